"""The schema of requests to `/v1/responses`, and the chat request that each stands for."""

from typing import Annotated, Any, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationError

from kvboost_hf.server.fields import Body, Many, Named, Refusal
from kvboost_hf.server.schema import (
    MAX_TOOLS,
    CalledFunction,
    ChatRequest,
    Content,
    Function,
    Length,
    MadeCall,
    Message,
    Request,
)


class SaidItem(Body):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class CallItem(Body):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class ResultItem(Body):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: str | None = None
    status: str | None = None


def _known(item: Any) -> Any:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind not in (None, "message", "function_call", "function_call_output"):
        raise ValueError(f"items of type {kind!a} are not context")
    return item


def _tag(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return str(kind)


Item = Annotated[
    Annotated[SaidItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")],
    Discriminator(_tag),
    BeforeValidator(_known),
]


class FlatFunction(Function):
    """A tool."""

    type: Literal["function"]


class FlatChoice(Body):
    """The tool to call."""

    type: Literal["function"]
    name: str


class PlainFormat(Body):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class FlatSchema(Body):
    """A schema that an answer must keep to."""

    type: Literal["json_schema"]
    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """The format of the text."""

    format: Annotated[PlainFormat | FlatSchema, Field(discriminator="type")] | None = None


class ResponseRequest(Request):
    """A request to `/v1/responses`."""

    input: str | Annotated[Many[Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Length = None
    text: TextOptions | None = None
    tools: Annotated[Many[FlatFunction], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: Annotated[Any, Refusal("responses are not stored; send the whole conversation as input")] = (
        None
    )
    metadata: Named[str] | None = None
    """Sent back with the answer."""
    background: Annotated[Any, Refusal("responses are not stored; leave background out, and wait or stream")] = None
    conversation: Annotated[Any, Refusal("conversations are not stored; send the whole conversation as input")] = None
    prompt: Annotated[Any, Refusal("templates of prompts are not stored; send input and instructions")] = None

    @property
    def chat(self) -> ChatRequest:
        """The same as a chat.

        Raises:
            RequestValidationError: its parts do not fit together.
        """
        form = self.text.format if self.text is not None else None
        choice: Any = self.tool_choice
        if isinstance(choice, FlatChoice):
            choice = {"type": "function", "function": {"name": choice.name}}
        functions = [tool.model_dump(exclude={"type"}) for tool in self.tools or ()]
        fields = {
            **self.model_dump(include=set(Request.model_fields)),
            "messages": [message.model_dump() for message in self._messages()],
            "max_completion_tokens": self.max_output_tokens,
            "tools": [{"type": "function", "function": function} for function in functions] or None,
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
        }
        if isinstance(form, FlatSchema):
            schema = form.model_dump(by_alias=True, exclude={"type"})
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif form is not None:
            fields["response_format"] = form.model_dump()
        try:
            return ChatRequest.model_validate(fields)
        except ValidationError as error:
            raise RequestValidationError([one | {"loc": ("body", *one["loc"])} for one in error.errors()]) from error

    def _messages(self) -> list[Message]:
        found = [] if self.instructions is None else [Message(role="system", content=self.instructions)]
        if isinstance(self.input, str):
            return [*found, Message(role="user", content=self.input)]
        calls: list[MadeCall] = []  # of the last message, while there are more of them
        for item in self.input:
            match item:
                case SaidItem():
                    found.append(Message(role=item.role, content=item.content))
                case ResultItem():
                    found.append(Message(role="tool", content=item.output, tool_call_id=item.call_id))
                case CallItem():
                    call = MadeCall(id=item.call_id, function=CalledFunction(name=item.name, arguments=item.arguments))
                    if not found or found[-1].role != "assistant":
                        found.append(Message(role="assistant"))
                    if found[-1].tool_calls is not calls:
                        calls = []
                        found[-1] = found[-1].model_copy(update={"tool_calls": calls})
                    calls.append(call)
        return found
