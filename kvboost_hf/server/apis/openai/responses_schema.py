"""The schema of requests to `/v1/responses`, and the chat request that each stands for."""

import json
from itertools import takewhile
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from kvboost_hf.server.requests.chat import (
    MAX_TOOLS,
    MAX_TOP_LOGPROBS,
    ChatRequest,
    Function,
    ReasoningFields,
    ToolName,
    named_choice,
)
from kvboost_hf.server.requests.fields import NUMBER, Body, Length, Many, Named, Refusal, TextRequest, only
from kvboost_hf.server.requests.messages import (
    CallArguments,
    CalledFunction,
    MadeCall,
    Message,
    MessageContent,
    input_arguments,
    joined_thoughts,
)


class SaidItem(Body):
    """A message."""

    place: ClassVar = "input"
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: MessageContent
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class _Call(Body):
    """What calls of tools of any kind have."""

    place: ClassVar = "input"
    call_id: str
    name: str
    namespace: str | None = None
    id: str | None = None
    status: str | None = None


class CallItem(_Call):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    arguments: CallArguments = ""

    @property
    def function(self) -> CalledFunction:
        """The call as chats have it."""
        return CalledFunction(name=whole_name(self.namespace, self.name), arguments=self.arguments)


class CustomCallItem(_Call):
    """A call of a custom tool."""

    type: Literal["custom_tool_call"]
    input: str = ""

    @property
    def function(self) -> CalledFunction:
        """The call as chats have it."""
        return CalledFunction(name=whole_name(self.namespace, self.name), arguments=input_arguments(self.input))


class ResultItem(Body):
    """The result of a call."""

    place: ClassVar = "input"
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: MessageContent
    id: str | None = None
    status: str | None = None


class ReasoningText(Body):
    """A piece of reasoning."""

    place: ClassVar = "input.content"
    type: str | None = None
    text: str


class ReasoningItem(Body):
    """Reasoning of an earlier answer; the chat template decides whether it is part of the prompt."""

    place: ClassVar = "input"
    type: Literal["reasoning"]
    content: Many[ReasoningText] | None = None
    summary: Any = None
    """Not part of the prompt, as `encrypted_content`, `id` and `status`."""
    encrypted_content: Any = None
    id: str | None = None
    status: str | None = None


_ITEMS = (
    "message",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "reasoning",
)


def _known(item: Any) -> Any:
    if isinstance(item, dict) and item.get("type") == "item_reference":
        raise ValueError("responses are not stored; send the items themselves, as clients do with store=False")
    return item


def _tag(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return str(kind)


Item = Annotated[
    Annotated[SaidItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[ResultItem, Tag("function_call_output")]
    | Annotated[ResultItem, Tag("custom_tool_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_tag),
    BeforeValidator(_known),
]


class FlatFunction(Function):
    """A tool."""

    place: ClassVar = "tools"
    type: Literal["function"]


class InputFormat(Body):
    """The form of a custom tool's input."""

    place: ClassVar = "tools.format"
    type: Literal["text", "grammar"]
    syntax: str | None = None
    definition: str | None = None


class CustomTool(Body):
    """A tool whose input is a text, such as Codex's `apply_patch`; the model calls it with one argument, `input`."""

    place: ClassVar = "tools"
    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: InputFormat | None = None
    """A grammar is told to the model, but not enforced."""

    @property
    def function(self) -> FlatFunction:
        """The same as a function."""
        said = self.description or ""
        if self.format is not None and self.format.definition:
            grammar = f"The input is text of this grammar ({self.format.syntax or 'lark'}):\n{self.format.definition}"
            said = f"{said}\n\n{grammar}".lstrip()
        parameters = {
            "type": "object",
            "properties": {"input": {"type": "string"}},
            "required": ["input"],
            "additionalProperties": False,
        }
        return FlatFunction(type="function", name=self.name, description=said or None, parameters=parameters)


def custom_input(arguments: str) -> str:
    """The input of a custom tool, from the arguments that the model has written: one text, by whatever name."""
    found = json.loads(arguments)
    texts = [value for value in found.values() if isinstance(value, str)]
    if isinstance(found.get("input"), str):
        return str(found["input"])
    return texts[0] if len(found) == len(texts) == 1 else "" if not found else arguments


class Namespace(Body):
    """Tools of one kind, as Codex offers them; the model sees each as `NAMESPACE.NAME`."""

    place: ClassVar = "tools"
    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: Annotated[Many[FlatFunction], Field(max_length=MAX_TOOLS), only("tools.tools", ("function",))]

    @property
    def functions(self) -> list[FlatFunction]:
        """The tools of the namespace, by their whole names."""
        return [tool.model_copy(update={"name": whole_name(self.name, tool.name)}) for tool in self.tools]


def whole_name(namespace: str | None, name: str) -> str:
    """The name by which the model knows a tool."""
    return f"{namespace}.{name}" if namespace else name


class FlatChoice(Body):
    """The tool to call."""

    place: ClassVar = "tool_choice"
    type: Literal["function", "custom"]
    name: str

    @property
    def body(self) -> dict[str, Any]:
        """As in a chat."""
        return {"type": "function", "function": {"name": self.name}}


class FlatAllowed(Body):
    """The tools that may be called; the model is told of no others."""

    place: ClassVar = "tool_choice"
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[Many[FlatChoice], Field(max_length=MAX_TOOLS), only("tool_choice.tools", ("function", "custom"))]

    @property
    def body(self) -> dict[str, Any]:
        """As in a chat."""
        return {
            "type": "allowed_tools",
            "allowed_tools": {"mode": self.mode, "tools": [one.body for one in self.tools]},
        }


class PlainFormat(Body):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class FlatSchema(Body):
    """A schema that an answer must keep to."""

    place: ClassVar = "text.format"
    type: Literal["json_schema"]
    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """The format of the text."""

    place: ClassVar = "text"
    format: Annotated[PlainFormat | FlatSchema, Field(discriminator="type")] | None = None


_Choice = Literal["none", "auto", "required"] | Annotated[FlatChoice | FlatAllowed, Field(discriminator="type")]


def _with_one_head(messages: list[Message]) -> list[Message]:
    """Join what system and developer say first: many chat templates take one such message."""
    heads = list(takewhile(lambda message: message.role in ("system", "developer"), messages))
    if len(heads) < 2:
        return messages
    return [Message(role="system", content="\n\n".join(head.text for head in heads)), *messages[len(heads) :]]


class ResponseRequest(ReasoningFields, TextRequest):
    """A request to `/v1/responses`."""

    input: str | Annotated[Many[Item], Field(min_length=1), only("input", (*_ITEMS, "item_reference"), "message")]
    """A text, or items. Those of types that are not known are ignored and named."""
    instructions: str | None = None
    max_output_tokens: Length = None
    """As `max_tokens` of chats."""
    text: TextOptions | None = None
    tools: (
        Annotated[
            Many[Annotated[FlatFunction | CustomTool | Namespace, Field(discriminator="type")]],
            Field(max_length=MAX_TOOLS),
            only("tools", ("function", "custom", "namespace")),
        ]
        | None
    ) = None
    """Functions, namespaces of them, and custom tools. Other types of tools are ignored and named."""
    tool_choice: Annotated[_Choice | None, named_choice("function", "custom", "allowed_tools")] = None
    parallel_tool_calls: bool | None = None
    previous_response_id: Annotated[Any, Refusal("responses are not stored; send the whole conversation as input")] = (
        None
    )
    metadata: Named[str] | None = None
    """Sent back with the answer."""
    include: Many[str] | None = None
    """`message.output_text.logprobs` is served; there is nothing for the others."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), NUMBER] | None = None
    """More than 0 asks for log probabilities, too."""
    truncation: Literal["auto", "disabled"] | None = None
    """`auto` leaves out the beginning of a prompt that is too long."""
    store: bool | None = None
    """Responses are never stored."""
    background: Annotated[Any, Refusal("responses are not stored; leave background out, and wait or stream")] = None
    conversation: Annotated[Any, Refusal("conversations are not stored; send the whole conversation as input")] = None
    prompt: Annotated[Any, Refusal("templates of prompts are not stored; send input and instructions")] = None

    @property
    def chat(self) -> ChatRequest:
        """The same as a chat."""
        form = self.text.format if self.text is not None else None
        choice: Any = self.tool_choice
        if isinstance(choice, FlatChoice | FlatAllowed):
            choice = choice.body
        functions = [tool.model_dump(exclude={"type"}) for tool in self.functions]
        fields = {
            **self.model_dump(include=set(TextRequest.model_fields) | set(ReasoningFields.model_fields)),
            "truncate_prompt_tokens": -1 if self.truncation == "auto" else None,
            "messages": [message.model_dump() for message in _with_one_head(self._messages())],
            "max_completion_tokens": self.max_output_tokens,
            "tools": [{"type": "function", "function": function} for function in functions] or None,
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "logprobs": "message.output_text.logprobs" in (self.include or ()),
            "top_logprobs": self.top_logprobs,
        }
        if isinstance(form, FlatSchema):
            schema = form.model_dump(by_alias=True, exclude={"type"})
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif form is not None:
            fields["response_format"] = form.model_dump()
        return ChatRequest.of(fields)

    @property
    def functions(self) -> list[FlatFunction]:
        """All tools that are offered."""
        found: list[FlatFunction] = []
        for tool in self.tools or ():
            match tool:
                case Namespace():
                    found += tool.functions
                case CustomTool():
                    found.append(tool.function)
                case FlatFunction():
                    found.append(tool)
        return found

    def is_custom(self, name: str) -> bool:
        """Whether a custom tool has this name."""
        return any(isinstance(tool, CustomTool) and tool.name == name for tool in self.tools or ())

    def named(self, whole: str) -> dict[str, str]:
        """The name and namespace of a tool, as a call of it has them."""
        for tool in self.tools or ():
            if isinstance(tool, Namespace) and whole in [one.name for one in tool.functions]:
                return {"name": whole.removeprefix(whole_name(tool.name, "")), "namespace": tool.name}
        return {"name": whole}

    def _messages(self) -> list[Message]:
        found = [] if self.instructions is None else [Message(role="system", content=self.instructions)]
        if isinstance(self.input, str):
            return [*found, Message(role="user", content=self.input)]
        calls: list[MadeCall] = []  # of the last message, while there are more of them
        reasoning: str | None = None  # of the next message, or of the last one where more calls of that follow
        for item in self.input:
            match item:
                case SaidItem():
                    if reasoning is not None and item.role != "assistant":
                        found.append(_unsaid(reasoning))
                        reasoning = None
                    found.append(Message(role=item.role, content=item.content, reasoning_content=reasoning))
                    reasoning = None
                case ReasoningItem():
                    reasoning = joined_thoughts(reasoning, "".join(part.text for part in item.content or ()))
                case ResultItem():
                    found.append(Message(role="tool", content=item.output, tool_call_id=item.call_id))
                case CallItem() | CustomCallItem():
                    call = MadeCall(id=item.call_id, function=item.function)
                    if not found or found[-1].role != "assistant":
                        found.append(Message(role="assistant"))
                    if found[-1].tool_calls is not calls:
                        calls = []
                    told = {"tool_calls": calls, "reasoning_content": joined_thoughts(found[-1].thoughts, reasoning)}
                    found[-1], reasoning = found[-1].model_copy(update=told), None
                    calls.append(call)
        if reasoning is not None:
            found.append(_unsaid(reasoning))
        return found


def _unsaid(reasoning: str) -> Message:
    """An answer that was cut before its text."""
    return Message(role="assistant", content="", reasoning_content=reasoning)
