"""Makes a history that fails as small as it can, while it fails in the same way."""

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from tests.fuzz.history import Call, History, Row, changed, default_of


def shrunk(history: History, fails: Callable[[History], bool], seconds: float) -> History:
    """The smallest history found in so many seconds for which `fails` holds, as it does for `history`."""
    end = time.monotonic() + seconds
    while True:
        smaller = next((each for each in _smaller(history) if time.monotonic() < end and fails(each)), None)
        if smaller is None:
            return history
        history = smaller


def _smaller(history: History) -> Iterator[History]:
    """Histories that differ from this one in one step towards the simplest, the largest steps first."""
    calls = history.calls
    if history.threads > 1:
        yield from (
            replace(history, threads=1, calls=calls[lane :: history.threads]) for lane in range(history.threads)
        )
    for size in (len(calls) // 2, 1):
        for start in range(0, len(calls) if size else 0, size or 1):
            yield replace(history, calls=calls[:start] + calls[start + size :])
    yield from (replace(history, **change) for change in _defaults(history, but=("calls", "policy", "threads")))
    for number, call in enumerate(calls):
        for each in _smaller_call(call):
            yield replace(history, calls=(*calls[:number], each, *calls[number + 1 :]))


def _defaults(record: Any, but: tuple[str, ...] = ()) -> Iterator[dict[str, Any]]:
    """Each changed field at its default."""
    defaults = {of.name: default_of(of) for of in fields(record)}
    for name, _ in changed(record):
        if name not in but:
            yield {name: defaults[name]}


def _smaller_call(call: Call) -> Iterator[Call]:
    yield from (replace(call, **change) for change in _defaults(call, but=("rows", "options", "new")))
    for name in call.options:
        yield replace(call, options={key: value for key, value in call.options.items() if key != name})
    for number in range(len(call.rows) if len(call.rows) > 1 else 0):
        yield replace(call, rows=call.rows[:number] + call.rows[number + 1 :])
    for fewer in _fewer(call.new, 1):
        yield replace(call, new=fewer)
    for number, row in enumerate(call.rows):
        for each in _smaller_row(row):
            yield replace(call, rows=(*call.rows[:number], each, *call.rows[number + 1 :]))


def _smaller_row(row: Row) -> Iterator[Row]:
    yield from (replace(row, tail=fewer) for fewer in _fewer(row.tail, 0))
    yield from (replace(row, head=fewer) for fewer in _fewer(row.head, 0) if fewer + row.tail)
    if row.text:
        yield replace(row, text=0)
    if row.other != 1:
        yield replace(row, other=1)


def _fewer(number: int, least: int) -> list[int]:
    return sorted({least, number // 2, number - 8, number - 1} & set(range(least, number)))
