"""Linear layers on AWQ weights, without a GPU: against dense weights in float64."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.awq import Weight, in_gemm, in_gemv, in_llm_awq, make_linear, random_weight, share_of_budget
from tests.internals.offload import (
    _TILE,
    AwqLinear,
    StoredWeight,
    awq_matmul_torch,
    awq_matmul_transposed_torch,
    dequantize,
    layout_of,
    pack,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOKENS = [1, 3, 7, 8, 40]  # either side of where weights are scaled instead of products


def draw(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def require_close(found: torch.Tensor, x: torch.Tensor, weight: Weight, *, transposed: bool = False) -> None:
    """`found` may err as much as if weights were rounded to the dtype of `x`."""
    share = share_of_budget(found, x, weight, transposed=transposed)
    assert share <= 1, f"off by {share:.3g} times the budget"


@pytest.mark.daily
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("out_features", [8, 72])
def test_products(dtype: torch.dtype, group_size: int, tokens: int, out_features: int) -> None:
    weight = random_weight(384, out_features, group_size)
    x = draw(tokens, 384).to(dtype)
    require_close(awq_matmul_torch(x, *in_gemm(weight)), x, weight)


@pytest.mark.daily
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 40])
def test_transposed_products(dtype: torch.dtype, tokens: int) -> None:
    weight = random_weight(384, 72, 64)
    grad = draw(tokens, 72).to(dtype)
    require_close(awq_matmul_transposed_torch(grad, *in_gemm(weight)), grad, weight, transposed=True)


@pytest.mark.daily
@pytest.mark.parametrize("level", [0, 15])
@pytest.mark.parametrize("zero", [0, 15])
def test_extreme_values(level: int, zero: int) -> None:
    weight = random_weight(128, 16, 64)
    weight.levels.fill_(level)
    weight.zeros.fill_(zero)
    weight.scales.fill_(1000)
    x = draw(2, 128)
    off = awq_matmul_torch(x, *in_gemm(weight)).double() - x.double() @ weight.dense
    assert off.abs().max() <= 1e-6 * 15_000 * x.abs().sum(1).max()


@pytest.mark.daily
@pytest.mark.parametrize("tokens", [1, 40])
def test_other_mistakes_are_found_out(tokens: int) -> None:
    weight = random_weight(128, 16, 64)
    qweight, qzeros, scales = in_gemm(weight)
    x = draw(tokens, 128)
    swapped = in_gemm(weight, (16, 0, 4, 20, 8, 24, 12, 28)).qweight
    for wrong in ((swapped, qzeros, scales), (qweight, pack(weight.zeros.clamp(max=14) + 1), scales)):
        with pytest.raises(AssertionError, match=r"off by [\de+.]+ times"):
            require_close(awq_matmul_torch(x, *wrong), x, weight)


class Largest(TorchDispatchMode):
    """The most bytes that one new tensor took."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.nbytes = max(self.nbytes, found.untyped_storage().nbytes())
        return found


@pytest.mark.parametrize("tokens", [1, 16])
def test_never_more_than_a_tile_is_unpacked(tokens: int) -> None:
    weight = in_gemm(random_weight(4096, 1024, 128))
    assert weight.qweight.numel() * 8 == 2 * _TILE
    with Largest() as largest:
        awq_matmul_torch(draw(tokens, 4096), *weight)
        awq_matmul_transposed_torch(draw(tokens, 1024), *weight)
    assert largest.nbytes == 4 * _TILE
    with Largest() as largest:
        dequantize(*weight)
    assert largest.nbytes >= 8 * _TILE


def test_the_order_of_sums_depends_on_shapes_alone() -> None:
    weight = in_gemm(random_weight(256, 64, 32))
    x = draw(16, 256)
    found = awq_matmul_torch(x, *weight)
    assert torch.equal(awq_matmul_torch(x.clone(), *weight), found)
    assert torch.equal(awq_matmul_torch(x.T.contiguous().T, *weight), found)


def test_no_tokens() -> None:
    weight = in_gemm(random_weight(256, 64, 32))
    assert awq_matmul_torch(draw(0, 256), *weight).shape == (0, 64)
    assert awq_matmul_transposed_torch(draw(0, 64), *weight).shape == (0, 256)


@pytest.mark.daily
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 5, 64), (2, 0, 64)])
@pytest.mark.parametrize("bias", [None, draw(24, seed=2).half()], ids=["plain", "bias"])
def test_layers(dtype: torch.dtype, shape: tuple[int, ...], bias: torch.Tensor | None) -> None:
    weight = random_weight(64, 24, 32)
    linear = make_linear(weight, bias)
    x = draw(*shape).to(dtype)
    found = linear(x)
    expected = awq_matmul_torch(x.reshape(-1, 64), *in_gemm(weight)).view(*shape[:-1], 24)
    assert found.dtype == dtype
    assert torch.equal(found, expected if bias is None else expected + bias.to(dtype))


def test_a_bias_may_be_trained() -> None:
    linear = make_linear(random_weight(64, 24, 32), draw(24).half())
    linear.bias = nn.Parameter(draw(24))
    linear(draw(5, 64)).sum().backward()
    assert torch.equal(linear.bias.grad, torch.full((24,), 5.0))
    assert linear.to(torch.bfloat16).bias.dtype == torch.bfloat16


@pytest.mark.daily
@pytest.mark.parametrize("version", ["gemv", "llm-awq"])
@pytest.mark.parametrize("group_size", [32, 64])
def test_other_layouts_become_gemm(version: str, group_size: int) -> None:
    weight = random_weight(192, 24, group_size)
    stored = in_gemv(weight) if version == "gemv" else in_llm_awq(weight)
    linear = AwqLinear(192, 24, bias=False, group_size=group_size, stored=StoredWeight(version, group_size))
    linear.expect_()
    linear.load_state_dict(stored, assign=True)
    with pytest.raises(ValueError, match=f"must have the layout gemm, got {version}; call to_gemm_"):
        linear(draw(1, 192))
    linear.to_gemm_()
    linear.to_gemm_()
    expected = make_linear(weight)
    assert repr(linear) == repr(expected)
    assert set(linear.state_dict()) == {"qweight", "qzeros", "scales"}
    for name, tensor in linear.state_dict().items():
        assert torch.equal(tensor, expected.state_dict()[name]), name


MOVES: dict[str, Callable[[AwqLinear], AwqLinear]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda linear: pickle.loads(pickle.dumps(linear)),
    "to bfloat16": lambda linear: linear.to(torch.bfloat16),
    "to float32": lambda linear: linear.to(torch.float32),
    "half": lambda linear: linear.half(),
    "double": lambda linear: linear.double(),
    "type": lambda linear: linear.type(torch.float32),
    "to cpu": lambda linear: linear.to("cpu", torch.bfloat16),
    "apply": lambda linear: linear.apply(lambda module: None),
    "share_memory": lambda linear: linear.share_memory(),
}


@pytest.mark.daily
@pytest.mark.parametrize("move", MOVES)
def test_packed_weights_stay_what_they_are(move: str) -> None:
    linear = make_linear(random_weight(64, 24, 32), draw(24).half())
    found = MOVES[move](copy.deepcopy(linear))
    for name in ("qweight", "qzeros", "scales"):
        one, other = getattr(found, name), getattr(linear, name)
        assert one.dtype == other.dtype, name
        assert torch.equal(one, other), name
    x = draw(2, 64)
    assert (found(x) - linear(x)).abs().max() <= 0.01  # the bias has been rounded


def test_the_meta_device() -> None:
    with torch.device("meta"):
        linear = AwqLinear(64, 24, bias=True, group_size=32)
    state = make_linear(random_weight(64, 24, 32), draw(24).half()).state_dict()
    for name, (shape, dtype) in {**layout_of("gemm", 64, 24, 32), "bias": ((24,), torch.float16)}.items():
        tensor = getattr(linear, name)
        assert (tensor.is_meta, tuple(tensor.shape), tensor.dtype) == (True, shape, dtype)
    assert not list(linear.parameters())
    linear.to_empty(device="cpu").load_state_dict(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in linear.state_dict().items())
    assert linear.to("meta", torch.bfloat16).scales.is_meta
    assert linear.scales.dtype == torch.float16


@pytest.mark.daily
@pytest.mark.parametrize("tokens", [2, 40])
def test_gradients_of_inputs(tokens: int) -> None:
    weight = random_weight(128, 24, 32)
    linear = make_linear(weight, draw(24).half())
    x = draw(1, tokens, 128).requires_grad_()
    grad = draw(1, tokens, 24, seed=3)
    linear(x).backward(grad)
    require_close(x.grad, grad, weight, transposed=True)


def test_an_adapter_is_trained() -> None:
    """Two layers, the second of which passes a gradient on to an adapter beside the first."""
    first, second = make_linear(random_weight(64, 32, 32)), make_linear(random_weight(32, 8, 32, seed=1))
    dense = [weight.dense.float() for weight in (random_weight(64, 32, 32), random_weight(32, 8, 32, seed=1))]
    x, target = draw(6, 64), draw(6, 8, seed=4)
    grads = []
    for one, two in ((first, second), (lambda x: x @ dense[0], lambda x: x @ dense[1])):
        adapter = nn.Linear(64, 32, bias=False)
        adapter.weight.data = draw(32, 64, seed=5)
        (two(torch.relu(one(x) + adapter(x))) - target).square().sum().backward()
        grads.append(adapter.weight.grad)
    size = grads[1].abs().max()  # what sums in float32 are off by is relative to their terms
    torch.testing.assert_close(grads[0] / size, grads[1] / size, rtol=0, atol=2e-5)


def test_gradients_are_not_differentiated_again() -> None:
    x = draw(2, 64).requires_grad_()
    (grad,) = torch.autograd.grad(make_linear(random_weight(64, 24, 32))(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_nothing_is_kept_without_a_gradient() -> None:
    linear = make_linear(random_weight(64, 24, 32))
    assert not linear(draw(2, 64)).requires_grad
    with torch.no_grad():
        assert not linear(draw(2, 64).requires_grad_()).requires_grad


@pytest.mark.daily
@pytest.mark.parametrize("tokens", [2, 40])
def test_autocast_takes_no_digits_away(tokens: int) -> None:
    linear = make_linear(random_weight(64, 24, 32))
    x = draw(tokens, 64).requires_grad_()
    expected = linear(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(linear(x), expected)


def test_other_features_are_refused() -> None:
    linear = make_linear(random_weight(64, 24, 32))
    with pytest.raises(ValueError, match=r"`x` must have 64 features, got a shape of \(4, 32\)"):
        linear(draw(4, 32))
    with pytest.raises(ValueError, match="`in_features` must be a multiple of the group size 128, got 64"):
        AwqLinear(64, 24, bias=False, group_size=128)


def test_what_print_says() -> None:
    found = repr(nn.Sequential(make_linear(random_weight(64, 24, 32))))
    assert "AwqLinear(in_features=64, out_features=24, bias=False, group_size=32, version=gemm)" in found


def test_the_oracle() -> None:
    """What all of the above is measured by."""
    scales = torch.tensor([[0.5], [2.0]]).half()
    weight = Weight(torch.tensor([[1], [2], [3], [15]]).byte(), torch.tensor([[3], [0]]).byte(), scales)
    assert weight.dense.tolist() == [[-1.0], [-0.5], [6.0], [30.0]]
