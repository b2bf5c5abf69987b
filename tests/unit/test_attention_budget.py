"""The budget of attention kernels: what is right is within it on any machine, and what is wrong is far beyond it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.attention import Problem, assert_within_budget, shares_of_budget
from tests.internals.attention import Part, Visibility, reference

pytestmark = pytest.mark.daily

PROBLEM = Problem(queries=20, columns=60, head_dim=64)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BF16 = torch.bfloat16


def most(found: Part, problem: Problem) -> float:
    """The largest share of the budget."""
    return max(share.max().item() for share in shares_of_budget(found, problem.call(), *problem.kv()))


def attend(
    problem: Problem,
    *,
    logits_in: torch.dtype = torch.float32,
    weights_in: torch.dtype | None = None,
    sums_in: torch.dtype = torch.float32,
    norm_of_rounded: bool = False,
    backwards: bool = False,
) -> Part:
    """A kernel that takes one column after the other, and rounds what it is told to.

    Args:
        problem: Without anything but causality.
        logits_in: Dtype that logits are rounded to.
        weights_in: Dtype that weights are rounded to; that of the problem by default.
        sums_in: Dtype of the sums of weights and of products with values, after each column.
        norm_of_rounded: Whether the rounded weights are added up, as some kernels do.
        backwards: Whether the last column is the first.
    """
    query, key, value = (each.float() for each in problem.tensors())
    groups = problem.heads // problem.kv_heads
    key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    seen = problem.visibility().dense(problem.queries, problem.columns, query.device)
    logits = (query @ key.mT * problem.scale).to(logits_in).float().masked_fill(~seen, float("-inf"))
    peak = logits.amax(dim=-1)
    weights = torch.exp(logits - peak[..., None])
    rounded = weights.to(weights_in or problem.dtype).float()
    norm, sums = torch.zeros_like(peak), torch.zeros_like(query)
    for column in range(problem.columns)[:: -1 if backwards else 1]:
        norm = (norm + (rounded if norm_of_rounded else weights)[..., column]).to(sums_in).float()
        sums = (sums + rounded[..., column, None] * value[:, :, None, column]).to(sums_in).float()
    return (sums / norm[..., None]).transpose(1, 2), peak + norm.log()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [20, 60, 700])
@pytest.mark.parametrize("backwards", [False, True])
def test_any_order_is_within_it(dtype: torch.dtype, columns: int, backwards: bool) -> None:
    problem = replace(PROBLEM, dtype=dtype, columns=columns)
    assert most(attend(problem, backwards=backwards), problem) < 1


def off_by_one(problem: Problem) -> Part:
    """Queries see one column less."""
    columns = torch.arange(problem.columns - problem.queries, problem.columns, dtype=torch.int32) - 1
    call = problem.call(visibility=Visibility(columns=columns.expand(problem.batch, -1)), partial=True)
    return reference.attend(call, *problem.kv())


def without_a_column(problem: Problem) -> Part:
    keep = torch.ones(problem.batch, problem.columns, dtype=torch.bool)
    keep[:, 17] = False
    return reference.attend(problem.call(visibility=Visibility(keep=keep), partial=True), *problem.kv())


WRONG: dict[str, Callable[[Problem], Part]] = {
    "a column is left out": without_a_column,
    "the mask is off by one": off_by_one,
    "the scale is off by 1%": lambda problem: reference.attend(
        problem.call(scale=1.01 * problem.scale, partial=True), *problem.kv()
    ),
    "values are of another head": lambda problem: reference.attend(
        problem.call(partial=True), problem.kv()[0], problem.kv()[1].flip(1)
    ),
    "sums in bfloat16": lambda problem: attend(problem, sums_in=BF16),
    "logits in bfloat16": lambda problem: attend(problem, logits_in=BF16),
    "logits, and then weights, in bfloat16": lambda problem: attend(problem, logits_in=BF16, weights_in=BF16),
    "weights in 8 bits": lambda problem: attend(problem, weights_in=torch.float8_e5m2),
    "the norm is of rounded weights": lambda problem: attend(problem, weights_in=BF16, norm_of_rounded=True),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_far_beyond_it(wrong: str, dtype: torch.dtype) -> None:
    problem = replace(PROBLEM, dtype=dtype)
    assert most(WRONG[wrong](problem), problem) > 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_weights_of_fewer_bits_are_found_by_the_attention_alone(dtype: torch.dtype) -> None:
    problem = replace(PROBLEM, dtype=dtype)
    attention, log = shares_of_budget(attend(problem, weights_in=BF16), problem.call(), *problem.kv())
    assert attention.max() > 3
    assert log.max() < 1


def test_each_number_has_its_own_budget() -> None:
    """One small number that is off is found beside large ones."""
    problem = replace(PROBLEM, queries=1, columns=40)
    key, value = problem.kv()
    value[..., 0] *= 1e-6
    out, lse = reference.attend(problem.call(partial=True), key, value)
    wrong = out.clone()
    wrong[..., 0] *= 1.01
    assert_within_budget((out, lse), problem.call(), key, value)
    with pytest.raises(AssertionError, match=r"attention is off by [\d.]+ times its budget"):
        assert_within_budget((wrong, lse), problem.call(), key, value)
