"""`ChunkStore`: K/V of chunks that outlives any one cache or call."""

import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvboost_hf import forks
from kvboost_hf.cache.codecs import LiveQuant, live_config, make_codec
from kvboost_hf.cache.codecs.base import Codec
from kvboost_hf.cache.costs import stored_per_computed
from kvboost_hf.cache.identity import ModelState, model_name
from kvboost_hf.cache.kv import Put, StoreContents, Stored, StoredChunk, StoredStates
from kvboost_hf.cache.kv.layer_states import StateFormat
from kvboost_hf.cache.kv.model_form import BlobReader, ColumnFormat
from kvboost_hf.cache.planning.chunks import Chunker
from kvboost_hf.cache.planning.report import ReuseReport
from kvboost_hf.cache.store.history import Audits, Payback, Roots, require_model, salt_bytes
from kvboost_hf.cache.store.integrity import IntegrityReport, check_integrity
from kvboost_hf.cache.store.settings import (
    Starts,
    Texts,
    Uncut,
    WarmSettings,
    checked_budget,
    checked_chunker,
    checked_share,
    chunk_bytes,
    warmer,
)
from kvboost_hf.cache.store.tiered import TieredRecords
from kvboost_hf.cache.tiers import open_tiers
from kvboost_hf.cache.tiers.base import Tier
from kvboost_hf.cache.tiers.below import LowerTiers
from kvboost_hf.compat import KeptOnModel, ranks_of, require_cache, require_one_process, rope_regime, unwrapped
from kvboost_hf.config import KVQuantConfig, ReusePolicy, require_size
from kvboost_hf.ngrams import MAX_NGRAM, Continued

__all__ = ["ChunkStore", "Put", "StoredChunk", "StoredStates", "salt_bytes"]

S = TypeVar("S", bound=Stored)


class ChunkStore:
    """K/V of chunks, in host memory within a byte budget, and in the tiers below it.

    One store may serve many caches and threads; `with` closes it. What it holds is found by prefix key (tokens,
    positions and history all the same) and by content (tokens the same), never by another model, other weights or
    another salt.

    Args:
        model: The model whose K/V is stored. Held weakly.
        chunk_size: Tokens per chunk, a positive multiple of 16. With a `chunker`, that one's, or left out.
        chunker: Cuts prompts into chunks, such as a `ContentChunker`; None cuts at multiples of `chunk_size`.
        max_bytes: Budget for all tensors in host memory, never exceeded: bytes, or text such as `"2GB"`; None for
            that of `tiers`, or 4 GiB. The chunks that are asked for least often, of those that nothing continues, go
            first.
        tiers: Where chunks live, as addresses or `Tier` objects, the nearest first: `"ram:4GB"`,
            `"disk:~/.cache/kvboost_hf:50GB"`, `"redis://host:6379"`, and any fsspec URL. Host memory is always one of
            them. What is stored is written to all of them, and outlives the process on all others. A folder
            `"handover:/var/lib/kv:50GB"` is written at `close()` alone.
        tier_key: 32 bytes or more: blobs below host memory carry a seal that only whoever has this key can make, and
            what does not have it is never used. All who share a tier need the same key. None for no seals.
        codec: How K/V is kept, in all tiers: `"raw"`, `"int8"`, `"int8:4"`, `"int4"`, `"turboquant"`,
            `"turboquant:3.5"`, a `KVQuantConfig`, or the codec of another store. All but `"raw"` are lossy: what is
            reused is no longer exactly what was computed.
        salt: Separates those who must not see each other's prompts, not even by timing.
        state_share: The share of `max_bytes` that the states of linear attention may take, from 0 for none to 1. What
            a prompt leaves behind takes a quarter of that at most. Beyond it, those go first whose loss costs the
            fewest expected tokens. Pinned states are not counted.
        state_codec: How states are kept, as `codec` says it for K/V: `"raw"`, `"int8"`, … All but `"raw"` are lossy.

    Raises:
        ValueError: for a bad `chunk_size`, or another one than its chunker's, a budget smaller than one chunk, an
            unknown tier or codec, a `tier_key` that is too short, or a model that cannot be served (encoder-decoder,
            on the meta device, no `PreTrainedModel`).

    Example:
        >>> from kvboost_hf.assets import load_embedded
        >>> model, tokenizer = load_embedded()
        >>> store = ChunkStore(model, max_bytes=64 * 2**20)
        >>> store.stats()["chunks"]
        0
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        chunk_size: int | None = None,
        chunker: Chunker | None = None,
        max_bytes: int | str | None = None,
        salt: str | bytes = b"",
        tiers: Sequence[str | Tier] = (),
        tier_key: bytes | None = None,
        codec: str | KVQuantConfig | Codec | None = None,
        state_share: float = 0.5,
        state_codec: str | KVQuantConfig | Codec | None = None,
    ) -> None:
        model = unwrapped(model)
        require_cache(model)
        self.ranks = ranks_of(model)
        self.chunker = checked_chunker(chunker, chunk_size)
        self.salt = salt_bytes(salt)
        codec = make_codec(codec)
        least = chunk_bytes(model, self.chunker.chunk_size, codec)
        ram = checked_budget(model, max_bytes, least, self.chunker.chunk_size)
        opened = open_tiers(tiers, ram, tier_key, least_bytes=least)
        self._model = weakref.ref(model)
        self.audits = Audits()
        state_format = StateFormat(make_codec(state_codec))
        self._reader = BlobReader(partial(require_model, self._model), codec, state_format)
        if self.ranks is not None:
            self._reader.column_format  # noqa: B018  # it may run the model, as all ranks do now
        # What other processes may ask for is always stored; nobody else asks for the name of the model.
        lower = LowerTiers(opened.lower, opened.opened, opened.at_close)
        name, pays_for = (model_name(model), None) if lower else (b"", stored_per_computed(model))
        self._records = records = TieredRecords(
            opened.ram,
            checked_share(state_share),
            opened.device,
            lower,
            name,
            self._reader,
            Payback(pays_for, model),
            self.chunker,
        )
        ranks = b"rank %d of %d" % (self.ranks.rank, self.ranks.size) if self.ranks is not None else b""
        self._roots = Roots(
            model,
            self._reader,
            records.lock,
            records.history,
            records.lower,
            records.drop,
            require_open=records.require_open,
            mark=ranks,
        )
        self._lock = self._records.lock
        # The verbs of caches, the server and tools: nobody else knows records, and they know no store.
        self.require_open, self.wait_for_others = records.require_open, records.wait_for_others
        self.view, self.moved_index, self.chain = records.view, records.moved_index, records.chain
        self.root, self.hidden_kinds, self.worth = self._roots.root, self._roots.hidden_kinds, records.worth
        self.beside = self._roots.beside
        self.fetch, self.lose = records.fetch, records.lose
        self.held, self.entries, self.places = records.held, records.entries, records.places
        self.unkept = records.unkept
        self.roots_beside = records.roots_beside
        self.made_with = records.made_with
        history = records.history
        self.was_evicted, self.known_under_other_root = history.was_evicted, history.known_under_other_root
        self.record_use, self.promote, self.expects = records.record_use, records.promote, records.expects
        taken = records.insertion
        self.put, self.put_content, self.put_states = taken.put, taken.put_content, taken.put_states
        self.settles_first, self.quarantine, self.remove = records.settles_first, records.quarantine, records.remove
        self.announce, self.hear, self.discard = records.announce, records.hear, records.discard
        self.watch = records.watch
        memory = records.memory
        self.holds, self.is_in_memory = records.holds, memory.__contains__
        self.beginning, self.pin, self.let_go = memory.beginning, memory.pin_all, memory.let_go
        self.pinned_bytes, self.has_pinned = memory.pinned_bytes, memory.has_pinned
        if lower:  # now, for it takes a moment
            records.payback.seconds_per_token  # noqa: B018
            self._reader.look_at_model()
        self._close_tiers = weakref.finalize(self, lower.close)

    def __reduce__(self) -> Any:
        raise TypeError(
            "A ChunkStore can be neither pickled nor copied: it belongs to a model in this process. Make a new one, "
            "which finds what this one keeps in tiers on disk and on servers."
        )

    def without_room(self, *, with_roots: bool = True) -> "ChunkStore":
        """A store that takes no chunks in: its caches compute, and keep, all columns.

        Args:
            with_roots: Whether the store has the roots of this one, which takes what its caches hold. Without, it has
                none, and nothing is looked up either.
        """
        chunker = Uncut() if with_roots else self.chunker
        store = ChunkStore(self._require_model(), chunker=chunker, max_bytes=2**62)
        store._roots.noted_by, store.codec = self._roots if with_roots else None, self.codec
        store._reader.state_format = self.state_format
        return store

    # Finding

    @property
    def codec(self) -> Codec:
        """How K/V is kept."""
        return self._reader.codec

    @codec.setter
    def codec(self, codec: Codec) -> None:
        self._reader.codec = codec

    @property
    def column_format(self) -> ColumnFormat:
        """How columns are kept."""
        return self._reader.column_format

    @property
    def state_format(self) -> StateFormat:
        """How states are kept."""
        return self._reader.state_format

    @property
    def lossy(self) -> str | None:
        """The name of the codecs, if what comes out of one is not what was computed; else None."""
        is_exact = self.codec.lossless and self.state_format.codec.lossless
        return None if is_exact else self.codec.name + self.state_format.mark

    @property
    def owing(self) -> list[str]:
        """Names of the tiers that have not answered to a deletion yet, and are told again when they do."""
        return self._records.lower.tiers.owing

    @property
    def is_shared(self) -> bool:
        """Whether there are tiers that others may use, too."""
        return self._records.has_lower

    @property
    def room_for_states(self) -> int:
        """Bytes that the states of one prompt may take, before they are encoded."""
        return int(self._records.memory.max_state_bytes / 4 * self.state_format.gain)

    # Pinning, and letting go

    def pinned_keys(self) -> set[bytes]:
        """Keys of all pinned chunks and states."""
        return self._records.memory.pinned_keys()

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Let what is stored under these keys be evicted again."""
        with self._lock:
            for key in keys:
                self._records.memory.unpin(key)

    def clear(self) -> None:
        """Drop everything stored for this model, pinned or not, in all tiers: what other processes stored, too.

        Raises:
            StoreClosedError: the store was closed: it would delete nothing in its tiers.
        """
        self.require_open()
        self._records.clear()
        self._records.lower.clear()

    # What users ask for

    def check_integrity(self, sample: float = 1.0) -> IntegrityReport:
        """Compute what is stored again, compare, and take out of the store what differs.

        It costs a forward over each stored text, once: as much as it took to store them. Nothing else may use the
        model meanwhile, as with any forward.

        Args:
            sample: The share of the chunks to check, drawn at random: above 0, up to 1 for all of them.

        Returns:
            What was checked, and what was wrong.

        Raises:
            ValueError: for a bad `sample`, or a model that several ranks compute.
            StoreClosedError: after `close()`.

        Example:
            >>> from kvboost_hf.assets import load_embedded
            >>> model, tokenizer = load_embedded()
            >>> store = ChunkStore(model)
            >>> _ = store.warm("The lamp is red. " * 40, tokenizer=tokenizer)
            >>> store.check_integrity().wrong
            0
        """
        if not 0 < sample <= 1:
            raise ValueError(f"`sample` must be above 0 and at most 1, got {sample!r}. Pass 1.0 to check all of it.")
        self.require_open()
        require_one_process(self._require_model(), "check_integrity()")
        is_current = partial(self._is_current, cache(partial(self.root, read_all=True)))
        return check_integrity(self._require_model(), self._records, is_current, self._reader, sample)

    def warm(
        self,
        text_or_ids: Starts | None = None,
        *,
        documents: Sequence[Texts] | None = None,
        prefix: Starts | None = None,
        tokenizer: Any = None,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        pin: bool = True,
        policy: ReusePolicy | None = None,
        salt: str | bytes | None = None,
        progress: Callable[[int, int], None] | None = None,
        live_quant: LiveQuant = None,
    ) -> ReuseReport:
        """Compute and store K/V ahead of the first request: of the start of prompts, or of documents within them.

        Args:
            text_or_ids: What prompts start with; any mode finds it. The first messages of chats: the longest prefix is
                computed that all chats have in common that go on from there, as the chat template writes them; the
                last message, if it is the user's, may go on itself. Or a text as it is, or token ids ([n] or [1, n]).
            documents: In place of it, texts or ids that may stand anywhere in prompts, each computed without the
                others. Only mode `"blend"` finds them, and only parts of 16 tokens or more.
            prefix: What each of the documents is computed behind, such as a system message in a list; itself computed
                once, and stored as `text_or_ids` is.
            tokenizer: The model's tokenizer or processor. It tokenizes `text_or_ids` and `prefix` with special tokens,
                as it would a prompt, and has the chat template.
            tools: With messages, the tools of the chats, as `apply_chat_template()` takes them.
            chat_template_kwargs: With messages, other arguments that chats give the template.
            pin: Never evict it.
            policy: That of the caches that are to find it.
            salt: That of the caches that are to find it; None for the store's.
            progress: Called as texts are computed, with the tokens that are done, and how many there are in all.
            live_quant: That of the caches that are to find it. Not with `documents`, for codes cannot be moved.

        Returns:
            What was already stored and what was computed, summed over the documents. Its `start_reason` says why chats
            never begin with what was warmed, or not always: most chat templates write something before a text.

        Raises:
            ValueError: for both or neither of `text_or_ids` and `documents`, a text or messages without a tokenizer,
                an empty text, ids of a wrong shape, messages that the chat template refuses, documents for a model
                whose K/V cannot be moved, or with `live_quant`.
            StoreFullError: if what is to be pinned does not fit into the budget; nothing of it stays pinned.
            StoreClosedError: after `close()`.

        Example:
            >>> from kvboost_hf.assets import load_embedded
            >>> model, tokenizer = load_embedded()
            >>> store = ChunkStore(model)
            >>> system = {"role": "system", "content": "You read documents and answer questions about them."}
            >>> print(store.warm([system], tokenizer=tokenizer))
            prompt 17 tokens, 0 reused (0%), 17 computed
        """
        self.require_open()
        settings = WarmSettings(
            tokenizer=tokenizer,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            pin=pin,
            policy=policy,
            salt=self.salt if salt is None else salt_bytes(salt),
            progress=progress,
            live_quant=live_config(live_quant),
        )
        return warmer()(self._require_model(), self, text_or_ids, documents, prefix, settings)

    def continuation(
        self,
        ids: Sequence[int] | NDArray[np.int64],
        length: int,
        *,
        max_ngram: int = MAX_NGRAM,
        min_ngram: int = 2,
        salt: str | bytes | None = None,
    ) -> list[int]:
        """Look up how text went on: the tokens that followed the longest n-gram that ends `ids`, in host memory.

        The same n-gram may stand in several places. The token that followed most often counts, or of two the one that
        was stored last; then that which followed both most often, and so on.

        Args:
            ids: Token ids, from 0 on.
            length: So many tokens are wanted.
            max_ngram: Compare so many tokens at most, 8 or fewer.
            min_ngram: And so many at least, 2 or more.
            salt: The salt of the caches that stored it; None for that of the store.

        Returns:
            At most `length` token ids, fewer where the stored text ends or something other than text follows.

        Raises:
            ValueError: for a bad `max_ngram` or `min_ngram`.
            StoreClosedError: after `close()`.
        """
        return self.continued(ids, length, max_ngram=max_ngram, min_ngram=min_ngram, salt=salt).tokens

    def continued(
        self,
        ids: Sequence[int] | NDArray[np.int64],
        length: int,
        *,
        max_ngram: int = MAX_NGRAM,
        min_ngram: int = 2,
        salt: str | bytes | None = None,
    ) -> Continued:
        """Look up how text went on, and how often: `continuation` with the share of each token.

        Args:
            ids: Token ids, from 0 on.
            length: So many tokens are wanted.
            max_ngram: Compare so many tokens at most, 8 or fewer.
            min_ngram: And so many at least, 2 or more.
            salt: The salt of the caches that stored it; None for that of the store.

        Raises:
            ValueError: for a bad `max_ngram` or `min_ngram`.
            StoreClosedError: after `close()`.
        """
        self.require_open()
        with self._lock:
            salt = self.salt if salt is None else salt_bytes(salt)
            chunks = self._records.memory.chunks.values()
            return self._records.text.continued(chunks, salt, np.asarray(ids), length, max_ngram, min_ngram)

    def inspect(self) -> StoreContents:
        """The contents of host memory: chunks, states, and which of them are pinned.

        Example:
            >>> from kvboost_hf.assets import load_embedded
            >>> ChunkStore(load_embedded()[0]).inspect()
            StoreContents(0 chunks, 0 states, 0 pinned, 0 bytes)
        """
        with self._lock:
            memory = self._records.memory
            pinned = frozenset(memory.pinned_keys())
            return StoreContents(dict(memory.chunks), dict(memory.states), pinned, memory.nbytes)

    def check_consistency(self) -> None:
        """Check the store's bookkeeping: bytes, keys, parents, pins and indexes against the chunks that are there.

        Raises:
            AssertionError: naming what disagrees. The store is to be thrown away, and the bug reported.
        """
        self._records.check_consistency()

    def stats(self) -> dict[str, Any]:
        """Counts and bytes: `chunks`, `bytes`, `max_bytes`, `pinned_chunks`, `tokens`, `hits`, `misses`, … by tier."""
        return self._records.stats(self.audits, self.codec.name + self.state_format.mark)

    @property
    def max_bytes(self) -> int:
        """Budget of host memory, to be set in bytes or as text. A smaller one holds from the next chunk on."""
        return self._records.memory.max_bytes

    @max_bytes.setter
    def max_bytes(self, max_bytes: int | str) -> None:
        self._records.memory.max_bytes = require_size("max_bytes", max_bytes, least=0)

    if not TYPE_CHECKING:  # or types would know any name

        def __getattr__(self, name: str) -> NoReturn:
            if name in dir(Cache):
                raise AttributeError("`cache` must be a cache, got a ChunkStore. Pass ChunkReuseCache(model, store).")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __len__(self) -> int:
        return len(self._records.memory.chunks)

    def serves(self, model: PreTrainedModel) -> bool:
        """Whether this store was made for `model`."""
        return self._model() is model

    def flush(self) -> None:
        """Wait until everything stored so far has been written to the lower tiers."""
        self._records.settle()
        self._records.lower.tiers.flush()

    def invalidate(self) -> None:
        """Forget everything, live caches included: for weights that were changed where nobody can see it.

        Raises:
            StoreClosedError: as `clear()`.
        """
        self.require_open()
        ModelState.of(self._require_model()).fingerprint.bump()
        self.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self, *, timeout_s: float = 20.0, hear: Callable[[], object] | None = None) -> None:
        """Finish writing to the lower tiers, drop what is in host memory, and refuse further use.

        What only host memory holds is handed over before: tiers that are written at close take all that they have room
        for, others what they did not take when it was stored; what is asked for most often comes first. A process that
        is killed meanwhile leaves what it has written, and nothing wrong.

        Args:
            timeout_s: Seconds after which nothing more is handed over.
            hear: Called between writes; does what others who share a tier have told. None for what concerns K/V.
        """
        until = time.monotonic() + timeout_s
        self._records.settle()
        self._records.hand_over(until, hear or self._records.hear)
        self._close_tiers()
        self._records.close()

    @property
    def usable(self) -> bool:
        """Whether it is open and its model exists."""
        return self._records.is_open and self._model() is not None

    def _is_current(self, root_of_all: Callable[[bytes, bytes], bytes | None], stored: Stored, tokens: int) -> bool:
        """Whether the model, as it is now, has computed a record that ends after so many tokens.

        `root_of_all` gives the root of a salt and a regime with `weights_check="full"`.
        """
        salt, regime = self._records.history.salt_of(stored.root), rope_regime(self._require_model(), tokens)
        if salt is None or regime is None:
            return False
        return stored.root == self.root(salt, regime) or stored.root == root_of_all(salt, regime)

    def _require_model(self) -> PreTrainedModel:
        return require_model(self._model)


class _DefaultStore(KeptOnModel):
    """The store of a model's caches that were given none."""

    def __init__(self) -> None:
        self.lock = forks.lock()
        self.store: ChunkStore | None = None


def default_store(model: PreTrainedModel) -> ChunkStore:
    """The store of a model's caches that were given none; made at the first call, and again after `close()`."""
    kept = _DefaultStore.of(model)
    with kept.lock:
        if kept.store is None or not kept.store.usable:
            kept.store = ChunkStore(model)
        return kept.store
