"""`Rendering`: how a chat template writes a chat, and which of its arguments clients may choose."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

_NO_EFFORT = ("none", "minimal")
# Not for clients: the arguments of the renderer, and the texts of special tokens.
RESERVED = frozenset(
    {
        "messages",
        *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
        *inspect.signature(render_jinja_template).parameters,
        *PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """How a chat template writes a chat.

    Args:
        answer: Whether the start of an answer is at its end.
        continues: The field of the last message that the answer continues, such as `"content"`; None for none.
        arguments: Other arguments of the template; those that it does not read change nothing.
    """

    answer: bool = True
    continues: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


def reasoning_arguments(thinks: bool | None, effort: str | None) -> dict[str, Any]:
    """The arguments of chat templates that switch reasoning, as all families of models spell them.

    Args:
        thinks: Whether the model is to reason; None to decide it by `effort`.
        effort: How much; "none" and "minimal" switch reasoning off. None for what the template does.
    """
    found: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if thinks is None and effort is not None:
        thinks = effort not in _NO_EFFORT
    if thinks is not None:
        found |= {"enable_thinking": thinks, "thinking": thinks}  # Qwen 3, SmolLM 3, GLM; DeepSeek, Granite
    return found
