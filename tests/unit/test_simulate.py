"""The simulation of many replicas, and that it does what the store does."""

import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvboost_hf import ChunkReuseCache, ChunkStore
from tests.conftest import make_model
from tests.internals.cache import Border, ComputePace, Put, plan_row

pytestmark = pytest.mark.daily

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
simulate = pytest.importorskip("simulate")
sys.path.pop(0)


@pytest.fixture(scope="module")
def trace() -> Any:
    return simulate.make_trace(1500, seed=1, tenants=20, chats=100)


def test_unlimited_room_reaches_the_bound(trace: Any) -> None:
    unlimited = simulate.simulate(trace, 1, simulate.Room(0, None), "prefix")["hit"]
    assert unlimited == pytest.approx(simulate.best(trace, None))
    assert 0.3 < unlimited < 1
    little = simulate.simulate(trace, 1, simulate.Room(0, 256), "prefix")["hit"]
    assert little < simulate.best(trace, 256) < unlimited


def test_prefixes_beat_turns_within_the_bound_of_loads(trace: Any) -> None:
    room = simulate.Room(32, 256)
    found = {name: simulate.simulate(trace, 16, room, name) for name in simulate.ROUTINGS}
    assert found["prefix"]["hit"] > 1.2 * found["round-robin"]["hit"]
    assert found["prefix"]["load"] <= 1 < found["round-robin"]["load"]
    assert found["events"]["hit"] > found["prefix"]["hit"]
    assert found["events"]["load"] <= 1
    most = 1.5  # what is bounded is under way; requests of a short trace take unequal times
    assert found["prefix"]["share"] <= most
    assert found["prefix"]["hit"] <= simulate.best(trace, 16 * 256)
    wide = simulate.simulate(trace, 16, room, "prefix", load_factor=8)
    assert wide["share"] > most


def test_a_shared_tier_serves_what_others_stored(trace: Any) -> None:
    alone = simulate.simulate(trace, 4, simulate.Room(32, 256), "round-robin")
    shared = simulate.simulate(trace, 4, simulate.Room(32, 256, 0, None), "round-robin")
    assert alone["remote"] == 0 < shared["remote"]
    assert shared["hit"] == pytest.approx(simulate.best(trace, None))


def test_the_seed_decides_all(trace: Any) -> None:
    room = simulate.Room(32, 256, 512, 2048)
    again = simulate.make_trace(1500, seed=1, tenants=20, chats=100)
    other = simulate.make_trace(1500, seed=2, tenants=20, chats=100)
    first = simulate.simulate(trace, 4, room, "least-loaded")
    assert simulate.simulate(again, 4, room, "least-loaded") == first
    assert simulate.simulate(other, 4, room, "least-loaded") != first


@pytest.mark.parametrize("wrong", ["--requests=0", "--replicas=0", "--ram=-5", "--rooms=x", "--seed=-1"])
def test_numbers_that_are_none(
    wrong: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["simulate.py", "--out", "nowhere", wrong])
    with pytest.raises(SystemExit, match="2"):
        simulate.main()
    assert "or more, got" in capsys.readouterr().err


def test_a_trace_of_one_request() -> None:
    trace = simulate.make_trace(1)
    assert simulate.simulate(trace, 1, simulate.Room(), "prefix")["hit"] == simulate.best(trace, None) == 0


def test_host_memory_holds_what_a_store_holds() -> None:
    """Chunk by chunk, through `plan_row` and `ChunkStore.put`, which evicts by bytes."""
    rng = np.random.default_rng(0)
    heads, texts = rng.integers(0, 1000, (4, 16 * 2)), rng.integers(0, 1000, (24, 16 * 6))
    prompts = [np.concatenate([heads[i % 4], texts[i]]) for i in np.minimum(rng.zipf(1.3, 300), 24) - 1]
    kv: Any = simulate._Sized()
    store = ChunkStore(make_model(), chunk_size=16)
    store.max_bytes = 40 * (kv.nbytes + 16 * 8)
    replica = simulate.Replica(simulate.Room(0, 40), simulate._Lower(0))
    root, hits = b"root", 0
    for prompt in prompts:
        index = store.view(root, prompt)
        plan = plan_row(prompt, 0, Border(0, root), len(prompt), store.chunker, index)
        whole = [segment.chunk for segment in plan.segments if segment.stop - segment.start == 16]
        store.record_use(whole, missed=plan.miss is not None)  # type: ignore[arg-type]
        keys, parent = [], root
        for start in range(0, len(prompt), 16):
            tokens = prompt[start : start + 16]
            assert store.put(root, parent, start, tokens, kv.nbytes, lambda: kv) in (Put.STORED, Put.PRESENT)
            keys.append(parent := simulate.prefix_key(parent, tokens))
        assert len(replica.serve(keys)) == len(whole)
        hits += len(whole)
        assert dict(replica.order.parents()).keys() == store.inspect().chunks.keys()
    assert 0 < hits < len(prompts) * 8 - store.stats()["evictions"]
    assert store.stats()["evictions"] > 0


@pytest.mark.parametrize(("ram", "disk"), [(24, 64), (64, 400)])
def test_tiers_find_what_those_of_a_store_find(
    ram: int, disk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompt by prompt, through generate() with a store that has files on disk."""
    monkeypatch.setattr(ComputePace, "seconds_per_token", lambda self, model: 1.0)  # loading is always worth it
    model, rng = make_model("llama"), np.random.default_rng(0)
    heads, texts = rng.integers(3, 90, (4, 16 * 2)), rng.integers(3, 90, (24, 16 * 6))
    prompts = [np.concatenate([heads[i % 4], texts[i], [3]]) for i in rng.triangular(0, 0, 24, 80).astype(int)]

    def serve(store: ChunkStore, prompt: Any) -> Counter[str]:
        cache = ChunkReuseCache(model, store)
        model.generate(torch.tensor(prompt)[None], past_key_values=cache, do_sample=False, max_new_tokens=1)
        store.flush()
        return Counter({tier: tokens // 16 for tier, tokens in cache.report.tier_tokens.items() if tokens})

    def opened(name: str, ram_bytes: float, disk_bytes: float) -> Any:
        tiers = [f"ram:{int(ram_bytes)}B", f"disk:{tmp_path / name}:{int(disk_bytes)}B"]
        return closing(ChunkStore(model, chunk_size=16, tiers=tiers))

    with opened("sizes", 1e7, 1e7) as store:
        serve(store, prompts[0])
        nbytes = {name: tier["bytes"] / tier["chunks"] for name, tier in store.stats()["tiers"].items()}
    replica = simulate.Replica(simulate.Room(0, ram, disk), simulate._Lower(0))
    smaller = simulate.Replica(simulate.Room(0, ram, disk // 2), simulate._Lower(0))
    found, simulated, control = Counter[str](), Counter[str](), Counter[str]()
    same = 0
    with opened("tier", (ram + 0.5) * nbytes["ram"], (disk + 0.5) * nbytes["disk"]) as store:
        for prompt in prompts:
            root, keys = b"root", list[bytes]()
            for start in range(0, len(prompt) - 1, 16):
                keys.append(simulate.prefix_key(keys[-1] if keys else root, prompt[start : start + 16]))
            there, here = Counter(replica.serve(keys)), serve(store, prompt)
            control.update(smaller.serve(keys))
            same += here == there
            found += here
            simulated += there
    assert found["disk"] > 20
    assert same >= 0.9 * len(prompts)  # what comes back from disk comes when a thread has the time
    assert found.total() == pytest.approx(simulated.total(), rel=0.02)
    assert control.total() < 0.95 * found.total() or disk // 2 >= 24 * 6 + 8
