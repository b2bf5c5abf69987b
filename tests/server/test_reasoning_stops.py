"""Stop texts end the answer, and not the reasoning before it; log probabilities have the bytes of their tokens."""

from typing import Any

import pytest

from kvboost_hf.assets import load_embedded
from tests.internals.server import Grammars, ReasoningSpan, TextStream, make_app
from tests.property.test_text_stream import _byte_fallback, _byte_level
from tests.recorded_calls import RECORDED
from tests.server.conftest import SETTINGS, Listening, listening
from tests.server.fake_engine import FakeEngine
from tests.server.test_reasoning import TOOLS, Family, _families, family  # noqa: F401

pytestmark = pytest.mark.daily

THINK = ("<think>", "</think>")
ASK: list[Any] = [{"role": "user", "content": "Who?"}]


def _said(text: str, span: ReasoningSpan | None, *stop: str, include: bool = False) -> tuple[str, str | None]:
    tokenizer = load_embedded()[1]
    ids = tokenizer.encode(text, add_special_tokens=False)
    stream = TextStream(tokenizer, stop, reasoning=span, include_stop=include)
    parts = [stream.push(token) for token in ids]
    return "".join([*parts, stream.finish()]), stream.stop


@pytest.mark.parametrize(
    ("opened", "text", "wanted", "stop"),
    [
        (False, "<think>a END b</think>c END d", "<think>a END b</think>c ", "END"),
        (False, "\n<think>a END b</think>END", "\n<think>a END b</think>", "END"),
        (False, "<think>a END b", "<think>a END b", None),
        (False, "<think>a END b</th", "<think>a END b</th", None),
        (False, "a END b", "a ", "END"),
        (False, "END <think>", "", "END"),
        (False, "<thEND", "<th", "END"),
        (False, "<think></think>c", "<think></think>c", None),
        (False, "<thi", "<thi", None),
        (True, "a END b</think>c END d", "a END b</think>c ", "END"),
        (True, "a END b", "a END b", None),
        (True, "a < / END </think>", "a < / END </think>", None),
    ],
)
def test_stop_texts_do_not_end_reasoning(opened: bool, text: str, wanted: str, stop: str | None) -> None:
    assert _said(text, ReasoningSpan(*THINK, opened), "END") == (wanted, stop)
    told, found = _said(text, ReasoningSpan(*THINK, opened), "END", include=True)
    assert (told, found) == (wanted + (stop or ""), stop)


def test_without_reasoning_all_is_as_before() -> None:
    assert _said("<think>a END b", None, "END") == ("<think>a ", "END")


def test_jobs_know_the_reasoning(family: Family, _families: Any) -> None:  # noqa: F811, PT019
    for name, change, span in (
        ("qwen", {}, ReasoningSpan(*THINK, False)),
        ("r1", {}, ReasoningSpan(*THINK, True)),
        ("plain", {}, None),
        ("gpt-oss", {}, ReasoningSpan("<|channel|>analysis<|message|>", "<|end|>", False)),
        ("qwen", {"stop": ["</think>"]}, None),  # to have the reasoning alone
        ("qwen", {"tools": TOOLS}, ReasoningSpan(*THINK, False)),
    ):
        body = {"messages": ASK, "stop": ["END"]} | change
        assert family(name).http.post("/v1/chat/completions", json=body).status_code == 200
        assert _families[0].job.reasoning == span


@pytest.mark.parametrize("text", ["é😀日", "Zoë 🙂👩‍👩‍👧 plays", "\n\ttabs", " 日本語 "])
def test_bytes_of_tokens(text: str) -> None:
    for tokenizer in (_byte_level(), _byte_fallback(), load_embedded()[1]):
        grammars = Grammars(tokenizer, len(tokenizer), ends=[2])
        ids = tokenizer.encode(text, add_special_tokens=False)
        found = b"".join(grammars.token_bytes(token) or b"?" for token in ids)
        assert found.decode().strip() == text.strip()
        assert grammars.token_bytes(len(tokenizer)) is None


def test_bytes_of_half_a_character(at: Listening, engine: FakeEngine, tokenizer: Any) -> None:
    pieces = tokenizer.encode("😀", add_special_tokens=False)
    assert len(pieces) > 1
    first = pieces[0] - 40
    assert first > 0
    engine.says = ["a"] * (first + 1)
    body = {"messages": ASK, "logprobs": True, "max_tokens": 2000}
    told = at.http.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"][first]
    assert bytes(told["bytes"]) == "😀".encode()[: len(told["bytes"])]
    assert len(told["bytes"]) == 1


@pytest.fixture(scope="module")
def channels() -> Any:
    """A server of a model of gpt-oss' format, without a response template."""
    tokenizer = load_embedded()[1]
    plain = tokenizer.chat_template
    tokenizer.chat_template = "{% if false %}" + RECORDED["HARMONY"][0] + "{% endif %}" + plain
    made = FakeEngine()
    with listening(make_app(made, tokenizer, SETTINGS)) as at:
        yield at, made


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tools", [[], TOOLS])
def test_channels_without_a_response_template(channels: Any, tools: Any, stream: bool) -> None:
    at, made = channels
    text = "<|channel|>analysis<|message|>So it is.<|end|><|start|>assistant<|channel|>final<|message|>Anna.<|return|>"
    made.says = [*text]
    asked: dict[str, Any] = {"model": "reader", "messages": ASK, "max_tokens": 999} | (
        {"tools": tools} if tools else {}
    )
    if stream:
        deltas = [chunk.choices[0].delta for chunk in at.openai.chat.completions.create(**asked, stream=True)]
        content = "".join(delta.content or "" for delta in deltas)
        reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    else:
        message = at.openai.chat.completions.create(**asked).choices[0].message
        content, reasoning = message.content, message.reasoning_content
    assert (content, reasoning) == ("Anna.", "So it is.")
    assert not made.job.skip_special_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_beside_calls(at: Listening, engine: FakeEngine, stream: bool) -> None:
    """All tokens have theirs in chats; in responses, those of the text."""
    engine.says = ["I ", "look.", *'<tool_call>{"name": "look", "arguments": {"a": 1}}</tool_call>']
    asked = {"messages": ASK, "tools": TOOLS, "logprobs": True, "stream": stream, "max_tokens": 999}
    if stream:
        chunks = list(at.openai.chat.completions.create(model="reader", **asked))
        told = [one for chunk in chunks if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content]
    else:
        told = at.http.post("/v1/chat/completions", json=asked).json()["choices"][0]["logprobs"]["content"]
    assert len(told) == len(engine.says)
    flat = [{"type": "function", **TOOLS[0]["function"]}]
    body = {"input": "Who?", "tools": flat, "include": ["message.output_text.logprobs"], "max_output_tokens": 999}
    output = at.http.post("/v1/responses", json=body).json()["output"]
    assert [item["type"] for item in output] == ["message", "function_call"]
    assert len(output[0]["content"][0]["logprobs"]) >= 2
    engine.says = engine.says[2:]
    output = at.http.post("/v1/responses", json=body).json()["output"]
    assert [item["type"] for item in output] == ["function_call"]
