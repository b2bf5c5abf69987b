"""The operators that are built for CPUs: beside float64, beside PyTorch's own 4-bit product, and in whole models."""

import copy
import logging
import pickle
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from kvboost_hf import StreamingConfig, load_streamed, stream_layers
from recipes.awq import quantize_awq
from tests.awq import Weight, in_gemm, make_linear, random_weight
from tests.internals.offload import Int4Packed, Int8Head, built, int4pack, int4pack_from_gemm, int4pack_matmul
from tests.parity.test_awq_int4pack import draw, off
from tests.parity.test_streaming_awq import IDS, dense

# Inputs are rounded to 16 bits of the largest of their group, by half a step evenly: 3 of them are rarely more than 4
# times as large as their mean square.
BUDGET = 4 * 2**-16

pytestmark = pytest.mark.skipif(
    not int4pack.load_operator(),
    reason="no compiler, or no AVX2: PyTorch's product runs",
)


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a compiler."""
    monkeypatch.setattr(built._Library, "loaded", False)


def packed(weight: Weight) -> Int4Packed:
    return int4pack_from_gemm(in_gemm(weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("in_features", "group_size"), [(384, 32), (576, 64), (1536, 128)])
def test_products(dtype: torch.dtype, in_features: int, group_size: int) -> None:
    """Any number of tokens gets the same bits, which are those of each token alone."""
    weight = random_weight(in_features, 192, group_size)
    x = draw(130, in_features).to(dtype)
    whole = int4pack_matmul(x, *packed(weight))
    assert whole.dtype == dtype
    assert off(whole, x, weight.dense) <= BUDGET + torch.finfo(dtype).eps / 3
    for rows in (1, 2, 3, 4, 47, 96, 97):
        assert torch.equal(int4pack_matmul(x[:rows], *packed(weight)), whole[:rows])
    assert int4pack_matmul(x[:0], *packed(weight)).shape == (0, 192)


@pytest.mark.daily
@pytest.mark.usefixtures("without")
@pytest.mark.parametrize("tokens", [1, 47, 48])
def test_without_the_operator(tokens: int) -> None:
    """PyTorch's product computes the same, and rounds more."""
    weight, x = random_weight(576, 192, 64), draw(tokens, 576)
    found = off(int4pack_matmul(x, *packed(weight)), x, weight.dense)
    assert found <= 4 * 2**-9 / 3**0.5
    assert tokens > int4pack.MOST_TOKENS or found > 10 * BUDGET


def test_columns_that_fill_no_block_are_pytorchs() -> None:
    weight, x = random_weight(128, 48, 64), draw(2, 128)
    assert off(int4pack_matmul(x, *packed(weight)), x, weight.dense) > 10 * BUDGET


@pytest.mark.daily
@pytest.mark.parametrize("tokens", [1, 5])
def test_columns_do_not_depend_on_others(tokens: int) -> None:
    """Weights of the same inputs side by side give the bits of each alone."""
    x = draw(tokens, 128).bfloat16()
    one, two = (packed(random_weight(128, columns, 64, seed)) for columns, seed in ((192, 1), (64, 2)))
    joined = Int4Packed(*(torch.cat(each, dim=min(at, 1)) for at, each in enumerate(zip(one, two, strict=True))))
    both = torch.cat([int4pack_matmul(x, *one), int4pack_matmul(x, *two)], dim=1)
    assert torch.equal(int4pack_matmul(x, *joined), both)


def test_mistakes_are_found_out() -> None:
    weight, x = random_weight(384, 64, 64), draw(2, 384)
    one_more = weight._replace(zeros=weight.zeros.clamp(max=14) + 1)
    held = packed(weight)
    swapped = held._replace(qweight=held.qweight >> 4 | held.qweight << 4)
    for wrong in (packed(one_more), swapped):
        assert off(int4pack_matmul(x, *wrong), x, weight.dense) > 100 * BUDGET


@pytest.mark.daily
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_no_number_stays_none(value: float) -> None:
    x = draw(3, 128)
    x[1, 7] = value
    found = int4pack_matmul(x, *packed(random_weight(128, 64, 64)))
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()


@pytest.mark.daily
@pytest.mark.parametrize("size", [0.0, 1e-38, 1e30])
def test_very_small_and_large_inputs(size: float) -> None:
    x = torch.full((2, 128), size)
    found, truth = int4pack_matmul(x, *packed(random_weight(128, 64, 64))), random_weight(128, 64, 64).dense.sum(0)
    assert torch.allclose(found[0].double(), truth * x[0, 0].double(), rtol=1e-3, atol=1e-30)


def test_as_operators() -> None:
    weight = packed(random_weight(128, 64, 32))
    given = (draw(3, 128), weight.qweight, weight.qzeros, weight.scales, int4pack.own_block())
    torch.library.opcheck(torch.ops.kvboost_hf.int4pack_mm.default, given)
    head = Int8Head(nn.Linear(128, 20))
    torch.library.opcheck(torch.ops.kvboost_hf.int8_mm.default, (draw(3, 128), head.codes, head.scales))


def test_threads_do_not_change_the_result() -> None:
    weight, x, threads = packed(random_weight(576, 1536, 64)), draw(20, 576), torch.get_num_threads()
    before = int4pack_matmul(x, *weight)
    try:
        torch.set_num_threads(3 - min(threads, 2))
        assert torch.equal(int4pack_matmul(x, *weight), before)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.daily
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("out_features", [4, 6, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_heads(dtype: torch.dtype, out_features: int, bias: bool) -> None:
    linear = nn.Linear(192, out_features, bias=bias)
    head, x = Int8Head(linear), draw(2, 5, 192).to(dtype)
    with torch.no_grad():
        found = head(x)
        weight = head.codes.double() * head.scales.double()[:, None]
        truth = x.double() @ weight.T + (0 if linear.bias is None else linear.bias.double())
        assert found.dtype == dtype
        assert (found.double() - truth).norm() <= (BUDGET + torch.finfo(dtype).eps) * truth.norm()
        assert (weight - linear.weight.double()).abs().max() <= head.scales.max() / 2 * 1.001
        assert torch.equal(head(x[:1, :1]), found[:1, :1])


def test_heads_are_copied_moved_and_loaded() -> None:
    head, x = Int8Head(nn.Linear(64, 8)), draw(2, 64)
    with torch.no_grad():
        before = head(x)
        for found in (copy.deepcopy(head), pickle.loads(pickle.dumps(head)), copy.deepcopy(head).half().float()):
            assert torch.equal(found.codes, head.codes)
            assert torch.equal(found.scales, head.scales)
        other = Int8Head(nn.Linear(64, 8))
        other.load_state_dict(head.state_dict())
        assert torch.allclose(other(x), before, atol=1e-5)
    given = x.clone().requires_grad_()
    head(given).sum().backward()
    assert torch.allclose(given.grad, head.weight.sum(0).expand_as(x), atol=1e-5)
    with pytest.raises(ValueError, match="a head whose inputs are a multiple of 64, got 32"):
        Int8Head(nn.Linear(32, 8))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("awq")
    quantize_awq(dense(), folder, group_size=64)
    return folder


def test_models_with_a_head_in_8_bits(checkpoint: Path, tmp_path: Path) -> None:
    """Near the model without; what is saved has the rounded head, and loads as a plain checkpoint."""
    plain = load_streamed(str(checkpoint), device="cpu", dtype=torch.float32)
    model: Any = load_streamed(str(checkpoint), StreamingConfig(head_bits=8), device="cpu", dtype=torch.float32)
    assert isinstance(model.get_output_embeddings(), Int8Head)
    with torch.no_grad():
        wanted, found = plain(input_ids=IDS).logits, model(input_ids=IDS).logits
    assert 0 < (found - wanted).norm() <= 0.02 * wanted.norm()
    assert model.generate(input_ids=IDS[:1], max_new_tokens=4).shape == (1, IDS.shape[1] + 4)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert torch.allclose(saved["lm_head.weight"], model.get_output_embeddings().weight)
    again = load_streamed(str(tmp_path), device="cpu", dtype=torch.float32)
    with torch.no_grad():
        assert (again(input_ids=IDS).logits - found).norm() <= 1e-3 * found.norm()


def test_a_tied_head_leaves_the_embeddings() -> None:
    config = dense().config
    config.tie_word_embeddings = True
    model: Any = AutoModelForCausalLM.from_config(config)
    embeddings = model.get_input_embeddings().weight
    before = embeddings.detach().clone()
    stream_layers(model, StreamingConfig(head_bits=8), device="cpu")
    assert model.get_input_embeddings().weight is embeddings
    assert torch.equal(embeddings, before)
    assert torch.allclose(model.get_output_embeddings().weight, before, atol=before.abs().max() / 127)
    assert not model.config.tie_word_embeddings


def test_heads_that_cannot_be_rounded_are_refused(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=r"`head_bits` must be one of \(8,\), got 4"):
        StreamingConfig(head_bits=4)  # type: ignore[arg-type]
    model: Any = load_streamed(str(checkpoint), StreamingConfig(head_bits=8), device="cpu")
    with pytest.raises(ValueError, match="needs a head that is a linear layer, got Int8Head"):
        stream_layers(model, StreamingConfig(head_bits=8), device="cpu")


@pytest.mark.usefixtures("without")
def test_a_head_needs_the_operator(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=r"`head_bits` 8 needs a CPU with AVX2 and a C\+\+ compiler"):
        load_streamed(str(checkpoint), StreamingConfig(head_bits=8), device="cpu")
    head, x = Int8Head(nn.Linear(64, 8)), draw(2, 64)  # one that was pickled elsewhere computes all the same
    assert torch.allclose(head(x), x @ head.weight.T + head.bias, atol=1e-6)


@pytest.mark.daily
@pytest.mark.parametrize("how", ["no compiler", "a compiler that fails"])
def test_a_machine_that_cannot_build(
    how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The log says why, once, and PyTorch's product runs."""

    def fail(command: list[str]) -> None:
        raise subprocess.CalledProcessError(1, command, stderr="fatal error: no header")

    monkeypatch.setattr(built._Library, "asked", False)
    monkeypatch.setattr(built._Library, "loaded", False)
    monkeypatch.setattr(built, "_folder", lambda: tmp_path)
    if how == "no compiler":
        monkeypatch.setattr(built, "_compiler", lambda: None)
    monkeypatch.setattr(built, "_run", fail)
    linear, x = make_linear(random_weight(128, 64, 32)), draw(2, 128)
    with caplog.at_level(logging.WARNING):
        linear.lay_out_(torch.device("cpu"))
        linear.lay_out_(torch.device("cpu"))
    said = [
        record.getMessage() for record in caplog.records if "multiplied by PyTorch's own product" in record.message
    ]
    assert len(said) == 1
    assert ("need a C++ compiler" if how == "no compiler" else "no header") in said[0]
    assert not list(tmp_path.iterdir())
    assert off(linear(x), x, random_weight(128, 64, 32).dense) <= 4 * 2**-9 / 3**0.5


def test_an_interrupted_build_is_begun_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupt(command: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(built._Library, "asked", False)
    monkeypatch.setattr(built._Library, "loaded", False)
    monkeypatch.setattr(built._Library, "block", 0)
    monkeypatch.setattr(built, "_folder", lambda: tmp_path)
    monkeypatch.setattr(built, "_run", interrupt)
    with pytest.raises(KeyboardInterrupt):
        built.load(block=32)
    monkeypatch.setattr(built, "_load", lambda: None)  # as the next build would end
    assert built.load(block=32)
