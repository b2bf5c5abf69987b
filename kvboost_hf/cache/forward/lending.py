"""Lending layers to forwards over tokens of which not all will stay, and taking over those that do.

Drafts that branch are such tokens: side by side in the layers, they are no text that the cache could keep track of.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvboost_hf.cache.forward.held import Running
from kvboost_hf.cache.forward.serve import ServingCache
from kvboost_hf.cache.live.ledger import Ledger
from kvboost_hf.compat import attention_kind, rope_regime
from kvboost_hf.handles import ATTENTION


class LendingCache(ServingCache):
    """A cache whose layers can be lent."""

    @property
    def lending_reason(self) -> str | None:
        """Why the layers cannot be lent, nor read and extended; None if they can."""
        if self._plain is not None:
            return self._plain
        rigid = {type(layer).__name__ for layer in self._layers if layer.is_stateful or not layer.can_branch}
        return f"its cache has layers of the kind {', '.join(sorted(rigid))}" if rigid else None

    def require_branches(self) -> None:
        """Raise if the layers cannot be lent.

        Raises:
            ValueError: if they cannot forget what was appended.
        """
        if (reason := self.lending_reason) is not None:
            raise ValueError(f"K/V of branches cannot be held, for {reason}. Draft chains instead.")

    def lend(self) -> list[Any]:
        """The layers, as transformers knows them, for one forward that is not told to the cache.

        What it appends is gone with `give_back`, or with whatever is done to the cache next.
        """
        self._settled()
        model = self._model()
        self._hand_out(model is not None and attention_kind(model) == ATTENTION)
        self._running = Running(self._held())
        return [layer.lend() for layer in self._layers]

    def give_back(self) -> None:
        """Forget what was appended since `lend`."""
        self._hand_out(False)
        self._recover()

    def read(self) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
        """Of each layer, keys and values [1, num_kv_heads, tokens, head_dim] of the only row's tokens that it holds.

        They are views where they can be, and not to be kept. None for a layer that has none.
        """
        self._settled()
        length = self._held()
        found = [layer.columns(0, layer.first, length) for layer in self._layers]
        return [None if not piece else (piece[0][None], piece[1][None]) for piece in found]

    def stored_tokens(self, ids: torch.Tensor) -> int:
        """How many first tokens of a prompt [1, tokens], whose last one is left to compute, the store holds now."""
        model = self._model()
        regime = rope_regime(model, ids.shape[1]) if model is not None and self._unsupported is None else None
        root = self._root(regime) if regime is not None else None
        if root is None:
            return 0
        ledger = Ledger.empty(np.zeros(1, dtype=np.int64), root)
        tokens = ids.cpu().numpy().astype(np.int64, copy=False)
        return ledger.plan(tokens, 0, ids.shape[1] - 1, self.store, 0, stateful=self._stateful).filled

    def extend(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        kv: Sequence[tuple[torch.Tensor, torch.Tensor] | None],
    ) -> None:
        """Append columns that were computed by forwards over lent layers.

        Args:
            input_ids: [1, tokens].
            position_ids: [1, tokens], or [planes, 1, tokens].
            kv: Of each layer, keys and values [1, num_kv_heads, tokens, head_dim]; None where it has none.
        """
        ledger, held = self._settled(), self._held()
        self._running = Running(held)
        self._columns = held + input_ids.shape[1]
        for layer, pair in zip(self._layers, kv, strict=True):
            if pair is not None:
                layer.fill(held, self._columns, [[(pair[0][0], pair[1][0])]])
                layer.native.crop(0)
        model = self._model()
        if ledger is not None and model is not None:
            pad = int(ledger.log.pads.min())
            if rope_regime(model, self._columns - pad) != self._regime:
                ledger = self._ledger = None
        if ledger is not None:
            ledger.log.append(input_ids, position_ids)
            self._note_layers(ledger)
        self._running = None  # only now: an interrupt before this undoes it
        if ledger is not None:
            self._confirm(ledger)
