"""The store over lower tiers: what is written when, who may close it, and what is worth loading."""

import errno
import gc
import logging
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from kvboost_hf import ChunkReuseCache, ChunkStore, StoreClosedError, StoreFullError
from tests.blobs import make_blob
from tests.conftest import as_inputs, make_model, random_ids
from tests.internals.cache import (
    Block,
    Border,
    ComputePace,
    DeviceMemory,
    Entry,
    FixedChunker,
    HostMemory,
    LayerKV,
    LayerKVReader,
    MeasuredTier,
    ModelForm,
    Put,
    RowPlan,
    Segment,
    StoredChunk,
    StoredStates,
    Tier,
    Tokens,
    _by_text,
    lower,
    model_name,
    plan_row,
    prefix_key,
    records_of,
    text_of,
    trim_row,
)
from tests.internals.cache import history as pace
from tests.internals.disk import DiskTier
from tests.property.test_store import BYTES_PER_TOKEN, KV_FORM, kv_of

pytestmark = pytest.mark.daily

MODEL = make_model("llama")
CHUNK = 32
IDS = random_ids(150, seed=1)


class Recording:
    """A tier that notes the calls and their keys, on another one."""

    def __init__(self, inner: Tier) -> None:
        self.inner, self.name, self.location = inner, inner.name, inner.location
        self.calls: list[tuple[str, int]] = []
        self.keys: set[bytes] = set()

    def _note(self, what: str, keys: Iterable[bytes]) -> list[bytes]:
        asked = list(keys)
        self.calls.append((what, len(asked)))
        self.keys |= set(asked)
        return asked

    def find(self, keys: Sequence[bytes]) -> dict[bytes, Entry]:
        return self.inner.find(self._note("find", keys))

    def find_alike(self, heads: Sequence[bytes]) -> list[Entry]:
        return self.inner.find_alike(self._note("find_alike", heads))

    def entries(self, root: bytes | None = None) -> Iterator[Entry]:
        self._note("entries", [root] if root is not None else [])
        return self.inner.entries(root)

    def read(self, key: bytes) -> memoryview | None:
        return self.inner.read(self._note("read", [key])[0])

    def write(self, entry: Entry, blob: Sequence[bytes | memoryview]) -> bool:
        self._note("write", [entry.key])
        return self.inner.write(entry, blob)

    def touch(self, keys: Sequence[bytes]) -> None:
        self.inner.touch(self._note("touch", keys))

    def delete(self, keys: Iterable[bytes]) -> None:
        self.inner.delete(self._note("delete", keys))

    def clear(self, model: bytes) -> None:
        self.inner.clear(model)

    def stats(self) -> Mapping[str, int | float | str]:
        return self.inner.stats()

    def hits(self) -> Mapping[bytes, int]:
        return self.inner.hits()

    def close(self) -> None:
        self.inner.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "tier"


def open_store(folder: Path, **settings: Any) -> ChunkStore:
    with patch.object(ModelForm, "of", lambda model: KV_FORM):  # `kv_of` is in place of a model
        return ChunkStore(MODEL, **{"chunk_size": CHUNK, "tiers": [f"disk:{folder}:1GB"], **settings})


def put_all(store: ChunkStore, tokens: Tokens, *, pinned: bool = False, salt: bytes = b"") -> list[Put]:
    """Store whole chunks whose K/V tells their tokens."""
    root = store.root(salt)
    assert root is not None
    key, results = root, []
    for at in range(0, len(tokens) // CHUNK * CHUNK, CHUNK):
        part = tokens[at : at + CHUNK]
        copy = partial(kv_of, part, at)
        results.append(store.put(root, key, at, part, BYTES_PER_TOKEN * CHUNK, copy, pinned=pinned))
        key = prefix_key(key, part)
    return results


def found_of(store: ChunkStore, tokens: Tokens, salt: bytes = b"") -> int:
    """How many tokens the store serves; all of its K/V must be right."""
    root = store.root(salt)
    assert root is not None
    border = Border(0, root)
    view = store.view(root, tokens, border)
    plan = plan_row(tokens, 0, border, len(tokens), store.chunker, view)
    chunks = [segment.chunk for segment in plan.segments]
    loaded = store.fetch(chunk for chunk in chunks if isinstance(chunk, StoredChunk))
    for segment in plan.segments:
        chunk = loaded.get(segment.chunk.key)
        if chunk is None:
            return segment.start
        keys, values = LayerKVReader(chunk.kv).layer(0)
        length = segment.stop - segment.start
        assert keys[0, :length, 0].tolist() == tokens[segment.start : segment.stop].tolist()
        assert values[0, :length, 0].tolist() == list(range(segment.start, segment.stop))
    store.promote(list(loaded.values()))
    return plan.hit


# Budgets


def test_what_ram_gives_up_is_found_on_disk(folder: Path) -> None:
    store = open_store(folder)
    store.max_bytes = 4 * CHUNK * (BYTES_PER_TOKEN + 8)
    texts = [np.arange(n * 1000, n * 1000 + 4 * CHUNK) for n in range(5)]
    for text in texts:
        put_all(store, text)
    assert store.stats()["evictions"] == 16
    store.flush()
    for text in texts:
        assert found_of(store, text) == len(text)
        store.flush()
        assert store.stats()["bytes"] <= store.max_bytes
    assert store.stats()["loaded"] >= 16
    store.close()


def test_ram_smaller_than_the_prompt(folder: Path) -> None:
    store = open_store(folder)
    store.max_bytes = 2 * CHUNK * (BYTES_PER_TOKEN + 8)
    text = np.arange(10 * CHUNK)
    put_all(store, text)
    store.flush()
    assert store.stats()["tiers"]["disk"]["chunks"] >= 2
    store.close()


def test_pinned_chunks_stay_and_are_on_disk(folder: Path) -> None:
    store = open_store(folder)
    store.max_bytes = 4 * CHUNK * (BYTES_PER_TOKEN + 8)
    pinned = np.arange(3 * CHUNK)
    put_all(store, pinned, pinned=True)
    for n in range(1, 6):
        put_all(store, np.arange(n * 1000, n * 1000 + CHUNK))
    assert store.stats()["pinned_chunks"] == 3
    store.close()
    store = open_store(folder)
    assert found_of(store, pinned) == len(pinned)
    assert store.stats()["pinned_chunks"] == 0  # a pin is of this process
    store.close()


def test_a_text_is_pinned_whole_or_not_at_all(folder: Path) -> None:
    store = open_store(folder)
    put_all(store, np.arange(3 * CHUNK))
    keys = list(store.inspect().chunks)
    assert not store.pin([*keys, b"gone"], b"holder")
    assert store.stats()["pinned_chunks"] == 0
    assert store.pin(keys, b"holder")
    assert store.stats()["pinned_chunks"] == 3
    store.let_go(b"holder")
    assert store.stats()["pinned_chunks"] == 0
    store.max_bytes = 3 * CHUNK * (BYTES_PER_TOKEN + 8)
    put_all(store, np.arange(1000, 1000 + 3 * CHUNK))
    assert not {*keys} & {*store.inspect().chunks}
    store.close()


def test_pinning_documents_that_are_on_disk(folder: Path) -> None:
    documents = [random_ids(64, seed=seed) for seed in range(4)]
    store = open_store(folder)
    store.warm(documents=documents)
    store.close()
    store = open_store(folder)
    assert store.warm(documents=documents).forwarded_tokens == 0
    assert store.stats()["pinned_chunks"] == 8
    store.close()
    store = open_store(folder, max_bytes=60_000)  # of 17 KB each
    with pytest.raises(StoreFullError, match="does not fit"):
        store.warm(documents=documents)
    assert store.stats()["pinned_chunks"] == 0
    store.close()


def no_space(*_: Any) -> bool:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("full", ["budget", "disk"])
def test_a_full_tier_keeps_what_it_has_when_it_is_opened(
    folder: Path, full: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How fast a tier is, is not worth giving anything up for."""
    tokens = np.arange(20 * CHUNK)
    store = ChunkStore(MODEL, chunk_size=CHUNK, tiers=[f"disk:{folder}:3MB"])
    put_all(store, tokens)
    store.flush()
    before = store.stats()["tiers"]["disk"]["chunks"]
    store.close()
    filler = DiskTier(folder, 10**9)
    assert {entry.model for entry in filler.entries()} == {model_name(MODEL)}
    size = int(filler.stats()["bytes"])
    filler.close()
    if full == "disk":
        monkeypatch.setattr("kvboost_hf.cache.tiers.disk.disk_usage", lambda _: SimpleNamespace(free=100_000))
        monkeypatch.setattr("kvboost_hf.cache.tiers.disk_files.BlobFiles.write", no_space)
        size = 10**9
    store = ChunkStore(MODEL, chunk_size=CHUNK, tiers=[f"disk:{folder}:{size + 100_000}B"])
    assert store.stats()["tiers"]["disk"]["chunks"] == before == 20
    assert store.stats()["tiers"]["disk"]["evictions"] == 0
    store.close()


@pytest.mark.parametrize("nbytes", [2**16, 2**16 - 1])
def test_how_fast_a_tier_is_is_found_out_with_what_it_has(folder: Path, nbytes: int) -> None:
    """With a blob of 64 KiB or more; only without one is another written, if there is room, and here is none."""
    header = make_blob(1, 60_000)[0].nbytes - 60_000
    entry, parts = make_blob(1, nbytes - header)
    assert entry.nbytes == nbytes
    tier = DiskTier(folder, 2**17)
    assert tier.write(entry, parts)
    seconds = MeasuredTier(tier).seconds_per_byte
    assert (0 < seconds < 1e-3) if nbytes == 2**16 else seconds == 0
    assert tier.stats()["chunks"] == 1
    tier.close()


@pytest.mark.daily
@pytest.mark.parametrize(("room", "is_probed"), [(2**22, True), (2**22 - 1, False)])
def test_an_empty_tier_is_probed_where_two_blobs_fit(folder: Path, room: int, is_probed: bool) -> None:
    tier = DiskTier(folder, room)
    assert (MeasuredTier(tier).seconds_per_byte > 0) == is_probed
    tier.close()


def test_a_probe_that_was_left_behind_goes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(DiskTier, "delete", lambda self, keys: None)  # killed before it
        open_store(folder).close()
    tier = DiskTier(folder, 10**9)
    assert tier.stats()["chunks"] == 1
    tier.close()
    for _ in range(2):
        store = open_store(folder)
        chunks = store.stats()["tiers"]["disk"]["chunks"]
        store.close()
    assert chunks <= 1


def test_quarantine_takes_what_was_stored_while_its_parent_was_below(folder: Path) -> None:
    tokens = np.arange(2 * CHUNK)
    store = open_store(folder)
    put_all(store, tokens[:CHUNK])
    store.close()
    store = open_store(folder)
    goes_on = threading.Event()
    records_of(store).lower.tiers.run(goes_on.wait)  # nothing comes to host memory before what follows is stored
    assert found_of(store, tokens[:CHUNK]) == CHUNK
    root = store.root(b"")
    assert root is not None
    first, rest = prefix_key(root, tokens[:CHUNK]), tokens[CHUNK:]
    copy = partial(kv_of, rest, CHUNK)
    assert store.put(root, first, CHUNK, rest, BYTES_PER_TOKEN * len(rest), copy) is Put.STORED
    goes_on.set()
    store.flush()
    assert len(store) == 2
    store.quarantine([first, b"no key"])
    assert len(store) == store.stats()["bytes"] == 0
    assert store.stats()["quarantined"] == 1
    put_all(store, tokens[:CHUNK])
    assert found_of(store, tokens) == CHUNK
    store.close()
    for tiers in ((), [f"disk:{folder}:1GB"]):  # in host memory alone, and on disk alone
        store = open_store(folder, tiers=tiers)
        put_all(store, tokens[: 0 if tiers else CHUNK])
        root = store.root(b"")
        assert root is not None
        store.quarantine([prefix_key(root, tokens[:CHUNK])])
        assert store.stats()["quarantined"] == 1
        assert found_of(store, tokens) == 0
        store.close()


# Closing


def stored_below(folder: Path) -> tuple[ChunkStore, Any, bytes]:
    """A store with two chunks on its disk tier and none in host memory; their tokens, and the root."""
    store, tokens = open_store(folder), np.arange(2 * CHUNK)
    put_all(store, tokens)
    store.close()
    store = open_store(folder)
    root = store.root(b"")
    assert root is not None
    return store, tokens, root


def test_what_one_row_is_to_do_without_others_find(folder: Path) -> None:
    """A later piece of a prompt finds what the prompt did, unless that was looked up without something."""
    store, tokens, root = stored_below(folder)
    key = prefix_key(root, tokens[:CHUNK])

    def finds(**how: Any) -> bool:
        return store.view(root, tokens, **how).find(key, tokens[:CHUNK]) is not None

    assert not finds(without=frozenset([key]))
    assert finds(is_piece=True)
    assert finds()
    assert not finds(is_piece=True, without=frozenset([key]))
    known = store.view(root, tokens)
    assert store.view(root, tokens, is_piece=True) is known
    store.close()


def test_two_threads_look_up_what_one_row_is_to_find(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the first one is told what there is, the second one is not told that there is nothing."""
    store, tokens, root = stored_below(folder)
    found, unloaded, view = list[Any](), lower.unloaded, store.view(root, tokens)

    def find() -> Any:
        return view.find(prefix_key(root, tokens[:CHUNK]), tokens[:CHUNK])

    def meanwhile(each: Any) -> Any:
        monkeypatch.setattr(lower, "unloaded", unloaded)
        with ThreadPoolExecutor(1) as pool:
            found.append(pool.submit(find).result(30))
        return unloaded(each)

    monkeypatch.setattr(lower, "unloaded", meanwhile)
    found.append(find())
    assert len(found) == 2
    assert all(found)
    store.close()


def test_close_reopen_and_use_after_close(folder: Path) -> None:
    store = open_store(folder)
    put_all(store, np.arange(64))
    cache = ChunkReuseCache(MODEL, store)
    store.close()
    store.close()
    store.flush()
    with pytest.raises(StoreClosedError, match="was closed"):
        store.root(b"")
    with pytest.raises(StoreClosedError, match="was closed"):
        store.warm(IDS)
    for delete in (store.clear, store.invalidate):  # else they seemed to, and all was found again below
        with pytest.raises(StoreClosedError, match="was closed"):
            delete()
    cache.reset()
    store = open_store(folder)
    assert found_of(store, np.arange(64)) == 64
    store.close()


def test_with_closes_whatever_happens(folder: Path) -> None:
    def use(store: ChunkStore) -> None:
        with store:
            put_all(store, np.arange(64))
            raise RuntimeError("inside")

    store = open_store(folder)
    with pytest.raises(RuntimeError, match="inside"):
        use(store)
    with pytest.raises(StoreClosedError, match="was closed"):
        store.warm(IDS)
    with open_store(folder) as again:
        assert found_of(again, np.arange(64)) == 64


def test_a_store_that_is_let_go_of_is_written_whole(folder: Path) -> None:
    before = set(threading.enumerate())
    store = open_store(folder)
    put_all(store, np.arange(10 * CHUNK))
    writers = set(threading.enumerate()) - before
    del store
    gc.collect()
    for writer in writers:  # which may have been the last to hold it
        writer.join(30)
    store = open_store(folder)
    assert found_of(store, np.arange(10 * CHUNK)) == 10 * CHUNK
    store.close()


def test_the_thread_may_be_the_last_to_hold_a_store(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its jobs hold it: what is found in the end must not wait for itself."""
    for _ in range(3):
        store = open_store(folder)
        goes_on = threading.Event()
        records_of(store).lower.tiers.run(goes_on.wait)
        put_all(store, np.arange(10 * CHUNK))
        lower = records_of(store).lower.tiers
        lower.run(lambda store=store: None)
        lower.touch([b"something"])  # and one that does not
        executor = lower._executor
        assert executor is not None
        (thread,) = executor._threads
        del store
        gc.collect()
        goes_on.set()
        thread.join(20)
        assert not thread.is_alive()
    store = open_store(folder)
    assert found_of(store, np.arange(10 * CHUNK)) == 10 * CHUNK
    assert not caplog.records
    store.close()


def test_two_stores_on_one_folder(folder: Path) -> None:
    one, other = open_store(folder), open_store(folder)
    put_all(one, np.arange(128))
    one.flush()
    assert found_of(other, np.arange(128)) == 128
    other.flush()
    one.clear()
    assert found_of(one, np.arange(128)) == 0
    assert found_of(other, np.arange(128)) == 0  # what was cleared is cleared everywhere
    one.close()
    other.close()


LATE = """
import sys, threading
from pathlib import Path
from tests.unit.test_tiered_store import IDS, MODEL, ChunkReuseCache, as_inputs, open_store

store = open_store(Path(sys.argv[1]))

def late():
    threading.main_thread().join()
    MODEL.generate(**as_inputs(IDS), cache=ChunkReuseCache(MODEL, store), max_new_tokens=1)

threading.Thread(target=late).start()
"""

SECOND = """
import sys
from tests.conftest import as_inputs, make_model, random_ids
from kvboost_hf import ChunkReuseCache, ChunkStore
from kvboost_hf.cache.store.history import ComputePace
ComputePace.seconds_per_token = lambda self, model: 1.0
model = make_model("llama")
store = ChunkStore(model, chunk_size=32, tiers=[f"disk:{sys.argv[1]}:1GB"])
cache = ChunkReuseCache(model, store)
model.generate(**as_inputs(random_ids(150, seed=1)), past_key_values=cache, max_new_tokens=2, do_sample=False)
sys.stdout.write(f"reused {cache.report.reused_tokens}")
"""


@pytest.mark.slow
def test_another_process_finds_what_is_stored(folder: Path) -> None:
    """Nothing that it is found by depends on the process, such as the seed of hash()."""
    store = open_store(folder)
    cache = ChunkReuseCache(MODEL, store)
    MODEL.generate(**as_inputs(IDS), past_key_values=cache, max_new_tokens=1)
    cache.reset()
    store.flush()
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    command = [sys.executable, "-c", SECOND, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "reused 149", done.stderr
    store.close()


@pytest.mark.slow
def test_what_a_thread_stores_after_the_main_one_has_ended_is_written(folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LATE, str(folder)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    store = open_store(folder)
    assert store.stats()["tiers"]["disk"]["chunks"] > 0
    store.close()


def test_a_forked_child_has_a_store_of_its_own(folder: Path) -> None:
    parent = open_store(folder)
    put_all(parent, np.arange(128))
    parent.flush()

    def work() -> None:
        store = open_store(folder)
        assert found_of(store, np.arange(128)) == 128
        put_all(store, np.arange(1000, 1128))
        store.close()
        parent.close()  # a copy of it: nothing of the parent's goes
        os._exit(7)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(60)
    torch.set_num_threads(threads)
    assert child.exitcode == 7
    assert found_of(parent, np.arange(1000, 1128)) == 128
    put_all(parent, np.arange(2000, 2128))
    parent.close()
    store = open_store(folder)
    assert found_of(store, np.arange(2000, 2128)) == 128
    store.close()


# Isolation


def test_tenants_find_nothing_of_each_other_and_cannot_tell(folder: Path) -> None:
    """For a prompt that another tenant has stored, the same work as for one that nobody has."""
    text, unseen = np.arange(128), np.arange(5000, 5128)
    store = open_store(folder)
    put_all(store, text, salt=b"one")
    put_all(store, np.arange(9000, 9128), salt=b"other")
    store.close()
    calls = []
    for asked in (text, unseen):
        tier = Recording(DiskTier(folder, 10**9))
        keys = {entry.key for entry in tier.inner.entries()}
        store = ChunkStore(MODEL, chunk_size=CHUNK, tiers=[tier])
        tier.calls.clear()
        tier.keys.clear()
        assert found_of(store, asked, salt=b"other") == 0
        index = store.moved_index(store.root(b"other") or b"")
        assert index.whole(text_of(asked)) is None
        store.flush()
        assert not tier.keys & keys
        calls.append(tier.calls)
        store.close()
    assert calls[0] == calls[1]
    assert calls[0]


# What is worth loading


def segment(start: int, stop: int, key: bytes = b"") -> Segment:
    chunk = StoredChunk(key, b"", b"", start, np.arange(start, stop), None, 0, stop - start)
    return Segment(chunk, 0, start, stop)


@pytest.mark.parametrize(
    ("savings", "kept"),
    [
        ([1, 1, 1], 3),
        ([1, -1, 1], 3),
        ([1, -2, 1], 1),
        ([-1, -1, 5], 3),
        ([-1], 0),
        ([], 0),
        ([0, 0], 2),
        ([1, -1], 1),
    ],
)
def test_trim_row(savings: list[float], kept: int) -> None:
    segments = tuple(segment(at * 10, at * 10 + 10) for at in range(len(savings)))
    borders = tuple(Border(at * 10 + 10, b"") for at in range(len(savings)))
    states: dict[int, Any] = {at * 10 + 5: None for at in range(len(savings))}
    plan = RowPlan(len(savings) * 10, segments, borders, None, states)
    told = dict(zip([each.start for each in segments], savings, strict=True))
    trimmed = trim_row(plan, lambda each: told[each.start])
    assert trimmed.hit == kept * 10
    assert trimmed.segments == segments[:kept]
    assert trimmed.borders == borders[:kept]
    assert set(trimmed.states or {}) == {at * 10 + 5 for at in range(kept)}


def test_pace_follows_what_is_observed() -> None:
    found = ComputePace()
    estimated = found.seconds_per_token(MODEL)
    assert 0 < estimated < 1
    found.observe(pace.LEAST_TOKENS - 1, 1000.0)  # too few to tell
    assert found.seconds_per_token(MODEL) == estimated
    found.observe(pace.LEAST_TOKENS, pace.LEAST_TOKENS / 2)
    assert found.seconds_per_token(MODEL) == 0.5
    found.observe(100, 150.0)
    assert found.seconds_per_token(MODEL) == pytest.approx(0.5 + pace._WEIGHT * 1.0)


@pytest.mark.parametrize("slow", [False, True])
def test_what_takes_longer_to_load_than_to_compute_is_computed(
    folder: Path, slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ComputePace, "seconds_per_token", lambda self, model: 1e-3)
    store = open_store(folder)
    cache = ChunkReuseCache(MODEL, store)
    MODEL.generate(**as_inputs(IDS), past_key_values=cache, max_new_tokens=1)
    cache.reset()
    store.close()
    store = open_store(folder)
    (tier,) = records_of(store).lower.tiers.tiers
    tier.seconds_per_byte = 1e-3 / 512 * (1.5 if slow else 0.5)  # 512 bytes of K/V are a token's
    cache = ChunkReuseCache(MODEL, store)
    MODEL.generate(**as_inputs(IDS), past_key_values=cache, max_new_tokens=1)
    assert cache.report.reused_tokens == (0 if slow else 149)
    assert store.stats()["not_worth_loading"] == (149 if slow else 0)
    assert [(miss.at, miss.cause) for miss in cache.report.misses] == ([(0, "slow")] if slow else [])
    cache.reset()
    again = ChunkReuseCache(MODEL, store)  # what is in host memory is always worth it
    MODEL.generate(**as_inputs(IDS), past_key_values=again, max_new_tokens=1)
    assert again.report.reused_tokens == 149
    store.close()


# Failures of the store's own thread


def test_device_memory_is_filled_to_its_last_byte() -> None:
    """Two chunks that fill it stay; one byte less, and the second has no room beside the first."""
    chunks = [LayerKV((Block.raw(torch.full((2, 1, 16, 1), float(n))),), (((0, 0), (0, 1)),)) for n in range(3)]
    nbytes = chunks[0].nbytes
    for max_bytes, held in ((2 * nbytes, {0, 1}), (2 * nbytes - 1, {1}), (nbytes, {1}), (nbytes - 1, set[int]())):
        memory = DeviceMemory(max_bytes)
        for n in (0, 1):
            memory.put(b"%d" % n, chunks[n])
            memory.check_consistency()
        assert {n for n in (0, 1) if memory.get(b"%d" % n) is not None} == held
        assert memory.stats() == {"chunks": len(held), "bytes": len(held) * nbytes, "max_bytes": max_bytes}
    memory = DeviceMemory(2 * nbytes)
    for n, used in ((0, None), (1, 0), (2, None)):
        memory.put(b"%d" % n, chunks[n])
        if used is not None:
            memory.get(b"%d" % used)
    assert [memory.get(b"%d" % n) is not None for n in range(3)] == [True, False, True]  # 1 was used least recently


def test_a_failing_job_is_logged_and_the_next_one_runs(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(folder)
    with caplog.at_level(logging.ERROR, "kvboost_hf"):
        records_of(store).lower.tiers.run(lambda: 1 / 0)
        put_all(store, np.arange(64))
        store.flush()
    assert "what it wrote is lost" in caplog.text
    assert store.stats()["tiers"]["disk"]["chunks"] == 2
    store.close()


@pytest.mark.parametrize("end", ["flush", "close"])
def test_what_a_job_gives_the_thread_is_waited_for(folder: Path, end: str) -> None:
    """What comes back from a lower tier is written to the nearer ones, by jobs of the job that brings it."""
    store, done = open_store(folder), list[int]()
    tiers, goes_on = records_of(store).lower.tiers, threading.Event()

    def bring(depth: int) -> None:
        goes_on.wait(20)
        if depth:
            tiers.run(partial(bring, depth - 1))
            time.sleep(0.05)
        done.append(depth)

    tiers.run(partial(bring, 2))
    threading.Timer(0.05, goes_on.set).start()
    getattr(store, end)()
    assert done == [2, 1, 0]
    store.close()


def test_too_much_that_waits_is_written_when_ram_gives_it_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvboost_hf.cache.tiers.below._MAX_WAITING", 600)
    store = open_store(folder)
    goes_on = threading.Event()
    records_of(store).lower.tiers.run(goes_on.wait)
    store.max_bytes = 4 * CHUNK * (BYTES_PER_TOKEN + 8)
    put_all(store, np.arange(4 * CHUNK))
    assert records_of(store).lower.tiers.refused == 3
    goes_on.set()
    store.flush()
    for n in range(1, 9):
        put_all(store, np.arange(n * 1000, n * 1000 + CHUNK))
        store.flush()
    assert found_of(store, np.arange(4 * CHUNK)) == 4 * CHUNK
    store.close()


@pytest.mark.parametrize("in_segments", [False, True])
def test_what_one_forward_over_a_text_checks(in_segments: bool) -> None:
    """Chunks wherever they end, and states where the forward ends, or one of its segments of two tokens at least."""
    ids, other, texts = np.arange(20), np.arange(20) + 100, dict[bytes, Tokens]()

    def of(kind: str, stop: int, tokens: Tokens = ids) -> StoredChunk | StoredStates:
        key = f"{kind}{stop}{'' if tokens is ids else 'b'}".encode()
        texts[key] = tokens[:stop]
        if kind == "chunk":
            return StoredChunk(key, b"", b"", 0, tokens[:stop], None, 0, stop)
        return StoredStates(key, b"", b"", tokens[:stop], None, 0)

    chunks = [of("chunk", stop) for stop in (4, 8, 19)]
    states = [of("states", stop) for stop in (20, 18, 17, 16, 1)] + [replace(of("states", 20), key=b"twin")]
    texts[b"twin"] = ids
    found = list(
        _by_text([*chunks, *states, of("chunk", 8, other)], texts, lambda length: None, in_segments=in_segments)
    )
    assert all(
        np.array_equal(texts[each.key], text[: len(texts[each.key])]) for text, group in found for each in group
    )
    keys = [{each.key.decode() for each in group} for _, group in found]
    assert sum(map(len, keys)) == len(texts)
    first = {"states20", "twin", "chunk19", "chunk8", "chunk4"}
    if in_segments:  # 19 would leave one token behind 18, as 17 does before 18
        assert keys == [first | {"states18", "states16"}, {"states17"}, {"chunk8b"}, {"states1"}]
    else:
        assert keys == [first, {"states18"}, {"states17"}, {"states16"}, {"chunk8b"}, {"states1"}]


class _Text:
    """A text of chunks of 32 tokens in host memory, and states after some of its tokens, of 100 bytes each."""

    def __init__(self, memory: HostMemory, ids: Tokens, name: bytes = b"") -> None:
        self.memory, self.ids, self.name = memory, ids, name

    def key(self, stop: int) -> bytes:
        return b"" if stop == 0 else b"chunk %d%s" % (stop, self.name if stop > 32 else b"")

    def keep(self, stop: int) -> bool:
        begin = (stop - 1) // 32 * 32
        states = StoredStates(b"%d%s" % (stop, self.name), b"", self.key(begin), self.ids[begin:stop], None, 100)
        reservation = self.memory.reserve(100, b"", states=True)
        if reservation is not None:
            self.memory.insert(states, reservation)
        return reservation is not None

    def store(self, *stops: int) -> None:
        for stop in stops:
            chunk = StoredChunk(
                self.key(stop), b"", self.key(stop - 32), stop - 32, self.ids[stop - 32 : stop], None, 10, 32
            )
            reservation = self.memory.reserve(10, b"")
            assert reservation is not None
            self.memory.insert(chunk, reservation)


@pytest.mark.parametrize(("used", "left"), [(b"chunk 64", b"chunk 64"), (b"chunk 64b", b"chunk 64b")])
def test_what_was_used_last_is_given_up_last(used: bytes, left: bytes) -> None:
    memory = HostMemory(30, threading.RLock())
    ids = np.arange(64)
    _Text(memory, ids).store(32, 64)
    _Text(memory, np.concatenate([ids[:32], ids[32:] + 1000]), b"b").store(64)
    memory.use([used, b"in a lower tier"], by_content=False)
    assert memory.reserve(10, b"") is not None
    assert set(memory.chunks) == {b"chunk 32", left}


def test_how_far_states_are_behind_those_before_them() -> None:
    """In the same text: what a prompt that goes on from them would be computed again without them."""
    memory = HostMemory(10**6, threading.RLock())
    ids = np.arange(128)
    other = np.concatenate([ids[:45], ids[45:] + 1000])
    text, branch = _Text(memory, ids), _Text(memory, other, b"b")
    text.store(32, 64, 96)
    places = [10, 24, 32, 50, 96, 110]
    for place in places:
        assert text.keep(place)
    assert branch.keep(60)
    for n, place in enumerate(places):
        assert memory._tokens_since(memory.states[b"%d" % place]) == place - (places[n - 1] if n else 0)
    alone = _Text(memory, ids + 5000, b"c")
    assert alone.keep(70)  # the chunks before it are gone: as far as is known, there is none
    assert memory._tokens_since(memory.states[b"70c"]) == 6


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("order", [(32, 64), (64, 32)])
def test_states_within_a_text_make_room_for_others_before_its_end(pinned: bool, order: tuple[int, int]) -> None:
    memory = HostMemory(1000, threading.RLock(), state_share=0.2)
    text = _Text(memory, np.arange(128))
    text.store(32, 64)
    assert [text.keep(stop) for stop in order] == [True, True]  # all that may be kept
    if pinned:
        memory.pin(b"32")
        assert text.keep(48)  # beside those that nobody may drop
        assert set(memory.states) == {b"32", b"64", b"48"}
        memory.pin(b"48")
        memory.pin(b"64")
        assert [text.keep(stop) for stop in (40, 56)] == [True, True]
        return
    assert text.keep(96)
    assert set(memory.states) == {b"64", b"96"}
    assert memory.reserve(201, b"", states=True) is None
    reservation = memory.reserve(200, b"", states=True)
    assert reservation is not None
    assert not memory.states


def test_among_many_pinned_states_others_still_make_room() -> None:
    memory = HostMemory(10**6, threading.RLock(), state_share=0.0002)  # two states besides those that are pinned
    text = _Text(memory, np.arange(200))
    for stop in range(1, 101):
        assert text.keep(stop)
        memory.pin(b"%d" % stop)
    assert all(map(text.keep, range(101, 130)))
    assert len(memory.states) == 102


def test_what_was_found_for_a_row_holds_for_its_later_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a while; not for another text, root, or kind of model."""
    ids = np.arange(50)
    row = lower.RowToServe(b"root", ids, Border(0, b"root"), FixedChunker(16), False)
    view = lower.TieredView(HostMemory(1000, threading.RLock()), None, row, frozenset())
    assert view.holds_for(row)
    assert view.holds_for(replace(row, tokens=ids[:30]))
    assert not view.holds_for(replace(row, tokens=ids + 1))
    assert not view.holds_for(replace(row, tokens=np.arange(51)))
    assert not view.holds_for(replace(row, root=b"other"))
    assert not view.holds_for(replace(row, stateful=True))
    monkeypatch.setattr(view, "_until", 0.0)
    assert not view.holds_for(row)
