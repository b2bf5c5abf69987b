"""Embeds texts, and has a model fill in the middle of one, for the routes of several APIs."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from fastapi import Request

from kvboost_hf.server.apis.answers import unless_gone
from kvboost_hf.server.apis.context import RouteContext, client
from kvboost_hf.server.http.errors import ApiError, refused
from kvboost_hf.server.protocol import DrainingError
from kvboost_hf.server.requests.texts import MAX_TEXTS

_FORMATS = (  # as the models were trained; the answer follows
    "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",  # Qwen Coder, CodeGemma
    "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>",  # StarCoder, Granite
    "<fim-prefix>{prefix}<fim-suffix>{suffix}<fim-middle>",  # SantaCoder
    "<｜fim▁begin｜>{prefix}<｜fim▁hole｜>{suffix}<｜fim▁end｜>",  # DeepSeek  # noqa: RUF001
    "▁<PRE>{prefix}▁<SUF>{suffix}▁<MID>",  # CodeLlama
    "[SUFFIX]{suffix}[PREFIX]{prefix}",  # Codestral
)


def require_embeddings(context: RouteContext) -> None:
    """Raise an `ApiError` if the operator has not turned embeddings on."""
    if not context.settings.embeddings:
        raise ApiError(404, "This server makes no embeddings. Start it with `--embeddings`.", code="not_supported")


async def embed(
    context: RouteContext, texts: Sequence[str | list[int]], request: Request, param: str
) -> tuple[list[list[float]], int]:
    """Embed the texts of a request, or their tokens; returns an embedding of each, and the tokens of all together."""
    if len(texts) > MAX_TEXTS:
        raise refused(param, f"One request may have {MAX_TEXTS} texts, got {len(texts)}. Send several.")
    encoded = [await context.encode(text, request, param, whole=True) for text in texts]
    if not all(encoded):
        raise refused(param, "A text must have a token at least, got an empty one.")
    future = context.engine.embed(encoded, client(request))
    found = await unless_gone(request, future, _within(future, context.settings.timeout_s))
    return found, sum(map(len, encoded))


async def _within(future: Future[list[list[float]]], timeout_s: float) -> list[list[float]]:
    found = asyncio.wrap_future(future)
    done, _ = await asyncio.wait({found}, timeout=timeout_s)
    if not done:
        raise ApiError(504, f"The request was given up after {timeout_s:g} s.", code="timeout")
    error = found.exception()
    if error is not None and not isinstance(error, DrainingError):
        raise ApiError(500, f"{type(error).__name__}: {error}", code="model_error")
    return found.result()


def filled(tokenizer: Any, prefix: str, suffix: str) -> str:
    """A prompt for the text between two others; `ApiError` if the model has no tokens for it."""
    for form in _FORMATS:
        marks = form.replace("{prefix}", " ").replace("{suffix}", " ").split()
        if all(mark in tokenizer.added_tokens_encoder for mark in marks):
            return form.format(prefix=prefix, suffix=suffix)
    raise refused(
        "suffix",
        "The model has no tokens to fill in the middle of a text, as models of code have. Leave suffix out, and send "
        "the text before the answer as prompt.",
    )
