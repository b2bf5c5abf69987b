"""Attention over K/V that is held in pieces or in codes, and in tensors behind these: two kernels and one that merges.

All parts go into one tensor, whichever kernel they come from.
"""

from dataclasses import replace

import torch

from kvboost_hf.attention.triton import codes, dense, pieces
from kvboost_hf.attention.triton.combine import combine
from kvboost_hf.attention.triton.tiling import MAX_SPLITS, Tiling, device_of
from kvboost_hf.attention.visibility import Visibility
from kvboost_hf.handles import CodedKV, HeldKV


def can_attend(query: torch.Tensor, kv: HeldKV) -> bool:
    """Whether `attend` takes these."""
    if isinstance(kv, CodedKV):
        taken = codes.can_attend(query, kv.keys, kv.values)
        return taken and dense.can_attend(query, kv.exact_keys, kv.exact_values)
    taken = pieces.can_attend(query, kv.table) and query.shape[3] == kv.values.shape[3]
    return taken and dense.can_attend(query, kv.keys, kv.values)


def attend(
    query: torch.Tensor,
    kv: HeldKV,
    *,
    scale: float,
    before: Visibility,
    behind: Visibility,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """What attention over all columns would have been.

    Args:
        query: [batch, heads, queries, head_dim].
        kv: The columns.
        scale: Factor of the logits, above 0.
        before: Of all columns, as pieces are asked it; codes are seen by all.
        behind: Of the columns that are tensors.
        softcap: As in `reference.attend`.
        sinks: As in `reference.attend`.

    Returns:
        [batch, queries, heads, head_dim].
    """
    device, (batch, heads, queries, head_dim) = device_of(query.device), query.shape
    if isinstance(kv, CodedKV):
        own, exact = codes.plan(query, kv.keys, kv.values, device), (kv.exact_keys, kv.exact_values)
    else:
        own, exact = pieces.plan(query, kv.table, before, device), (kv.keys, kv.values)
    tail = _limited(dense.plan(query, *exact, behind))
    own = _limited(own)
    outs = query.new_empty((own.splits + tail.splits, batch, queries, heads, head_dim), dtype=torch.float32)
    logs = query.new_empty((own.splits + tail.splits, batch, heads, queries), dtype=torch.float32)
    if isinstance(kv, CodedKV):
        rotation = kv.values.rotation
        room = outs if rotation is None else outs.new_empty((own.splits, *outs.shape[1:]))
        codes.launch(query, kv.keys, kv.values, kv.lengths, room, logs, scale=scale, softcap=softcap, tiling=own)
        if rotation is not None:
            torch.matmul(room, rotation, out=outs[: own.splits])
    else:
        total = kv.table.columns + kv.keys.shape[2]
        pieces.launch(
            query, kv.table, outs, logs, scale=scale, total=total, visibility=before, softcap=softcap, tiling=own
        )
    rest = outs[own.splits :], logs[own.splits :]
    dense.launch(query, *exact, *rest, scale=scale, visibility=behind, softcap=softcap, sinks=None, tiling=tail)
    return combine(outs, logs, sinks=sinks, dtype=query.dtype, partial=False)[0]


def _limited(tiling: Tiling) -> Tiling:
    """With so few parts that two of them can be merged at once."""
    return tiling if tiling.splits <= MAX_SPLITS // 2 else replace(tiling, splits=MAX_SPLITS // 2)
