"""Log probabilities of prompts, and the best of several answers, against plain forwards of the model."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from kvboost_hf import ChunkStore
from kvboost_hf.assets import load_embedded
from tests.conftest import make_model, random_ids
from tests.internals.server import Job, ModelEngine, SamplingOptions, TokenLogprob, _mean, make_app
from tests.property.test_text_stream import _byte_fallback
from tests.server.conftest import SETTINGS, Listening, listening
from tests.server.fake_engine import FakeEngine
from tests.server.test_worker import Told, numbers

pytestmark = pytest.mark.daily

KEY = {"Authorization": "Bearer key"}
ALL: dict[str, Any] = {"ignore_eos": True, "skip_special_tokens": False}
TEXT = "Anna plays the piano in the hall. The lamp in the hall is red. " * 3


def _scores(ids: list[int], top: int = 1) -> tuple[list[float], list[list[int]]]:
    """Of each token but the first one, and the likeliest ones at its place."""
    with torch.no_grad():
        logprobs = load_embedded()[0](torch.tensor([ids])).logits[0].float().log_softmax(-1)
    own = [float(row[token]) for row, token in zip(logprobs, ids[1:], strict=False)]
    return own, logprobs.topk(top).indices.tolist()[:-1]


def _complete(at: Listening, **asked: Any) -> Any:
    response = at.http.post("/v1/completions", json={"temperature": 0} | asked, headers=KEY)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("new", [0, 1, 5])
def test_an_echo_with_log_probabilities(reading: Listening, tokenizer: Any, new: int) -> None:
    ids = tokenizer.encode(TEXT)
    for _ in range(2):  # the second time the prompt is stored
        told = _complete(reading, prompt=TEXT, max_tokens=new, echo=True, logprobs=2, **ALL)
        (choice,) = told["choices"]
        found = choice["logprobs"]
        assert choice["text"].startswith(TEXT)
        assert told["usage"]["completion_tokens"] == new
        assert told["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert len(found["tokens"]) == len(found["top_logprobs"]) == len(found["text_offset"]) == len(ids) + new
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        own, best = _scores(ids, 2)
        assert found["token_logprobs"][1 : len(ids)] == pytest.approx(own, abs=1e-4)
        for top, wanted in zip(found["top_logprobs"][1 : len(ids)], best, strict=True):
            assert set(top) == {tokenizer.decode([token]) for token in wanted}
        assert found["text_offset"] == [len("".join(found["tokens"][:n])) for n in range(len(ids) + new)]
    # What was computed for it serves others.
    assert _complete(reading, prompt=TEXT, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_an_echo_with_log_probabilities_in_a_stream(reading: Listening, tokenizer: Any) -> None:
    whole = _complete(reading, prompt=TEXT, max_tokens=3, echo=True, logprobs=1)["choices"][0]
    text, tokens, offsets = "", list[str](), list[int]()
    client = reading.openai.with_options(api_key="key")
    for chunk in client.completions.create(
        model="reader", prompt=TEXT, max_tokens=3, echo=True, logprobs=1, temperature=0, stream=True
    ):
        choice = chunk.choices[0]
        text += choice.text
        if choice.logprobs is not None:
            tokens += choice.logprobs.tokens or []
            offsets += choice.logprobs.text_offset or []
    assert (text, tokens) == (whole["text"], whole["logprobs"]["tokens"])
    assert offsets == whole["logprobs"]["text_offset"]


@pytest.fixture(scope="module")
def spaced() -> Iterator[tuple[Listening, Any]]:
    """The embedded model behind a tokenizer whose tokens begin with a space, and whose texts begin with a token."""
    model, tokenizer = load_embedded()[0], _byte_fallback()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    engine = ModelEngine(model, tokenizer, store=ChunkStore(model, chunk_size=16))
    with listening(make_app(engine, tokenizer, SETTINGS)) as at:
        yield at, tokenizer
    engine.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["spaced", "reading"])
def test_offsets_are_those_of_the_text(
    spaced: tuple[Listening, Any], reading: Listening, name: str, stream: bool
) -> None:
    """Where tokens are parts of characters, have a space that the text has not, or are not in it at all."""
    at, prompt = spaced[0], "the cat sat on é🙂 mat"
    if name == "reading":
        at, prompt = reading, f"<|im_start|>{prompt}<|im_end|> mat"
    bias = {"1": 100, "0": 99, "266": 98}  # special tokens, and a text
    body = {"prompt": prompt, "max_tokens": 6, "echo": True, "logprobs": 3, "ignore_eos": True, "logit_bias": bias}
    for more in ({}, {"skip_special_tokens": False}, {"truncate_prompt_tokens": 5}, {"echo": False}):
        asked = body | more | {"presence_penalty": 2, "temperature": 1.5, "seed": 3, "stream": stream}
        response = at.http.post("/v1/completions", json=asked, headers=KEY)
        lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
        choices = [json.loads(line)["choices"][0] for line in (lines if stream else [response.text])]
        text = "".join(choice["text"] for choice in choices)
        told = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        tokens = [token for one in told for token in one["tokens"]]
        offsets = [start for one in told for start in one["text_offset"]]
        assert offsets == sorted(offsets)
        assert text.startswith(prompt) == (len(more) == 0 or "skip_special_tokens" in more)
        for n, (token, start) in enumerate(zip(tokens, offsets, strict=True)):
            if token.startswith("<"):
                left_out = n >= len(tokens) - 6 and more.get("skip_special_tokens", True)
                assert text.startswith(token, start) or token == "<s>" or left_out
            elif "\ufffd" not in token:  # a whole one, but for the space that the first one has
                assert text.startswith(token, start) or (start == 0 and text.startswith(token[1:]))
        assert text.endswith(tokens[-1])


class _Halves(FakeEngine):
    """Finds parts of characters likely."""

    def _logprobs(self, job: Job, piece: int) -> tuple[TokenLogprob, ...]:
        return (TokenLogprob(259, -2.0, ((250, -0.5), (251, -1.5), (259, -2.0))),)


def test_the_likeliest_of_tokens_with_one_text_is_told(spaced: tuple[Listening, Any]) -> None:
    with listening(make_app(_Halves("a"), spaced[1], SETTINGS)) as at:
        told = _complete(at, prompt="the", logprobs=3, max_tokens=1)["choices"][0]["logprobs"]
    assert told["top_logprobs"] == [{"\ufffd": -0.5, told["tokens"][0]: -2.0}]


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_next", "bloom"])
def test_prompts_beside_others(name: str) -> None:
    """Piece by piece, of a model that runs in batches and of one that does not, with stored prompts and without."""
    model = make_model(name)
    engine = ModelEngine(model, numbers(), store=ChunkStore(model, chunk_size=16), prefill_chunk_size=16)
    try:
        prompts = [random_ids(50, seed)[0].tolist() for seed in (0, 0, 1)]
        options = SamplingOptions(max_tokens=3, logprobs=0, prompt_logprobs=True)
        told = [Told() for _ in prompts]
        for ids, listener in zip(prompts, told, strict=True):
            engine.submit(Job(ids=ids, options=options), listener)
        plain = Told()
        engine.submit(Job(ids=prompts[0], options=SamplingOptions(max_tokens=3)), plain)
        for ids, listener in zip(prompts, told, strict=True):
            assert listener.end.error is None
            found: list[TokenLogprob] = [one for event in listener.events[:-1] for one in event.logprobs]
            with torch.no_grad():
                wanted = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
            assert [one.token for one in found[: len(ids)]] == ids
            assert found[0].logprob is None
            own = [float(row[token]) for row, token in zip(wanted, ids[1:], strict=False)]
            assert [one.logprob for one in found[1 : len(ids)]] == pytest.approx(own, abs=1e-4)
            assert len(found) == len(ids) + 3
        assert told[0].text == told[1].text == plain.text
    finally:
        engine.close()


def test_the_mean_log_probability_is_that_of_the_answer() -> None:
    """The tokens before it are of the prompt, the first of which has none."""
    found = [TokenLogprob(5, logprob) for logprob in (None, -9.0, -1.0, -4.0)]
    assert [_mean(found, tokens) for tokens in (0, 1, 2, 4)] == [0.0, -4.0, -2.5, -3.5]


def test_the_best_of_several(reading: Listening, tokenizer: Any) -> None:
    asked = {"prompt": ["Anna plays", "The lamp"], "temperature": 1.0, "seed": 5, "max_tokens": 8}
    every = _complete(reading, **asked, n=4, logprobs=0)
    best = _complete(reading, **asked, n=2, best_of=4)
    for first in (0, 4):
        choices = every["choices"][first : first + 4]
        means = [sum(one["logprobs"]["token_logprobs"]) / len(one["logprobs"]["tokens"]) for one in choices]
        ranked = sorted(range(4), key=lambda at: -means[at])
        found = best["choices"][first // 2 : first // 2 + 2]
        assert [one["text"] for one in found] == [choices[at]["text"] for at in ranked[:2]]
        assert all(one["logprobs"] is None for one in found)
    assert [one["index"] for one in best["choices"]] == [0, 1, 2, 3]
    assert best["usage"]["prompt_tokens"] == every["usage"]["prompt_tokens"]
    assert best["usage"]["completion_tokens"] == every["usage"]["completion_tokens"]
    echoed = _complete(reading, **asked, n=1, best_of=4, echo=True, logprobs=0)
    assert echoed["choices"][0]["text"] == "Anna plays" + best["choices"][0]["text"]
