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


class EmbeddingJob:
    """Texts to embed, one after the other, each piece by piece with the K/V of the pieces before.

    Clients take turns. A model that was not trained for this makes poor embeddings.

    Attributes:
        future: Receives the embeddings; may be cancelled.
    """

    def __init__(self, texts: Sequence[Sequence[int]], client: bytes = b"") -> None:
        self.future: Future[list[list[float]]] = Future()
        self.client = client
        self._texts = texts
        self._found: list[list[float]] = []
        self._begin()

    def _begin(self) -> None:
        self._done = 0  # tokens of the text that is next or under way
        self._cache: Any = None  # their K/V
        self._sum: torch.Tensor | float = 0.0  # of their hidden states, in float32

    @property
    def between(self) -> bool:
        """Whether no text is under way."""
        return not self._done

    def is_short(self, piece: int | None) -> bool:
        """Whether the next text is computed in one piece."""
        return piece is None or len(self._texts[len(self._found)]) <= piece

    def advance(self, model: PreTrainedModel, piece: int | None) -> bool:
        """Compute the next piece of the next text, of so many tokens at most; tells whether nothing is left to do."""
        if self.future.cancelled():
            return True
        try:
            self._compute(model, piece)
        except Exception as error:
            _log.error("A text could not be embedded.", exc_info=error)
            self.fail(error)
            return True
        if len(self._found) < len(self._texts):
            return False
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(self._found)
        return True

    @torch.no_grad()
    def _compute(self, model: PreTrainedModel, piece: int | None) -> None:
        body: Any = model.base_model
        text, start = self._texts[len(self._found)], self._done
        stop = len(text) if piece is None else min(start + piece, len(text))
        if self._cache is None and stop < len(text):
            self._cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        ids = torch.tensor([text[start:stop]], device=input_device(model))
        positions = torch.arange(start, stop, device=ids.device)[None] if self._cache is not None else None
        hidden: torch.Tensor = run_model(body, ids, self._cache, position_ids=positions).last_hidden_state[0]
        self._done, self._sum = stop, self._sum + hidden.float().sum(0)
        if stop == len(text):
            self._found.append(normalize(self._sum / stop, dim=0).tolist())
            self._begin()

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
