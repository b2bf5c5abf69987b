"""The schemas of requests to the server's own routes, `/v1/warm` and `/v1/kv/sessions`."""

from typing import Annotated

from pydantic import Field, model_validator

from kvboost_hf.server.requests.fields import Body, Many
from kvboost_hf.server.requests.messages import Message
from kvboost_hf.server.requests.tools import MAX_TOOLS, Tool


class WarmRequest(Body):
    """A request to `/v1/warm`: texts, or a chat, that prompts will start with."""

    texts: Annotated[Many[str], Field(min_length=1)] | None = None
    messages: Annotated[Many[Message], Field(min_length=1)] | None = None
    tools: Annotated[Many[Tool], Field(max_length=MAX_TOOLS)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """As in requests for answers."""

    @model_validator(mode="after")
    def _one_of_them(self) -> "WarmRequest":
        if (self.texts is None) == (self.messages is None):
            raise ValueError("either texts or messages must be given")
        if self.tools and self.messages is None:
            raise ValueError("tools need messages")
        return self


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
