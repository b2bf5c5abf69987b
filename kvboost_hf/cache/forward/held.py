"""What a cache holds: its layers, the ledger beside them, and how both are kept in step.

Everything here is about the state between forwards: rows that are reordered, columns that are cropped, forwards that
never returned, chunks that have become complete. What a forward is given is decided in `serve.py`.
"""

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from kvboost_hf.cache.forward.loading import Loading
from kvboost_hf.cache.forward.scatter import ScatterPass
from kvboost_hf.cache.identity.foreign import foreign_attention, holder_of_cache, hooks_registered, is_own
from kvboost_hf.cache.identity.model_state import ModelState
from kvboost_hf.cache.identity.walk import autocast
from kvboost_hf.cache.layers.base import ReuseLayer
from kvboost_hf.cache.layers.choose import make_layers
from kvboost_hf.cache.layers.quantized import mark
from kvboost_hf.cache.layers.static import StaticReuseLayer
from kvboost_hf.cache.live.compiled import StaticDecoding
from kvboost_hf.cache.live.ledger import Ledger
from kvboost_hf.cache.planning.chunks import Tokens
from kvboost_hf.cache.planning.plan import HEAD_TOKENS, RowPlan
from kvboost_hf.cache.planning.report import Tally, miss_report
from kvboost_hf.cache.prompt.generate_call import in_generate, in_prefill
from kvboost_hf.cache.prompt.hook import HookedCache, Kwargs
from kvboost_hf.cache.store.chunk_store import ChunkStore, Put, StoredChunk, StoredStates
from kvboost_hf.compat import cache_layers, known_reason
from kvboost_hf.config import KVQuantConfig, ReusePolicy
from kvboost_hf.errors import StoreClosedError

CHANGED = "the cache was changed by somebody else"
_UNPAID = (
    "storing has taken longer than what was reused of it has saved, so that text is now stored when it comes the "
    "second time (ReusePolicy(min_prefill_saving=0) stores all of it)"
)


@dataclass(frozen=True, slots=True)
class Running:
    """A forward under way: where to fall back to if it never returns, and what to record when it does."""

    length: int  # columns that are right whatever happens
    stop: int = 0  # columns when it is done
    commit: Callable[[], None] | None = None
    confirmed: bool = True  # no crop() will follow
    root_checked: bool = False  # the fingerprint was read just before
    scatter: ScatterPass | None = None  # puts the K/V of columns in any order in place
    began: float | None = None  # when, if it is to tell how fast the model is
    loading: Loading | None = None  # K/V from a lower tier is still on its way into the layers
    audited: Kwargs | None = None  # the caller's arguments, if the prompt is to be computed a second time
    audit_if_altered: bool = False  # only if a hook of somebody else turns out to change what is computed


class HoldingCache(HookedCache):
    """The layers of a `ChunkReuseCache`, and what is known of what they hold.

    Args:
        model: The model that it is made for. Held weakly.
        store: Where K/V outlives it.
        policy: How stored K/V may be used.
        salt: Of its prompts.
        max_cache_len: Columns of buffers that never move, or None.
        live_quant: How the layers hold K/V in codes, or None.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        store: ChunkStore,
        policy: ReusePolicy,
        salt: bytes,
        max_cache_len: int | None,
        live_quant: KVQuantConfig | None,
    ) -> None:
        self._model = weakref.ref(model)
        self.store, self.policy, self._salt = store, policy, salt
        self._unsupported = known_reason(model)
        self._plain = self._unsupported  # why the layers are transformers' own, for good or for this text, or None
        self._changed = False  # somebody else has changed what the layers held
        self._kinds_of: list[ReuseLayer] | None = None
        self._made: list[type | None] = []
        self._hooks = 0  # that others had put anywhere when the model was last looked at
        self._precision: Hashable = None  # autocast, then
        self._records_for_call = False  # a generate() call has asked the layers to keep what crop() may go back to
        self._used = False  # layers of a model that cannot reuse K/V hold something
        self._tally = Tally()
        self._running: Running | None = None
        self._bumps = ModelState.of(model).fingerprint.bumps
        self._fetched: list[StoredChunk | StoredStates] = []  # from lower tiers, for the prompt under way
        self._ledger: Ledger | None = None  # None: nothing is known of what the layers hold
        self._regime = b""  # of the rotary frequencies behind what the layers hold
        self._columns = 0  # held by layers that do not count themselves
        self._lost = False  # an interrupted forward took with it what the layers held
        self._untracked = False  # the model goes on from a prompt in a way that must not be stored
        self._static = StaticDecoding(model, max_cache_len) if max_cache_len is not None else None
        if max_cache_len is not None:
            self.max_cache_len = max_cache_len
        self._live_quant = live_quant
        self._mark = mark(live_quant) if live_quant is not None else b""  # of codes behind what the layers hold
        text_config = model.config.get_text_config(decoder=True)
        self._of_images = frozenset(getattr(text_config, "cross_attention_layers", None) or ())  # they hold no tokens
        self._layers = self._make_layers(model)
        self._stateful = any(layer.is_stateful for layer in self._layers)
        self._counting = next((layer for layer in self._layers if layer.length is not None), None)
        self._shown = self._native_layers(model)  # what `layers` is, unless somebody else has set it
        super().__init__(layers=self._shown)

    def _choose_layers(self, model: PreTrainedModel) -> None:
        """Before a text begins: take transformers' own layers for it if somebody else's code is given the cache."""
        reason = self._unsupported
        if reason is None and self._static is None:
            reason = holder_of_cache(model)
        if reason is None and ("update" in self.__dict__ or not is_own(type(self).update)):
            reason = "`update` of this ChunkReuseCache was replaced"
        if reason is not None and self._plain is not None:
            self._plain = reason
        elif reason is not self._plain or not self._owns_layers:
            self.store_tails()
            self._drop()
            self._plain = reason
            self._layers = self._make_layers(model)
            self._counting = next((layer for layer in self._layers if layer.length is not None), None)
            self._show(self._native_layers(model))

    def _show(self, layers: Sequence[Any]) -> None:
        """Have transformers see these layers; an attached call's own cache sees the same list."""
        recording = any(getattr(layer, "record_past", False) for layer in self.layers)
        self._shown[:] = layers
        self.layers = self._shown
        if recording:  # generate() has asked for it already
            super().activate_past_recording()  # type: ignore[no-untyped-call]

    def _follow_others(self) -> None:
        """Go on with layers that somebody else has put in place of ours, of which nothing is known."""
        self._note_change()
        self._plain, self._layers, self._counting, self._used = CHANGED, [], None, True

    @property
    def _owns_layers(self) -> bool:
        """Whether the layers that transformers sees are those that were made for it, as they were made."""
        return len(self.layers) == len(self._layers) and all(
            theirs is ours.native and type(theirs) is kind and "update" not in theirs.__dict__
            for theirs, ours, kind in zip(self.layers, self._layers, self._kinds, strict=True)
        )

    @property
    def _kinds(self) -> list[type | None]:
        """Classes of the layers that transformers sees, as they were made; None for one of somebody else."""
        if self._kinds_of is not self._layers:
            kinds = [type(layer.native) for layer in self._layers]
            self._kinds_of, self._made = self._layers, [kind if is_own(kind) else None for kind in kinds]
        return self._made

    # What transformers calls

    @property
    def is_compileable(self) -> bool:
        """Whether the next forward may be compiled: one that decodes, in a cache of a fixed size."""
        if self._static is None or self._plain is not None:
            return False
        if torch.compiler.is_compiling():
            return bool(super().is_compileable)
        return self._static.in_use and self._static_layers[0].whole and not in_prefill()

    def activate_past_recording(self) -> None:
        """See `Cache.activate_past_recording`; what generate() asks for ends with the next call."""
        recording = any(getattr(layer, "record_past", False) for layer in self.layers)
        self._records_for_call = self._records_for_call or (in_generate() and not recording)
        super().activate_past_recording()  # type: ignore[no-untyped-call]

    def _stop_recording(self) -> None:
        if self._records_for_call:
            self._records_for_call = False
            for layer in self._layers:
                layer.stop_recording()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` columns; what remains is confirmed.

        A positive number is how many columns to keep.
        """
        in_step = self._settled()
        remove = int(tokens_to_remove)
        if remove > 0:
            remove = min(0, remove - self._held())
        super().crop(remove)
        self._columns = max(0, self._columns + remove)
        if in_step is not None:
            in_step.rewind(max(0, in_step.log.length + remove))
            self._note_layers(in_step)
            self._confirm(in_step)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Make row i what row `beam_idx[i]` was."""
        in_step = self._settled()
        super().reorder_cache(beam_idx)
        self._select_rows(in_step, beam_idx.cpu().numpy())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`."""
        in_step = self._settled()
        super().batch_select_indices(indices)
        rows = indices.cpu().numpy()
        self._select_rows(in_step, np.flatnonzero(rows) if rows.dtype == np.bool_ else rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        in_step = self._settled()
        super().batch_repeat_interleave(repeats)
        if in_step is not None:
            self._select_rows(in_step, np.arange(in_step.log.batch_size).repeat(repeats))

    # Handing to the store

    def store_all(self, *, pinned: bool = False) -> list[Put]:
        """Offer everything that the cache holds to the store, unfinished chunks included."""
        ledger = self._in_step()
        if ledger is None or not self._may_store(ledger):
            return []
        results: list[Put] = []
        for row in range(ledger.log.batch_size):
            results += ledger.store_row(row, self._layers, self.store, pinned=pinned, again=True)
            results.append(ledger.store_tail(row, self._layers, self.store, pinned=pinned))
            if self._stateful:
                results.append(ledger.store_states(row, self._layers, self.store, pinned=pinned))
        return results

    def store_content(self, store: ChunkStore, start: int, *, pinned: bool = False) -> list[Put]:
        """Offer what the cache holds from column `start` on, of one row without padding, to be found by content only.

        It is cut as if it were all there is, so that it is cut in the same way behind any other text.
        """
        ledger = self._in_step()
        if ledger is None or not self._may_store(ledger):
            return []
        return ledger.store_content(start, self._layers, store, pinned=pinned)

    def store_tails(self) -> None:
        """Offer the tokens that fill no chunk to the store, before the cache lets go of them."""
        ledger = self._in_step()
        if ledger is not None and self._running is None and self._may_store(ledger):
            self._store_tails(ledger, keep=0)

    def _store_tails(self, ledger: Ledger, keep: int) -> None:
        """Offer the tails of the rows that are about to lose columns from `keep` on."""
        with_states = self._stateful and not ledger.unconfirmed
        offer = ledger.store_states if with_states else ledger.store_tail  # states bring their tail with them
        for row, pad in enumerate(ledger.log.pads):
            if ledger.log.length - max(keep, int(pad)) >= HEAD_TOKENS:
                offer(row, self._layers, self.store)

    def _confirm(self, ledger: Ledger, *, root_checked: bool = False) -> None:
        """Everything in the layers is there to stay: offer chunks that have become complete to the store."""
        ledger.unconfirmed = False
        if not ledger.has_new_chunk(self.store.chunker.chunk_size):
            return
        if self._may_store(ledger, root_checked=root_checked):
            self._store_new(ledger)
            self._release(ledger.first_unstored())
        else:  # there is no storing them later
            self._release(ledger.log.length)
            if not ledger.log.trusted:  # nor anything that follows: no need to ask again at each step
                self._ledger = None

    def _store_new(self, ledger: Ledger) -> None:
        """Offer chunks that have become complete to the store."""
        everything = not self.policy.min_prefill_saving or self.policy.mode == "blend"  # found behind other texts, too
        if ledger.store_new(self._layers, self.store, unseen=everything):
            self._tally.unstored = _UNPAID

    def _may_store(self, ledger: Ledger, *, root_checked: bool = False) -> bool:
        """Whether the layers hold what the ledger says, computed by the model as it is now."""
        if not self._untouched(ledger):
            self._note_change()
            return False
        if not ledger.log.trusted:
            return False
        model = self._model()
        if model is None:
            return False
        fingerprint = ModelState.of(model).fingerprint
        if fingerprint.altered is not None:
            return False
        # What others have put into it may have changed in the course of the forward.
        if root_checked and foreign_attention(model) is None and not fingerprint.watched:
            return True
        try:
            return self._root(self._regime) == ledger.root and fingerprint.altered is None
        except StoreClosedError:  # which another thread may do at any time
            return False

    def _untouched(self, ledger: Ledger) -> bool:
        """Whether nobody else has written to the layers, or changed how much they hold."""
        return self._owns_layers and all(
            layer.intact and (layer.length in (None, 0, ledger.log.length) or idx in self._of_images)
            for idx, layer in enumerate(self._layers)
        )

    def _note_change(self) -> None:
        """Nothing is known any more of what the layers hold."""
        self._ledger, self._changed = None, True
        self._tally.dropped = CHANGED

    def _root(self, regime: bytes) -> bytes | None:
        """What all chains of the model, as it is now, start from."""
        self._hooks, self._precision = hooks_registered(), autocast()
        return self.store.root(self._salt, regime + self._mark, read_all=self.policy.weights_check == "full")

    def _note_miss(self, ledger: Ledger, row: int, tokens: Tokens, plan: RowPlan) -> None:
        """Report where and why the store could give no more of a row that holds `tokens`."""
        if plan.miss is not None:
            evicted = self.store.was_evicted(plan.miss.wanted_key)
            other = self.store.known_under_other_root(ledger.root, tokens)
            self._tally.misses.append(miss_report(row, tokens, plan.miss, evicted=evicted, other_fingerprint=other))

    def _release(self, before: int) -> None:
        """Columns before `before` are of no more use to the store."""
        for layer in self._layers:
            if layer.is_sliding:
                layer.release(before)

    # Keeping the ledger beside the layers

    @property
    def nbytes(self) -> int:
        """Bytes of the live buffers, room to spare included; the store counts its own."""
        return sum(layer.nbytes for layer in self._layers)

    def _make_layers(self, model: PreTrainedModel) -> list[ReuseLayer]:
        if self._static is not None:
            return self._static.make_layers(model)
        return make_layers(model, self._live_quant) if self._plain is None else []

    def _native_layers(self, model: PreTrainedModel) -> list[Any]:
        return [layer.native for layer in self._layers] if self._plain is None else cache_layers(model)

    @property
    def _static_layers(self) -> list[StaticReuseLayer]:
        return cast("list[StaticReuseLayer]", self._layers)

    def _catch_up(self, static: StaticDecoding) -> None:
        """Take over what compiled steps have left."""
        version = self._layers_version()
        if self._running is not None or not any([layer.catch_up() for layer in self._static_layers]):
            return
        ledger = self._ledger
        if not static.catch_up(self._static_layers, ledger if ledger and ledger.version == version else None):
            self._ledger = None
        elif ledger is not None:
            self._note_layers(ledger)
            self._confirm(ledger)

    def _held(self) -> int:
        """Columns in the layers, armed or not."""
        if self._static is not None:
            self._catch_up(self._static)
        if self._counting is not None:
            return self._counting.length or 0
        if self._plain is None:
            return self._columns
        try:
            return super().get_seq_length()
        except (ValueError, RuntimeError):  # there are no attention layers
            return 0

    def _expect_padding(self, pads: NDArray[np.int64]) -> None:
        """Tell the layers where the shortest row begins."""
        for layer in self._layers:
            layer.expect_padding(int(pads.max()))

    def _note_layers(self, ledger: Ledger) -> None:
        """The ledger says what the layers hold now."""
        ledger.version = self._layers_version()
        if self._stateful:
            for layer in self._layers:
                layer.note_state()

    def _layers_version(self) -> int:
        return sum([layer.version for layer in self._layers])

    def _truncate(self, length: int) -> None:
        for layer in self._layers:
            layer.truncate(length)
        self._columns = min(self._columns, length)

    def _in_step(self, *, look: bool = True) -> Ledger | None:
        """The ledger, unless the layers were changed by somebody else since it was last brought up to date.

        Args:
            look: Find out whether somebody has written to their tensors. What is not found now is found later.
        """
        if self._static is not None:
            self._catch_up(self._static)
        ledger = self._ledger
        if ledger is not None and (ledger.version != self._layers_version() or (look and not self._untouched(ledger))):
            self._note_change()
        if self._bumps != (bumps := self._model_bumps()):  # store.invalidate() was called: K/V may not be the model's
            self._bumps, self._ledger = bumps, None
        return self._ledger

    def _model_bumps(self) -> int:
        model = self._model()
        return ModelState.of(model).fingerprint.bumps if model is not None else self._bumps

    def _settled(self) -> Ledger | None:
        """The ledger before a change from outside, with no interrupted forward left behind."""
        self._recover()
        return self._in_step()

    def _recover(self) -> None:
        """After a forward that raised or was interrupted, forget what it may have left in some of the layers."""
        running, self._running = self._running, None
        if running is None:
            return
        if running.scatter is not None:
            running.scatter.close()
        if running.loading is not None:
            running.loading.stop()
        if not all(layer.can_rewind(running.length) for layer in self._layers):
            self._drop()
            self._lost = running.length > 0
            return
        self._truncate(running.length)
        if self._ledger is not None:
            self._ledger.rewind(running.length)
            self._note_layers(self._ledger)

    def _drop(self) -> None:
        """Empty the layers."""
        model = self._model()
        for layer in self._layers:
            layer.reset()
        if self._plain is not None and self._used and model is not None:
            self._show(self._native_layers(model))
        self._used = self._untracked = self._lost = False
        self._columns = 0
        self._ledger = None

    def _select_rows(self, ledger: Ledger | None, rows: NDArray[np.int64]) -> None:
        if ledger is not None:
            ledger.select(rows)
            self._note_layers(ledger)
