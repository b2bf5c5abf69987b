"""The dense kernel compiled for GPUs that are not here: on tensor cores, with nothing spilled from registers."""

from dataclasses import replace
from itertools import chain

import pytest
import torch

from tests.internals.attention import AttentionCall, Visibility
from tests.internals.triton import Device, dense
from tests.internals.triton import attention_plan_tiling as plan_tiling
from tests.triton_compile import Kernels, Launch, pointer

SHARED = {  # bytes that a program may use
    **dict.fromkeys((86, 89, 120), 99 * 1024),
    80: 163 * 1024,
    **dict.fromkeys((90, 100), 227 * 1024),
}
MMA = {**dict.fromkeys((80, 86, 89, 120), "mma.sync"), 90: "wgmma.mma_async", 100: "tcgen05.mma"}

BF16 = torch.bfloat16

# head_dim, queries, what is asked, dtype
EVERYWHERE = [
    (128, 512, "", BF16),
    (128, 512, "mask", torch.float16),
    (128, 64, "tree", BF16),
    (128, 512, "", torch.float32),
]
WIDTHS = [(64, 512, "", BF16), (256, 512, "window, padding", BF16)]
CASES = [
    *((capability, *each) for capability in (80, 86, 89, 90, 120) for each in EVERYWHERE),
    (100, *EVERYWHERE[0]),
    *((capability, *each) for capability in (80, 90, 100, 120) for each in WIDTHS),
    (90, 128, 1, "window, padding", BF16),
    (90, 128, 1, "columns, window", BF16),
    (90, 64, 16, "tree, softcap, sinks", BF16),
    (90, 128, 64, "tree, window", BF16),
    (90, 128, 512, "mask, columns, padding", BF16),
    (90, 64, 512, "mask", BF16),
    (90, 256, 512, "mask", BF16),
]
# Bytes of stack of a thread, at most, where registers do not suffice: what trees and masks ask of each pair of a query
# and a column takes the last ones, and float32 has three programs on a processor of sm_86 and sm_89.
STACK = {"tree": 32, "mask": 104}
FLOAT32_STACK = 24
OTHERS = ["few warps", "mask and 64 columns", "32 columns"]


def launch(capability: int, head_dim: int, queries: int, asked: str, dtype: torch.dtype, **tiles: int) -> Launch:
    """A call over 4096 columns, with 4 heads for each head of keys."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    device = Device(132, SHARED[capability])
    tiling = plan_tiling(queries * 4, head_dim, dtype.itemsize, device, has_matrix="mask" in asked)
    tiling = replace(tiling, **tiles)
    call = AttentionCall(
        empty(1, queries, 32, head_dim).transpose(1, 2),
        scale=head_dim**-0.5,
        visibility=Visibility(
            window=1024 if "window" in asked else 0,
            keep=empty(1, 4096, dtype=torch.bool) if "padding" in asked else None,
            columns=empty(1, queries, dtype=torch.int32) if "columns" in asked or "tree, window" in asked else None,
            tree=empty(1, queries, dtype=torch.int64) if "tree" in asked else None,
            mask=empty(1, 1, queries, 4096, dtype=torch.bool) if "mask" in asked else None,
        ),
        softcap=30.0 if "softcap" in asked else 0.0,
        sinks=empty(32) if "sinks" in asked else None,
    )
    key, value = (empty(1, 8, 4096, head_dim) for _ in range(2))
    out, lse = empty(1, 1, queries, 32, head_dim), empty(1, 1, 32, queries, dtype=torch.float32)
    arguments = dense.launch_arguments(call, key, value, out, lse, tiling)
    given = dict(zip(dense.fwd.arg_names, map(pointer, chain.from_iterable(arguments)), strict=True))
    return Launch("kvboost_hf.attention.triton.dense:fwd", given, capability, tiling.warps, tiling.stages)


@pytest.fixture(scope="module")
def compiled() -> Kernels:
    launches = [launch(*case) for case in CASES]
    launches += [
        launch(80, 128, 512, "", BF16, warps=4, block_n=64),
        launch(90, 128, 512, "mask", BF16, block_n=64),
        launch(90, 128, 512, "", BF16, block_n=32),
    ]
    return Kernels(dict(zip([*CASES, *OTHERS], launches, strict=True)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel(compiled: Kernels, case: tuple[int, int, int, str, torch.dtype]) -> None:
    capability, _, queries, asked, dtype = case
    found = compiled[case]
    # A tile of few queries, with 4 heads, is smaller than what the instructions of later GPUs take.
    expected = "mma.sync" if queries * 4 < 64 else MMA[capability]
    assert found.mma == ([] if dtype == torch.float32 else [expected])
    others = FLOAT32_STACK if dtype == torch.float32 else 0
    allowed = next((most for kind, most in STACK.items() if kind in asked), others)
    assert found.stack_bytes <= allowed
    assert found.shared_bytes <= SHARED[capability]


@pytest.mark.parametrize(("larger", "least"), [("few warps", 1000), ("mask and 64 columns", 200)])
def test_a_tile_that_is_too_large_spills(compiled: Kernels, larger: str, least: int) -> None:
    assert compiled[larger].stack_bytes > least


def test_a_mask_costs_little_more_than_its_loads(compiled: Kernels) -> None:
    """There were 945 instructions, not 415: the softmax was computed in the layout of the mask and in its own."""
    masked, plain = (
        min(sum(loop.values()) for loop in compiled[case].loops if any("MMA" in name for name in loop))
        for case in ((90, 128, 512, "mask", torch.float16), "32 columns")
    )
    assert masked <= 2 * plain
