"""The tiers below host memory as a store sees them: chunks and states of one model, under roots that last."""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TypeVar

from transformers import PreTrainedModel

from kvboost_hf.cache.codecs.base import Codec
from kvboost_hf.cache.identity.fingerprint import ModelState
from kvboost_hf.cache.kv.blocks import ColumnFormat
from kvboost_hf.cache.kv.layer_kv import LayerKV, LayerStates
from kvboost_hf.cache.kv.model_form import ModelForm, read_kv, read_states
from kvboost_hf.cache.kv.records import Stored, StoredChunk, StoredStates, head_key, unloaded
from kvboost_hf.cache.planning.chunks import root_key
from kvboost_hf.cache.planning.plan import HEAD_TOKENS
from kvboost_hf.cache.store.history import History, remember
from kvboost_hf.cache.tiers.base import Entry, Kind
from kvboost_hf.cache.tiers.below import Found, LowerTiers
from kvboost_hf.cache.tiers.record import Blob, DamagedBlobError, dump
from kvboost_hf.compat import cache_layers, key_rotation, known_reason

_log = logging.getLogger("kvboost_hf")

_LISTED_ANEW_AFTER = 10.0  # seconds after which other processes are asked for new content again

S = TypeVar("S", bound=Stored)


class BlobReader:
    """Knows the forms that K/V of a model has had under each root, and the format that columns are kept in.

    Args:
        model: Gives the model.
        codec: Of the store.
    """

    def __init__(self, model: Callable[[], PreTrainedModel], codec: Codec) -> None:
        self._model, self.codec = model, codec
        self._format: tuple[Codec, ColumnFormat] | None = None  # of the codec
        self._first_form: ModelForm | None = None
        self._kinds: OrderedDict[bytes, tuple[bytes, bool]] = OrderedDict()  # by root, see `note_root`
        self._forms: OrderedDict[tuple[bytes, bool], ModelForm | None] = OrderedDict()  # by kind

    @property
    def column_format(self) -> ColumnFormat:
        """The format of columns."""
        if self._format is None or self._format[0] is not self.codec:
            model = self._model()
            rotation = key_rotation(model) if not self.codec.lossless else "not needed"
            known = rotation if not isinstance(rotation, str) else None
            layers = len(cache_layers(model)) if not self.codec.lossless else None
            self._format = self.codec, ColumnFormat(self.codec, known, layers)
        return self._format[1]

    def look_at_model(self) -> None:
        """Find out now what form the K/V of the model has, which takes a moment."""
        model = self._model()
        self._first_form = ModelForm.of(model) if known_reason(model) is None else None

    def note_root(self, root: bytes, fingerprint: bytes, *, keeps_hidden: bool) -> None:
        """Remember which fingerprint of the model a root is of, and whether hidden states are kept under it."""
        remember(self._kinds, root, (fingerprint, keeps_hidden))

    def read(self, blob: Blob, root: bytes) -> LayerKV | LayerStates | None:
        """The K/V or the states in a blob, or None where the form that they should have is not known.

        Raises:
            DamagedBlobError: if they have another form.
        """
        damage: DamagedBlobError | None = None
        for form in self.forms(root):
            try:
                if blob.entry.kind is Kind.STATES:
                    return read_states(blob, form)
                return read_kv(blob, self.column_format, form)
            except DamagedBlobError as error:
                damage = error
        if damage is not None:
            raise damage
        return None

    def forms(self, root: bytes) -> Iterator[ModelForm]:
        """The form as the model was at first, then, where it may have changed since, as it is."""
        kind = self._kinds.get(root)
        if kind is None:
            return  # nothing of it is in a lower tier
        if kind not in self._forms:
            _, keeps_hidden = kind
            if self._first_form is not None and not keeps_hidden:
                yield self._first_form
            remember(self._forms, kind, ModelForm.of(self._model(), keeps_hidden=keeps_hidden))
        if (form := self._forms[kind]) is not None:
            yield form


class LowerMemory:
    """Chunks and states of one model in lower tiers. Only records under durable roots are written.

    Args:
        tiers: The tiers; there may be none.
        model_name: Names the model to them, see `Entry.model`.
        reader: Reads K/V and states from their blobs.
        lock: Held wherever the known keys change.
        on_found: Called with chunks that are found under a root which `list_content` was called for.
    """

    def __init__(
        self,
        tiers: LowerTiers,
        model_name: bytes,
        reader: BlobReader,
        lock: AbstractContextManager[object],
        on_found: Callable[[Iterable[Stored]], None],
    ) -> None:
        self.tiers = tiers
        self.loaded = self.lost = 0  # records that were read, and that could not be read
        self._model_name, self._reader, self._lock, self._on_found = model_name, reader, lock, on_found
        self._durable_roots: set[bytes] = set()  # that mean the same in every process
        self.forget_all()

    def __bool__(self) -> bool:
        return bool(self.tiers)

    def forget_all(self) -> None:
        """Forget what is known of the tiers, which keep what they have."""
        self._known: OrderedDict[bytes, None] = OrderedDict()  # keys of what is in a lower tier, as far as is known
        self._listed: dict[bytes, float] = {}  # root -> when the tiers were last asked for all content under it

    # Looking up

    def note_root(self, root: bytes, fingerprint: bytes, *, keeps_hidden: bool = False) -> None:
        """From now on, write what is stored under a root, and find what is there; see `BlobReader.note_root`."""
        self._durable_roots.add(root)
        self._reader.note_root(root, fingerprint, keeps_hidden=keeps_hidden)

    def keeps(self, root: bytes) -> bool:
        """Whether records under a root are written to lower tiers."""
        return root in self._durable_roots

    def __contains__(self, key: bytes) -> bool:
        """Whether a record is known to be in a lower tier."""
        return key in self._known

    def records(self, root: bytes) -> Iterator[Stored]:
        """All records under a root."""
        return map(unloaded, self.tiers.entries(root))

    def records_by_tier(self, root: bytes) -> Iterator[tuple[str, Stored, int]]:
        """All records under a root in each tier that has them: its name, the record, and its bytes there."""
        for tier in self.tiers.tiers:
            for entry in tier.tier.entries(root):
                if entry.root == root:
                    yield tier.tier.name, unloaded(Found(entry, tier)), entry.nbytes

    def all_records(self) -> Iterator[Stored]:
        """All records under the roots that the store knows."""
        for root in list(self._durable_roots):
            yield from self.records(root)

    def list_content(self, root: bytes) -> None:
        """Call `on_found` with all chunks under a root: at once the first time, and again from time to time."""
        listed, now = self._listed.get(root), time.monotonic()
        if root in self._durable_roots and (listed is None or now - listed >= _LISTED_ANEW_AFTER):
            self._listed[root] = now
            if listed is None:
                self._on_found(self.records(root))
            else:  # a prompt need not wait for it
                self.tiers.run(lambda: self._on_found(self.records(root)))

    def load(self, stored: S, *, check: bool) -> S | None:
        """Read a record from the tier that it was found in; None if it is not there any more.

        Args:
            stored: Not loaded yet.
            check: Compare all of a chunk with its checksums now, rather than as it is read.

        Raises:
            DamagedBlobError: if it is not what this store would have written there.
        """
        found = stored.found
        assert found is not None
        begin = time.perf_counter()
        blob = found.tier.read(found.entry)
        held = self._reader.read(blob, stored.root) if blob is not None else None
        if blob is None or held is None:
            return None
        if check or isinstance(stored, StoredStates):
            blob.check_all()
            found.tier.took(blob.entry.nbytes, time.perf_counter() - begin)
        with self._lock:
            self.loaded += 1
        return replace(stored, loaded=held, nbytes=held.nbytes + stored.tokens.nbytes)  # type: ignore[arg-type]

    # Writing

    def write(self, stored: Stored) -> bool:
        """Have a record written to the tiers that do not have it; tells whether it will be there."""
        if stored.root not in self._durable_roots:
            return False
        if isinstance(stored, StoredStates) and not stored.states.can_be_written:
            return False
        above = stored.found.tier if stored.found is not None else None

        def make() -> tuple[Entry, list[bytes | memoryview]]:
            assert stored.loaded is not None
            return dump(self._entry(stored), *stored.loaded.parts())

        written = self.tiers.write(stored.nbytes, make, above) or above is not None
        if written:
            self.note_known(stored.key)
        return written

    def note_known(self, key: bytes) -> None:
        """A record is in a lower tier."""
        with self._lock:
            remember(self._known, key, None)

    def keep_evicted(self, stored: Stored) -> None:
        """Host memory has evicted a record: write it if it is not there yet, and have it found by its content."""
        if stored.root in self._durable_roots and (stored.key in self._known or self.write(stored)):
            if isinstance(stored, StoredChunk) and stored.root in self._listed:
                key = stored.key
                self.tiers.run(lambda: self._on_found(map(unloaded, self.tiers.find([key]).values())))

    def _entry(self, stored: Stored) -> Entry:
        if isinstance(stored, StoredStates):
            kind, start = Kind.STATES, 0
        else:
            kind, start = Kind.CONTENT if stored.content_only else Kind.CHUNK, stored.start
        head = b"" if kind is Kind.CONTENT else head_key(stored.parent, stored.tokens[:HEAD_TOKENS])
        rest = (self._model_name, stored.root, stored.parent, head, start, stored.tokens)
        return Entry(stored.key, kind, *rest, nbytes=0)

    # Giving up

    def give_up(self, stored: Stored, error: DamagedBlobError | None = None) -> None:
        """Delete a record that cannot be had from the tier that it was found in, because of its damage if any."""
        found: Found | None = stored.found
        assert found is not None
        if error is not None:
            found.tier.note_damage(error)
        found.tier.tier.delete([stored.key])
        with self._lock:
            self.lost += 1
            self._known.pop(stored.key, None)

    def delete(self, keys: Collection[bytes]) -> None:
        """Delete records in every tier."""
        for key in keys:
            self._known.pop(key, None)
        if self.tiers:
            self.tiers.delete(keys)

    def clear(self) -> None:
        """Delete all records of the model in every tier: what other processes have stored, too."""
        self.forget_all()
        if self.tiers:
            self.tiers.clear(self._model_name)


class Roots:
    """Derives roots from the model and the salt, and registers them with `History` and `LowerMemory`.

    When weights change, K/V of before is dropped where nothing could ever find it again: in a store without tiers.

    Args:
        history: Remembers the salt of each root.
        lower: Registers roots that other processes derive, too.
        drop: Drops all that is stored under some roots.
    """

    def __init__(self, history: History, lower: LowerMemory, drop: Callable[[set[bytes]], None]) -> None:
        self._history, self._lower, self._drop = history, lower, drop
        self._age = -1, -1  # of the model
        self._passing: set[bytes] = set()  # roots that last as long as it stays as it is
        self._warned: set[str] = set()

    def root(self, model: PreTrainedModel, salt: bytes, regime: bytes, *, read_all: bool, keeps_hidden: bool) -> bytes:
        """The root of a model as it is now.

        Args:
            model: The model.
            salt: Whose prompts they are.
            regime: Of the rotary frequencies, and of the codec.
            read_all: Read every weight to tell whether one has changed.
            keeps_hidden: Hidden states are kept beside K/V.
        """
        follower = ModelState.of(model).fingerprint
        fingerprint = follower.durable(model, full=read_all) if self._lower else None
        if durable := isinstance(fingerprint, bytes):
            found = fingerprint
        else:
            if isinstance(fingerprint, str) and fingerprint not in self._warned:
                self._warned.add(fingerprint)
                _log.warning("K/V of this model is kept in host memory only: %s in other processes.", fingerprint)
            found = follower.current(model, full=read_all)
        root = root_key(found, salt, regime + (b"hidden states" if keeps_hidden else b""))
        self._history.note_root(root, salt)
        if not durable and not read_all:
            if follower.age != self._age:
                self._drop(self._passing)
                self._age, self._passing = follower.age, set()
            self._passing.add(root)
        if durable:
            self._lower.note_root(root, found, keeps_hidden=keeps_hidden)
        return root
