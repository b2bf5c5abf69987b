"""A tier keeps what a dictionary would, whatever is done to it through two clients; with a budget, within it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.internals.cache import Entry, Kind, Tier
from tests.tier_contract import PLACES, OpenTier, make_blob, make_entry, name_of

NUMBERS = st.integers(0, 11)
WHICH = st.integers(0, 1)
BUDGET = 20_000


def entry_of(number: int) -> Entry:
    """One of twelve that share three heads, two roots and two models."""
    entry = make_entry(number, nbytes=2000 + 500 * number, start=number % 4 * 16)
    kind = Kind.CONTENT if number % 6 == 5 else Kind.CHUNK
    head = b"" if kind is Kind.CONTENT else name_of("head", number % 3)
    return replace(entry, kind=kind, head=head, root=name_of("root", number % 2), model=name_of("model", number % 2))


class TierMachine(RuleBasedStateMachine):
    """Two clients of one place, beside a dictionary."""

    def __init__(self, tiers: tuple[Tier, Tier], max_bytes: int | None) -> None:
        super().__init__()
        self.tiers, self.max_bytes = tiers, max_bytes
        self.kept: dict[bytes, Entry] = {}  # the oldest first

    @rule(which=WHICH, number=NUMBERS)
    def write(self, which: int, number: int) -> None:
        entry = entry_of(number)
        assert self.tiers[which].write(entry, make_blob(entry))
        self.kept.setdefault(entry.key, entry)

    @rule(which=WHICH, numbers=st.lists(NUMBERS, max_size=4))
    def delete(self, which: int, numbers: list[int]) -> None:
        self.tiers[which].delete(entry_of(number).key for number in numbers)
        for number in numbers:
            self.kept.pop(entry_of(number).key, None)

    @rule(which=WHICH, numbers=st.lists(NUMBERS, max_size=4))
    def touch(self, which: int, numbers: list[int]) -> None:
        self.tiers[which].touch([entry_of(number).key for number in numbers])

    @rule(which=WHICH, of=WHICH)
    def clear(self, which: int, of: int) -> None:
        self.tiers[which].clear(name_of("model", of))
        self.kept = {key: entry for key, entry in self.kept.items() if entry.model != name_of("model", of)}

    @rule(which=WHICH, number=NUMBERS)
    def read(self, which: int, number: int) -> None:
        entry = entry_of(number)
        blob = self.tiers[which].read(entry.key)
        assert blob is None or blob == b"".join(make_blob(entry))
        assert (blob is not None) == (entry.key in self.kept)

    @rule(which=WHICH, of=st.integers(0, 2))
    def find_alike(self, which: int, of: int) -> None:
        found = [entry.key for entry in self.tiers[which].find_alike([name_of("head", of)])]
        assert found == [key for key, entry in self.kept.items() if entry.head == name_of("head", of)][::-1]

    @rule(which=WHICH, of=WHICH)
    def entries(self, which: int, of: int) -> None:
        found = {entry.key for entry in self.tiers[which].entries(name_of("root", of))}
        assert found == {key for key, entry in self.kept.items() if entry.root == name_of("root", of)}

    @invariant()
    def agrees(self) -> None:
        for tier in self.tiers:
            found = {entry.key for entry in tier.entries()}
            if self.max_bytes is None:
                assert found == set(self.kept)
            assert found <= set(self.kept)
            assert tier.stats()["errors"] == 0
        nbytes = sum(entry_of(number).nbytes for number in range(12) if entry_of(number).key in found)
        assert self.max_bytes is None or nbytes <= self.max_bytes
        # What was given up for room is not foreseen here.
        self.kept = {key: entry for key, entry in self.kept.items() if key in found}

    def teardown(self) -> None:
        for tier in self.tiers:
            tier.close()


class Counted(TierMachine):
    """Where clients count together, the count is exact."""

    @invariant()
    def counts(self) -> None:
        for tier in self.tiers:
            stats = tier.stats()
            assert (stats["chunks"], stats["bytes"]) == (len(self.kept), sum(e.nbytes for e in self.kept.values()))


FEW = settings(max_examples=20, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))


def run(machine: type[TierMachine], opened: Callable[[], OpenTier], max_bytes: int | None, clients: int = 2) -> None:
    """Run a machine, each time at another place."""

    def made() -> TierMachine:
        place = opened()
        tiers = [place(max_bytes) for _ in range(clients)]
        return machine((tiers[0], tiers[-1]), max_bytes)

    run_state_machine_as_test(made, settings=FEW)  # type: ignore[arg-type]


@pytest.mark.parametrize("max_bytes", [None, BUDGET])
def test_on_a_server(request, max_bytes):
    run(Counted, lambda: PLACES["server"][1](request), max_bytes)


def test_in_files_that_two_write(request):
    run(TierMachine, lambda: PLACES["memory"][1](request), None)


@pytest.mark.parametrize("max_bytes", [None, BUDGET])
def test_in_files_that_one_writes(request, max_bytes):
    run(Counted, lambda: PLACES["memory"][1](request), max_bytes, clients=1)
