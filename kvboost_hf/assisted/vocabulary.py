"""Vocabularies that differ by the rows with which embeddings are padded, as those of sizes of one family may."""

from typing import Any

import torch
from transformers import PreTrainedModel

_PADDING = 1024  # rows, at most: tables are padded to multiples of up to that


def vocab_size(model: PreTrainedModel) -> int:
    """Rows of the table of embeddings, as the configuration says."""
    return int(model.config.get_text_config(decoder=True).vocab_size)


@torch.no_grad()
def fit_vocabulary(draft: PreTrainedModel, target: PreTrainedModel) -> bool:
    """Give a draft the vocabulary size of its target, if the two differ by padding only.

    New rows are those of its last token: padding, too, or as rare as it. A token of the draft's that the target has no
    row for is never drafted.

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
