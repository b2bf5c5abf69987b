"""Chats by the openai SDK, over a socket."""

import json
import threading
from typing import Any

import openai
import pytest

from tests.internals.server import ServerSettings, TokenLogprob, make_app
from tests.server.conftest import Listening, Serve
from tests.server.fake_engine import FakeEngine

pytestmark = pytest.mark.daily

ASK: list[Any] = [{"role": "user", "content": "What does Anna play?"}]


def test_an_answer_and_its_usage(at: Listening, engine: FakeEngine, tokenizer: Any) -> None:
    answer = at.openai.chat.completions.create(model="reader", messages=ASK)
    assert answer.choices[0].message.content == "Anna plays the piano."
    assert answer.choices[0].finish_reason == "stop"
    ids = tokenizer.apply_chat_template(ASK, add_generation_prompt=True, return_dict=False)
    assert list(engine.job.ids) == list(ids)
    assert engine.job.ends == {tokenizer.eos_token_id}
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 4)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == len(ids) // 2
    assert answer.usage.prompt_tokens_details.model_extra == {
        "cached_tokens_by_tier": {"ram": len(ids) // 2},
        "moved_tokens": 3,
        "repaired_tokens": 1,
        "computed_tokens": len(ids) - len(ids) // 2 + 1,
    }


def test_a_stream_tells_its_role_then_pieces_then_the_reason_then_the_usage(at: Listening) -> None:
    stream = at.openai.chat.completions.create(
        model="reader", messages=ASK, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.content for chunk in chunks[1:5]] == ["Anna ", "plays ", "the ", "piano."]
    assert chunks[5].choices[0].finish_reason == "stop"
    assert chunks[6].choices == []
    assert chunks[6].usage is not None
    assert chunks[6].usage.completion_tokens == 4
    assert len({chunk.id for chunk in chunks}) == 1
    assert len(chunks) == 7


def test_a_stream_of_no_text_begins_with_an_empty_one(at: Listening, engine: FakeEngine) -> None:
    engine.says = []
    first, last = at.openai.chat.completions.create(model="reader", messages=ASK, stream=True)
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert last.choices[0].finish_reason == "stop"


def test_a_stream_without_options_tells_no_usage_and_ends_with_done(at: Listening) -> None:
    body = {"model": "reader", "messages": ASK, "stream": True}
    lines = at.http.post("/v1/chat/completions", json=body).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    assert "usage" not in "".join(lines)


def test_pieces_arrive_before_the_answer_is_whole(at: Listening, engine: FakeEngine) -> None:
    seen = threading.Event()

    def wait_for_the_reader(ticket: object, piece: int) -> None:
        if piece == 1:
            assert seen.wait(20)

    engine.before = wait_for_the_reader
    said = []
    for chunk in at.openai.chat.completions.create(model="reader", messages=ASK, stream=True):
        if chunk.choices[0].delta.content:
            said.append(chunk.choices[0].delta.content)
            seen.set()  # a server that sends all at the end would never come here
    assert "".join(said) == "Anna plays the piano."


def test_several_choices_have_seeds_of_their_own(at: Listening, engine: FakeEngine) -> None:
    answer = at.openai.chat.completions.create(model="reader", messages=ASK, n=3, seed=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {"Anna plays the piano."}
    assert [ticket.job.options.seed for ticket in engine.tickets] == [5, 6, 7]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(engine.job.ids)  # once, for three answers
    assert answer.usage.completion_tokens == 12


def test_several_choices_in_a_stream(at: Listening) -> None:
    said = {0: "", 1: ""}
    reasons = {}
    for chunk in at.openai.chat.completions.create(model="reader", messages=ASK, n=2, stream=True):
        for choice in chunk.choices:
            said[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason
    assert said == {0: "Anna plays the piano.", 1: "Anna plays the piano."}
    assert reasons == {0: "stop", 1: "stop"}


def test_options_reach_the_engine(at: Listening, engine: FakeEngine) -> None:
    at.openai.chat.completions.create(
        model="reader",
        messages=ASK,
        temperature=0.5,
        top_p=0.9,
        max_completion_tokens=3,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        logit_bias={"17": -100},
        stop=["\n", "."],
        extra_body={"top_k": 40, "min_p": 0.125, "repetition_penalty": 1.5},
    )
    options = engine.job.options
    assert (options.temperature, options.top_p, options.top_k, options.min_p) == (0.5, 0.9, 40, 0.125)
    assert (options.presence_penalty, options.frequency_penalty, options.repetition_penalty) == (0.25, -0.5, 1.5)
    assert options.max_tokens == 3
    assert options.logit_bias == {17: -100}
    assert options.seed is None
    assert engine.job.stop == ("\n", ".")
    assert engine.job.timeout_s == 20


def test_what_is_not_said_has_the_values_of_the_api(at: Listening, engine: FakeEngine) -> None:
    at.openai.chat.completions.create(model="reader", messages=ASK, max_tokens=2, stop="x")
    assert (engine.job.options.temperature, engine.job.options.top_p) == (1.0, 1.0)
    assert engine.job.options.max_tokens == 2
    assert engine.job.options.logprobs is None
    assert engine.job.stop == ("x",)
    assert engine.job.salt == b""


def test_an_answer_without_a_length_fits_the_context(serve: Serve, engine: FakeEngine) -> None:
    at = serve(engine, max_model_len=100, default_max_tokens=90)
    at.openai.chat.completions.create(model="reader", messages=ASK)
    assert engine.job.options.max_tokens == 100 - len(engine.job.ids)


def test_logprobs(at: Listening, engine: FakeEngine, tokenizer: Any) -> None:
    answer = at.openai.chat.completions.create(model="reader", messages=ASK, logprobs=True, top_logprobs=2)
    told = answer.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    assert [one.token for one in told.content] == [tokenizer.decode([token]) for token in (40, 41, 42, 43)]
    assert told.content[0].logprob == -0.25
    assert [one.logprob for one in told.content[0].top_logprobs] == [-0.5, -1.5]
    assert bytes(told.content[0].bytes or []).decode() == told.content[0].token
    plain = at.openai.chat.completions.create(model="reader", messages=ASK, logprobs=True)
    assert plain.choices[0].logprobs is not None
    assert engine.job.options.logprobs == 0


def test_logprobs_in_a_stream(at: Listening) -> None:
    stream = at.openai.chat.completions.create(model="reader", messages=ASK, logprobs=True, stream=True)
    told = [chunk.choices[0].logprobs for chunk in stream]
    assert sum(len(one.content or []) for one in told if one is not None) == 4


def test_contents_in_parts_and_the_roles_of_clients(at: Listening, engine: FakeEngine, tokenizer: Any) -> None:
    at.openai.chat.completions.create(
        model="reader",
        messages=[
            {"role": "developer", "content": "Be short."},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "What does ", "prompt_cache_breakpoint": {"mode": "explicit"}},
                    {"type": "text", "text": "Anna play?"},
                ],
            },
        ],
    )
    told = [{"role": "system", "content": "Be short."}, *ASK]
    assert list(engine.job.ids) == tokenizer.apply_chat_template(told, add_generation_prompt=True, return_dict=False)


def test_an_answer_goes_back_as_it_came(at: Listening, engine: FakeEngine) -> None:
    answer = at.openai.chat.completions.create(model="reader", messages=ASK)
    again: list[Any] = [*ASK, answer.choices[0].message, {"role": "user", "content": "And Tom?"}]
    assert at.openai.chat.completions.create(model="reader", messages=again).choices[0].message.content
    again[1] = answer.choices[0].message.model_dump()  # nulls included
    assert at.openai.chat.completions.create(model="reader", messages=again).choices[0].message.content


def test_cache_salts_keep_caches_apart(serve: Serve, engine: FakeEngine) -> None:
    """As vLLM's field of the name, in all routes for text; `prompt_cache_key` keeps nothing apart."""
    at = serve(engine, salt="server")
    bodies: dict[str, dict[str, Any]] = {
        "chat/completions": {"messages": ASK},
        "completions": {"prompt": "Who?"},
        "responses": {"input": "Who?"},
        "warm": {"texts": ["Who?"]},
    }
    for route, body in bodies.items():
        salts = set()
        for more in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"prompt_cache_key": "a"}):
            model = {} if route == "warm" else {"model": "reader"}
            assert at.http.post(f"/v1/{route}", json={**model, **body, **more}).status_code == 200
            salts.add(engine.job.salt)
        assert len(salts) == 3, route
        assert b"server" in salts
    refused = at.http.post("/v1/completions", json={"model": "reader", "prompt": "Who?", "cache_salt": ""})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "cache_salt"


def test_api_keys_keep_caches_apart_and_prompt_cache_keys_do_not(serve: Serve, engine: FakeEngine) -> None:
    at = serve(engine, api_keys=("one", "two"))
    salts = set()
    for key in ("one", "two"):
        for cache_key in (openai.omit, "tenant", "other"):
            client = at.openai.with_options(api_key=key)
            for _ in range(2):
                client.chat.completions.create(model="reader", messages=ASK, prompt_cache_key=cache_key)
                salts.add(engine.job.salt)
    assert len(salts) == 2
    assert b"" not in salts


@pytest.mark.parametrize("field", ["user", "metadata", "service_tier", "store"])
def test_fields_that_mean_nothing_are_taken(at: Listening, field: str) -> None:
    value: Any = {"user": "me", "metadata": {"a": "b"}, "service_tier": "auto", "store": False}[field]
    assert at.openai.chat.completions.create(model="reader", messages=ASK, extra_body={field: value}).choices


def test_a_cut_answer_says_so(at: Listening, engine: FakeEngine) -> None:
    engine.reason = "length"
    answer = at.openai.chat.completions.create(model="reader", messages=ASK, max_tokens=2)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content == "Anna plays "


def test_bodies_of_streams_are_json_lines(at: Listening) -> None:
    body = {"model": "reader", "messages": ASK, "stream": True}
    with at.http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line and line != "data: [DONE]":
                assert json.loads(line.removeprefix("data: "))["object"] == "chat.completion.chunk"


def test_the_bytes_of_a_token_that_is_a_part_of_a_character(engine: FakeEngine, tokenizer: Any) -> None:
    """Its text is a mark for what cannot be read; clients join bytes."""
    context = make_app(engine, tokenizer, ServerSettings(model_name="reader")).state.context
    ids = tokenizer.encode("€", add_special_tokens=False)
    assert len(ids) > 1
    told = [bytes(context.logprob_body(TokenLogprob(token, -1.0))["bytes"]) for token in ids]
    assert b"".join(told).decode() == "€"
