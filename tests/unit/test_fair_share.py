"""How clients share: no one takes all, those who were away are owed nothing, and who has the most gives way."""

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.internals.server import ConnectionLimits, Connections, FairCache, FairShare, FairTurns, may_hold

pytestmark = pytest.mark.daily


@pytest.mark.parametrize(("share", "alone", "of_two"), [(0.75, 75, 42), (0.5, 50, 33), (1.0, 100, 100)])
def test_a_client_alone_has_its_share_and_two_leave_something(share: float, alone: int, of_two: int) -> None:
    one: FairShare[str] = FairShare(100, share)
    while one.take("a"):
        pass
    assert one.held("a") == alone
    two: FairShare[str] = FairShare(100, share)
    while two.take("a") | two.take("b"):
        pass
    assert sorted((two.held("a"), two.held("b")))[0] >= min(of_two, 50)
    assert two.held() <= 2 * of_two + 2


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 40), st.booleans()), max_size=60))
def test_a_bound_holds_and_whoever_has_none_may_take_what_is_free(steps: list[tuple[str, int, bool]]) -> None:
    share: FairShare[str] = FairShare(100, 0.75)
    held: Counter[str] = Counter()
    for client, count, gives in steps:
        if gives and held[client] >= count:
            share.give_back(client, count)
            held[client] -= count
        elif share.take(client, count):
            held[client] += count
            assert held[client] == count or held[client] <= 75
        else:
            assert held[client] or held.total() + count > 100
        assert share.held() == held.total() <= 100
        assert {each: share.held(each) for each in "abc"} == {each: held[each] for each in "abc"}


def test_connections_are_counted_when_one_takes_the_place_of_another() -> None:
    """In a full house an address gives up a connection for each new one, and there are never more than may be."""

    class Waiting:
        answering, dropped = False, False

        def drop(self) -> None:
            self.dropped = True

    async def fill() -> None:
        connections = Connections(ConnectionLimits(most=40, header_s=10, write_s=10))
        others = [f"address {n}" for n in range(30)]
        opened: list[tuple[Any, str]] = [
            (Waiting(), each) for each in ["a"] * 10 + others + (["a"] * 7 + ["b"] * 3) * 8 + others
        ]
        for connection, address in opened:
            assert connections.admit(connection, address)
            left = [each for each in opened if each[0] in connections._all]
            assert len(left) == len(connections) == connections._addresses.held() <= 40
            for each in {address for _, address in left}:
                assert connections._addresses.held(each) == sum(address == each for _, address in left)
        assert all(connection.dropped or connection in connections._all for connection, _ in opened)

    asyncio.run(fill())


def test_borders_of_a_share() -> None:
    assert may_hold(0, 100, 0, 0.1)
    assert not may_hold(0, 100, -1, 1.0)
    assert may_hold(1, 1, 0, 1.0)
    assert may_hold(74, 1, 25, 0.75)
    assert not may_hold(75, 1, 24, 0.75)


def test_the_client_that_had_the_least_comes_first() -> None:
    turns: FairTurns[str] = FairTurns()
    had: Counter[str] = Counter()
    for _ in range(300):
        first = turns.order("abc")[0]
        cost = {"a": 1, "b": 5, "c": 10}[first]
        turns.charge(first, cost)
        had[first] += cost
    assert max(had.values()) - min(had.values()) <= 10
    assert sorted(turns.order("aab")) == ["a", "b"]
    assert turns.order("") == []


def test_who_was_away_is_owed_nothing() -> None:
    """The control: a client that asked all the time is owed what it has not had."""
    turns: FairTurns[str] = FairTurns()
    turns.order("ab")
    for _ in range(100):
        turns.order("a")
        turns.charge("a")
    assert turns.order("ab") == ["a", "b"]
    turns.charge("a", 5)
    for _ in range(5):
        assert turns.order("ab")[0] == "b"
        turns.charge("b")
    waiting: FairTurns[str] = FairTurns()
    for _ in range(100):
        waiting.order("ab")
        waiting.charge("a")
    assert waiting.order("ab")[0] == "b"
    waiting.charge("b", 50)
    assert waiting.order("ab")[0] == "b"


def test_a_newcomer_goes_behind_nobody_for_long() -> None:
    turns: FairTurns[int] = FairTurns()
    for _ in range(50):
        chosen = turns.order(range(3))[0]
        turns.charge(chosen, 7)
    order = []
    for _ in range(8):
        chosen = turns.order([0, 1, 2, 9])[0]
        order.append(chosen)
        turns.charge(chosen, 7)
    assert order.count(9) == 2


@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 12))
def test_a_cache_is_a_mapping_within_its_bounds(seed: int, most: int, most_of_one: int) -> None:
    rng = random.Random(seed)
    cache: FairCache[str, int] = FairCache(most, most_of_one, size=lambda key, value: value)
    known: dict[tuple[str, int], int] = {}
    for _ in range(80):
        client, key, value = rng.choice("abc"), rng.randrange(6), rng.randint(1, 4)
        what = rng.choice(("put", "get", "peek", "pop"))
        if what == "put":
            cache.put(client, key, value)
            known[client, key] = value
        else:
            found = getattr(cache, what)(client, key)
            assert found in (None, known.get((client, key)))
            if what == "pop":
                known.pop((client, key), None)
                assert cache.peek(client, key) is None
        sizes = {each: sum(cache.of(each)) for each in "abc"}
        assert sum(sizes.values()) == sum(cache) <= most
        assert max(sizes.values()) <= most_of_one
        assert len(cache) == len(list(cache))


def test_the_client_with_the_most_gives_up_what_it_used_least_recently() -> None:
    cache: FairCache[str, int] = FairCache(4)
    for key in range(3):
        cache.put("a", key, key)
    cache.put("b", 0, 0)
    assert cache.get("a", 0) == 0
    assert cache.peek("a", 1) == 1  # which does not use it
    cache.put("b", 1, 1)
    assert [*cache.of("a")] == [2, 0]
    assert [*cache.of("b")] == [0, 1]
    cache.put("b", 1, 7)
    assert [*cache.of("b")] == [0, 7]
    assert cache.get("c", 0) is None
    assert [*cache.of("c")] == []
    no_bound: FairCache[str, int] = FairCache()
    for key in range(1000):
        no_bound.put("a", key, key)
    assert len(no_bound) == 1000
