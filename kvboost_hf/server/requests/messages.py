"""`Message`: one message of a chat, with the parts of its content and the calls of tools in it.

Texts stand in place of images, documents and other parts that a model of text does not read.
"""

import base64
import binascii
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, model_validator

from kvboost_hf.server.chats.values import arguments_of
from kvboost_hf.server.http.metrics import note_ignored
from kvboost_hf.server.requests.fields import Body, LargeJsonError, Many, read_json

_URL_CHARS, _NAME_CHARS = 200, 100
_LEVELS = 4  # of documents in results in documents
_SOURCES = ("source", "image_url", "video_url", "audio_url", "input_audio", "file", "resource", "image", "media")
_URLS = ("url", "uri", "file_url", "image_url")
_DATA = ("data", "file_data", "blob", "image")
_TYPES = ("media_type", "mediaType", "mimeType", "mime_type")
_NAMES = ("filename", "title", "name", "file_id", "tool_name")
_KINDS = {
    "image_url": "image",
    "input_image": "image",
    "computer_screenshot": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "input_file": "file",
    "video_url": "video",
    "input_video": "video",
}


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
    """Sent back with an earlier answer; not part of the prompt."""
    logprobs: Any = None
    """Sent back with an earlier answer; not part of the prompt."""


MessageContent = str | Many[Annotated[TextPart, BeforeValidator(_as_text_part)]]


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


def input_arguments(text: str) -> str:
    """The input of a custom tool as the arguments of a function.

    Example:
        >>> input_arguments("ls")
        '{"input": "ls"}'
    """
    return json.dumps({"input": text}, ensure_ascii=False)


class MadeCall(Body):
    """A call of an earlier answer. That of a custom tool counts as one of a function with the argument `input`."""

    place: ClassVar = "messages.tool_calls"
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _as_function(cls, given: Any) -> Any:
        custom = given.get("custom") if isinstance(given, dict) and given.get("type") == "custom" else None
        if not isinstance(custom, dict) or not isinstance(custom.get("input"), str):
            return given
        function = {"name": custom.get("name"), "arguments": input_arguments(custom["input"])}
        return {name: value for name, value in given.items() if name != "custom"} | {
            "type": "function",
            "function": function,
        }


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
    """What an earlier answer was reasoned from: part of the prompt where the chat template reads it."""
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
        """As chat templates take it, with one text and arguments as objects, or `LargeJsonError` for those."""
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


def with_names(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages in which results of calls have the name of the tool, which some templates write.

    OpenAI's and Anthropic's clients send the id of the call alone.

    Example:
        >>> call = {"id": "a1", "type": "function", "function": {"name": "look", "arguments": {}}}
        >>> chat = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "a1"}]
        >>> with_names(chat)[1]
        {'role': 'tool', 'tool_call_id': 'a1', 'name': 'look'}
    """
    names: dict[str, str] = {}
    found = []
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ()) if call["id"]}
        name = names.get(message.get("tool_call_id", ""))
        if message["role"] == "tool" and "name" not in message and name is not None:
            message = {**message, "name": name}
        found.append(message)
    return found


def _thought(given: Any) -> Any:
    """The text of a part with reasoning, which Mistral has as a list of parts."""
    if isinstance(given, list):
        return "".join(str(part.get("text", "")) for part in given if isinstance(part, dict))
    return given


def joined_thoughts(*thoughts: str | None) -> str | None:
    """The reasoning of several places in one piece, as the message of a chat has it; None for none.

    Example:
        >>> joined_thoughts("So.", None, "Then.")
        'So.\\n\\nThen.'
    """
    return "\n\n".join(filter(None, thoughts)) or None


def text_of(content: MessageContent) -> str:
    """A content in one piece, without reasoning."""
    return _joined(content, thinking=False) if isinstance(content, list) else content


def _joined(content: list[TextPart], *, thinking: bool) -> str:
    return "".join(part.text for part in content if (part.type == "thinking") == thinking)


def text_of_media(part: Mapping[str, Any], place: str) -> str:
    """The text of a part that is none of text; what of it is left out is noted.

    A document of text, and a result of a search, keep their texts.

    Example:
        >>> image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
        >>> text_of_media(image, "messages.content")
        '[An image was left out here: image/png, 8 bytes. This model reads text only.]'
    """
    return _text(part, place, _LEVELS)


def images_left_out(images: Any, place: str) -> list[str]:
    """The texts in place of Ollama's `images`; they are noted as left out."""
    if not images:
        return []
    note_ignored(place, "images")
    found = images if isinstance(images, list) else [images]
    return [_left_out("image", {"data": image} if isinstance(image, str) else {}) for image in found]


def _text(part: Mapping[str, Any], place: str, levels: int) -> str:
    kind = str(part["type"])
    kept = "\n\n".join(_kept(part, place, levels)) if levels else ""
    if kept:
        return kept
    note_ignored(place, kind)
    inner: dict[str, Any] = dict(part)
    for name in _SOURCES:
        source = part.get(name)
        if isinstance(source, Mapping):
            inner |= source
        elif isinstance(source, str) and name != "source":
            inner.setdefault("url" if ":" in source[:12] else "data", source)
    return _left_out(_KINDS.get(kind, kind), inner)


def _kept(part: Mapping[str, Any], place: str, levels: int) -> Iterator[str]:
    """The texts of a document, of a resource, or of a result of a search."""
    source = part.get("source")
    found: list[str] = []
    contents = [part.get("content"), *([source.get("content")] if isinstance(source, Mapping) else [])]
    for content in contents:
        for each in content if isinstance(content, list) else [content]:
            if isinstance(each, str):
                found.append(each)
            elif isinstance(each, Mapping) and isinstance(each.get("text"), str):
                found.append(each["text"])
            elif isinstance(each, Mapping) and isinstance(each.get("type"), str):
                found.append(_text(each, place, levels - 1))
    if isinstance(source, Mapping) and source.get("type") == "text" and isinstance(source.get("data"), str):
        found.append(source["data"])
    for inner in (part, part.get("resource"), part.get("file")):
        if not isinstance(inner, Mapping):
            continue
        if isinstance(inner.get("text"), str):
            found.append(inner["text"])
        if isinstance(inner.get("file_data"), str) and (text := _text_of_url(inner["file_data"])) is not None:
            found.append(text)
    if found:
        names = [part.get("title"), source if isinstance(source, str) else None, part.get("context")]
        names += [inner.get("filename") for inner in (part, part.get("file")) if isinstance(inner, Mapping)]
        yield from (name for name in names if isinstance(name, str) and name)
        yield from found


def _text_of_url(url: str) -> str | None:
    """The text of a data URL with one."""
    head, _, data = url.partition(",")
    if not head.startswith(("data:text/", "data:application/json")):
        return None
    if not head.endswith(";base64"):
        return data
    try:
        return base64.b64decode(data, validate=True).decode()
    except (binascii.Error, ValueError):
        return None


def _left_out(kind: str, part: Mapping[str, Any]) -> str:
    told: list[str] = []
    url = next((part[name] for name in _URLS if isinstance(part.get(name), str)), "")
    data = next((part[name] for name in _DATA if isinstance(part.get(name), str)), "")
    media_type = next((part[name] for name in _TYPES if isinstance(part.get(name), str)), "")
    if data.startswith("data:"):
        url = data
    if url.startswith("data:"):
        head, _, data = url.partition(",")
        media_type, url = media_type or head.removeprefix("data:").partition(";")[0], ""
    if not media_type and isinstance(part.get("format"), str):
        media_type = part["format"]
    names = [part[name][:_NAME_CHARS] for name in _NAMES if isinstance(part.get(name), str)]
    told += names[:1] + ([media_type[:_NAME_CHARS]] if media_type else [])
    if data:
        told.append(_size(len(data.rstrip("=")) * 3 // 4))
    if url:
        told.append(url[:_URL_CHARS])
    article = "An" if kind[:1].lower() in "aeiou" else "A"
    what = f"{article} {kind[:_NAME_CHARS].replace('_', ' ')} was left out here"
    return f"[{': '.join(filter(None, (what, ', '.join(told))))}. This model reads text only.]"


def _size(count: int) -> str:
    if count < 1000:
        return f"{count} bytes"
    return f"{count / 1000:.0f} kB" if count < 10**6 else f"{count / 10**6:.1f} MB"
