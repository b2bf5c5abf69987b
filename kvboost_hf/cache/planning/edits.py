"""`edited`: a text, or a list of anything, whose spans are dropped, replaced and moved."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import index
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvboost_hf.cache.planning.chunks import Tokens

Ids = Any  # token ids [tokens], or [batch, tokens] for each row: a list, an array or a tensor
NEW = -1  # the source of what was not there before


class Edited(NamedTuple):
    """A text after an edit.

    Args:
        ids: [batch, columns].
        source: [columns], the column that each of them had before, or -1 for new text.
    """

    ids: Tokens
    source: NDArray[np.int64]

    @property
    def first(self) -> int:
        """The first column that is not what it was."""
        changed = np.flatnonzero(self.source != np.arange(len(self.source)))
        return int(changed[0]) if len(changed) else len(self.source)


def edited(
    ids: Tokens,
    drop: Iterable[tuple[int, int]] = (),
    replace: Iterable[tuple[int, int, Ids]] = (),
    move: Iterable[tuple[int, int, int]] = (),
    *,
    unit: str = "token",
) -> Edited:
    """The text after an edit. All columns are those of the text before it.

    Args:
        ids: [batch, columns], the text.
        drop: Spans [start, stop) to leave out.
        replace: Spans, and the ids that take their place; an empty span inserts them.
        move: Spans, and the columns that they are put in front of; also of what takes the place of these.
        unit: The name of a column in errors.

    Raises:
        ValueError: for spans outside of the text, spans that overlap, and ids of a wrong shape.
    """
    columns = ids.shape[1]
    taken: list[tuple[int, int]] = []
    put: dict[int, list[tuple[Tokens, NDArray[np.int64]]]] = {}  # in front of each column: ids and where they were
    for span in drop:
        taken.append(_span("drop", span, columns))
    for away in move:
        start, stop = _span("move", away, columns)
        taken.append((start, stop))
        put.setdefault(_place(away, columns), []).append((ids[:, start:stop], np.arange(start, stop)))
    for change in replace:
        start, stop = _span("replace", change, columns)
        taken.append((start, stop))
        new = _rows(change[2], len(ids))
        put.setdefault(start, []).append((new, np.full(new.shape[1], NEW)))
    taken.sort()
    for before, behind in pairwise(taken):
        if behind[0] < before[1]:
            raise ValueError(f"Spans of one edit must not overlap, got {before} and {behind}. Make two edits of them.")
    for start, stop in taken:
        if inside := [at for at in put if start < at < stop]:
            raise ValueError(
                f"Text cannot be put in front of {unit} {inside[0]}, which the same edit takes away with [{start}, "
                f"{stop}). Put it in front of {unit} {start} or {stop}."
            )
    kept = np.ones(columns, dtype=bool)
    for start, stop in taken:
        kept[start:stop] = False
    parts: list[tuple[Tokens, NDArray[np.int64]]] = []
    cuts = sorted({0, columns, *put})
    for at, end in zip(cuts, [*cuts[1:], columns], strict=True):
        where = np.arange(at, end)[kept[at:end]]
        parts += [*put.get(at, ()), (ids[:, where], where)]
    new, source = np.concatenate([part for part, _ in parts], axis=1), np.concatenate([at for _, at in parts])
    same = (ids[:, : new.shape[1]] == new[:, :columns]).all(axis=0)
    alike = int(same.cumprod().sum())
    source[:alike] = np.arange(alike)  # a text may go on as before where it is given anew
    return Edited(new, source)


def _span(name: str, given: Sequence[Any], columns: int) -> tuple[int, int]:
    wanted = {"drop": "(start, stop)", "replace": "(start, stop, ids)", "move": "(start, stop, to)"}[name]
    try:
        start, stop = index(given[0]), index(given[1])
        complete = len(given) == wanted.count(",") + 1
    except (TypeError, IndexError):
        start = stop = 0
        complete = False
    least = 0 if name == "replace" else 1
    if not complete or not 0 <= start <= stop <= columns or stop - start < least:
        empty = ", and start < stop" if least else ""
        raise ValueError(
            f"`{name}` must be a list of {wanted} with 0 <= start and stop <= {columns}, the tokens held{empty}, got "
            f"{_shown(given)}."
        )
    return start, stop


def _shown(given: Any) -> str:
    text = repr(given)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _place(given: Sequence[Any], columns: int) -> int:
    try:
        to = index(given[2])
    except TypeError:
        to = -1
    if not 0 <= to <= columns:
        raise ValueError(f"`move` must put spans in front of a token from 0 to {columns}, got {_shown(given)}.")
    return to


def _rows(given: Ids, batch: int) -> Tokens:
    """New ids of each row, [batch, tokens]."""
    found = np.asarray(given.cpu() if hasattr(given, "cpu") else given)
    found = found.reshape(1, -1) if found.ndim == 1 else found
    whole = found.size == 0 or np.issubdtype(found.dtype, np.integer)
    if found.ndim != 2 or found.shape[0] not in (1, batch) or not whole:
        raise ValueError(
            f"New text of `replace` must be token ids [tokens] or [{batch}, tokens], got an array of shape "
            f"{list(found.shape)} and type {found.dtype}. Pass tokenizer(text, add_special_tokens=False).input_ids."
        )
    return np.repeat(found.astype(np.int64), batch // found.shape[0], axis=0)
