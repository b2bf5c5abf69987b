"""How long drafts are, against every fixed length, where acceptance and costs are known."""

import random

import pytest

from kvboost_hf.assisted.schedule import Adaptive, Constant, DraftLength, Heuristic


def tokens_per_s(schedule: DraftLength, rate: float, target_s: float, rounds: int = 4000) -> float:
    """With a draft that takes a second for each token, each of which is accepted with the same chance."""
    chance, tokens, seconds = random.Random(0), 0, 0.0
    for number in range(rounds):
        drafted = schedule.length(64)
        accepted = 0
        while accepted < drafted and chance.random() < rate:
            accepted += 1
        tokens, seconds = tokens + accepted + 1, seconds + drafted + target_s
        told = {"drafted": drafted, "accepted": accepted, "draft_s": float(drafted)}
        schedule.learn(**told, target_s=target_s if number else 50 * target_s, first=not number)
    return tokens / seconds


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.8, 0.9, 0.97])
@pytest.mark.parametrize("target_s", [2, 5, 20, 60, 200])
def test_adaptive_is_near_the_best(rate: float, target_s: float) -> None:
    best = max(tokens_per_s(Constant(n), rate, target_s) for n in range(1, 33))
    assert tokens_per_s(Adaptive(5, 32), rate, target_s) >= 0.97 * best


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
