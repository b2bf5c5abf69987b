"""The schemas of requests. Fields that are not here are refused, never ignored."""

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from kvboost_hf.server.json_text import read_json

MAX_STOPS = 16
MAX_TOP_LOGPROBS = 20
MAX_TOOLS = 1000
MAX_TEXTS = 2048  # to embed, as in OpenAI's API
MAX_BIASES = 10_000

Item = TypeVar("Item")
# A collection with one error at most, where it would have one for each of millions of items.
Many = Annotated[list[Item], Field(fail_fast=True)]
Named = Annotated[dict[str, Item], Field(fail_fast=True)]

_Id = Annotated[int, Field(strict=True)]
_Token = Annotated[int, Field(ge=0)]
_Added = Annotated[float, Field(ge=-100, le=100)]
_Bias = Annotated[dict[_Token, _Added], Field(max_length=MAX_BIASES, fail_fast=True)]
_Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class Body(BaseModel):
    """A JSON object of known fields, without NaN and infinities."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_field(cls, given: Any) -> Any:
        """All but one of the unknown fields are left out: each would be an error of its own."""
        if not isinstance(given, dict) or len(given) <= len(cls.model_fields):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next((name for name in given if name not in known), None)
        return {name: value for name, value in given.items() if name in known or name == unknown}


def _only_text(part: Any) -> Any:
    if isinstance(part, dict) and part.get("type") not in ("text", "input_text", "output_text", None):
        raise ValueError(f"content parts of type {part['type']!a} are not served; send text")
    return part


class CacheBreakpoint(Body):
    """Says that what comes before is the start of other prompts, too.

    It changes nothing: all of a prompt is stored, and found again up to the token where another one parts from it.
    """

    mode: Literal["explicit"]


class TextPart(Body):
    """A piece of a message."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    prompt_cache_breakpoint: CacheBreakpoint | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: list[Any] | None = None


Content = str | Many[Annotated[TextPart, BeforeValidator(_only_text)]]


class CalledFunction(Body):
    """The name of a called function, and its arguments as JSON text."""

    name: str
    arguments: str

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

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Message(Body):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Many[MadeCall] | None = None
    tool_call_id: str | None = None
    # Of answers that are sent back as they came.
    refusal: str | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    reasoning_content: str | None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _said_something(self) -> "Message":
        if self.content is None and not self.tool_calls and self.role != "assistant":
            raise ValueError(f"a message of role {self.role!r} must have content")
        return self

    @property
    def text(self) -> str:
        """The content in one piece; empty for none."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class Function(Body):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool of a chat."""

    type: Literal["function"]
    function: Function

    @property
    def body(self) -> dict[str, Any]:
        """As it was sent."""
        return self.model_dump(exclude_none=True)


class FunctionName(Body):
    """Names a function."""

    name: str


class ToolChoice(Body):
    """The tool to call."""

    type: Literal["function"]
    function: FunctionName


class JsonSchema(Body):
    """A schema that an answer must keep to."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class PlainFormat(Body):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaFormat(Body):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")]


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class Request(Body):
    """The fields that all requests for text have."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stream: bool | None = None
    user: str | None = None
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None
    metadata: Named[str] | None = None
    service_tier: Literal["auto", "default"] | None = None


class Sampled(Request):
    """The fields of both kinds of completions; the last three are not part of OpenAI's API."""

    n: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: str | Annotated[Many[str], Field(max_length=MAX_STOPS)] | None = None
    seed: _Int64 | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[dict[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=-100, le=100)]], Field(fail_fast=True)]
        | None
    ) = None
    stream_options: StreamOptions | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None

    @model_validator(mode="after")
    def _streams(self) -> "Sampled":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options must be left out without stream")
        if self.stop is not None and not all([self.stop] if isinstance(self.stop, str) else self.stop):
            raise ValueError("stop must not be an empty text")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop texts."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(Sampled):
    """A request to `/v1/chat/completions`."""

    messages: Annotated[Many[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[Many[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    store: Literal[False] | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice needs tools")
        if isinstance(self.tool_choice, ToolChoice):
            name = self.tool_choice.function.name
            if name not in [tool.function.name for tool in self.tools or ()]:
                raise ValueError(f"tool_choice must name one of tools, got {name!r}")
        return self

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be a call of a tool."""
        return self.tool_choice not in (None, "none", "auto")

    @property
    def json_wanted(self) -> bool:
        """Whether the answer has to be JSON."""
        return self.response_format is not None and self.response_format.type != "text"

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model is told of."""
        return [] if self.tool_choice == "none" else list(self.tools or ())


def _kind_of_texts(given: Any) -> str:
    """Which kind of `Texts` this is; the first item of a list decides, so that others are errors of that kind."""
    if not isinstance(given, list):
        return "text"
    match given[:1]:
        case [list()]:
            return "token_lists"
        case [int()]:
            return "tokens"
        case _:
            return "texts"


Texts = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[Many[str], Tag("texts")]
    | Annotated[Many[_Id], Tag("tokens")]
    | Annotated[Many[Many[_Id]], Tag("token_lists")],
    Discriminator(_kind_of_texts),
]


def _as_list(texts: Texts) -> list[str | list[int]]:
    if isinstance(texts, str):
        return [texts]
    tokens = [one for one in texts if isinstance(one, int)]
    return [tokens] if tokens else [one for one in texts if not isinstance(one, int)]


class CompletionRequest(Sampled):
    """A request to `/v1/completions`."""

    prompt: Texts
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Literal[1] | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> "CompletionRequest":
        if self.echo and self.logprobs is not None:
            raise ValueError("logprobs of the prompt are not served; leave out echo or logprobs")
        if not self.prompts:
            raise ValueError("prompt must not be an empty list")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """Texts or tokens to continue."""
        return _as_list(self.prompt)


class EmbeddingRequest(Body):
    """A request to `/v1/embeddings`. All numbers are returned: there are no `dimensions` to choose."""

    model: str
    input: Annotated[Texts, Field(min_length=1)]
    encoding_format: Literal["float", "base64"] | None = None
    user: str | None = None

    @property
    def texts(self) -> list[str | list[int]]:
        """Texts or tokens to embed."""
        return _as_list(self.input)


class WarmRequest(Body):
    """A request to `/v1/warm`: texts, or a chat, that prompts will start with."""

    texts: Annotated[Many[str], Field(min_length=1)] | None = None
    messages: Annotated[Many[Message], Field(min_length=1)] | None = None
    tools: Annotated[Many[Tool], Field(max_length=MAX_TOOLS)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> "WarmRequest":
        if (self.texts is None) == (self.messages is None):
            raise ValueError("either texts or messages must be given")
        if self.tools and self.messages is None:
            raise ValueError("tools need messages")
        return self
