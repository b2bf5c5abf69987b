"""Decoding steps go on from the last one while nothing has changed, and are decided anew where something has."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, ReusePolicy
from tests.conftest import as_inputs, left_pad, make_model, random_ids
from tests.internals.cache import flow, reuse

NEW = 8
IDS = random_ids(40)
Change = Callable[[PreTrainedModel, ChunkReuseCache, ExitStack], Any]


@pytest.fixture
def model() -> PreTrainedModel:
    return make_model("llama")


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each forward had that was decided from the start."""
    found: list[int] = []
    decide = flow.next_forward

    def noted(parts: Any, request: Any) -> Any:
        found.append(request.kwargs["input_ids"].shape[1])
        return decide(parts, request)

    monkeypatch.setattr(reuse, "next_forward", noted)
    return found


class _At(LogitsProcessor):
    """Calls something after some tokens."""

    def __init__(self, token: int, act: Callable[[], Any]) -> None:
        self._left, self._act = token, act

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._left -= 1
        if self._left == 0:
            self._act()
        return scores


def generate(model: PreTrainedModel, inputs: dict[str, torch.Tensor], cache: Any = None, **more: Any) -> Any:
    settings = {"max_new_tokens": NEW, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    call: Any = model.generate
    return call(**inputs, past_key_values=cache, **settings, **more)


def same(found: Any, plain: Any) -> bool:
    return torch.equal(found.sequences, plain.sequences) and all(
        torch.allclose(one, other, atol=1e-4) for one, other in zip(found.logits, plain.logits, strict=True)
    )


def test_only_the_first_steps_are_decided(model: PreTrainedModel, decided: list[int]) -> None:
    plain, cache = generate(model, as_inputs(IDS)), ChunkReuseCache(model, ChunkStore(model, chunk_size=16))
    for _ in range(2):
        decided.clear()
        assert same(generate(model, as_inputs(IDS), cache), plain)
        assert decided == [40, 1]
    assert torch.equal(torch.tensor(cache.parts.live.ledger.log.row(0)[:40]), IDS[0])
    assert cache.parts.live.ledger.log.trusted
    text = plain.sequences
    assert cache.stored_tokens(text) == text.shape[1] - 1
    generate(model, as_inputs(text), cache)
    assert cache.report.forwarded_tokens == 1


@pytest.mark.parametrize("name", ["qwen3_next", "mistral", "gpt_oss"])
def test_states_and_windows(name: str, decided: list[int]) -> None:
    model = make_model(name)
    plain, cache = generate(model, as_inputs(IDS)), ChunkReuseCache(model, ChunkStore(model, chunk_size=16))
    for _ in range(2):
        decided.clear()
        assert same(generate(model, as_inputs(IDS), cache), plain)
        assert decided == [40, 1]
    text = plain.sequences
    assert same(generate(model, as_inputs(text), cache), generate(model, as_inputs(text)))


def test_rows_with_padding(model: PreTrainedModel, decided: list[int]) -> None:
    inputs, store = left_pad(IDS, IDS[:, :25]), ChunkReuseCache(model).store
    cache, plain = ChunkReuseCache(model, store), generate(model, inputs)
    for _ in range(2):
        decided.clear()
        assert same(generate(model, inputs, cache), plain)
        assert decided == [40, 1]
    assert cache.parts.live.ledger is not None
    assert cache.parts.live.ledger.log.trusted
    text = plain.sequences[1:, 15:]
    assert cache.stored_tokens(text) == text.shape[1] - 1
    assert same(generate(model, as_inputs(text), ChunkReuseCache(model, store)), generate(model, as_inputs(text)))


@pytest.mark.parametrize("attention", ["sdpa", "kvboost_fa2"])
def test_a_mask_that_hides_more_from_some_token_on(model: PreTrainedModel, attention: str, decided: list[int]) -> None:
    """It is obeyed, and what was computed behind it is not taken for a continuation of the text."""
    model.set_attn_implementation(attention)
    store = ChunkStore(model, chunk_size=16)
    cache, stock = ChunkReuseCache(model, store), DynamicCache(config=model.config)
    cache.in_own_loop = True
    tokens, hidden = random_ids(60), torch.ones(1, 60, dtype=torch.long)
    with torch.no_grad():
        for each in (cache, stock):
            model(tokens[:, :30], past_key_values=each, logits_to_keep=1)
        for at in range(30, 59):
            if at > 40:
                hidden[:, 5:9] = 0
            given = {"attention_mask": hidden[:, : at + 1], "position_ids": torch.tensor([[at]]), "logits_to_keep": 1}
            ours, theirs = (
                model(tokens[:, at : at + 1], past_key_values=each, **given).logits for each in (cache, stock)
            )
            assert torch.allclose(ours, theirs, atol=1e-4), at
    assert len(decided) < 15  # until a chunk is complete, and the masks are read
    fresh = ChunkReuseCache(model, store)
    assert fresh.stored_tokens(tokens) <= 40
    assert same(generate(model, as_inputs(tokens), fresh), generate(model, as_inputs(tokens)))


def _hook(model: PreTrainedModel, cache: ChunkReuseCache, stack: ExitStack) -> None:
    layer: Any = model.model
    stack.callback(layer.layers[0].mlp.register_forward_hook(lambda module, args, output: output * 2).remove)


def _autocast(model: PreTrainedModel, cache: ChunkReuseCache, stack: ExitStack) -> None:
    stack.enter_context(torch.autocast("cpu", torch.bfloat16))


def _written(model: PreTrainedModel, cache: ChunkReuseCache, stack: ExitStack) -> None:
    cache.layers[0].keys.mul_(2)


def _invalidated(model: PreTrainedModel, cache: ChunkReuseCache, stack: ExitStack) -> None:
    cache.store.invalidate()


@pytest.fixture(params=[_hook, _autocast, _written, _invalidated], ids=lambda each: each.__name__[1:])
def change(request: pytest.FixtureRequest) -> Iterator[tuple[Change, ExitStack]]:
    with ExitStack() as stack:
        yield request.param, stack


def test_what_changes_in_the_middle_of_a_call_is_seen(
    model: PreTrainedModel, decided: list[int], change: tuple[Change, ExitStack]
) -> None:
    """What follows is not taken for K/V of the model as it was: nothing of it is stored, or found again."""
    act, stack = change
    store = ChunkStore(model, chunk_size=16)
    cache = ChunkReuseCache(model, store)
    processor = _At(4, lambda: act(model, cache, stack))
    text = generate(model, as_inputs(IDS), cache, logits_processor=[processor]).sequences
    assert len(decided) > 2 or act is _written  # which is found when the next chunk is complete
    stack.close()
    fresh = ChunkReuseCache(model, store)
    assert fresh.stored_tokens(text) <= 43  # the prompt, and the tokens before the change
    if act is not _written:  # which other layers do not see
        assert same(generate(model, as_inputs(text), cache), generate(model, as_inputs(text)))
    assert same(generate(model, as_inputs(text), fresh), generate(model, as_inputs(text)))


def test_a_loop_by_hand_behind_a_call_is_decided_each_time(model: PreTrainedModel, decided: list[int]) -> None:
    """Weights may change between its tokens, and back."""
    store = ChunkStore(model, chunk_size=16)
    cache = ChunkReuseCache(model, store)
    weight = model.get_input_embeddings().weight
    text = generate(model, as_inputs(IDS), cache).sequences
    decided.clear()
    with torch.no_grad():
        before = weight.clone()
        for step in range(20):
            if step == 3:
                weight.mul_(1.5)
            text = torch.cat([text, text[:, -1:] + 1], dim=1)
            model(text[:, -1:], past_key_values=cache, logits_to_keep=1)
        weight.copy_(before)
    assert len(decided) == 20
    assert same(generate(model, as_inputs(text), cache), generate(model, as_inputs(text)))
    assert same(generate(model, as_inputs(text), ChunkReuseCache(model, store)), generate(model, as_inputs(text)))


def test_a_call_that_failed_is_not_gone_on_with(model: PreTrainedModel, decided: list[int]) -> None:
    """Its exception keeps its frame: what somebody runs by hand then is no token of it."""
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=16))

    def fail() -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop") as kept:
        generate(model, as_inputs(IDS), cache, logits_processor=[_At(4, fail)])
    decided.clear()
    with torch.no_grad():
        model(IDS[:, :1], past_key_values=cache, logits_to_keep=1)
        model(IDS[:, :1], past_key_values=cache, logits_to_keep=1)
    assert decided == [1, 1]
    assert kept.value is not None


@pytest.mark.daily
@pytest.mark.parametrize("more", [{"output_hidden_states": True}, {"output_attentions": True}])
def test_what_a_call_asks_for_is_returned(model: PreTrainedModel, more: dict[str, Any]) -> None:
    model.set_attn_implementation("eager")
    cache = ChunkReuseCache(model, policy=ReusePolicy(keep_logprobs=True))
    found, plain = generate(model, as_inputs(IDS), cache, **more), generate(model, as_inputs(IDS), **more)
    assert same(found, plain)
    name = "hidden_states" if "output_hidden_states" in more else "attentions"
    for one, other in zip(found[name][1:], plain[name][1:], strict=True):
        for ours, theirs in zip(one, other, strict=True):
            assert torch.allclose(ours, theirs, atol=1e-4)


def test_several_caches_take_turns(model: PreTrainedModel, decided: list[int]) -> None:
    """Each goes on with its own text; a bare forward between two calls is no part of either."""
    texts = [random_ids(30, seed) for seed in (1, 2)]
    caches = [ChunkReuseCache(model) for _ in texts]
    for _ in range(2):
        for ids, cache in zip(texts, caches, strict=True):
            assert same(generate(model, as_inputs(ids), cache), generate(model, as_inputs(ids)))
    assert decided.count(1) == 4
