"""`ModelRunner`: the model of an engine, and the caches that single rows are computed with."""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from weakref import WeakSet

import psutil
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from kvboost_hf.assisted.heads import hidden_bytes
from kvboost_hf.cache.forward.prompt_plan import look_up
from kvboost_hf.cache.identity import ModelState
from kvboost_hf.cache.layers.stateful import states_of
from kvboost_hf.cache.live.ledger import KnownRow
from kvboost_hf.cache.reuse import ChunkReuseCache
from kvboost_hf.cache.store.chunk_store import ChunkStore
from kvboost_hf.compat import (
    PrivateCache,
    bytes_per_token,
    cache_layers,
    has_own_cache,
    input_device,
    padding_reason,
    probe_ids,
    probe_reason,
    require_one_process,
    rope_regime,
    run_model,
    steps_reason,
)
from kvboost_hf.config import KVQuantConfig, ReusePolicy
from kvboost_hf.errors import StoreClosedError
from kvboost_hf.ngrams import common_prefix
from kvboost_hf.server.engine.task import Task
from kvboost_hf.server.generation.sharing import sharing_reason
from kvboost_hf.server.jobs import Job

_log = logging.getLogger("kvboost_hf.server")
_OTHERS_AFTER_S = 1.0  # after which others may have stored more in tiers that are shared
_MOST_ASKED = 16  # prompts that somebody has asked for, and may send next
_COPIES = 2  # of K/V under way: a row's own, and the one in the batch


class ModelRunner:
    """Runs a model on single rows of tokens, each with a `ChunkReuseCache` of its own.

    Args:
        model: A causal language model in eval mode.
        store: Where K/V is kept; once somebody has closed it, nothing is kept.
        policy: How stored K/V may be used.
        live_quant: The codec of K/V in the caches; None for K/V as the model computes it.
        context: Tokens of a row, at most.

    Attributes:
        in_pieces: Whether prompts can be computed in pieces.
        one_by_one: Whether single tokens leave other states than a prompt: answers are computed again one by one.
        batchable: Whether rows can be computed in one batch.
        in_place: Whether rows of a batch can read K/V that they share where it lies.
        lending_reason: Why the caches cannot hand out their K/V, or None.

    Raises:
        ValueError: The model cannot be served.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        store: ChunkStore,
        policy: ReusePolicy,
        live_quant: KVQuantConfig | None,
        context: int,
    ) -> None:
        self.model, self.store, self.policy, self.device = model, store, policy, input_device(model)
        self._live_quant = live_quant
        self._changes = 0  # of what is stored, as far as this process knows
        self._asked: deque[KnownRow] = deque(maxlen=_MOST_ASKED)  # by `known_tokens`, since the last change
        store.watch(self._note_change)
        require_one_process(model, "A server")
        self._caches: WeakSet[ChunkReuseCache] = WeakSet()  # those of tasks
        cache = ChunkReuseCache(model, store, live_quant=live_quant)
        self.lending_reason = cache.loans.lending_reason
        ModelState.of(model).fingerprint.look(model)
        self.in_pieces = (
            cache.loans.reading_reason is None
            and rope_regime(model, context) == b""  # a long row would change the frequencies of others and of itself
            and probe_reason(model) is None
        )
        self.one_by_one = self.in_pieces and steps_reason(model) is not None
        self.batchable = (
            self.in_pieces
            and live_quant is None  # a batch would hold it as it is
            and padding_reason(model) is None
        )
        if (reason := self._unfit_reason()) is not None:
            raise ValueError(
                f"{type(model).__name__} cannot be served: {reason}. Call its own generate(), or serve another model."
            )
        self.in_place = self.batchable and sharing_reason(model) is None

    @torch.no_grad()
    def _unfit_reason(self) -> str | None:
        """Why the model cannot be served, or None. Runs it on a short prompt and a token behind it."""
        if has_own_cache(self.model):
            return "it keeps what it has computed in a cache class of its own, and takes no other"
        ids, cache = probe_ids(self.model), ChunkReuseCache(self.model, self.store.without_room(with_roots=False))
        try:
            for start, stop in ((0, ids.shape[1] - 1), (ids.shape[1] - 1, ids.shape[1])):
                self.forward(cache, ids[:, start:stop], start)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # models fail in ways of their own on what they were not written for
            return f"it fails on a prompt of {len(ids[0]) - 1} tokens and one more ({type(error).__name__}: {error})"
        return None

    def forward(self, cache: ChunkReuseCache | None, ids: torch.Tensor, start: int) -> torch.Tensor:
        """Run the model on tokens [1, tokens] of one row from position `start` on; returns logits [1, vocab_size]."""
        return self.forward_all(cache, ids, start, keep=1)[:, -1]

    def forward_all(
        self, cache: ChunkReuseCache | None, ids: torch.Tensor, start: int, *, keep: int = 0
    ) -> torch.Tensor:
        """As `forward`; returns logits [1, tokens, vocab_size] of the last `keep` tokens. 0 keeps and computes all."""
        # As generate() gives them: some models would count otherwise.
        positions = torch.arange(start, start + ids.shape[1], device=self.device)[None]
        logits: torch.Tensor = run_model(self.model, ids, cache, logits=keep, position_ids=positions).logits
        return logits

    def step(self, task: Task) -> torch.Tensor:
        """Run the model on the last token of a task, with the task's own cache; returns logits [1, vocab_size]."""
        ids = torch.tensor([task.ids[-1:]], device=self.device)
        try:
            return self.forward(task.cache, ids, task.length)
        except StoreClosedError:  # before anything was computed
            self.leave_store()
            return self.forward(task.cache, ids, task.length)

    def look_up(self, task: Task) -> KnownRow:
        """What the store has of what a task computes, which is then known of the task; nothing is loaded.

        The store is asked again if it has changed since, or if others may have changed it. A cache that the task has
        is told, so that its next prompt is not looked up once more.
        """
        is_current, ids = self._from_now(), torch.tensor([task.to_compute])
        try:
            self.store.hear()  # what others have removed is not served, whenever it was looked up
            cache = task.cache or self._cache(self.policy_of(task.job), task.job.salt)
            rows = (task.known, *self._asked) if cache.store is self.store else ()
            found = look_up(cache.parts, ids, rows, is_current)
        except Exception:
            if task.cache is not None:
                raise
            # Whoever computes the prompt meets the error, which ends this task alone.
            task.known = KnownRow(b"", ids[0].numpy(), 0, None, is_current)
            return task.known
        if cache.store is self.store:
            task.known = cache.parts.live.known = found
        return found

    def known_tokens(self, ids: Sequence[int], salt: bytes) -> int:
        """How many first tokens of a prompt the store has, less than all of them; nothing is loaded.

        A task with the prompt is not looked up once more.
        """
        try:
            parts, is_current = self._cache(self.policy, salt).parts, self._from_now()
            found = look_up(parts, torch.tensor([ids]), (), is_current) if len(ids) > 1 else None
        except StoreClosedError:  # who computes the prompt will notice
            return 0
        if found is None:
            return 0
        self._asked.append(found)
        return found.filled

    def _cache(self, policy: ReusePolicy, salt: bytes) -> ChunkReuseCache:
        return ChunkReuseCache(self.model, self.store, policy, salt, live_quant=self._live_quant)

    def _from_now(self) -> Callable[[], bool]:
        """Tells from now on whether the store is as it is now, as far as is known."""
        until = time.monotonic() + _OTHERS_AFTER_S if self.store.is_shared else math.inf
        return partial(self._is_current, self._changes, until)

    def _is_current(self, changes: int, until: float) -> bool:
        return changes == self._changes and time.monotonic() <= until

    def _note_change(self, keys: Iterable[bytes] | None) -> None:
        """Chunks of the store have come or gone; called with the store's lock held."""
        self._changes += 1
        self._asked.clear()

    def open(self, task: Task, others: Sequence[Task]) -> tuple[ChunkReuseCache, int]:
        """A cache for a task, and how many tokens of its prompt that has.

        It is a fork of the cache of one of `others`, where that has more of the prompt than a chunk.
        """
        job = task.job
        policy = self.policy_of(job)
        others = [
            other
            for other in others
            if other.cache is not None
            and other.cache.store is self.store  # else nothing of the fork would be kept
            and other.job.salt == job.salt
            and other.cache.policy == policy
        ]
        shared = [min(common_prefix(other.job.ids, job.ids), other.done) for other in others]
        most = max(shared, default=0)
        # A fork with states could not go back to where the texts part.
        if self.batchable and self.lending_reason is None and most >= self.store.chunker.chunk_size:
            found = others[shared.index(most)].cache
            assert found is not None
            cache = found.fork()
            cache.begin_anew()
        else:
            most = 0
            cache = self._cache(policy, job.salt)
        self._caches.add(cache)
        if task.unwanted:
            self.keep_nothing(cache)
        return cache, most

    def policy_of(self, job: Job) -> ReusePolicy:
        """How stored K/V may be used for a job: as the job asks, where K/V can be moved at all.

        A job without an answer is computed exactly, so that any other finds it.
        """
        policy = self.policy
        if job.reuse == "exact" or not job.options.max_tokens:
            return replace(policy, mode="exact", repair="auto")
        kept = policy.keep_logprobs or policy.keep_hidden_states or policy.reproducible
        if job.reuse is None or kept or self._live_quant is not None:
            return policy
        # With `True`, others would wait for a long step: only the operator can ask for that.
        progressive = policy.progressive if policy.mode == "blend" else "ride"
        return replace(policy, mode="blend", repair=job.reuse, audit_rate=0.0, progressive=progressive)

    def root_of(self, salt: bytes) -> bytes | None:
        """The key that the chains of a salt start from, but for prompts with other rotary frequencies."""
        return self._cache(self.policy, salt).root_of(1)

    def keep_nothing(self, cache: ChunkReuseCache) -> None:
        """From now on, store nothing that a cache holds."""
        cache.store = self.store.without_room(with_roots=False)

    def leave_store(self) -> None:
        """Go on without the store, which somebody has closed: open caches and later ones keep nothing."""
        _log.warning("The store was closed: from now on nothing is kept.")
        self.store = self.store.without_room(with_roots=False)
        self._note_change(None)
        for cache in self._caches:
            cache.store = self.store


@torch.no_grad()
def row_state_bytes(model: PreTrainedModel) -> int:
    """Bytes of the states of one row, however long it is; 0 without states. Runs the model on a few tokens."""
    layers = cache_layers(model)
    stateful = [layer for layer in layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
    if stateful:
        run_model(model, probe_ids(model), PrivateCache(layers))
    return sum(state.nbytes for layer in stateful for state in states_of(layer))


def live_token_bytes(model: PreTrainedModel, draft: PreTrainedModel | None = None) -> int:
    """Bytes of K/V of one token of a running request; of a draft, and of hidden states that it reads, too."""
    if draft is None:
        return _COPIES * bytes_per_token(model)
    return _COPIES * bytes_per_token(model) + bytes_per_token(draft) + hidden_bytes(draft)


def tokens_that_fit(
    model: PreTrainedModel,
    draft: PreTrainedModel | None = None,
    *,
    rows: int = 0,
    reserved: int = 0,
    promised: int = 0,
    safety_margin: float = 0.15,
) -> int | None:
    """Plan how many tokens of K/V, of all running requests, fit into the free memory of the model's device.

    Args:
        model: The model.
        draft: One that keeps K/V of the same texts; None for none.
        rows: Requests that run at the same time, whose states have room besides.
        reserved: Bytes of host memory that something else will take, such as a store.
        promised: Bytes of host memory that other servers on this machine may still come to use.
        safety_margin: Share of the memory to leave free.

    Returns:
        None where the model does not say how large its K/V is.

    Raises:
        ValueError: for a margin that is no share, or where there is no room for the states, or for a single token.
    """
    if not 0 <= safety_margin < 1:
        raise ValueError(f"`safety_margin` must be from 0 to less than 1, got {safety_margin}.")
    per_token = live_token_bytes(model, draft)
    states = _COPIES * rows * row_state_bytes(model)
    if not per_token + states:
        return None
    device = input_device(model)
    if device.type == "cuda":
        others = ""
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by PyTorch, for others
        free = torch.cuda.mem_get_info(device)[0] + kept
    else:
        free = psutil.virtual_memory().available - reserved - promised
        beside = [f"{reserved / 2**30:.1f} GiB of the store"] if reserved else []
        beside += [f"{promised / 2**30:.1f} GiB that other servers here may use"] if promised else []
        others = f" beside the {' and the '.join(beside)}" if beside else ""
    usable = int(free * (1 - safety_margin))
    if states > max(usable, 0):
        raise ValueError(
            f"There is no memory for the states of {rows} requests: they take {states / 2**30:.2f} GiB, and "
            f"{max(usable, 0) / 2**30:.2f} GiB may be used. Let fewer requests run at a time (`--max-batch-size`), or "
            "give the store less."
        )
    if not per_token:
        return None
    tokens = (usable - states) // per_token
    if tokens < 1:
        raise ValueError(
            f"There is no memory for K/V: {max(free, 0) / 2**30:.1f} GiB are free{others}, of which "
            f"{safety_margin:.0%} stay so. Give stores less (`--max-cache-bytes`), those of other servers, too, or "
            "stream layers."
        )
    return tokens
