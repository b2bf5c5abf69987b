"""`Edit`: a change of a chat's messages that a request asks for, and `edited_messages`, which makes all of them."""

from collections.abc import Sequence
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field, model_validator

from kvboost_hf.cache.planning.edits import edited
from kvboost_hf.server.requests.fields import Body, Many
from kvboost_hf.server.requests.messages import Message

MAX_EDITS = 1000
_Number = Annotated[int, Field(strict=True, ge=0)]
_CallId = Annotated[str, Field(min_length=1, max_length=1024)]
_Span = _Number | _CallId | tuple[_Number, _Number]


class Edit(Body):
    """A change of a chat's messages: one of `drop`, `replace` and `move`. Each names a message by its number, from 0
    on, the result of a call by its `tool_call_id`, or messages by `[start, stop]`, without the last one."""

    place: ClassVar = "edits"
    drop: _Span | None = None
    """Leave these messages out."""
    replace: _Span | None = None
    """Put `with` in the place of these messages; `[at, at]` inserts it."""
    with_: str | Many[Message] | None = Field(default=None, alias="with")
    """Messages, or a text that takes the place of the content of one message."""
    move: _Span | None = None
    """Put these messages in front of message `before`."""
    before: _Number | _CallId | None = None
    """As many as there are messages is the end of the chat."""

    @model_validator(mode="after")
    def _one_change(self) -> "Edit":
        given = [name for name in ("drop", "replace", "move") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"an edit must have one of drop, replace and move, got {' and '.join(given) or 'none'}")
        for name, needs, value in (("replace", "with", self.with_), ("move", "before", self.before)):
            if (value is not None) != (given == [name]):
                raise ValueError(f"{needs} goes with {name}, and {name} needs it; got {given[0]}")
        return self


def edited_messages(messages: Sequence[Message], edits: Sequence[Edit]) -> list[Message]:
    """A chat after an edit. All numbers are those of the messages before it.

    Raises `ValueError` for messages that there are not, spans that overlap, and an edit that leaves no message.

    Example:
        >>> chat = [Message(role="user", content=text) for text in "abc"]
        >>> edits = [Edit(drop=0), Edit(move=2, before=1), Edit.model_validate({"replace": 1, "with": "B"})]
        >>> [message.text for message in edited_messages(chat, edits)]
        ['c', 'B']
    """
    drop, replace, move = list[tuple[int, int]](), list[tuple[int, int, list[int]]](), list[tuple[int, int, int]]()
    known = list(messages)  # and behind these, the new ones
    for number, edit in enumerate(edits):
        place = f"edits.{number}"
        if edit.drop is not None:
            drop.append(_span(messages, edit.drop, f"{place}.drop"))
        elif edit.replace is not None:
            start, stop = _span(messages, edit.replace, f"{place}.replace", may_be_empty=True)
            new = _put(messages[start:stop], edit.with_, f"{place}.with")
            replace.append((start, stop, list(range(len(known), len(known) + len(new)))))
            known += new
        elif edit.move is not None and edit.before is not None:
            start, stop = _span(messages, edit.move, f"{place}.move")
            move.append((start, stop, _at(messages, edit.before, f"{place}.before", last=len(messages))))
    order = edited(np.arange(len(messages))[None], drop, replace, move, unit="message").ids[0]
    if not len(order):
        raise ValueError("edits must leave a message at least, got edits that drop all of them.")
    return [known[at] for at in order]


def _put(old: Sequence[Message], given: str | list[Message] | None, place: str) -> list[Message]:
    if not isinstance(given, str):
        return given or []
    if len(old) != 1:
        raise ValueError(f"{place} may be a text for one message, got a text for {len(old)}. Pass messages.")
    return [old[0].model_copy(update={"content": given})]


def _span(
    messages: Sequence[Message], given: int | str | tuple[int, int], place: str, *, may_be_empty: bool = False
) -> tuple[int, int]:
    if not isinstance(given, tuple):
        at = _at(messages, given, place, last=len(messages) - 1)
        return at, at + 1
    start, stop = given
    if not start <= stop <= len(messages) or (start == stop and not may_be_empty):
        least = "start <= stop" if may_be_empty else "start < stop"
        raise ValueError(
            f"{place} must be [start, stop] with {least} and stop <= {len(messages)}, the messages of the chat before "
            f"the edit, got [{start}, {stop}]."
        )
    return start, stop


def _at(messages: Sequence[Message], given: int | str, place: str, *, last: int) -> int:
    if isinstance(given, int):
        if given > last:
            raise ValueError(
                f"{place} must be a number from 0 to {last}, got {given}: the chat has {len(messages)} messages "
                "before the edit, those that are kept first."
            )
        return given
    found = [at for at, message in enumerate(messages) if message.tool_call_id == given]
    if len(found) != 1:
        raise ValueError(
            f"{place} must be the tool_call_id of one message, got {given[:64]!a}, which {len(found)} have. Give the "
            "message's number."
        )
    return found[0]
