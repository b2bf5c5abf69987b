"""`ChatRequest`: a request to `/v1/chat/completions`; those of the other APIs' chats are turned into it."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from kvboost_hf.server.chats.rendering import Rendering
from kvboost_hf.server.requests.fields import Body, Many
from kvboost_hf.server.requests.messages import Content, Message, text_of
from kvboost_hf.server.requests.sampled import Length, Sampled
from kvboost_hf.server.requests.template_fields import ReasoningFields
from kvboost_hf.server.requests.tools import MAX_TOOLS, AllowedTools, Function, FunctionName, Tool, ToolChoice

MAX_TOP_LOGPROBS = 20


class Prediction(Body):
    """A text that the answer may have parts of, such as a file that is to be changed."""

    place: ClassVar = "prediction"
    type: Literal["content"]
    content: Content

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


_Choice = Literal["none", "auto", "required"] | Annotated[ToolChoice | AllowedTools, Field(discriminator="type")]


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
    tools: Annotated[Many[Tool], Field(max_length=MAX_TOOLS)] | None = None
    """Functions; other types of tools are refused."""
    tool_choice: Annotated[_Choice | None, BeforeValidator(lambda given: "required" if given == "any" else given)] = (
        None
    )
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
