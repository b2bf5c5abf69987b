"""Pipelines and other calls that bring no cache of their own."""

import threading
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, pipeline

from kvboost_hf import ChunkReuseCache, ChunkStore, attach, check_model_compatibility, detach, last_cache
from kvboost_hf.assets import load_embedded
from tests.architectures import make_architecture
from tests.conftest import as_inputs, counted, left_pad, make_model, random_ids

BASE = random_ids(200, seed=1)


@pytest.fixture
def attached(llama: PreTrainedModel) -> PreTrainedModel:
    check_model_compatibility(llama)
    return attach(llama, ChunkStore(llama, chunk_size=32))


def report(model: PreTrainedModel) -> Any:
    cache = last_cache(model)
    assert cache is not None
    return cache.report


def test_later_calls_reuse(attached: PreTrainedModel) -> None:
    expected = make_model("llama").generate(**as_inputs(BASE), max_new_tokens=6)
    for reused in (0, 199):
        assert torch.equal(attached.generate(**as_inputs(BASE), max_new_tokens=6), expected)
        assert report(attached).reused_tokens == reused  # the tail that filled no chunk, too


@pytest.mark.parametrize(
    "mode",
    [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 50}, {"num_return_sequences": 2}],
)
def test_modes(attached: PreTrainedModel, mode: dict[str, Any]) -> None:
    plain = make_model("llama")
    sample = {"do_sample": "num_return_sequences" in mode}
    for ids in (BASE, BASE, BASE[:, :120]):
        torch.manual_seed(0)
        expected = plain.generate(**as_inputs(ids), max_new_tokens=6, **mode, **sample)
        torch.manual_seed(0)
        assert torch.equal(attached.generate(**as_inputs(ids), max_new_tokens=6, **mode, **sample), expected)
    assert report(attached).reused_tokens >= 100


@pytest.mark.parametrize("name", ["mistral", "lfm2"])
def test_candidates_are_cropped_from_windows_and_states(name: str) -> None:
    """generate() asks the cache that it has made to remember them, before ours takes its place."""
    plain, model = make_architecture(name), make_architecture(name)
    check_model_compatibility(model)
    attach(model, ChunkStore(model, chunk_size=32))
    ids = BASE[:, :40].repeat(1, 3)
    for _ in range(2):
        found = model.generate(**as_inputs(ids), max_new_tokens=12, prompt_lookup_num_tokens=4)
        assert torch.equal(found, plain.generate(**as_inputs(ids), max_new_tokens=12))
    assert report(model).reused_tokens >= 96


def test_target_and_assistant_both_attached(attached: PreTrainedModel) -> None:
    assistant = attach(make_model("llama", seed=7))
    assistant.generation_config.num_assistant_tokens = 5
    assistant.generation_config.assistant_confidence_threshold = 0.0
    plain = make_model("llama")
    for ids in (BASE, BASE, BASE[:, :150]):
        found = attached.generate(**as_inputs(ids), max_new_tokens=10, assistant_model=assistant)
        assert torch.equal(found, plain.generate(**as_inputs(ids), max_new_tokens=10))


def test_batches(attached: PreTrainedModel) -> None:
    plain = make_model("llama")
    for batch in (left_pad(BASE[:, :150], BASE[:, :70]), left_pad(BASE[:, :170], BASE[:, :90])):
        expected = plain.generate(**batch, max_new_tokens=6)
        assert torch.equal(attached.generate(**batch, max_new_tokens=6), expected)
    assert report(attached).reused_tokens >= 150


@torch.no_grad()
def test_a_cache_of_the_caller_stays_usable(attached: PreTrainedModel) -> None:
    """Somebody passes a DynamicCache of their own, and goes on using it."""
    plain = make_model("llama")
    theirs, stock = DynamicCache(config=attached.config), DynamicCache(config=attached.config)
    for model, cache in ((attached, theirs), (plain, stock)):
        model.generate(**as_inputs(BASE[:, :90]), past_key_values=cache, max_new_tokens=4)
    assert theirs.get_seq_length() == stock.get_seq_length()
    ids = random_ids(40, seed=2)
    for step in (lambda c: None, lambda c: c.crop(-7), lambda c: c.reorder_cache(torch.tensor([0]))):
        step(theirs)
        step(stock)
        found, expected = attached(ids, past_key_values=theirs).logits, plain(ids, past_key_values=stock).logits
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
    # Nothing of it was stored under tokens that it does not belong to.
    for prompt in (BASE, torch.cat([BASE[:, :93], ids], dim=1)):
        assert torch.equal(
            attached.generate(**as_inputs(prompt), max_new_tokens=4),
            plain.generate(**as_inputs(prompt), max_new_tokens=4),
        )


def test_a_cache_passed_by_hand_wins(attached: PreTrainedModel) -> None:
    cache = ChunkReuseCache(attached, ChunkStore(attached, chunk_size=32))
    attached.generate(**as_inputs(BASE), max_new_tokens=2, past_key_values=cache)
    assert cache.report.prompt_tokens == 200
    assert last_cache(attached) is None


def test_detach(attached: PreTrainedModel) -> None:
    attached.generate(**as_inputs(BASE), max_new_tokens=2)
    detach(attached)
    assert last_cache(attached) is None
    with counted(attached) as work:
        attached.generate(**as_inputs(BASE), max_new_tokens=2)
    assert work.tokens == 201


def test_threads(attached: PreTrainedModel) -> None:
    prompts = [torch.cat([BASE[:, : 20 * i], random_ids(30, seed=i)], dim=1) for i in range(8)]
    expected = [make_model("llama").generate(**as_inputs(p), max_new_tokens=5) for p in prompts]
    wrong: list[int] = []

    def work(offset: int) -> None:
        for i in range(16):
            at = (i * 3 + offset) % 8
            if not torch.equal(attached.generate(**as_inputs(prompts[at]), max_new_tokens=5), expected[at]):
                wrong.append(at)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


class TestPipeline:
    TEXT = "The lamp is red. The box is blue. Anna lives in Rome. She owns the lamp. " * 6

    @pytest.mark.parametrize("by_hand", [True, False])
    def test_text_generation(self, by_hand: bool) -> None:
        model, tokenizer = load_embedded()
        check_model_compatibility(model)
        pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
        ask = {"max_new_tokens": 5, "do_sample": False, "return_full_text": False}
        expected = pipe(self.TEXT, **ask)
        cache = ChunkReuseCache(model)
        if not by_hand:
            attach(model)
        kwargs = {"past_key_values": cache} if by_hand else {}
        assert pipe(self.TEXT, **ask, **kwargs) == expected
        with counted(model) as work:
            assert pipe(self.TEXT, **ask, **kwargs) == expected
        assert work.tokens <= 5


def test_a_growing_chat_loses_little_between_calls(attached: PreTrainedModel) -> None:
    """Each call has a cache of its own, so that the store alone carries the chat: at most 8 tokens a turn are lost."""
    plain = make_model("llama")
    history, seen = random_ids(54, seed=20), 0
    for turn in range(6):
        history = torch.cat([history, random_ids(40 + turn, seed=30 + turn)], dim=1)
        with counted(attached) as work:
            found = attached.generate(**as_inputs(history), max_new_tokens=11, min_new_tokens=11)
        assert torch.equal(found, plain.generate(**as_inputs(history), max_new_tokens=11, min_new_tokens=11))
        assert work.tokens - 10 <= history.shape[1] - seen + 8
        history, seen = found, found.shape[1] - 1
