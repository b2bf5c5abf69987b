"""`filled`: a prompt that asks a model to fill in the middle of a text, by the tokens that models of code have."""

from typing import Any

from kvboost_hf.server.http.errors import refused

_FORMATS = (  # as the models were trained; the answer follows
    "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",  # Qwen Coder, CodeGemma
    "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>",  # StarCoder, Granite
    "<fim-prefix>{prefix}<fim-suffix>{suffix}<fim-middle>",  # SantaCoder
    "<｜fim▁begin｜>{prefix}<｜fim▁hole｜>{suffix}<｜fim▁end｜>",  # DeepSeek  # noqa: RUF001
    "▁<PRE>{prefix}▁<SUF>{suffix}▁<MID>",  # CodeLlama
    "[SUFFIX]{suffix}[PREFIX]{prefix}",  # Codestral
)


def filled(tokenizer: Any, prefix: str, suffix: str) -> str:
    """A prompt for the text between two others.

    Args:
        tokenizer: Of the model.
        prefix: The text before.
        suffix: The text behind.

    Raises:
        ApiError: The model has no tokens for it.
    """
    for form in _FORMATS:
        marks = form.replace("{prefix}", " ").replace("{suffix}", " ").split()
        if all(mark in tokenizer.added_tokens_encoder for mark in marks):
            return form.format(prefix=prefix, suffix=suffix)
    raise refused(
        "suffix",
        "The model has no tokens to fill in the middle of a text, as models of code have. Leave suffix out, and send "
        "the text before the answer as prompt.",
    )
