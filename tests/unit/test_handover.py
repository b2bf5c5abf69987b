"""What host memory hands over when a store is closed: the hottest first, nothing removed, whole or not at all."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvboost_hf import ChunkStore
from tests.conftest import make_model
from tests.internals.cache import Entry, StoredChunk, records_of
from tests.internals.disk import DiskTier
from tests.property.test_store import BYTES_PER_TOKEN
from tests.unit.test_tiered_store import CHUNK, found_of, open_store, put_all

TEXTS = [np.arange(n * 1000, n * 1000 + 3 * CHUNK) for n in range(8)]
ONE = 3 * CHUNK  # tokens of a text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "tier"


def opened(at: Path, size: str = "1GB", **settings: object) -> ChunkStore:
    return open_store(at, tiers=[f"handover:{at}:{size}"], **settings)


def blobs(at: Path) -> int:
    return sum(path.is_file() for path in (at / "blobs").rglob("*"))


def test_it_is_written_at_close_and_found_by_the_next_one(folder: Path) -> None:
    store = opened(folder)
    for text in TEXTS:
        put_all(store, text, salt=b"one")
    store.flush()
    assert blobs(folder) == 0
    assert [found_of(store, text, b"one") for text in TEXTS] == [ONE] * 8
    store.close()
    assert blobs(folder) == 24
    with opened(folder) as later:
        assert [found_of(later, text, b"one") for text in TEXTS] == [ONE] * 8
        assert found_of(later, TEXTS[0], b"other") == 0
        later.flush()
        assert len(later) == 24  # in host memory, as it was
    assert blobs(folder) == 24  # it was there


def test_other_weights_find_nothing(folder: Path) -> None:
    with opened(folder) as store:
        put_all(store, TEXTS[0])
    other = make_model("llama", seed=5)
    with ChunkStore(other, chunk_size=CHUNK, tiers=[f"handover:{folder}:1GB"]) as store:
        assert found_of(store, TEXTS[0]) == 0


@pytest.mark.parametrize("small", ["budget", "disk"])
def test_what_is_asked_for_most_often_comes_first(folder: Path, small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder has room for four of eight texts; two of these are used again, and one is pinned."""
    room = int(4 * 3 * (CHUNK * (BYTES_PER_TOKEN + 8) + 4096) / 0.9) + 1
    size = f"{room}B" if small == "budget" else "1GB"
    if small == "disk":
        monkeypatch.setattr("kvboost_hf.cache.tiers.disk.disk_usage", lambda _: SimpleNamespace(free=room))
    store = opened(folder, size)
    for text in TEXTS:
        put_all(store, text)
    put_all(store, TEXTS[7], pinned=True)
    for _ in range(5):
        for text in (TEXTS[2], TEXTS[5]):
            held = [each for each in store.held() if isinstance(each, StoredChunk)]
            used = [each for each in held if each.tokens[0] // 1000 == text[0] // 1000]
            store.record_use(used, missed=False)
    store.close()
    with opened(folder, size) as later:
        found = [found_of(later, text) for text in TEXTS]
    assert [found[n] for n in (2, 5, 7)] == [ONE] * 3
    assert found.count(0) == 4
    assert set(found) == {0, ONE}  # never an end without its beginning


def test_no_time_hands_over_nothing_and_says_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = opened(folder)
    put_all(store, TEXTS[0])
    store.close(timeout_s=0)
    assert blobs(folder) == 0
    assert "no time was left" in caplog.text


@pytest.mark.parametrize("hears", [True, False])
def test_what_others_have_removed_is_not_handed_over(folder: Path, hears: bool) -> None:
    """Nor what they remove meanwhile; unless nobody hears of it, so that this could fail."""
    closing, other = opened(folder), opened(folder)
    for store in (closing, other):
        for text in TEXTS:
            put_all(store, text)
    doomed = {each.key for each in other.held() if each.tokens[0] // 1000 == 3}
    later = {each.key for each in other.held() if each.tokens[0] // 1000 == 4}
    root = other.root(b"")
    assert root is not None
    other.remove([root], lambda records: doomed)
    calls = 0

    def hear() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:  # the records are listed, and none is written
            other.remove([root], lambda records: later)
        if hears:
            records_of(closing).hear()

    closing.close(hear=hear)
    other.close(timeout_s=0)
    with opened(folder) as third:
        found = [found_of(third, text) for text in TEXTS]
    assert [found[3], found[4]] == ([0, 0] if hears else [ONE, ONE])
    assert found.count(ONE) == (6 if hears else 8)


class Away:
    """Takes nothing while it is away."""

    def __init__(self, at: Path) -> None:
        self.is_away = True
        self.inner = DiskTier(at, 10**9)
        self.name, self.location = self.inner.name, self.inner.location
        for name in ("find", "find_alike", "entries", "read", "touch", "delete", "clear", "stats", "hits", "close"):
            setattr(self, name, getattr(self.inner, name))

    def write(self, entry: Entry, blob: Sequence[bytes | memoryview]) -> bool:
        return False if self.is_away else self.inner.write(entry, blob)

    find: Callable[..., object]
    find_alike: Callable[..., object]
    entries: Callable[..., object]
    read: Callable[..., object]
    touch: Callable[..., object]
    delete: Callable[..., object]
    clear: Callable[..., object]
    stats: Callable[..., object]
    hits: Callable[..., object]
    close: Callable[..., object]


@pytest.mark.parametrize("comes_back", [True, False])
def test_what_a_tier_did_not_take_when_it_was_stored_it_takes_at_close(folder: Path, comes_back: bool) -> None:
    tier = Away(folder)
    store = open_store(folder, tiers=[tier])
    for text in TEXTS:
        put_all(store, text)
    store.flush()
    assert blobs(folder) == 0
    tier.is_away = not comes_back
    store.close()
    tier.inner.close()
    with open_store(folder) as later:
        assert [found_of(later, text) for text in TEXTS] == [ONE * comes_back] * 8


def test_too_much_that_waited_is_written_at_close(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvboost_hf.cache.tiers.below._MAX_WAITING", 1)
    store = open_store(folder)
    for text in TEXTS:
        put_all(store, text)
    assert records_of(store).lower.tiers.refused
    store.close()
    with open_store(folder) as later:
        assert [found_of(later, text) for text in TEXTS] == [ONE] * 8


KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from tests.internals.disk import DiskTier
from tests.unit.test_handover import TEXTS, opened, put_all

store = opened(Path(sys.argv[1]))
for text in TEXTS:
    put_all(store, text)
left, write = int(sys.argv[2]), DiskTier._write
def counted(*args):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(*args)
DiskTier._write = counted
store.close()
"""


@pytest.mark.parametrize("writes", [0, 7, 100])
def test_a_kill_in_the_middle_leaves_nothing_wrong(folder: Path, writes: int) -> None:
    command = [sys.executable, "-c", KILLED, str(folder), str(writes)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=120, check=False)
    assert done.returncode == (-signal.SIGKILL if writes < 24 else 0)
    with opened(folder) as later:
        found = [found_of(later, text) for text in TEXTS]  # which compares all K/V
        assert sum(found) == min(writes, 24) * CHUNK
