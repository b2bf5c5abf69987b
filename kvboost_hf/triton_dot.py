"""Multiplies two tiles in Triton, exactly, and also under the interpreter. Imports Triton."""

import triton
import triton.language as tl
from triton import knobs

# In Triton's interpreter a product of bfloat16 is silently wrong, and int8 becomes NaN as bfloat16:
# https://github.com/triton-lang/triton/issues/11584. There, products are of float32.
INTERPRET = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def dot(a, b, onto=None):
    """Compute a @ b + onto in float32, without rounding the operands."""
    if INTERPRET:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, onto, input_precision="ieee")
