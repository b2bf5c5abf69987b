"""kvboost_fa2 over a cache that holds codes: what decoding all of them first gives, without decoding them."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, KVQuantConfig, attach
from tests.conftest import as_inputs, left_pad, make_model, random_ids
from tests.internals.attention import kernel_calls
from tests.internals.cache import CodedTensor, QuantizedLayer

SMALL: dict[str, Any] = {"window": 16, "exact_layers": 0}
CONFIGS = {
    "int8": KVQuantConfig(method="kivi", key_bits=8, value_bits=8, group_size=16, **SMALL),
    "int4": KVQuantConfig(method="kivi", group_size=16, **SMALL),
    "turboquant4": KVQuantConfig(**SMALL),
    "turboquant3": KVQuantConfig(key_bits=3, value_bits=2, **SMALL),
    "haar": KVQuantConfig(rotation="haar", remove_key_mean=False, **SMALL),
    "grouped": KVQuantConfig(grouped_values=True, group_size=16, **SMALL),
}


def run(model: PreTrainedModel, config: KVQuantConfig, inputs: dict[str, torch.Tensor], **kwargs: Any) -> Any:
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=32), live_quant=config)
    given = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False, **kwargs}
    return model.generate(
        **inputs, past_key_values=cache, output_logits=True, return_dict_in_generate=True, **given
    ), cache


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Notes how many blocks are decoded for an attention that asks for all columns."""
    found: list[int] = []
    whole = CodedTensor.whole

    def noting(self: CodedTensor, blocks: int, exact: torch.Tensor) -> torch.Tensor:
        found.append(blocks)
        return whole(self, blocks, exact)

    monkeypatch.setattr(CodedTensor, "whole", noting)
    return found


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("config", CONFIGS)
def test_logits_are_those_over_decoded_codes(name: str, config: str, decoded: list[int]) -> None:
    model = make_model(name)
    inputs = left_pad(random_ids(90, 1), random_ids(71, 2))
    model.set_attn_implementation("eager")
    plain, _ = run(model, CONFIGS[config], inputs)
    assert decoded
    decoded.clear()
    model.set_attn_implementation("kvboost_fa2")
    before = kernel_calls()
    found, cache = run(model, CONFIGS[config], inputs)
    calls = kernel_calls() - before
    coded = sum(isinstance(layer, QuantizedLayer) for layer in cache.layers)
    assert coded
    assert calls["cpu.attend_codes"] == 39 * coded
    assert not decoded
    off = (torch.stack(found.logits) - torch.stack(plain.logits)).abs().max()
    assert off < 5e-4 * torch.stack(plain.logits).std()
    assert torch.equal(found.sequences, plain.sequences)


@pytest.mark.parametrize("how", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 4}, {"prefill_chunk_size": 40}])
def test_in_every_way_of_generating(how: dict[str, Any]) -> None:
    model = make_model()
    inputs = as_inputs(random_ids(90, 1))
    plain, _ = run(model, CONFIGS["turboquant4"], inputs, **how)
    model.set_attn_implementation("kvboost_fa2")
    found, _ = run(model, CONFIGS["turboquant4"], inputs, **how)
    assert torch.equal(found.sequences, plain.sequences)


def test_a_mask_of_the_callers_own_is_obeyed() -> None:
    model = make_model()
    ids, answers = random_ids(90, 1), []
    mask = torch.ones(1, 91, dtype=torch.long)
    mask[0, 20:40] = 0
    for attention in ("eager", "kvboost_fa2"):
        model.set_attn_implementation(attention)
        cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=32), live_quant=CONFIGS["int8"])
        with torch.no_grad():
            model(ids, past_key_values=cache)
            answers.append(model(random_ids(1, 5), attention_mask=mask, past_key_values=cache).logits)
    torch.testing.assert_close(answers[1], answers[0], rtol=1e-4, atol=1e-4)


def test_a_mask_of_a_generate_call_that_goes_on_is_obeyed() -> None:
    model = make_model()
    mask = torch.ones(1, 92, dtype=torch.long)
    mask[0, 20:40] = 0
    more = {"input_ids": random_ids(1, 5), "attention_mask": mask, "max_new_tokens": 6, "min_new_tokens": 6}
    given = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    answers = []
    for attention in ("eager", "kvboost_fa2"):
        model.set_attn_implementation(attention)
        _, cache = run(model, CONFIGS["int8"], as_inputs(random_ids(90, 1)), max_new_tokens=2, min_new_tokens=2)
        answers.append(torch.stack(model.generate(**more, **given, past_key_values=cache).logits))
    torch.testing.assert_close(answers[1], answers[0], rtol=1e-4, atol=1e-4)


def test_layers_in_a_stock_cache_obey_any_mask() -> None:
    model = attach(make_model(), live_quant=CONFIGS["int8"])
    mask = torch.ones(1, 92, dtype=torch.long)
    mask[0, 20:40] = 0
    answers = []
    for attention in ("eager", "kvboost_fa2"):
        model.set_attn_implementation(attention)
        cache = DynamicCache(config=model.config)
        model.generate(**as_inputs(random_ids(90, 1)), past_key_values=cache, max_new_tokens=2, min_new_tokens=2)
        assert isinstance(cache.layers[0], QuantizedLayer)
        with torch.no_grad():
            answers.append(model(random_ids(1, 5), attention_mask=mask, past_key_values=cache).logits)
    torch.testing.assert_close(answers[1], answers[0], rtol=1e-4, atol=1e-4)
