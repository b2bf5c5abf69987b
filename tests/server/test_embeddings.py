"""Embeddings: what transformers' own hidden states say, in between the steps of answers."""

import base64
import struct
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch
from torch.nn.functional import cosine_similarity, normalize

from kvboost_hf import ChunkStore
from kvboost_hf.assets import load_embedded
from tests.conftest import make_model, random_ids
from tests.internals.server import (
    DrainingError,
    EmbeddingJob,
    EmbeddingTurns,
    Job,
    ModelEngine,
    QueueFullError,
    SamplingOptions,
    TooLongError,
    embed,
)
from tests.server.conftest import Listening, Serve
from tests.server.test_worker import Told, numbers

pytestmark = pytest.mark.daily

TEXTS = ["Anna lives in Oslo.", "The lamp is red. " * 8, "é"]


def expected(model: Any, ids: list[int]) -> torch.Tensor:
    """By the hidden states that a forward for text returns."""
    with torch.no_grad():
        hidden = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1]
    return normalize(hidden[0].double().mean(0), dim=0)


@pytest.fixture
def engine() -> Iterator[ModelEngine]:
    model, tokenizer = load_embedded()
    made = ModelEngine(model, tokenizer, store=ChunkStore(model, chunk_size=16), max_queue_size=2)
    yield made
    made.close()


@pytest.fixture
def at(engine: ModelEngine, serve: Serve) -> Listening:
    return serve(engine, embeddings=True)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "qwen3_next"])
def test_equal_to_hidden_states(name: str) -> None:
    model = make_model(name)
    for length in (1, 40):
        ids = random_ids(length, length)[0].tolist()
        found = torch.tensor(embed(model, ids), dtype=torch.double)
        torch.testing.assert_close(found, expected(model, ids), rtol=0, atol=1e-5)
        assert found.norm().item() == pytest.approx(1, abs=1e-6)
        other = torch.tensor(embed(model, [*ids, 5]), dtype=torch.double)
        assert cosine_similarity(found, other, dim=0) < 1 - 1e-5


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "mistral"])
def test_in_pieces(name: str) -> None:
    model = make_model(name)
    ids = random_ids(40, 3)[0].tolist()
    for piece in (7, 16, 39):
        found = torch.tensor(embed(model, ids, piece=piece), dtype=torch.double)
        torch.testing.assert_close(found, expected(model, ids), rtol=0, atol=1e-5)


def test_the_client_gets_them_in_both_forms(at: Listening) -> None:
    """The SDK asks for base64, and decodes it."""
    model, tokenizer = load_embedded()
    for form in (openai.omit, "float"):
        answer = at.openai.embeddings.create(model="reader", input=TEXTS, encoding_format=form)
        assert [each.index for each in answer.data] == [0, 1, 2]
        for text, each in zip(TEXTS, answer.data, strict=True):
            wanted = expected(model, tokenizer.encode(text))
            torch.testing.assert_close(torch.tensor(each.embedding).double(), wanted, rtol=0, atol=1e-5)
        assert answer.usage.prompt_tokens == sum(len(tokenizer.encode(text)) for text in TEXTS)
    raw = at.http.post("/v1/embeddings", json={"model": "reader", "input": "é", "encoding_format": "base64"}).json()
    packed = base64.b64decode(raw["data"][0]["embedding"])
    assert list(struct.unpack(f"<{len(packed) // 4}f", packed)) == pytest.approx(answer.data[2].embedding, abs=1e-6)


def test_tokens_in_place_of_texts(at: Listening) -> None:
    ids = load_embedded()[1].encode(TEXTS[0])
    text, one, many = (
        at.openai.embeddings.create(model="reader", input=given).data for given in (TEXTS[0], ids, [ids, ids])
    )
    assert text[0].embedding == one[0].embedding == many[1].embedding


@pytest.mark.parametrize(
    ("changes", "status", "says"),
    [
        ({"dimensions": 8}, 400, "leave dimensions out"),
        ({"input": ""}, 400, "input"),
        ({"input": ["a", ""]}, 400, "a token at least"),
        ({"input": []}, 400, "input"),
        ({"input": [10**6]}, 400, "Tokens must be from 0"),
        ({"encoding_format": "hex"}, 400, "encoding_format"),
        ({"model": "other"}, 404, "no model"),
        ({"input": [5] * 9000}, 400, "Cut it into several"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_refusals(changes: dict[str, Any], status: int, says: str, at: Listening) -> None:
    answer = at.http.post("/v1/embeddings", json={"model": "reader", "input": "a"} | changes)
    assert answer.status_code == status
    assert says in answer.json()["error"]["message"]


def test_without_the_setting(engine: ModelEngine, serve: Serve) -> None:
    answer = serve(engine).http.post("/v1/embeddings", json={"model": "reader", "input": "a"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_supported"
    assert "--embeddings" in answer.json()["error"]["message"]


def test_between_the_tokens_of_an_answer() -> None:
    """One text for each step of those under way, and the answer stays what it is."""
    model = make_model()
    engine = ModelEngine(model, numbers(), store=ChunkStore(model, chunk_size=16))
    asked = Job(ids=random_ids(30, 1)[0].tolist(), options=SamplingOptions(max_tokens=20))
    texts = [random_ids(9, seed)[0].tolist() for seed in range(5)]
    plain, futures, done_at = Told(), list[Any](), list[int]()
    engine.submit(asked, plain)
    assert plain.end

    def listen(event: Any) -> None:
        if len(told.events) == 3:
            futures.append(engine.embed(texts))
            futures[0].add_done_callback(lambda _: done_at.append(len(told.events)))

    told = Told(listen)
    engine.submit(asked, told)
    assert told.text == plain.text
    assert futures[0].result() == [embed(model, text) for text in texts]
    assert done_at == [3 + len(texts) - 1]
    engine.close()


def test_a_long_text_and_many_texts_hold_up_nobody() -> None:
    """A piece of a text between two steps of an answer, and a text of each request in turn."""
    model = make_model()
    engine = ModelEngine(model, numbers(), store=ChunkStore(model, chunk_size=16), prefill_chunk_size=16)
    text = random_ids(100, 1)[0].tolist()
    plain = embed(model, text), embed(model, [9])
    sizes, order, go = list[int](), list[str](), threading.Event()

    def look(module: Any, args: Any, given: Any) -> None:
        assert go.wait(60)
        sizes.append(given["input_ids"].shape[1])

    handle = model.base_model.register_forward_pre_hook(look, with_kwargs=True)
    told = Told()
    engine.submit(Job(ids=[5], options=SamplingOptions(max_tokens=30)), told)
    many, one = engine.embed([[7]] * 50), engine.embed([text, [9]])
    for name, future in (("many", many), ("one", one)):
        future.add_done_callback(lambda _, name=name: order.append(name))
    go.set()
    assert told.end
    for found, wanted in zip(one.result(60), plain, strict=True):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=0, atol=1e-5)
    assert len(many.result(60)) == 50
    assert order == ["one", "many"]
    handle.remove()
    assert max(sizes) == 16
    engine.close()


def test_while_a_text_is_under_way_others_begin_that_need_one_piece() -> None:
    model, turns = make_model(), EmbeddingTurns()
    begun, fits, longer = (EmbeddingJob([[7] * tokens]) for tokens in (40, 16, 17))
    assert not begun.advance(model, 16)
    assert turns.next([fits, longer, begun], 16) is fits
    assert turns.next([longer, begun], 16) is begun
    assert turns.next([longer, begun], None) is longer


def test_limits_and_the_end() -> None:
    model = make_model()
    engine = ModelEngine(model, numbers(), store=ChunkStore(model, chunk_size=16), max_queue_size=1, max_model_len=50)
    with pytest.raises(TooLongError, match="A text of 51 tokens"):
        engine.embed([[5] * 51])
    assert len(engine.embed([[5] * 50]).result(60)) == 1
    held, go = threading.Event(), threading.Event()

    def hold(*_: object) -> None:
        held.set()
        assert go.wait(60)

    handle = model.register_forward_pre_hook(hold)
    told = Told()
    engine.submit(Job(ids=[5], options=SamplingOptions(max_tokens=1)), told)
    assert held.wait(60)
    first = engine.embed([[5]])
    with pytest.raises(QueueFullError):
        engine.embed([[5]])
    assert first.cancel()
    handle.remove()
    go.set()
    assert told.end
    assert engine.embed([[7]]).result(60) == [embed(model, [7])]
    assert engine.drain(60)
    with pytest.raises(DrainingError):
        engine.embed([[5]])
    engine.close()


def test_a_failure_is_told_and_others_go_on(
    at: Listening, engine: ModelEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(engine.model.base_model, "forward", None)
        with pytest.raises(openai.InternalServerError, match="TypeError"):
            at.openai.embeddings.create(model="reader", input="a")
    assert at.openai.embeddings.create(model="reader", input="a").data[0].embedding
