"""Puts the parts of messages whose order does not matter into the order in which most of the prompt is stored."""

from functools import partial

from fastapi import Request

from kvboost_hf.cache.planning.order import Order, search_order
from kvboost_hf.server.apis.context import RouteContext
from kvboost_hf.server.http.notes import note_changed
from kvboost_hf.server.requests.chat import ChatRequest, Message


async def in_best_order(context: RouteContext, body: ChatRequest, request: Request) -> ChatRequest:
    """The request with the parts of its messages that have `any_order` where more of the prompt is stored then.

    Args:
        context: Encodes prompts, and asks the engine what is stored.
        body: The request.
        request: As it came.

    Raises:
        ApiError: A prompt is too long, or the chat template refuses it.
    """
    for at, message in enumerate(body.messages):
        if (count := len(message.movable)) > 1:
            order = await _order_of(context, body, request, at, count)
            if order != tuple(range(count)):
                note_changed("parts-reordered")
                body = _with(body, at, message.with_movable(order))
    return body


async def _order_of(context: RouteContext, body: ChatRequest, request: Request, at: int, count: int) -> Order:
    search, salt = search_order(count), context.salt(request, body.cache_salt)
    asked = next(search)
    while True:
        message = body.messages[at]
        prompts = [await context.encode_asked(_with(body, at, message.with_movable(some)), request) for some in asked]
        found = await context.read(request, partial(context.engine.known_tokens, prompts, salt))
        try:
            asked = search.send(found)
        except StopIteration as end:
            order: Order = end.value[0]
            return order


def _with(body: ChatRequest, at: int, message: Message) -> ChatRequest:
    messages = [*body.messages[:at], message, *body.messages[at + 1 :]]
    return body.model_copy(update={"messages": messages})
