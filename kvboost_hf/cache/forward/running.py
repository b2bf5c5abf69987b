"""Forwards under way: how each kind begins, what it records when it is done, and what is left when it is abandoned.

A cache has one forward under way at most. `begin` puts K/V in place and gives the arguments that the model is run
with; `record` and `settle` follow when the model has returned; `abandon` follows where it did not.
"""

import contextlib
import os
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import CodeType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvboost_hf import forks
from kvboost_hf.cache.forward.idle import Idle
from kvboost_hf.cache.identity.foreign import edits_inputs
from kvboost_hf.cache.identity.walk import ModelParts
from kvboost_hf.cache.live import Behind, LiveKV
from kvboost_hf.cache.live.binding import Binding, StoreWriter
from kvboost_hf.cache.live.decoding_form import DecodingForm
from kvboost_hf.cache.planning.chunks import Tokens
from kvboost_hf.cache.prompt import ForwardInputs, Kwargs, hides_padding_only
from kvboost_hf.cache.prompt.token_log import MaskShape, Prompt
from kvboost_hf.compat import GenerateCall, Shown, at_end, is_in_forward, is_in_stock_loop, is_under_way, steps_reason
from kvboost_hf.errors import CacheInUseError, StoreClosedError

_MOMENT_S = 0.05  # in which a thread takes a token and goes on
_CONSTANT = (bool, int, float, str, type(None))  # types of arguments that are the same if they are the same object
_OF_EACH_STEP = ("input_ids", "position_ids", "cache_position", "attention_mask")
_SHARE_OF_STORE = 4  # part of its bytes, that K/V may take that waits to be repaired
_ALIKE = 16  # columns in which two prompts agree that may share more


_REMEDY = (
    "Give each call a cache of its own, ChunkReuseCache(model): they share K/V by their store. Or leave the cache out "
    "after attach(model), which gives each call one."
)


class CacheUse:
    """The generate() call, the forward or the change that uses a `ChunkReuseCache`; all others are refused meanwhile.

    Attributes:
        inside: The thread of the forward under way, or of the last one that raised; 0 if it has returned.
        changing: Held by the thread that changes the cache outside of its forwards.
    """

    def __init__(self) -> None:
        self._lock = forks.rlock()  # a call's end may show, and store its tokens, wherever memory is allocated
        self.changing = forks.rlock()
        self._config: weakref.ref[Any] | None = None  # of the call
        self._thread, self._name = 0, ""  # that the call runs in
        self._ran = False  # a forward of the call has begun
        self.inside = 0

    def begin_call(self, call: GenerateCall, cache: Any) -> None:
        """A generate() call of this thread takes the cache.

        CacheInUseError: another call is under way that has computed K/V with it, or that runs in another thread; or
        another thread runs a forward with the cache, or changes it.
        """
        config = call.config
        with self._lock:
            self._require_no_other(cache)
            other = self._config() if self._config is not None else None
            if other is not None and other is not config:
                self._require_returned(other)
            self._config = weakref.ref(config) if config is not None else None
            self._thread, self._name = threading.get_ident(), threading.current_thread().name
            self._ran = False

    def begin_forward(self, cache: Any) -> None:
        """A forward of this thread takes the cache. CacheInUseError: another thread has, or changes, it."""
        with self._lock:
            self._require_no_other(cache)
            self.inside, self._ran = threading.get_ident(), True

    def begin_change(self, cache: Any) -> None:
        """This thread changes what the cache holds, until it releases `changing`.

        CacheInUseError: another thread has, or changes, the cache.
        """
        with self._lock:
            self._require_no_other(cache)
            self.changing.acquire()

    def when_left(self, act: Callable[[], None]) -> None:
        """Call `act`, unless the last call is under way, or somebody has taken the cache since it has ended."""
        if self._lock.acquire(blocking=False):
            try:
                if self.call_has_ended and self.inside == 0 and self.changing.acquire(blocking=False):
                    self.changing.release()
                    act()
            finally:
                self._lock.release()

    def _require_no_other(self, cache: Any) -> None:
        thread = threading.get_ident()
        if not self.changing.acquire(blocking=False):
            raise CacheInUseError(f"This ChunkReuseCache is in use: another thread changes what it holds. {_REMEDY}")
        self.changing.release()
        if self._thread != thread and self._config is not None:
            self._require_no_call()
        if self.inside not in (0, thread) and self.is_in_forward(cache):
            raise CacheInUseError(
                f"This ChunkReuseCache is in use: thread {self.inside} runs a forward with it. {_REMEDY}"
            )

    def is_in_forward(self, cache: Any) -> bool:
        """Whether a forward with the cache is under way, and not one that has raised."""
        return self.inside != 0 and is_in_forward(cache, self.inside)

    def require_free(self) -> None:
        """Before somebody changes what the cache holds. CacheInUseError: a call of another thread has it."""
        if self._thread != threading.get_ident():
            with self._lock:
                self._require_no_call()

    def require_idle(self) -> None:
        """Before somebody changes the text itself, which a generate() call under way counts on.

        CacheInUseError: a call is under way with it, in this thread or in another one.
        """
        with self._lock:
            self._require_no_call()

    @property
    def is_elsewhere(self) -> bool:
        """Whether a generate() call of another thread has the cache."""
        config = self._config
        return config is not None and config() is not None and self._thread != threading.get_ident()

    @property
    def call_has_ended(self) -> bool:
        """Whether a generate() call has had the cache, and has returned."""
        return self._config is not None and self._config() is None

    def _require_no_call(self) -> None:
        other = self._config() if self._config is not None else None
        if other is not None:
            self._require_returned(other)

    def _require_returned(self, other: Any) -> None:
        """`other` is the configuration of the last call."""
        here = self._thread == threading.get_ident()
        if here and not self._ran and not is_in_stock_loop(other, self._thread):  # it may hand the cache on
            return
        if not is_under_way(other, self._thread):  # it has failed, and somebody keeps the exception
            self._config = None
            return
        where = "around this one, in the same thread" if here else f"in thread {self._name!r}"
        raise CacheInUseError(
            f"This ChunkReuseCache is in use: a generate() call {where}, holds it and has not returned. {_REMEDY}"
        )


@dataclass(frozen=True, slots=True)
class CacheParts:
    """The parts of one `ChunkReuseCache`."""

    binding: Binding
    live: LiveKV
    writer: StoreWriter
    form: DecodingForm  # whether its buffers grow, or are of a fixed size
    when_idle: "Callable[[CacheParts, threading.Event], bool]"  # done between two calls; see `Idle.begin`
    idle: Idle = field(default_factory=Idle)  # has it done
    use: CacheUse = field(default_factory=CacheUse)  # who has the cache

    def begin_idle(self) -> None:
        """A call has ended: go on with a repair that has not, until somebody needs the cache."""
        ledger = self.live.ledger
        if ledger is None or ledger.blended is None or self.live.in_forward:
            return
        most_bytes = self.binding.store.max_bytes // _SHARE_OF_STORE
        self.idle.begin(partial(self.when_idle, self), self.live.nbytes, most_bytes)


@dataclass(slots=True)
class Request:
    """A forward as the cache was asked for it."""

    cache: Cache
    model: PreTrainedModel
    kwargs: Kwargs
    armed: bool  # it brings a whole prompt, whatever the layers hold
    in_own_loop: bool  # whoever calls the model leaves it as it is between the tokens of a text, as generate() does
    # The mask of the generate() call has a column for all that the layers hold and for each new id, if the ids follow
    # what the layers hold.
    mask_fits: bool
    # The mask of the generate() call hides padding on the left, and no more of what the layers hold than it did
    # before; and no loop of somebody else makes others.
    hides_padding_only: bool
    stores_whole: bool  # nobody will tell when the call has ended: store all of a prompt at once
    depth: int = 0  # how many frames it is up to the generate() call under way; 0 if there is none
    code: CodeType | None = None  # that of the frame of that call
    in_prefill: bool = False  # that call runs its prompt, or a piece of it
    # The arguments as far as reuse is concerned; or why K/V of it cannot be told by its tokens.
    inputs: ForwardInputs | str = "not read yet"
    seen: ModelParts | None = None  # what was just found in the model; None where nobody has looked
    carries: bool = False  # tokens that the layers lagged behind are in front of its own
    # It has one token, behind what the layers hold. In a cache of a fixed size it is a decoding step: the last piece
    # of a prompt, which may have one token, too, is none.
    is_step: bool = False

    @property
    def in_generate(self) -> bool:
        """Whether some generate() call is under way."""
        return self.code is not None


@dataclass(slots=True)
class PromptColumns:
    """All columns up to the end of a forward over a prompt, or over more of one."""

    inputs: ForwardInputs
    new: Prompt
    ids: Tokens  # codes of all columns, [batch, columns]
    held: int  # how many of them the layers hold
    least: int = 1  # how many the model has to be given at once: see `least_of_prompt`
    columns: int = field(init=False)  # how many there are
    first: int = field(init=False)  # the column of the first id that the caller passed
    # At most this many columns can be left out of the forward: the logits of the others are wanted.
    limit: int = field(init=False)

    def __post_init__(self) -> None:
        self.columns = int(self.ids.shape[1])
        self.first = self.columns - self.inputs.input_ids.shape[1]
        self.limit = self.columns - max(self.inputs.logits, self.least)


class Forward(ABC):
    """One forward of the model with a cache. Whatever happens, the first `length` columns of the layers stay right."""

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
        """Take new K/V [batch, num_kv_heads, m, head_dim] of a layer: returns that of all columns, or None to have it
        appended.
        """
        return None

    def take_hidden_states(self, shown: Shown) -> Shown:
        """Keep the hidden states of new columns; returns those to compute logits of, and to return."""
        self.parts.live.keep_hidden(shown.of)
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
        config: The configuration that the generate() call has made for itself, and lets go of when it returns.
    """

    def __init__(self, forward: Forward, config: Any) -> None:
        self._forward: Forward | None = forward
        self._parts = forward.parts
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
            ledger = self._parts.live.ledger
            if ledger is not None and ledger.blended is not None:
                self._parts.use.when_left(self._parts.begin_idle)

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
    """A forward behind `length` columns whose arguments stay as they are, and of whose K/V nothing is known."""

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

    Without a `mask`, nothing is hidden. `repair` computes some of what the layers hold again, before it.
    """

    def __init__(
        self,
        parts: CacheParts,
        held: int,
        inputs: ForwardInputs,
        mask: MaskShape | None,
        repair: Callable[[], None] | None = None,
        settled: "Settled | None" = None,
    ) -> None:
        super().__init__(parts, held)
        self._input_ids, self._position_ids, self._verifies = inputs.input_ids, inputs.position_ids, inputs.verifies
        self._mask, self._repair, self._settled = mask, repair, settled
        self.drops_mask = settled is not None and settled.drops_mask

    def goes_on(self, model: PreTrainedModel, kwargs: Kwargs, in_own_loop: bool) -> bool:
        """Make this forward, which has been settled, that of the next token; False if that has to be decided anew.

        All that decides on a token has to be as it was for the last one: the call, the arguments, hooks, precision,
        and that the layers hold what the ledger says. To be called by the cache's `before_forward`.
        """
        settled, live = self._settled, self.parts.live
        ids, positions = kwargs.get("input_ids"), kwargs.get("position_ids")
        if (
            settled is None
            or not isinstance(ids, torch.Tensor)
            or not isinstance(positions, torch.Tensor)
            or ids.shape != self._input_ids.shape
            or positions.shape != settled.positions
            or model.training
            or torch.is_grad_enabled()
            or (settled.code is None and not in_own_loop)
            or not settled.goes_on(kwargs)
            or live.behind is not None
            or live.untracked
            or live.static is not None
            or live.plain_reason is not None
            or not live.owns_layers
            or self.parts.binding.looks_changed
        ):
            return False
        ledger = live.in_step(look=live.stateful)
        if ledger is None or ledger.unconfirmed or ledger.blended is not None or len(ledger.log.pads) != len(ids):
            return False
        if settled.drops_mask or (settled.is_masked and settled.hands_out):
            mask = kwargs["attention_mask"]
            if mask.device.type == "cpu" and not hides_padding_only(mask, ledger.log.pads):
                return False
        self.length, self._input_ids, self._position_ids = ledger.log.length, ids, positions
        self._mask = MaskShape.of(kwargs["attention_mask"]) if settled.is_masked else None
        live.hand_out(settled.hands_out)
        return True

    def begin(self, request: Request) -> Kwargs:
        if self._repair is not None:
            self._repair()
        if self._verifies:
            self.parts.live.keep_states()
        return request.kwargs

    def record(self, output: Any) -> Any:
        stop = self.length + self._input_ids.shape[1]
        self.parts.live.appended(self._input_ids, self._position_ids, self._mask, stop)
        note_hooks(self.parts, confirmed=not self._verifies)

    def settle(self) -> None:
        stop = self.length + self._input_ids.shape[1]
        offer(self.parts, stop, confirmed=not self._verifies, root_checked=False)


@dataclass(frozen=True, slots=True)
class Settled:
    """The arguments of a decoding step, as far as they decide how it runs, and where it was called from."""

    constants: dict[str, Any]
    caches: frozenset[str]
    names: frozenset[str]  # of all arguments, with ids, positions and mask
    is_masked: bool  # there was a mask, of which nobody knows what the next one hides: it is noted each time
    positions: torch.Size
    depth: int  # how many frames it is from the forward hook's cache up to the generate() call
    # That of the frame of this call; None for a loop of somebody else, who keeps the model as it is.
    code: CodeType | None
    hands_out: bool  # the layers may give the attention K/V as it is held
    drops_mask: bool  # the mask hides nothing, and is left out

    @classmethod
    def of(cls, request: Request, kwargs: Kwargs, hands_out: bool) -> "Settled | None":
        """What was found of a request for one token; None if the next request may differ in more than its token.

        Args:
            request: The request, with the arguments that the model is run with.
            kwargs: The arguments with which it came.
            hands_out: Whether the layers may give the attention K/V as it is held.
        """
        positions = kwargs.get("position_ids")
        constants = {name: value for name, value in kwargs.items() if type(value) in _CONSTANT}
        caches = frozenset(name for name, value in kwargs.items() if isinstance(value, Cache))
        if (
            not isinstance(positions, torch.Tensor)
            or kwargs.get("output_attentions")  # which depends on the attention, too
            or type(kwargs.get("logits_to_keep")) is not int
            or not kwargs.keys() <= {*constants, *caches, *_OF_EACH_STEP}
            or not (request.in_generate or request.in_own_loop)  # the model may change between two tokens
        ):
            return None
        masked, where = "attention_mask" in kwargs and "attention_mask" not in constants, (request.depth, request.code)
        drops_mask = masked and request.kwargs["attention_mask"] is None
        return cls(constants, caches, frozenset(kwargs), masked, positions.shape, *where, hands_out, drops_mask)

    def goes_on(self, kwargs: Kwargs) -> bool:
        """Whether these arguments are such ones, and the generate() call is the same."""
        if kwargs.keys() != self.names:
            return False
        for name, value in kwargs.items():
            if name in self.constants:
                if self.constants[name] is not value:
                    return False
            elif name == "attention_mask":
                if not isinstance(value, torch.Tensor) or value.ndim != 2:
                    return False
            elif name in self.caches and not isinstance(value, Cache):
                return False
        if self.code is None:
            return True
        try:
            return sys._getframe(self.depth + 2).f_code is self.code  # from here, by way of `Step.goes_on`
        except ValueError:  # there are not so many frames
            return False


def hides_known_padding(parts: CacheParts, request: Request, mask: torch.Tensor, pads: NDArray[np.int64]) -> bool:
    """Whether the mask of a step hides the padding of a text and nothing else; False where that is not known.

    To read a mask would make a GPU wait for its work: there it is taken for what generate() makes of its own mask,
    unless the model has somebody else's code that may make another.
    """
    if not request.in_generate or not request.hides_padding_only:
        return False
    if mask.device.type == "cpu":
        return hides_padding_only(mask, pads)
    return not parts.binding.fact(request.model, edits_inputs)


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
