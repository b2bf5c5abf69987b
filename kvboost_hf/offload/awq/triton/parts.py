"""Combines the parts of a sum that several programs compute."""

import triton
import triton.language as tl


@triton.jit
def is_last(arrived):
    """Count a program whose part is stored; whether the parts of its tile are all there, for it to add up.

    Counters, of which each tile has one, are zero before and behind a kernel.
    """
    tl.debug_barrier()  # what all threads have stored comes before the count
    last = tl.atomic_add(arrived + tl.program_id(0), 1) == tl.num_programs(1) - 1
    if last:
        tl.store(arrived + tl.program_id(0), 0)
    return last
