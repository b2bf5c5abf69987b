"""Requests with texts in place of a chat: completions, embeddings, and those to the server's own routes."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from kvboost_hf.server.chats.template import Rendering
from kvboost_hf.server.requests.chat import MAX_TOOLS, MAX_TOP_LOGPROBS, ReasoningFields, Tool
from kvboost_hf.server.requests.fields import NUMBER, Body, Many, Refusal, Sampled, SessionName, absent, only
from kvboost_hf.server.requests.messages import Message

MAX_TEXTS = 2048  # to embed, as in OpenAI's API
_Id = Annotated[int, Field(strict=True)]


def _kind_of_texts(given: Any) -> str:
    """Which kind of `TextList` this is; the first item of a list decides, so that others are errors of that kind."""
    if not isinstance(given, list):
        return "text"
    match given[:1]:
        case [list()]:
            return "token_lists"
        case [int()]:
            return "tokens"
        case _:
            return "texts"


TextList = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[Many[str], Tag("texts")]
    | Annotated[Many[_Id], Tag("tokens")]
    | Annotated[Many[Many[_Id]], Tag("token_lists")],
    Discriminator(_kind_of_texts),
]


def _as_list(texts: TextList) -> list[str | list[int]]:
    if isinstance(texts, str):
        return [texts]
    tokens = [one for one in texts if isinstance(one, int)]
    return [tokens] if tokens else [one for one in texts if not isinstance(one, int)]


class CompletionRequest(Sampled):
    """A request to `/v1/completions`."""

    prompt: TextList
    """Texts, or lists of token ids."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), NUMBER] | None = None
    max_tokens: Annotated[Annotated[int, Field(ge=0), NUMBER] | None, absent(-1)] = None
    """As many as the context has room for where it is more, left out, or -1. 0 with `echo` for the prompt alone."""
    echo: bool | None = None
    """Begin the answer with the prompt; with `logprobs`, with the log probabilities of its tokens, too: all of it is
    computed then, without reuse."""
    suffix: str | None = None
    """The text behind the answer, for models with tokens to fill in the middle; not with prompts of tokens."""
    add_special_tokens: bool | None = None
    """`false` leaves out what the tokenizer puts around a text, such as a token that begins it."""
    best_of: Annotated[int, Field(ge=1), NUMBER] | None = None
    """Compute so many answers, and return the `n` with the highest mean log probability of their tokens."""

    @model_validator(mode="after")
    def _fits_together(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens must be 1 or more without echo, got 0")
        if self.best_of is not None and self.best_of < self.answers:
            raise ValueError(f"best_of must be n, {self.answers}, or more, got {self.best_of}")
        if self.stream and self.computed > self.answers:
            raise ValueError(f"best_of must be n, {self.answers}, in a stream, got {self.best_of}; leave one out")
        if not self.prompts:
            raise ValueError("prompt must not be an empty list")
        if self.suffix and not isinstance(self.prompts[0], str):
            raise ValueError("suffix needs prompts of text, got tokens")
        return self

    @property
    def answers(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def computed(self) -> int:
        """Answers to each prompt that are computed."""
        return self.best_of or self.answers

    @property
    def prompts(self) -> list[str | list[int]]:
        """Texts or tokens to continue."""
        return _as_list(self.prompt)


class EmbeddingRequest(Body):
    """A request to `/v1/embeddings`."""

    model: str | None = None
    input: Annotated[TextList, Field(min_length=1)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[Any, Refusal("all numbers of an embedding are returned; leave dimensions out")] = None

    @property
    def texts(self) -> list[str | list[int]]:
        """Texts or tokens to embed."""
        return _as_list(self.input)


class WarmRequest(ReasoningFields):
    """A request to `/v1/warm`: texts, or a chat, that prompts will start with."""

    texts: Annotated[Many[str], Field(min_length=1)] | None = None
    """Prompts of `/v1/completions` begin with them. Chats do not: the chat template writes something before them."""
    messages: Annotated[Many[Message], Field(min_length=1)] | None = None
    """The first messages of chats, such as one of the system. What is computed is the longest beginning that all chats
    have in common which go on from there."""
    tools: Annotated[Many[Tool], Field(max_length=MAX_TOOLS), only("tools", ("function",))] | None = None
    """Tools that the chats are written with, as in requests for answers."""
    prompt_cache_key: SessionName = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """As in requests for answers."""

    @property
    def rendering(self) -> Rendering:
        """How the chat template writes such chats."""
        return Rendering(arguments=self.template_arguments)

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
    """The first messages of chats from a file: a list of messages, or the body of a request to `/v1/warm`, as JSON."""
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
    ttl_s: Annotated[float, Field(gt=0, le=30 * 86_400), NUMBER] | None = None
    priority: Annotated[int, Field(strict=True, ge=-(2**31), lt=2**31)] | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> "SessionRequest":
        if self.pinned is False and self.ttl_s is not None:
            raise ValueError("ttl_s must be left out where pinned is false")
        if self.pinned is None and self.ttl_s is None and self.priority is None:
            raise ValueError("one of pinned, ttl_s and priority must be given")
        return self
