"""Parses JSON of clients within limits of size and depth. Pure Python, no HTTP."""

import json
from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json

MAX_PARTS = 200_000  # objects, lists, and fields of objects
MAX_DEPTH = 100  # of lists and objects in each other


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

    Example:
        >>> read_json(b'{"n": 2}')
        {'n': 2}
    """
    require_few_parts([raw])
    try:
        found = from_json(raw)
    except ValueError as error:
        why = str(error)
        if "recursion" in why:
            raise LargeJsonError(deep=True) from error
        if "escape" in why or "unicode" in why:  # such as half of a character
            why += "; texts must be valid Unicode"
        raise json.JSONDecodeError(why, "", 0) from error
    inner = [found]
    for _ in range(MAX_DEPTH):
        inner = [part for whole in inner for part in _inside(whole) if isinstance(part, dict | list)]
    if inner:
        raise LargeJsonError(deep=True)
    return found


def _inside(whole: Any) -> Any:
    if isinstance(whole, dict):
        return whole.values()
    return whole if isinstance(whole, list) else ()


def _count(raw: bytes) -> int:
    return sum(raw.count(sign) for sign in (b"{", b"[", b":"))
