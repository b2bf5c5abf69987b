"""Tiers on servers and file systems, as long as they work, and when they do not."""

import errno
import logging
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from uuid import uuid4

import fsspec
import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

from tests.internals.cache import (
    FilesystemTier,
    Guard,
    Tier,
    ValkeyTier,
    _is_foreign,
    _member,
    open_tier,
    pack_entry,
    parse_tier,
    unpack_entry,
)
from tests.servers import BINARY, Impostor, Server, free_port
from tests.tier_contract import ROOT, assert_same, keys, make_blob, make_entry, name_of, write

pytestmark = pytest.mark.daily

valkey = pytest.importorskip("valkey")
needs_server = pytest.mark.skipif(BINARY is None, reason="neither valkey-server nor redis-server is on the PATH")

COOLDOWN_S = 0.05
TIMEOUT_S = 0.3  # where a server does not answer; others have time, on a busy machine, too


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers of the test's own, with options."""
    with ExitStack() as stack:

        def start(*options: str) -> Server:
            server = Server(tmp_path, *options)
            stack.callback(server.stop)
            return server

        yield start


@pytest.fixture
def connect() -> Iterator[Callable[..., ValkeyTier]]:
    """Opens tiers that come back soon after a failure, and closes them."""
    with ExitStack() as stack:

        def connect(url: str, **options: object) -> ValkeyTier:
            tier = ValkeyTier(url, **({"timeout_s": 20.0, "cooldown_s": COOLDOWN_S} | options))  # type: ignore[arg-type]
            stack.callback(tier.close)
            return tier

        yield connect


def eventually(succeeds: Callable[[], object]) -> None:
    """Try until it does; a tier comes back after its cool-down."""
    deadline = time.monotonic() + 20
    while not succeeds():
        assert time.monotonic() < deadline
        time.sleep(COOLDOWN_S / 2)


def test_a_read_that_comes_too_early_takes_nothing_away(files, monkeypatch):
    """Another thread writes the chunk after this one has found that it is not there."""
    entry = make_entry(0)

    def too_early(paths):
        write(files, entry)
        return {path: FileNotFoundError(path) for path in paths}

    with monkeypatch.context() as patched:
        patched.setattr(files, "_contents", too_early)
        assert files.read(entry.key) is None
    assert files.read(entry.key) is not None
    assert list(files.find([entry.key])) == [entry.key]


# Guard


def fail() -> str:
    raise OSError("the password is hush")


def test_what_failed_is_left_alone_and_then_tried_once(caplog):
    guard = Guard("The test", secrets=["hush"], cooldown_s=COOLDOWN_S)
    assert guard.call("well", str.lower, "GOOD") == "good"
    assert guard.call("otherwise", fail) == "otherwise"
    assert (guard.state, guard.errors) == ("down", 1)
    assert caplog.messages == ["The test failed, and is left alone for a while (OSError: the password is ***)."]
    eventually(lambda: guard.call(False, lambda: True))
    assert (guard.state, guard.errors) == ("open", 1)


def test_is_left_alone_for_longer_each_time_up_to_a_limit(monkeypatch):
    now = 100.0
    monkeypatch.setattr("kvboost_hf.cache.tiers.base.monotonic", lambda: now)
    guard, pauses = Guard("The test"), list[float]()
    for _ in range(7):
        guard.call(None, fail)
        failed_at = now
        while guard.errors == len(pauses) + 1:
            now += 0.5
            guard.call(None, fail)
        pauses.append(now - failed_at)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]


def test_while_one_call_finds_out_the_others_go_on_without():
    guard = Guard("The test", cooldown_s=COOLDOWN_S)
    guard.call(None, fail)
    during: list[str] = []

    def probe() -> bool:
        during.append(guard.call("skipped", lambda: "tried"))
        return True

    eventually(lambda: guard.call(False, probe))
    assert during == ["skipped"]


def test_a_late_success_proves_nothing():
    guard = Guard("The test", cooldown_s=60.0)

    def fails_meanwhile() -> str:
        guard.call(None, fail)
        return "late"

    assert guard.call("", fails_meanwhile) == "late"
    assert guard.state == "down"


@pytest.mark.parametrize("cooldown_s", [0, -1, float("nan")])
def test_refuses_a_cooldown_that_is_none(cooldown_s):
    with pytest.raises(ValueError, match="`cooldown_s` must be more than 0 seconds"):
        Guard("The test", cooldown_s=cooldown_s)


# Entries as bytes


def test_entries_survive_as_bytes():
    entry = make_entry(1, start=2**40, nbytes=2**40)
    assert_same(unpack_entry(pack_entry(entry)), entry)


def test_entries_of_earlier_releases_are_read():
    entry = make_entry(1, start=2**40, nbytes=2**40)
    tokens = entry.tokens.astype("<i8").tobytes()
    fields = (entry.key, entry.kind.value.encode(), entry.model, entry.root, entry.parent, entry.head, tokens)
    packed = struct.pack("<4sqq7I", b"KVE1", entry.start, entry.nbytes, *map(len, fields)) + b"".join(fields)
    assert_same(unpack_entry(packed), entry)
    for damaged in (packed[:-1], packed[:20], packed + b"x", packed.replace(b"chunk", b"shelf")):
        with pytest.raises(ValueError, match=r"."):
            unpack_entry(damaged)


def test_a_part_of_an_entry_is_none():
    packed = pack_entry(make_entry(1))
    for damaged in (b"", packed[:-1], packed + b"x", b"KVE0" + packed[4:], packed.replace(b"chunk", b"shelf")):
        with pytest.raises(ValueError, match=r"."):
            unpack_entry(damaged)


# Servers


@needs_server
def test_a_server_that_is_killed_is_a_miss_until_it_is_back(start, connect, caplog):
    server = start()
    tier, entry = connect(server.url), make_entry(1)
    write(tier, entry)
    server.stop()
    assert tier.find([entry.key]) == {}
    assert tier.read(entry.key) is None
    assert not tier.write(make_entry(2), make_blob(make_entry(2)))
    tier.touch([entry.key])
    tier.delete([entry.key])
    tier.clear(entry.model)
    assert (keys(tier.entries()), tier.find_alike([entry.head]), tier.hits()) == ([], [], {})
    assert tier.stats()["state"] == "down"
    assert len(caplog.messages) == 1
    server.start()
    eventually(lambda: tier.write(entry, make_blob(entry)))
    assert set(tier.find([entry.key])) == {entry.key}
    assert tier.stats()["state"] == "open"
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


@needs_server
@pytest.mark.parametrize("call", ["find", "read", "write"])
def test_a_server_that_stalls_costs_one_timeout(start, connect, call):
    server = start()
    tier, entry = connect(server.url, timeout_s=TIMEOUT_S, cooldown_s=3.0), make_entry(1)
    large = make_entry(2, nbytes=32 * 2**20)
    write(connect(server.url), entry)
    calls = {
        "find": lambda: tier.find([entry.key]),
        "read": lambda: tier.read(entry.key),
        "write": lambda: tier.write(large, [bytes(large.nbytes)]),
    }
    server.stall()
    began = time.monotonic()
    assert not calls[call]()
    assert TIMEOUT_S <= time.monotonic() - began < 20 * TIMEOUT_S
    for other in calls.values():
        assert not other()
    assert tier.stats()["errors"] == 1  # no other was tried
    server.go_on()
    eventually(lambda: tier.read(entry.key) == b"".join(make_blob(entry)))


@needs_server
def test_a_server_that_is_not_there_yet_may_come(start, connect, caplog):
    server = start()
    server.stop()
    tier = connect(server.url)
    assert tier.stats()["state"] == "down"
    assert "is left alone for a while" in caplog.text
    server.start()
    eventually(lambda: tier.stats()["state"] == "open")
    write(tier, make_entry(1))


@needs_server
def test_a_full_server_is_read_from(start, connect, caplog):
    server = start("--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
    tier = connect(server.url, cooldown_s=60.0)
    entries = [make_entry(number, nbytes=2**20) for number in range(12)]
    kept = [entry for entry in entries if tier.write(entry, make_blob(entry))]
    assert 0 < len(kept) < 12
    assert tier.read(kept[0].key) == b"".join(make_blob(kept[0]))
    assert set(keys(tier.entries())) == set(keys(kept))
    assert tier.stats()["state"] == "open"
    assert tier.stats()["errors"] == 1
    (message,) = caplog.messages
    assert message.endswith("(ResponseError: command not allowed when used memory > 'maxmemory'.).")


@needs_server
def test_what_the_server_gives_up_is_dropped_from_all_lists(start, connect):
    server = start("--maxmemory", "8mb", "--maxmemory-policy", "allkeys-random")
    tier, head = connect(server.url), name_of("shared head")
    # Of what the server gives up at random, lists are spared: theirs is a database that is not full.
    write(tier, *(make_entry(number, nbytes=2**18, head=head) for number in range(8)))
    client = valkey.Valkey.from_url(server.url)
    for number in range(0, 8, 2):
        client.delete(f"kvboost_hf:chunk:{make_entry(number).key.hex()}")
    left = {make_entry(number).key for number in range(1, 8, 2)}
    assert set(keys(tier.find_alike([head]))) == left
    assert set(keys(tier.entries(ROOT))) == left
    assert set(keys(tier.entries())) == left
    assert client.zcard(f"kvboost_hf:head:{head.hex()}") == 4
    assert client.scard(f"kvboost_hf:root:{ROOT.hex()}") == 4
    assert (tier.stats()["chunks"], tier.stats()["bytes"]) == (4, 4 * 2**18)
    client.close()
    for number in range(100, 160):  # and then the server gives up what it likes
        tier.write(make_entry(number, nbytes=2**18), make_blob(make_entry(number, nbytes=2**18)))
    for entry in tier.entries():
        assert tier.read(entry.key) == b"".join(make_blob(entry))


@pytest.mark.parametrize("name", ["used", f"root:{ROOT.hex()}"])
def test_a_list_that_the_server_gives_up_leaves_nothing_that_cannot_be_deleted(shared_server, connect, name):
    tier, entries = connect(shared_server.url, prefix=(prefix := uuid4().hex)), [make_entry(n) for n in range(3)]
    write(tier, *entries)
    client = valkey.Valkey.from_url(shared_server.url)
    client.delete(f"{prefix}:{name}")
    assert set(tier.find(keys(entries))) == set(keys(tier.entries(ROOT)))
    assert tier.clear(entries[0].model)
    assert tier.find(keys(entries)) == {}
    assert not client.keys(f"{prefix}:chunk:*")
    write(tier, *entries)
    assert set(tier.find(keys(entries))) == set(keys(entries))
    client.close()


@pytest.mark.parametrize("name", ["used", "bytes"])
def test_a_budget_holds_once_the_server_gave_up_what_it_is_counted_by(shared_server, connect, name):
    tier = connect(shared_server.url, prefix=(prefix := uuid4().hex), max_bytes=12_000)
    write(tier, *(make_entry(number) for number in range(4)))
    with valkey.Valkey.from_url(shared_server.url) as client:
        client.delete(f"{prefix}:{name}")
    written = [make_entry(number) for number in range(10, 14)]
    write(tier, *written)
    assert set(keys(tier.entries())) == set(keys(written))
    assert (tier.stats()["chunks"], tier.stats()["bytes"]) == (4, 12_000)


def test_a_blob_without_some_piece_is_none(shared_server, connect):
    tier = connect(shared_server.url, prefix=uuid4().hex)
    entry = make_entry(1, nbytes=3 * 2**20)
    write(tier, entry)
    with valkey.Valkey.from_url(shared_server.url) as client:
        client.hdel(f"{tier._prefix}:chunk:{entry.key.hex()}", "3")
    assert tier.read(entry.key) is None
    assert tier.stats()["errors"] == 0


def test_an_entry_that_is_none_is_a_miss(shared_server, connect):
    tier = connect(shared_server.url, prefix=uuid4().hex)
    first, second = make_entry(1), make_entry(2)
    write(tier, first, second)
    with valkey.Valkey.from_url(shared_server.url) as client:
        client.hset(f"{tier._prefix}:chunk:{first.key.hex()}", "entry", b"half of it")
        client.hset(f"{tier._prefix}:chunk:{second.key.hex()}", "entry", pack_entry(first))  # another's
    assert tier.find([first.key, second.key]) == {}
    assert tier.read(first.key) is None
    assert tier.stats()["errors"] == 0
    write(tier, first, second)  # whose places are free again
    assert tier.read(second.key) == b"".join(make_blob(second))


@pytest.mark.parametrize("kind", ["string", "list", "hash"])
@pytest.mark.parametrize("name", ["chunk", "head", "root", "used", "hits", "bytes", "notices"])
def test_a_key_of_another_type_is_removed(shared_server, connect, caplog, name, kind):
    """One call fails, and no later one: nothing of ours could be written there, and nothing could be found."""
    tier = connect(shared_server.url, prefix=(prefix := uuid4().hex))
    first, second = make_entry(1), make_entry(2)
    write(tier, second)
    part = {"chunk": f":{first.key.hex()}", "head": f":{first.head.hex()}", "root": f":{ROOT.hex()}"}.get(name, "")
    with valkey.Valkey.from_url(shared_server.url) as client:
        key = f"{prefix}:{name}{part}"
        client.delete(key)
        if kind == "string":
            client.set(key, "what is no number")
        elif kind == "list":
            client.rpush(key, "an item")
        else:
            client.hset(key, "field", "value")
    for _ in range(3):
        tier.find([first.key])
        tier.write(first, make_blob(first))
        tier.find_alike([first.head])
        tier.touch([first.key])
        tier.announce(b"notice")
        tier.heard(None)
        tier.hits()
        tier.stats()
        time.sleep(3 * COOLDOWN_S)
    errors = tier.stats()["errors"]
    assert tier.clear(first.model)
    for entry in (first, second):
        write(tier, entry)
        assert tier.read(entry.key) == b"".join(make_blob(entry))
    assert set(keys(tier.find_alike([first.head]))) == {first.key}
    tier.touch([first.key])
    assert tier.hits() == {first.key: 1}
    assert tier.announce(b"another")
    assert b"another" in tier.heard(None).notices
    stats = tier.stats()
    assert (stats["chunks"], stats["bytes"], stats["errors"], stats["state"]) == (2, 6000, errors, "open")
    assert errors <= 2


def test_only_what_has_another_type_is_removed():
    told = ["WRONGTYPE Operation against a key", "value is not an integer or out of range", "OOM command not allowed"]
    assert [_is_foreign(valkey.ResponseError(each)) for each in told] == [True, True, False]


def test_a_sum_that_is_no_number_is_made_anew(shared_server, connect):
    tier = connect(shared_server.url, prefix=(prefix := uuid4().hex))
    write(tier, make_entry(1), make_entry(2))
    with valkey.Valkey.from_url(shared_server.url) as client:
        client.set(f"{prefix}:bytes", "what is no number")
    assert (tier.stats()["bytes"], tier.stats()["errors"]) == (6000, 0)


def test_the_hits_of_all_chunks_are_read(shared_server, connect):
    tier, entries = connect(shared_server.url, prefix=uuid4().hex), [make_entry(n) for n in range(3)]
    write(tier, *entries)
    tier.touch(keys(entries))
    assert tier.hits() == dict.fromkeys(keys(entries), 1)


def test_what_the_server_gave_up_counts_once_when_it_is_written_again(shared_server, connect):
    """Else the budget seemed to be taken up, and all the rest was given up for it."""
    tier = connect(shared_server.url, prefix=(prefix := uuid4().hex), max_bytes=12_000)
    write(tier, make_entry(1), make_entry(2))
    with valkey.Valkey.from_url(shared_server.url) as client:
        for _ in range(5):
            client.delete(f"{prefix}:chunk:{make_entry(1).key.hex()}")
            write(tier, make_entry(1))
    assert set(keys(tier.entries())) == {make_entry(1).key, make_entry(2).key}
    assert tier.stats()["bytes"] == 6000


@pytest.mark.parametrize("prefix", ["app[1]", "app*", "app?", "a\\b"])
def test_a_prefix_may_have_any_letters(shared_server, connect, prefix):
    own, other = f"{prefix}{uuid4().hex}", f"app1{uuid4().hex}"
    tiers = [connect(shared_server.url, prefix=each) for each in (own, other)]
    for tier in tiers:
        write(tier, make_entry(1))
        assert keys(tier.entries(ROOT[:3])) == [make_entry(1).key]
    assert tiers[0].clear(make_entry(1).model)
    assert [keys(tier.entries()) for tier in tiers] == [[], [make_entry(1).key]]


def test_a_field_that_is_no_piece_is_passed_over(shared_server, connect):
    """One bad chunk is no reason to leave the server alone."""
    tier, entry = connect(shared_server.url, prefix=uuid4().hex), make_entry(1)
    write(tier, entry)
    with valkey.Valkey.from_url(shared_server.url) as client:
        client.hset(f"{tier._prefix}:chunk:{entry.key.hex()}", "no number", b"anything")
    assert tier.read(entry.key) == b"".join(make_blob(entry))
    assert (tier.stats()["errors"], tier.stats()["state"]) == (0, "open")


def test_what_is_not_used_for_its_time_to_live_is_gone(shared_server, connect):
    tier, began = connect(shared_server.url, prefix=uuid4().hex, ttl_s=0.5), time.monotonic()
    write(tier, make_entry(1))
    assert set(tier.find([make_entry(1).key])) == {make_entry(1).key} or time.monotonic() - began > 0.5
    eventually(lambda: not tier.find([make_entry(1).key]))
    assert tier.find_alike([make_entry(1).head]) == []
    assert keys(tier.entries()) == []
    assert (tier.stats()["chunks"], tier.stats()["bytes"]) == (0, 0)


def test_use_keeps_alive(shared_server, connect):
    tier = connect(shared_server.url, prefix=uuid4().hex, ttl_s=100.0)
    write(tier, make_entry(1))
    with valkey.Valkey.from_url(shared_server.url) as client:
        names = [name for name in client.keys(f"{tier._prefix}:*") if client.expire(name, 5)]
        tier.touch([make_entry(1).key])
        kinds = {name.split(b":")[1] for name in names if client.ttl(name) > 5}
    assert kinds == {b"chunk", b"head", b"root"}


def test_counts_again_what_a_client_that_died_has_left_wrong(shared_server, connect):
    prefix = uuid4().hex
    tier = connect(shared_server.url, prefix=prefix)
    write(tier, make_entry(1), make_entry(2))
    with valkey.Valkey.from_url(shared_server.url) as client:
        client.incrby(f"{prefix}:bytes", 12345)
    assert tier.stats()["bytes"] == 6000 + 12345
    assert connect(shared_server.url, prefix=prefix).stats()["bytes"] == 6000


def test_listens_at_a_unix_socket(shared_server, connect):
    tier = connect(f"unix://{shared_server.socket}?db=1", prefix=uuid4().hex)
    write(tier, make_entry(1))
    assert tier.location == f"unix://{shared_server.socket}"


def test_only_its_prefix_is_touched(shared_server, connect):
    first, second = (connect(shared_server.url, prefix=uuid4().hex) for _ in range(2))
    write(first, make_entry(1))
    write(second, make_entry(1))
    first.clear(make_entry(1).model)
    assert (keys(first.entries()), keys(second.entries())) == ([], [make_entry(1).key])
    with valkey.Valkey.from_url(shared_server.url) as client:
        left = client.keys(f"{first._prefix}:*")
    assert left == [f"{first._prefix}:bytes".encode()]


@needs_server
@pytest.mark.parametrize("password", ["hush/hush:1", "wrong"])
def test_the_password_is_not_shown(start, connect, caplog, password):
    server = start("--requirepass", "hush/hush:1")
    caplog.set_level(logging.DEBUG)
    url = f"redis://:{password.replace('/', '%2F')}@127.0.0.1:{server.port}/0"
    tier = connect(url)
    assert tier.write(make_entry(1), make_blob(make_entry(1))) == (password != "wrong")
    server.stop()
    tier.find([make_entry(1).key])
    assert tier.location == f"redis://127.0.0.1:{server.port}/0"
    assert caplog.messages
    for shown in (caplog.text, repr(tier), str(tier.stats())):
        assert "hush" not in shown
        assert "wrong@" not in shown


GARBAGE = [
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b"$many\r\n",
    b"*-5\r\n",
    b":12\r\n",
    b"+OK\r\n" * 50,
    b"*3\r\n:1\r\n$3\r\nabc\r\n*0\r\n" * 50,
    b"-ERR unknown\r\n",
    b"-LOADING it takes time\r\n",
    b"$99999999999\r\nabc",
    b"*1\r\n" * 5000,
    bytes(range(256)) * 10 + b"\r\n",
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_a_miss(connect, garbage):
    with Impostor(lambda heard: garbage) as impostor:
        tier, entry = connect(impostor.url, timeout_s=TIMEOUT_S, cooldown_s=1e-6), make_entry(1)
        assert tier.find([entry.key]) == {}
        assert tier.find_alike([entry.head]) == []
        assert tier.read(entry.key) is None
        assert keys(tier.entries()) == keys(tier.entries(ROOT)) == []
        tier.write(entry, make_blob(entry))  # that it is there already may be believed
        tier.touch([entry.key])
        tier.delete([entry.key])
        tier.hits()
        assert tier.stats()["errors"]
        tier.close()
    assert impostor.received  # it was there, and asked


@pytest.mark.parametrize("answer", [b"*-5\r\n", b"", b"HTTP/1.1 400 Bad Request\r\n"])
def test_what_is_lost_on_its_way_is_not_kept(connect, answer):
    def answers(heard: bytes) -> bytes:
        known = {b"CLIENT": b"+OK\r\n", b"WATCH": b"+OK\r\n", b"EXISTS": b":0\r\n"}
        return next((reply for command, reply in known.items() if command in heard), answer)

    with Impostor(answers) as impostor:
        tier, entry = connect(impostor.url, timeout_s=TIMEOUT_S, cooldown_s=1e-6), make_entry(1)
        assert not tier.write(entry, make_blob(entry))
        assert tier.stats()["state"] == "down"
        tier.close()
    assert b"HSET" in impostor.received


@pytest.mark.daily
@pytest.mark.parametrize("allowed", [True, False])
def test_room_is_made_in_as_many_rounds_as_it_takes(connect, monkeypatch, allowed):
    """Unless chunks cannot be given up."""
    tier, rounds = connect(f"redis://127.0.0.1:{free_port()}/0", max_bytes=1000), []
    entries = [make_entry(n) for n in range(5)]
    held = [_member(entry) for entry in entries]
    size = entries[0].nbytes

    def drop(members):
        rounds.append(len(members))
        del held[: len(members) if allowed else 0]
        return allowed

    tier.max_bytes = 5 * size
    monkeypatch.setattr(tier, "_count", lambda: (len(held), len(held) * size))
    monkeypatch.setattr(tier, "_ask", lambda commands: [held[:2]])
    monkeypatch.setattr(tier, "_drop", drop)
    tier._make_room(3 * size)
    assert (rounds, len(held)) == (([2, 1], 2) if allowed else ([2], 5))


def test_nobody_is_there(connect, caplog):
    tier = connect(f"redis://127.0.0.1:{free_port()}/0")
    assert tier.find([make_entry(1).key]) == {}
    assert tier.stats()["state"] == "down"
    assert caplog.messages[0].startswith(f"The tier at {tier.location} failed")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "host:6379",
        "http://:hush@host",
        "redis://:hush@host:port",
        "redis://:hu/hush@host/0",
        "redis://:hush@host?no_such_option=hush",
        "redis://:hush@host?protocol=9",
        "redis://host?socket_timeout=hush",
    ],
)
def test_a_wrong_url_is_refused_without_its_password(url):
    with pytest.raises(ValueError, match=r"Example: 'redis://localhost:6379/0'") as caught:
        ValkeyTier(url)
    assert "hush" not in str(caught.value)
    assert caught.value.__suppress_context__


@pytest.mark.parametrize("address", ["disk:kv:1MB", "file://kv:1MB", "local://kv"])
def test_a_relative_folder_stays_where_it_was_opened(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    tier = open_tier(parse_tier(address))
    monkeypatch.chdir("elsewhere")
    entry = make_entry(1)
    write(tier, entry)
    assert keys(tier.entries()) == [entry.key]
    assert tier.read(entry.key) is not None
    tier.close()
    assert not list((tmp_path / "elsewhere").iterdir())
    assert (tmp_path / "kv").is_dir()


@pytest.mark.parametrize("option", [{"ttl_s": 0}, {"timeout_s": -1}, {"cooldown_s": 0}])
def test_refuses_numbers_that_are_not_positive(option):
    with pytest.raises(ValueError, match=f"`{next(iter(option))}` must be"):
        ValkeyTier("redis://127.0.0.1:1/0", **option)


def test_refuses_blobs_that_no_server_takes(shared_server, connect, monkeypatch):
    monkeypatch.setattr("kvboost_hf.cache.tiers.valkey._MAX_BLOB_BYTES", 100)
    tier = connect(shared_server.url, prefix=uuid4().hex)
    taken = [tier.write(make_entry(n, nbytes=n), [np.zeros(n, np.uint8).data]) for n in (100, 101)]
    assert (taken, tier.stats()["errors"]) == ([True, False], 0)


# File systems


@pytest.fixture
def files(tmp_path: Path) -> FilesystemTier:
    return FilesystemTier(tmp_path.as_uri(), cooldown_s=COOLDOWN_S)


@pytest.mark.parametrize("keep", [0, 1, 2, 3, 4])
def test_a_writer_that_dies_leaves_no_entry_without_a_blob(tmp_path, monkeypatch, keep):
    entry = make_entry(1)
    dying = FilesystemTier(tmp_path.as_uri())
    left, put = keep, dying._put

    def put_or_die(path: str, content: bytes) -> None:
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        put(path, content)

    monkeypatch.setattr(dying, "_put", put_or_die)
    try:
        assert dying.write(entry, make_blob(entry)) == (keep == 4)
    except KeyboardInterrupt:
        assert keep < 4
    tier = FilesystemTier(tmp_path.as_uri(), max_bytes=5000)
    for found in (*tier.find([entry.key]).values(), *tier.find_alike([entry.head]), *tier.entries()):
        assert_same(found, entry)
        assert tier.read(found.key) == b"".join(make_blob(entry))
    write(tier, entry)
    write(tier, make_entry(2))  # what was left half written is given up as any other
    assert tier.stats()["bytes"] == 3000
    assert keys(tier.entries()) == [make_entry(2).key]


def _killed_after(files: Any, name: str, times: int, change: Callable[[], object]) -> None:
    """A process that is killed in a change, after so many files: no handler of an Exception runs."""
    work, left = getattr(files, name), times

    def work_or_die(*args: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        work(*args)

    with pytest.MonkeyPatch.context() as patched, suppress(KeyboardInterrupt):
        patched.setattr(files, name, work_or_die)
        change()


@pytest.mark.parametrize(("hours", "is_left"), [(0, True), (-2, False), (2, False)])
def test_what_a_killed_writer_left_is_removed(tmp_path, monkeypatch, hours, is_left):
    """Not what others are writing, nor files of somebody else's."""
    files, foreign = FilesystemTier(tmp_path.as_uri()), tmp_path / "unfinished-letter"
    clock = SimpleNamespace(time_ns=lambda: time.time_ns() + hours * 3600 * 10**9)
    with monkeypatch.context() as patched:
        patched.setattr("kvboost_hf.cache.tiers.filesystem.time", clock)
        patched.setattr("kvboost_hf.cache.tiers.filesystem.os.replace", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            files.write(make_entry(1), make_blob(make_entry(1)))
    (left,) = tmp_path.glob("unfinished-*")
    for path in (foreign, earlier := tmp_path / f"unfinished-{uuid4().hex}"):
        path.touch()
    FilesystemTier(tmp_path.as_uri())
    assert (left.exists(), foreign.exists(), earlier.exists()) == (is_left, True, False)


@pytest.mark.parametrize("times", [0, 1, 2, 3])
def test_what_takes_room_is_counted(tmp_path, times):
    """Also what a process has left that was killed while it wrote or gave up a chunk."""
    files, written, given_up = FilesystemTier(tmp_path.as_uri()), make_entry(1), make_entry(2)
    write(files, given_up)
    _killed_after(files, "_put", times, lambda: files.write(written, make_blob(written)))
    _killed_after(files._fs, "rm_file", times, lambda: files.delete([given_up.key]))
    there = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert FilesystemTier(tmp_path.as_uri()).stats()["bytes"] >= there


@pytest.mark.parametrize("written", [0, 1, 2, 3])
def test_a_full_disk_has_nothing_of_what_did_not_fit(tmp_path, monkeypatch, written):
    """A part that was written would be counted nowhere, and take the room that is left."""
    tier, entry, replace = FilesystemTier(tmp_path.as_uri(), cooldown_s=COOLDOWN_S), make_entry(1), os.replace
    left = written

    def replace_some(*args: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(*args)

    with monkeypatch.context() as patched:
        patched.setattr("kvboost_hf.cache.tiers.filesystem.os.replace", replace_some)
        assert not tier.write(entry, make_blob(entry))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    eventually(lambda: tier.write(entry, make_blob(entry)))
    assert set(tier.find([entry.key])) == {entry.key}


@pytest.mark.parametrize("max_bytes", [None, 2**30])
def test_on_a_full_disk_what_was_used_longest_ago_makes_room(tmp_path, monkeypatch, max_bytes):
    tier, entries = FilesystemTier(tmp_path.as_uri(), max_bytes=max_bytes), [make_entry(n) for n in range(5)]
    replace = os.replace

    def replace_within_a_disk(source: str, target: str) -> None:
        if sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors")) >= 9000 and target.endswith("tensors"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    monkeypatch.setattr("kvboost_hf.cache.tiers.filesystem.os.replace", replace_within_a_disk)
    write(tier, *entries[:3])
    tier.touch([entries[0].key])
    write(tier, *entries[3:])
    assert set(tier.find(keys(entries))) == {entries[n].key for n in (0, 3, 4)}
    assert (tier.stats()["errors"], tier.stats()["bytes"]) == (0, 9000)


def test_a_disk_that_fails_and_is_not_full_gives_nothing_up(tmp_path, monkeypatch):
    tier, entries = FilesystemTier(tmp_path.as_uri()), [make_entry(n) for n in range(3)]
    write(tier, *entries[:2])

    def broken(*args: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr("kvboost_hf.cache.tiers.filesystem.os.replace", broken)
        assert not tier.write(entries[2], make_blob(entries[2]))
    assert set(tier.find(keys(entries))) == set(keys(entries[:2]))


@pytest.mark.parametrize("change", ["write", "delete", "announce", "clean"])
def test_what_cannot_be_written_to_is_read(tmp_path, monkeypatch, caplog, change):
    tier, entry, other = FilesystemTier(tmp_path.as_uri(), cooldown_s=60.0), make_entry(1), make_entry(2)
    write(tier, entry)
    if change == "clean":
        (tmp_path / "chunks" / f"{other.key.hex()}.entry").write_bytes(b"what is no entry")

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("kvboost_hf.cache.tiers.filesystem._put_privately", refuse)
    monkeypatch.setattr(tier._fs, "rm_file", refuse)
    for _ in range(2):
        if change == "write":
            assert not tier.write(other, make_blob(other))
        elif change == "delete":
            assert not tier.delete([entry.key])
        elif change == "announce":
            assert not tier.announce(b"a notice")
        assert set(tier.find([entry.key, other.key])) == {entry.key}
        assert tier.read(entry.key) == b"".join(make_blob(entry))
    stats = tier.stats()
    assert (stats["chunks"], stats["state"], stats["errors"]) == (1, "open", 1)
    assert len(caplog.messages) == 1


def test_who_has_heard_none_of_many_notices_may_have_missed_some(tmp_path, monkeypatch):
    monkeypatch.setattr("kvboost_hf.cache.tiers.filesystem._LISTED_EVERY_S", 0.0)
    monkeypatch.setattr("kvboost_hf.cache.tiers.filesystem._MAX_NOTICES", 16)
    early, others = (FilesystemTier(tmp_path.as_uri()) for _ in range(2))
    place, seen = early.heard(None).place, others.heard(None).place
    for number in range(30):
        if number in (7, 8):  # of 16 that stay
            assert early.heard(place).complete == (number == 7)
        others.announce(b"%d" % number)
        seen = others.heard(seen).place
        if number == 15:
            assert len(list((tmp_path / "notices").iterdir())) == 16
    later = early.heard(place)
    assert (b"0" in later.notices, later.complete) == (False, False)
    assert early.heard(later.place).complete


def test_notices_are_listed_from_time_to_time(files, monkeypatch):
    now, clock = 100.0, SimpleNamespace(monotonic=lambda: now, time_ns=time.time_ns)
    monkeypatch.setattr("kvboost_hf.cache.tiers.filesystem.time", clock)
    heard = files.heard(None)
    files.announce(b"first")
    listed = Mock(wraps=files._fs.find)
    monkeypatch.setattr(files._fs, "find", listed)
    for later, count in ((0.0, 0), (0.5, 0), (1.0, 1), (1.5, 1), (2.0, 2)):
        now = 100.0 + later
        heard = files.heard(heard.place)
        assert (listed.call_count, heard.complete) == (count, True)
        assert list(heard.notices) == [b"first"] * (later == 1.0)


def test_who_could_not_read_a_notice_has_missed_it(files, tmp_path, monkeypatch):
    monkeypatch.setattr("kvboost_hf.cache.tiers.filesystem._LISTED_EVERY_S", 0.0)
    files.announce(b"first")
    heard = files.heard(None)
    files.announce(b"second")
    last = max((tmp_path / "notices").iterdir())
    last.unlink()
    last.symlink_to(tmp_path / "gone")
    later = files.heard(heard.place)
    assert (list(later.notices), later.complete) == ([], False)


@pytest.mark.parametrize("suffix", ["entry", "safetensors"])
@pytest.mark.parametrize("put", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.touch])
def test_what_is_no_file_is_not_read(files, tmp_path, suffix, put):
    """A pipe would have a prompt wait for ever, and a device never end."""
    entry = make_entry(1)
    write(files, entry)
    path = tmp_path / "chunks" / f"{entry.key.hex()}.{suffix}"
    path.unlink()
    put(path)
    assert len(files.find([entry.key])) == (suffix != "entry")
    assert files.read(entry.key) == (b"" if suffix != "entry" else b"".join(make_blob(entry)))
    assert files.delete([entry.key])
    write(files, entry)
    assert files.read(entry.key) == b"".join(make_blob(entry))
    assert files.stats()["errors"] == 0


@pytest.mark.parametrize("name", ["chunks", "index", "heads", "notices", f"index/{ROOT.hex()}", "heads/{}"])
def test_a_folder_that_is_a_link_is_not_followed(files, tmp_path, name):
    """Neither to write, nor to read, nor to remove what is there."""
    first, second = make_entry(1), make_entry(2, head=make_entry(1).head)
    write(files, first)
    assert files.announce(b"first")
    folder, elsewhere = tmp_path / name.format(first.head.hex()), tmp_path / "elsewhere"
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    there = sorted(elsewhere.rglob("*"))
    assert there
    assert set(files.find([first.key])) == (set() if name == "chunks" else {first.key})
    assert (files.read(first.key) is None) == (name == "chunks")
    write(files, first, second)
    assert files.announce(b"second")
    assert not folder.is_symlink()
    assert sorted(elsewhere.rglob("*")) == there
    assert {first.key, second.key} == set(files.find([first.key, second.key]))
    assert files.read(second.key) == b"".join(make_blob(second))
    folder.rename(tmp_path / "ours")
    folder.symlink_to(elsewhere)
    assert files.delete([first.key, second.key])
    if "/" not in name:
        assert sorted(elsewhere.rglob("*")) == there
    assert files.stats()["errors"] == 0


def test_half_an_entry_is_a_miss(files, tmp_path):
    write(files, make_entry(1), make_entry(2))
    path = tmp_path / "chunks" / f"{make_entry(1).key.hex()}.entry"
    path.write_bytes(path.read_bytes()[:50])
    assert set(files.find([make_entry(1).key, make_entry(2).key])) == {make_entry(2).key}
    assert files.stats()["errors"] == 0
    write(files, make_entry(1))  # whose place is free again
    assert files.read(make_entry(1).key) == b"".join(make_blob(make_entry(1)))
    assert set(files.find([make_entry(1).key])) == {make_entry(1).key}


def test_files_of_others_are_left_alone(files, tmp_path):
    write(files, make_entry(1))
    for folder in (f"index/{ROOT.hex()}", f"heads/{make_entry(1).head.hex()}", "chunks", "."):
        (tmp_path / folder / "notes.txt").write_text("mine")
    assert keys(files.entries()) == keys(files.find_alike([make_entry(1).head])) == [make_entry(1).key]
    files.clear(make_entry(1).model)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["notes.txt"] * 4


def _ls_as_ftp(local: LocalFileSystem, path: str, detail: bool = True, **how: Any) -> list[Any]:
    return local.ls(path, detail=True) if detail else [os.path.basename(each) for each in local.ls(path)]


@pytest.mark.parametrize("scheme", ["file", "elsewhere"])
def test_what_was_given_up_leaves_no_folders(scheme, tmp_path, monkeypatch):
    """Each chunk had one, which took room for good. Another process may need one as it is removed."""
    local = LocalFileSystem()
    names = ("_open", "info", "makedirs", "mv", "rm_file", "rmdir")
    methods = {name: staticmethod(getattr(local, name)) for name in names}
    methods["ls"] = staticmethod(partial(_ls_as_ftp, local))
    remote = type("Remote", (AbstractFileSystem,), {"protocol": ("sftp", "elsewhere"), **methods})
    fsspec.register_implementation("elsewhere", remote, clobber=True)
    tier, other = (FilesystemTier(f"{scheme}://{tmp_path}", max_bytes=9000) for _ in range(2))
    write(tier, *(make_entry(number) for number in range(20)))
    assert len(list((tmp_path / "heads").iterdir())) == 3
    entry, late = make_entry(50), set[str]()
    place, name = (os, "replace") if scheme == "file" else (other._fs, "mv")
    replace = getattr(place, name)

    def replace_late(source: str, target: str) -> None:
        with suppress(OSError):
            if target not in late:
                os.rmdir(os.path.dirname(target))
        late.add(target)
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(place, name, replace_late)
        assert other.write(entry, make_blob(entry))
    (tmp_path / f"unfinished-{0:016x}-{entry.key.hex()[:32]}").touch()
    FilesystemTier(f"{scheme}://{tmp_path}")
    assert tier.clear(entry.model)
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")} == {"chunks", "heads", "index"}
    assert other.stats()["errors"] == 0


def test_a_file_system_that_fails_is_a_miss_until_it_is_back(tmp_path, caplog):
    tier = FilesystemTier((tmp_path / "kv").as_uri(), cooldown_s=COOLDOWN_S)
    (tmp_path / "kv").rmdir()
    (tmp_path / "kv").write_text("a file where a folder should be")
    entry = make_entry(1)
    assert not tier.write(entry, make_blob(entry))
    assert tier.find([entry.key]) == {}
    assert tier.stats()["state"] == "down"
    assert [message.partition(" file:")[0] for message in caplog.messages] == ["Writing to", "The tier at"]
    (tmp_path / "kv").unlink()
    eventually(lambda: tier.write(entry, make_blob(entry)))
    assert set(tier.find([entry.key])) == {entry.key}


def test_an_entry_without_a_blob_is_gone_once_it_is_read(files, tmp_path):
    write(files, make_entry(1))
    (tmp_path / "chunks" / f"{make_entry(1).key.hex()}.safetensors").unlink()
    assert files.read(make_entry(1).key) is None
    assert files.find([make_entry(1).key]) == {}
    write(files, make_entry(1))
    assert files.read(make_entry(1).key) == b"".join(make_blob(make_entry(1)))


def test_a_list_names_no_more_than_is_there(files, tmp_path):
    head = name_of("shared head")
    write(files, make_entry(1, head=head), make_entry(2, head=head))
    (tmp_path / "chunks" / f"{make_entry(1).key.hex()}.entry").unlink()
    assert keys(files.find_alike([head])) == [make_entry(2).key]
    assert len(list((tmp_path / "heads" / head.hex()).iterdir())) == 1


def test_counts_what_others_wrote_before_it(tmp_path):
    write(FilesystemTier(tmp_path.as_uri()), *(make_entry(number, start=number) for number in range(3)))
    tier = FilesystemTier(tmp_path.as_uri(), max_bytes=9000)
    assert (tier.stats()["chunks"], tier.stats()["bytes"]) == (3, 9000)
    write(tier, make_entry(9))
    assert set(keys(tier.entries())) == {make_entry(number).key for number in (0, 1, 9)}


@pytest.mark.parametrize("url", ["", "/tmp/kv", "no-such-scheme://me:hush@host/kv", "file:///kv*"])
def test_refuses_urls_that_fsspec_does_not_know(url):
    with pytest.raises(ValueError, match="`url` must") as caught:
        FilesystemTier(url)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("below", ["", "/below"])
def test_refuses_places_that_are_no_folder(tmp_path, below):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"`url` must name a folder .* got '.*/file.*' \(.*\)\. Pass another one"):
        FilesystemTier(f"{tmp_path.as_uri()}/file{below}")


@pytest.mark.parametrize("url", ["simplecache::file:///{}/kv", "zip://kv::file:///{}/kv.zip", "file:///{}/k::v"])
def test_refuses_chains(tmp_path, url):
    """In caches what others have cleared was found again, and archives raised what nobody could read."""
    with pytest.raises(ValueError, match=r"`url` must name one file system, got .*::.* Pass the last of them alone\."):
        FilesystemTier(url.format(tmp_path))


def test_names_the_package_that_is_missing():
    hint = "Install no_such_package to access it"
    fsspec.register_implementation("tape", "no_such_package.FileSystem", clobber=True, errtxt=hint)
    with pytest.raises(ImportError, match="fsspec needs another package for 'tape://kv': Install no_such_package"):
        FilesystemTier("tape://kv")


def test_names_the_extra_that_is_missing(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "valkey", None)
    with pytest.raises(ImportError, match=r"\.\[valkey\]"):
        ValkeyTier("redis://127.0.0.1/0")


def test_all_are_tiers(tmp_path):
    tier: Tier = FilesystemTier(tmp_path.as_uri())
    assert (tier.name, tier.location) == ("filesystem", tmp_path.as_uri())


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    """Also with a generous umask; others may not even list the folders."""
    before = os.umask(0)
    try:
        tier = FilesystemTier((tmp_path / "a" / "kv").as_uri())
        write(tier, make_entry(1))
        tier.announce(b"notice")
    finally:
        os.umask(before)
    made = [tmp_path / "a", *(tmp_path / "a").rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in made if path.is_file()} == {0o600}
    assert {path.stat().st_mode & 0o777 for path in made if path.is_dir()} == {0o700}
    assert tier.read(make_entry(1).key) == b"".join(make_blob(make_entry(1)))
