"""`ChunkReuseCache`: a transformers `Cache` that never computes the same K/V twice.

It delegates to its parts: `live/` has the layers and the record of what they hold, `forward/` decides what each
forward is given, and `forward/running.py` has the forward under way.

generate() reads `get_seq_length()` and cuts the ids by it before any hook can see them. Before that, it sets
`_is_user_defined` on a cache that it was given: the setter arms the cache, and an armed cache claims to be empty until
the first forward, which then sees the whole prompt.
"""

import copy
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial, wraps
from types import FrameType
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from kvboost_hf.cache.codecs import LiveQuant, live_config
from kvboost_hf.cache.forward import carrying_forward, may_carry, next_forward
from kvboost_hf.cache.forward.admission import root_of
from kvboost_hf.cache.forward.edits import cut_live, leave_behind, plan_live, require_editable, run_live
from kvboost_hf.cache.forward.loans import Lent, Loans
from kvboost_hf.cache.forward.moved import movable_spans
from kvboost_hf.cache.forward.prompt_plan import look_up
from kvboost_hf.cache.forward.repair_later import (
    PIECE,
    may_repair,
    reason_against_riding,
    repair_more,
    repair_while_idle,
)
from kvboost_hf.cache.forward.reused import Reused
from kvboost_hf.cache.forward.running import CacheParts, Forward, Request, SettledLater, Step, note_hooks
from kvboost_hf.cache.identity.foreign import is_own
from kvboost_hf.cache.layers.base import ReuseLayer, whole_columns
from kvboost_hf.cache.live import LiveKV, suffix_graph
from kvboost_hf.cache.live.binding import Binding, StoreWriter, require_policy, require_store
from kvboost_hf.cache.live.compiled import StaticDecoding
from kvboost_hf.cache.live.decoding_form import AUTO, DecodingForm, MaxCacheLen
from kvboost_hf.cache.planning.beginnings import BestOrder, D, best_order
from kvboost_hf.cache.planning.edits import Ids, edited
from kvboost_hf.cache.planning.report import ReuseReport, Tally
from kvboost_hf.cache.prompt import Kwargs, hides_padding_only, install
from kvboost_hf.cache.prompt.token_log import one_row
from kvboost_hf.cache.store.chunk_store import ChunkStore, Put, salt_bytes
from kvboost_hf.compat import (
    GenerateCall,
    Shown,
    calling,
    generate_frame,
    hook_hidden_states,
    in_generate,
    in_prefill,
    input_device,
    outputs_read,
    run_model,
    running_config,
    unwrapped,
)
from kvboost_hf.config import ReusePolicy
from kvboost_hf.errors import CacheModelMismatchError, InterruptedForwardError

P = ParamSpec("P")
R = TypeVar("R")
_UNUSED = "the model has made no use of the cache"


def _changes(
    method: "Callable[Concatenate[ChunkReuseCache, P], R]",
) -> "Callable[Concatenate[ChunkReuseCache, P], R]":
    """Has a method raise a CacheInUseError while another thread uses the cache, and keeps other threads out of it."""

    @wraps(method)
    def change(cache: "ChunkReuseCache", /, *args: P.args, **kwargs: P.kwargs) -> R:
        cache._use.begin_change(cache)
        try:
            return method(cache, *args, **kwargs)
        finally:
            cache._use.changing.release()

    return change


class _KindOfCache(type):
    """The class of `ChunkReuseCache`, which generate() may be given in place of a cache: it would mark all of them."""

    def __setattr__(cls, name: str, value: Any) -> None:
        if name == "_is_user_defined":
            raise TypeError(f"`cache` must be a cache, got the class {cls.__name__}. Pass {cls.__name__}(model).")
        super().__setattr__(name, value)


class ChunkReuseCache(DynamicCache, metaclass=_KindOfCache):
    """Pass it as `cache` to as many `generate()` calls as you like.

    Each call gets what plain generate() would give. What was computed before, in this cache or in its store, is not
    computed again: the prompt may continue the one before, be shorter, diverge from it, or have nothing to do with it.
    Bare `model(...)` keeps its usual meaning: ids continue what the cache holds; pass `logits_to_keep=1` to let a
    prompt reuse anything, for otherwise the logits of all its tokens are wanted, or `keep_logprobs` in the policy.
    Constructing one costs nothing. It serves one call at a time; the store may be shared by any number of caches.

    Args:
        model: The causal language model that it will be passed to. Held weakly.
        store: Where K/V outlives this cache; None takes the model's own default store (4 GiB of host memory).
        policy: How stored K/V may be used.
        salt: Separates those who must not see each other's prompts; None takes the store's. May be set anew, as
            `cache.salt`, before each request.
        max_cache_len: Hold at most so many tokens, in buffers that never move, so that generate() can compile
            decoding: it does so by itself on a GPU, and elsewhere where its `compile_config` asks for it. `"auto"`
            takes such buffers, as long as a call needs them, for calls of which a compilation is worth its time, or
            that have a `compile_config`; on a CPU it grows otherwise. None always grows.
        live_quant: Hold K/V of full attention as codes while it is used, but for the first and last tokens and layers:
            a `KVQuantConfig`, the text of a codec such as `"int8"` or `"turboquant:3.5"`, or bits from 1 to 4. The
            output may differ. What is stored of it is found by caches with the same `live_quant` only.

    Raises:
        ValueError: for a model that cannot be served, or not with `max_cache_len`; a store that was made for another
            model; any two of `live_quant`, `max_cache_len` and `keep_logprobs`, or one of the first two with
            `reproducible`; audits of lossy K/V, or `reproducible` with it; and later, for a generate() call that may
            take more than `max_cache_len` tokens.
        CacheInUseError: later, for a call while another one is under way with the cache, around it or in another
            thread; and for whatever would change what it holds, or needs that to stay, while another thread uses it.

    Example:
        >>> from kvboost_hf.assets import load_embedded
        >>> model, tokenizer = load_embedded()
        >>> cache = ChunkReuseCache(model)
        >>> inputs = tokenizer("The lamp is red. " * 20, return_tensors="pt")
        >>> for _ in range(2):
        ...     _ = model.generate(**inputs, cache=cache, max_new_tokens=1)
        >>> cache.report.forwarded_tokens
        1
    """

    stores_prompts_whole = False  # nobody will tell when a call has ended: store all of a prompt at once
    recorded = False  # PyTorch records or transforms the forward that is about to begin
    in_own_loop = False  # whoever calls the model leaves it as it is between the tokens of a text, as generate() does
    judge: Callable[[Any], None] | None = None  # given what a forward returns; raises to have it leave nothing behind

    def __init__(
        self,
        model: PreTrainedModel,
        store: ChunkStore | None = None,
        policy: ReusePolicy | None = None,
        salt: str | bytes | None = None,
        *,
        max_cache_len: MaxCacheLen = AUTO,
        live_quant: LiveQuant = None,
    ) -> None:
        model = unwrapped(model)
        live_quant = live_config(live_quant) if live_quant is not None else None
        named = max_cache_len if max_cache_len != AUTO else None
        binding = Binding.checked(model, store, policy, salt, live_quant, named)
        static = StaticDecoding(model, named) if named is not None else None
        live = LiveKV(
            model, static, live_quant, hidden_layers=binding.hidden_layers, reproducible=binding.policy.reproducible
        )
        writer = StoreWriter(binding, live)
        form = DecodingForm(model, max_cache_len, binding, live, writer)
        self._take(CacheParts(binding, live, writer, form, repair_while_idle))
        install(model)
        if binding.hidden_layers:
            hook_hidden_states(model)

    @classmethod
    def over(cls, parts: CacheParts) -> "ChunkReuseCache":
        """A cache that goes on with what one has left to which nobody refers any more."""
        cache = cls.__new__(cls)
        if parts.idle.busy:
            parts.idle.stop()
        if parts.live.in_forward:  # it has failed
            parts.live.in_forward = False
            parts.live.drop()
        cache._take(parts)
        return cache

    def _take(self, parts: CacheParts) -> None:
        self._parts, self._binding, self._live = parts, parts.binding, parts.live
        self._writer, self._form, self._use = parts.writer, parts.form, parts.use
        self._forward: Forward | None = None  # the one under way
        self._step: Step | None = None  # the last decoding step, which may go on with the next token
        self._config: Any = None  # of the generate() call whose forward is under way
        self._unsettled: SettledLater | None = None  # the last one, while its token is being handed out
        self._call: GenerateCall | None = None  # the generate() call that has armed the cache
        self._user_defined = self._begins_anew = False
        self._mask_fits = True  # the mask of a generate() call that begins, if it goes on from what is held
        self._hides_padding_only = True  # the mask of the last one
        self._of_call = False  # `attach` has made it: when the call has ended, it is what transformers would return
        Cache.__init__(self, layers=parts.live.visible)

    # What transformers calls

    @property
    def layers(self) -> list[Any]:
        """The layers that transformers sees."""
        if self._of_call and self._live.static is not None:
            self._go_on()
        if self._parts.idle.busy:
            self._parts.idle.stop()
        return self._live.visible

    @layers.setter
    def layers(self, layers: list[Any]) -> None:
        self._live.visible = layers

    def __len__(self) -> int:
        return len(self._live.visible)  # also where somebody only asks whether there is a cache

    @property
    def _is_user_defined(self) -> bool:
        return self._user_defined

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        for name in ("get_seq_length", "get_mask_sizes"):
            # RecurrentGemma of transformers 5.17 sets its own in each forward; they do not know an armed cache.
            self.__dict__.pop(name, None)
        self._go_on()
        call, live, self._step = calling(), self._live, None
        self._use.begin_call(call, self)
        if self._forward is not None:  # it has failed
            self._recover()
        self._settle_last()
        if live.static is not None or ((model := self._binding.model()) is not None and call.compiles(model)):
            self._form.choose(call, self._settle)
        else:
            self._form.reason = self._form.reason_elsewhere
        static = live.static
        if static is not None:
            self._settle()
            static.in_use, static.padded = call.uses_cache, call.mask is not None
            static.require_call_fits(call, live.held)
        self._user_defined = value
        elsewhere = self._of_call and call.model is not None and call.model is not self._binding.model()
        held = live.held if live.behind is None else live.claimed
        follows = elsewhere or call.follows(held)
        self._call = call if value and not follows else None
        self._mask_fits = not follows or call.fits(held)
        known = live.ledger.log.pads if follows and live.ledger is not None else None
        self._hides_padding_only = (
            self._mask_fits
            and (call.mask is None or hides_padding_only(call.mask, known))
            and (call.loop is None or is_own(type(call.loop)))  # somebody else's may pass any mask to any forward
        )
        if self._call is not None:
            live.tally = Tally(bypass=_UNUSED)  # until a forward comes with it
            live.end_call()
            if live.plain_used and any(hasattr(layer, "set_prefill_length") for layer in live.visible):
                live.drop()  # Unlimited-OCR tells its layers how long the prompt is before the first forward
            if live.held and (model := self._binding.model()) is not None:
                self._call.start_over(model)

    def reason_for_eager(self, call: GenerateCall) -> str | None:
        """Why a generate() call with this cache would decode without a graph; None if it may decode in one."""
        return self._form.reason_for(call, self._settle)

    def note_eager(self, reason: str | None) -> None:
        """Report why the call that the cache was made for decodes without a graph."""
        self._form.reason = reason

    def decode_with(self, model: PreTrainedModel, compiled: Callable[..., Any], kwargs: Kwargs) -> Any:
        """Run a decoding step of generate() for a model that was compiled."""
        self._settle_last()
        return self._form.decode(model, compiled, kwargs)

    def compute_with(self, plain: Callable[..., Any], kwargs: Kwargs) -> Any:
        """Run a forward of the model below its head, which `plain` does without a graph."""
        return suffix_graph.compute(self._binding.model(), self._live, plain, kwargs)

    @property
    def is_compileable(self) -> bool:
        """Whether the next forward may be compiled: one that decodes, in a cache of a fixed size."""
        self._go_on()
        static = self._live.static
        if static is None or self._live.plain_reason is not None:
            return False
        if torch.compiler.is_compiling():
            return all(layer.is_compileable for layer in self.layers)  # torch 2.11 cannot trace super()'s property
        return static.in_use and self._live.static_layers[0].whole and not in_prefill()

    @property
    def begins_text(self) -> bool:
        """Whether the next forward begins a text, or the one under way is not a step in a graph."""
        return self._call is not None or self._begins_anew or self._forward is not None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns held; 0 between the start of a generate() call and its first forward."""
        if self._call is not None:
            return 0
        # Asked in the middle of a forward: this layer may have got its new columns already, others not.
        held = super().get_seq_length(layer_idx) if self._live.counting is not None else self._live.held
        return held + self.lag if self._live.behind is not None else held

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The last columns of a convolution, as many as its kernel has, also while earlier ones are recorded."""
        state: torch.Tensor | None = super().get_conv_state(layer_idx, state_idx)
        if state is None:
            return None
        layer: Any = self.layers[layer_idx]
        kernel = layer.conv_kernel_size[state_idx]
        return state if state.shape[-1] == kernel else state[..., -kernel:]

    def activate_past_recording(self) -> None:
        """What generate() asks for ends with the next call."""
        if in_generate():
            self._live.record_for_call()
        super().activate_past_recording()  # type: ignore[no-untyped-call]

    @_changes
    def stop_recording(self) -> None:
        """Undo `activate_past_recording`: until it is called again, `crop` goes back to what the store has."""
        self._settle()
        self._live.stop_recording()

    @_changes
    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` columns; what remains is confirmed.

        Tokens cannot be taken out of states. These go back to where they were kept last: before the last forward if
        `activate_past_recording` was called, else in the store. The next forward computes the tokens from there on in
        front of its own.

        Args:
            tokens_to_remove: Minus the number of columns to remove, or the number of columns to keep.

        Raises:
            ValueError: for what is no integer.
            RuntimeError: states cannot go back, because it is not known which tokens they hold.
        """
        live, remove = self._live, whole_columns(tokens_to_remove)
        self._settle()
        length = min(remove, live.claimed) if remove > 0 else max(live.claimed + remove, 0)
        live.behind = live.behind.part(length) if live.behind is not None else None
        columns = max(live.held - length, 0)
        if live.plain_reason is not None and remove < 0:  # states alone do not tell how many columns they hold
            columns = -remove
        with live.changing() as ledger:
            if live.can_crop(columns):
                live.crop(columns)
                live.cropped(ledger, columns)
            else:
                live.crop_states(ledger, length, self._writer.offer_tails)
        if live.ledger is not None:
            self._writer.confirm(live.ledger)

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` works: it does over states, too."""
        return self._live.plain_reason is None or super().is_croppable

    @property
    def lag(self) -> int:
        """Columns that the next forward computes in front of its own, since `crop` has taken others out of states."""
        return self._live.claimed - self._live.held

    @_changes
    def catch_up(self) -> None:
        """Compute the columns of `lag` now, in one forward."""
        behind, model = self._live.behind, self._binding.model()
        if behind is None or model is None:
            return
        last = behind.positions[..., -1:] if behind.positions is not None else None
        ids = behind.ids[:, -1:].to(input_device(model))
        self._live.behind = behind.part(self._live.claimed - 1)
        try:
            run_model(model, ids, self, position_ids=last)
        except BaseException:
            self._recover()
            self._live.fall_behind(behind)
            raise

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Make row i what row `beam_idx[i]` was."""
        self._select(partial(super().reorder_cache, beam_idx), lambda _: beam_idx.cpu().numpy())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`, numbers or a mask."""
        numbers = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        self._select(partial(super().batch_select_indices, indices), lambda _: numbers.cpu().numpy())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        self._select(partial(super().batch_repeat_interleave, repeats), lambda rows: np.arange(rows).repeat(repeats))

    @_changes
    def _select(self, change: Callable[[], None], rows_of: Callable[[int], NDArray[np.int64]]) -> None:
        """Change the rows of the layers, of which there are so many: row i becomes what row `rows[i]` was."""
        self._settle()
        self.catch_up()
        with self._live.changing() as ledger:
            change()
            if ledger is not None:
                self._live.selected(ledger, rows_of(ledger.log.batch_size))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if (forward := self._forward) is not None:
            if forward.takes_kv and (taken := forward.update(layer_idx, key_states, value_states)) is not None:
                return taken
        # What `attach` has made takes what it is given, as any cache that transformers returns. And no hook has run
        # around a compiled step that could have said so.
        elif not self._of_call and (
            self._live.static is None or not (torch.compiler.is_compiling() or key_states.shape[-2] == 1)
        ):
            raise CacheModelMismatchError(
                f"This ChunkReuseCache was made for {self._made_for('one')}, and K/V reached it from elsewhere. Make "
                "a cache for each model, ChunkReuseCache(other_model), and pass it to the model, not to a part of it."
            )
        found: tuple[torch.Tensor, torch.Tensor]
        # `Cache.update` does no more where layers are neither made at their first use nor offloaded.
        layers = self.layers if self._of_call else self._live.visible
        found = layers[layer_idx].update(key_states, value_states, *args, **kwargs)
        return found

    def _made_for(self, which: str) -> str:
        model = self._binding.model()
        return f"{which} {type(model).__name__} object" if model is not None else "a model that no longer exists"

    @_changes
    def reset(self) -> None:
        """Let go of what the cache holds. The store keeps its chunks."""
        self._recover()
        self.store_tails()
        self._live.drop()
        self._call = None
        self._live.tally = Tally()

    # What the hooks on the model call

    def before_forward(self, model: PreTrainedModel, kwargs: Kwargs) -> Kwargs:
        """Called with the keyword arguments of a forward; returns those to run it with."""
        live, static = self._live, self._live.static
        if static is not None and torch.compiler.is_compiling():
            static.step_log.record(live.static_layers[0].length_tensor, kwargs)
            return kwargs
        if model is not self._binding.model():
            if self._of_call:
                self._go_on()
                return kwargs
            raise CacheModelMismatchError(
                f"This ChunkReuseCache was made for {self._made_for('another')}, not for the {type(model).__name__} "
                "that it was passed to. Make one for it: ChunkReuseCache(model)."
            )
        self._go_on()
        ids = kwargs.get("input_ids")
        if live.behind is not None and not may_carry(model, kwargs, len(live.behind.ids)):
            call = self._call
            if not (self._begins_anew or (call is not None and call.is_at(generate_frame(sys._getframe()), ids))):
                self.catch_up()
        self._use.begin_forward(self)
        self._recover()
        step, self._step = self._step, None
        if (
            step is not None
            and self._call is None
            and not self._begins_anew
            and step.goes_on(model, kwargs, self.in_own_loop)
        ):
            self._forward = self._step = step
            self._form.costs.tokens += 1
            live.in_forward = True
            return {**kwargs, "attention_mask": None} if step.drops_mask else kwargs
        static = live.static
        if static is not None and not self._form.serves(running_config):
            self._form.leave(self._settle)
            static = None
        if live.hands_out:
            live.hand_out(False)
        call, self._call = self._call, None
        running = generate_frame(sys._getframe())
        armed = self._begins_anew or (call is not None and call.is_at(running, ids))
        self._begins_anew = False
        mask_fits, self._mask_fits = self._mask_fits, True  # of the call's first forward
        if live.lost and not armed:
            raise InterruptedForwardError(
                "The last forward with this ChunkReuseCache was interrupted, and the states that it held cannot be "
                "taken back, so that nothing can be continued. Call reset(), and pass the whole text."
            )
        depth, in_prefill = _way_to(running) if running is not None else (0, False)
        request = Request(
            self,
            model,
            kwargs,
            armed,
            self.in_own_loop,
            mask_fits,
            self._hides_padding_only,
            self.stores_prompts_whole,
            depth=depth,
            code=running.f_code if running is not None else None,
            in_prefill=in_prefill,
        )
        # What is read of a forward by somebody's own loop is not known.
        if running and isinstance(ids, torch.Tensor) and ids.shape[-1] > 1:
            if outputs_read(ids, running) is not None:
                self._config = running.f_locals["generation_config"]
        behind, live.behind = live.behind, None
        if behind is None or armed:
            self._forward = next_forward(self._parts, request)
        else:
            self._forward = carrying_forward(self._parts, request, behind)
        if request.is_step:
            self._form.costs.tokens += 1
            self._step = self._forward if isinstance(self._forward, Step) else None
        live.in_forward = True
        if static is not None and live.stateful and not request.is_step:
            static.open(live.static_layers, {}, step=False)  # forwards of our own may come first
        given = self._forward.begin(request)
        if static is not None:
            static.open(live.static_layers, given, step=request.is_step)
            if isinstance(self._forward, Reused):
                suffix_graph.expect(model, live, given, running_config())
        return given

    def after_forward(self, output: Any) -> Any:
        """Called with what the forward has returned; returns what to return in its place, or None."""
        forward, live = self._forward, self._live
        if forward is None:  # after a compiled step
            return None
        if live.hands_out:
            live.hand_out(False)  # other forwards may be run on the layers, in a stock cache
        if live.static is not None:
            live.static.close(live.static_layers)
        if self.judge is not None:
            self.judge(output)
        changed = forward.record(output)
        self._forward, live.in_forward = None, False  # only now: an interrupt before this undoes the forward
        self._use.inside = 0
        config, self._config = self._config, None
        if config is None or not forward.can_settle_later or live.is_held_by_others:
            forward.settle()
        else:
            self._unsettled = SettledLater(forward, config)
        return changed

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """The layers whose hidden states the forward under way is to show: those that are kept."""
        return self._live.hidden_layers if self._forward is not None and self._live.hidden is not None else ()

    @property
    def take_hidden_states(self) -> Callable[[Shown], Shown] | None:
        """Called with the hidden states of a forward, if they are kept; see `Forward.take_hidden_states`."""
        if self._forward is None or self._live.hidden is None:
            return None
        return self._forward.take_hidden_states

    def _recover(self) -> None:
        """Settle the last forward; after one that raised or was interrupted, forget what it may have left."""
        self._settle_last()
        self._config = None
        forward, self._forward = self._forward, None
        self._live.in_forward = False
        if forward is not None:
            self._step = None
            forward.abandon()

    def _settle_last(self) -> None:
        unsettled, self._unsettled = self._unsettled, None
        if unsettled is not None:
            unsettled.settle()
        if self._parts.idle.busy:  # maybe only since the last call has ended, a moment ago
            self._parts.idle.stop()

    def _settle_here(self) -> None:
        """For whoever only reads, and may do so in another thread than the call's."""
        if (unsettled := self._unsettled) is not None:
            unsettled.settle_here()

    def _settle(self) -> None:
        """Before a change from outside: no interrupted forward, and no compiled step that is not taken over."""
        self._use.require_free()
        self._recover()
        self._writer.confirm_steps()

    # What users call

    @property
    def store(self) -> ChunkStore:
        """Where K/V outlives this cache."""
        self._settle_here()
        return self._binding.store

    @store.setter
    @_changes
    def store(self, store: ChunkStore) -> None:
        if (model := self._binding.model()) is not None:
            require_store(store, model)
        self._settle_last()
        self._binding.change(store=store)

    @property
    def policy(self) -> ReusePolicy:
        """How stored K/V may be used."""
        return self._binding.policy

    @policy.setter
    @_changes
    def policy(self, policy: ReusePolicy) -> None:
        require_policy(policy)
        for name in ("keep_logprobs", "keep_hidden_states", "reproducible"):
            before, new = getattr(self.policy, name), getattr(policy, name)
            if new != before:
                raise ValueError(f"`{name}` of a cache must stay {before}, got {new}. Make a new ChunkReuseCache.")
        self._settle_last()
        self._binding.change(policy=policy)

    @property
    def salt(self) -> bytes:
        """Separates those who must not see each other's prompts. Another one may be set before any prompt."""
        return self._binding.salt

    @salt.setter
    def salt(self, salt: str | bytes) -> None:
        new = salt_bytes(salt)
        if new != self._binding.salt:
            self._take_salt(new)

    @_changes
    def _take_salt(self, salt: bytes) -> None:
        self.reset()  # with the old one: what it holds belongs to that
        self._binding.salt = salt

    @property
    def root(self) -> bytes | None:
        """The key that the chains of what the cache holds start from; None where nothing is known of that."""
        ledger = self._live.ledger  # which another thread may drop
        return ledger.root if ledger is not None else None

    @property
    def content_keys(self) -> frozenset[bytes]:
        """Keys of what was stored to be found by its content only, as it was computed behind moved K/V."""
        self._settle_here()
        ledger = self._live.ledger
        return frozenset(ledger.content_keys) if ledger is not None else frozenset()

    @property
    def head_roots(self) -> frozenset[bytes]:
        """The roots of the chains of K/V that heads have computed of texts of the cache."""
        return frozenset(self._binding.head_roots)

    @property
    def report(self) -> ReuseReport:
        """Counts for the last prompt."""
        self._settle_here()
        ledger, riding = self._live.ledger, None
        if ledger is None and self._live.static is not None and not self._use.is_elsewhere:
            self._live.catch_up()
        if ledger is not None and ledger.blended is not None:
            riding = reason_against_riding(self._live, self._parts.binding.model())
        return replace(self._live.tally.report(), eager_reason=self._form.reason_told, riding_reason=riding)

    @property
    def nbytes(self) -> int:
        """Bytes of the live buffers, room to spare included; the store counts its own."""
        return self._live.nbytes

    def note_refusal(self, reason: str, tokens: int) -> None:
        """Report a prompt of so many tokens that was computed without this cache."""
        self._live.tally = Tally(prompt=tokens, forwarded=tokens, bypass=reason)

    def begin_anew(self) -> None:
        """Take the ids of the next forward for the start of a prompt, as generate() has it, not for what follows.

        What the layers hold of it is used, and the rest forgotten.
        """
        self._begins_anew = True

    @property
    def max_cache_len(self) -> int:
        """Columns of buffers of a fixed size, or -1: PEFT asks before it puts the cache of its tuned prefix here."""
        static = self._live.static
        return static.max_cache_len if static is not None else -1

    @property
    def parts(self) -> CacheParts:
        """What `over` makes another cache of, when this one is gone."""
        return self._parts

    def serve_call(self, call: GenerateCall) -> None:
        """The cache is made for a generate() call, or for one forward: `attach` has made it, and not its user."""
        self._of_call = True
        self._use.begin_call(call, self)

    def _go_on(self) -> None:
        """Before the cache is used: if the call that `attach` made it for has ended, it grows as others do."""
        if torch.compiler.is_compiling() or self._forward is not None or self._live.static is None:
            return
        if self._of_call and self._use.call_has_ended:
            self._form.grow(self._settle)

    @_changes
    def repair(self) -> int:
        """Compute again what moved chunks have left, until all K/V is that of plain generate(), and store it as such.

        For moments between calls, where `ReusePolicy.progressive` has not come to an end, or is False.

        Returns:
            How many tokens went through the model, over all rows: 0 if K/V is exact, or where they cannot be
            computed again: a window has let go of tokens, an image came behind them, or the model is another one now.
        """
        live, model = self._live, self._binding.model()
        before = live.tally.repaired
        self._begin_loan()  # an interrupt leaves what is held, tainted as before
        if model is not None and self._writer.storable() is not None and self._binding.reason_in_training is None:
            while may_repair(live, at_once=True):
                repair_more(live, model, PIECE)
                note_hooks(self._parts, confirmed=True)
        self._forward, live.in_forward = None, False
        if live.tally.repaired > before and live.ledger is not None:
            self._writer.confirm(live.ledger)
        return live.tally.repaired - before

    @_changes
    def edit(
        self,
        *,
        drop: Iterable[tuple[int, int]] = (),
        replace: Iterable[tuple[int, int, Ids]] = (),
        move: Iterable[tuple[int, int, int]] = (),
    ) -> torch.Tensor:
        """Edit the text that the cache holds, without its prompt: what stays is moved, and only new text is computed.

        Afterwards the cache is as if generate() had been called with the edited prompt and mode `"blend"`: a
        `generate()` call with it goes on at once. All columns below are those of the text before the edit, intervals
        are half-open, and those of one edit do not overlap. An edit that is interrupted leaves what was before it.

        Text behind an edit was computed behind another text: the report counts it as moved, the store never has it by
        its history, and `repair` computes it again, as the policy's `progressive` does. New tokens, the last 16 and
        those that the policy's `repair` chooses are computed now; so are runs of fewer than 16 tokens that have moved.

        Args:
            drop: Spans (start, stop) to leave out.
            replace: Spans and token ids, (start, stop, ids), that take their place in all rows, or [batch, tokens] for
                each. An empty span inserts them.
            move: Spans and a column, (start, stop, to), that they are put in front of.

        Returns:
            The ids of the edited text, [batch, tokens], on the device of the model's inputs.

        Raises:
            ValueError: with mode `"exact"`; for spans outside of the text, spans that overlap, and an edit that leaves
                nothing; for a text that cannot be moved: images in it, states, other positions than rotary ones, rows
                of unequal length, codes (`live_quant`), buffers of a fixed size, windows that have let go of tokens.
            CacheInUseError: while a generate() call is under way with the cache.
            StoreClosedError: if its store was closed.

        Example:
            >>> from kvboost_hf.assets import load_embedded
            >>> model, tokenizer = load_embedded()
            >>> cache = ChunkReuseCache(model, policy=ReusePolicy(mode="blend"))
            >>> rules, result = "Answer in one word. " * 10, "The lamp is red. " * 20
            >>> start, inputs = len(tokenizer(rules).input_ids), tokenizer(rules + result, return_tensors="pt")
            >>> _ = model.generate(**inputs, cache=cache, max_new_tokens=1)
            >>> cache.edit(drop=[(start, start + 50)]).shape[1] == inputs.input_ids.shape[1] - 50
            True
        """
        self._use.require_idle()
        self._begin_loan()
        live, model, moved = self._live, self._binding.model(), None
        try:
            ledger = require_editable(self._parts)
            assert model is not None
            text = edited(ledger.log.columns(), drop, replace, move)
            if text.first < max(ledger.log.length, text.ids.shape[1]):
                moved = plan_live(self._parts, ledger, text)
                self._forward = moved if moved is not None else self._forward
                cut_live(self._parts, ledger, text)
                if moved is not None:
                    run_live(self._parts, model, moved)
                else:
                    leave_behind(self._parts, text)
        except BaseException:
            self._recover()
            raise
        self._forward, self._step, live.in_forward = None, None, False
        if moved is not None:
            moved.settle()
        self.catch_up()
        return torch.from_numpy(text.ids).to(input_device(model))

    @_changes
    def repair_when_idle(self) -> None:
        """Go on with a repair that rides, in a thread of its own, until the cache or its model is used again.

        For whoever calls the model in a loop of their own: a generate() call does so when it ends.
        """
        self._settle_last()
        self._parts.begin_idle()

    @_changes
    def store_all(self, *, pinned: bool = False) -> list[Put]:
        """Offer everything that the cache holds to the store, unfinished chunks included."""
        self._settle_last()
        self.catch_up()
        return self._writer.offer_all(pinned=pinned)

    @_changes
    def store_content(self, store: ChunkStore, start: int, *, pinned: bool = False) -> list[Put]:
        """Offer what the cache holds from column `start` on, of one row without padding, to be found by content only.

        It is cut as if it were all there is, so that it is cut in the same way behind any other text.
        """
        self._settle_last()
        self.catch_up()
        return self._writer.offer_content(store, start, pinned=pinned)

    @_changes
    def store_tails(self) -> bool:
        """Offer the tokens that fill no chunk to the store, before the cache lets go of them; not within a forward.

        Returns:
            Whether the cache holds what moved chunks have left; see `repair_when_idle`.
        """
        if self._use.inside == 0 or not self._use.is_in_forward(self):
            self._settle_last()
            self._writer.offer_tails()
        return self._live.ledger is not None and self._live.ledger.blended is not None

    @_changes
    def fork(self) -> "ChunkReuseCache":
        """A cache that holds the same, at no cost: whichever of the two is written to first copies its buffers.

        With `max_cache_len`, they are copied now.

        Raises:
            ValueError: if the model cannot reuse K/V, or no longer exists.
        """
        self._go_on()
        live, binding = self._live, self._binding
        if (model := binding.model()) is None:
            raise ValueError(
                "`fork` and copies need the model that the cache was made for, which no longer exists. Keep it, "
                "or pickle the cache: what is loaded needs none."
            )
        if live.unsupported is not None:
            raise ValueError(f"`fork` needs a model that can reuse K/V, but {live.unsupported}.")
        self._settle()
        self._form.leave(self._settle)
        live.in_step()
        twin = ChunkReuseCache(
            model,
            binding.store,
            binding.policy,
            binding.salt,
            max_cache_len=self._form.asked,
            live_quant=binding.live_quant,
        )
        live.share_into(twin._live, None if live.plain_reason is None else copy.deepcopy(self.layers))
        twin._binding.hidden_layers = binding.hidden_layers
        twin._user_defined, twin._call, twin._of_call = self._user_defined, self._call, self._of_call
        return twin

    @property
    def loans(self) -> Loans:
        """The layers for whoever runs forwards beside the cache: drafts that branch, and servers."""
        return Loans(self._parts, self._hold_all, self._repair_at_once, self._begin_loan, self._end_loan)

    def _hold_all(self) -> None:
        """End what is under way; then all columns are in the layers, in buffers that grow unless a size was named."""
        self._settle()
        self.catch_up()
        self._form.leave(self._settle)

    def _repair_at_once(self) -> None:
        """Before forwards that are not told to the cache: do what `progressive=True` does before a token."""
        self._settle()
        ledger = self._live.ledger
        if ledger is not None and ledger.blended is not None and ledger.progressive is True:
            self.repair()
        self._hold_all()

    def _begin_loan(self) -> None:
        """Up to `_end_loan`, the layers are changed outside of any forward of theirs; an interrupt undoes that."""
        self._hold_all()
        self._live.in_step()
        self._forward = Lent(self._parts, self._live.held)
        self._live.in_forward = True

    def _end_loan(self) -> None:
        self._forward, self._live.in_forward = None, False
        if self._live.ledger is not None:
            self._writer.confirm(self._live.ledger)

    def root_of(self, tokens: int) -> bytes | None:
        """The key that the chain of a prompt with so many tokens starts from; None if nothing of it can be stored."""
        return root_of(self._parts, tokens)

    def stored_tokens(self, ids: torch.Tensor) -> int:
        """How many first tokens of a prompt, whose last one is left to compute, the store holds now.

        Args:
            ids: The prompt, [1, tokens] or [tokens].

        Raises:
            ValueError: for ids of several rows, of another shape, and numbers that are no integers.
            TypeError: for what is no numbers.
        """
        row = one_row("`ids` must be those of one prompt", ids)
        self._settle_last()
        return look_up(self._parts, row).filled if row.shape[1] > 1 else 0

    def best_order(self, documents: Sequence[D], ids_of: Callable[[list[D]], Ids]) -> BestOrder[D]:
        """The order of documents in which most of a prompt is stored: for prompts whose answer does not depend on it.

        Exact reuse of what comes first: nothing is moved, and nothing is computed. No text is changed. What the cache
        holds itself is stored before.

        Args:
            documents: In an order, which is kept where another one gains nothing.
            ids_of: Makes the token ids [tokens] or [1, tokens] of the prompt with these documents: with all of them in
                some order, or with some. It is called once for each pair of documents that is tried.

        Returns:
            The documents in the best order, and how many first tokens of their prompt are stored, in this order and in
            the one that was given. Those of which nothing is stored come last, in the order that was given.

        Raises:
            ValueError: for ids of several rows, of another shape, and numbers that are no integers.
            TypeError: for what is no numbers.

        Example:
            >>> from kvboost_hf.assets import load_embedded
            >>> model, tokenizer = load_embedded()
            >>> notes = [f"The {thing} is red. It stands in the hall. " * 8 for thing in ("lamp", "cup", "boat")]
            >>> ids_of = lambda notes: tokenizer("".join([*notes, "Where is the cup?"]), return_tensors="pt").input_ids
            >>> cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=16))
            >>> _ = model.generate(ids_of(notes), cache=cache, max_new_tokens=1)
            >>> best = cache.best_order([notes[2], notes[0], notes[1]], ids_of)
            >>> best.documents == notes, best.saved_tokens > 100
            (True, True)
        """
        self.store_tails()
        return best_order(documents, lambda some: self.stored_tokens(ids_of(some)))

    def movable_spans(self, ids: torch.Tensor, start: int) -> list[tuple[int, int]]:
        """Which tokens of a prompt stored K/V could serve that stood elsewhere; half-open, none with mode `"exact"`.

        Args:
            ids: The prompt, [1, tokens] or [tokens].
            start: The first token that is looked at.

        Raises:
            ValueError: for ids of several rows, of another shape, and numbers that are no integers.
            TypeError: for what is no numbers.
        """
        row = one_row("`ids` must be those of one prompt", ids)
        if self.policy.mode == "exact":
            return []
        self._settle_last()
        return movable_spans(self._parts, row, start)

    @_changes
    def __reduce__(self) -> Any:
        """A `DynamicCache` with copies of what this one holds, which needs neither its model nor this package."""
        self._settle()
        self.catch_up()
        layers = [layer.as_stock() if isinstance(layer, ReuseLayer) else layer for layer in self.layers]
        return DynamicCache, (), {**vars(DynamicCache()), "layers": layers, "layer_class_to_replicate": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> "ChunkReuseCache":
        return self.fork()

    def __copy__(self) -> "ChunkReuseCache":
        return self.fork()


def _way_to(frame: FrameType) -> tuple[int, bool]:
    """How many frames it is from the caller up to that of a generate() call, and whether this runs its prompt."""
    depth, in_prefill, caller = 0, False, sys._getframe(1)
    while caller is not frame and caller.f_back is not None:
        in_prefill |= caller.f_code.co_name == "_prefill"
        depth, caller = depth + 1, caller.f_back
    return depth, in_prefill
