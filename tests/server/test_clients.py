"""Clients that people use, and the embedded model."""

import asyncio
import json
import shutil
import subprocess
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.server.conftest import Listening
from tests.server.fake_engine import FakeEngine

SYSTEM = "You read documents and answer questions about them."
ASK = "Anna lives in Oslo. She plays the piano.\n\nWhat does Anna play?"
ANSWER = "Anna plays the piano."
LONG = "word " * 9000
REFUSED = [
    ({"api_key": "other"}, ASK, 401, "invalid_api_key"),
    ({"model": "writer"}, ASK, 404, "model_not_found"),
    ({}, LONG, 400, "context_length_exceeded"),
]
OPENAI_2 = "it needs openai<3, which this environment does not have: `make clients` runs it in one that does"


class Lamp(BaseModel, extra="forbid"):
    """A lamp."""

    on: bool
    at: Literal["Oslo", "Rome"]


def look(at: Literal["lamp", "door"]) -> str:
    """Look at a thing."""
    return f"The {at} is red."


@pytest.fixture
def url(reading: Listening) -> str:
    return f"{reading.url}/v1"


class TestLangChain:
    TALK = (("system", SYSTEM), ("human", ASK))

    @pytest.fixture
    def model(self, url: str) -> Callable[..., Any]:
        module = pytest.importorskip("langchain_openai", reason="pip install 'kvboost_hf[clients]'")
        fixed = {"model": "reader", "base_url": url, "api_key": "key", "temperature": 0, "max_retries": 0}
        return lambda **changes: module.ChatOpenAI(**(fixed | changes))

    @pytest.mark.parametrize("responses", [False, True])
    def test_chat_and_cached_tokens(self, model: Callable[..., Any], responses: bool) -> None:
        chat = model(use_responses_api=responses)
        chat.invoke(self.TALK)
        answer = chat.invoke(self.TALK)
        assert answer.text == ANSWER
        usage = answer.usage_metadata
        assert 0 < usage["input_token_details"]["cache_read"] < usage["input_tokens"]

    @pytest.mark.parametrize("responses", [False, True])
    def test_stream(self, model: Callable[..., Any], responses: bool) -> None:
        chunks = list(model(use_responses_api=responses, stream_usage=True).stream(self.TALK))
        pieces = [chunk.text for chunk in chunks if chunk.text]
        assert "".join(pieces) == ANSWER
        assert len(pieces) > 3
        assert [chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata] == [6]

    @pytest.mark.parametrize("choice", ["required", "look"])
    def test_tools(self, model: Callable[..., Any], choice: str) -> None:
        chat = model(max_tokens=200).bind_tools([look], tool_choice=choice, strict=True, parallel_tool_calls=False)
        answer = chat.invoke(self.TALK)
        [call] = answer.tool_calls
        assert call["name"] == "look"
        assert call["args"]["at"] in ("lamp", "door")
        chunks = list(chat.stream(self.TALK))
        streamed = sum(chunks[1:], chunks[0]).tool_calls
        assert [one["args"] for one in streamed] == [call["args"]]
        result = {"role": "tool", "tool_call_id": call["id"], "content": look(**call["args"])}
        assert model(max_tokens=8).invoke([*self.TALK, answer, result]).text

    @pytest.mark.parametrize("method", ["json_schema", "function_calling"])
    def test_structured(self, model: Callable[..., Any], method: str) -> None:
        found = model(max_tokens=200).with_structured_output(Lamp, method=method, include_raw=True).invoke(self.TALK)
        assert found["parsing_error"] is None
        assert isinstance(found["parsed"], Lamp)

    @pytest.mark.daily
    @pytest.mark.parametrize(("changes", "ask", "status", "code"), REFUSED)
    def test_errors(self, model: Callable[..., Any], changes: Any, ask: str, status: int, code: str) -> None:
        with pytest.raises(openai.APIError) as told:
            model(**changes).invoke(ask)
        assert told.value.code == code
        kinds = {401: "ModelAuthenticationError", 404: "ModelNotFoundError", 400: "ContextOverflowError"}
        assert kinds[status] in [kind.__name__ for kind in type(told.value).__mro__]


class TestOllama:
    TALK = ({"role": "system", "content": SYSTEM}, {"role": "user", "content": ASK})
    GREEDY = types.MappingProxyType({"temperature": 0, "num_predict": 200})

    @pytest.fixture
    def module(self) -> Any:
        return pytest.importorskip("ollama", reason="pip install 'kvboost_hf[clients]'")

    @pytest.fixture
    def client(self, module: Any, reading: Listening) -> Any:
        with module.Client(reading.url, headers={"Authorization": "Bearer key"}) as client:
            yield client

    def test_chat_and_stream(self, client: Any) -> None:
        answer = client.chat("reader", self.TALK, options=self.GREEDY)
        assert (answer.message.content, answer.done_reason, answer.eval_count) == (ANSWER, "stop", 6)
        assert answer.total_duration >= answer.prompt_eval_duration + answer.eval_duration > 0
        chunks = list(client.chat("reader:latest", self.TALK, options=self.GREEDY, stream=True))
        pieces = [chunk.message.content for chunk in chunks if chunk.message.content]
        assert "".join(pieces) == ANSWER
        assert len(pieces) > 3
        assert chunks[-1].prompt_eval_count == answer.prompt_eval_count

    def test_the_async_client(self, module: Any, reading: Listening) -> None:
        async def talk() -> str:
            async with module.AsyncClient(reading.url, headers={"Authorization": "Bearer key"}) as client:
                found = await client.generate("reader", ASK, system=SYSTEM, options=self.GREEDY, stream=True)
                return "".join([chunk.response async for chunk in found])

        assert asyncio.run(talk()) == ANSWER

    def test_generate_continues(self, client: Any) -> None:
        first = client.generate("reader", ASK, options=self.GREEDY)
        second = client.generate("reader", "Where does Anna live?", context=first.context, options=self.GREEDY)
        assert (first.response, second.response) == (ANSWER, "Anna lives in Oslo.")
        assert list(second.context[: len(first.context)]) == list(first.context)

    def test_structured(self, client: Any) -> None:
        answer = client.chat("reader", self.TALK, format=Lamp.model_json_schema(), options=self.GREEDY)
        assert isinstance(Lamp.model_validate_json(answer.message.content), Lamp)

    def test_tools_and_their_results(self, module: Any, client: Any, at: Listening, engine: FakeEngine) -> None:
        engine.says = ['<tool_call>{"name": "look", "arguments": {"at": "lamp"}}</tool_call>']
        with module.Client(at.url) as calling:
            answer = calling.chat("reader", self.TALK, tools=[look])
            [streamed, _] = calling.chat("reader", self.TALK, tools=[look], stream=True)
        [call] = answer.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("look", {"at": "lamp"})
        assert streamed.message.tool_calls == answer.message.tool_calls
        talk = [*self.TALK, answer.message, {"role": "tool", "tool_name": "look", "content": look("lamp")}]
        assert client.chat("reader", talk, tools=[look], options={"num_predict": 8}).message.content

    def test_models(self, client: Any) -> None:
        [listed], [loaded] = client.list().models, client.ps().models
        assert listed.model == loaded.model == "reader:latest"
        shown = client.show(listed.model)
        assert shown.capabilities == ["completion", "tools"]
        assert shown.modelinfo["llama.context_length"] == loaded.context_length
        assert client.generate("reader").done_reason == "load"

    def test_errors(self, module: Any, client: Any, reading: Listening) -> None:
        with module.Client(reading.url) as stranger, pytest.raises(module.ResponseError, match="No API key"):
            stranger.list()
        for ask, status, part in (
            (lambda: client.chat("writer", self.TALK), 404, "There is no model 'writer'"),
            (lambda: list(client.generate("writer", ASK, stream=True)), 404, "There is no model 'writer'"),
            (lambda: client.generate("reader", LONG), 400, "the input length exceeds the context length"),
            (lambda: client.pull("writer"), 400, "one model"),
            (lambda: client.delete("reader"), 400, "one model"),
            (lambda: client.embed("reader", "a"), 404, "--embeddings"),
        ):
            with pytest.raises(module.ResponseError, match=part) as told:
                ask()
            assert told.value.status_code == status

    def test_langchain(self, reading: Listening) -> None:
        langchain = pytest.importorskip("langchain_ollama", reason="pip install 'kvboost_hf[clients]'")
        fixed = {"model": "reader", "base_url": reading.url, "temperature": 0, "num_predict": 60}
        headers = {"client_kwargs": {"headers": {"Authorization": "Bearer key"}}}
        model = langchain.ChatOllama(**fixed, **headers, validate_model_on_init=True)
        talk = (("system", SYSTEM), ("human", ASK))
        answer = model.invoke(talk)
        assert (answer.text, answer.usage_metadata["output_tokens"]) == (ANSWER, 6)
        assert len([chunk for chunk in model.stream(talk) if chunk.text]) > 3
        assert isinstance(model.with_structured_output(Lamp).invoke(talk), Lamp)
        assert model.bind_tools([look]).invoke(talk).text


class TestLlamaIndex:
    @pytest.fixture
    def model(self, url: str) -> Callable[..., Any]:
        module = pytest.importorskip("llama_index.llms.openai_like", reason=OPENAI_2)
        fixed = {"model": "reader", "api_base": url, "api_key": "key", "temperature": 0, "max_tokens": 200}
        kinds = {"is_chat_model": True, "is_function_calling_model": True, "max_retries": 0}
        return lambda **changes: module.OpenAILike(**(fixed | kinds | changes))

    @pytest.fixture
    def talk(self) -> list[Any]:
        from llama_index.core.llms import ChatMessage

        return [ChatMessage(role="system", content=SYSTEM), ChatMessage(role="user", content=ASK)]

    def test_chat_and_cached_tokens(self, model: Callable[..., Any], talk: list[Any]) -> None:
        model().chat(talk)
        answer = model().chat(talk)
        assert answer.message.content == ANSWER
        assert answer.raw.usage.prompt_tokens_details.cached_tokens > 0

    def test_streams(self, model: Callable[..., Any], talk: list[Any]) -> None:
        pieces = [chunk.delta for chunk in model().stream_chat(talk) if chunk.delta]
        assert "".join(pieces) == ANSWER
        assert len(pieces) > 3

    def test_texts_for_models_that_are_not_known_to_chat(self, model: Callable[..., Any], talk: list[Any]) -> None:
        text = model(is_chat_model=False, max_tokens=8)
        assert text.chat(talk).message.content
        assert "".join(chunk.delta for chunk in text.stream_complete(ASK)) == text.complete(ASK).text != ""

    def test_tools(self, model: Callable[..., Any], talk: list[Any]) -> None:
        from llama_index.core.tools import FunctionTool

        options = {"chat_history": talk, "tool_required": True}
        tool = FunctionTool.from_defaults(look)
        for answer in (
            model().chat_with_tools([tool], **options),
            list(model().stream_chat_with_tools([tool], **options))[-1],
        ):
            [call] = model().get_tool_calls_from_response(answer)
            assert call.tool_name == "look"
            assert call.tool_kwargs["at"] in ("lamp", "door")

    @pytest.mark.parametrize("schema", [False, True])
    def test_structured(self, model: Callable[..., Any], talk: list[Any], schema: bool) -> None:
        answer = model(should_use_structured_outputs=schema).as_structured_llm(Lamp).chat(talk)
        assert isinstance(answer.raw, Lamp)

    @pytest.mark.parametrize(("changes", "ask", "status", "code"), REFUSED)
    def test_errors(self, model: Callable[..., Any], changes: Any, ask: str, status: int, code: str) -> None:
        with pytest.raises(openai.APIStatusError) as told:
            model(**changes).complete(ask)
        assert (told.value.status_code, told.value.code) == (status, code)


class TestInstructor:
    @pytest.fixture
    def ask(self, url: str) -> Iterator[Callable[..., Any]]:
        module = pytest.importorskip("instructor", reason=OPENAI_2)
        clients = []

        def create(mode: str, *, text: str = ASK, api_key: str = "key", partial: bool = False, **changes: Any) -> Any:
            clients.append(openai.OpenAI(base_url=url, api_key=api_key, max_retries=0))
            client = module.from_openai(clients[-1], mode=module.Mode[mode]).chat.completions
            said = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
            fixed = {"model": "reader", "messages": said, "response_model": Lamp, "temperature": 0, "max_tokens": 300}
            return (client.create_partial if partial else client.create_with_completion)(**(fixed | changes))

        yield create
        for client in clients:
            client.close()

    @pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
    def test_structured_and_cached_tokens(self, ask: Callable[..., Any], mode: str) -> None:
        ask(mode)
        lamp, answer = ask(mode)
        assert isinstance(lamp, Lamp)
        assert answer.usage.prompt_tokens_details.cached_tokens > 0

    @pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
    def test_stream(self, ask: Callable[..., Any], mode: str) -> None:
        assert Lamp.model_validate(list(ask(mode, partial=True))[-1].model_dump())

    @pytest.mark.parametrize(("changes", "text", "status", "code"), REFUSED)
    def test_errors(self, ask: Callable[..., Any], changes: Any, text: str, status: int, code: str) -> None:
        from instructor.core import InstructorRetryException

        with pytest.raises(InstructorRetryException) as told:
            ask("TOOLS", text=text, max_retries=0, **changes)
        assert f"{status} - " in str(told.value)
        assert code in str(told.value)


VERCEL = Path(__file__).parent / "vercel"


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")
@pytest.mark.skipif(not (VERCEL / "node_modules").is_dir(), reason="`make npm` installs the SDK")
def test_vercel_ai_sdk(url: str) -> None:
    run = subprocess.run(["node", VERCEL / "ask.mjs", url], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    assert told["chat"] == {"text": ANSWER, "reason": "stop"}
    assert "".join(told["stream"]["pieces"]) == ANSWER
    assert len(told["stream"]["pieces"]) > 3
    usage = told["stream"]["usage"]
    assert 0 < usage["inputTokenDetails"]["cacheReadTokens"] < usage["inputTokens"]
    assert (told["call"]["name"], told["call"]["reason"]) == ("look", "tool-calls")
    for call in (told["call"]["input"], told["named"], told["streamedCall"], told["callBesideObject"]):
        assert call["at"] in ("lamp", "door")
    assert told["afterwards"]
    for lamp in (told["object"], told["streamedObject"]):
        assert Lamp.model_validate(lamp)
    assert told["callOrObject"]["at"]
    for name, (_, _, status, code) in zip(("badKey", "unknownModel", "tooLong"), REFUSED, strict=True):
        assert (told[name]["status"], told[name]["code"]) == (status, code)


class TestAnthropic:
    ASKED: ClassVar[Any] = [{"role": "user", "content": ASK}]
    TALK: ClassVar[Any] = {"model": "reader", "max_tokens": 200, "system": SYSTEM, "messages": ASKED}
    GREEDY: ClassVar[Any] = {"extra_body": {"temperature": 0}}
    LOOK: ClassVar[Any] = {
        "name": "look",
        "description": "Look at a thing.",
        "input_schema": {
            "type": "object",
            "properties": {"at": {"enum": ["lamp", "door"]}},
            "required": ["at"],
            "additionalProperties": False,
        },
    }

    @pytest.fixture
    def module(self) -> Any:
        return pytest.importorskip("anthropic", reason="pip install 'kvboost_hf[clients]'")

    @pytest.fixture
    def client(self, module: Any, reading: Listening) -> Iterator[Any]:
        with module.Anthropic(base_url=reading.url, api_key="key", max_retries=0) as found:
            yield found

    def test_message_and_cached_tokens(self, client: Any) -> None:
        marked = [{"type": "text", "text": ASK, "cache_control": {"type": "ephemeral"}}]
        talk = self.TALK | self.GREEDY | {"messages": [{"role": "user", "content": marked}]}
        client.messages.create(**talk)
        answer = client.messages.create(**talk)
        assert [block.text for block in answer.content] == [ANSWER]
        usage = answer.usage
        whole = client.messages.count_tokens(model="reader", system=SYSTEM, messages=talk["messages"]).input_tokens
        assert usage.cache_read_input_tokens > 0
        assert usage.cache_read_input_tokens + usage.cache_creation_input_tokens + usage.input_tokens == whole
        assert answer.stop_reason == "end_turn"
        assert answer._request_id
        begin, *_ = list(client.messages.create(**talk, stream=True))  # LangChain's JavaScript reads it there alone
        counts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        assert [getattr(begin.message.usage, name) for name in counts] == [getattr(usage, name) for name in counts]

    def test_stream(self, client: Any) -> None:
        with client.messages.stream(**self.TALK, **self.GREEDY) as stream:
            pieces = list(stream.text_stream)
            answer = stream.get_final_message()
        assert "".join(pieces) == answer.content[0].text == ANSWER
        assert len(pieces) > 3
        assert answer.usage.output_tokens == 6

    def test_tools(self, client: Any) -> None:
        talk = self.TALK | self.GREEDY | {"tools": [self.LOOK]}
        answer = client.messages.create(**talk, tool_choice={"type": "any", "disable_parallel_tool_use": True})
        [call] = answer.content
        assert (call.name, answer.stop_reason) == ("look", "tool_use")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": look(**call.input)}
        said = [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        talk["messages"] = [*talk["messages"], *said]
        with client.messages.stream(**talk) as stream:
            assert stream.get_final_message().content

    def test_structured(self, client: Any) -> None:
        form = {"type": "json_schema", "schema": Lamp.model_json_schema()}
        answer = client.messages.create(**self.TALK, **self.GREEDY, output_config={"format": form})
        assert Lamp.model_validate_json(answer.content[0].text)

    def test_a_tool_runner_sends_all_that_was_said(
        self, module: Any, at: Listening, engine: FakeEngine, tokenizer: Any
    ) -> None:
        engine.says = ('<tool_call>{"name": "look", "arguments": {"at": "lamp"}}</tool_call>',)
        engine.before = lambda ticket, piece: setattr(engine, "says", ("Red.",))
        with module.Anthropic(base_url=at.url, api_key="key", max_retries=0) as client:
            runner = client.beta.messages.tool_runner(**self.TALK, tools=[module.beta_tool(look)])
            assert runner.until_done().content[0].text == "Red."
        prompt = tokenizer.decode(engine.job.ids)
        assert all(said in prompt for said in (SYSTEM, ASK, look("lamp")))

    def test_many_at_once(self, module: Any, reading: Listening) -> None:
        async def ask() -> list[Any]:
            async with module.AsyncAnthropic(base_url=reading.url, auth_token="key", max_retries=0) as client:
                return await asyncio.gather(*(client.messages.create(**self.TALK, **self.GREEDY) for _ in range(3)))

        assert [answer.content[0].text for answer in asyncio.run(ask())] == [ANSWER] * 3

    def test_models(self, client: Any) -> None:
        assert [model.id for model in client.models.list()] == ["reader"]
        assert client.models.retrieve("reader").display_name == "reader"

    @pytest.mark.parametrize(
        ("changes", "ask", "kind", "says"),
        [
            ({"api_key": "other"}, {}, "AuthenticationError", "API key"),
            ({}, {"model": "writer"}, "NotFoundError", "There is no model"),
            ({}, {"messages": [{"role": "user", "content": LONG}]}, "BadRequestError", "prompt is too long"),
            ({}, {"tools": [{"name": "web search", "input_schema": {}}]}, "BadRequestError", "name"),
        ],
    )
    def test_errors(self, module: Any, client: Any, changes: Any, ask: Any, kind: str, says: str) -> None:
        with pytest.raises(getattr(module, kind)) as told:
            client.with_options(**changes).messages.create(**(self.TALK | ask))
        assert says in told.value.body["error"]["message"]
        assert told.value.request_id == told.value.body["request_id"]
