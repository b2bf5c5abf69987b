"""`tokens_that_fit`: plans how many tokens of K/V fit into memory."""

import psutil
import torch
from transformers import PreTrainedModel

from kvboost_hf.compat import bytes_per_token, input_device

_COPIES = 2  # of K/V under way: a row's own, and the one in the batch


def tokens_that_fit(
    model: PreTrainedModel, draft: PreTrainedModel | None = None, *, reserved: int = 0, safety_margin: float = 0.15
) -> int | None:
    """Plan how many tokens of K/V, of all running requests, fit into the free memory of the model's device.

    Args:
        model: The model.
        draft: One that keeps K/V of the same texts; None for none.
        reserved: Bytes of host memory that something else will take, such as a store.
        safety_margin: Share of the memory to leave free.

    Returns:
        None where the model does not say how large its K/V is.

    Raises:
        ValueError: for a margin that is no share, or where there is no room for a single token.
    """
    if not 0 <= safety_margin < 1:
        raise ValueError(f"`safety_margin` must be from 0 to less than 1, got {safety_margin}.")
    per_token = _COPIES * bytes_per_token(model) + (bytes_per_token(draft) if draft is not None else 0)
    if not per_token:
        return None
    device = input_device(model)
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by PyTorch, for others
        free = torch.cuda.mem_get_info(device)[0] + kept
    else:
        free = psutil.virtual_memory().available - reserved
    tokens = int(free * (1 - safety_margin)) // per_token
    if tokens < 1:
        raise ValueError(
            f"There is no memory for K/V: {max(free, 0) / 2**30:.1f} GiB are free, of which {safety_margin:.0%} stay "
            "so. Give the store less, or stream layers."
        )
    return tokens
