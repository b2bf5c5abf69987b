"""Computes embeddings: the mean of a model's last hidden states, normalized to length 1."""

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch.nn.functional import normalize
from transformers import DynamicCache, PreTrainedModel

from kvboost_hf.compat import input_device, run_model
from kvboost_hf.server.fair_share import FairTurns

_log = logging.getLogger("kvboost_hf.server")


def embed(model: PreTrainedModel, ids: Sequence[int], *, piece: int | None = None) -> list[float]:
    """Compute the embedding [hidden_size] of one text.

    Args:
        model: A causal language model. Not trained for this, it makes poor embeddings.
        ids: The token ids of the text; one at least.
        piece: Tokens to compute at once, at most; None for all.
    """
    text = _Text(ids)
    while (found := text.advance(model, piece)) is None:
        pass
    return found


class _Text:
    """One text, computed piece by piece with the K/V of the pieces before."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids, self._done = ids, 0
        self._cache: Any = None
        self._sum: torch.Tensor | float = 0.0  # of the hidden states, in float32

    @torch.no_grad()
    def advance(self, model: PreTrainedModel, piece: int | None) -> list[float] | None:
        """Compute the next piece; returns the embedding after the last one, else None."""
        body: Any = model.base_model
        whole, start = len(self._ids), self._done
        self._done = whole if piece is None else min(start + piece, whole)
        if self._cache is None and self._done < whole:
            self._cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        ids = torch.tensor([self._ids[start : self._done]], device=input_device(model))
        positions = torch.arange(start, self._done, device=ids.device)[None] if self._cache is not None else None
        hidden: torch.Tensor = run_model(body, ids, self._cache, position_ids=positions).last_hidden_state[0]
        self._sum = self._sum + hidden.float().sum(0)
        if self._done < whole:
            return None
        found: list[float] = normalize(self._sum / whole, dim=0).tolist()
        return found


class EmbeddingJob:
    """Texts to embed, one after the other.

    Args:
        texts: Token ids of each.
        client: Who asks. Clients take turns.

    Attributes:
        future: Receives the embeddings; may be cancelled.
    """

    def __init__(self, texts: Sequence[Sequence[int]], client: bytes = b"") -> None:
        self.future: Future[list[list[float]]] = Future()
        self.client = client
        self._texts = texts
        self._found: list[list[float]] = []
        self._text: _Text | None = None

    @property
    def between(self) -> bool:
        """Whether no text is under way."""
        return self._text is None

    def is_short(self, piece: int | None) -> bool:
        """Whether the next text is computed in one piece."""
        return piece is None or len(self._texts[len(self._found)]) <= piece

    def advance(self, model: PreTrainedModel, piece: int | None) -> bool:
        """Compute the next piece of the next text, of so many tokens at most, or all of it.

        Returns:
            Whether nothing is left to do.
        """
        if self.future.cancelled():
            return True
        try:
            self._text = self._text or _Text(self._texts[len(self._found)])
            found = self._text.advance(model, piece)
        except Exception as error:
            _log.error("A text could not be embedded.", exc_info=error)
            self.fail(error)
            return True
        if found is not None:
            self._found.append(found)
            self._text = None
        if len(self._found) < len(self._texts):
            return False
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(self._found)
        return True

    def fail(self, error: Exception) -> None:
        """End with an error."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class EmbeddingTurns:
    """Chooses the request whose text is embedded next: clients take turns, and so do the requests of a client.

    K/V is held of one text at a time: while a text is under way, others are begun only if they need one piece.
    """

    def __init__(self) -> None:
        self._clients: FairTurns[bytes] = FairTurns()

    def next(self, jobs: list[EmbeddingJob], piece: int | None) -> EmbeddingJob:
        """Choose one of `jobs`, of which there is one at least, for a piece of so many tokens; it becomes the last."""
        begun = [job for job in jobs if not job.between]
        able = [job for job in jobs if not begun or job in begun or job.is_short(piece)]
        clients = self._clients.order(job.client for job in jobs)
        chosen = next(job for client in clients for job in able if job.client == client)
        self._clients.charge(chosen.client)
        jobs.remove(chosen)
        jobs.append(chosen)
        return chosen
