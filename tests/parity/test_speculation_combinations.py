"""Every way to draft, with every cache, target and attention: what is said is what plain generate() says."""

from collections.abc import Callable
from itertools import combinations as subsets
from itertools import product
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvboost_hf import streaming_plan, streaming_stats
from tests.speculation import (
    ASSISTANTS,
    ATTENTIONS,
    CACHES,
    DRAFTS,
    Combination,
    Conversation,
    Reader,
    combinations,
    conversations,
    parted,
    run,
)


@pytest.fixture(scope="module")
def chats() -> list[Conversation]:
    """A single question, and a chat of three turns."""
    return conversations(Reader("sdpa", streamed=False).tokenizer, 1, seed=3)


@pytest.fixture(scope="module")
def readers(chats: list[Conversation]) -> dict[tuple[str, bool], Reader]:
    """By attention, and whether layers are streamed."""
    found = {key: Reader(*key) for key in product(ATTENTIONS, (False, True))}
    for reader in found.values():
        reader.warm(chats)
    return found


@pytest.fixture(scope="module")
def plain(readers: dict[tuple[str, bool], Reader], chats: list[Conversation]) -> dict[tuple[str, bool], Any]:
    """By attention, and whether K/V is in codes."""
    return {key: readers[key[0], False].plain(chats, codes=key[1]) for key in product(ATTENTIONS, (False, True))}


def test_any_two_values_meet() -> None:
    values = {"assistant": ASSISTANTS, "cache": CACHES, "streamed": (False, True), "attention": ATTENTIONS}
    for one, other in subsets(values, 2):
        met = {(getattr(each, one), getattr(each, other)) for each in combinations()}
        apart = set(product(values[one], values[other])) - met
        assert apart == {(name, "reuse by both") for name in ASSISTANTS if name not in DRAFTS and other == "cache"}


@pytest.mark.parametrize("combination", combinations(), ids=str)
def test_answers(combination: Combination, readers: Any, plain: Any, chats: list[Conversation]) -> None:
    reader = readers[combination.attention, combination.streamed]
    expected = plain[combination.attention, combination.cache == "codes"]
    before = streaming_stats(reader.model)
    done = run(reader, combination, chats)
    assert done.equal(expected) == len(expected) == 4
    prompts = [prompt.numel() for chat in chats for prompt in chat]
    said = sum(answer.numel() for answer in expected) - sum(prompts)
    assert len(prompts) <= done.target.passes <= said / 2  # drafts were taken
    assert (done.draft.passes > 0) == (combination.assistant in DRAFTS)
    missed = sum(prompts) - done.reused
    widest = 64 if combination.assistant == "trees" else 17
    assert missed + said - len(prompts) <= done.target.tokens <= missed + widest * done.target.passes
    if combination.cache in ("warm", "reuse by both"):
        assert missed <= 2 * len(prompts)
    elif combination.cache == "conversation":
        assert done.reused >= chats[1][1].numel() + 32  # all of the turn before, and most of the one before that
    else:
        assert done.reused == 0
    if combination.streamed:
        after, plan = streaming_stats(reader.model), streaming_plan(reader.model)
        assert plan.resident == (0,)
        assert after.layer_calls - before.layer_calls >= 3 * done.target.passes
        assert after.bytes_copied - before.bytes_copied >= 2 * plan.slot_bytes * done.target.passes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parts_only_at_ties(dtype: torch.dtype, chats: list[Conversation]) -> None:
    reader = Reader("sdpa", False, dtype)
    told = {"output_logits": True, "return_dict_in_generate": True}
    prompts = [prompt for chat in chats for prompt in chat]
    done = run(reader, Combination("constant", "conversation", False, "sdpa"), chats, **told)
    found = [
        parted(ours, reader.answer(prompt, **told), prompt.shape[1], dtype)  # type: ignore[arg-type]
        for ours, prompt in zip(done.answers, prompts, strict=True)
    ]
    assert 0 < max(off for off, _ in found) <= 2  # a pass over several tokens does round otherwise
    assert all(gap is None or gap <= 4 for _, gap in found)


def test_the_draft_reuses_kv(readers: Any, chats: list[Conversation]) -> None:
    reader = readers["sdpa", False]
    for assistant in DRAFTS:
        alone, both = (run(reader, Combination(assistant, c, False, "sdpa"), chats) for c in ("warm", "reuse by both"))
        assert both.draft.passes == alone.draft.passes
        assert both.draft.tokens <= alone.draft.tokens - chats[1][0].numel() + 32


def spoil_kv(model: PreTrainedModel, args: Any, kwargs: Any, output: Any) -> None:
    """What is kept of the text is nothing."""
    for layer in output.past_key_values.layers:
        layer.values.zero_()


def accept_everything(model: PreTrainedModel, args: Any, kwargs: Any, output: Any) -> None:
    """The target is made to say what it is asked about, whatever it would have said."""
    drafted = output.logits.shape[1] - 1
    if drafted:
        output.logits[:, :-1].scatter_(2, kwargs["input_ids"][:, -drafted:, None], torch.inf)


@pytest.mark.parametrize("wrong", [spoil_kv, accept_everything])
@pytest.mark.parametrize("cache", ["none", "conversation"])
def test_a_wrong_cache_and_a_wrong_check_are_found(
    wrong: Callable[..., None], cache: str, plain: Any, chats: list[Conversation]
) -> None:
    reader = Reader("sdpa", streamed=False)
    reader.model.register_forward_hook(wrong, with_kwargs=True)
    done = run(reader, Combination("constant", cache, False, "sdpa"), chats)
    assert done.equal(plain["sdpa", False]) <= 2
