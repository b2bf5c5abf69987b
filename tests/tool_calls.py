"""All tool calls of a whole answer, as a server finds them in one that comes in pieces."""

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from tests.internals.server import Parsed, ToolCallStream, joined


def parse_tool_calls(
    text: str, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Any], *, prefix: str = ""
) -> Parsed:
    """The calls in an answer, and the text around them."""
    stream = ToolCallStream(tokenizer, tools, prefix=prefix)
    return joined([stream.push(text), stream.finish()])
