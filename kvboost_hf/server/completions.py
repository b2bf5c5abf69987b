"""The route `/v1/completions`."""

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from kvboost_hf.server.answers import Answer, CallReaders, Usage, deltas, large, whole
from kvboost_hf.server.constraints import constraints_of
from kvboost_hf.server.context import RouteContext
from kvboost_hf.server.jobs import TokenLogprob
from kvboost_hf.server.posted import PostedRoute
from kvboost_hf.server.request_jobs import RequestJobs, unless_gone
from kvboost_hf.server.schema import CompletionRequest
from kvboost_hf.server.sse import EventStream

_DEFAULT_TOKENS = 16  # as OpenAI's API has it


def completion_routes(context: RouteContext) -> APIRouter:
    """Make a router with `/v1/completions`."""
    router = APIRouter(route_class=PostedRoute)

    @router.post("/v1/completions")
    async def complete(body: CompletionRequest, request: Request) -> Response:
        context.require_model(body.model)
        n = body.n or 1
        context.require_choices(n * len(body.prompts))
        context.require_few_logprobs(n * len(body.prompts) * (body.max_tokens or _DEFAULT_TOKENS), body.logprobs)
        prompts = [
            await context.tokens(prompt, request, "prompt", new=body.max_tokens or _DEFAULT_TOKENS)
            for prompt in body.prompts
        ]
        salt = context.salt(request, body.prompt_cache_key)
        constraints = iter(await constraints_of(context, body, request, salt, n * len(prompts)))
        options = [
            context.options(
                body,
                max_tokens=body.max_tokens or _DEFAULT_TOKENS,
                logprobs=body.logprobs,
                choice=choice,
                constraint=next(constraints),
            )
            for _ in prompts
            for choice in range(n)
        ]
        asked = zip([ids for ids in prompts for _ in range(n)], options, strict=True)
        jobs = context.start([context.job(ids, option, salt=salt, asked=body) for ids, option in asked], request)
        form = _Form(context, body, jobs)
        if body.stream:
            return EventStream(form.chunks(), jobs, context.settings.ping_s)
        return await unless_gone(request, jobs, form.completion())

    return router


@dataclass(frozen=True, slots=True)
class _Form:
    """The answers to one request, in the form of this route."""

    context: RouteContext
    asked: CompletionRequest
    jobs: RequestJobs

    async def completion(self) -> Response:
        """The whole response."""
        answers = await whole(deltas(self.jobs, CallReaders()), self._choices)
        return await large(lambda: self._completion(answers))

    def _completion(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = []
        for choice, answer in enumerate(answers):
            text, logprobs = self._echo(choice) + answer.text, self._logprobs(answer.logprobs, 0)
            choices.append(_choice(choice, text, logprobs, answer.reason))
        return self._head() | {"choices": choices, "usage": self._usage()}

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a stream."""
        head = self._head() | ({"usage": None} if self.asked.with_usage else {})
        offsets = [0] * self._choices
        for choice in range(self._choices if self.asked.echo else 0):
            yield head | {"choices": [_choice(choice, self._echo(choice))]}
        async for delta in deltas(self.jobs, CallReaders()):
            if not (delta.text or delta.logprobs or delta.reason):
                continue
            logprobs = self._logprobs(delta.logprobs, offsets[delta.choice]) if delta.logprobs else None
            offsets[delta.choice] += len(delta.text)
            yield head | {"choices": [_choice(delta.choice, delta.text, logprobs, delta.reason)]}
        if self.asked.with_usage:
            yield head | {"choices": [], "usage": self._usage()}

    @property
    def _choices(self) -> int:
        return len(self.asked.prompts) * (self.asked.n or 1)

    def _echo(self, choice: int) -> str:
        if not self.asked.echo:
            return ""
        prompt = self.asked.prompts[choice // (self.asked.n or 1)]
        return prompt if isinstance(prompt, str) else str(self.context.tokenizer.decode(prompt))

    def _head(self) -> dict[str, Any]:
        return {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.context.require_model(self.asked.model),
        }

    def _usage(self) -> dict[str, Any]:
        return Usage.of(self.jobs.finished, self.asked.n or 1).body

    def _logprobs(self, found: Sequence[TokenLogprob], offset: int) -> dict[str, Any] | None:
        if self.asked.logprobs is None:
            return None
        tokens = [self.context.token_text(one.token) for one in found]
        offsets = [offset]
        for token in tokens:
            offsets.append(offsets[-1] + len(token))
        return {
            "tokens": tokens,
            "token_logprobs": [one.logprob for one in found],
            "top_logprobs": [{self.context.token_text(token): p for token, p in one.top} for one in found],
            "text_offset": offsets[: len(tokens)],
        }


def _choice(
    choice: int, text: str, logprobs: dict[str, Any] | None = None, reason: str | None = None
) -> dict[str, Any]:
    return {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": reason}
