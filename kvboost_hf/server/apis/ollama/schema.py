"""The schemas of requests of Ollama's API, and the chat request that each stands for."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from kvboost_hf.server.http.metrics import note_ignored
from kvboost_hf.server.requests.chat import MAX_TOOLS, MAX_TOP_LOGPROBS, ChatRequest, Tool
from kvboost_hf.server.requests.fields import MAX_STOPS, NUMBER, Body, Many, Refusal, TopK, absent, only
from kvboost_hf.server.requests.messages import images_left_out

_Added = Annotated[float, Field(ge=-2, le=2), NUMBER]
_UNLIMITED = (0, -1, -2)


class OllamaOptions(Body):
    """How tokens are chosen. Options of the process that runs a model, such as `num_ctx`, are ignored."""

    place: ClassVar = "options"
    num_predict: Annotated[Annotated[int, Field(ge=1), NUMBER] | None, absent(*_UNLIMITED)] = None
    """Tokens of the answer, at most; as many as the context has room for where it is more, left out, 0, -1 or -2."""
    temperature: Annotated[float, Field(ge=0, le=2), NUMBER] | None = None
    """0 takes the likeliest token."""
    top_k: TopK = None
    """0 and -1 for all tokens."""
    top_p: Annotated[float, Field(ge=0, le=1), NUMBER] | None = None
    min_p: Annotated[float, Field(ge=0, le=1), NUMBER] | None = None
    seed: Annotated[Annotated[int, Field(ge=-(2**63), lt=2**63), NUMBER] | None, absent(-1)] = None
    """-1 for a different one each time."""
    stop: str | Annotated[Many[str], Field(max_length=MAX_STOPS)] | None = None
    """Texts that end the answer and are left out of it."""
    repeat_penalty: Annotated[float, Field(ge=0.01, le=100), NUMBER] | None = None
    """Divides positive logits of the tokens that prompt and answer have, and multiplies negative ones."""
    presence_penalty: _Added | None = None
    frequency_penalty: _Added | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        """The same as fields of a `ChatRequest`."""
        told = self.model_dump(exclude={"num_predict", "repeat_penalty"})
        return told | {"max_tokens": self.num_predict, "repetition_penalty": self.repeat_penalty}


class OllamaFunction(Body):
    """A called function, and its arguments."""

    place: ClassVar = "messages.tool_calls.function"
    name: str
    arguments: dict[str, Any] | str | None = None
    index: int | None = None


class OllamaCall(Body):
    """A call of an earlier answer."""

    place: ClassVar = "messages.tool_calls"
    id: str | None = None
    type: Literal["function"] = "function"
    function: OllamaFunction


def _with_texts(given: Any, name: str, place: str) -> Any:
    """A message or a request whose text `name` has a text for each of its images."""
    if not isinstance(given, dict) or not given.get("images") or not isinstance(given.get(name, ""), str | None):
        return given
    found = {field: value for field, value in given.items() if field != "images"}
    texts = images_left_out(given["images"], place)
    return found | {name: "\n".join(filter(None, (given.get(name), *texts)))}


class OllamaMessage(Body):
    """One message of a chat."""

    place: ClassVar = "messages"
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    images: Any = None
    """A text stands for each, behind the content."""
    thinking: str | None = None
    tool_calls: Many[OllamaCall] | None = None
    tool_name: str | None = None
    """The function that a message of role `tool` has the result of."""
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_images(cls, given: Any) -> Any:
        return _with_texts(given, "content", "messages")


class _Asked(Body):
    """The fields that requests for text have."""

    model: str
    """The model's name, also with `:latest` behind it, or one of `--model-alias`."""
    stream: bool | None = None
    """Lines of JSON, also where it is left out; with false one object."""
    format: Annotated[Literal["json"] | dict[str, Any] | None, absent("")] = None
    """`"json"` for any JSON object, or a schema."""
    options: OllamaOptions | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), NUMBER] | None = None
    keep_alive: Any = None
    """Changes nothing: the model stays loaded."""

    @property
    def unloads(self) -> bool:
        """Whether a request without a prompt asks to unload the model."""
        return self.keep_alive in (0, "0", "0s", "0m") and self.keep_alive is not False

    def chat_of(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool] | None = None) -> ChatRequest:
        """The request as a chat of these messages."""
        fields = (self.options or OllamaOptions()).sampling | {
            "model": self.model,
            "messages": messages,
            "tools": [tool.model_dump(exclude_none=True) for tool in tools or ()] or None,
            "logprobs": self.logprobs,
            "top_logprobs": self.top_logprobs,
            "response_format": _response_format(self.format),
            "think": self.think,
        }
        return ChatRequest.of(fields)


class OllamaChatRequest(_Asked):
    """A request to `/api/chat`."""

    messages: Many[OllamaMessage] | None = None
    """Without any, the answer says that the model is loaded."""
    tools: Annotated[Many[Tool], Field(max_length=MAX_TOOLS), only("tools", ("function",))] | None = None
    """Functions; other types of tools are ignored and named."""

    @property
    def chat(self) -> ChatRequest:
        """The same as a chat of OpenAI's API."""
        return self.chat_of(list(_messages(self.messages or ())), self.tools)


class OllamaGenerateRequest(_Asked):
    """A request to `/api/generate`."""

    prompt: str | None = None
    """Without one, the answer says that the model is loaded."""
    system: str | None = None
    """The system prompt; ignored, and named, beside `context`, which begins with one."""
    context: Many[Annotated[int, Field(strict=True)]] | None = None
    """The tokens of an earlier answer, behind which the prompt is the next message."""
    raw: bool | None = None
    """Take the prompt as it is, without the chat template."""
    images: Any = None
    """A text stands for each, behind the prompt."""
    template: Annotated[Any, Refusal("the model's chat template is used; pass raw to write your own")] = None
    suffix: str | None = None
    """The text behind the answer, for models with tokens to fill in the middle; without the chat template."""

    @model_validator(mode="before")
    @classmethod
    def _without_images(cls, given: Any) -> Any:
        return _with_texts(given, "prompt", "")

    @model_validator(mode="after")
    def _fits_together(self) -> "OllamaGenerateRequest":
        if (self.raw or self.suffix) and (self.system or self.context):
            raise ValueError("a raw prompt has all text itself; leave out system and context, or raw and suffix")
        if self.system and self.context:
            note_ignored("", "system")
        return self

    @property
    def chat(self) -> ChatRequest:
        """The same as a chat of OpenAI's API, without what `context` has."""
        system = [] if self.system is None or self.context else [{"role": "system", "content": self.system}]
        return self.chat_of([*system, {"role": "user", "content": self.prompt}])


class OllamaShowRequest(Body):
    """A request to `/api/show`."""

    model: str | None = None
    name: str | None = None
    """An older name of `model`."""
    verbose: bool | None = None
    """Changes nothing."""


class _Embedded(Body):
    """The fields that requests for embeddings have."""

    model: str
    options: Annotated[dict[str, Any], Field(fail_fast=True)] | None = None
    """Change nothing."""
    keep_alive: Any = None
    """Changes nothing: the model stays loaded."""


class OllamaEmbedRequest(_Embedded):
    """A request to `/api/embed`."""

    input: str | Many[str]
    truncate: bool | None = None
    """Changes nothing: texts that are too long are refused."""
    dimensions: Annotated[Any, Refusal("all numbers of an embedding are returned; leave dimensions out")] = None


class OllamaEmbeddingsRequest(_Embedded):
    """A request to `/api/embeddings`."""

    prompt: str


def _response_format(form: str | dict[str, Any] | None) -> dict[str, Any] | None:
    if not form:
        return None
    return {"type": "json_object"} if form == "json" else {"type": "json_schema", "json_schema": {"schema": form}}


def _messages(given: Sequence[OllamaMessage]) -> Iterator[dict[str, Any]]:
    """Messages of OpenAI's API, in which each call has an id, and each result that of its call.

    Ollama's clients may leave ids out. Those that are made up are the same in every request of a chat, so that its
    prompts begin alike.
    """
    open_calls: list[tuple[str, str]] = []  # name and id of those without a result
    made = 0
    for message in given:
        told: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        told |= {"reasoning_content": message.thinking, "name": message.tool_name}
        if message.tool_calls:
            told["tool_calls"] = calls = []
            for call in message.tool_calls:
                made += 1
                calls.append(call.model_dump(include={"function": {"name", "arguments"}}))
                calls[-1]["id"] = call.id or f"call{made:05}"  # nine letters and digits, which every template takes
                open_calls.append((call.function.name, calls[-1]["id"]))
        if message.role == "tool":
            told["tool_call_id"] = message.tool_call_id or _id_of(message.tool_name, open_calls)
            open_calls = [call for call in open_calls if call[1] != told["tool_call_id"]]
        yield told


def _id_of(name: str | None, open_calls: Sequence[tuple[str, str]]) -> str | None:
    """The id of the first call of this name, or of the first one."""
    return next((id for found, id in open_calls if found == name), open_calls[0][1] if open_calls else None)
