"""`RouteContext`: the engine, tokenizer and settings that all routes share; `PostedRoute`: how bodies are read.

Large bodies are parsed and checked in a thread, and the client is told which fields were ignored.
"""

import json
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from fastapi import Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Receive, Scope

from kvboost_hf.cache.prompt.chats import Start
from kvboost_hf.server.apis.answers import RequestJobs, unless_gone
from kvboost_hf.server.apis.histories import Histories
from kvboost_hf.server.chats.encoding import Encoder, Told
from kvboost_hf.server.chats.merging import without_changing_lines
from kvboost_hf.server.fair_share import Turns
from kvboost_hf.server.grammars.compiling import Grammars
from kvboost_hf.server.http.errors import ApiError, most_telling, refused
from kvboost_hf.server.http.metrics import PROMPT_CUT, Meter, note_changed, noting
from kvboost_hf.server.jobs import (
    Constraint,
    Job,
    Keep,
    LimitedBy,
    Reuse,
    SamplingDefaults,
    SamplingOptions,
    TokenLogprob,
    prompt_salt,
)
from kvboost_hf.server.protocol import Engine, QueueFullError, TooLongError
from kvboost_hf.server.requests.chat import ChatRequest, Tool
from kvboost_hf.server.requests.fields import LargeJsonError, Sampled, read_json, require_few_parts
from kvboost_hf.server.requests.fields import TextRequest as Asked
from kvboost_hf.server.requests.messages import Message, with_names
from kvboost_hf.server.requests.texts import WarmRequest
from kvboost_hf.server.settings import ServerSettings

T = TypeVar("T")

MAX_LOGPROBS = 500_000  # of all tokens of a request
_ANSWER_PART = 8  # of the context, that a prompt which is cut leaves for an answer without a length
_PINNED_SHARE = 0.5  # of the store's budget, that all clients together may have pinned
_RETENTION_S: dict[str | None, float] = {"in_memory": 600.0, "in-memory": 600.0, "24h": 86_400.0}
_REPAIR_HEADER = "x-kvboost-repair"
_JSON = "application/json"
_KIND = 64  # characters of a content type in an error
_GZIP = b"\x1f\x8b"
_SMALL = 2**16  # bytes that are read faster than a thread could be asked to
_REUSES = ("exact", *get_args(get_args(Reuse)[1]))


class Length(NamedTuple):
    """How long an answer may get."""

    tokens: int
    limited_by: LimitedBy


@dataclass(frozen=True, slots=True)
class RouteContext:
    """The parts of a server that its routes use."""

    engine: Engine  # runs jobs
    tokenizer: Any  # the tokenizer of the model
    settings: ServerSettings  # the settings of the server
    ends: frozenset[int]  # tokens that end an answer
    sampling: SamplingDefaults  # how tokens are chosen where a request leaves it open
    meter: Meter  # counts figures for `/metrics`
    grammars: Grammars  # compiles grammars for constraints
    reading: Turns  # turns of clients to have a request read
    compiling: Turns  # turns of clients to have a grammar compiled
    encoder: Encoder  # encodes texts and chats
    created: int  # when the server started, in seconds since 1970
    histories: Histories = field(default_factory=Histories)  # keeps messages of chats for requests that ask for it
    _token_texts: dict[int, str] = field(default_factory=dict)
    _token_bytes: dict[int, list[int]] = field(default_factory=dict)
    _token_chars: dict[int, tuple[int, int]] = field(default_factory=dict)

    def require_model(self, name: str | None) -> str:
        """Return the name that an answer gives the model, or raise an `ApiError` for the name of another model."""
        own = self.settings.model_name
        # Ollama's clients add the tag.
        names = () if name is None or name == own else (name, name.removesuffix(":latest"))
        if names and not any(map(self.settings.is_name, names)):
            raise ApiError(
                404,
                f"There is no model {name!a}. This server has {own!r}.",
                param="model",
                code="model_not_found",
            )
        return name or own

    async def encode(
        self,
        text: str | list[int],
        request: Request,
        param: str = "prompt",
        *,
        new: int = 1,
        whole: bool = False,
        truncates: bool = False,
        special: bool = True,
    ) -> list[int]:
        """Encode a text of the field `param`, as `Encoder.text` does, or check the tokens in its place."""
        work = self.encoder.text(text, client(request), new=new, whole=whole, truncates=truncates, special=special)
        ids = await self._awaited(request, work)
        for token in () if isinstance(text, str) else (min(ids, default=0), max(ids, default=0)):
            if not 0 <= token < self.engine.vocab_size:
                raise refused(param, f"Tokens must be from 0 to {self.engine.vocab_size - 1}, got {token}.")
        return ids

    async def encode_chat(self, body: ChatRequest, request: Request, *, new: int = 1) -> list[int]:
        """Encode the chat of a request, as its fields say."""
        told, shown = await self.read(request, lambda: self.told(body.messages, body.offered))
        owner = (client(request), self.salt(request, body.cache_salt))
        work = self.encoder.chat(told, shown, owner, new=new, rendering=body.rendering, truncates=body.truncates)
        return body.truncated(await self._awaited(request, work))

    async def encode_start(self, body: WarmRequest, request: Request) -> Start:
        """Encode what chats begin with that go on from the messages of a request."""
        told, shown = await self.read(request, lambda: self.told(body.messages or (), body.tools or ()))
        owner = (client(request), self.salt(request, body.cache_salt))
        return await self._awaited(request, self.encoder.chat_start(told, shown, owner, rendering=body.rendering))

    def told(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[Told, Told]:
        """Messages and tools as chat templates take them."""
        try:
            calls = [call for message in messages for call in message.calls]
            require_few_parts([call.function.arguments.encode() for call in calls])
            told = with_names([message.body for message in messages])
        except LargeJsonError as error:
            raise refused("messages", f"Arguments of calls: {error}") from error
        if any(message["role"] == "system" for message in told):
            told = without_changing_lines(told, self.settings.strip_heads)
        return told, [tool.body for tool in tools]

    async def read(self, request: Request, work: Callable[[], T]) -> T:
        """Run `work` in a thread when it is the client's turn, unless the client disconnects."""
        return await self._awaited(request, self.reading.run(client(request), work))

    async def compile(self, request: Request, work: Callable[[], Sequence[Constraint]]) -> Sequence[Constraint]:
        """Make constraints in a thread when it is the client's turn, unless the client disconnects."""
        return await self._awaited(request, self.compiling.run(client(request), work))

    async def _awaited(self, request: Request, work: Coroutine[Any, Any, T]) -> T:
        """Await work for a request, unless its client disconnects; refusals are counted."""
        try:
            return await unless_gone(request, None, work)
        except (TooLongError, QueueFullError) as error:
            self.meter.refused(error)
            raise

    def token_text(self, token: int) -> str:
        """The text of a single token, with the space that it begins with behind others."""
        found = self._token_texts.get(token)
        if found is None:
            known = self.grammars.token_bytes(token)
            # `decode()` leaves out a space in front of the first token where tokens begin with one, as in Llama 2.
            text = known.decode(errors="replace") if known else str(self.tokenizer.decode([token]))
            found = self._token_texts[token] = text
        return found

    def chars_of(self, token: int, *, special: bool) -> int:
        """How many characters of a text begin in a token; `special` says whether the text has special tokens."""
        found = self._token_chars.get(token)
        if found is None:
            begun = sum(byte & 0xC0 != 0x80 for byte in self._bytes_of(token))
            hidden = self.token_text(token).strip() and not self.tokenizer.decode([token], skip_special_tokens=True)
            found = self._token_chars[token] = (0 if hidden else begun, begun)
        return found[special]

    def _bytes_of(self, token: int) -> list[int]:
        """The bytes of a single token; the caller must not change the list."""
        found = self._token_bytes.get(token)
        if found is None:
            given = self.grammars.token_bytes(token) or self.token_text(token).encode()
            found = self._token_bytes[token] = list(given)
        return found

    def logprob_body(self, found: TokenLogprob) -> dict[str, Any]:
        """A log probability, and those of other tokens at its place, as chats have them."""

        def told(token: int, logprob: float | None) -> dict[str, Any]:
            return {"token": self.token_text(token), "logprob": logprob, "bytes": self._bytes_of(token)}

        return told(found.token, found.logprob) | {"top_logprobs": [told(*one) for one in found.top]}

    def options(
        self, request: Sampled, *, length: Length, logprobs: int | None, choice: int, constraint: Constraint | None
    ) -> SamplingOptions:
        """The `SamplingOptions` of one choice of a request."""
        bias = request.logit_bias or {}
        if any(token >= self.engine.vocab_size for token in bias):
            raise refused(
                "logit_bias", f"Tokens of logit_bias must be below {self.engine.vocab_size}, got {max(bias)}."
            )
        least = request.min_tokens or 0
        if least > length.tokens and length.limited_by == "request":
            why = f"min_tokens must not be above max_tokens, {length.tokens}, got {least}. Lower it."
            raise refused("min_tokens", why)
        chosen = {name: getattr(request, name) for name in self.sampling.body}
        return SamplingOptions(
            max_tokens=length.tokens,
            min_tokens=min(least, length.tokens),
            **self.sampling.body | {name: value for name, value in chosen.items() if value is not None},
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            logit_bias=bias,
            seed=None if request.seed is None else (request.seed + choice) % 2**63,
            logprobs=logprobs,
            constraint=constraint,
        )

    @property
    def context_length(self) -> int:
        """Tokens of a prompt and its answer together, at most."""
        most = self.settings.max_model_len
        return self.engine.max_model_len if most is None else min(most, self.engine.max_model_len)

    def wanted(self, asked: int | None) -> int:
        """Tokens of an answer that a prompt which is too long has to leave room for: those that are asked for, but
        half of the context at most."""
        return 1 if asked is None else min(asked, self.context_length // 2)

    def fitted(
        self, ids: list[int], asked: int | None, *, what: Literal["messages", "prompt"], truncates: bool
    ) -> list[int]:
        """A prompt that leaves room for an answer. `truncates` leaves the beginning out of one that does not, so that
        there is room for `asked` tokens."""
        limit = self.context_length
        if len(ids) <= limit - (asked != 0):
            return ids
        most = limit - self.wanted(asked)
        if truncates or self.settings.auto_truncate:
            note_changed(PROMPT_CUT)
            return ids[-(most if asked is not None else limit - max(1, limit // _ANSWER_PART)) :]
        message = f"A prompt of {len(ids)} tokens leaves no room for an answer in the context window of {limit}."
        error = TooLongError(message, most, tokens=len(ids), limit=limit, what=what)
        self.meter.refused(error)
        raise error

    def length(self, ids: Sequence[int], asked: int | None, *, reported: int | None) -> Length:
        """How long an answer may get: as long as is asked for, but no longer than there is room for.

        No more tokens than `reported` get log probabilities, as `reportable` says.
        """
        room, cap = self.context_length - len(ids), self.settings.default_max_tokens
        if asked is not None and asked <= room:
            return Length(asked, "request")
        found = Length(room, "context")
        if asked is None and cap is not None and cap < room:
            found = Length(cap, "server")
        if reported is None or found.tokens <= reported:
            return found
        return Length(max(1, reported), "logprobs")

    def reportable(self, answers: int, logprobs: int | None) -> int | None:
        """Tokens of each answer that one response can have log probabilities of; None where none are asked for."""
        return None if logprobs is None else MAX_LOGPROBS // ((1 + logprobs) * answers)

    def salt(self, request: Request, cache_salt: str | None = None) -> bytes:
        """The salt of a request, which separates K/V by API key and `cache_salt`."""
        return prompt_salt(self.settings.salt, request.scope.get("api_key"), cache_salt=cache_salt)

    def job(
        self,
        ids: Sequence[int],
        options: SamplingOptions,
        *,
        salt: bytes,
        asked: Sampled | None = None,
        skip_special_tokens: bool = True,
        limited_by: LimitedBy = "request",
    ) -> Job:
        """Make the job of one answer; `asked` says what ends it, besides the model's tokens."""
        if not ids:
            raise refused("prompt", "A prompt must have a token at least, got an empty text.")
        job = Job(
            ids=ids,
            options=options,
            ends=self.ends,
            salt=salt,
            timeout_s=self.settings.timeout_s,
            skip_special_tokens=skip_special_tokens,
            limited_by=limited_by,
        )
        if asked is None:
            return job
        ends = frozenset(asked.stop_token_ids or ())
        if ends and max(ends) >= self.engine.vocab_size:
            raise refused("stop_token_ids", f"stop_token_ids must be below {self.engine.vocab_size}, got {max(ends)}.")
        return replace(
            job,
            stop=asked.stops,
            ends=ends if asked.ignore_eos else ends | self.ends,
            include_stop=bool(asked.include_stop_str_in_output),
            skip_special_tokens=skip_special_tokens and asked.skip_special_tokens is not False,
        )

    def require_choices(self, choices: int, field: str = "n") -> int:
        """Return the number of answers, or raise an `ApiError` if one request may not have as many."""
        most = self.settings.max_choices
        if choices > most:
            raise refused(field, f"One request may have {most} answers, got {choices}. Send several requests.")
        return choices

    def require_few_logprobs(self, tokens: int, logprobs: int | None) -> None:
        """Raise an `ApiError` if the answers may have more log probabilities than one response can hold."""
        found = 0 if logprobs is None else tokens * (1 + logprobs)
        if found > MAX_LOGPROBS:
            raise refused(
                "logprobs",
                f"One request may ask for {MAX_LOGPROBS} log probabilities, got up to {found}: those of {tokens} "
                f"tokens with {logprobs} others each. Ask for fewer tokens, answers or others.",
            )

    def keep(self, ttl_s: float | None, tokens: int | None = None) -> Keep:
        """Ask to pin the first tokens of a prompt, or all, within the share that each client has of the store."""
        return Keep(ttl_s=ttl_s, tokens=tokens, share=_PINNED_SHARE / max(1, len(self.settings.api_keys)))

    def start(self, jobs: Sequence[Job], request: Request, asked: Asked | None = None) -> RequestJobs:
        """Submit the jobs of a request together.

        The body, or the header `x-kvboost-repair`, says how moved K/V may be used, and the body what is kept.
        """
        figures = request.scope.setdefault("figures", Counter())
        fields: dict[str, Any] = {"client": client(request), "reuse": _reuse(request)}
        if all(job.ids is jobs[0].ids for job in jobs):  # else the keys are those of several prompts
            fields["text_keys"] = request.scope.get("text_keys", ())
        if asked is not None:
            fields |= {"session": asked.prompt_cache_key, "priority": asked.priority or 0}
            fields |= {"reuse": asked.repair} if asked.repair is not None else {}
            if (ttl_s := _RETENTION_S.get(asked.prompt_cache_retention)) is not None:
                jobs = [replace(job, keep=(*job.keep, self.keep(ttl_s))) for job in jobs]
        jobs = [replace(job, **fields) for job in jobs]
        if any(job.options.max_tokens for job in jobs):
            shortest = min(jobs, key=lambda job: job.options.max_tokens)
            told = f"max_tokens={shortest.options.max_tokens}, limited_by={shortest.limited_by}"
            request.scope["length"] = told
        try:
            return RequestJobs(self.engine, jobs, self.meter, figures)
        except TooLongError as error:
            truncates = self.settings.auto_truncate or (isinstance(asked, Sampled) and asked.truncates)
            if not truncates or error.max_prompt_tokens < 1:
                raise
            shorter = [replace(job, ids=job.ids[-error.max_prompt_tokens :]) for job in jobs]
            return RequestJobs(self.engine, shorter, self.meter, figures)


def client(request: Request) -> bytes:
    """The client of a request, by its API key; clients share the server's capacity."""
    return str(request.scope.get("api_key", "")).encode()


def _reuse(request: Request) -> Any:
    """The value of the header that says how moved K/V may be used; None without it."""
    found = request.headers.get(_REPAIR_HEADER)
    if found is not None and found not in _REUSES:
        raise refused(_REPAIR_HEADER, f"The header {_REPAIR_HEADER!r} must be one of {_REUSES}, got {found[:64]!a}.")
    return found


class PostedRoute(APIRoute):
    """A route with a body of JSON, of any content type, as `curl -d` sends it. The app's `state.context` is its
    `RouteContext`.

    Pages in browsers, whose requests have an origin, must send the content type of JSON: then the browser asks first
    whether the server lets pages of that origin call it.

    The names of unknown fields are in the header `x-kvboost-ignored` of the answer and in the log, and are counted.
    What of the messages was changed for the model is in the header `x-kvboost-changed`, and in the log.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_posted(request: Request) -> Response:
            context: RouteContext = request.app.state.context
            kind = request.headers.get("content-type", "")
            if not _is_json(kind):
                if "origin" in request.headers and request.method == "POST":
                    raise ApiError(
                        415,
                        f"Web pages must send JSON as such, got the content type {kind[:_KIND]!a}. Send the header "
                        f"'Content-Type: {_JSON}'.",
                        code="unsupported_media_type",
                    )
                others = [header for header in request.scope["headers"] if header[0] != b"content-type"]
                request.scope["headers"] = [*others, (b"content-type", _JSON.encode())]
                request.scope["sent_type"] = kind
            posted = _Posted(request.scope, request.receive, self)
            with noting(refuse=context.settings.strict_requests) as unknown:
                try:
                    response = await handle(posted)
                except HTTPException:
                    if posted.refusal is not None:
                        raise posted.refusal from None
                    raise
            if ignored := [*unknown.names, *unknown.left]:
                request.scope["ignored"] = ignored
                response.headers["x-kvboost-ignored"] = ", ".join(ignored)
                context.meter.ignored(unknown.names)
            if unknown.changes:
                request.scope["changed"] = unknown.changes
                response.headers["x-kvboost-changed"] = ", ".join(unknown.changes)
            return response

        return handle_posted


def _is_json(kind: str) -> bool:
    """Whether a content type is one of JSON, such as `application/json; charset=utf-8`."""
    name = kind.partition(";")[0].strip().lower()
    return name == _JSON or (name.startswith("application/") and name.endswith("+json"))


class _Posted(Request):
    """A request whose body is JSON.

    Attributes:
        refusal: The error that the body has, once it is found here.
    """

    def __init__(self, scope: Scope, receive: Receive, route: APIRoute) -> None:
        super().__init__(scope, receive)
        self._field = route.body_field
        self.refusal: RequestValidationError | None = None

    async def json(self) -> Any:
        """The body, parsed; a large one is an instance of its type, which FastAPI does not check again."""
        raw = await self.body()
        try:
            return await self._read(raw)
        except json.JSONDecodeError as error:
            raise json.JSONDecodeError(f"{error.msg}{self._hint(raw)}", "", 0) from error

    def _hint(self, raw: bytes) -> str:
        """What a body that is no JSON may be."""
        if raw.startswith(_GZIP):
            return ". It begins as gzip does: send the header 'Content-Encoding: gzip' with it"
        kind = self.scope.get("sent_type")
        if kind is None:
            return ""
        given = f"says {kind[:_KIND]!a}" if kind else "is not there"
        return f". The header Content-Type {given}: send JSON, and 'Content-Type: {_JSON}'"

    async def _read(self, raw: bytes) -> Any:
        try:
            if len(raw) <= _SMALL:
                return read_json(raw)
            context: RouteContext = self.app.state.context
            return await context.reading.run(client(self), partial(self._checked, raw))
        except LargeJsonError as error:
            raise HTTPException(400 if error.deep else 413, str(error)) from error

    def _checked(self, raw: bytes) -> Any:
        """The body as an instance of its type. The event loop would do nothing else while it is checked."""
        parsed = read_json(raw)
        if self._field is None:
            return parsed
        found, errors = self._field.validate(parsed, {}, loc=("body",))
        if errors:
            self.refusal = RequestValidationError([most_telling(errors)], body=parsed)
            raise HTTPException(422)
        return found
