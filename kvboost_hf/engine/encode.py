"""`PromptEncoder`: encodes texts and chats, with the model's chat template where there is one."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvboost_hf.cache.planning.chunks import Tokens
from kvboost_hf.cache.prompt.chats import ChatTemplate, Message, Start

Prompt = str | Sequence[Message]


class PromptEncoder:
    """Turns prompts into token ids.

    A text is the message of a user where the tokenizer has a chat template. It is sent as it is where there is none,
    where it has a special token in it, as a text has to which a template was applied already, and where `templated` is
    False. Messages always go through the template.

    Args:
        tokenizer: Of the model.
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
