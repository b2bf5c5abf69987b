"""Turns prompts into token ids: texts, lists of ids, tensors."""

from collections.abc import Sequence
from typing import Any

import torch

Prompt = str | Sequence[int] | torch.Tensor


def as_ids(prompts: Sequence[Prompt] | torch.Tensor, tokenizer: Any) -> list[torch.Tensor]:
    """Ids [1, n] of each prompt, on the CPU.

    Raises:
        ValueError: for no prompts, an empty one, a text without a tokenizer, and anything else that is no prompt.
    """
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence | torch.Tensor):
        raise ValueError(
            f"`prompts` must be a list of prompts, got {_shown(prompts)}. Pass a single prompt as a list of one."
        )
    if len(prompts) == 0:
        raise ValueError("`prompts` must hold at least one prompt, got none. Pass some that your users would send.")
    return [_one(index, prompt, tokenizer) for index, prompt in enumerate(prompts)]


def _one(index: int, prompt: Prompt, tokenizer: Any) -> torch.Tensor:
    given = prompt
    if isinstance(given, str):
        if tokenizer is None:
            raise ValueError(
                f"`prompts[{index}]` is a text, {_shown(given)}, and there is no tokenizer. Pass "
                "`tokenizer=tokenizer`, or ids in place of texts."
            )
        given = tokenizer(given)["input_ids"]
    if isinstance(given, torch.Tensor):
        ids = given.detach().cpu()
    elif isinstance(given, Sequence) and all(isinstance(i, int) and not isinstance(i, bool) for i in given):
        ids = torch.tensor(given, dtype=torch.long)
    else:
        raise ValueError(f"`prompts[{index}]` must be a text or token ids, got {_shown(prompt)}. Pass a list of ints.")
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.ndim != 2 or ids.shape[0] != 1 or ids.shape[1] == 0 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(
            f"`prompts[{index}]` must be a text, or integer ids of the shape [n] or [1, n], n > 0, got "
            f"{_shown(prompt)}. Pass the rows of a batch as prompts of their own, without padding."
        )
    return ids.long()


def _shown(given: object) -> str:
    if isinstance(given, torch.Tensor):
        return f"a tensor {list(given.shape)} of {given.dtype}"
    text = repr(given)
    return text if len(text) <= 60 else f"{text[:57]}…"
