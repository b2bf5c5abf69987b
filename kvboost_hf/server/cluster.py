"""`front_app`: the app in front of several replicas of the server, which takes requests as one server does.

client ──▶ connections ──▶ keys, hosts, sizes, deadlines ──▶ `Forwarding` ──▶ one replica, or all of them
                                          replicas ──▶ news of what they hold ──▶ `PrefixRouter`, which ranks them

It has the limits of a server of its own: keys are checked before bodies are read, bodies have a deadline and a share
of memory, and what takes time runs in threads, in which clients take turns. What concerns all replicas is asked of
all: sessions, figures and statistics. `ClusterArgs` is what a cluster serves, and how, from a file of YAML.
"""

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import MISSING, Field, dataclass, fields
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from fastapi import FastAPI
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send
from transformers import PreTrainedModel

from kvboost_hf.assets import load_embedded
from kvboost_hf.cache.tiers.record import read_tier_key
from kvboost_hf.engine.load import load
from kvboost_hf.engine.settings import EngineSettings
from kvboost_hf.server.app import add_middleware
from kvboost_hf.server.fair_share import Turns
from kvboost_hf.server.http.errors import ApiError, add_handlers
from kvboost_hf.server.routing import News, Place, PrefixRouter, prompt_keys
from kvboost_hf.server.settings import ServerSettings, TlsFiles, read_keys

_log = logging.getLogger("kvboost_hf.server")

_SESSIONS = "/v1/kv/sessions"
_OF_ALL = (_SESSIONS, "/v1/stats", "/metrics")
_NEWS_EVERY_S = 0.25  # of what replicas hold
_TRIES = 2  # of a request whose replica ends before it has answered anything
_SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "client", "server")
_FILES = ("api_keys_file", "operator_keys_file", "tier_key_file")
_OF_BUILD = ("replicas", "fronts", "load_factor", "actor_options", "check_resources")
_KEYS = ("model", "model_args", "server", "kept", *_FILES, *_OF_BUILD)
_SECRET = {"api_keys": "api_keys_file", "operator_keys": "operator_keys_file", "tier_key": "tier_key_file"}
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (.+)")  # of Prometheus's text format


class ReplicaLostError(RuntimeError):
    """A replica has ended, or does not answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The whole answer of one replica."""

    replica: str
    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes


class Replicas(Protocol):
    """Servers that answer requests as ASGI apps do."""

    def ask(self, keys: Sequence[bytes], scope: dict[str, Any], body: bytes) -> AsyncIterator[Message]:
        """The messages of the replica that the keys of a prompt are for; closing it cancels the request.

        Raises:
            QueueFullError: No replica takes more requests.
            ReplicaLostError: The replica has ended.
        """
        ...

    async def ask_all(self, scope: dict[str, Any], body: bytes) -> list[Answer]:
        """The answers of all replicas.

        Raises:
            ReplicaLostError: One of them does not answer.
        """
        ...

    async def news(self, places: Mapping[str, Place]) -> list[News]:
        """What the replicas hold anew since these places; those that do not answer soon are left out."""
        ...


def front_app(replicas: Replicas, settings: ServerSettings, router: PrefixRouter) -> FastAPI:
    """Make the app in front of replicas, which have the same settings.

    `router` is the one that they choose by; it learns what they hold as long as the app runs.
    """
    forwarding = Forwarding(replicas, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        following = asyncio.create_task(_follow(replicas, router))
        yield
        following.cancel()

    app = FastAPI(title="kvboost_hf", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.router.default = app.state.forwarding = forwarding
    add_handlers(app, [])
    add_middleware(app, settings, _OF_ALL, None)
    return app


async def _follow(replicas: Replicas, router: PrefixRouter) -> None:
    """Have a router learn what replicas hold, for ever."""
    fails = False
    while True:
        try:
            router.learn(await replicas.news(router.places))
            fails = False
        except Exception:  # requests go on by what is known
            if not fails:
                _log.exception("The front does not hear what replicas hold; it tries on.")
            fails = True
        await asyncio.sleep(_NEWS_EVERY_S)


class Forwarding:
    """Hands requests to replicas, and their answers back."""

    def __init__(self, replicas: Replicas, settings: ServerSettings) -> None:
        self._replicas, self._turns = replicas, Turns(2, settings.max_requests)
        self._under_way: set[asyncio.Task[Any]] = set()
        self._draining = self._ended = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._under_way.add(task)
        try:
            await self._answer(scope, receive, send)
        finally:
            self._under_way.discard(task)

    def drain(self, timeout_s: float) -> bool:
        """Take no more requests, and wait for those under way, as an engine does; what is left then is cancelled."""
        self._draining, end = True, time.monotonic() + timeout_s
        while self._under_way and time.monotonic() < end:
            time.sleep(0.02)
        left = list(self._under_way)
        for task in left:
            task.get_loop().call_soon_threadsafe(task.cancel)
        return not left

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/health" and scope["method"] == "GET":
            return await JSONResponse({"status": "ok"})(scope, receive, send)
        if self._draining:
            raise ApiError(503, "The cluster is about to end.", code="draining", headers={"Retry-After": "5"})
        body = await _read(receive)
        headers = [pair for pair in scope["headers"] if pair[0] != b"x-request-id"]
        headers.append((b"x-request-id", scope["request_id"].encode()))
        asked = {**{name: scope[name] for name in _SCOPE}, "headers": headers}
        if scope["path"] in _OF_ALL or scope["path"].startswith(f"{_SESSIONS}/"):
            return await (await self._of_all(asked, body))(scope, receive, send)
        client = scope.get("api_key") or dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
        keys = await self._turns.run(scope.get("api_key", "").encode(), lambda: prompt_keys(body, client))
        answering = asyncio.ensure_future(self._forward(keys, asked, body, send))
        leaving = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            for task in (answering, leaving):
                task.cancel()
            await asyncio.wait({answering, leaving})
        return None

    async def _forward(self, keys: Sequence[bytes], scope: dict[str, Any], body: bytes, send: Send) -> None:
        started = False
        for attempt in range(_TRIES):
            messages = self._replicas.ask(keys, scope, body)
            try:
                async with aclosing(messages):  # type: ignore[type-var]
                    async for message in messages:
                        started = True
                        await send(message)
                return
            except ReplicaLostError as error:
                if started:  # a stream that breaks off is known to be no whole one
                    raise
                if attempt + 1 == _TRIES:
                    raise _lost(error) from error

    async def _of_all(self, scope: dict[str, Any], body: bytes) -> Response:
        try:
            answers = await self._replicas.ask_all(scope, body)
        except ReplicaLostError as error:
            raise _lost(error) from error
        if not answers:
            raise _lost(ReplicaLostError("There is none."))
        return merged(scope["path"], answers)


async def _read(receive: Receive) -> bytes:
    pieces: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b""  # its client is gone
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(pieces)


async def _gone(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _lost(error: Exception) -> ApiError:
    told = f"A replica of the server has ended, or does not answer. {error}"[:500]
    return ApiError(503, f"{told} Send the request again.", code="replica_lost", headers={"Retry-After": "1"})


# Answers of all replicas as one


def merged(path: str, answers: Sequence[Answer]) -> Response:
    """One answer in place of those of all replicas."""
    failed = [each for each in answers if each.status >= 400]
    # Who does not know a session has nothing to say of it; what one could not do is not done.
    telling = [each for each in failed if each.status != 404] or (failed if len(failed) == len(answers) else [])
    if telling:
        return _as_told(max(telling, key=lambda each: each.status))
    found = [each for each in answers if each.status < 400]
    if path == "/metrics":
        pages = {each.replica: each.body.decode() for each in found}
        kind = dict(found[0].headers).get(b"content-type", b"text/plain").decode("latin-1")
        return Response(merged_figures(pages), headers={"content-type": kind})
    bodies = {each.replica: json.loads(each.body) for each in found}
    if path == "/v1/stats":
        return JSONResponse({"replicas": bodies})
    told = list(bodies.values())
    if path == _SESSIONS:
        sessions: dict[tuple[str, Any], list[dict[str, Any]]] = {}
        for each in (session for body in told for session in body["data"]):
            sessions.setdefault((each["id"], each.get("key")), []).append(each)
        data = sorted(map(merged_session, sessions.values()), key=lambda session: -session["last_used"])
        return JSONResponse({"object": "list", "data": data})
    if "deleted" in told[0]:
        return JSONResponse({**told[0], "freed_bytes": _sums(body["freed_bytes"] for body in told)})
    return JSONResponse(merged_session(told))


def _as_told(answer: Answer) -> Response:
    response = Response(answer.body, answer.status)
    response.raw_headers = list(answer.headers)
    return response


def _sums(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for each in counts:
        for name, count in each.items():
            found[name] = found.get(name, 0) + count
    return found


def merged_session(told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of one session, of which each replica has told its own."""
    newest = max(told, key=lambda each: (each["requests"] > 0, each["last_used"]))
    sums = {name: sum(each[name] for each in told) for name in ("requests", "prompt_tokens", "cached_tokens", "bytes")}
    share = sums["cached_tokens"] / sums["prompt_tokens"] if sums["prompt_tokens"] else 0.0
    pinned = [each for each in told if each["pinned"]]
    ends = [each["pinned_until"] for each in pinned]
    return {
        **newest,
        **sums,
        "cached_share": round(share, 4),
        "first_seen": min(each["first_seen"] for each in told),
        "last_used": max(each["last_used"] for each in told),
        "pinned": bool(pinned),
        "pinned_until": max(ends) if ends and None not in ends else None,
    }


def merged_figures(pages: Mapping[str, str]) -> str:
    """The figures of all replicas in Prometheus's text format, each with the label `replica`."""
    families: dict[str, list[str]] = {}  # by the comment that begins each, all lines
    for replica, page in pages.items():
        family = families.setdefault("", [])
        label = f"replica={json.dumps(replica)}"
        for line in page.splitlines():
            if line.startswith("# HELP "):
                family = families.setdefault(line, [])
            elif line.startswith("#"):
                if line not in family:
                    family.append(line)
            elif (found := _SAMPLE.fullmatch(line)) is not None:
                name, labels, value = found.groups()
                family.append(f"{name}{{{label}{',' + labels if labels else ''}}} {value}")
    lines = [line for comment, family in families.items() for line in ([comment] if comment else []) + family]
    return "\n".join(lines) + "\n"


def lacking(wanted: Mapping[str, float], there: Mapping[str, float]) -> dict[str, float]:
    """What a cluster lacks of some resources, by name."""
    short = {name: amount - there.get(name, 0) for name, amount in wanted.items()}
    return {name: amount for name, amount in short.items() if amount > 0}


def needed(options: Mapping[str, Any] | None, count: int, default_cpus: float) -> dict[str, float]:
    """The resources that so many actors with these options need, by the names that Ray gives them."""
    options = options or {}
    each = {
        "CPU": options.get("num_cpus", default_cpus),
        "GPU": options.get("num_gpus", 0),
        "memory": options.get("memory", 0),
    }
    each |= options.get("resources") or {}
    return {name: float(amount or 0) * count for name, amount in each.items() if amount}


def names_of(resources: Mapping[str, float]) -> str:
    """Resources for people, such as `3 CPU, 1 GPU`."""
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(resources.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterArgs:
    """The arguments of `build`.

    Args:
        load: Makes the model and its tokenizer.
        settings: The settings of each replica's server.
        kept: What each replica keeps of prompts.
        more: The other arguments, by name.
    """

    load: Callable[[], tuple[PreTrainedModel, Any]]
    settings: ServerSettings
    kept: EngineSettings
    more: Mapping[str, Any]

    @classmethod
    def of(cls, args: Mapping[str, Any]) -> "ClusterArgs":
        """The arguments that a mapping of texts, numbers and lists has.

        Args:
            args: `model`: a name at the hub, a folder, or `embedded` for the model of the package. `model_args`:
                arguments of `from_pretrained()`; `dtype` is `auto` where it is left out. `server`: fields of
                `ServerSettings`; `model_name` is that of the model where it is left out. `kept`: fields of
                `EngineSettings`. `api_keys_file`, `operator_keys_file`, `tier_key_file`: paths of files with secrets,
                which are nowhere else. `replicas`, `fronts`, `load_factor`, `actor_options`, `check_resources`: as
                `build` takes them.

        Raises:
            ValueError: for a name that is none, a secret, values of a wrong type or out of range, or a file that
                cannot be read.
        """
        _require_known(args, _KEYS, "args")
        name = args.get("model")
        if not isinstance(name, str) or not name:
            raise ValueError(f"`args` must have a `model`, the name or the folder of one, got {name!r}.")
        server, kept = dict(_section(args, "server")), dict(_section(args, "kept"))
        server.setdefault("model_name", Path(name).name if Path(name).is_dir() else name)
        if isinstance(tls := server.get("tls"), Mapping):
            paths: dict[str, Any] = {key: Path(path) if key != "password" else path for key, path in tls.items()}
            server["tls"] = _made(TlsFiles, paths, "server.tls")
        for names, reader, into in (
            (("api_keys", "operator_keys"), read_keys, server),
            (("tier_key",), read_tier_key, kept),
        ):
            for secret in names:
                if (path := args.get(_SECRET[secret])) is not None:
                    into[secret] = reader(Path(path))
        options = {"dtype": "auto", **_section(args, "model_args")}
        return cls(
            load=load_embedded if name == "embedded" else partial(load, name, None, None, options),
            settings=_made(ServerSettings, server, "server"),
            kept=_made(EngineSettings, kept, "kept"),
            more={key: args[key] for key in _OF_BUILD if key in args},
        )


def _section(args: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A mapping in the arguments, which has no secrets."""
    found = args.get(name) or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"`{name}` must be a mapping, got {found!r}.")
    for key in _SECRET.keys() & found.keys():
        raise ValueError(
            f"`{name}` must not have `{key}`: whoever reads the file would know it. Pass the path of a file as "
            f"`{_SECRET[key]}`."
        )
    return found


def _made(kind: Callable[..., Any], values: Mapping[str, Any], section: str) -> Any:
    """A dataclass of settings; lists become tuples where it has them."""
    known: dict[str, Field[Any]] = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    _require_known(values, known, section)
    checked: dict[str, Any] = {}
    for name, value in values.items():
        default = known[name].default
        if isinstance(value, list):
            value = tuple(value)
        numbers = int | float if isinstance(default, float) else int
        wrong = {
            bool: not isinstance(value, bool),
            str: not isinstance(value, str),
            tuple: not isinstance(value, tuple),
            int: isinstance(value, bool) or not isinstance(value, numbers),
            float: isinstance(value, bool) or not isinstance(value, numbers),
        }
        if default is not MISSING and value is not None and wrong.get(type(default), False):
            what = {bool: "true or false", str: "a text", tuple: "a list", int: "a whole number"}
            raise ValueError(f"`{section}.{name}` must be {what.get(type(default), 'a number')}, got {value!r}.")
        checked[name] = value
    try:
        return kind(**checked)
    except TypeError as error:  # such as a text in place of a number
        raise ValueError(f"`{section}` has a value of a wrong type: {error}.") from error


def _require_known(values: Mapping[str, Any], known: Any, where: str) -> None:
    for name in values:
        if name not in known:
            close = get_close_matches(str(name), list(known), n=1)
            remedy = f"Did you mean `{close[0]}`?" if close else f"There are {', '.join(sorted(known))}."
            raise ValueError(f"`{where}` must have no `{name}`: there is no such setting. {remedy}")
