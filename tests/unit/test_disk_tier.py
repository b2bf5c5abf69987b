"""The disk tier beyond the contract of all tiers: its files, damage, full disks and other processes."""

import errno
import gc
import json
import logging
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.blobs import is_right, key_of, make_blob
from tests.internals.cache import Entry, Failures
from tests.internals.disk import DiskTier, charge, disk, disk_files, disk_index

pytestmark = pytest.mark.daily

Open = Callable[..., DiskTier]
fork = multiprocessing.get_context("fork")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "tier"


@pytest.fixture
def opened(folder: Path) -> Iterator[Open]:
    """Opens the folder, and closes it in the end."""
    tiers: list[DiskTier] = []

    def open_tier(max_bytes: int = 2**20) -> DiskTier:
        tiers.append(DiskTier(folder, max_bytes))
        return tiers[-1]

    yield open_tier
    for tier in tiers:
        tier.close()


def put(tier: DiskTier, n: int, size: int = 1000, **told: object) -> bool:
    return tier.write(*make_blob(n, size, **told))  # type: ignore[arg-type]


def room_for(count: int) -> int:
    """A budget for so many blobs of the usual size, and no more."""
    entry, _ = make_blob(10, parent=key_of(10), start=10)
    return count * (charge(entry, entry.nbytes) + 50) + 200


def kept(tier: DiskTier, *numbers: int) -> list[int]:
    """Which of these are found, and read right."""
    found = tier.find([key_of(n) for n in numbers])
    for key, entry in found.items():
        blob = tier.read(key)
        assert blob is not None
        assert len(blob) == entry.nbytes
        assert is_right(key, blob)
    return [n for n in numbers if key_of(n) in found]


def files_in(folder: Path) -> list[Path]:
    return [path for path in (folder / "blobs").rglob("*") if path.is_file()]


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in files_in(folder))


def the_file(folder: Path, n: int) -> Path:
    name = key_of(n).hex()
    return folder / "blobs" / name[:2] / f"{name}.safetensors"


def same(a: Entry, b: Entry) -> bool:
    one, other = asdict(a), asdict(b)
    return one.pop("tokens").tolist() == other.pop("tokens").tolist() and one == other


# What is kept


def test_one_that_nobody_holds_leaves_no_file_open(folder: Path) -> None:
    def open_files() -> list[str]:
        found = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
        return [path for path in found if path.startswith(str(folder))]

    tier = DiskTier(folder, 2**20)
    assert put(tier, 1)
    reference = weakref.ref(tier)
    assert open_files()
    del tier
    gc.collect()
    assert reference() is None
    assert not open_files()


def test_a_blob_stays_readable_whatever_happens(opened: Open, folder: Path) -> None:
    tier = opened()
    put(tier, 1)
    blob = tier.read(key_of(1))
    assert blob is not None
    tier.delete([key_of(1)])
    tier.close()
    shutil.rmtree(folder)
    assert is_right(key_of(1), blob)
    torch.frombuffer(blob, dtype=torch.uint8).zero_()  # its own copy, and no warning that it cannot be written to


def test_a_change_of_what_was_read_stays_private(opened: Open) -> None:
    tier = opened()
    put(tier, 1)
    blob = tier.read(key_of(1))
    assert blob is not None
    blob[:] = bytes(len(blob))
    assert kept(tier, 1) == [1]


def test_many_blobs_are_held_at_once_with_few_descriptors(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_files, "_MAX_MAPPED", 4)
    tier = opened()
    for n in range(12):
        put(tier, n, 10)
    before = len(os.listdir("/proc/self/fd"))
    blobs = [tier.read(key_of(n)) for n in range(12)]
    assert len(os.listdir("/proc/self/fd")) <= before + 4
    assert all(blob is not None and is_right(key_of(n), blob) for n, blob in enumerate(blobs))


# The budget


def test_what_a_chunk_continues_is_not_given_up_for_it(opened: Open) -> None:
    tier = opened(room_for(4))
    stored = [put(tier, n, parent=key_of(n - 1), start=16 * n) for n in range(5)]
    assert stored == [True] * 4 + [False]
    assert kept(tier, *range(5)) == [0, 1, 2, 3]


def test_what_is_written_within_ten_minutes_of_the_use_of_what_it_continues_is_used_with_it() -> None:
    db, minutes = sqlite3.connect(":memory:"), 60 * 10**9
    for statement in disk_index.SCHEMA:
        db.execute(statement)
    for n, used in enumerate([50, 50 + 10 * minutes, 50 + 20 * minutes + 1, 0]):
        disk_index.add(db, make_blob(n, parent=key_of(n - 1))[0], 1000, used)
    found = [used for (used,) in db.execute("SELECT last_used FROM blobs ORDER BY rowid")]
    assert found == [50, 50, 50 + 20 * minutes + 1, 0]


def test_each_keeps_its_own_budget(opened: Open, folder: Path) -> None:
    large, small = opened(room_for(16)), None
    for n in range(16):
        put(large, n)
    small = opened(room_for(4))
    assert bytes_in(folder) <= room_for(4)
    assert kept(large, *range(16)) == [12, 13, 14, 15]
    for n in range(16, 24):
        put(large, n)
    assert len(files_in(folder)) == 12
    put(small, 24)
    assert bytes_in(folder) <= room_for(4)
    assert kept(small, *range(25)) == [21, 22, 23, 24]
    assert (large.stats()["evictions"], small.stats()["evictions"]) == (0, 21)


@pytest.mark.parametrize("max_bytes", [0, -1, True, 1.5, "1 GB"])
def test_a_budget_that_is_none(folder: Path, max_bytes: int) -> None:
    with pytest.raises(ValueError, match="`max_bytes` must be a positive int, got"):
        DiskTier(folder, max_bytes)


# Files


def test_only_their_owner_may_read(opened: Open, folder: Path) -> None:
    umask = os.umask(0o377)
    try:
        assert put(opened(), 1)
    finally:
        os.umask(umask)
    for path in [folder, *folder.rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_a_folder_of_somebody_else_keeps_its_mode(opened: Open, folder: Path) -> None:
    folder.mkdir(0o750)
    put(opened(), 1)
    assert folder.stat().st_mode & 0o777 == 0o750
    assert (folder / "blobs").stat().st_mode & 0o777 == 0o700


def test_a_path_that_can_be_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=r"`path` must be a folder.*Pass another one"):
            DiskTier(path, 1000)


def test_flipped_bytes_are_returned_as_they_are(opened: Open, folder: Path) -> None:
    tier = opened()
    put(tier, 1)
    contents = bytearray(the_file(folder, 1).read_bytes())
    contents[-1] ^= 1
    the_file(folder, 1).write_bytes(contents)
    blob = tier.read(key_of(1))
    assert blob == contents
    with pytest.raises(ValueError, match="does not have its checksum"):
        is_right(key_of(1), blob)


@pytest.mark.parametrize("harm", [Path.unlink, lambda path: os.truncate(path, 100), lambda path: os.truncate(path, 0)])
def test_a_lost_or_short_file_is_a_miss_and_forgotten(
    opened: Open, folder: Path, harm: Callable[[Path], None]
) -> None:
    tier = opened()
    put(tier, 1)
    put(tier, 2)
    harm(the_file(folder, 1))
    assert tier.read(key_of(1)) is None
    assert tier.find([key_of(1)]) == {}
    assert len(files_in(folder)) == tier.stats()["chunks"] == 1
    assert put(tier, 1)
    assert kept(tier, 1, 2) == [1, 2]


@pytest.mark.parametrize("size", [1000, 2000])
def test_one_that_is_written_again_while_it_is_read_stays(
    opened: Open, folder: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Its file was gone for a moment: a miss, and no reason to give up the blob that took its place."""
    tier, other = opened(), opened()
    put(tier, 1)
    read = disk_files.BlobFiles.read

    def while_another_writes(files: disk_files.BlobFiles, key: bytes, nbytes: int) -> memoryview | None:
        other.delete([key])
        found = read(files, key, nbytes)
        assert put(other, 1, size)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(disk_files.BlobFiles, "read", while_another_writes)
        assert tier.read(key_of(1)) is None
    assert kept(tier, 1) == [1]
    assert len(files_in(folder)) == tier.stats()["chunks"] == 1


def test_what_cannot_be_read_is_no_miss(folder: Path) -> None:
    """It is a failure, which is counted; a link in place of a file or a folder is a miss."""
    files, name = disk_files.BlobFiles(folder), key_of(1).hex()
    place = folder / name[:2] / f"{name}.safetensors"
    assert files.read(key_of(1), 5) is None
    place.mkdir(parents=True)
    with pytest.raises(IsADirectoryError):
        files.read(key_of(1), 5)
    place.rmdir()
    place.symlink_to(folder)
    assert files.read(key_of(1), 5) is None


# What others left behind


def test_leftovers_are_adopted_or_removed_at_open(opened: Open, folder: Path) -> None:
    tier = opened()
    for n in range(5):
        put(tier, n)
    whole = the_file(folder, 0).read_bytes()
    tier.delete([key_of(0)])
    tier.close()
    the_file(folder, 0).write_bytes(whole)  # without a row
    for n, contents in ((5, whole), (6, b"no blob")):  # of another key, and of none
        the_file(folder, n).parent.mkdir(exist_ok=True)
        the_file(folder, n).write_bytes(contents)
    the_file(folder, 2).with_name(f"{key_of(2).hex()}.{'abcd' * 8}.tmp").write_bytes(b"unfinished")
    notes = the_file(folder, 2).with_name("notes.txt")
    notes.write_text("somebody's own")
    the_file(folder, 1).unlink()
    again = opened()
    assert kept(again, *range(5)) == [0, 2, 3, 4]
    assert again.stats()["chunks"] == 4
    assert len(files_in(folder)) == 5
    assert notes.exists()
    assert again.stats()["errors"] == 0


def die(folder: Path, at: str) -> None:
    """Write a blob in a process that is killed on the way."""

    def work() -> None:
        def killed(*args: object, **kwargs: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(disk_files.os, at, killed)  # type: ignore[attr-defined]
        put(DiskTier(folder, room_for(4)), 9)

    child = fork.Process(target=work)
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("at", ["fchmod", "replace"])
def test_a_killed_writer_loses_what_it_was_writing(opened: Open, folder: Path, at: str) -> None:
    tier = opened(room_for(4))
    for n in range(3):
        put(tier, n)
    die(folder, at)
    assert len(files_in(folder)) == 4
    opened(room_for(4)).close()
    assert len(files_in(folder)) == 3
    assert kept(tier, *range(3), 9) == [0, 1, 2]


def test_room_that_a_killed_writer_held_is_used(opened: Open, folder: Path) -> None:
    tier = opened(room_for(4))
    for n in range(3):
        put(tier, n)
    die(folder, "replace")
    assert put(tier, 3)
    assert kept(tier, *range(4)) == [0, 1, 2, 3]
    assert tier.stats()["evictions"] == 0


def test_what_a_killed_writer_had_in_place_is_kept(opened: Open, folder: Path) -> None:
    tier = opened()
    put(tier, 1)
    tier.close()
    with sqlite3.connect(folder / "index.sqlite3") as db:
        db.execute(f"UPDATE blobs SET token = '{'abcd' * 8}', host = ?, pid = 2147483647, since = ?", writer(0))
    db.close()
    tier = opened()
    assert kept(tier, 1) == [1]
    with sqlite3.connect(folder / "index.sqlite3") as db:
        db.execute(f"UPDATE blobs SET token = '{'abcd' * 8}', host = ?, pid = 2147483647, since = ?", writer(0))
    db.close()
    assert kept(tier, 1) == []
    assert put(tier, 1)
    assert kept(tier, 1) == [1]


def writer(age_s: float) -> tuple[str, int]:
    return os.uname().nodename, time.time_ns() - int(age_s * 10**9)


def test_who_is_dead() -> None:
    host, pid, now = disk_files.signature()
    assert not disk_files.is_dead("t", host, os.getppid(), now)
    assert not disk_files.is_dead("t", host, 1, now)
    assert not disk_files.is_dead("t", "another", pid, now)
    assert disk_files.is_dead("t", "another", pid, now - 200 * 10**9)
    assert disk_files.is_dead("t", host, os.getppid(), now - 200 * 10**9)
    assert disk_files.is_dead("t", host, os.getppid(), now + 200 * 10**9)
    assert disk_files.is_dead("t", host, 2**31 - 1, now)
    assert disk_files.is_dead("t", host, pid, now)  # had the same number as this process
    disk_files.in_flight.add("t")
    try:
        assert not disk_files.is_dead("t", host, pid, now)
    finally:
        disk_files.in_flight.remove("t")


def test_a_writer_that_was_given_up_does_not_come_back(
    opened: Open, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier, other = opened(room_for(4)), opened(room_for(4))
    replace = os.replace

    def slow(*paths: str, **folders: int) -> None:
        other.delete([key_of(1)])
        replace(*paths, **folders)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "replace", slow)
    assert not put(tier, 1)
    assert files_in(folder) == []
    assert (tier.stats()["bytes"], tier.stats()["errors"]) == (0, 0)


def test_two_write_the_same(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, other = opened(), opened()
    replace, told = os.replace, []

    def meanwhile(*paths: str, **folders: int) -> None:
        told.append(put(other, 1))
        replace(*paths, **folders)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "replace", meanwhile)
    assert put(tier, 1)
    assert told == [False]
    assert kept(other, 1) == [1]


# The index


@pytest.mark.parametrize("lost", ["index.sqlite3", "index.sqlite3*"])
def test_a_lost_index_is_made_anew(opened: Open, folder: Path, lost: str) -> None:
    tier = opened()
    for n in range(3):
        put(tier, n, head=b"alike")
    before = list(tier.entries())
    for path in folder.glob(lost):
        path.unlink()
    assert kept(tier, *range(3)) == [0, 1, 2]
    assert all(same(a, b) for a, b in zip(before, tier.entries(), strict=True))
    assert [entry.key for entry in tier.find_alike([b"alike"])] == [key_of(2), key_of(1), key_of(0)]
    assert put(tier, 3)
    assert kept(opened(), *range(4)) == [0, 1, 2, 3]


def test_others_notice_that_the_index_was_lost(opened: Open, folder: Path) -> None:
    tier, other = opened(), opened()
    for n in range(3):
        put(tier, n)
    (folder / "index.sqlite3").unlink()
    assert put(tier, 3)
    assert kept(other, *range(4)) == [0, 1, 2, 3]
    assert put(other, 4)
    assert kept(tier, *range(5)) == [0, 1, 2, 3, 4]
    assert tier.stats()["errors"] == other.stats()["errors"] == 0


def damage(folder: Path) -> None:
    path = folder / "index.sqlite3"
    with open(path, "r+b") as file:
        for at in range(0, path.stat().st_size, 512):
            file.seek(at)
            file.write(b"\xa5" * 400)


def test_a_damaged_index_is_moved_aside_at_open(opened: Open, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = opened()
    for n in range(3):
        put(tier, n)
    tier.close()
    damage(folder)
    again = opened()
    assert kept(again, *range(3)) == [0, 1, 2]
    assert (folder / "index.damaged").exists()
    assert "is made anew from the blobs" in caplog.text


def test_a_damaged_index_is_moved_aside_in_mid_use(opened: Open, folder: Path) -> None:
    tier, other = opened(), opened()
    for n in range(40):
        put(tier, n, 10)
    with sqlite3.connect(folder / "index.sqlite3") as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    damage(folder)
    third = opened()  # finds the damage
    assert kept(third, *range(40)) == list(range(40))
    for tier_again in (tier, other):
        assert kept(tier_again, *range(40)) == list(range(40))
        assert put(tier_again, 50 + id(tier_again))
    assert kept(other, 50 + id(tier)) == [50 + id(tier)]
    assert third.stats()["chunks"] == 42


@pytest.mark.parametrize(
    "change",
    [
        "kind = 'none'",
        "start = -1",
        "nbytes = -1",
        "number = -1",
        *(f"{column} = {2**62}" for column in ("start", "nbytes", "number")),
        "model = 'text'",
        "tokens = x'00'",
    ],
)
def test_a_row_that_cannot_be_read_is_damage(opened: Open, folder: Path, change: str) -> None:
    tier = opened()
    put(tier, 1)
    with sqlite3.connect(folder / "index.sqlite3") as db:
        db.execute(f"UPDATE blobs SET {change}")
    db.close()
    assert tier.find([key_of(1)]) == {}
    assert tier.stats()["errors"] == 1
    assert kept(tier, 1) == [1]


@pytest.mark.parametrize("version", [1, 0])
def test_an_index_of_another_version_is_made_anew(opened: Open, folder: Path, version: int) -> None:
    tier = opened()
    put(tier, 1)
    tier.close()
    with sqlite3.connect(folder / "index.sqlite3") as db:
        db.execute("ALTER TABLE blobs RENAME COLUMN head TO tail")
        db.execute(f"PRAGMA user_version={version}")
    db.close()
    assert kept(opened(), 1) == [1]


@pytest.mark.parametrize("later", [0, 1])
def test_an_index_of_another_version_is_not_read_where_it_cannot_be_made_anew(
    opened: Open, folder: Path, later: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its tables are the same."""
    tier = opened()
    put(tier, 1)
    tier.close()
    with sqlite3.connect(folder / "index.sqlite3") as db:
        db.execute(f"PRAGMA user_version={disk_index.VERSION + later}")
    db.close()
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    assert kept(opened(), 1) == ([] if later else [1])


def test_a_new_index_keeps_the_budget(opened: Open, folder: Path) -> None:
    tier = opened(room_for(16))
    for n in range(16):
        put(tier, n)
        os.utime(the_file(folder, n), ns=(n, n * 10**9))
    tier.close()
    (folder / "index.sqlite3").unlink()
    assert kept(opened(room_for(4)), *range(16)) == [12, 13, 14, 15]
    assert bytes_in(folder) <= room_for(4)


# Failures


def test_failures_of_one_kind_are_logged_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = Failures(logging.getLogger("kvboost_hf"), "A tier", (OSError,))
    for error in (OSError(errno.EIO, "1"), OSError(errno.EIO, "2"), OSError(errno.ENOSPC, "3")):
        with failures.caught("read"):
            raise error
    assert [message.rpartition(": ")[2] for message in caplog.messages] == ["1.", "3."]
    monkeypatch.setattr("kvboost_hf.cache.tiers.base._SILENCE_S", 0.0)
    failures.note("read", OSError(errno.EIO, "4"))
    assert (failures.count, len(caplog.messages)) == (4, 3)


def test_a_full_disk(
    opened: Open, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Full of what others write: of three blobs that find no room, the first one alone has another given up for it."""
    tier = opened()
    for n in (0, 1):
        put(tier, n, 300_000)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("replace", "mkdir", "open"):
        with monkeypatch.context() as patch:
            patch.setattr(disk_files.os, name, full)  # type: ignore[attr-defined]
            assert not put(tier, 2)
    assert kept(tier, 0, 1, 2) == [1]
    assert len(files_in(folder)) == tier.stats()["chunks"] == 1
    assert tier.stats()["errors"] >= 2
    assert caplog.text.count("No space left on device") == 1  # once a minute
    assert put(tier, 2)
    assert kept(tier, 1, 2) == [1, 2]


def test_a_full_disk_gives_up_no_more_than_a_blob_takes(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes as much is enough, and what a blob goes on from stays."""
    monkeypatch.setattr("kvboost_hf.cache.tiers.disk._ROOM_BYTES", 0)
    tier, replace, tried = opened(), os.replace, []
    for n in range(4):
        put(tier, n)

    def full_at_first(*names: str, **folders: Any) -> None:
        tried.append(names)
        if len(tried) % 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(*names, **folders)

    monkeypatch.setattr(disk_files.os, "replace", full_at_first)  # type: ignore[attr-defined]
    assert put(tier, 4)
    assert not put(tier, 5, parent=key_of(1))
    assert kept(tier, *range(6)) == [1, 2, 3, 4]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_really_full_disk(tmp_path: Path) -> None:
    place = tmp_path / "mounted"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        tier = DiskTier(place / "tier", 2**30)
        written = [n for n in range(40) if put(tier, n, 50_000)]
        assert written == list(range(40))
        assert tier.stats()["errors"] == 0
        left = kept(tier, *range(40))
        assert left == written[-len(left) :]
        assert 5 < len(left) < 30
        tier.delete([key_of(n) for n in written])
        tier.close()
        again = DiskTier(place / "tier", 2**30)
        assert put(again, 1)
        assert kept(again, *range(40)) == [1]
        again.close()
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        reader = DiskTier(place / "tier", 2**30)
        assert kept(reader, 1) == [1]
        assert not put(reader, 2)
        assert reader.stats()["errors"] == 0
        reader.close()
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_small_tier_takes_little_beside_its_budget(opened: Open, folder: Path) -> None:
    """The log of SQLite's, too: it filled small file systems."""
    tier = opened(2**20)
    for number in range(300):
        assert tier.write(*make_blob(number, 20_000))
        tier.touch([key_of(number)])
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 1.3 * 2**20


def test_a_limit_on_the_size_of_files(opened: Open, folder: Path) -> None:
    opened()

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
        tier = DiskTier(folder, 2**20)
        assert not put(tier, 1, 500_000)
        assert tier.stats()["errors"] == 1
        assert put(tier, 2)

    child = fork.Process(target=work)
    child.start()
    child.join()
    assert child.exitcode == 0
    assert kept(opened(), 1, 2) == [2]
    assert len(files_in(folder)) == 1


def test_a_folder_that_cannot_be_written_to_is_read(
    opened: Open, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = opened()
    put(tier, 1)
    tier.close()
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    reader = opened()
    assert "it is only read" in caplog.text
    before = {**reader.stats(), "free_bytes": 0}  # which others take, too
    assert kept(reader, 1) == [1]
    assert not put(reader, 2)
    reader.touch([key_of(1)])
    reader.delete([key_of(1)])
    reader.clear(b"model")
    the_file(folder, 1).unlink()
    assert reader.read(key_of(1)) is None
    assert {**reader.stats(), "free_bytes": 0} == before
    with pytest.raises(ValueError, match=r"`path` must be a folder that can be written to.*Pass another one"):
        DiskTier(folder / "other", 1000)


@pytest.mark.parametrize("part", ["", "index.sqlite3", "blobs"])
def test_what_cannot_be_read_is_refused(
    opened: Open, folder: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = opened()
    put(tier, 1)
    tier.close()
    hidden = str(folder / part)
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != hidden)
    with pytest.raises(ValueError, match=rf"'{hidden}' cannot be read\. Pass another one, or change who may read it"):
        opened()


def test_no_name_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"Pass '\.' for the current folder"):
        DiskTier("", 1000)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_modes_that_forbid_to_write(opened: Open, folder: Path) -> None:
    tier = opened()
    put(tier, 1)
    tier.close()
    folder.chmod(0o500)
    try:
        reader = opened()
        assert kept(reader, 1) == [1]
        assert not put(reader, 2)
        with pytest.raises(ValueError, match="`path` must be a folder"):
            DiskTier(folder / "below", 1000)
    finally:
        folder.chmod(0o700)


def test_a_folder_that_vanishes_and_comes_back(opened: Open, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = opened()
    put(tier, 1)
    shutil.move(folder, folder.with_name("elsewhere"))
    assert not put(tier, 2)
    assert tier.read(key_of(1)) is None
    assert tier.find([key_of(1)]) == tier.hits() == {}  # type: ignore[comparison-overlap]
    assert tier.find_alike([b"head"]) == list(tier.entries()) == []
    tier.touch([key_of(1)])
    tier.delete([key_of(1)])
    tier.clear(b"model")
    assert int(tier.stats()["errors"]) >= 9
    assert not folder.exists()
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1
    shutil.move(folder.with_name("elsewhere"), folder)
    assert kept(tier, 1) == [1]
    assert put(tier, 2)


def test_a_file_that_cannot_be_read(opened: Open, folder: Path) -> None:
    tier = opened()
    put(tier, 1)
    the_file(folder, 1).unlink()
    the_file(folder, 1).mkdir()
    assert tier.read(key_of(1)) is None
    assert tier.stats()["errors"] == 1


def test_after_close_everything_looks_like_a_miss(opened: Open) -> None:
    tier = opened()
    put(tier, 1)
    tier.close()
    tier.close()
    assert not put(tier, 2)
    assert tier.read(key_of(1)) is None
    assert tier.find([key_of(1)]) == {}
    assert list(tier.entries()) == []


# Several at once


def test_a_forked_process_has_a_connection_of_its_own(opened: Open) -> None:
    tier = opened()
    put(tier, 1)

    def work() -> None:
        assert kept(tier, 1) == [1]
        assert put(tier, 2)
        tier.close()

    held = threading.Event()

    def hold() -> None:
        with tier._index.transaction():
            held.set()
            time.sleep(0.2)  # the fork waits for it

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = fork.Process(target=work)
    child.start()
    child.join(20)
    child.kill()
    child.join()
    thread.join()
    assert child.exitcode == 0
    assert put(tier, 3)
    assert kept(tier, 1, 2, 3) == [1, 2, 3]


def test_processes_that_open_a_new_folder_together(folder: Path) -> None:
    def work(n: int) -> None:
        tier = DiskTier(folder, 2**20)
        assert put(tier, n)
        assert tier.stats()["errors"] == 0

    run_all(work, range(8))
    tier = DiskTier(folder, 2**20)
    assert kept(tier, *range(8)) == list(range(8))
    tier.close()


def run_all(work: Callable[[int], None], numbers: range) -> None:
    children = [fork.Process(target=work, args=(n,)) for n in numbers]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * len(children)


def test_processes_share_a_folder(folder: Path) -> None:
    max_bytes, operations = 80_000, 1000

    def work(seed: int) -> None:
        draw = random.Random(seed)
        tier = DiskTier(folder, max_bytes)
        read = 0
        for step in range(operations):
            n = draw.randrange(60)
            keys = [key_of(n)]
            match draw.choice(["write", "write", "read", "find", "touch", "delete"]):
                case "write":
                    put(tier, n, 100 + 97 * n)
                case "read":
                    blob = tier.read(key_of(n))
                    assert blob is None or is_right(key_of(n), blob)
                    read += blob is not None
                case "find":
                    assert set(tier.find(keys)) <= set(keys)
                case "touch":
                    tier.touch(keys)
                case "delete" if step % 4 == 0:
                    tier.delete(keys)
        assert tier.stats()["errors"] == 0, tier.stats()
        assert read > operations / 40
        tier.close()

    done = threading.Event()
    sampled: list[int] = []

    def sample() -> None:
        while not done.wait(0.002):
            # Twice: others write and evict while files are added up.
            sampled.append(min(du(folder / "blobs"), du(folder / "blobs")))

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        run_all(work, range(4))
    finally:
        done.set()
        sampler.join()
    assert len(sampled) > 10
    assert max_bytes / 2 < max(sampled) <= max_bytes
    tier = DiskTier(folder, max_bytes)
    assert len(kept(tier, *range(60))) == tier.stats()["chunks"] == len(files_in(folder))
    tier.close()


@pytest.mark.parametrize("harm", ["lost", "damaged"])
def test_processes_go_on_when_the_index_is_harmed_under_them(folder: Path, harm: str) -> None:
    max_bytes = 60_000

    def work(seed: int) -> None:
        draw = random.Random(seed)
        tier = DiskTier(folder, max_bytes)
        for step in range(150):
            n = draw.randrange(60)
            put(tier, n)
            blob = tier.read(key_of(n))
            assert blob is None or is_right(key_of(n), blob)
            if seed == 0 and step % 50 == 25:
                if harm == "lost":
                    (folder / "index.sqlite3").unlink(missing_ok=True)
                else:
                    damage(folder)
            assert du(folder / "blobs") <= max_bytes
        tier.close()

    run_all(work, range(3))
    DiskTier(folder, max_bytes).close()
    tier = DiskTier(folder, max_bytes)
    assert put(tier, 100)
    assert len(kept(tier, *range(60), 100)) == tier.stats()["chunks"] == len(files_in(folder))
    assert tier.stats()["errors"] == 0
    tier.close()


@pytest.mark.slow
def test_the_soak_finds_nothing(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "soak.py"
    command = [sys.executable, str(script), "--rounds", "16", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "soak-cpu.json").read_text())
    tally = result["tally"]
    for stores in (result["stores"], result["stores_with_states"]):
        assert tally["rounds"] == stores["rounds"] == 16
        # How many prompts are written before a kill is a matter of the machine: with some, the soak can find a loss.
        assert min(stores["compared"], stores["checked"]) > 10
        assert stores["flushed"] > 3
    assert tally["kept"] > 16
    assert tally["in_flight"] > 5


def du(folder: Path) -> int:
    """Bytes of the files in two levels of folders, some of which may go meanwhile: never more than there were."""
    total = 0
    for path in folder.glob("*/*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            pass
    return total


# An index that was lost, of many files: it is made anew while the tier is used


@pytest.fixture
def many(opened: Open, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of 40 blobs, which are many here, without an index."""
    tier = opened()
    for n in range(40):
        put(tier, n, 100, root=b"even" if n % 2 == 0 else b"odd", model=b"m%d" % (n % 4))
    tier.close()
    (folder / "index.sqlite3").unlink()
    monkeypatch.setattr(disk, "_MANY", 8)
    monkeypatch.setattr(disk, "_AT_ONCE", 3)
    return folder


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Set, it lets the threads that make an index anew begin."""
    begin, settle = threading.Event(), DiskTier._settle

    def later(tier: DiskTier) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert begin.wait(60)
        settle(tier)

    monkeypatch.setattr(DiskTier, "_settle", later)
    yield begin
    begin.set()


def rows_of(folder: Path) -> list[tuple[object, ...]]:
    with sqlite3.connect(folder / "index.sqlite3") as db:
        rows = db.execute("SELECT key, kind, model, root, parent, head, start, tokens, nbytes, charge FROM blobs")
        found = sorted(rows)
    db.close()
    return found


def whole(tier: DiskTier, folder: Path, count: int) -> None:
    """Wait for the thread, and look at what it has left."""
    assert tier._settling is not None
    tier._settling.join(60)
    assert tier.stats()["chunks"] == count
    with sqlite3.connect(folder / "index.sqlite3") as db:
        assert db.execute("PRAGMA application_id").fetchone() == (0,)
    db.close()


def test_what_is_there_is_found_before_the_index_is_whole(many: Path, opened: Open, held_up: threading.Event) -> None:
    tier, other = opened(), opened()
    assert tier.stats()["chunks"] == 0
    assert kept(tier, 7, 8, 99) == [7, 8]
    assert kept(other, 7, 9) == [7, 9]
    assert tier.stats()["chunks"] == 3
    held_up.set()
    whole(tier, many, 40)
    assert kept(other, *range(40)) == list(range(40))
    assert (tier.stats()["errors"], other.stats()["errors"]) == (0, 0)


def test_it_ends_as_an_index_that_was_never_lost(many: Path, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_MANY", 10_000)
    at_once = opened()
    expected, order = rows_of(many), [entry.key for entry in at_once.entries()]
    at_once.close()
    (many / "index.sqlite3").unlink()
    monkeypatch.setattr(disk, "_MANY", 8)
    tier = opened()
    whole(tier, many, 40)
    assert rows_of(many) == expected
    assert [entry.key for entry in tier.entries()] == order


def test_what_is_deleted_meanwhile_does_not_come_back(many: Path, opened: Open, held_up: threading.Event) -> None:
    tier = opened()
    assert tier.delete([key_of(5)])
    assert kept(tier, 5) == []
    held_up.set()
    tier.clear(b"m1")  # waits: it must leave out none
    whole(tier, many, 30)
    assert kept(tier, *range(40)) == [n for n in range(40) if n % 4 != 1]


def test_all_of_a_root_is_listed(many: Path, opened: Open, held_up: threading.Event) -> None:
    threading.Timer(0.2, held_up.set).start()
    assert len(list(opened().entries(b"even"))) == 20


def test_the_budget_holds_meanwhile(many: Path, opened: Open, held_up: threading.Event) -> None:
    used = bytes_in(many)
    small, large = opened(used), opened()
    assert not put(small, 50, 100)  # nobody has counted yet
    assert len(files_in(many)) == 40
    held_up.set()
    for tier in (small, large):
        assert tier._settling is not None
        tier._settling.join(60)
    assert int(small.stats()["bytes"]) <= used
    assert put(small, 50, 100)
    assert int(small.stats()["bytes"]) <= used


def test_a_kill_meanwhile_is_made_up_for(many: Path, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(folder: Path) -> None:
        adding, seen = DiskTier._add, []

        def add(tier: DiskTier, db: object, entries: object) -> None:
            adding(tier, db, entries)  # type: ignore[arg-type]
            seen.append(entries)
            if len(seen) == 4:
                os.kill(os.getpid(), signal.SIGKILL)

        DiskTier._add = add  # type: ignore[assignment]
        tier = DiskTier(folder, 2**20)
        assert tier._settling is not None
        tier._settling.join()

    child = fork.Process(target=die, args=(many,))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    tier = opened()
    assert 0 < len(rows_of(many)) <= 40
    whole(tier, many, 40)
    assert kept(tier, *range(40)) == list(range(40))


def test_one_thread_makes_the_index_whoever_asks_for_it(
    many: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where two others ask at the same moment, of which each may wait for its end."""
    tier, started = opened(), list[threading.Thread]()
    begun, go_on, asked = (threading.Event() for _ in range(3))
    whole(tier, many, 40)

    class Halted(threading.Thread):
        def start(self) -> None:
            started.append(self)
            begun.set()
            assert go_on.wait(30)
            super().start()

        def run(self) -> None:
            assert asked.wait(30)  # one that is done by then may be followed by another
            super().run()

    monkeypatch.setattr(disk, "Thread", Halted)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(tier._settle_later)
        assert begun.wait(30)
        second = pool.submit(tier._settle_later)
        wait((second,), timeout=0.1)
        go_on.set()
        wait((first, second))
    assert started == [tier._settling]
    asked.set()
    started[0].join(60)
    assert not started[0].is_alive()


def test_another_process_writes_meanwhile(many: Path, opened: Open, held_up: threading.Event) -> None:
    tier = opened()

    def write(folder: Path) -> None:
        held_up.set()
        other = DiskTier(folder, 2**20)
        assert other._settling is not None
        other._settling.join()
        assert all([put(other, n, 100) for n in range(60, 70)])

    child = fork.Process(target=write, args=(many,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert kept(tier, *range(60, 70)) == list(range(60, 70))
    held_up.set()
    whole(tier, many, 50)


def test_a_damaged_file_is_removed_meanwhile(many: Path, opened: Open, held_up: threading.Event) -> None:
    the_file(many, 3).write_bytes(b"no blob")
    tier = opened()
    assert kept(tier, 3, 4) == [4]
    held_up.set()
    whole(tier, many, 39)


def test_opening_takes_as_many_queries_however_many_files_there_are(
    many: Path, opened: Open, held_up: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an index that is whole; the thread that looks for what others left behind begins later."""
    held_up.set()
    whole(opened(), many, 40)
    held_up.clear()
    looked = []
    monkeypatch.setattr(disk_files.BlobFiles, "status", lambda _, key: looked.append(key))
    began = time.monotonic()
    tier = opened()
    assert not looked
    assert time.monotonic() - began < 30
    held_up.set()
    assert tier._settling is not None
    tier._settling.join(60)
    assert not looked  # nothing had to be put right


@pytest.mark.parametrize("written_again", [False, True])
def test_what_others_have_done_to_it_while_it_was_written(
    opened: Open, monkeypatch: pytest.MonkeyPatch, written_again: bool
) -> None:
    """A write tells whether the blob is there, whoever wrote it."""
    tier, other = opened(), opened()
    write = tier._files.write

    def interrupted(*given: object) -> bool:
        monkeypatch.undo()
        done: bool = write(*given)  # type: ignore[arg-type]
        other.delete([key_of(1)])
        assert not written_again or put(other, 1)
        return done

    monkeypatch.setattr(tier._files, "write", interrupted)
    assert put(tier, 1) is written_again
    assert kept(tier, 1) == kept(other, 1) == [1] * written_again


def test_what_is_told_of_a_folder_is_text(tmp_path: Path) -> None:
    """Its name need not be UTF-8, which JSON is written in."""
    folder = tmp_path / os.fsdecode(b"d\xfc")
    try:
        tier = DiskTier(folder, 2**20)
    except OSError:
        pytest.skip("this file system takes names in UTF-8 alone")
    try:
        assert put(tier, 1)
        told = json.dumps(tier.stats(), ensure_ascii=False).encode()
        assert json.loads(told)["location"] == f"{tmp_path}/d\ufffd"
    finally:
        tier.close()
