"""Products with weights of four bits compiled for GPUs that are not here: wide loads, tensor cores, no spills."""

from dataclasses import replace

import pytest
import torch

from kvboost_hf.offload.awq.triton.launch import launch_arguments
from kvboost_hf.offload.awq.triton.tiling import plan_tiling
from tests.triton_compile import Compiled, Launch, compile_launches, pointer

pytestmark = pytest.mark.slow

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
# What a program may use of it: sm_86 and sm_89, of consumers' GPUs, have the least since sm_80.
SHARED = {75: 64 * 1024, 80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
MMA = {80: "mma.sync", 86: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}

# capability, rows, group size, dtype
CASES = [
    *((capability, rows, 128, BF16) for capability in (80, 90, 100) for rows in (1, 16, 4096)),
    (90, 64, 32, F16),
    (86, 4096, 128, F16),
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
    tiling = replace(tiling, **tiles)
    groups = 5120 // group_size
    arguments = launch_arguments(
        empty(rows, 5120, dtype=dtype),
        empty(5120, 27648 // 8, dtype=torch.int32),
        empty(groups, 27648 // 8, dtype=torch.int32),
        empty(groups, 27648, dtype=F16),
        empty(tiling.parts, rows, 27648, dtype=F32 if tiling.parts > 1 else dtype),
        tiling,
    )
    name = "gemv" if rows == 1 else "gemm"
    given = {name: pointer(value) for name, value in arguments.items()}
    kernel = f"kvboost_hf.offload.awq.triton.{name}:{name}"
    return Launch(kernel, given, capability, tiling.warps, tiling.stages)


@pytest.fixture(scope="module")
def compiled() -> dict[object, Compiled]:
    launches = [*(launch(*case) for case in CASES), launch(90, 1, 128, F16, warps=1)]
    return dict(zip([*CASES, "too large"], compile_launches(launches), strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel(compiled: dict[object, Compiled], case: tuple[int, int, int, torch.dtype]) -> None:
    capability, rows, _, dtype = case
    found = compiled[case]
    # A tile of few rows is smaller than what the instructions of later GPUs take.
    expected = "mma.sync" if rows < 64 else MMA.get(capability)
    assert found.mma == ([] if rows == 1 or dtype == F32 or capability < 80 else [expected])
    assert found.stack_bytes == 0
    assert found.shared_bytes <= SHARED[capability]


@pytest.mark.parametrize("case", [each for each in CASES if each[1] == 1], ids=str)
def test_one_row_loads_16_bytes_at_a_time(
    compiled: dict[object, Compiled], case: tuple[int, int, int, torch.dtype]
) -> None:
    assert "ld.global.v4.b32" in compiled[case].loads
    # Three programs fit onto a processor, as their number is planned for.
    assert compiled[case].registers * 3 * 128 <= 65536


def test_a_tile_that_is_too_large_spills(compiled: dict[object, Compiled]) -> None:
    assert compiled["too large"].stack_bytes > 100
