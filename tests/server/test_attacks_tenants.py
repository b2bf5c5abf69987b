"""Attacks by one who has a key on those who have others: none reads their prompts, or keeps them from being served."""

import asyncio
import json
import random
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import truediv
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from kvboost_hf import ChunkStore
from kvboost_hf.assets import load_embedded
from tests.internals.server import Encoder, Markers, ModelEngine
from tests.server.conftest import Listening, Serve

WORDS = ["anna", "noah", "plays", "reads", "the", "piano", "book", "in", "a", "red", "hall", "lamp", "and", "then"]


class Key:
    """A client with a key of its own."""

    def __init__(self, at: Listening, key: str) -> None:
        self.http = httpx.Client(base_url=at.url, headers={"authorization": f"Bearer {key}"}, timeout=120)

    def post(self, prompt: str, max_tokens: int = 1, **more: Any) -> httpx.Response:
        body = {"model": "reader", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **more}
        return self.http.post("/v1/completions", json=body)

    def seconds(self, prompt: str) -> float:
        """Until the first token of the prompt is there."""
        start = time.perf_counter()
        assert self.post(prompt).status_code == 200
        return time.perf_counter() - start

    def chat(self, **more: Any) -> httpx.Response:
        body = {"model": "reader", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1, **more}
        return self.http.post("/v1/chat/completions", json=body)


Tenants = Callable[..., tuple[Key, Key, ModelEngine]]


@pytest.fixture
def tenants(serve: Serve, tokenizer: Any) -> Iterator[Tenants]:
    """Starts a server with the keys of two clients, who are told apart by nothing else."""
    keys: list[Key] = []
    engines: list[ModelEngine] = []

    def start(*, store_bytes: int = 2**28, **more: Any) -> tuple[Key, Key, ModelEngine]:
        model = load_embedded()[0]
        store = ChunkStore(model, chunk_size=16, max_bytes=store_bytes)
        engines.append(ModelEngine(model, tokenizer, store=store, max_client_share=0.75, **more))
        at = serve(engines[-1], api_keys=("one", "two"), timeout_s=120)
        keys.extend(Key(at, key) for key in ("one", "two"))
        return keys[-2], keys[-1], engines[-1]

    yield start
    for key in keys:
        key.http.close()
    for engine in engines:
        engine.close()


def text(rng: random.Random, words: int = 250) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


@contextmanager
def under_way(calls: list[Callable[[], object]]) -> Iterator[list[threading.Thread]]:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    yield threads
    for thread in threads:
        thread.join()


class Held:
    """A model that stops once: `reached` says that it has, and goes on at `go`."""

    def __init__(self, when: Callable[[], bool]) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        self._when = when

    def __call__(self, *_: object) -> None:
        """Before each forward."""
        if not self.reached.is_set() and self._when():
            self.reached.set()
            assert self.go.wait(60)


@contextmanager
def held(engine: ModelEngine, when: Callable[[], bool]) -> Iterator[Held]:
    """Stops the engine's model before a forward, so that what waits stays as it is; on a busy machine, too."""
    found = Held(when)
    handle = engine.model.register_forward_pre_hook(found)
    try:
        yield found
    finally:
        found.go.set()
        handle.remove()


def until(found: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not found():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_many_requests_of_one_do_not_keep_another_waiting(tenants: Tenants) -> None:
    one, two, engine = tenants(max_batch_size=2, max_queue_size=64)
    rng = random.Random(0)
    long = [partial(one.post, text(rng), 600, n=4, logit_bias={"2": -100}) for _ in range(6)]
    with under_way(long) as threads:  # type: ignore[arg-type]
        until(lambda: engine.stats()["running"] == 2 and engine.stats()["waiting"] == 22)
        for _ in range(3):
            assert two.post(text(rng), 5).status_code == 200
        assert engine.stats()["finished"] == {"length": 3}  # those of the first have hardly begun
        assert all(thread.is_alive() for thread in threads)
        engine.close()


def test_one_does_not_take_all_places_to_wait(tenants: Tenants) -> None:
    one, two, engine = tenants(max_batch_size=1, max_queue_size=8)
    rng, answered = random.Random(0), list[int]()

    def ask() -> None:
        answered.append(one.post(text(rng, 20), 400, logit_bias={"2": -100}).status_code)

    with ExitStack() as stack:
        held_now = stack.enter_context(held(engine, lambda: True))
        stack.enter_context(under_way([ask]))
        assert held_now.reached.wait(60)  # it is no longer one of those that wait
        stack.enter_context(under_way([ask for _ in range(11)]))
        until(lambda: engine.stats()["waiting"] == 6 and len(answered) == 5)
        assert answered == [429] * 5
        answer = one.post("a")
        assert answer.status_code == 429
        assert "requests are waiting, as many as may be of one client" in answer.json()["error"]["message"]
        assert int(answer.headers["retry-after"]) >= 1
        held_now.go.set()
        assert two.post("a").status_code == 200
        engine.close()


def test_one_does_not_take_all_memory(tenants: Tenants) -> None:
    one, two, engine = tenants(max_batch_size=8, max_live_tokens=1000)
    rng = random.Random(0)
    told: list[int] = []

    def ask(words: int, max_tokens: int) -> None:
        told.append(two.post(text(rng, words), max_tokens).status_code)

    of_one = [partial(one.post, text(rng, 20), 200, logit_bias={"2": -100}) for _ in range(12)]
    with held(engine, lambda: engine.stats()["running"] == 3) as held_now, under_way(of_one):  # type: ignore[arg-type]
        assert held_now.reached.wait(60)
        until(lambda: engine.stats()["waiting"] == 9)  # all have arrived, and there is room for three
        assert engine.stats()["prompts"] == 0
        with under_way([partial(ask, 20, 100), partial(ask, 450, 5)]):
            until(lambda: engine.stats()["waiting"] == 11)
            held_now.go.set()
        assert told == [200, 200]
        # What is too long beside others of the first gets its turn before more of those.
        assert engine.stats()["finished"]["length"] <= 7
        engine.close()


def auc(higher: list[float], lower: list[float]) -> float:
    """How often a time of the first is longer than one of the second: 0.5 if they do not differ."""
    return statistics.fmean((a > b) + 0.5 * (a == b) for a in higher for b in lower)


TRIALS = 24


def told(trial: Callable[[str, str], float], seed: int) -> float:
    """How well the time that a guess takes tells whether it is right."""
    rng, right, wrong = random.Random(seed), list[float](), list[float]()
    for _ in range(TRIALS):
        secret = text(rng)
        pair = [(right, secret), (wrong, text(rng))]
        rng.shuffle(pair)
        for times, guess in pair:
            times.append(trial(secret, guess))
    return auc(wrong, right)


@pytest.mark.slow
def test_time_to_first_token_tells_nothing(tenants: Tenants) -> None:
    one, two, _ = tenants()

    def trial(secret: str, guess: str) -> float:
        one.post(secret)
        return two.seconds(guess)

    def own(secret: str, guess: str) -> float:
        two.post(secret)
        return two.seconds(guess)

    assert told(own, 1) > 0.8  # it would be noticed
    assert 0.2 < told(trial, 0) < 0.8


@pytest.mark.slow
def test_time_beside_a_running_answer_tells_nothing(tenants: Tenants) -> None:
    one, two, engine = tenants()

    def trial(secret: str, guess: str) -> float:
        with under_way([partial(one.post, secret, 80, logit_bias={"2": -100})]):
            until(lambda: engine.stats()["running"] == 1)
            start = time.perf_counter()
            assert two.post(guess, 8).status_code == 200
            return time.perf_counter() - start

    assert 0.2 < told(trial, 2) < 0.8


@pytest.mark.slow
def test_time_to_compile_tells_nothing(tenants: Tenants) -> None:
    one, two, _ = tenants()

    def schema(secret: str) -> dict[str, Any]:
        properties = {
            word + str(n): {"type": "string", "pattern": f"^{word}+$"} for n, word in enumerate(secret.split())
        }
        return {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": {"type": "object", "properties": properties}},
        }

    def seconds(key: Key, guess: str) -> float:
        start = time.perf_counter()
        assert key.chat(response_format=schema(guess)).status_code == 200
        return time.perf_counter() - start

    def trial(secret: str, guess: str) -> float:
        assert one.chat(response_format=schema(secret)).status_code == 200
        return seconds(two, guess)

    def own(secret: str, guess: str) -> float:
        seconds(two, secret)
        return seconds(two, guess)

    assert told(own, 3) > 0.8
    assert 0.2 < told(trial, 4) < 0.8


def test_what_another_key_has_sent_is_cold(tenants: Tenants) -> None:
    """The same prompt and schema, counted: nothing reused, and as many tokens computed, as if nobody had sent it."""
    one, two, engine = tenants()
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "string", "maxLength": 4}}}
    messages = [{"role": "user", "content": text(random.Random(9))}]
    counts = []
    for key in (one, two, two):
        before = engine.stats()
        answer = key.chat(messages=messages, response_format=schema).json()
        after = engine.stats()
        computed, cached = (after[name] - before[name] for name in ("computed_tokens", "cached_tokens"))
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
        counts.append((computed, cached))
    assert counts[0] == counts[1]
    assert counts[0][1] == 0
    assert counts[2][1] > 200  # its own it finds


LETTERS = "abcdefgh"


def many_merges() -> PreTrainedTokenizerFast:
    """A tokenizer with all words of two and four of eight letters."""
    pairs = [(one, other) for one in LETTERS for other in LETTERS]
    words_of_two = ["".join(pair) for pair in pairs]
    merges = pairs + [(one, other) for one in words_of_two for other in words_of_two]
    words = ["<s>", *LETTERS, *("".join(merge) for merge in merges)]
    made = Tokenizer(BPE({word: n for n, word in enumerate(words)}, merges, unk_token="<s>"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<s>")


def test_time_to_encode_tells_nothing() -> None:
    """Tokenizers remember words that they have encoded, and are then about 1.5 times as fast."""
    tokenizer = many_merges()
    times = defaultdict[str, list[float]](list)

    def seconds(encode: Callable[[str], object], asked: str) -> float:
        start = time.thread_time()  # of this thread alone: others may keep it waiting
        encode(asked)
        return time.thread_time() - start

    async def encoded(encoder: Encoder, asked: str, client: bytes) -> float:
        async with encoder._place(client, 0) as found:
            return seconds(found.encode, asked)

    for seed in range(15):
        rng = random.Random(seed)
        asked = " ".join("".join(rng.choices(LETTERS, k=24)) for _ in range(1000))
        for client, name in ((b"one", "sent by the same key"), (b"two", "sent by another key")):
            encoder = Encoder(tokenizer, context=2**31, truncates=False, max_waiting=8)
            asyncio.run(encoded(encoder, asked, b"one"))
            times[name].append(asyncio.run(encoded(encoder, asked, client)))
        markers = Markers(tokenizer)  # they encode texts with special tokens, for all keys
        for name in ("apart, first", "apart, again"):
            times[name].append(seconds(partial(markers.encode, markers=[]), asked))
    for name in ("sent by another key", "apart, again"):
        assert statistics.median(map(truediv, times[name], times["sent by the same key"])) > 1.2


@pytest.mark.slow
def test_the_order_of_answers_tells_nothing(tenants: Tenants) -> None:
    """Six candidates wait behind the secret; which of them comes first is not the right one more often than any."""
    one, two, engine = tenants(max_batch_size=1)
    rng, right = random.Random(5), 0

    def first(secret: str, candidates: list[str]) -> str:
        order: list[str] = []

        def guess(candidate: str) -> None:
            assert two.post(candidate).status_code == 200
            order.append(candidate)

        block = partial(one.post, text(rng, 30), 60, logit_bias={"2": -100})
        with under_way([block, partial(one.post, secret)]):
            until(lambda: engine.stats()["running"] + engine.stats()["prompts"] == 1)
            with under_way([partial(guess, candidate) for candidate in candidates]):
                pass
        return order[0]

    for _ in range(12):
        candidates = [text(rng, 60) for _ in range(6)]
        secret = rng.choice(candidates)
        right += first(secret, candidates) == secret
    assert right < 8  # two are expected by chance; eight of twelve come by chance in one of 7,000


def test_what_is_given_up_tells_nothing_but_how_much_others_store(tenants: Tenants) -> None:
    kept = []
    for same in (True, False):
        one, two, _ = tenants(store_bytes=400_000)
        rng = random.Random(6)
        mine, other = text(rng, 60), text(rng, 60)
        two.post(mine)
        for _ in range(2):
            assert one.post(mine if same else other).status_code == 200
        kept.append(json.dumps(two.post(mine).json()["usage"]))
    assert kept[0] == kept[1]
