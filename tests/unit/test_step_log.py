"""What a graph has noted of decoding steps, by masks of every form: taken over if they saw what they should."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import make_model
from tests.internals.cache import StaticDecoding, StepLog, TokenLog, Windows, seen_columns
from tests.internals.top import make_reach

pytestmark = pytest.mark.daily

TOTAL, HELD, WINDOW = 32, 20, 8
PADS = np.array([0, 3])
FULL: Windows = {"full_attention": 0}
SLIDING: Windows = {"sliding_attention": WINDOW}
MIXED: Windows = {**FULL, **SLIDING}


def visible(column: int, window: int) -> torch.Tensor:
    """[batch, columns], bool: what a step at a column should see."""
    columns = torch.arange(TOTAL)
    seen = (columns <= column) & (columns >= torch.from_numpy(PADS)[:, None])
    return seen & (columns > column - window) if window else seen


def mask_of(form: str, column: int, window: int) -> torch.Tensor:
    """The same as a mask."""
    seen = visible(column, window)
    if form == "sdpa":
        return seen[:, None, None]
    if form == "eager":
        return torch.where(seen, 0.0, torch.finfo(torch.float32).min)[:, None, None]
    keep = (torch.arange(TOTAL) >= torch.from_numpy(PADS)[:, None]) & (torch.arange(TOTAL) <= column)
    found = make_reach(keep, window, "cpu", torch.full((2, 1), column))
    assert found is not None
    return found


def play(windows: Windows, masks: list[Any], pads: Any = PADS) -> bool:
    """Whether steps with these masks, from column HELD on, are taken over."""
    steps, log = StepLog(TOTAL, windows), TokenLog(pads)
    steps.reset(2, torch.device("cpu"))
    log.extend(np.zeros((2, HELD), dtype=np.int64))
    for column, mask in enumerate(masks, start=HELD):
        ids, positions = torch.full((2, 1), column), torch.from_numpy(column - pads)[:, None]
        steps.record(torch.tensor(column), {"input_ids": ids, "position_ids": positions, "attention_mask": mask})
    found = steps.append_to(log, HELD + len(masks))
    assert log.length == HELD + found * len(masks)
    return found


def masks(form: str, windows: Windows, **others: int) -> list[Any]:
    """Masks of three steps, with the window of a kind replaced by that in `others`."""
    found: list[Any] = []
    for column in range(HELD, HELD + 3):
        each = {kind: mask_of(form, column, others.get(kind, window)) for kind, window in windows.items()}
        found.append(each if len(each) > 1 else next(iter(each.values())))
    return found


@pytest.mark.parametrize("form", ["sdpa", "eager", "kvboost_fa2"])
def test_masks_of_steps(form: str) -> None:
    for windows in (FULL, SLIDING, MIXED):
        assert play(windows, masks(form, windows))
    assert not play(FULL, masks(form, FULL, full_attention=WINDOW))
    assert not play(SLIDING, masks(form, SLIDING, sliding_attention=WINDOW + 1))
    assert not play(MIXED, masks(form, MIXED, sliding_attention=WINDOW + 1))
    assert not play(MIXED, masks(form, MIXED, sliding_attention=0))


@pytest.mark.parametrize("windows", [FULL, SLIDING])
def test_without_a_mask_padding_is_seen(windows: Windows) -> None:
    assert play(windows, [None] * 3, np.zeros(2, dtype=np.int64))
    assert play(windows, [None] * 3, PADS) is (windows is SLIDING)  # it is behind the window by then


def test_masks_that_do_not_tell() -> None:
    first, second, third = masks("sdpa", FULL)
    assert not play(FULL, [first, second[:, 0], third])  # for all heads and queries at once
    assert not play(FULL, [first, {"full_attention": None}, third])  # all columns, those behind the step, too
    assert not play(MIXED, masks("sdpa", FULL))  # one for layers of both kinds
    tree = torch.ones(2, 1, 1, 1, dtype=torch.int64)
    assert not play(FULL, [first, tree, third])


def test_a_log_is_of_so_many_rows() -> None:
    """And stays in its place in memory for as long as it is: graphs write there."""
    steps, step = StepLog(TOTAL, FULL), {"position_ids": torch.tensor([[0]]), "attention_mask": None}
    places = list[int]()
    for rows in (2, 2, 3):
        steps.reset(rows, torch.device("cpu"))
        places.append(steps._notes.data_ptr())
        for other, known in ((rows - 1, False), (rows, True)):
            log = TokenLog(np.zeros(other, dtype=np.int64))
            steps.record(torch.tensor(0), {**step, "input_ids": torch.ones(other, 1, dtype=torch.long)})
            assert steps.copy().append_to(log, 1) is known
            assert log.length == known
        steps.forget(0)
        assert not steps.append_to(TokenLog(np.zeros(rows, dtype=np.int64)), 1)
    assert places[0] == places[1] != places[2]
    never = StepLog(TOTAL, FULL)
    never.forget(0)
    assert not never.copy().append_to(TokenLog(np.zeros(2, dtype=np.int64)), 1)


def test_columns_without_padding() -> None:
    """Where nothing is padding, the columns of the queries are all that `kvboost_fa2` is told."""
    column = torch.tensor([[HELD]])
    for window in (0, WINDOW):
        mask = make_reach(None, window, "cpu", column)
        assert mask is not None
        assert mask.shape == (1, 4 if window else 3, 1, 1)
        windows = SLIDING if window else FULL
        seen = seen_columns(mask, windows, column[0], TOTAL)
        assert seen is not None
        assert torch.equal(seen[0, 0], visible(HELD, window)[0])


# What a forward with a mask of four dimensions is run with, and what is read of it

WIDTH = 64  # of the cache; tiny models have windows of 24
KINDS: dict[str, dict[str, int]] = {
    "llama": {"full_attention": 0},
    "mistral": {"sliding_attention": 24},
    "gemma2": {"full_attention": 0, "sliding_attention": 24},
}


@cache
def static(name: str) -> StaticDecoding:
    return StaticDecoding(make_model(name), WIDTH)


def causal(held: int, new: int, window: int, width: int, pads: tuple[int, ...] = (0, 3)) -> torch.Tensor:
    """[batch, 1, new, width], bool."""
    own, columns = torch.arange(held, held + new)[:, None], torch.arange(width)
    seen = (columns <= own) & (columns > own - window) if window else columns <= own
    return (seen & (columns >= torch.tensor(pads)[:, None, None]))[:, None]


def read(name: str, mask: Any, held: int, new: int, pads: Any = (0, 3)) -> tuple[bool, Any]:
    """Whether the mask is run with as it is, and the one that is read."""
    kwargs = {"input_ids": torch.zeros(2, new, dtype=torch.long), "attention_mask": mask}
    run, seen = static(name).read_mask(kwargs, held, None if pads is None else np.array(pads))
    assert run is kwargs or run is seen
    assert seen["input_ids"] is kwargs["input_ids"]
    return run is kwargs, seen["attention_mask"]


def given(name: str, held: int, new: int, width: int) -> Any:
    each = {kind: causal(held, new, window, width) for kind, window in KINDS[name].items()}
    return each if len(each) > 1 else next(iter(each.values()))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("held", [20, 40])
def test_padding_is_read_from_masks(name: str, held: int) -> None:
    """Only a step whose mask has all columns keeps it: a graph counts on the shape."""
    for new in (1, 2, 5):
        for width in (held + new, held + new + 1, WIDTH):
            kept, found = read(name, given(name, held, new, width), held, new)
            assert kept == (new == 1 and width == WIDTH)
            assert found.tolist() == [[1] * (held + new), [0] * 3 + [1] * (held + new - 3)]


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_masks_that_no_padding_makes_stay(name: str) -> None:
    held, new, window = 20, 3, KINDS[name].get("sliding_attention", 0)
    mask = causal(held, new, window, held + new)
    for row, query, column in [(0, 0, 7), (1, 2, 21), (0, 1, 22), (0, 0, 20)]:  # one query sees more, or less
        other = mask.clone()
        other[row, 0, query, column] ^= True
        kept, found = read(name, other, held, new)
        assert kept
        assert found is other
    hidden = mask.clone()
    hidden[0, :, :, 7] = False  # all queries alike
    kept, found = read(name, hidden, held, new)
    assert not kept
    assert found[0].tolist() == [1] * 7 + [0] + [1] * 15
    for wrong in (mask[:, :, :2], mask[..., :-1]):  # of other queries, or not of all columns
        assert read(name, wrong, held, new) == (True, wrong)


def test_what_has_left_a_window_is_padding_or_not() -> None:
    held, window = 40, 24
    mask = causal(held, 1, window, held + 1, (0, 30))
    assert read("mistral", mask, held, 1, (0, 30))[1].tolist() == [[1] * 41, [0] * 30 + [1] * 11]
    assert read("mistral", mask, held, 1, (0, 2))[1].tolist() == [[1] * 41, [0] * 2 + [1] * 15 + [0] * 13 + [1] * 11]
    for unknown in (None, (0, 0, 0)):  # of another batch
        assert read("mistral", mask, held, 1, unknown)[1].tolist() == [[0] * 17 + [1] * 24, [0] * 30 + [1] * 11]
    assert read("llama", causal(held, 1, 0, held + 1), held, 1, None)[1].tolist() == [[1] * 41, [0] * 3 + [1] * 38]


def test_layers_of_one_kind_may_hide_nothing() -> None:
    """Then nothing may be padding; and a step of a graph has no mask for them."""
    for new in (1, 3):
        for width in (20 + new, WIDTH):
            windowed = causal(20, new, 24, width, (0, 0))
            kept, found = read("gemma2", {"full_attention": None, "sliding_attention": windowed}, 20, new)
            assert not kept
            assert found.tolist() == [[1] * (20 + new)] * 2
            kept, found = read(
                "gemma2", {"full_attention": None, "sliding_attention": causal(20, new, 24, width)}, 20, new
            )
            assert kept
            assert isinstance(found, dict)
    assert read("gemma2", {"full_attention": None, "sliding_attention": None}, 20, 1) == (False, None)
    assert read("llama", None, 20, 1) == (True, None)
    flat = torch.ones(2, 21, dtype=torch.long)
    assert read("llama", flat, 20, 1)[1] is flat
    assert read("llama", torch.ones(2, 1, 0, 20, dtype=torch.bool), 20, 0)[0]
