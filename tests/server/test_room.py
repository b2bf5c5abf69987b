"""Memory is planned before a request starts."""

import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvboost_hf import ChunkReuseCache, ChunkStore
from kvboost_hf.assets import load_embedded
from tests.conftest import make_model, random_ids
from tests.internals.compat import bytes_per_token
from tests.internals.server import BatchKV, MemoryPlans, ModelEngine, ServerSettings, _live_tokens, tokens_that_fit
from tests.internals.server import memory as room
from tests.server.conftest import Listening


class _Memory:
    available = 3 * 2**20


@torch.no_grad()
def test_tokens_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    monkeypatch.setattr(room.psutil, "virtual_memory", _Memory)  # type: ignore[attr-defined]
    twice = 2 * bytes_per_token(model)
    assert tokens_that_fit(model, safety_margin=0) == 3 * 2**20 // twice
    assert tokens_that_fit(model, make_model(), safety_margin=0) == 3 * 2**20 // (twice + twice // 2)
    assert tokens_that_fit(model, reserved=2**20, safety_margin=0.5) == 2**20 // twice
    with pytest.raises(
        ValueError, match=r"0\.0 GiB are free beside the 0\.0 GiB of the store, of which 15%.*max-cache-bytes"
    ):
        tokens_that_fit(model, reserved=2**22)
    with pytest.raises(ValueError, match="`safety_margin` must be"):
        tokens_that_fit(model, safety_margin=1.0)
    hybrid = make_model("falcon_h1")
    batch, cache = BatchKV(hybrid), ChunkReuseCache(hybrid)
    hybrid(random_ids(9), past_key_values=cache)
    batch.join([None] * len(cache.layers), [1], states=cache.loans.read_states())
    twice = 2 * bytes_per_token(hybrid)
    assert tokens_that_fit(hybrid, rows=4, safety_margin=0) == (3 * 2**20 - 2 * 4 * batch.nbytes) // twice
    with pytest.raises(ValueError, match=r"no memory for the states of 4000 requests: .*max-batch-size"):
        tokens_that_fit(hybrid, rows=4000)


def test_what_pytorch_keeps_on_a_gpu_and_does_not_use_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    monkeypatch.setattr(room, "input_device", lambda model: torch.device("cuda"))
    for name, told in (("memory_reserved", 2**20), ("memory_allocated", 2**18), ("mem_get_info", (2**21, 2**30))):
        monkeypatch.setattr(torch.cuda, name, lambda device, told=told: told)
    free = 2**21 + 2**20 - 2**18
    # What is taken of host memory, or promised to others, is none of a GPU's.
    found = tokens_that_fit(model, reserved=2**40, promised=2**40, safety_margin=0)
    assert found == free // (2 * bytes_per_token(model))


def test_prompts_without_room(serve: Callable[..., Listening]) -> None:
    """They are refused with a length that fits, or lose their beginning if that is asked for."""
    model, tokenizer = load_embedded()
    engine = ModelEngine(model, tokenizer, store=ChunkStore(model, chunk_size=16), max_live_tokens=48)
    asked: dict[str, Any] = {"model": "reader", "max_tokens": 8, "temperature": 0, "prompt": "The lamp is red. " * 20}
    try:
        refused = serve(engine).http.post("/v1/completions", json=asked)
        assert refused.status_code == 400
        assert refused.json()["error"]["max_prompt_tokens"] == 40
        cut = serve(engine, auto_truncate=True).http.post("/v1/completions", json=asked).json()
        assert cut["usage"]["prompt_tokens"] == 40
        ids = torch.tensor([tokenizer.encode(asked["prompt"])[-40:]])
        plain = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        assert cut["choices"][0]["text"].strip() == tokenizer.decode(plain[0, 40:], skip_special_tokens=True).strip()
    finally:
        engine.close()


def test_a_server_claims_what_its_store_and_its_requests_may_come_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    model, claimed = make_model(), list[int]()
    monkeypatch.setattr(MemoryPlans, "claim", lambda plans, nbytes: claimed.append(nbytes))
    store, per_token = ChunkStore(model, max_bytes=10**6), 2 * bytes_per_token(model)
    store.warm(random_ids(200))
    left = 10**6 - int(store.stats()["bytes"])
    for most, keys, longest in ((None, "", 500), (10, "", 20), (10, "a", 20), (10, "ab", 40)):  # of two requests
        limits: Any = {"max_live_tokens": 500, "max_batch_size": 2, "max_model_len": most}
        settings = ServerSettings(model_name="reader", api_keys=tuple(keys), **limits)
        assert _live_tokens(model, None, store, settings) == 500
        assert claimed.pop() == left + longest * per_token
    assert left < 10**6


def test_settings_that_are_none() -> None:
    for wrong in ({"max_live_tokens": 1}, {"safety_margin": 1.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ServerSettings(model_name="reader", **wrong)


def _claim(folder: Path, told: Connection) -> None:
    plans = MemoryPlans(folder)
    with plans.locked() as others:
        plans.claim(3 * 2**30)
    told.send(others)
    time.sleep(60)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_plans_know_of_other_servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What another process has promised itself and not used yet is not free; a plan ends with its process."""
    folder = tmp_path / "plans"
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    own = MemoryPlans(folder)
    with own.locked() as others:
        assert others == 0
        own.claim(2**30)
    other = context.Process(target=_claim, args=(folder, theirs))
    other.start()
    assert abs(ours.recv() - 2**30) < 2**28
    with own.locked() as others:
        assert abs(others - 3 * 2**30) < 2**28
    other.kill()
    other.join()
    with own.locked() as others:
        assert others == 0
    assert [path.name for path in folder.glob("plan-*")] == [f"plan-{os.getpid()}.json"]
    own.release()
    (folder / "plan-1.json").write_text("[nonsense")
    with own.locked() as others:
        assert others == 0
    folder.chmod(0o777)
    with own.locked() as others:  # anybody could write there
        assert others == 0
    memory = SimpleNamespace(available=4 * 2**30)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    model = make_model()
    every = tokens_that_fit(model, safety_margin=0)
    assert every is not None
    assert tokens_that_fit(model, promised=2**30, safety_margin=0) == every * 3 // 4
    with pytest.raises(ValueError, match=r"beside the 4\.0 GiB that other servers here may use"):
        tokens_that_fit(model, promised=2**32)
