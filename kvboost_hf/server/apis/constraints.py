"""Makes the constraints that a request asks for: JSON, another form of the answer, or tool calls."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from starlette.requests import Request

from kvboost_hf.server.apis.context import RouteContext
from kvboost_hf.server.grammars.structured import choice, json_schema, regex, tool_calls, written
from kvboost_hf.server.http.errors import refused
from kvboost_hf.server.jobs import Constraint
from kvboost_hf.server.requests.answer_form import AnswerForm
from kvboost_hf.server.requests.chat import ChatRequest
from kvboost_hf.server.requests.sampled import Sampled
from kvboost_hf.server.requests.tools import ToolChoice


async def constraints_of(
    context: RouteContext, body: Sampled, request: Request, salt: bytes, answers: int
) -> Sequence[Constraint | None]:
    """Make a constraint for each answer to a request; None for answers that may be any text.

    Args:
        context: Compiles grammars, when it is the client's turn.
        body: The request.
        request: Of HTTP.
        salt: The salt of the client.
        answers: The number of answers.

    Raises:
        ApiError: The constraint cannot be enforced.
    """
    must_call = isinstance(body, ChatRequest) and body.must_call
    if body.form is None and not must_call:
        return [None] * answers
    return await context.compile(request, partial(_compiled, context, body, salt, answers, must_call))


def calls_many(body: ChatRequest) -> bool:
    """Whether an answer may have several calls. It may not where the request names one, as in OpenAI's API."""
    one = isinstance(body.tool_choice, ToolChoice) or bool(body.functions)
    return body.parallel_tool_calls is not False and not one


def _compiled(
    context: RouteContext, body: Sampled, salt: bytes, answers: int, must_call: bool
) -> Sequence[Constraint]:
    try:
        if isinstance(body, ChatRequest) and body.offered:
            grammar, is_json = _grammar_of_calls(body, context.tokenizer), True
        else:
            assert body.form is not None
            grammar, is_json = _grammar(body.form), body.form.kind == "json"
        return [context.grammars.constraint(grammar, salt, is_json=is_json) for _ in range(answers)]
    except ValueError as error:
        raise refused("tools" if body.form is None or must_call else body.form.field, str(error)) from error


def _grammar(form: AnswerForm) -> str:
    match form.kind:
        case "json":
            return json_schema(form.value)
        case "regex":
            return regex(form.value)
        case "choice":
            return choice(form.value)
        case "grammar":
            return written(form.value)


def _grammar_of_calls(body: ChatRequest, tokenizer: Any) -> str:
    named = body.tool_choice.function.name if isinstance(body.tool_choice, ToolChoice) else None
    tools = [tool.body for tool in body.offered if named in (None, tool.function.name)]
    form = None if body.must_call else body.form
    if form is not None and form.kind != "json":
        raise ValueError("Answers beside tools can be JSON by a schema only. Pass tool_choice 'none' or 'required'.")
    schema = form.value if form is not None else None
    return tool_calls(tokenizer, tools, parallel=calls_many(body), answer=schema)
