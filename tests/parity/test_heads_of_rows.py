"""Heads draft for the rows of a batch: each row says what it says under plain generate(), with drafts of its own."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost_hf import ChunkReuseCache, ChunkStore, DraftTreeConfig, TreeDecoding, speculation_stats
from tests.conftest import PAD
from tests.heads import TREES, make_pair
from tests.internals.assisted import Account, Branches, PassTimes, eagle_drafts, head_kinds
from tests.parity.test_drafts_of_rows import UNEVEN, batch

CHAINS = DraftTreeConfig(policy="tree", branching=1, width=1, depth=3)
KINDS = ["eagle gemma2", "glm4_moe 2", "mimo_v2_flash", "blocks", "gemma4 text", "gemma4 shares"]


@pytest.mark.daily
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_warm_prompts(kind: str, tmp_path: Path) -> None:
    """Rows of unequal lengths and ends, without a cache, cold and warm: the same drafts, and less to take in."""
    model, heads = make_pair(kind, tmp_path)
    told: dict[str, Any] = {**batch((60, 7, 33, 1, 48)), "max_new_tokens": 17, "pad_token_id": PAD}
    free = model.generate(**told, eos_token_id=None)
    told["eos_token_id"] = [int(free[0, -9]), int(free[3, -4])]
    wanted, stats = model.generate(**told), speculation_stats(heads)
    assert (wanted[:, -17:] == PAD).any()
    store, seen, taken_in = ChunkStore(model, chunk_size=16), list[Any](), list[int]()
    for cache in (None, ChunkReuseCache(model, store), ChunkReuseCache(model, store)):
        trees, before = TreeDecoding(heads, TREES), stats.text_computed
        assert torch.equal(model.generate(**told, custom_generate=trees, past_key_values=cache), wanted)
        seen.append((trees.stats.drafted, trees.stats.histogram))
        taken_in.append(stats.text_computed - before)
    assert seen[0] == seen[1] == seen[2]
    assert cache is not None
    assert cache.report.forwarded_tokens < 60
    if not kind.startswith("gemma4"):
        assert taken_in[0] == taken_in[1] == 149
        assert taken_in[2] < 60
    store.check_consistency()


@pytest.mark.parametrize("kind", KINDS)
def test_each_row_has_the_drafts_that_it_has_alone(kind: str, tmp_path: Path) -> None:
    model, heads = make_pair(kind, tmp_path)
    told = batch(UNEVEN)
    together, alone = TreeDecoding(heads, CHAINS), TreeDecoding(heads, CHAINS)
    given: dict[str, Any] = {"max_new_tokens": 16, "eos_token_id": None, "pad_token_id": PAD}
    found = model.generate(**told, **given, custom_generate=together)
    for row, length in enumerate(UNEVEN):
        ids, mask = (each[row : row + 1, -length:] for each in (told["input_ids"], told["attention_mask"]))
        mine = model.generate(ids, attention_mask=mask, **given, custom_generate=alone)
        assert torch.equal(mine[0, -16:], found[row, -16:])
    assert together.stats.histogram == alone.stats.histogram
    assert together.stats.drafted == alone.stats.drafted > 0


def test_hidden_states_of_other_rows_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: heads that read those of the row before draft something else, and rows say the same."""
    model, heads = make_pair("glm4_moe", tmp_path)
    told, seen = {**batch(UNEVEN), "max_new_tokens": 20}, []
    wanted, append = model.generate(**told), Branches._append

    def mistaken(self: Any, row: int, hidden: Any, at: torch.Tensor) -> None:
        append(self, row, {layer: each.roll(1, 0) for layer, each in dict(hidden).items()}, at)

    for wrong in (False, True):
        trees = TreeDecoding(heads, CHAINS)
        with monkeypatch.context() as patched:
            if wrong:
                patched.setattr(Branches, "_append", mistaken)
            assert torch.equal(model.generate(**told, custom_generate=trees), wanted)
        seen.append(trees.stats.histogram)
    assert seen[0] != seen[1]


class _Clock:
    """Time passes with what the model and its heads compute."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("kind", ["blocks", "glm4_moe", "eagle"])
@pytest.mark.parametrize("of_heads", [0.02, 0.2])
def test_never_two_percent_slower(kind: str, of_heads: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of the model takes 1 s, one of its heads a share of that, and each further token a hundredth.

    Those of blocks are never right, and those of the others often.
    """
    (model, heads), clock = make_pair(kind, tmp_path), _Clock()
    for part in (head_kinds, eagle_drafts):  # as by the layers of a larger model
        monkeypatch.setattr(part, "share_of", lambda *_: of_heads)
    told: dict[str, Any] = {**batch((12, 4, 9, 12)), "max_new_tokens": 90, "eos_token_id": None, "pad_token_id": PAD}
    wanted = model.generate(**told)

    def charge(share: float) -> Any:
        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            given = next(each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor))
            clock.now += share * (1.0 + 0.01 * (given.shape[0] * (given.shape[1] - 1)))

        hook.leaves_kv_alone = True  # type: ignore[attr-defined]
        return hook

    trees = TreeDecoding(heads, clock=clock)
    model.generate(**batch((3, 2)), max_new_tokens=1, custom_generate=trees)  # tries the model once
    hooks = [
        each.register_forward_hook(charge(share), with_kwargs=True)
        for each, share in ((model, 1.0), (heads, of_heads))
    ]
    try:
        clock.now = 0.0
        model.generate(**told)
        plain, took = clock.now, list[float]()
        for _ in range(3):
            clock.now = 0.0
            assert torch.equal(model.generate(**told, custom_generate=trees), wanted)
            took.append(clock.now)
            assert clock.now <= 1.02 * plain
        assert of_heads > 0.1 or took[0] != plain  # something was tried
        if kind == "glm4_moe" and of_heads == 0.02:
            assert took[-1] < 0.8 * plain
    finally:
        for each in hooks:
            each.remove()


def test_what_heads_have_to_take_in_is_weighed() -> None:
    """Before anything was measured by the layers, then by what it took; a long text waits until there is time."""
    times = PassTimes()
    times.learn_prompt(100, 1.0)
    account = Account(times, 2, 1000)
    assert not account.may_draft([(0.1, 1)])  # no plain pass is known
    account.note(0, 1, 0.0, 1.0)
    assert account.may_draft([(0.1, 1), (0.1, 1)])
    assert not account.may_draft([(0.4, 1), (0.4, 1)])
    assert account.may_draft([(0.1, 300), (0.1, 1)])  # 0.2 + 0.1 * 300 / 100
    assert not account.may_draft([(0.1, 400), (0.1, 1)])
    account.note(0, 1, 0.2, 1.0, [1, 1])
    account.note(0, 1, 0.3, 1.0, [100, 1])  # a thousandth of a second each
    account.note(0, 1, 0.2, 1.0, [1, 1])
    for _ in range(80):
        account.note(0, 1, 0.0, 1.0)
    assert account.may_draft([(0.1, 290), (0.1, 1)])
    assert not account.may_draft([(0.1, 900), (0.1, 1)])
