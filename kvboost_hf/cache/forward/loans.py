"""`Loans`: layers of a cache, lent to forwards of somebody else, and read and extended outside of any forward.

Drafts that branch run forwards over tokens of which not all will stay: side by side in the layers, they are no text
that the cache could keep track of. It takes over those that do. A server reads the row of a cache, decodes it together
with others, and hands over what that has computed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from kvboost_hf.cache.forward.head_kv import HeadKV
from kvboost_hf.cache.forward.repair_later import may_repair
from kvboost_hf.cache.forward.running import CacheParts, Forward, leave_prompts
from kvboost_hf.cache.layers.base import LayerState, kv_layers
from kvboost_hf.cache.layers.growing import GrowingLayer
from kvboost_hf.cache.live import LiveKV
from kvboost_hf.compat import attn_implementation, rope_regime
from kvboost_hf.config import Progressive
from kvboost_hf.handles import ATTENTION

LayerPair = tuple[torch.Tensor, torch.Tensor]  # keys and values [rows, num_kv_heads, tokens, head_dim]


class Lent(Forward):
    """Layers that run forwards of somebody else, who forgets what these append, or hands over a part of it."""

    def record(self, output: Any) -> Any:
        """Nothing: such a forward is not told to the cache."""

    def settle(self) -> None:
        """Nothing, as with `record`."""


def lending_reason(live: LiveKV) -> str | None:
    """Why the layers cannot be lent, nor read and extended; None if they can."""
    if live.plain_reason is not None:
        return live.plain_reason
    return _of_kinds({type(layer).__name__ for layer in live.layers if layer.is_stateful or not layer.can_branch})


def _of_kinds(rigid: set[str]) -> str | None:
    return f"its cache has layers of the kind {', '.join(sorted(rigid))}" if rigid else None


def reading_reason(live: LiveKV) -> str | None:
    """Why what the layers hold of a row cannot be read, and put back with more tokens; None if it can."""
    if live.plain_reason is not None:
        return live.plain_reason
    return _of_kinds(
        {type(each).__name__ for each in live.layers if each.single_row or not (each.can_branch or each.is_stateful)}
    )


@dataclass(frozen=True, slots=True)
class Loans:
    """What drafts that branch do with a cache, and servers that decode rows of many caches together."""

    _parts: CacheParts
    _settle: Callable[[], None]  # ends what is under way: then all columns are in the layers, in buffers that grow
    _repair: Callable[[], object]  # the same, and computes again what is to be exact before the next token
    _begin: Callable[
        [], None
    ]  # the same as `_settle`: up to `_end` the layers may be changed, or an interrupt undoes it
    _end: Callable[[], None]

    @property
    def lending_reason(self) -> str | None:
        """Why the layers cannot be lent, nor read and extended; None if they can."""
        self._settle()
        return lending_reason(self._parts.live)

    @property
    def reading_reason(self) -> str | None:
        """Why a row of the layers cannot be read, and extended; None if it can."""
        self._settle()
        return reading_reason(self._parts.live)

    def require_branches(self) -> None:
        """Raise a ValueError if the layers cannot forget what was appended."""
        if (reason := self.lending_reason) is not None:
            raise ValueError(f"K/V of branches cannot be held, for {reason}. Draft chains instead.")

    def lend(self) -> list[Any]:
        """The layers, as transformers knows them, for one forward that is not told to the cache.

        What it appends is gone with `give_back`, or with whatever is done to the cache next.
        """
        self._repair()
        self._begin()
        live, model = self._parts.live, self._parts.binding.model()
        live.hand_out(model is not None and attn_implementation(model) == ATTENTION)
        return [layer.lend() for layer in kv_layers(live.layers)]

    def give_back(self) -> None:
        """Forget what was appended since `lend`."""
        self._parts.live.hand_out(False)
        self._settle()

    def read(self, layers: Sequence[int] | None = None, row: int = 0) -> list[LayerPair | None]:
        """K/V [1, num_kv_heads, columns, head_dim] of a row, padding included, that some layers hold, None for all.

        They are views where they can be, and not to be kept. None for a layer that has none.
        """
        self._repair()
        live = self._parts.live
        length, held = live.held, kv_layers(live.layers)
        chosen = held if layers is None else [held[at] for at in layers]
        found = [layer.columns(row, layer.first, length) for layer in chosen]
        return [None if not piece else (piece[0][None], piece[1][None]) for piece in found]

    def read_states(self) -> list[LayerState | None]:
        """Of each layer, views of the only row's state: not to be kept. None for a layer that has none."""
        self._settle()
        return [layer.view_state(0) for layer in kv_layers(self._parts.live.layers)]

    @property
    def kept_layers(self) -> tuple[int, ...]:
        """The layers whose hidden states are kept of what the cache holds, by their numbers or `LAST`."""
        live = self._parts.live
        return live.hidden_layers if live.hidden is not None else ()

    def read_hidden(self, layers: Sequence[int], start: int) -> dict[int, torch.Tensor] | None:
        """Views of the hidden states [1, tokens, hidden_size] of some layers, of the tokens from column `start` on.

        They are not to be kept. None if they are not kept of all that the cache holds.
        """
        self._settle()
        hidden = self._parts.live.hidden
        if hidden is None or not set(layers) <= set(hidden.which) or hidden.first:
            return None
        if hidden.length != self._parts.live.held:
            return None
        return {layer: hidden.view(layer, start) for layer in layers}

    def head_kv(self, heads: PreTrainedModel, like: Callable[[], Sequence[torch.Tensor]], row: int = 0) -> HeadKV:
        """Finds and keeps the K/V that heads of drafts compute of the text in a row of the cache; see `HeadKV`."""
        return HeadKV(self._parts, heads, like, self._settle, row)

    def extend(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        kv: Sequence[LayerPair | None],
        states: Sequence[LayerState | None] = (),
        *,
        hidden: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        """Append columns that were computed by forwards over lent layers, or over what was read of these.

        Args:
            input_ids: [rows, tokens].
            position_ids: [rows, tokens], or [planes, rows, tokens].
            kv: For each layer, keys and values [rows, num_kv_heads, tokens, head_dim]; None where it has none.
            states: For each layer, the state of the only row behind the last of the tokens; None where it has none.
            hidden: Hidden states [rows, tokens, hidden_size] of the layers whose states are kept. Without them,
                nothing is known any more of what the cache holds, if it keeps some.
        """
        self._settle()
        live, model = self._parts.live, self._parts.binding.model()
        if any(states) and model is not None:
            leave_prompts(self._parts, model)
        self._begin()
        held = live.held
        stop = held + input_ids.shape[1]
        for layer, pair in zip(kv_layers(live.layers), kv, strict=True):
            if pair is not None:
                layer.fill(held, stop, [[row] for row in zip(*pair, strict=True)])
                if live.is_recording:
                    layer.native.crop(0)
        for layer, state in zip(kv_layers(live.layers), states, strict=bool(states)):
            if state is not None:
                layer.load_states([state])
        live.keep_hidden((hidden or {}).get)
        if live.ledger is not None and model is not None:
            if rope_regime(model, stop - int(live.ledger.log.pads.min())) != live.regime:
                live.ledger = None
        live.appended(input_ids, position_ids, None, stop)
        self._end()

    @property
    def rides_from(self) -> tuple[int, Progressive] | None:
        """The first column that a repair computes again along with later tokens, and how; None where nothing rides."""
        ledger = self._parts.live.ledger
        if ledger is None or ledger.blended is None or ledger.progressive is True or not may_repair(self._parts.live):
            return None
        return ledger.blended.exact_columns, ledger.progressive

    def take_repaired(self, start: int, kv: Sequence[LayerPair | None], computed: int) -> None:
        """Take exact K/V of the first tainted columns, computed by forwards over what was read of the layers.

        Args:
            start: The first of them, as `rides_from` has said.
            kv: For each layer, their keys and values [1, num_kv_heads, columns, head_dim]; None where it has none.
            computed: How many of them were computed a second time, and are to be counted.
        """
        self._begin()
        live, ledger = self._parts.live, self._parts.live.ledger
        if ledger is not None and ledger.blended is not None and ledger.blended.tainted_from(0) == start:
            stop = start
            for layer, pair in zip(kv_layers(live.layers), kv, strict=True):
                if pair is not None:
                    assert isinstance(layer, GrowingLayer)
                    stop = start + pair[0].shape[2]
                    layer.scatter(torch.arange(start, stop, device=pair[0].device)[None], *pair)
                    live.rewritten(1)
            live.tally.repaired += computed
            columns = np.zeros((1, ledger.log.length), dtype=bool)
            columns[0, start:stop] = True
            live.repaired(columns)
        self._end()
