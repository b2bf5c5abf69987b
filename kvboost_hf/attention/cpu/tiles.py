"""Cuts the matrix of queries and columns into rectangles to be computed, of which few need a mask."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from kvboost_hf.visibility import Visibility

_ROWS = 128  # queries that share a mask: with more of them, more of the work is hidden; with fewer, more calls


class Tile(NamedTuple):
    """A rectangle of queries and columns."""

    rows: slice
    columns: slice
    mask: torch.Tensor | None = None  # [batch or 1, heads or 1, rows, columns], bool; None where all is seen
    causal: bool = False  # as many rows as columns, of which row i sees the first i + 1


def is_plain(seen: Visibility, queries: int, total: int) -> bool:
    """Whether one rectangle, or one square, is all there is."""
    own = seen.window or any(each is not None for each in (seen.keep, seen.columns, seen.tree, seen.mask))
    return not own and (queries in (1, total) or not seen.causal)


def is_irregular(seen: Visibility) -> bool:
    """Whether nothing but a mask of all queries and columns tells who sees what."""
    if seen.mask is not None:
        return True
    return seen.window > 0 and not seen.causal if seen.tree is None else seen.window > 0 or seen.columns is not None


def square(queries: int, total: int) -> Iterator[Tile]:
    """Tiles of queries that are the last columns, and see those up to theirs."""
    everyone, first = slice(0, queries), total - queries if queries > 1 else total
    if first:
        yield Tile(everyone, slice(0, first))
    if first < total:
        yield Tile(everyone, slice(first, total), causal=True)


def tree(bits: torch.Tensor, total: int) -> Iterator[Tile]:
    """Tiles of queries that are the last columns; they see all before these, and of these what the bits say."""
    queries = bits.shape[1]
    everyone, first = slice(0, queries), total - queries
    if first:
        yield Tile(everyone, slice(0, first))
    mask = bits[:, None, :, None] >> torch.arange(queries, device=bits.device) & 1
    yield Tile(everyone, slice(first, total), mask.bool())


def staircase(own: torch.Tensor, window: int) -> Iterator[Tile]:
    """Tiles of queries at columns [queries], ascending, that see the `window` columns up to theirs, or all."""
    before = 0 if window else int(own[0])
    if before:
        yield Tile(slice(0, len(own)), slice(0, before))
    for start in range(0, len(own), _ROWS):
        rows = slice(start, min(start + _ROWS, len(own)))
        first = max(int(own[start]) - window + 1, 0) if window else before
        columns = slice(first, int(own[rows.stop - 1]) + 1)
        away = own[rows, None] - torch.arange(columns.start, columns.stop, device=own.device)
        mask = (away >= 0) & (away < window) if window else away >= 0
        yield Tile(rows, columns, mask[None, None] if len(mask) > 1 else None)


def masked(mask: torch.Tensor) -> Iterator[Tile]:
    """Tiles of a mask [batch or 1, heads or 1, queries, columns]."""
    queries, total = mask.shape[2:]
    for start in range(0, queries, _ROWS):
        rows = slice(start, min(start + _ROWS, queries))
        yield Tile(rows, slice(0, total), mask[:, :, rows])
