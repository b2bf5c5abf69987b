"""The repair that follows the first token: what moved chunks have left is computed again, in order.

A column is exact if every column before it is. So each piece begins where the last one has ended, and what was chosen
before the first token is computed a second time. When no column is left, the row is stored under its history.

at once     before the next token, in a forward of its own           `repair_more`
riding      some columns in the forward of each next token           `RidingStep`
idle        when the call has ended, until somebody needs the cache  `repair_while_idle`
"""

import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from kvboost_hf.cache.costs import free_columns, no_column_is_free
from kvboost_hf.cache.forward.admission import RIDING_ON_CPU, RIDING_UNWANTED, RIDING_WINDOW, UNKNOWN, needs_no_mask
from kvboost_hf.cache.forward.running import CacheParts, Forward, Request, note_hooks, offer
from kvboost_hf.cache.forward.scatter import Columns, ScatterPass, Stopped
from kvboost_hf.cache.layers.base import ReuseLayer
from kvboost_hf.cache.layers.growing import GrowingLayer
from kvboost_hf.cache.live import LiveKV
from kvboost_hf.cache.planning.chunks import is_text
from kvboost_hf.cache.planning.moved import Mask, choose_columns
from kvboost_hf.cache.prompt import ForwardInputs, Kwargs
from kvboost_hf.cache.prompt.token_log import MaskShape
from kvboost_hf.compat import PrivateCache, input_device, is_compiled, is_running, run_model
from kvboost_hf.device_link import link

PIECE = 512  # columns at once where nobody waits
_IDLE_PIECE = 128  # columns at once that are lost where somebody comes
_AT_ONCE = 2048  # columns: with so many, the first token alone stands on repaired K/V, and all later ones on exact K/V
_TOKENS = 3  # with which all of a longer prompt is computed again: its mask has columns by columns


def may_repair(live: LiveKV, *, at_once: bool = False) -> bool:
    """Whether a cache holds tainted columns that can be computed again, and are to be: with later tokens, or now."""
    ledger = live.ledger
    return (
        ledger is not None
        and ledger.blended is not None
        and (at_once or ledger.progressive is not False)
        and not ledger.unconfirmed
        and ledger.log.trusted
        and _holds_all(live.layers)
        and is_text(ledger.log.columns())  # images would have to be shown again
    )


def reason_against_riding(live: LiveKV, model: PreTrainedModel | None) -> str | None:
    """Why new tokens do not take the tainted columns of a cache along, as far as that is known.

    None if they do, or if there are none. Any thread may ask.
    """
    ledger = live.ledger
    if ledger is None or ledger.blended is None or ledger.progressive is True:
        return None
    if ledger.progressive is False:
        return RIDING_UNWANTED
    if not _holds_all(live.layers):
        return RIDING_WINDOW
    if not may_repair(live):
        return UNKNOWN
    on_cpu = ledger.progressive == "ride" and model is not None and no_column_is_free(model)
    return RIDING_ON_CPU if on_cpu else None


def columns_per_token(live: LiveKV) -> int:
    """How many columns of each row to compute again before a new token: all, or a third of a long prompt."""
    assert live.ledger is not None
    return max(_AT_ONCE, math.ceil(live.ledger.log.length / _TOKENS))


def riding_columns(live: LiveKV, model: PreTrainedModel) -> int:
    """How many columns of each row to compute again in the forward of a new token."""
    assert live.ledger is not None
    asked, rows = live.ledger.progressive, live.ledger.log.batch_size
    return free_columns(model) // rows if asked == "ride" else int(asked)


def repair_more(live: LiveKV, model: PreTrainedModel, most: int) -> None:
    """Compute the next tainted columns again, at most `most` of each row.

    An interrupt leaves some layers with new K/V and others with old: the ledger still says that it is tainted.
    """
    _note_repaired(live, *_compute_again(live, model, most))


@torch.no_grad()
def _compute_again(
    live: LiveKV, model: PreTrainedModel, most: int, stop: threading.Event | None = None
) -> tuple[Columns, Mask]:
    """Put new K/V of the next tainted columns into the layers; returns what `_note_repaired` is to be told.

    Ends with `Stopped` where `stop` is set.
    """
    ledger, layers = live.ledger, live.layers
    assert ledger is not None
    assert ledger.blended is not None
    ids = ledger.log.columns()
    wanted = ledger.blended.next_tainted(ids.shape[1], most)
    columns = choose_columns(list(wanted), list(np.ones_like(wanted)))
    cache = PrivateCache([layer.native for layer in layers])
    pads = ledger.log.pads.tolist()
    scatter = ScatterPass(model, cache, layers, columns, pads, unmasked=needs_no_mask(model), stop=stop)
    cache.take = scatter.update
    try:
        given = scatter.arguments(torch.from_numpy(ids).to(input_device(model)), 0)
        run_model(model, cache=cache, past_hooks=True, **given)
    finally:
        scatter.close()
        cache.take = None
        live.rewritten(scatter.writes)
    return columns, wanted


def _note_repaired(live: LiveKV, columns: Columns, wanted: Mask) -> None:
    """The layers hold new K/V of `columns` [batch, m], of which `wanted` ones [batch, length] were tainted."""
    assert live.ledger is not None
    live.tally.repaired += int((columns >= live.ledger.log.pads[:, None]).sum())
    live.repaired(wanted)


def _holds_all(layers: Sequence[ReuseLayer]) -> bool:
    """Whether no layer has let go of columns, as windows do."""
    return not any(layer.first for layer in layers)


class RidingStep(Forward):
    """A decoding step, or candidates to verify, whose forward computes some tainted columns again on the way.

    A pass over the weights that one token needs has room for some more: `most` of each row. The new tokens attend to
    the new K/V of those.
    """

    takes_kv = True

    def __init__(self, parts: CacheParts, held: int, inputs: ForwardInputs, mask: MaskShape | None, most: int) -> None:
        super().__init__(parts, held)
        self._inputs, self._mask, self._most = inputs, mask, most
        self._wanted: Mask | None = None
        self._scatter: ScatterPass | None = None

    @property
    def _stop(self) -> int:
        return self.length + self._inputs.input_ids.shape[1]

    def begin(self, request: Request) -> Kwargs:
        live, own = self.parts.live, self._inputs.input_ids
        ledger, model, new = live.ledger, request.model, own.shape[1]
        assert ledger is not None
        assert ledger.blended is not None
        known = ledger.log.columns()
        self._wanted = np.pad(
            ledger.blended.next_tainted(self.length, self._most), ((0, 0), (0, new)), constant_values=True
        )
        columns = choose_columns(list(self._wanted), list(np.ones_like(self._wanted)))
        self._scatter = ScatterPass(model, request.cache, live.layers, columns, ledger.log.pads.tolist(), new=new)
        ids = torch.cat([torch.from_numpy(known).to(own.device), own], dim=1)
        given = {**request.kwargs, **self._scatter.arguments(ids, 0)}
        if self._inputs.position_ids is not None:
            given["position_ids"][:, -new:] = self._inputs.position_ids
        given["logits_to_keep"] = min(request.kwargs.get("logits_to_keep") or new, new)
        given.pop("cache_position", None)
        return given

    def update(
        self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        assert self._scatter is not None
        layer = self.parts.live.layers[layer_idx]
        assert isinstance(layer, GrowingLayer)
        with torch.no_grad():
            layer.open(self._stop, (keys[:1, :, :1], values[:1, :, :1]), len(keys))
        found: tuple[torch.Tensor, torch.Tensor] = self._scatter.update(layer_idx, keys, values)
        return found

    def record(self, output: Any) -> Any:
        assert self._scatter is not None
        assert self._wanted is not None
        self._scatter.close()
        live, inputs = self.parts.live, self._inputs
        live.appended(inputs.input_ids, inputs.position_ids, self._mask, self._stop)
        if live.ledger is not None:
            columns = self._scatter.columns[:, : -inputs.input_ids.shape[1]]
            _note_repaired(live, columns, self._wanted)
        note_hooks(self.parts, confirmed=not inputs.verifies)

    def settle(self) -> None:
        offer(self.parts, self._stop, confirmed=not self._inputs.verifies, root_checked=False)

    def abandon(self) -> None:
        if self._scatter is not None:
            self._scatter.close()
        super().abandon()


def repair_while_idle(parts: CacheParts, stop: threading.Event) -> bool:
    """Compute tainted columns again until none is left, `stop` is set, or another call runs the model.

    A piece counts only if the model was the same before and after it. A compiled model is left alone: PyTorch's
    compiler may crash a process in which another thread compiles, or resets it, meanwhile. Returns whether columns are
    left because of another call.
    """
    live, ledger, model = parts.live, parts.live.ledger, parts.binding.model()
    if ledger is None or ledger.progressive is True or live.in_forward or model is None or is_compiled(model):
        return False
    broken_off = False
    try:
        buffers = [each for layer in live.layers if isinstance(layer, GrowingLayer) for each in layer.buffers]
        with torch.inference_mode(any(buffer.is_inference() for buffer in buffers)):  # else they cannot be written to
            while not (stop.is_set() or broken_off) and may_repair(live) and _is_as_it_was(parts):
                broken_off = not _repair_piece(parts, stop)
    finally:
        for device in {
            layer.device for layer in live.layers if isinstance(layer, GrowingLayer) and layer.is_initialized
        }:
            if link.is_apart(device):  # whoever comes may use another stream
                link.record(link.current(device)).synchronize()
    return broken_off


def _repair_piece(parts: CacheParts, stop: threading.Event) -> bool:
    """Compute the next columns again; returns whether that is done, and not left to another call of the model."""
    live, model = parts.live, parts.binding.model()
    if model is None or is_running(model):
        return model is None
    done = None
    try:
        done = _compute_again(live, model, _IDLE_PIECE, stop)
    except Stopped:
        pass
    finally:
        if not _is_as_it_was(parts):
            live.note_change()  # layers may hold K/V of what the model was meanwhile
            done = None
    if done is None:
        return False
    _note_repaired(live, *done)
    if live.ledger is not None and live.ledger.blended is None:
        parts.writer.confirm(live.ledger)
        parts.writer.offer_tails()  # nobody may use the cache again
    return True


def _is_as_it_was(parts: CacheParts) -> bool:
    """Whether the model computes what it did when the rest of the prompt was computed, and nobody has touched that."""
    return parts.binding.reason_in_training is None and parts.writer.storable() is not None
