"""The route `/v1/chat/completions`."""

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request, Response

from kvboost_hf.server.answers import Answer, CallReaders, Delta, Usage, deltas, large, whole
from kvboost_hf.server.constraints import constraints_of
from kvboost_hf.server.context import RouteContext
from kvboost_hf.server.jobs import Keep, TokenLogprob
from kvboost_hf.server.posted import PostedRoute
from kvboost_hf.server.reading import reading_of
from kvboost_hf.server.request_jobs import RequestJobs, unless_gone
from kvboost_hf.server.schema import ChatRequest
from kvboost_hf.server.sse import EventStream
from kvboost_hf.server.tools import ToolCall


def chat_routes(context: RouteContext) -> APIRouter:
    """Make a router with `/v1/chat/completions`."""
    router = APIRouter(route_class=PostedRoute)

    @router.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        jobs, readers = await start_chat(context, body, request)
        form = _Form(context, body, jobs, readers)
        if body.stream:
            return EventStream(form.chunks(), jobs, context.settings.ping_s)
        return await unless_gone(request, jobs, form.completion())

    return router


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


@dataclass(frozen=True, slots=True)
class _Form:
    """The answers to one request, in the form of this route."""

    context: RouteContext
    asked: ChatRequest
    jobs: RequestJobs
    readers: CallReaders

    async def completion(self) -> Response:
        """The whole response."""
        answers = await whole(deltas(self.jobs, self.readers), self.asked.n or 1)
        return await large(lambda: self._completion(answers))

    def _completion(self, answers: Sequence[Answer]) -> dict[str, Any]:
        return self._head("chat.completion") | {
            "choices": [
                {
                    "index": index,
                    "message": self._message(answer),
                    "logprobs": self._logprobs(answer.logprobs),
                    "finish_reason": self._reason(answer.reason),
                }
                for index, answer in enumerate(answers)
            ],
            "usage": Usage.of(self.jobs.finished, len(answers), self.readers).body,
        }

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a stream."""
        head, choices = self._head("chat.completion.chunk"), self.asked.n or 1
        if self.asked.with_usage:
            head["usage"] = None
        for choice in range(choices):
            yield head | {"choices": [_delta(choice, {"role": "assistant", "content": ""})]}
        sent = [0] * choices  # calls of each
        async for delta in deltas(self.jobs, self.readers):
            message: dict[str, Any] = _reasoned(delta) | ({"content": delta.text} if delta.text else {})
            if delta.calls and self.asked.functions:
                message["function_call"] = _function(delta.calls[0])
            elif delta.calls:
                first = sent[delta.choice]
                message["tool_calls"] = [{"index": n} | _call(call) for n, call in enumerate(delta.calls, first)]
                sent[delta.choice] += len(delta.calls)
            if message or delta.logprobs:
                logprobs = self._logprobs(delta.logprobs) if delta.logprobs else None
                yield head | {"choices": [_delta(delta.choice, message, logprobs)]}
            if delta.reason is not None:
                yield head | {"choices": [_delta(delta.choice, {}, reason=self._reason(delta.reason))]}
        if self.asked.with_usage:
            yield head | {"choices": [], "usage": Usage.of(self.jobs.finished, choices, self.readers).body}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": self.context.require_model(self.asked.model),
        }

    def _logprobs(self, found: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self.asked.reported is None:
            return None
        return {"content": [self.context.logprob_body(one) for one in found], "refusal": None}

    def _message(self, answer: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None} | _reasoned(answer)
        if answer.calls:
            message["content"] = answer.text or None
            if self.asked.functions:
                message["function_call"] = _function(answer.calls[0])
            else:
                message["tool_calls"] = [_call(call) for call in answer.calls]
        return message

    def _reason(self, reason: str | None) -> str | None:
        return "function_call" if reason == "tool_calls" and self.asked.functions else reason


def _reasoned(part: Answer | Delta) -> dict[str, Any]:
    """Reasoning by its two names: that of DeepSeek's API, and that of vLLM and OpenRouter."""
    return {"reasoning_content": part.reasoning, "reasoning": part.reasoning} if part.reasoning else {}


def _delta(
    choice: int, message: dict[str, Any], logprobs: dict[str, Any] | None = None, reason: str | None = None
) -> dict[str, Any]:
    return {"index": choice, "delta": message, "logprobs": logprobs, "finish_reason": reason}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": _function(call)}


def _function(call: ToolCall) -> dict[str, str]:
    return {"name": call.name, "arguments": call.arguments}
