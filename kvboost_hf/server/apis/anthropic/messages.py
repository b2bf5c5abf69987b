"""The routes of Anthropic's Messages API: `/v1/messages` and `/v1/messages/count_tokens`."""

import json
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from kvboost_hf.ngrams import common_prefix
from kvboost_hf.server.apis.answers import PINGED_EVENTS, CallReaders, EventStream, RequestJobs, deltas, unless_gone
from kvboost_hf.server.apis.anthropic.schema import Breakpoint, CountRequest, MessagesRequest
from kvboost_hf.server.apis.chat_jobs import count_tokens, start_chat
from kvboost_hf.server.apis.context import PostedRoute, RouteContext
from kvboost_hf.server.chats.calls import ToolCall
from kvboost_hf.server.http.errors import ApiError
from kvboost_hf.server.jobs import Finished
from kvboost_hf.server.requests.chat import ChatRequest

_TTL_S = {"5m": 300.0, "1h": 3600.0}


def message_routes(context: RouteContext) -> APIRouter:
    """Make a router with `/v1/messages` and what belongs to it."""
    router = APIRouter(route_class=PostedRoute)

    @router.post("/v1/messages")
    async def create(body: MessagesRequest, request: Request) -> Response:
        model = context.require_model(body.model)
        chat = await context.read(request, lambda: body.chat)
        marks = await _marks(context, body, chat, request)
        keep = [context.keep(_TTL_S[mark.ttl], None if mark.ids is None else len(mark.ids)) for mark in marks]
        jobs, readers = await start_chat(
            context, chat, request, new=body.max_tokens, keep=keep, tells_known=bool(body.stream)
        )
        reply = _Reply(model, jobs, readers, marks)
        if body.stream:
            return EventStream(reply.events(), jobs, context.settings.ping_s, form=PINGED_EVENTS)
        return JSONResponse(await unless_gone(request, jobs, reply.whole()))

    @router.post("/v1/messages/count_tokens")
    async def count(body: CountRequest, request: Request) -> dict[str, int]:
        context.require_model(body.model)
        chat = await context.read(request, lambda: body.chat)
        return {"input_tokens": await count_tokens(context, chat, request)}

    return router


@dataclass(frozen=True, slots=True)
class _Mark:
    """The beginning of a prompt that `cache_control` asks to keep."""

    ttl: str  # as the request has it, such as `"5m"`
    ids: Sequence[int] | None  # the tokens up to there, and some that end it; None for the whole prompt

    def tokens(self, prompt: Sequence[int]) -> int:
        """How many tokens of the prompt it has."""
        return len(prompt) if self.ids is None else common_prefix(self.ids, prompt)


async def _marks(context: RouteContext, body: MessagesRequest, chat: ChatRequest, request: Request) -> list[_Mark]:
    """The last breakpoint of each TTL. The others are beginnings of these."""
    last: dict[str, Breakpoint] = {point.ttl: point for point in body.breakpoints}
    found = []
    for ttl, point in last.items():
        if point.last:
            found.append(_Mark(ttl, None))
            continue
        messages = await context.read(request, partial(body.up_to, point))
        whole = {"add_generation_prompt": False, "continue_final_message": None}
        part = chat.model_copy(update={"messages": messages, **whole})
        try:
            found.append(_Mark(ttl, await context.encode_chat(part, request)))
        except ApiError:  # templates may refuse half of a chat: then this one is not kept
            continue
    return found


@dataclass(slots=True)
class _Reply:
    """The answer to one request: blocks that open, grow and close."""

    model: str
    jobs: RequestJobs
    readers: CallReaders
    marks: Sequence[_Mark]
    id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")
    content: list[dict[str, Any]] = field(default_factory=list)
    arguments: str = ""  # of the last call, so far
    reason: str | None = None
    open: bool = False  # whether the last block is
    known: int = 0  # tokens of the prompt that were stored when the stream began

    async def whole(self) -> dict[str, Any]:
        """The whole message."""
        async for _ in self.events():
            pass
        return self._message | self._end | {"usage": self._usage}

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The events of a stream."""
        # Some clients read of the prompt's tokens here alone; the end says what was reused of them.
        self.known = await self.jobs.known()
        yield {"type": "message_start", "message": self._message | {"content": []}}
        async for delta in deltas(self.jobs, self.readers):
            for event in self._grow("thinking", delta.reasoning):
                yield event
            for event in self._grow("text", delta.text):
                yield event
            for call in delta.calls:
                for event in self._call(call):
                    yield event
            self.reason = delta.reason or self.reason
        for event in self._close():
            yield event
        usage = {name: tokens for name, tokens in self._usage.items() if name != "cache_creation"}
        yield {"type": "message_delta", "delta": self._end, "usage": usage}
        yield {"type": "message_stop"}

    def _grow(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        """Add text to the last block, or to a new one where that is of another kind."""
        if not text:
            return
        if not self.open or self.content[-1]["type"] != kind:
            yield from self._close()
            yield self._open({"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {}))
        self.content[-1][kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _call(self, call: ToolCall) -> Iterator[dict[str, Any]]:
        if call.begins:
            yield from self._close()
            yield self._open({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            self.arguments = ""
        self.arguments += call.arguments
        if call.arguments:
            yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        if call.ended:
            self.content[-1]["input"] = json.loads(self.arguments)
            yield from self._close()

    def _open(self, block: dict[str, Any]) -> dict[str, Any]:
        self.content.append(block)
        self.open = True
        return {"type": "content_block_start", "index": len(self.content) - 1, "content_block": dict(block)}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}

    def _close(self) -> Iterator[dict[str, Any]]:
        if not self.open:
            return
        if self.content[-1]["type"] == "thinking":
            # Clients send it back with the block, and drop blocks without one; it is not checked.
            self.content[-1]["signature"] = self.id
            yield self._delta({"type": "signature_delta", "signature": self.id})
        self.open = False
        yield {"type": "content_block_stop", "index": len(self.content) - 1}

    @property
    def _message(self) -> dict[str, Any]:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": self.content}
        return head | {"stop_reason": None, "stop_sequence": None, "usage": self._usage}

    @property
    def _end(self) -> dict[str, Any]:
        finished = self.jobs.finished[0]
        reason = self._stop_reason(finished)
        told = {"stop_reason": reason, "stop_sequence": finished.stop if reason == "stop_sequence" else None}
        return told | self.jobs.limit(0, self.reason)

    def _stop_reason(self, finished: Finished) -> str:
        if self.reason == "tool_calls":
            return "tool_use"
        if finished.stop is not None:
            return "stop_sequence"
        if self.reason != "length":
            return "end_turn"
        # A call that is no call to its end has the reason "length", too.
        full = finished.reason == "length" and self.jobs.first.limited_by == "context"
        return "model_context_window_exceeded" if full else "max_tokens"

    @property
    def _usage(self) -> dict[str, Any]:
        """Tokens as this API counts them: each of the prompt's is read, created or neither."""
        prompt, finished, thought = self.jobs.first.ids, self.jobs.finished.get(0), self.readers.thought
        read = finished.cached_tokens if finished is not None else self.known
        ends = {mark.ttl: mark.tokens(prompt) for mark in self.marks}
        hour = max(ends.get("1h", 0) - read, 0)
        created = max(max(ends.values(), default=0) - read, 0)
        return {
            "input_tokens": len(prompt) - read - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": read,
            "cache_creation": {"ephemeral_5m_input_tokens": created - hour, "ephemeral_1h_input_tokens": hour},
            "output_tokens": finished.completion_tokens if finished is not None else 0,
        } | ({"output_tokens_details": {"thinking_tokens": thought.total()}} if self.readers.streams else {})
