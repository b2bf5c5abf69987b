"""The route `/v1/chat/completions`."""

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from kvboost_hf.server.apis.answers import Answer, CallReaders, Delta, Usage, deltas, large, whole
from kvboost_hf.server.apis.chat_jobs import start_chat
from kvboost_hf.server.apis.context import RouteContext
from kvboost_hf.server.apis.posted import PostedRoute
from kvboost_hf.server.apis.request_jobs import RequestJobs, unless_gone
from kvboost_hf.server.apis.sse import EventStream
from kvboost_hf.server.chats.tools import ToolCall
from kvboost_hf.server.jobs import TokenLogprob
from kvboost_hf.server.requests.chat import ChatRequest


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
