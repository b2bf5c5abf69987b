"""How long answers get, what ends them, and what clients are told of both, on all APIs."""

import json
import re
from typing import Any

import openai
import pytest

from kvboost_hf import ChunkStore
from kvboost_hf.assets import load_embedded
from tests.internals.server import ModelEngine, ServerSettings
from tests.server.conftest import Listening, Serve
from tests.server.fake_engine import FakeEngine

CONTEXT = 120
ASK = [{"role": "user", "content": "Where is Anna?"}]
LONG = "Anna plays the piano. " * 60
# By route: a body, the field of its length, where the prompt stands, and what an unlimited length is besides none.
APIS: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": ({"messages": ASK}, "max_tokens"),
    "/v1/completions": ({"prompt": "Where is Anna?"}, "max_tokens"),
    "/v1/responses": ({"input": "Where is Anna?"}, "max_output_tokens"),
    "/v1/messages": ({"messages": ASK}, "max_tokens"),
    "/api/chat": ({"messages": ASK, "stream": False}, "num_predict"),
    "/api/generate": ({"prompt": "Where is Anna?", "stream": False}, "num_predict"),
}


def body_of(route: str, length: int | None = None, **more: Any) -> dict[str, Any]:
    body, field = APIS[route]
    told: dict[str, Any] = {"model": "reader", **body, **more}
    if length is None:
        return told
    return told | ({"options": {field: length}} if field == "num_predict" else {field: length})


def small(serve: Serve, engine: FakeEngine, **settings: Any) -> Listening:
    engine.max_model_len = CONTEXT
    return serve(engine, **settings)


@pytest.mark.parametrize("route", APIS)
@pytest.mark.parametrize("length", [None, -1, CONTEXT, 32_000, 2**40])
def test_the_room_is_the_longest(serve: Serve, engine: FakeEngine, route: str, length: int | None) -> None:
    at = small(serve, engine)
    answer = at.http.post(route, json=body_of(route, length))
    assert answer.status_code == 200, answer.text
    room = CONTEXT - len(engine.job.ids)
    assert engine.job.options.max_tokens == room
    assert answer.headers["x-kvboost-length"] == f"max_tokens={room}, limited_by=context"
    at.http.post(route, json=body_of(route, 3))
    assert engine.job.options.max_tokens == 3
    streamed = at.http.post(route, json=body_of(route, 3, stream=True))
    assert streamed.headers["x-kvboost-length"] == "max_tokens=3, limited_by=request"


@pytest.mark.parametrize("length", [0, -2])
def test_ollama_has_other_names_of_it(serve: Serve, engine: FakeEngine, length: int) -> None:
    at = small(serve, engine)
    assert at.http.post("/api/chat", json=body_of("/api/chat", length)).status_code == 200
    assert engine.job.options.max_tokens == CONTEXT - len(engine.job.ids)


def test_chats_take_both_names_of_a_length(serve: Serve, engine: FakeEngine) -> None:
    at = small(serve, engine)
    for both, most in (({"max_completion_tokens": 5, "max_tokens": 9}, 5), ({"max_completion_tokens": -1}, None)):
        at.http.post("/v1/chat/completions", json=body_of("/v1/chat/completions", **both))
        assert engine.job.options.max_tokens == (most or CONTEXT - len(engine.job.ids))


def test_the_setting_shortens_the_context(serve: Serve, engine: FakeEngine) -> None:
    at = small(serve, engine, max_model_len=100)
    at.http.post("/v1/chat/completions", json=body_of("/v1/chat/completions", 1000))
    assert engine.job.options.max_tokens == 100 - len(engine.job.ids)


def test_each_prompt_has_its_own_room(serve: Serve, engine: FakeEngine) -> None:
    at = small(serve, engine)
    answer = at.http.post("/v1/completions", json=body_of("/v1/completions", prompt=[[5] * 20, [6] * 50]))
    assert [ticket.job.options.max_tokens for ticket in engine.tickets] == [CONTEXT - 20, CONTEXT - 50]
    assert answer.headers["x-kvboost-length"] == f"max_tokens={CONTEXT - 50}, limited_by=context"


def test_log_probabilities_shorten_an_answer_that_nobody_has_measured(at: Listening, engine: FakeEngine) -> None:
    """Where it was asked for, it is refused as before."""
    body = body_of("/v1/chat/completions", logprobs=True, top_logprobs=19)
    answer = at.http.post("/v1/chat/completions", json=body | {"n": 2})
    assert answer.status_code == 200, answer.text
    assert engine.job.options.max_tokens == 500_000 // 20 // 2
    assert answer.headers["x-kvboost-length"].endswith("limited_by=logprobs")
    assert at.http.post("/v1/chat/completions", json=body | {"max_tokens": 26_000}).status_code == 400
    echo = body_of("/v1/completions", logprobs=1, echo=True, prompt=[[5] * 100, [6] * 100])
    assert at.http.post("/v1/completions", json=echo).status_code == 200
    assert engine.job.options.max_tokens == (250_000 - 200) // 2


def test_min_tokens_is_cut_with_the_length(serve: Serve, engine: FakeEngine) -> None:
    at = small(serve, engine)
    assert at.http.post("/v1/completions", json=body_of("/v1/completions", 500, min_tokens=300)).status_code == 200
    assert engine.job.options.min_tokens == engine.job.options.max_tokens
    refused = at.http.post("/v1/completions", json=body_of("/v1/completions", 5, min_tokens=6))
    assert "max_tokens, 5, got 6" in refused.json()["error"]["message"]


# The operator's own limit


def _note(route: str, told: Any) -> Any:
    """Where the end of an answer says what has ended it."""
    match route:
        case "/v1/chat/completions" | "/v1/completions":
            return told["choices"][0]
        case "/v1/responses":
            return told["incomplete_details"] or {}
        case _:
            return told


def _last(route: str, text: str) -> Any:
    """The object at the end of a stream that has the reason."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith(("data: {", "{"))]
    told = [json.loads(line) for line in lines]
    match route:
        case "/v1/responses":
            return told[-1]["response"]
        case "/v1/messages":
            return next(each["delta"] for each in told if each["type"] == "message_delta")
        case "/v1/chat/completions" | "/v1/completions":
            return next(each for each in told if each["choices"] and each["choices"][0]["finish_reason"])
        case _:
            return told[-1]


@pytest.mark.parametrize("route", APIS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_limit_of_the_operator_is_named_where_it_ends_an_answer(
    serve: Serve, engine: FakeEngine, route: str, stream: bool
) -> None:
    at = serve(engine, default_max_tokens=2)

    def ask(length: int | None = None) -> Any:
        answer = at.http.post(route, json=body_of(route, length, stream=stream))
        assert answer.headers["x-kvboost-length"].endswith("request" if length else "limited_by=server")
        return _note(route, _last(route, answer.text) if stream else answer.json())

    assert "length_limit" not in ask()  # it has ended by itself
    engine.reason = "length"
    assert ask()["length_limit"] == {"max_tokens": 2, "limited_by": "server"}
    assert engine.job.options.max_tokens == 2
    assert "length_limit" not in ask(2)


def test_without_the_flag_there_is_none(at: Listening, engine: FakeEngine) -> None:
    assert ServerSettings(model_name="reader").default_max_tokens is None
    with pytest.raises(ValueError, match="`default_max_tokens` must be positive, got 0"):
        ServerSettings(model_name="reader", default_max_tokens=0)


# What does not fit


def _prompt(route: str, text: str) -> dict[str, Any]:
    body, _ = APIS[route]
    asked = [{"role": "user", "content": text}]
    return {"model": "reader"} | {name: asked if name == "messages" else text for name in body if name != "stream"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [None, 1, 32_000])
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_an_overflow_as_openai_says_it(
    serve: Serve, engine: FakeEngine, route: str, length: int | None, stream: bool
) -> None:
    at = small(serve, engine)
    answer = at.http.post(route, json=body_of(route, length) | _prompt(route, LONG) | {"stream": stream})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
    counted = re.match(
        r"This model's maximum context length is (\d+) tokens\. However, your (?:messages|prompt) resulted in (\d+) "
        r"tokens\. Please reduce the length of the (?:messages|prompt)",
        error["message"],
    )
    assert counted, error["message"]
    whole = serve(FakeEngine("a"))
    usage = whole.http.post(route, json=_prompt(route, LONG)).json()["usage"]
    assert int(counted[1]) == CONTEXT
    assert int(counted[2]) == usage.get("prompt_tokens", usage.get("input_tokens"))
    assert not engine.tickets


def test_the_sdk_knows_it(serve: Serve, engine: FakeEngine) -> None:
    at = small(serve, engine)
    with pytest.raises(openai.BadRequestError) as told:
        at.openai.chat.completions.create(model="reader", messages=[{"role": "user", "content": LONG}])
    assert told.value.code == "context_length_exceeded"


def test_an_overflow_as_anthropic_says_it(serve: Serve, engine: FakeEngine) -> None:
    at = small(serve, engine)
    answer = at.http.post("/v1/messages", json=_prompt("/v1/messages", LONG) | {"max_tokens": 9})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    counted = re.match(r"prompt is too long: (\d+) tokens > (\d+) maximum", error["message"])
    assert counted, error["message"]
    assert int(counted[1]) > int(counted[2]) == CONTEXT


@pytest.mark.daily
@pytest.mark.parametrize("times", [1, 500])
@pytest.mark.parametrize(("route", "count"), [("/v1/messages", "count_tokens"), ("/v1/responses", "input_tokens")])
def test_tokens_of_what_is_too_long_are_counted(
    serve: Serve, engine: FakeEngine, route: str, count: str, times: int
) -> None:
    """Or estimated: a client asks for the number to learn whether it is."""
    at = small(serve, engine)
    counted = at.http.post(f"{route}/{count}", json=_prompt(route, LONG * times))
    assert counted.status_code == 200, counted.text
    assert counted.json()["input_tokens"] > 100 * times


@pytest.mark.parametrize("route", ["/api/chat", "/api/generate"])
def test_an_overflow_as_ollama_says_it(serve: Serve, engine: FakeEngine, route: str) -> None:
    at = small(serve, engine)
    answer = at.http.post(route, json=_prompt(route, LONG))
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("the input length exceeds the context length")
    assert f"maximum context length is {CONTEXT} tokens" in answer.json()["error"]


@pytest.mark.parametrize("route", APIS)
def test_what_is_far_too_long_has_an_estimate(serve: Serve, engine: FakeEngine, route: str) -> None:
    at = small(serve, engine)
    answer = at.http.post(route, json=_prompt(route, LONG * 500))
    assert answer.status_code == 400
    counts = [int(found) for found in re.findall(r"(\d+) tokens", answer.text)]
    assert CONTEXT in counts
    assert max(counts) > 50_000
    assert "estimate" in answer.text


@pytest.mark.parametrize("route", APIS)
def test_a_prompt_with_room_for_one_token(serve: Serve, engine: FakeEngine, route: str) -> None:
    wide = serve(engine)
    wide.http.post(route, json=body_of(route))
    length = len(engine.job.ids)
    engine.max_model_len = length + 1
    assert serve(engine).http.post(route, json=body_of(route, 500)).status_code == 200
    assert engine.job.options.max_tokens == 1
    engine.max_model_len = length
    assert serve(engine).http.post(route, json=body_of(route)).status_code == 400


def test_a_prompt_that_is_computed_alone_may_have_all_of_it(serve: Serve, engine: FakeEngine) -> None:
    engine.max_model_len = 50
    at = serve(engine)
    body = {"model": "reader", "prompt": [5] * 50, "max_tokens": 0, "echo": True}
    assert at.http.post("/v1/completions", json=body).status_code == 200
    assert at.http.post("/v1/completions", json=body | {"max_tokens": 1}).status_code == 400


@pytest.mark.parametrize(
    ("asked", "kept"), [(None, CONTEXT - CONTEXT // 8), (20, CONTEXT - 20), (32_000, CONTEXT // 2)]
)
def test_a_beginning_that_is_left_out_leaves_room(
    serve: Serve, engine: FakeEngine, asked: int | None, kept: int
) -> None:
    at = small(serve, engine, auto_truncate=True)
    body = {"model": "reader", "prompt": [5] * 500} | ({} if asked is None else {"max_tokens": asked})
    response = at.http.post("/v1/completions", json=body)
    assert (response.status_code, response.headers["x-kvboost-changed"]) == (200, "prompt-cut")
    assert len(engine.job.ids) == kept
    assert engine.job.options.max_tokens == CONTEXT - kept


@pytest.mark.parametrize("asked", [20, 32_000])
@pytest.mark.parametrize("route", APIS)
def test_a_prompt_that_has_room_keeps_its_beginning(serve: Serve, engine: FakeEngine, route: str, asked: int) -> None:
    """Where longer ones are cut, too: the answer gets what room is left, as where they are refused."""
    serve(engine).http.post(route, json=body_of(route, asked))
    ids = engine.job.ids
    engine.max_model_len = len(ids) + 5
    response = serve(engine, auto_truncate=True).http.post(route, json=body_of(route, asked))
    assert response.status_code == 200
    assert "x-kvboost-changed" not in response.headers
    assert list(engine.job.ids) == list(ids)
    assert engine.job.options.max_tokens == 5
    auto = {"truncation": "auto"} if route == "/v1/responses" else {"truncate_prompt_tokens": -1}
    assert serve(engine).http.post(route, json=body_of(route, asked) | auto).status_code == 200
    assert list(engine.job.ids) == list(ids)


def test_memory_bounds_a_context(serve: Serve) -> None:
    """What has no room in memory is cut, as what has none in the context, and clients are told of the smaller one."""
    model, tokenizer = load_embedded()
    engine = ModelEngine(model, tokenizer, store=ChunkStore(model, chunk_size=16), max_live_tokens=60)
    try:
        at = serve(engine)
        answer = at.http.post(
            "/v1/completions",
            json={"model": "reader", "prompt": [5] * 20, "max_tokens": 4000, "ignore_eos": True, "temperature": 0},
        ).json()
        assert answer["usage"]["completion_tokens"] == 40
        assert answer["choices"][0]["finish_reason"] == "length"
        assert at.http.get("/v1/models/reader").json()["max_model_len"] == 60
        assert "length is 60 tokens" in at.http.post("/v1/completions", json={"prompt": [5] * 60}).text
    finally:
        engine.close()


# What clients are told of the model

NAMES = ["max_model_len", "context_length", "context_window", "max_context_length", "max_input_tokens", "max_tokens"]


def test_models_have_their_length_under_the_names_that_clients_read(serve: Serve, engine: FakeEngine) -> None:
    at = small(serve, engine, model_aliases=("gpt-4o",))
    listed = at.http.get("/v1/models").json()["data"]
    assert len(listed) == 2
    for told in (*listed, at.http.get("/v1/models/gpt-4o").json()):
        assert [told[name] for name in NAMES] == [CONTEXT] * 6
        assert (told["meta"]["n_ctx"], told["meta"]["n_ctx_train"]) == (CONTEXT, CONTEXT)
    shown = at.http.post("/api/show", json={"model": "reader"}).json()["model_info"]
    assert shown["fake.context_length"] == CONTEXT
    assert at.openai.models.retrieve("reader").max_model_len == CONTEXT  # type: ignore[attr-defined]


def test_a_model_without_an_end_has_none(at: Listening) -> None:
    told = at.http.get("/v1/models/reader").json()
    assert not {*NAMES} & told.keys()
    assert "n_ctx" not in told["meta"]
