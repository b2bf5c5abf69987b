"""Every part with every other one: what plain generate() says, what loses as much says, or a reason why not.

That moved chunks which are repaired in full give what plain generate() gives is tested in test_blend.
"""

import re
from dataclasses import replace

import pytest
import torch
import transformers
from packaging.version import Version

from kvboost_hf import streaming_stats
from tests.composition.cells import CHUNK, NEW, Done, apart, done, model_of, plain, prompts, reference, run
from tests.composition.covering import covering_cells
from tests.composition.factors import CHAINS, LIMITS, Cell, Pair, all_pairs, cell_of
from tests.composition.page import PAGE, page

RELEASE = Version(transformers.__version__)
CELLS = covering_cells(LIMITS)
SAME = 1e-3  # standard deviations of the logits; a state that is computed in parts is off by 2e-4 in transformers, too
LOST = {"raw": 0.0, "int8": 0.05, "int4": 0.7, "turboquant": 0.8}  # by codecs, at most; zeros are off by 1.1 to 1.7
LOST_LIVE = {"exact": 0.0, "int8": 0.05, "int4": 0.5}
LOST_MOVED = 1.0


def allowed(cell: Cell) -> float:
    """How far the logits of a cell may be from those of plain generate()."""
    found = SAME + LOST_LIVE[cell.live] + (LOST_MOVED if cell.repair != "exact" else 0)
    return found + LOST[cell.codec] if cell.is_stored else found


def is_right(cell: Cell, found: Done) -> bool:
    """Whether tokens and logits are those of the reference, and logits no farther from plain ones than they may be."""
    expected = done(reference(cell))
    same = torch.equal(found.tokens, expected.tokens) and apart(found, expected) <= SAME
    return same and apart(found, done(plain(cell))) <= allowed(cell)


def reusable(cell: Cell) -> int:
    """Tokens that are known to the history of a cell, over all rows.

    States are known at borders of chunks only; those of a batch, in one column.
    """
    copies = {"samples": 3, "beams": 3}.get(cell.rows, 1)
    lengths = [row.shape[1] - (20 if cell.reuse == "live" else 1) for row in prompts(cell)]
    if cell.model == "qwen3_next":
        before = [max(lengths) - length if cell.reuse == "live" else 0 for length in lengths]
        lengths = [(pad + length) // CHUNK * CHUNK - pad for pad, length in zip(before, lengths, strict=True)]
    return copies * sum(lengths)


def test_all_pairs_are_covered() -> None:
    covered = set().union(*(cell.pairs for cell in CELLS))
    assert covered == set(all_pairs()) - LIMITS.keys()
    assert covering_cells(LIMITS) == CELLS
    print(f"{len(covered)} pairs in {len(CELLS)} cells; {len(LIMITS)} pairs do not go together")  # noqa: T201
    assert len(CELLS) == 49


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_cell(cell: Cell) -> None:
    if RELEASE < Version("5.18") and cell.model == "gemma2" and cell.assistant in CHAINS:
        pytest.skip("transformers 5.17 cannot draft beyond a window")
    model = model_of(cell)
    before = streaming_stats(model)
    found = run(cell)
    assert is_right(cell, found)
    assert_forwarded(cell, found)
    after = streaming_stats(model)
    assert (after is not None) == cell.weights.startswith("streamed")
    if before is not None and after is not None:
        assert after.layer_calls - before.layer_calls >= model.config.num_hidden_layers * found.work.passes


def assert_forwarded(cell: Cell, found: Done) -> None:
    """What was reused is what the history knows, and what went through the model is the rest."""
    report = found.report
    if report is None:
        assert cell.reuse == "none"
        return
    assert report.bypass_reason is None
    assert report.moved_reason is None
    tier = {"live": "live", "store": "ram", "disk": "disk"}[cell.reuse]
    assert report.tier_tokens[tier] > 0 or (cell.model == "qwen3_next" and tier == "live")
    rows = len(found.tokens) if cell.rows == "samples" else len(found.logits)
    if cell.repair == "exact":
        assert report.reused_tokens == reusable(cell)
    else:
        assert report.moved_tokens == 128 * rows
        assert 0 < report.forwarded_tokens < report.prompt_tokens
    most = report.forwarded_tokens + NEW - 1
    if cell.assistant == "none":
        assert found.work.tokens <= most
    else:
        assert found.work.tokens <= most + 64 * found.work.passes
    if cell.assistant in CHAINS and not cell.loses:
        cold = done(replace(cell, reuse="none", codec="raw", buffers="growing"))
        assert cold.work.tokens - found.work.tokens == report.reused_tokens


@pytest.mark.parametrize("both", [p for p, limit in LIMITS.items() if limit.outcome == "refused"], ids=str)
def test_refused(both: Pair) -> None:
    if RELEASE < Version("5.21") and ("attention", "sdpa") in both:
        pytest.skip("transformers before 5.21 leaves the softcap out")
    with pytest.raises(ValueError, match=re.escape(LIMITS[both].says)):
        run(cell_of(both))


@pytest.mark.parametrize("both", [p for p, limit in LIMITS.items() if limit.outcome == "bypassed"], ids=str)
def test_bypassed(both: Pair) -> None:
    cell = cell_of(both)
    found, expected = run(cell), done(plain(cell))
    assert found.report is not None
    assert LIMITS[both].says in str(found.report.bypass_reason) + str(found.report.moved_reason)
    assert found.report.reused_tokens == 0
    assert apart(found, expected) <= SAME
    assert cell.live != "exact" or torch.equal(found.tokens, expected.tokens)


@pytest.mark.parametrize("both", [p for p, limit in LIMITS.items() if limit.outcome == "nothing"], ids=str)
def test_what_makes_no_difference(both: Pair) -> None:
    cell = cell_of(both)
    without = replace(Cell(), **dict([both[0] if both[0][0] == "reuse" else both[1]]))
    found, expected = run(cell), done(without)
    assert torch.equal(found.tokens, expected.tokens)
    assert (found.work.passes, found.work.tokens) == (expected.work.passes, expected.work.tokens)


CONTROLS = [
    Cell(),
    Cell(reuse="live"),
    Cell(reuse="disk"),
    Cell(model="gemma2"),
    Cell(model="qwen3_next"),
    Cell(model="deepseek_v3"),
    Cell(codec="int8"),
    Cell(codec="int4"),
    Cell(codec="turboquant"),
    Cell(live="int8"),
    Cell(live="int4"),
    Cell(repair="first_k"),
    Cell(repair="cacheblend"),
    Cell(repair="query"),
    Cell(attention="kvboost_fa2"),
    Cell(weights="streamed"),
    Cell(weights="streamed AWQ"),
    Cell(assistant="draft"),
    Cell(assistant="trees"),
    Cell(assistant="heads"),
    Cell(rows="padded"),
    Cell(rows="beams"),
    Cell(decoding="sampled"),
    Cell(buffers="static"),
]


@pytest.mark.parametrize("cell", CONTROLS, ids=str)
def test_kv_of_zeros_is_found_out(cell: Cell) -> None:
    found, right = run(cell, spoiled=True), done(cell)
    assert found.report is not None
    assert right.report is not None
    assert found.report.reused_tokens == right.report.reused_tokens > 0
    assert is_right(cell, right)
    assert not is_right(cell, found)
    if cell.repair == "exact":
        assert apart(found, done(plain(cell))) > allowed(cell)


def test_the_page_is_that_of_the_limits() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.composition --write"


def test_a_cold_store_is_found_out() -> None:
    """The control for the count of tokens."""
    cold = done(Cell(reuse="none"))
    with pytest.raises(AssertionError):
        assert_forwarded(Cell(), replace(done(Cell()), work=cold.work))
