"""How long drafts are, against every fixed length, where acceptance and costs are known."""

import random
from itertools import accumulate
from operator import mul

import pytest

from tests.internals.assisted import (
    Account,
    Adaptive,
    ConfidentLength,
    Constant,
    DraftLength,
    Heuristic,
    HostReads,
    PassTimes,
)


def speed(rate: float, target_s: float, length: int) -> float:
    """Tokens per second of drafts of one length, in the mean."""
    return sum(rate**n for n in range(length + 1)) / (target_s + length)


def play(schedule: Adaptive, rate: float, target_s: float, rounds: int, chance: random.Random) -> None:
    for _ in range(rounds):
        drafted, accepted = schedule.length(64), 0
        while accepted < drafted and chance.random() < rate:
            accepted += 1
        schedule.learn(drafted=drafted, accepted=accepted, draft_s=float(drafted), target_s=target_s)


def share_of_best(rate: float, target_s: float, before: tuple[float, float] | None = None) -> float:
    """What drafts are worth after 30 rounds, in the mean over seeds; `before` these, others of another kind."""
    best, found = max(speed(rate, target_s, length) for length in range(1, 33)), 0.0
    for seed in range(SEEDS):
        schedule, chance = Adaptive(5, 32), random.Random(seed)
        if before is not None:
            play(schedule, *before, 60, chance)
        play(schedule, rate, target_s, 30, chance)
        for _ in range(10):
            found += speed(rate, target_s, schedule.length(64)) / SEEDS / 10
            play(schedule, rate, target_s, 1, chance)
    return found / best


SEEDS = 20
RATES, TARGETS_S = (0.2, 0.5, 0.8, 0.95), (2, 5, 20, 60, 200)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("target_s", TARGETS_S)
def test_adaptive_is_near_the_best(rate: float, target_s: float) -> None:
    assert share_of_best(rate, target_s) >= 0.97


@pytest.mark.parametrize("rate", RATES)
def test_another_target(rate: float) -> None:
    assert share_of_best(rate, 5, before=(rate, 200)) >= 0.97
    assert share_of_best(rate, 200, before=(rate, 5)) >= 0.97


@pytest.mark.parametrize("target_s", TARGETS_S)
def test_another_text(target_s: float) -> None:
    assert share_of_best(0.8, target_s, before=(0.5, target_s)) >= 0.97
    assert share_of_best(0.5, target_s, before=(0.8, target_s)) >= 0.97


def test_it_follows_what_changes() -> None:
    schedule = Adaptive(5, 32)
    lengths = []
    for accepted_all in (True, False, True):
        for _ in range(60):
            drafted = schedule.length(64)
            accepted = drafted if accepted_all else 0
            schedule.learn(drafted=drafted, accepted=accepted, draft_s=0.01 * drafted, target_s=1.0)
        lengths.append(schedule.length(64))
    assert lengths[0] > 20
    assert lengths[1] <= 6
    assert lengths[2] > 20


def test_no_more_than_there_is_room_for() -> None:
    for schedule in (Constant(9), Heuristic(9), Adaptive(9, 32)):
        assert schedule.length(4) == 4
        assert schedule.length(1) == 1


def test_heuristic() -> None:
    schedule, lengths = Heuristic(5), []
    for accepted in (5, 7, 0, 0):
        schedule.learn(drafted=schedule.length(99), accepted=accepted, draft_s=1.0, target_s=1.0)
        lengths.append(schedule.length(99))
    assert lengths == [7, 9, 8, 7]


SURE = (0.2, 0.6, 0.95, 0.9995)  # and as sure is true


def speed_with_confidence(schedule: DraftLength, target_s: float, *, told: bool, rounds: int = 400) -> float:
    """Tokens per second where each token is accepted with the probability that the draft gives it.

    `told` is whether a schedule that asks for these probabilities hears them, or the same ones in another order.
    """
    chance, tokens, seconds = random.Random(1), 0.0, 0.0
    for _ in range(rounds):
        true: list[float] = []
        sure: list[float] = []
        while True:
            true.append(chance.choice(SURE))
            sure.append(true[-1] if told else chance.choice(SURE))
            if isinstance(schedule, ConfidentLength):
                if not schedule.goes_on(sure):
                    break
            elif len(true) == schedule.length(64):
                break
        accepted = next((place for place, each in enumerate(true) if chance.random() >= each), len(true))
        tokens, seconds = tokens + 1 + sum(accumulate(true, mul)), seconds + len(true) + target_s  # in the mean
        if isinstance(schedule, ConfidentLength):
            schedule.compare(sure, accepted)
        schedule.learn(drafted=len(true), accepted=accepted, draft_s=float(len(true)), target_s=target_s)
    return tokens / seconds


@pytest.mark.parametrize(("target_s", "gain"), [(2, 1.03), (5, 1.06), (20, 1.06), (60, 1.04), (200, 0.99)])
def test_confidence_is_worth_something(target_s: float, gain: float) -> None:
    """More than any fixed length can have; and if it tells nothing, little is lost by listening to it."""
    best = max(speed_with_confidence(Constant(n), target_s, told=True) for n in range(1, 21))
    assert speed_with_confidence(Adaptive(5, 32), target_s, told=True) >= gain * best
    assert speed_with_confidence(Adaptive(5, 32), target_s, told=False) >= 0.95 * best


def test_a_draft_that_is_never_refused() -> None:
    schedule = Adaptive(5, 32)
    for _ in range(500):
        sure = [0.5]
        while schedule.goes_on(sure):
            sure.append(0.5)
        schedule.compare(sure, len(sure))
        schedule.learn(drafted=len(sure), accepted=len(sure), draft_s=1.0 * len(sure), target_s=20.0)
    assert len(sure) == schedule.length(64) == 32


def test_a_clock_that_stands_still() -> None:
    schedule = Adaptive(5, 32)
    for _ in range(3):
        schedule.learn(drafted=5, accepted=1, draft_s=0.0, target_s=0.0)
        assert schedule.length(64) == 5
        assert schedule.goes_on([0.9] * 4)
        assert not schedule.goes_on([0.9] * 5)


def test_prompts_are_not_taken_for_passes() -> None:
    schedules = [Adaptive(5, 32), Adaptive(5, 32)]
    for number in range(20):
        for schedule, prompt_s in zip(schedules, (0.0, 500.0), strict=True):
            told = {"drafted": 5, "accepted": 4, "draft_s": 5.0, "target_s": 10.0}
            schedule.learn(**told)  # type: ignore[arg-type]
            schedule.learn(**{**told, "draft_s": 5.0 + prompt_s, "target_s": 10.0 + 9 * prompt_s}, first=True)  # type: ignore[arg-type]
        assert schedules[0].length(64) == schedules[1].length(64), number


@pytest.mark.daily
@pytest.mark.parametrize(
    ("launch_s", "wait_s", "every"), [(9.0, 0.0, 1), (9.0, 1.0, 1), (1.0, 9.0, 1), (5.0, 5.0, 4)], ids=str
)
def test_looks(launch_s: float, wait_s: float, every: int) -> None:
    """At each token, unless a device would wait long for its next pass."""
    looks = HostReads()
    assert looks.every == 1
    for _ in range(3):
        looks.learn(passes=1, launch_s=launch_s, wait_s=wait_s)
        assert looks.every == every
    for _ in range(40):  # and it is not for ever
        looks.learn(passes=4, launch_s=8.0, wait_s=0.0)
    assert looks.every == 1


def test_what_passes_with_drafts_take() -> None:
    """As measured; else by the next smaller one and by passes over prompts, and no less than without drafts."""
    times = PassTimes()
    for rows, seconds in ((2, 1.0), (3, 3.0), (4, 2.0)):
        times.learn(rows, 0, seconds)
    assert [times.plain(rows) for rows in (1, 2, 3, 4)] == [None, 1.0, 3.0, 2.0]
    assert times.wide(2, 3) == pytest.approx(1.1 + 4 * 0.5)
    for tokens, seconds in ((100, 1.0), (10, 5.0), (0, 7.0)):
        times.learn_prompt(tokens, seconds)
    assert times.wide(2, 3) == pytest.approx(1.1 + 4 * 0.01)
    times.learn(2, 2, 1.2)
    assert [times.wide(*each) for each in ((2, 2), (2, 3))] == pytest.approx([1.2, 1.2 + 2 * 0.01])
    assert [times.wide(*each) for each in ((4, 2), (3, 2))] == pytest.approx([2.2 + 4 * 0.01, 3.0 + 2 * 0.01])
    times.learn(2, 4, 1.6)  # a tenth of a second for each token more
    assert [times.wide(*each) for each in ((2, 3), (2, 4), (3, 4))] == pytest.approx([1.4, 1.6, 3.4])


def test_what_drafting_takes() -> None:
    times = PassTimes()
    assert times.drafting([], 1.0) == 0.0
    assert times.drafting([(0.1, 1), (0.4, 9)], 2.0) == pytest.approx(2 * 0.8)
    times.learn_prompt(100, 1.0)
    assert times.drafting([(0.4, 8)], 1.0) == pytest.approx(0.4)
    assert times.drafting([(0.4, 9), (0.1, 1)], 1.0) == pytest.approx(2 * 0.4 + 9 * 0.4 * 0.01)
    times.learn_drafting([], 9.0)
    times.learn_drafting([1, 1], 0.2)
    assert times.drafting([(0.4, 1)], 1.0) == pytest.approx(0.1)
    times.learn_drafting([100, 1], 0.3)
    assert times.drafting([(0.4, 200)], 1.0) == pytest.approx(0.1 + 200 * 0.001)
    times.learn_drafting([100, 1], 0.1)  # less than is known for drafting alone
    assert times.drafting([(0.4, 200)], 1.0) == pytest.approx(0.1 + 200 * 0.001 * 0.95 / 1.95)


def test_what_drafts_may_lose() -> None:
    times = PassTimes()
    times.learn(2, 0, 1.0)
    assert Account(times, 5, 1000).spare_s == 0.0  # nothing is known of such passes
    assert [Account(times, 2, room).spare_s for room in (20, 1000)] == pytest.approx([0.2, 0.5])
    assert Account(times, 2, 1000, most_passes=0.3).spare_s == pytest.approx(0.3)
    for most, spare in ((float("inf"), 6.1 + 0.18 + 0.5 - 0.25), (3.0, 3.0)):
        account = Account(times, 2, 1000, most_passes=most)
        account.note(0, 10, 0.0, 1.0)
        account.note(4, 8, 0.5, 1.4)
        account.note(0, 0, 0.25, 1.0)  # drafts that no pass checked
        assert account.spare_s == pytest.approx(spare)


def test_as_many_columns_as_give_most_tokens_a_second() -> None:
    times = PassTimes()
    for columns, seconds in ((0, 1.0), (2, 1.5), (3, 2.0)):
        times.learn(2, columns, seconds)
    account, nothing = Account(times, 2, 1000), Account(times, 5, 1000)
    assert (nothing.columns([[1.0]], [5]), nothing.may_draft()) == (0, False)
    assert account.may_draft([(0.25, 1), (0.25, 1)])  # half a second, of half a second
    assert not account.may_draft([(0.26, 1), (0.25, 1)])
    assert account.columns([[0.5], [0.5]], [5, 5]) == 0  # half a token more, in half of the time more
    assert account.columns([[0.5], [0.6]], [5, 5]) == 1
    assert account.columns([[0.9, 0.9], [0.9, 0.9]], [5, 5]) == 1  # two would lose more than may be lost
    account.note(0, 100, 0.0, 1.0)
    assert account.columns([[0.9, 0.9], [0.9, 0.9]], [5, 5]) == 2
    for ahead, best in ((16, 1), (17, 0)):  # which saves no time
        assert account.columns([[1.0, 1.0], [0.2]], [10 + ahead, 10]) == best
