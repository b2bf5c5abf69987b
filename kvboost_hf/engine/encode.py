"""`PromptEncoder`: encodes texts and chats, with the model's chat template where there is one."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jinja2 import TemplateError

from kvboost_hf.cache.planning.chunks import Tokens, common_length

Message = Mapping[str, Any]
Prompt = str | Sequence[Message]

_GO_ON = (" a", "\n\nb")  # ways in which a text may go on, that have no token in common


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
        self._templated = templated and tokenizer.chat_template is not None
        added = tokenizer.added_tokens_decoder.values()
        self._special = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}

    def encode(self, prompt: Prompt) -> Tokens:
        """Ids [n] of a prompt, up to where the answer starts.

        Raises:
            ValueError: The prompt is neither a text nor messages, it is empty, or messages have no chat template.
        """
        messages = self._messages(prompt)
        return self._text_ids(str(prompt)) if messages is None else self._chat_ids(messages)

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

    def encode_start(self, prompt: Prompt) -> Tokens:
        """Ids [n] of the prefix that is common to all prompts that begin with this text or these messages.

        Raises:
            ValueError: As `encode` does.
        """
        messages = self._messages(prompt)
        if messages is None:
            return self._text_ids(str(prompt))
        last, content = messages[-1], messages[-1].get("content")
        if last.get("role") == "user" and isinstance(content, str):
            text = content.rstrip(" ")  # a space becomes a part of the next word
            ways = [[*messages[:-1], {**last, "content": text + more}] for more in _GO_ON]
        else:
            ways = [[*messages, {"role": "user", "content": more.strip()}] for more in _GO_ON]
        one, other = (self._chat_ids(way) for way in ways)
        return one[: common_length(one, other)]

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
        if not messages:
            raise ValueError("A chat must have one message or more, got [].")
        if self._tokenizer.chat_template is None:
            raise ValueError(
                f"Messages need a chat template, and {type(self._tokenizer).__name__} has none. Pass a text, or set "
                "tokenizer.chat_template."
            )
        return messages

    def _text_ids(self, text: str) -> Tokens:
        # beside a template, a text that is sent as it is has its special tokens
        ids = np.asarray(self._tokenizer(text, add_special_tokens=not self._templated)["input_ids"], dtype=np.int64)
        if not len(ids):
            raise ValueError(f"A prompt must have one token or more, got {text!r}.")
        return ids

    def _chat_ids(self, messages: Sequence[Message]) -> Tokens:
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except (TemplateError, TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"The chat template refuses these messages: {error}. Pass what it takes: with most, a `role` that it "
                "knows, and a text as `content`."
            ) from error
        ids = np.asarray(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.int64)
        if not len(ids):
            raise ValueError(
                "The chat template gives no text for these messages: it may take their content in another form, such "
                "as a list of parts. Pass such messages, or texts with KVBoost(chat_template=False)."
            )
        return ids
