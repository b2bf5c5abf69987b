"""The route `/v1/warm`: computes prompts ahead of the requests that begin with them."""

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import anyio
from fastapi import APIRouter, Request

from kvboost_hf.cache.prompt.chats import why_not_stored
from kvboost_hf.server.apis.context import RouteContext, client
from kvboost_hf.server.apis.kvboost.schema import WarmRequest
from kvboost_hf.server.apis.posted import PostedRoute
from kvboost_hf.server.apis.request_jobs import RequestJobs, unless_gone
from kvboost_hf.server.chats.rendering import Rendering
from kvboost_hf.server.jobs import Finished, Job, QueueFullError, SamplingOptions


def warm_routes(context: RouteContext) -> APIRouter:
    """Make a router with `/v1/warm`."""
    router = APIRouter(route_class=PostedRoute)

    @router.post("/v1/warm")
    async def warm(body: WarmRequest, request: Request) -> dict[str, Any]:
        salt = context.salt(request, body.prompt_cache_key, body.cache_salt)
        if body.messages is not None:
            rendering = Rendering(arguments=body.template_arguments)
            work = context.encode_start(body.messages, body.tools or (), request, rendering=rendering, salt=salt)
            start, reason = await work
            prompts = [start.tolist()]
        else:
            prompts = [await context.encode(text, request, new=0) for text in body.texts or ()]
            reason = await context.encoder.why_never(prompts, client(request))
        reason = next(filter(None, (why_not_stored(len(ids)) for ids in prompts)), reason)
        keep, name, options = (context.keep(None),), body.prompt_cache_key, SamplingOptions(max_tokens=0)
        jobs = [replace(context.job(ids, options, salt=salt), keep=keep, session=name) for ids in prompts]

        async def finish() -> dict[str, Any]:
            found = [event async for event in _one_by_one(context, jobs, request)]
            return {
                "object": "warm",
                "prompt_tokens": sum(event.prompt_tokens for event in found),
                "cached_tokens": sum(event.cached_tokens for event in found),
                "pinned": all(bool(event.pinned) for event in found),
                "start_reason": reason,
            }

        return await unless_gone(request, None, finish())

    return router


async def _one_by_one(context: RouteContext, jobs: Sequence[Job], request: Request) -> AsyncIterator[Finished]:
    """Run jobs so that only one is in the queue, however many there are."""
    submitted: RequestJobs | None = None
    for job in jobs:
        while True:
            try:
                submitted = context.start([job], request)
                break
            except QueueFullError as error:
                if submitted is None:
                    raise
                await anyio.sleep(error.retry_after_s)  # what was computed would be in vain
        try:
            async for _, event in submitted.events():
                if isinstance(event, Finished):
                    yield event
        finally:
            submitted.cancel()
