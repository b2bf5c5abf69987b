"""Loads rows and computes a running softmax: what all Triton kernels of attention share."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


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
