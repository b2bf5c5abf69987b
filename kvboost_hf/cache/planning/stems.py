"""Stems: what several rows of a batch begin with, and the forwards that compute it once.

    rows            a b c d e f      stems   [0, 3) of rows 0, 1, 2
                    a b c d e g              [3, 5) of rows 0, 1
                    a b c x y z

Rows are compared by their tokens, padding left out. A stem that would save fewer tokens than another forward is worth
is joined with those that continue it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvboost_hf.cache.planning.chunks import Tokens, common_length


@dataclass(frozen=True, slots=True)
class Stem:
    """Row tokens [start, stop) that some rows have alike, and all before them; the first of the rows computes them."""

    rows: tuple[int, ...]
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def find_stems(tokens: Sequence[Tokens], known: Sequence[int], min_saving: int) -> list[Stem]:
    """The stems of a batch, each behind those that it continues.

    A row is in all stems that end behind what is known of it. The first of them begins there or earlier, and each one
    where the one before it ends.

    Args:
        tokens: The tokens of each row, as far as they may be computed ahead.
        known: For each row, the token from which it can be continued: what is before it is held or stored.
        min_saving: Tokens that a stem must save.
    """
    order = sorted(range(len(tokens)), key=lambda row: tokens[row].astype(">i8").tobytes())
    alike = [common_length(tokens[row], tokens[following]) for row, following in pairwise(order)]
    found: list[Stem] = []
    left = [(0, len(order), 0)] if len(order) > 1 else []
    while left:
        first, last, start = left.pop()
        stop = min(alike[first : last - 1])
        rows = sorted((row for row in order[first:last] if known[row] < stop), key=lambda row: known[row])
        begin = max(start, known[rows[0]]) if rows else stop
        if (len(rows) - 1) * (stop - begin) >= max(min_saving, 1):
            found.append(Stem(tuple(rows), begin, stop))
            start = stop
        parts = [first, *(at for at in range(first + 1, last) if alike[at - 1] == stop), last]
        left += [(begin, end, start) for begin, end in pairwise(parts) if end - begin > 1]
    return found


def paths_of(stems: Iterable[Stem], batch: int) -> list[list[Stem]]:
    """The stems of each row, in order."""
    paths: list[list[Stem]] = [[] for _ in range(batch)]
    for stem in stems:
        for row in stem.rows:
            paths[row].append(stem)
    return paths


def in_groups(
    stems: Sequence[Stem], batch: int, waste: int, *, padded: bool, equal_starts: bool
) -> list[tuple[Stem, ...]]:
    """Stems that one forward can compute, in the order in which the forwards must run.

    Args:
        stems: Each behind those that it continues.
        batch: Rows in all.
        waste: Tokens that a stem may be shorter than the longest one in its forward.
        padded: A forward may have padding on the left.
        equal_starts: Stems that continue something must begin at the same token to share a forward.
    """
    levels: dict[tuple[int, int, int], list[Stem]] = {}
    paths = paths_of(stems, batch)
    for stem in stems:
        level = paths[stem.rows[0]].index(stem)
        alone = equal_starts and stem.start > 0
        key = level, 0 if padded and not alone else stem.stop, stem.start if alone else 0
        levels.setdefault(key, []).append(stem)
    groups: list[tuple[Stem, ...]] = []
    for _, level_stems in sorted(levels.items()):
        group: list[Stem] = []
        for stem in sorted(level_stems, key=len, reverse=True):
            if group and len(group[0]) - len(stem) > waste:
                groups.append(tuple(group))
                group = []
            group.append(stem)
        groups.append(tuple(group))
    return groups
