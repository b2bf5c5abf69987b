"""What is told of rounds: the last one of an answer, and where the time goes."""

import gc
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from kvboost_hf import ChunkReuseCache, ChunkStore, load_assistant, speculation_stats
from tests.conftest import as_inputs, random_ids
from tests.streaming import make_layers, stream_except

IDS = random_ids(30, 1)
PASS_S, DRAFT_S, CROP_S = 100.0, 1.0, 7.0


class Clock:
    """Goes forward when models do."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def charge(self, model: PreTrainedModel, price: float) -> None:
        def advance(*_: object) -> None:
            self.now += price

        model.register_forward_hook(advance)


class SlowToCrop(ChunkReuseCache):
    clock: Clock

    def crop(self, tokens_to_remove: int) -> None:
        self.clock.now += CROP_S
        super().crop(tokens_to_remove)


class Noting:
    """A schedule that keeps what it is told."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.told = tokens, list[dict[str, Any]]()

    def length(self, most: int) -> int:
        return min(self.tokens, most)

    def learn(self, **told: Any) -> None:
        self.told.append(told)


class Cautious(Noting):
    """Drafts until the draft is less sure than it was of its first token."""

    def __init__(self) -> None:
        super().__init__(99)
        self.compared = list[list[float]]()

    def goes_on(self, sure: Sequence[float]) -> bool:
        return sure[-1] >= sure[0]

    def compare(self, sure: Sequence[float], accepted: int) -> None:
        self.compared.append([*sure, accepted])


def same_pair(tokens: int, **kwargs: Any) -> tuple[PreTrainedModel, PreTrainedModel, Noting]:
    """A draft that says what its target says, though it has fewer layers: those that it lacks do nothing."""
    target, schedule = make_layers(3), Noting(tokens)
    with torch.no_grad():
        for name, parameter in target.model.layers[2].named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
    draft = make_layers(2)
    return target, load_assistant(draft, target=target, schedule=schedule, **kwargs), schedule


def plain_answer(target: PreTrainedModel) -> list[int]:
    found = target.generate(**as_inputs(IDS), max_new_tokens=20, eos_token_id=None)
    said: list[int] = found[0, 30:].tolist()
    return said


@pytest.mark.parametrize("reuses", [False, True])
def test_an_answer_of_one_round(reuses: bool) -> None:
    """It ends with a token of the draft, which the next call will not tell; the target's cache did."""
    target, draft, schedule = same_pair(12)
    said = plain_answer(target)
    end = next(token for token in said[3:] if token not in said[:3])
    length = said.index(end) + 1
    assert length <= 12
    cache = ChunkReuseCache(target) if reuses else None
    told = {**as_inputs(IDS), "max_new_tokens": 20, "eos_token_id": end, "past_key_values": cache}
    found = target.generate(**told, assistant_model=draft)
    assert found[0, 30:].tolist() == said[:length]
    drafted = length - 1  # the first token is the target's
    assert [(each["drafted"], each["accepted"]) for each in schedule.told] == [(drafted, drafted)]
    stats = speculation_stats(draft)
    assert (stats.rounds, stats.committed, stats.histogram) == (1, drafted, Counter({drafted: 1}))


@pytest.mark.parametrize("reuses", [False, True])
@pytest.mark.parametrize("pads", [0, 5])
def test_the_first_token_does_not_wait_for_the_draft(reuses: bool, pads: int) -> None:
    """The target takes in the prompt as without a draft, and the draft takes it in afterwards."""
    target, draft, _ = same_pair(4)
    ids = torch.cat([torch.zeros(1, pads, dtype=torch.long), IDS], 1)
    told: dict[str, Any] = {"input_ids": ids, "attention_mask": (ids.cumsum(1) > 0).long(), "max_new_tokens": 12}
    told["eos_token_id"] = None
    wanted = target.generate(**told)
    events: list[tuple[str, int]] = []
    for name, model in (("target", target), ("draft", draft)):
        layer = model.model.layers[1]
        layer.register_forward_pre_hook(lambda _, args, name=name: events.append((name, args[0].shape[1])))

    class Streamer(BaseStreamer):
        def put(self, value: torch.Tensor) -> None:
            events.append(("streamed", value.numel()))

        def end(self) -> None:
            pass

    cache = ChunkReuseCache(target) if reuses else None
    for warm in (False, True):
        events.clear()
        found = target.generate(**told, assistant_model=draft, past_key_values=cache, streamer=Streamer())
        assert torch.equal(found, wanted)
        first = events.index(("streamed", 1))  # the prompt is streamed before it
        assert not any(name == "draft" for name, _ in events[:first])
        assert events[first - 1] == ("target", 1 if reuses and warm else ids.shape[1])
        assert events[first + 1] == ("draft", ids.shape[1] + 1)
    assert speculation_stats(draft).acceptance > 0.9  # a draft that saw other columns or positions would be refused


def test_a_slow_target_checks_a_draft_at_once() -> None:
    """Where weights are fetched for each pass, a pass without a draft is time lost."""
    target = make_layers(5)
    stream_except(target, (0,))
    draft = load_assistant(make_layers(2), target=target)
    passes = list[str]()
    target.model.layers[1].register_forward_pre_hook(lambda *_: passes.append("target"))
    draft.model.layers[1].register_forward_pre_hook(lambda *_: passes.append("draft"))
    target.generate(**as_inputs(IDS), max_new_tokens=4, assistant_model=draft)
    assert passes[0] == "draft"


def test_a_last_round_that_is_refused() -> None:
    target, draft, schedule = same_pair(6)
    with torch.no_grad():
        draft.lm_head.weight.neg_()
    target.generate(**as_inputs(IDS), max_new_tokens=4, eos_token_id=None, assistant_model=draft)
    assert [each["accepted"] for each in schedule.told] == [0, 0]
    assert speculation_stats(draft).committed == 2  # one token was left, for which nothing is drafted


def test_a_schedule_that_is_asked_at_each_token() -> None:
    """It is told the draft's own probabilities, and no pass of the draft comes after it has said no."""
    target, draft, _ = same_pair(4)
    schedule, passes = Cautious(), [0]
    draft = load_assistant(draft, target=target, schedule=schedule)
    handle = draft.register_forward_hook(lambda *_: passes.__setitem__(0, passes[0] + 1))
    told = {**as_inputs(IDS), "max_new_tokens": 16, "eos_token_id": None}
    found = target.generate(**told, assistant_model=draft)
    handle.remove()
    stats = speculation_stats(draft)
    assert passes[0] == stats.drafted == sum(len(each) - 1 for each in schedule.compared)
    with torch.no_grad():
        likely = draft(found).logits[0].softmax(-1)
    at = IDS.shape[1] + 1  # behind the first token, which is the target's
    for *sure, accepted in schedule.compared:
        assert accepted == len(sure)
        assert all(each >= sure[0] for each in sure[:-1])
        for place, each in enumerate(sure):
            assert each == pytest.approx(likely[at + place - 1, found[0, at + place]].item(), rel=1e-4)
        at += len(sure) + 1
    assert len(schedule.compared) > 2
    assert stats.rounds < stats.drafted  # some drafts went on


def test_where_time_goes() -> None:
    clock = Clock()
    target, draft, schedule = same_pair(4, clock=clock)
    SlowToCrop.clock = clock
    cache = SlowToCrop(target, ChunkStore(target))
    target.generate(**as_inputs(IDS), max_new_tokens=2, past_key_values=cache)  # probes the model
    clock.charge(target, PASS_S)
    clock.charge(draft, DRAFT_S)
    target.generate(
        **as_inputs(IDS), max_new_tokens=16, eos_token_id=None, assistant_model=draft, past_key_values=cache
    )
    stats = speculation_stats(draft)
    assert stats.rounds == len(schedule.told) > 2
    assert stats.draft_s == DRAFT_S * stats.drafted
    assert stats.verify_s == PASS_S * stats.rounds
    assert stats.rollback_s == CROP_S * stats.rounds
    assert stats.target_s == stats.verify_s + stats.rollback_s
    assert all(each["target_s"] == PASS_S + CROP_S for each in schedule.told)


def test_no_trace_is_left() -> None:
    """On models and caches, whether generate() comes to its end or not."""
    target, draft, schedule = same_pair(4)
    cache = ChunkReuseCache(target)
    hooks = len(target._forward_hooks)
    told = {**as_inputs(IDS), "max_new_tokens": 12, "eos_token_id": None, "past_key_values": cache}
    target.generate(**told, assistant_model=draft)
    assert "crop" not in vars(cache)
    assert len(target._forward_hooks) == hooks

    def fail(*_: object) -> None:
        raise RuntimeError("a pass that fails")

    handle = target.model.layers[1].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="a pass that fails"):
        target.generate(**told, assistant_model=draft)
    handle.remove()
    gc.collect()
    assert len(target._forward_hooks) == hooks
    rounds = len(schedule.told)
    wanted = target.generate(**told)
    assert "crop" not in vars(cache)
    assert torch.equal(target.generate(**told, assistant_model=draft), wanted)
    assert len(schedule.told) > rounds
    assert "crop" not in vars(cache)
    assert len(target._forward_hooks) == hooks


def test_another_target() -> None:
    """Answers of a model that the draft was not prepared for are counted as far as the next call tells."""
    _, draft, schedule = same_pair(4)
    other = make_layers(2)
    other.generate(**as_inputs(IDS), max_new_tokens=13, eos_token_id=None, assistant_model=draft)
    assert len(schedule.told) == 2  # of three rounds: no call comes after the last one
    assert all(each["accepted"] == 4 for each in schedule.told)
