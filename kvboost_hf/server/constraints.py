"""Makes the constraints that a chat request asks for: JSON, a schema, or tool calls."""

from collections.abc import Sequence
from typing import Any

from kvboost_hf.server.errors import refused
from kvboost_hf.server.grammars import Grammars
from kvboost_hf.server.jobs import Constraint
from kvboost_hf.server.schema import ChatRequest, SchemaFormat, ToolChoice
from kvboost_hf.server.structured import json_schema, tool_calls


def is_constrained(body: ChatRequest) -> bool:
    """Whether the request constrains its answers."""
    return body.must_call or body.json_wanted


def constraints_of(
    body: ChatRequest, tokenizer: Any, grammars: Grammars, salt: bytes, choices: int
) -> Sequence[Constraint]:
    """Make a constraint for each answer to a constrained request.

    Args:
        body: The request.
        tokenizer: The tokenizer of the model.
        grammars: Compiles grammars for the tokenizer.
        salt: The salt of the client.
        choices: The number of answers.

    Raises:
        ApiError: The constraint cannot be enforced.
    """
    try:
        grammar = _grammar(body, tokenizer)
        return [grammars.constraint(grammar, salt) for _ in range(choices)]
    except ValueError as error:
        raise refused("tools" if body.must_call else "response_format", str(error)) from error


def calls_many(body: ChatRequest) -> bool:
    """Whether an answer may have several calls. It may not where the request names one, as in OpenAI's API."""
    return body.parallel_tool_calls is not False and not isinstance(body.tool_choice, ToolChoice)


def _grammar(body: ChatRequest, tokenizer: Any) -> str:
    form = body.response_format
    schema = form.json_schema.schema_ if isinstance(form, SchemaFormat) else None
    schema = {"type": "object"} if schema is None else schema
    if not body.offered:
        return json_schema(schema)
    named = body.tool_choice.function.name if isinstance(body.tool_choice, ToolChoice) else None
    tools = [tool.body for tool in body.offered if named in (None, tool.function.name)]
    return tool_calls(tokenizer, tools, parallel=calls_many(body), answer=None if body.must_call else schema)
