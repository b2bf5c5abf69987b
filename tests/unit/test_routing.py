"""Which replica gets a request: properties, without any replica."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.internals.server import PrefixRouter

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


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="above 1, got 1"):
        PrefixRouter(1)
    with pytest.raises(ValueError, match="0 or more, got -1"):
        PrefixRouter(max_remembered=-1)
    with pytest.raises(ValueError, match="at least one replica"):
        PrefixRouter().rank([b"a"], {})
