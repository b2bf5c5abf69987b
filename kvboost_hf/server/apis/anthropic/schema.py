"""The schema of requests to `/v1/messages`, and the chat request that each stands for."""

import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, Field, model_validator

from kvboost_hf.server.http.errors import NO_THREADS
from kvboost_hf.server.http.metrics import note_ignored
from kvboost_hf.server.requests.chat import MAX_TOOLS, ChatRequest, ToolName
from kvboost_hf.server.requests.fields import (
    MAX_STOPS,
    NUMBER,
    Body,
    JsonSchemaBody,
    Many,
    Refusal,
    TopK,
    absent,
    only,
)
from kvboost_hf.server.requests.messages import CalledFunction, MadeCall, Message, joined_thoughts, text_of_media

_BETWEEN = "\n\n"  # texts of several blocks


class CacheControl(Body):
    """Asks to keep the prompt up to here for a while."""

    place: ClassVar = "cache_control"
    type: Literal["ephemeral"] = "ephemeral"
    ttl: Literal["5m", "1h"] = "5m"


class _Marked(Body):
    """A part of a prompt that `cache_control` may stand at."""

    cache_control: CacheControl | None = None


class TextBlock(_Marked):
    """A text."""

    place: ClassVar = "messages.content"
    type: Literal["text"]
    text: str
    citations: Any = None
    """Sent back with an earlier answer; not part of the prompt."""


class ThinkingBlock(Body):
    """Reasoning of an earlier answer; the chat template decides whether it is part of the prompt."""

    place: ClassVar = "messages.content"
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None
    """Not checked."""


class HiddenThinkingBlock(Body):
    """Reasoning that another server has encrypted; left out."""

    place: ClassVar = "messages.content"
    type: Literal["redacted_thinking"]
    data: str | None = None


class UseBlock(_Marked):
    """A call of an earlier answer."""

    place: ClassVar = "messages.content"
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


def _text_block(block: Any) -> Any:
    """A block as one of text."""
    kind = block.get("type") if isinstance(block, dict) else "text"
    if not isinstance(kind, str):
        raise ValueError(f"blocks of type {kind!a} are not served; send text")
    if kind == "text":
        return block
    text = {"type": "text", "text": text_of_media(block, "messages.content")}
    return text | {name: block[name] for name in ("cache_control",) if name in block}


class ResultBlock(_Marked):
    """The result of a call."""

    place: ClassVar = "messages.content"
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Many[Annotated[TextBlock, BeforeValidator(_text_block)]] | None = None
    is_error: bool | None = None
    """Puts `Error: ` before the result."""

    @property
    def message(self) -> Message:
        """The message of a chat."""
        text = self.content if isinstance(self.content, str) else _joined(self.content or ())
        text = f"Error: {text}" if self.is_error else text
        return Message(role="tool", content=text, tool_call_id=self.tool_use_id)


class OwnTool(_Marked):
    """A tool that the client runs; `input_schema` is a JSON schema."""

    place: ClassVar = "tools"
    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: JsonSchemaBody
    strict: bool | None = None
    """With true, what a grammar of a call cannot hold of `input_schema` is refused."""

    @property
    def body(self) -> dict[str, Any]:
        """As in a chat."""
        function: dict[str, Any] = {
            "name": self.name,
            "description": self.description,
            "parameters": self.input_schema,
        }
        function |= {} if self.strict is None else {"strict": self.strict}
        return {"type": "function", "function": function}


class NamedTool(Body):
    """A tool of the request, or of an earlier addition."""

    place: ClassVar = "messages.content.tool"
    type: Literal["tool_reference"]
    name: str


class DefinedTool(Body):
    """A tool that an addition brings."""

    place: ClassVar = "messages.content.tool"
    type: Literal["tool_definition"]
    definition: OwnTool


class AddedTool(_Marked):
    """Offers a tool from here on."""

    place: ClassVar = "messages.content"
    type: Literal["tool_addition"]
    tool: Annotated[NamedTool | DefinedTool, Field(discriminator="type")]


class RemovedTool(_Marked):
    """Offers a tool no longer."""

    place: ClassVar = "messages.content"
    type: Literal["tool_removal"]
    tool: NamedTool


def _is_of_client(kind: str, block: dict[str, Any]) -> bool:
    """Whether no tool is added or removed that another than the client runs."""
    match block.get("tool") if kind in _CHANGES else None:
        case {"type": "tool_definition", "definition": {"type": str(of)}}:
            return of == "custom"
        case {"type": str(of)}:
            return not of.startswith("mcp_")
    return True


_SAID = (TextBlock, ThinkingBlock, HiddenThinkingBlock, UseBlock)
_ASKED = (TextBlock, ResultBlock, AddedTool, RemovedTool)
_CHANGES = ("tool_addition", "tool_removal")
_BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result", *_CHANGES)


_MEDIA = ("image", "document", "audio", "video", "search_result")


def _without_servers(blocks: Any) -> Any:
    """Leave out blocks of tools that Anthropic's servers run, and others that no chat template knows."""
    if not isinstance(blocks, list):
        return blocks
    found = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(kind, str) and (kind not in (*_BLOCKS, *_MEDIA) or not _is_of_client(kind, block)):
            note_ignored("messages.content", kind)
        else:
            found.append(block)
    return found


def _known_block(block: Any) -> Any:
    known = isinstance(block, dict) and isinstance(block.get("type"), str) and block["type"] in _BLOCKS
    return block if known else _text_block(block)


Block = Annotated[
    Annotated[
        TextBlock | ThinkingBlock | HiddenThinkingBlock | UseBlock | ResultBlock | AddedTool | RemovedTool,
        Field(discriminator="type"),
    ],
    BeforeValidator(_known_block),
]


class Turn(Body):
    """What one side has said. Consecutive turns of the same side are one.

    A turn of the system counts as one of the user: many chat templates take the system's messages at the start only.
    """

    place: ClassVar = "messages"
    role: Literal["user", "assistant", "system"]
    content: Annotated[str | Many[Block], BeforeValidator(_without_servers)]

    @model_validator(mode="before")
    @classmethod
    def _settings_alone(cls, given: Any) -> Any:
        """A turn of the system may have settings, and no content."""
        settings = isinstance(given, dict) and given.get("role") == "system" and given.get("content") is None
        return given | {"content": []} if settings and given.get("output_config") is not None else given

    @model_validator(mode="after")
    def _of_its_side(self) -> "Turn":
        if isinstance(self.content, list):
            kinds = _SAID if self.role == "assistant" else _ASKED
            wrong = next((block for block in self.content if not isinstance(block, kinds)), None)
            if wrong is not None:
                raise ValueError(f"blocks of type {wrong.type!r} cannot be in a message of role {self.role!r}")
        return self

    @property
    def messages(self) -> list[Message]:
        """The messages of a chat: each result of a call is one, and so are the texts in a row."""
        role: Literal["user", "assistant"] = "assistant" if self.role == "assistant" else "user"
        if isinstance(self.content, str):
            return [Message(role=role, content=self.content)]
        if role == "assistant":
            return [_said(self.content)]
        found: list[Message] = []
        for is_text, blocks in groupby(self.content, lambda block: isinstance(block, TextBlock)):
            if is_text:
                found.append(Message(role=role, content=_joined(blocks)))
            else:
                found += [block.message for block in blocks if isinstance(block, ResultBlock)]
        return found or ([] if self.role == "system" else [Message(role=role, content="")])

    @property
    def changes(self) -> list[AddedTool | RemovedTool]:
        """What it adds to the tools, and takes away, in order."""
        blocks = self.content if isinstance(self.content, list) else []
        return [block for block in blocks if isinstance(block, AddedTool | RemovedTool)]

    def up_to(self, blocks: int) -> "Turn":
        """The same with its first blocks only."""
        return self if isinstance(self.content, str) else self.model_copy(update={"content": self.content[:blocks]})


def _joined(blocks: Iterable[Any]) -> str:
    return _BETWEEN.join(block.text for block in blocks if block.text)


def _said(blocks: Sequence[Body]) -> Message:
    calls = [
        MadeCall(id=one.id, function=CalledFunction(name=one.name, arguments=json.dumps(one.input)))
        for one in blocks
        if isinstance(one, UseBlock)
    ]
    reasoning = joined_thoughts(*(one.thinking for one in blocks if isinstance(one, ThinkingBlock)))
    text = "".join(one.text for one in blocks if isinstance(one, TextBlock))
    return Message(role="assistant", content=text, tool_calls=calls or None, reasoning_content=reasoning)


def _merged(messages: Iterable[Message]) -> list[Message]:
    """Make one message of what the same side says in a row."""
    found: list[Message] = []
    for message in messages:
        last = found[-1] if found else None
        if last is None or last.role != message.role or message.role not in ("user", "assistant"):
            found.append(message)
            continue
        between = _BETWEEN if message.role == "user" else ""
        calls = [*(last.tool_calls or ()), *(message.tool_calls or ())]
        text = between.join(filter(None, (last.text, message.text)))
        thoughts = joined_thoughts(last.reasoning_content, message.reasoning_content)
        told = {"content": text, "tool_calls": calls or None, "reasoning_content": thoughts}
        found[-1] = last.model_copy(update=told)
    return found


class UseChoice(Body):
    """Whether a tool has to be called, and which."""

    place: ClassVar = "tool_choice"
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _named(self) -> "UseChoice":
        if self.type == "tool" and self.name is None:
            raise ValueError("tool_choice of type 'tool' must name a tool")
        return self

    @property
    def body(self) -> Any:
        """As in a chat."""
        named = {"type": "function", "function": {"name": self.name}}
        return {"auto": "auto", "any": "required", "none": "none", "tool": named}[self.type]


class OutputFormat(Body):
    """A schema that an answer must keep to."""

    place: ClassVar = "output_config.format"
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """The form of an answer."""

    place: ClassVar = "output_config"
    format: OutputFormat | None = None
    effort: Annotated[str, Field(max_length=32)] | None = None
    """Given to the chat template as `reasoning_effort`."""


class Thinking(Body):
    """Whether the model reasons before its answer."""

    place: ClassVar = "thinking"
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]


class Breakpoint(NamedTuple):
    """Where `cache_control` stands."""

    turns: int  # before the one that it is in; 0 for tools and system
    blocks: int  # of that one, up to here; 0 for tools and system
    ttl: str
    last: bool  # whether nothing follows


class CountRequest(Body):
    """A request to `/v1/messages/count_tokens`."""

    model: str | None = None
    """The model's name, or one of `--model-alias`; the only model where it is left out."""
    messages: Annotated[Many[Turn], Field(min_length=1)]
    """Text, thinking, calls and their results; a text stands for images and other blocks. The answer continues a last
    message of the assistant."""
    system: str | Many[Annotated[TextBlock, BeforeValidator(_text_block)]] | None = None
    """Claude Code's line `x-anthropic-billing-header` is left out: it changes with each request."""
    tools: Annotated[Many[OwnTool], Field(max_length=MAX_TOOLS), only("tools", ("custom",))] | None = None
    """Tools with an `input_schema`; those that Anthropic defines or runs are ignored and named."""
    tool_choice: UseChoice | None = None
    thinking: Thinking | None = None
    """Reasoning is off without it, where the chat template has a switch, and no part of the answer."""
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The older place of `output_config.format`."""
    cache_control: CacheControl | None = None
    """The same as at the last block."""
    container: Annotated[Any, Refusal("the server runs no code; leave container out")] = None

    @model_validator(mode="after")
    def _asks_something(self) -> "CountRequest":
        last = self.messages[-1].messages[-1:]
        if last and last[0].calls:
            raise ValueError("the last message must not be a call of the assistant; send the result of the call")
        return self

    @property
    def chat(self) -> ChatRequest:
        """The same as a chat."""
        return ChatRequest.of(self._chat_fields())

    def _chat_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": [message.model_dump() for message in self._messages(self.messages)],
            "tools": [tool.body for tool in self._offered] or None,
            "continue_final_message": self.messages[-1].role == "assistant" or None,
        }
        if self.output_config is not None:
            fields["reasoning_effort"] = self.output_config.effort
        thinks = self.thinking is not None and self.thinking.type in ("enabled", "adaptive")
        fields |= {"enable_thinking": thinks, "include_reasoning": thinks}
        if self.tool_choice is not None:
            fields["tool_choice"] = self.tool_choice.body
            fields["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        form = self.output_config.format if self.output_config is not None else None
        if (form := form or self.output_format) is not None:
            fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.schema_}}
        return fields

    @property
    def _offered(self) -> list[OwnTool]:
        """The tools behind the last message."""
        known = {tool.name: tool for tool in self.tools or ()}
        offered = dict(known)
        for turn in self.messages:
            for change in turn.changes:
                match change:
                    case RemovedTool(tool=tool):
                        offered.pop(tool.name, None)
                    case AddedTool(tool=DefinedTool(definition=tool)):
                        known[tool.name] = offered[tool.name] = tool
                    case AddedTool(tool=NamedTool(name=name)) if name in known:
                        offered[name] = known[name]
        return list(offered.values())

    def _messages(self, turns: Iterable[Turn]) -> list[Message]:
        system = self.system
        if isinstance(system, list):
            system = _joined(system)
        head = [Message(role="system", content=system)] if system else []
        return _merged([*head, *(message for turn in turns for message in turn.messages)])

    @property
    def breakpoints(self) -> list[Breakpoint]:
        """Where `cache_control` stands, in order; tools and system are one place."""
        system = self.system if isinstance(self.system, list) else []
        head = [part.cache_control for part in (*(self.tools or ()), *system) if part.cache_control is not None]
        found = [Breakpoint(0, 0, control.ttl, last=False) for control in head]
        end = len(self.messages) - 1
        for turns, turn in enumerate(self.messages):
            blocks = turn.content if isinstance(turn.content, list) else []
            for count, block in enumerate(blocks, 1):
                control = getattr(block, "cache_control", None)
                if control is not None:
                    found.append(Breakpoint(turns, count, control.ttl, turns == end and count == len(blocks)))
        if self.cache_control is not None:
            found.append(Breakpoint(end, 0, self.cache_control.ttl, last=True))
        return found

    def up_to(self, point: Breakpoint) -> list[Message]:
        """The messages up to a breakpoint; an empty one of the user behind tools and system alone."""
        turns = list(self.messages[: point.turns])
        if point.blocks:
            turns.append(self.messages[point.turns].up_to(point.blocks))
        return self._messages(turns or [Turn(role="user", content="")])


class MessagesRequest(CountRequest):
    """A request to `/v1/messages`."""

    max_tokens: Annotated[Annotated[int, Field(ge=0), NUMBER] | None, absent(-1)] = None
    """As many as the context has room for where it is more, left out, or -1; 0 computes the prompt for requests to
    come."""
    stop_sequences: Annotated[Many[str], Field(max_length=MAX_STOPS)] | None = None
    """Texts that end the answer and are left out of it."""
    stream: bool | None = None
    """Server-sent events."""
    temperature: Annotated[float, Field(ge=0, le=2), NUMBER] | None = None
    """0 takes the likeliest token."""
    top_p: Annotated[float, Field(ge=0, le=1), NUMBER] | None = None
    top_k: TopK = None
    """0 and -1 for all tokens."""
    thread: Annotated[
        Any, Refusal("conversations are not stored; leave thread out, and send all messages", code=NO_THREADS)
    ] = None
    compaction: Annotated[Any, Refusal("the server makes no summaries; leave compaction out, and ask for one")] = None

    def _chat_fields(self) -> dict[str, Any]:
        asked = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return super()._chat_fields() | asked | {"stop": self.stop_sequences, "stream": self.stream}
