"""`ChatRequest`: a request to `/v1/chat/completions`, its tools and template arguments.

Requests to the other APIs' chats are turned into it.
"""

from typing import Annotated, Any, ClassVar, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from kvboost_hf.server.chats.template import RESERVED, Rendering, reasoning_arguments
from kvboost_hf.server.requests.edits import MAX_EDITS, Edit
from kvboost_hf.server.requests.fields import NUMBER, Body, JsonSchemaBody, Length, Many, Refusal, Sampled, only
from kvboost_hf.server.requests.messages import Message, MessageContent, text_of

MAX_TOP_LOGPROBS = 20
MAX_TOOLS = 1000
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
_Effort = Annotated[str, Field(max_length=32)]


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

    history: bool | Annotated[str, Field(min_length=1, max_length=64)] | None = None
    """True keeps the messages, and `history` of the answer names them. With such a name, `messages` are only those
    behind these. Needs `prompt_cache_key`."""
    messages: Many[Message]
    """One at least, where `history` names none."""
    max_completion_tokens: Length = None
    """As `max_tokens`, before which it counts."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), NUMBER] | None = None
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
    edits: Annotated[Many[Edit], Field(max_length=MAX_EDITS)] | None = None
    """Changes of the messages, made before the chat template writes them."""

    @classmethod
    def of(cls, fields: dict[str, Any]) -> "ChatRequest":
        """A request to another API as one to this; `RequestValidationError` if its parts do not fit together."""
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise RequestValidationError([one | {"loc": ("body", *one["loc"])} for one in error.errors()]) from error

    @model_validator(mode="before")
    @classmethod
    def _modern(cls, given: Any) -> Any:
        return _as_tools(given)

    @field_validator("messages")
    @classmethod
    def _has_one(cls, given: list[Message], info: ValidationInfo) -> list[Message]:
        if not given and not isinstance(info.data.get("history"), str):
            raise ValueError("must have one message at least where history names none, got an empty list")
        return given

    @model_validator(mode="after")
    def _fits_together(self) -> "ChatRequest":
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice needs tools")
        known = [tool.function.name for tool in self.tools or ()]
        wrong = next((name for name in self._chosen if name not in known), None)
        if wrong is not None:
            raise ValueError(f"tool_choice must name one of tools, got {wrong!r}")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message needs add_generation_prompt to be false; leave that out")
        if self.history and self.prompt_cache_key is None:
            raise ValueError("history needs prompt_cache_key, which names the session that the messages are kept for")
        if self.messages and not self.edits:  # else what is last is known later
            self._require_last(self.messages[-1])
        return self

    def _require_last(self, last: Message) -> None:
        if self.continue_final_message and (last.role != "assistant" or last.calls):
            raise ValueError("continue_final_message needs a last message of the assistant, without calls")

    def with_messages(self, messages: list[Message]) -> "ChatRequest":
        """The request with other messages, one at least; `ValueError` if its other fields do not go with these."""
        self._require_last(messages[-1])
        return self.model_copy(update={"messages": messages})

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
