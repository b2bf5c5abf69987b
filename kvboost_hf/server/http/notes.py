"""Notes what of a request was ignored, left to the model, or changed for it, so that the client is told."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from pydantic_core import PydanticCustomError

_MOST_NOTED, _NAME, _PATH = 32, 64, 128  # names of one request, and characters of a name, and of a path


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
