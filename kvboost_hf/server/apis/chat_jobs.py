"""`start_chat`: submits a job for each answer that a chat asks for, whatever API it came by."""

from collections.abc import Sequence
from dataclasses import replace

from fastapi import Request

from kvboost_hf.server.apis.answers import CallReaders
from kvboost_hf.server.apis.constraints import constraints_of
from kvboost_hf.server.apis.context import RouteContext
from kvboost_hf.server.apis.reading import reading_of
from kvboost_hf.server.apis.request_jobs import RequestJobs
from kvboost_hf.server.jobs import Keep
from kvboost_hf.server.requests.chat import ChatRequest


async def start_chat(
    context: RouteContext,
    body: ChatRequest,
    request: Request,
    *,
    ids: Sequence[int] | None = None,
    most: int | None = None,
    keep: Sequence[Keep] = (),
) -> tuple[RequestJobs, CallReaders]:
    """Submit a job for each answer that a request asks for.

    Args:
        context: The parts of the server.
        body: The request.
        request: As it came.
        ids: The tokens of the prompt; None to encode the messages.
        keep: Beginnings of the prompt to pin, besides what the body asks for.
        most: Tokens of an answer, as far as the context has room for them; None for what the body asks for.

    Returns:
        The jobs, and readers of the tool calls in their texts.
    """
    context.require_model(body.model)
    choices = context.require_choices(body.n or 1)
    asked = body.max_completion_tokens or body.max_tokens
    salt = context.salt(request, body.prompt_cache_key, body.cache_salt)
    if ids is None:
        ids = await context.encode_asked(body, request, new=asked or 1)
    reading = reading_of(context, body, ids)
    readers = reading.readers(choices)
    most = asked or context.room(ids, most)
    context.require_few_logprobs(choices * most, body.reported)
    predicted: Sequence[int] = ()
    if body.prediction is not None and body.prediction.text:
        predicted = await context.encode(body.prediction.text, request)
    jobs = []
    constraints = await constraints_of(context, body, request, salt, choices)
    for choice, constraint in enumerate(map(reading.constrained, constraints)):
        options = context.options(body, max_tokens=most, logprobs=body.reported, choice=choice, constraint=constraint)
        job = context.job(ids, options, salt=salt, asked=body, skip_special_tokens=not reading.keeps_special)
        jobs.append(replace(job, prediction=predicted, keep=tuple(keep)))
    return context.start(jobs, request, body), readers
