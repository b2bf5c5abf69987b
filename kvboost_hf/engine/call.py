"""Checks the arguments of a generate() call, and runs it for prompts of any lengths."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, StoppingCriteriaList

from kvboost_hf.cache.planning.chunks import Tokens
from kvboost_hf.compat import input_device
from kvboost_hf.engine.watch import Watch
from kvboost_hf.migration import refuse

_OWN = (
    "inputs",
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "generation_config",
    "past_key_values",
    "cache",
    "use_cache",
    "streamer",
    "assistant_model",
    "custom_generate",
    "num_beams",
    "num_return_sequences",
    "return_dict_in_generate",
)
_OF_ONE_ROW = ("stop_strings", "stopping_criteria")


def call_options(
    max_new_tokens: int, temperature: float, do_sample: bool, more: Mapping[str, Any], *, rows: int = 1
) -> dict[str, Any]:
    """Arguments for generate().

    Args:
        max_new_tokens: Tokens of each answer, at most.
        temperature: With `do_sample`, positive; else 1 or 0.
        do_sample: Sample tokens.
        more: Other arguments of generate().
        rows: Of the call.

    Raises:
        ValueError: The engine sets an argument itself, only the kvboost package has it, or arguments do not fit.
    """
    refuse("generate", more)
    for name in _OWN:
        if name in more:
            raise ValueError(
                f"`{name}` is set by the engine, got {type(more[name]).__name__}. Call "
                "engine.model.generate(..., cache=ChunkReuseCache(engine.model, engine.store)) for what it "
                "does not offer."
            )
    for name in _OF_ONE_ROW:
        if rows > 1 and name in more:
            raise ValueError(
                f"`{name}` ends one row, and must be left out for {rows} prompts in a batch. Call generate() for each."
            )
    if type(max_new_tokens) is not int or max_new_tokens < 1:
        raise ValueError(f"`max_new_tokens` must be an int of 1 or more, got {max_new_tokens!r}.")
    if do_sample and not temperature > 0:
        raise ValueError(f"`temperature` must be positive with do_sample=True, got {temperature}. Pass False.")
    if not do_sample and temperature not in (0, 1):
        raise ValueError(f"`temperature` is used with do_sample=True only, got {temperature}. Pass that, too.")
    sampling = {"do_sample": True, "temperature": temperature} if do_sample else {"do_sample": False}
    return {**more, "max_new_tokens": max_new_tokens, **sampling}


def generate_rows(
    model: PreTrainedModel, rows: Sequence[Tokens], pad: int, watch: Watch, options: Mapping[str, Any]
) -> list[list[int]]:
    """Call generate() for prompts of any lengths.

    Args:
        model: What generates.
        rows: Token ids [n] of each prompt.
        pad: An id for padding, which nothing attends to.
        watch: Sees the call.
        options: For generate().

    Returns:
        The new tokens of each row, with the one that ends it.
    """
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), pad)
    mask = torch.zeros_like(ids)
    for at, row in enumerate(rows):
        ids[at, width - len(row) :] = torch.from_numpy(row)
        mask[at, width - len(row) :] = 1
    device = input_device(model)
    criteria = StoppingCriteriaList([*options.get("stopping_criteria", ()), watch])
    given = {**options, "stopping_criteria": criteria, "pad_token_id": pad}
    generate: Any = model.generate
    out = generate(input_ids=ids.to(device), attention_mask=mask.to(device), **given)
    watch(out, None)  # the last token: not every way of decoding asks criteria about that
    told = options.get("eos_token_id", getattr(model.generation_config, "eos_token_id", None))
    ends = set(told) if isinstance(told, list | tuple) else {told}
    return [_to_end(row, ends) for row in out[:, width:].tolist()]


def _to_end(row: list[int], ends: set[int]) -> list[int]:
    """A row without the padding behind its end."""
    return row[: next((at + 1 for at, token in enumerate(row) if token in ends), len(row))]
