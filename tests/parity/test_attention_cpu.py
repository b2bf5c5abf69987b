"""The CPU tier against float64: whatever queries may see, in each dtype, and over codes."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.attention import UNIT, Problem, assert_within_budget, of_codes, within
from tests.internals.attention import AttentionCall, Visibility, codes, dense, kernel_calls, ops, reference
from tests.internals.attention import cpu_attend as attend
from tests.internals.top import CodePlanes

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
    call = problem.call(visibility=visibility or problem.visibility(), partial=True)
    return attend(call, *problem.kv())


def rounding(dtype: torch.dtype) -> dict[str, Any]:
    """What PyTorch's kernel rounds: weights, and its result, of which there is one for each part.

    With AVX-512 its exponentials are of a polynomial in 16 bits: `fexp_u20`, which is off by 1.1e-4.
    """
    return {"weights": 2, "exponential": 1.2e-4 if dtype.itemsize == 2 else 40 * UNIT}  # `exp_u20`: 20 units


@pytest.mark.parametrize("in_parts", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", PROBLEMS)
def test_parity(name: str, dtype: torch.dtype, in_parts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if in_parts:  # as large calls are
        monkeypatch.setattr(dense, "_SMALL", 0)
    problem = replace(PROBLEMS[name], dtype=dtype)
    found = solve(problem)
    assert all(each.dtype == torch.float32 for each in found)
    problem.check(found, **rounding(dtype))


@pytest.mark.daily
@pytest.mark.parametrize("mask", ["none", "of ones", "padding"])
@pytest.mark.parametrize("window", [0, 5, 60])
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_step_in_buffers_of_a_fixed_size(
    dtype: torch.dtype, kv_heads: int, window: int, mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads no column that is not held, and takes one call of PyTorch's kernel unless there is padding."""
    problem, held = Problem(queries=1, kv_heads=kv_heads, window=window, dtype=dtype), 23
    keep = None if mask == "none" else torch.ones(2, problem.columns, dtype=torch.bool)
    if keep is not None and mask == "padding":
        keep[1, :20] = False
    key, value = problem.kv()
    key[:, :, held:] = value[:, :, held:] = torch.nan
    general: list[object] = []
    monkeypatch.setattr(dense, "_attend", lambda *given, inner=dense._attend: general.append(given) or inner(*given))
    seen = Visibility(True, window, keep, torch.full((2, 1), held - 1, dtype=torch.int32))
    found, _ = attend(problem.call(visibility=seen), key, value)
    assert bool(general) is (mask == "padding")
    assert found.dtype == dtype
    call = problem.call(visibility=Visibility(True, window, keep[:, :held] if keep is not None else None))
    (truth, _), (allowed, _) = within(call, key[:, :, :held], value[:, :, :held], **rounding(dtype) | {"weights": 3})
    assert bool(((found.double() - truth).abs() <= allowed).all())
    value[:, :, held - 1] = 0  # as if it were not read
    (other, _), _ = within(call, key[:, :, :held], value[:, :, :held])
    assert bool(((other - truth).abs() > allowed).any())


def planes(form: str, tokens: int = 32, blocks: int = 9, dim: int = 32) -> tuple[CodePlanes, CodePlanes]:
    """Keys and values of two rows with two heads, as codes that nobody encoded."""
    draw = torch.Generator().manual_seed(3)
    method, _, given = form.partition(":")
    bits = int(given)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.rand(2, blocks, 2, *shape, generator=draw) + 0.1

    def drawn() -> torch.Tensor:
        return torch.randint(256, (2, blocks, 2, tokens, dim * bits // 8), generator=draw, dtype=torch.uint8)

    if method == "kivi":
        size = 24 if bits == 2 else 16
        groups = -(-tokens // size), -(-dim // size)
        of_keys, of_values = ((groups[0], dim), (tokens, groups[1]))
        keys, values = (
            CodePlanes(bits, drawn(), numbers(*shape) - 1, numbers(*shape) / 2**bits, size)
            for shape in (of_keys, of_values)
        )
        return keys, values
    codebook = torch.randn(2**bits, generator=draw)
    rotation = torch.linalg.qr(torch.randn(dim, dim, generator=draw)).Q
    cos, sin = torch.randn(2, tokens, dim, generator=draw).unbind(0)
    partner = torch.arange(dim).roll(dim // 2).int()
    turn = (cos, sin, partner) if method == "turned" else ()
    keys = CodePlanes(
        bits,
        drawn(),
        None,
        None,
        0,
        numbers(tokens),
        codebook,
        rotation,
        *((numbers(dim), *turn) if method != "flat" else ()),
    )
    return keys, CodePlanes(bits, drawn(), None, None, 0, numbers(tokens), codebook, rotation)


FORMS = ["kivi:8", "kivi:4", "kivi:2", *(f"turned:{bits}" for bits in (1, 2, 3, 4, 8)), "mean:4", "flat:3"]


@pytest.mark.daily
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("form", FORMS)
def test_parity_over_codes(form: str, queries: int, softcap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codes, "NUMBERS", 2 * 2 * 32 * 32 * 4)  # so that there are several parts
    query = Problem(queries=queries, heads=4).tensors()[0]
    lengths = torch.tensor([32, 32, 32, 32, 0, 0, 0, 0, 17], dtype=torch.int32)
    given = (AttentionCall(query, 0.1, Visibility(), softcap), *planes(form), lengths)
    before = kernel_calls()["cpu.attend_codes"]
    found = ops.attend_codes(*given)
    assert kernel_calls()["cpu.attend_codes"] == before + 1
    assert_within_budget(
        found, *reference.over_codes(*given, torch.float64), **of_codes(*given[1:3]), **rounding(query.dtype)
    )


def test_bytes_of_codes_are_looked_up_at_once_where_they_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """In any form the result is right; those of usual heads have codes unpacked nowhere."""
    unpacked: list[int] = []
    unpack = reference.unpack
    usual = [("turned:4", 32), ("turned:2", 32), ("flat:3", 32)]
    for form, dim in [*usual, ("turned:1", 32), ("turned:8", 32), ("mean:4", 20), ("flat:2", 20)]:
        query = Problem(queries=1, heads=4, head_dim=dim).tensors()[0]
        lengths = torch.tensor([32] * 8 + [17], dtype=torch.int32)
        given = (AttentionCall(query, 0.1, Visibility()), *planes(form, dim=dim), lengths)
        truth = reference.over_codes(*given, torch.float64)
        with monkeypatch.context() as patch:
            patch.setattr(reference, "unpack", lambda *given: (unpacked.append(1), unpack(*given))[1])
            found = ops.attend_codes(*given)
        assert bool(unpacked) == ((form, dim) not in usual)
        assert_within_budget(found, *truth, **of_codes(*given[1:3]), **rounding(query.dtype))
        unpacked.clear()


@pytest.mark.daily
@pytest.mark.parametrize("hidden", ["the first column", "the last column"])
def test_a_column_that_is_not_read_is_noticed(hidden: str) -> None:
    problem = Problem()
    lost = 0 if hidden == "the first column" else problem.columns - 1
    keep = torch.ones(problem.batch, problem.columns, dtype=torch.bool)
    keep[:, lost] = False
    with pytest.raises(AssertionError, match="off by"):
        problem.check(solve(problem, Visibility(keep=keep)), **rounding(problem.dtype))


def test_columns_in_any_order() -> None:
    problem = Problem(queries=200, columns=400, sparse=True, window=50)
    columns = problem.visibility().columns
    assert columns is not None
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    seen = Visibility(window=50, columns=columns[:, order])
    call = problem.call(query=problem.tensors()[0][:, :, order], visibility=seen, partial=True)
    assert_within_budget(attend(call, *problem.kv()), call, *problem.kv(), **rounding(problem.dtype))


@pytest.mark.daily
@pytest.mark.parametrize("keys_first", [True, False])
def test_other_dimensions_of_values(keys_first: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    dims = (48, 32) if keys_first else (32, 48)
    query, key, value = (torch.randn(2, 4, 40, dim, generator=draw) for dim in (dims[0], *dims))
    call = AttentionCall(query, 0.2, Visibility())
    assert_within_budget(attend(call, key, value), call, key, value, **rounding(query.dtype))


def test_the_dtype_of_the_query_comes_back_and_calls_are_counted() -> None:
    problem = Problem(dtype=torch.bfloat16)
    before = kernel_calls()["cpu.attend"]
    out, lse = ops.attend(problem.call(), *problem.kv())
    assert out.dtype == torch.bfloat16
    assert out.is_contiguous()
    assert lse.numel() == 0
    assert kernel_calls()["cpu.attend"] == before + 1


def test_what_is_hidden_is_not_computed() -> None:
    """Columns out of reach of all queries are no numbers, which any product with them would show."""
    problem = Problem(queries=300, columns=1000, window=20)
    key, value = problem.kv()
    key[:, :, :600], value[:, :, :600] = float("nan"), float("nan")
    out, _ = attend(problem.call(), key, value)
    assert out.isfinite().all()
    columns = torch.arange(5, 305, dtype=torch.int32)[None].expand(2, -1) * 2
    key, value = problem.kv()
    key[:, :, 700:], value[:, :, 700:] = float("nan"), float("nan")
    out, _ = attend(problem.call(visibility=Visibility(columns=columns)), key, value)
    assert out.isfinite().all()


def test_no_columns() -> None:
    empty = (each[:, :, :0] for each in Problem().kv())
    out, lse = attend(Problem().call(visibility=Visibility(causal=False), partial=True), *empty)
    assert not out.any()
    assert (lse == float("-inf")).all()


@pytest.mark.daily
@pytest.mark.parametrize("asked", [{}, {"softcap": 3.0}, {"padding": True}, {"sparse": True}, {"window": 9}], ids=str)
def test_no_queries(asked: dict[str, Any]) -> None:
    out, lse = solve(Problem(queries=0, **asked))
    assert out.shape == (2, 0, 4, 32)
    assert lse.shape == (2, 4, 0)


def test_a_sink_of_no_weight() -> None:
    keep = torch.ones(2, 40, dtype=torch.bool)
    keep[1] = False
    kv, call = Problem().kv(), Problem().call(visibility=Visibility(keep=keep), partial=True)
    out, lse = attend(call._replace(sinks=torch.full((4,), float("-inf"))), *kv)
    without, _ = attend(call, *kv)
    assert torch.equal(out, without)
    assert (lse[1] == float("-inf")).all()
