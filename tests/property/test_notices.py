"""Readers of a file of notices hear each of them once, in order, or are told that they may have missed some."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.internals.disk import NoticeFile

pytestmark = pytest.mark.daily

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(1, 60)),
        st.tuples(st.just("read"), st.integers(0, 2)),
        st.tuples(st.just("killed"), st.integers(1, 20)),
        st.tuples(st.just("removed"), st.just(0)),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=80)
@given(STEPS, st.sampled_from([150, 300, 10**6]))
def test_notices(steps: list[tuple[str, int]], most: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "notices"
        writers, told = [NoticeFile(path, most), NoticeFile(path, most)], list[bytes]()
        places = {number: writers[0].read(None).place for number in range(3)}
        since = dict.fromkeys(range(3), 0)  # how many had been told when each reader was last told all
        wrong = False  # whether something has happened that may have told of anything
        for at, (do, number) in enumerate(steps):
            if do == "write":
                notice = b"%d:" % len(told) + b"x" * number
                writers[at % 2].append(notice)
                told.append(notice)
                assert path.stat().st_size <= max(most, 0) + 400
            elif do == "read":
                found = writers[at % 2].read(places[number])
                places[number] = found.place
                new = list(found.notices)
                assert new == told[len(told) - len(new) :]  # the last ones, in order
                missed = len(told) - since[number] - len(new)
                assert missed >= 0
                if found.complete:
                    assert not missed
                else:
                    assert missed or wrong
                since[number] = len(told)
                again = writers[0].read(found.place)
                assert (list(again.notices), again.complete) == ([], True)
            elif path.exists() and do == "killed":  # in the middle of a line
                with open(path, "ab") as file:
                    file.write(b"1234abcd what was being written"[:number])
                wrong = True
            elif path.exists() and do == "removed":
                path.unlink()
                told, wrong = [], True
                since = dict.fromkeys(range(3), 0)


def test_what_is_not_a_notice_may_have_told_of_anything(tmp_path: Path) -> None:
    path = tmp_path / "notices"
    file = NoticeFile(path)
    assert file.read(None).complete
    file.append(b"first")
    place = file.read(None).place
    file.append(b"second")
    path.write_bytes(path.read_bytes().replace(b"second", b"sacond"))
    found = file.read(place)
    assert (list(found.notices), found.complete) == ([], False)
    found = file.read(None)
    assert (list(found.notices), found.complete) == ([b"first"], True)  # who has never read has missed nothing
    for damaged in (b"00000000", b"00000000\t", b""):  # the checksum of an empty notice, or none at all
        whole = path.read_bytes()
        path.write_bytes(whole + damaged + b"\n")
        found = file.read(place)
        assert (list(found.notices), found.complete) == ([], False)
        path.write_bytes(whole)
    file.append(b"")
    assert list(file.read(None).notices) == [b"first", b""]
    path.write_bytes(b"of somebody else\n")
    found = file.read(place)
    assert (list(found.notices), found.complete) == ([], False)
    file.append(b"third")
    found = file.read(place)
    assert (list(found.notices), found.complete) == ([b"third"], False)  # another file
    path.unlink()
    assert not file.read(found.place).complete
    assert file.read(None).complete


def test_half_a_notice_on_a_full_disk_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, write = NoticeFile(tmp_path / "notices"), os.write
    file.append(b"first")
    place = file.read(None).place
    with monkeypatch.context() as patched:
        patched.setattr("kvboost_hf.cache.tiers.disk_files.os.write", lambda to, data: write(to, data[:20]))
        with pytest.raises(OSError, match="No space left"):
            file.append(b"a notice of more than twenty bytes")
    file.append(b"again")
    found = file.read(place)
    assert (list(found.notices), found.complete) == ([b"again"], False)


@pytest.mark.parametrize("extra", [0, 1])
def test_a_file_is_shortened_when_it_is_longer_than_it_may_be(tmp_path: Path, extra: int) -> None:
    path = tmp_path / "notices"
    file = NoticeFile(path)
    for number in range(8):
        file.append(b"notice %d" % number)
    size = path.stat().st_size
    NoticeFile(path, size - extra).append(b"last")
    assert (path.stat().st_size > size) == (extra == 0)
    kept = list(file.read(None).notices)
    assert kept[-1] == b"last"
    assert len(kept) == (9 if extra == 0 else 4)
    assert oct(path.stat().st_mode)[-3:] == "600"


def test_who_is_killed_or_has_no_room_while_it_shortens_leaves_one_file_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = NoticeFile(tmp_path / "notices", 500)
    with monkeypatch.context() as patched:
        patched.setattr("kvboost_hf.cache.tiers.disk_files.os.replace", Mock(side_effect=KeyboardInterrupt))
        for number in range(50):
            with suppress(KeyboardInterrupt):
                file.append(b"notice %d" % number)
    assert len(list(tmp_path.iterdir())) == 2
    file.append(b"last")
    assert [path.name for path in tmp_path.iterdir()] == ["notices"]
    assert file.read(None).notices[-1] == b"last"
