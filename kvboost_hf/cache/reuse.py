"""`ChunkReuseCache`: a transformers `Cache` that never computes the same K/V twice.

It is built in three steps: `held.py` keeps the layers and the record of what they hold in step, `serve.py` decides
what each forward is given, and here is what callers and generate() see.

generate() reads `get_seq_length()` and cuts the ids by it before any hook can see them. Before that, it sets
`_is_user_defined` on a cache that it was given: the setter arms the cache, and an armed cache claims to be empty until
the first forward, which then sees the whole prompt.
"""

import copy
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from kvboost_hf.cache.forward.lending import LendingCache
from kvboost_hf.cache.planning.report import ReuseReport, Tally
from kvboost_hf.cache.prompt.generate_call import calling
from kvboost_hf.cache.prompt.hook import install
from kvboost_hf.cache.prompt.inputs import read_pads
from kvboost_hf.cache.store.chunk_store import ChunkStore, default_store, salt_bytes
from kvboost_hf.compat import require_cache, unwrapped
from kvboost_hf.config import KVQuantConfig, ReusePolicy
from kvboost_hf.errors import CacheModelMismatchError

_UNUSED = "the model has made no use of the cache"


class ChunkReuseCache(LendingCache):
    """Pass it as `past_key_values` (for Mamba-2, as `cache_params`) to as many `generate()` calls as you like.

    Each call gets what plain generate() would give. What was computed before, in this cache or in its store, is not
    computed again: the prompt may continue the one before, be shorter, diverge from it, or have nothing to do with it.
    Bare `model(...)` keeps its usual meaning: ids continue what the cache holds; pass `logits_to_keep=1` to let a
    prompt reuse anything, for otherwise the logits of all its tokens are wanted. Constructing one costs nothing. It
    belongs to one thread at a time; the store may be shared.

    Args:
        model: The causal language model that it will be passed to. Held weakly.
        store: Where K/V outlives this cache; None takes the model's own default store (4 GiB of host memory).
        policy: How stored K/V may be used.
        salt: Separates those who must not see each other's prompts; None takes the store's. May be set anew, as
            `cache.salt`, before each request.
        max_cache_len: Hold at most so many tokens, in buffers that never move, so that generate() can compile
            decoding: it does so by itself on a GPU, and elsewhere where its `compile_config` asks for it. None grows.
        live_quant: Hold K/V of full attention as codes while it is used, but for the first and last tokens and layers.
            The output may differ. What is stored of it is found by caches with the same `live_quant` only.

    Raises:
        ValueError: for a model that cannot be served, or not with `max_cache_len`; a store that was made for another
            model; `live_quant` with `max_cache_len`; audits of lossy K/V; and later, for a generate() call that may
            take more than `max_cache_len` tokens.

    Example:
        >>> from kvboost_hf.assets import load_embedded
        >>> model, tokenizer = load_embedded()
        >>> cache = ChunkReuseCache(model)
        >>> inputs = tokenizer("The lamp is red. " * 20, return_tensors="pt")
        >>> for _ in range(2):
        ...     _ = model.generate(**inputs, past_key_values=cache, max_new_tokens=1)
        >>> cache.report.forwarded_tokens
        1
    """

    def __init__(
        self,
        model: PreTrainedModel,
        store: ChunkStore | None = None,
        policy: ReusePolicy | None = None,
        salt: str | bytes | None = None,
        *,
        max_cache_len: int | None = None,
        live_quant: KVQuantConfig | None = None,
    ) -> None:
        model = unwrapped(model)
        require_cache(model)
        if store is not None and not isinstance(store, ChunkStore):
            raise ValueError(f"`store` must be a ChunkStore, got {store!r}. Pass ChunkStore(model).")
        if policy is not None and not isinstance(policy, ReusePolicy):
            raise ValueError(f"`policy` must be a ReusePolicy, got {policy!r}. Pass ReusePolicy(mode='blend').")
        if store is not None and not store.serves(model):
            raise ValueError(
                "`store` was made for another model object, whose K/V this model cannot use. Pass a store made with "
                "ChunkStore(model), or None for the model's default store."
            )
        policy = policy if policy is not None else ReusePolicy()
        if live_quant is not None and max_cache_len is not None:
            raise ValueError(
                f"`max_cache_len` must be None with `live_quant`, whose buffers grow, got {max_cache_len}. Leave out "
                "one of the two."
            )
        store = store if store is not None else default_store(model)
        if policy.audit_rate and (live_quant is not None or not store.codec.lossless):
            lossy = "`live_quant`" if live_quant is not None else f"a store with codec {store.codec.name!r}"
            raise ValueError(
                f"`audit_rate` must be 0 with {lossy}, whose answers may differ, got {policy.audit_rate}. Measure "
                "them with verify_correctness()."
            )
        salt = store.salt if salt is None else salt_bytes(salt)
        super().__init__(model, store, policy, salt, max_cache_len, live_quant)
        self._user_defined = False
        install(model)

    # What transformers calls

    @property
    def _is_user_defined(self) -> bool:
        return self._user_defined

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        call = calling()
        if self._static is not None:
            self._recover()
            self._static.in_use = call.uses_cache
            self._static.require_call_fits(call, self._held())
        self._user_defined = value
        continues = call.continues(self._held())
        self._call = call if value and not continues else None
        self._hides_padding_only = not continues or self._knows_padding(call.mask)
        model = self._model()
        if self._call is not None:
            self._tally = Tally(bypass=_UNUSED)  # until a forward comes with it
            self._stop_recording()
            if self._held() and model is not None:
                self._call.start_over(model)

    def _knows_padding(self, mask: torch.Tensor | None) -> bool:
        """Whether a mask over what the cache holds, and more, hides what has been hidden so far."""
        if mask is None or self._ledger is None:
            return True
        pads = read_pads(mask, *mask.shape[:2])
        return pads is not None and np.array_equal(pads, self._ledger.log.pads)

    @property
    def salt(self) -> bytes:
        """Separates those who must not see each other's prompts. Another one may be set before any prompt."""
        return self._salt

    @salt.setter
    def salt(self, salt: str | bytes) -> None:
        new = salt_bytes(salt)
        if new != self._salt:
            self.reset()  # with the old one: what it holds belongs to that
            self._salt = new

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns held; 0 between the start of a generate() call and its first forward."""
        if self._call is not None:
            return 0
        # Asked in the middle of a forward: this layer may have got its new columns already, others not.
        return self._held() if self._counting is None else super().get_seq_length(layer_idx)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Cache.update`."""
        # Around a compiled step no hook has run that could have said so.
        step = self._static is not None and (torch.compiler.is_compiling() or key_states.shape[-2] == 1)
        if self._running is None and not step:
            model = self._model()
            name = type(model).__name__ if model is not None else "a model that no longer exists"
            raise CacheModelMismatchError(
                f"This ChunkReuseCache was made for one {name} object, and K/V reached it from elsewhere. Make a "
                "cache for each model, ChunkReuseCache(other_model), and pass it to the model, not to a part of it."
            )
        if self._running is not None and self._running.loading is not None:
            self._running.loading.wait(layer_idx)
        if self._running is not None and self._running.scatter is not None:
            keys, values = self._running.scatter.update(layer_idx, key_states, value_states)
        else:
            keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys, values

    def reset(self) -> None:
        """Let go of what the cache holds. The store keeps its chunks."""
        self._recover()
        self.store_tails()
        self._drop()
        self._call = None
        self._tally = Tally()

    # What users call

    @property
    def report(self) -> ReuseReport:
        """Counts for the last prompt."""
        return self._tally.report()

    def note_refusal(self, reason: str, tokens: int) -> None:
        """Report a prompt of so many tokens that was computed without this cache."""
        self._tally = Tally(prompt=tokens, forwarded=tokens, bypass=reason)

    def fork(self) -> "ChunkReuseCache":
        """A cache that holds the same, at no cost: whichever of the two is written to first copies its buffers.

        With `max_cache_len`, they are copied now.

        Raises:
            ValueError: if the model cannot reuse K/V.
        """
        if self._unsupported is not None:
            raise ValueError(f"`fork` needs a model that can reuse K/V, but {self._unsupported}.")
        self._recover()
        self._in_step()
        model = self._model()
        assert model is not None, "a cache without its model cannot be forked"
        max_cache_len = self._static.max_cache_len if self._static is not None else None
        twin = ChunkReuseCache(
            model, self.store, self.policy, self.salt, max_cache_len=max_cache_len, live_quant=self._live_quant
        )
        if self._static is not None and twin._static is not None:
            twin._static.tape = self._static.tape.copy()
        twin._plain, twin._used, twin._changed = self._plain, self._used, self._changed
        twin._layers = [layer.share() for layer in self._layers]
        twin._counting = next((layer for layer in twin._layers if layer.length is not None), None)
        own = self._plain is None
        twin.layers[:] = [layer.native for layer in twin._layers] if own else copy.deepcopy(self.layers)
        twin._user_defined, twin._call = self._user_defined, self._call
        twin._regime, twin._columns, twin._bumps = self._regime, self._columns, self._bumps
        twin._records_for_call = self._records_for_call
        twin._ledger = self._ledger.copy() if self._ledger is not None else None
        return twin

    def __reduce__(self) -> Any:
        raise TypeError("A ChunkReuseCache cannot be pickled: it belongs to a model in this process. Make a new one.")

    def __deepcopy__(self, memo: dict[int, Any]) -> "ChunkReuseCache":
        return self.fork()

    def __copy__(self) -> "ChunkReuseCache":
        return self.fork()
