"""The CPU tier against float64: whatever queries may see, in each dtype, and over codes."""

from dataclasses import replace

import pytest
import torch

from kvboost_hf.attention import kernel_calls, ops, reference
from kvboost_hf.attention.cpu import attend
from kvboost_hf.attention.visibility import Visibility
from tests.attention import Problem, assert_within_budget

PROBLEMS = {
    "suffix": Problem(),
    "square": Problem(queries=40),
    "decode": Problem(queries=1),
    "multi-head": Problem(kv_heads=4),
    "multi-query": Problem(kv_heads=1),
    "everything": Problem(causal=False),
    "window": Problem(queries=300, columns=400, window=50),
    "window, decode": Problem(queries=1, window=5),
    "window, not causal": Problem(window=5, causal=False),
    "padding": Problem(queries=20, columns=80, padding=True),
    "padding, few queries": Problem(queries=3, padding=True),
    "padding, square": Problem(queries=40, padding=True),
    "padding, not causal": Problem(queries=20, padding=True, causal=False),
    "padding, window": Problem(queries=40, window=9, padding=True),
    "sparse": Problem(queries=200, columns=400, sparse=True),
    "sparse, window": Problem(queries=200, columns=400, sparse=True, window=50),
    "sparse, padding": Problem(queries=12, sparse=True, padding=True),
    "sparse, one": Problem(queries=1, sparse=True),
    "tree": Problem(tree=True),
    "tree, window": Problem(tree=True, window=12),
    "tree, padding": Problem(tree=True, padding=True),
    "tree, square": Problem(queries=40, tree=True, padding=True),
    "mask": Problem(mask=True),
    "mask, decode": Problem(queries=1, mask=True),
    "mask, padding": Problem(mask=True, padding=True, sparse=True),
    "sinks": Problem(sinks=True),
    "sinks, padding": Problem(queries=40, sinks=True, padding=True),
    "softcap": Problem(softcap=5.0),
    "softcap, all of it": Problem(queries=40, softcap=5.0, padding=True, sparse=True, window=9, sinks=True),
    "softcap, tree": Problem(softcap=5.0, tree=True, padding=True),
    "softcap, mask": Problem(softcap=5.0, mask=True),
}


def solve(problem: Problem, visibility: Visibility | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """What the CPU tier makes of it."""
    return attend(
        *problem.tensors(),
        scale=problem.scale,
        visibility=visibility or problem.visibility(),
        softcap=problem.softcap,
        sinks=problem.sink_logits(),
        partial=True,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", PROBLEMS)
def test_parity(name: str, dtype: torch.dtype) -> None:
    problem = replace(PROBLEMS[name], dtype=dtype)
    for found, truth, same in zip(solve(problem), problem.solve(torch.float64), problem.solve(dtype), strict=True):
        assert found.dtype == torch.float32
        assert_within_budget(found, truth, same, dtype)
