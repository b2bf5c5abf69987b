"""Encodes texts and chats in threads, each with a tokenizer of its own; clients take turns.

`Reach` bounds the text that a token can stand for, so that a text that cannot fit is refused before it is tokenized.
"""

import copy
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Any, Literal

import anyio.lowlevel
from jinja2 import TemplateError
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from kvboost_hf.cache.prompt.chats import ChatTemplate, Messages, Start, chat_start
from kvboost_hf.server.chats.merging import Abilities, abilities_of, adapted
from kvboost_hf.server.chats.template import (
    CutText,
    ForgedMarkerError,
    KnownTools,
    Markers,
    Owner,
    Rendering,
    TokenCache,
    forget_words,
    own_text,
    texts_in,
    with_own_texts,
)
from kvboost_hf.server.chats.tool_formats import known_format
from kvboost_hf.server.fair_share import Turns, in_thread
from kvboost_hf.server.http.errors import ApiError, refused
from kvboost_hf.server.http.metrics import note_changed
from kvboost_hf.server.protocol import TooLongError

Told = list[dict[str, Any]]  # messages, or tools, as chat templates take them
What = Literal["messages", "prompt", "text"]
_PLACES = 3  # of which long texts leave one
_LONG = 2**15  # characters, which take some 30 ms
_CHARS = 4  # of a token, on average, for the estimate of a text that is not tokenized
_TRIED = 8  # characters for each token of the context: most texts have more tokens than that
_SEAM = 64  # tokens that may become fewer when a text goes on
_KEPT_BYTES = 2**26  # of tokens of known parts of chats, for all clients together
_MOST_ABILITIES = 32
_PROBED_TOOLS: Told = [
    {
        "type": "function",
        "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
    }
]
_PROBED: Told = [{"role": "user", "content": "Who?"}]
_ERROR_CHARS = 300  # of a template's error, which may quote the whole chat
# For tokenizers that may drop some of a text, such as white space, or take any number of characters for one token.
UNSURE_CHARS = 256
# NFC and NFKC compose one character of four at most, and leave ASCII as it is.
_COMPOSED = 4
# None of them makes a text shorter, in characters.
_KEEPING_NORMALIZERS = {"Prepend", "Lowercase", "NFD", "NFKD", "ByteLevel"}
_KEEPING_PRE_TOKENIZERS = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength"}


class Encoder:
    """Encodes for all requests of a server.

    A tokenizer changes its settings while it works, so that each place has a copy of its own, and the one that was
    given is left to those who decode. The work is done in threads, without Python's lock for most of it.

    Args:
        tokenizer: The tokenizer of the model, with a chat template if chats are to be encoded.
        context: Tokens of a prompt and its answer together, at most. What must have more tokens is not tokenized.
        truncates: Leave out the beginning of what is too long, in place of refusing it.
        max_waiting: Texts of one client that may wait.
        clients: How many clients there are, which have an equal part of the memory for known tokens.
    """

    def __init__(self, tokenizer: Any, *, context: int, truncates: bool, max_waiting: int, clients: int = 1) -> None:
        self._tokenizer = tokenizer
        # Copies, and who has used each last; made when they are needed: that takes long.
        self._idle: list[tuple[bytes, Any]] = []
        self._context, self._truncates = context, truncates
        self._reach, self._markers = reach_of(tokenizer), Markers(tokenizer)
        self._turns = Turns(_PLACES, max_waiting)
        self._known = TokenCache(tokenizer, _KEPT_BYTES // clients)
        self._tools = KnownTools()
        # What the template does with messages: by template, with tools or without, and by a hash of its arguments.
        self._abilities: dict[tuple[str, bool, bytes], Abilities] = {}
        self._bare_tools: dict[str, bool] = {}  # whether a template takes functions alone

    async def text(
        self,
        text: str | list[int],
        client: bytes,
        *,
        new: int,
        whole: bool = False,
        truncates: bool = False,
        special: bool = True,
    ) -> list[int]:
        """Tokens of a text, in which special tokens are such; or those that came in its place, no more than fit.

        Args:
            text: The text, or its tokens.
            client: Who asks; see `Turns`.
            new: Tokens that are to come behind it.
            whole: Refuse a text that is too long even where the beginning of prompts is left out.
            truncates: Leave out the beginning of what is too long even where the server does not.
            special: With the tokens that the tokenizer puts around each text.
        """
        limit = self._limit(new, truncates, whole)
        if not isinstance(text, str):
            await anyio.lowlevel.checkpoint()  # there may be many in a row
            if len(text) > self._context and not limit.truncates:
                raise limit.error(f"{len(text)} tokens", len(text), "prompt")
            return text[-self._context :]
        kept = limit.kept(text, "prompt")
        async with self._place(client, len(kept)) as tokenizer:
            return await in_thread(lambda: _encode(tokenizer, limit.tried(tokenizer, kept, "prompt"), special=special))

    async def chat(
        self,
        messages: Told,
        tools: Told,
        owner: Owner,
        *,
        new: int,
        rendering: Rendering,
        truncates: bool = False,
    ) -> list[int]:
        """Tokens of a chat, in which only what the chat template writes itself becomes special tokens.

        What is known of the chat is not tokenized again for the same owner. `new` and `truncates` are as in `text`.
        """
        limit = self._limit(new, truncates)
        if len(messages) > self._context and not limit.truncates:  # each has a token at least
            raise limit.error(f"{len(messages)} messages", len(messages), "messages", estimated=True)
        chat = _Chat(messages, tools, rendering)
        size = sum(map(len, texts_in(chat.given)))
        async with self._place(owner[0], size) as tokenizer:
            return await in_thread(lambda: self._chat(tokenizer, chat, owner, limit))

    async def chat_start(self, messages: Told, tools: Told, owner: Owner, *, rendering: Rendering) -> Start:
        """What all chats begin with that go on from these messages, encoded as `chat` encodes them."""
        size = 2 * sum(map(len, texts_in([messages, tools])))
        async with self._place(owner[0], size) as tokenizer:
            return await in_thread(lambda: self.start_of(messages, tools, owner, rendering, tokenizer))

    def start_of(
        self, messages: Told, tools: Told, owner: Owner, rendering: Rendering, tokenizer: Any = None
    ) -> Start:
        """As `chat_start`, in this thread; without a tokenizer of its own only while nobody else encodes."""
        tokenizer, limit = self._tokenizer if tokenizer is None else tokenizer, self._limit(0, False, True)
        shown = self._as_shown(tools)

        def encode(way: Messages, answer: bool) -> list[int]:
            chat = _Chat([dict(message) for message in way], tools, replace(rendering, answer=answer))
            return self._chat(tokenizer, chat, owner, limit)

        template = ChatTemplate(tokenizer, tools=shown, arguments=rendering.arguments)
        try:
            ids = chat_start(messages, encode, ApiError)
            return Start(ids, template.why_not_always(messages))
        except TooLongError:
            raise
        except ValueError as error:
            raise refused("messages", str(error)[:_ERROR_CHARS]) from error

    async def why_never(self, rows: Sequence[Sequence[int]], client: bytes) -> str | None:
        """Why no chat begins with the first of these texts, given as ids, that no chat begins with; None for none."""
        async with self._place(client, 0) as tokenizer:
            template = ChatTemplate(tokenizer)
            return await in_thread(lambda: next(filter(None, map(template.why_never, rows)), None))

    def _limit(self, new: int, truncates: bool, whole: bool = False) -> "_Limit":
        return _Limit(self._context, self._reach, new, (self._truncates or truncates) and not whole, whole)

    @asynccontextmanager
    async def _place(self, client: bytes, chars: int) -> AsyncIterator[Any]:
        async with self._turns.turn(client, long=chars > _LONG):
            tokenizer = self._take_idle(client) or await in_thread(lambda: copy.deepcopy(self._tokenizer))
            try:
                yield tokenizer
            finally:
                self._idle.append((client, tokenizer))

    def _take_idle(self, client: bytes) -> Any | None:
        """A copy that knows no words of other clients, or None. With a known word, a text is encoded faster."""
        place = next((i for i, (last, _) in enumerate(self._idle) if last == client), 0)
        if not self._idle:
            return None
        last, tokenizer = self._idle.pop(place)
        return tokenizer if last == client or forget_words(tokenizer) else None

    def _chat(self, tokenizer: Any, chat: "_Chat", owner: Owner, limit: "_Limit") -> list[int]:
        tools, other = self._tools.ordered(chat.tools, owner)
        if other:
            note_changed("tools-in-known-order")
            chat = replace(chat, tools=tools)
        chat = replace(chat, tools=self._as_shown(chat.tools))
        rendered, chat = self._rendered(chat)
        text = limit.tried(tokenizer, limit.kept(rendered, "messages"), "messages")
        cut = self._markers.cut(chat.given)
        if cut is None:
            return self._known.encode(tokenizer, text, owner)
        apart = chat.with_given(cut.given).rendered(self._tokenizer)
        return self._apart(tokenizer, cut, apart if text == rendered else cut.last(apart, len(text)))

    def _rendered(self, chat: "_Chat") -> tuple[str, "_Chat"]:
        """What the template makes of a chat, and the chat in the form that it takes; `ApiError` if it refuses all."""
        if chat.alternates:
            return chat.rendered(self._tokenizer), chat
        abilities = self._abilities_for(chat)
        known = known_format(str(self._tokenizer.chat_template or ""))
        write = partial(known.written, own=own_text) if known is not None else None
        messages, changes = adapted(chat.messages, abilities, dropped_only=True, write=write)
        kept = replace(chat, messages=messages)
        try:
            text = kept.rendered(self._tokenizer)
        except ApiError:
            for may in (abilities, Abilities()):
                messages, changes = adapted(chat.messages, may, write=write)
                changed = replace(chat, messages=messages)
                with suppress(ApiError):
                    text, kept = changed.rendered(self._tokenizer), changed
                    break
            else:
                raise
        for change in changes:
            note_changed(change)
        return text, kept

    def _abilities_for(self, chat: "_Chat") -> Abilities:
        """What the template does with messages, with the arguments of a chat."""
        arguments = sha256(repr(sorted(chat.rendering.arguments.items())).encode()).digest()
        key = (str(self._tokenizer.chat_template), bool(chat.tools), arguments)
        found = self._abilities.get(key)
        if found is None:
            rendering = replace(chat.rendering, answer=True, continues=None)
            tools = self._as_shown(_PROBED_TOOLS) if chat.tools else []

            def render(messages: Told) -> str | None:
                try:
                    return _Chat(messages, tools, rendering).rendered(self._tokenizer)
                except ApiError:
                    return None

            found = abilities_of(render)
            if len(self._abilities) >= _MOST_ABILITIES:
                self._abilities.clear()
            self._abilities[key] = found
        return found

    def _as_shown(self, tools: Told) -> Told:
        """Tools as the template writes them: that of Apertus takes functions without the object around them."""
        template = str(self._tokenizer.chat_template)
        bare = [dict(tool["function"]) for tool in _PROBED_TOOLS]
        if tools and template not in self._bare_tools:
            self._bare_tools[template] = not self._shows(_PROBED_TOOLS) and self._shows(bare)
        return [tool["function"] for tool in tools] if tools and self._bare_tools[template] else tools

    def _shows(self, tools: Told) -> bool:
        """Whether the template writes these tools, of which the first one is described."""
        function = tools[0].get("function", tools[0])
        try:
            return function["description"] in _Chat(_PROBED, tools, Rendering()).rendered(self._tokenizer)
        except ApiError:
            return False

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


@dataclass(frozen=True, slots=True)
class Reach:
    """How many characters one token can stand for."""

    ascii: int  # in a text of ASCII alone
    other: int  # in any other text

    def most(self, text: str, tokens: int) -> int:
        """How many characters `tokens` tokens can have at most, in a text such as this one."""
        return tokens * (self.ascii if text.isascii() else self.other)


@dataclass(frozen=True, slots=True)
class _Limit:
    """The longest prompt of one request."""

    context: int
    reach: Reach
    new: int
    truncates: bool
    whole: bool

    def kept(self, text: str, what: What) -> str:
        """As much of a text as may be tokenized."""
        most = self.reach.most(text, self.context)
        if len(text) <= most:
            return text
        if self.truncates:
            return text[-most:]
        length = f"{len(text)} characters, which are more than {self.context} tokens"
        raise self.error(length, max(self.context + 1, len(text) // _CHARS), what, estimated=True)

    def tried(self, tokenizer: Any, text: str, what: What) -> str:
        """As much of a text as may be tokenized, found out by a part of it: all of it would take time and memory."""
        size = _TRIED * self.context
        if len(text) <= 2 * size:
            return text
        part = text[-size:] if self.truncates else text[:size]
        tokens = len(_encode(tokenizer, part, special=False))
        if tokens <= self.context + _SEAM:
            return text
        if self.truncates:
            return part
        raise self.error(f"more than {tokens - _SEAM} tokens", tokens * len(text) // size, what, estimated=True)

    def error(self, length: str, tokens: int, what: What, *, estimated: bool = False) -> TooLongError:
        most, message = self.context, f"A text of {length} is longer than the model's context of {self.context}. "
        if self.whole:
            message, what = f"{message}Cut it into several.", "text"
        else:
            most = max(self.context - self.new, 0)
            message = (
                f"A prompt of {length} with {self.new} new ones exceeds the context window of {self.context}. "
                f"Shorten it to {most} tokens, or ask for fewer new ones."
            )
        return TooLongError(message, most, tokens=tokens, limit=self.context, estimated=estimated, what=what)


@dataclass(frozen=True, slots=True)
class _Chat:
    """The arguments of a chat template."""

    messages: Told
    tools: Told
    rendering: Rendering

    @property
    def given(self) -> list[Any]:
        """What comes from the client."""
        return [self.messages, self.tools, self.rendering.arguments]

    @property
    def alternates(self) -> bool:
        """Whether user and assistant take turns, and nobody else speaks: such a chat is as any template takes it."""
        return all(
            message.get("role") == ("assistant" if at % 2 else "user") and not message.get("tool_calls")
            for at, message in enumerate(self.messages)
        )

    def with_given(self, given: list[Any]) -> "_Chat":
        messages, tools, arguments = given
        return _Chat(messages, tools, replace(self.rendering, arguments=arguments))

    def rendered(self, tokenizer: Any) -> str:
        """What the template makes of it; `ApiError` if there is none, or it refuses the messages."""
        if tokenizer.chat_template is None:
            raise refused("messages", "The model has no chat template. Send a text to /v1/completions.")
        try:
            text = tokenizer.apply_chat_template(
                self.messages,
                tools=self.tools or None,
                tokenize=False,
                add_generation_prompt=self.rendering.answer,
                continue_final_message=self.rendering.continues or False,
                **self.rendering.arguments,
            )
        except (TemplateError, TypeError, ValueError, RecursionError) as error:
            raise refused(
                "messages", f"The model's chat template refuses them: {str(error)[:_ERROR_CHARS]}"
            ) from error
        return with_own_texts(str(text))


def _encode(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=special))


def reach_of(tokenizer: Any) -> Reach:
    """How many characters one token of a tokenizer can stand for.

    Where all that the tokenizer does is known to keep each character, that is the length of the longest token;
    else `UNSURE_CHARS`, or the length of the longest token if that is more.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    longest = max(map(len, tokenizer.get_vocab()), default=1)
    if not isinstance(backend, Tokenizer):
        return Reach(max(longest, UNSURE_CHARS), max(longest, UNSURE_CHARS))
    parts = json.loads(backend.to_str())
    normalizers, pre_tokenizers = (
        _flat(parts["normalizer"], "normalizers"),
        _flat(parts["pre_tokenizer"], "pretokenizers"),
    )
    byte_level = any(part["type"] == "ByteLevel" for part in (*normalizers, *pre_tokenizers))
    if not (
        all(map(_keeps_length, normalizers))
        and all(map(_keeps_all, pre_tokenizers))
        and _knows_all(parts["model"], backend, byte_level)
        and not any(token["lstrip"] or token["rstrip"] for token in parts["added_tokens"])
    ):
        longest = max(longest, UNSURE_CHARS)
    composes = any(part["type"] in ("NFC", "NFKC") for part in normalizers)
    return Reach(longest, longest * (_COMPOSED if composes else 1))


def _flat(part: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    if part is None:
        return []
    return [each for one in part[inner] for each in _flat(one, inner)] if part["type"] == "Sequence" else [part]


def _keeps_length(normalizer: Mapping[str, Any]) -> bool:
    """Whether it makes no text shorter but by composing characters."""
    if normalizer["type"] == "Replace":
        replaced = normalizer["pattern"].get("String")
        return replaced is not None and len(normalizer["content"]) >= len(replaced)
    return normalizer["type"] in _KEEPING_NORMALIZERS or normalizer["type"] in ("NFC", "NFKC")


def _keeps_all(pre_tokenizer: Mapping[str, Any]) -> bool:
    if pre_tokenizer["type"] in ("Split", "Punctuation"):
        return bool(pre_tokenizer["behavior"] != "Removed")
    return pre_tokenizer["type"] in _KEEPING_PRE_TOKENIZERS


def _knows_all(model: Mapping[str, Any], backend: Tokenizer, byte_level: bool) -> bool:
    """Whether each character becomes a part of a token: none is dropped, or fused with others that are not known."""
    vocab = backend.get_vocab()
    if model["type"] == "BPE" and byte_level:
        return vocab.keys() >= set(ByteLevel.alphabet())
    if model["type"] == "BPE" and model["unk_token"] is not None and not model["fuse_unk"]:
        return True
    bytes_known = model.get("byte_fallback") and vocab.keys() >= {f"<0x{byte:02X}>" for byte in range(256)}
    return model["type"] in ("BPE", "Unigram") and bool(bytes_known)
