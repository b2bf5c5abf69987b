"""Chains of drafts behind the text in a cache with states.

States cannot branch, and no token can be taken out of one: they go back to where they were copied. So a cache lags
behind its text where drafts were rejected, and the next forward carries what was accepted since in front of its own:

    text        a b c d e          states at c: a forward over d e [drafts]
    accepted    one draft          states at c again; the next forward is over d e f [drafts]
    accepted    all drafts         states behind the last of them

No forward is run only to go back.
"""

import copy
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from kvboost_hf.assisted.branches import Branches, branch_reason
from kvboost_hf.assisted.hidden import TextStates
from kvboost_hf.compat import (
    STATEFUL_LAYERS,
    PrivateCache,
    as_steps,
    cache_layers,
    known_reason,
    probe_reason,
    remember,
    run_model,
    several_steps_reason,
    steps_reason,
)


class _Lagging(Protocol):
    """A cache that may lag behind its text."""

    @property
    def lag(self) -> int:
        """Tokens of the text that the next forward computes in front of its own."""
        ...

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last tokens back, minus their number."""
        ...

    def catch_up(self) -> None:
        """Compute the tokens of `lag` now."""
        ...


class Chain:
    """Tokens in a row that continue the text in a cache: `Branches` without siblings, for models with states.

    Args:
        model: The model of the cache.
        cache: A `ChunkReuseCache` that was told to record, or a cache of transformers, with one row.
        position: The position of the first token, [1, 1] or [planes, 1, 1].
        keep: [1, columns held], bool: the columns that are no padding; None for all.
    """

    def __init__(
        self, model: PreTrainedModel, cache: Any, position: torch.Tensor, keep: torch.Tensor | None = None
    ) -> None:
        self._model, self._position, self._keep = model, position, keep
        self._copied = None if hasattr(cache, "lag") else _CopiedStates(model, cache)
        self._cache: Any = cache
        self._lagging: _Lagging = self._copied if self._copied is not None else cache
        self._count = 0
        if self._copied is None and steps_reason(model) is not None:
            cache.store_tails()  # while the model still is what has computed them

    @property
    def lag(self) -> int:
        """Tokens that the next forward carries in front of its own; one without drafts leaves none."""
        return self._lagging.lag

    # A compiled model breaks its graph here, rather than tracing what is not arithmetic.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def forward(self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> torch.Tensor:
        """Append tokens to the row.

        Args:
            tokens: Ids of the new tokens, of one row.
            parents: The index of each token's parent, which is the token before it.

        Returns:
            Logits [1, tokens, vocab_size] behind each new token.
        """
        count, device = len(tokens[0]), self._position.device
        assert list(parents[0]) == list(range(self._count - 1, self._count - 1 + count)), "states cannot branch"
        mask = F.pad(self._keep, (0, self._count + count), value=True).long() if self._keep is not None else None
        with as_steps(self._model):
            found = run_model(
                self._model,
                *self._given(torch.tensor(tokens, device=device)),
                logits=count,
                attention_mask=mask,
                position_ids=self._positions(count),
            )
        self._count += count
        logits: torch.Tensor = found.logits[:, -count:]
        return logits

    def keep(self, paths: Sequence[Sequence[int]]) -> int:
        """Keep the first tokens, as many as there are in the row's path, and drop the others.

        Returns:
            How many tokens the cache holds more, for whoever goes on without this object.
        """
        kept = len(paths[0])
        dropped = self._count - kept
        self._lagging.crop(-dropped)
        self._count, self._position = 0, self._position + kept
        if self._keep is not None:
            self._keep = F.pad(self._keep, (0, kept), value=True)
        return 0 if dropped and self._copied is not None else kept

    def end(self) -> None:
        """Leave the cache as one that was given these tokens and no drafts."""
        with as_steps(self._model):
            self._lagging.catch_up()

    def _given(self, ids: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (ids, self._cache) if self._copied is None else self._copied.extend(ids)

    def _positions(self, count: int) -> torch.Tensor:
        carried = self._copied.carried if self._copied is not None else 0  # the other cache sees to them itself
        at = torch.arange(-carried, count, device=self._position.device)
        return self._position + self._count + at


class _CopiedStates:
    """Runs forwards over copies of the states in a cache of transformers, and takes the copies over if all was kept.

    Args:
        model: The model of the cache.
        cache: With one row.
    """

    def __init__(self, model: PreTrainedModel, cache: Any) -> None:
        self._model, self._cache = model, cache
        self._behind: list[torch.Tensor] = []  # [1, tokens] each, of the text
        self._running: PrivateCache | None = None
        self._since: list[torch.Tensor] = []  # and behind these, since the copies were made
        self.carried = 0  # by the forward that `extend` was called for

    @property
    def lag(self) -> int:
        return sum(ids.shape[1] for ids in self._behind)

    def extend(self, ids: torch.Tensor) -> tuple[torch.Tensor, PrivateCache]:
        """The ids of the next forward, which carries what it has to, and its cache."""
        self._since.append(ids)
        if self._running is not None:
            self.carried = 0
            return ids, self._running
        self.carried = self.lag
        layers = [_copied(each) if _keeps_state(each) else each for each in self._cache.layers]
        self._running = PrivateCache(layers)
        return torch.cat([*self._behind, ids], dim=1), self._running

    def crop(self, tokens_to_remove: int) -> None:
        running, self._running = self._running, None
        since, self._since = self._since, []
        if running is None:
            return
        if not tokens_to_remove:
            layers: Any = zip(running.layers, self._cache.layers, strict=True)
            for copied, layer in layers:
                if _keeps_state(layer):
                    copied.record_past = layer.record_past
            self._cache.layers[:], self._behind = running.layers, []
        appended = self.lag + sum(ids.shape[1] for ids in since) if tokens_to_remove else 0
        for layer in self._cache.layers:
            if hasattr(layer, "crop") and (not _keeps_state(layer) or (not appended and layer.record_past)):
                layer.crop(-appended)  # of none: layers let go of what they have recorded
        if not tokens_to_remove:
            return
        kept = torch.cat(since, dim=1)[:, :tokens_to_remove]
        self._behind += [kept] if kept.shape[1] else []

    def catch_up(self) -> None:
        if self._behind:
            run_model(self._model, torch.cat(self._behind, dim=1), PrivateCache(self._cache.layers))
            self._behind = []


def continuing(
    model: PreTrainedModel,
    cache: Any,
    position: torch.Tensor,
    keep: torch.Tensor | None = None,
    states: TextStates | None = None,
) -> Branches | Chain:
    """Tokens that continue the text in a cache: a chain where states cannot branch, else a tree.

    See `Branches` for the arguments. Heads, which read `states`, draft for no model with states of its layers.
    """
    if keeps_states(model):
        return Chain(model, cache, position, keep)
    return Branches(model, cache, position, keep, states=() if states is None else (states,))


def keeps_states(model: PreTrainedModel) -> bool:
    """Whether some layers of a model keep a sum of what they saw, so that its drafts are chains."""
    found: bool = remember(model, keeps_states, lambda: any(map(_keeps_state, cache_layers(model))))
    return found


def drafting_reason(model: PreTrainedModel) -> str | None:
    """Why a model cannot compute trees of tokens, or with states chains; None if it can.

    Once per model, dtype and attention: forwards of a few tokens.
    """
    if keeps_states(model):
        return known_reason(model) or probe_reason(model) or several_steps_reason(model)
    return branch_reason(model)


def _copied(layer: Any) -> Any:
    """A copy that records nothing: it is let go of where something is rejected. ZAYA's code takes no longer states."""
    copied = copy.deepcopy(layer)
    copied.record_past = False
    return copied


def _keeps_state(layer: Any) -> bool:
    return type(layer).__name__ in STATEFUL_LAYERS
