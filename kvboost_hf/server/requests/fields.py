"""`Body`: a JSON object of a request, read within limits of size and depth.

Unknown fields are ignored and noted, or refused where the operator says so.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, from_json
from pydantic_core.core_schema import no_info_after_validator_function

from kvboost_hf.server.http.notes import note_ignored

Item = TypeVar("Item")
# A collection with one error at most, where it would have one for each of millions of items.
Many = Annotated[list[Item], Field(fail_fast=True)]
Named = Annotated[dict[str, Item], Field(fail_fast=True)]
MAX_PARTS = 200_000  # objects, lists, and fields of objects
MAX_DEPTH = 100  # of lists and objects in each other


def only(place: str, kinds: Sequence[str], default: str | None = None) -> BeforeValidator:
    """Leave objects of other types out of a list, and note these, as `Body` notes fields that it does not know.

    Args:
        place: Where the list is in a request.
        kinds: The types that are served.
        default: The type of an object that names none; None to have that checked later.

    Example:
        >>> only("tools", ["function"]).func([{"type": "function"}, {"type": "web_search"}])
        [{'type': 'function'}]
    """

    def kept(given: Any) -> Any:
        if not isinstance(given, list):
            return given
        found = []
        for item in given:
            kind = item.get("type", default) if isinstance(item, dict) else None
            if isinstance(kind, str) and kind not in kinds:
                note_ignored(place, kind)
            else:
                found.append(item)
        if given and not found and default is not None:
            kind = given[0].get("type")
            raise ValueError(f"one must be of a type that is served: {', '.join(kinds)}; got only such as {kind!a}")
        return found

    return BeforeValidator(kept)


class Body(BaseModel):
    """A JSON object, without NaN and infinities.

    Attributes:
        place: Where such objects are in a request, for the names of unknown fields; empty for a whole request.
    """

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, frozen=True, use_attribute_docstrings=True)
    place: ClassVar[str] = ""

    @model_validator(mode="before")
    @classmethod
    def _note_unknown(cls, given: Any) -> Any:
        if isinstance(given, dict):
            known = _names_of(cls)
            unknown = [name for name, value in given.items() if name not in known and value is not None]
            if unknown:
                note_ignored(cls.place, *unknown)
        return given


@dataclass(frozen=True)
class Refusal:
    """The type of a field that asks for what the server cannot do, so that ignoring it would give another answer.

    Args:
        why: What it asks for, and what to do.
        accepted: A value that asks for nothing, besides empty ones.
    """

    why: str
    accepted: Any = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_after_validator_function(self._check, handler(source))

    def _check(self, given: Any) -> None:
        if given and given != self.accepted:
            raise ValueError(self.why)


def absent(*values: Any) -> BeforeValidator:
    """Take some values for a field that was left out, such as -1 for a length without a limit."""
    return BeforeValidator(lambda given: None if given in values and not isinstance(given, bool) else given)


@cache
def _names_of(kind: type[BaseModel]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in kind.model_fields.items())


class LargeJsonError(ValueError):
    """JSON has too many parts, or they are nested too deep.

    Args:
        deep: Whether it is the depth.
        got: How many parts there are, otherwise.
    """

    def __init__(self, *, deep: bool = False, got: int = 0) -> None:
        if deep:
            message = f"Lists and objects must be nested {MAX_DEPTH} deep at most, got more. Flatten them."
        else:
            message = f"JSON may have {MAX_PARTS} objects, lists and fields, got {got}. Send several requests."
        super().__init__(message)
        self.deep = deep


def require_few_parts(texts: Sequence[bytes]) -> None:
    """Raise a `LargeJsonError` if texts have too many parts together; they are not parsed for this."""
    if sum(map(_count, texts)) <= MAX_PARTS:
        return
    plain = (text.replace(rb"\\", b"").replace(rb"\"", b"") for text in texts)
    # Up to where it is no JSON, if it is not.
    parts = sum(_count(b"".join(text.split(b'"')[::2])) for text in plain)
    if parts > MAX_PARTS:
        raise LargeJsonError(got=parts)


def read_json(raw: bytes) -> Any:
    """Parse JSON.

    Raises:
        LargeJsonError: it has too many parts, or they are nested too deep.
        json.JSONDecodeError: it is no JSON, or has texts that are no Unicode.

    A mark of the byte order is skipped, and UTF-16 and UTF-32 are read as Python's `json` reads them.

    Example:
        >>> read_json(b'{"n": 2}')
        {'n': 2}
    """
    raw = _as_utf8(raw)
    require_few_parts([raw])
    try:
        found = from_json(raw)
    except ValueError as error:
        why = str(error)
        if "recursion" in why:
            raise LargeJsonError(deep=True) from error
        if "escape" in why or "unicode" in why:  # such as half of a character
            why += "; texts must be valid Unicode, in UTF-8"
        raise json.JSONDecodeError(why, "", 0) from error
    inner = [found]
    for _ in range(MAX_DEPTH):
        inner = [part for whole in inner for part in _inside(whole) if isinstance(part, dict | list)]
    if inner:
        raise LargeJsonError(deep=True)
    return found


def _as_utf8(raw: bytes) -> bytes:
    encoding = json.detect_encoding(raw)
    if encoding == "utf-8":
        return raw
    try:
        return raw.decode(encoding).encode()
    except UnicodeError as error:
        raise json.JSONDecodeError(f"it looks like {encoding}, and is none: {error}. Send UTF-8", "", 0) from error


def _inside(whole: Any) -> Any:
    if isinstance(whole, dict):
        return whole.values()
    return whole if isinstance(whole, list) else ()


def _count(raw: bytes) -> int:
    return sum(raw.count(sign) for sign in (b"{", b"[", b":"))
