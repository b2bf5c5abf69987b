"""Encodes texts and chats in threads, each with a tokenizer of its own; clients take turns."""

import copy
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio.lowlevel
from jinja2 import TemplateError

from kvboost_hf.server.errors import refused
from kvboost_hf.server.jobs import TooLongError
from kvboost_hf.server.lengths import reach_of
from kvboost_hf.server.markers import CutText, ForgedMarkerError, Markers, texts_in
from kvboost_hf.server.turns import Turns, in_thread

Told = list[dict[str, Any]]  # messages, or tools, as chat templates take them

_PLACES = 3  # of which long texts leave one
_LONG = 2**15  # characters, which take some 30 ms
_TRIED = 8  # characters for each token of the context: most texts have more tokens than that
_SEAM = 64  # tokens that may become fewer when a text goes on


class Encoder:
    """Encodes for all requests of a server.

    A tokenizer changes its settings while it works, so that each place has a copy of its own, and the one that was
    given is left to those who decode. The work is done in threads, without Python's lock for most of it.

    Args:
        tokenizer: Of the model, with a chat template if chats are to be encoded.
        context: Tokens of a prompt and its answer together, at most. What must have more tokens is not tokenized.
        truncates: Leave out the beginning of what is too long, in place of refusing it.
        max_waiting: Texts of one client that may wait.
    """

    def __init__(self, tokenizer: Any, *, context: int, truncates: bool, max_waiting: int) -> None:
        self._tokenizer = tokenizer
        self._idle: list[Any] = []  # copies, made when they are needed: that takes long
        self._context, self._truncates = context, truncates
        self._reach, self._markers = reach_of(tokenizer), Markers(tokenizer)
        self._turns = Turns(_PLACES, max_waiting)

    async def text(self, text: str, client: bytes, *, new: int, whole: bool = False) -> list[int]:
        """Tokens of a text, with what the tokenizer puts before each. Special tokens in the text are such.

        Args:
            text: The text.
            client: Who asks; see `Turns`.
            new: Tokens that are to come behind it.
            whole: Refuse a text that is too long even where the beginning of prompts is left out.

        Raises:
            TooLongError: it must have more tokens than the context.
            QueueFullError: too many texts of this client wait.
        """
        kept = self._kept(text, new, whole)
        async with self._place(client, len(kept)) as tokenizer:
            return await in_thread(lambda: _encode(tokenizer, self._tried(tokenizer, kept, new, whole), special=True))

    async def tokens(self, ids: list[int], *, new: int, whole: bool = False) -> list[int]:
        """Tokens that came in place of a text: no more than the context has, or `TooLongError`. See `text`."""
        await anyio.lowlevel.checkpoint()  # there may be many in a row
        if len(ids) <= self._context:
            return ids
        if self._truncates and not whole:
            return ids[-self._context :]
        raise self._too_long(f"{len(ids)} tokens", new, whole)

    async def chat(self, messages: Told, tools: Told, client: bytes, *, new: int, answer: bool) -> list[int]:
        """Tokens of a chat, in which only what the chat template writes itself becomes special tokens.

        Args:
            messages: As the chat template takes them.
            tools: Likewise.
            client: Who asks; see `Turns`.
            new: Tokens that are to come behind it.
            answer: Whether the start of an answer is at its end.

        Raises:
            ApiError: there is no chat template, or it refuses the messages.
            TooLongError: see `text`, as for the other.
            QueueFullError:
        """
        if len(messages) > self._context and not self._truncates:  # each has a token at least
            raise self._too_long(f"{len(messages)} messages", new, whole=False)
        size = sum(map(len, texts_in([messages, tools])))
        async with self._place(client, size) as tokenizer:
            return await in_thread(lambda: self._chat(tokenizer, messages, tools, new, answer))

    @asynccontextmanager
    async def _place(self, client: bytes, chars: int) -> AsyncIterator[Any]:
        async with self._turns.turn(client, long=chars > _LONG):
            tokenizer = self._idle.pop() if self._idle else await in_thread(lambda: copy.deepcopy(self._tokenizer))
            try:
                yield tokenizer
            finally:
                self._idle.append(tokenizer)

    def _chat(self, tokenizer: Any, messages: Told, tools: Told, new: int, answer: bool) -> list[int]:
        rendered = _rendered(self._tokenizer, messages, tools, answer)
        text = self._tried(tokenizer, self._kept(rendered, new), new)
        cut = self._markers.cut([messages, tools])
        if cut is None:
            return _encode(tokenizer, text, special=False)
        messages, tools = cut.given
        apart = _rendered(self._tokenizer, messages, tools, answer)
        return self._apart(tokenizer, cut, apart if text == rendered else cut.last(apart, len(text)))

    def _apart(self, tokenizer: Any, cut: CutText, rendered: str) -> list[int]:
        """Tokens of a chat in which clients have written what could be taken for special tokens."""
        text, markers = cut.markers(rendered)
        if markers == self._markers.find(text) and not cut.hidden:
            return _encode(tokenizer, text, special=False)
        try:
            return self._markers.encode(text, markers)
        except ForgedMarkerError as error:
            raise refused(
                "messages",
                f"They have the text of a special token, which the model cannot read as text: {error}. Leave it out.",
            ) from error

    def _kept(self, text: str, new: int, whole: bool = False) -> str:
        """As much of a text as may be tokenized."""
        most = self._reach.most(text, self._context)
        if len(text) <= most:
            return text
        if self._truncates and not whole:
            return text[-most:]
        raise self._too_long(f"{len(text)} characters, which are more than {self._context} tokens", new, whole)

    def _tried(self, tokenizer: Any, text: str, new: int, whole: bool = False) -> str:
        """As much of a text as may be tokenized, found out by a part of it: all of it would take time and memory."""
        size, truncates = _TRIED * self._context, self._truncates and not whole
        if len(text) <= 2 * size:
            return text
        part = text[-size:] if truncates else text[:size]
        tokens = len(_encode(tokenizer, part, special=False))
        if tokens <= self._context + _SEAM:
            return text
        if truncates:
            return part
        raise self._too_long(f"more than {tokens - _SEAM} tokens", new, whole)

    def _too_long(self, length: str, new: int, whole: bool) -> TooLongError:
        if whole:
            return TooLongError(
                f"A text of {length} is longer than the model's context of {self._context}. Cut it into several.",
                self._context,
            )
        most = max(self._context - new, 0)
        return TooLongError(
            f"A prompt of {length} with {new} new ones exceeds the context window of {self._context}. Shorten it to "
            f"{most} tokens, or ask for fewer new ones.",
            most,
        )


def _encode(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=special))


def _rendered(tokenizer: Any, messages: Told, tools: Told, answer: bool) -> str:
    if tokenizer.chat_template is None:
        raise refused("messages", "The model has no chat template. Send a text to /v1/completions.")
    try:
        return str(
            tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False, add_generation_prompt=answer)
        )
    except (TemplateError, TypeError, ValueError, RecursionError) as error:
        raise refused("messages", f"The model's chat template refuses them: {error}") from error
