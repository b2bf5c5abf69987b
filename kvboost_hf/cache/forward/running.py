"""Forwards under way: how each kind begins, what it records when it is done, and what is left when it is abandoned.

Layers can also be lent to forwards over tokens of which not all will stay, as drafts that branch: side by side in the
layers, they are no text that the cache could keep track of. It takes over those that do.

A cache has one forward under way at most. `begin` puts K/V in place and gives the arguments that the model is run
with; `record` and `settle` follow when the model has returned; `abandon` follows where it did not.
"""

import contextlib
import logging
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvboost_hf.cache.identity.walk import ModelParts
from kvboost_hf.cache.layers.base import LayerState, kv_layers
from kvboost_hf.cache.live.binding import Binding, StoreWriter
from kvboost_hf.cache.live.decoding_form import DecodingForm
from kvboost_hf.cache.live.ledger import Ledger
from kvboost_hf.cache.live.live_kv import Behind, LiveKV
from kvboost_hf.cache.planning.chunks import Tokens, whole_pieces
from kvboost_hf.cache.prompt.forward_call import ForwardInputs, Kwargs
from kvboost_hf.cache.prompt.generate_call import at_end
from kvboost_hf.cache.prompt.media import Prompt
from kvboost_hf.cache.prompt.token_log import MaskShape
from kvboost_hf.compat import Shown, attn_implementation, rope_regime, steps_reason
from kvboost_hf.errors import StoreClosedError
from kvboost_hf.handles import ATTENTION

_log = logging.getLogger("kvboost_hf")
_MOMENT_S = 0.05  # in which a thread takes a token and goes on
_ALIKE = 16  # columns in which two prompts agree that may share more
LayerPair = tuple[torch.Tensor, torch.Tensor]  # keys and values [1, num_kv_heads, tokens, head_dim]


@dataclass(frozen=True, slots=True)
class CacheParts:
    """The parts of one `ChunkReuseCache`.

    Args:
        binding: The model, store and settings.
        live: What it holds.
        writer: Offers that to the store.
        form: Whether its buffers grow, or are of a fixed size.
    """

    binding: Binding
    live: LiveKV
    writer: StoreWriter
    form: DecodingForm


@dataclass(slots=True)
class Request:
    """A forward as the cache was asked for it.

    Args:
        cache: The cache that it came with.
        model: The model.
        kwargs: The arguments of the forward, by name.
        armed: It brings a whole prompt, whatever the layers hold.
        in_own_loop: Whoever calls the model leaves it as it is between the tokens of a text, as generate() does.
        mask_fits: The mask of the generate() call has a column for all that the layers hold and for each new id, if
            the ids follow what the layers hold.
        hides_padding_only: The mask of the generate() call, if it goes on from what the layers hold.
        stores_whole: Nobody will tell when the call has ended: store all of a prompt at once.
        in_generate: Some generate() call is under way.
        inputs: The arguments as far as reuse is concerned; or why K/V of it cannot be told by its tokens.
        seen: What was just found in the model; None where nobody has looked.
        carries: Tokens that the layers lagged behind are in front of its own.
        is_step: It has one token, behind what the layers hold. In a cache of a fixed size it is a decoding step: the
            last piece of a prompt, which may have one token, too, is none.
    """

    cache: Cache
    model: PreTrainedModel
    kwargs: Kwargs
    armed: bool
    in_own_loop: bool
    mask_fits: bool
    hides_padding_only: bool
    stores_whole: bool
    in_generate: bool
    inputs: ForwardInputs | str = "not read yet"
    seen: ModelParts | None = None
    carries: bool = False
    is_step: bool = False


@dataclass(slots=True)
class PromptColumns:
    """All columns up to the end of a forward over a prompt, or over more of one.

    Args:
        inputs: The arguments of the forward.
        new: The columns that it brings.
        ids: Codes of all columns, [batch, columns].
        held: How many of them the layers hold.
        least: How many the model has to be given at once: see `least_of_prompt`.

    Attributes:
        columns: How many there are.
        first: The column of the first id that the caller passed.
        limit: At most this many columns can be left out of the forward: the logits of the others are wanted.
    """

    inputs: ForwardInputs
    new: Prompt
    ids: Tokens
    held: int
    least: int = 1
    columns: int = field(init=False)
    first: int = field(init=False)
    limit: int = field(init=False)

    def __post_init__(self) -> None:
        self.columns = int(self.ids.shape[1])
        self.first = self.columns - self.inputs.input_ids.shape[1]
        self.limit = self.columns - max(self.inputs.logits, self.least)


class Forward(ABC):
    """One forward of the model with a cache.

    Args:
        parts: The parts of the cache.
        length: Columns of the layers that stay right whatever happens: what to fall back to.
    """

    behind: Behind | None = None  # what of its tokens the layers lagged behind
    takes_kv = False  # `update` is to be called with the new K/V of each layer
    can_settle_later = False  # its K/V, and what there is to offer of it, stay as they are until the next forward

    def __init__(self, parts: CacheParts, length: int) -> None:
        self.parts, self.length = parts, length

    @property
    def beginning(self) -> Tokens | None:
        """Codes of the first columns [batch, columns] of what can be settled later."""
        return None

    def begin(self, request: Request) -> Kwargs:
        """Put in place what can be reused; returns the arguments to run the model with. By default they stay.

        The request holds the cache, and so the forward must not keep it: nothing would free a cache whose forward has
        failed.
        """
        return request.kwargs

    def update(
        self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Take new K/V [batch, num_kv_heads, m, head_dim] of a layer in place of the layer.

        Returns:
            K/V of all columns, or None: the layer is to append it.
        """
        return None

    def take_hidden_states(self, shown: Shown) -> Shown:
        """Keep the hidden states of new columns; returns those to compute logits of, and to return."""
        self.parts.live.keep_hidden(shown)
        return shown

    @abstractmethod
    def record(self, output: Any) -> Any:
        """Record that the model has returned; returns what to return in place of `output`, or None.

        An interrupt in it abandons the forward.
        """

    @abstractmethod
    def settle(self) -> None:
        """Offer to the store what is complete, now that the forward can no longer be abandoned."""

    def abandon(self) -> None:
        """Forget what the forward may have left in some of the layers."""
        self.parts.live.fall_back(self.length)
        if self.behind is not None:
            self.parts.live.fall_behind(self.behind)


class SettledLater:
    """A forward of a generate() call that is settled when its token has been handed out.

    That is before the next forward, when the cache is used otherwise, before the store is flushed or closed, or when
    the call returns, whichever comes first.

    Args:
        forward: The forward, recorded.
        config: The configuration that the generate() call has made for itself, and lets go of when it returns.
    """

    def __init__(self, forward: Forward, config: Any) -> None:
        self._forward: Forward | None = forward
        self._thread, self._config, self._pid = threading.get_ident(), weakref.ref(config), os.getpid()
        self._lock = forward.parts.writer.settling
        self._begun = threading.Event()
        ledger, beginning = forward.parts.live.ledger, forward.beginning
        self._root = ledger.root if ledger is not None else None
        self._beginnings = _beginnings(beginning) if beginning is not None else frozenset()
        at_end(config, self._settle_unless_under_way)
        forward.parts.binding.store.settles_first(self)

    def settle(self) -> None:
        """Settle it, once."""
        with self._lock:
            self._begun.set()
            forward, self._forward = self._forward, None
            if forward is not None:
                with contextlib.suppress(StoreClosedError):  # then there is nothing to store it in
                    forward.settle()

    def _settle_unless_under_way(self) -> None:
        """Settle it where nobody does so: the end of a call may show in any thread, and somebody wait for that one."""
        if self._lock.acquire(blocking=False):
            try:
                self.settle()
            finally:
                self._lock.release()

    def settle_here(self) -> None:
        """Settle it, unless another thread may still be running the call."""
        if self._config() is None or self._is_own:
            self.settle()

    @property
    def _is_own(self) -> bool:
        """Whether this thread runs the call; a forked process may have other threads by the same numbers."""
        if self._pid != os.getpid() and threading.current_thread() is not threading.main_thread():
            return False
        return self._thread == threading.get_ident()

    def wait_for(self, root: bytes, ids: Tokens) -> None:
        """Wait until it is settled, if a prompt with columns `ids` [batch, columns] begins as it does.

        The call's thread settles it when it goes on to the next token. That may be kept from it, by a reader of its
        stream: it is not waited for longer than a moment.
        """
        if self._is_own or self._pid != os.getpid() or self._root != root:
            return
        if self._beginnings.isdisjoint(_beginnings(ids)) or not self._begun.wait(_MOMENT_S):
            return
        with self._lock:  # until it is settled
            pass


def _beginnings(ids: Tokens) -> frozenset[bytes]:
    """The first columns of the rows [batch, columns] that have enough of them."""
    return frozenset(row[:_ALIKE].tobytes() for row in ids) if ids.shape[1] >= _ALIKE else frozenset()


class Unrecorded(Forward):
    """A forward whose arguments stay as they are, and of whose K/V nothing is known.

    Args:
        parts: The parts of the cache.
        length: Columns in the layers before it.
        stop: Columns after it.
        inputs: The arguments of the forward, if they can be read.
    """

    def __init__(self, parts: CacheParts, length: int, stop: int, inputs: ForwardInputs | None = None) -> None:
        super().__init__(parts, length)
        self._stop, self._inputs = stop, inputs

    def begin(self, request: Request) -> Kwargs:
        if self._inputs is not None and self._inputs.verifies:
            self.parts.live.keep_states()
        return request.kwargs

    def record(self, output: Any) -> Any:
        ids, positions = (self._inputs.input_ids, self._inputs.position_ids) if self._inputs else (None, None)
        self.parts.live.advanced(self._stop, ids, positions)

    def settle(self) -> None:
        self.parts.live.release(self._stop)


class Step(Forward):
    """A forward that needs the logits of all its tokens: a decoding step, or candidates to verify.

    Args:
        parts: The parts of the cache.
        held: Columns in the layers before it.
        inputs: The arguments of the forward.
        mask: The attention mask, or None for one that hides nothing.
        repair: Computes some of what the layers hold again, before it.
    """

    def __init__(
        self,
        parts: CacheParts,
        held: int,
        inputs: ForwardInputs,
        mask: MaskShape | None,
        repair: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(parts, held)
        self._inputs, self._mask, self._repair = inputs, mask, repair

    def begin(self, request: Request) -> Kwargs:
        if self._repair is not None:
            self._repair()
        if self._inputs.verifies:
            self.parts.live.keep_states()
        return request.kwargs

    def record(self, output: Any) -> Any:
        inputs = self._inputs
        stop = self.length + inputs.input_ids.shape[1]
        self.parts.live.appended(inputs.input_ids, inputs.position_ids, self._mask, stop)
        note_hooks(self.parts, confirmed=not inputs.verifies)

    def settle(self) -> None:
        stop = self.length + self._inputs.input_ids.shape[1]
        offer(self.parts, stop, confirmed=not self._inputs.verifies, root_checked=False)


class Lent(Forward):
    """Layers that run forwards of somebody else, who forgets what these append, or hands over a part of it."""

    def record(self, output: Any) -> Any:
        """Nothing: such a forward is not told to the cache."""

    def settle(self) -> None:
        """Nothing, as with `record`."""


def note_hooks(parts: CacheParts, *, confirmed: bool) -> None:
    """After K/V was recorded: whether it is there to stay, and whether hooks have changed it meanwhile."""
    live, binding = parts.live, parts.binding
    if live.ledger is None:
        return
    live.ledger.unconfirmed = not confirmed
    if binding.has_new_hooks:
        live.ledger = None  # somebody has put a hook somewhere in the course of the forward
    elif (altered := binding.altered) is not None:
        live.tally.bypass = live.tally.bypass or altered


def offer(parts: CacheParts, stop: int, *, confirmed: bool, root_checked: bool) -> None:
    """Offer chunks that have become complete; what cannot be stored may leave the windows."""
    ledger = parts.live.ledger
    if ledger is None:
        parts.live.release(stop)
    elif confirmed:
        size, quiet_until = ledger.quiet
        if stop >= quiet_until or size != parts.binding.store.chunker.chunk_size or ledger.blended is not None:
            parts.writer.confirm(ledger, root_checked=root_checked)


def lending_reason(live: LiveKV) -> str | None:
    """Why the layers cannot be lent, nor read and extended; None if they can."""
    if live.plain_reason is not None:
        return live.plain_reason
    return _of_kinds({type(layer).__name__ for layer in live.layers if layer.is_stateful or not layer.can_branch})


def _of_kinds(rigid: set[str]) -> str | None:
    return f"its cache has layers of the kind {', '.join(sorted(rigid))}" if rigid else None


def least_of_prompt(model: PreTrainedModel) -> int:
    """How many tokens of a prompt a model with states has to be given at once: 2 if it computes one in other ways."""
    return 1 if steps_reason(model) is None else 2


def leave_prompts(parts: CacheParts, model: PreTrainedModel) -> bool:
    """Before single tokens go on: whether what they leave is not what a prompt would, so that it is not recorded."""
    if steps_reason(model) is None:
        return False
    parts.writer.offer_tails()  # let the store have what there is
    parts.live.ledger, parts.live.untracked = None, True
    return True


def reading_reason(live: LiveKV) -> str | None:
    """Why what the layers hold of a row cannot be read, and put back with more tokens; None if it can."""
    if live.plain_reason is not None:
        return live.plain_reason
    return _of_kinds(
        {type(each).__name__ for each in live.layers if each.single_row or not (each.can_branch or each.is_stateful)}
    )


def lend_layers(parts: CacheParts) -> list[Any]:
    """The layers, as transformers knows them, for forwards that are not told to the cache."""
    model = parts.binding.model()
    parts.live.hand_out(model is not None and attn_implementation(model) == ATTENTION)
    return [layer.lend() for layer in kv_layers(parts.live.layers)]


def read_layers(live: LiveKV) -> list[LayerPair | None]:
    """Of each layer, K/V of the only row's tokens that it holds; None for a layer that has none."""
    length = live.held
    found = [layer.columns(0, layer.first, length) for layer in kv_layers(live.layers)]
    return [None if not piece else (piece[0][None], piece[1][None]) for piece in found]


def read_states(live: LiveKV) -> list[LayerState | None]:
    """Of each layer, views of the only row's state; None for a layer that has none."""
    return [layer.view_state(0) for layer in kv_layers(live.layers)]


def extend_layers(
    parts: CacheParts,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    kv: Sequence[LayerPair | None],
    states: Sequence[LayerState | None],
) -> None:
    """Append columns that were computed by forwards elsewhere: see `ChunkReuseCache.extend`."""
    live, model = parts.live, parts.binding.model()
    held = live.held
    stop = held + input_ids.shape[1]
    for layer, pair in zip(kv_layers(live.layers), kv, strict=True):
        if pair is not None:
            layer.fill(held, stop, [[(pair[0][0], pair[1][0])]])
            if live.is_recording:
                layer.native.crop(0)
    for layer, state in zip(kv_layers(live.layers), states, strict=bool(states)):
        if state is not None:
            layer.load_states([state])
    if (
        live.ledger is not None
        and model is not None
        and rope_regime(model, stop - int(live.ledger.log.pads.min())) != live.regime
    ):
        live.ledger = None
    live.appended(input_ids, position_ids, None, stop)


def root_of(parts: CacheParts, tokens: int) -> bytes | None:
    """The root of a prompt of one row with so many tokens; None if nothing of it can be stored."""
    live, model = parts.live, parts.binding.model()
    regime = rope_regime(model, tokens) if model is not None and live.unsupported is None else None
    return parts.binding.root(regime) if regime is not None else None


def stored_tokens(parts: CacheParts, ids: torch.Tensor) -> int:
    """How many first tokens of a prompt [1, tokens], whose last one is left to compute, the store holds now."""
    binding, live, root = parts.binding, parts.live, root_of(parts, ids.shape[1])
    model = binding.model()
    if root is None:
        return 0
    ledger = Ledger.empty(np.zeros(1, dtype=np.int64), root)
    tokens = ids.cpu().numpy().astype(np.int64, copy=False)
    limit = ids.shape[1] - (least_of_prompt(model) if live.stateful and model is not None else 1)
    filled = ledger.plan(tokens, 0, limit, binding.store, 0, stateful=live.stateful).filled
    return whole_pieces(filled) if binding.policy.reproducible else filled
