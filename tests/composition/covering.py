"""A few cells in which any two values meet that can: a covering array of strength two, chosen greedily."""

from collections.abc import Collection

from tests.composition.factors import FACTORS, Cell, Pair, Value, all_pairs, pair


def covering_cells(apart: Collection[Pair]) -> list[Cell]:
    """Cells that hold every pair of values but those in `apart`, and none of these. The same at each call."""
    missing = dict.fromkeys(each for each in all_pairs() if each not in apart)
    cells: list[Cell] = []
    while missing:
        cell = _grown(next(iter(missing)), missing, apart)
        cells.append(cell)
        for each in cell.pairs:
            missing.pop(each, None)
    return cells


def _grown(seed: Pair, missing: Collection[Pair], apart: Collection[Pair]) -> Cell:
    """A cell that holds `seed`, with the value of each factor that brings most missing pairs."""
    chosen: list[Value] = list(seed)
    while left := [name for name in FACTORS if name not in dict(chosen)]:
        choices = [
            (sum(pair(value, each) in missing for each in chosen), -place, value)
            for place, value in enumerate((name, each) for name in left for each in FACTORS[name])
            if not any(pair(value, each) in apart for each in chosen)
        ]
        chosen.append(max(choices)[2])
    return Cell(**dict(chosen))
