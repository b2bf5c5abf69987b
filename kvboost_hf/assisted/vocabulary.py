"""Fits vocabularies that differ only in padding rows of the embeddings, as within a family of models."""

import copy
from typing import Any

import torch
from transformers import PreTrainedModel

from kvboost_hf.compat import decoder_layers

_PADDING = 1024  # rows, at most: tables are padded to multiples of up to that


def vocab_size(model: PreTrainedModel) -> int:
    """Rows of the table of embeddings, as the configuration says."""
    return int(model.config.get_text_config(decoder=True).vocab_size)


def end_tokens(config: Any) -> set[int]:
    """The tokens that end a text, by a generation configuration."""
    ends = config.eos_token_id
    return {ends} if isinstance(ends, int) else set(ends or ())


def differ_by_padding(mine: int, theirs: int) -> bool:
    """Whether two vocabularies of these sizes may differ by padding only, as those of one family do."""
    return abs(mine - theirs) <= _PADDING and 10 * abs(mine - theirs) <= min(mine, theirs)


@torch.no_grad()
def fitted(draft: PreTrainedModel, target: PreTrainedModel) -> PreTrainedModel:
    """A draft with the vocabulary size of its target: itself, or a copy where the two differ by padding.

    A copy has embeddings and a head of its own, and shares all other weights. New rows are copies of that of the last
    token, which is padding or rare. Tokens that the target has no row for are never drafted.

    Raises:
        ValueError: the sizes differ by more than padding.
    """
    mine, theirs = vocab_size(draft), vocab_size(target)
    if mine == theirs:
        return draft
    if not differ_by_padding(mine, theirs):
        raise ValueError(
            f"The draft must have the vocabulary of its target, of {theirs} tokens, got {mine}. Choose one of the "
            "same family, or pass `tokenizer` and `assistant_tokenizer` to generate() with the draft as it is."
        )
    resized = _copy_beside_tables(draft)
    resized.resize_token_embeddings(theirs, mean_resizing=False)
    if theirs > mine:
        for table in _tables(resized):
            for name in ("weight", "bias"):
                rows = getattr(table, name, None)
                if rows is not None and len(rows) == theirs:
                    rows[mine:] = rows[mine - 1]
    return resized


def _tables(model: Any) -> list[Any]:
    return [table for table in (model.get_input_embeddings(), model.get_output_embeddings()) if table is not None]


def _copy_beside_tables(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that shares all weights except those of the embeddings and the head, which resizing writes to."""
    own = {id(weight) for table in _tables(model) for weight in table.parameters()}
    # Layers are shared as they are: hooks on them, as those that fetch weights, cannot be copied.
    memo: dict[int, Any] = {id(layer): layer for layer in decoder_layers(model)}
    memo |= {id(each): each for each in (*model.parameters(), *model.buffers()) if id(each) not in own}
    return copy.deepcopy(model, memo)
