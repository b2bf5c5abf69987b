"""Which replica gets a request: properties, without any replica."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.internals.server import BELOW, GONE, MEMORY, News, PrefixRouter

_NAMES = [f"replica-{number}" for number in range(8)]
_KEYS = [str(number).encode() for number in range(400)]


def _firsts(names: list[str]) -> list[str]:
    """Where each of many unknown prompts would go, with nothing under way."""
    return [PrefixRouter().rank([key], dict.fromkeys(names, 0))[0] for key in _KEYS]


@given(
    prompts=st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=60),
    count=st.integers(1, 6),
    factor=st.sampled_from([1.01, 1.25, 2.0]),
    ends=st.integers(1, 20),
)
@settings(deadline=None)
def test_no_replica_has_more_than_the_bound(prompts: list[list[int]], count: int, factor: float, ends: int) -> None:
    router, loads, under_way = PrefixRouter(factor, 16), dict.fromkeys(_NAMES[:count], 0), []
    for prompt in prompts:
        keys = [bytes(prompt[: n + 1]) for n in range(len(prompt))]
        ranked = router.rank(keys, loads)
        assert sorted(ranked) == sorted(loads)
        most = router.most(loads)
        router.routed(keys, ranked[0])
        loads[ranked[0]] += 1
        assert loads[ranked[0]] <= most < factor * sum(loads.values()) / count + 1
        under_way.append(ranked[0])
        if len(under_way) > ends:
            loads[under_way.pop(0)] -= 1


def test_a_replica_that_goes_moves_its_prompts_alone() -> None:
    before, after = _firsts(_NAMES), _firsts(_NAMES[1:])
    assert all(new == old for old, new in zip(before, after, strict=True) if old != _NAMES[0])
    assert len(set(after)) == 7
    moved = [new for old, new in zip(before, after, strict=True) if old == _NAMES[0]]
    assert len(set(moved)) > 3  # not all to the same neighbour


def test_a_replica_that_comes_takes_its_share() -> None:
    before, after = _firsts(_NAMES[1:]), _firsts(_NAMES)
    moved = {new for old, new in zip(before, after, strict=True) if new != old}
    assert moved == {_NAMES[0]}
    shares = Counter(after)
    assert all(len(_KEYS) / 16 < shares[name] < len(_KEYS) / 4 for name in _NAMES)
    by_number = sum(key % 7 != key % 8 for key in range(len(_KEYS)))  # as plain hashing would
    assert by_number > 4 * shares[_NAMES[0]]


def test_a_prompt_goes_where_most_of_it_went() -> None:
    router, loads = PrefixRouter(), dict.fromkeys(_NAMES, 0)
    router.routed([b"a"], "replica-1")
    router.routed([b"a", b"ab"], "replica-2")
    router.routed([b"a"], "replica-3")
    assert router.rank([b"a", b"ab", b"abc"], loads)[0] == "replica-2"
    assert router.rank([b"a", b"ax"], loads)[0] == "replica-3"
    del loads["replica-2"]  # what it had is elsewhere, in part
    assert router.rank([b"a", b"ab", b"abc"], loads)[0] == "replica-3"


def test_who_has_enough_to_do_is_passed_by() -> None:
    router = PrefixRouter()
    router.routed([b"a"], "busy")
    assert router.rank([b"a"], {"busy": 1, "idle": 0, "other": 1})[0] == "busy"
    ranked = router.rank([b"a"], {"busy": 9, "idle": 0, "other": 5})
    assert ranked == ["idle", "other", "busy"]
    assert router.rank([], {"busy": 1, "idle": 0})[0] == "idle"


def test_what_continues_a_chunk_is_forgotten_first() -> None:
    router, loads = PrefixRouter(max_remembered=2), dict.fromkeys(_NAMES, 0)
    other = next(name for name in _NAMES if name != router.rank([b"a"], loads)[0])
    router.routed([b"a", b"ab", b"abc"], other)
    assert router.rank([b"a"], loads)[0] == other
    assert router.rank([b"abc"], loads) == PrefixRouter().rank([b"abc"], loads)


def _tell(router: PrefixRouter, name: str, keys: list[bytes], tier: int = MEMORY) -> None:
    """All that a replica holds."""
    router.learn([News(name, "process", None, len(keys), keys, bytes([tier] * len(keys)))])


_PROMPT = [b"abcdefgh"[: n + 1] for n in range(8)]


def test_the_longest_prefix_that_is_held_decides() -> None:
    router, loads = PrefixRouter(), dict.fromkeys(_NAMES, 0)
    _tell(router, "replica-1", _PROMPT[:2])
    _tell(router, "replica-5", _PROMPT[:5])
    _tell(router, "replica-7", _PROMPT[:7], BELOW)
    assert router.rank(_PROMPT, loads)[:3] == ["replica-5", "replica-7", "replica-1"]
    assert router.hits(_PROMPT, loads) == {"replica-1": 2, "replica-5": 5, "replica-7": 3.5}
    router.learn([News("replica-5", "process", 5, 8, _PROMPT[2:5], bytes([GONE, BELOW, BELOW]))])
    assert router.hits(_PROMPT, loads)["replica-5"] == 2 + 0.5 * 3  # what is held is told from the first piece on
    assert router.rank([b"session", *_PROMPT], loads)[0] in ("replica-5", "replica-7")
    assert router.hits([], loads) == {}


def test_of_several_holders_the_least_loaded_is_chosen() -> None:
    router = PrefixRouter(2.0)
    for name in ("a", "b", "c"):
        _tell(router, name, _PROMPT[:4])
    _tell(router, "d", _PROMPT[:6])
    loads = {"a": 2, "b": 1, "c": 2, "d": 2, "e": 0}
    assert router.rank(_PROMPT, loads)[:2] == ["d", "b"]
    loads["d"] = 9  # as much as it may have
    assert router.rank(_PROMPT, loads)[0] == "b"
    assert router.rank(_PROMPT, loads)[-1] == "d"


def test_a_guess_counts_until_its_replica_says_otherwise() -> None:
    router, loads = PrefixRouter(), dict.fromkeys(_NAMES, 0)
    _tell(router, "replica-2", _PROMPT[:3])
    router.routed(_PROMPT[:5], "replica-4")
    assert router.rank(_PROMPT, loads)[:2] == ["replica-4", "replica-2"]
    router.learn([News("replica-4", "process", None, 5, _PROMPT[:2], bytes([MEMORY] * 2))])
    assert router.hits(_PROMPT, loads)["replica-4"] == 5  # it may be under way
    events = [*_PROMPT[2:5], *_PROMPT[2:5]]
    router.learn([News("replica-4", "process", 5, 11, events, bytes([MEMORY] * 3 + [GONE] * 3))])
    assert router.hits(_PROMPT, loads) == {"replica-2": 3, "replica-4": 2}
    router.learn([News("replica-4", "process", 11, 12, _PROMPT[1:2], bytes([BELOW]))])
    assert router.hits(_PROMPT, loads) == {
        "replica-2": 3,
        "replica-4": 1.5,
    }
    router.routed(_PROMPT, "replica-4")
    router.learn([News("replica-4", "process", None, 20, _PROMPT[:1], bytes([MEMORY]))])
    assert router.hits(_PROMPT, loads)["replica-4"] == 8  # under way
    router.learn([News("replica-4", "other", None, 0, [], b"")])
    assert router.hits(_PROMPT, loads) == {"replica-2": 3}  # it was lost with its process


def test_a_session_stays_where_it_was_unless_another_has_less_to_do() -> None:
    router, session = PrefixRouter(9.0), [b"session", *_PROMPT[:4]]
    for name in ("a", "b", "c"):
        _tell(router, name, _PROMPT[:4])
    router.routed(session, "b")
    assert router.rank(session, {"a": 1, "b": 1, "c": 1})[0] == "b"
    assert router.rank(session, {"a": 1, "b": 2, "c": 2})[0] in ("a", "b")
    assert router.rank(session, {"a": 1, "b": 3, "c": 2})[0] == "a"
    _tell(router, "c", _PROMPT[:6])
    assert router.rank([b"session", *_PROMPT], {"a": 1, "b": 1, "c": 5})[0] == "c"


def test_what_goes_is_no_more_ranked_and_what_comes_is() -> None:
    router = PrefixRouter()
    _tell(router, "old", _PROMPT)
    assert router.rank(_PROMPT, {"new": 0, "other": 0})[0] in ("new", "other")
    assert router.hits(_PROMPT, {"new": 0, "other": 0}) == {}
    for _ in range(240):
        router.learn([])  # nobody answers: the front is cut off, and what it knows may be true
        _tell(router, "new", [])
    assert router.held("old")
    _tell(router, "new", [])
    assert not router.held("old")
    assert set(router.places) == {"new"}


def test_a_replica_that_claims_too_much_is_bounded() -> None:
    router = PrefixRouter(max_keys=3)
    _tell(router, "liar", _PROMPT)
    assert list(router.held("liar")) == _PROMPT[:3]
    router.learn([News("liar", "process", 8, 11, [_PROMPT[0], b"x", b"y"], bytes([GONE, MEMORY, MEMORY]))])
    assert len(router.held("liar")) == 3
    router.learn([News("liar", "process", 11, 19, [b"z"], b"")])  # numbers that do not fit
    assert router.places["liar"].events == -1
    _tell(router, "liar", _PROMPT[:1])
    assert router.places["liar"].events == 1


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="above 1, got 1"):
        PrefixRouter(1)
    with pytest.raises(ValueError, match="0 or more, got -1"):
        PrefixRouter(max_remembered=-1)
    with pytest.raises(ValueError, match="at least one replica"):
        PrefixRouter().rank([b"a"], {})
