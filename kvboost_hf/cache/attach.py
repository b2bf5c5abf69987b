"""`attach` and `detach`: reuse for calls that bring no cache of their own, such as pipelines."""

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import prod
from types import MethodType
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, StaticCache
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.generation.configuration_utils import GenerationMode

from kvboost_hf import forks
from kvboost_hf.cache.codecs import LiveQuant, live_config
from kvboost_hf.cache.forward.admission import RECORDED
from kvboost_hf.cache.forward.running import CacheParts
from kvboost_hf.cache.identity import ModelState
from kvboost_hf.cache.identity.foreign import holder_of_cache, is_stock
from kvboost_hf.cache.identity.versions import PREPARE_CACHE
from kvboost_hf.cache.live.compiled import static_reason
from kvboost_hf.cache.live.decoding_form import AUTO, GROWS, NOT_ON_GPU, MaxCacheLen
from kvboost_hf.cache.prompt import (
    ALL_LOGITS,
    GRADIENTS,
    Kwargs,
    begun_tokens,
    gradients_enabled,
    install,
    logits_kept,
    new_shape,
    new_tokens,
    reason_of_arguments,
    wants_all_logits,
)
from kvboost_hf.cache.reuse import ChunkReuseCache
from kvboost_hf.cache.store.chunk_store import ChunkStore
from kvboost_hf.compat import (
    CACHE,
    GenerateCall,
    at_end,
    cache_in,
    calling,
    has_own_cache,
    is_in_stock_loop,
    known_reason,
    require_model,
    running_config,
    unwrapped,
)
from kvboost_hf.config import KVQuantConfig, ReusePolicy
from kvboost_hf.errors import CacheInUseError

Salt = str | bytes | None

_PAGED = "generate_batch() keeps K/V in pages of its own"
_PACKAGE = __name__.partition(".")[0]


class _OfThread(threading.local):
    """State that the calls of one thread leave for its next one."""

    last: ChunkReuseCache | None = None
    config: "weakref.ref[Any] | None" = None  # that the generate() call of the last cache has made for itself
    fixed: "_LeftBuffers | None" = None  # of a fixed size: they serve the next call, too
    in_graphs: "_LeftBuffers | None" = None  # of the calls that decode in graphs of which nobody has named the size
    eager_reason: str | None = None  # why the call that begins decodes without a graph


class _LeftBuffers(NamedTuple):
    """What a cache of a fixed size has, for the next call to go on with."""

    cache: "weakref.ref[ChunkReuseCache]"  # gone when the call has ended and nobody keeps what it has returned
    parts: CacheParts

    @classmethod
    def of(cls, cache: ChunkReuseCache) -> "_LeftBuffers":
        return cls(weakref.ref(cache), cache.parts)


class _Attachment:
    """Makes a `ChunkReuseCache` for each call; calls may come from several threads.

    A chunk goes to the store when it is complete, and the tokens behind the last one when `generate()` returns.
    """

    def __init__(
        self,
        store: ChunkStore | None,
        policy: ReusePolicy | None,
        salt: Salt | Callable[[], Salt],
        live_quant: KVQuantConfig | None,
        max_cache_len: MaxCacheLen,
    ) -> None:
        self._store, self._policy, self._salt, self._live_quant = store, policy, salt, live_quant
        self._max_cache_len = max_cache_len
        kept = policy.keep_hidden_states if policy is not None else None
        self._keeps = policy is not None and (policy.keep_logprobs or bool(kept))  # hidden states of all texts
        self._may_keep = kept is not False
        self._of_thread = _OfThread()
        self._latest: ChunkReuseCache | None = None
        self._storing = forks.lock()  # tails are on their way to the store

    def cache_for(
        self,
        model: PreTrainedModel,
        call: GenerateCall,
        config: GenerationConfig,
        given: Kwargs,
        mode: GenerationMode,
    ) -> ChunkReuseCache | None:
        """A cache of a fixed size for a generate() call that has none and asks for none, or None."""
        if self._max_cache_len is None or config.cache_implementation not in (None, "dynamic") or not config.use_cache:
            return None
        if cache_in(given) is not None or given.get("inputs_embeds") is not None:
            return None
        if mode == GenerationMode.ASSISTED_GENERATION:
            return None
        if self._max_cache_len == AUTO:
            return self._in_a_graph(model, call)
        if (holder_of_cache(model) or static_reason(model, self._max_cache_len)) is not None:  # changed after attach()
            return None
        self._finish_last()
        return self._of_call(self._of_fixed_size(model, self._max_cache_len))

    def _in_a_graph(self, model: PreTrainedModel, call: GenerateCall) -> ChunkReuseCache | None:
        """This thread's cache for calls that decode in a graph, or None for one that does not."""
        of_thread = self._of_thread
        if not call.compiles(model):
            of_thread.eager_reason = NOT_ON_GPU
            return None
        if holder_of_cache(model) is not None:
            return None
        self._finish_last()
        parts, of_thread.in_graphs = self._take_over(of_thread.in_graphs), None
        cache = self._of_any_size(model, AUTO) if parts is None else ChunkReuseCache.over(parts)
        of_thread.eager_reason = cache.reason_for_eager(call)
        if of_thread.eager_reason is not None:  # a call that grows may need the memory
            return None
        of_thread.in_graphs = _LeftBuffers.of(cache)
        return self._of_call(self._begin_anew(cache))

    def stand_in(self, model: PreTrainedModel, theirs: Any, kwargs: Kwargs, recorded: bool) -> ChunkReuseCache | None:
        """The cache to use in place of `theirs`, a caller's own cache or None; None to leave the call alone.

        A forward that is `recorded` by PyTorch is always left alone.

        The caller's object is given the layers of ours, so that it holds what was computed, too.
        """
        pages = kwargs.get("cache")  # since transformers 5.24 any cache is called so
        if pages is not None and not isinstance(pages, Cache):
            if not has_own_cache(model):  # whose first forward was told of
                self._refuse_batch(model, kwargs)
            return None
        keeps = self._keeps or (self._may_keep and bool(kwargs.get("output_hidden_states")))
        begins = _begins_text(model, theirs, kwargs, keeps_logprobs=keeps)
        why = None if begins else _unreadable(model, theirs, kwargs, keeps_logprobs=keeps)
        if not begins and why is None:
            return None
        if recorded:
            self._refuse(model, RECORDED, prod(new_shape(kwargs)))  # what a mask holds is not known
            return None
        if why is not None:
            self._refuse_again(model, why, begun_tokens(kwargs))
            return None
        self._finish_last()
        reason = _refusal(model, theirs, kwargs)
        if reason is None and isinstance(theirs, StaticCache) and self._live_quant is not None:
            reason = "`live_quant` has buffers that grow, and generate() was told to make a StaticCache"
        if reason is None and isinstance(theirs, StaticCache) and self._keeps:
            reason = "hidden states are kept in buffers that grow, and generate() was told to make a StaticCache"
        if reason is not None:
            self._refuse(model, reason, begun_tokens(kwargs))
            return None
        if isinstance(theirs, StaticCache):
            cache = self._of_fixed_size(model, _size(theirs))
        else:
            cache = self._of_any_size(model)
            reason, self._of_thread.eager_reason = self._of_thread.eager_reason, None
            cache.note_eager(reason if self._max_cache_len is not None else GROWS)
        if isinstance(theirs, DynamicCache):
            if any(getattr(layer, "record_past", False) for layer in theirs.layers):  # generate() will crop candidates
                cache.activate_past_recording()
            theirs.layers = cache.layers
        return self._of_call(cache)

    def _finish_last(self) -> None:
        """Store what earlier calls have left."""
        self.flush()
        with self._storing:  # what another thread's call has just left is worth waiting for
            pass

    def _of_call(self, cache: ChunkReuseCache) -> ChunkReuseCache:
        """Note the cache of a call that begins, and have its last tokens stored when that has ended."""
        call = calling()
        cache.serve_call(call)  # before other threads can have it
        self._note(cache, call)
        if (config := call.config) is None:
            cache.stores_prompts_whole = True
        else:  # generate() makes it for one call, and lets go of it when it returns
            store = partial(self._store_tails_of, weakref.ref(cache), threading.get_ident())
            at_end(config, store, streamer=call.streamer)
        return cache

    def _of_any_size(self, model: PreTrainedModel, max_cache_len: MaxCacheLen = None) -> ChunkReuseCache:
        salt, live_quant = self._current_salt(), self._live_quant
        return ChunkReuseCache(
            model, self._store, self._policy, salt, max_cache_len=max_cache_len, live_quant=live_quant
        )

    def _of_fixed_size(self, model: PreTrainedModel, max_cache_len: int) -> ChunkReuseCache:
        parts = self._take_over(self._of_thread.fixed)
        if parts is None or parts.live.static is None or parts.live.static.max_cache_len < max_cache_len:
            cache = self._of_any_size(model, max_cache_len)
        else:
            cache = ChunkReuseCache.over(parts)
        self._of_thread.fixed = _LeftBuffers.of(cache)
        return self._begin_anew(cache)

    def _take_over(self, buffers: _LeftBuffers | None) -> CacheParts | None:
        """What an earlier call of this thread has left; None if it is under way, or its cache or layers are in use."""
        if buffers is None:
            return None
        last = self._of_thread.last
        if last is buffers.cache():  # we keep it for its report
            self._of_thread.last = None
            self._latest = None if self._latest is last else self._latest
        del last
        is_free = buffers.cache() is None and not buffers.parts.live.has_layers_elsewhere
        return buffers.parts if is_free else None

    def _begin_anew(self, cache: ChunkReuseCache) -> ChunkReuseCache:
        salt = self._current_salt()
        cache.salt = cache.store.salt if salt is None else salt
        cache.begin_anew()
        return cache

    def _current_salt(self) -> Salt:
        return self._salt() if callable(self._salt) else self._salt

    def _refuse(self, model: PreTrainedModel, reason: str, tokens: int) -> None:
        """Note why a call is not served: a report for `last_cache`."""
        cache = ChunkReuseCache(model, self._store, self._policy, b"", live_quant=self._live_quant)
        cache.note_refusal(reason, tokens)
        self._note(cache, calling())

    def _refuse_again(self, model: PreTrainedModel, reason: str, tokens: int) -> None:
        """The same where one call may come as many forwards, of which the first one has the prompt."""
        last, noted = self._of_thread.last, self._of_thread.config
        if noted is not None and (config := noted()) is not None and config is running_config():
            if is_in_stock_loop(config, threading.get_ident()):
                return
        if last is not None and last.report.bypass_reason == reason:
            last.note_refusal(reason, tokens)
            self._note(last, calling())
        else:
            self.flush()
            self._refuse(model, reason, tokens)

    def _refuse_batch(self, model: PreTrainedModel, kwargs: Kwargs) -> None:
        """Note that generate_batch() is not served: once, for its forwards run in a thread that nobody asks."""
        last, ids = self._latest, kwargs.get("input_ids")
        if (last is None or last.report.bypass_reason != _PAGED) and isinstance(ids, torch.Tensor):
            self._refuse(model, _PAGED, new_tokens(kwargs))
            self._of_thread = _OfThread()  # of no thread: all are told of it

    def flush(self) -> None:
        """Store what the last call of this thread has left."""
        if (last := self._of_thread.last) is not None:
            with self._storing, suppress(CacheInUseError):  # by another thread, which has it from `last_cache`
                last.store_tails()

    @property
    def last(self) -> ChunkReuseCache | None:
        """The cache of this thread's last call; without one, of the last call of any thread."""
        last = self._of_thread.last  # once: another thread may put an empty one in place of `_of_thread`
        return last if last is not None else self._latest

    def _note(self, cache: ChunkReuseCache, call: GenerateCall) -> None:
        """Take a cache for that of the last call, which is under way.

        Loops of transformers begin with the prompt: a call's forwards of other texts, such as those of
        `guidance_scale`, do not stand for it.
        """
        of_thread, config = self._of_thread, call.config
        is_noted = config is not None and of_thread.config is not None and of_thread.config() is config
        if not is_noted or not is_in_stock_loop(config, threading.get_ident()):
            of_thread.last = self._latest = cache
            of_thread.config = weakref.ref(config) if config is not None else None

    def _store_tails_of(self, ended: "weakref.ref[ChunkReuseCache]", thread: int) -> None:
        """Store what a call of a thread has left, unless the end shows in another thread, which must not wait.

        What moved chunks have left in it is repaired then.
        """
        if (cache := ended()) is not None and self._storing.acquire(blocking=thread == threading.get_ident()):
            try:
                with suppress(CacheInUseError):  # see `flush`
                    if cache.store_tails():
                        cache.repair_when_idle()
            finally:
                self._storing.release()


def _begins_text(model: PreTrainedModel, theirs: Any, kwargs: Kwargs, *, keeps_logprobs: bool) -> bool:
    """Whether a forward may be the first one over a text, and its logits can be had where something is reused."""
    ids, wants_all = kwargs.get("input_ids"), wants_all_logits(kwargs)
    if not isinstance(ids, torch.Tensor):
        return False
    if wants_all and keeps_logprobs:
        if model.training or gradients_enabled(model):
            return False
    elif logits_kept(kwargs) is None or (theirs is None and wants_all):
        return False
    if theirs is None:
        return kwargs.get("use_cache") is not False
    ours = type(theirs) is Cache or type(theirs).__module__.partition(".")[0] == _PACKAGE  # a forward within a forward
    return isinstance(theirs, Cache) and not ours and _is_empty(theirs)


def _unreadable(model: PreTrainedModel, theirs: Any, kwargs: Kwargs, *, keeps_logprobs: bool) -> str | None:
    """Why a forward that may begin a text cannot be served, whatever its cache; None if it goes on."""
    ids, embeds = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
    if isinstance(embeds, torch.Tensor) and ids is None:
        empty = theirs is None or (isinstance(theirs, Cache) and _is_empty(theirs))
        return "no input_ids were passed" if empty else None
    if theirs is not None or not isinstance(ids, torch.Tensor):
        return None
    if kwargs.get("use_cache") is False:
        return "use_cache is False"
    if not keeps_logprobs:
        return ALL_LOGITS
    return "the model is in training mode" if model.training else GRADIENTS


def _is_empty(theirs: Cache) -> bool:
    """Whether a cache that transformers made holds nothing."""
    if not hasattr(theirs, "layers"):  # an EncoderDecoderCache has two caches in their place
        return int(theirs.get_seq_length()) == 0
    for layer in theirs.layers:
        if isinstance(layer, CacheLayerMixin) and int(layer.get_seq_length()) > 0:
            return False
        if any(getattr(layer, "has_previous_state", {}).values()):
            return False
    return True


def _refusal(model: PreTrainedModel, theirs: Cache | None, kwargs: Kwargs) -> str | None:
    """Why a text runs on what its caller has brought, or None."""
    if (reason := known_reason(model) or holder_of_cache(model)) is not None:
        return reason
    if theirs is None:
        if not getattr(model.config.get_text_config(decoder=True), "use_cache", True):  # Inkling has none
            return "use_cache is False"
        return reason_of_arguments(model, kwargs)  # with `encoder_hidden_states` a model makes a cache of another kind
    kind = type(theirs)
    if kind in (DynamicCache, StaticCache) and not is_stock(theirs):
        return f"layers or methods of the {kind.__name__} that it was given were replaced"
    if kind not in (DynamicCache, StaticCache):
        return f"generate() was given a {kind.__name__}, or told to make one, which keeps K/V in a form of its own"
    if theirs.offloading:
        return "generate() was told to offload its cache"
    if kind is StaticCache and getattr(theirs, "_is_user_defined", False):
        return "generate() was given a StaticCache (pass ChunkReuseCache(model, max_cache_len=...) in its place)"
    if kind is StaticCache and not _size(theirs):
        return "it was given a StaticCache whose layers all have a window, outside generate()"
    return static_reason(model, _size(theirs)) if kind is StaticCache else None


def _size(theirs: Cache) -> int:
    """Columns that a StaticCache was made for; 0 if nothing tells: each layer has a state, or its window at most."""
    call = calling().max_length
    pairs = zip(theirs.layers, theirs.is_sliding, strict=True)
    sizes = [size for layer, is_sliding in pairs if not is_sliding and (size := layer.get_max_length()) > 0]
    return max(sizes, default=call - 1 if call is not None else 0)


def attach(
    model: PreTrainedModel,
    store: ChunkStore | None = None,
    policy: ReusePolicy | None = None,
    salt: Salt | Callable[[], Salt] = None,
    *,
    live_quant: LiveQuant = None,
    max_cache_len: MaxCacheLen = AUTO,
) -> PreTrainedModel:
    """Give every later `generate()` call on `model` that passes no cache a `ChunkReuseCache`.

    So are calls of `model(...)` without a cache that say which logits they want (`logits_to_keep`; with
    `ReusePolicy(keep_logprobs=True)` all calls under `torch.no_grad()`), and those with
    `cache_implementation="static"`. The K/V of a thread's last call stays in memory until its next call, or until
    `detach`. Attaching again replaces the settings.

    Args:
        model: The model whose calls are served, for example a pipeline's `pipe.model`; or a wrapper of PEFT or of
            `torch.compile` around it.
        store: Shared by all calls; None takes the model's default store.
        policy: How stored K/V may be used.
        salt: Separates those who must not see each other's prompts; None takes the store's. A function is asked
            at each call, such as the `get` of a context variable.
        live_quant: Hold K/V as codes, see `ChunkReuseCache`.
        max_cache_len: Have each thread's `generate()` calls use one cache of so many tokens, whose decoding
            `generate()` can compile, see `ChunkReuseCache`; without effect on assisted decoding, and on calls that ask
            for a kind of cache. A call that may take more tokens raises a `ValueError`. `"auto"` does so for calls of
            which a compilation is worth its time, with as many tokens as they need; None for none.

    Returns:
        `model`.

    Raises:
        ValueError: for a model that cannot be served, or not with `max_cache_len`; a store that was made for another
            model; `live_quant` with `max_cache_len`.

    Example:
        >>> from transformers import pipeline
        >>> from kvboost_hf.assets import load_embedded
        >>> model, tokenizer = load_embedded()
        >>> pipe = pipeline("text-generation", model=attach(model), tokenizer=tokenizer)
    """
    inner, live_quant = unwrapped(model), live_config(live_quant)
    known = None if callable(salt) else salt
    # Refuses now, not at the first call.
    ChunkReuseCache(inner, store, policy, known, max_cache_len=max_cache_len, live_quant=live_quant)
    install(inner)
    detach(inner)
    if max_cache_len is not None:
        # Whether decoding is compiled is decided before any forward, by the cache that this makes.
        setattr(inner, PREPARE_CACHE, MethodType(_prepare_cache_for_generation, inner))
    ModelState.of(inner).attached = _Attachment(store, policy, salt, live_quant, max_cache_len)
    return model


def _prepare_cache_for_generation(
    self: PreTrainedModel,
    generation_config: GenerationConfig,
    model_kwargs: Kwargs,
    generation_mode: GenerationMode,
    *args: Any,
) -> Any:
    """Stands before the method of this name: a call goes on as if the cache had been passed to it."""
    call = calling()
    model = call.model or self  # which may be a shallow copy: this is bound to what that was copied from
    attached = ModelState.of(model).attached
    if isinstance(attached, _Attachment):
        cache = attached.cache_for(model, call, generation_config, model_kwargs, generation_mode)
        if cache is not None:
            model_kwargs[CACHE] = cache
    prepare = getattr(type(model), PREPARE_CACHE)
    return prepare(model, generation_config, model_kwargs, generation_mode, *args)


def detach(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `attach`. Stored chunks, and caches that are passed by hand, stay as they are."""
    inner = require_model(model)
    state = ModelState.of(inner)
    if isinstance(state.attached, _Attachment):
        state.attached.flush()
    inner.__dict__.pop(PREPARE_CACHE, None)
    state.attached = None
    return model


def last_cache(model: PreTrainedModel) -> ChunkReuseCache | None:
    """The cache of an attached model's last call: `last_cache(model).report`.

    That of this thread, or where this thread has made none, of any thread. The report of a call that was not served
    says why.
    """
    attached = ModelState.of(require_model(model)).attached
    return attached.last if isinstance(attached, _Attachment) else None


def cache_of_attached(model: PreTrainedModel) -> ChunkReuseCache:
    """A new cache with the settings of `attach`; for a model that is not attached, with those of `ChunkReuseCache`."""
    attached = ModelState.of(model).attached
    if not isinstance(attached, _Attachment):
        return ChunkReuseCache(model)
    attached._finish_last()
    return attached._of_any_size(model)
