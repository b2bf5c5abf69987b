"""The peers of the benchmark: ways in which transformers and kvboost serve prompts.

A new peer is a line in `PEERS`, and its name in `choices`.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import transformers
from packaging.version import Version
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig

from kvboost_hf import choices
from kvboost_hf.bench.models import Counted, Models
from kvboost_hf.bench.served import Served, Server, reason, served
from kvboost_hf.compat import CACHE

_PAGES, _BATCH_TOKENS = 64, 2048  # pages of 256 tokens
# In 5.17 a layer that keeps what has left its window fails at the second token: the mask does not fit.
_KEEPS_PAST = Version(transformers.__version__) >= Version("5.18")
# The chunks that its documentation shows, and the budget of its server; all else is left to it.
_ENGINE = {"chunk_size": 128, "max_cache_bytes": 2_000_000_000}


@dataclass(frozen=True, slots=True)
class Peer:
    """One way of serving prompts."""

    name: str  # the peer's name in `--peers`
    make: Callable[[Counted], Server]  # makes a server that has seen nothing yet, for a model
    # Asks for a model with this attention, which no arm shares; None for the one that all share.
    attention: str | None = None
    needs: str | None = None  # a package that it needs in an environment of its own; None where it runs in this one

    def refusal(self, models: Models, tokenizer: Any) -> str | None:
        """Why it cannot serve this model here, or None: it answers a short prompt to find out."""
        try:
            with closing(self.open(models, tokenizer, None)) as server:
                server.answer(tokenizer.encode("Hello."), 4)
        except Exception as error:  # of whatever kind: the others run all the same
            return reason(error)
        return None

    def open(self, models: Models, tokenizer: Any, folder: Path | None) -> Server:
        """A server that has seen nothing yet; it keeps nothing in folders."""
        return self.make(models.get(self.attention))


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((at for at, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b)))


def _new_cache(model: Any) -> DynamicCache:
    """One that can be cut: layers with windows keep what has left them."""
    cache: Any = DynamicCache(config=model.config)
    if _KEEPS_PAST:
        cache.activate_past_recording()
    return cache  # type: ignore[no-any-return]


def _can_be_cut(cache: Any, tokens: int) -> bool:
    """Whether nothing is to be cut, or all layers still have what has left their windows; one that is cut loses it."""
    length = cache.get_seq_length()
    return tokens == length or all(layer.keys is None or layer.keys.shape[2] == length for layer in cache.layers)


def _cut(cache: Any, tokens: int) -> None:
    if cache.get_seq_length() > tokens:
        cache.crop(tokens - cache.get_seq_length())


def _nbytes(cache: DynamicCache) -> int:
    layers: Any = cache.layers
    return sum(part.nbytes for layer in layers for part in (layer.keys, layer.values) if part is not None)


class KeptCache:
    """One DynamicCache for all prompts; before each, what the prompt does not share is cut off by hand.

    With windows it can be cut once, and with transformers 5.17 not at all; where it cannot be cut, it begins anew.
    """

    def __init__(self, counted: Counted) -> None:
        self._model, self._count = counted
        self._cache = _new_cache(self._model)
        self._ids: list[int] = []
        self._reused = 0

    def answer(self, ids: Sequence[int], max_new_tokens: int) -> Served:

        def make() -> dict[str, Any]:
            self._reused = min(_common(self._ids, ids), len(ids) - 1)
            if not _can_be_cut(self._cache, self._reused):
                self._cache, self._reused = _new_cache(self._model), 0
            _cut(self._cache, self._reused)
            return {CACHE: self._cache}

        found = served(self._model, self._count, ids, max_new_tokens, make)
        self._ids = [*ids, *found.ids][: self._cache.get_seq_length()]
        return replace(found, reused=self._reused, store_bytes=_nbytes(self._cache))

    def close(self) -> None:
        """Nothing to close."""


class CopiedPrefix:
    """A copy of the K/V of the first prompt and its answer for each later prompt, cut to what it shares.

    It is the recipe "Re-use cache to continue generation" of transformers' documentation, told where the shared part
    ends. Copying counts as time to the first token. Where it cannot be cut, as with windows and transformers 5.17,
    nothing is copied.
    """

    def __init__(self, counted: Counted) -> None:
        self._model, self._count = counted
        self._first: DynamicCache | None = None
        self._ids: list[int] = []
        self._reused = 0

    def answer(self, ids: Sequence[int], max_new_tokens: int) -> Served:
        mine: DynamicCache

        def make() -> dict[str, Any]:
            nonlocal mine
            self._reused = min(_common(self._ids, ids), len(ids) - 1)
            if self._first is None or not _can_be_cut(self._first, self._reused):
                mine, self._reused = _new_cache(self._model), 0
            else:
                mine = copy.deepcopy(self._first)
                _cut(mine, self._reused)
            return {CACHE: mine}

        found = served(self._model, self._count, ids, max_new_tokens, make)
        if self._first is None:
            self._first, self._ids = mine, [*ids, *found.ids][: mine.get_seq_length()]
        return replace(found, reused=self._reused, store_bytes=_nbytes(self._first))

    def close(self) -> None:
        """Nothing to close."""


class OwnCache:
    """A cache that transformers makes for each prompt: nothing is reused."""

    def __init__(self, counted: Counted, implementation: str) -> None:
        self._model, self._count = counted
        self._implementation = implementation

    def answer(self, ids: Sequence[int], max_new_tokens: int) -> Served:

        def make() -> dict[str, Any]:
            return {"cache_implementation": self._implementation}

        found = served(self._model, self._count, ids, max_new_tokens, make)
        return replace(found, reused=0, store_bytes=0)

    def close(self) -> None:
        """Nothing to close."""


class ContinuousBatching:
    """transformers' continuous batching, one request at a time; requests share the pages of a common prefix."""

    def __init__(self, counted: Counted) -> None:
        self._model, self._count = counted
        model: Any = self._model
        config: Any = GenerationConfig
        ends = {name: getattr(model.generation_config, name) for name in ("eos_token_id", "pad_token_id")}
        # Left to itself, it takes nine tenths of the memory that is free.
        room = ContinuousBatchingConfig(num_blocks=_PAGES, max_batch_tokens=_BATCH_TOKENS)
        self._manager = model.init_continuous_batching(config(do_sample=False, **ends), room)
        self._manager.start()
        try:
            self.answer([0, 0], 1)  # makes room for K/V
        except BaseException:
            self.close()  # its thread would keep this process from ending
            raise

    def answer(self, ids: Sequence[int], max_new_tokens: int) -> Served:
        start, begin, first_ms = self._count.tokens, perf_counter(), None
        request = self._manager.add_request(list(ids), max_new_tokens=max_new_tokens, streaming=True)
        for told in self._manager.request_id_iter(request):
            first_ms = first_ms or 1000 * (perf_counter() - begin)
            if told.is_finished():
                break
        total_ms = 1000 * (perf_counter() - begin)
        assert first_ms is not None
        answer = list(told.generated_tokens)
        forwarded = self._count.tokens - start
        prefilled = forwarded - (len(answer) - 1)  # the model runs in another thread, and goes on
        return Served(
            ids=answer,
            ttft_ms=first_ms,
            total_ms=total_ms,
            prefilled=prefilled,
            forwarded=forwarded,
            reused=len(ids) - prefilled,
        )

    def close(self) -> None:
        self._manager.stop(block=True)


@dataclass(frozen=True, slots=True)
class KVBoostPeer:
    """kvboost with one of its repair strategies."""

    name: str
    strategy: str
    needs: str | None = "kvboost==0.9.0"

    def refusal(self, models: Models, tokenizer: Any) -> str | None:
        """Why it cannot serve this model here, or None."""
        try:
            self.open(models, tokenizer, None).close()
        except Exception as error:  # of whatever kind: the others run all the same
            return reason(error)
        return None

    def open(self, models: Models, tokenizer: Any, folder: Path | None) -> Server:
        """A new engine; it keeps nothing in folders."""
        return _Engine(models.get(), tokenizer, self.strategy)


KVBOOST_PEERS = [KVBoostPeer(f"kvboost-{way}", way) for way in ("none", "selective", "cacheblend")]
_ALL: tuple[Peer | KVBoostPeer, ...] = (
    Peer("hf-kept", KeptCache),
    Peer("hf-deepcopy", CopiedPrefix),
    Peer("hf-quantized", lambda counted: OwnCache(counted, "quantized"), needs="optimum-quanto==0.2.7"),
    Peer("hf-offloaded", lambda counted: OwnCache(counted, "offloaded")),
    Peer("hf-batching", ContinuousBatching, "sdpa"),  # it changes the attention of its model
    *KVBOOST_PEERS,
)
PEERS = {peer.name: peer for peer in _ALL}
assert tuple(PEERS) == choices.PEERS, "flags take the names in choices"


class _Engine:
    def __init__(self, counted: Counted, tokenizer: Any, strategy: str) -> None:
        import kvboost

        self._count, self._tokenizer = counted.forwards, tokenizer
        self._mode = kvboost.GenerationMode.CHUNK_KV_REUSE
        options: dict[str, Any] = {"device": str(counted.model.device), "recompute_strategy": strategy, **_ENGINE}
        self._engine = kvboost.KVBoost(model=counted.model, tokenizer=tokenizer, **options)

    def answer(self, ids: Sequence[int], max_new_tokens: int) -> Served:
        """Tokenizing counts as time; the reused tokens are those that kvboost reports."""
        text, said = self._tokenizer.decode(ids), list[int]()
        start, begin, first_ms, first = self._count.tokens, perf_counter(), 0.0, 0

        def on_token(token: int) -> None:
            nonlocal first_ms, first
            if not said:
                first_ms, first = 1000 * (perf_counter() - begin), self._count.tokens
            said.append(token)

        found = self._engine.generate(text, max_new_tokens=max_new_tokens, mode=self._mode, on_token=on_token)
        total_ms = 1000 * (perf_counter() - begin)
        assert found.prompt_tokens == len(ids), f"kvboost saw {found.prompt_tokens} tokens of {len(ids)}"
        return Served(
            ids=said,
            ttft_ms=first_ms,
            total_ms=total_ms,
            prefilled=first - start,
            forwarded=self._count.tokens - start,
            reused=found.cached_tokens,
        )

    def close(self) -> None:
        """Nothing to close."""
