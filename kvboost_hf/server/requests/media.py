"""Texts in place of images, documents and other parts of messages that a model of text does not read."""

import base64
import binascii
from collections.abc import Iterator, Mapping
from typing import Any

from kvboost_hf.server.http.metrics import note_ignored

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
