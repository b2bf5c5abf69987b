"""`ChatTemplate`: encodes chats, and finds what all chats begin with that go on from given messages."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
from jinja2 import TemplateError
from transformers import ProcessorMixin

from kvboost_hf.cache.planning.chunks import HEAD_TOKENS, Tokens, common_length

Message = Mapping[str, Any]
Messages = Sequence[Message]

_GO_ON = (" a", "\n\nb")  # ways in which a text may go on, that have no token in common
_NEXT = tuple(more.strip() for more in _GO_ON)  # messages that have no token in common
_TOOL_ROLES = ("tool", "function", "ipython")
_CLOCK = "strftime_now"  # the only clock that transformers gives to templates
# Written before a template, they stand in place of its clock.
_CLOCKS = tuple(f"{{% macro {_CLOCK}(format) %}}{day}{{% endmacro %}}" for day in ("1 Jan 2001", "23 Nov 2019"))


class Start(NamedTuple):
    """What prompts begin with."""

    ids: Tokens  # [n]
    reason: str | None = None  # why chats never begin with it, or not always


def why_not_stored(tokens: int) -> str | None:
    """Why a start of so many tokens is not stored; None if it is."""
    if tokens >= HEAD_TOKENS:
        return None
    return f"a start of {tokens} tokens is too short to be stored, which takes {HEAD_TOKENS} or more"


def is_chat(prompt: Any) -> bool:
    """Whether this is a list of messages, in place of a text or its ids."""
    return (
        isinstance(prompt, Sequence) and not isinstance(prompt, str) and isinstance(next(iter(prompt), None), Mapping)
    )


def chat_start(
    messages: Messages,
    encode: Callable[[Messages, bool], Sequence[int] | Tokens],
    refusal: type[Exception] = ValueError,
) -> Tokens:
    """Token ids [n] of the longest prefix that is common to all prompts of chats that go on from these messages.

    Chats go on with a message of the user, with the results of calls, or in the text of the last message if that is
    the user's. Several ways to go on are encoded and compared: only a template knows what it writes around messages.
    `encode` returns the ids of a chat, with the start of an answer at its end or without, and raises a `refusal` where
    the template refuses it. ValueError: such chats have no token in common.
    """
    refused: Exception | None = None
    for ways, answer in _ways(messages):
        try:
            rows = [np.asarray(encode(way, answer), dtype=np.int64) for way in ways]
        except refusal as error:
            refused = error
            continue
        start = rows[0][: min(common_length(rows[0], row) for row in rows)]
        if not len(start):
            raise ValueError(
                "Chats with these messages have no first token in common: the chat template writes later messages "
                "before them. Leave them out."
            )
        return start
    assert refused is not None
    raise refused


def _ways(messages: Messages) -> Iterator[tuple[list[list[Message]], bool]]:
    """Ways to go on, and whether an answer follows; if the template refuses them, the next ones count."""
    last = messages[-1]
    calls, role = last.get("tool_calls"), last.get("role")
    if role in _TOOL_ROLES:
        yield [list(messages)], True
    if role == "user" and (longer := _longer(last)) is not None:
        yield [[*messages[:-1], message] for message in longer], True
    elif role == "assistant" and calls:
        yield [[*messages, *_results(calls, text)] for text in _NEXT], True
    if role != "user":
        as_parts = any(isinstance(message.get("content"), list) for message in messages)
        contents: list[Any] = [[{"type": "text", "text": text}] if as_parts else text for text in _NEXT]
        yield [[*messages, {"role": "user", "content": content}] for content in contents], True
    yield [list(messages)], False


def _longer(message: Message) -> list[Message] | None:
    """The message with more text behind its own; None if it does not end in text."""
    content = message.get("content")
    if isinstance(content, str):
        text = content.rstrip(" ")  # a space becomes a part of the next word
        return [{**message, "content": text + more} for more in _GO_ON]
    if isinstance(content, list) and content and isinstance(content[-1], Mapping) and "text" in content[-1]:
        text = str(content[-1]["text"]).rstrip(" ")
        return [{**message, "content": [*content[:-1], {**content[-1], "text": text + more}]} for more in _GO_ON]
    return None


def _results(calls: Sequence[Any], text: str) -> list[Message]:
    """Messages with the results of calls."""
    found: list[Message] = []
    for call in calls:
        named = {"name": name} if (name := _named(call)) is not None else {}
        told = {"tool_call_id": call["id"]} if isinstance(call, Mapping) and "id" in call else {}
        found.append({"role": "tool", **named, **told, "content": text})
    return found


def _named(call: Any) -> str | None:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    return function.get("name") if isinstance(function, Mapping) else None


class ChatTemplate:
    """The chat template of a tokenizer, with the tools and other arguments that chats give it."""

    def __init__(
        self, tokenizer: Any, *, tools: Sequence[Any] | None = None, arguments: Mapping[str, Any] | None = None
    ) -> None:
        self._templates, self._tokenizer = tokenizer, text_tokenizer(tokenizer)
        self._tools, self._arguments = list(tools) if tools else None, dict(arguments or {})

    @property
    def exists(self) -> bool:
        """Whether the tokenizer has a template."""
        return getattr(self._templates, "chat_template", None) is not None

    def require(self, messages: Messages) -> None:
        """Raise `ValueError` for no messages, or without a template."""
        if not messages:
            raise ValueError("A chat must have one message or more, got [].")
        if not self.exists:
            raise ValueError(
                f"Messages need a chat template, and {type(self._templates).__name__} has none. Pass a text, or set "
                "tokenizer.chat_template."
            )

    def encode(self, messages: Messages, answer: bool = True) -> Tokens:
        """Ids [n] of a chat, with the start of an `answer` at its end.

        ValueError: the template refuses the messages, or makes nothing of them.
        """
        return self._encode(messages, answer)

    def start(self, messages: Messages) -> Start:
        """What all chats begin with that go on from these messages.

        ValueError: as `chat_start`; there are no messages, or no template, or something other than text is in a
        message.
        """
        self.require(messages)
        for message in messages:
            _require_text(message)
        ids = chat_start(messages, self._encode)
        return Start(ids, self.why_not_always(messages))

    def why_not_always(self, messages: Messages) -> str | None:
        """Why chats of another day do not begin as those of today; None if they do. ValueError: as `start`."""
        if _CLOCK not in str(self._templates.chat_template):
            return None
        one, other = (chat_start(messages, partial(self._encode, before=day)) for day in _CLOCKS)
        same = common_length(one, other)
        if same == len(one):
            return None
        return (
            f"the chat template writes the date behind the first {same} tokens: what is behind it is found until the "
            "date changes. Warm again then, or give the template a fixed date"
        )

    def why_never(self, ids: Sequence[int] | Tokens) -> str | None:
        """Why no chat begins with a text of these ids; None if one may, or if there is no template.

        A text with a special token behind its first one was written by a template, maybe with other arguments: nothing
        is said of it, unless it begins with the same special token twice.
        """
        row = np.asarray(ids, dtype=np.int64)
        if not self.exists or not len(row):
            return None
        special = set(self._tokenizer.all_special_ids)
        if len(row) > 1 and row[0] == row[1] == self._tokenizer.bos_token_id:
            if all(_times(head, int(row[0])) < 2 for head in self._heads.values()):
                return (
                    f"no chat begins with {self._tokenizer.bos_token!r} twice, as this text does: the tokenizer has "
                    "added one to that of the text. Warm the messages, or tokenizer(text, add_special_tokens=False)"
                    "['input_ids']"
                )
        if not self._heads:
            return None
        role, last = list(self._heads.items())[-1]
        remedy = f"Warm the messages of such chats, [{{'role': '{role}', 'content': text}}]"
        heads = [head for head in self._heads.values() if len(head)]
        if not heads:  # chats begin with their own text
            added = self._tokenizer.decode([int(row[0])])
            return f"no chat begins with {added!r}, as this text does. {remedy}" if int(row[0]) in special else None
        if any(common_length(head, row) == min(len(head), len(row)) for head in heads):
            return None
        if any(int(token) in special for token in row[1:]):
            return None
        head = self._tokenizer.decode(last.tolist())
        return f"no chat begins with this text: the chat template writes {head!r} before it. {remedy}"

    def _encode(self, messages: Messages, answer: bool, before: str | None = None) -> Tokens:
        more = {} if before is None else {"chat_template": before + self._source()}
        try:
            text = self._templates.apply_chat_template(
                list(messages),
                **self._arguments,
                **more,
                tools=self._tools,
                tokenize=False,
                add_generation_prompt=answer,
            )
        except (TemplateError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"The chat template refuses these messages: {error}. Pass what it takes: with most, a `role` that it "
                "knows, and a text as `content`."
            ) from error
        ids = np.asarray(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.int64)
        if not len(ids):
            raise ValueError(
                "The chat template gives no text for these messages: it may take their content in another form, such "
                "as a list of parts. Pass such messages, or texts that the template is not applied to (with KVBoost: "
                "chat_template=False)."
            )
        return ids

    def _source(self) -> str:
        template = self._templates.chat_template
        return template if isinstance(template, str) else str(self._templates.get_chat_template(None, self._tools))

    @cached_property
    def _heads(self) -> dict[str, Tokens]:
        """What the template writes before the first text of chats, by whose it is: a tool's, a user's, a system's."""
        users = [[{"role": "user", "content": text}] for text in _NEXT]
        systems = [[{"role": "system", "content": text}, *user] for text, user in zip(_NEXT, users, strict=True)]
        tools = [[{"type": "function", "function": {"name": name, "parameters": {}}}] for name in _NEXT]
        found = {}
        for role, chats, offered in (
            ("tool", [users[0]] * 2, tools),
            ("user", users, [None] * 2),
            ("system", systems, [None] * 2),
        ):
            try:
                one, other = (
                    ChatTemplate(self._templates, tools=given, arguments=self._arguments).encode(chat)
                    for chat, given in zip(chats, offered, strict=True)
                )
            except ValueError:
                continue
            if (length := common_length(one, other)) < len(one):
                found[role] = one[:length]
        return found


def _require_text(message: Any) -> None:
    if not isinstance(message, Mapping):
        raise ValueError(
            "A chat must be a list of messages such as {'role': 'user', 'content': 'Hello'}, got one of type "
            f"{type(message).__name__}."
        )
    content = message.get("content")
    for part in content if isinstance(content, list) else ():
        if isinstance(part, Mapping) and "text" not in part:
            raise ValueError(
                f"Only the text of chats can be warmed, got a part of type {part.get('type')!r}. Pass the messages "
                "before it, or send one request with it."
            )


def text_tokenizer(tokenizer: Any) -> Any:
    """What encodes texts: of a processor, its tokenizer."""
    return getattr(tokenizer, "tokenizer", tokenizer) if isinstance(tokenizer, ProcessorMixin) else tokenizer


def _times(row: Tokens, token: int) -> int:
    """How often a row begins with a token."""
    return sum(1 for _ in takewhile(lambda found: found == token, row))
