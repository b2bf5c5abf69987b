"""Seals of blobs: whoever does not have the key cannot have K/V used."""

import os
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from transformers import PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore
from tests.conftest import as_inputs
from tests.forged import Forged, change_all
from tests.internals.cache import Blob, Entry, FilesystemTier, SealedTier, Tier, read_tier_key
from tests.internals.cli import main
from tests.internals.disk import DiskTier
from tests.internals.engine import EngineSettings
from tests.parity.test_tiers import BASE, fill, generate, restart, serve
from tests.tier_contract import OTHER_MODEL, make_blob, make_entry

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
COUNT = 5  # chunks of `BASE`


pytestmark = [pytest.mark.daily, pytest.mark.usefixtures("loading_is_worth_it")]


# One tier


@pytest.fixture
def inner(tmp_path: Path) -> DiskTier:
    return DiskTier(tmp_path / "tier", 10**9)


@pytest.mark.parametrize("at", [0, 7, 1500, 2999, 3000, 3031])
def test_no_byte_can_be_changed(inner: DiskTier, tmp_path: Path, at: int) -> None:
    tier, entry = SealedTier(inner, KEY), make_entry(1)
    tier.write(entry, make_blob(entry))
    assert tier.read(entry.key) == b"".join(make_blob(entry))
    (path,) = (tmp_path / "tier").rglob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    assert tier.read(entry.key) is None
    assert inner.find([entry.key]) == {}
    assert (tier.stats()["forged"], tier.stats()["errors"]) == (1, 1)


@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 3000])
def test_what_has_no_seal_is_deleted(inner: DiskTier, size: int) -> None:
    tier, entry = SealedTier(inner, KEY), make_entry(1, nbytes=size)
    inner.write(entry, [bytes(size)])
    assert tier.read(entry.key) is None
    assert inner.find([entry.key]) == {}
    assert tier.stats()["forged"] == 1


@pytest.mark.parametrize("other", [make_entry(2), make_entry(2, model=OTHER_MODEL, root=b"other" * 4)])
def test_a_blob_is_sealed_for_its_own_key(inner: DiskTier, other: Entry) -> None:
    """Another chunk, of the same model or of another one."""
    tier, one = SealedTier(inner, KEY), make_entry(1)
    tier.write(one, make_blob(one))
    sealed = inner.read(one.key)
    assert sealed is not None
    inner.write(other, [sealed])
    assert tier.read(other.key) is None
    assert tier.stats()["forged"] == 1
    assert tier.read(one.key) is not None


@pytest.mark.parametrize("place", ["disk", "memory"])
@pytest.mark.parametrize("size", [0, 31, 32, 100, 3000, 3031])
def test_a_part_of_a_sealed_blob_is_refused(tmp_path: Path, place: str, size: int) -> None:
    """Whoever shortens blobs may shorten what a tier notes of their size, too."""
    url = f"memory://{uuid4().hex}/kv"
    inner: Tier = FilesystemTier(url, max_bytes=None) if place == "memory" else DiskTier(tmp_path / "tier", 10**9)
    tier, entry = SealedTier(inner, KEY), make_entry(1)
    tier.write(entry, make_blob(entry))
    whole = inner.read(entry.key)
    assert whole is not None
    cut = bytes(whole[:size])
    del whole
    inner.delete([entry.key])
    inner.write(replace(entry, nbytes=size), [cut])
    assert tier.read(entry.key) is None
    assert inner.read(entry.key) is None
    assert tier.stats()["forged"] == 1


def test_of_a_forged_blob_not_even_the_header_is_read(disk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fill("llama", disk, BASE, tier_key=KEY)
    read: list[int] = []

    def blob(data: memoryview) -> Blob:
        read.append(len(data))
        return Blob(data)

    monkeypatch.setattr("kvboost_hf.cache.tiers.below.Blob", blob)
    for key, blobs in ((OTHER_KEY, 0), (KEY, COUNT)):
        read.clear()
        model, store, cache = restart("llama", disk, tier_key=key)
        generate(model, as_inputs(BASE), cache)
        assert sum(size < 2**20 for size in read) == blobs  # a larger one measures the speed of the tier
        store.close()
        if key is OTHER_KEY:
            assert cache.report.reused_tokens == 0
            fill("llama", disk, BASE, tier_key=KEY)  # what was refused was deleted


def test_what_was_compared_with_its_seal_does_not_change(inner: DiskTier, tmp_path: Path) -> None:
    """A file that is mapped would, whoever maps it."""
    tier, entry = SealedTier(inner, KEY), make_entry(1)
    tier.write(entry, make_blob(entry))
    blob = tier.read(entry.key)
    (path,) = (tmp_path / "tier").rglob("*.safetensors")
    with path.open("r+b") as file:
        file.write(bytes(3000))
    assert blob == b"".join(make_blob(entry))


@pytest.mark.parametrize("key", [b"", b"k" * 31, "k" * 32, bytearray(32), None])
def test_keys_that_are_none(inner: DiskTier, key: Any) -> None:
    with pytest.raises(ValueError, match="`tier_key` must be 32 bytes or more, got "):
        SealedTier(inner, key)


# A store


@pytest.mark.parametrize("place", ["disk", "memory"])
def test_sealed_blobs_are_reused(disk: str, place: str) -> None:
    address = disk if place == "disk" else f"memory://{uuid4().hex}"
    fill("llama", address, BASE, tier_key=KEY)
    model, store, cache = restart("llama", address, tier_key=KEY)
    assert serve(model, cache, BASE).reused_tokens == 149
    (stats,) = (stats for name, stats in store.stats()["tiers"].items() if name != "ram")
    assert (stats["forged"], stats["errors"]) == (0, 0)
    store.close()


@pytest.mark.parametrize("now", [OTHER_KEY, None], ids=["another key", "no key"])
@pytest.mark.parametrize("before", [KEY, None], ids=["sealed", "not sealed"])
def test_without_the_same_key_nothing_is_used(disk: str, before: bytes | None, now: bytes | None) -> None:
    fill("llama", disk, BASE, tier_key=before)
    model, store, cache = restart("llama", disk, tier_key=now)
    alike = before is now
    assert serve(model, cache, BASE).reused_tokens == (149 if alike else 0)
    stats = store.stats()["tiers"]["disk"]
    assert stats["errors"] == (0 if alike else COUNT)
    assert stats.get("forged", 0) == (COUNT if now is OTHER_KEY else 0)
    store.close()


def test_sealed_blobs_outlive_their_index(tmp_path: Path, disk: str) -> None:
    fill("llama", disk, BASE, tier_key=KEY)
    for path in (tmp_path / "tier").glob("index*"):
        path.unlink()
    model, store, cache = restart("llama", disk, tier_key=KEY)
    assert serve(model, cache, BASE).reused_tokens == 149
    store.close()


def wrong_kv(data: bytes) -> bytes:
    """As it was, but for its numbers; with the checksums that belong to them, and a seal that does not."""
    blob = Forged(data)
    size = max(spec["data_offsets"][1] for spec in blob.header.values())
    blob.body[:size] = torch.full((size // 4,), 3.0).numpy().tobytes()
    blob.sum_up()
    return blob.joined()


@pytest.mark.parametrize("key", [KEY, None], ids=["sealed", "not sealed"])
def test_wrong_kv_with_right_checksums(tmp_path: Path, disk: str, key: bytes | None) -> None:
    """Without a key it is used, which shows that nothing else is wrong with it."""
    fill("llama", disk, BASE, tier_key=key)
    change_all(tmp_path / "tier", wrong_kv)
    model, store, cache = restart("llama", disk, tier_key=key)
    if key is None:
        plain, found = generate(model, as_inputs(BASE)), generate(model, as_inputs(BASE), cache)
        assert cache.report.reused_tokens == 149
        assert not torch.allclose(plain.logits[0], found.logits[0], atol=1e-2)
    else:
        assert serve(model, cache, BASE).reused_tokens == 0
        assert store.stats()["tiers"]["disk"]["forged"] == COUNT
        cache.reset()
        store.close()
        model, store, cache = restart("llama", disk, tier_key=key)
        assert serve(model, cache, BASE).reused_tokens == 149
    store.close()


def exchanged(column: str) -> Callable[[sqlite3.Connection], None]:
    """Every row has what another one had."""

    def exchange(db: sqlite3.Connection) -> None:
        rows = db.execute(f"SELECT number, {column} FROM blobs ORDER BY number").fetchall()
        for (number, _), (_, value) in zip(rows, [*rows[1:], rows[0]], strict=True):
            db.execute(f"UPDATE blobs SET {column} = ? WHERE number = ?", (value, number))

    return exchange


def of_another_history(db: sqlite3.Connection) -> None:
    """The second chunk as what begins a text, behind the root."""
    root, head = db.execute("SELECT root, head FROM blobs WHERE start = 0").fetchone()
    db.execute("UPDATE blobs SET parent = ?, head = ? WHERE start = 32", (root, head))


def other_tokens(db: sqlite3.Connection) -> None:
    """The last chunk as one of the first tokens."""
    ((wanted,),) = db.execute("SELECT tokens FROM blobs WHERE start = 0")
    db.execute(
        "UPDATE blobs SET tokens = ?, head = (SELECT head FROM blobs WHERE start = 0) WHERE start > 0", (wanted,)
    )


@pytest.mark.parametrize(
    "change", [exchanged("tokens"), exchanged("parent"), exchanged("start"), of_another_history, other_tokens]
)
def test_a_forged_index_has_no_wrong_kv_used(
    tmp_path: Path, disk: str, change: Callable[[sqlite3.Connection], None]
) -> None:
    """Blobs and seals are as they were; what they are found by is not."""
    fill("llama", disk, BASE, tier_key=KEY)
    db = sqlite3.connect(tmp_path / "tier" / "index.sqlite3")
    change(db)
    db.commit()
    db.close()
    model, store, cache = restart("llama", disk, tier_key=KEY)
    assert serve(model, cache, BASE).reused_tokens < 149
    store.close()


def test_a_tier_that_was_opened_elsewhere_is_sealed_too(tmp_path: Path) -> None:
    inner = DiskTier(tmp_path / "tier", 10**9)
    model, store, cache = open_on(inner)
    serve(model, cache, BASE)
    cache.reset()
    store.close()
    data = next((tmp_path / "tier").rglob("*.safetensors")).read_bytes()
    assert len(data) == Forged(data[:-32]).size + 32
    _, store, _ = open_on(inner)  # which was not closed with the store
    assert store.stats()["tiers"]["disk"]["chunks"] == COUNT
    store.close()
    inner.close()


def open_on(tier: DiskTier) -> tuple[PreTrainedModel, ChunkStore, ChunkReuseCache]:
    model, unused, _ = restart("llama", f"memory://{uuid4().hex}")
    unused.close()
    store = ChunkStore(model, chunk_size=32, tiers=[tier], tier_key=KEY)
    return model, store, ChunkReuseCache(model, store)


def test_settings_do_not_show_the_key() -> None:
    assert repr(KEY) not in repr(EngineSettings(tier_key=KEY))


# Files of keys, and the command line


def write_key(path: Path, key: bytes = KEY, mode: int = 0o600) -> Path:
    path.write_bytes(key)
    path.chmod(mode)
    return path


def test_a_key_is_read_byte_for_byte(tmp_path: Path) -> None:
    for key in (b"\n" * 32, bytes(range(256)) * 16):
        assert read_tier_key(write_key(tmp_path / "key", key)) == key


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o610, 0o777])
def test_a_key_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ValueError, match=rf"open to its owner only, got .* with mode {mode:04o}. Run `chmod 600`"):
        read_tier_key(write_key(tmp_path / "key", mode=mode))


@pytest.mark.parametrize("size", [0, 31, 4097])
def test_a_key_of_another_size_is_refused(tmp_path: Path, size: int) -> None:
    with pytest.raises(ValueError, match=f"must have 32 to 4096 bytes, got {size} in "):
        read_tier_key(write_key(tmp_path / "key", bytes(size)))


def test_a_key_that_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ValueError, match=r"must be in a file, got .*pipe"):
        read_tier_key(tmp_path / "pipe")
    with pytest.raises(FileNotFoundError):
        read_tier_key(tmp_path / "missing")


def test_the_command_line_seals(tmp_path: Path, disk: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "a.txt"
    text.write_text("Anna lives in Oslo. The lamp is red. " * 20, encoding="utf-8")
    key = write_key(tmp_path / "key")
    warm = ["warm", str(text), "--tiers", disk, "--tier-key-file", str(key), "--dtype", "float32"]
    assert main(warm) == 0
    for data in (path.read_bytes() for path in (tmp_path / "tier").rglob("*.safetensors")):
        assert len(data) == Forged(data[:-32]).size + 32
    key.chmod(0o644)
    capsys.readouterr()
    for command in (warm, ["serve", "--disk-cache-dir", str(tmp_path / "tier"), "--tier-key-file", str(key)]):
        assert main(command) == 2
        assert "open to its owner only" in capsys.readouterr().err
