"""Token ids that methods are passed: `one_row` checks their type and shape."""

from typing import Any

import torch


def one_row(what: str, given: Any, *, least: int = 0) -> torch.Tensor:
    """The ids of one prompt, [1, tokens].

    Args:
        what: What they must be, in errors.
        given: A list, an array or a tensor of integers [tokens] or [1, tokens].
        least: The fewest tokens.

    Raises:
        ValueError: for several rows, another shape, and numbers that are no integers.
        TypeError: for what is no numbers.
    """
    try:
        ids = torch.as_tensor(given)
    except (RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"{what}, got {type(given).__name__}. Pass tokenizer(text).input_ids.") from error
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.ndim != 2 or ids.shape[0] != 1 or ids.shape[1] < least:
        raise ValueError(
            f"{what} of the shape [n] or [1, n]{', n > 0' if least else ''}, got {list(ids.shape)}. Pass the rows of "
            "a batch one by one, without padding."
        )
    if ids.numel() and (ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool):
        raise ValueError(f"{what}, which are integers, got {ids.dtype}. Pass tokenizer(text).input_ids.")
    return ids.long()
