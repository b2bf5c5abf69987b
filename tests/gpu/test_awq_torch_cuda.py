"""AWQ weights multiplied by PyTorch's own operators on a GPU."""

import pytest
import torch

from tests.awq import in_gemm, make_linear, random_weight, share_of_budget
from tests.gpu.device import DEVICE
from tests.internals.offload import awq_matmul_torch, awq_matmul_transposed_torch, dequantize, pack, unpack


def test_packing() -> None:
    weight = in_gemm(random_weight(256, 72, 64))
    on_gpu = [tensor.to(DEVICE) for tensor in weight]
    assert torch.equal(pack(unpack(on_gpu[0])), on_gpu[0])
    assert torch.equal(dequantize(*on_gpu).cpu(), dequantize(*weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens", [1, 40])
def test_products(dtype: torch.dtype, tokens: int) -> None:
    weight = random_weight(256, 72, 64)
    packed = [tensor.to(DEVICE) for tensor in in_gemm(weight)]
    draw = torch.Generator().manual_seed(1)
    for multiply, transposed in ((awq_matmul_torch, False), (awq_matmul_transposed_torch, True)):
        x = torch.randn(tokens, 72 if transposed else 256, generator=draw).to(dtype)
        found = multiply(x.to(DEVICE), *packed)
        assert found.device.type == DEVICE.type
        assert share_of_budget(found.cpu(), x, weight, transposed=transposed) <= 1


def test_a_layer_moves() -> None:
    linear = make_linear(random_weight(64, 24, 32)).to(DEVICE, torch.bfloat16)
    assert [tensor.dtype for tensor in linear.buffers()] == [torch.int32, torch.int32, torch.float16]
    assert all(tensor.device.type == DEVICE.type for tensor in linear.buffers())
