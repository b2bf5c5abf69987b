"""Products with weights of four bits against float64, in Triton's interpreter."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs

from kvboost_hf.config import QuantKernel
from tests.awq import SHIFTS, Packed, Weight, in_gemm, share_of_budget
from tests.internals.attention import kernel_calls
from tests.internals.offload import awq_matmul, dispatch
from tests.internals.triton import MOST_ROWS, awq_matmul_triton, halfwords, scratch_columns, triton_support
from tests.internals.triton import AwqTiling as Tiling
from tests.internals.triton import awq_plan_tiling as plan_tiling
from tests.internals.triton import launch_module as launch
from tests.parity.test_triton_halfwords import halves, run

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Rows times weights.

    Args:
        rows: The rows of x.
        in_features: A multiple of the group size.
        out_features: A multiple of 8.
        group_size: Rows of weights that share a scale and a zero.
        dtype: The dtype of x.
        levels: The least of the numbers that weights and zeros are drawn from, and one more than the largest.
        size: The size of scales.
        spread: Standard deviation of x.
        device: Where.
    """

    rows: int = 5
    in_features: int = 256
    out_features: int = 72
    group_size: int = 128
    dtype: torch.dtype = F16
    levels: tuple[int, int] = (0, 16)
    size: float = 0.02
    spread: float = 1.0
    device: torch.device | str = "cpu"

    def drawn(self) -> tuple[torch.Tensor, Weight]:
        """Rows and weights."""
        draw = torch.Generator().manual_seed(self.rows + self.out_features)
        groups = self.in_features // self.group_size
        x = (self.spread * torch.randn(self.rows, self.in_features, generator=draw)).to(self.dtype)
        levels, zeros = (
            torch.randint(*self.levels, (size, self.out_features), generator=draw, dtype=torch.uint8)
            for size in (self.in_features, groups)
        )
        scales = self.size * (0.5 + torch.rand(groups, self.out_features, generator=draw))
        weight = (each.to(self.device) for each in (levels, zeros, scales.half()))
        return x.to(self.device), Weight(*weight)

    def tensors(self, shifts: tuple[int, ...] = SHIFTS) -> Given:
        """What a kernel is given."""
        x, weight = self.drawn()
        return x, *in_gemm(weight, shifts)


def check(product: Product, found: torch.Tensor) -> None:
    """It may be off as much as if weights were rounded to the dtype of x, or what is the sum of their groups."""
    # The interpreter cuts off what does not fit into bfloat16, where a GPU rounds.
    truncates = product.dtype == BF16 and product.device == "cpu"
    share = share_of_budget(found, *product.drawn(), truncates=truncates)
    assert share <= 1, f"off by {share:.3g} times the budget"


CASES = [
    *(Product(rows=rows, dtype=dtype) for rows in (1, 2, 5, 16, 17, 40) for dtype in (F16, BF16, F32)),
    *(Product(rows=rows, group_size=group, dtype=F32) for rows in (1, 5) for group in (32, 64)),
    *(Product(rows=rows, in_features=96, out_features=out, group_size=32) for rows in (1, 17) for out in (8, 24, 520)),
    *(Product(rows=rows, levels=levels) for rows in (1, 5) for levels in ((0, 1), (15, 16))),
    *(Product(rows=MOST_ROWS + 1, dtype=dtype) for dtype in (F16, BF16, F32)),
    Product(rows=MOST_ROWS + 1, in_features=96, out_features=520, group_size=32),
    *(Product(rows=rows, size=100.0) for rows in (1, 5, MOST_ROWS + 1)),
    *(Product(rows=rows, size=6e-6, dtype=F32) for rows in (1, 5)),
    # Large, and less than any normal number of float16; of bfloat16, what float16 cannot hold.
    *(Product(rows=rows, spread=2.0**13, size=0.002) for rows in (1, 5, 40)),
    *(Product(rows=rows, spread=2.0**-20, size=100.0) for rows in (1, 5, 40)),
    *(Product(rows=rows, spread=size, dtype=BF16) for rows in (5, 40) for size in (2.0**100, 2.0**-100)),
    *(Product(rows=64, group_size=group, dtype=dtype) for group in (32, 64) for dtype in (F16, BF16)),
]


@pytest.mark.parametrize("product", CASES, ids=str)
def test_parity(product: Product) -> None:
    before = kernel_calls()
    found = awq_matmul(*product.tensors(), "triton")
    assert dict(kernel_calls() - before) == {"triton.awq_matmul": 1}
    check(product, found)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("low", [(0, 15), (15, 0)], ids=str)
def test_the_farthest_from_zero(rows: int, low: tuple[int, int]) -> None:
    """All weights are one end of what four bits hold, and all zeros are the other: no nibble leaks into another."""
    x, qweight, qzeros, scales = Product(rows=rows, dtype=F32).tensors()
    all_ones = [torch.full_like(each, -1 if end else 0) for each, end in zip((qweight, qzeros), low, strict=True)]
    expected = x.double().sum(1, keepdim=True) * (low[0] - low[1]) * scales[0].double()
    same = scales[:1].expand(2, -1)
    torch.testing.assert_close(awq_matmul(x, *all_ones, same, "triton").double(), expected, rtol=1e-5, atol=1e-5)  # type: ignore[arg-type, call-arg]


@pytest.mark.parametrize("rows", [1, 5])
def test_another_order_of_nibbles_is_found_out(rows: int) -> None:
    product = Product(rows=rows)
    found = awq_matmul(*product.tensors(shifts=(0, 4, 8, 12, 16, 20, 24, 28)), "triton")
    with pytest.raises(AssertionError, match="off by"):
        check(product, found)


@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_parts_add_up(rows: int, parts: int) -> None:
    """Any number of parts, also one that the steps cannot be divided by; the same numbers twice."""
    product = Product(rows=rows, in_features=256, out_features=40, group_size=64)
    planned = plan_tiling(rows, 256, 40, 64, processors=1, tile_rows=64)
    found, again = (awq_matmul_triton(*product.tensors(), replace(planned, parts=parts)) for _ in range(2))
    check(product, found)
    assert torch.equal(found, again)
    assert not launch._counters(torch.device("cpu"), 0).any(), "the next product would miss a part"


def test_small_tiles() -> None:
    """More tiles of rows and of columns than are taken together, and several steps in a group."""
    product = Product(rows=150, in_features=64, out_features=72, group_size=64, dtype=F32)
    tiling = Tiling(block_m=16, block_n=64, block_k=32, warps=4, stages=1, parts=2)
    check(product, awq_matmul_triton(*product.tensors(), tiling))


def test_prompts_take_some_columns_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What weights become takes no more memory than one slice of columns."""
    monkeypatch.setattr("kvboost_hf.offload.awq.tiling.SCRATCH_BYTES", 256 * 96 * 2)
    product = Product(rows=MOST_ROWS + 1, in_features=96, out_features=520, group_size=32)
    with Shapes(torch.ops.aten.mm.out) as shapes:
        check(product, awq_matmul_triton(*product.tensors()))
    assert shapes.found == [(96, 256), (96, 256), (96, 8)]


class Shapes(TorchDispatchMode):
    """Shapes of the second arguments of an operator."""

    def __init__(self, operator: object) -> None:
        super().__init__()
        self.operator, self.found = operator, list[tuple[int, ...]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self.operator:
            self.found.append(tuple(args[1].shape))
        return func(*args, **(kwargs or {}))


def test_scratch() -> None:
    """Within 128 MiB, in whole tiles, each time about as many, or all columns at once."""
    assert scratch_columns(5120, 27648, 2) == 9216
    assert scratch_columns(5120, 1024, 2) == 1024
    assert scratch_columns(1 << 20, 27648, 4) == 256


def test_rows_that_are_not_contiguous() -> None:
    for rows in (1, 5, MOST_ROWS + 1):
        product = Product(rows=rows)
        x, *packed = product.tensors()
        weights = Packed(*packed)
        apart = torch.stack([x, torch.full_like(x, float("nan"))], 1)[:, 0]
        turned = x.T.contiguous().T
        for each in (apart, turned):
            check(product, awq_matmul(each, *weights, "triton"))
    assert not apart.is_contiguous()
    assert turned.stride(1) != 1


def test_no_rows() -> None:
    found = awq_matmul(*Product(rows=0).tensors(), "triton")
    assert found.shape == (0, 72)
    assert found.dtype == F16


@pytest.mark.parametrize("rows", [1, 5])
def test_opcheck(rows: int) -> None:
    torch.library.opcheck(torch.ops.kvboost_hf.awq_matmul.default, (*Product(rows=rows).tensors(), "triton"))


def test_one_operator_where_it_is_compiled() -> None:
    x, *packed = Product(dtype=F32).tensors()
    weights = Packed(*packed)
    targets: list[torch.Tensor] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        targets.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph

    compiled = torch.compile(lambda x: awq_matmul(x, *weights, "triton"), fullgraph=True, backend=backend)
    assert torch.equal(compiled(x), awq_matmul(x, *weights, "triton"))
    assert targets == [torch.ops.kvboost_hf.awq_matmul.default]


@pytest.fixture
def _chosen_anew() -> Iterator[None]:
    dispatch.runs_triton.cache_clear()
    yield
    dispatch.runs_triton.cache_clear()


@pytest.mark.usefixtures("_chosen_anew")
def test_triton_needs_a_gpu_or_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    with pytest.raises(ValueError, match=r"'triton' needs a GPU, or TRITON_INTERPRET=1 .* on 'cpu'; choose 'auto'"):
        awq_matmul(*Product().tensors(), "triton")


@pytest.mark.usefixtures("_chosen_anew")
def test_triton_needs_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_support, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs the package triton"):
        awq_matmul(*Product().tensors(), "triton")


@pytest.mark.daily
@pytest.mark.usefixtures("_chosen_anew")
@pytest.mark.parametrize(("capability", "chosen"), [((6, 1), False), ((7, 0), True), ((9, 0), True)])
def test_auto_on_a_gpu(capability: tuple[int, int], chosen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert dispatch.runs_triton("auto", torch.device("cuda:0")) == chosen
    assert not dispatch.runs_triton("torch", torch.device("cuda:0"))


@pytest.mark.daily
@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_on_a_cpu_it_is_plain_pytorch(kernel: QuantKernel) -> None:
    product, before = Product(), kernel_calls()
    check(product, awq_matmul(*product.tensors(), kernel))
    assert dict(kernel_calls() - before) == {"reference.awq_matmul": 1}


SHAPES = [(i, o, group) for i in (256, 5120, 28672) for o in (8, 1024, 27648) for group in (32, 64, 128)]


@pytest.mark.daily
@pytest.mark.parametrize("tile_rows", [0, 32, 64, 128])
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 40, 100, 4096])
def test_tilings(rows: int, tile_rows: int) -> None:
    for in_features, out_features, group in SHAPES:
        shape = rows, in_features, out_features, group
        tiling = plan_tiling(*shape, processors=132, tile_rows=tile_rows)
        programs = -(-rows // tiling.block_m) * -(-out_features // tiling.block_n) * tiling.parts
        steps = -(-in_features // (4 * group)) if rows == 1 else in_features // group
        assert (tiling.block_m == 1) == (rows == 1)
        assert tiling.block_m <= (tile_rows or 32)
        assert group % tiling.block_k == 0
        assert -(-steps // tiling.parts) * (tiling.parts - 1) < steps, "a part is empty"
        most = 12 if rows == 1 else 3  # those of one row are short, and follow each other
        assert tiling.parts == 1 or programs <= most * 132, "they do not fit on the device at a time"
        if in_features == 5120 and out_features >= 1024:
            assert programs >= 132 // 2, "most processors stand still"
    assert plan_tiling(1, 5120, 5120, 128, processors=1, tile_rows=tile_rows).parts == 1


@pytest.mark.daily
@pytest.mark.parametrize("major", [7, 8, 9, 10, 12])
def test_few_rows_round_no_weights(major: int) -> None:
    """Scales are multiplied by in float32 as long as registers hold two sums."""
    tile_rows = launch.traits_of(major, 132).tile_rows
    for rows in (2, 16, 17, 64):
        scaled = plan_tiling(rows, 5120, 5120, 128, processors=132, tile_rows=tile_rows).scaled
        assert scaled == (rows > 16 and major >= 8)


SCALED = [
    Tiling(block_m=16, block_n=64, block_k=32, warps=4, stages=1, parts=1, scaled=each) for each in (False, True)
]


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("tiling", SCALED, ids=["sums", "weights"])
def test_weights_are_as_exact_as_the_dtype(tiling: Tiling, dtype: torch.dtype) -> None:
    """Rows that pick one weight of each column give it, rounded once; and with bfloat16, scales rounded, too."""
    assert_exact_weights(tiling, dtype, "cpu")


def assert_exact_weights(tiling: Tiling, dtype: torch.dtype, device: torch.device | str) -> None:
    product = Product(rows=16, dtype=dtype, device=device)
    _, weight = product.drawn()
    x = torch.zeros(16, product.in_features, dtype=dtype, device=device)
    picked = torch.arange(16) * 16 + 3
    x[torch.arange(16), picked] = 1
    found, dense = awq_matmul_triton(x, *in_gemm(weight), tiling), weight.dense[picked]
    if dtype == F16:
        assert torch.equal(found, dense.half())
    else:
        off = ((found.double() - dense).abs() / dense.abs().clamp(min=1e-30)).max().item()
        rounded = 2 if tiling.scaled else 1
        cut = 2 if str(device) == "cpu" else 1  # Triton's interpreter does not round to bfloat16
        assert off <= 1.01 * rounded * cut * 2**-8


@pytest.mark.parametrize("rows", [5, 40])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_infinities(rows: int, dtype: torch.dtype) -> None:
    assert_infinities(Product(rows=rows, dtype=dtype))


@np.errstate(invalid="ignore")  # in the interpreter
def assert_infinities(product: Product) -> None:
    """They stay in their rows, and become what plain weights make of them: one of weight 0 is not a number."""
    x, *packed = product.tensors()
    weights, (_, weight) = Packed(*packed), product.drawn()
    finite = awq_matmul(x, *weights, "triton")
    x[1, 7], x[2, 9], x[3, 11] = float("inf"), float("-inf"), float("nan")
    found = awq_matmul(x, *weights, "triton")
    plain = x[1:4].double() @ weight.dense
    torch.testing.assert_close(found[1:4].double(), plain, rtol=0, atol=0, equal_nan=True)
    assert plain[:2].isnan().any()
    assert plain[:2].isinf().any(1).all()
    others = [0, *range(4, product.rows)]
    assert torch.equal(found[others], finite[others])


@pytest.mark.daily
@pytest.mark.parametrize("damage", [None, ("0x000f000f", "0x00070007"), ("base,", "t,")], ids=str)
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_instructions(dtype: torch.dtype, damage: tuple[str, str] | None) -> None:
    """The PTX makes numbers of all halfwords that differ by codes, or by 16 times as much, from those of 0."""
    text = halfwords.instructions(dtype)
    if damage:
        assert damage[0] in text
        text = text.replace(*damage)

    def numbers(words: np.ndarray) -> list[torch.Tensor]:
        operands = [np.zeros(1, np.uint32)] * 4 + [words]
        run(text, operands)
        return [halves(each).view(dtype).flatten().double() for each in operands[:4]]

    every = np.arange(1 << 16, dtype=np.uint16)
    lowest = numbers(np.zeros(1, np.uint32))
    found = [each - low[0] for each, low in zip(numbers(every.view(np.uint32)), lowest, strict=True)]
    steps = [16.0 if dtype == F16 and j % 2 else 1.0 for j in range(4)]
    expected = [torch.from_numpy((every >> 4 * j & 15).astype(np.float64)) for j in range(4)]
    right = all(torch.equal(each / step, code) for each, step, code in zip(found, steps, expected, strict=True))
    assert right == (damage is None)
