"""Clocks, copies and memory of the device that a benchmark measures; on the host, those of the host.

Work on a GPU is asynchronous: wall time has the device synchronized at both ends, and device time is that between two
CUDA events around several calls, all of which are launched before the first one begins. Calls have run before a clock
starts, which compiles them. On a CPU all of these are wall time, so that a benchmark can be tried where no GPU is.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]

L2_BYTES = 128 << 20  # inputs of a case take at least twice as much
MOST_INPUTS = 64
LAUNCH_CYCLES = 1 << 20  # of a GPU, about half a millisecond: in which the host launches one call
ROUNDS_OF_HOST = 5


def synchronize(device: str) -> None:
    """Wait until a device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def inputs_for(nbytes: int, device: str) -> int:
    """How many inputs of so many bytes a case needs, so that none of them is in the second-level cache."""
    return max(2, min(-(-2 * L2_BYTES // max(1, nbytes)), MOST_INPUTS)) if device == "cuda" else 2


def wall_ms(call: Call, device: str) -> float:
    """Milliseconds from the call to its result."""
    synchronize(device)
    begin = time.perf_counter()
    call()
    synchronize(device)
    return 1000 * (time.perf_counter() - begin)


def device_ms(calls: Sequence[Call], rounds: int, device: str) -> float:
    """Milliseconds of one of several calls on the device, in the median of the rounds."""
    return statistics.median(_together_ms(calls, device) for _ in range(rounds))


def replayed_ms(calls: Sequence[Call], rounds: int, device: str) -> float:
    """Milliseconds of one of several calls, as part of a CUDA graph of them all."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return device_ms([graph.replay], rounds, device) / len(calls)


def host_us(call: Call, device: str, count: int = 200) -> float:
    """Microseconds of a call on the host, which does not wait for the device."""
    times = []
    for _ in range(ROUNDS_OF_HOST):
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(count):
            call()
        times.append(1e6 * (time.perf_counter() - begin) / count)
    synchronize(device)
    return min(times)


def copy_rate(nbytes: int, rounds: int, device: str) -> float:
    """GB/s that a copy on the device reads and writes."""
    here, there = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * nbytes / device_ms([lambda: here.copy_(there)], rounds + 1, device) / 1e6


def link_rate(host: torch.Tensor, rounds: int, device: str, piece_bytes: int | None = None) -> float:
    """GB/s of copies from host memory to the device.

    Args:
        host: uint8 [bytes], pinned for a GPU.
        rounds: That are timed, after one that is not.
        device: Where the copies go.
        piece_bytes: The bytes of one copy; all of `host` by default.
    """
    there = torch.empty(len(host), dtype=torch.uint8, device=device)
    pieces = list(zip(*(each.split(piece_bytes or len(host)) for each in (there, host)), strict=True))

    def copy() -> None:
        for target, source in pieces:
            target.copy_(source, non_blocking=True)

    copy()
    return len(host) / device_ms([copy], rounds, device) / 1e6


def peak_bytes(device: str, *, reserved: bool = False) -> int:
    """The most bytes that tensors have taken of a GPU since `forget_peak`; 0 on a CPU, where nobody counts them."""
    if device != "cuda":
        return 0
    return torch.cuda.max_memory_reserved() if reserved else torch.cuda.max_memory_allocated()


def forget_peak(device: str) -> None:
    """Count anew."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def free(device: str) -> int:
    """Give a GPU's memory back; returns how many bytes tensors still take of it."""
    gc.collect()
    if device != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def _together_ms(calls: Sequence[Call], device: str) -> float:
    if device != "cuda":
        begin = time.perf_counter()
        for call in calls:
            call()
        return 1000 * (time.perf_counter() - begin) / len(calls)
    begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(LAUNCH_CYCLES * len(calls))
    begin_event.record()
    for call in calls:
        call()
    end_event.record()
    torch.cuda.synchronize()
    return begin_event.elapsed_time(end_event) / len(calls)
