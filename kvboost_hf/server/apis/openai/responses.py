"""The route `/v1/responses`: text and function calls; no response is stored."""

import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from kvboost_hf.server.apis.answers import (
    NAMED_EVENTS,
    CallReaders,
    Delta,
    EventStream,
    RequestJobs,
    deltas,
    unless_gone,
    usage,
)
from kvboost_hf.server.apis.chat_jobs import count_tokens, start_chat
from kvboost_hf.server.apis.context import PostedRoute, RouteContext
from kvboost_hf.server.apis.openai.responses_schema import ResponseRequest, custom_input
from kvboost_hf.server.chats.calls import ToolCall


def response_routes(context: RouteContext) -> APIRouter:
    """Make a router with `/v1/responses` and `/v1/responses/input_tokens`."""
    router = APIRouter(route_class=PostedRoute)

    @router.post("/v1/responses")
    async def respond(body: ResponseRequest, request: Request) -> Response:
        chat = await context.read(request, lambda: body.chat)
        jobs, readers = await start_chat(context, chat, request)
        reply = _Reply(context, body, context.require_model(body.model), jobs, readers)
        if body.stream:
            return EventStream(reply.events(), jobs, context.settings.ping_s, form=NAMED_EVENTS)
        return JSONResponse(await unless_gone(request, jobs, reply.whole()))

    @router.post("/v1/responses/input_tokens")
    async def count(body: ResponseRequest, request: Request) -> dict[str, Any]:
        context.require_model(body.model)
        chat = await context.read(request, lambda: body.chat)
        return {"object": "response.input_tokens", "input_tokens": await count_tokens(context, chat, request)}

    return router


@dataclass(slots=True)
class _Reply:
    """The answer to one request, in the form of this route: items that open, grow and close."""

    context: RouteContext
    asked: ResponseRequest
    model: str
    jobs: RequestJobs
    readers: CallReaders
    id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    created: float = field(default_factory=time.time)
    output: list[dict[str, Any]] = field(default_factory=list)
    sequence: int = 0
    open: str | None = None  # the type of the last item, where it may grow
    text: str = ""  # of that one, and
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    waiting: list[dict[str, Any]] = field(default_factory=list)  # log probabilities of tokens without text so far

    async def whole(self) -> dict[str, Any]:
        """The whole response, as the last event has it."""
        told: dict[str, Any] = {}
        async for event in self.events():
            told = event.get("response", told)
        return told

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The events of a stream."""
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))
        reason = None
        async for delta in deltas(self.jobs, self.readers):
            reason = delta.reason or reason
            for event in self._step(delta):
                yield event
        status = "incomplete" if reason == "length" else "completed"
        if not self.output:
            for event in (*self._open("message"), *self._grow("message", "", self.waiting)):
                yield event
        for event in self._close(status):
            yield event
        yield self._event(f"response.{status}", response=self._response(status))

    def _step(self, delta: Delta) -> Iterator[dict[str, Any]]:
        logprobs = [self.context.logprob_body(one) for one in delta.logprobs]
        thinking = self.open == "reasoning" or any(stream.thinking for stream in self.readers.streams)
        yield from self._grow("reasoning", delta.reasoning)
        self.waiting += logprobs
        if delta.text or (self.open == "message" and not thinking):
            yield from self._grow("message", delta.text, self.waiting)
            self.waiting = []
        elif thinking or delta.calls:  # those of reasoning and of calls have no place
            self.waiting = []
        for call in delta.calls:
            yield from self._call(call)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self.sequence += 1
        return {"type": kind, "sequence_number": self.sequence - 1, **fields}

    @property
    def _here(self) -> dict[str, Any]:
        return {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1, "content_index": 0}

    def _grow(
        self, kind: str, text: str, logprobs: Sequence[dict[str, Any]] | None = None
    ) -> Iterator[dict[str, Any]]:
        """Add text to the last item, or to a new one where that is of another kind."""
        if not text and not logprobs:
            return
        if self.open != kind:
            yield from self._close("completed")
            yield from self._open(kind)
        self.text += text
        if kind == "message":
            self.logprobs += logprobs or ()
            yield self._event("response.output_text.delta", **self._here, delta=text, logprobs=list(logprobs or ()))
        else:
            yield self._event("response.reasoning_text.delta", **self._here, delta=text)

    def _open(self, kind: str) -> Iterator[dict[str, Any]]:
        prefix = "msg" if kind == "message" else "rs"
        more: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
        item: dict[str, Any] = {
            "id": f"{prefix}_{uuid.uuid4().hex}",
            "type": kind,
            **more,
            "status": "in_progress",
            "content": [],
        }
        self.open, self.text, self.logprobs = kind, "", []
        self.output.append(item)
        yield self._event("response.output_item.added", output_index=len(self.output) - 1, item=dict(item))
        yield self._event("response.content_part.added", **self._here, part=self._part)

    def _close(self, status: str) -> Iterator[dict[str, Any]]:
        if self.open is None:
            return
        part = self._part
        self.output[-1] |= {"status": status, "content": [part]}
        if self.open == "message":
            yield self._event("response.output_text.done", **self._here, text=self.text, logprobs=self.logprobs)
        else:
            yield self._event("response.reasoning_text.done", **self._here, text=self.text)
        self.open = None
        yield self._event("response.content_part.done", **self._here, part=part)
        yield self._event("response.output_item.done", output_index=len(self.output) - 1, item=self.output[-1])

    @property
    def _part(self) -> dict[str, Any]:
        """The content of the item that is open."""
        if self.open == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": list(self.logprobs)}

    def _chosen(self, name: str) -> Any:
        """The value of a field, or its default."""
        asked = getattr(self.asked, name)
        return getattr(self.context.sampling, name) if asked is None else asked

    def _call(self, call: ToolCall) -> Iterator[dict[str, Any]]:
        """Add a piece to the call that is open, or to a new one."""
        custom = self.asked.is_custom(call.name)
        field, event = ("input", "custom_tool_call_input") if custom else ("arguments", "function_call_arguments")
        if call.begins:
            yield from self._close("completed")
            item: dict[str, Any] = {
                "id": f"{'ctc' if custom else 'fc'}_{uuid.uuid4().hex}",
                "type": "custom_tool_call" if custom else "function_call",
                "status": "in_progress",
                "call_id": call.id,
                field: "",
            } | self.asked.named(call.name)
            self.output.append(item)
            self.text = ""
            yield self._event("response.output_item.added", output_index=len(self.output) - 1, item=dict(item))
        self.text += call.arguments
        place = {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}
        told = call.arguments
        if custom:  # whose input is a text, and no JSON
            told = self.text = custom_input(self.text) if call.ended else self.text
        if told and (call.ended or not custom):
            yield self._event(f"response.{event}.delta", **place, delta=told)
        if not call.ended:
            return
        item = self.output[-1] | {"status": "incomplete" if call.cut else "completed", field: self.text}
        self.output[-1] = item
        more = {} if custom else {"name": item["name"]}
        yield self._event(f"response.{event}.done", **place, **more, **{field: self.text})
        yield self._event("response.output_item.done", output_index=place["output_index"], item=item)

    def _response(self, status: str) -> dict[str, Any]:
        asked = self.asked.model_dump(include={"text", "tool_choice", "tools"}, by_alias=True)
        ended, reasoning = status != "in_progress", self.asked.reasoning
        cut = {"reason": "max_output_tokens"} | self.jobs.limit(0, "length") if status == "incomplete" else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": int(self.created),
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "model": self.model,
            "output": list(self.output),
            "instructions": self.asked.instructions,
            "max_output_tokens": self.asked.max_output_tokens,
            "metadata": self.asked.metadata or {},
            "parallel_tool_calls": self.asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": self._chosen("temperature"),
            "text": {"format": (asked["text"] or {}).get("format") or {"type": "text"}},
            "tool_choice": asked["tool_choice"] or "auto",
            "tools": asked["tools"] or [],
            "top_p": self._chosen("top_p"),
            "truncation": self.asked.truncation or "disabled",
            "reasoning": {"effort": reasoning and reasoning.effort, "summary": reasoning and reasoning.summary},
            "usage": _usage(usage(self.jobs.finished, 1, self.readers)) if ended else None,
        }


def _usage(found: dict[str, Any]) -> dict[str, Any]:
    details = found["prompt_tokens_details"]
    # The Agents SDK takes numbers alone there, and ends a stream with an error for anything else.
    counts = {name: value for name, value in details.items() if isinstance(value, int) and not isinstance(value, bool)}
    return {
        "input_tokens": found["prompt_tokens"],
        "input_tokens_details": counts,
        "output_tokens": found["completion_tokens"],
        "output_tokens_details": {
            "reasoning_tokens": found.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
        },
        "total_tokens": found["total_tokens"],
        "prompt_tokens_details": details,
    }
