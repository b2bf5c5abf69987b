"""How long a pass through streamed layers takes, on a simulated link: the tables of docs/streaming.md.

python benchmarks/ring.py
"""

from kvboost_hf.offload.simulate import simulate

LAYERS = 64
STAYING = (0.01, 0.25, 0.5, 0.75, 1)  # a layer computes for so many times as long as it is copied
ROUNDING = (0.02, 0.25, 0.6, 0.75, 0.9, 1)
HOSTS = (0.0, 0.2, 0.35, 0.4, 0.5, 0.62)  # the host submits a layer in so many times as long as one is copied


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


if __name__ == "__main__":
    print(staying())
    print(rounding())
    print(hosts(), end="")
