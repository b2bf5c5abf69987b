"""`Histories`: the messages of chats that later requests go on from, which then send edits and new messages alone."""

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvboost_hf.server.fair_share import FairCache
from kvboost_hf.server.http.errors import ApiError, refused
from kvboost_hf.server.http.metrics import note_changed
from kvboost_hf.server.requests.chat import ChatRequest
from kvboost_hf.server.requests.edits import edited_messages
from kvboost_hf.server.requests.messages import Message

_MAX_BYTES = 64 * 2**20  # of all chats, those with messages in common counted in full
_MESSAGE_BYTES = 1024  # of a message besides its text
_KEPT_S = 3600.0


@dataclass(frozen=True, slots=True)
class _Kept:
    client: bytes
    key: tuple[bytes, str, str]  # salt, session, name
    messages: Sequence[Message]
    num_bytes: int
    until: float


class Histories:
    """Chats by their names, for an hour after their last use, in this process's memory alone.

    A name stands for the same messages for ever: a request that is sent again gives the same prompt again, and two
    may go on from one chat. For the event loop's thread alone.

    The chats of all clients take `max_bytes` at most: the client that has most loses what it used least recently.
    """

    def __init__(self, max_bytes: int = _MAX_BYTES, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes, self._clock = max_bytes, clock
        self._chats: FairCache[bytes, _Kept] = FairCache(max_bytes, size=lambda key, kept: kept.num_bytes)

    def whole(self, body: ChatRequest, client: bytes, salt: bytes) -> ChatRequest:
        """A request with all messages of its chat: those that are kept, edited, and then its own."""
        kept: Sequence[Message] = ()
        if isinstance(body.history, str):
            key = (salt, body.prompt_cache_key or "", body.history)
            self._forget()
            found = self._chats.get(client, key)
            if found is None:
                raise ApiError(
                    404,
                    f"No messages are kept as {body.history!a} for this prompt_cache_key, API key and cache_salt. "
                    "They are kept for an hour after their last use, while there is room, until the session is "
                    "deleted or the server's process ends. Send all messages, and 'history': true.",
                    param="history",
                    code="history_not_found",
                )
            kept = found.messages
            self._put(client, key, kept, found.num_bytes)
        try:
            messages = edited_messages([*kept, *body.messages], body.edits or ())
            whole = body.with_messages(messages)
        except ValueError as error:
            raise refused("edits", str(error)) from error
        if body.edits:
            note_changed("edits-applied")
        return whole

    def keep(self, body: ChatRequest, client: bytes, salt: bytes) -> str | None:
        """Keep the messages of a request; returns their name, or None if they alone are larger than all may be."""
        num_bytes = sum(len(message.model_dump_json()) + _MESSAGE_BYTES for message in body.messages)
        if num_bytes > self._max_bytes:
            return None
        self._forget()
        name = uuid.uuid4().hex
        self._put(client, (salt, body.prompt_cache_key or "", name), body.messages, num_bytes)
        return name

    def drop(self, client: bytes, session: str) -> None:
        """Forget what is kept of a session."""
        for kept in [kept for kept in self._chats.of(client) if kept.key[1] == session]:
            self._chats.pop(client, kept.key)

    def _put(self, client: bytes, key: tuple[bytes, str, str], messages: Sequence[Message], num_bytes: int) -> None:
        self._chats.put(client, key, _Kept(client, key, messages, num_bytes, self._clock() + _KEPT_S))

    def _forget(self) -> None:
        """Forget what nobody has used for long."""
        now = self._clock()
        for kept in [kept for kept in self._chats if kept.until <= now]:
            self._chats.pop(kept.client, kept.key)
