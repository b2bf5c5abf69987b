"""What fronts know of replicas is what those hold, whatever happens to either, and to the news between them."""

import random
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.internals.cache import Border
from tests.internals.server import BELOW, GONE, MEMORY, Holdings, News, Place, PrefixRouter

pytestmark = pytest.mark.daily

_TEXTS = [(a, b, c, d) for a in "xy" for b in "xy" for c in "xyz" for d in "xy"]


def _keys(text: tuple[str, ...]) -> list[bytes]:
    """Of its pieces, and of its chunks: here they end at the same places."""
    return ["".join(text[: n + 1]).encode() for n in range(len(text))]


class Replica:
    """Chunks with tiers, without K/V."""

    def __init__(self, max_keys: int = 1000, max_log: int = 20) -> None:
        self.tiers: dict[bytes, int] = {}
        self.age = 0
        self.linked: list[bytes] = []  # of this age; those seen last come last
        self.max_keys = max_keys
        self.holdings = Holdings(
            lambda key: self.tiers.get(key, GONE), lambda: self.age, max_keys=max_keys, max_log=max_log
        )

    def put(self, key: bytes, tier: int) -> None:
        self.tiers[key] = tier
        self.holdings.changed([key])

    def serve(self, text: tuple[str, ...]) -> None:
        keys = _keys(text)
        self.linked = [key for key in self.linked if key not in keys] + keys[::-1]
        self.linked = self.linked[-self.max_keys :]
        self.holdings.link(keys, [Border(10 * n, key) for n, key in enumerate(keys, 1)], 10 * len(keys) + 4)
        for key in keys:
            self.put(key, MEMORY)

    def clear(self) -> None:
        self.tiers.clear()
        self.holdings.changed(None)

    def change_weights(self) -> None:
        self.age += 1
        self.linked.clear()

    @property
    def holds(self) -> dict[bytes, int]:
        """By piece that was linked, the tier of the farthest of it and all before it."""
        known = {key: min(self.tiers.get(key[: n + 1], GONE) for n in range(len(key))) for key in self.linked}
        return {key: tier for key, tier in known.items() if tier != GONE}


class Cluster:
    """Replicas and fronts, with news that come late, twice, in any order, or not at all."""

    def __init__(self, seed: int, replicas: int = 3, fronts: int = 2) -> None:
        self.random = random.Random(seed)
        self.replicas = {f"r{n}": Replica(self.random.choice([7, 1000])) for n in range(replicas)}
        self.fronts = [PrefixRouter() for _ in range(fronts)]
        self.late: list[tuple[int, News]] = []

    def ask(self, front: int, name: str) -> News:
        return self.replicas[name].holdings.since(name, self.fronts[front].places.get(name))

    def step(self) -> None:
        draw, name, front = self.random.random(), self.random.choice([*self.replicas]), self.random.randrange(2)
        replica = self.replicas[name]
        if draw < 0.4:
            text = self.random.choice(_TEXTS)
            self.fronts[front].routed(_keys(text), name)
            replica.serve(text)
        elif draw < 0.6 and replica.tiers:
            replica.put(self.random.choice(sorted(replica.tiers)), self.random.choice([GONE, BELOW, MEMORY]))
        elif draw < 0.62:
            self.random.choice([replica.clear, replica.change_weights])()
        elif draw < 0.64:
            self.replicas[name] = Replica()  # started again
        elif draw < 0.66:
            self.fronts[front] = PrefixRouter()
        elif draw < 0.8:
            self.fronts[front].learn([self.ask(front, name)])
        elif draw < 0.9:
            self.late.append((front, self.ask(front, name)))  # lost, unless it comes later
        elif self.late:
            front, news = self.random.choice(self.late)
            self.fronts[front].learn([news])

    def settle(self) -> None:
        """Two rounds without loss: the first finds out what is missing."""
        for _ in range(2):
            for number, front in enumerate(self.fronts):
                front.learn([self.ask(number, name) for name in self.replicas])

    def views(self) -> list[dict[str, dict[bytes, int]]]:
        return [{name: front.held(name) for name in self.replicas} for front in self.fronts]


@given(seed=st.integers(0, 2**32), steps=st.integers(1, 120))
@settings(deadline=None, max_examples=150)
def test_the_view_of_all_fronts_is_what_replicas_hold(seed: int, steps: int) -> None:
    cluster = Cluster(seed)
    for _ in range(steps):
        cluster.step()
        if cluster.random.random() < 0.1:
            cluster.settle()
            truth = {name: replica.holds for name, replica in cluster.replicas.items()}
            assert cluster.views() == [truth, truth]
    cluster.settle()
    truth = {name: replica.holds for name, replica in cluster.replicas.items()}
    assert cluster.views() == [truth, truth]


def _lose(news: News) -> News:
    """The same without its last event, as if there had been none."""
    return news._replace(keys=news.keys[:-1], tiers=news.tiers[:-1])


def _lose_unseen(news: News) -> News:
    """The same, numbered as if nothing was missing: no front could tell."""
    return news._replace(keys=[*news.keys[:-1], b"?"], tiers=news.tiers)


@pytest.mark.parametrize(("spoil", "heals"), [(_lose, True), (_lose_unseen, False)])
def test_an_event_that_is_lost_is_noticed(spoil: Callable[[News], News], heals: bool) -> None:
    """And a view that is wrong is found to be, where nothing could notice."""
    replica, front = Replica(), PrefixRouter()
    replica.serve(_TEXTS[0])
    front.learn([replica.holdings.since("r", None)])
    replica.put(b"xxxx", GONE)
    replica.put(b"xxx", GONE)
    front.learn([spoil(replica.holdings.since("r", front.places["r"]))])
    assert front.held("r") != replica.holds
    front.learn([replica.holdings.since("r", front.places["r"])])
    assert (front.held("r") == replica.holds) is heals


def test_who_has_missed_too_much_is_told_all() -> None:
    replica, front, late = Replica(max_log=4), PrefixRouter(), PrefixRouter()
    replica.serve(_TEXTS[0])
    for router in (front, late):
        router.learn([replica.holdings.since("r", None)])
    starts = []
    for number in range(40):
        replica.put(b"xxxx", GONE if number % 2 else BELOW)
        news = replica.holdings.since("r", front.places["r"])
        starts.append(news.start)
        front.learn([news])
    assert None not in starts
    news = replica.holdings.since("r", late.places["r"])
    assert news.start is None
    late.learn([news])
    assert late.held("r") == front.held("r") == replica.holds
    assert late.places == front.places


def test_a_replica_that_starts_again_holds_nothing() -> None:
    replica, front, loads = Replica(), PrefixRouter(), {"a": 0, "r": 0}
    keys = _keys(_TEXTS[0])
    replica.serve(_TEXTS[0])
    front.routed(keys, "r")
    front.learn([replica.holdings.since("r", None)])
    assert front.hits(keys, loads) == {"r": 4}
    front.routed(_keys(_TEXTS[1]), "r")
    replica = Replica()
    front.learn([replica.holdings.since("r", front.places["r"])])
    assert front.hits(keys, loads) == front.hits(_keys(_TEXTS[1]), loads) == {}


def test_what_is_not_linked_any_more_is_withdrawn() -> None:
    replica, front = Replica(max_keys=6), PrefixRouter()
    for text in _TEXTS:
        replica.serve(text)
        front.learn([replica.holdings.since("r", front.places.get("r"))])
        assert len(front.held("r")) <= 6
        assert front.held("r") == replica.holds
        assert front.hits(_keys(text), {"r": 0}) == {"r": 4}


def test_pieces_of_a_text_are_held_with_the_chunks_that_cover_them() -> None:
    """Ten pieces over four chunks, whose last one reaches beyond, and a longer text with the same beginning."""
    tiers = dict.fromkeys(["a", "b", "c", "d", "e"], MEMORY)
    holdings = Holdings(lambda key: tiers.get(key.decode(), GONE))
    keys, router = [f"k{n}".encode() for n in range(20)], PrefixRouter()
    borders = [Border(100 * n, key.encode()) for n, key in enumerate("abcde", 1)]

    def held(change: Mapping[str, int] | None = None) -> float:
        tiers.update(change or {})
        holdings.changed([key.encode() for key in change or {}])
        router.learn([holdings.since("r", router.places.get("r"))])
        return router.hits(keys, {"r": 0}).get("r", 0)

    holdings.link(keys[:10], borders[:4], 410)  # pieces end at each 39th token
    assert held() == 10
    assert held({"d": GONE}) == 7  # the eighth ends at 312
    assert held({"b": GONE}) == 2
    assert held({"b": MEMORY}) == 7
    assert held({"c": BELOW, "d": MEMORY}) == 5 + 0.5 * 5
    holdings.link(keys, borders, 900)  # the same beginning: its pieces stay where they were
    assert held() == 5 + 0.5 * 15
    assert held({"c": MEMORY, "e": GONE}) == 10
    other = [Border(100 * n, key.encode()) for n, key in enumerate("axyz", 1)]
    holdings.link([*keys[:4], b"other"], other, 400)  # another text behind the first chunk, of which nothing is stored
    assert held() == 2  # both end within the first chunk


def test_nothing_is_linked_without_pieces_or_whole_chunks() -> None:
    holdings = Holdings(lambda key: MEMORY)
    holdings.link([], [Border(16, b"a")], 20)
    holdings.link([b"k"], [], 10)
    holdings.changed([b"a", b"k"])
    holdings.changed(None)
    news = holdings.since("r", None)
    assert (news.keys, news.tiers, news.start, news.stop) == ([], b"", None, 0)


def test_the_store_is_watched_from_the_first_link_on() -> None:
    watching: list[object] = []
    holdings = Holdings(lambda key: MEMORY, watch=watching.append)
    holdings.link([], [Border(16, b"a")], 20)
    assert not watching
    for _ in range(2):
        holdings.link([b"k"], [Border(16, b"a")], 20)
    assert watching == [holdings.changed]


def test_places_that_never_were_are_told_all() -> None:
    replica = Replica()
    replica.serve(_TEXTS[0])
    now = replica.holdings.since("r", None)
    for place in (Place(now.epoch, 10**9), Place("other", now.stop), Place(now.epoch, -1)):
        assert replica.holdings.since("r", place) == now
