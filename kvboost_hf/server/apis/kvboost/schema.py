"""The schemas of requests to the server's own routes, `/v1/warm` and `/v1/kv/sessions`."""

import json
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from kvboost_hf.server.requests.fields import Body, Many
from kvboost_hf.server.requests.messages import Message
from kvboost_hf.server.requests.template_fields import ReasoningFields
from kvboost_hf.server.requests.tools import MAX_TOOLS, Tool


class WarmRequest(ReasoningFields):
    """A request to `/v1/warm`: texts, or a chat, that prompts will start with."""

    texts: Annotated[Many[str], Field(min_length=1)] | None = None
    """Prompts of `/v1/completions` begin with them. Chats do not: the chat template writes something before them."""
    messages: Annotated[Many[Message], Field(min_length=1)] | None = None
    """The first messages of chats, such as one of the system. What is computed is the longest beginning that all chats
    have in common which go on from there."""
    tools: Annotated[Many[Tool], Field(max_length=MAX_TOOLS)] | None = None
    """Of these chats, as in requests for answers."""
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """As in requests for answers."""

    @model_validator(mode="after")
    def _one_of_them(self) -> "WarmRequest":
        if (self.texts is None) == (self.messages is None):
            raise ValueError("either texts or messages must be given")
        if self.tools and self.messages is None:
            raise ValueError("tools need messages")
        if self.template_arguments and self.messages is None:
            raise ValueError("arguments of the chat template need messages")
        return self


def read_chat(path: Path) -> WarmRequest:
    """The first messages of chats from a file: a list of messages, or the body of a request to `/v1/warm`, as JSON.

    Raises:
        ValueError: The file cannot be read, or has something else.
    """
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
        found = WarmRequest.model_validate({"messages": given} if isinstance(given, list) else given)
        if found.messages is None:
            raise ValueError("it has no `messages`")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} must be JSON with the first messages of chats, such as "
            f'{{"messages": [{{"role": "system", "content": "…"}}], "tools": [...]}}: {error}.'
        ) from error
    return found


class SessionRequest(Body):
    """A request to change what is kept of a session."""

    pinned: Annotated[bool, Field(strict=True)] | None = None
    ttl_s: Annotated[float, Field(gt=0, le=30 * 86_400)] | None = None
    priority: Annotated[int, Field(strict=True, ge=-(2**31), lt=2**31)] | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> "SessionRequest":
        if self.pinned is False and self.ttl_s is not None:
            raise ValueError("ttl_s must be left out where pinned is false")
        if self.pinned is None and self.ttl_s is None and self.priority is None:
            raise ValueError("one of pinned, ttl_s and priority must be given")
        return self
