"""K/V of heads in stores and tiers: what outlives a process, what is damaged, and whose it is."""

import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvboost_hf import ChunkReuseCache, ChunkStore, ReusePolicy, TreeDecoding, load_assistant, speculation_stats
from tests.conftest import left_pad, make_model, random_ids
from tests.heads import CHAINS, GREEDY, KINDS, NEW, PROMPT, TREES, Pair, drafted, make_pair, watched
from tests.parity.test_loading import blobs, flip


@pytest.mark.parametrize("kind", [kind for kind, behind in KINDS.items() if behind is not None])
def test_a_conversation_in_trees(kind: str, tmp_path: Path) -> None:
    """Each turn costs heads what is new, and less than a chunk of the last answer."""
    (model, heads), behind = make_pair(kind, tmp_path), KINDS[kind]
    assert behind is not None
    store, text = ChunkStore(model, chunk_size=16), PROMPT[:, :70]
    before = 0
    for turn in range(3):
        given: dict[str, Any] = {**GREEDY, "attention_mask": torch.ones_like(text)}  # tokens that pad are text, too
        plain = model.generate(text, **given)
        trees, stock, stats = TreeDecoding(heads, TREES), TreeDecoding(heads, TREES), speculation_stats(heads)
        model.generate(text, **given, custom_generate=stock)
        reused, computed = stats.text_reused, stats.text_computed
        cache = ChunkReuseCache(model, store)
        assert torch.equal(model.generate(text, **given, custom_generate=trees, cache=cache), plain)
        assert (trees.stats.accepted, trees.stats.drafted) == (stock.stats.accepted, stock.stats.drafted)
        reused, computed = stats.text_reused - reused, stats.text_computed - computed
        assert reused + computed == text.shape[1]
        assert computed <= text.shape[1] - before + 16 + behind
        before = text.shape[1] + NEW - 1
        text = torch.cat([plain, random_ids(10, seed=turn)], dim=1)


@pytest.mark.slow
def test_stored_before_and_by_other_heads(tmp_path: Path) -> None:
    """A text that was stored without costs the target nothing, and other heads never find what these have computed."""
    for kind in ("eagle", "glm4_moe", "blocks"):
        model, heads = make_pair(kind, tmp_path)
        store = ChunkStore(model, chunk_size=32)
        other = make_pair(kind, tmp_path, seed=1)[1] if kind != "glm4_moe" else None
        first = (
            heads
            if other is None
            else load_assistant(other, target=model)
            if kind == "blocks"
            else load_assistant(str(tmp_path / "heads of 1"), target=model, **CHAINS)
        )
        for drafts, forwarded, columns in (
            (first, 150, 150),
            (heads, 1, 150 if other is not None else 1),
            (heads, 1, 1),
        ):
            stock = drafted(Pair(model, drafts))
            cache = ChunkReuseCache(model, store)
            found = drafted(Pair(model, drafts), cache=cache)
            assert torch.equal(found.answer, stock.answer)
            assert found.counts == stock.counts
            assert found.rounds.columns[0] == columns
            assert cache.report.forwarded_tokens <= max(forwarded, 8)
        with torch.no_grad():
            next(parameter for name, parameter in heads.named_parameters() if "fc" in name or "eh_proj" in name).mul_(
                1.5
            )
        stock = drafted(Pair(model, heads))
        for columns in (150, 1):
            found = drafted(Pair(model, heads), cache=ChunkReuseCache(model, store))
            assert (found.counts, found.rounds.columns[0]) == (stock.counts, columns)


@pytest.mark.usefixtures("loading_is_worth_it")
@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize("kind", ["eagle", "glm4_moe 2", "deepseek_v3", "blocks"])
def test_they_outlive_the_process(kind: str, codec: str, disk: str, tmp_path: Path) -> None:
    """From the disk tier, by objects of the same weights. Others find nothing, and nobody does after clear()."""
    seen, least = [], max(KINDS.get(kind) or 0, 1)
    for seed, known in ((0, False), (0, True), (1, False), (0, True)):
        model, heads = make_pair(kind, tmp_path, seed=seed)
        with ChunkStore(model, chunk_size=32, tiers=[disk], codec=codec) as store:
            cache = ChunkReuseCache(model, store)
            answer, counts, rounds, _ = drafted(Pair(model, heads), cache=cache)
        assert rounds.columns[0] == (least if known else 150)
        if codec == "raw":
            assert torch.equal(answer, model.generate(PROMPT, **GREEDY))
            seen.append((seed, counts))
    assert len(set(seen)) <= 2
    model, heads = make_pair(kind, tmp_path)
    with ChunkStore(model, chunk_size=32, tiers=[disk], codec=codec) as store:
        for known in (True, False):
            cache = ChunkReuseCache(model, store)
            rounds = drafted(Pair(model, heads), cache=cache).rounds
            assert rounds.columns[0] == (least if known else 150)
            cache.begin_anew()
            store.clear()
            assert store.stats()["chunks"] == 0


@pytest.mark.usefixtures("loading_is_worth_it")
@pytest.mark.parametrize("at", [0.3, 0.999])
def test_damaged_blobs_are_computed_again(at: float, disk: str, tmp_path: Path) -> None:
    plain, counted = None, None
    for stored in (False, True, False):
        model, heads = make_pair("eagle", tmp_path)
        plain = model.generate(PROMPT, **GREEDY) if plain is None else plain
        with ChunkStore(model, chunk_size=32, tiers=[disk]) as store:
            answer, counts, rounds, _ = drafted(Pair(model, heads), cache=ChunkReuseCache(model, store))
        assert torch.equal(answer, plain)
        assert counted is None or counts == counted
        counted = counts
        assert not stored or rounds.columns[0] > 1
        for path in blobs(tmp_path):
            flip(path, at)


_KILLED = """
import os, signal, sys
from pathlib import Path
from kvboost_hf import ChunkReuseCache, ChunkStore
from tests.heads import GREEDY, PROMPT, make_pair, watched

model, heads = make_pair("eagle", Path(sys.argv[2]))
store = ChunkStore(model, chunk_size=16, tiers=[sys.argv[1]])
with watched(heads) as rounds:
    rounds.act = lambda forwards: os.kill(os.getpid(), signal.SIGKILL) if forwards == int(sys.argv[3]) else None
    model.generate(PROMPT, **GREEDY, assistant_model=heads, cache=ChunkReuseCache(model, store))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("loading_is_worth_it")
@pytest.mark.parametrize("forwards", [1, 20])
def test_a_kill_between_writes(forwards: int, disk: str, tmp_path: Path) -> None:
    """Whatever was written by then, the next process drafts as ever."""
    killed = subprocess.run([sys.executable, "-W", "ignore", "-c", _KILLED, disk, str(tmp_path), str(forwards)])
    assert killed.returncode == -9
    model, heads = make_pair("eagle", tmp_path)
    plain, stock = model.generate(PROMPT, **GREEDY), drafted(Pair(model, heads))
    with ChunkStore(model, chunk_size=16, tiers=[disk]) as store:
        for _ in range(2):
            found = drafted(Pair(model, heads), cache=ChunkReuseCache(model, store))
            assert torch.equal(found.answer, plain)
            assert found.counts == stock.counts
        assert found.rounds.columns[0] == 1 + 6  # tokens behind the last border, too few to be kept
        store.check_consistency()


def test_hooks_training_and_types(tmp_path: Path) -> None:
    """What may compute something else is computed whole, and the report says why."""
    model, heads = make_pair("eagle", tmp_path)
    store, stats = ChunkStore(model, chunk_size=32), speculation_stats(heads)

    def columns() -> int:
        return drafted(Pair(model, heads), cache=ChunkReuseCache(model, store)).rounds.columns[0]

    assert (columns(), stats.text_reason) == (150, None)
    handle = heads.fc.register_forward_hook(lambda module, args, output: output * 1.5)
    for _ in range(2):
        assert columns() == 150
        assert "hooks, or functions of others" in (stats.text_reason or "")
    handle.remove()
    heads.train()
    assert columns() == 150
    assert "training mode" in (stats.text_reason or "")
    heads.eval()
    assert (columns(), stats.text_reason) == (1, None)
    heads.to(torch.bfloat16)
    for expected in (150, 1):
        assert (columns(), stats.text_reason) == (expected, None)
    heads.to(torch.float32)
    reproducible = ChunkReuseCache(model, store, ReusePolicy(reproducible=True))
    found = model.generate(PROMPT, **GREEDY, assistant_model=heads, cache=reproducible)
    assert "computed in pieces" in (stats.text_reason or "")
    assert torch.equal(found, model.generate(PROMPT, **GREEDY))


def test_edges(tmp_path: Path) -> None:
    """Prompts of every length about a border, a store of two chunks, moved chunks, and clear() in mid-answer."""
    model, heads = make_pair("eagle", tmp_path)
    store = ChunkStore(model, chunk_size=32)
    for length in (1, 2, 15, 16, 17, 31, 32, 33, 34, 63, 64, 65, 66):
        prompt = PROMPT[:, :length]
        stock = drafted(Pair(model, heads), prompt)
        for _ in range(2):
            found = drafted(Pair(model, heads), prompt, cache=ChunkReuseCache(model, store))
            assert torch.equal(found.answer, stock.answer)
            assert found.counts == stock.counts
        short = length % 32 if length % 32 < 8 else 0  # a tail that is not kept
        assert found.rounds.columns[0] == min(length, 1 + short)
    tight = ChunkStore(model, chunk_size=32, max_bytes=2 * 65_000)
    moved = ReusePolicy(mode="blend", min_prefill_saving=0)
    for which, policy in ((tight, None), (store, moved), (store, moved)):
        for prompt in (PROMPT, torch.cat([random_ids(20, seed=9), PROMPT], dim=1)):
            stock = drafted(Pair(model, heads), prompt)
            cache = ChunkReuseCache(model, which, policy)
            found = drafted(Pair(model, heads), prompt, cache=cache)
            assert (torch.equal(found.answer, stock.answer), found.counts) == (True, stock.counts)
        which.check_consistency()
    with watched(heads) as rounds:
        rounds.act = lambda forwards: store.clear() if forwards == 9 else None
        answer = model.generate(PROMPT, **GREEDY, assistant_model=heads, cache=ChunkReuseCache(model, store))
    assert torch.equal(answer, model.generate(PROMPT, **GREEDY))
    store.check_consistency()


@torch.no_grad()
def test_rows_that_a_cache_does_not_have() -> None:
    """Nor has any more, where other rows go on without it."""
    model, heads = make_model("llama"), make_model("llama", seed=1)
    cache, rows = ChunkReuseCache(model, ChunkStore(model, chunk_size=32)), random_ids(64, batch=2)
    model(rows, past_key_values=cache, logits_to_keep=1)
    kept = [cache.loans.head_kv(heads, lambda: [torch.zeros(1, 2, 1, 8)], row) for row in range(3)]
    for row, each in enumerate(kept):
        assert each.find(rows[min(row, 1)].numpy(), 63) is None
    assert [each.reason is None for each in kept] == [True, True, False]
    cache.batch_select_indices(torch.tensor([0]))
    for row, each in enumerate(kept[:2]):
        each.offer(rows[row].numpy(), lambda start, stop: [torch.zeros(1, 2, stop - start, 8)], 0, tail=True)
    assert [each.reason is None for each in kept] == [True, False, False]


@torch.no_grad()
def test_what_is_offered_of_a_text() -> None:
    """As far as the cache holds it, by heads that are as they were; else nothing, and it is said why."""
    model, heads = make_model("llama"), make_model("llama", seed=1)
    long, short = random_ids(64, seed=2), random_ids(56, seed=3)
    ids = np.append(short[0].numpy(), 7)  # one more than the cache holds

    def read(start: int, stop: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        return [torch.arange(start, stop, dtype=dtype)[None, None, :, None].expand(1, 2, -1, 8)]

    def keeping(store: ChunkStore) -> Any:
        cache = ChunkReuseCache(model, store, ReusePolicy(min_prefill_saving=0))
        model.generate(**left_pad(long, short), max_new_tokens=1, past_key_values=cache)
        return cache.loans.head_kv(heads, lambda: read(0, 1), 1)

    store = ChunkStore(model, chunk_size=16)
    for known, tail in ((0, False), (48, True), (56, True)):
        kept = keeping(store)
        kept.offer(ids, read, 0, tail=True)  # before it was looked for: it is left alone
        found = kept.find(ids, 57)
        assert (0 if found is None else found[0].shape[2]) == known
        if found is not None:
            assert torch.equal(found[0], read(0, known)[0])
        kept.offer(ids, read, 0, tail=tail)
        assert kept.reason is None
    for length, tail, too_short in ((7, True, True), (8, True, False), (15, False, True), (16, False, False)):
        kept = keeping(ChunkStore(model, chunk_size=16))
        kept.find(ids, 57)
        kept.offer(ids[:length], read, 0, tail=tail)  # not the text that the cache holds
        assert (kept.reason is None) is too_short
    for case, reason in (
        ("left", "columns have left the window"),
        ("type", "the heads have changed, or compute in another type"),
        ("weights", "the heads have changed, or compute in another type"),
        ("cleared", "the store keeps nothing of this text"),
    ):
        store = ChunkStore(model, chunk_size=16)
        kept = keeping(store)
        assert kept.find(ids, 57) is None
        if case == "cleared":
            store.clear()
        if case == "weights":
            heads.lm_head.weight.data += 1
        form = torch.bfloat16 if case == "type" else torch.float32
        kept.offer(ids, partial(read, dtype=form), int(case == "left"), tail=True)
        assert str(kept.reason).startswith(reason)


def test_a_thread_for_each_request(tmp_path: Path) -> None:
    model, heads = make_pair("glm4_moe", tmp_path)
    store, prompts = ChunkStore(model, chunk_size=16), [random_ids(60 + 7 * n, seed=n % 3) for n in range(6)]
    plain, answers = [model.generate(each, **GREEDY) for each in prompts], dict[int, torch.Tensor]()

    def ask(number: int) -> None:
        for _ in range(2):
            cache = ChunkReuseCache(model, store)
            answers[number] = model.generate(
                prompts[number], **GREEDY, custom_generate=TreeDecoding(heads, TREES), cache=cache
            )

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(prompts))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert all(torch.equal(answers[number], plain[number]) for number in range(len(prompts)))
    assert speculation_stats(heads).text_reused > 0
    store.check_consistency()


def test_use_mtp_takes_layers_that_were_loaded(tmp_path: Path) -> None:
    model, heads = make_pair("glm4_moe", tmp_path)
    store, plain = ChunkStore(model, chunk_size=32), model.generate(PROMPT, **GREEDY)
    for columns in (150, 1):
        found = drafted(Pair(model, heads), use_mtp=True, cache=ChunkReuseCache(model, store), assistant_model=None)
        assert torch.equal(found.answer, plain)
        assert found.rounds.columns[0] == columns
