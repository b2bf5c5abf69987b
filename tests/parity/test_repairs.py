"""The contract of repairs: every way to repair, with every way to go on with it, ends as plain generate() has it.

A prompt is planned, filled with K/V that has moved, repaired before its first token as `repair` says, and afterwards
as `progressive` says. What is neither must say so, and be exact once `cache.repair()` has run.
"""

from typing import Any, get_args

import pytest
import torch
from transformers import PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore
from kvboost_hf.config import Repair
from tests.conftest import as_inputs, counted, make_model, random_ids
from tests.internals.cache import REPAIRS, blend_reason, idle, idle_of
from tests.parity.test_blend import assert_same, blend, generate, off_from_plain, prompt, store_with_documents

MOVED, BEHIND = 256, 276  # tokens that move, and tokens from the first one that moves on
HEAD, TAIL = 21, 20  # computed in any case
STEPS = 12
WAYS = get_args(Repair)
GOES_ON: list[Any] = [False, True, 64, "ride", None]


def asked_twice(model: PreTrainedModel, store: ChunkStore, repair: str, progressive: Any, **more: Any) -> Any:
    """A cache that has answered a prompt of moved documents, the answer, and what was forwarded for it."""
    cache = ChunkReuseCache(model, store, blend(repair, progressive=progressive, **more))
    with counted(model) as work:
        found = generate(model, as_inputs(prompt([2, 0, 3, 1])), cache, max_new_tokens=STEPS, min_new_tokens=STEPS)
    return cache, found, work


def require_exact(model: PreTrainedModel, store: ChunkStore, cache: ChunkReuseCache, found: Any) -> None:
    """The next turn is plain without anything moved, and another cache finds the prompt by its history."""
    longer = as_inputs(torch.cat([found.sequences, random_ids(30, seed=4)], dim=1))
    assert_same(generate(model, longer, cache), generate(model, longer))
    assert cache.report.moved_tokens == 0
    other, inputs = ChunkReuseCache(model, store), as_inputs(prompt([2, 0, 3, 1]))
    assert_same(generate(model, inputs, other), generate(model, inputs))
    assert other.report.exact_tokens >= 288
    assert not store.check_integrity().wrong


@pytest.fixture
def model() -> PreTrainedModel:
    model = make_model("llama")
    assert all(blend_reason(model, repair.measure) is None for repair in REPAIRS.values())  # found out once
    return model


@pytest.mark.parametrize("progressive", GOES_ON, ids=str)
@pytest.mark.parametrize("repair", WAYS)
@torch.no_grad()
def test_a_repair(repair: str, progressive: Any, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle.Idle, "begin", lambda *given: None)  # nothing but what is asked for
    store = store_with_documents(model)
    cache, found, work = asked_twice(model, store, repair, progressive)
    report = cache.report
    assert report.moved_tokens == MOVED
    assert 0 <= report.recomputed_tokens <= MOVED // 3
    assert report.forwarded_tokens + report.repaired_tokens + STEPS - 1 == work.tokens
    measured = repair in ("auto", "cacheblend")  # which compute all tokens in the first layers, and there are two
    if not measured:
        assert report.forwarded_tokens <= HEAD + TAIL + report.recomputed_tokens + TAIL  # the end may go through twice
    off = off_from_plain(model, found)
    assert measured or off[0] > 1e-3
    if progressive is True or progressive == 64:
        assert BEHIND - report.recomputed_tokens <= report.repaired_tokens <= BEHIND + STEPS
        assert max(off[-4:]) < 1e-4
        assert cache.repair() == 0
    else:  # no token is free on a CPU, and seams are not dense enough to ride where nobody asks for it
        assert measured or max(off[-4:]) > 1e-4
        exact = ChunkReuseCache(model, store)
        assert exact.stored_tokens(prompt([2, 0, 3, 1])) <= HEAD  # what has moved is nobody's history
        assert cache.repair() > 0
    require_exact(model, store, cache, found)


@pytest.mark.parametrize("repair", [name for name in WAYS if name not in ("none", "selective")])
@torch.no_grad()
def test_a_repair_of_all_is_plain_at_once(repair: str, model: PreTrainedModel) -> None:
    store = store_with_documents(model)
    cache, found, _ = asked_twice(model, store, repair, False, ratio=1.0)
    assert cache.report.recomputed_tokens == MOVED
    assert max(off_from_plain(model, found)) < 1e-4


@torch.no_grad()
def test_a_repair_that_computes_nothing_is_noticed(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: what has moved stays, and only says that it does not."""
    monkeypatch.setattr(idle.Idle, "begin", lambda *given: None)
    store = store_with_documents(model)
    cache, found, _ = asked_twice(model, store, "none", False)
    assert idle_of(cache).wait(30)
    longer = as_inputs(torch.cat([found.sequences, random_ids(30, seed=4)], dim=1))
    with pytest.raises(AssertionError):
        assert_same(generate(model, longer, cache), generate(model, longer))
    with pytest.raises(AssertionError):
        require_exact(model, store, cache, found)
