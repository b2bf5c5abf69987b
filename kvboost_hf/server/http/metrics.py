"""Figures for Prometheus, and notes of what of a request was ignored, left to the model, or changed for it.

Each app has figures of its own, so that several can live in one process. Of the notes the client is told.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from pydantic_core import PydanticCustomError

from kvboost_hf.server.jobs import Finished, FinishReason
from kvboost_hf.server.protocol import Engine

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_MOST_NOTED, _NAME, _PATH = 32, 64, 128  # names of one request, and characters of a name, and of a path
PROMPT_CUT = "prompt-cut"  # a change: the beginning of a prompt is left out
_MOST_FIELDS = 100  # ignored ones that are counted by name: clients may invent any


class Meter:
    """Counts the events of an engine's jobs."""

    def __init__(self, engine: Engine) -> None:
        self._registry = registry = CollectorRegistry()
        self._named: set[str] = set()  # ignored fields that have a figure of their own
        self._ttft = Histogram(
            "kvboost_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._queued = Histogram(
            "kvboost_queue_seconds", "From a request's arrival to its turn.", buckets=_SECONDS, registry=registry
        )
        self._between = Histogram(
            "kvboost_inter_token_seconds",
            "Between the tokens of one answer, as they reach the front.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._finished = Counter(
            "kvboost_finished", "Answers, by the reason of their end.", ["reason"], registry=registry
        )
        self._refused = Counter("kvboost_refused", "Requests that were not taken.", ["error"], registry=registry)
        self._tokens = Counter("kvboost_tokens", "Of prompts and of answers.", ["of"], registry=registry)
        self._cached = Counter(
            "kvboost_cached_tokens", "Of prompts, not computed, by where they were.", ["tier"], registry=registry
        )
        self._ignored = Counter(
            "kvboost_ignored_fields",
            "Fields of requests that were ignored; the first 100 names by name, later ones as 'other'.",
            ["field"],
            registry=registry,
        )
        self._work = Counter(
            "kvboost_prompt_work_tokens",
            "Of prompts: computed, moved from elsewhere, and computed again to repair what was moved.",
            ["kind"],
            registry=registry,
        )
        registry.register(_EngineFigures(engine))
        for reason in get_args(FinishReason):
            self._finished.labels(reason)

    def gap(self, seconds: float, tokens: int) -> None:
        """Note tokens, and the seconds between each of them and the one before."""
        for _ in range(tokens):
            self._between.observe(seconds)

    def finished(self, event: Finished) -> None:
        """Note the end of a job."""
        self._finished.labels(event.reason).inc()
        self._tokens.labels("prompt").inc(event.prompt_tokens)
        self._tokens.labels("answer").inc(event.completion_tokens)
        self._queued.observe(event.queue_s)
        if event.ttft_s is not None:
            self._ttft.observe(event.ttft_s)
        self._work.labels("computed").inc(event.computed_tokens)
        self._work.labels("moved").inc(event.moved_tokens)
        self._work.labels("repaired").inc(event.repaired_tokens)
        for tier, tokens in event.tiers.items():
            self._cached.labels(tier).inc(tokens)

    def refused(self, error: Exception) -> None:
        """Note a job that was refused."""
        self._refused.labels(type(error).__name__).inc()

    def ignored(self, fields: Iterable[str]) -> None:
        """Note fields of a request that were ignored."""
        for field in fields:
            if len(self._named) < _MOST_FIELDS:
                self._named.add(field)
            self._ignored.labels(field if field in self._named else "other").inc()

    def page(self) -> bytes:
        """All figures, in the text format of Prometheus."""
        return generate_latest(self._registry)


class _EngineFigures(Collector):
    """The numbers in `Engine.stats()`; those in dicts by their path, such as `tiers.ram.bytes`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "kvboost_engine", "What the engine tells of itself, such as queued and running.", labels=["figure"]
        )
        for path, value in _numbers(self._engine.stats()):
            family.add_metric([path], value)
        yield family


def _numbers(figures: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, float]]:
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{above}{name}.")
        elif isinstance(value, int | float):
            yield f"{above}{name}", float(value)


class RequestNotes:
    """What of one request the server does not know, leaves to the model, or changes.

    Args:
        refuse: Whether the first unknown part is an error of validation.

    Attributes:
        names: Dotted paths without indices, such as `messages.annotations`, in the order in which they were found; the
            first 32, in printable ASCII.
        left: Likewise, parts of schemas that are left to the model.
        changes: Likewise, what of the messages was changed for the model, such as `users-merged`.
    """

    def __init__(self, *, refuse: bool = False) -> None:
        self.names: list[str] = []
        self.left: list[str] = []
        self.changes: list[str] = []
        self._refuse = refuse

    def note(self, place: str, names: Sequence[str]) -> None:
        """Note fields of the object at `place`."""
        if self._refuse:
            told = {"field": names[0], "shown": ascii(names[0])}
            raise PydanticCustomError("unknown_field", "{shown} is not supported. Leave it out", told)
        for name in names[:_MOST_NOTED]:
            path = ".".join(filter(None, (place, _printable(name))))
            if path not in self.names and len(self.names) < _MOST_NOTED:
                self.names.append(path)


_current: ContextVar[RequestNotes | None] = ContextVar("notes", default=None)


@contextmanager
def noting(*, refuse: bool) -> Iterator[RequestNotes]:
    """Collect what is noted in this context, and in threads that are begun in it."""
    found = RequestNotes(refuse=refuse)
    token = _current.set(found)
    try:
        yield found
    finally:
        _current.reset(token)


def note_ignored(place: str, *names: str) -> None:
    """Note that parts of a request are ignored: fields of the object at `place`, or kinds of it."""
    noted = _current.get()
    if noted is not None:
        noted.note(place, names)


def note_left(paths: Sequence[str]) -> None:
    """Note parts of schemas that are left to the model."""
    noted = _current.get()
    if noted is not None:
        told = (_printable(path, _PATH) for path in paths[:_MOST_NOTED])
        noted.left = list(dict.fromkeys([*noted.left, *told]))[:_MOST_NOTED]


def note_changed(change: str) -> None:
    """Note what of the messages was changed for the model."""
    noted = _current.get()
    if noted is not None and change not in noted.changes and len(noted.changes) < _MOST_NOTED:
        noted.changes.append(change)


def _printable(name: str, most: int = _NAME) -> str:
    """A name that can stand in a header and in a line of a log."""
    return "".join(char if char.isascii() and (char.isalnum() or char in "_-.$") else "?" for char in name[:most])
