"""Every tier keeps the contract of `tests/tier_contract.py`, and the contract notices what breaks it."""

import inspect
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import pytest

from tests.internals.cache import Entry, FilesystemTier, Kind, Tier, tiers
from tests.tier_contract import PLACES, OpenTier, TierContract, make_entry

pytestmark = pytest.mark.daily

PROMISED = [name for name in vars(Tier) if inspect.isfunction(vars(Tier)[name]) and not name.startswith("_")]


for _name in PLACES:  # a class of each, for every promise is tried at every place each day
    _class = f"Test{_name.title().replace(' ', '')}"
    globals()[_class] = type(_class, (TierContract,), {"place": _name})


def test_all_tiers_are_tried() -> None:
    """`PLACES` has every class of the package with the methods of a tier."""
    modules = [import_module(found.name) for found in pkgutil.iter_modules(tiers.__path__, f"{tiers.__name__}.")]
    classes = {value for module in modules for value in vars(module).values() if inspect.isclass(value)}
    found = {each for each in classes - {Tier} if all(hasattr(each, name) for name in PROMISED)}
    assert {each for each in found if not inspect.isabstract(each)} == {each for each, _ in PLACES.values()}


# The control: for each promise a way to break it, which its test notices


def _raise(*_: Any) -> Any:
    raise RuntimeError("It is closed.")


def _shown(old: Any, tier: Any, key: bytes) -> Any:
    """A buffer that `_writing_over` writes to."""
    if (blob := old(key)) is not None:
        tier.shown = blob = memoryview(bytearray(blob))
    return blob


def _writing_over(old: Any, tier: Any, keys: Any) -> Any:
    tier.shown[:] = bytes(len(tier.shown))
    return old(keys)


def _anew(old: Any, tier: Any, entry: Entry, blob: Any) -> Any:
    tier.delete([entry.key])
    return old(entry, blob)


def _closed(old: Any, tier: Any) -> None:
    old()
    tier.read = _raise


def _listed(old: Any, tier: Any, root: bytes | None = None) -> Iterator[Entry]:
    """A page at a time, each as many entries behind the first one that is left."""
    for at in range(len(list(old(root)))):
        yield from list(old(root))[at : at + 1]


def _all(tier: Any) -> list[bytes]:
    return [entry.key for entry in FilesystemTier(f"memory://{tier._base}").entries()]


Change = Callable[..., Any]  # of the method before, the tier, and the arguments
BREAKS: dict[str, dict[str, Change]] = {
    "gives_back_what_was_written": {
        "find": lambda old, _, keys: {k: replace(e, start=0) for k, e in old(keys).items()}
    },
    "parts_may_be_of_any_type": {"write": lambda old, _, entry, blob: old(entry, [bytes(entry.nbytes)])},
    "an_empty_blob_is_a_blob": {"write": lambda old, _, entry, blob: entry.nbytes > 0 and old(entry, blob)},
    "finds_only_what_is_there": {"find": lambda old, tier, keys: old([*keys, *_all(tier)])},
    "a_key_is_not_a_pattern": {"find": lambda old, tier, keys: old(_all(tier) if b"*" in keys else keys)},
    "finds_what_begins_alike_newest_first": {"find_alike": lambda old, _, heads: old(heads)[::-1]},
    "looks_at_256_that_begin_alike": {"find_alike": lambda old, _, heads: old(heads)[:255]},
    "what_is_found_by_content_begins_like_nothing": {
        "find_alike": lambda old, tier, heads: [e for e in tier.entries() if e.head in heads]
    },
    "lists_all_and_those_of_one_root": {"entries": lambda old, _, root=None: old()},
    "lists_those_of_roots_that_begin_alike": {
        "entries": lambda old, _, root=None: [each for each in old() if each.root[:9] == (root or b"")[:9]]
    },
    "what_is_listed_may_go_meanwhile": {"entries": _listed},
    "one_that_is_there_stays_as_it_is": {"write": _anew},
    "deletes": {"delete": lambda old, _, keys: True},
    "clears_one_model": {"clear": lambda old, tier, _: tier.delete(_all(tier))},
    "what_was_read_stays_readable": {"read": _shown, "delete": _writing_over},
    "a_second_one_sees_what_the_first_wrote": {"delete": lambda old, _, keys: True},
    "what_is_kept_outlives_the_tier": {"close": lambda old, tier: tier.delete(_all(tier))},
    "after_close_nothing_raises": {"close": _closed},
    "a_budget_must_be_positive": {"max_bytes": lambda _: None},
    "keeps_within_its_budget": {"max_bytes": lambda _: None},
    "a_budget_may_be_used_up": {"max_bytes": lambda given: given - 1},
    "gives_up_what_was_not_used_for_longest": {"touch": lambda old, _, keys: None},
    "gives_up_what_continues_a_chunk_first": {"write": lambda old, _, entry, blob: old(replace(entry, start=0), blob)},
    "refuses_what_is_larger_than_its_budget": {"max_bytes": lambda given: given * 2},
    "several_threads": {"stats": lambda old, _: {**old(), "bytes": 1}},
    "counts_uses_where_they_are_known": {"hits": lambda old, _: {make_entry(1).key: 3}},
    "notices_are_heard_by_all_in_their_order": {"heard": lambda old, _, since: old(None)},
    "who_has_heard_nothing_yet_misses_nothing": {"announce": lambda old, _, notice: True},
    "deleting_tells_whether_it_was_done": {"delete": lambda old, _, keys: bool(old(keys)) and None},
}
TESTS = {name.removeprefix("test_"): test for name, test in vars(TierContract).items() if name.startswith("test_")}


def _told(test: Callable[..., None], open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of a test of the contract."""
    every = {
        "open_tier": open_tier,
        "monkeypatch": monkeypatch,
        "kind": Kind.CHUNK,
        "parts": [],
        "max_bytes": -1,
        "room": 5,
        "count": 3,
    }
    names = list(inspect.signature(test).parameters)[1:]
    return {name: open_tier() if name == "tier" else every[name] for name in names}


@pytest.mark.parametrize("promise", TESTS)
def test_a_broken_promise_is_noticed(
    promise: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, changes = PLACES["memory"][1](request), BREAKS[promise]

    def open_broken(max_bytes: int | None) -> Any:
        tier: Any = whole(changes.get("max_bytes", lambda given: given)(max_bytes) if max_bytes else None)
        for name, change in changes.items():
            if name != "max_bytes":
                setattr(tier, name, partial(change, getattr(tier, name), tier))
        return tier

    test, broken = TESTS[promise], whole._replace(open=open_broken)
    with pytest.raises((AssertionError, RuntimeError, pytest.fail.Exception)):
        test(TierContract(), **_told(test, broken, monkeypatch))
