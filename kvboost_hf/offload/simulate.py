"""Simulates how long a pass through streamed layers takes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Successor = Callable[[int, int, int], int]  # (streamed layer, number of them, slots) -> layer to copy next

WARM_UP, MEASURED = 16, 16  # passes; a few are enough for the times to repeat


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A pass through all layers in the steady state.

    Args:
        seconds: From its first layer to that of the next pass.
        stall_s: Seconds of these in which the computation waited for copies.
        bytes_copied: Bytes copied in the pass.
        misses: Layers whose copy had not been issued when they were needed.
    """

    seconds: float
    stall_s: float
    bytes_copied: float
    misses: float


def next_of_slot(layer: int, streamed: int, n_slots: int) -> int:
    """The next layer, in the order of computation, with the same slot, `layer % n_slots`."""
    return layer + n_slots if layer + n_slots < streamed else layer % n_slots


def simulate(
    layer_bytes: Sequence[int],
    compute_s: Sequence[float],
    resident: Sequence[int],
    *,
    n_slots: int,
    link_bytes_per_s: float,
    host_s: float = 0.0,
    successor: Successor = next_of_slot,
) -> Pass:
    """Simulate repeated passes, with one link on which copies run one after the other.

    Streamed layer `i` uses slot `i % n_slots`. After its computation the copy of its successor is issued. The host
    submits one layer after the other, as early as possible, and begins a pass when the one before has been computed,
    since it needs the token.

    Args:
        layer_bytes: Bytes of each layer.
        compute_s: Seconds of computation of each layer.
        resident: Indices of the layers that are not streamed.
        n_slots: At least 1.
        link_bytes_per_s: Speed of copies.
        host_s: Seconds that the host takes to submit a layer.
        successor: Which layer is copied next.

    Returns:
        Means over the last passes.
    """
    kept = frozenset(resident)
    streamed = [layer for layer in range(len(layer_bytes)) if layer not in kept]
    number = {layer: i for i, layer in enumerate(streamed)}
    owner: dict[int, int] = {}  # of a slot
    ready: dict[int, float] = {}  # when the last copy into a slot ends
    clock = link = stall = nbytes = 0.0
    misses = 0

    def issue(i: int) -> None:
        nonlocal link, nbytes
        link = max(link, clock) + layer_bytes[streamed[i]] / link_bytes_per_s
        nbytes += layer_bytes[streamed[i]]
        owner[i % n_slots], ready[i % n_slots] = i, link

    for i in range(min(n_slots, len(streamed))):
        issue(i)
    before = (0.0, 0.0, 0.0, 0)
    for turn in range(WARM_UP + MEASURED):
        if turn == WARM_UP:
            before = (clock, stall, nbytes, misses)
        submitted = clock
        for layer, seconds in enumerate(compute_s):
            submitted += host_s
            clock = max(clock, submitted)
            if layer in kept:
                clock += seconds
                continue
            i = number[layer]
            if owner[i % n_slots] != i:
                misses += 1
                issue(i)
            start = max(clock, ready[i % n_slots])
            stall += start - clock
            clock = start + seconds
            issue(successor(i, len(streamed), n_slots))
    return Pass(
        seconds=(clock - before[0]) / MEASURED,
        stall_s=(stall - before[1]) / MEASURED,
        bytes_copied=(nbytes - before[2]) / MEASURED,
        misses=(misses - before[3]) / MEASURED,
    )
