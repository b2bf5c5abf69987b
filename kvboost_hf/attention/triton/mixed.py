"""Attention in Triton over K/V of which some columns are pieces or codes, and the others tensors.

One kernel takes the pieces or codes, another one the tensors. Both write their parts into one tensor, which a third
one merges.
"""

from dataclasses import replace

import torch

from kvboost_hf.attention.call import AttentionCall
from kvboost_hf.attention.triton import codes, dense, pieces
from kvboost_hf.attention.triton.tile import combine
from kvboost_hf.attention.triton.tiling import MAX_SPLITS, Tiling, device_of, empty_parts
from kvboost_hf.handles import CodedKV, MixedKV


def can_attend(query: torch.Tensor, kv: MixedKV) -> bool:
    """Whether `attend` takes these."""
    if isinstance(kv, CodedKV):
        taken = codes.can_attend(query, kv.keys, kv.values)
        return taken and dense.can_attend(query, kv.exact_keys, kv.exact_values)
    taken = pieces.can_attend(query, kv.table) and query.shape[3] == kv.values.shape[3]
    return taken and dense.can_attend(query, kv.keys, kv.values)


def attend(call: AttentionCall, rest: AttentionCall, kv: MixedKV) -> torch.Tensor:
    """Compute attention over all columns.

    Args:
        call: The call over all columns; pieces are seen as its visibility says, and codes by all queries.
        rest: The `partial` call over the columns that are tensors.
        kv: The columns.

    Returns:
        [batch, queries, heads, head_dim].
    """
    query = call.query
    device = device_of(query.device)
    if isinstance(kv, CodedKV):
        own, exact = codes.plan(query, kv.keys, kv.values, device), (kv.exact_keys, kv.exact_values)
    else:
        own, exact = pieces.plan(call, kv.table, device), (kv.keys, kv.values)
    tail = _limited(dense.plan(rest, *exact))
    own = _limited(own)
    outs, logs = empty_parts(query, own.splits + tail.splits)
    if isinstance(kv, CodedKV):
        rotation = kv.values.rotation
        room = outs if rotation is None else outs.new_empty((own.splits, *outs.shape[1:]))
        codes.launch(call, kv.keys, kv.values, kv.lengths, room, logs, own)
        if rotation is not None:
            torch.matmul(room, rotation, out=outs[: own.splits])
    else:
        pieces.launch(call, kv.table, kv.table.columns + kv.keys.shape[2], outs, logs, own)
    dense.launch(rest, *exact, outs[own.splits :], logs[own.splits :], tail)
    return combine(outs, logs, sinks=call.sinks, dtype=query.dtype, partial=False)[0]


def _limited(tiling: Tiling) -> Tiling:
    """Limit the parts, so that those of two tilings can be merged at once."""
    return tiling if tiling.splits <= MAX_SPLITS // 2 else replace(tiling, splits=MAX_SPLITS // 2)
