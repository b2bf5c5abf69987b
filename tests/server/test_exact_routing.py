"""A front knows what engines would serve: replicas in this process, each with a model's store, and fronts on HTTP."""

import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from kvboost_hf.assets import load_embedded
from tests.internals.cache import ComputePace
from tests.internals.server import (
    BELOW,
    MEMORY,
    FrontServer,
    ModelEngine,
    News,
    Place,
    PrefixRouter,
    front_app,
    make_app,
    prompt_keys,
    prompt_salt,
)
from tests.server.conftest import SETTINGS
from tests.server.test_front import Local
from tests.server.test_sessions import engine_of
from tests.server.wire import Wire, in_a_thread, until

CHUNK = 16
TEXTS = [f"Document {n}. " + f"Anna lives in house {n}. She plays the piano. The lamp is red. " * 14 for n in range(8)]


@pytest.fixture(scope="module")
def reader() -> tuple[Any, Any]:
    return load_embedded()


@pytest.fixture(autouse=True)
def _loading_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ComputePace, "seconds_per_token", lambda self, model: 1.0)


def body_of(text: str | list[str], **more: Any) -> bytes:
    return json.dumps({"model": "reader", "prompt": text, "max_tokens": 1, **more}).encode()


class Routed(Local):
    """Engines that are asked as a router ranks them; some do not answer a front's questions for news.

    Args:
        engines: By name.
        tokenizer: The tokenizer of all engines.
        router: That of the front.
    """

    def __init__(self, engines: dict[str, ModelEngine], tokenizer: Any, router: PrefixRouter) -> None:
        super().__init__({})
        self.engines, self.router, self.tokenizer = engines, router, tokenizer
        self.silent: set[str] = set()
        self.loads: dict[str, int] = {}

    async def ask(self, keys: Sequence[bytes], scope: dict[str, Any], body: bytes) -> AsyncIterator[Any]:
        loads = {name: self.loads.get(name, 0) for name in self.engines}
        name = self.router.rank(keys, loads)[0]
        self.router.routed(keys, name)
        self.asked.append(name)
        only = Local({name: make_app(self.engines[name], self.tokenizer, SETTINGS)})
        async for message in only.ask(keys, {**scope, "text_keys": keys}, body):
            yield message

    async def news(self, places: Mapping[str, Place]) -> list[News]:
        heard = [name for name in self.engines if name not in self.silent]
        return [self.engines[name].holdings.since(name, places.get(name)) for name in heard]


class Cluster:
    """Engines and fronts."""

    def __init__(self, stack: ExitStack, reader: tuple[Any, Any], count: int, **kept: Any) -> None:
        self.stack, self.reader, self.kept = stack, reader, kept
        self.engines = {f"r{n}": self.engine() for n in range(count)}

    def engine(self) -> ModelEngine:
        return self.stack.enter_context(engine_of(*self.reader, chunk_size=CHUNK, **self.kept))

    def front(self) -> tuple[Routed, Wire]:
        replicas = Routed(self.engines, self.reader[1], PrefixRouter())
        app = front_app(replicas, SETTINGS, replicas.router)
        settings = replace(SETTINGS, port=0, drain_s=1.0)
        return replicas, self.stack.enter_context(in_a_thread(FrontServer(app, app.state.forwarding, settings)))

    def hear(self, router: PrefixRouter) -> PrefixRouter:
        """Have a router learn all, once what is on its way between tiers has arrived."""
        for engine in self.engines.values():
            engine.store.flush()
        router.learn([engine.holdings.since(name, router.places.get(name)) for name, engine in self.engines.items()])
        return router

    def require_exact(self, router: PrefixRouter, texts: Sequence[str] = TEXTS) -> float:
        """What a router knows of each text at each replica is what the store would serve; returns pieces of all."""
        found = 0.0
        loads = dict.fromkeys(self.engines, 0)
        for text in texts:
            ids = self.reader[1].encode(text)
            keys = prompt_keys(body_of(text))
            hits = router.hits(keys, loads)
            for name, engine in self.engines.items():
                served = engine.known_tokens([ids], prompt_salt("", None))[0]
                hit = sum(router.held(name).get(key) is not None for key in keys)
                claimed = len(ids) * 2 * hit // (2 * len(keys) + 1)
                # Pieces are of 256 characters, and chunks of 16 tokens; the last token is computed in any case.
                least = len(ids) * 2 * (hit + 1) // (2 * len(keys) + 1) if hit < len(keys) else len(ids)
                assert claimed <= served + 1, (text[:12], name, hit, served)
                assert served < least + CHUNK, (text[:12], name, hit, served)
                found += hits.get(name, 0)
        return found


@contextmanager
def cluster_of(reader: tuple[Any, Any], count: int = 2, **kept: Any) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(stack, reader, count, **kept)


def post(wire: Wire, text: str, **more: Any) -> int:
    """Cached tokens of a prompt."""
    answer = httpx.post(f"{wire.url}/v1/completions", content=body_of(text, **more), timeout=30)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_what_fronts_know_is_what_stores_serve(reader: tuple[Any, Any]) -> None:
    """After answers, evictions, a quarantine, a session that is dropped, `clear()` and `invalidate()`."""
    with cluster_of(reader) as cluster:
        first, wire = cluster.front()
        for number, text in enumerate(TEXTS):
            first.loads = {f"r{number % 2}": 0, f"r{1 - number % 2}": 9}
            assert post(wire, text, prompt_cache_key="k") < 20
        second, _ = cluster.front()

        def exact() -> float:
            """Both fronts know the same, and what is true, within some rounds of news."""
            told = {name: engine.holdings.since(name, None) for name, engine in cluster.engines.items()}
            truth = [dict(zip(news.keys, news.tiers, strict=True)) for news in told.values()]
            for replicas in (first, second):
                until(lambda r=replicas: [r.router.held(name) for name in told] == truth, "no news")
            assert cluster.require_exact(second.router) == cluster.require_exact(first.router)
            return cluster.require_exact(second.router)

        everything = exact()
        assert everything >= 8 * 2
        assert {name for name in first.asked} == {"r0", "r1"}
        store = cluster.engines["r0"].store
        store.max_bytes = int(store.stats()["bytes"]) * 2 // 3
        first.loads = {"r0": 0, "r1": 9}
        post(wire, "Tom has two goats. " * 16, prompt_cache_key="k")  # evicts others
        evicted = exact()
        assert 0 < evicted < everything
        chunk = next(iter(cluster.engines["r1"].store.inspect().chunks))
        cluster.engines["r1"].store.quarantine([chunk])
        quarantined = exact()
        assert quarantined < evicted
        cluster.engines["r0"].drop_session(b"", "k", prompt_salt("", None, "k"))
        dropped = exact()
        assert 0 < dropped < quarantined
        cluster.engines["r1"].store.clear()
        assert exact() == 0
        first.loads = {}
        for text in TEXTS[:4]:
            post(wire, text)
        assert exact() > 0
        for engine in cluster.engines.values():
            engine.store.invalidate()
        assert exact() == 0
        for text in TEXTS[:4]:
            post(wire, text)
            assert post(wire, text) > 100
        assert exact() > 0


def test_a_view_that_is_wrong_is_found_to_be(reader: tuple[Any, Any]) -> None:
    """Of a front that hears nothing while its replica loses, or stores, a text."""
    with cluster_of(reader, 1) as cluster:
        replicas, wire = cluster.front()
        post(wire, TEXTS[0])
        cluster.require_exact(cluster.hear(replicas.router), TEXTS[:2])
        replicas.silent.add("r0")
        post(wire, TEXTS[1])
        for _ in range(2):
            with pytest.raises(AssertionError, match="Document"):
                cluster.require_exact(replicas.router, TEXTS[:2])
            cluster.require_exact(cluster.hear(replicas.router), TEXTS[:2])
            cluster.engines["r0"].store.clear()


def test_weights_that_change_withdraw_all(reader: tuple[Any, Any], tmp_path: Path) -> None:
    """Also where a tier keeps what was stored before."""
    model, _ = load_embedded()
    with cluster_of((model, reader[1]), 1, tiers=[f"disk:{tmp_path}:1GB"]) as cluster:
        replicas, wire = cluster.front()
        post(wire, TEXTS[0])
        assert cluster.require_exact(cluster.hear(replicas.router), TEXTS[:1]) > 2
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(1.5)
        assert post(wire, TEXTS[1]) == 0
        assert post(wire, TEXTS[0]) < 20
        cluster.hear(replicas.router)
        assert cluster.require_exact(replicas.router, TEXTS[:2]) > 4


def test_a_tier_below_counts_for_less_than_memory(reader: tuple[Any, Any], tmp_path: Path) -> None:
    """What host memory evicts is below; a replica that starts again on the same disk says nothing until asked."""
    with cluster_of(reader, 1, tiers=[f"disk:{tmp_path}:1GB"]) as cluster:
        replicas, wire = cluster.front()
        router = replicas.router
        for text in TEXTS:
            post(wire, text)
        engine = cluster.engines["r0"]
        full = cluster.require_exact(cluster.hear(router))
        engine.store.max_bytes = int(engine.store.stats()["bytes"]) // 3
        post(wire, "Tom has two goats. " * 16)
        loaded = cluster.require_exact(cluster.hear(router))
        assert full / 2 <= loaded < full
        assert {*router.held("r0").values()} == {BELOW, MEMORY}
        cluster.engines["r0"] = again = cluster.engine()
        cluster.hear(router)
        assert router.held("r0") == {}
        assert again.known_tokens([reader[1].encode(TEXTS[3])], prompt_salt("", None))[0] > 100
        assert post(wire, TEXTS[3]) > 100
        cluster.hear(router)
        assert router.hits(prompt_keys(body_of(TEXTS[3])), {"r0": 0})["r0"] > 2
        again.store.clear()
        cluster.hear(router)
        assert router.held("r0") == {}


def test_what_others_delete_in_a_shared_tier_is_withdrawn(reader: tuple[Any, Any], tmp_path: Path) -> None:
    with cluster_of(reader, 2, tiers=[f"disk:{tmp_path}:1GB"]) as cluster:
        replicas, wire = cluster.front()
        for loads in ({"r1": 9}, {"r0": 9}):
            replicas.loads = loads
            for text in TEXTS[:2]:
                post(wire, text, prompt_cache_key=text[:10])
        cluster.hear(replicas.router)
        both = cluster.require_exact(replicas.router, TEXTS[:2])
        assert cluster.engines["r0"].drop_session(b"", TEXTS[0][:10], prompt_salt("", None, TEXTS[0][:10]))
        cluster.engines["r1"].store.hear()
        cluster.hear(replicas.router)
        assert cluster.require_exact(replicas.router, TEXTS[:2]) == both / 2
        hits = replicas.router.hits(prompt_keys(body_of(TEXTS[1])), dict.fromkeys(cluster.engines, 0))
        assert hits.keys() == {"r0", "r1"}


def test_requests_follow_what_is_held(reader: tuple[Any, Any]) -> None:
    """To the replica with the longest prefix, away from one that has lost it, and past one that is silent."""
    with cluster_of(reader, 3) as cluster:
        replicas, wire = cluster.front()
        router = replicas.router
        replicas.loads = {"r0": 9, "r1": 0, "r2": 9}
        post(wire, TEXTS[0])
        replicas.loads = {}
        assert post(wire, TEXTS[0] + " Who?") > 100
        assert replicas.asked == ["r1", "r1"]
        cluster.engines["r1"].store.clear()
        until(lambda: not router.held("r1"), "no news")
        replicas.loads = {"r0": 9, "r1": 9, "r2": 0}
        post(wire, TEXTS[0])
        replicas.loads = {}
        until(lambda: router.held("r2"), "no news")
        assert post(wire, TEXTS[0] + " Where?") > 100
        assert replicas.asked[2:] == ["r2", "r2"]
        replicas.silent.add("r2")  # it serves, and its news do not come: what it said is believed
        cluster.engines["r2"].store.clear()
        assert post(wire, TEXTS[0] + " When?") < 20
        assert replicas.asked[4:] == ["r2"]
        replicas.silent.clear()
        until(lambda: 0 < len(router.held("r2")) <= len(prompt_keys(body_of(TEXTS[0] + " When?"))), "no news")


def test_replicas_come_and_go(reader: tuple[Any, Any]) -> None:
    """And a session whose text is too short for a piece stays at its replica."""
    with cluster_of(reader, 2) as cluster:
        replicas, wire = cluster.front()
        for loads in ({"r0": 9}, {}, {}):
            replicas.loads = loads
            post(wire, "Hi", prompt_cache_key="chat")
        assert replicas.asked == ["r1"] * 3
        post(wire, TEXTS[0], prompt_cache_key="chat")
        assert replicas.asked[-1] == "r1"
        del cluster.engines["r1"]
        assert post(wire, TEXTS[0], prompt_cache_key="chat") < 20
        cluster.engines["r2"] = cluster.engine()
        replicas.loads = {"r0": 9}
        assert post(wire, TEXTS[1]) < 20
        replicas.loads = {}
        until(lambda: replicas.router.held("r2"), "no news")
        assert post(wire, TEXTS[0] + " Who?") > 100
        assert post(wire, TEXTS[1] + " Who?") > 100
        assert replicas.asked[-4:] == ["r0", "r2", "r0", "r2"]


def test_keys_and_salts_and_odd_bodies(reader: tuple[Any, Any]) -> None:
    """Each client's texts are its own; what has no text is routed by load and linked to nothing."""
    with cluster_of(reader, 1) as cluster:
        replicas, wire = cluster.front()
        router = replicas.router
        post(wire, TEXTS[0], cache_salt="a")
        post(wire, TEXTS[0], cache_salt="b")
        cluster.hear(router)
        counts = [
            router.hits(prompt_keys(body_of(TEXTS[0], cache_salt=salt)), {"r0": 0}).get("r0", 0) for salt in "abc"
        ]
        assert counts[0] == counts[1] > 2
        assert counts[2] == 0
        held = router.held("r0")
        for content in (b"", b"{", b"[1]", b"null", body_of(""), body_of("Who?"), body_of(["Who?", TEXTS[3]])):
            httpx.post(f"{wire.url}/v1/completions", content=content, timeout=30)
        cluster.hear(router)
        assert router.held("r0") == held
