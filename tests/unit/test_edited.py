"""Edits of a text, beside a reading of them that goes column by column."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.internals.cache import edited

pytestmark = pytest.mark.daily


def _edited(ids: Any, drop: Any, replace: Any, move: Any) -> tuple[list[list[int]], list[int]]:
    """As `edited`, column by column."""
    columns, put = ids.shape[1], dict[int, list[tuple[int, Any]]]()
    gone = {at for start, stop, *_ in (*drop, *replace, *move) for at in range(start, stop)}
    for start, stop, to in move:
        put.setdefault(to, []).extend((at, ids[:, at]) for at in range(start, stop))
    for start, _, new in replace:
        put.setdefault(start, []).extend((-1, np.full(len(ids), token)) for token in new)
    found = list[tuple[int, Any]]()
    for at in range(columns + 1):
        found += put.get(at, [])
        if at < columns and at not in gone:
            found.append((at, ids[:, at]))
    source, still = [at for at, _ in found], True
    for at, (_, tokens) in enumerate(found):
        still = still and at < columns and bool((ids[:, at] == tokens).all())
        source[at] = at if still else source[at]
    return [[int(tokens[row]) for _, tokens in found] for row in range(len(ids))], source


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_a_text_is_edited(data: st.DataObject) -> None:
    columns = data.draw(st.integers(0, 12))
    ids = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, 3, (data.draw(st.integers(1, 2)), columns))
    cuts = sorted({0, columns, *data.draw(st.lists(st.integers(0, columns), max_size=6))})
    spans = list(pairwise(cuts))
    what = [data.draw(st.sampled_from(["keep", "drop", "move", "replace"])) for _ in spans]
    taken = [span for span, kind in zip(spans, what, strict=True) if kind != "keep"]
    places = [at for at in range(columns + 1) if not any(start < at < stop for start, stop in taken)]
    drop = [span for span, kind in zip(spans, what, strict=True) if kind == "drop"]
    move = [
        (*span, data.draw(st.sampled_from(places))) for span, kind in zip(spans, what, strict=True) if kind == "move"
    ]
    tokens = st.lists(st.integers(0, 2), max_size=3)
    replace = [(*span, data.draw(tokens)) for span, kind in zip(spans, what, strict=True) if kind == "replace"]
    if data.draw(st.booleans()):
        at = data.draw(st.sampled_from(places))
        replace.append((at, at, data.draw(tokens)))
    found = edited(ids, drop, replace, move)
    wanted, source = _edited(ids, drop, replace, move)
    assert found.ids.tolist() == wanted
    assert found.source.tolist() == source
    assert found.first == next((at for at, was in enumerate(source) if at != was), len(source))


_SIX = np.array([[1, 2, 3, 4, 5, 6]] * 2)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ({"drop": [(2, 5), (4, 6)]}, r"must not overlap, got \(2, 5\) and \(4, 6\)"),
        ({"drop": [(2, 5)], "move": [(4, 6, 0)]}, "must not overlap"),
        ({"drop": [(2, 5)], "move": [(5, 6, 3)]}, r"in front of line 3, .* takes away with \[2, 5\)"),
        ({"drop": [(2, 5)], "move": [(5, 6, 4)]}, "in front of line 2 or 5"),
        ({"drop": [(-1, 2)]}, "`drop` must be a list of .* and start < stop, got"),
        ({"drop": [(0, 7)]}, "stop <= 6"),
        ({"drop": [(3, 3)]}, "start < stop"),
        ({"drop": [(4, 3)]}, "start < stop"),
        ({"drop": [(0, 1, 2)]}, r"got \(0, 1, 2\)"),
        ({"drop": [(0,)]}, r"got \(0,\)"),
        ({"drop": [(0.0, 1)]}, "got"),
        ({"drop": [4]}, "got 4"),
        ({"move": [(0, 1)]}, r"\(start, stop, to\)"),
        ({"move": [(1, 1, 0)]}, "start < stop"),
        ({"move": [(0, 1, 7)]}, "from 0 to 6"),
        ({"move": [(0, 1, -1)]}, "from 0 to 6"),
        ({"move": [(0, 1, "a")]}, "from 0 to 6"),
        ({"replace": [(4, 3, [1])]}, r"stop <= 6, the tokens held, got"),
        ({"replace": [(0, 1, [1.5])]}, "type float64"),
        ({"replace": [(0, 1, [[1], [2], [3]])]}, r"shape \[3, 1\]"),
        ({"replace": [(0, 1, [[[1]]])]}, r"shape \[1, 1, 1\]"),
    ],
)
def test_edits_that_are_none(edit: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        edited(_SIX, **edit, unit="line")


def test_edits_at_the_borders() -> None:
    assert edited(_SIX, drop=[(2, 5), (5, 6)]).ids.tolist() == [[1, 2]] * 2
    assert edited(_SIX, drop=[(0, 6)]).ids.tolist() == [[], []]
    assert edited(_SIX, drop=[(2, 5)], move=[(5, 6, 2)]).ids.tolist() == [[1, 2, 6]] * 2
    assert edited(_SIX, move=[(0, 1, 6)]).ids.tolist() == [[2, 3, 4, 5, 6, 1]] * 2
    assert edited(_SIX, replace=[(6, 6, [0])]).ids.tolist() == [[1, 2, 3, 4, 5, 6, 0]] * 2
    assert edited(_SIX, replace=[(0, 0, [])]).first == 6
    assert edited(_SIX, replace=[(0, 1, [[7], [8]])]).ids[:, 0].tolist() == [7, 8]
    assert edited(_SIX, replace=[(0, 1, np.array([9], dtype=np.uint8))]).source.tolist() == [-1, 1, 2, 3, 4, 5]
    for length in (80, 81):
        with pytest.raises(ValueError, match="must be a list") as raised:
            edited(_SIX, drop=["x" * (length - 2)])  # type: ignore[list-item]  # and its quotes
        assert ("..." in str(raised.value)) == (length > 80)
        assert len(str(raised.value).partition(", got ")[2]) == 81  # with the full stop
