"""What all routes share: the model's engine, its tokenizer, and how prompts become jobs."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from starlette.requests import Request

from kvboost_hf.server.encoding import Encoder
from kvboost_hf.server.errors import ApiError, refused
from kvboost_hf.server.grammars import Grammars
from kvboost_hf.server.jobs import Constraint, Engine, Job, QueueFullError, SamplingOptions, TooLongError
from kvboost_hf.server.json_text import LargeJsonError, require_few_parts
from kvboost_hf.server.keys import prompt_salt
from kvboost_hf.server.metrics import Meter
from kvboost_hf.server.request_jobs import RequestJobs, unless_gone
from kvboost_hf.server.schema import Message, Sampled, Tool
from kvboost_hf.server.settings import ServerSettings
from kvboost_hf.server.turns import Turns, in_thread

T = TypeVar("T")

MAX_LOGPROBS = 500_000  # of all tokens of a request


@dataclass(frozen=True, slots=True)
class RouteContext:
    """One model, and what it takes to serve it.

    Args:
        engine: Runs jobs.
        tokenizer: Of the model.
        settings: Of the server.
        ends: Tokens that end an answer.
        meter: Counts.
        grammars: Compiles what answers must follow.
        reading: Whose request is read next.
        compiling: Whose grammar is compiled next.
        encoder: Makes tokens of texts and chats.
        created: When the server started, in seconds since 1970.
    """

    engine: Engine
    tokenizer: Any
    settings: ServerSettings
    ends: frozenset[int]
    meter: Meter
    grammars: Grammars
    reading: Turns
    compiling: Turns
    encoder: Encoder
    created: int
    _token_texts: dict[int, str] = field(default_factory=dict)

    def require_model(self, name: str) -> None:
        """Raises an `ApiError` if another model is asked for."""
        if name != self.settings.model_name:
            raise ApiError(
                404,
                f"There is no model {name!a}. This server has {self.settings.model_name!r}.",
                param="model",
                code="model_not_found",
            )

    async def encode(self, text: str, request: Request, *, new: int = 1, whole: bool = False) -> list[int]:
        """Tokens of a text that a request has; see `Encoder.text`."""
        with self._refusals():
            work = self.encoder.text(text, client(request), new=new, whole=whole)
            return await unless_gone(request, None, work)

    async def tokens(
        self, text: str | list[int], request: Request, param: str, *, new: int = 1, whole: bool = False
    ) -> list[int]:
        """Tokens of a text, or those that a request has in its place, in the field `param`; see `Encoder.text`."""
        if isinstance(text, str):
            return await self.encode(text, request, new=new, whole=whole)
        with self._refusals():
            ids = await self.encoder.tokens(text, new=new, whole=whole)
        wrong = next(
            (token for token in (min(ids, default=0), max(ids, default=0)) if not self._is_token(token)), None
        )
        if wrong is not None:
            raise refused(param, f"Tokens must be from 0 to {self.engine.vocab_size - 1}, got {wrong}.")
        return ids

    async def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        request: Request,
        *,
        new: int = 1,
        answer: bool = True,
    ) -> list[int]:
        """Tokens of a chat, up to where the answer starts, or without that start; see `Encoder.chat`."""
        told, shown = await self.read(request, lambda: _as_templates_have_them(messages, tools))
        with self._refusals():
            work = self.encoder.chat(told, shown, client(request), new=new, answer=answer)
            return await unless_gone(request, None, work)

    async def read(self, request: Request, work: Callable[[], T]) -> T:
        """What a thread makes of a request when it is the client's turn, unless the client goes away."""
        return await self._in_turn(self.reading, request, work)

    async def compile(self, request: Request, work: Callable[[], Sequence[Constraint]]) -> Sequence[Constraint]:
        """Constraints, which a thread makes when it is the client's turn, unless the client goes away."""
        return await self._in_turn(self.compiling, request, work)

    async def _in_turn(self, turns: Turns, request: Request, work: Callable[[], T]) -> T:
        async def done() -> T:
            async with turns.turn(client(request)):
                return await in_thread(work)

        with self._refusals():
            return await unless_gone(request, None, done())

    def token_text(self, token: int) -> str:
        """What a token stands for by itself."""
        found = self._token_texts.get(token)
        if found is None:
            found = self._token_texts[token] = str(self.tokenizer.decode([token]))
        return found

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Counts them."""
        try:
            yield
        except (TooLongError, QueueFullError) as error:
            self.meter.refused(error)
            raise

    def _is_token(self, token: int) -> bool:
        return 0 <= token < self.engine.vocab_size

    def options(
        self, request: Sampled, *, max_tokens: int, logprobs: int | None, choice: int, constraint: Constraint | None
    ) -> SamplingOptions:
        """How one of a request's choices is sampled."""
        bias = request.logit_bias or {}
        if any(token >= self.engine.vocab_size for token in bias):
            raise refused("logit_bias", f"Tokens must be below {self.engine.vocab_size}, got {max(bias)}.")
        return SamplingOptions(
            max_tokens=max_tokens,
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=request.top_k or 0,
            min_p=request.min_p or 0.0,
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            repetition_penalty=request.repetition_penalty or 1.0,
            logit_bias=bias,
            seed=None if request.seed is None else (request.seed + choice) % 2**63,
            logprobs=logprobs,
            constraint=constraint,
        )

    def room(self, ids: Sequence[int]) -> int:
        """How many tokens an answer has that was given no length."""
        most = self.settings.max_model_len
        default = self.settings.default_max_tokens
        return default if most is None else max(1, min(default, most - len(ids)))

    def salt(self, request: Request, cache_key: str | None) -> bytes:
        """Separates K/V of those with other API keys, or who gave another `prompt_cache_key`."""
        return prompt_salt(self.settings.salt, request.scope.get("api_key"), cache_key)

    def job(
        self,
        ids: Sequence[int],
        options: SamplingOptions,
        *,
        stop: tuple[str, ...] = (),
        salt: bytes,
        skip_special_tokens: bool = True,
    ) -> Job:
        """A text to continue.

        Raises:
            ApiError: it has no tokens.
        """
        if not ids:
            raise refused("prompt", "A prompt must have a token at least, got an empty text.")
        return Job(
            ids=ids,
            options=options,
            stop=stop,
            ends=self.ends,
            salt=salt,
            timeout_s=self.settings.timeout_s,
            skip_special_tokens=skip_special_tokens,
        )

    def require_choices(self, choices: int) -> int:
        """As many answers as one request may have, or an `ApiError`."""
        most = self.settings.max_choices
        if choices > most:
            raise refused("n", f"One request may have {most} answers, got {choices}. Send several requests.")
        return choices

    def require_few_logprobs(self, tokens: int, logprobs: int | None) -> None:
        """Raises an `ApiError` if the answers of a request may have more log probabilities than one response can."""
        found = 0 if logprobs is None else tokens * (1 + logprobs)
        if found > MAX_LOGPROBS:
            raise refused(
                "logprobs",
                f"One request may ask for {MAX_LOGPROBS} log probabilities, got up to {found}: those of {tokens} "
                f"tokens with {logprobs} others each. Ask for fewer tokens, answers or others.",
            )

    def start(self, jobs: Sequence[Job], request: Request) -> RequestJobs:
        """Submit the jobs of a request together."""
        figures = request.scope.setdefault("figures", Counter())
        jobs = [replace(job, client=client(request)) for job in jobs]
        try:
            return RequestJobs(self.engine, jobs, self.meter, figures)
        except TooLongError as error:
            if not self.settings.auto_truncate or error.max_prompt_tokens < 1:
                raise
            shorter = [replace(job, ids=job.ids[-error.max_prompt_tokens :]) for job in jobs]
            return RequestJobs(self.engine, shorter, self.meter, figures)


def client(request: Request) -> bytes:
    """Who asks: what is shared out among those that have API keys is shared out among these."""
    return str(request.scope.get("api_key", "")).encode()


def _as_templates_have_them(
    messages: Sequence[Message], tools: Sequence[Tool]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    try:
        calls = [call for message in messages for call in message.tool_calls or ()]
        require_few_parts([call.function.arguments.encode() for call in calls])
        return [_as_template_has_it(message) for message in messages], [tool.body for tool in tools]
    except LargeJsonError as error:
        raise refused("messages", f"Arguments of calls: {error}") from error


def _as_template_has_it(message: Message) -> dict[str, Any]:
    """Contents as one text, and arguments of calls as the objects that chat templates expect."""
    role = "system" if message.role == "developer" else message.role
    told: dict[str, Any] = {"role": role, "content": message.text}
    if message.tool_calls:
        told["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.parsed},
            }
            for call in message.tool_calls
        ]
    told |= {name: value for name in ("name", "tool_call_id") if (value := getattr(message, name)) is not None}
    return told
