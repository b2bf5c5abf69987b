"""The CUDA kernel on a GPU, whichever is there: compiled for it, and held against float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.attention import Problem
from tests.cuda_kernel.problems import PROBLEMS
from tests.gpu.device import DEVICE, needs_gpu
from tests.internals.attention import Part, can_attend, kernel_calls, nvrtc, use_tier
from tests.internals.attention import ops_attend as attend

pytestmark = [
    needs_gpu("CUDA compiles and launches; tests/parity/test_cuda_on_cpu.py runs the kernel on the host"),
    pytest.mark.skipif(nvrtc.library() is None, reason="kvboost_hf[cuda] is not installed"),
]
HALF = torch.float16
LARGE = {
    "prompt": Problem(dtype=HALF, head_dim=128, queries=700, columns=700, heads=8, window=500),
    "suffix of a long one": Problem(dtype=HALF, head_dim=128, queries=100, columns=9000, heads=8, padding=True),
    "one token": Problem(dtype=HALF, head_dim=96, queries=1, columns=20_000, heads=8, sinks=True),
    "tree": Problem(dtype=HALF, head_dim=128, queries=64, columns=9000, heads=8, tree=True, sparse=True, window=4000),
}


def solve(problem: Problem, *, partial: bool = True) -> Part:
    calls = kernel_calls()["cuda.attend"]
    with use_tier("cuda"):
        found = attend(problem.call(partial=partial), *problem.kv())
    assert kernel_calls()["cuda.attend"] == calls + 1
    return found


@pytest.mark.parametrize("name", [*PROBLEMS, *LARGE])
def test_parity(name: str) -> None:
    problem = replace((PROBLEMS | LARGE)[name], device=DEVICE)
    problem.check(solve(problem))


def test_the_same_each_time_and_in_half_precision() -> None:
    problem = replace(LARGE["one token"], device=DEVICE)
    (out, _), (again, _) = solve(problem), solve(problem)
    assert torch.equal(out, again)
    half, lse = solve(problem, partial=False)
    assert torch.equal(half, out.half())
    assert lse.numel() == 0


@pytest.mark.parametrize(
    "changes", [{"dtype": torch.bfloat16}, {"head_dim": 40}, {"head_dim": 272}, {"device": "cpu"}], ids=str
)
def test_what_is_not_taken(changes: dict[str, Any]) -> None:
    problem = replace(PROBLEMS["suffix"], device=DEVICE)
    assert can_attend(*problem.tensors())
    other = replace(problem, **changes)
    assert not can_attend(*other.tensors())


def test_in_a_graph() -> None:
    problem = replace(PROBLEMS["splits"], device=DEVICE)
    given = problem.call(), *problem.kv()
    with use_tier("cuda"):
        expected, _ = attend(*given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found, _ = attend(*given)
    found.zero_()
    graph.replay()
    assert torch.equal(found, expected)
