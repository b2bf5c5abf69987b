"""How long a pass through streamed layers takes, on a simulated link: the tables of docs/streaming.md.

python benchmarks/ring.py
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

LAYERS = 64
STAYING = (0.01, 0.25, 0.5, 0.75, 1)  # a layer computes for so many times as long as it is copied
ROUNDING = (0.02, 0.25, 0.6, 0.75, 0.9, 1)
HOSTS = (0.0, 0.2, 0.35, 0.4, 0.5, 0.62)  # the host submits a layer in so many times as long as one is copied
Successor = Callable[[int, int, int], int]  # (streamed layer, number of them, slots) -> layer to copy next
WARM_UP, MEASURED = 16, 16  # passes; a few are enough for the times to repeat


def spread(count: int) -> list[int]:
    """So many layers that stay, every so-many-th."""
    return [i * LAYERS // count for i in range(count)]


def ends(count: int) -> list[int]:
    """The first ones, and as many last ones."""
    return [*range(count // 2), *range(LAYERS - count // 2, LAYERS)]


def seconds(resident: list[int], compute: float, n_slots: int = 2) -> float:
    """Of a pass, in units of the time that a layer is copied in."""
    return simulate([1] * LAYERS, [compute] * LAYERS, resident, n_slots=n_slots, link_bytes_per_s=1).seconds


def staying() -> str:
    """What it matters which 32 layers stay, in markdown."""
    half = LAYERS // 2
    return "".join(
        f"| {compute:g} | {seconds(spread(half), compute):.1f} | {seconds(ends(half), compute):.1f} |\n"
        for compute in STAYING
    )


def rounding() -> str:
    """What rounding the number of streamed layers up to a multiple of the slots changes, in markdown."""
    lines = []
    for compute in ROUNDING:
        changes = []
        for n_slots in (2, 3, 4):
            for streamed in range(n_slots + 1, LAYERS - n_slots):
                if more := -streamed % n_slots:
                    plain, rounded = (
                        seconds(spread(LAYERS - count), compute, n_slots) for count in (streamed, streamed + more)
                    )
                    changes.append(rounded / plain - 1)
        lines.append(f"| {compute:g} | {_in_words(min(changes))} | {_in_words(max(changes))} |\n")
    return "".join(lines)


def hosts() -> str:
    """What share of the link is used where 9 of 24 layers are streamed, by how long the host takes, in markdown."""
    lines = []
    for host in HOSTS:
        resident = [i * 24 // 15 for i in range(15)]
        found = simulate([1] * 24, [0.07] * 24, resident, n_slots=2, link_bytes_per_s=1, host_s=host)
        lines.append(f"| {host:g} | {9 / found.seconds:.2f} | {found.stall_s / found.seconds:.2f} |\n")
    return "".join(lines)


def _in_words(change: float) -> str:
    percent = f"{100 * abs(change):.2g}"
    return "the same" if percent == "0" else f"{percent}% {'slower' if change > 0 else 'faster'}"


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
    numbers = {layer: i for i, layer in enumerate(sorted({*range(len(layer_bytes))}.difference(resident)))}
    device = _Device([layer_bytes[layer] for layer in numbers], n_slots, link_bytes_per_s, successor)
    before = device.counts()
    for turn in range(WARM_UP + MEASURED):
        if turn == WARM_UP:
            before = device.counts()
        submitted = device.clock
        for layer, seconds in enumerate(compute_s):
            submitted += host_s
            device.clock = max(device.clock, submitted)
            device.compute(numbers.get(layer), seconds)
    means = [(after - start) / MEASURED for after, start in zip(device.counts(), before, strict=True)]
    return Pass(seconds=means[0], stall_s=means[1], bytes_copied=means[2], misses=means[3])


class _Device:
    """The clock of the computation, and the slots with the link that fills them."""

    def __init__(
        self, streamed_bytes: Sequence[int], n_slots: int, link_bytes_per_s: float, successor: Successor
    ) -> None:
        self.clock = 0.0
        self._stall = self._nbytes = self._link_free_at = 0.0
        self._misses = 0
        self._streamed_bytes, self._n_slots = streamed_bytes, n_slots
        self._link_bytes_per_s, self._successor = link_bytes_per_s, successor
        self._slots: dict[int, tuple[int, float]] = {}  # the streamed layer in each, and when its copy ends
        for i in range(min(n_slots, len(streamed_bytes))):
            self._issue(i)

    def counts(self) -> tuple[float, float, float, int]:
        """Clock, seconds of stalls, bytes copied and misses so far."""
        return self.clock, self._stall, self._nbytes, self._misses

    def compute(self, i: int | None, seconds: float) -> None:
        """Compute streamed layer `i`, or a resident one."""
        if i is not None:
            if self._slots[i % self._n_slots][0] != i:
                self._misses += 1
                self._issue(i)
            stall = max(0.0, self._slots[i % self._n_slots][1] - self.clock)
            self._stall += stall
            self.clock += stall
        self.clock += seconds
        if i is not None:
            self._issue(self._successor(i, len(self._streamed_bytes), self._n_slots))

    def _issue(self, i: int) -> None:
        nbytes = self._streamed_bytes[i]
        self._link_free_at = max(self._link_free_at, self.clock) + nbytes / self._link_bytes_per_s
        self._nbytes += nbytes
        self._slots[i % self._n_slots] = i, self._link_free_at


if __name__ == "__main__":
    print(staying())
    print(rounding())
    print(hosts(), end="")
