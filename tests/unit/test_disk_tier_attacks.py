"""The disk tier in a folder that somebody else has written to: an index, links and pipes that are not ours."""

import logging
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.blobs import is_right, key_of, make_blob
from tests.internals.disk import DiskTier, disk_index

pytestmark = pytest.mark.daily

NUMBERS = range(4)
NOBODY = 2**31 - 1  # no process has this number


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with four blobs."""
    found = tmp_path / "tier"
    tier = DiskTier(found, 10**6)
    for n in NUMBERS:
        assert tier.write(*make_blob(n))
    tier.close()
    return found


@pytest.fixture
def opened(folder: Path) -> Iterator[Callable[..., DiskTier]]:
    tiers: list[DiskTier] = []

    def open_tier(max_bytes: int = 10**6) -> DiskTier:
        tiers.append(DiskTier(folder, max_bytes))
        return tiers[-1]

    yield open_tier
    for tier in tiers:
        tier.close()


def the_file(folder: Path, n: int) -> Path:
    name = key_of(n).hex()
    return folder / "blobs" / name[:2] / f"{name}.safetensors"


def change(folder: Path, *statements: str, values: tuple[object, ...] = ()) -> None:
    """Do something to the index."""
    db = sqlite3.connect(folder / "index.sqlite3")
    for statement in statements:
        db.execute(statement, values)
    db.commit()
    db.close()


def use(tier: DiskTier) -> None:
    """Whatever can be asked of it: nothing of this raises."""
    tier.find([*map(key_of, NUMBERS), b"", b"\x00" * 20])
    tier.find_alike([b"head", b""])
    list(tier.entries())
    list(tier.entries(b"root"))
    for n in NUMBERS:
        tier.read(key_of(n))
    tier.touch(list(map(key_of, NUMBERS)))
    tier.hits()
    tier.stats()
    tier.write(*make_blob(9))
    tier.delete([key_of(9)])
    tier.clear(b"another model")


def assert_whole(tier: DiskTier, *numbers: int) -> None:
    """Blobs that nobody has touched are found, and right."""
    for n in numbers:
        blob = tier.read(key_of(n))
        assert blob is not None
        assert is_right(key_of(n), blob)


def test_a_name_in_the_index_leads_nowhere_else(folder: Path, opened: Callable[..., DiskTier], tmp_path: Path) -> None:
    """Whoever was writing it was killed: what it had begun is taken away, but only what is ours."""
    outside = [tmp_path / "victim.tmp", folder.parent / "victim.safetensors"]
    for path in outside:
        path.write_text("of somebody else")
    for n in NUMBERS:
        the_file(folder, n).with_name(f"{key_of(n).hex()}.").mkdir()  # which makes a path of what follows
    dead = (os.uname().nodename, NOBODY)
    change(
        folder,
        "UPDATE blobs SET token = '/../../../../victim', host = ?, pid = ?, since = 0",
        values=dead,
    )
    tier = opened()
    use(tier)
    assert [path.read_text() for path in outside] == ["of somebody else"] * 2
    assert_whole(opened(), *NUMBERS)


@pytest.mark.parametrize(
    "token", ["../../x", "x", "", "A" * 32, "0" * 31, "0" * 33, "0" * 31 + "/", "0" * 32 + "\n", "\0" * 32, "é" * 32]
)
def test_tokens_that_are_none(folder: Path, opened: Callable[..., DiskTier], token: str) -> None:
    dead = (token, os.uname().nodename, NOBODY)
    change(folder, "UPDATE blobs SET token = ?, host = ?, pid = ?, since = 0", values=dead)
    tier = opened()
    use(tier)
    assert_whole(tier, *NUMBERS)
    db = sqlite3.connect(folder / "index.sqlite3")
    assert db.execute("SELECT count(*) FROM blobs WHERE token IS NOT NULL").fetchone() == (0,)
    db.close()


COLUMNS = {
    "key": ["'text'", "7", "1.5", "x''", "x'2e2e2f2e2e'", "zeroblob(21)", "CAST(x'ff' AS TEXT)"],
    "kind": ["'other'", "x'00'", "7", "CAST(x'ff' AS TEXT)"],
    **{name: ["'text'", "7"] for name in ("model", "root", "parent", "head")},
    "start": ["'text'", "-1", "9223372036854775807", "1.5", "x'00'"],
    "tokens": ["'text'", "x'00'", "7"],
    "nbytes": ["'text'", "-1", "9223372036854775807"],
    "charge": ["'text'", "-9223372036854775807"],
    "uses": ["'text'", "9223372036854775807"],
    "last_used": ["'text'", "-1", "9223372036854775807"],
    "token": ["7", "x'00'", "CAST(x'ff' AS TEXT)"],
    "pid": ["'text'", "9223372036854775807", "-1"],
    "since": ["'text'", "NULL", "9223372036854775807"],
}


def test_a_number_that_is_of_no_process_is_damage() -> None:
    """To signal 0 is to signal all processes of a group."""
    assert [disk_index._is_process(number) for number in (-1, 0, 1, 2**31 - 1, 2**31)] == [
        False,
        False,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(("column", "value"), [(name, value) for name, values in COLUMNS.items() for value in values])
@pytest.mark.parametrize("meanwhile", [False, True])
def test_values_that_nobody_here_writes(
    folder: Path, opened: Callable[..., DiskTier], column: str, value: str, meanwhile: bool
) -> None:
    """Before it is opened, and while it is open."""
    tier = opened() if meanwhile else None
    writing = ", token = hex(zeroblob(16)), host = 'host'" if column in ("pid", "since") else ""
    change(
        folder,
        "UPDATE blobs SET last_used = 1",
        f"UPDATE blobs SET {column} = {value} {writing} WHERE number = 2",
    )
    tier = tier or opened(5000)
    use(tier)
    again = opened()
    use(again)
    assert_whole(again, *(n for n in (0, 2, 3) if the_file(folder, n).exists()))
    assert tier.write(*make_blob(7))


@pytest.mark.parametrize(
    "statements",
    [
        ["CREATE TRIGGER more AFTER UPDATE ON blobs BEGIN DELETE FROM blobs; END"],
        ["ALTER TABLE blobs RENAME TO others", "CREATE VIEW blobs AS SELECT * FROM others"],
        ["DELETE FROM charged"],
        ["UPDATE charged SET total = -9000000000"],
        ["DROP TABLE charged"],
    ],
    ids=str,
)
def test_tables_that_are_not_ours(folder: Path, opened: Callable[..., DiskTier], statements: list[str]) -> None:
    change(folder, *statements)
    tier = opened()
    use(tier)
    assert_whole(tier, *NUMBERS)
    assert tier.stats()["chunks"] == 4


# Links


def test_a_link_in_the_place_of_a_blob(folder: Path, opened: Callable[..., DiskTier], tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    the_file(folder, 1).rename(outside)
    the_file(folder, 1).symlink_to(outside)
    before = outside.read_bytes()
    tier = opened()
    assert tier.read(key_of(1)) is None
    tier.delete([key_of(1)])
    assert tier.write(*make_blob(1))
    assert not the_file(folder, 1).is_symlink()
    assert outside.read_bytes() == before
    assert_whole(tier, *NUMBERS)


@pytest.mark.parametrize("place", ["blobs", "blobs/xx"])
def test_a_link_in_the_place_of_a_folder(
    folder: Path, opened: Callable[..., DiskTier], tmp_path: Path, place: str
) -> None:
    linked = folder / place.replace("xx", key_of(1).hex()[:2])
    outside = tmp_path / "outside"
    linked.rename(outside)
    linked.symlink_to(outside)
    before = {path: path.read_bytes() for path in outside.rglob("*.safetensors")}
    assert before
    tier = opened()
    use(tier)
    tier.delete(map(key_of, NUMBERS))
    assert {path: path.read_bytes() for path in outside.rglob("*.safetensors")} == before
    assert tier.write(*make_blob(1))
    assert not linked.is_symlink()
    assert_whole(tier, 1)


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm", "-journal"])
@pytest.mark.parametrize("content", [b"", b"of somebody else" * 100])
def test_a_link_in_the_place_of_the_index(
    folder: Path, opened: Callable[..., DiskTier], tmp_path: Path, suffix: str, content: bytes
) -> None:
    outside, linked = tmp_path / "outside", folder / f"index.sqlite3{suffix}"
    outside.write_bytes(content)
    linked.unlink(missing_ok=True)
    linked.symlink_to(outside)
    tier = opened()
    use(tier)
    assert outside.read_bytes() == content
    assert not linked.is_symlink()
    assert_whole(tier, *NUMBERS)


def test_a_pipe_in_the_place_of_a_blob(folder: Path, opened: Callable[..., DiskTier]) -> None:
    """To open one waits for whoever writes to it."""
    the_file(folder, 1).unlink()
    os.mkfifo(the_file(folder, 1))
    tier = opened()
    assert tier.read(key_of(1)) is None
    assert_whole(tier, 0, 2, 3)


def test_files_with_other_names_stay(folder: Path, opened: Callable[..., DiskTier]) -> None:
    name = key_of(1).hex()
    others = [
        folder / "blobs" / name[:2] / each
        for each in (
            f"{name}.tmp",
            f"{name}.x.tmp",
            f"{name[:-2]}.safetensors",
            f"{name.upper()}.safetensors",
            "x.tmp",
        )
    ]
    for path in others:
        path.write_bytes(b"of somebody else")
    use(opened())
    assert all(path.read_bytes() == b"of somebody else" for path in others)


# Whose folder it is


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o707, 0o702])
def test_a_folder_that_everybody_may_write_to_is_refused(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    with pytest.raises(ValueError, match=rf"everybody may write to, got .* mode {mode:04o}.*`chmod 700 "):
        DiskTier(folder, 10**6)
    folder.chmod(0o700)
    DiskTier(folder, 10**6).close()


def test_a_group_that_may_write_to_it_is_warned_of(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.chmod(0o770)
    with caplog.at_level(logging.WARNING):
        DiskTier(folder, 10**6).close()
    assert "may be written to by its group (mode 0770)" in caplog.text
    caplog.clear()
    folder.chmod(0o755)
    with caplog.at_level(logging.WARNING):
        DiskTier(folder, 10**6).close()
    assert not caplog.text


def test_a_folder_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(folder, 54321, -1)  # what belongs to root, everybody may use
    owner = folder.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ValueError, match=rf"the user who runs this \({owner + 1}\), got .* belongs to user {owner}"):
        DiskTier(folder, 10**6)
    for allowed in (owner, 0):
        monkeypatch.setattr(os, "geteuid", lambda allowed=allowed: allowed)
        DiskTier(folder, 10**6).close()


def test_a_new_folder_is_nobody_elses(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        DiskTier(tmp_path / "new", 10**6).close()
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
