"""Ollama's API: what it makes of requests, and the form of its answers."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvboost_hf import ChunkStore
from kvboost_hf.assets import load_embedded
from tests.internals.server import ModelCard, ModelEngine, OllamaChatRequest, QueueFullError, make_app
from tests.server.conftest import SETTINGS, Listening, Serve, listening
from tests.server.fake_engine import FakeEngine

pytestmark = pytest.mark.daily

ASK: list[Any] = [{"role": "user", "content": "Who?"}]
CHAT: dict[str, Any] = {"model": "reader", "messages": ASK, "stream": False}
GENERATE: dict[str, Any] = {"model": "reader", "prompt": "Who?", "stream": False}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "look", "arguments": {"at": "lamp", "far": NaN}}</tool_call>'
SYSTEM = [{"role": "system", "content": "Be short."}]


def _ids(tokenizer: Any, messages: list[Any], **more: Any) -> list[int]:
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **more)


def _lines(response: Any) -> list[Any]:
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def test_a_chat(at: Listening, engine: FakeEngine, tokenizer: Any) -> None:
    told = at.http.post("/api/chat", json=CHAT | {"messages": SYSTEM + ASK, "model": "reader:latest"}).json()
    assert told["created_at"].startswith("20")
    assert told | {"created_at": ""} == {
        "model": "reader:latest",
        "created_at": "",
        "message": {"role": "assistant", "content": "Anna plays the piano."},
        "done": True,
        "done_reason": "stop",
        "total_duration": 500_000_000,
        "load_duration": 0,
        "prompt_eval_count": len(engine.job.ids),
        "prompt_eval_duration": 250_000_000,
        "eval_count": 4,
        "eval_duration": 250_000_000,
        "cached_tokens": len(engine.job.ids) // 2,
    }
    assert list(engine.job.ids) == _ids(tokenizer, SYSTEM + ASK)


def test_streams_are_lines_and_the_default(at: Listening, engine: FakeEngine) -> None:
    del engine
    lines = _lines(at.http.post("/api/chat", json={"model": "reader", "messages": ASK}))
    assert [line["message"]["content"] for line in lines] == ["Anna ", "plays ", "the ", "piano.", ""]
    assert [line["done"] for line in lines] == [False] * 4 + [True]
    assert lines[-1]["eval_count"] == 4
    lines = _lines(at.http.post("/api/generate", json={"model": "reader", "prompt": "Who?", "stream": None}))
    assert "".join(line["response"] for line in lines) == "Anna plays the piano."
    assert lines[-1]["done_reason"] == "stop"


def test_silent_streams_stay_json(serve: Serve, engine: FakeEngine) -> None:
    engine.before = lambda ticket, piece: ticket.cancelled.wait(0.3 if piece == 1 else 0)
    response = serve(engine, ping_s=0.05).http.post("/api/generate", json=GENERATE | {"stream": True})
    assert "\n  " in response.text
    assert "".join(line["response"] for line in _lines(response)) == "Anna plays the piano."


def test_options(at: Listening, engine: FakeEngine) -> None:
    options = {"num_predict": 3, "temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "seed": 7, "stop": ["x"]}
    options |= {"repeat_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3}
    response = at.http.post("/api/generate", json=GENERATE | {"options": options | {"num_ctx": 9, "mirostat": 1}})
    assert response.headers["x-kvboost-ignored"].startswith("options.num_ctx, options.mirostat")
    job, chosen = engine.job, engine.job.options
    assert (chosen.max_tokens, chosen.temperature, chosen.top_k, chosen.top_p) == (3, 0.5, 4, 0.9)
    assert (chosen.min_p, chosen.seed, job.stop, chosen.repetition_penalty) == (0.1, 7, ("x",), 1.1)
    assert (chosen.presence_penalty, chosen.frequency_penalty) == (0.2, 0.3)


@pytest.mark.parametrize("num_predict", [0, -1, -2, None])
def test_answers_without_a_limit_have_that_of_the_server(
    serve: Serve, engine: FakeEngine, num_predict: int | None
) -> None:
    at = serve(engine, default_max_tokens=2)
    told = at.http.post("/api/chat", json=CHAT | {"options": {"num_predict": num_predict, "seed": -1}}).json()
    assert told["message"]["content"] == "Anna plays "
    assert engine.job.options.seed is None


def test_a_cut_answer(at: Listening, engine: FakeEngine) -> None:
    engine.reason = "length"
    assert at.http.post("/api/chat", json=CHAT).json()["done_reason"] == "length"


def test_calls(at: Listening, engine: FakeEngine) -> None:
    engine.says = ["Well. ", CALL, CALL]
    told = at.http.post("/api/chat", json=CHAT | {"tools": [TOOL]}).json()
    calls = told["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [
        {"index": index, "name": "look", "arguments": {"at": "lamp", "far": None}} for index in (0, 1)
    ]
    assert (told["message"]["content"].strip(), told["done_reason"]) == ("Well.", "stop")
    lines = _lines(at.http.post("/api/chat", json=CHAT | {"tools": [TOOL], "stream": True}))
    streamed = [call for line in lines for call in line["message"].get("tool_calls", ())]
    assert [call["function"] for call in streamed] == [call["function"] for call in calls]


def test_calls_and_results_are_paired() -> None:
    calls = [{"function": {"name": name, "arguments": {"at": name}}} for name in ("look", "hear", "hear")]
    results = [{"role": "tool", "tool_name": name, "content": name} for name in ("hear", "look", None)]
    talk = [*ASK, {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": calls}, *results]
    found = OllamaChatRequest.model_validate(CHAT | {"messages": talk}).chat.messages
    assert found[1].reasoning_content == "Hm."
    assert [(call.id, call.function.parsed) for call in found[1].tool_calls] == [
        ("call00001", {"at": "look"}),
        ("call00002", {"at": "hear"}),
        ("call00003", {"at": "hear"}),
    ]
    assert [message.tool_call_id for message in found[2:]] == ["call00002", "call00001", "call00003"]
    assert [message.name for message in found[2:]] == ["hear", "look", None]


def test_format(at: Listening, engine: FakeEngine) -> None:
    schema = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    for path, body in (("/api/chat", CHAT), ("/api/generate", GENERATE), ("/api/generate", GENERATE | {"raw": True})):
        for form, constrained in (("", False), (None, False), ("json", True), (schema, True)):
            assert at.http.post(path, json=body | {"format": form}).status_code == 200
            assert (engine.job.options.constraint is not None) == constrained


def test_logprobs(at: Listening) -> None:
    told = at.http.post("/api/chat", json=CHAT | {"logprobs": True, "top_logprobs": 2}).json()["logprobs"]
    assert len(told) == 4
    assert told[0].keys() == {"token", "logprob", "bytes", "top_logprobs"}
    assert [one["logprob"] for one in told[0]["top_logprobs"]] == [-0.5, -1.5]
    assert "logprobs" not in at.http.post("/api/generate", json=GENERATE).json()


def test_prompts_are_chats_unless_they_are_raw(at: Listening, engine: FakeEngine, tokenizer: Any) -> None:
    at.http.post("/api/generate", json=GENERATE | {"system": "Be short."})
    assert list(engine.job.ids) == _ids(tokenizer, SYSTEM + ASK)
    told = at.http.post("/api/generate", json=GENERATE | {"raw": True, "prompt": "<|im_start|>"}).json()
    assert list(engine.job.ids) == tokenizer.encode("<|im_start|>")
    assert "context" not in told


def test_context_continues_a_chat(at: Listening, engine: FakeEngine, tokenizer: Any) -> None:
    said = "Anna plays the piano."
    context = _ids(tokenizer, SYSTEM + ASK) + tokenizer.encode(said, add_special_tokens=False)
    body = GENERATE | {"context": context, "system": "Be short.", "prompt": "Where?"}
    assert at.http.post("/api/generate", json=body).headers["x-kvboost-ignored"] == "system"
    talk = [*SYSTEM, *ASK, {"role": "assistant", "content": said}, {"role": "user", "content": "Where?"}]
    assert list(engine.job.ids) == _ids(tokenizer, talk)
    told = at.http.post("/api/generate", json=GENERATE).json()
    assert told["context"] == [*_ids(tokenizer, ASK), 40, 41, 42, 43]
    text = at.http.post("/api/generate", json=GENERATE | {"context": context, "prompt": "<|im_end|>"})
    assert text.status_code == 200
    assert list(engine.job.ids).count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 4  # as in the template


@pytest.mark.parametrize(
    ("path", "body", "empty"),
    [
        ("/api/chat", {"messages": []}, {"message": {"role": "assistant", "content": ""}}),
        ("/api/chat", {}, {"message": {"role": "assistant", "content": ""}}),
        ("/api/generate", {}, {"response": ""}),
    ],
)
def test_requests_without_a_prompt_load_and_unload(
    at: Listening, engine: FakeEngine, path: str, body: Any, empty: Any
) -> None:
    for keep_alive, reason in ((None, "load"), ("5m", "load"), (-1, "load"), (0, "unload"), ("0", "unload")):
        told = at.http.post(path, json={"model": "reader", "keep_alive": keep_alive} | body).json()
        assert (told.items() >= empty.items(), told["done"], told["done_reason"]) == (True, True, reason)
    assert not engine.tickets
    assert at.http.post(path, json={"model": "writer"} | body).status_code == 404


@pytest.mark.parametrize(
    ("path", "body", "status", "part"),
    [
        ("/api/chat", CHAT | {"model": "writer"}, 404, "There is no model 'writer'"),
        ("/api/chat", CHAT | {"model": "reader:7b"}, 404, "There is no model"),
        ("/api/chat", {"messages": ASK}, 400, "model: Field required"),
        ("/api/chat", CHAT | {"messages": [{"role": "critic"}]}, 400, "messages.0.role"),
        ("/api/chat", CHAT | {"options": {"temperature": 9}}, 400, "options.temperature: Input should be less"),
        ("/api/chat", CHAT | {"format": "yaml"}, 400, "format"),
        ("/api/chat", CHAT | {"tools": [{"type": "function"}]}, 400, "tools.0.function"),
        ("/api/generate", GENERATE | {"suffix": "s"}, 400, "Leave suffix out"),
        ("/api/generate", GENERATE | {"template": "t"}, 400, "template: "),
        ("/api/generate", GENERATE | {"context": [1, 10**6]}, 400, "Tokens must be from 0 to 1471, got 1000000"),
        ("/api/generate", GENERATE | {"context": ["a"]}, 400, "context.0"),
        ("/api/generate", GENERATE | {"context": [5], "raw": True}, 400, "leave out system and context"),
        ("/api/embed", {"model": "reader", "input": "a"}, 404, "--embeddings"),
        ("/api/embeddings", {"model": "reader", "prompt": "a"}, 404, "--embeddings"),
        ("/api/show", {"model": "writer"}, 404, "There is no model"),
        ("/api/show", {}, 400, "a name is required"),
        ("/api/pull", {"model": "writer"}, 400, "serves one model, 'reader'"),
        ("/api/create", {"model": "writer"}, 400, "/api/create is not served"),
        ("/api/push", {"model": "writer"}, 400, "--model NAME"),
        ("/api/copy", {"source": "reader", "destination": "writer"}, 400, "--model NAME"),
        ("/api/other", {}, 404, "Not Found"),
    ],
)
def test_errors_are_texts(at: Listening, path: str, body: Any, status: int, part: str) -> None:
    response = at.http.post(path, json=body)
    assert response.status_code == status
    assert response.json().keys() == {"error"}
    assert part in response.json()["error"]


def test_other_errors(at: Listening, serve: Serve, engine: FakeEngine) -> None:
    assert "one model" in at.http.request("DELETE", "/api/delete", json={"model": "reader"}).json()["error"]
    engine.failure = "out of luck"
    assert at.http.post("/api/chat", json=CHAT).json() == {"error": "out of luck"}
    lines = _lines(at.http.post("/api/chat", json=CHAT | {"stream": True}))
    assert lines[-1] == {"error": "out of luck"}
    assert not any(line.get("done") for line in lines)
    engine.error = QueueFullError("full", 2.0)
    response = at.http.post("/api/chat", json=CHAT)
    assert (response.status_code, response.json(), response.headers["retry-after"]) == (429, {"error": "full"}, "2")
    locked = serve(engine, api_keys=("key",))
    assert "No API key" in locked.http.get("/api/tags").json()["error"]
    assert locked.http.get("/api/tags", headers={"authorization": "Bearer key"}).status_code == 200
    assert (
        "think"
        in serve(engine, strict_requests=True).http.post("/api/chat", json=CHAT | {"thinks": True}).json()["error"]
    )


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", None])
def test_bodies_of_any_type(at: Listening, engine: FakeEngine, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    for path, body in (("/api/chat", CHAT), ("/api/generate", GENERATE), ("/api/show", {"model": "reader"})):
        assert at.http.post(path, content=json.dumps(body), headers=headers).status_code == 200
    taken = len(engine.tickets)
    page = at.http.post("/api/chat", content=json.dumps(CHAT), headers=headers | {"origin": "https://a.example"})
    assert (page.status_code, len(engine.tickets)) == (415, taken)
    assert "Content-Type: application/json" in page.json()["error"]
    assert "must be JSON" in at.http.post("/api/chat", content="model=reader", headers=headers).json()["error"]
    assert at.http.post("/api/chat", json=CHAT, headers={"origin": "https://a.example"}).status_code == 200
    assert at.http.get("/api/tags", headers=headers | {"origin": "https://a.example"}).status_code == 200


def test_models(serve: Serve, engine: FakeEngine) -> None:
    at = serve(engine, model_aliases=("gpt-4o", "qwen:4b", "*"), embeddings=True, max_model_len=512)
    models = at.http.get("/api/tags").json()["models"]
    assert [model["name"] for model in models] == ["reader:latest", "gpt-4o:latest", "qwen:4b"]
    assert len({model["digest"] for model in models}) == 1
    assert models[0]["size"] == 6_000_000
    assert models[0]["details"].items() >= {"family": "fake", "parameter_size": "1.5M"}.items()
    [loaded] = at.http.get("/api/ps").json()["models"]
    assert (loaded["context_length"], loaded["size_vram"]) == (512, 0)
    for names in ({"model": "reader"}, {"name": "reader:latest"}, {"model": "qwen:4b"}):
        shown = at.http.post("/api/show", json=names).json()
    assert shown["model_info"]["fake.context_length"] == 512
    assert shown["capabilities"] == ["completion", "tools", "embedding"]
    assert at.http.get("/api/version").json()["version"].count(".") == 2
    assert at.http.head("/").status_code == 200
    told = at.http.post("/v1/chat/completions", json={"model": "gpt-4o:latest", "messages": ASK}).json()
    assert told["model"] == "gpt-4o:latest"


def test_a_template_without_tools(engine: FakeEngine) -> None:
    tokenizer = load_embedded()[1]
    tokenizer.chat_template += "{% if enable_thinking %}{% endif %}"
    with listening(make_app(engine, tokenizer, SETTINGS)) as at:
        shown = at.http.post("/api/show", json={"model": "reader"}).json()
    assert shown["capabilities"] == ["completion", "thinking"]


def test_the_card_of_a_model() -> None:
    model = load_embedded()[0]
    card = ModelCard.of(model)
    assert card.parameters == sum(one.numel() for one in model.parameters())
    assert card.num_bytes >= 4 * card.parameters
    assert (card.family, card.quantization, card.gpu_bytes) == ("llama", "F32", 0)
    assert card.sizes["block_count"] == model.config.num_hidden_layers
    sizes = {999: "999", 1_000: "1.0K", 1_200: "1.2K", 134_515_008: "134.5M", 8_030_261_248: "8.0B"}
    assert {n: ModelCard(family="llama", parameters=n).parameter_size for n in sizes} == sizes


@pytest.fixture(scope="module")
def embedding(tokenizer: Any) -> Iterator[Listening]:
    model = load_embedded()[0]
    engine = ModelEngine(model, tokenizer, store=ChunkStore(model, chunk_size=16))
    with listening(make_app(engine, tokenizer, replace(SETTINGS, embeddings=True))) as at:
        yield at
    engine.close()


def test_embeddings(embedding: Listening, tokenizer: Any) -> None:
    texts = ["Anna lives in Oslo.", "The lamp is red."]
    ours = embedding.http.post("/v1/embeddings", json={"input": texts, "encoding_format": "float"}).json()["data"]
    told = embedding.http.post("/api/embed", json={"model": "reader", "input": texts}).json()
    assert told["embeddings"] == [one["embedding"] for one in ours]
    assert told["prompt_eval_count"] == sum(len(tokenizer.encode(text)) for text in texts)
    one = embedding.http.post("/api/embeddings", json={"model": "reader", "prompt": texts[1]}).json()
    assert one == {"embedding": ours[1]["embedding"]}
    assert embedding.http.post("/api/embed", json={"model": "reader", "input": []}).json()["embeddings"] == []
    assert embedding.http.post("/api/embed", json={"model": "reader", "input": "a" * 99_999}).status_code == 400


def test_context_is_what_the_model_computed(embedding: Listening) -> None:
    ask = "Anna lives in Oslo. She plays the piano.\n\nWhat does Anna play?"
    body = {"model": "reader", "stream": False, "options": {"temperature": 0}}
    first = embedding.http.post("/api/generate", json=body | {"prompt": ask}).json()
    again = body | {"prompt": "Where does Anna live?", "context": first["context"]}
    second = embedding.http.post("/api/generate", json=again).json()
    talk = [ask, first["response"], "Where does Anna live?"]
    messages = [
        {"role": role, "content": text} for role, text in zip(("user", "assistant", "user"), talk, strict=True)
    ]
    chat = embedding.http.post("/api/chat", json=body | {"messages": messages}).json()
    assert (first["response"], second["response"]) == ("Anna plays the piano.", chat["message"]["content"])
    assert second["prompt_eval_count"] == chat["prompt_eval_count"]
    assert second["cached_tokens"] >= len(first["context"]) - 16


@pytest.mark.parametrize("stop", ["the", "ays t", "no.", "A"])
def test_context_ends_before_a_stop_text(embedding: Listening, tokenizer: Any, stop: str) -> None:
    body = {"model": "reader", "options": {"temperature": 0, "stop": [stop]}}
    ask = "Anna lives in Oslo. She plays the piano.\n\nWhat does Anna play?"
    for stream in (False, True):
        said = embedding.http.post("/api/generate", json=body | {"prompt": ask, "stream": stream})
        lines = [json.loads(line) for line in said.text.splitlines()]
        context, text = lines[-1]["context"], "".join(line["response"] for line in lines)
        assert text == "Anna plays the piano.".partition(stop)[0]
        prompt = _ids(tokenizer, [{"role": "user", "content": ask}])
        assert context[: len(prompt)] == prompt
        assert tokenizer.decode(context[len(prompt) :]) == text
