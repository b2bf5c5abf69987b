"""The arithmetic of the CUDA kernel, without a GPU: its source runs on the CPU, thread by thread."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.attention import Problem, assert_within_budget
from tests.cuda_kernel.on_cpu import COMPILER, CpuKernel
from tests.cuda_kernel.problems import PROBLEMS
from tests.internals.attention import Part, backends, kernel_calls, launch, nvrtc, use_tier
from tests.internals.attention import ops_attend as attend

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++")
HALF = torch.float16


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory):
    return cache(lambda *dims: CpuKernel(tmp_path_factory.mktemp("kernel"), *dims))


def solve(kernel: CpuKernel, problem: Problem, *, partial: bool = True, value_dim: int | None = None) -> Part:
    key, value = problem.kv()
    return launch.attend(kernel, problem.call(partial=partial), key, value[..., :value_dim], processors=8)


def check(found: Part, problem: Problem) -> None:
    key, value = problem.kv()
    assert_within_budget(found, problem.call(), key, value[..., : found[0].shape[-1]])


@pytest.mark.parametrize("backwards", [False, True], ids=["forth", "back"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_parity(name: str, backwards: bool, kernels) -> None:
    problem = PROBLEMS[name]
    kernel = kernels(problem.head_dim, problem.head_dim)
    kernel.backwards, calls = backwards, kernel.calls
    out, lse = solve(kernel, problem)
    assert kernel.calls == calls + 1
    assert out.dtype == lse.dtype == torch.float32
    check((out, lse), problem)


@pytest.mark.daily
@pytest.mark.parametrize("name", ["suffix", "splits"])
def test_in_half_precision_without_a_log_sum_exp(name: str, kernels) -> None:
    problem = PROBLEMS[name]
    out, lse = solve(kernels(64, 64), problem, partial=False)
    assert (out.dtype, lse.numel()) == (HALF, 0)
    check((out, lse), problem)


def test_values_of_another_size(kernels) -> None:
    problem = Problem(dtype=HALF, head_dim=192, queries=20)
    check(solve(kernels(192, 128), problem, value_dim=128), problem)


def test_queries_that_see_nothing(kernels) -> None:
    out, lse = solve(kernels(64, 64), PROBLEMS["padding"])
    assert not out[1, :10].any()
    assert lse[1, :, :10].isneginf().all()
    assert lse[0].isfinite().all()


@pytest.mark.daily
@pytest.mark.parametrize("offset", [0, 1])
def test_rows_anywhere(offset: int, kernels) -> None:
    """Rows that lie apart are read in place; those that are no multiple of 16 bytes apart are copied before."""
    problem = PROBLEMS["suffix"]
    torn = [torch.nn.functional.pad(each, (offset, 8 - offset)) for each in problem.tensors()]
    query, key, value = (each[..., offset : offset + 64] for each in torn)
    found = launch.attend(kernels(64, 64), problem.call(query=query, partial=True), key, value, processors=1)
    check(found, problem)


def test_tensors_elsewhere_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_lacking", lambda tier: None)
    problem = PROBLEMS["suffix"]
    calls = kernel_calls()["cuda.attend"]
    with use_tier("cuda"):
        attend(problem.call(), *problem.kv())
    assert kernel_calls()["cuda.attend"] == calls


def test_no_queries(kernels) -> None:
    kernel = kernels(64, 64)
    calls = kernel.calls
    out, lse = solve(kernel, Problem(dtype=HALF, head_dim=64, queries=0))
    assert (out.shape, lse.shape) == ((2, 0, 4, 64), (2, 4, 0))
    assert kernel.calls == calls


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("column > own", "column > own + 1"),
        ("        __syncthreads();\n        if (!warp_there)", "        if (!warp_there)"),
        ("line_factors[j] = factor;\n        __syncwarp();", "line_factors[j] = factor;"),
        ("sums[d].x[j] *= scaling.x[j]", "sums[d].x[j] *= 1"),
    ],
    ids=["sees too much", "no barrier before K/V is read", "no barrier in a warp", "sums of other factors"],
)
def test_what_is_wrong_is_found(right: str, wrong: str, tmp_path: Path) -> None:
    source = nvrtc.SOURCE.read_text()
    assert right in source
    kernel = CpuKernel(tmp_path, 16, 16, source.replace(right, wrong))
    problem = Problem(dtype=HALF, head_dim=16, queries=20, columns=70)

    def right_both_ways() -> None:
        for kernel.backwards in (False, True):
            check(solve(kernel, problem), problem)

    with pytest.raises(AssertionError):
        right_both_ways()


def test_a_tree_of_which_32_bits_are_read_is_found(tmp_path: Path) -> None:
    source, problem = nvrtc.SOURCE.read_text(), replace(PROBLEMS["tree of 64"], head_dim=16)
    assert "const long long bits" in source
    kernel = CpuKernel(tmp_path, 16, 16, source.replace("const long long bits", "const int bits"))
    with pytest.raises(AssertionError, match="off by"):
        check(solve(kernel, problem), problem)


def test_how_many_splits() -> None:
    assert launch.splits_of(blocks=1000, columns=100_000, processors=40) == 1
    assert launch.splits_of(blocks=8, columns=100_000, processors=40) == 10
    assert launch.splits_of(blocks=8, columns=1000, processors=40) == 3
    assert launch.splits_of(blocks=8, columns=10, processors=40) == 1
