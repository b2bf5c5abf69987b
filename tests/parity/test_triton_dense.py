"""The dense Triton kernel against float64, in Triton's interpreter: every pair of what can be asked of it."""

import random
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
import torch

from kvboost_hf.attention.triton import dense
from kvboost_hf.attention.triton.tiling import Device, Tiling
from kvboost_hf.attention.visibility import Visibility
from tests.attention import Problem, assert_within_budget

H100, A100, RTX = Device(132, 227 * 1024), Device(108, 163 * 1024), Device(84, 99 * 1024)

OPTIONS: dict[str, list[Any]] = {
    "shape": [(1, 37), (7, 40), (19, 19), (1, 1), (16, 33)],  # queries and columns
    "heads": [(2, 2), (8, 2), (8, 1)],  # of queries, and of keys
    "head_dim": [16, 32, 64, 80, 96, 128, 256],
    "dtype": [torch.float32, torch.float16, torch.bfloat16],
    "splits": [1, 2, 3, 5],
    "causal": [True, False],
    "window": [0, 5, 17],
    "softcap": [0.0, 3.0],
    "padding": [False, True],
    "sparse": [False, True],
    "tree": [False, True],
    "mask": [False, True],
    "sinks": [False, True],
}


def pairwise() -> Iterator[dict[str, Any]]:
    """Few cases in which each two options meet with all their values."""
    draw, names = random.Random(0), list(OPTIONS)
    pairs = [(a, x, b, y) for a, b in combinations(names, 2) for x in OPTIONS[a] for y in OPTIONS[b]]
    missing = {pair for pair in pairs if pair != ("sparse", True, "tree", True)}  # a tree is at the end
    while missing:
        a, x, b, y = min(missing, key=repr)
        best, most = {}, -1
        for _ in range(40):
            case = {name: draw.choice(values) for name, values in OPTIONS.items()} | {a: x, b: y}
            if case["sparse"] and case["tree"]:
                case["tree" if "sparse" in (a, b) else "sparse"] = False
            met = sum((a, case[a], b, case[b]) in missing for a, b in combinations(names, 2))
            if met > most:
                best, most = case, met
        missing -= {(a, best[a], b, best[b]) for a, b in combinations(names, 2)}
        yield best


def as_problem(case: dict[str, Any]) -> tuple[Problem, int]:
    """The problem, and in how many parts it is solved."""
    given = dict(case)
    splits, (queries, columns), (heads, kv_heads) = given.pop("splits"), given.pop("shape"), given.pop("heads")
    return Problem(queries=queries, columns=columns, heads=heads, kv_heads=kv_heads, **given), splits


def solve(problem: Problem, splits: int = 1, *, visibility: Visibility | None = None, partial: bool = True) -> Any:
    """What the kernel makes of it."""
    return dense.attend(
        *problem.tensors(),
        scale=problem.scale,
        visibility=visibility or problem.visibility(),
        softcap=problem.softcap,
        sinks=problem.sink_logits(),
        partial=partial,
        tiling=Tiling(block_m=32, block_n=16, warps=1, stages=1, splits=splits),
    )


def check(problem: Problem, splits: int = 1, **given: Any) -> None:
    """Assert that the kernel is as near to the truth as PyTorch is."""
    found = solve(problem, splits, **given)
    for ours, truth, same in zip(found, problem.solve(torch.float64), problem.solve(problem.dtype), strict=True):
        assert_within_budget(ours, truth, same, problem.dtype)


CASES = list(pairwise())


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_parity(case: dict[str, Any]) -> None:
    check(*as_problem(case))
