"""The store over a folder as a state machine: what is found is right, and what was written is found."""

import shutil
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.internals.cache import ChunkStore, LayerKVReader, Put, StoredChunk, Tokens, find_moved, records_of
from tests.internals.cache import lower as lower_memory
from tests.property.test_store import BYTES_PER_TOKEN, kv_of
from tests.unit.test_tiered_store import CHUNK, found_of, open_store, put_all

PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple)
Words = tuple[int, ...]


def tokens_of(words: Words) -> Tokens:
    """A chunk for each word."""
    return np.concatenate([np.arange(CHUNK) + 100 * word for word in words])


class TieredMachine(RuleBasedStateMachine):
    """Prompts are made of few words, so that they share beginnings; two tenants share a folder."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.listed_anew_after, lower_memory._LISTED_ANEW_AFTER = lower_memory._LISTED_ANEW_AFTER, 0.0
        self.stored: set[tuple[bytes, Words]] = set()  # may be found
        self.waiting: set[tuple[bytes, Words]] = set()  # will be written
        self.written: set[tuple[bytes, Words]] = set()  # must be found
        self.puts = 0  # since something was lost
        self.sure = True  # memory holds nothing that the folder has lost
        self.intact = True  # no file was lost or damaged: until it is asked for, another one is not written for it

    @initialize(room=st.integers(2, 12))
    def begin(self, room: int) -> None:
        self.room = room
        self.store = self.opened()

    def opened(self) -> ChunkStore:
        store = open_store(self.folder)
        store.max_bytes = self.room * CHUNK * (BYTES_PER_TOKEN + 8)
        return store

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)
        lower_memory._LISTED_ANEW_AFTER = self.listed_anew_after

    @rule(
        prompts=st.lists(PROMPTS, min_size=1, max_size=4), pinned=st.booleans(), salt=st.sampled_from([b"", b"other"])
    )
    def put(self, prompts: list[Words], pinned: bool, salt: bytes) -> None:
        self.puts += 1
        for words in prompts:
            results = put_all(self.store, tokens_of(words), pinned=pinned and not self.store.pinned_keys(), salt=salt)
            kept = next((n for n, put in enumerate(results) if put not in (Put.STORED, Put.PRESENT)), len(words))
            new = {(salt, words[:n]) for n in range(1, kept + 1)}
            self.stored |= new
            self.waiting |= new

    @rule(words=PROMPTS, start=st.integers(0, 40), pinned=st.booleans())
    def put_content(self, words: Words, start: int, pinned: bool) -> None:
        """In place of what has more before it, wherever that is; and in its turn given up for what has less."""
        root = self.store.root(b"")
        assert root is not None
        pinned = pinned and not self.store.pinned_keys()
        for word in words:
            tokens = tokens_of((word,))
            copy = partial(kv_of, tokens, start)
            put = self.store.put_content(root, tokens, start, BYTES_PER_TOKEN * CHUNK, copy, pinned=pinned)
            assert put in (Put.STORED, Put.PRESENT, Put.NO_ROOM)
            if put is not Put.NO_ROOM:
                assert self.store.moved_index(root).variants(tokens)[0].start <= start

    @rule(words=PROMPTS, salt=st.sampled_from([b"", b"other", b"nobody"]))
    def look_up(self, words: Words, salt: bytes) -> None:
        found = found_of(self.store, tokens_of(words), salt)
        for n in range(1, len(words) + 1):
            if self.sure and (salt, words[:n]) in self.written:
                assert found >= n * CHUNK
        self.flush()  # what was found has come back
        longest = max((_common(words, other) for tenant, other in self.stored if tenant == salt), default=0)
        assert found <= longest * CHUNK

    @rule(words=PROMPTS)
    def look_up_moved(self, words: Words) -> None:
        root = self.store.root(b"")
        assert root is not None
        tokens = np.concatenate([[7] * 5, tokens_of(words)])
        segments = find_moved(tokens, 0, len(tokens), self.store.moved_index(root))
        loaded = self.store.fetch(each.chunk for each in segments if isinstance(each.chunk, StoredChunk))
        for segment in segments:
            chunk = loaded.get(segment.chunk.key)
            if chunk is not None:
                assert chunk.root == root
                keys, values = LayerKVReader(chunk.kv).layer(0)
                part = slice(segment.offset, segment.offset + segment.stop - segment.start)
                positions = range(segment.start - segment.shift, segment.stop - segment.shift)
                assert keys[0, part, 0].tolist() == tokens[segment.start : segment.stop].tolist()
                assert values[0, part, 0].tolist() == list(positions)
        self.store.promote(list(loaded.values()))
        self.flush()

    @rule()
    def flush(self) -> None:
        self.store.flush()
        self.note_written()

    def note_written(self) -> None:
        if self.sure:
            self.written |= self.waiting
        self.waiting.clear()

    @rule()
    def restart(self) -> None:
        self.store.unpin(self.store.pinned_keys())
        self.store.close()
        self.note_written()
        self.sure = self.intact
        self.store = self.opened()

    @precondition(lambda self: self.puts > 2)
    @rule()
    def crash(self) -> None:
        """What waits to be written is lost, but for what the thread is at."""
        lower = records_of(self.store).lower.tiers
        with lower._lock:
            lower._closed = True
        lower._executor.shutdown(wait=True, cancel_futures=True)
        self.store._close_tiers.detach()
        lower._close_opened()
        self.waiting.clear()
        self.sure = self.intact
        self.store = self.opened()

    @precondition(lambda self: self.puts > 3)
    @rule(words=PROMPTS)
    def lose_a_file(self, words: Words) -> None:
        """Or damage it: whatever needs it is no longer there for certain."""
        self.puts = 0  # whatever is there, which after a crash depends on how far the thread was
        self.flush()
        files = sorted((self.folder / "blobs").rglob("*.safetensors"))
        if files:
            path = files[sum(words) % len(files)]
            if len(words) % 2:
                path.unlink()
            else:
                data = bytearray(path.read_bytes())
                data[len(data) - 1 - sum(words)] ^= 1
                path.write_bytes(data)
            self.intact = False
            self.lose()

    def lose(self) -> None:
        self.written.clear()
        self.waiting.clear()
        self.sure = False

    @precondition(lambda self: self.puts > 5)
    @rule()
    def clear(self) -> None:
        self.store.clear()
        self.intact = True
        self.puts = 0
        for texts in (self.stored, self.waiting, self.written):
            texts.clear()

    @precondition(lambda self: self.puts > 3)
    @rule(words=PROMPTS)
    def quarantine(self, words: Words) -> None:
        """And what continues it is gone, in all tiers; what is quarantined twice is not taken again."""
        self.puts = 0  # as above
        root = self.store.root(b"")
        assert root is not None
        found = self.store.chain(root, tokens_of(words))
        if found:
            chunk, start, _ = found[-1]
            self.store.quarantine([chunk.key])
            assert found_of(self.store, tokens_of(words)[: start + CHUNK]) <= start
            self.lose()

    @invariant()
    def its_books_agree(self) -> None:
        if hasattr(self, "store"):
            self.store.check_consistency()


def _common(one: Words, other: Words) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


TestTieredStore = TieredMachine.TestCase
TestTieredStore.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
