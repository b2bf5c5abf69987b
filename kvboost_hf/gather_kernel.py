"""Gathers columns of stored chunks into a layer with one Triton kernel. Imports Triton.

The kernel reads pinned host memory where it is, over the link: a copy of each chunk costs the host a call, and a link
that is fast waits for it.
"""

from collections.abc import Sequence
from subprocess import CalledProcessError

import torch
import triton
import triton.language as tl
from triton.errors import TritonError

from kvboost_hf.triton_launch import Launcher

# Few programs, so that the model has the other processors: each waits for 16 KiB at a time, and all of them for about
# twice what a link of 64 GB/s has under way.
_PROGRAMS, _BYTES = 16, 2**14
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def failure(device: torch.device) -> str | None:
    """Return why the kernel does not read pinned host memory on a device, found out by reading some, or None."""
    try:
        host = torch.arange(1024, device="cpu").pin_memory().view(2, 1, 64, 8)
        out = torch.zeros((1, 1, 64, 8), dtype=torch.int64, device=device)
        table = torch.tensor([[0, 0, 64, 0, 64, host.data_ptr()]], device=device)
        launch([out], table, [(5, 1)])
        return None if torch.equal(out[0].cpu(), host[1]) else "its kernels do not find pinned memory by its address"
    except (CalledProcessError, OSError, RuntimeError, TritonError) as error:  # no compiler, or nothing that is mapped
        return str(error).partition("\n")[0]


def launch(opened: Sequence[torch.Tensor], table: torch.Tensor, places: Sequence[tuple[int, int]]) -> None:
    """Write the columns of one layer, two tensors at a time, on the current stream.

    Args:
        opened: The new columns of each tensor of the layer, [batch, heads, columns, dim]; their last two dimensions
            are contiguous.
        table: The addresses of the pieces, on the same device.
        places: For each tensor of the layer, the column of the table with the address of its block, and its index in
            the block.
    """
    for at in range(0, len(opened), 2):
        _launch_two(opened[at : at + 2], table, places[at : at + 2])


def _launch_two(opened: Sequence[torch.Tensor], table: torch.Tensor, places: Sequence[tuple[int, int]]) -> None:
    row_bytes = [part.shape[3] * part.itemsize for part in opened]
    size = next(size for size in _WORDS if not any(each % size for each in row_bytes))
    aligned = 16 if not any(each % 16 for each in row_bytes) else size
    words = [part.view(_WORDS[size]) for part in opened]
    first, second = words[0], words[-1]
    heads = [part.shape[1] for part in opened] if len(opened) == 2 else [opened[0].shape[1], 0]
    (block, at), (other, there) = places[0], places[-1]
    given = (
        (table, first, second),
        (*first.stride()[:2], *second.stride()[:2]),
        (len(table), table.shape[1], *heads, block, at, other, there),
        (),
        (first.shape[3], second.shape[3], aligned, _BYTES // size),
    )
    tasks = len(table) * sum(heads)
    if tasks:
        _launch((min(_PROGRAMS, tasks), 1, 1), table.device, given, warps=8, stages=1)


@triton.jit(do_not_specialize="runs fields heads other_heads block at other_block other_at".split())
def gather(
    table, first, second,
    first_batch, first_head, second_batch, second_head,
    runs, fields, heads, other_heads, block, at, other_block, other_at,
    ROW: tl.constexpr, OTHER_ROW: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program copies every so-manieth pair of a run and a head, of both tensors."""
    both = heads + other_heads
    for task in range(tl.program_id(0), runs * both, tl.num_programs(0)):
        run = table + (task // both).to(tl.int64) * fields
        head = task % both
        if head < heads:
            _copy(run, block, at, head, heads, first, first_batch, first_head, ROW, ALIGNED, BLOCK)
        else:
            _copy(
                run, other_block, other_at, head - heads, other_heads, second, second_batch, second_head,
                OTHER_ROW, ALIGNED, BLOCK,
            )  # fmt: skip


_launch = Launcher(gather)


@triton.jit
def _copy(
    run, block, at, head, heads, out, out_batch, out_head,
    ROW: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy one run of one head, which is without gaps on both sides; zeros where it has no address."""
    row, column, length, begin, tokens = (
        tl.load(run), tl.load(run + 1), tl.load(run + 2), tl.load(run + 3), tl.load(run + 4),
    )  # fmt: skip
    # The hint is where it survives: on what is loaded. Multiples of ROW are aligned as it is.
    address = tl.load(run + block)
    source = tl.multiple_of(address.to(tl.pointer_type(out.dtype.element_ty)), ALIGNED)
    source += ((tl.cast(at, tl.int64) * heads + head) * tokens + begin) * ROW
    target = out + (row * out_batch + head.to(tl.int64) * out_head + column * ROW)
    words = length * ROW
    stored = words * (address != 0).to(tl.int64)
    for start in range(0, words, BLOCK):
        i = start + tl.arange(0, BLOCK)
        found = tl.load(source + i, mask=i < stored, other=0)
        tl.store(target + i, found, mask=i < words)
