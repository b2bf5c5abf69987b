"""The contract of tiers below host memory: `tests/unit/test_tiers.py` runs it over all of them."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import blake2b
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import pytest

from tests.internals.cache import Entry, FilesystemTier, Kind, NoticeBoard, SealedTier, Tier, ValkeyTier, tiers
from tests.internals.disk import DiskTier, charge, disk

MODEL, OTHER_MODEL = b"model" * 4, b"other" * 4
ROOT = b"root!" * 4


class OpenTier(NamedTuple):
    """Opens one place, at each call once more."""

    open: Callable[..., Tier]  # with its budget
    beside: int = 0  # bytes that it keeps beside each blob, and counts

    def __call__(self, max_bytes: int | None = None) -> Tier:
        return self.open(max_bytes)

    def bytes_of(self, *entries: Entry) -> int:
        """Bytes that these take."""
        return sum(entry.nbytes + self.beside for entry in entries)

    def room_for(self, count: int) -> int:
        """A budget for so many entries of the usual size, and no more."""
        return count * (3000 + self.beside) + 1000


def name_of(*parts: object) -> bytes:
    """A key like those of chunks."""
    return blake2b(repr(parts).encode(), digest_size=20).digest()


def make_entry(
    number: int,
    *,
    nbytes: int = 3000,
    kind: Kind = Kind.CHUNK,
    model: bytes = MODEL,
    root: bytes = ROOT,
    head: bytes = b"",
    start: int = 0,
) -> Entry:
    """An entry that differs from all of another number."""
    tokens = np.arange(number, number + 16, dtype=np.int64)
    head = head or (b"" if kind is Kind.CONTENT else name_of("head", number))
    return Entry(name_of("key", number), kind, model, root, root, head, start, tokens, nbytes)


def make_blob(entry: Entry) -> list[bytes | memoryview]:
    """Bytes that follow from the key, in parts of different kinds."""
    whole = np.random.default_rng(list(entry.key)).bytes(entry.nbytes)
    return [whole[:7], memoryview(whole)[7:1000], memoryview(bytearray(whole[1000:]))]


def write(tier: Tier, *entries: Entry) -> None:
    """Write all of them, each of which must be kept."""
    for entry in entries:
        assert tier.write(entry, make_blob(entry))


def assert_same(found: Entry, entry: Entry) -> None:
    """Every field is the same."""
    for name in ("key", "kind", "model", "root", "parent", "head", "start", "nbytes"):
        assert getattr(found, name) == getattr(entry, name)
    assert found.tokens.dtype == np.int64
    assert np.array_equal(found.tokens, entry.tokens)


def _board(tier: Tier) -> Any:
    assert isinstance(tier, NoticeBoard)
    return tier


def keys(entries: Iterator[Entry] | list[Entry]) -> list[bytes]:
    """Their keys, in order."""
    return [entry.key for entry in entries]


ROW = charge(make_entry(1), 0)


def _on_server(request: pytest.FixtureRequest) -> OpenTier:
    pytest.importorskip("valkey")
    url, prefix = request.getfixturevalue("shared_server").url, uuid4().hex
    return OpenTier(lambda max_bytes: ValkeyTier(url, prefix=prefix, max_bytes=max_bytes, timeout_s=20.0))


def _in_memory(_: pytest.FixtureRequest) -> OpenTier:
    url = f"memory://{uuid4().hex}/kv"
    return OpenTier(lambda max_bytes: FilesystemTier(url, max_bytes=max_bytes))


def _in_files(request: pytest.FixtureRequest) -> OpenTier:
    folder = request.getfixturevalue("tmp_path") / uuid4().hex
    return OpenTier(lambda max_bytes: FilesystemTier(folder.as_uri(), max_bytes=max_bytes))


def _on_disk(request: pytest.FixtureRequest) -> OpenTier:
    folder = request.getfixturevalue("tmp_path") / uuid4().hex
    return OpenTier(lambda max_bytes: DiskTier(folder, 10**9 if max_bytes is None else max_bytes), ROW)


def _sealed(request: pytest.FixtureRequest, inner: Callable[..., OpenTier]) -> OpenTier:
    opened = inner(request)
    return OpenTier(lambda max_bytes: SealedTier(opened(max_bytes), b"k" * 32), opened.beside + 32)


# The class of each, and how to come to a new place of it.
PLACES: dict[str, tuple[type, Callable[[pytest.FixtureRequest], OpenTier]]] = {
    "server": (ValkeyTier, _on_server),
    "memory": (FilesystemTier, _in_memory),
    "files": (FilesystemTier, _in_files),
    "disk": (DiskTier, _on_disk),
    "sealed memory": (SealedTier, partial(_sealed, inner=_in_memory)),
    "sealed disk": (SealedTier, partial(_sealed, inner=_on_disk)),
}


class TierContract:
    """Tests of one place."""

    place: str  # its name in `PLACES`

    @pytest.fixture
    def open_tier(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenTier]:
        """A place whose lists have several pages; what was opened is closed."""
        monkeypatch.setattr(disk, "_AT_ONCE", 7)
        monkeypatch.setattr(tiers.base, "_BATCH", 7)
        place = PLACES[self.place][1](request)
        opened: list[Tier] = []

        def open_tier(max_bytes: int | None) -> Tier:
            opened.append(place(max_bytes))
            return opened[-1]

        yield place._replace(open=open_tier)
        for tier in opened:
            tier.close()

    @pytest.fixture
    def tier(self, open_tier: OpenTier) -> Tier:
        return open_tier()

    @pytest.mark.parametrize("kind", Kind)
    def test_gives_back_what_was_written(self, tier: Tier, kind: Kind) -> None:
        entry = make_entry(1, kind=kind, start=123_456)
        write(tier, entry)
        assert_same(tier.find([entry.key])[entry.key], entry)
        blob = tier.read(entry.key)
        assert blob is not None
        assert blob == b"".join(make_blob(entry))

    def test_parts_may_be_of_any_type(self, tier: Tier) -> None:
        numbers = memoryview(np.arange(6, dtype=np.int16))  # type: ignore[arg-type]
        entry = make_entry(1, nbytes=15)
        assert tier.write(entry, [b"", numbers, b"end"])
        assert tier.read(entry.key) == numbers.tobytes() + b"end"
        assert tier.find([entry.key])[entry.key].nbytes == 15

    @pytest.mark.parametrize("parts", [[], [b""]])
    def test_an_empty_blob_is_a_blob(self, tier: Tier, parts: list[bytes | memoryview]) -> None:
        entry = make_entry(1, nbytes=0)
        assert tier.write(entry, parts)
        assert_same(tier.find([entry.key])[entry.key], entry)
        blob = tier.read(entry.key)
        assert blob is not None
        assert len(blob) == 0
        assert (tier.stats()["chunks"], tier.stats()["errors"]) == (1, 0)

    def test_finds_only_what_is_there(self, tier: Tier) -> None:
        first, second, missing = (make_entry(number) for number in range(3))
        write(tier, first, second)
        assert set(tier.find([first.key, missing.key, second.key])) == {first.key, second.key}
        assert tier.find([]) == {}
        assert tier.find([missing.key]) == {}
        assert tier.read(missing.key) is None

    def test_a_key_is_not_a_pattern(self, tier: Tier) -> None:
        write(tier, make_entry(1))
        assert tier.find([b"*", b"", b"\x00" * 20]) == {}

    def test_finds_what_begins_alike_newest_first(self, tier: Tier) -> None:
        head = name_of("shared head")
        alike = [make_entry(number, head=head) for number in range(5)]
        write(tier, *alike, make_entry(9))
        assert keys(tier.find_alike([head])) == keys(alike[::-1])
        assert keys(tier.find_alike([name_of("no head"), make_entry(9).head])) == [make_entry(9).key]
        both = keys(tier.find_alike([head, make_entry(9).head, head]))  # one of them twice
        assert (set(both), [key for key in both if key != make_entry(9).key]) == (
            set(keys([make_entry(9), *alike])),
            keys(alike[::-1]),
        )
        assert tier.find_alike([]) == []

    def test_looks_at_256_that_begin_alike(self, tier: Tier) -> None:
        head = name_of("crowded head")
        crowd = [make_entry(number, nbytes=1000, head=head) for number in range(260)]
        write(tier, *crowd)
        assert keys(tier.find_alike([head])) == keys(crowd[:3:-1])

    def test_what_is_found_by_content_begins_like_nothing(self, tier: Tier) -> None:
        write(tier, make_entry(1, kind=Kind.CONTENT))
        assert tier.find_alike([b""]) == []

    def test_lists_all_and_those_of_one_root(self, tier: Tier) -> None:
        other = make_entry(3, root=name_of("other root"))
        write(tier, make_entry(1), make_entry(2), other)
        assert set(keys(tier.entries())) == {make_entry(1).key, make_entry(2).key, other.key}
        assert keys(tier.entries(other.root)) == [other.key]
        assert keys(tier.entries(name_of("no root"))) == []

    def test_lists_those_of_roots_that_begin_alike(self, tier: Tier) -> None:
        begin = name_of("root")[:10]
        some = [make_entry(number, root=begin + name_of("rest", number)[:10]) for number in range(4)]
        write(tier, *some, make_entry(9, root=begin[:9] + name_of("root")[:11]), make_entry(8))
        assert set(keys(tier.entries(begin))) == set(keys(some))
        assert keys(tier.entries(name_of("no root")[:10])) == []

    def test_what_is_listed_may_go_meanwhile(self, tier: Tier) -> None:
        several = [make_entry(number, nbytes=100, root=name_of("root", number % 2)) for number in range(20)]
        write(tier, *several)
        listed = []
        for entry in tier.entries(name_of("root", 0)):
            listed.append(entry.key)
            tier.delete([entry.key])
        assert set(listed) == set(keys(several[::2]))
        assert set(keys(tier.entries())) == set(keys(several[1::2]))

    def test_one_that_is_there_stays_as_it_is(self, open_tier: OpenTier) -> None:
        tier = open_tier()
        entry = make_entry(1)
        write(tier, entry)
        assert tier.write(entry, [bytes(entry.nbytes)])
        assert tier.read(entry.key) == b"".join(make_blob(entry))
        assert (tier.stats()["chunks"], tier.stats()["bytes"]) == (1, open_tier.bytes_of(entry))

    def test_deletes(self, open_tier: OpenTier) -> None:
        tier = open_tier()
        head = name_of("shared head")
        kept, given_up = make_entry(1, head=head), make_entry(2, head=head)
        write(tier, kept, given_up)
        tier.delete([given_up.key, name_of("nothing")])
        assert tier.read(given_up.key) is None
        assert set(tier.find([kept.key, given_up.key])) == {kept.key}
        assert keys(tier.find_alike([head])) == keys(tier.entries()) == keys(tier.entries(ROOT)) == [kept.key]
        assert (tier.stats()["chunks"], tier.stats()["bytes"]) == (1, open_tier.bytes_of(kept))
        write(tier, given_up)
        assert keys(tier.find_alike([head])) == [given_up.key, kept.key]

    def test_clears_one_model(self, open_tier: OpenTier) -> None:
        tier = open_tier()
        other = make_entry(3, model=OTHER_MODEL)
        write(tier, make_entry(1), make_entry(2), other)
        tier.clear(MODEL)
        assert keys(tier.entries()) == [other.key]
        assert tier.stats()["bytes"] == open_tier.bytes_of(other)

    def test_what_was_read_stays_readable(self, tier: Tier) -> None:
        entry = make_entry(1)
        write(tier, entry)
        blob = tier.read(entry.key)
        tier.delete([entry.key])
        tier.close()
        assert blob == b"".join(make_blob(entry))

    def test_a_second_one_sees_what_the_first_wrote(self, open_tier: OpenTier) -> None:
        first, second = open_tier(), open_tier()
        before, after = make_entry(1), make_entry(2)
        assert second.find([before.key]) == {}
        write(first, before)
        assert set(second.find([before.key])) == {before.key}
        write(second, after)
        assert set(keys(first.entries())) == {before.key, after.key}
        second.delete([before.key])
        assert first.read(before.key) is None

    def test_what_is_kept_outlives_the_tier(self, open_tier: OpenTier) -> None:
        first = open_tier()
        write(first, make_entry(1))
        first.touch([make_entry(1).key])
        known = first.hits()
        first.close()
        second = open_tier()
        assert keys(second.entries()) == [make_entry(1).key]
        assert second.hits() == known
        second.delete([make_entry(1).key])
        assert second.hits() == {}

    def test_after_close_nothing_raises(self, tier: Tier) -> None:
        entry = make_entry(1)
        write(tier, entry)
        for _ in range(2):
            tier.close()
        assert tier.read(entry.key) in (b"".join(make_blob(entry)), None)
        assert set(tier.find([entry.key])) <= {entry.key}
        assert set(keys(tier.find_alike([entry.head]))) | set(keys(tier.entries())) <= {entry.key}
        tier.touch([entry.key])
        assert tier.write(make_entry(2), make_blob(make_entry(2))) in (True, False)
        tier.clear(MODEL)
        assert tier.delete([entry.key]) in (True, False)
        assert set(tier.hits()) <= {entry.key}
        assert {"chunks", "bytes", "errors"} <= set(tier.stats())

    @pytest.mark.parametrize("max_bytes", [0, -1])
    def test_a_budget_must_be_positive(self, open_tier: OpenTier, max_bytes: int) -> None:
        with pytest.raises(ValueError, match="`max_bytes` must be a positive"):
            open_tier(max_bytes=max_bytes)

    def test_keeps_within_its_budget(self, open_tier: OpenTier) -> None:
        tier = open_tier(max_bytes=open_tier.room_for(3))
        for number in range(10):
            write(tier, make_entry(number))
            assert tier.stats()["bytes"] <= open_tier.room_for(3)
        assert set(keys(tier.entries())) == {make_entry(number).key for number in (7, 8, 9)}
        assert tier.stats()["max_bytes"] == open_tier.room_for(3)

    @pytest.mark.parametrize("count", [1, 3])
    def test_a_budget_may_be_used_up(self, open_tier: OpenTier, count: int) -> None:
        fitting = [make_entry(number) for number in range(count)]
        tier = open_tier(max_bytes=open_tier.bytes_of(*fitting))
        write(tier, *fitting)
        assert set(keys(tier.entries())) == set(keys(fitting))
        less = make_entry(count, nbytes=2000)
        write(tier, less)
        assert set(keys(tier.entries())) == set(keys([*fitting[1:], less]))

    def test_gives_up_what_was_not_used_for_longest(self, open_tier: OpenTier) -> None:
        tier = open_tier(max_bytes=open_tier.room_for(3))
        write(tier, *map(make_entry, range(3)))
        tier.touch([make_entry(0).key, name_of("nothing")])
        write(tier, make_entry(3))
        assert set(keys(tier.entries())) == {make_entry(number).key for number in (0, 2, 3)}

    def test_gives_up_what_continues_a_chunk_first(self, open_tier: OpenTier) -> None:
        tier = open_tier(max_bytes=open_tier.room_for(3))
        chain = [make_entry(number, start=number * 16) for number in range(3)]
        write(tier, *chain)
        tier.touch(keys(chain))
        write(tier, make_entry(9))
        assert set(keys(tier.entries())) == {chain[0].key, chain[1].key, make_entry(9).key}

    def test_refuses_what_is_larger_than_its_budget(self, open_tier: OpenTier) -> None:
        tier = open_tier(max_bytes=open_tier.room_for(1))
        write(tier, make_entry(1))
        large = make_entry(2, nbytes=4001)
        assert not tier.write(large, make_blob(large))
        assert keys(tier.entries()) == [make_entry(1).key]
        assert tier.stats()["errors"] == 0

    @pytest.mark.parametrize("room", [5, 100])
    def test_several_threads(self, open_tier: OpenTier, room: int) -> None:
        tier = open_tier(max_bytes=open_tier.room_for(room))
        wrong: list[bytes] = []

        def work(worker: int) -> None:
            for number in range(10):
                entry = make_entry(number)  # the same for all workers
                tier.write(entry, make_blob(entry))
                if tier.read(entry.key) not in (b"".join(make_blob(entry)), None):
                    wrong.append(entry.key)
                if (number + worker) % 5 == 0:
                    tier.delete([entry.key])

        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert tier.stats()["errors"] == 0
        there = list(tier.entries())
        assert tier.stats()["chunks"] == len(there)
        assert tier.stats()["bytes"] == open_tier.bytes_of(*there) <= open_tier.room_for(room)

    def test_counts_uses_where_they_are_known(self, open_tier: OpenTier) -> None:
        tier, other = open_tier(), open_tier()
        write(tier, make_entry(1), make_entry(2))
        other.touch([make_entry(1).key])
        tier.touch([make_entry(1).key, make_entry(2).key])
        hits = tier.hits()
        assert not hits or hits == {make_entry(1).key: 2, make_entry(2).key: 1}

    # Notices

    def test_notices_are_heard_by_all_in_their_order(self, open_tier: OpenTier, monkeypatch) -> None:
        monkeypatch.setattr("kvboost_hf.cache.tiers.filesystem._LISTED_EVERY_S", 0.0)
        one, other = _board(open_tier()), _board(open_tier())
        assert list(one.heard(None).notices) == []
        assert one.announce(b"first")
        assert other.announce(b"second")
        heard = one.heard(None)
        assert list(heard.notices) == [b"first", b"second"]
        assert heard.complete
        assert list(one.heard(heard.place).notices) == []
        assert other.announce(b"third")
        later = one.heard(heard.place)
        assert (list(later.notices), later.complete) == ([b"third"], True)
        assert list(_board(open_tier()).heard(None).notices) == [b"first", b"second", b"third"]

    def test_who_has_heard_nothing_yet_misses_nothing(self, open_tier: OpenTier, monkeypatch) -> None:
        monkeypatch.setattr("kvboost_hf.cache.tiers.filesystem._LISTED_EVERY_S", 0.0)
        one, other = _board(open_tier()), _board(open_tier())
        heard = one.heard(None)
        other.announce(b"first")
        later = one.heard(heard.place)
        assert (list(later.notices), later.complete) == ([b"first"], True)

    def test_deleting_tells_whether_it_was_done(self, tier: Tier) -> None:
        write(tier, make_entry(1))
        assert tier.delete([make_entry(1).key, make_entry(2).key]) is True
        assert tier.delete([]) is True
