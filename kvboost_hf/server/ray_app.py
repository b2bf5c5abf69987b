"""Runs the server on Ray Serve: replicas with a model each, behind a router by prompt prefixes.

client ──▶ proxy of Ray ──▶ Front ──▶ PrefixRequestRouter ──▶ Replica: the app, the engine, the store
                                                                          └──▶ tiers that all replicas share
"""

import asyncio
from collections.abc import AsyncIterator, Callable, MutableMapping, Sequence
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import StreamingResponse
from transformers import PreTrainedModel

from kvboost_hf.engine.settings import EngineSettings
from kvboost_hf.server.prompt_keys import prompt_keys
from kvboost_hf.server.routing import PrefixRouter
from kvboost_hf.server.serve import front, start_engine
from kvboost_hf.server.settings import ServerSettings

_SCOPE = (
    "type",
    "http_version",
    "method",
    "scheme",
    "path",
    "raw_path",
    "query_string",
    "headers",
    "client",
    "server",
)


class PrefixRequestRouter(RequestRouter):
    """Sends a request to the replica that has had most of its prompt; see `PrefixRouter`.

    The first argument of a request is the keys of its prompt. Loads are those that Ray has last heard of.
    """

    def initialize_state(self, load_factor: float = 1.25) -> None:
        """Called by Ray, with what `RequestRouterConfig` has for it."""
        self._router = PrefixRouter(load_factor)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if not candidate_replicas:
            return []
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # Ray would ask over and over where all are full
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loads = {name: self.replica_queue_len_cache.get(replica.replica_id) or 0 for name, replica in replicas.items()}
        return [[replicas[name]] for name in self._router.rank(_keys(pending_request), loads)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._router.routed(_keys(pending_request), replica_id.unique_id)


def _keys(pending_request: PendingRequest | None) -> Sequence[bytes]:
    return pending_request.args[0] if pending_request is not None and pending_request.args else ()


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
        model, tokenizer = load()
        self._engine = start_engine(model, tokenizer, settings, kept)
        self._app = front(self._engine, settings)

    async def ask(self, keys: Sequence[bytes], scope: dict[str, Any], body: bytes) -> AsyncIterator[dict[str, Any]]:
        """Answer a request.

        Args:
            keys: The keys of the prompt, for the router.
            scope: The scope of the request, as ASGI has it.
            body: The whole of it.

        Yields:
            The app's messages, as ASGI has them.
        """
        asked: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        said: asyncio.Queue[MutableMapping[str, Any] | None] = asyncio.Queue()
        asked.put_nowait({"type": "http.request", "body": body, "more_body": False})

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

    def __del__(self) -> None:
        self._engine.close()
        self._engine.store.close()


class Front:
    """Takes requests, and hands them on with the keys of their prompts.

    Args:
        replicas: A handle of the deployment of `Replica`.
        max_body_bytes: More of a request is not read, and the replica refuses it.
    """

    def __init__(self, replicas: DeploymentHandle, max_body_bytes: int) -> None:
        self._replicas, self._max_bytes = replicas.options(method_name="ask", stream=True), max_body_bytes

    async def __call__(self, request: Request) -> StreamingResponse:
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > self._max_bytes:
                break
        keys = prompt_keys(body, request.headers.get("authorization", ""))
        messages = self._replicas.remote(keys, {name: request.scope[name] for name in _SCOPE}, body)
        start = await anext(messages)
        answer = StreamingResponse((message["body"] async for message in messages), start["status"])
        answer.raw_headers = list(start["headers"])
        return answer


def build(
    load: Callable[[], tuple[PreTrainedModel, Any]],
    settings: ServerSettings,
    kept: EngineSettings,
    *,
    replicas: int = 2,
    fronts: int = 1,
    load_factor: float = 1.25,
    actor_options: dict[str, Any] | None = None,
) -> serve.Application:
    """An application for `ray.serve.run`.

    Args:
        load: Makes a model and its tokenizer, on the machine of the replica.
        settings: The settings of each replica's server. Address and port are Ray's.
        kept: What each replica keeps of prompts. Tiers that they can all reach make one replica find what another has
            stored.
        replicas: How many.
        fronts: How many processes take requests. Each remembers by itself where prompts went.
        load_factor: The most load of a replica, as a multiple of its share.
        actor_options: What Ray is to give each replica, such as `{"num_gpus": 1}`.
    """
    router = RequestRouterConfig(
        request_router_class=PrefixRequestRouter, request_router_kwargs={"load_factor": load_factor}
    )
    served = serve.deployment(
        Replica,
        num_replicas=replicas,
        max_ongoing_requests=settings.max_batch_size + settings.max_queue_size,
        ray_actor_options=actor_options,
        request_router_config=router,
    )
    taking = serve.deployment(Front, num_replicas=fronts, max_ongoing_requests=10_000)
    return taking.bind(served.bind(load, settings, kept), settings.max_body_bytes)
