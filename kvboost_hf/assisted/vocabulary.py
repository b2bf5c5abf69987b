"""Fits vocabularies that differ only in padding rows of the embeddings, as within a family of models."""

from typing import Any

import torch
from transformers import PreTrainedModel

_PADDING = 1024  # rows, at most: tables are padded to multiples of up to that


def vocab_size(model: PreTrainedModel) -> int:
    """Rows of the table of embeddings, as the configuration says."""
    return int(model.config.get_text_config(decoder=True).vocab_size)


def end_tokens(config: Any) -> set[int]:
    """The tokens that end a text, by a generation configuration."""
    ends = config.eos_token_id
    return {ends} if isinstance(ends, int) else set(ends or ())


@torch.no_grad()
def fit_vocabulary(draft: PreTrainedModel, target: PreTrainedModel) -> bool:
    """Give a draft the vocabulary size of its target, if the two differ by padding only.

    New rows are copies of that of its last token, which is padding or rare. Tokens that the target has no row for are
    never drafted.

    Returns:
        Whether it has that size now; False if they differ by more.
    """
    mine, theirs = vocab_size(draft), vocab_size(target)
    if mine == theirs:
        return True
    if abs(mine - theirs) > _PADDING or 10 * abs(mine - theirs) > min(mine, theirs):
        return False
    draft.resize_token_embeddings(theirs, mean_resizing=False)
    if theirs > mine:
        owner: Any = draft
        for table in (owner.get_input_embeddings(), owner.get_output_embeddings()):
            for name in ("weight", "bias"):
                rows = getattr(table, name, None)
                if rows is not None and len(rows) == theirs:
                    rows[mine:] = rows[mine - 1]
    return True
