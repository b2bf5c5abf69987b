"""AWQ weights on CPUs in the layout of PyTorch's 4-bit product: against dense weights in float64."""

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import CompileConfig

from kvboost_hf import ChunkReuseCache, StreamingConfig, load_streamed, stop_streaming
from recipes.awq import quantize_awq
from tests.awq import in_gemm, make_linear, random_weight
from tests.internals.attention import kernel_calls
from tests.internals.offload import (
    EXPERT_PARTS,
    MOST_TOKENS,
    TILE,
    AwqExperts,
    AwqLinear,
    Int4Packed,
    built,
    dense_dtype,
    gemm_qweight,
    int4pack,
    int4pack_from_gemm,
    int4pack_matmul,
    quantizer,
    use_backend,
)
from tests.offload.poisoning import PoisoningBackend
from tests.parity.test_awq_linear import Largest
from tests.parity.test_streaming_awq import IDS, dense, qwen3_moe, write_experts

CPU = torch.device("cpu")
TOKENS = [1, 3, MOST_TOKENS, MOST_TOKENS + 1, 130]  # either side of where weights are dequantized
# In the norm: inputs, scales, zero points and outputs are each rounded to the 8 bits of bfloat16, by at most 2 ** -9
# of themselves and evenly, and the parts of a weight are up to twice as large as their sum.
BUDGET = 4 * 2**-9 / 3**0.5

pytestmark = pytest.mark.skipif(int4pack.order_name() is None, reason="PyTorch has no 4-bit product here")


def draw(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def off(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    truth = x.double() @ weight
    return float((found.double() - truth).norm() / truth.norm())


def packed_linear(in_features: int = 128, out_features: int = 48, group_size: int = 32, seed: int = 0) -> AwqLinear:
    linear = make_linear(random_weight(in_features, out_features, group_size, seed), draw(out_features).half())
    linear.lay_out_(CPU)
    assert linear.version == "int4pack"
    return linear


@pytest.fixture(params=["built", "of PyTorch"])
def product(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either operator, where both can be had."""
    if request.param == "of PyTorch":
        monkeypatch.setattr(built._Library, "loaded", False)
    elif not int4pack.load_operator():
        pytest.skip("there is no compiler here, or no AVX2")


@pytest.mark.daily
@pytest.mark.usefixtures("product")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("out_features", [16, 96, 64 + 48, 192])
def test_products(dtype: torch.dtype, group_size: int, tokens: int, out_features: int) -> None:
    weight = random_weight(384, out_features, group_size)
    x = draw(tokens, 384).to(dtype)
    found = int4pack_matmul(x, *int4pack_from_gemm(in_gemm(weight)))
    assert found.dtype == dtype
    assert off(found, x, weight.dense) <= BUDGET


@pytest.mark.daily
@pytest.mark.usefixtures("product")
@pytest.mark.parametrize("tokens", [1, 130])
def test_mistakes_are_found_out(tokens: int) -> None:
    """A zero point off by one, two columns exchanged, and nibbles exchanged are far beyond the budget."""
    weight, x = random_weight(384, 64, 64), draw(tokens, 384)
    qweight, qzeros, scales, pairs = int4pack_from_gemm(in_gemm(weight))
    one_more = in_gemm(weight._replace(zeros=weight.zeros.clamp(max=14) + 1))
    moved = qweight.view(-1, 2).flip(1).reshape(qweight.shape)
    nibbles = qweight >> 4 | qweight << 4
    wrong = [
        int4pack_from_gemm(one_more),
        Int4Packed(moved, qzeros, scales, pairs),
        Int4Packed(nibbles, qzeros, scales, pairs),
    ]
    for each in wrong:
        assert off(int4pack_matmul(x, *each), x, weight.dense) > 10 * BUDGET


@pytest.mark.daily
@pytest.mark.usefixtures("product")
@pytest.mark.parametrize("tokens", [1, 130])
@pytest.mark.parametrize("level", [0, 15])
@pytest.mark.parametrize("zero", [0, 15])
def test_extreme_values(level: int, zero: int, tokens: int) -> None:
    weight = random_weight(128, 16, 64)
    weight.levels.fill_(level)
    weight.zeros.fill_(zero)
    weight.scales.fill_(1000)
    x = draw(tokens, 128)
    found = int4pack_matmul(x, *int4pack_from_gemm(in_gemm(weight))).double() - x.double() @ weight.dense
    assert found.abs().max() <= 2**-7 * 15_000 * x.abs().sum(1).max()
    assert torch.isnan(
        int4pack_matmul(x.fill_(torch.inf), *int4pack_from_gemm(in_gemm(random_weight(128, 16, 64))))
    ).any()


@pytest.mark.daily
@pytest.mark.usefixtures("product")
def test_no_tokens() -> None:
    assert int4pack_matmul(draw(0, 128), *int4pack_from_gemm(in_gemm(random_weight(128, 16, 64)))).shape == (0, 16)


@pytest.mark.daily
@pytest.mark.parametrize(("in_features", "out_features"), [(64, 16), (64, 32), (192, 112), (128, 1024)])
def test_there_and_back(in_features: int, out_features: int) -> None:
    packed = in_gemm(random_weight(in_features, out_features, 64))
    found = int4pack_from_gemm(packed)
    assert torch.equal(gemm_qweight(found.qweight), packed.qweight)
    assert torch.equal(found.qzeros, packed.qzeros)
    assert torch.equal(found.scales, packed.scales)


_ON_ANOTHER = """
import torch
from kvboost_hf.offload.awq.int4pack import dense_dtype, gemm_qweight, int4pack_from_gemm, int4pack_matmul, order_name
from tests.awq import in_gemm, make_linear, random_weight
if order_name() is None:
    linear = make_linear(random_weight(192, 112, 64))
    linear.lay_out_(torch.device("cpu"))
    assert linear.version == "gemm"
    raise SystemExit("no order")
weight = random_weight(192, 112, 64)
packed = int4pack_from_gemm(in_gemm(weight))
assert torch.equal(gemm_qweight(packed.qweight), in_gemm(weight).qweight)
for tokens in (1, 130):
    x = torch.randn(tokens, 192)
    truth = x.double() @ weight.dense
    assert (int4pack_matmul(x, *packed).double() - truth).norm() <= {budget} * truth.norm()
print(order_name(), dense_dtype())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("instructions", "found"), [("default", "no order"), ("avx2", "32 torch.float32")])
def test_other_processors(instructions: str, found: str) -> None:
    """PyTorch's kernels for other processors, which keep codes in another order, and without bfloat16."""
    environment = os.environ | {"ATEN_CPU_CAPABILITY": instructions, "OMP_NUM_THREADS": "1"}
    environment |= {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    script = _ON_ANOTHER.format(budget=BUDGET)
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert (done.stdout + done.stderr).strip().endswith(found)


def test_never_more_than_a_tile_is_dequantized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(built._Library, "loaded", False)
    weight = int4pack_from_gemm(in_gemm(random_weight(4096, 2048, 128)))
    assert weight.qweight.numel() * 2 == 2 * TILE
    x = draw(MOST_TOKENS + 1, 4096)
    with Largest() as largest:
        int4pack_matmul(x, *weight)
    assert largest.nbytes == TILE * dense_dtype().itemsize // 2  # half of the codes at a time


def test_a_kernel_of_choice_is_exact() -> None:
    """`quant_kernel="torch"` keeps float32; sizes that the product cannot have do, too."""
    for linear in (
        make_linear(random_weight(128, 48, 32)),
        make_linear(random_weight(128, 24, 32)),
    ):
        linear.quant_kernel = "torch" if linear.out_features == 48 else "auto"
        linear.lay_out_(CPU)
        assert linear.version == "gemm"
        x = draw(5, 128)
        assert off(linear(x), x, random_weight(128, linear.out_features, 32).dense) <= 1e-6


def test_states_have_the_layout_of_checkpoints() -> None:
    linear, expected = packed_linear(), make_linear(random_weight(128, 48, 32), draw(48).half())
    state = linear.state_dict()
    assert state.keys() == expected.state_dict().keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in expected.state_dict().items())
    x, other = draw(2, 128), packed_linear(seed=1)
    assert not torch.equal(other(x), linear(x))
    other.load_state_dict(state)
    assert torch.equal(other(x), linear(x))
    part = {"qweight": packed_linear(seed=1).state_dict()["qweight"]}
    other.load_state_dict(part, strict=False)
    assert torch.equal(other.state_dict()["qweight"], part["qweight"])
    assert torch.equal(other.scales, linear.scales)
    other.load_state_dict({}, strict=False)
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict({"bias": state["bias"]})


MOVES: dict[str, Any] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "to bfloat16": lambda module: module.to(torch.bfloat16),
    "float": lambda module: module.float(),
    "half": lambda module: module.half(),
    "double": lambda module: module.double(),
    "share_memory": lambda module: module.share_memory(),
}


@pytest.mark.daily
@pytest.mark.parametrize("move", MOVES)
def test_packed_weights_stay_what_they_are(move: str) -> None:
    linear = packed_linear()
    found = MOVES[move](copy.deepcopy(linear))
    for name in Int4Packed._fields:
        one, other = getattr(found, name), getattr(linear, name)
        assert one.dtype == other.dtype, name
        assert torch.equal(one, other), name


def test_another_device_gets_gemm() -> None:
    """As a GPU would; and the weights are as they were when they come back."""
    linear, x = packed_linear(), draw(2, 128)
    before, wanted = linear(x), make_linear(random_weight(128, 48, 32))
    linear.lay_out_(torch.device("cuda"))
    assert linear.version == "gemm"
    assert torch.equal(linear.qweight, wanted.qweight)
    linear.lay_out_(CPU)
    assert torch.equal(linear(x), before)
    empty = packed_linear().to("meta").to_empty(device="cpu")
    empty.load_state_dict(packed_linear().state_dict())
    assert torch.equal(empty(x), before)


def _in_order(levels: torch.Tensor, order: str) -> torch.Tensor:
    """Codes [in, out], a multiple of 64 columns, packed as another processor does."""
    blocks = levels.view(len(levels), -1, int(order)).transpose(0, 1)  # blocks, in, block
    low, high = blocks.chunk(2, dim=-1)
    return (low | high << 4).reshape(levels.shape[1], -1)


@pytest.mark.daily
@pytest.mark.parametrize("order", ["64", "32"])
def test_pickled_on_another_processor(order: str) -> None:
    weight = random_weight(128, 128, 32)
    linear = make_linear(weight)
    linear.lay_out_(CPU)
    x, copied = draw(2, 128), copy.deepcopy(linear)
    copied.qweight, copied.code_order = _in_order(weight.levels, order), order
    assert torch.equal(gemm_qweight(copied.qweight, order), in_gemm(weight).qweight)
    found = pickle.loads(pickle.dumps(copied))
    assert found.code_order == int4pack.order_name()
    assert torch.equal(found(x), linear(x))


@pytest.mark.daily
@pytest.mark.parametrize("tokens", [2, 130])
def test_gradients_of_inputs(tokens: int) -> None:
    linear, weight = packed_linear(), random_weight(128, 48, 32)
    x = draw(1, tokens, 128).requires_grad_()
    grad = draw(1, tokens, 48, seed=3)
    linear(x).backward(grad)
    assert off(x.grad, grad, weight.dense.T) <= 1e-6


def test_as_an_operator() -> None:
    weight = int4pack_from_gemm(in_gemm(random_weight(128, 48, 32)))
    given = (draw(3, 128), weight.qweight, weight.qzeros, weight.scales, "auto", weight.scales_and_zeros)
    torch.library.opcheck(torch.ops.kvboost_hf.awq_matmul.default, given)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("awq")
    quantize_awq(dense(), folder, group_size=64)
    return folder


@pytest.mark.usefixtures("product")
@pytest.mark.parametrize("kind", ["whole", "in memory", "in files"])
def test_models(kind: str, checkpoint: Path, tmp_path: Path) -> None:
    """Near the float32 model, all products by the 4-bit one; what is saved is the checkpoint, bit by bit."""
    exact = load_streamed(str(checkpoint), StreamingConfig(quant_kernel="torch"), device="cpu", dtype=torch.float32)
    config = StreamingConfig(
        residency_mode="full_resident" if kind == "whole" else "full_stream",
        disk_folder=str(tmp_path / "layers") if kind == "in files" else None,
    )
    with use_backend(PoisoningBackend), torch.no_grad():
        model = load_streamed(str(checkpoint), config, device="cpu", dtype=torch.float32)
        before = kernel_calls()
        found, wanted = model(input_ids=IDS).logits, exact(input_ids=IDS).logits
    assert (kernel_calls() - before)["int4pack.awq_matmul"] == 5 * 7
    # Each of 35 products errs by up to the budget, independently of the others.
    assert 0 < (found - wanted).norm() <= 35**0.5 * BUDGET * wanted.norm()
    model.save_pretrained(tmp_path / "saved")
    one, other = (load_file(folder / "model.safetensors") for folder in (checkpoint, tmp_path / "saved"))
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items() if "layers" in name)
    stop_streaming(model)
    with torch.no_grad():
        assert torch.equal(model(input_ids=IDS).logits, found)


@pytest.mark.usefixtures("product")
def test_decoding_is_compiled(checkpoint: Path) -> None:
    """One graph with an operator for each product; a model whose layers are streamed is left alone."""
    model: Any = load_streamed(str(checkpoint), device="cpu", dtype=torch.bfloat16)
    given: Any = {"input_ids": IDS[:1], "attention_mask": torch.ones_like(IDS[:1]), "max_new_tokens": 10}
    plain = model.generate(**given)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Any:
        graphs.append(graph)
        return graph.forward

    config = CompileConfig(backend=backend, fullgraph=True, mode=None)
    config._compile_all_devices = True  # type: ignore[assignment]
    cache = ChunkReuseCache(model, max_cache_len=64)
    before = kernel_calls()["int4pack.awq_matmul"]
    assert torch.equal(model.generate(**given, cache=cache, compile_config=config), plain)
    # The prompt, and the three steps that are computed twice, are not in the graph.
    assert kernel_calls()["int4pack.awq_matmul"] - before == (1 + 3) * 5 * 7
    assert cache.report.eager_reason is None
    names = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    products = [name for name in names if "int4pack_mm" in name]
    assert len(products) == 5 * 7
    assert {"kvboost_hf" in name for name in products} == {built.is_loaded()}
    assert not any("awq_matmul" in name for name in names)
    with use_backend(PoisoningBackend):
        streamed: Any = load_streamed(
            str(checkpoint), StreamingConfig(residency_mode="full_stream"), device="cpu", dtype=torch.bfloat16
        )
    assert not streamed.hf_quantizer.is_compileable
    cache, made = ChunkReuseCache(streamed, max_cache_len=64), len(graphs)
    assert torch.equal(streamed.generate(**given, cache=cache, compile_config=config), plain)
    assert len(graphs) == made


def test_files_of_another_processor_are_not_read(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = StreamingConfig(residency_mode="full_stream", disk_folder=str(tmp_path))
    written = []
    for order in (None, None, "another"):
        if order is not None:
            monkeypatch.setattr(quantizer, "order_name", lambda: "another")
        with use_backend(PoisoningBackend):
            load_streamed(str(checkpoint), config, device="cpu")
        written.append({path.name for path in tmp_path.glob("checkpoint-*.json")})
    assert written[0] == written[1]
    assert len(written[2]) == 2  # what is in files is known by the order of codes, too


def test_experts(tmp_path: Path) -> None:
    wanted = write_experts(qwen3_moe(), tmp_path, EXPERT_PARTS[0], "mlp.experts")
    with use_backend(PoisoningBackend), torch.no_grad():
        config = StreamingConfig(residency_mode="full_stream")
        model = load_streamed(str(tmp_path), config, device="cpu", dtype=torch.float32)
        before = kernel_calls()
        found, expected = model(input_ids=IDS).logits, wanted(input_ids=IDS).logits
    assert set(kernel_calls() - before) == {"int4pack.awq_matmul"}
    # A token near a border of the router takes another expert.
    rows = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert rows.median() <= 30**0.5 * BUDGET
    state, saved = model.state_dict(), load_file(tmp_path / "model.safetensors")
    experts = [name for name in saved if "experts" in name]
    assert len(experts) == 3 * 6 * 3 * 3
    assert all(torch.equal(state[name], saved[name]) for name in experts)
    stop_streaming(model)
    layer = next(module for module in model.modules() if isinstance(module, AwqExperts))
    hidden, chosen, shares = draw(3, 128), torch.tensor([[0, 5], [1, 2], [3, 3]]), torch.rand(3, 2)
    before_all = layer(hidden, chosen, shares)
    for found_layer in (layer.half(), pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        assert torch.equal(found_layer(hidden, chosen, shares), before_all)
        assert found_layer.gate_proj_scales_and_zeros.dtype == torch.bfloat16
    held = dict(layer.named_buffers())
    layer.lay_out_(CPU)
    assert all(tensor is held[name] for name, tensor in layer.named_buffers()), "what is laid out is not copied"
    layer.lay_out_(torch.device("cuda"))
    assert layer.code_order is None
    held = dict(layer.named_buffers())
    layer.lay_out_(torch.device("cuda"))
    assert all(tensor is held[name] for name, tensor in layer.named_buffers())
    assert not any(name.endswith("scales_and_zeros") for name, _ in layer.named_buffers())
    assert layer.gate_proj_qweight.dtype == torch.int32


def test_a_model_moves_between_devices_as_its_layers_do(checkpoint: Path) -> None:
    model = load_streamed(str(checkpoint), device="cpu")
    linears = [module for module in model.modules() if isinstance(module, AwqLinear)]
    assert {linear.version for linear in linears} == {"int4pack"}
    nn.Module.to(model, "meta")
    assert all(tensor.is_meta for tensor in model.buffers())
    assert isinstance(nn.Module.to_empty(model, device="cpu"), nn.Module)
    assert {linear.version for linear in linears} == {"int4pack"}
