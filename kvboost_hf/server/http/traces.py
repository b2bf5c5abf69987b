"""Traces of OpenTelemetry: a span for each request, and in it those of its jobs: queue, prefill and decode.

Spans have counts and times, with the names of the semantic conventions (`gen_ai.…`). They have no text.
"""

import time
from collections import Counter
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvboost_hf import __version__
from kvboost_hf.server.jobs import Finished, Job, JobEvent, Listener
from kvboost_hf.server.protocol import Engine, Ticket

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
_FAILED = ("error", "timeout", "constraint")
_NS = 10**9


def otlp_provider() -> TracerProvider:
    """A provider that sends spans by OTLP over HTTP, as the environment variables of OpenTelemetry say.

    Its `shutdown()` sends those that are left.
    """
    own = Resource({SERVICE_NAME: "kvboost_hf", "service.version": __version__})
    provider = TracerProvider(resource=own.merge(OTELResourceDetector().detect()))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


@dataclass(slots=True)
class _Traced:
    """A request under way: its span, and the sums over its jobs."""

    tracer: Tracer
    span: Span
    input: int = 0
    cached: int = 0
    output: int = 0
    reasons: list[str] = field(default_factory=list)
    prompts: list[Sequence[int]] = field(default_factory=list)  # several answers of one are counted once

    def asked(self, job: Job) -> None:
        """Note a job that was submitted."""
        options = job.options
        self.span.set_attributes(
            {
                "gen_ai.request.max_tokens": options.max_tokens,
                "gen_ai.request.temperature": options.temperature,
                "gen_ai.request.top_p": options.top_p,
            }
        )
        if options.seed is not None:
            self.span.set_attribute("gen_ai.request.seed", options.seed)

    def ended(self, job: Job, event: Finished, start: int) -> None:
        """Note the end of a job that was submitted at `start`, in nanoseconds since 1970."""
        self._phases(event, start)
        if not any(known is job.ids for known in self.prompts):
            self.prompts.append(job.ids)
            self.input += event.prompt_tokens
            self.cached += event.cached_tokens
        self.output += event.completion_tokens
        self.reasons.append(event.reason)
        self.span.set_attributes(
            {
                "gen_ai.usage.input_tokens": self.input,
                "gen_ai.usage.cache_read.input_tokens": self.cached,
                "gen_ai.usage.output_tokens": self.output,
                "gen_ai.response.finish_reasons": self.reasons,
            }
        )
        if event.reason in _FAILED:
            self.span.set_attribute("error.type", event.reason)
            self.span.set_status(Status(StatusCode.ERROR))

    def _phases(self, event: Finished, start: int) -> None:
        begun, first = min(event.queue_s, event.total_s), event.ttft_s
        prefill = {
            "gen_ai.usage.input_tokens": event.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": event.cached_tokens,
            **{f"kvboost.cached_tokens.{tier}": tokens for tier, tokens in event.tiers.items()},
        }
        decode = {"gen_ai.usage.output_tokens": event.completion_tokens, "kvboost.finish_reason": event.reason}
        phases: list[tuple[str, float, float, dict[str, Any]]] = [("queue", 0.0, begun, {})]
        if begun < event.total_s:
            phases.append(("prefill", begun, event.total_s if first is None else first, prefill))
        if first is not None:
            phases.append(("decode", first, event.total_s, decode))
        parent = trace.set_span_in_context(self.span)
        for name, begin, end, attributes in phases:
            span = self.tracer.start_span(name, parent, attributes=attributes, start_time=start + int(begin * _NS))
            span.end(start + int(end * _NS))


_under_way: ContextVar[_Traced | None] = ContextVar("kvboost_hf_traced", default=None)


class TracedEngine:
    """An engine whose jobs are noted in the span of the request that submits them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, job: Job, listener: Listener) -> Ticket:
        traced, start = _under_way.get(), time.time_ns()
        if traced is None:
            return self._engine.submit(job, listener)
        traced.asked(job)

        def listen(event: JobEvent) -> None:
            if isinstance(event, Finished):
                traced.ended(job, event, start)
            listener(event)

        return self._engine.submit(job, listen)


class TraceRequests:
    """Middleware that makes a span of each `POST` request, below that of its header `traceparent`."""

    def __init__(self, app: ASGIApp, provider: trace.TracerProvider, model: str) -> None:
        self._app, self._model = app, model
        self._tracer = provider.get_tracer("kvboost_hf.server", __version__)
        self._parents = TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        operation = _OPERATIONS.get(scope["path"])
        attributes = {
            "http.request.method": "POST",
            "url.path": scope["path"][:256],
            "gen_ai.provider.name": "kvboost_hf",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            **({"gen_ai.operation.name": operation} if operation is not None else {}),
        }
        with self._tracer.start_as_current_span(
            f"{operation} {self._model}" if operation is not None else "POST",
            self._parents.extract(Headers(scope=scope)),
            SpanKind.SERVER,
            attributes,
            record_exception=False,  # its text could have a prompt's
            set_status_on_exception=False,
        ) as span:
            # For the request's line in the log.
            scope.setdefault("figures", Counter())["trace_id"] = f"{span.get_span_context().trace_id:032x}"

            async def tell(message: Message) -> None:
                if message["type"] == "http.response.start":
                    _note_status(span, message["status"])
                await send(message)

            token = _under_way.set(_Traced(self._tracer, span))
            try:
                await self._app(scope, receive, tell)
            except Exception:  # the guard answers it
                _note_status(span, 500)
                raise
            finally:
                _under_way.reset(token)


def _note_status(span: Span, status: int) -> None:
    span.set_attribute("http.response.status_code", status)
    if status >= 400:
        span.set_attribute("error.type", str(status))
    if status >= 500:
        span.set_status(Status(StatusCode.ERROR))
