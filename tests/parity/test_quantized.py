"""Quantized weights: several tensors in one, no tensors at all, or activations that are rounded together.

Tests of packages that are missing are skipped. bitsandbytes comes with the `test` extra; torchao does not, for it
fills the log of every run that can import it.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, check_model_compatibility
from tests.conftest import as_inputs, random_ids
from tests.internals.cache import ModelFingerprint, plain_tensors
from tests.parity.compare import same_as_plain

BASE = random_ids(100, seed=1)
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=200, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, pad_token_id=0, bos_token_id=1, eos_token_id=199,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def reuses(model: PreTrainedModel) -> None:
    assert check_model_compatibility(model).moved
    store = ChunkStore(model, chunk_size=32)
    cache = ChunkReuseCache(model, store)
    assert same_as_plain(model, cache, BASE) == 0
    assert same_as_plain(model, cache, BASE) == 99
    assert same_as_plain(model, ChunkReuseCache(model, store), BASE) >= 96
    fingerprint = ModelFingerprint()
    for full in (False, True):
        assert fingerprint.current(model, full=full) == fingerprint.current(model, full=full)


@pytest.mark.daily
def test_only_what_has_values_holds_data() -> None:
    one = torch.ones(2)
    found = [len(list(plain_tensors(each))) for each in (one, torch.empty(2, device="meta"), one.to_sparse())]
    assert found == [1, 0, 0]


def test_torchao_weights(model: PreTrainedModel) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    check_model_compatibility(model)
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=32))
    assert same_as_plain(model, cache, BASE) == 0
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    assert same_as_plain(model, cache, BASE) == 0
    reuses(model)
    fingerprint = ModelFingerprint()
    before = [fingerprint.current(model, full=full) for full in (False, True)]
    scales = list(plain_tensors(model.model.layers[0].self_attn.v_proj.weight))[1]
    scales.data *= 2
    assert all(fingerprint.current(model, full=full) != before[full] for full in (False, True))
    assert same_as_plain(model, cache, BASE) == 0


def test_activations_rounded_by_row(model: PreTrainedModel) -> None:
    """Where the last bits of a value differ, it may be rounded to another step: so it is for any prompt in parts."""
    torchao = pytest.importorskip("torchao.quantization")
    torchao.quantize_(model, torchao.Int8DynamicActivationInt8WeightConfig())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reason = check_model_compatibility(model, strict=False).reason
    if reason is not None:
        return refuses(model, "a prompt in two parts gives other logits")
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=32))
    plain = model.generate(**as_inputs(BASE), max_new_tokens=1, output_logits=True, return_dict_in_generate=True)
    pieces = [
        model.generate(
            **as_inputs(BASE), max_new_tokens=1, output_logits=True, return_dict_in_generate=True, **kwargs
        ).logits[0]
        for kwargs in ({"prefill_chunk_size": 99}, {"past_key_values": cache}, {"past_key_values": cache})
    ]
    stock, _, reused = ((logits - plain.logits[0]).abs().max() / plain.logits[0].std() for logits in pieces)
    assert cache.report.reused_tokens == 99
    assert reused <= max(2 * stock, 0.1)


def test_activations_rounded_together(model: PreTrainedModel) -> None:
    """One scale for all tokens of a prompt: what comes later changes what came before."""
    reuses(model)  # what is known of it holds no more then
    quantized = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8, inplace=True)
    refuses(quantized.eval(), "a prompt in two parts gives other logits")
    fingerprint = ModelFingerprint()
    before = fingerprint.current(quantized.eval())
    assert fingerprint.current(quantized) == before
    linear = quantized.model.layers[0].self_attn.v_proj
    weight, bias = linear._weight_bias()
    linear.set_weight_bias(torch.quantize_per_tensor(-weight.dequantize(), 0.01, 0, torch.qint8), bias)
    assert fingerprint.current(quantized) not in (before, None)


def refuses(model: PreTrainedModel, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_model_compatibility(model)
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=32))
    for _ in range(2):
        assert same_as_plain(model, cache, BASE) == 0
        assert reason in (cache.report.bypass_reason or "")


def test_quanto(model: PreTrainedModel) -> None:
    quanto = pytest.importorskip("optimum.quanto")
    quanto.quantize(model, weights=quanto.qint8)
    quanto.freeze(model)
    reuses(model.eval())  # quantize() leaves its layers in training mode


@pytest.mark.parametrize(
    ("settings", "reused"),
    [
        ({"load_in_4bit": True, "bnb_4bit_use_double_quant": True}, True),
        ({"load_in_8bit": True, "llm_int8_threshold": 0.0}, None),
        ({"load_in_8bit": True}, False),  # columns with outliers are found in all tokens of a prompt together
    ],
)
def test_bitsandbytes(model: PreTrainedModel, tmp_path: Path, settings: dict[str, Any], reused: bool | None) -> None:
    pytest.importorskip("bitsandbytes")
    model.save_pretrained(tmp_path)
    quantized = LlamaForCausalLM.from_pretrained(
        tmp_path, quantization_config=BitsAndBytesConfig(**settings), dtype=torch.float32
    ).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reason = check_model_compatibility(quantized, strict=False).reason
    assert reused is None or reused == (reason is None)
    reuses(quantized) if reason is None else refuses(quantized, reason.split(" (")[0])
