"""Layers that keep less than all K/V: sliding windows, and the states of linear attention."""

import copy
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, attach, check_model_compatibility, detach
from kvboost_hf.cache.windows import SlidingLayer
from tests.conftest import STATEFUL, WINDOWED, as_inputs, counted, left_pad, make_model, random_ids

NEW = 8
CHUNK = 32
BASE, OTHER = random_ids(300, seed=1), random_ids(300, seed=2)


def join(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts, dim=1)


def generate(model: PreTrainedModel, inputs: dict[str, torch.Tensor], **kwargs: Any) -> Any:
    return model.generate(
        **inputs, max_new_tokens=NEW, do_sample=False, output_logits=True, return_dict_in_generate=True, **kwargs
    )


def check(model: PreTrainedModel, cache: ChunkReuseCache, inputs: dict[str, torch.Tensor], **mode: Any) -> int:
    """Parity with plain generate(); returns prompt tokens that were really forwarded, padding included."""
    plain = generate(model, inputs, **mode)
    with counted(model) as work:
        reused = generate(model, inputs, past_key_values=cache, **mode)
    assert torch.equal(plain.sequences, reused.sequences)
    for expected, found in zip(plain.logits, reused.logits, strict=True):
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
    assert cache.report.bypass_reason is None
    return work.tokens - len(inputs["input_ids"]) * (NEW - 1)


@pytest.fixture(params=[*WINDOWED, *STATEFUL])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    made = make_model(request.param)
    check_model_compatibility(made)
    return made


def test_prompts_that_grow_shrink_repeat_and_part(model: PreTrainedModel) -> None:
    store = ChunkStore(model, chunk_size=CHUNK)
    cache = ChunkReuseCache(model, store)
    stateful = any(layer.is_stateful for layer in cache._layers)
    # A state can be gone on from at the last chunk border of an earlier prompt, and where earlier prompts parted.
    for ids, most in [
        (BASE[:, :200], 200),
        (join(BASE[:, :200], OTHER[:, :20]), 20 + 8 + (200 - 192 if stateful else 0)),
        (BASE[:, :200], 8 if stateful else 1),
        (BASE[:, :1], 1),
        (OTHER[:, :150], 150),
        (join(BASE[:, :150], OTHER[:, :100]), 250 if stateful else 100),  # parts where no state was kept
        (join(BASE[:, :150], OTHER[:, 100:200]), 100),  # but now it is
        (join(BASE[:, :200], OTHER[:, :40]), 48 if stateful else 40),
    ]:
        assert check(model, cache, as_inputs(ids)) <= most
    for ids in (BASE[:, :200], join(BASE[:, :150], OTHER[:, 100:200])):  # and through the store alone
        assert check(model, ChunkReuseCache(model, store), as_inputs(ids)) <= CHUNK


@pytest.mark.parametrize("mode", [{"num_beams": 3}, {"prefill_chunk_size": 50}, {"num_return_sequences": 2}])
def test_modes(model: PreTrainedModel, mode: dict[str, Any]) -> None:
    if "num_return_sequences" in mode:
        mode = {**mode, "num_beams": 2}
    store = ChunkStore(model, chunk_size=CHUNK)
    cache = ChunkReuseCache(model, store)
    for ids, least in (BASE[:, :120], 0), (join(BASE[:, :120], OTHER[:, :30]), 90), (BASE[:, :120], 90):
        plain = generate(model, as_inputs(ids), **mode)
        reused = generate(model, as_inputs(ids), past_key_values=cache, **mode)
        assert torch.equal(plain.sequences, reused.sequences)
        if "prefill_chunk_size" in mode:  # each piece goes on from a state of its own
            least = min(least, 60)
        assert cache.report.reused_tokens >= least


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize("kwargs", [{"prompt_lookup_num_tokens": 4}, {"assistant_model": True}])
def test_candidates_over_a_window(name: str, kwargs: dict[str, Any]) -> None:
    model = make_model(name)
    if "assistant_model" in kwargs:
        assistant = make_model("llama", seed=7)
        assistant.generation_config.num_assistant_tokens = 5
        assistant.generation_config.assistant_confidence_threshold = 0.0
        kwargs = {"assistant_model": assistant}
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=CHUNK))
    for ids in (join(BASE[:, :80], BASE[:, :80]), join(BASE[:, :80], BASE[:, :80], OTHER[:, :9]), BASE[:, :100]):
        expected = model.generate(**as_inputs(ids), max_new_tokens=30)
        found = model.generate(**as_inputs(ids), max_new_tokens=30, past_key_values=cache, **kwargs)
        assert torch.equal(found, expected)
    assert cache.report.reused_tokens >= 80


def test_batches_with_a_cold_row(model: PreTrainedModel) -> None:
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=CHUNK))
    check(model, cache, as_inputs(BASE[:, :260]))
    check(model, ChunkReuseCache(model, cache.store), as_inputs(BASE[:, :265]))
    check(model, cache, left_pad(BASE[:, :265], OTHER[:, :200]))
    assert cache.report.reused_tokens >= 256
    assert cache.report.forwarded_tokens <= 200 + 9
    check(model, cache, left_pad(OTHER[:, :220], BASE[:, :259], BASE[:, 100:130]))


def test_chat(model: PreTrainedModel) -> None:
    """Ids that continue what is held cost nothing but themselves."""
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=CHUNK))
    history, seen = random_ids(54, seed=20), 0
    for turn in range(5):
        history = join(history, random_ids(30, seed=30 + turn))
        plain = model.generate(**as_inputs(history), max_new_tokens=20)
        with counted(model) as work:
            reused = model.generate(**as_inputs(history), max_new_tokens=20, past_key_values=cache)
        assert torch.equal(plain, reused)
        assert work.tokens == history.shape[1] - seen + reused.shape[1] - history.shape[1] - 1
        history, seen = reused, reused.shape[1] - 1


def test_two_conversations_take_turns(model: PreTrainedModel) -> None:
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=CHUNK))
    talks = [random_ids(100, seed=40), random_ids(100, seed=41)]
    for _ in range(3):
        for i in range(2):
            talks[i] = join(talks[i], random_ids(20, seed=50 + i))
            with counted(model) as work:
                found = model.generate(
                    **as_inputs(talks[i]), max_new_tokens=20, min_new_tokens=20, past_key_values=cache
                )
            assert torch.equal(found, model.generate(**as_inputs(talks[i]), max_new_tokens=20, min_new_tokens=20))
            talks[i] = found
    assert work.tokens <= 20 + 1 + 19 + 8  # what the cache let go of is in the store, to the last 8 tokens


def test_warm_and_attach(model: PreTrainedModel) -> None:
    store = ChunkStore(model, chunk_size=CHUNK)
    store.warm(BASE[:, :205])
    assert store.stats()["pinned_chunks"] >= 7
    attach(model, store)
    ids = join(BASE[:, :205], OTHER[:, :10])
    with counted(model) as work:
        found = model.generate(**as_inputs(ids), max_new_tokens=NEW)
    detach(model)
    assert torch.equal(found, model.generate(**as_inputs(ids), max_new_tokens=NEW))
    assert work.tokens == 10 + NEW - 1


def test_forks_go_their_own_way(model: PreTrainedModel) -> None:
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=CHUNK))
    check(model, cache, as_inputs(BASE[:, :100]))
    for i, twin in enumerate((cache.fork(), copy.deepcopy(cache))):
        held = twin.get_seq_length()
        ids = join(generate(model, as_inputs(BASE[:, :100])).sequences[:, :held], OTHER[:, i : i + 9])
        assert check(model, twin, as_inputs(ids)) == 9
    ids = join(generate(model, as_inputs(BASE[:, :100])).sequences[:, :107], OTHER[:, 20:25])
    assert check(model, cache, as_inputs(ids)) == 5


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_forward_leaves_no_trace(model: PreTrainedModel, error: type[BaseException]) -> None:
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=CHUNK))
    check(model, cache, as_inputs(BASE[:, :80]))

    def fail(*_: Any) -> None:
        raise error

    for layer, ids in [(1, BASE), (0, OTHER[:, :90]), (1, BASE[:, :150])]:
        handle = model.model.layers[layer].register_forward_pre_hook(fail)
        with pytest.raises(error):
            generate(model, as_inputs(ids), past_key_values=cache)
        handle.remove()
        check(model, cache, as_inputs(BASE[:, :150]))


@pytest.mark.parametrize("name", STATEFUL)
def test_states_are_in_the_budget(name: str) -> None:
    model = make_model(name)
    store = ChunkStore(model, chunk_size=CHUNK, max_bytes=150_000)
    cache = ChunkReuseCache(model, store)
    for seed in range(12):
        check(model, cache, as_inputs(random_ids(100, seed=seed)))
        stats = store.stats()
        assert stats["bytes"] <= 150_000
        held = [c.kv.nbytes + c.tokens.nbytes for c in store._chunks.values()]
        held += [s.states.nbytes + s.tokens.nbytes for s in store._states.values()]
        assert stats["bytes"] == sum(held)
        assert stats["states"] == len(store._states)
    assert store.stats()["evictions"] > 0


@pytest.mark.parametrize("name", STATEFUL)
def test_zeroed_states_are_noticed(name: str) -> None:
    """The control: were the stored states not used, the tests above would prove nothing."""
    model = make_model(name)
    store = ChunkStore(model, chunk_size=CHUNK)
    check(model, ChunkReuseCache(model, store), as_inputs(BASE[:, :100]))
    for saved in store._states.values():
        for layer in saved.states.layers:
            for tensor in layer.tensors if layer is not None else ():
                if tensor is not None:
                    tensor.zero_()
    with pytest.raises(AssertionError):
        check(model, ChunkReuseCache(model, store), as_inputs(BASE[:, :100]))


def test_a_window_lets_go_of_what_has_left_it() -> None:
    model = make_model("mistral")
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=CHUNK))
    long = random_ids(1500, seed=9)
    with counted(model) as work:
        model.generate(**as_inputs(long), max_new_tokens=2, past_key_values=cache)
    assert work.tokens == 1501
    layer = cache._layers[0]
    assert isinstance(layer, SlidingLayer)
    assert layer.first > 1000
    assert cache.nbytes < 1500 * layer.bytes_per_column  # two layers
    # Going back further than the cache remembers: the store has it.
    assert check(model, cache, as_inputs(join(long[:, :700], OTHER[:, :20]))) <= 20 + CHUNK
    assert check(model, cache, as_inputs(long)) <= CHUNK


@torch.no_grad()
def test_stock_sliding_layers_show_the_same() -> None:
    from transformers.cache_utils import DynamicSlidingWindowLayer

    ours, stock = SlidingLayer(8), DynamicSlidingWindowLayer(8)
    for m in (1, 3, 5, 1, 12, 1, 1, 2):
        assert ours.get_mask_sizes(m) == stock.get_mask_sizes(m)
        new = torch.randn(1, 2, m, 4), torch.randn(1, 2, m, 4)
        for found, expected in zip(ours.update(*new), stock.update(*new), strict=True):
            assert torch.equal(found, expected)
        assert torch.equal(ours.keys, stock.keys)
        assert ours.get_seq_length() == stock.get_seq_length()
