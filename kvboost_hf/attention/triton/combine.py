"""Merges attention over parts of the columns, which lie in one tensor, with one Triton kernel."""

from functools import cache

import torch
import triton
import triton.language as tl

from kvboost_hf.attention.call import Part
from kvboost_hf.attention.merge import no_log
from kvboost_hf.attention.triton.tile import LN2, LOG2E
from kvboost_hf.attention.triton.tiling import MAX_SPLITS, power_of_2
from kvboost_hf.triton_launch import Launcher

_BLOCK_D = 64  # dimensions of a program at most: with few queries there are more programs than heads
_FEW = 16  # parts
_NUMBERS = 8192  # that a program holds


def combine(
    parts: torch.Tensor, logs: torch.Tensor, *, sinks: torch.Tensor | None, dtype: torch.dtype, partial: bool = True
) -> Part:
    """Merge parts into what attention over all columns gives.

    Args:
        parts: [parts, batch, queries, heads, value_dim], float32, contiguous; zeros where a query sees nothing.
        logs: [parts, batch, heads, queries], float32, contiguous.
        sinks: [heads], or None: logits of a column without a value.
        dtype: Of the result.
        partial: Whether the log-sum-exp is wanted; else it is empty.

    Returns:
        [batch, queries, heads, value_dim], and the log-sum-exp [batch, heads, queries], float32.
    """
    splits, batch, queries, heads, dim = parts.shape
    out = parts.new_empty((batch, queries, heads, dim), dtype=dtype)
    lse = logs.new_empty((batch, heads, queries)) if partial else no_log(logs.device)
    rows, blocks = batch * queries * heads, blocks_of(splits, dim)
    _, block_r, block_d = blocks
    grid = (-(-rows // block_r), -(-dim // block_d), 1)
    tensors = parts, logs, sinks, out, lse if partial else None
    given = tensors, (dim,), (splits, rows, queries, heads), (), blocks
    _launch(grid, parts.device, given, warps=4, stages=3)
    return out, lse


@cache
def blocks_of(splits: int, dim: int) -> tuple[int, int, int]:
    """BLOCK_P, BLOCK_R and BLOCK_D. A cache that grows has more and more parts, but the kernel is compiled twice."""
    block_p, block_d = _FEW if splits <= _FEW else MAX_SPLITS, min(_BLOCK_D, power_of_2(dim))
    return block_p, _NUMBERS // (block_p * block_d), block_d


@triton.jit(do_not_specialize=["splits", "rows", "queries", "heads"])
def merge_parts(
    parts, logs, sinks, out, lse, dim, splits, rows, queries, heads,
    BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK_R queries of heads, and BLOCK_D dimensions."""
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    head, query, batch = row % heads, row // heads % queries, row // heads // queries
    at_log = (batch * heads + head) * queries + query
    part = tl.arange(0, BLOCK_P)
    before = part[:, None] * tl.cast(rows, tl.int64)  # rows of the parts before
    there = (part < splits)[:, None] & (row < rows)[None, :]
    log = tl.load(logs + before + at_log[None, :], mask=there, other=float("-inf"))
    peak = tl.max(log, 0)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32)
        peak = tl.maximum(peak, sink)
    finite = tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.exp2((log - finite[None, :]) * LOG2E)
    norm = tl.sum(weights, 0)
    if sinks is not None:
        norm += tl.exp2((sink - finite) * LOG2E)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    at = (before + row[None, :])[:, :, None] * dim + d[None, None, :]
    numbers = tl.load(parts + at, mask=there[:, :, None] & (d < dim)[None, None, :], other=0.0)
    divisor = tl.where(norm > 0, norm, 1.0)
    found = tl.sum(numbers * weights[:, :, None], 0) / divisor[:, None]
    at = out + row.to(tl.int64)[:, None] * dim + d[None, :]
    tl.store(at, found.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (d < dim)[None, :])
    if lse is not None and tl.program_id(1) == 0:
        tl.store(lse + at_log, peak + tl.log2(divisor) * LN2, mask=row < rows)


_launch = Launcher(merge_parts)
