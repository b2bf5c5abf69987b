"""K/V that heads compute of a text: what is stored of it beside the text is taken over, and the rest is kept.

Heads read hidden states of the whole text, and make K/V of their own from them. So that a warm prompt does not cost
them a pass over all of it, they are given that K/V with the text, and take in its new columns only.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from kvboost_hf.assisted.hidden import TextStates
from kvboost_hf.assisted.rounds import SpeculationStats
from kvboost_hf.compat import CACHE

Tensors = Sequence[torch.Tensor]
Read = Callable[[int, int], Tensors]


class _HeadKV(Protocol):
    """What a cache keeps of the heads of its text; see `kvboost_hf.cache.forward.head_kv`."""

    reason: str | None

    def find(self, ids: Any, limit: int) -> list[torch.Tensor] | None: ...

    def offer(self, ids: Any, read: Read, first: int, *, tail: bool) -> None: ...


class KeptKV:
    """The K/V of heads for one text, and the cache of the text that keeps it.

    Heads compute a column for each token, from its hidden state, and some from the tokens behind it. What depends on
    `shift` tokens behind a column is stored with the last one of these: so it depends on the text up to there alone.

    Args:
        heads: The heads.
        shift: Tokens behind a column that it depends on.
        like: Gives, for each tensor of the heads, one [1, heads, columns, dim] of the same form.
        stats: Counts the columns that were computed, and that were not.
    """

    def __init__(
        self, heads: PreTrainedModel, shift: int, like: Callable[[], Tensors], stats: SpeculationStats
    ) -> None:
        self._heads, self.shift, self._like, self._stats = heads, shift, like, stats
        self._kept: _HeadKV | None = None
        self._is_new = True

    def begin(self, cache: Any, ids: torch.Tensor, row: int = 0) -> list[torch.Tensor] | None:
        """Find what is stored.

        Args:
            cache: The cache that holds the text but for its last token.
            ids: The text, [1, tokens].
            row: The row of the cache that holds it.

        Returns:
            Each tensor [1, heads, columns, dim] of the first columns, so many that one at least is left to compute;
            None if there are none.
        """
        computed, found = ids.shape[1] - 1, list[torch.Tensor]()
        if hasattr(cache, "loans"):
            self._kept = cache.loans.head_kv(self._heads, self._like, row)
            limit = ids.shape[1] - (1 if self.shift else 2)
            found = [each[:, :, self.shift :] for each in self._kept.find(_tokens(ids), limit) or ()]
            self._stats.text_reason = self._kept.reason
        reused = found[0].shape[2] if found else 0
        self._stats.text_computed += computed - reused
        self._stats.text_reused += reused
        return found if reused else None

    def offer(self, ids: torch.Tensor, read: Read, first: int = 0) -> None:
        """Keep what was computed.

        Args:
            ids: The text, [1, tokens]; the cache holds all but the last one.
            read: Gives the tensors [1, heads, columns, dim] of some columns of the heads, half-open.
            first: The first column that it can give.
        """
        if self._kept is None or self._kept.reason is not None:
            return

        def columns(start: int, stop: int) -> Tensors:
            lacking = min(max(self.shift - start, 0), stop - start)
            found = read(max(start - self.shift, 0), stop - self.shift)
            return [F.pad(each, (0, 0, lacking, 0)) for each in found] if lacking else found

        tail, self._is_new = self._is_new, False
        self._kept.offer(_tokens(ids[:, :-1]), columns, first + self.shift if first else 0, tail=tail)
        self._stats.text_reason = self._kept.reason


def _tokens(ids: torch.Tensor) -> Any:
    return ids[0].cpu().numpy().astype(np.int64, copy=False)


class WarmCandidates:
    """A generator of candidates of transformers whose K/V begins with what is stored of the text.

    Args:
        inner: The generator, for one answer.
        name: The attribute of its cache.
        kept: The K/V of the text.
        text: Has the cache of the text where the outputs of forwards do not.
        ahead: Columns behind those of the text that it removes from its cache at each call.
    """

    requires_model_outputs = True

    def __init__(self, inner: Any, name: str, kept: KeptKV, text: TextStates | None = None, ahead: int = 0) -> None:
        self._inner, self._kept, self._text, self._ahead = inner, kept, text, ahead
        self._own: Any = getattr(inner, name)
        self._begun = self._keeps = False

    @property
    def model_kwargs_overrides(self) -> dict[str, Any]:
        """What each forward of the target is to be passed."""
        found: dict[str, Any] = self._inner.model_kwargs_overrides
        return found

    def get_candidates(self, input_ids: torch.Tensor, **round_: Any) -> Any:
        """As transformers' generators."""
        if not round_["is_first_iteration"] and not self._begun:
            self._begun = True
            self._keeps = _is_plain(round_["model_kwargs"]) and all(map(_is_known, self._own.layers))
            if self._keeps:
                shown, text = round_["model_outputs"], self._text
                own = (text.cache, text.row) if text is not None else (getattr(shown, CACHE, None), 0)
                if (found := self._kept.begin(own[0], input_ids, own[1])) is not None:
                    round_["model_outputs"] = self._put(found, shown)
                    round_["n_last_matches"] = input_ids.shape[1] - 2 - found[0].shape[2]
        result = self._inner.get_candidates(input_ids=input_ids, **round_)
        if self._keeps and not self._inner.is_main_model_prefill and self._holds(input_ids.shape[1] - 1):
            self._kept.offer(input_ids, self._read, self._first)
        return result

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """As transformers' generators."""
        self._inner.update_candidate_strategy(input_ids, scores, num_matches)

    def _put(self, found: Tensors, model_outputs: Any) -> Any:
        """Fill the cache; returns the outputs without the hidden states of what is in it."""
        known, inner = found[0].shape[2], self._inner
        for layer, pair in enumerate(zip(found[::2], found[1::2], strict=True)):
            keys, values = (F.pad(each, (0, 0, 0, self._ahead)) for each in pair)
            self._own.update(keys, values, layer)
        states = model_outputs.hidden_states
        if getattr(inner, "num_mtp_layers", 1) > 1:
            inner.full_seq_last_hidden_states = states[-1][:, :known].to(inner.device)
        inner.is_main_model_prefill = False
        rest = [each[:, known:] if each is not None else None for each in states]
        return type(model_outputs)(**{**model_outputs, "hidden_states": tuple(rest)})

    def _holds(self, columns: int) -> bool:
        """Whether the heads have taken in so many columns of the text: they do not where there is nothing to draft."""
        held = min(int(layer.get_seq_length()) for layer in self._own.layers)
        return held - self._ahead + self._kept.shift >= columns

    @property
    def _first(self) -> int:
        """The first column that all layers hold."""
        return max(int(layer.get_seq_length()) - int(layer.keys.shape[2]) for layer in self._own.layers)

    def _read(self, start: int, stop: int) -> Tensors:
        found: list[torch.Tensor] = []
        for layer in self._own.layers:
            gone = layer.get_seq_length() - layer.keys.shape[2]
            found += [each[:, :, start - gone : stop - gone] for each in (layer.keys, layer.values)]
        return found


def keys_and_values(cache: Any) -> list[torch.Tensor]:
    """The keys and values [1, num_kv_heads, columns, head_dim] of each layer in turn."""
    return [each for layer in cache.layers for each in (layer.keys, layer.values)]


def _is_known(layer: Any) -> bool:
    """Whether a layer of transformers holds keys and values, and nothing else."""
    return type(layer).__name__ in ("DynamicLayer", "DynamicSlidingWindowLayer")


def _is_plain(model_kwargs: Any) -> bool:
    """Whether a text has no padding, and its positions are those of its tokens."""
    mask, positions = (model_kwargs.get(name) for name in ("attention_mask", "position_ids"))
    if (mask is not None and not bool(mask.all())) or positions is None or positions.ndim != 2:
        return False
    return bool((positions[0] == torch.arange(positions.shape[1], device=positions.device)).all())
