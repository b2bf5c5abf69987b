"""`PrefixRouter`: sends a request to the replica that holds the longest prefix of its prompt, within bounds of load.

    replica: Holdings ──▶ News (what came, what went, by number) ──▶ front: PrefixRouter.learn
    request: prompt_keys ──▶ rank: held prefix, then load ──▶ replica ──▶ routed: a guess until the next News

Pure bookkeeping: no tensors, no HTTP, no cluster, no clocks. A prompt is told by the keys of its pieces, each of which
stands for all that is before it, too. Where no replica has any of it, the first key decides by rendezvous hashing
(Thaler and Ravishankar, 1998): when a replica goes, its prompts alone move, and when one comes, it takes its share of
each. Loads are bounded as in consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, SODA 2018).
"""

import json
import logging
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import xxhash

from kvboost_hf.cache.planning.chunks import digest, root_key

_log = logging.getLogger("kvboost_hf.server")

GONE, BELOW, MEMORY = 0, 1, 2  # where a replica has a piece: nowhere, in tiers below host memory, in host memory
MAX_KEYS = 65_536  # pieces that a replica publishes, and that a router takes from it
_LOADING = 0.5  # of computing: what a piece counts for that has to be loaded from a lower tier
_UNKNOWN = -1  # events of a replica, some of which are missing
_SILENT = 240  # rounds of news without any of a replica, after which its view is dropped

_PIECE = 256  # characters
_CHANGING = re.compile(r'x-anthropic-billing-header:[^"\\]*')  # no part of prompts
# In the order in which prompts have them.
_FIELDS = ("tools", "instructions", "system", "context", "messages", "prompt", "input", "texts")


class Place(NamedTuple):
    """How far a router has followed a replica."""

    epoch: str  # names the process of the replica
    events: int  # how many of its events are known


class News(NamedTuple):
    """The pieces that a replica holds, or what has changed since some event."""

    replica: str  # name of the replica
    epoch: str  # names its process: another one holds something else
    start: int | None  # the number of the first event; None where this is all that the replica holds
    stop: int  # how many events there were
    keys: Sequence[bytes]  # the keys of the pieces, in the order of events
    tiers: bytes  # for each key, `GONE`, `BELOW` or `MEMORY`


class PrefixRouter:
    """Ranks replicas for prompts, by what they say they hold, and until they say so by where prompts went.

    Safe to use from several threads.

    Args:
        load_factor: No replica gets more than so many times its share of the requests under way; above 1.
        max_remembered: Keys of which it is remembered where they went; those not seen for longest are forgotten. With
            0 nothing is, and all that begins alike goes to the same replica while its load allows.
        max_keys: Pieces of one replica that are known, at most; what it says beyond is not heard.

    Raises:
        ValueError: for a load factor that leaves no room, or a negative number of keys.

    Example:
        >>> router = PrefixRouter()
        >>> loads = {"a": 0, "b": 0}
        >>> first = router.rank([b"handbook"], loads)[0]
        >>> router.routed([b"handbook", b"question"], first)
        >>> router.rank([b"handbook", b"another"], loads)[0] == first
        True
        >>> router.learn([News("b", "process 1", None, 2, [b"letter", b"reply"], bytes([MEMORY, MEMORY]))])
        >>> router.rank([b"letter", b"reply", b"again"], loads)[0]
        'b'
    """

    def __init__(self, load_factor: float = 1.25, max_remembered: int = 262_144, *, max_keys: int = MAX_KEYS) -> None:
        if not load_factor > 1:
            raise ValueError(
                f"`load_factor` must be above 1, got {load_factor}. 1.25 allows a quarter above the mean."
            )
        if max_remembered < 0:
            raise ValueError(f"`max_remembered` must be 0 or more, got {max_remembered}.")
        self.load_factor, self.max_remembered, self._max_keys = load_factor, max_remembered, max_keys
        self._lock = threading.Lock()
        self._went: OrderedDict[bytes, str] = OrderedDict()
        self._held: dict[str, dict[bytes, int]] = {}  # by replica and piece, its tier
        self._places: dict[str, Place] = {}
        self._silent: dict[str, int] = {}  # rounds of news in a row without any of a replica
        self._overfull: set[str] = set()

    def most(self, loads: Mapping[str, int]) -> int:
        """How many requests a replica may have under way, the next one included."""
        return math.ceil(self.load_factor * (sum(loads.values()) + 1) / len(loads))

    def rank(self, keys: Sequence[bytes], loads: Mapping[str, int]) -> list[str]:
        """All replicas, the best first: the one that has most of the prompt, unless it has as much as it may.

        Of several that have as much of it, the least loaded is the best, where the one that the last such prompt went
        to, which may have a part of the next piece, counts one request less. Those that have as many requests as they
        may come last, the least loaded first.

        Args:
            keys: The keys of the prompt's pieces, in their order; where there are none, the load alone decides.
            loads: By replica, its requests under way.

        Raises:
            ValueError: there are no replicas.
        """
        if not loads:
            raise ValueError("`loads` must name at least one replica, got none.")
        if not keys:
            return sorted(loads, key=loads.__getitem__)
        (hits, last), most, first = self._look_up(keys, loads), self.most(loads), keys[0]
        known = sorted(hits, key=lambda name: (-hits[name], loads[name] - (name == last), -_weight(first, name)))
        rest = sorted((name for name in loads if name not in hits), key=lambda name: -_weight(first, name))
        ranked = known + rest
        full = [name for name in ranked if loads[name] >= most]
        if not full:
            return ranked
        return [name for name in ranked if loads[name] < most] + sorted(full, key=loads.__getitem__)

    def hits(self, keys: Sequence[bytes], loads: Mapping[str, int]) -> dict[str, float]:
        """By replica, how many leading pieces of a prompt it has; those that have none are left out.

        A piece in a lower tier counts for half: it has to be loaded. A prompt that went to a replica is taken for held
        there until the replica says what has become of it.
        """
        return self._look_up(keys, loads)[0] if keys else {}

    def _look_up(self, keys: Sequence[bytes], loads: Mapping[str, int]) -> tuple[dict[str, float], str | None]:
        """The hits of some keys, and where the last prompt with most of them went."""
        backwards, found = keys[::-1], dict[str, float]()
        first, second = keys[0], keys[:2][-1]  # the first may name a session, and is of no piece then
        with self._lock:
            for name, held in self._held.items():
                if (second in held or first in held) and name in loads:
                    found[name] = _depth(backwards, held)
            for at, key in enumerate(backwards if self._went else ()):
                if (name := self._went.get(key, "")) in loads:
                    if key not in self._held.get(name, ()):  # not told yet
                        found[name] = max(found.get(name, 0.0), len(keys) - at)
                    return found, name
        return found, None

    def routed(self, keys: Sequence[bytes], replica: str) -> None:
        """Remember that a prompt went to `replica`, which will have its pieces."""
        with self._lock:
            for key in reversed(keys):  # so that what continues a piece is forgotten before the piece
                self._went[key] = replica
                self._went.move_to_end(key)
            while len(self._went) > self.max_remembered:
                self._went.popitem(last=False)

    # What replicas say

    @property
    def places(self) -> dict[str, Place]:
        """How far each replica is followed: it is to tell what came after."""
        with self._lock:
            return dict(self._places)

    def held(self, replica: str) -> dict[bytes, int]:
        """The pieces that a replica holds, as far as it has said, with their tiers."""
        with self._lock:
            return dict(self._held.get(replica, {}))

    def learn(self, round: Iterable[News]) -> None:
        """Take a round of news in, in any order, once or several times.

        Where events are missing, `places` says so, and the replica will tell all that it holds. What a replica has
        said last is believed for 240 rounds in which others say something and it does not.
        """
        with self._lock:
            told = set[str]()
            for news in round:
                told.add(news.replica)
                self._take(news)
            for name in list(self._held) if told else ():
                silent = self._silent[name] = 0 if name in told else self._silent.get(name, 0) + 1
                if silent > _SILENT:
                    self._forget(name)

    def _take(self, news: News) -> None:
        place = self._places.get(news.replica)
        if place is not None and place.epoch == news.epoch and news.stop <= place.events:
            return  # known
        skipped, other = 0, place is None or place.epoch != news.epoch
        if news.start is None:
            if other:
                self._forget(news.replica)  # what went to another process is not held by this one
            for key in self._held.get(news.replica, {}).keys() - set(news.keys):
                self._leave(key, news.replica)
            self._held[news.replica] = {}
        elif place is None or other or news.start > place.events or news.stop - news.start != len(news.keys):
            self._places[news.replica] = Place(news.epoch, _UNKNOWN)  # events are missing
            return
        else:
            skipped = place.events - news.start
        self._enter(news, skipped)
        self._places[news.replica] = Place(news.epoch, news.stop)

    def _enter(self, news: News, skipped: int) -> None:
        held, name = self._held[news.replica], news.replica
        for key, tier in zip(news.keys[skipped:], news.tiers[skipped:], strict=True):
            if tier == GONE:
                held.pop(key, None)
                self._leave(key, name)
            elif len(held) < self._max_keys or key in held:
                held[key] = tier
            elif name not in self._overfull:
                self._overfull.add(name)
                _log.warning("The replica %s holds more than %d pieces; the rest is not heard.", name, self._max_keys)

    def _leave(self, key: bytes, name: str) -> None:
        """What went to a replica has gone there."""
        if self._went.get(key) == name:
            del self._went[key]

    def _forget(self, name: str) -> None:
        known = self._held.pop(name, None) is not None
        for of in (self._places, self._silent):
            of.pop(name, None)
        self._overfull.discard(name)
        if known:
            for key in [key for key, replica in self._went.items() if replica == name]:
                del self._went[key]


def _depth(backwards: Sequence[bytes], held: Mapping[bytes, int]) -> float:
    """How many pieces are held, counted from the first; those that have to be loaded count for less."""
    below = 0
    for at, key in enumerate(backwards):
        tier = held.get(key)
        if tier == MEMORY:
            near = len(backwards) - at
            return near + _LOADING * (below - near) if below else near
        if tier is not None and not below:
            below = len(backwards) - at
    return _LOADING * below


def _weight(key: bytes, replica: str) -> int:
    return xxhash.xxh3_64_intdigest(key + replica.encode())


def prompt_keys(body: bytes, authorization: str = "") -> list[bytes]:
    """Keys of the leading pieces of a prompt: requests that share some begin with the same text, for the same client.

    Args:
        body: The body of a request to any route of the server.
        authorization: What clients are told apart by, besides the body's `cache_salt`.

    Returns:
        One of the body's `prompt_cache_key`, if it has one, and one for each 256 characters; none for what is no JSON
        object, which the server will refuse.
    """
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return []
    if not isinstance(asked, dict):
        return []
    text = _CHANGING.sub("", json.dumps([asked[name] for name in _FIELDS if asked.get(name) is not None])).encode()
    owner = repr((authorization, asked.get("cache_salt"))).encode()
    key = root_key(b"text", owner)
    session = asked.get("prompt_cache_key")
    keys: list[bytes] = [] if session in (None, "") else [root_key(b"session", owner + repr(session).encode())]
    for stop in range(_PIECE, len(text) + 1, _PIECE):
        keys.append(key := digest(key, text[stop - _PIECE : stop]))
    return keys
