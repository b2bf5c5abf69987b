"""The routes of Ollama's API: chats, generation, embeddings, and those about models."""

import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from kvboost_hf import __version__
from kvboost_hf.server.apis.answers import (
    JSON_LINES,
    CallReaders,
    Delta,
    EventStream,
    RequestJobs,
    deltas,
    large,
    unless_gone,
    whole,
)
from kvboost_hf.server.apis.chat_jobs import start_chat
from kvboost_hf.server.apis.context import PostedRoute, RouteContext, client
from kvboost_hf.server.apis.ollama.schema import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from kvboost_hf.server.apis.texts import embed, filled, require_embeddings
from kvboost_hf.server.chats.calls import ToolCall
from kvboost_hf.server.chats.tool_formats import ToolSupport
from kvboost_hf.server.http.errors import ApiError, refused
from kvboost_hf.server.jobs import Finished
from kvboost_hf.server.requests.chat import ChatRequest
from kvboost_hf.server.requests.messages import Message

Form = Callable[[Delta], dict[str, Any]]  # of a part of an answer
_API_VERSION = "0.12.11"  # of Ollama, whose API this is: clients ask for the one that has what they need
_NEVER = "9999-12-31T23:59:59Z"
_CHANGES = {"pull": "POST", "push": "POST", "create": "POST", "copy": "POST", "delete": "DELETE"}
_THINKS = re.compile(r"enable_thinking|reasoning_effort|reasoning_content|<think>")


def ollama_routes(context: RouteContext) -> APIRouter:
    """Make a router with the routes for text and embeddings."""
    router = APIRouter(route_class=PostedRoute)

    @router.post("/api/chat")
    async def chat(body: OllamaChatRequest, request: Request) -> Response:
        context.require_model(body.model)
        if not body.messages:
            return _loaded(body, _message(Delta(0)))
        asked = await context.read(request, lambda: body.chat)
        jobs, readers = await start_chat(context, asked, request)
        return await _answered(_Reply(context, body, jobs, readers, _message, client(request)), request)

    @router.post("/api/generate")
    async def generate(body: OllamaGenerateRequest, request: Request) -> Response:
        context.require_model(body.model)
        if not body.prompt:
            return _loaded(body, _text(Delta(0)))
        asked = await context.read(request, lambda: body.chat)
        ids = await _prompt_ids(context, body, asked, request)
        jobs, readers = await start_chat(context, asked, request, ids=ids)
        return await _answered(_Reply(context, body, jobs, readers, _text, client(request)), request)

    @router.post("/api/embed")
    async def embed_texts(body: OllamaEmbedRequest, request: Request) -> Response:
        require_embeddings(context)
        context.require_model(body.model)
        texts = [body.input] if isinstance(body.input, str) else body.input
        start = datetime.now(UTC)
        found, tokens = await embed(context, texts, request, "input") if texts else ([], 0)
        seconds = (datetime.now(UTC) - start).total_seconds()
        told = {"total_duration": _nanoseconds(seconds), "load_duration": 0, "prompt_eval_count": tokens}
        return await large(lambda: {"model": body.model, "embeddings": found, **told})

    @router.post("/api/embeddings")
    async def embed_prompt(body: OllamaEmbeddingsRequest, request: Request) -> Response:
        require_embeddings(context)
        context.require_model(body.model)
        [found], _ = await embed(context, [body.prompt], request, "prompt")
        return await large(lambda: {"embedding": found})

    return router


async def _prompt_ids(
    context: RouteContext, body: OllamaGenerateRequest, asked: ChatRequest, request: Request
) -> list[int] | None:
    """The tokens of a prompt that is no whole chat; None for one that is."""
    new, prompt = context.wanted(asked.max_tokens), body.prompt or ""
    if body.raw or body.suffix:
        prompt = filled(context.tokenizer, prompt, body.suffix) if body.suffix else prompt
        return await context.encode(prompt, request, "prompt", new=new)
    if not body.context:
        return None
    turn = await _turn(context, asked, request, new)
    return await context.encode([*body.context, *turn], request, "context", new=new)


async def _turn(context: RouteContext, asked: ChatRequest, request: Request, new: int) -> list[int]:
    """The tokens that the chat template has from the end of an answer to the beginning of the next one."""
    before = [Message(role="user", content=".")]
    opened = await context.encode_chat(asked.model_copy(update={"messages": before}), request)
    talk = [*before, Message(role="assistant", content=""), asked.messages[-1]]
    ids = await context.encode_chat(asked.model_copy(update={"messages": talk}), request, new=new)
    if ids[: len(opened)] != opened:
        raise refused(
            "context",
            "The model's chat template changes what comes before an answer, so that tokens cannot be continued. "
            "Send the messages to /api/chat.",
        )
    return ids[len(opened) :]


@dataclass(frozen=True, slots=True)
class _Reply:
    """The answer to one request, in the form of these routes."""

    context: RouteContext
    asked: OllamaChatRequest | OllamaGenerateRequest
    jobs: RequestJobs
    readers: CallReaders
    form: Form
    client: bytes

    async def whole(self) -> dict[str, Any]:
        """The whole answer."""
        [answer] = await whole(deltas(self.jobs, self.readers), 1)
        return self._part(answer) | await self._end(answer.reason)

    async def lines(self) -> AsyncIterator[dict[str, Any]]:
        """The objects of a stream."""
        reason = None
        async for delta in deltas(self.jobs, self.readers):
            if delta.text or delta.reasoning or delta.calls or delta.logprobs:
                yield self._part(delta)
            reason = delta.reason or reason
        yield self._part(Delta(0)) | await self._end(reason)

    def _part(self, part: Delta) -> dict[str, Any]:
        told = _head(self.asked.model) | self.form(part) | {"done": False}
        if part.logprobs:
            told["logprobs"] = [self.context.logprob_body(one) for one in part.logprobs]
        return told

    async def _end(self, reason: str | None) -> dict[str, Any]:
        finished = self.jobs.finished[0]
        told = {"done": True, "done_reason": "length" if reason == "length" else "stop"} | _figures(finished)
        told |= self.jobs.limit(0, reason)
        if isinstance(self.asked, OllamaGenerateRequest) and not (self.asked.raw or self.asked.suffix):
            told["context"] = [*self.jobs.first.ids, *await self._said(finished)]
        return told

    async def _said(self, finished: Finished) -> Sequence[int]:
        """The tokens of the answer without the token, or the text, that has ended it."""
        ids, decode = finished.ids, self.context.tokenizer.decode
        if finished.stop is None:
            return ids[:-1] if ids and ids[-1] in self.context.ends else ids
        text = str(decode(ids)).rpartition(finished.stop)[0]
        kept = next(count for count in range(len(ids), -1, -1) if text.startswith(begun := str(decode(ids[:count]))))
        rest = text.removeprefix(begun)  # of the token that the stop text begins in
        more = await self.context.encoder.text(rest, self.client, new=0, special=False) if rest else []
        return [*ids[:kept], *more]


async def _answered(reply: _Reply, request: Request) -> Response:
    if reply.asked.stream is not False:
        return EventStream(reply.lines(), reply.jobs, reply.context.settings.ping_s, form=JSON_LINES)
    told = await unless_gone(request, reply.jobs, reply.whole())
    return await large(lambda: told)


def _loaded(asked: OllamaChatRequest | OllamaGenerateRequest, empty: dict[str, Any]) -> Response:
    """The answer to a request without a prompt, which asks to load or to unload the model."""
    told = {"done": True, "done_reason": "unload" if asked.unloads else "load"}
    return JSONResponse(_head(asked.model) | empty | told)


def _head(model: str) -> dict[str, Any]:
    return {"model": model, "created_at": datetime.now(UTC).isoformat()}


def _message(part: Delta) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": part.text}
    if part.reasoning:
        message["thinking"] = part.reasoning
    if part.calls:
        message["tool_calls"] = [_call(call) for call in part.calls]
    return {"message": message}


def _call(call: ToolCall) -> dict[str, Any]:
    # NaN and infinities, which a model may write, are no JSON.
    arguments = json.loads(call.arguments, parse_constant=lambda name: None)
    return {"id": call.id, "function": {"index": call.number, "name": call.name, "arguments": arguments}}


def _text(part: Delta) -> dict[str, Any]:
    return {"response": part.text} | ({"thinking": part.reasoning} if part.reasoning else {})


def _figures(finished: Finished) -> dict[str, Any]:
    """Counts and durations; what comes before the first token counts as evaluation of the prompt, without waiting."""
    first = finished.total_s if finished.ttft_s is None else finished.ttft_s
    return {
        "total_duration": _nanoseconds(finished.total_s),
        "load_duration": 0,
        "prompt_eval_count": finished.prompt_tokens,
        "prompt_eval_duration": _nanoseconds(first - finished.queue_s),
        "eval_count": finished.completion_tokens,
        "eval_duration": _nanoseconds(finished.total_s - first),
        "cached_tokens": finished.cached_tokens,
    }


def _nanoseconds(seconds: float) -> int:
    return max(1, round(seconds * 1e9))  # clients divide by it


def ollama_model_routes(context: RouteContext) -> APIRouter:
    """Make a router with the routes about models."""
    router = APIRouter(route_class=PostedRoute)

    @router.get("/api/version")
    async def version() -> dict[str, str]:
        return {"version": _API_VERSION, "server": f"kvboost_hf {__version__}"}

    @router.get("/api/tags")
    async def tags() -> dict[str, Any]:
        return {"models": [_listed(context, name) for name in context.settings.model_names]}

    @router.get("/api/ps")
    async def loaded() -> dict[str, Any]:
        more = {
            "expires_at": _NEVER,
            "size_vram": context.engine.model_card.gpu_bytes,
            "context_length": context.context_length,
        }
        return {"models": [_listed(context, context.settings.model_name) | more]}

    @router.post("/api/show")
    async def show(body: OllamaShowRequest) -> dict[str, Any]:
        name = body.model or body.name
        if not name:
            raise refused("model", f"model: a name is required, such as {context.settings.model_name!r}.")
        context.require_model(name)
        return _shown(context)

    async def refuse(request: Request) -> None:
        raise ApiError(
            400,
            f"This server serves one model, {context.settings.model_name!r}, and cannot change models: "
            f"{request.url.path} is not served. Start a server with `kvboost-hf serve --model NAME` for another one.",
            code="not_supported",
        )

    for name, method in _CHANGES.items():
        router.add_api_route(f"/api/{name}", refuse, methods=[method], include_in_schema=False)
    return router


def _listed(context: RouteContext, name: str) -> dict[str, Any]:
    """A model of a list; names have a tag there."""
    name, card = name if ":" in name else f"{name}:latest", context.engine.model_card
    return {
        "name": name,
        "model": name,
        "modified_at": _since(context),
        "size": card.num_bytes,
        # Of what is told here: there is no file whose digest it would be.
        "digest": sha256(json.dumps([context.settings.model_name, asdict(card)], sort_keys=True).encode()).hexdigest(),
        "details": _details(context),
    }


def _details(context: RouteContext) -> dict[str, Any]:
    card = context.engine.model_card
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": card.family,
        "families": [card.family],
        "parameter_size": card.parameter_size,
        "quantization_level": card.quantization,
    }


def _shown(context: RouteContext) -> dict[str, Any]:
    card, template = context.engine.model_card, context.tokenizer.chat_template
    info = {
        "general.architecture": card.family,
        "general.basename": context.settings.model_name,
        "general.parameter_count": card.parameters,
        f"{card.family}.context_length": context.context_length,
    }
    return {
        "modelfile": f"FROM {context.settings.model_name}",
        "parameters": "",
        "template": template if isinstance(template, str) else "",
        "details": _details(context),
        "model_info": info | {f"{card.family}.{name}": size for name, size in card.sizes.items()},
        "capabilities": _capabilities(context),
        "modified_at": _since(context),
    }


def _capabilities(context: RouteContext) -> list[str]:
    template = context.tokenizer.chat_template
    templates = "".join(template.values()) if isinstance(template, dict) else template or ""
    found = {
        "completion": True,
        "tools": ToolSupport.of(context.tokenizer).served,
        "thinking": _THINKS.search(templates) is not None,
        "embedding": context.settings.embeddings,
    }
    return [name for name, has in found.items() if has]


def _since(context: RouteContext) -> str:
    return datetime.fromtimestamp(context.created, UTC).isoformat()
