"""Products with weights of four bits on a GPU: the cases of the interpreter, and those of models."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kvboost_hf.config import QuantKernel
from tests.awq import Packed
from tests.gpu.device import COMPILER, DEVICE, ON_GPU, needs_gpu
from tests.internals.attention import kernel_calls
from tests.internals.offload import awq_matmul
from tests.internals.triton import AwqTiling as Tiling
from tests.internals.triton import awq_matmul_triton
from tests.internals.triton import awq_plan_tiling as plan_tiling
from tests.parity.test_awq_triton import (
    BF16,
    CASES,
    F16,
    F32,
    SCALED,
    Product,
    assert_exact_weights,
    assert_infinities,
    check,
)

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0), reason="Triton has no tensor cores"
    ),
]
LARGE = [
    *(Product(rows=rows, in_features=5120, out_features=27648) for rows in (1, 7, 16, 40, 300)),
    *(Product(rows=rows, in_features=27648, out_features=5120, dtype=BF16) for rows in (1, 8, 20, 64, 100)),
    *(
        Product(rows=rows, in_features=8192, out_features=1024, dtype=dtype)
        for rows in (1, 33)
        for dtype in (F16, F32)
    ),
    *(Product(rows=rows, in_features=3584, out_features=18944, group_size=64) for rows in (1, 600)),
    *(Product(rows=rows, in_features=4064, out_features=1000, group_size=32, dtype=BF16) for rows in (1, 3, 129)),
]
if not ON_GPU:
    LARGE = [replace(product, in_features=256, out_features=72, dtype=F16) for product in LARGE]
KERNEL: QuantKernel = "auto" if ON_GPU else "triton"  # which is what it chooses there
WIDE, LONG = (1024, 5120) if ON_GPU else (128, 256)


@pytest.fixture(autouse=True)
def _all_bits() -> Iterator[None]:
    """What PyTorch makes of the weights is as exact as the dtype allows."""
    settings = torch.backends.cuda.matmul
    names = ("allow_tf32", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    before = [getattr(settings, name) for name in names]
    for name in names:
        setattr(settings, name, False)
    yield
    for name, value in zip(names, before, strict=True):
        setattr(settings, name, value)


@pytest.mark.parametrize("product", [*CASES, *LARGE], ids=str)
def test_parity(product: Product) -> None:
    product, before = replace(product, device=DEVICE), kernel_calls()
    found = awq_matmul(*product.tensors(), KERNEL)
    assert dict(kernel_calls() - before) == {"triton.awq_matmul": 1}
    check(product, found)


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("tiling", SCALED, ids=["sums", "weights"])
def test_weights_are_as_exact_as_the_dtype(tiling: Tiling, dtype: torch.dtype) -> None:
    assert_exact_weights(tiling, dtype, DEVICE)


@pytest.mark.parametrize("rows", [5, 17, 64, 128])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_infinities(rows: int, dtype: torch.dtype) -> None:
    assert_infinities(Product(rows=rows, in_features=LONG, out_features=WIDE, dtype=dtype, device=DEVICE))


@pytest.mark.parametrize("product", LARGE[:5], ids=str)
def test_plain_pytorch_says_the_same(product: Product) -> None:
    given = replace(product, device=DEVICE).tensors()
    ours, plain = (awq_matmul(*given, kernel).double() for kernel in ("triton", "torch"))
    assert (ours - plain).abs().max() <= 4 * torch.finfo(F16).eps * plain.abs().max()


@pytest.mark.parametrize("rows", [1, 16])
def test_another_order_of_nibbles_is_found_out(rows: int) -> None:
    product = Product(rows=rows, in_features=WIDE, out_features=WIDE, device=DEVICE)
    found = awq_matmul(*product.tensors(shifts=(0, 4, 8, 12, 16, 20, 24, 28)), "triton")
    with pytest.raises(AssertionError, match="off by"):
        check(product, found)


@pytest.mark.parametrize("rows", [1, 16, 300])
def test_the_same_numbers_at_each_call(rows: int) -> None:
    given = Product(rows=rows, in_features=LONG, out_features=WIDE, device=DEVICE).tensors()
    first = awq_matmul(*given, "triton")
    assert all(torch.equal(first, awq_matmul(*given, "triton")) for _ in range(10 if ON_GPU else 1))


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("parts", [1, 3, 40])
def test_parts_add_up(rows: int, parts: int) -> None:
    product = Product(rows=rows, in_features=LONG, out_features=WIDE + 8, device=DEVICE)
    planned = plan_tiling(rows, LONG, WIDE + 8, 128, processors=1, tile_rows=64)
    check(product, awq_matmul_triton(*product.tensors(), replace(planned, parts=parts)))


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_opcheck(rows: int) -> None:
    product = Product(rows=rows, device=DEVICE)
    torch.library.opcheck(torch.ops.kvboost_hf.awq_matmul.default, (*product.tensors(), KERNEL))


@needs_gpu("it captures a graph")
@pytest.mark.parametrize("rows", [1, 16])
def test_streams_do_not_count_each_others_parts(rows: int) -> None:
    """Products of two streams run beside each other."""
    given = Product(rows=rows, in_features=5120, out_features=1024, device="cuda").tensors()
    expected = awq_matmul(*given, "triton")
    torch.cuda.synchronize()
    found, streams = [], [torch.cuda.Stream() for _ in range(4)]
    for stream in streams * 25:
        with torch.cuda.stream(stream):
            found.append(awq_matmul(*given, "triton"))
    torch.cuda.synchronize()
    assert all(torch.equal(each, expected) for each in found)


@needs_gpu("it captures a graph")
@pytest.mark.parametrize("rows", [1, 16, 300])
def test_it_can_be_captured(rows: int) -> None:
    """A CUDA graph replays it: nothing in a call waits for the device."""
    given = Product(rows=rows, in_features=LONG, out_features=WIDE, device=DEVICE).tensors()
    expected = awq_matmul(*given, "triton")  # compiled before it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = awq_matmul(*given, "triton")
    found.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("rows", [1, 16])
def test_compiled_by_inductor(rows: int) -> None:
    x, *packed = Product(rows=rows, in_features=WIDE, out_features=WIDE, device=DEVICE).tensors()
    weights = Packed(*packed)
    compiled = torch.compile(lambda x: awq_matmul(2 * x, *weights, KERNEL) + 1, fullgraph=True, backend=COMPILER)
    torch.testing.assert_close(compiled(x), awq_matmul(2 * x, *weights, KERNEL) + 1)


@needs_gpu("4 GB")
def test_rows_that_are_far_apart() -> None:
    """The last one begins after more numbers than 32 bits can count."""
    product = Product(rows=16, in_features=WIDE, out_features=WIDE, device=DEVICE)
    x, *packed = product.tensors()
    weights = Packed(*packed)
    wide = torch.empty(16, 2**31 // 15 + 8, dtype=F16, device=DEVICE)
    wide[:, :1024] = x
    check(product, awq_matmul(wide[:, :1024], *weights, "triton"))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
@pytest.mark.parametrize("rows", [1, 16])
def test_another_device_than_the_current_one(rows: int) -> None:
    product = Product(rows=rows, in_features=WIDE, out_features=WIDE, device="cuda:1")
    with torch.cuda.device(0):
        found = awq_matmul(*product.tensors(), KERNEL)
        assert torch.cuda.current_device() == 0
    assert found.device == torch.device("cuda:1")
    check(product, found)
