"""K/V of heads is kept beside that of the text: a warm prompt costs them its new columns, and drafts are as cold."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost_hf import (
    ChunkReuseCache,
    ChunkStore,
    DraftTreeConfig,
    ReusePolicy,
    TreeDecoding,
    attach,
    check_model_compatibility,
    last_cache,
    load_assistant,
    speculation_stats,
)
from tests import eagle, mtp
from tests.conftest import make_model, random_ids
from tests.internals.cache import HeadKV
from tests.parity.test_loading import blobs, flip
from tests.parity.test_own_heads import make_blocks

PROMPT = random_ids(150, seed=3)
NEW = 30
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
TREES = DraftTreeConfig(policy="tree", depth=4, width=3, branching=3, max_nodes=20)
CHAINS: dict[str, Any] = {"schedule": "constant", "num_assistant_tokens": 4}
KINDS = {  # and how many tokens behind a column its K/V depends on
    "eagle": 1,
    "eagle gemma2": 1,
    "glm4_moe": 1,
    "glm4_moe 2": 2,
    "deepseek_v3": 1,
    "mimo_v2_flash": 1,
    "blocks": 0,
    "blocks gemma2": 0,
}


class Columns:
    """Counts the columns that heads are given, forward by forward, and may fail in one of them."""

    leaves_kv_alone = True  # read by the fingerprint: other hooks may change what heads compute

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.act: Callable[[int], None] = lambda forwards: None

    def note(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The hook."""
        self.act(len(self.counts))
        given = kwargs.get("context_hidden_states", kwargs.get("last_hidden_states", kwargs.get("hidden")))
        self.counts.append(given.shape[1])

    @contextmanager
    def of(self, heads: Any) -> Iterator["Columns"]:
        """Counts within a `with` block."""
        handle = heads.register_forward_pre_hook(self.note, with_kwargs=True)
        try:
            yield self
        finally:
            handle.remove()


Pair = tuple[Any, Any]


def make_pair(kind: str, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Pair:
    """A model, and heads for it, of other weights for another `seed`."""
    family, _, rest = kind.partition(" ")
    if family == "eagle":
        model: Any = eagle.make_target(rest or "llama").to(dtype)
        weights = eagle.weights_of(model)
        if seed:
            weights["fc.weight"] = weights["fc.weight"] * 3
        folder = eagle.save_heads(
            folder / f"heads of {seed}",
            {name: each.to(dtype) if each.is_floating_point() else each for name, each in weights.items()},
        )
        heads: Any = load_assistant(str(folder), target=model, **CHAINS)
    elif family == "blocks":
        model = make_model(rest or "deep_llama")
        torch.nn.Module.to(model, dtype)
        blocks = make_blocks(model, [0, 1]).to(dtype)
        for each in blocks.parameters():
            each.data *= 1 + seed
        heads = load_assistant(blocks, target=model)
    else:
        model = mtp.make_target(family, int(rest or 1))
        torch.nn.Module.to(model, dtype)
        with pytest.MonkeyPatch.context() as patched:
            layers: Any = mtp.use_layers(model, patched)
            for layer in layers.layers:
                layer.to(dtype)
                layer.eh_proj.weight.data *= 1 + seed
            heads = load_assistant(model)
    check_model_compatibility(model)
    return model, heads


Drafted = tuple[torch.Tensor, tuple[int, int], list[int]]


def drafted(pair: Pair, prompt: torch.Tensor = PROMPT, **given: Any) -> Drafted:
    """An answer, how many tokens heads have drafted for it and how many of them are in it, and columns of forwards."""
    model, heads = pair
    stats, columns = speculation_stats(heads), Columns()
    before = stats.drafted, stats.accepted
    given = {"assistant_model": heads, **GREEDY, **given}
    with columns.of(heads):
        answer = model.generate(prompt, **given)
    return answer, (stats.drafted - before[0], stats.accepted - before[1]), columns.counts


@pytest.fixture(params=list(KINDS))
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Any, int]:
    return *make_pair(request.param, tmp_path), KINDS[request.param]


def test_a_warm_prompt_costs_heads_its_new_columns(pair: tuple[Any, Any, int]) -> None:
    """The same prompt, longer ones, ones that part, in other caches and the same one: the drafts of no cache."""
    model, heads, shift = pair
    least, store = max(shift, 1), ChunkStore(model, chunk_size=32)
    longer, parted = torch.cat([PROMPT, random_ids(40, seed=9)], 1), torch.cat([PROMPT[:, :77], random_ids(60)], 1)
    kept = ChunkReuseCache(model, store)
    for prompt, known, cache in (
        (PROMPT, 0, None),
        (PROMPT, 150, None),
        (longer, 150, None),
        (PROMPT[:, :97], 96, None),
        (PROMPT[:, :96], 96, kept),
        (parted, 77, kept),
        (parted, 137, "attached"),
    ):
        plain = model.generate(prompt, **GREEDY)
        answer, counts, cold = drafted((model, heads), prompt)
        assert torch.equal(answer, plain)
        assert cold[0] == prompt.shape[1]
        if cache == "attached":
            attach(model, store)
            given = {}
        else:
            given = {"cache": cache or ChunkReuseCache(model, store)}
        answer, again, warm = drafted((model, heads), prompt, **given)
        assert torch.equal(answer, plain)
        assert again == counts
        assert warm[0] == max(least, prompt.shape[1] - known + shift) if known else prompt.shape[1]
        assert warm[1:] == cold[1:]
        used = last_cache(model) if cache == "attached" else given["cache"]
        assert used is not None
        assert used.report.bypass_reason is None
    store.check_consistency()
    assert store.check_integrity().wrong == 0


def test_a_conversation_in_trees(pair: tuple[Any, Any, int]) -> None:
    """Each turn costs heads what is new, and less than a chunk of the last answer."""
    model, heads, shift = pair
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
        assert computed <= text.shape[1] - before + 16 + shift
        before = text.shape[1] + NEW - 1
        text = torch.cat([plain, random_ids(10, seed=turn)], dim=1)


def test_what_is_served_matters(pair: tuple[Any, Any, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tests above would show little: other K/V gives other drafts, and the same answer."""
    model, heads, _ = pair
    store, seen = ChunkStore(model, chunk_size=32), list[Any]()
    for spoil in (None, None, lambda each: each.flip(2) * 5 + 1):
        with monkeypatch.context() as patched:

            def spoiled(self: HeadKV, ids: Any, limit: int, find: Any = HeadKV.find, spoil: Any = spoil) -> Any:
                found = find(self, ids, limit)
                return [spoil(each) for each in found] if spoil is not None and found is not None else found

            patched.setattr(HeadKV, "find", spoiled)
            logits = list[torch.Tensor]()
            trees = TreeDecoding(heads, TREES)
            answer = model.generate(PROMPT, **GREEDY, custom_generate=trees, cache=ChunkReuseCache(model, store))
        assert torch.equal(answer, model.generate(PROMPT, **GREEDY))
        seen.append((trees.stats.drafted, trees.stats.accepted, dict(trees.stats.histogram)))
    assert seen[1] == seen[0]
    assert seen[2] != seen[0] or not seen[0][1] or logits == []


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
            stock = drafted((model, drafts))
            cache = ChunkReuseCache(model, store)
            found = drafted((model, drafts), cache=cache)
            assert torch.equal(found[0], stock[0])
            assert found[1] == stock[1]
            assert found[2][0] == columns
            assert cache.report.forwarded_tokens <= max(forwarded, 8)
        with torch.no_grad():
            next(parameter for name, parameter in heads.named_parameters() if "fc" in name or "eh_proj" in name).mul_(
                1.5
            )
        stock = drafted((model, heads))
        for columns in (150, 1):
            found = drafted((model, heads), cache=ChunkReuseCache(model, store))
            assert (found[1], found[2][0]) == (stock[1], columns)


@pytest.mark.usefixtures("loading_is_worth_it")
@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize("kind", ["eagle", "glm4_moe 2", "deepseek_v3", "blocks"])
def test_they_outlive_the_process(kind: str, codec: str, disk: str, tmp_path: Path) -> None:
    """From the disk tier, by objects of the same weights. Others find nothing, and nobody does after clear()."""
    seen, shift = [], KINDS[kind]
    for seed, known in ((0, False), (0, True), (1, False), (0, True)):
        model, heads = make_pair(kind, tmp_path, seed=seed)
        with ChunkStore(model, chunk_size=32, tiers=[disk], codec=codec) as store:
            cache = ChunkReuseCache(model, store)
            answer, counts, columns = drafted((model, heads), cache=cache)
        assert columns[0] == (max(shift, 1) if known else 150)
        if codec == "raw":
            assert torch.equal(answer, model.generate(PROMPT, **GREEDY))
            seen.append((seed, counts))
    assert len(set(seen)) <= 2
    model, heads = make_pair(kind, tmp_path)
    with ChunkStore(model, chunk_size=32, tiers=[disk], codec=codec) as store:
        for known in (True, False):
            cache = ChunkReuseCache(model, store)
            *_, columns = drafted((model, heads), cache=cache)
            assert columns[0] == (max(shift, 1) if known else 150)
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
            answer, counts, columns = drafted((model, heads), cache=ChunkReuseCache(model, store))
        assert torch.equal(answer, plain)
        assert counted is None or counts == counted
        counted = counts
        assert not stored or columns[0] > 1
        for path in blobs(tmp_path):
            flip(path, at)


_KILLED = """
import os, signal, sys
from pathlib import Path
from kvboost_hf import ChunkReuseCache, ChunkStore
from tests.parity.test_head_kv import GREEDY, PROMPT, Columns, make_pair

model, heads = make_pair("eagle", Path(sys.argv[2]))
columns, store = Columns(), ChunkStore(model, chunk_size=16, tiers=[sys.argv[1]])
columns.act = lambda forwards: os.kill(os.getpid(), signal.SIGKILL) if forwards == int(sys.argv[3]) else None
with columns.of(heads):
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
    plain, stock = model.generate(PROMPT, **GREEDY), drafted((model, heads))
    with ChunkStore(model, chunk_size=16, tiers=[disk]) as store:
        for _ in range(2):
            found = drafted((model, heads), cache=ChunkReuseCache(model, store))
            assert torch.equal(found[0], plain)
            assert found[1] == stock[1]
        assert found[2][0] == 1 + 6  # tokens behind the last border, too few to be kept
        store.check_consistency()


def test_hooks_training_and_types(tmp_path: Path) -> None:
    """What may compute something else is computed whole, and the report says why."""
    model, heads = make_pair("eagle", tmp_path)
    store, stats = ChunkStore(model, chunk_size=32), speculation_stats(heads)

    def columns() -> int:
        return drafted((model, heads), cache=ChunkReuseCache(model, store))[2][0]

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


@pytest.mark.parametrize("kind", ["eagle", "glm4_moe 2", "blocks"])
def test_half_precision(kind: str, tmp_path: Path) -> None:
    model, heads = make_pair(kind, tmp_path, dtype=torch.bfloat16)
    store, seen = ChunkStore(model, chunk_size=32), []
    for known in (False, True, True):
        cache = ChunkReuseCache(model, store)
        _, counts, columns = drafted((model, heads), cache=cache)
        assert columns[0] == (max(KINDS[kind], 1) if known else 150)
        seen.append(counts)
    assert seen[2] == seen[1]


@pytest.mark.parametrize("kind", ["eagle", "glm4_moe", "blocks"])
def test_what_ends_a_call_in_the_middle(kind: str, tmp_path: Path) -> None:
    """An interrupt in any forward of the heads, a token that ends the text: what is kept then is as it should be."""
    model, heads = make_pair(kind, tmp_path)
    store, plain = ChunkStore(model, chunk_size=16), model.generate(PROMPT, **GREEDY)
    stock = drafted((model, heads))
    for fails_at in (0, 1, 5):
        columns = Columns()

        def fail(forwards: int, at: int = fails_at) -> None:
            if forwards == at:
                raise KeyboardInterrupt

        columns.act, cache = fail, ChunkReuseCache(model, store)
        with columns.of(heads), pytest.raises(KeyboardInterrupt):
            model.generate(PROMPT, **GREEDY, assistant_model=heads, cache=cache)
        for use in (cache, ChunkReuseCache(model, store)):
            found = drafted((model, heads), cache=use)
            assert torch.equal(found[0], plain)
            assert found[1] == stock[1]
    ended: dict[str, Any] = {"eos_token_id": int(plain[0, 157]), "pad_token_id": 0}
    expected = model.generate(PROMPT, **GREEDY, **ended)
    found = drafted((model, heads), **ended, cache=ChunkReuseCache(model, store))
    assert torch.equal(found[0], expected)
    longer = torch.cat([plain, random_ids(20, seed=2)], 1)
    stock = drafted((model, heads), longer)
    found = drafted((model, heads), longer, cache=ChunkReuseCache(model, store))
    assert (torch.equal(found[0], stock[0]), found[1]) == (True, stock[1])
    store.check_consistency()


@pytest.mark.slow
def test_edges(tmp_path: Path) -> None:
    """Prompts of every length about a border, a store of two chunks, moved chunks, and clear() in mid-answer."""
    model, heads = make_pair("eagle", tmp_path)
    store = ChunkStore(model, chunk_size=32)
    for length in (1, 2, 15, 16, 17, 31, 32, 33, 34, 63, 64, 65, 66):
        prompt = PROMPT[:, :length]
        stock = drafted((model, heads), prompt)
        for _ in range(2):
            found = drafted((model, heads), prompt, cache=ChunkReuseCache(model, store))
            assert torch.equal(found[0], stock[0])
            assert found[1] == stock[1]
        short = length % 32 if length % 32 < 8 else 0  # a tail that is not kept
        assert found[2][0] == min(length, 1 + short)
    tight = ChunkStore(model, chunk_size=32, max_bytes=2 * 65_000)
    moved = ReusePolicy(mode="blend", min_prefill_saving=0)
    for which, policy in ((tight, None), (store, moved), (store, moved)):
        for prompt in (PROMPT, torch.cat([random_ids(20, seed=9), PROMPT], dim=1)):
            stock = drafted((model, heads), prompt)
            cache = ChunkReuseCache(model, which, policy)
            found = drafted((model, heads), prompt, cache=cache)
            assert (torch.equal(found[0], stock[0]), found[1]) == (True, stock[1])
        which.check_consistency()
    columns = Columns()
    columns.act = lambda forwards: store.clear() if forwards == 9 else None
    with columns.of(heads):
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
        found = drafted((model, heads), use_mtp=True, cache=ChunkReuseCache(model, store), assistant_model=None)
        assert torch.equal(found[0], plain)
        assert found[2][0] == columns
