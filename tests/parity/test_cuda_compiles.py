"""The CUDA kernel's source, compiled for GPUs that are not there: tensor cores, registers, shared memory."""

import numpy as np
import pytest

from tests.internals.attention import launch, nvrtc

pytestmark = pytest.mark.skipif(nvrtc.library() is None, reason="kvboost_hf[cuda] is not installed")

VOLTA = pytest.param(
    70, marks=pytest.mark.skipif("cu13" in str(nvrtc.library()), reason="NVRTC of CUDA 13 does not know sm_70")
)
# Of an instruction for tensor cores: the lowest 12 bits, and how many make one product of 16 x 16 matrices.
HMMA = {70: (0x236, 16), 75: (0x23C, 4), 80: (0x23C, 2), 90: (0x23C, 2)}


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("architecture", [VOLTA, 75])
def test_without_spills(architecture: int, head_dim: int) -> None:
    _, log = nvrtc.compile_attend(architecture, head_dim, head_dim, "--ptxas-options=-v")
    assert "0 bytes spill stores, 0 bytes spill loads" in log, log


@pytest.mark.parametrize("architecture", [VOLTA, 75, 80, 90])
def test_all_products_are_of_tensor_cores(architecture: int) -> None:
    binary, _ = nvrtc.compile_attend(architecture, 128, 64)
    opcode, steps = HMMA[architecture]
    instructions = np.frombuffer(binary[: len(binary) // 16 * 16], dtype="<u2")[::8] & 0xFFF
    assert (instructions == opcode).sum() == steps * (32 // 16) * (128 + 64) // 16


def test_what_does_not_compile_says_why() -> None:
    with pytest.raises(RuntimeError, match="HEAD_DIM / 16"):
        nvrtc.compile_attend(75, 0, 16)


@pytest.mark.daily
@pytest.mark.parametrize("value_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 192, 256])
def test_shared_memory_fits(head_dim: int, value_dim: int) -> None:
    assert launch.shared_bytes(head_dim, value_dim) <= 64 * 1024
