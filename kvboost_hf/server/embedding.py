"""Embeddings: the mean of a model's last hidden states, of length 1."""

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch.nn.functional import normalize
from transformers import PreTrainedModel

from kvboost_hf.compat import input_device

_log = logging.getLogger("kvboost_hf.server")


@torch.no_grad()
def embed(model: PreTrainedModel, ids: Sequence[int]) -> list[float]:
    """The embedding of one text, of as many numbers as the model's hidden states have.

    Args:
        model: A causal language model. Not trained for this, it makes poor embeddings.
        ids: Of the text; one at least.
    """
    body: Any = model.base_model
    given = torch.tensor([ids], device=input_device(model))
    hidden: torch.Tensor = body(input_ids=given, use_cache=False, return_dict=True).last_hidden_state[0]
    found: list[float] = normalize(hidden.float().mean(0), dim=0).tolist()
    return found


class EmbeddingJob:
    """Texts to embed, one after the other.

    Args:
        texts: Token ids of each.

    Attributes:
        future: What comes of it; may be cancelled.
    """

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self.future: Future[list[list[float]]] = Future()
        self._texts = texts
        self._found: list[list[float]] = []

    def advance(self, model: PreTrainedModel) -> bool:
        """Embed the next text; returns whether nothing is left to do."""
        if self.future.cancelled():
            return True
        try:
            self._found.append(embed(model, self._texts[len(self._found)]))
        except Exception as error:
            _log.error("A text could not be embedded.", exc_info=error)
            self.fail(error)
            return True
        if len(self._found) < len(self._texts):
            return False
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(self._found)
        return True

    def fail(self, error: Exception) -> None:
        """End with an error."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)
