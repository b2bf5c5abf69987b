"""Makes the masks that transformers gives to `kvboost_fa2`: none, one number for each column, or a matrix.

transformers gives no mask at all to an attention without a mask function of its own, which would attend to padding.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    eager_mask,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from kvboost_hf.attention.backends import backend_of
from kvboost_hf.compat import mask_form
from kvboost_hf.visibility import make_reach

# Masks of a window are closures: `and_masks(sliding_window_overlay(window), causal_mask_function)`.
_WINDOWED: Any = sliding_window_causal_mask_function(1)


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    config: Any = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Make the mask of a forward, for `kvboost_fa2`.

    Args:
        batch_size: The rows of the batch.
        q_length: The number of queries.
        kv_length: The number of columns of the keys.
        q_offset: The position of the first query; a tensor if a cache has a fixed size.
        kv_offset: The position of the first of these columns.
        mask_function: Tells whether a position sees another one.
        attention_mask: [batch, positions], bool, False for padding.
        config: The model's configuration.
        **kwargs: Further arguments of transformers' own mask functions.

    Returns:
        None where queries are the last columns, and see all before them, or, if the layer is not causal, all; what
        `visibility.make_reach` makes where there is padding, or a window that hides something, or columns behind the
        queries of a causal layer, as in a cache of a fixed size; [batch, 1, q_length, kv_length] for everything else:
        bool, or, for models that may compute attention themselves, numbers to add.
    """
    form, device = mask_form(config), kwargs.get("device", "cpu")
    window = _window(mask_function)
    if form == "compact" and window is not None and _layers_know(mask_function, config):
        if isinstance(q_offset, torch.Tensor):
            if kv_offset == 0 and mask_function is not bidirectional_mask_function:
                columns = (torch.arange(q_length, dtype=torch.int32, device=device) + q_offset).expand(batch_size, -1)
                return make_reach(_padding_ahead(attention_mask, columns, kv_length), window, device, columns)
        elif q_offset + q_length == kv_offset + kv_length:
            return _make_compact(
                _of_columns(attention_mask, kv_offset, kv_length), q_length, kv_length, window, device
            )
    given = {**kwargs, "config": config, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    make: Callable[..., Any] = eager_mask if form == "additive" else sdpa_mask
    found: torch.Tensor | None = make(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **given,
    )
    return found


def _layers_know(mask_function: Callable[..., Any], config: Any) -> bool:
    """Whether layers are causal exactly if this function is, so that a compact mask need not say it."""
    if mask_function is bidirectional_mask_function:
        return getattr(config, "is_causal", None) is not False
    return not getattr(config, "use_bidirectional_attention", None)


def _window(mask_function: Callable[..., Any]) -> int | None:
    """Return the window of a mask function, 0 for one without; None where it has conditions of other kinds."""
    if mask_function in (causal_mask_function, bidirectional_mask_function):
        return 0
    if torch.compiler.is_compiling():  # which cannot look into closures
        return None
    parts, windowed = _inner(mask_function, _WINDOWED), _inner(_WINDOWED, _WINDOWED)
    if len(parts) != 2 or parts[1] is not causal_mask_function:
        return None
    found = _inner(parts[0], windowed[0])
    return found if isinstance(found, int) else None


def _inner(function: Any, like: Any) -> Any:
    """Return the content of a closure, if the function that made it also made `like`; else an empty tuple."""
    if getattr(function, "__code__", None) is not like.__code__:
        return ()
    (cell,) = function.__closure__
    return cell.cell_contents


def _of_columns(attention_mask: torch.Tensor | None, first: int, count: int) -> torch.Tensor | None:
    """The part of a mask for some columns, bool; those behind its end are hidden, as by transformers' own masks."""
    if attention_mask is None:
        return None
    keep = attention_mask[:, first : first + count].bool()
    return F.pad(keep, (0, count - keep.shape[1])) if keep.shape[1] < count else keep


def _make_compact(
    keep: torch.Tensor | None, q_length: int, kv_length: int, window: int, device: torch.device | str
) -> torch.Tensor | None:
    """Make the mask of queries that are the last columns; bool, as layers read it, of one query without a window."""
    window = window if window < kv_length else 0
    if keep is not None and _is_checked(keep, q_length, window) and bool(keep.all()):
        keep = None
    if keep is not None and q_length == 1 and not window and _reads_masks_fast(keep.device):
        return keep[:, None, None]
    return make_reach(keep, window, device)


def _is_checked(keep: torch.Tensor, queries: int, window: int) -> bool:
    """Whether the host checks if there is padding at all, so that no layer reads a mask where there is none.

    The host then waits for a GPU: once in the forward of a prompt, never while tokens are decoded, nor while a graph
    is compiled or captured.
    """
    if _is_recorded(keep.device):
        return False
    return not _reads_masks_fast(keep.device) or (queries > 1 and not window)


def _reads_masks_fast(device: torch.device) -> bool:
    """Whether reading a mask costs the kernels of a device next to nothing, so that the host need not check it."""
    return not torch.compiler.is_compiling() and backend_of(device) == "triton"


def _padding_ahead(attention_mask: torch.Tensor | None, columns: torch.Tensor, kv_length: int) -> torch.Tensor | None:
    """Extend a mask that ends with the last query to [batch, kv_length]; None for one query without padding."""
    if attention_mask is not None:
        return F.pad(attention_mask.bool(), (0, kv_length - attention_mask.shape[1]))
    return None if columns.shape[1] == 1 else torch.ones_like(columns[:, :1], dtype=torch.bool).expand(-1, kv_length)


def _is_recorded(device: torch.device) -> bool:
    """Whether operations are only recorded now: for torch.compile, for a CUDA graph, or for their shapes."""
    if torch.compiler.is_compiling() or device.type == "meta":
        return True
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
