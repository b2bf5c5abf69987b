"""`LiveKV`: the layers of a cache, and the record of the tokens whose K/V they hold.

Every method that changes the layers brings the ledger up to date, with the version of the layers that it belongs to.
A version that the ledger does not have means that somebody else has changed the layers: then nothing is known of what
they hold any more, nothing of it is stored, and `changed` is True.
"""

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvboost_hf.cache.identity import ModelState
from kvboost_hf.cache.identity.foreign import is_own
from kvboost_hf.cache.identity.weights import are_held_by_more, references
from kvboost_hf.cache.layers import make_layers
from kvboost_hf.cache.layers.base import ReuseLayer, kv_layers
from kvboost_hf.cache.layers.growing import GrowingLayer
from kvboost_hf.cache.layers.hidden_states import HiddenStates
from kvboost_hf.cache.layers.stateful import states_of
from kvboost_hf.cache.layers.static import StaticReuseLayer
from kvboost_hf.cache.live.compiled import StaticDecoding
from kvboost_hf.cache.live.ledger import KnownRow, Ledger
from kvboost_hf.cache.planning.chunks import Tokens, is_text
from kvboost_hf.cache.planning.report import Tally
from kvboost_hf.cache.prompt.token_log import MaskShape
from kvboost_hf.compat import cache_layers, forms_of, known_reason
from kvboost_hf.config import KVQuantConfig

_is_own: Callable[[type], bool] = cache(is_own)  # asked of the classes of layers for each text
CHANGED = "the cache was changed by somebody else"
IN_GRAPH = "`torch.compile` runs the whole forward in a graph, of a cache of a fixed size"
NO_HIDDEN = "its forward has not shown its hidden states, which are kept"


class Behind(NamedTuple):
    """Tokens that follow what the layers hold: the next forward computes them in front of its own."""

    column: int
    ids: torch.Tensor  # [batch, tokens]
    # [batch or 1, tokens] or [planes, batch, tokens]; None where they are left to the model.
    positions: torch.Tensor | None

    def part(self, stop: int) -> "Behind | None":
        """The tokens up to column `stop`; None if there are none."""
        n = stop - self.column
        positions = self.positions[..., :n] if self.positions is not None else None
        return Behind(self.column, self.ids[:, :n], positions) if n > 0 else None


@dataclass(slots=True)
class _KeptStates:
    """Where the layers have kept states, and the tokens that were appended since."""

    column: int
    since: list[tuple[torch.Tensor, torch.Tensor | None]] = field(default_factory=list)  # ids and positions

    def append(self, ids: torch.Tensor, positions: torch.Tensor | None) -> None:
        """Note tokens that a forward has appended: copies, for the caller may write the next ones there."""
        self.since.append((ids.clone(), positions.clone() if positions is not None else None))

    def behind(self, stop: int) -> Behind | None:
        """The tokens since, up to column `stop`."""
        if not self.since:
            return None
        ids, positions = zip(*self.since, strict=True)
        known = None if any(each is None for each in positions) else torch.cat(positions, dim=-1)
        return Behind(self.column, torch.cat(ids, dim=1), known).part(stop)


class LiveKV:
    """The K/V that one cache holds.

    Args:
        model: The model that computes it. Held weakly.
        static: Decoding in buffers that never move, or None for layers that grow.
        live_quant: How layers of full attention quantize K/V, or None.
        hidden_layers: The layers whose hidden states are kept beside K/V, until `keep_hidden_of` names others.
        reproducible: Keep and store only what was computed in whole pieces, see `ReusePolicy`.

    Attributes:
        layers: The layers, in the order of the model, and behind them one of hidden states if they are kept; none
            while `plain_reason` is set.
        visible: The list of layers that transformers sees, as the cache's `layers`. Anybody may change it.
        ledger: The tokens behind the layers; None where nothing is known of what they hold.
        regime: Names the rotary frequencies that the K/V was computed with.
        plain_reason: Why transformers' own layers are used, for this text or for good; None if ours are.
        changed: Somebody else has changed what the layers held; the next prompt reports it.
        untracked: The model goes on from a prompt in a way that must not be stored.
        lost: An interrupted forward took with it what the layers held.
        behind: Tokens that were cropped out of states only, and that the next forward computes again; or None.
        looked: The number of what was last found in the model, when the layers were made or seen to fit it.
        tally: What is reported of the last prompt.
        known: What is known of the next prompt, so that it is not looked up again; None for nothing.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        static: StaticDecoding | None,
        live_quant: KVQuantConfig | None,
        *,
        hidden_layers: tuple[int, ...] = (),
        reproducible: bool = False,
    ) -> None:
        self.static, self.tally = static, Tally()
        self.unsupported = self.plain_reason = known_reason(model)
        self.ledger: Ledger | None = None
        self.known: KnownRow | None = None
        self.regime = b""
        self.changed = self.untracked = self.lost = False
        self.behind: Behind | None = None
        self._kept: _KeptStates | None = None
        self.plain_used = False  # transformers' own layers hold something
        self.in_forward = False  # a forward with the cache is under way
        self.stepped = False  # compiled steps were taken over, and not offered to the store yet
        self._model, self._live_quant, self.hidden_layers = weakref.ref(model), live_quant, hidden_layers
        self._reproducible = reproducible
        self._columns = 0  # held by layers that do not count themselves
        fingerprint = ModelState.of(model).fingerprint
        self._fingerprint = weakref.ref(fingerprint)  # it may hold hooks that hold the model
        self._bumps, self.looked = fingerprint.bumps, fingerprint.number
        self._records_for_call = False  # a generate() call has asked the layers to keep what crop() may go back to
        self._own_of: list[ReuseLayer] | None = None
        self._own: dict[str, list[int]] = {}  # by method, numbers of these layers: `has_layers_elsewhere` counts them
        text_config = model.config.get_text_config(decoder=True)
        self._of_images = frozenset(getattr(text_config, "cross_attention_layers", None) or ())  # they hold no tokens
        self._make_layers(model)
        self.stateful = any([layer.is_stateful for layer in self.layers])
        self._shown = self._native_layers(model)  # what `visible` is, unless somebody else has set it
        self.visible: list[Any] = self._shown

    # Layers

    def _make_layers(self, model: PreTrainedModel) -> None:
        if self.static is not None:
            self.layers = self.static.make_layers(model)
        elif self.plain_reason is not None:
            self.layers = []
        else:
            self.layers = make_layers(
                model, self._live_quant, hidden_layers=self.hidden_layers, contiguous=self._reproducible
            )
        self.hands_out = False
        self._forms: tuple[Hashable, ...] | None = None
        self._look_at_layers()

    @property
    def forms(self) -> tuple[Hashable, ...]:
        """What the model's `layer_forms` were when the layers were made."""
        if self._forms is None:
            self._forms = forms_of(layer.stock for layer in kv_layers(self.layers))
        return self._forms

    def _look_at_layers(self) -> None:
        """Note which layer counts columns, and the classes of what transformers sees; None for somebody else's."""
        seen = kv_layers(self.layers)
        self.counting: ReuseLayer | None = next((layer for layer in seen if layer.length is not None), None)
        kinds = [type(layer.native) for layer in seen]
        self._classes = [kind if _is_own(kind) else None for kind in kinds]

    def _native_layers(self, model: PreTrainedModel) -> list[Any]:
        if self.plain_reason is not None:
            return cache_layers(model)
        return [layer.native for layer in kv_layers(self.layers)]

    @property
    def hidden(self) -> HiddenStates | None:
        """The layer of hidden states, if they are kept."""
        last = self.layers[-1] if self.layers else None
        return last if isinstance(last, HiddenStates) else None

    def _with_own(self, name: str) -> list[ReuseLayer]:
        """The layers whose kind does something in a method that does nothing by default."""
        if self._own_of is not self.layers:
            self._own_of, self._own = self.layers, {}
        if name not in self._own:
            default = getattr(ReuseLayer, name)
            kinds = list(map(type, self.layers))
            self._own[name] = [at for at, kind in enumerate(kinds) if getattr(kind, name) is not default]
        return [self.layers[at] for at in self._own[name]]

    @property
    def static_layers(self) -> list[StaticReuseLayer]:
        """The layers of a cache of a fixed size, also where somebody else has put them in other places."""
        layers = self.layers if self.plain_reason is None else self.visible
        return [layer for layer in layers if isinstance(layer, StaticReuseLayer)]

    def begin_text(self, model: PreTrainedModel, reason: str | None) -> None:
        """Take transformers' own layers for a text, for a `reason`, or ours again. What they held is dropped."""
        self.drop()
        self.plain_reason = reason
        self._make_layers(model)
        self._show(self._native_layers(model))

    def keep_hidden_of(self, model: PreTrainedModel, layers: tuple[int, ...]) -> None:
        """Keep the hidden states of these layers of the next text. What the layers hold is dropped."""
        self.hidden_layers = layers
        self.begin_text(model, self.plain_reason)

    def take_form(self, model: PreTrainedModel, static: StaticDecoding | None) -> None:
        """Hold the same K/V in buffers that never move, or, without `static`, in ones that grow.

        torch.OutOfMemoryError: there is no room for both; nothing has changed then.
        """
        if self.plain_reason is not None or not self.owns_layers:  # others hold the K/V, and go on with it
            self.static = static
            return
        ledger = self.in_step()
        if ledger is None and static is not None:  # nobody can use what is not known
            self.drop()
        before, self.static = (self.static, self.layers, self.hands_out), static
        try:
            self._make_layers(model)
            for old, new in zip(kv_layers(before[1]), kv_layers(self.layers), strict=True):
                _move(old, new, ledger.log.batch_size if ledger is not None else None)
        except BaseException:
            self.static, self.layers, self.hands_out = before
            self._look_at_layers()
            raise
        self._show(self._native_layers(model))
        if ledger is not None:
            self.expect_padding(ledger.log.pads)
            self._note(ledger)

    def follow_others(self) -> None:
        """Go on with layers that somebody else has put in place of ours, of which nothing is known."""
        self.note_change()
        self.plain_reason, self.layers, self.plain_used = CHANGED, [], True
        self._look_at_layers()

    def _show(self, layers: Sequence[Any]) -> None:
        """Have transformers see these layers; an attached call's own cache sees the same list."""
        recording = self.is_recording
        self._shown[:] = layers
        self.visible = self._shown
        if recording:  # generate() has asked for it already
            Cache(layers=self._shown).activate_past_recording()  # type: ignore[no-untyped-call]

    @property
    def owns_layers(self) -> bool:
        """Whether the layers that transformers sees are those that were made for it, as they were made."""
        if len(self.visible) != len(self._classes):
            return False
        for theirs, ours, made in zip(self.visible, self.layers, self._classes, strict=False):
            if theirs is not ours and theirs is not ours.native:
                return False
            if type(theirs) is not made or "update" in theirs.__dict__:
                return False
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, room to spare included."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def is_recording(self) -> bool:
        """Whether layers keep what `crop` may go back to."""
        return any(getattr(layer, "record_past", False) for layer in self.visible)

    def record_for_call(self) -> None:
        """The layers are asked to record by a generate() call, and until the next one."""
        self._records_for_call = self._records_for_call or not self.is_recording

    def end_call(self) -> None:
        """Stop recording what a generate() call has asked for."""
        if self._records_for_call:
            self.stop_recording()

    def stop_recording(self) -> None:
        """Let go of what layers keep for `crop`."""
        self._records_for_call, self._kept = False, None
        with self.changing():
            for layer in self.layers:
                layer.stop_recording()

    def hand_out(self, allowed: bool) -> None:
        """Let layers give the attention K/V as it is held: if it can read that, and only padding is hidden."""
        if self.hands_out != allowed:
            self.hands_out = allowed
            for layer in self.layers:
                layer.hands_out = allowed

    def expect_padding(self, pads: NDArray[np.int64]) -> None:
        """Tell the layers where the shortest row begins."""
        longest = int(pads.max())
        for layer in self._with_own("expect_padding"):
            layer.expect_padding(longest)

    def release(self, before: int) -> None:
        """Columns before `before` are of no more use to the store: windows may let go of them."""
        for layer in self.layers:
            if layer.is_sliding:
                layer.release(before)

    # What they hold

    @property
    def held(self) -> int:
        """Columns in the layers; without compiled steps that `catch_up` has not taken over."""
        if (counting := self.counting) is not None:  # other threads may ask, too
            return counting.length or 0
        if self.plain_reason is None:
            return self._columns
        try:
            return int(Cache(layers=self.visible).get_seq_length())
        except (ValueError, RuntimeError):  # there are no attention layers
            return 0

    @property
    def claimed(self) -> int:
        """Columns that callers may count on: those held, and those that the next forward computes in front."""
        behind = self.behind
        return self.held + (behind.ids.shape[1] if behind is not None else 0)

    def in_step(self, *, look: bool = True, owned: bool = False) -> Ledger | None:
        """The ledger, unless the layers were changed by somebody else since it was last brought up to date.

        With `look`, find out whether somebody has written to their tensors: what is not found now is found later.
        `owned` says that `owns_layers` was True a moment ago.
        """
        ledger = self.ledger
        if ledger is not None and (
            ledger.version != self._version() or (look and not self.untouched(ledger, owned=owned))
        ):
            self.note_change()
        fingerprint = self._fingerprint()
        if fingerprint is not None and self._bumps != fingerprint.bumps:  # store.invalidate() was called
            self._bumps, self.ledger = fingerprint.bumps, None
        return self.ledger

    def untouched(self, ledger: Ledger, *, owned: bool = False) -> bool:
        """Whether nobody else has written to the layers, or changed how much they hold."""
        if not owned and not self.owns_layers:
            return False
        lengths = None, 0, ledger.log.length
        for idx, layer in enumerate(self.layers):
            if not layer.intact or (layer.length not in lengths and idx not in self._of_images):
                return False
        return True

    @property
    def is_held_by_others(self) -> bool:
        """Whether somebody else may hold memory of the layers, to which they can write unseen (NumPy, `.data`)."""
        known = [layer for layer in self.layers if isinstance(layer, GrowingLayer | HiddenStates)]
        if len(known) < len(self.layers):
            return True
        return are_held_by_more(chain.from_iterable([layer.buffers for layer in known]))

    @property
    def has_layers_elsewhere(self) -> bool:
        """Whether somebody else refers to one of the layers, or to the list of them that transformers sees."""
        if self.visible is not self._shown:
            return True
        known = [sum(each is layer for each in self._shown) + 1 + (layer is self.counting) for layer in self.layers]
        found = references([*self.layers, self._shown])
        return found[-1] > 2 or any(more > own for more, own in zip(found, known, strict=False))

    def note_change(self) -> None:
        """Nothing is known any more of what the layers hold."""
        self.ledger, self.changed, self.stepped = None, True, False
        self.tally.dropped = CHANGED

    def _version(self) -> int:
        return sum([layer.version for layer in self.layers])

    def _note(self, ledger: Ledger) -> None:
        """The ledger says what the layers hold now."""
        if self.hidden is not None and self.hidden.length != ledger.log.length:
            self.ledger, self.tally.bypass = None, self.tally.bypass or NO_HIDDEN
            return
        ledger.version = self._version()
        if self.stateful:
            for layer in self.layers:
                layer.note_state()

    # Changes

    def start_ledger(self, pads: NDArray[np.int64], root: bytes, regime: bytes) -> Ledger:
        """The ledger, a new one if the layers hold nothing that is known."""
        self.regime = regime
        self.expect_padding(pads)
        if self.ledger is None:
            self.ledger = Ledger.empty(pads, root)
            self.ledger.in_pieces = 0 if self._reproducible else None
        return self.ledger

    def filled(self, ids: Tokens, stop: int) -> None:
        """The layers were given the K/V of `ids` [batch, columns], up to column `stop`."""
        self._columns, self._kept = stop, None
        if (ledger := self.ledger) is not None:
            ledger.log.extend(ids)
            self._note(ledger)

    def repaired(self, columns: NDArray[np.bool_]) -> None:
        """The layers were given the K/V of tainted columns anew; see `Ledger.repaired`."""
        assert self.ledger is not None
        self.ledger.repaired(columns)
        self._note(self.ledger)

    def rewritten(self, writes: int) -> None:
        """The layers were given K/V anew, in so many writes; whatever else has changed them shows as before."""
        if self.ledger is not None:
            self.ledger.version += writes

    def appended(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor | None, mask: MaskShape | None, stop: int
    ) -> None:
        """A forward has appended the K/V of `input_ids` [batch, m], up to column `stop`; they are read when needed."""
        self._columns = stop
        if self._kept is not None:
            self._kept.append(input_ids, position_ids)
        if (ledger := self.ledger) is not None:
            ledger.log.append(input_ids, position_ids, mask)
            self._note(ledger)

    def advanced(self, stop: int, input_ids: torch.Tensor | None, position_ids: torch.Tensor | None) -> None:
        """A forward that is not recorded has ended at column `stop`, after `input_ids` if they are known."""
        self._columns = stop
        if input_ids is None:
            self._kept = None
        elif self._kept is not None:
            self._kept.append(input_ids, position_ids)

    def keep_hidden(self, of: Callable[[int], torch.Tensor | None]) -> None:
        """A forward under way has computed hidden states of its columns; `of` gives those of a layer, if known."""
        if self.hidden is not None and self.ledger is not None:
            self.hidden.append(of)

    @contextmanager
    def changing(self) -> Iterator[Ledger | None]:
        """Within it, change rows or columns of all layers alike, and of the ledger that it gives, if there is one."""
        ledger = self.in_step()
        yield ledger
        if ledger is not None:
            self._note(ledger)

    def keep_states(self) -> None:
        """Before a forward of several tokens: keep the states, if `crop` may take some of these back."""
        held = self.held
        if self.stateful and held and self.plain_reason is None and self.is_recording:
            if self._kept is None or self._kept.column != held:
                self._kept = _KeptStates(held)
                for layer in self.layers:
                    layer.keep_state(held)
            self._kept.since.clear()

    def can_crop(self, columns: int) -> bool:
        """Whether transformers' own `crop` can remove the last columns from all layers."""
        held = self.held
        return all([layer.can_crop(columns, held) for layer in self._with_own("can_crop")])

    def crop(self, columns: int) -> None:
        """Remove the last columns, or none, so that layers let go of what they have recorded."""
        for native in self.visible:
            recorded = getattr(native, "record_past", False) and getattr(native, "is_initialized", True)
            if columns or recorded or isinstance(native, ReuseLayer):
                native.crop(-columns)

    def crop_states(self, ledger: Ledger | None, length: int, offer: Callable[[], None]) -> None:
        """Go back to states at or before column `length`, and leave the tokens up to there to the next forward.

        To be called within `changing`. `offer` offers to the store what is held: without states, the next forward
        looks there.
        """
        if self._kept is not None and self._kept.column <= length and self.can_rewind(self._kept.column):
            behind = self._kept.behind(length)
            self.rewind(self._kept.column)
            self._kept.since.clear()
            self.behind = behind
            return
        known = ledger is not None and ledger.log.trusted and not ledger.log.pads.any()
        columns = ledger.log.columns()[:, :length].copy() if known and ledger is not None else None
        if length and (columns is None or not is_text(columns)):
            raise RuntimeError(
                f"`crop` to {length} of {self.held} columns cannot be undone in the states of this model: it is not "
                "known which tokens they hold, or some of them are padding or images. Call reset(), and pass the "
                "whole text."
            )
        offer()
        self.drop()
        if columns is not None and length:
            self.behind = Behind(0, torch.from_numpy(columns), None)

    def cropped(self, ledger: Ledger | None, columns: int) -> None:
        """The last `columns` were removed from the layers; to be called within `changing`."""
        self._columns = max(0, self._columns - columns)
        if ledger is not None:
            ledger.rewind(max(0, ledger.log.length - columns))
            if self.hidden is not None:
                self.hidden.truncate(ledger.log.length)

    def selected(self, ledger: Ledger, rows: NDArray[np.int64]) -> None:
        """Row i of the layers is what row `rows[i]` was; to be called within `changing`."""
        self._kept = None
        ledger.select(rows)
        if self.hidden is not None:
            self.hidden.select(torch.from_numpy(rows))

    def can_rewind(self, length: int) -> bool:
        """Whether all layers can forget the columns from `length` on."""
        return all([layer.can_rewind(length) for layer in self._with_own("can_rewind")])

    def rewind(self, length: int) -> None:
        """Forget the columns from `length` on."""
        for layer in self.layers:
            layer.truncate(length)
        if self._kept is not None and self._kept.column > length:
            self._kept = None
        self._columns = min(self._columns, length)
        if self.ledger is not None:
            self.ledger.rewind(length)
            self._note(self.ledger)

    def fall_back(self, length: int) -> None:
        """After a forward that failed: forget what it may have left in some of the layers, from `length` on."""
        if self.can_rewind(length):
            self.rewind(length)
        else:
            self.drop()
            self.lost = length > 0

    def fall_behind(self, behind: Behind) -> None:
        """After a forward that failed, which would have computed these: leave them to the next one."""
        if behind.column == 0:
            self.drop()
        if self.held == behind.column:
            self.behind = behind

    def drop(self) -> None:
        """Empty the layers."""
        model = self._model()
        self.behind = self._kept = None
        for layer in self.layers:
            layer.reset()
        if self.plain_reason is not None and self.plain_used and model is not None:
            self._show(self._native_layers(model))
        self.plain_used = self.untracked = self.lost = self.stepped = False
        self._columns = 0
        self.ledger = None

    def catch_up(self) -> None:
        """Take over what compiled steps have left: before anything is asked of the layers or the ledger."""
        static, version, ledger = self.static, self._version(), self.ledger
        if static is None or self.in_forward:
            return
        held, appended = self.held, any([layer.catch_up() for layer in self.static_layers])
        if self.stateful and static.is_torn(self.static_layers, held):
            static.in_step, static.ahead = False, 0
            self.drop()
            self.lost = True
            return
        if not appended:
            return
        if self.ledger is None and self.tally.bypass in (None, IN_GRAPH):  # nobody has seen the text begin
            self.tally.bypass = IN_GRAPH
            self.tally.prompt = self.tally.forwarded = self.held * len(self.static_layers[0].buffers[0])
        if not static.catch_up(self.static_layers, ledger if ledger and ledger.version == version else None):
            self.ledger = None
        elif ledger is not None:
            self._note(ledger)
            self.stepped = True

    def share_into(self, twin: "LiveKV", layers: list[Any] | None) -> None:
        """Have `twin` hold the same, in layers of its own that share buffers with these until one of them writes.

        `layers` are copies of what transformers sees, where these are its own layers.
        """
        twin.plain_reason, twin.plain_used, twin.changed = self.plain_reason, self.plain_used, self.changed
        twin.hidden_layers, twin.layers = self.hidden_layers, [layer.share() for layer in self.layers]
        twin.hands_out = self.hands_out
        twin._look_at_layers()
        twin.visible[:] = [layer.native for layer in kv_layers(twin.layers)] if layers is None else layers
        twin.regime, twin._columns, twin._bumps = self.regime, self._columns, self._bumps
        twin.looked, twin._forms = self.looked, self.forms
        twin._records_for_call, twin.behind = self._records_for_call, self.behind
        twin.ledger = self.ledger.copy() if self.ledger is not None else None
        if self.static is not None and twin.static is not None:
            twin.static.step_log = self.static.step_log.copy()


def _move(old: ReuseLayer, new: ReuseLayer, rows: int | None) -> None:
    """Fill an empty layer with what another one holds, `rows` if they are known: in the same buffers where it can."""
    if old.is_stateful:
        states = states_of(old) if hasattr(old, "conv_states") else []
        count = len(states[0]) if states else rows or 0
        new.load_states([old.save_state(row) for row in range(count)])
    if not isinstance(old, GrowingLayer) or not isinstance(new, GrowingLayer):
        return
    if not old.length:
        return
    if isinstance(old, StaticReuseLayer) and old.first == 0 and new.can_take(old.device):
        new.take(old.buffers, old.length)
        return
    rows = old.buffers[0].shape[0] if rows is None else rows
    pieces = [old.columns(row, old.first, old.length) for row in range(rows)]
    new.fill(old.first, old.length, [[piece] if piece else [] for piece in pieces])
