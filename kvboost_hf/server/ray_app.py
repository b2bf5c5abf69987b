"""Runs the server on Ray Serve: replicas with a model each, behind a router by prompt prefixes.

client ──▶ Front ──▶ PrefixRequestRouter ──▶ Replica: the app, the engine, the store
             └─ PrefixRouter ◀── news of what each holds ──┘                  └──▶ tiers that all replicas share
"""

import asyncio
import hashlib
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import ray
from ray import serve
from ray.exceptions import GetTimeoutError, RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import JSONResponse
from transformers import PreTrainedModel

from kvboost_hf import __version__
from kvboost_hf.engine.settings import EngineSettings
from kvboost_hf.server.cluster import Answer, ClusterArgs, ReplicaLostError, front_app, lacking, names_of, needed
from kvboost_hf.server.http.guard import JsonLines
from kvboost_hf.server.http.listen import FrontServer
from kvboost_hf.server.protocol import QueueFullError
from kvboost_hf.server.routing import News, Place, PrefixRouter
from kvboost_hf.server.serve import front, start_engine
from kvboost_hf.server.settings import ServerSettings

_ALL_S = 30.0  # for all replicas to answer
_NEWS_S = 2.0  # for those that tell what they hold
_STARTED_S = 60.0
_HANDED_OVER_S = 30.0  # for a replica's store to be closed
_LAST_WORDS_S = 10.0  # for a front to close its connections
_LOOKED_AT_S = 0.5  # between two looks whether a replica that is to end has anything under way


@dataclass(frozen=True, slots=True)
class _Routed:
    """The keys of a prompt, and the router of the front, which does not go with them to the replica."""

    keys: tuple[bytes, ...]
    router: PrefixRouter

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (self.keys,)


class PrefixRequestRouter(RequestRouter):
    """Sends a request to the replica that holds most of its prompt; see `PrefixRouter`.

    The first argument of a request has the keys of its prompt and the router of its front. Loads are those that Ray
    has last heard of.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if not candidate_replicas:
            return []
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # Ray would ask over and over where all are full
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loads = {name: self.replica_queue_len_cache.get(replica.replica_id) or 0 for name, replica in replicas.items()}
        routed = _routed(pending_request)
        ranked = sorted(loads, key=loads.__getitem__) if routed is None else routed.router.rank(routed.keys, loads)
        return [[replicas[name]] for name in ranked]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        if (routed := _routed(pending_request)) is not None:
            routed.router.routed(routed.keys, replica_id.unique_id)


def _routed(pending_request: PendingRequest | None) -> _Routed | None:
    """The first argument of a request. Ray copies the router's class with its globals: `isinstance` would say no."""
    return pending_request.args[0] if pending_request is not None and pending_request.args else None


class Replica:
    """A model behind the app, which is asked without a connection.

    Args:
        load: Makes the model and its tokenizer.
        settings: The settings of the server.
        kept: What is kept of prompts; its tiers are shared with other replicas.
    """

    def __init__(
        self, load: Callable[[], tuple[PreTrainedModel, Any]], settings: ServerSettings, kept: EngineSettings
    ) -> None:
        self._name = serve.get_replica_context().replica_id.unique_id
        _log_requests({"replica": self._name})
        model, tokenizer = load()
        self._engine = start_engine(model, tokenizer, settings, kept)
        self._app = front(self._engine, settings)

    async def ask(self, keys: Sequence[bytes], scope: dict[str, Any], body: bytes) -> AsyncIterator[dict[str, Any]]:
        """Answer a request with the app's messages; by `keys` the front knows what is held of its prompt."""
        asked: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        said: asyncio.Queue[MutableMapping[str, Any] | None] = asyncio.Queue()
        asked.put_nowait({"type": "http.request", "body": body, "more_body": False})
        scope = {**scope, "text_keys": keys}

        async def run() -> None:
            try:
                await self._app(scope, asked.get, said.put)
            finally:
                said.put_nowait(None)

        answering = asyncio.create_task(run())
        try:
            while (message := await said.get()) is not None:
                yield dict(message)
        finally:
            asked.put_nowait({"type": "http.disconnect"})
            await answering

    async def ask_whole(self, scope: dict[str, Any], body: bytes) -> Answer:
        """Answer a request that all replicas are asked."""
        messages = [message async for message in self.ask((), scope, body)]
        pieces = (message.get("body", b"") for message in messages[1:])
        return Answer(self._name, messages[0]["status"], list(messages[0]["headers"]), b"".join(pieces))

    async def news(self, places: Mapping[str, Place]) -> News:
        """What this replica holds of the texts of prompts, anew since its place."""
        return self._engine.holdings.since(self._name, places.get(self._name))

    def __del__(self) -> None:
        self._engine.close()
        self._engine.close_store()


class _RayReplicas:
    """`Replicas` behind a handle of their deployment, which chooses by `router`."""

    def __init__(self, handle: DeploymentHandle, router: PrefixRouter) -> None:
        self._handle, self._one = handle, handle.options(method_name="ask", stream=True)
        self._router = router

    async def ask(
        self, keys: Sequence[bytes], scope: dict[str, Any], body: bytes
    ) -> AsyncIterator[MutableMapping[str, Any]]:
        messages = self._one.remote(_Routed(tuple(keys), self._router), scope, body)
        try:
            async for message in messages:
                yield message
        except BackPressureError as error:
            raise QueueFullError("All replicas have as many requests as they may. Try again later.", 1.0) from error
        except (RayError, DeploymentUnavailableError) as error:
            raise ReplicaLostError(str(error).splitlines()[0]) from error
        finally:
            messages.cancel()

    async def ask_all(self, scope: dict[str, Any], body: bytes) -> list[Answer]:
        asked = self._handle.broadcast("ask_whole", scope, body)
        try:
            return list(await anyio.to_thread.run_sync(lambda: asked.results(timeout_s=_ALL_S)))
        except (RayError, DeploymentUnavailableError, GetTimeoutError, TimeoutError) as error:
            raise ReplicaLostError(str(error).splitlines()[0] if str(error) else type(error).__name__) from error

    async def news(self, places: Mapping[str, Place]) -> list[News]:
        try:
            asked = self._handle.broadcast("news", places)
            found = await anyio.to_thread.run_sync(lambda: asked.results(timeout_s=_NEWS_S, return_exceptions=True))
        except (DeploymentUnavailableError, TimeoutError):
            return []  # there are no replicas now
        return [each for each in found if isinstance(each, News)]


class Front:
    """Listens for requests, and hands them on with the keys of their prompts.

    Args:
        replicas: A handle of the deployment of `Replica`.
        settings: The settings of each replica. Here they decide the address, keys, names and limits.
        load_factor: The most load of a replica, as a multiple of its share.
    """

    def __init__(self, replicas: DeploymentHandle, settings: ServerSettings, load_factor: float = 1.25) -> None:
        self._settings = settings
        _log_requests({"front": serve.get_replica_context().replica_id.unique_id})
        router = PrefixRouter(load_factor)
        app = front_app(_RayReplicas(replicas, router), settings, router)
        listener = _listener(settings)
        self._server = FrontServer(app, app.state.forwarding, settings, others_listen=True)
        self._thread = threading.Thread(target=self._server.run, args=([listener],), name="front", daemon=True)
        self._thread.start()
        end = time.monotonic() + _STARTED_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > end:
                raise RuntimeError(f"The front has not begun to listen at {settings.host}:{settings.port}.")
            time.sleep(0.01)
        scheme = "http" if settings.tls is None else "https"
        self._url = f"{scheme}://{settings.host}:{listener.getsockname()[1]}"
        logging.getLogger("kvboost_hf.server").info("listening at %s", self._url)

    async def __call__(self, request: Request) -> JSONResponse:
        """Answer what comes by Ray's proxies: that this is the wrong address."""
        told = f"The server does not listen here, but at {self._url}."
        error = {"message": told, "type": "invalid_request_error", "param": None, "code": "wrong_address"}
        return JSONResponse({"error": error}, 421)

    def url(self) -> str:
        """The address that this front listens at."""
        return self._url

    def __del__(self) -> None:
        self._server.should_exit = True
        self._thread.join(self._settings.drain_s + _LAST_WORDS_S)


def _listener(settings: ServerSettings) -> socket.socket:
    """A socket that several fronts on one machine may share.

    Raises:
        ValueError: for an address that cannot be listened at.
    """
    found = socket.socket(socket.AF_INET6 if ":" in settings.host else socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "SO_REUSEPORT"):
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        found.bind((settings.host, settings.port))
    except OSError as error:
        found.close()
        raise ValueError(
            f"`host` and `port` must be an address of the front's machine that is free, got {settings.host} and "
            f"{settings.port}: {error.strerror}. Ray's own proxies take port 8000: start them elsewhere, or none with "
            "serve.start(proxy_location='Disabled')."
        ) from error
    return found


def _log_requests(names: dict[str, str]) -> None:
    """Write the log of the server as lines of JSON to standard error, which Ray keeps in the log of the replica."""

    class Lines(JsonLines):
        def format(self, record: logging.LogRecord) -> str:
            record.fields = {**names, **getattr(record, "fields", {})}
            return super().format(record)

    log, handler = logging.getLogger("kvboost_hf"), logging.StreamHandler()
    handler.setFormatter(Lines())
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)


def build(
    load: Callable[[], tuple[PreTrainedModel, Any]],
    settings: ServerSettings,
    kept: EngineSettings,
    *,
    replicas: int | AutoscalingConfig = 2,
    fronts: int = 1,
    load_factor: float = 1.25,
    actor_options: dict[str, Any] | None = None,
    check_resources: bool = True,
) -> serve.Application:
    """An application for `ray.serve.run`.

    Args:
        load: Makes a model and its tokenizer, on the machine of the replica.
        settings: The settings of each replica's server, and of the fronts, which listen at its address and port.
        kept: What each replica keeps of prompts. Tiers that they can all reach make one replica find what another has
            stored.
        replicas: How many, or Ray's `AutoscalingConfig` with the least and the most. Its `target_ongoing_requests` is
            `settings.max_batch_size` where it is left out.
        fronts: How many processes take requests. All hear the same of what replicas hold. Those on one machine share
            the port.
        load_factor: The most load of a replica, as a multiple of its share.
        actor_options: What Ray is to give each replica, such as `{"num_gpus": 1}`. Fronts need no CPU of their own.
        check_resources: Refuse more replicas than the cluster, if Ray runs already, has resources for: Ray would wait
            for more without a word. False for a cluster that grows.

    A replica that is to end, since another one takes its place or too many are idle, is asked nothing new, has
    `settings.drain_s` for what it has begun, and then hands its K/V over, as `ChunkStore.close` does. What goes on for
    longer is cut off, and then nothing is handed over.

    Raises:
        ValueError: for more replicas than the cluster has resources for.
    """
    most = replicas
    if isinstance(replicas, AutoscalingConfig):
        most = replicas.max_replicas
        if "target_ongoing_requests" not in replicas.model_fields_set:
            replicas = replicas.model_copy(update={"target_ongoing_requests": float(settings.max_batch_size)})
    if check_resources and ray.is_initialized():
        wanted, there = needed(actor_options, most, 1), ray.cluster_resources()
        if short := lacking(wanted, there):
            raise ValueError(
                f"`replicas` must fit into the cluster: {most} of them need {names_of(wanted)}, of which "
                f"{names_of(short)} are lacking. Start fewer, give each less (actor_options={{'num_cpus': 0.5}}), or "
                "pass check_resources=False for a cluster that grows."
            )
    served = serve.deployment(
        Replica,
        **(
            {"autoscaling_config": replicas} if isinstance(replicas, AutoscalingConfig) else {"num_replicas": replicas}
        ),
        graceful_shutdown_timeout_s=settings.drain_s + _HANDED_OVER_S,
        graceful_shutdown_wait_loop_s=_LOOKED_AT_S,
        max_ongoing_requests=settings.max_requests,
        max_queued_requests=settings.max_queue_size,
        ray_actor_options=actor_options,
        request_router_config=RequestRouterConfig(request_router_class=PrefixRequestRouter),
    )
    taking = serve.deployment(
        Front,
        num_replicas=fronts,
        graceful_shutdown_timeout_s=settings.drain_s + _LAST_WORDS_S,
        graceful_shutdown_wait_loop_s=_LOOKED_AT_S,
        max_ongoing_requests=10_000,
        ray_actor_options={"num_cpus": 0},
    )
    # Fronts that would be the same stay: else nobody would listen while one starts. Ray has no public name for it.
    told = repr((__version__, load_factor, settings)).encode()
    taking._version = hashlib.pbkdf2_hmac("sha256", told, b"front", 100_000).hex()  # slow: `told` has API keys
    return taking.bind(served.bind(load, settings, kept), settings, load_factor)


def app_from(args: dict[str, Any]) -> serve.Application:
    """The application of a file of YAML: `import_path: kvboost_hf.server.ray_app:app_from`, with `args`.

    Args:
        args: As `ClusterArgs.of` takes them; `replicas` is a number, or a mapping with fields of Ray's
            `AutoscalingConfig`.

    Raises:
        ValueError: for arguments that are none, or more replicas than the cluster has resources for.
    """
    found = ClusterArgs.of(args)
    more = dict(found.more)
    if isinstance(replicas := more.get("replicas"), Mapping):
        more["replicas"] = AutoscalingConfig(**replicas)
    return build(found.load, found.settings, found.kept, **more)
