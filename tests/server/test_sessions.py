"""Sessions: edited ones that move K/V, those that stay for a while, and those that are dropped."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest
import torch
from transformers import PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, ReusePolicy
from kvboost_hf.assets import load_embedded
from tests.conftest import make_model, random_ids
from tests.internals.cache import ComputePace
from tests.internals.server import (
    Beginnings,
    Finished,
    Job,
    Keep,
    ModelEngine,
    ModelRunner,
    Progress,
    SamplingOptions,
    ServerSettings,
    SessionChange,
    WaitingLine,
    choose_attention,
    make_app,
)
from tests.server.conftest import Listening, listening
from tests.server.test_worker import Told, numbers
from tests.server.wire import until

pytestmark = pytest.mark.daily

BOOK = "Anna lives in Oslo. She plays the piano. The lamp is red. It costs ten coins. Tom has two goats. " * 12
HOUR = Keep(ttl_s=3600, share=0.5)


@pytest.fixture(scope="module")
def reader() -> tuple[PreTrainedModel, Any]:
    return load_embedded()


@contextmanager
def engine_of(model: PreTrainedModel, tokenizer: Any, **more: Any) -> Iterator[ModelEngine]:
    kept = {name: more.pop(name) for name in ("max_bytes", "tiers", "chunk_size") if name in more}
    engine = ModelEngine(model, tokenizer, store=ChunkStore(model, **kept), **more)
    try:
        yield engine
    finally:
        engine.close()
        engine.store.check_consistency()
        engine.store.close()


def ask(engine: ModelEngine, ids: list[int], new: int = 4, **more: Any) -> tuple[Finished, str]:
    told = Told()
    engine.submit(Job(ids=ids, options=SamplingOptions(max_tokens=new), **more), told)
    assert told.end.error is None
    return told.end, told.text


def plain(reader: tuple[PreTrainedModel, Any], ids: list[int], new: int = 4) -> str:
    model, tokenizer = reader
    row = torch.tensor([ids])
    said = model.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=new, eos_token_id=None)
    return str(tokenizer.decode(said[0, len(ids) :], skip_special_tokens=True))


def head(clock: str) -> str:
    return f"Time: {clock}. You answer from this book. "


class Clock:
    now = 1e9

    def __call__(self) -> float:
        return self.now


# Edits


@pytest.mark.parametrize("default", [None, ReusePolicy(mode="blend", repair="selective")], ids=["exact", "blend"])
def test_a_request_chooses_how_moved_kv_is_used(reader: tuple[PreTrainedModel, Any], default: Any) -> None:
    """And what it has left is never found by exact requests."""
    first, edited, again = (reader[1].encode(head(at) + BOOK + "Who plays?") for at in ("9:41", "10:07", "11:23"))
    with engine_of(*reader, policy=default) as engine:
        ask(engine, first, reuse="exact")
        exact, text = ask(engine, edited[:-3], reuse="exact")
        assert (exact.moved_tokens, exact.repaired_tokens) == (0, 0)
        assert exact.cached_tokens + exact.computed_tokens == exact.prompt_tokens
        assert text == plain(reader, edited[:-3])
        moved, _ = ask(engine, again, 1, reuse="selective")  # so that nothing is repaired after the first token
        assert moved.cached_tokens >= moved.moved_tokens > len(again) // 2
        assert 0 < moved.repaired_tokens <= moved.computed_tokens < len(again) // 2
        assert (ask(engine, again[:-2], 1)[0].moved_tokens > 0) is (default is not None)
        for ids in (again, again[:-4], edited):
            found, text = ask(engine, ids, reuse="exact")
            assert found.moved_tokens == 0
            assert text == plain(reader, ids)
        assert ask(engine, again, reuse="exact")[0].cached_tokens == len(again) - 1


@pytest.mark.parametrize("batch", [1, 4])
def test_what_moved_kv_has_left_is_repaired_between_requests(reader: tuple[PreTrainedModel, Any], batch: int) -> None:
    """Then the next request is an exact hit; with the batch, each prompt is, that comes when the repair has ended."""
    prompts = [reader[1].encode(head(at) + BOOK + "Who plays?") for at in ("9:41", "10:07", "11:23")]
    with engine_of(*reader, policy=ReusePolicy(mode="blend", repair="none", progressive="ride")) as engine:
        ask(engine, prompts[0], 2)
        seen = ChunkReuseCache(reader[0], engine._runner.store)
        for ids in prompts[1:]:
            told = [Told() for _ in range(batch)]
            for one in told:
                engine.submit(Job(ids=ids, options=SamplingOptions(max_tokens=2)), one)
            assert all(one.end.moved_tokens > 100 for one in told)
            row = torch.tensor([ids])
            until(lambda row=row, ids=ids: seen.stored_tokens(row) >= len(ids) - 16, "nothing was repaired")
            found, text = ask(engine, ids, reuse="exact")
            assert found.cached_tokens >= len(ids) - 16
            assert text == plain(reader, ids)


def test_exact_answers_beside_those_with_moved_kv() -> None:
    """Of the same prompts, in one batch that reads K/V in place: none is forked from the other kind, or shares it."""
    model, tokenizer = load_embedded()
    choose_attention(model)
    prompts = [tokenizer.encode(head(f"{hour}:15") + BOOK + f"Question {hour}: who plays?") for hour in range(5)]
    options = SamplingOptions(max_tokens=12, logprobs=0)

    def logprobs(told: Told) -> list[float]:
        assert told.end.error is None
        return [one.logprob for event in told.events if isinstance(event, Progress) for one in event.logprobs]

    with engine_of(model, tokenizer, max_batch_size=8) as engine:
        assert engine._runner.in_place
        ask(engine, prompts[0])
        moved, exact = [Told() for _ in prompts[1:]], [Told() for _ in prompts[1:]]
        for ids, one, other in zip(prompts[1:], moved, exact, strict=True):
            engine.submit(Job(ids=ids, options=options, reuse="none"), one)
            engine.submit(Job(ids=ids, options=options), other)
        assert all(told.end.moved_tokens > 200 for told in moved)
        assert all(told.end.moved_tokens == 0 for told in exact)
    with engine_of(model, tokenizer) as engine:
        for ids, one, other in zip(prompts[1:], moved, exact, strict=True):
            alone = Told()
            engine.submit(Job(ids=ids, options=options), alone)
            assert logprobs(other) == pytest.approx(logprobs(alone), abs=1e-4)
            assert logprobs(one) != pytest.approx(logprobs(alone), abs=1e-4)  # or this could not fail


def test_prompts_with_moved_kv_are_computed_in_pieces(
    reader: tuple[PreTrainedModel, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of as many new tokens as others; what is moved does not count. A short request behind them waits for one."""
    book = reader[1].encode(BOOK)
    news = [reader[1].encode(f"Ben sells {n} {word}. " * 30) for n, word in enumerate(("hats", "nets", "maps"))]
    prompt = [*news[0], *book, *news[1], *news[2]]
    new = len(prompt) - len(book)
    with engine_of(*reader, prefill_chunk_size=64) as engine:
        ask(engine, book)
        pieces = engine.stats()["pieces"]
        order: list[str] = []
        long, short = Told(lambda event: order.append("long")), Told()
        asked, one, forward = threading.Event(), SamplingOptions(max_tokens=1), ModelRunner.forward

        def wait_for_the_short_one(*given: Any) -> torch.Tensor:  # a hook of the model would rule out reuse
            assert engine.stats()["pieces"] == pieces or asked.wait(60)
            return forward(*given)

        monkeypatch.setattr(ModelRunner, "forward", wait_for_the_short_one)
        engine.submit(Job(ids=prompt, options=one, reuse="selective"), long)
        until(lambda: engine.stats()["pieces"] > pieces, "nothing was computed")
        engine.submit(Job(ids=book[:40], options=one, client=b"other", salt=b"other"), short)
        asked.set()
        assert short.end.error is None
        order.append("short")
        assert long.end.moved_tokens > len(book) // 2
        assert order[0] == "short"
        took = engine.stats()["pieces"] - pieces - 1
        assert new // 64 <= took <= new // 64 + 2
        assert ask(engine, prompt, 8, reuse="exact")[1] == plain(reader, prompt, 8)


def test_the_route_says_what_an_edit_has_cost(reader: tuple[PreTrainedModel, Any]) -> None:
    with engine_of(*reader) as engine, served(engine) as at:

        def asked(clock: str, headers: dict[str, str] | None = None, **more: Any) -> Any:
            body = {"model": "reader", "prompt": head(clock) + BOOK, "max_tokens": 2, "temperature": 0, **more}
            return at.http.post("/v1/completions", json=body, headers=headers)

        asked("9:41")
        found = asked("10:15", repair="selective")
        details = found.json()["usage"]["prompt_tokens_details"]
        assert details["cached_tokens"] >= details["moved_tokens"] > 100
        assert details["computed_tokens"] > details["repaired_tokens"] > 0
        told = dict(part.split("=") for part in found.headers["x-kvboost-reuse"].split(", "))
        assert {name: int(told[name]) for name in ("cached", "moved", "computed")} == {
            name: details[f"{name}_tokens"] for name in ("cached", "moved", "computed")
        }
        assert float(told["ttft_ms"]) > 0
        header = {"x-kvboost-repair": "auto"}
        assert asked("10:16", header).json()["usage"]["prompt_tokens_details"]["moved_tokens"] > 100
        exact = asked("10:17", header, repair="exact").json()["usage"]["prompt_tokens_details"]
        assert exact["moved_tokens"] == 0
        assert "pinned" not in exact
        for wrong in (asked("9:41", {"x-kvboost-repair": "perfect"}), asked("9:41", repair="perfect")):
            assert wrong.status_code == 400
            assert "'exact'" in wrong.json()["error"]["message"]
            assert "x-kvboost-reuse" not in wrong.headers
        stream = asked("10:18", repair="auto", stream=True, stream_options={"include_usage": True})
        assert '"moved_tokens": ' in stream.text
        assert "x-kvboost-reuse" not in stream.headers
        assert 'kvboost_prompt_work_tokens_total{kind="moved"}' in at.http.get("/metrics").text
        answer = at.http.post(
            "/v1/responses", json={"model": "reader", "input": "Who?", "repair": "exact", "max_output_tokens": 1}
        )
        assert answer.json()["usage"]["input_tokens_details"]["moved_tokens"] == 0


# Retention


def crowd(engine: ModelEngine, count: int = 8) -> None:
    """Other prompts, which take the place of what is not pinned."""
    for n in range(count):
        ask(engine, random_ids(300, 100 + n)[0].tolist(), 1)


@pytest.fixture
def tiny() -> tuple[PreTrainedModel, Any]:
    return make_model("llama"), numbers()


ROOM = 600_000


def test_pins_end_unless_they_are_used(tiny: tuple[PreTrainedModel, Any]) -> None:
    clock, ids = Clock(), random_ids(200, 1)[0].tolist()
    with engine_of(*tiny, clock=clock, chunk_size=16, max_bytes=ROOM) as engine:
        assert engine.store.max_bytes < 5 * 300 * 512  # the crowd does not fit
        found, _ = ask(engine, ids, keep=(Keep(ttl_s=300, tokens=112, share=0.5),))
        assert found.pinned
        for _ in range(3):  # each use begins it anew
            crowd(engine)
            clock.now += 290
            found, _ = ask(engine, [*ids[:112], *random_ids(20, int(clock.now) % 1000)[0].tolist()])
            assert found.cached_tokens >= 112
            assert found.pinned is None
        assert engine.stats()["pins"] == 1
        clock.now += 301
        crowd(engine)
        assert engine.stats()["pins"] == 0
        assert not engine.store.pinned_keys()
        assert ask(engine, ids)[0].cached_tokens < 112


def test_pins_grow_with_a_chat_and_differ_in_time(tiny: tuple[PreTrainedModel, Any]) -> None:
    """As with a system prompt for an hour and the messages for five minutes."""
    clock, ids = Clock(), random_ids(400, 1)[0].tolist()
    with engine_of(*tiny, clock=clock, chunk_size=16, max_bytes=4 * ROOM) as engine:
        for stop in (150, 250, 400):
            keep = (Keep(ttl_s=3600, tokens=100, share=0.5), Keep(ttl_s=300, tokens=stop, share=0.5))
            assert ask(engine, ids[:stop], keep=keep)[0].pinned
            assert engine.stats()["pins"] == 2
        held = len(engine.store.pinned_keys())
        clock.now += 301
        ask(engine, [1, 2, 3])
        assert 0 < len(engine.store.pinned_keys()) < held / 3
        clock.now += 3600
        ask(engine, [1, 2, 3])
        assert not engine.store.pinned_keys()


def test_pins_of_a_client_share_and_give_way_by_priority(tiny: tuple[PreTrainedModel, Any]) -> None:
    with engine_of(*tiny, chunk_size=16, max_bytes=ROOM) as engine:
        part = partial(Keep, share=0.5)
        first, second, third, large = (random_ids(size, size)[0].tolist() for size in (201, 202, 203, 900))
        bytes_of_one = sum(c.nbytes for c in after(engine, first, keep=(part(),), priority=-1))
        assert bytes_of_one < 0.5 * ROOM < 3 * bytes_of_one
        assert ask(engine, second, keep=(part(),))[0].pinned
        assert not ask(engine, large, keep=(part(),))[0].pinned  # more than the share: nothing gives way for it
        assert engine.stats()["pins"] == 2
        assert ask(engine, third, keep=(part(),))[0].pinned
        crowd(engine)
        assert ask(engine, first)[0].cached_tokens == 200  # it came first, but others give way before it
        assert ask(engine, third)[0].cached_tokens == 202
        assert ask(engine, second)[0].cached_tokens < 100
        assert ask(engine, second, keep=(part(),), client=b"other", salt=b"other")[0].pinned
        assert engine.stats()["pins"] == 3


def after(engine: ModelEngine, ids: list[int], **more: Any) -> list[Any]:
    """The pinned chunks after a request."""
    assert ask(engine, ids, **more)[0].pinned
    keys = engine.store.pinned_keys()
    return [chunk for key, chunk in engine.store.inspect().chunks.items() if key in keys]


def test_moved_text_is_not_pinned(reader: tuple[PreTrainedModel, Any]) -> None:
    first, edited = (reader[1].encode(head(at) + BOOK) for at in ("9:41", "10:07"))
    with engine_of(*reader) as engine:
        ask(engine, first)
        found, _ = ask(engine, edited, reuse="selective", keep=(HOUR,))
        assert found.moved_tokens
        assert found.pinned is False
        assert not engine.store.pinned_keys()
        assert ask(engine, edited, reuse="exact", keep=(HOUR,))[0].pinned


def test_the_fields_of_requests_pin(reader: tuple[PreTrainedModel, Any]) -> None:
    with engine_of(*reader) as engine, served(engine) as at:
        body = {"model": "reader", "messages": [{"role": "user", "content": BOOK}], "max_tokens": 1}
        for retention, seconds in (("in_memory", 600), ("24h", 86_400)):
            asked = body | {"prompt_cache_retention": retention, "prompt_cache_key": retention}
            usage = at.http.post("/v1/chat/completions", json=asked).json()["usage"]
            assert usage["prompt_tokens_details"]["pinned"] is True
            session = at.http.get(f"/v1/kv/sessions/{retention}").json()
            assert session["pinned"]
            assert session["pinned_until"] - session["last_used"] == pytest.approx(seconds, abs=5)


# Sessions


@contextmanager
def served(engine: ModelEngine, **more: Any) -> Iterator[Listening]:
    with listening(make_app(engine, engine.tokenizer, ServerSettings(model_name="reader", **more))) as at:
        yield at


def say(at: Listening, text: str, key: str = "none", name: str | None = None) -> int:
    """Ask; returns the cached tokens."""
    body = {"model": "reader", "prompt": text, "max_tokens": 2, "temperature": 0, "prompt_cache_key": name}
    answer = at.http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
    assert answer.status_code == 200
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_sessions_are_listed_changed_and_dropped(reader: tuple[PreTrainedModel, Any]) -> None:
    with engine_of(*reader) as engine, served(engine) as at:
        say(at, BOOK + "Who?", name="chat/1")
        assert say(at, BOOK + "What?", name="chat/1") > 100
        say(at, head("9:41") + BOOK)
        named, hashed = sorted(at.http.get("/v1/kv/sessions").json()["data"], key=lambda each: -each["requests"])
        assert (named["id"], named["requests"], named["pinned"]) == ("chat/1", 2, False)
        assert named["tokens"] == len(reader[1].encode(BOOK + "What?")) + 2
        assert named["cached_share"] == pytest.approx(0.5, abs=0.05)
        assert named["first_seen"] <= named["last_used"]
        assert named["bytes"] + hashed["bytes"] == engine.store.stats()["bytes"]
        assert len(hashed["id"]) == 24
        changed = at.http.patch("/v1/kv/sessions/chat/1", json={"ttl_s": 60, "priority": -2}).json()
        assert (changed["pinned"], changed["ttl_s"], changed["priority"]) == (True, 60, -2)
        before = len(engine.store.pinned_keys())
        say(at, BOOK + "What is red? " + BOOK, name="chat/1")
        assert len(engine.store.pinned_keys()) > before  # what comes later, too
        assert at.http.patch("/v1/kv/sessions/chat/1", json={"pinned": False}).json()["pinned_until"] is None
        assert not engine.store.pinned_keys()
        for id in ("chat/1", hashed["id"]):
            size = at.http.get(f"/v1/kv/sessions/{id}").json()["bytes"]
            gone = at.http.delete(f"/v1/kv/sessions/{id}").json()
            assert (gone["deleted"], gone["freed_bytes"]) == (True, {"ram": size})
            assert at.http.delete(f"/v1/kv/sessions/{id}").status_code == 404
        assert engine.store.stats()["bytes"] == 0
        assert at.http.get("/v1/kv/sessions").json()["data"] == []
        assert say(at, BOOK, name="chat/1") == 0
        for wrong in ({}, {"ttl_s": -1}, {"ttl_s": 5, "pinned": False}, {"pinned": "yes"}, {"priority": 1.5}):
            assert at.http.patch("/v1/kv/sessions/chat/1", json=wrong).status_code == 400
        assert at.http.patch("/v1/kv/sessions/other", json={"pinned": True}).json()["error"]["code"] == "not_found"


@pytest.mark.parametrize("name", ["a//b", "/a/", "a?b#%2F", "a\nb\n", "é 🙂"])
def test_all_sessions_can_be_dropped(reader: tuple[PreTrainedModel, Any], name: str) -> None:
    with engine_of(*reader) as engine, served(engine) as at:
        say(at, BOOK + "Who?", name=name)
        say(at, head("9:41") + BOOK, name="")  # which is none, as where it is left out
        path = f"/v1/kv/sessions/{quote(name, safe='')}"
        assert at.http.get(path).json()["id"] == name
        assert at.http.delete(path).json()["deleted"]
        [left] = at.http.get("/v1/kv/sessions").json()["data"]
        assert len(left["id"]) == 24


def test_keys_see_and_drop_their_own_sessions_only(reader: tuple[PreTrainedModel, Any]) -> None:
    keys = {"api_keys": ("one", "two"), "operator_keys": ("boss",)}
    with engine_of(*reader) as engine, served(engine, **keys) as at:

        def http(method: str, path: str, key: str, **more: Any) -> Any:
            return at.http.request(
                method, f"/v1/kv/sessions{path}", headers={"authorization": f"Bearer {key}"}, **more
            )

        for key in ("one", "two"):
            say(at, BOOK, key)
            say(at, BOOK, key, "chat")
        listed = {key: http("GET", "", key).json()["data"] for key in ("one", "two", "boss")}
        assert [len(listed[key]) for key in ("one", "two", "boss")] == [2, 2, 4]
        assert not {each["id"] for each in listed["one"]} & {each["id"] for each in listed["two"]} - {"chat"}
        assert "key" not in listed["one"][0]
        hashes = {each["key"] for each in listed["boss"]}
        assert len(hashes) == 2
        assert not any("one" in each.values() for each in listed["boss"])
        hashed = next(each["id"] for each in listed["one"] if each["id"] != "chat")
        for method, body in (("GET", None), ("PATCH", {"pinned": True}), ("DELETE", None)):
            assert http(method, f"/{hashed}", "two", json=body).status_code == 404
            assert http(method, f"/{hashed}?key={hashes.pop()}", "two", json=body).status_code == 403
            hashes = {each["key"] for each in listed["boss"]}
        assert http("DELETE", "/chat", "two").json()["deleted"]
        assert say(at, BOOK, "one", "chat") > 100
        assert say(at, BOOK, "one") > 100
        owner = next(each["key"] for each in listed["boss"] if each["id"] == hashed)
        assert http("GET", f"/{hashed}?key={owner}", "boss").json()["key"] == owner
        assert http("DELETE", f"/{hashed}?key={owner}", "boss").json()["deleted"]
        assert say(at, BOOK, "one") == 0
        assert http("GET", "/chat?key=nobody", "boss").status_code == 404


def test_what_was_dropped_is_gone_from_all_tiers(
    reader: tuple[PreTrainedModel, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a restart, of which the tiers tell which sessions there are."""
    monkeypatch.setattr(ComputePace, "seconds_per_token", lambda self, model: 1.0)  # any loading pays
    tiers = [f"disk:{tmp_path / 'tier'}:1GB"]

    def restarted() -> Any:
        return engine_of(*reader, tiers=tiers)

    with restarted() as engine, served(engine) as at:
        for name in ("chat", "other", None):
            say(at, BOOK, name=name)
        engine.store.flush()
    with restarted() as engine, served(engine) as at:
        assert {each["id"] for each in at.http.get("/v1/kv/sessions").json()["data"]} > {"chat", "other"}
        assert at.http.delete("/v1/kv/sessions/nothing").status_code == 404
        assert at.http.delete("/v1/kv/sessions/chat").json()["freed_bytes"].keys() == {"disk"}
        assert at.http.delete("/v1/kv/sessions/chat").status_code == 404
        assert say(at, BOOK, name="chat") == 0
        assert at.http.delete("/v1/kv/sessions/chat").json()["freed_bytes"].keys() == {"ram", "disk"}
        # The other one has written nothing since, as if it had been killed.
        with restarted() as next_engine, served(next_engine) as next_at:
            assert say(next_at, BOOK, name="chat") == 0
            assert say(next_at, BOOK, name="other") > 100


def test_named_sessions_share_what_begins_alike(reader: tuple[PreTrainedModel, Any]) -> None:
    """As Codex has it: each session has a name of its own, and the same system prompt."""
    with engine_of(*reader) as engine, served(engine, api_keys=("one", "two")) as at:
        assert say(at, BOOK + "Who?", "one", name="first") == 0
        assert say(at, BOOK + "What?", "one", name="second") > 100
        assert say(at, BOOK + "What?", "two", name="first") == 0  # keys share nothing
        key = {"authorization": "Bearer one"}
        listed = at.http.get("/v1/kv/sessions", headers=key).json()["data"]
        assert [each["id"] for each in listed] == ["second", "first"]
        assert all(each["bytes"] > 0 for each in listed)
        assert at.http.delete("/v1/kv/sessions/first", headers=key).json()["deleted"]
        (left,) = at.http.get("/v1/kv/sessions", headers=key).json()["data"]
        assert (left["id"], left["bytes"]) == ("second", 0)  # what was shared is gone
        assert say(at, BOOK + "What?", "one", name="second") == 0
        assert say(at, BOOK + "What?", "two", name="first") > 100


def test_dropping_takes_moved_text_along_and_leaves_what_others_share(reader: tuple[PreTrainedModel, Any]) -> None:
    first, edited = (reader[1].encode(head(at) + BOOK) for at in ("9:41", "10:07 and a half"))
    with engine_of(*reader, chunk_size=16) as engine:
        told = ask(engine, first)[0]
        ask(engine, edited, 40, reuse="selective")
        assert told.prompt_tokens
        late, early = engine.sessions(b"")
        assert engine.store.stats()["content_only"] > 0
        assert engine.drop_session(b"", late.id, b"?")
        assert engine.store.stats()["content_only"] == 0
        assert ask(engine, first)[0].cached_tokens == len(first) - 1
        short = reader[1].encode("Anna plays")
        ask(engine, short, 30)  # too short for a chunk: the next prompt goes on in the same one
        text = [*short, *reader[1].encode(BOOK)]
        ask(engine, text)
        for each in engine.sessions(b""):
            if each.tokens < 60:
                assert engine.drop_session(b"", each.id, b"?") is not None
        assert ask(engine, text)[0].cached_tokens == len(text) - 1
        assert {each.id for each in engine.sessions(b"")} >= {early.id}


@pytest.mark.slow
def test_a_session_is_dropped_while_it_runs(reader: tuple[PreTrainedModel, Any]) -> None:
    """What runs goes on to the same answer, and leaves nothing; what comes later is kept again."""
    ids = reader[1].encode(BOOK + "Who?")
    with engine_of(*reader, chunk_size=16, prefill_chunk_size=32) as engine:
        for at in (0, 1, 60):  # in the prompt, and in the answer
            started = threading.Event()
            told = Told(lambda event, started=started: started.set())
            engine.submit(Job(ids=ids, options=SamplingOptions(max_tokens=90), session="chat", salt=b"s"), told)
            if at:
                assert started.wait(20)
            while not engine.sessions(b"", "chat"):
                time.sleep(0.001)
            assert engine.drop_session(b"", "chat", b"s") is not None
            beside = Told()
            engine.submit(Job(ids=ids, options=SamplingOptions(max_tokens=1), client=b"2", salt=b"2"), beside)
            assert told.text == plain(reader, ids, 90)
            assert beside.end.reason == "length"
            root = engine._runner.root_of(b"s")
            assert all(chunk.root != root for chunk in engine.store.inspect().chunks.values())
            assert not engine.sessions(b"", "chat")
        ask(engine, ids, session="chat", salt=b"s")
        assert ask(engine, ids, session="chat", salt=b"s")[0].cached_tokens == len(ids) - 1


def test_changes_and_drops_beside_many_requests(tiny: tuple[PreTrainedModel, Any]) -> None:
    """Whatever happens at the same time, answers are right, books are kept, and no pin is left."""
    model, tokenizer = tiny
    prompts = [random_ids(60 + 30 * n, n)[0].tolist() for n in range(4)]
    with engine_of(model, tokenizer, chunk_size=16, max_bytes=ROOM) as engine:
        wanted = [ask(engine, ids, 8, session="first")[1] for ids in prompts]
        told = []
        for turn in range(40):
            n = turn % 4
            told.append((n, Told()))
            options, name = SamplingOptions(max_tokens=8), f"s{n % 2}"
            keep = (Keep(ttl_s=9, share=0.3),) if turn % 3 else ()
            salt = name.encode()
            engine.submit(Job(ids=prompts[n], options=options, session=name, salt=salt, keep=keep), told[-1][1])
            if turn % 2:
                change = SessionChange(keep=HOUR if turn % 4 == 1 else False)
                engine.change_session(b"", name, change)
            if turn % 5 == 4:
                engine.drop_session(b"", name, salt)
        for n, listener in told:
            assert listener.text == wanted[n]
        engine.store.check_consistency()
        for each in engine.sessions(None):
            engine.drop_session(b"", each.id, each.id.encode())
        assert not engine.store.pinned_keys()
        assert engine.stats()["pins"] == engine.stats()["sessions"] == 0


def test_sessions_are_bounded_and_the_largest_client_forgets(
    tiny: tuple[PreTrainedModel, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvboost_hf.server.engine.sessions._MOST_SESSIONS", 10)
    with engine_of(*tiny, chunk_size=16) as engine:
        ask(engine, [1, 2, 3], client=b"small", session="mine")
        for n in range(30):
            ask(engine, [4, 5, 6], 1, client=b"large", session=f"s{n}")
        assert [each.id for each in engine.sessions(b"small")] == ["mine"]
        assert [each.id for each in engine.sessions(b"large")] == [f"s{n}" for n in range(29, 20, -1)]


# Priorities


def test_priorities_count_within_a_client() -> None:
    line = WaitingLine[Job](lambda job: job)

    def waits(token: int, priority: int = 0, client: bytes = b"one") -> None:
        options = SamplingOptions(max_tokens=1)
        line.append(Job(ids=[token, token], options=options, priority=priority, client=client))

    for token, priority in ((1, 0), (2, 5), (3, -1), (4, 0), (2, 0)):
        waits(token, priority)
    waits(6, 2**30, b"two")
    waits(7, 2**30, b"two")
    order = []
    while (job := line.take()) is not None:
        order.append((job.client, job.ids[0], job.priority))
    assert [found[1:] for found in order if found[0] == b"one"] == [(3, -1), (1, 0), (4, 0), (2, 0), (2, 5)]
    assert {found[0] for found in order[:2]} == {b"one", b"two"}  # clients take turns all the same


def test_only_a_first_chunk_belongs_to_those_whose_prompts_begin_with_it() -> None:
    """A later chunk may have the same tokens."""
    root, tokens = b"root", random_ids(16)[0].numpy()
    beginnings = Beginnings()
    for length, owner in ((8, "one"), (12, "other")):
        beginnings.add(root, tokens[:length], owner)

    def owners(**of: Any) -> frozenset[str]:
        stored: Any = SimpleNamespace(**{"root": root, "parent": root, "tokens": tokens} | of)
        return beginnings.owners(stored)

    assert owners() == {"other"}  # whose beginning is the longest
    assert owners(tokens=tokens[:10]) == {"one"}
    assert owners(tokens=tokens[1:]) == owners(parent=b"chunk") == owners(root=b"another") == frozenset()
