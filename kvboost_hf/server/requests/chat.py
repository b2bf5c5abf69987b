"""`ChatRequest`: a request to `/v1/chat/completions`, its messages, tools and template arguments.

Requests to the other APIs' chats are turned into it.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from kvboost_hf.server.chats.template import RESERVED, Rendering, reasoning_arguments
from kvboost_hf.server.chats.values import arguments_of
from kvboost_hf.server.requests.fields import Body, LargeJsonError, Many, Refusal, only, read_json
from kvboost_hf.server.requests.media import text_of_media
from kvboost_hf.server.requests.sampled import JsonSchemaBody, Length, Sampled

MAX_TOP_LOGPROBS = 20
MAX_TOOLS = 1000
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
_Effort = Annotated[str, Field(max_length=32)]


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
        case str():
            return {"text": f"\n{text_of_media(part, 'messages.content')}\n"}
        case kind:
            raise ValueError(f"content parts of type {kind!a} are not served; send text")


MAX_MOVABLE = 32  # parts of a message whose order does not matter: each pair of them may be looked up


class TextPart(Body):
    """A piece of a message."""

    place: ClassVar = "messages.content"
    type: str | None = None
    text: str
    any_order: bool = False
    """The order of such parts of a message does not matter: they change places where more is stored then."""
    prompt_cache_breakpoint: Any = None
    """Changes nothing: all of a prompt is stored, and found again up to the token where another one parts from it."""
    annotations: Any = None
    """Of an answer that is sent back; not part of the prompt."""
    logprobs: Any = None
    """Of an answer that is sent back; not part of the prompt."""


MessageContent = str | Many[Annotated[TextPart, BeforeValidator(_as_text_part)]]


class Prediction(Body):
    """A text that the answer may have parts of, such as a file that is to be changed."""

    place: ClassVar = "prediction"
    type: Literal["content"]
    content: MessageContent

    @property
    def text(self) -> str:
        """The content in one piece."""
        return text_of(self.content)


def _as_tools(given: Any) -> Any:
    """A chat with `functions` and `function_call` as one with `tools` and `tool_choice`, besides."""
    if not isinstance(given, dict):
        return given
    functions, call = given.get("functions"), given.get("function_call")
    for older, newer in (("functions", "tools"), ("function_call", "tool_choice")):
        if given.get(older) is not None and given.get(newer) is not None:
            raise ValueError(f"{older} is the older form of {newer}; leave one of them out")
    if call is not None and not functions:
        raise ValueError("function_call needs functions")
    found = dict(given)
    if isinstance(functions, list):
        found["tools"] = [{"type": "function", "function": function} for function in functions]
    if call is not None:
        found["tool_choice"] = {"type": "function", "function": call} if isinstance(call, dict) else call
    return found


class FunctionName(Body):
    """Names a function."""

    place: ClassVar = "tool_choice.function"
    name: str


class ToolChoice(Body):
    """The tool to call."""

    place: ClassVar = "tool_choice"
    type: Literal["function"]
    function: FunctionName


class AllowedNames(Body):
    """Names the tools that may be called."""

    place: ClassVar = "tool_choice.allowed_tools"
    mode: Literal["auto", "required"]
    tools: Annotated[Many[ToolChoice], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedTools(Body):
    """The tools that may be called; the model is told of no others."""

    place: ClassVar = "tool_choice"
    type: Literal["allowed_tools"]
    allowed_tools: AllowedNames


def named_choice(*kinds: str) -> BeforeValidator:
    """Refuse a choice of a tool of another type: such tools are ignored, and cannot be called."""

    def check(given: Any) -> Any:
        kind = given.get("type") if isinstance(given, dict) else None
        if isinstance(kind, str) and kind not in kinds:
            raise ValueError(
                f"it must be of type {' or '.join(map(repr, kinds))}, got {kind!a}: others are ignored here"
            )
        return "required" if given == "any" else given

    return BeforeValidator(check)


_Choice = Literal["none", "auto", "required"] | Annotated[ToolChoice | AllowedTools, Field(discriminator="type")]


def _as_arguments(given: Any) -> Any:
    return "" if given is None else json.dumps(given) if isinstance(given, dict) else given


CallArguments = Annotated[str, BeforeValidator(_as_arguments)]
"""Arguments of a call as JSON text; an object counts as that, and null as no text."""


class CalledFunction(Body):
    """The name of a called function, and its arguments as JSON text."""

    place: ClassVar = "messages.tool_calls.function"
    name: str
    arguments: CallArguments = ""

    @property
    def parsed(self) -> dict[str, Any] | str:
        """The arguments as an object; as text if they are none, as a model may have written them.

        No arguments are an empty object, and what only JSON's rules are against, such as NaN or half a character, is
        mended as in answers.

        Raises:
            LargeJsonError: they have too many parts, or too deep ones.
        """
        try:
            found = read_json(self.arguments.encode())
            json.dumps(found, allow_nan=False)
        except LargeJsonError:
            raise
        except ValueError:  # no JSON, or a number that JSON does not have
            found = None
        if not isinstance(found, dict):
            written = arguments_of(self.arguments)
            found = read_json(written.encode()) if written is not None else None
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
    content: MessageContent | None = None
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
        if len(self.movable) > MAX_MOVABLE:
            raise ValueError(
                f"a message must have at most {MAX_MOVABLE} parts with any_order, got {len(self.movable)}"
            )
        if self.role != "assistant" and isinstance(self.content, list):
            if any(part.type == "thinking" for part in self.content):
                raise ValueError(f"a message of role {self.role!r} must not have reasoning; leave that part out")
        return self

    @property
    def movable(self) -> list[int]:
        """The numbers of the parts whose order does not matter."""
        parts = self.content if isinstance(self.content, list) else []
        return [at for at, part in enumerate(parts) if part.any_order]

    def with_movable(self, order: Sequence[int]) -> "Message":
        """The message with the movable parts of these numbers in their places, in this order; others are left out."""
        assert isinstance(self.content, list)
        places, parts = self.movable, list[TextPart]()
        put = dict(zip(places, order, strict=False))
        for at, part in enumerate(self.content):
            if at not in places:
                parts.append(part)
            elif at in put:
                parts.append(self.content[places[put[at]]])
        return self.model_copy(update={"content": parts})

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


class Function(Body):
    """A function that the model may call; `parameters` is a JSON schema."""

    place: ClassVar = "tools.function"
    name: ToolName
    description: str | None = None
    parameters: JsonSchemaBody | None = None
    strict: bool | None = None
    """With true, what a grammar of a call cannot hold of `parameters` is refused; else it is left to the model, and
    named."""


class Tool(Body):
    """A tool of a chat."""

    place: ClassVar = "tools"
    type: Literal["function"]
    function: Function

    @property
    def body(self) -> dict[str, Any]:
        """As chat templates take it."""
        return self.model_dump(exclude_none=True)


def _unreserved(given: dict[str, Any]) -> dict[str, Any]:
    wrong = next((name for name in given if name in RESERVED), None)
    if wrong is not None:
        raise ValueError(f"it must not have {wrong!a}, which the server gives to the template; leave that out")
    return given


class ReasoningOptions(Body):
    """How a model reasons."""

    place: ClassVar = "reasoning"
    effort: _Effort | None = None
    """As `reasoning_effort`."""
    enabled: bool | None = None
    """As `enable_thinking`."""
    exclude: bool | None = None
    """Leave the reasoning out of the answer."""
    summary: str | None = None
    """Changes nothing: reasoning is returned as the model writes it."""


class ReasoningFields(Body):
    """The fields about reasoning, as several servers name them; and other arguments of the chat template."""

    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_unreserved)] | None = None
    """Arguments of the model's chat template, such as `{"enable_thinking": false}`; those that it does not read change
    nothing."""
    chat_template: Annotated[
        Any, Refusal("a template is code, which the operator chooses; pass chat_template_kwargs")
    ] = None
    reasoning_effort: _Effort | None = None
    """Given to the chat template. `none` and `minimal` switch reasoning off, others on, where the template has a
    switch."""
    reasoning: ReasoningOptions | None = None
    """The same as an object."""
    enable_thinking: bool | None = None
    """Switch reasoning on or off, where the chat template has a switch."""
    think: bool | _Effort | None = None
    """A switch, or an effort."""
    include_reasoning: bool | None = None
    """`false` leaves the reasoning out of the answer; its tokens count."""

    @property
    def template_arguments(self) -> dict[str, Any]:
        """The arguments of the chat template besides messages and tools."""
        options = self.reasoning or ReasoningOptions()
        thinks = self.enable_thinking
        if thinks is None:
            thinks = self.think if isinstance(self.think, bool) else options.enabled
        effort = self.reasoning_effort or options.effort or (self.think if isinstance(self.think, str) else None)
        return reasoning_arguments(thinks, effort) | (self.chat_template_kwargs or {})

    @property
    def shows_reasoning(self) -> bool:
        """Whether the answer has the reasoning."""
        return self.include_reasoning is not False and not (self.reasoning is not None and self.reasoning.exclude)


class ChatRequest(ReasoningFields, Sampled):
    """A request to `/v1/chat/completions`."""

    messages: Annotated[Many[Message], Field(min_length=1)]
    max_completion_tokens: Length = None
    """As `max_tokens`, before which it counts."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """More than 0 asks for `logprobs`, too."""
    functions: Annotated[Many[Function], Field(max_length=MAX_TOOLS)] | None = None
    """An older form of `tools`: the answer has a `function_call` then."""
    function_call: Literal["none", "auto"] | FunctionName | None = None
    """An older form of `tool_choice`."""
    tools: Annotated[Many[Tool], Field(max_length=MAX_TOOLS), only("tools", ("function",))] | None = None
    """Functions; other types of tools are ignored and named."""
    tool_choice: Annotated[_Choice | None, named_choice("function", "allowed_tools")] = None
    """`any` is another name of `required`."""
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    """Parts of it that are in the answer come faster, while the request runs alone; the answer is the same."""
    add_generation_prompt: bool | None = None
    """`false` leaves out the start of an answer at the end of the prompt."""
    continue_final_message: bool | None = None
    """The answer continues the last message, which is the assistant's."""

    @model_validator(mode="before")
    @classmethod
    def _modern(cls, given: Any) -> Any:
        return _as_tools(given)

    @model_validator(mode="after")
    def _fits_together(self) -> "ChatRequest":
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice needs tools")
        known = [tool.function.name for tool in self.tools or ()]
        wrong = next((name for name in self._chosen if name not in known), None)
        if wrong is not None:
            raise ValueError(f"tool_choice must name one of tools, got {wrong!r}")
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise ValueError("continue_final_message needs add_generation_prompt to be false; leave that out")
            if self.messages[-1].role != "assistant" or self.messages[-1].calls:
                raise ValueError("continue_final_message needs a last message of the assistant, without calls")
        return self

    @property
    def _chosen(self) -> list[str]:
        """The tools that `tool_choice` names."""
        if isinstance(self.tool_choice, AllowedTools):
            return [tool.function.name for tool in self.tool_choice.allowed_tools.tools]
        return [self.tool_choice.function.name] if isinstance(self.tool_choice, ToolChoice) else []

    @property
    def rendering(self) -> Rendering:
        """How the chat template writes this chat."""
        continues, last = None, self.messages[-1]
        if self.continue_final_message:
            continues = "reasoning_content" if last.thoughts and not last.text else "content"
        answer = continues is None and self.add_generation_prompt is not False
        return Rendering(answer=answer, continues=continues, arguments=self.template_arguments)

    @property
    def reported(self) -> int | None:
        """How many other tokens are reported beside each one; None where no log probabilities are."""
        return self.top_logprobs or 0 if self.logprobs or self.top_logprobs else None

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be a call of a tool."""
        if isinstance(self.tool_choice, AllowedTools):
            return self.tool_choice.allowed_tools.mode == "required"
        return self.tool_choice not in (None, "none", "auto")

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model is told of."""
        if isinstance(self.tool_choice, AllowedTools):
            return [tool for tool in self.tools or () if tool.function.name in self._chosen]
        return [] if self.tool_choice == "none" else list(self.tools or ())


def _thought(given: Any) -> Any:
    """The text of a part with reasoning, which Mistral has as a list of parts."""
    if isinstance(given, list):
        return "".join(str(part.get("text", "")) for part in given if isinstance(part, dict))
    return given


def text_of(content: MessageContent) -> str:
    """A content in one piece, without reasoning."""
    return _joined(content, thinking=False) if isinstance(content, list) else content


def _joined(content: list[TextPart], *, thinking: bool) -> str:
    return "".join(part.text for part in content if (part.type == "thinking") == thinking)
