"""Answers that follow a grammar: JSON by a schema, a regular expression, or calls of tools. By llguidance."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvboost_hf.server.chats.tags import types_of
from kvboost_hf.server.chats.tool_formats import Tags, Tool, format_of
from kvboost_hf.server.chats.values import values_in
from kvboost_hf.server.grammars.program import WRITTEN
from kvboost_hf.server.grammars.schemas import closed, require_ends
from kvboost_hf.server.jobs import ConstraintError

# Between the parts of JSON: a space, or a line end with its indentation, much as llama.cpp allows it. With more room,
# a model that prefers line ends to all else writes them until it has no tokens left.
_SPACE = r" |\n {0,20}"
_MAX_DIGITS, _MAX_SPACES = 40, 200  # in a row: of a number, and in a string
_ASCII_CLASSES = {"d": "0-9", "w": "0-9A-Za-z_", "s": r"\t\n\v\f\r "}
_COMBINE, _SHARED = ("$ref", "allOf", "anyOf", "oneOf"), ("$defs", "definitions")
_QUOTE, _ESCAPE = b'"\\'


def json_schema(schema: Mapping[str, Any]) -> str:
    """The grammar of JSON that has a schema. Objects have no properties but those that it names; see `closed`."""
    require_ends(schema)
    return LLMatcher.grammar_from_json_schema(json.dumps(closed(schema)), defaults={"whitespace_pattern": _SPACE})


def regex(pattern: str) -> str:
    """The grammar of texts that a regular expression, in the syntax of Rust, matches as a whole.

    Its `\\d`, `\\w` and `\\s` are those of ASCII; see `ascii_pattern`.
    """
    return LLMatcher.grammar_from_regex(ascii_pattern(pattern))


def ascii_pattern(pattern: str) -> str:
    """A regular expression in the syntax of Rust whose `\\d`, `\\w` and `\\s` stand for characters of ASCII alone.

    Rust's stand for those of all scripts, ECMA's for those of ASCII, and Python's depend on a flag. What is written by
    a pattern of ASCII matches the client's own pattern in all of them. What must not be there (`\\D`, `[^\\d]`)
    therefore stays as wide as Rust has it.

    Example:
        >>> print(ascii_pattern(r"\\d{4}-[\\w.]+ [^\\d]"))
        [0-9]{4}-[[0-9A-Za-z_].]+ [^\\d]
    """
    written, at = "", 0
    negations: list[bool] = []  # of the brackets that are open, whether each of them is a `[^`
    while at < len(pattern):
        piece = pattern[at : at + (2 if pattern[at] == "\\" else 1)]
        at += len(piece)
        if piece == "[":
            # What begins a class is part of it, even if it looks like its end.
            negated = pattern.startswith("^", at)
            piece = "[^" if negated else "["
            at += negated
            if pattern.startswith(("]", ":"), at):
                piece += pattern[at]
                at += 1
            negations.append(negated)
        elif piece == "]" and negations:
            negations.pop()
        elif piece[0] == "\\":
            piece = _ascii_escape(piece, sum(negations) % 2 == 1)
        written += piece
    return written


def _ascii_escape(escape: str, negated: bool) -> str:
    """An escape in place of another one that stands for more characters than ASCII has."""
    letter = escape[1:]
    if letter.lower() not in _ASCII_CLASSES or letter.isupper() != negated:
        return escape
    return f"[{'^' * negated}{_ASCII_CLASSES[letter.lower()]}]"


def choice(texts: Sequence[str]) -> str:
    """The grammar of a few texts."""
    return f"start: {' | '.join(map(json.dumps, texts))}"


def written(grammar: str) -> str:
    """The grammar that somebody has written, in GBNF as llama.cpp has it, or in Lark as llguidance has it.

    A schema in it is refused: its references could not be checked.
    """
    if "%json" in grammar or grammar.lstrip().startswith("{"):
        raise ValueError("A grammar must be GBNF or Lark without `%json`. Pass the schema alone, as `json_schema`.")
    return WRITTEN + grammar


def tool_calls(
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Tool],
    *,
    parallel: bool = True,
    answer: Mapping[str, Any] | None = None,
) -> str:
    """The grammar of an answer that calls tools and says nothing else, as the model writes it.

    Args:
        tokenizer: The tokenizer of the model.
        tools: The tools that may be called, as in OpenAI's API; one tool if the request names it.
        parallel: Whether there may be more than one call.
        answer: The schema of JSON that may be said in place of calls; None if there must be a call.

    Raises:
        ValueError: the chat template has no place for tools, it is not known how the model writes calls, or the
            references of a schema have no end.
    """
    known = format_of(tokenizer, tools)
    added = tokenizer.get_added_vocab()
    if known.call is None:
        raise ValueError(
            f"Calls cannot be forced with this model, which writes them as {known.name} do. Pass tool_choice 'auto'."
        )
    before_name, before_arguments, behind = known.call
    rules, names = [], []

    def json_of(schema: Mapping[str, Any]) -> str:
        require_ends(schema)
        return f"%json {json.dumps({**closed(schema), 'x-guidance': {'whitespace_pattern': _SPACE}})}"

    for i, tool in enumerate(tools):
        function = tool["function"]
        head = _lark(before_name + json.dumps(function["name"])[1:-1] + before_arguments, added)
        schema = function.get("parameters") or {"type": "object"}
        arguments = json_of(schema) if known.tags is None else _tagged(known.tags, schema, f"value_{i}", json_of)
        rules.append(f"call_{i}: {head} arguments_{i} {_lark(behind, added)}\narguments_{i}: {arguments}")
        names.append(f"call_{i}")
    more = f"({_lark(known.between, added)} call)*" if parallel and known.between is not None else ""
    start = f"start: {_lark(known.before, added)} call {more} {_lark(known.after, added)}"
    if answer is not None:
        start += f" | answer\nanswer: {json_of(answer)}"
    return "\n".join([start, f"call: {' | '.join(names)}", *rules])


def _tagged(tags: Tags, schema: Mapping[str, Any], name: str, json_of: Callable[[Mapping[str, Any]], str]) -> str:
    """The rule of arguments that are written as tags, and behind it those of their values, whose names begin alike.

    Texts are free up to the tag behind them, also where a value may be of another type, too; what else a schema says
    of them is left to the model. Raises `ValueError` for a schema that does not name its properties at its top.
    """
    properties = schema.get("properties") or {}
    if not isinstance(properties, dict) or ("properties" not in schema and any(name in schema for name in _COMBINE)):
        raise ValueError(
            "Arguments of this model's calls are tags: `parameters` must have its `properties` at its top to force a "
            "call. Write them there, or pass tool_choice 'auto'."
        )
    required, shared = schema.get("required") or (), {key: schema[key] for key in _SHARED if key in schema}
    parts, rules = [], []
    for n, (key, given) in enumerate(properties.items()):
        value = given if isinstance(given, dict) else {}
        before, _, behind = tags.written.replace("{key}", key).partition("{value}")
        rule, end = f"{name}_{n}", tags.end(key)
        types, values = types_of(value, schema), values_in(value)
        if values and "string" in types:  # texts stand without quotes
            names = [json.dumps(one if isinstance(one, str) else json.dumps(one)) for one in values]
            rules.append(f"{rule}: ({' | '.join(names)}) {json.dumps(behind)}")
        elif not types or "string" in types:
            rules.append(f"{rule}: {rule}_text {json.dumps(behind.removeprefix(end))}")
            rules.append(f"{rule}_text[suffix={json.dumps(end)}]: /(?s:.*)/")
        else:
            rules.append(f"{rule}: {rule}_json {json.dumps(behind)}\n{rule}_json: {json_of({**shared, **value})}")
        parts.append(f"{json.dumps(before)} {rule}" if key in required else f"({json.dumps(before)} {rule})?")
    return "\n".join([" ".join(parts) or '""', *rules])


class GrammarConstraint:
    """Allows the tokens that a grammar does. It is a `Constraint` of :mod:`kvboost_hf.server.jobs`.

    Where it is one of JSON, runs of digits and spaces are limited; see `Runs`.
    """

    def __init__(self, matcher: LLMatcher, tokens: LLTokenizer, vocab_size: int, *, is_json: bool = True) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._runs = Runs(tokens, vocab_size) if is_json else None

    def allowed(self) -> Tensor:
        """[vocab_size], bool, on the host: the tokens that may come next; `ConstraintError` for none."""
        mask = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)
        self._check()
        allowed = mask[: self._vocab_size].bool()
        if self._runs is None or (barred := self._runs.barred) is None:
            return allowed
        fewer = allowed & ~barred
        return fewer if fewer.any() else allowed

    def advance(self, token: int) -> None:
        """Follow the grammar by one token; `ConstraintError` if it was not allowed, or the grammar got too large."""
        self._matcher.consume_token(token)
        self._check()
        if self._runs is not None:
            self._runs.advance(token)

    @property
    def finished(self) -> bool:
        """Whether nothing but the end may come."""
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConstraintError(f"The grammar cannot be followed: {self._matcher.get_error()}. Use a simpler one.")


class Runs:
    """Follows a text, token by token, and bars what a model may repeat without an end: digits, and space in strings.

    No grammar limits how many digits a number of JSON has, and a greedy model that begins to repeat one goes on until
    it has no tokens left.
    """

    def __init__(self, tokens: LLTokenizer, vocab_size: int) -> None:
        self._tokens, self._vocab_size = tokens, vocab_size
        self._in_string = self._escaped = False
        self._digits = self._spaces = 0  # in a row, up to here

    def advance(self, token: int) -> None:
        """Follow the grammar by one token."""
        for byte in self._tokens.decode_bytes([token]):
            self._follow(byte)

    def _follow(self, byte: int) -> None:
        space = byte in b"nrt" if self._escaped else byte in b" "
        if self._in_string and not (byte == _ESCAPE and not self._escaped):
            self._spaces = self._spaces + 1 if space else 0
        self._digits = self._digits + 1 if byte in b"0123456789" and not self._in_string else 0
        if byte == _QUOTE and not self._escaped:
            self._in_string, self._spaces = not self._in_string, 0
        self._escaped = byte == _ESCAPE and self._in_string and not self._escaped

    @property
    def barred(self) -> Tensor | None:
        """[vocab_size], bool, on the host: tokens that would make a run too long; None if there is none."""
        if self._digits >= _MAX_DIGITS:
            return _beginning(self._tokens, self._vocab_size, b"0123456789")
        if self._spaces >= _MAX_SPACES:
            return _beginning(self._tokens, self._vocab_size, b" \\")
        return None


@lru_cache(maxsize=8)
def _beginning(tokens: LLTokenizer, vocab_size: int, chars: bytes) -> Tensor:
    """[vocab_size], bool: the tokens that begin with one of these."""
    starts = (tokens.decode_bytes([token])[:1] for token in range(vocab_size))  # b"<" of one that there is not
    return torch.tensor([start != b"" and start in chars for start in starts])


def _lark(text: str, added: Mapping[str, int]) -> str:
    """`text` in a grammar. Markers that are tokens of their own have to be those."""
    markers = sorted((marker for marker in added if marker and marker in text), key=len, reverse=True)
    pattern = "|".join(map(re.escape, markers))
    pieces = [piece for piece in re.split(f"({pattern})", text) if piece] if markers else [text] if text else []
    return " ".join(f"<[{added[piece]}]>" if piece in added else json.dumps(piece) for piece in pieces)
