"""`ChunkStore`: K/V of chunks that outlives any one cache or call."""

import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from kvboost_hf.cache.codecs import make_codec
from kvboost_hf.cache.codecs.base import Codec
from kvboost_hf.cache.identity.fingerprint import model_name
from kvboost_hf.cache.identity.model_state import ModelState
from kvboost_hf.cache.planning.chunks import Chunker, FixedChunker, Tokens, common_length, prefix_key, root_key
from kvboost_hf.cache.planning.plan import HEAD_TOKENS, Border, RowPlan, Segment, trim_row
from kvboost_hf.cache.planning.report import ReuseReport
from kvboost_hf.cache.store.compute_pace import ComputePace
from kvboost_hf.cache.store.costs import stored_per_computed
from kvboost_hf.cache.store.device import DeviceShelf
from kvboost_hf.cache.store.integrity import IntegrityReport, check_integrity
from kvboost_hf.cache.store.kv import ColumnFormat
from kvboost_hf.cache.store.memory import Put, Shelf, StoredChunk, StoredStates, remember
from kvboost_hf.cache.store.model_form import ModelForm
from kvboost_hf.cache.store.tiered import Row, TieredShelf
from kvboost_hf.cache.tiers.addresses import open_tiers
from kvboost_hf.cache.tiers.base import Tier
from kvboost_hf.cache.tiers.below import LowerTiers
from kvboost_hf.compat import KeptOnModel, bytes_per_token, key_rotation, known_reason, require_cache, unwrapped
from kvboost_hf.config import KVQuantConfig, ReusePolicy, require_size
from kvboost_hf.errors import StoreClosedError
from kvboost_hf.ngrams import MAX_NGRAM, check_ngrams

_log = logging.getLogger("kvboost_hf")

__all__ = ["ChunkStore", "Put", "StoredChunk", "StoredStates", "salt_bytes"]


Texts = str | Sequence[int] | torch.Tensor  # a text, or its token ids


@dataclass(frozen=True, slots=True)
class WarmSettings:
    """The keyword arguments of `ChunkStore.warm`."""

    tokenizer: Any
    pin: bool
    policy: ReusePolicy | None
    salt: bytes
    progress: Callable[[int, int], None] | None  # given the tokens that are done, and all of them
    live_quant: KVQuantConfig | None


Warmer = Callable[
    [PreTrainedModel, "ChunkStore", Texts | None, Sequence[Texts] | None, Texts | None, WarmSettings], ReuseReport
]
_warmer: Warmer | None = None


def register_warmer(warmer: Warmer) -> None:
    """Set what `ChunkStore.warm` calls: it runs the model with caches, which are built on the store."""
    global _warmer
    _warmer = warmer


class ChunkStore(TieredShelf):
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
            them. What is stored is written to all of them, and outlives the process on all others.
        tier_key: 32 bytes or more: blobs below host memory carry a seal that only whoever has this key can make, and
            what does not have it is never used. All who share a tier need the same key. None for no seals.
        codec: How K/V is kept, in all tiers: `"raw"`, `"int8"`, `"int4"`, `"turboquant"`, `"turboquant:3.5"`, a
            `KVQuantConfig`, or the codec of another store. All but `"raw"` are lossy: what is reused is no longer
            exactly what was computed.
        salt: Separates those who must not see each other's prompts, not even by timing.

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
    ) -> None:
        model = unwrapped(model)
        require_cache(model)
        self.chunker = _checked_chunker(chunker, chunk_size)
        self.salt = salt_bytes(salt)
        self.codec = make_codec(codec)
        ram = None if max_bytes is None else require_size("max_bytes", max_bytes, least=1)
        least = _chunk_bytes(model, self.chunker.chunk_size, self.codec)
        if ram is not None and ram < least:
            raise ValueError(
                f"`max_bytes` must hold at least one chunk, which is {least} bytes ({self.chunker.chunk_size} tokens "
                f"of {bytes_per_token(model)} bytes of K/V), got {ram}. Raise it, or lower `chunk_size`."
            )
        opened = open_tiers(tiers, ram, tier_key, least_bytes=least)
        self._model = weakref.ref(model)
        self._audit_debt = 0.0
        self._format: ColumnFormat | None = None
        self._said: set[str] = set()
        self._fingerprints: OrderedDict[bytes, bytes] = OrderedDict()  # by root
        self._forms: OrderedDict[bytes, ModelForm | None] = OrderedDict()  # by fingerprint
        self._first_form: ModelForm | None = None
        name = model_name(model) if opened.lower else b""  # nobody else asks for it
        lower = LowerTiers(opened.lower, opened.opened)
        super().__init__(opened.ram, lower, DeviceShelf(opened.device), name, stored_per_computed(model))
        if self._lower:  # now, for it takes a moment
            ComputePace.of(model).seconds_per_token(model)
            self._first_form = ModelForm.of(model) if known_reason(model) is None else None
        self._close_tiers = weakref.finalize(self, self._lower.close)

    def __reduce__(self) -> Any:
        raise TypeError(
            "A ChunkStore can be neither pickled nor copied: it belongs to a model in this process. Make a new one, "
            "which finds what this one keeps in tiers on disk and on servers."
        )

    # What a cache asks for

    def root(self, salt: bytes, regime: bytes = b"", *, read_all: bool = False) -> bytes | None:
        """The key that all chains of the model, as it is now, start from; None while a part of it is in training.

        Args:
            salt: Whose prompts they are.
            regime: Of the rotary frequencies, see `compat.rope_regime`.
            read_all: Read every weight to tell whether one has changed.
        """
        self._require_open()
        model = self._require_model()
        follower = ModelState.of(model).fingerprint
        fingerprint = follower.durable(model, full=read_all) if self._lower else None
        durable = isinstance(fingerprint, bytes)
        if isinstance(fingerprint, str) and fingerprint not in self._said:
            self._said.add(fingerprint)
            _log.warning("K/V of this model is kept in host memory only: %s in other processes.", fingerprint)
        if not isinstance(fingerprint, bytes):
            fingerprint = follower.current(model, full=read_all)
        if fingerprint is None:
            return None
        root = root_key(fingerprint, salt, regime + self.codec.name.encode())
        with self._lock:
            remember(self._salts, root, salt)
            if durable:
                remember(self._fingerprints, root, fingerprint)
                self._durable_roots.add(root)
        return root

    def forms(self, root: bytes) -> Iterator[ModelForm]:
        """See `TieredShelf.forms`."""
        fingerprint = self._fingerprints.get(root)
        if fingerprint is None:
            return  # nothing of it is in a lower tier
        if fingerprint not in self._forms:
            if self._first_form is not None:
                yield self._first_form
            remember(self._forms, fingerprint, ModelForm.of(self._require_model()))
        if (form := self._forms[fingerprint]) is not None:
            yield form

    @property
    def column_format(self) -> ColumnFormat:
        """How columns are kept."""
        if self._format is None:
            model = self._require_model()
            rotation = key_rotation(model) if not self.codec.lossless else "not needed"
            self._format = ColumnFormat(self.codec, rotation if not isinstance(rotation, str) else None)
        return self._format

    def worth(self, plan: RowPlan) -> RowPlan:
        """The plan without what would take longer to load than to compute."""
        if all(segment.chunk.found is None for segment in plan.segments if isinstance(segment.chunk, StoredChunk)):
            return plan
        model = self._require_model()
        per_token = ComputePace.of(model).seconds_per_token(model)

        def saving(segment: Segment) -> float:
            assert isinstance(segment.chunk, StoredChunk)
            found, computing = segment.chunk.found, (segment.stop - segment.start) * per_token
            return computing - (found.tier.seconds_to_read(found.entry.nbytes) if found is not None else 0.0)

        trimmed = trim_row(plan, saving)
        with self._lock:
            self._counts["not_worth_loading"] += plan.hit - trimmed.hit
        return trimmed

    def chain(self, root: bytes, tokens: Tokens) -> list[tuple[StoredChunk, int, int]]:
        """Every chunk that may serve a row: with the row token that it starts at, and how many tokens it shares."""
        found: list[tuple[StoredChunk, int, int]] = []
        index = self.view(root, Row(tokens, Border(0, root), self.chunker, stateful=False))
        key, at = root, 0
        while at < len(tokens):
            rest = tokens[at:]
            siblings = index.siblings(key, rest[:HEAD_TOKENS]) if len(rest) >= HEAD_TOKENS else ()
            loaded = self.fetch(chunk for chunk in siblings if isinstance(chunk, StoredChunk))
            found += [(chunk, at, common_length(chunk.tokens, rest)) for chunk in loaded.values()]
            cut = self.chunker.next_cut(tokens, at)
            if cut is None:
                break
            key, at = prefix_key(key, tokens[at:cut]), cut
        return found

    # Audits

    def audit_is_due(self, rate: float) -> bool:
        """Whether one more reused prompt brings the share of audited ones up to `rate`."""
        with self._lock:
            self._audit_debt += rate
            due = self._audit_debt >= 1 - 1e-9
            self._audit_debt -= due
            return due

    def record_audit(self, *, diverged: bool) -> None:
        """Count an audit."""
        with self._lock:
            self._counts["audits"] += 1
            self._counts["divergences"] += diverged

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
            ValueError: for a bad `sample`.
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
        self._require_open()
        return check_integrity(self._require_model(), self, sample)

    def warm(
        self,
        text_or_ids: Texts | None = None,
        *,
        documents: Sequence[Texts] | None = None,
        prefix: Texts | None = None,
        tokenizer: Any = None,
        pin: bool = True,
        policy: ReusePolicy | None = None,
        salt: str | bytes | None = None,
        progress: Callable[[int, int], None] | None = None,
        live_quant: KVQuantConfig | None = None,
    ) -> ReuseReport:
        """Compute and store K/V ahead of the first request: of the start of prompts, or of documents within them.

        Args:
            text_or_ids: What prompts start with: text, or token ids ([n] or [1, n]). Any mode finds it.
            documents: In place of it, texts or ids that may stand anywhere in prompts, each computed without the
                others. Only mode `"blend"` finds them, and only parts of 16 tokens or more.
            prefix: What each of the documents is computed behind, such as a system prompt; itself computed once, and
                stored as `text_or_ids` is.
            tokenizer: Tokenizes texts; `text_or_ids` and `prefix` with special tokens, as it would a prompt.
            pin: Never evict it.
            policy: That of the caches that are to find it.
            salt: That of the caches that are to find it; None for the store's.
            progress: Called as texts are computed, with the tokens that are done, and how many there are in all.
            live_quant: That of the caches that are to find it. Not with `documents`, for codes cannot be moved.

        Returns:
            What was already stored and what was computed, summed over the documents.

        Raises:
            ValueError: for both or neither of `text_or_ids` and `documents`, a text without a tokenizer, an empty one,
                ids of a wrong shape, documents for a model whose K/V cannot be moved, or with `live_quant`.
            StoreFullError: if what is to be pinned does not fit into the budget; nothing of it stays pinned.
            StoreClosedError: after `close()`.
        """
        self._require_open()
        assert _warmer is not None, "kvboost_hf.cache.warm registers itself when it is imported"
        settings = WarmSettings(
            tokenizer=tokenizer,
            pin=pin,
            policy=policy,
            salt=self.salt if salt is None else salt_bytes(salt),
            progress=progress,
            live_quant=live_quant,
        )
        return _warmer(self._require_model(), self, text_or_ids, documents, prefix, settings)

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

        The same n-gram may stand in several places: what followed it most often counts, of that the last one stored.

        Args:
            ids: Token ids, from 0 on.
            length: So many tokens are wanted.
            max_ngram: Compare so many tokens at most, 8 or fewer.
            min_ngram: And so many at least, 2 or more.
            salt: Of the caches that stored it; None for the store's.

        Returns:
            At most `length` token ids, fewer where the stored text ends or something other than text follows.

        Raises:
            ValueError: for a bad `max_ngram` or `min_ngram`.
            StoreClosedError: after `close()`.
        """
        self._require_open()
        check_ngrams(max_ngram, min_ngram)
        with self._lock:
            index = self._ngrams_with(self.salt if salt is None else salt_bytes(salt))
            return index.continuation(np.asarray(ids), length, max_ngram, min_ngram) if index is not None else []

    def stats(self) -> dict[str, Any]:
        """Counts and bytes: `chunks`, `bytes`, `max_bytes`, `pinned_chunks`, `tokens`, `hits`, `misses`, … by tier."""
        with self._lock:
            device = {"device": self._device.stats()} if self._device.max_bytes else {}
            ram = {"chunks": len(self._chunks), "bytes": self._used, "max_bytes": self.max_bytes}
            return {
                **ram,
                "pinned_chunks": len(self.pinned_keys()),
                "content_only": sum(chunk.content_only for chunk in self._chunks.values()),
                "states": len(self._states),
                "tokens": sum(len(chunk.tokens) for chunk in self._chunks.values()),
                "ngram_bytes": sum(index.nbytes for index in self._ngrams.values()),
                **self._counts,
                "codec": self.codec.name,
                "seconds_per_token": self._seconds_per_token(),
                "tiers": {**device, "ram": ram, **self._lower.stats()},
            }

    def invalidate(self) -> None:
        """Forget everything, live caches included: for weights that were changed where nobody can see it."""
        ModelState.of(self._require_model()).fingerprint.bump()
        self.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Finish writing to the lower tiers, drop what is in host memory, and refuse further use."""
        self._close_tiers()
        with self._lock:
            Shelf.clear(self)
            self._closed = True

    @property
    def usable(self) -> bool:
        """Whether it is open and its model exists."""
        return not self._closed and self._model() is not None

    def __len__(self) -> int:
        return len(self._chunks)

    def serves(self, model: PreTrainedModel) -> bool:
        """Whether this store was made for `model`."""
        return self._model() is model

    # Bookkeeping

    def _seconds_per_token(self) -> float | None:
        model = self._model()
        return ComputePace.of(model).seconds_per_token(model) if self._lower and model is not None else None

    def _require_model(self) -> PreTrainedModel:
        model = self._model()
        if model is None:
            raise StoreClosedError("The model that this ChunkStore was made for no longer exists. Make a new store.")
        return model


def salt_bytes(salt: str | bytes) -> bytes:
    """A salt as bytes.

    Raises:
        ValueError: if it is neither text nor bytes.
    """
    if isinstance(salt, str):
        return salt.encode()
    if isinstance(salt, bytes):
        return salt
    raise ValueError(f"`salt` must be str or bytes, got {type(salt).__name__}.")


def _checked_chunker(chunker: Chunker | None, chunk_size: int | None) -> Chunker:
    if chunker is None:
        return FixedChunker(128 if chunk_size is None else chunk_size)
    if chunk_size not in (None, chunker.chunk_size):
        raise ValueError(
            f"`chunk_size` must be left out beside a `chunker`, or be its {chunker.chunk_size}, got {chunk_size!r}."
        )
    return chunker


def _chunk_bytes(model: PreTrainedModel, chunk_size: int, codec: Codec) -> int:
    """The least that a chunk takes; 0 where nothing will be stored, and the configuration may have other names."""
    if known_reason(model) is not None:
        return 0
    per_token = bytes_per_token(model) if codec.lossless else 0  # of codes: less, and not worth a second formula
    return (per_token + np.dtype(np.int64).itemsize) * chunk_size


class _DefaultStore(KeptOnModel):
    """The store of a model's caches that were given none."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.store: ChunkStore | None = None


def default_store(model: PreTrainedModel) -> ChunkStore:
    """The store of a model's caches that were given none; made at the first call, and again after `close()`."""
    kept = _DefaultStore.of(model)
    with kept.lock:
        if kept.store is None or not kept.store.usable:
            kept.store = ChunkStore(model)
        return kept.store
