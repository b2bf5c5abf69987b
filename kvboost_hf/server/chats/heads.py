"""Leaves lines out of system prompts that change with each request and mean nothing to a model."""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from kvboost_hf.server.http.notes import note_changed

BILLING = "x-anthropic-billing-header"  # Claude Code's first line, with a number that changes with each request
_START = re.compile(rf"[ \t]*{BILLING}:[ \t]*", re.IGNORECASE)
_PAIR = re.compile(r"[\w.-]+=[^;\s]*;?[ \t]*")
_LINE_CHARS = 1000  # of a line that patterns are tried on
_BREAKS = "\r\n"


def without_changing_lines(messages: Sequence[dict[str, Any]], patterns: Sequence[str]) -> list[dict[str, Any]]:
    """Messages without changing lines of the system; what is left out is noted.

    Args:
        messages: As chat templates take them.
        patterns: Regular expressions of Python; a line that one of them matches as a whole is left out.

    Example:
        >>> text = "x-anthropic-billing-header: cc_version=2; cch=1a;\\nBe short."
        >>> without_changing_lines([{"role": "system", "content": text}], [])
        [{'role': 'system', 'content': 'Be short.'}]
    """
    found = []
    for message in messages:
        text = message.get("content")
        if message.get("role") == "system" and isinstance(text, str):
            kept = _without(text, patterns)
            if not kept and text:
                continue
            message = message if kept == text else {**message, "content": kept}
        found.append(message)
    return found or list(messages)


def _without(text: str, patterns: Sequence[str]) -> str:
    if not patterns and BILLING not in text.lower():
        return text
    lines = text.splitlines(keepends=True)
    kept = [_kept(line, patterns) for line in lines]
    whole = "".join(kept)
    return whole if kept[:1] == lines[:1] else whole.lstrip(_BREAKS)


def _kept(line: str, patterns: Sequence[str]) -> str:
    """A line without what changes; empty if all of it does."""
    if start := _START.match(line):
        note_changed(f"left-out:{BILLING}")
        end = start.end()
        while pair := _PAIR.match(line, end):
            end = pair.end()
        return line[end:].lstrip(_BREAKS) if end > start.end() else ""
    bare = line.rstrip(_BREAKS)
    if len(bare) <= _LINE_CHARS:
        for number, pattern in enumerate(patterns, 1):
            if _compiled(pattern).fullmatch(bare):
                note_changed(f"left-out:strip-head-{number}")
                return ""
    return line


@lru_cache(maxsize=64)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)
