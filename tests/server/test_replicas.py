"""Several servers over one tier: what one drops, pins or takes out of service, all others do, whatever they hold."""

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost_hf import ChunkReuseCache, ChunkStore
from kvboost_hf.assets import load_embedded
from tests.internals.cache import ComputePace
from tests.internals.disk import NoticeFile
from tests.internals.server import Job, Keep, ModelEngine, SamplingOptions, SessionChange, UnreachableTierError
from tests.server.test_sessions import ask, engine_of
from tests.server.test_worker import Told
from tests.servers import BINARY, Server

NAMES = [f"s{number}" for number in range(10)]
HOUR = Keep(ttl_s=3600, share=0.5)


@pytest.fixture(scope="module")
def reader() -> Any:
    return load_embedded()


@pytest.fixture(autouse=True)
def any_loading_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ComputePace, "seconds_per_token", lambda self, model: 1.0)


@pytest.fixture(params=["disk", pytest.param("valkey", marks=pytest.mark.skipif(BINARY is None, reason="no server"))])
def tiers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[str]]:
    if request.param == "disk":
        yield [f"disk:{tmp_path / 'tier'}:1GB"]
        return
    server = Server(tmp_path)
    yield [server.url]
    server.stop()


def opened(reader: Any, tiers: list[str]) -> AbstractContextManager[ModelEngine]:
    return engine_of(*reader, tiers=tiers, chunk_size=16)


def text_of(reader: Any, name: str) -> list[int]:
    """No two of them share a chunk."""
    return reader[1].encode(f"{name}: " + f"Anna lives in {name}. She plays the piano. " * 8)


def cached(engine: ModelEngine, reader: Any, name: str) -> int:
    found = ask(engine, text_of(reader, name), 2, session=name)[0].cached_tokens
    engine.store.flush()
    return found


def held_of(engine: ModelEngine, reader: Any, name: str) -> int:
    """Chunks in host memory with tokens of a session."""
    wanted = text_of(reader, name)[:16]
    return sum(list(each.tokens[:16]) == wanted for each in engine.store.held())


def test_what_one_server_drops_none_serves(reader: Any, tiers: list[str]) -> None:
    """Each session was served by all three, from their own memory; then it is dropped at one of them."""
    with ExitStack() as stack:
        engines = [stack.enter_context(opened(reader, tiers)) for _ in range(3)]
        for engine in engines:
            for name in NAMES:
                cached(engine, reader, name)
        for engine in engines:
            assert all(cached(engine, reader, name) > 60 for name in NAMES)
            assert {each.id for each in engine.sessions(b"")} == {*NAMES}
        for number, name in enumerate(NAMES[:6]):
            assert engines[number % 3].drop_session(b"", name, b"?")
            assert not any(engine.sessions(b"", name) for engine in engines)
            assert sum(held_of(engine, reader, name) for engine in engines) == 0
        served = 0
        for name in NAMES[:6]:
            told = [cached(engine, reader, name) for engine in engines]
            served += told[0]
            assert told[1] > 60  # it comes again, as a new one
        assert served == 0
        assert all(cached(engine, reader, name) > 60 for engine in engines for name in NAMES[6:])


def test_who_does_not_hear_serves_what_was_dropped(
    reader: Any, tiers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the test above would fail without notices."""
    with opened(reader, tiers) as one, opened(reader, tiers) as deaf:
        for engine in (one, deaf):
            cached(engine, reader, "s0")
        monkeypatch.setattr(deaf.store, "hear", lambda take=False: [])
        monkeypatch.setattr(deaf.store._records, "hear", list)
        assert one.drop_session(b"", "s0", b"?")
        assert cached(deaf, reader, "s0") > 60


@pytest.mark.parametrize("skew_s", [-86_400.0, 86_400.0])
def test_clocks_that_differ_change_no_promise(reader: Any, tiers: list[str], skew_s: float) -> None:
    """One server is a day ahead or behind: what is pinned for an hour is so at both, and what is dropped is gone."""
    with opened(reader, tiers) as one, opened(reader, tiers) as other:
        one._sessions._clock = one._sessions.pins._clock = lambda: time.time() + skew_s
        for engine in (one, other):
            for name in NAMES[:4]:
                cached(engine, reader, name)
        for here, there, name in ((one, other, "s0"), (other, one, "s1")):
            assert here.change_session(b"", name, SessionChange(keep=HOUR))
            for engine in (here, there):
                cached(engine, reader, "s2")  # its thread lets go of pins that have ended
                (found,) = engine.sessions(b"", name)
                now = time.time() + (skew_s if engine is one else 0.0)
                assert found.pinned
                assert 3500 < found.pinned_until - now <= 3600
            assert here.change_session(b"", name, SessionChange(keep=False))
            assert not there.sessions(b"", name)[0].pinned
            assert here.drop_session(b"", name, b"?")
            assert cached(there, reader, name) == 0


@pytest.mark.parametrize("hears", [True, False])
def test_what_was_dropped_is_not_handed_over(
    reader: Any, tmp_path: Path, hears: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One server ends while sessions are dropped at another, which knows them; the third is started later."""
    tiers = [f"handover:{tmp_path / 'tier'}:1GB"]
    with opened(reader, tiers) as one:
        with opened(reader, tiers) as ending:
            for engine in (one, ending):
                for name in NAMES[:4]:
                    cached(engine, reader, name)
            hear, calls = ending._sessions.hear, 0

            def hear_later(tasks: Any) -> None:
                nonlocal calls
                calls += 1
                if calls == 2:  # what is to be handed over is listed, and none of it is written
                    assert one.drop_session(b"", "s1", b"?")
                if hears:
                    hear(tasks)

            assert one.drop_session(b"", "s0", b"?")
            ending.close()
            monkeypatch.setattr(ending._sessions, "hear", hear_later)
            if not hears:
                monkeypatch.setattr(ending.store, "hear", lambda take: [])
            ending.close_store()
            assert calls >= 3
        with opened(reader, tiers) as later:
            found = [cached(later, reader, name) for name in NAMES[:4]]
    assert min(found[2:]) > 60
    assert (max(found[:2]) == 0) == hears


def test_others_hear_of_a_drop_before_the_tiers_are_listed(
    reader: Any, tiers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that whoever writes to a tier after that has heard of it when it ends."""
    with opened(reader, tiers) as one, opened(reader, tiers) as other:
        cached(one, reader, "s0")
        cached(other, reader, "s0")
        heard: list[str] = []
        remove: Any = one.store.remove

        def watched(*given: Any) -> Any:
            heard.extend(notice["kind"] for notice in other.store.hear(take=True))
            return remove(*given)

        monkeypatch.setattr(one.store, "remove", watched)
        assert one.drop_session(b"", "s0", b"?")
        assert "drop" in heard


def test_a_server_that_is_idle_lets_go_within_seconds(reader: Any, tiers: list[str]) -> None:
    with opened(reader, tiers) as one, opened(reader, tiers) as idle:
        cached(one, reader, "s0")
        assert cached(idle, reader, "s0") > 60
        one.drop_session(b"", "s0", b"?")
        end = time.monotonic() + 10
        while held_of(idle, reader, "s0") and time.monotonic() < end:
            time.sleep(0.05)
        assert not held_of(idle, reader, "s0")


def test_sessions_are_known_where_they_were_not_created(reader: Any, tiers: list[str]) -> None:
    """Read, pinned, let go and dropped at another server, also one that was started later."""
    with opened(reader, tiers) as one:
        cached(one, reader, "chat")
        one.store.flush()
        with opened(reader, tiers) as other:
            (there,) = other.sessions(b"", "chat")
            assert there.requests == 0
            assert other.sessions(b"other", "chat") == []
            assert other.change_session(b"", "chat", SessionChange(keep=HOUR, priority=3))
            (here,) = one.sessions(b"", "chat")
            assert (here.pinned, here.ttl_s, here.priority) == (True, 3600, 3)
            assert one.store.pinned_keys()
            cached(other, reader, "chat")
            assert other.sessions(b"", "chat")[0].pinned
            assert one.change_session(b"", "chat", SessionChange(keep=False))
            assert not other.sessions(b"", "chat")[0].pinned
            assert not other.store.pinned_keys()
        with opened(reader, tiers) as later:
            freed = later.drop_session(b"", "chat", b"?")
            assert freed
            assert "ram" not in freed
        assert one.sessions(b"", "chat") == []
        assert cached(one, reader, "chat") == 0


def test_who_is_cut_off_hears_when_it_is_back(reader: Any, tiers: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile it serves what is in its memory; then it has missed nothing, whatever the clocks say."""
    with opened(reader, tiers) as one, opened(reader, tiers) as away:
        for engine in (one, away):
            for name in NAMES[:4]:
                cached(engine, reader, name)
        board = away.store._records.lower.tiers.tiers[0]._board
        assert board is not None
        with monkeypatch.context() as cut:
            cut.setattr(board, "heard", lambda since: None)
            assert one.drop_session(b"", "s0", b"?")
            with monkeypatch.context() as clock:
                clock.setattr("time.time", lambda: 1e9)  # long ago
                assert one.drop_session(b"", "s1", b"?")
            assert cached(away, reader, "s0") > 60
        assert [cached(away, reader, name) for name in ("s1", "s0")] == [0, 0]
        assert cached(away, reader, "s2") > 60


def test_a_request_under_way_elsewhere_keeps_nothing(reader: Any, tiers: list[str]) -> None:
    """Its session is dropped at another server while it decodes."""
    ids = text_of(reader, "chat")
    with (
        opened(reader, tiers) as one,
        opened(reader, tiers) as other,
    ):
        told = Told()
        one.submit(Job(ids=ids, options=SamplingOptions(max_tokens=200), session="chat"), told)
        end = time.monotonic() + 20
        while not other.sessions(b"", "chat") and time.monotonic() < end:
            time.sleep(0.01)
        assert other.drop_session(b"", "chat", b"?") is not None
        assert told.end.reason in ("length", "stop")
        one.store.flush()
        assert cached(other, reader, "chat") == 0
        other.store.flush()
        assert held_of(one, reader, "chat") == 0


def test_two_clients_with_one_name(reader: Any, tiers: list[str]) -> None:
    """What one client drops is another's no more than before."""
    with (
        opened(reader, tiers) as one,
        opened(reader, tiers) as other,
    ):
        for engine in (one, other):
            for client in (b"1", b"2"):
                ask(engine, text_of(reader, "chat"), 2, session="chat", client=client, salt=client)
            engine.store.flush()  # what is announced later than a drop is a new session
        assert one.drop_session(b"1", "chat", b"1")
        for engine in (one, other):
            assert engine.sessions(b"1", "chat") == []
            assert engine.sessions(b"2", "chat")
            assert ask(engine, text_of(reader, "chat"), 2, client=b"2", salt=b"2")[0].cached_tokens > 60
        told = [
            ask(engine, text_of(reader, "chat"), 2, client=b"1", salt=b"1")[0].cached_tokens for engine in (one, other)
        ]
        assert told[0] == 0


def test_names_of_clients_are_in_no_notice(reader: Any, tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    with engine_of(*reader, tiers=[f"disk:{folder}:1GB"], chunk_size=16) as engine:
        ask(engine, text_of(reader, "chat"), 2, session="chat", client=b"sk-hush-hush", salt=b"x")
        engine.store.flush()
        notices = (folder / "notices").read_bytes()
    assert b'"session"' in notices
    assert b"hush" not in notices
    assert (folder / "notices").stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(BINARY is None, reason="no server")
def test_a_tier_that_does_not_answer_is_told_when_it_does(reader: Any, tmp_path: Path) -> None:
    """The client is told that the session is not gone from everywhere; asked again, it is."""
    server = Server(tmp_path)
    tiers = [server.url]
    try:
        with (
            opened(reader, tiers) as one,
            opened(reader, tiers) as other,
        ):
            cached(one, reader, "chat")
            assert cached(other, reader, "chat") > 60
            server.stall()
            with pytest.raises(UnreachableTierError, match="valkey"):
                one.drop_session(b"", "chat", b"?")
            assert cached(one, reader, "other") == 0
            assert one.sessions(b"", "chat")  # it is listed until it is gone
            server.go_on()
            end = time.monotonic() + 30
            gone = None
            while gone is None and time.monotonic() < end:
                time.sleep(0.2)
                try:
                    gone = one.drop_session(b"", "chat", b"?")
                except UnreachableTierError:
                    continue
            assert gone is not None
            assert cached(other, reader, "chat") == 0
    finally:
        server.go_on()
        server.stop()


def generated(model: Any, store: ChunkStore, ids: torch.Tensor) -> int:
    cache = ChunkReuseCache(model, store)
    model.generate(ids, past_key_values=cache, max_new_tokens=1, do_sample=False)
    return cache.report.reused_tokens


def test_what_one_process_takes_out_of_service_none_uses(reader: Any, tiers: list[str]) -> None:
    """Stores without a server: quarantined and cleared K/V goes from the memory of others, too."""
    model = reader[0]
    ids = torch.tensor([text_of(reader, "chat")])
    with (
        ChunkStore(model, chunk_size=16, tiers=tiers) as one,
        ChunkStore(model, chunk_size=16, tiers=tiers) as other,
    ):
        for store in (one, other, one, other):
            reused = generated(model, store, ids)
            store.flush()
        assert reused > 60
        second = next(each for each in one.held() if each.start == 16)
        one.quarantine([second.key])
        assert generated(model, other, ids) == 16
        for store in (one, other):
            store.flush()
            generated(model, store, ids)
        one.clear()
        assert generated(model, other, ids) == 0


def test_who_was_away_for_too_long_uses_nothing_it_holds(
    reader: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of notices was shortened, removed, cut or written over: anything may have been removed."""
    model, folder = reader[0], tmp_path / "tier"
    ids = torch.tensor([text_of(reader, "chat")])
    tiers = [f"disk:{folder}:1GB"]
    notices = folder / "notices"

    def shorten(one: ChunkStore) -> None:
        tier: Any = one._records.lower.tiers.tiers[0].tier
        tier._notices._max_bytes = 3000
        for _ in range(60):
            one.announce({"kind": "other", "text": "x" * 100})

    def cut(one: ChunkStore) -> None:
        os.truncate(notices, 100)

    def flip(one: ChunkStore) -> None:
        one.announce({"kind": "other", "text": "x" * 100})
        data = bytearray(notices.read_bytes())
        data[-20] ^= 1
        notices.write_bytes(data)

    def remove(one: ChunkStore) -> None:
        notices.unlink()

    def replace(one: ChunkStore) -> None:
        notices.write_bytes(b"something else\n")

    for away in (shorten, cut, flip, remove, replace):
        with (
            ChunkStore(model, chunk_size=16, tiers=tiers) as one,
            ChunkStore(model, chunk_size=16, tiers=tiers) as other,
        ):
            one.announce({"kind": "other"})
            for _ in range(2):
                generated(model, other, ids)
                other.flush()
            assert other.stats()["chunks"]
            away(one)
            other.hear()
            held = len(other.held())
            one.announce({"kind": "other"})
            other.hear()
            assert min(held, len(other.held())) == 0, away.__name__
            assert generated(model, other, ids) > 60  # the tier has it still


def test_a_writer_that_was_killed_in_a_line_loses_that_line_alone(tmp_path: Path) -> None:
    file = NoticeFile(tmp_path / "notices")
    file.append(b"one")
    with open(tmp_path / "notices", "ab") as half:
        half.write(b"12345678 half of")
    heard = file.read(None)
    assert list(heard.notices) == [b"one"]
    file.append(b"two")
    later = file.read(heard.place)
    assert list(later.notices) == [b"two"]
    assert not later.complete  # nobody knows what it was to tell


def test_a_file_that_was_only_touched_tells_nothing_and_loses_nothing(tmp_path: Path) -> None:
    file = NoticeFile(tmp_path / "notices")
    file.append(b"one")
    heard = file.read(None)
    os.utime(tmp_path / "notices", (1, 1))
    later = file.read(heard.place)
    assert (list(later.notices), later.complete) == ([], True)
    file.append(b"two")
    assert list(file.read(later.place).notices) == [b"two"]


def test_a_file_that_was_shortened_is_read_on(tmp_path: Path) -> None:
    file = NoticeFile(tmp_path / "notices", max_bytes=2000)
    heard = file.read(None)
    told: list[bytes] = []
    for number in range(500):
        file.append(b"notice %d" % number)
        if number % 7 == 0:
            heard = file.read(heard.place)
            assert heard.complete
            told += heard.notices
    told += file.read(heard.place).notices
    assert told == [b"notice %d" % number for number in range(500)]
    assert (tmp_path / "notices").stat().st_size < 4000
    assert [path.name for path in tmp_path.iterdir()] == ["notices"]


def _write_many(path: Path, name: bytes) -> None:
    file = NoticeFile(path, max_bytes=20_000)
    for number in range(400):
        file.append(b"%s %d" % (name, number))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_processes_write_to_one_file_and_none_loses_a_notice(tmp_path: Path) -> None:
    file = NoticeFile(tmp_path / "notices", max_bytes=20_000)
    heard, told = file.read(None), list[bytes]()
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_many, args=(tmp_path / "notices", name)) for name in (b"a", b"b")]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        heard = file.read(heard.place)
        assert heard.complete
        told += heard.notices
    told += file.read(heard.place).notices
    for name in (b"a", b"b"):
        assert [each for each in told if each.startswith(name)] == [b"%s %d" % (name, number) for number in range(400)]
