"""Translates regular expressions of JSON schemas, which are JavaScript's, into those of grammars, which are Rust's."""

import re
from collections.abc import Iterator
from typing import NamedTuple

_CLASSES = {"d": "0-9", "w": "A-Za-z0-9_"}  # JavaScript's are of ASCII
_ANCHORS = {"A": "^", "Z": "$", "z": "$"}  # Python's
_KEPT = frozenset("nrtfvsSpPx")
_OF_UNICODE = re.compile(r"\\[pP](?:\{[^{}]*\}|[A-Za-z])")
_META = frozenset(r"\.+*?()|[]{}^$#&-~/")
_QUANTIFIER = re.compile(r"[*+?]\??|\{\d+(?:,\d*)?\}\??")
_GROUP = re.compile(r"\(\?(?:<?[=!])")
_MOST_GROUPS = 16  # that look around, in one pattern
_ITEM = r"(?P<item>\[\^?(?:\\.|[^\]\\])+\]|\\[^bBkAZz1-9]|[^\\.^$*+?()\[\]{}|])"
_NOT_ALL = re.compile(rf"\^?{_ITEM}(?P<times>[*+])\$")
_NOT_FIRST = re.compile(rf"\^?{_ITEM}")
_NOT_WITHIN = re.compile(rf"\^?\.\*{_ITEM}(?P<again>\\?.)?")


class Translation(NamedTuple):
    """Patterns of Rust, all of which a text must match."""

    patterns: tuple[str, ...]  # one or more
    exact: bool  # whether they match the same texts as the pattern that was given; otherwise they match others, too


def rust(pattern: str) -> Translation:
    r"""A pattern of a JSON schema for a grammar.

    What looks ahead at the beginning is a pattern of its own where that says the same. Other looking around, and
    references to what a group has matched, are left out.

    Example:
        >>> rust(r"^(?!^[-+.]*$)[+-]?\d*$")
        Translation(patterns=('^(?:)[+-]?[0-9]*$', '[^-+.]'), exact=True)
    """
    if len(_GROUP.findall(pattern)) > _MOST_GROUPS:
        return Translation((r"[\s\S]*",), False)
    found: list[str] = []
    more: list[str] = []
    exact = True
    split = _has_choice(pattern)
    at_start = False  # nothing but `^` and looking ahead has come
    at = 0
    while at < len(pattern):
        if _GROUP.match(pattern, at):
            end = _end_of_group(pattern, at)
            same = _alone(pattern[at:end]) if at_start and not split else None
            if same is None:
                exact = False
            else:
                more.append(same)
            found.append("(?:)")
            at = end
            if quantifier := _QUANTIFIER.match(pattern, at):
                at = quantifier.end()
            continue
        piece, at, kept = _piece(pattern, at)
        exact = exact and kept
        at_start = (at_start or not found) and piece == "^"
        found.append(piece)
    patterns = ["".join(found)]
    for each in more:
        inner = rust(each)
        patterns += inner.patterns
        exact = exact and inner.exact
    return Translation(tuple(patterns), exact)


def _piece(pattern: str, at: int) -> tuple[str, int, bool]:
    """The next piece in Rust's syntax, where it ends, and whether it means the same."""
    char = pattern[at]
    if char == "[":
        return _set(pattern, at)
    if char != "\\" or at + 1 == len(pattern):
        return char, at + 1, True
    escaped, end = pattern[at + 1], at + 2
    if escaped in "123456789":
        digits = re.compile(r"\d+").match(pattern, at + 1)
        assert digits is not None
        return r"[\s\S]*", digits.end(), False
    if escaped == "k" and (name := re.compile(r"k<\w+>").match(pattern, at + 1)):
        return r"[\s\S]*", name.end(), False
    if escaped in "bB":
        return "(?:)", end, False
    if of_unicode := _OF_UNICODE.match(pattern, at):
        return _held(f"[{of_unicode[0]}]"), of_unicode.end(), True
    if escaped in _ANCHORS:
        return _ANCHORS[escaped], end, True
    if escaped.lower() in _CLASSES:
        return f"[{'^' * escaped.isupper()}{_CLASSES[escaped.lower()]}]", end, True
    return *_escape(pattern, at), True


def _set(pattern: str, at: int) -> tuple[str, int, bool]:
    """A class of characters, such as `[a-z]`."""
    start, at = at, at + 1
    negated = pattern.startswith("^", at)
    at += negated
    if pattern.startswith("]", at):
        return (r"[\s\S]" if negated else r"[^\s\S]"), at + 1, True
    found = ["[^" if negated else "["]
    while at < len(pattern) and pattern[at] != "]":
        char, escaped = pattern[at], pattern[at + 1 : at + 2]
        if char != "\\" or not escaped:
            found.append(f"\\{char}" if char in "[&~|" or (char == "-" and pattern.startswith("-", at - 1)) else char)
            at += 1
        elif escaped.lower() in _CLASSES:
            inner = _CLASSES[escaped.lower()]
            found.append(inner if escaped.islower() else f"[^{inner}]")
            at += 2
        elif escaped == "b":
            found.append(r"\x08")
            at += 2
        else:
            piece, at = _escape(pattern, at)
            found.append(piece)
    if at >= len(pattern):
        return pattern[start:], at, True  # which is refused when it is compiled
    return _held("".join([*found, "]"])), at + 1, True


def _held(kind: str) -> str:
    """A class of characters as grammars hold it.

    llguidance lets quotes and backslashes through where a class has all control characters: without one of these, NUL,
    it does not. Classes that are known to have both are left as they are.
    """
    try:
        has = None if kind[1:].count("[") > kind.count(r"\[") else re.compile(kind)
    except re.error:  # what Python does not know, such as `\p{L}`
        has = None
    if has is not None and (not has.match("\0") or all(map(has.match, '"\\'))):
        return kind
    return rf"[{kind}&&[^\x00]]"


def _escape(pattern: str, at: int) -> tuple[str, int]:
    """An escape that is one character, or a class of Unicode's."""
    escaped, end = pattern[at + 1], at + 2
    if escaped == "u" and (code := re.compile(r"u([0-9a-fA-F]{4})|u\{[0-9a-fA-F]+\}").match(pattern, at + 1)):
        return f"\\{code[0]}", code.end()
    if escaped == "c" and pattern[end : end + 1].isalpha():
        return f"\\x{ord(pattern[end]) % 32:02x}", end + 1
    if escaped == "0":
        return r"\x00", end
    if escaped in _KEPT or escaped in _META:
        return f"\\{escaped}".replace(r"\/", "/"), end
    return escaped, end


def _alone(group: str) -> str | None:
    """A pattern that says what a look ahead at the start of a text says; None if there is none."""
    kind, inner = group[2], group[3:-1]
    if kind == "=":
        return f"^(?:{inner.removeprefix('^')})"
    if kind != "!":
        return None
    if inner in ("$", "^$"):
        return r"[\s\S]"
    if found := _NOT_ALL.fullmatch(inner):
        other = _other(found["item"])
        return other if found["times"] == "*" else f"^$|{other}"
    if found := _NOT_FIRST.fullmatch(inner):
        return f"^(?:$|{_other(found['item'])})"
    if found := _NOT_WITHIN.fullmatch(inner):
        item, other = found["item"], _other(found["item"])
        if found["again"] is None:
            return f"^{other}*$"
        if found["again"] == item and not item.startswith("["):
            return f"^(?:{item}?{other})*{item}?$"
    return None


def _other(item: str) -> str:
    """What matches one character that an item does not."""
    if item.startswith("[^"):
        return f"[{item[2:]}"
    return f"[^{item[1:]}" if item.startswith("[") else f"[^{item}]"


def _has_choice(pattern: str) -> bool:
    """Whether there is a `|` outside of all groups."""
    depth = 0
    for char in _plain(pattern):
        depth += {"(": 1, ")": -1}.get(char, 0)
        if char == "|" and not depth:
            return True
    return False


def _end_of_group(pattern: str, at: int) -> int:
    depth = 0
    for place, char in enumerate(_plain(pattern[at:]), at):
        depth += {"(": 1, ")": -1}.get(char, 0)
        if not depth:
            return place + 1
    return len(pattern)


def _plain(pattern: str) -> Iterator[str]:
    """The characters, with blanks in place of those that are escaped, or in classes."""
    escaped = inside = False
    for char in pattern:
        hidden = escaped or (inside and char != "]")
        yield " " if hidden or char in "\\]" else char
        inside = (inside and (escaped or char != "]")) or (not inside and not escaped and char == "[")
        escaped = not escaped and char == "\\"
