"""Parts that all Triton kernels of attention share: rows, a running softmax, and `combine`, which merges parts."""

from functools import cache

import torch
import triton
import triton.language as tl

from kvboost_hf.attention.call import Part, no_log
from kvboost_hf.attention.triton.tiling import MAX_SPLITS, power_of_2
from kvboost_hf.triton_launch import Launcher

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
_BLOCK_D = 64  # dimensions of a program of `merge_parts`, at most: with few queries there are more programs than heads
_FEW = 16  # parts that are merged at once
_NUMBERS = 8192  # that a program of `merge_parts` holds


@triton.jit
def load_rows(start, stride, rows, DIM: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr, ALL: tl.constexpr):
    """Load [BLOCK, PADDED] of [rows, DIM] numbers from `start`, zeros elsewhere; `ALL` if there are BLOCK rows."""
    row = tl.arange(0, BLOCK)[:, None]
    dim = tl.arange(0, PADDED)[None, :]
    at = start + row * stride + dim
    if ALL and DIM == PADDED:
        return tl.load(at)
    if ALL:
        return tl.load(at, mask=dim < DIM, other=0.0)
    if DIM == PADDED:
        return tl.load(at, mask=row < rows, other=0.0)
    return tl.load(at, mask=(row < rows) & (dim < DIM), other=0.0)


@triton.jit
def tanh(x):
    """Compute tanh, as exact near 0 as float32 is near 1, and never with an overflow."""
    faded = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    size = (1 - faded) / (1 + faded)
    return tl.where(x < 0, -size, size)


@triton.jit
def softmax_step(scores, scale, peak):
    """Take a block into a running softmax.

    Args:
        scores: [rows, columns], float32; -inf for what is not seen.
        scale: Factor of the scores, times log2(e); above 0.
        peak: [rows]: the largest of the scaled scores before; -inf if there was none.

    Returns:
        Weights [rows, columns], 2 ** (scaled score - peak); the factor of what was summed before; the peak.
    """
    higher = tl.maximum(peak, tl.max(scores, 1) * scale)
    finite = tl.where(higher == float("-inf"), 0.0, higher)  # of a row that has seen nothing
    weights = tl.exp2(scores * scale - finite[:, None])
    fade = tl.exp2(peak - finite)
    return weights, fade, higher


@triton.jit
def softmax_end(sums, peak, norm, logit):
    """Finish a running softmax.

    Args:
        sums: [rows, dims]: weighted values.
        peak: [rows]: the largest of the scaled scores.
        norm: [rows]: the sum of the weights.
        logit: [rows], or None: of a column that everybody sees, without a value.

    Returns:
        Attention [rows, dims], zeros where nothing is seen, and the log of the sum of the exponentiated logits.
    """
    if logit is not None:
        higher = tl.maximum(peak, logit * LOG2E)
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        fade = tl.exp2(peak - finite)
        norm = norm * fade + tl.exp2(logit * LOG2E - finite)
        sums *= fade[:, None]
        peak = higher
    divisor = tl.where(norm > 0, norm, 1.0)
    return sums / divisor[:, None], (peak + tl.log2(divisor)) * LN2


def combine(
    parts: torch.Tensor, logs: torch.Tensor, *, sinks: torch.Tensor | None, dtype: torch.dtype, partial: bool = True
) -> Part:
    """Merge parts into what attention over all columns gives.

    Args:
        parts: [parts, batch, queries, heads, value_dim], float32, contiguous; zeros where a query sees nothing.
        logs: [parts, batch, heads, queries], float32, contiguous.
        sinks: [heads], or None: logits of a column without a value.
        dtype: The data type of the result.
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
