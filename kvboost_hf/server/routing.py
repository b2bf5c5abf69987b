"""`PrefixRouter`: sends a request to the replica that has had the prefix of its prompt, within bounds of its load.

Pure bookkeeping: no tensors, no HTTP, no cluster. A prompt is told by the keys of its chunks, each of which stands for
all that is before it, too. Where no replica has had any of it, the first key decides by rendezvous hashing (Thaler and
Ravishankar, 1998): when a replica goes, its prompts alone move, and when one comes, it takes its share of each. Loads
are bounded as in consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, SODA 2018).
"""

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import xxhash


class PrefixRouter:
    """Ranks replicas for prompts, and remembers where those went.

    Not safe to use from several threads at once.

    Args:
        load_factor: No replica gets more than so many times its share of the requests under way; above 1.
        max_remembered: Keys of which it is remembered where they went; those not seen for longest are forgotten. With
            0 nothing is, and all that begins alike goes to the same replica while its load allows.

    Raises:
        ValueError: for a load factor that leaves no room, or a negative number of keys.

    Example:
        >>> router = PrefixRouter()
        >>> loads = {"a": 0, "b": 0}
        >>> first = router.rank([b"handbook"], loads)[0]
        >>> router.routed([b"handbook", b"question"], first)
        >>> router.rank([b"handbook", b"another"], loads)[0] == first
        True
    """

    def __init__(self, load_factor: float = 1.25, max_remembered: int = 262_144) -> None:
        if not load_factor > 1:
            raise ValueError(
                f"`load_factor` must be above 1, got {load_factor}. 1.25 allows a quarter above the mean."
            )
        if max_remembered < 0:
            raise ValueError(f"`max_remembered` must be 0 or more, got {max_remembered}.")
        self.load_factor, self.max_remembered = load_factor, max_remembered
        self._went: OrderedDict[bytes, str] = OrderedDict()

    def most(self, loads: Mapping[str, int]) -> int:
        """How many requests a replica may have under way, the next one included.

        Args:
            loads: By replica, its requests under way.
        """
        return math.ceil(self.load_factor * (sum(loads.values()) + 1) / len(loads))

    def rank(self, keys: Sequence[bytes], loads: Mapping[str, int]) -> list[str]:
        """All replicas, the best first: the one that has had most of the prompt, unless it has as much as it may.

        Those that have as much as they may come last, the least loaded first.

        Args:
            keys: The keys of the prompt's chunks, in their order; where there are none, the load alone decides.
            loads: By replica, its requests under way.

        Raises:
            ValueError: there are no replicas.
        """
        if not loads:
            raise ValueError("`loads` must name at least one replica, got none.")
        if not keys:
            return sorted(loads, key=loads.__getitem__)
        holder = next((name for key in reversed(keys) if (name := self._went.get(key)) in loads), None)
        ranked = sorted(loads, key=lambda name: (name != holder, -_weight(keys[0], name)))
        most = self.most(loads)
        full = [name for name in ranked if loads[name] >= most]
        return [name for name in ranked if loads[name] < most] + sorted(full, key=loads.__getitem__)

    def routed(self, keys: Sequence[bytes], replica: str) -> None:
        """Remember that a prompt went to `replica`, which will have its chunks.

        Args:
            keys: As in `rank`.
            replica: Where it went.
        """
        for key in reversed(keys):  # so that what continues a chunk is forgotten before the chunk
            self._went[key] = replica
            self._went.move_to_end(key)
        while len(self._went) > self.max_remembered:
            self._went.popitem(last=False)


def _weight(key: bytes, replica: str) -> int:
    return xxhash.xxh3_64_intdigest(key + replica.encode())
