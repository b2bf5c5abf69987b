"""Attention over parts of the columns, made one in one kernel: `merge` for parts that lie in one tensor."""

import torch
import triton
import triton.language as tl

from kvboost_hf.attention.merge import Part
from kvboost_hf.attention.triton.tile import LN2, LOG2E

_BLOCK_D = 64  # dimensions of a program: with few queries there is one program each 64 dimensions of a head


def combine(parts: torch.Tensor, logs: torch.Tensor, *, sinks: torch.Tensor | None, dtype: torch.dtype) -> Part:
    """What attention over all columns would have been.

    Args:
        parts: [parts, batch, queries, heads, value_dim], float32, contiguous; zeros where a query sees nothing.
        logs: [parts, batch, heads, queries], float32, contiguous.
        sinks: [heads], or None; as for `attend`.
        dtype: Of the result.

    Returns:
        [batch, queries, heads, value_dim], and the log-sum-exp [batch, heads, queries], float32.
    """
    splits, batch, queries, heads, dim = parts.shape
    out, lse = parts.new_empty(batch, queries, heads, dim, dtype=dtype), logs.new_empty(batch, heads, queries)
    block_p, block_d = triton.next_power_of_2(splits), min(_BLOCK_D, triton.next_power_of_2(dim))
    grid = (batch * queries * heads, triton.cdiv(dim, block_d))
    merge_parts[grid](parts, logs, sinks, out, lse, splits, queries, heads, dim, BLOCK_P=block_p, BLOCK_D=block_d)
    return out, lse


@triton.jit(do_not_specialize=["splits", "queries"])
def merge_parts(
    parts, logs, sinks, out, lse, splits, queries, heads, dim, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr
):
    """One program for each query of each head, and each BLOCK_D dimensions."""
    row = tl.program_id(0).to(tl.int64)
    head, query, batch = row % heads, row // heads % queries, row // heads // queries
    at_log = (batch * heads + head) * queries + query
    part = tl.arange(0, BLOCK_P)
    before = part * tl.num_programs(0).to(tl.int64)  # rows of the parts before
    log = tl.load(logs + before + at_log, mask=part < splits, other=float("-inf"))
    peak = tl.max(log, 0)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32)
        peak = tl.maximum(peak, sink)
    finite = tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.exp2((log - finite) * LOG2E)
    norm = tl.sum(weights, 0)
    if sinks is not None:
        norm += tl.exp2((sink - finite) * LOG2E)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    at = (before + row)[:, None] * dim + d[None, :]
    there = (part < splits)[:, None] & (d < dim)[None, :]
    sums = tl.sum(tl.load(parts + at, mask=there, other=0.0) * weights[:, None], 0)
    divisor = tl.where(norm > 0, norm, 1.0)
    tl.store(out + row * dim + d, (sums / divisor).to(out.dtype.element_ty), mask=d < dim)
    if tl.program_id(1) == 0:
        tl.store(lse + at_log, peak + tl.log2(divisor) * LN2)
