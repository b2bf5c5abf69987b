"""Answers that follow a grammar: JSON by a schema, a regular expression, or calls of tools. By llguidance."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from kvboost_hf.errors import KVBoostError
from kvboost_hf.server.references import require_ends
from kvboost_hf.server.tools import Tool, format_of

# Between the parts of JSON. Without a bound, a model may write nothing else.
_SPACE = r"[ \n]{1,40}"


def json_schema(schema: Mapping[str, Any]) -> str:
    """The grammar of JSON that has a schema.

    Raises:
        ValueError: its references have no end, or go too deep.
    """
    require_ends(schema)
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults={"whitespace_pattern": _SPACE})


def regex(pattern: str) -> str:
    """The grammar of texts that a regular expression, in the syntax of Rust, matches as a whole."""
    return LLMatcher.grammar_from_regex(pattern)


def tool_calls(
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Tool],
    *,
    parallel: bool = True,
    answer: Mapping[str, Any] | None = None,
) -> str:
    """The grammar of an answer that calls tools and says nothing else, as the model writes it.

    Args:
        tokenizer: Of the model.
        tools: Those that may be called, as in OpenAI's API; one for a call that is named.
        parallel: Whether there may be more than one call.
        answer: The schema of JSON that may be said in place of calls; None if there must be a call.

    Raises:
        ValueError: the chat template has no place for tools, it is not known how the model writes calls, or the
            references of a schema have no end.
    """
    known = format_of(tokenizer, tools)
    added = tokenizer.get_added_vocab()
    before_name, before_arguments, behind = known.call
    rules, names = [], []

    def json_of(schema: Mapping[str, Any]) -> str:
        require_ends(schema)
        return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': _SPACE}})}"

    for i, tool in enumerate(tools):
        function = tool["function"]
        head = _lark(before_name + json.dumps(function["name"])[1:-1] + before_arguments, added)
        arguments = json_of(function.get("parameters") or {"type": "object"})
        rules.append(f"call_{i}: {head} arguments_{i} {_lark(behind, added)}\narguments_{i}: {arguments}")
        names.append(f"call_{i}")
    more = f"({_lark(known.between, added)} call)*" if parallel and known.between is not None else ""
    start = f"start: {_lark(known.before, added)} call {more} {_lark(known.after, added)}"
    if answer is not None:
        start += f" | answer\nanswer: {json_of(answer)}"
    return "\n".join([start, f"call: {' | '.join(names)}", *rules])


def constraint_for(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int, kind: str, *, ends: Collection[int] = ()
) -> "GrammarConstraint":
    """A constraint for one job. Equal grammars are compiled once, and kept for a while.

    Args:
        tokenizer: Of the model; one of the fast ones.
        vocab_size: How many logits the model has; may be more than the tokenizer has tokens.
        kind: A grammar, from one of the functions above.
        ends: Tokens that end an answer; the tokenizer's own if empty.

    Raises:
        ValueError: the grammar is not one, or asks for what cannot be enforced.

    Example:
        >>> from kvboost_hf.assets import load_embedded
        >>> model, tokenizer = load_embedded()
        >>> constraint = constraint_for(tokenizer, model.config.vocab_size, regex("yes|no"))
        >>> [tokenizer.decode(token) for token in constraint.allowed().nonzero()]
        ['n', 'y']
    """
    return GrammarConstraint(_compiled(tokenizer, vocab_size, _ends(tokenizer, ends), kind).deep_copy(), vocab_size)


class GrammarConstraint:
    """Allows the tokens that a grammar does. It is a `Constraint` of :mod:`kvboost_hf.server.jobs`.

    Args:
        matcher: At the start of the grammar.
        vocab_size: How many logits the model has.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def allowed(self) -> Tensor:
        """[vocab_size], bool, on the host: the tokens that may come next.

        Raises:
            KVBoostError: the grammar has become too large to follow.
        """
        mask = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)
        self._check()
        return mask[: self._vocab_size].bool()

    def advance(self, token: int) -> None:
        """`token` has come.

        Raises:
            KVBoostError: it was not allowed, or the grammar has become too large to follow.
        """
        self._matcher.consume_token(token)
        self._check()

    @property
    def finished(self) -> bool:
        """Whether nothing but the end may come."""
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise KVBoostError(f"The grammar cannot be followed: {self._matcher.get_error()}. Use a simpler one.")


@lru_cache(maxsize=128)
def _compiled(tokenizer: PreTrainedTokenizerBase, vocab_size: int, ends: tuple[int, ...], grammar: str) -> LLMatcher:
    matcher = LLMatcher(_tokens(tokenizer, vocab_size, ends), grammar, log_level=0)
    if matcher.is_error():
        raise ValueError(f"The grammar or schema cannot be enforced: {matcher.get_error()}. Leave that out.")
    return matcher


@lru_cache(maxsize=8)
def _tokens(tokenizer: PreTrainedTokenizerBase, vocab_size: int, ends: tuple[int, ...]) -> LLTokenizer:
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"A grammar needs a fast tokenizer, got {type(tokenizer).__name__}.")
    return from_tokenizer(tokenizer, n_vocab=max(vocab_size, len(tokenizer)), eos_token=list(ends))


def _ends(tokenizer: PreTrainedTokenizerBase, ends: Collection[int]) -> tuple[int, ...]:
    if not ends and tokenizer.eos_token_id is None:
        raise ValueError("`ends` must name a token for a tokenizer that has no `eos_token`, got none.")
    return tuple(sorted(ends)) or (tokenizer.eos_token_id,)


def _lark(text: str, added: Mapping[str, int]) -> str:
    """`text` in a grammar. Markers that are tokens of their own have to be those."""
    pieces = [piece for piece in re.split(r"(</?tool_call>|\[TOOL_CALLS\]|\[ARGS\])", text) if piece]
    return " ".join(f"<[{added[piece]}]>" if piece in added else json.dumps(piece) for piece in pieces)
