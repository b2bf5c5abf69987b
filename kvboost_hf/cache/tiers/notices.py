"""Notices that all who share a tier hear: which K/V was removed, and which sessions there are.

A tier that is a `NoticeBoard` keeps notices in the order in which they came, told by places in that order and never by
clocks. Whoever has not heard for so long that some are no longer kept is told so, and must take it that anything was
removed.
"""

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable
from uuid import uuid4

_REMEMBERED = 65_536  # ids of notices


@dataclass(frozen=True, slots=True)
class Heard:
    """Notices since some place.

    Args:
        place: The place behind them, to go on from.
        notices: In their order.
        complete: Whether all are there that ever followed the place which was asked for.
    """

    place: Any
    notices: Sequence[bytes] = ()
    complete: bool = True


@runtime_checkable
class NoticeBoard(Protocol):
    """A tier that keeps notices for all who share it. As of a `Tier`, no method raises for what fails outside."""

    def announce(self, notice: bytes) -> bool:
        """Keep a notice, text without line breaks of at most 1 MiB; tells whether all will hear it."""
        ...

    def heard(self, since: Any) -> Heard | None:
        """Notices since a place that was returned before, or all that are kept for None; None if nobody answers."""
        ...


class Told:
    """Writes notices, and reads those of others: each once, on however many boards it is.

    Not safe to use from several threads at once.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[str, None] = OrderedDict()  # ids

    def write(self, notice: Mapping[str, Any]) -> bytes:
        """A notice of this process."""
        id = uuid4().hex
        self._note(id)
        return json.dumps({**notice, "id": id}).encode()

    def read(self, written: bytes) -> dict[str, Any] | None:
        """A notice of somebody else; None for one that is known, or was not written by `write`."""
        try:
            notice = json.loads(written)
        except (ValueError, RecursionError):
            return None
        id = notice.pop("id", None) if isinstance(notice, dict) else None
        if not isinstance(id, str) or id in self._known:
            return None
        self._note(id)
        return dict(notice)

    def _note(self, id: str) -> None:
        self._known[id] = None
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
