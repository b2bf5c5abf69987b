"""Attention over tensors in Triton: of whole prompts, of few queries behind many columns, and of scattered queries.

After FlashAttention-2 (https://arxiv.org/abs/2307.08691) and, where queries are few, Flash-Decoding
(https://crfm.stanford.edu/2023/10/12/flashdecoding.html).
"""

from dataclasses import replace
from functools import lru_cache

import torch
import triton
import triton.language as tl

from kvboost_hf.attention.call import AttentionCall, Part, no_log
from kvboost_hf.attention.triton.tile import LOG2E, combine, load_rows, softmax_end, softmax_step, tanh
from kvboost_hf.attention.triton.tiling import (
    Device,
    Tiling,
    device_of,
    is_taken,
    padded_dim,
    plan_splits,
    plan_tiling,
    round_columns,
)
from kvboost_hf.triton_launch import LaunchArguments, Launcher, dot

_MAX_GRID = 65_535  # in any dimension of a grid but the first


def can_attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether `attend` takes these."""
    return (
        is_taken(query, max(query.shape[3], value.shape[3]))
        and query.dtype == key.dtype == value.dtype
        and key.shape[0] * key.shape[1] <= _MAX_GRID
        and query.stride(3) == key.stride(3) == value.stride(3) == 1
    )


def attend(call: AttentionCall, key: torch.Tensor, value: torch.Tensor, tiling: Tiling | None = None) -> Part:
    """Compute what `reference.attend` defines. The log-sum-exp is empty unless `call.partial`.

    Without `tiling` it takes that of `plan`.
    """
    query, partial = call.query, call.partial
    tiling = tiling or plan(call, key, value)
    batch, heads, queries, _ = query.shape
    dtype = torch.float32 if partial else query.dtype
    shape = (batch, queries, heads, value.shape[3])
    split = tiling.splits > 1
    out = query.new_empty((tiling.splits, *shape), dtype=torch.float32 if split else dtype)
    logs = (tiling.splits, batch, heads, queries) if split or partial else None
    lse = query.new_empty(logs, dtype=torch.float32) if logs else None
    launch(call, key, value, out, lse, tiling)
    if lse is None:
        return out[0], no_log(query.device)
    return combine(out, lse, sinks=call.sinks, dtype=dtype, partial=partial) if split else (out[0], lse[0])


def plan(call: AttentionCall, key: torch.Tensor, value: torch.Tensor) -> Tiling:
    """Choose the tiling of a call."""
    query, window = call.query, call.visibility.window
    (batch, heads, queries, head_dim), (_, kv_heads, total, _) = query.shape, key.shape
    columns = min(total, window + queries) if window else total
    shape = batch * kv_heads, queries * (heads // kv_heads), max(head_dim, value.shape[3]), round_columns(columns)
    return _plan(*shape, query.itemsize, device_of(query.device), call.visibility.mask is not None)


@lru_cache(maxsize=1024)
def _plan(heads: int, rows: int, dim: int, columns: int, itemsize: int, device: Device, has_matrix: bool) -> Tiling:
    tiling = plan_tiling(rows, dim, itemsize, device, has_matrix=has_matrix)
    programs = -(-rows // tiling.block_m) * heads
    per_processor = 2 if tiling.block_m <= 64 else 1
    return replace(tiling, splits=plan_splits(programs, columns, tiling.block_n, device, per_processor=per_processor))


def launch(
    call: AttentionCall,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    tiling: Tiling,
) -> None:
    """Write the parts of `attend` into `out` [splits, …] and `lse` [splits, …]."""
    given = launch_arguments(call, key, value, out, lse, tiling)
    query = call.query
    grid = tiling.grid(query, key.shape[1])
    _launch(grid, query.device, given, warps=tiling.warps, stages=tiling.stages)


def launch_arguments(
    call: AttentionCall,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    tiling: Tiling,
) -> LaunchArguments:
    """Return the arguments of `fwd`."""
    query, visibility, softcap = call.query, call.visibility, call.softcap
    assert call.scale > 0
    (_, heads, queries, head_dim), (_, kv_heads, total, value_dim) = query.shape, value.shape
    keep, mask = visibility.keep, visibility.mask
    mask_strides = 0, 0, 0
    if keep is not None:
        keep = (keep if keep.stride(-1) == 1 else keep.contiguous()).view(torch.uint8)
    if mask is not None:
        mask = (mask if mask.stride(-1) == 1 else mask.contiguous()).view(torch.uint8)
        mask_strides = _broadcast(mask, 0), _broadcast(mask, 1), _broadcast(mask, 2)
    columns = None if visibility.columns is None else visibility.columns.contiguous()
    tree = None if visibility.tree is None else visibility.tree.contiguous()
    return (
        (query, key, value, out, lse, call.sinks if tiling.splits == 1 else None, keep, columns, tree, mask),
        (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3]),
        (
            *(0 if keep is None else _broadcast(keep, 0), *mask_strides),
            *(kv_heads, queries, total, visibility.window or None),
        ),
        (call.scale / softcap if softcap else float(call.scale), softcap or None),
        (
            *(visibility.causal, heads // kv_heads, head_dim, value_dim),
            *(tiling.block_m, tiling.block_n, padded_dim(head_dim), padded_dim(value_dim), tiling.border_stages),
        ),
    )


def _broadcast(x: torch.Tensor, dim: int) -> int:
    return x.stride(dim) if x.shape[dim] > 1 else 0


@triton.jit(
    do_not_specialize="keep_batch mask_batch mask_head mask_row kv_heads queries total window".split(),
    do_not_specialize_on_alignment=["lse", "keep", "mask"],  # which begin at any part, or column
)
def fwd(
    query, key, value, out, lse, sinks, keep, columns, tree, mask,
    query_batch, query_head, query_row, key_batch, key_head, key_row, value_batch, value_head, value_row,
    keep_batch, mask_batch, mask_head, mask_row,
    kv_heads, queries, total, window, scale, softcap,
    CAUSAL: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BORDER_STAGES: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK_M rows of one head of keys, and one part of the columns; row r is query r // GROUPS."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # those that see most begin first
    batch, kv_head = (tl.program_id(1) // kv_heads).to(tl.int64), tl.program_id(1) % kv_heads
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    i, head = row // GROUPS, kv_head * GROUPS + row % GROUPS
    there = i < queries

    # Of the columns [low, high) some row of this tile sees something, and all rows see [plain_low, plain_high).
    tail = total - queries if tree is not None else total
    own = i + total - queries
    if columns is not None:
        own = tl.load(columns + batch * queries + i, mask=there, other=0)
    earliest, latest = tl.min(tl.where(there, own, total), 0), tl.max(tl.where(there, own, 0), 0)
    low, high, plain_low, plain_high = 0, total, 0, tail
    if CAUSAL:
        high, plain_high = tl.minimum(total, latest + 1), tl.minimum(tail, earliest + 1)
    if window is not None:
        low, plain_low = tl.maximum(earliest - window + 1, 0), tl.maximum(latest - window + 1, 0)
    bits = None
    if tree is not None:
        low, high = tl.minimum(low, tail), total
        bits = tl.load(tree + batch * queries + i, mask=there, other=0)
    low = low // BLOCK_N * BLOCK_N
    part = tl.cdiv(tl.cdiv(high - low, BLOCK_N), tl.num_programs(2)) * BLOCK_N
    low += part * tl.program_id(2)
    high = tl.minimum(high, low + part)
    plain_low = tl.maximum(low, tl.minimum(tl.cdiv(plain_low, BLOCK_N), tl.cdiv(high, BLOCK_N)) * BLOCK_N)
    plain_high = tl.maximum(plain_low, tl.minimum(plain_high, high) // BLOCK_N * BLOCK_N)

    d = tl.arange(0, BLOCK_D)
    at = query + batch * query_batch + head.to(tl.int64)[:, None] * query_head + i.to(tl.int64)[:, None] * query_row
    q = tl.load(at + d[None, :], mask=there[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    key += batch * key_batch + kv_head.to(tl.int64) * key_head
    value += batch * value_batch + kv_head.to(tl.int64) * value_head
    if keep is not None:
        keep += batch * keep_batch
    if mask is not None:
        shown_to = tl.minimum(i, queries - 1).to(tl.int64)  # what rows that are not there see is never stored
        mask += batch * mask_batch + head.to(tl.int64) * mask_head + shown_to * mask_row
    sums = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    for start in range(plain_low, plain_high, BLOCK_N):
        sums, peak, norm = take_block(
            sums, peak, norm, q, key, value, keep, mask, bits, own, there, start, tail, total, key_row, value_row,
            window, scale, softcap, CAUSAL, HEAD_DIM, VALUE_DIM, BLOCK_N, BLOCK_D, BLOCK_V, False,
        )  # fmt: skip
    plain = plain_high - plain_low
    for at_border in tl.range(low, high - plain, BLOCK_N, num_stages=BORDER_STAGES):
        start = at_border + tl.where(at_border >= plain_low, plain, 0)
        sums, peak, norm = take_block(
            sums, peak, norm, q, key, value, keep, mask, bits, own, there, start, tail, total, key_row, value_row,
            window, scale, softcap, CAUSAL, HEAD_DIM, VALUE_DIM, BLOCK_N, BLOCK_D, BLOCK_V, True,
        )  # fmt: skip

    logit = None
    if sinks is not None:
        logit = tl.load(sinks + head, mask=there, other=0.0).to(tl.float32)
    found, log = softmax_end(sums, peak, norm, logit)
    batches, heads = tl.num_programs(1) // kv_heads, kv_heads * GROUPS
    batch += tl.program_id(2).to(tl.int64) * batches
    d = tl.arange(0, BLOCK_V)
    at = out + ((batch * queries + i) * heads + head)[:, None] * VALUE_DIM + d[None, :]
    tl.store(at, found.to(out.dtype.element_ty), mask=there[:, None] & (d < VALUE_DIM)[None, :])
    if lse is not None:
        tl.store(lse + (batch * heads + head) * queries + i, log, mask=there)


_launch = Launcher(fwd)


@triton.jit
def take_block(
    sums, peak, norm, q, key, value, keep, mask, bits, own, there, start, tail, total, key_row, value_row,
    window, scale, softcap,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BORDER: tl.constexpr,
):  # fmt: skip
    """The BLOCK_N columns from `start`; at a border not all rows see all of them, whatever `keep` and `mask` say."""
    first = tl.cast(start, tl.int64)
    column = start + tl.arange(0, BLOCK_N)
    if mask is not None:  # loaded before the product, the layout of which the compiler then keeps for the softmax
        at = (mask + first)[:, None] + tl.arange(0, BLOCK_N)[None, :]
        shown = (tl.load(at, mask=(column < total)[None, :], other=0) if BORDER else tl.load(at)) != 0
    k = load_rows(key + first * key_row, key_row, total - start, HEAD_DIM, BLOCK_N, BLOCK_D, not BORDER)
    scores = dot(q, tl.trans(k))
    factor = scale * LOG2E
    if softcap is not None:
        scores, factor = tanh(scores * scale), softcap * LOG2E
    if BORDER:
        seen = (column < total)[None, :]
        if CAUSAL:
            seen &= column[None, :] <= own[:, None]
        if window is not None:
            seen &= own[:, None] - column[None, :] < window
        if bits is not None:
            node = (column - tail) & 63  # a shift by more than 63 bits is undefined
            told = (bits[:, None] >> node[None, :].to(tl.int64)) & 1
            seen = tl.where((column < tail)[None, :], seen, (told == 1) & (column < total)[None, :])
        scores = tl.where(seen, scores, float("-inf"))
    if keep is not None:
        kept = tl.load(keep + column, mask=column < total, other=0) != 0
        scores = tl.where(kept[None, :], scores, float("-inf"))
    if mask is not None:
        scores = tl.where(shown, scores, float("-inf"))
    weights, fade, peak = softmax_step(scores, factor, peak)
    norm = norm * fade + tl.sum(weights, 1)
    v = load_rows(value + first * value_row, value_row, total - start, VALUE_DIM, BLOCK_N, BLOCK_V, not BORDER)
    return dot(weights.to(v.dtype), v, sums * fade[:, None]), peak, norm
