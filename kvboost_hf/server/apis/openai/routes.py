"""The routes of OpenAI's API except `/v1/responses`: chats, completions, embeddings and models."""

import base64
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from kvboost_hf.server.apis.answers import (
    CallReaders,
    Delta,
    EventStream,
    RequestJobs,
    deltas,
    large,
    unless_gone,
    usage,
    whole,
)
from kvboost_hf.server.apis.chat_jobs import constraints_of, start_chat
from kvboost_hf.server.apis.context import PostedRoute, RouteContext, client
from kvboost_hf.server.apis.texts import embed, filled, require_embeddings
from kvboost_hf.server.chats.calls import ToolCall
from kvboost_hf.server.jobs import Job, TokenLogprob
from kvboost_hf.server.protocol import UNLIMITED
from kvboost_hf.server.requests.chat import ChatRequest
from kvboost_hf.server.requests.texts import CompletionRequest, EmbeddingRequest


def chat_routes(context: RouteContext) -> APIRouter:
    """Make a router with `/v1/chat/completions`."""
    router = APIRouter(route_class=PostedRoute)

    @router.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        owner, history = (client(request), context.salt(request, body.cache_salt)), None
        if body.edits or body.history:
            body = context.histories.whole(body, *owner)
            request.scope["text_keys"] = ()  # of the text that was sent, with which the prompt may not begin
        jobs, readers = await start_chat(context, body, request)
        if body.history:
            history = context.histories.keep(body, *owner)
        form = _ChatForm(context, body, jobs, readers, history)
        if body.stream:
            return EventStream(form.chunks(), jobs, context.settings.ping_s)
        return await unless_gone(request, jobs, form.completion())

    return router


@dataclass(frozen=True, slots=True)
class _ChatForm:
    """The answers to one request, in the form of this route."""

    context: RouteContext
    asked: ChatRequest
    jobs: RequestJobs
    readers: CallReaders
    history: str | None

    async def completion(self) -> Response:
        """The whole response."""
        answers = await whole(deltas(self.jobs, self.readers), self.asked.n or 1)
        return await large(lambda: self._completion(answers))

    def _completion(self, answers: Sequence[Delta]) -> dict[str, Any]:
        return self._head("chat.completion") | {
            "choices": [
                {
                    "index": index,
                    "message": self._message(answer),
                    "logprobs": self._logprobs(answer.logprobs),
                    "finish_reason": self._reason(answer.reason),
                    **self.jobs.limit(index, answer.reason),
                }
                for index, answer in enumerate(answers)
            ],
            "usage": usage(self.jobs.finished, len(answers), self.readers),
        }

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a stream."""
        head, choices = self._head("chat.completion.chunk"), self.asked.n or 1
        if self.asked.with_usage:
            head["usage"] = None
        silent = set(range(choices))  # answers of which nothing came so far
        async for delta in deltas(self.jobs, self.readers):
            message: dict[str, Any] = _reasoned(delta) | ({"content": delta.text} if delta.text else {})
            if delta.choice in silent and (message or delta.calls or delta.logprobs or delta.reason):
                silent.remove(delta.choice)
                content = None if not delta.text and (delta.calls or delta.reasoning) else ""
                yield head | {"choices": [_delta(delta.choice, {"role": "assistant", "content": content})]}
            pieces = [
                {"index": call.number} | (_call(call) if call.begins else {"function": {"arguments": call.arguments}})
                for call in delta.calls
            ]
            if pieces and self.asked.functions:
                message["function_call"] = pieces[0]["function"]
            elif pieces:
                message["tool_calls"] = pieces
            if message or delta.logprobs:
                logprobs = self._logprobs(delta.logprobs) if delta.logprobs else None
                yield head | {"choices": [_delta(delta.choice, message, logprobs)]}
            if delta.reason is not None:
                last = _delta(delta.choice, {}, reason=self._reason(delta.reason))
                yield head | {"choices": [last | self.jobs.limit(delta.choice, delta.reason)]}
        if self.asked.with_usage:
            yield head | {"choices": [], "usage": usage(self.jobs.finished, choices, self.readers)}

    def _head(self, kind: str) -> dict[str, Any]:
        head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": self.context.require_model(self.asked.model),
        }
        return head | {"history": self.history} if self.asked.history else head

    def _logprobs(self, found: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self.asked.reported is None:
            return None
        return {"content": [self.context.logprob_body(one) for one in found], "refusal": None}

    def _message(self, answer: Delta) -> dict[str, Any]:
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


def _reasoned(part: Delta) -> dict[str, Any]:
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


def completion_routes(context: RouteContext) -> APIRouter:
    """Make a router with `/v1/completions`."""
    router = APIRouter(route_class=PostedRoute)

    @router.post("/v1/completions")
    async def complete(body: CompletionRequest, request: Request) -> Response:
        context.require_model(body.model)
        jobs = context.start(await _jobs(context, body, request), request, body)
        form = _TextForm(context, body, jobs)
        if body.stream:
            return EventStream(form.chunks(), jobs, context.settings.ping_s)
        return await unless_gone(request, jobs, form.completion())

    return router


async def _jobs(context: RouteContext, body: CompletionRequest, request: Request) -> list[Job]:
    """A job for each answer to each prompt."""
    answers = body.computed
    context.require_choices(answers * len(body.prompts), "n" if body.best_of is None else "best_of")
    prompts = [await _prompt(context, body, prompt, request) for prompt in body.prompts]
    told = sum(len(ids) for ids in prompts) if body.echo else 0
    reported = context.reportable(answers, body.logprobs)
    if reported is not None:
        reported = (reported - told) // len(prompts)
    lengths = [context.length(ids, body.max_tokens, reported=reported) for ids in prompts]
    context.require_few_logprobs(answers * (told + sum(length.tokens for length in lengths)), body.logprobs)
    salt = context.salt(request, body.cache_salt)
    constraints = iter(await constraints_of(context, body, request, salt, answers * len(prompts)))
    jobs = []
    for ids, length in zip(prompts, lengths, strict=True):
        for choice in range(answers):
            options = context.options(
                body, length=length, logprobs=body.logprobs, choice=choice, constraint=next(constraints)
            )
            if answers > body.answers and options.logprobs is None:
                options = replace(options, logprobs=0)  # to choose by
            if body.echo and body.logprobs is not None:
                options = replace(options, prompt_logprobs=True)
            jobs.append(context.job(ids, options, salt=salt, asked=body, limited_by=length.limited_by))
    return jobs


async def _prompt(
    context: RouteContext, body: CompletionRequest, prompt: str | list[int], request: Request
) -> list[int]:
    if body.suffix and isinstance(prompt, str):
        prompt = filled(context.tokenizer, prompt, body.suffix)
    special, new = body.add_special_tokens is not False, context.wanted(body.max_tokens)
    ids = await context.encode(prompt, request, "prompt", new=new, truncates=body.truncates, special=special)
    return context.fitted(body.truncated(ids), body.max_tokens, what="prompt", truncates=body.truncates)


@dataclass(frozen=True, slots=True)
class _TextForm:
    """The answers to one request, in the form of this route."""

    context: RouteContext
    asked: CompletionRequest
    jobs: RequestJobs

    async def completion(self) -> Response:
        """The whole response."""
        answers = await whole(deltas(self.jobs, CallReaders()), len(self.asked.prompts) * self.asked.computed)
        return await large(lambda: self._completion(self._best(answers)))

    def _best(self, answers: Sequence[Delta]) -> list[Delta]:
        """The answers that are returned: of each prompt those with the highest mean log probability."""
        n, computed = self.asked.answers, self.asked.computed
        if computed == n:
            return list(answers)
        means = [_mean(answer.logprobs, self.jobs.finished[at].completion_tokens) for at, answer in enumerate(answers)]
        found: list[Delta] = []
        for first in range(0, len(answers), computed):
            ranked = sorted(range(first, first + computed), key=lambda at: -means[at])
            found += [answers[at] for at in ranked[:n]]
        return found

    def _completion(self, answers: Sequence[Delta]) -> dict[str, Any]:
        choices = []
        for choice, (answer, (echo, start)) in enumerate(zip(answers, self._echoes, strict=True)):
            limit = self.jobs.limit(self._job(choice), answer.reason)
            logprobs, _ = self._logprobs(answer.logprobs, start, len(echo))
            choices.append(_choice(choice, echo + answer.text, logprobs, answer.reason) | limit)
        return self._head() | {"choices": choices, "usage": usage(self.jobs.finished, self.asked.computed)}

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a stream."""
        head = self._head() | ({"usage": None} if self.asked.with_usage else {})
        echoes = self._echoes
        offsets = [start for _, start in echoes]
        for choice, (echo, _) in enumerate(echoes if self.asked.echo else ()):
            yield head | {"choices": [_choice(choice, echo)]}
        async for delta in deltas(self.jobs, CallReaders()):
            if not (delta.text or delta.logprobs or delta.reason):
                continue
            choice, logprobs = delta.choice, None
            if delta.logprobs:
                logprobs, offsets[choice] = self._logprobs(delta.logprobs, offsets[choice], len(echoes[choice][0]))
            told = _choice(choice, delta.text, logprobs, delta.reason)
            yield head | {"choices": [told | self.jobs.limit(choice, delta.reason)]}
        if self.asked.with_usage:
            yield head | {"choices": [], "usage": usage(self.jobs.finished, self.asked.computed)}

    @property
    def _echoes(self) -> list[tuple[str, int]]:
        """The echo of each answer, and where the text of the first token begins."""
        found: list[tuple[str, int]] = []
        for number, prompt in enumerate(self.asked.prompts):
            ids = self.jobs.prompt(number * self.asked.computed)
            echo = self._echo(prompt, ids)
            found += [(echo, self._start(echo, ids))] * self.asked.answers
        return found

    def _echo(self, prompt: str | list[int], ids: Sequence[int]) -> str:
        if not self.asked.echo:
            return ""
        if isinstance(prompt, str) and not (self.asked.truncates or self.context.settings.auto_truncate):
            return prompt
        text = str(self.context.tokenizer.decode(ids))
        return prompt if isinstance(prompt, str) and len(text) >= len(prompt) else text

    def _job(self, choice: int) -> int:
        """The first job of the prompt of an answer."""
        return choice // self.asked.answers * self.asked.computed

    def _start(self, echo: str, prompt: Sequence[int]) -> int:
        """Where the text of the first token begins, so that the last one of the prompt ends where the echo does.

        It is below 0 where the prompt has tokens that the echo does not have, such as one that begins each text.
        """
        if not echo or self.asked.logprobs is None:
            return 0
        return len(echo) - sum(self.context.chars_of(token, special=True) for token in prompt)

    def _head(self) -> dict[str, Any]:
        return {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.context.require_model(self.asked.model),
        }

    def _logprobs(self, found: Sequence[TokenLogprob], start: int, echo: int) -> tuple[dict[str, Any] | None, int]:
        """Log probabilities of tokens, the first of which begins at `start` behind `echo` characters of the prompt,
        and where the next one begins."""
        if self.asked.logprobs is None:
            return None, start
        text, shown, offsets = self.context.token_text, self.asked.skip_special_tokens is False, list[int]()
        for one in found:
            offsets.append(max(0, start))
            start += self.context.chars_of(one.token, special=shown or start < echo)
        told = {
            "tokens": [text(one.token) for one in found],
            "token_logprobs": [one.logprob for one in found],
            # Of tokens with the same text, such as parts of characters, the likeliest, which comes first.
            "top_logprobs": [
                None if one.logprob is None else {text(token): logprob for token, logprob in reversed(one.top)}
                for one in found
            ],
            "text_offset": offsets,
        }
        return told, start


def _mean(logprobs: Sequence[TokenLogprob], tokens: int) -> float:
    """The mean log probability of the last `tokens` of them: those before are of the prompt."""
    values = [one.logprob or 0.0 for one in logprobs[len(logprobs) - tokens :]]
    return sum(values) / len(values) if values else 0.0


def _choice(
    choice: int, text: str, logprobs: dict[str, Any] | None = None, reason: str | None = None
) -> dict[str, Any]:
    return {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": reason}


def embedding_routes(context: RouteContext) -> APIRouter:
    """Make a router with `/v1/embeddings`."""
    router = APIRouter(route_class=PostedRoute)

    @router.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        require_embeddings(context)
        model = context.require_model(body.model)
        found, tokens = await embed(context, body.texts, request, "input")

        def tell(numbers: Sequence[float]) -> str | list[float]:
            if body.encoding_format != "base64":
                return list(numbers)
            return base64.b64encode(np.asarray(numbers, dtype="<f4").tobytes()).decode()  # float32, little-endian

        def embedded() -> dict[str, Any]:
            data = [{"object": "embedding", "index": n, "embedding": tell(numbers)} for n, numbers in enumerate(found)]
            usage = {"prompt_tokens": tokens, "total_tokens": tokens}
            return {"object": "list", "data": data, "model": model, "usage": usage}

        return await large(embedded)

    return router


def model_routes(context: RouteContext) -> APIRouter:
    """Make a router with `/v1/models`."""
    router = APIRouter()
    settings = context.settings
    lengths = _lengths(context)

    def described(name: str) -> dict[str, Any]:
        """As both OpenAI's and Anthropic's clients have it."""
        opened = datetime.fromtimestamp(context.created, UTC).isoformat()
        return {
            "id": name,
            "object": "model",
            "created": context.created,
            "owned_by": "kvboost_hf",
            "default_sampling": context.sampling.body,
            **lengths,
            "type": "model",
            "display_name": name,
            "created_at": opened,
            "lifecycle": "active",
        }

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        names = settings.model_names
        page = {"first_id": names[0], "last_id": names[-1], "has_more": False}
        return {"object": "list", "data": [described(name) for name in names]} | page

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        return described(context.require_model(name))

    return router


def _lengths(context: RouteContext) -> dict[str, Any]:
    """Tokens of a prompt and its answer, under the names that clients look for; none where there is no limit."""
    most, card = context.context_length, context.engine.model_card
    meta = {"n_params": card.parameters, "size": card.num_bytes}
    sizes = {"n_vocab": "vocab_size", "n_embd": "embedding_length"}
    meta |= {name: card.sizes[size] for name, size in sizes.items() if size in card.sizes}
    if most >= UNLIMITED:
        return {"meta": meta}
    names = (
        "max_model_len",  # vLLM, SGLang
        "context_length",  # OpenRouter
        "context_window",  # Groq
        "max_context_length",  # LM Studio, Mistral
        "max_input_tokens",  # Anthropic
        "max_tokens",
    )
    meta |= {"n_ctx": most, "n_ctx_train": most}  # llama.cpp
    return {name: most for name in names} | {"meta": meta}
