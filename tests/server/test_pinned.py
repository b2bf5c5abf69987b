"""What is warmed for a server stays in host memory, whatever else comes; no client gets more than its share."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from transformers import PreTrainedModel

from kvboost_hf import ChunkStore, ReusePolicy
from kvboost_hf.assets import load_embedded
from tests.conftest import STATEFUL, make_model, random_ids
from tests.internals.server import Finished, Job, Keep, ModelEngine, SamplingOptions, ServerSettings, _warm, make_app
from tests.server.conftest import listening
from tests.server.test_worker import Told, numbers

pytestmark = pytest.mark.daily

BUDGET = 4_000_000
HANDBOOK = "Anna lives in Oslo. She plays the piano. The lamp is red. It costs ten coins. " * 20
OTHERS = 18


@pytest.fixture(scope="module")
def reader() -> tuple[PreTrainedModel, Any]:
    return load_embedded()


@contextmanager
def engine_of(model: PreTrainedModel, tokenizer: Any, budget: int = BUDGET, **more: Any) -> Iterator[ModelEngine]:
    engine = ModelEngine(model, tokenizer, store=ChunkStore(model, max_bytes=budget), **more)
    yield engine
    engine.close()


def ask(engine: ModelEngine, ids: list[int], *, share: float | None = None, client: bytes = b"") -> Finished:
    told = Told()
    options, keep = SamplingOptions(max_tokens=0 if share else 1), (Keep(share=share),) if share else ()
    engine.submit(Job(ids=ids, options=options, keep=keep, client=client, salt=client), told)
    assert told.end.error is None
    return told.end


def crowd(engine: ModelEngine, count: int = OTHERS, tokens: int = 600) -> None:
    """Other prompts, which take the place of what is not pinned."""
    for n in range(count):
        ask(engine, (random_ids(tokens, 100 + n)[0] % engine.vocab_size).tolist())


def pinned_bytes(engine: ModelEngine) -> int:
    keys = engine.store.pinned_keys()
    return sum(chunk.nbytes for key, chunk in engine.store.inspect().chunks.items() if key in keys)


@pytest.mark.parametrize("policy", [None, ReusePolicy(mode="blend")], ids=["exact", "blend"])
def test_what_the_operator_warms_survives_other_requests(
    reader: tuple[PreTrainedModel, Any], policy: ReusePolicy | None
) -> None:
    ids = reader[1].encode(HANDBOOK)
    with engine_of(*reader, policy=policy) as engine:
        ask(engine, ids)  # a prompt that nobody has asked to keep
        crowd(engine)
        found = ask(engine, ids)
        # Its sentences are alike: with "blend", a chunk that is left may serve in several places.
        assert found.cached_tokens - found.moved_tokens < len(ids) // 2
        _warm(engine, ids, [b""])
        pinned = engine.stats()["store"]["pinned_chunks"]
        assert pinned > 2
        crowd(engine)
        stats = engine.stats()["store"]
        assert stats["pinned_chunks"] >= pinned
        assert stats["evictions"] > OTHERS
        assert ask(engine, [*ids, *reader[1].encode("Who?")]).cached_tokens >= len(ids) - 1


def test_what_the_route_warms_survives_other_requests(reader: tuple[PreTrainedModel, Any]) -> None:
    with (
        engine_of(*reader, budget=2 * BUDGET) as engine,
        listening(make_app(engine, reader[1], ServerSettings(model_name="reader"))) as at,
    ):
        assert at.http.post("/v1/warm", json={"texts": [HANDBOOK]}).json()["pinned"]
        crowd(engine, 2 * OTHERS)
        answer = at.openai.completions.create(model="reader", prompt=HANDBOOK + "Who?", max_tokens=1)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert (answer.usage.prompt_tokens_details.cached_tokens or 0) >= len(reader[1].encode(HANDBOOK)) - 1
        assert at.http.get("/v1/stats").json()["store"]["pinned_chunks"] > 2
        assert not at.http.post("/v1/warm", json={"texts": [HANDBOOK * 5]}).json()["pinned"]  # more than its share


def test_the_oldest_texts_of_a_client_give_way(reader: tuple[PreTrainedModel, Any]) -> None:
    """Whatever continues them, and nobody else's."""
    with engine_of(*reader) as engine:
        texts = [random_ids(270, seed)[0].tolist() for seed in range(6)]
        assert ask(engine, texts[0], share=0.4, client=b"other").pinned
        for text in texts[1:]:
            assert ask(engine, text, share=0.4, client=b"one").pinned
            ask(engine, [*text, *range(2, 90)], client=b"one")  # takes the place of its tail
            assert pinned_bytes(engine) <= 0.8 * BUDGET
        crowd(engine)
        assert ask(engine, texts[0], client=b"other").cached_tokens == 269
        assert ask(engine, texts[-1], client=b"one").cached_tokens == 269
        assert ask(engine, texts[1], client=b"one").cached_tokens < 200
        assert not ask(engine, random_ids(900, 9)[0].tolist(), share=0.4, client=b"one").pinned
        assert ask(engine, texts[-1], client=b"one").cached_tokens == 269  # for nothing was let go of for it


@pytest.mark.parametrize("name", STATEFUL)
def test_states_are_kept_and_let_go_of_too(name: str) -> None:
    with engine_of(make_model(name), numbers(), budget=300_000) as engine:
        for seed in range(5):
            ids = random_ids(150, seed)[0].tolist()
            assert ask(engine, ids, share=0.6).pinned
        crowd(engine, 6, 150)
        assert ask(engine, [*ids, 5, 6, 7]).cached_tokens >= 149
        assert engine.store.stats()["bytes"] <= 300_000


def test_a_server_whose_texts_have_no_room_does_not_start(reader: tuple[PreTrainedModel, Any]) -> None:
    with engine_of(*reader) as engine:
        _warm(engine, reader[1].encode(HANDBOOK), [b""])
        with pytest.raises(ValueError, match="raise `--max-cache-bytes`"):
            _warm(engine, reader[1].encode("Tom has goats. " * 300), [b""])
        assert ask(engine, reader[1].encode(HANDBOOK)).cached_tokens > 200
