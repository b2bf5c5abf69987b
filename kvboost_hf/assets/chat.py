"""Encodes chats as token ids."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

Message = dict[str, str]


def encode(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Ids of a chat up to the start of the next answer; without a chat template, roles are written as plain labels."""
    if tokenizer.chat_template is not None:
        prompt = str(tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))
        return list(tokenizer.encode(prompt, add_special_tokens=False))
    lines = [f"{message['role'].capitalize()}: {message['content']}" for message in messages]
    return list(tokenizer.encode("\n\n".join([*lines, "Assistant:"])))
