"""What a graph has noted of decoding steps, by masks of every form: taken over if they saw what they should."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.internals.cache import StepLog, TokenLog, Windows, seen_columns
from tests.internals.top import make_reach

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


def play(windows: Windows, masks: list[Any]) -> bool:
    """Whether steps with these masks, from column HELD on, are taken over."""
    steps, log = StepLog(TOTAL, windows), TokenLog(PADS)
    steps.reset(2, torch.device("cpu"))
    log.extend(np.zeros((2, HELD), dtype=np.int64))
    for column, mask in enumerate(masks, start=HELD):
        ids, positions = torch.full((2, 1), column), torch.from_numpy(column - PADS)[:, None]
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


def test_masks_that_do_not_tell() -> None:
    first, second, third = masks("sdpa", FULL)
    assert not play(FULL, [first, second[:, 0], third])  # for all heads and queries at once
    assert not play(FULL, [first, {"full_attention": None}, third])  # all columns, those behind the step, too
    assert not play(MIXED, masks("sdpa", FULL))  # one for layers of both kinds
    tree = torch.ones(2, 1, 1, 1, dtype=torch.int64)
    assert not play(FULL, [first, tree, third])


def test_columns_without_padding() -> None:
    """Where nothing is padding, the columns of the queries are all that `kvboost_fa2` is told."""
    column = torch.tensor([[HELD]])
    for window in (0, WINDOW):
        mask = make_reach(None, window, "cpu", column)
        assert mask is not None
        assert mask.shape == (1, 2 if window else 1, 2, 1)
        windows = SLIDING if window else FULL
        seen = seen_columns(mask, windows, column[0], TOTAL)
        assert seen is not None
        assert torch.equal(seen[0, 0], visible(HELD, window)[0])
