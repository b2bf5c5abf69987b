"""The responses API by the openai SDK."""

from typing import Any

import openai
import pytest
from openai.types.shared import ResponseFormatText

from tests.server.conftest import Listening
from tests.server.fake_engine import FakeEngine

pytestmark = pytest.mark.daily

TOOL: Any = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}
CALL = '<tool_call>{"name": "look", "arguments": {"at": "lamp"}}</tool_call>'


def test_an_answer(at: Listening, engine: FakeEngine, tokenizer: Any) -> None:
    answer = at.openai.responses.create(
        model="reader",
        input="What does Anna play?",
        instructions="Be short.",
        max_output_tokens=8,
        temperature=0,
        text={"verbosity": "low"},
    )
    assert answer.text is not None
    assert answer.text.format == ResponseFormatText(type="text")
    assert answer.output_text == "Anna plays the piano."
    assert answer.status == "completed"
    told = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What does Anna play?"}]
    assert list(engine.job.ids) == tokenizer.apply_chat_template(told, add_generation_prompt=True, return_dict=False)
    assert engine.job.options.max_tokens == 8
    counted = at.openai.responses.input_tokens.count(
        model="reader", input="What does Anna play?", instructions="Be short."
    )
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", len(engine.job.ids))
    assert answer.usage is not None
    assert answer.usage.input_tokens_details.cached_tokens == len(engine.job.ids) // 2
    # The Agents SDK of JavaScript refuses anything else in a stream.
    assert {type(count) for count in answer.usage.input_tokens_details.to_dict().values()} == {int}
    assert answer.usage.model_dump()["prompt_tokens_details"]["cached_tokens_by_tier"]
    assert answer.usage.output_tokens == 4


def test_events_of_a_stream(at: Listening) -> None:
    events = list(at.openai.responses.create(model="reader", input="Who?", stream=True))
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 4,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(12))
    last: Any = events[-1]
    assert last.response.output_text == "Anna plays the piano."
    assert last.response.usage.output_tokens == 4


def test_the_streaming_helper_of_the_sdk(at: Listening) -> None:
    with at.openai.responses.stream(model="reader", input="Who?") as stream:
        assert "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert stream.get_final_response().output_text == "Anna plays the piano."


def test_a_cut_answer_is_incomplete(at: Listening, engine: FakeEngine) -> None:
    engine.reason = "length"
    answer = at.openai.responses.create(model="reader", input="Who?", max_output_tokens=1)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output_text == "Anna "


def test_a_silent_model_says_an_empty_text(at: Listening, engine: FakeEngine) -> None:
    engine.says = ()
    answer = at.openai.responses.create(model="reader", input="Who?")
    assert answer.output[0].type == "message"
    assert answer.output_text == ""


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_and_its_result(at: Listening, engine: FakeEngine, tokenizer: Any, stream: bool) -> None:
    engine.says = (CALL[:20], CALL[20:])
    asked: list[Any] = [{"role": "user", "content": "Is it on?"}]
    told: Any = at.openai.responses.create(model="reader", input=asked, tools=[TOOL], stream=stream)
    answer = list(told)[-1].response if stream else told
    [call] = answer.output
    assert (call.type, call.name) == ("function_call", "look")
    engine.says = ("Yes.",)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "it is on"}
    again = at.openai.responses.create(model="reader", input=[*asked, call, result], tools=[TOOL])  # type: ignore[list-item]
    assert again.output_text == "Yes."
    assert "it is on" in tokenizer.decode(engine.job.ids)


def test_calls_of_a_namespace_are_told_apart(at: Listening, engine: FakeEngine) -> None:
    flat = {key: value for key, value in TOOL.items() if key != "namespace"}
    tools = [flat, {"type": "namespace", "name": "lamp", "tools": [flat]}]
    for name, namespace in (("look", None), ("lamp.look", "lamp")):
        engine.says = (CALL.replace('"look"', f'"{name}"'),)
        body = {"model": "reader", "input": "Is it on?", "tools": tools}
        [call] = at.http.post("/v1/responses", json=body).json()["output"]
        assert (call["name"], call.get("namespace")) == ("look", namespace)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id: responses are not stored"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"input": []}, "input"),
        ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "'web_search_call'"),
        ({"tools": [{"type": "local_shell"}], "tool_choice": {"type": "local_shell"}}, "'local_shell'"),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"text": {"format": {"type": "xml"}}}, "text"),
    ],
)
def test_what_is_not_served_is_named(at: Listening, engine: FakeEngine, change: dict[str, Any], says: str) -> None:
    with pytest.raises(openai.BadRequestError) as told:
        at.openai.responses.create(**({"model": "reader", "input": "Who?", "extra_body": change}))  # type: ignore[call-overload]
    assert says in told.value.message
    assert not engine.tickets
