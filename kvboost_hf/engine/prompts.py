"""Prompts: encodes texts and chats, with the chat template where there is one, and groups those that begin alike."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvboost_hf.cache.planning.chunks import Tokens
from kvboost_hf.cache.prompt.chats import ChatTemplate, Message, Start
from kvboost_hf.fields import require_int

_PASSAGES = (
    "The old harbour lies on the north side of the bay, and a lighthouse of red brick stands at its mouth. ",
    "Every spring the carpenters mend the boats, while the nets are hung over the fences to dry in the wind. ",
    "The school is behind the market, next to a well that has not been used for a hundred years. ",
)
_ORDERS = ((0, 1, 2), (0, 1, 2), (0, 2, 1))
CHECK_PROMPTS = tuple(6 * "".join(_PASSAGES[at] for at in order) + "What is behind the market?" for order in _ORDERS)
Prompt = str | Sequence[Message]


class PromptEncoder:
    """Turns prompts into token ids.

    A text is the message of a user where the tokenizer has a chat template. It is sent as it is where there is none,
    where it has a special token in it, as a text has to which a template was applied already, and where `templated` is
    False. Messages always go through the template.

    Args:
        tokenizer: The tokenizer of the model.
        templated: Whether texts may go through the template.
    """

    def __init__(self, tokenizer: Any, *, templated: bool = True) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        self._templated = templated and self._template.exists
        added = tokenizer.added_tokens_decoder.values()
        self._special = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}

    def encode(self, prompt: Prompt) -> Tokens:
        """Ids [n] of a prompt, up to where the answer starts.

        Raises:
            ValueError: The prompt is neither a text nor messages, it is empty, or messages have no chat template.
        """
        messages = self._messages(prompt)
        return self._text_ids(str(prompt)) if messages is None else self._template.encode(messages)

    def encode_all(self, prompts: Sequence[Prompt]) -> list[Tokens]:
        """Ids [n] of each of several prompts.

        Raises:
            ValueError: `prompts` is one text or no sequence, or as `encode` does.
        """
        if isinstance(prompts, str):
            raise ValueError("`prompts` must be a sequence of prompts, got one text. Pass [text].")
        if not isinstance(prompts, Sequence):
            raise ValueError(f"`prompts` must be a sequence of prompts, got {type(prompts).__name__}. Pass a list.")
        return [self.encode(prompt) for prompt in prompts]

    def encode_start(self, prompt: Prompt, *, tools: Sequence[Any] | None = None) -> Start:
        """The prefix that is common to all prompts that begin with this text or these messages.

        Args:
            prompt: A text or messages.
            tools: Tools of the chats, with messages.

        Raises:
            ValueError: As `encode` does; tools beside a text that no template is applied to.
        """
        messages = self._messages(prompt)
        if messages is not None:
            return (ChatTemplate(self._tokenizer, tools=tools) if tools else self._template).start(messages)
        if tools:
            raise ValueError(
                "`tools` needs messages, beside which the chat template puts it, got a text that is sent as it is. "
                "Pass [{'role': 'system', 'content': text}]."
            )
        ids = self._text_ids(str(prompt))
        return Start(ids, self._template.why_never(ids) if self._templated else None)

    def _messages(self, prompt: Prompt) -> Sequence[Message] | None:
        """A chat, or a text as one; None for a text that is sent as it is."""
        if isinstance(prompt, str):
            if not prompt:
                raise ValueError("A prompt must have one token or more, got ''.")
            is_sent_raw = not self._templated or any(token in prompt for token in self._special)
            return None if is_sent_raw else [{"role": "user", "content": prompt}]
        messages: Sequence[Message] = prompt
        if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
            raise ValueError(
                f"A prompt must be a text, or a list of messages such as {{'role': 'user', 'content': 'Hello'}}, got "
                f"{type(prompt).__name__}. Decode ids with the tokenizer."
            )
        self._template.require(messages)
        return messages

    def _text_ids(self, text: str) -> Tokens:
        # beside a template, a text that is sent as it is has its special tokens
        ids = np.asarray(self._tokenizer(text, add_special_tokens=not self._templated)["input_ids"], dtype=np.int64)
        if not len(ids):
            raise ValueError(f"A prompt must have one token or more, got {text!r}.")
        return ids


@dataclass(slots=True)
class _Node:
    """A chunk behind others."""

    children: dict[tuple[int, ...], "_Node"] = field(default_factory=dict)
    rows: list[int] = field(default_factory=list)  # that are in no group further down


def group_by_prefix(
    rows: Sequence[Sequence[int]], chunk_size: int, max_batch_size: int | None = None
) -> list[list[int]]:
    """Group prompts that begin with the same chunks, those with the most in common first.

    A prompt goes where the longest chain of whole chunks is that another one, which is not yet in a group, has, too.
    One that shares no chunk with another stays alone.

    Args:
        rows: Token ids of each prompt.
        chunk_size: Tokens of a chunk.
        max_batch_size: The most prompts in a group; None for any number.

    Returns:
        Groups of indices into `rows`, each in ascending order, by their first index.

    Raises:
        ValueError: for a `chunk_size` or `max_batch_size` that is no int of 1 or more.

    Example:
        >>> group_by_prefix([[1, 2, 3, 4], [9, 9], [1, 2, 5, 6], [1, 2, 3, 4, 7]], chunk_size=2)
        [[0, 3], [1], [2]]
    """
    for name, value in (("chunk_size", chunk_size), ("max_batch_size", max_batch_size)):
        if value is not None:
            require_int(name, value)
    root = _Node()
    for row, ids in enumerate(rows):
        node = root
        for start in range(0, len(ids) - chunk_size + 1, chunk_size):
            node = node.children.setdefault(tuple(ids[start : start + chunk_size]), _Node())
        node.rows.append(row)
    groups: list[list[int]] = []
    for node in _deepest_first(root):
        left = sorted(node.rows + [row for child in node.children.values() for row in child.rows])
        if node is not root and len(left) < 2:
            node.rows = left
            continue
        size = 1 if node is root else max_batch_size or len(left)
        groups += [left[at : at + size] for at in range(0, len(left), size)]
        node.rows = []
    return sorted(groups)


def _deepest_first(root: _Node) -> list[_Node]:
    """All nodes, each behind its children. Prompts may have more chunks than Python has stack."""
    found = [root]
    for node in found:
        found += node.children.values()
    return found[::-1]
