"""The dense Triton kernel against float64, in Triton's interpreter: every pair of what can be asked of it."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from triton import knobs

from tests.attention import Problem, assert_within_budget, roundings
from tests.internals.attention import AttentionCall, Part, Visibility, kernel_calls, merge, ops, use_tier
from tests.internals.triton import MAX_SPLITS, Device, blocks_of, combine, dense, plan_splits
from tests.internals.triton import AttentionTiling as Tiling
from tests.internals.triton import attention_plan_tiling as plan_tiling

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
    missing = {(a, x, b, y) for a, b in combinations(names, 2) for x in OPTIONS[a] for y in OPTIONS[b]}
    while missing:
        a, x, b, y = min(missing, key=repr)
        best, most = {}, -1
        for _ in range(40):
            case = {name: draw.choice(values) for name, values in OPTIONS.items()} | {a: x, b: y}
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


Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def given(
    problem: Problem, visibility: Visibility | None, tensors: Tensors | None
) -> tuple[AttentionCall, tuple[torch.Tensor, torch.Tensor]]:
    """A call, and keys and values."""
    query, *kv = tensors or problem.tensors()
    return problem.call(query=query, visibility=visibility or problem.visibility(), partial=True), (kv[0], kv[1])


def solve(
    problem: Problem,
    splits: int = 1,
    *,
    visibility: Visibility | None = None,
    tensors: Tensors | None = None,
    sinks: torch.Tensor | None = None,
) -> Part:
    """What the kernel makes of it."""
    call, kv = given(problem, visibility, tensors)
    if sinks is not None:
        call = call._replace(sinks=sinks)
    tiling = Tiling(block_m=32, block_n=16, warps=1, stages=1, border_stages=1, splits=splits)
    return dense.attend(call, *kv, tiling)


def assert_right(
    found: Part, problem: Problem, *, visibility: Visibility | None = None, tensors: Tensors | None = None
) -> None:
    """Assert that a result is within the budget."""
    call, kv = given(problem, visibility, tensors)
    assert_within_budget(found, call, *kv, **roundings(problem.dtype))


CASES = list(pairwise())


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_parity(case: dict[str, Any]) -> None:
    problem, splits = as_problem(case)
    assert_right(solve(problem, splits), problem)


@pytest.mark.parametrize(
    "asked", [{"window": 9}, {"padding": True}, {"tree": True}, {"softcap": 3.0}, {"sinks": True}], ids=str
)
def test_a_wrong_answer_is_found(asked: dict[str, Any]) -> None:
    """What a kernel gives that ignores an option is out of the budget."""
    found = solve(Problem())
    with pytest.raises(AssertionError, match=r"off by|what is infinite"):
        assert_right(found, Problem(**asked))


@pytest.mark.parametrize("partial", [False, True])
def test_the_operator_calls_the_kernel(partial: bool) -> None:
    problem = Problem(dtype=torch.float16, sinks=True)
    before = kernel_calls()
    with use_tier("triton"):
        out, lse = ops.attend(problem.call(partial=partial), *problem.kv())
    assert kernel_calls() - before == {"triton.attend": 1}
    assert out.dtype == (torch.float32 if partial else torch.float16)
    assert out.is_contiguous()
    assert lse.numel() == (2 * 4 * 7 if partial else 0)
    problem.check((out, lse))


def test_views_of_larger_buffers() -> None:
    """Keys as a cache holds them, in part, and values of fewer dimensions."""
    problem = Problem(head_dim=48)
    query, key, value = problem.tensors()
    buffer = torch.full((2, 64, 2, 80), float("nan"))
    buffer[:, 5:45, :, 16:64] = key.transpose(1, 2)
    held = buffer[:, 5:45, :, 16:64].transpose(1, 2)
    assert_right(
        solve(problem, tensors=(query, held, value[..., :24])), problem, tensors=(query, key, value[..., :24])
    )


@pytest.mark.parametrize("splits", [1, 3])
def test_columns_that_nobody_sees_are_not_read(splits: int) -> None:
    """Whole blocks before the window and behind the last query hold what would spoil any sum."""
    problem = Problem(queries=5, columns=120)
    query, key, value = problem.tensors()
    columns = torch.tensor([[70, 66, 68, 75, 64], [71, 70, 69, 67, 66]], dtype=torch.int32)  # in any order
    visibility, spoilt = Visibility(window=20, columns=columns), (query, key.clone(), value.clone())
    for each in spoilt[1:]:
        each[:, :, :32] = each[:, :, 80:] = float("nan")
    assert_right(solve(problem, splits, visibility=visibility, tensors=spoilt), problem, visibility=visibility)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("sink", [None, 0.5, float("-inf")])
def test_a_query_that_sees_nothing_gets_zeros(splits: int, sink: float | None) -> None:
    keep = torch.ones(2, 40, dtype=torch.bool)
    keep[1] = False
    sinks = None if sink is None else torch.full((4,), sink)
    out, lse = solve(Problem(), splits, visibility=Visibility(keep=keep), sinks=sinks)
    assert out[0].abs().min() > 0
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert lse[1].eq(float("-inf") if sink is None else sink).all()


def test_a_mask_of_its_own_for_each_head() -> None:
    problem = Problem(columns=33)
    mask = torch.rand(1, 4, 7, 40, generator=torch.Generator().manual_seed(0))[..., :33] > 0.3
    visibility = Visibility(causal=False, mask=mask)
    assert_right(solve(problem, visibility=visibility), problem, visibility=visibility)


@pytest.mark.parametrize("splits", [1, 5])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_combine_is_merge(splits: int, with_sinks: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    parts, logs = (torch.randn(splits, 2, *shape, generator=draw) for shape in ((3, 4, 80), (4, 3)))
    logs[0, 0] = float("-inf")
    parts[0, 0] = 0
    sinks = torch.randn(4, generator=draw) if with_sinks else None
    out, lse = combine(parts, logs, sinks=sinks, dtype=torch.float32)
    torch.testing.assert_close(out, merge(list(zip(parts, logs, strict=True)), sinks, torch.float32))
    rest = logs if sinks is None else torch.cat([logs, sinks[None, None, :, None].expand(1, 2, 4, 3)])
    torch.testing.assert_close(lse, torch.logsumexp(rest, dim=0))


def test_parts_are_merged_by_few_kernels() -> None:
    """Compiling one in the middle of an answer holds up a token by a second."""
    blocks = [blocks_of(splits, 128) for splits in range(2, MAX_SPLITS + 1)]
    assert all(block_p >= splits for splits, (block_p, _, _) in enumerate(blocks, start=2))
    assert len(set(blocks)) == 2


def test_what_the_kernel_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = Problem().tensors()
    assert dense.can_attend(query, key, value)
    assert not dense.can_attend(query.double(), key.double(), value.double())
    assert not dense.can_attend(query, key.half(), value)
    assert not dense.can_attend(query, key.mT.contiguous().mT, value)
    wide, many = torch.zeros(1, 1, 1, 320), torch.zeros(1).expand(1 << 15, 2, 1, 16)
    assert not dense.can_attend(wide, wide, wide)
    assert not dense.can_attend(many, many, many)
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    assert not dense.can_attend(query, key, value)


@pytest.mark.daily
@pytest.mark.parametrize("device", [H100, A100, RTX])
@pytest.mark.parametrize("programs", [1, 8, 40, 131, 264, 5000])
@pytest.mark.parametrize("columns", [1, 64, 4096, 131072])
def test_splits_keep_processors_busy_and_are_worth_merging(device: Device, programs: int, columns: int) -> None:
    splits = plan_splits(programs, columns, 64, device)
    assert 1 <= splits <= MAX_SPLITS
    assert splits == 1 or programs * splits <= 2 * device.processors
    assert splits == 1 or columns > (splits - 1) * 128
    if columns == 131072 and programs <= device.processors:
        assert programs * min(2 * splits, MAX_SPLITS) > device.processors or splits == MAX_SPLITS


@pytest.mark.daily
@pytest.mark.parametrize("device", [H100, A100, RTX])
@pytest.mark.parametrize("dim", [16, 64, 80, 128, 256])
def test_tiles_fit(device: Device, dim: int) -> None:
    for rows in (1, 4, 32, 64, 4096):
        for itemsize in (2, 4):
            tiling = plan_tiling(rows, dim, itemsize, device)
            padded = max(16, 1 << (dim - 1).bit_length())
            held = padded * itemsize * (tiling.block_m + 2 * tiling.block_n * tiling.stages)
            assert held <= device.shared_bytes
            assert tiling.block_m < 2 * max(rows, 16)


@pytest.mark.parametrize("window", [0, 20])
def test_columns_behind_the_queries_are_not_read(window: int) -> None:
    """A cache of a fixed size hides most of its columns: parts that have none of the others say nothing."""
    problem = Problem(queries=1, columns=160, heads=4, kv_heads=2, window=window)
    query, key, value = problem.tensors()
    columns = torch.full((len(query), 1), 37, dtype=torch.int32)
    expected = solve(problem, visibility=replace(problem.visibility(), columns=columns))
    start = 48 if knobs.runtime.interpret else 64  # what is behind the block of the query
    key[:, :, start:] = value[:, :, start:] = float("nan")
    if window:
        key[:, :, : 37 - window - 16] = value[:, :, : 37 - window - 16] = float("nan")
    found = solve(problem, 5, visibility=replace(problem.visibility(), columns=columns), tensors=(query, key, value))
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
