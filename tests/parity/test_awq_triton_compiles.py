"""Products with weights of four bits compiled for GPUs that are not here: wide loads, tensor cores, no spills."""

from dataclasses import replace

import pytest
import torch

from kvboost_hf.offload.awq.triton.launch import Planned, plan_dequantizing, planned
from kvboost_hf.offload.awq.triton.tiling import plan_tiling
from tests.triton_compile import Compiled, Launch, compile_launches, pointer

pytestmark = pytest.mark.slow

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
# What a program may use of it: sm_86 and sm_89, of consumers' GPUs, have the least since sm_80.
SHARED = {75: 64 * 1024, 80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
MMA = {80: "mma.sync", 86: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}

# capability, rows, group size, dtype
CASES = [
    *((capability, rows, 128, BF16) for capability in (80, 90, 100) for rows in (1, 16, 128)),
    (90, 64, 32, F16),
    (86, 128, 128, F16),
    (80, 64, 64, F32),
    (75, 1, 128, F16),
    (75, 16, 128, F16),
]


def launch(capability: int, rows: int, group_size: int, dtype: torch.dtype, **tiles: int) -> Launch:
    """A call with a weight [5120, 27648]."""

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    tensor_cores = dtype != F32 and capability >= 80
    tiling = plan_tiling(rows, 5120, 27648, group_size, processors=132, tensor_cores=tensor_cores)
    groups = 5120 // group_size
    plan = planned(rows, 5120, 5120, groups, 27648, dtype, torch.device("cpu"), replace(tiling, **tiles))
    x, out = empty(rows, 5120, dtype=dtype), empty(rows, 27648, dtype=dtype)
    sums, arrived = empty(1, dtype=F32), empty(1, dtype=torch.int32)
    return as_launch(plan, (x, *weight(groups), out, sums, arrived), plan.numbers, capability)


def weight(groups: int) -> tuple[torch.Tensor, ...]:
    words, scales = torch.empty(5120, 27648 // 8, dtype=torch.int32), torch.empty(groups, 27648, dtype=F16)
    return words, words[:groups], scales


def as_launch(plan: Planned, tensors: tuple[torch.Tensor, ...], numbers: tuple[int, ...], capability: int) -> Launch:
    """What a kernel is given, by the names of its parameters."""
    kernel = plan.launch._kernel
    values = map(pointer, (*tensors, *plan.strides, *numbers, *plan.constants))
    given = dict(zip(kernel.arg_names, values, strict=True))
    name = kernel.fn.__name__
    return Launch(f"kvboost_hf.offload.awq.triton.{name}:{name}", given, capability, plan.warps, plan.stages)


def dequantizing(capability: int, group_size: int, dtype: torch.dtype) -> Launch:
    groups = 5120 // group_size
    plan = plan_dequantizing(5120, groups, 27648, 9216, dtype, torch.device("cpu"))
    out = torch.empty(5120, 9216, dtype=dtype)
    return as_launch(plan, (*weight(groups), out), (0,), capability)


@pytest.fixture(scope="module")
def compiled() -> dict[object, Compiled]:
    launches = [*(launch(*case) for case in CASES), launch(90, 1, 128, F16, warps=1), dequantizing(90, 128, F16)]
    return dict(zip([*CASES, "too large", "dequantize"], compile_launches(launches), strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel(compiled: dict[object, Compiled], case: tuple[int, int, int, torch.dtype]) -> None:
    capability, rows, _, dtype = case
    found = compiled[case]
    # A tile of few rows is smaller than what the instructions of later GPUs take.
    expected = "mma.sync" if rows < 64 else MMA.get(capability)
    assert found.mma == ([] if rows == 1 or dtype == F32 or capability < 80 else [expected])
    assert found.stack_bytes == 0
    assert found.shared_bytes <= SHARED[capability]


ONE_ROW = [each for each in CASES if each[1] == 1]


@pytest.mark.parametrize("case", ONE_ROW, ids=str)
def test_one_row_loads_16_bytes_at_a_time(
    compiled: dict[object, Compiled], case: tuple[int, int, int, torch.dtype]
) -> None:
    assert "ld.global.v4.b32" in compiled[case].loads
    # Four programs fit onto a processor.
    assert compiled[case].registers * 4 * 128 <= 65536


@pytest.mark.parametrize("case", ONE_ROW, ids=str)
def test_one_row_takes_few_instructions(
    compiled: dict[object, Compiled], case: tuple[int, int, int, torch.dtype]
) -> None:
    """Two for each weight, and what is done once for a row of words and once for a group.

    An H100 issues 9e11 of them per second to 32 threads: 2.75 per weight leave it twice the time that it takes to
    read the weights. With 5.2 it was half as fast as a copy.
    """
    inner, outer, *_ = compiled[case].loops
    words, group = sum(inner.values()), sum(outer.values())
    assert inner.get("FFMA", 0) + 2 * inner.get("FFMA2", 0) == 256  # weights of a thread: in 8 rows, 32 columns
    assert words / 256 <= 2.55
    assert (4 * words + group - words) / 1024 <= 2.85


@pytest.mark.parametrize("case", ONE_ROW, ids=str)
def test_codes_are_not_taken_for_zero(
    compiled: dict[object, Compiled], case: tuple[int, int, int, torch.dtype]
) -> None:
    """They are less than any normal number, which an instruction with FTZ would make zero of."""
    assert not compiled[case].flushes


def test_dequantizing(compiled: dict[object, Compiled]) -> None:
    found = compiled["dequantize"]
    assert found.stack_bytes == 0
    assert sum(found.loops[0].values()) / (16 * 256 / 128) <= 8  # per weight; it is bound by what it writes


def test_a_tile_that_is_too_large_spills(compiled: dict[object, Compiled]) -> None:
    assert compiled["too large"].stack_bytes > 100
