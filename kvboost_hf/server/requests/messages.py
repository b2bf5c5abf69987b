"""The messages of chats."""

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, model_validator

from kvboost_hf.server.requests.fields import Body, Many
from kvboost_hf.server.requests.json_text import read_json


def _thought(given: Any) -> Any:
    """The text of a part with reasoning, which Mistral has as a list of parts."""
    if isinstance(given, list):
        return "".join(str(part.get("text", "")) for part in given if isinstance(part, dict))
    return given


def _as_text_part(part: Any) -> Any:
    """A part of a content as a part with text."""
    if not isinstance(part, dict):
        return part
    match part.get("type"):
        case "text" | "input_text" | "output_text" | None:
            return part
        case "refusal":
            return {"text": part.get("refusal")}
        case "thinking" | "reasoning" as kind:
            return {"type": "thinking", "text": _thought(part.get("text", part.get(kind)))}
        case "redacted_thinking":
            return {"type": "thinking", "text": ""}
        case kind:
            raise ValueError(f"content parts of type {kind!a} are not served; send text")


class TextPart(Body):
    """A piece of a message."""

    place: ClassVar = "messages.content"
    type: str | None = None
    text: str
    prompt_cache_breakpoint: Any = None
    """Changes nothing: all of a prompt is stored, and found again up to the token where another one parts from it."""
    annotations: Any = None
    """Of an answer that is sent back; not part of the prompt."""
    logprobs: Any = None
    """Of an answer that is sent back; not part of the prompt."""


Content = str | Many[Annotated[TextPart, BeforeValidator(_as_text_part)]]


def text_of(content: Content) -> str:
    """A content in one piece, without reasoning."""
    return _joined(content, thinking=False) if isinstance(content, list) else content


def _joined(content: list[TextPart], *, thinking: bool) -> str:
    return "".join(part.text for part in content if (part.type == "thinking") == thinking)


class CalledFunction(Body):
    """The name of a called function, and its arguments as JSON text."""

    place: ClassVar = "messages.tool_calls.function"
    name: str
    arguments: Annotated[
        str, BeforeValidator(lambda given: json.dumps(given) if isinstance(given, dict) else given)
    ] = ""

    @property
    def parsed(self) -> dict[str, Any] | str:
        """The arguments as an object; as text if they are none, as a model may have written them.

        Raises:
            LargeJsonError: they have too many parts, or too deep ones.
        """
        try:
            found = read_json(self.arguments.encode())
        except json.JSONDecodeError:
            return self.arguments
        return found if isinstance(found, dict) else self.arguments


class MadeCall(Body):
    """A call of an earlier answer."""

    place: ClassVar = "messages.tool_calls"
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(Body):
    """One message of a chat. Of an answer that is sent back, any other field is ignored."""

    place: ClassVar = "messages"
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Many[MadeCall] | None = None
    function_call: CalledFunction | None = None
    """An older form of `tool_calls`, for one call."""
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    """Of an earlier answer: part of the prompt where the chat template reads it."""
    reasoning: Annotated[str | None, BeforeValidator(lambda given: given if isinstance(given, str) else None)] = None
    """Another name of `reasoning_content`."""

    @model_validator(mode="after")
    def _said_something(self) -> "Message":
        if self.content is None and self.role == "user":
            raise ValueError(f"a message of role {self.role!r} must have content")
        if self.role != "assistant" and isinstance(self.content, list):
            if any(part.type == "thinking" for part in self.content):
                raise ValueError(f"a message of role {self.role!r} must not have reasoning; leave that part out")
        return self

    @property
    def text(self) -> str:
        """The content in one piece; empty for none."""
        return text_of(self.content or "")

    @property
    def thoughts(self) -> str:
        """The reasoning in one piece; empty for none."""
        parts = _joined(self.content, thinking=True) if isinstance(self.content, list) else ""
        return self.reasoning_content or self.reasoning or parts

    @property
    def calls(self) -> list[MadeCall]:
        """All calls, in whichever form."""
        older = [] if self.function_call is None else [MadeCall(function=self.function_call)]
        return [*(self.tool_calls or ()), *older]

    @property
    def body(self) -> dict[str, Any]:
        """As chat templates take it: the content as one text, and arguments of calls as objects.

        Raises:
            LargeJsonError: Arguments of calls have too many parts, or too deep ones.
        """
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        told: dict[str, Any] = {"role": role, "content": self.text}
        if role == "assistant" and self.thoughts:
            told["reasoning_content"] = self.thoughts
        if self.calls:
            told["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.parsed},
                }
                for call in self.calls
            ]
        told |= {name: value for name in ("name", "tool_call_id") if (value := getattr(self, name)) is not None}
        return told
