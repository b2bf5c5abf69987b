"""What is known of the tokens that a cache holds, without a model: borders, plans, and arguments of steps."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from tests.internals.cache import (
    Border,
    FixedChunker,
    KnownRow,
    Ledger,
    MovedColumns,
    RowPlan,
    Segment,
    Settled,
    TokenLog,
    whole_pieces,
)
from tests.unit.test_chunks_and_plan import ROOT, FakeChunk, FakeIndex, run

pytestmark = pytest.mark.daily

TOKENS = run(40, seed=1)


def known_row(current: Any = lambda: True) -> KnownRow:
    """Of 40 tokens 32 are stored, and what stood elsewhere serves [10, 30)."""
    chunk: Any = FakeChunk(b"chunk", TOKENS[10:30])
    moved = Segment(chunk, 0, 10, 20, moved=True), Segment(chunk, 10, 20, 30, moved=True)
    return KnownRow(ROOT, TOKENS, 32, RowPlan(32, (), (), None), current, moved, 8)


def test_what_was_looked_up_serves_that_prompt_alone() -> None:
    known = known_row()
    assert known.of(ROOT, TOKENS[:33], 32) is known.plan
    assert known.of(ROOT, TOKENS, 39) is known.plan
    assert known.plan is not None
    for other in ((b"other", TOKENS, 39), (ROOT, TOKENS, 31), (ROOT, TOKENS[::-1], 39)):
        assert known.of(*other) is None
    assert known.moved is not None
    for stop, served in ((31, 2), (30, 2), (29, None), (21, None), (20, 1), (11, None), (10, 0)):
        assert known.moved_of(ROOT, TOKENS, 8, stop) == (known.moved[:served] if served is not None else None)
    for place in ((b"other", TOKENS, 8), (ROOT, TOKENS, 9), (ROOT, TOKENS[::-1], 8)):
        assert known.moved_of(*place, 31) is None


def test_what_was_looked_up_is_let_go_once_the_store_has_changed() -> None:
    for ask in (lambda known: known.of(ROOT, TOKENS, 39), lambda known: known.moved_of(ROOT, TOKENS, 8, 31)):
        known = known_row(lambda: False)
        assert ask(known) is None
        assert (known.plan, known.moved) == (None, None)


PADS, AT = (1, 4), [[0, 16, 32, 48], [0, 16, 29, 40]]  # of two rows of 51 columns, with the borders of each


def ledger_of(stale: range = range(0)) -> Ledger:
    """Both rows; columns `stale` of the first one were moved."""
    log = TokenLog(np.array(PADS))
    log.extend(np.stack([run(51, seed=2), run(51, seed=3)]))
    found = Ledger(log, [[Border(at, b"%d" % at) for at in row] for row in AT], ROOT, quiet=(16, 60))
    if stale:
        moved = np.zeros((2, 51), dtype=bool)
        moved[0, stale] = True
        found.blended = MovedColumns(moved, moved.copy())
    return found


def ats(ledger: Ledger) -> list[list[int]]:
    return [[border.at for border in row] for row in ledger.borders]


@pytest.mark.parametrize("stale", [range(0), range(20, 25)])
def test_borders_stay_as_far_as_the_text_does(stale: range) -> None:
    """Where nothing moved is left of a row, what is stored of it begins anew: its pieces did not end at chunks."""
    for length in range(53):
        ledger = ledger_of(stale)
        ledger.in_pieces = 32
        ledger.rewind(length)
        kept = [[at for at in row if at <= max(0, length - pad)] for row, pad in zip(AT, PADS, strict=True)]
        if stale and length <= stale.start:
            kept[0] = [0]
        assert ats(ledger) == kept
        assert (ledger.in_pieces, ledger.quiet) == (min(32, whole_pieces(length)), (0, 0))
        assert ledger.log.length == min(length, 51)
    if stale:
        for left in (1, 0):
            ledger = ledger_of(stale)
            assert ledger.blended is not None
            ledger.repaired(ledger.blended.next_tainted(51, 51 - stale.start - left))
            assert ats(ledger) == [AT[0] if left else [0], AT[1]]
            assert (ledger.tainted(0) is not None, ledger.tainted(1)) == (bool(left), None)


def test_a_chunk_is_new_once_some_row_has_all_of_it() -> None:
    ledger = ledger_of()
    for size, pieces, found in ((16, None, False), (7, None, True), (16, 59, False), (16, 60, True)):
        ledger.in_pieces, ledger.quiet = pieces, (0, 0)
        assert ledger.has_new_chunk(size) is found
        assert ledger.quiet == ((16, 60) if not found and pieces is None else (0, 0))
    assert ledger.first_unstored() == 44
    ledger.in_pieces = 40
    assert [len(ledger.storable(row)) for row in ledger.rows] == [39, 36]
    store: Any = SimpleNamespace(chunker=FixedChunker(16))
    for limit, last in ((49, 49), (48, 49), (64, 49), (65, 65), (66, 65)):
        assert ledger.last_border(limit, store, np.zeros((2, 70), dtype=np.int64)) == last
    for stale, found in ((range(20, 25), False), (range(49, 50), True)):  # moved, and then computed behind the border
        ledger = ledger_of(stale)
        assert ledger.has_new_chunk(16) is found
        assert ledger.quiet == (16, 60)


def test_rows_of_a_batch_are_planned_up_to_the_same_column() -> None:
    """Rows that repeat are looked up once; what was looked up before is taken for the only row that is new."""
    texts, pads, asked = [run(62, seed=4), run(58, seed=5), run(62, seed=4)], [0, 4, 0], list[int]()
    ids = np.stack([np.concatenate([np.zeros(62 - len(text), dtype=np.int64), text]) for text in texts])
    index = FakeIndex(FixedChunker(16), *texts[:2])

    def view(root: bytes, tokens: Any, *args: Any, **settings: Any) -> Any:
        asked.append(len(tokens))
        return index

    store: Any = SimpleNamespace(view=view, worth=lambda plan: plan, chunker=FixedChunker(16))
    for limit in (61, 48, 30, 12):
        plan = Ledger.empty(np.array(pads), ROOT).plan(ids, 0, limit, store, 0, stateful=False)
        assert [row.hit for row in plan.rows] == [limit, limit - 4, limit]
    assert asked == [62, 58] * 4
    ledger = Ledger.empty(np.zeros(1, dtype=np.int64), ROOT)
    known = KnownRow(ROOT, TOKENS, 0, RowPlan(0, (), (), None), lambda: True)
    for held, without in ((0, frozenset[bytes]()), (5, frozenset()), (0, frozenset([b"lost"]))):
        asked.clear()
        ledger.plan(TOKENS[None], held, 39, store, 0, stateful=False, without=without, known=known)
        assert asked == ([40] if held or without else [])


# The arguments of a decoding step


def test_a_step_goes_on_while_its_arguments_are_alike() -> None:
    """Another number, a value that was not there, or one of another kind: then it is decided anew."""
    ids, mask = torch.tensor([[3]]), torch.ones(1, 9)
    given: dict[str, Any] = {"input_ids": ids, "position_ids": torch.tensor([[8]]), "logits_to_keep": 1}
    given |= {"past_key_values": DynamicCache(), "use_cache": True, "attention_mask": mask}

    def settled(given: dict[str, Any], **request: Any) -> Settled | None:
        told = {"in_generate": True, "in_own_loop": False, "depth": 0, "code": None, "kwargs": given} | request
        return Settled.of(SimpleNamespace(**told), given, hands_out=False)  # type: ignore[arg-type]

    found = settled(given)
    assert found is not None
    assert (found.is_masked, found.drops_mask) == (True, False)
    dropped = settled(given, kwargs={**given, "attention_mask": None})
    assert dropped is not None
    assert dropped.drops_mask
    assert found.goes_on(given | {"input_ids": ids + 1, "attention_mask": torch.ones(1, 10)})
    assert found.goes_on(given | {"past_key_values": DynamicCache()})
    for name, value in {
        "use_cache": False,
        "logits_to_keep": 2,
        "past_key_values": None,
        "attention_mask": torch.ones(1, 1, 1, 9),
    }.items():
        assert not found.goes_on(given | {name: value}), name
    assert not found.goes_on(given | {"attention_mask": None})
    assert not found.goes_on(given | {"output_router_logits": True})
    for name in ("use_cache", "attention_mask"):
        fewer = {key: value for key, value in given.items() if key != name}
        assert not found.goes_on(fewer)
        assert not found.goes_on(fewer | {"cache_position": ids[0]})
    bare = settled({key: value for key, value in given.items() if key != "attention_mask"})
    assert bare is not None
    assert not bare.goes_on({**given, "use_cache": True} | {"attention_mask": mask})
    unmasked = {key: value for key, value in given.items() if key not in ("attention_mask", "use_cache")}
    assert not bare.goes_on(unmasked | {"attention_mask": mask})
    other_depth = settled(given, depth=10**6, code=test_a_step_goes_on_while_its_arguments_are_alike.__code__)
    assert other_depth is not None
    assert not other_depth.goes_on(given)
    for change in (
        {"position_ids": None},
        {"output_attentions": True},
        {"logits_to_keep": None},
        {"inputs_embeds": torch.ones(1, 1, 8)},
    ):
        assert settled(given | change) is None
    assert settled(given, in_generate=False) is None
    assert settled(given, in_generate=False, in_own_loop=True) is not None
