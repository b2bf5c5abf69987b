"""The Triton kernel over pieces against float64, in Triton's interpreter."""

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from tests.attention import Problem, assert_within_budget, roundings
from tests.internals.attention import Part, Visibility, kernel_calls, merge, no_log, ops, reference, use_tier
from tests.internals.compat import LayerRotation
from tests.internals.top import PiecedKV, PieceTable
from tests.internals.triton import AttentionTiling as Tiling
from tests.internals.triton import Device, dense, mixed, pieces

TOKENS = 16, 37, 1, 5, 22  # of each piece
ROWS = (  # piece, first column, shift: the first piece is shared, and the second row has a gap
    ((0, 0, -1), (1, 16, 0), (3, 53, 1), (2, 58, -1)),
    ((0, 0, -1), (4, 37, 1), (-1, -1, -1), (-1, -1, -1)),
)
COLUMNS, SHIFTS = 59, (3, -40)
ROTATIONS = {
    "half": lambda dim: LayerRotation(1e2 ** -torch.linspace(0, 1, dim // 2), "half", 0),
    "interleaved": lambda dim: LayerRotation(1e2 ** -torch.linspace(0, 1, dim // 2), "interleaved", 0),
    "partial": lambda dim: LayerRotation(1e2 ** -torch.linspace(0, 1, dim // 8), "half", 4),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieced:
    """A problem of which the first columns are in pieces."""

    problem: Problem = field(default_factory=Problem)
    rotation: str | None = "half"
    splits: int = 1

    def whole(self) -> Problem:
        return replace(self.problem, columns=COLUMNS + 3 + self.problem.queries)

    def turning(self) -> LayerRotation:
        assert self.rotation is not None
        return ROTATIONS[self.rotation](self.problem.head_dim)

    def table(self) -> PieceTable:
        draw, problem = torch.Generator().manual_seed(9), self.problem
        keys, values = [], []
        for tokens in TOKENS:  # views of larger buffers
            buffer = torch.randn(2, problem.kv_heads, tokens + 2, problem.head_dim, generator=draw).to(problem.dtype)
            keys.append(buffer[0, :, 1:-1])
            values.append(buffer[1, :, 2:])
        rows = torch.tensor(ROWS[: problem.batch])
        if self.rotation is None:
            rows[..., 2] = -1
            return PieceTable(tuple(keys), tuple(values), rows, COLUMNS)
        rotation, ones = self.turning(), torch.ones(1, 1, problem.head_dim)
        back, forth = (
            torch.cat([rotation.rotate(ones, sign * shift, torch.empty_like(ones))[0] for shift in SHIFTS])
            for sign in (-1, 1)
        )
        partner = rotation.partners(torch.arange(problem.head_dim, dtype=torch.int32))
        return PieceTable(tuple(keys), tuple(values), rows, COLUMNS, (back + forth) / 2, (back - forth) / 2, partner)

    def found(self, table: PieceTable | None = None, visibility: Visibility | None = None) -> Part:
        whole = self.whole()
        call, table = whole.call(visibility=visibility or whole.visibility()), table or self.table()
        assert pieces.can_attend(call.query, table)
        tiling = Tiling(block_m=16, block_n=16, warps=1, stages=1, border_stages=1, splits=self.splits)
        return pieces.attend_pieces(call, table, whole.columns, tiling)


def check(case: Pieced, found: Part) -> None:
    """Assert that a result is within the budget. Queries are rounded when they are turned back."""
    assert all(each.dtype == torch.float32 for each in found)
    whole = case.whole()
    dense = reference.over_pieces(whole.call(), case.table(), whole.columns, torch.float64)
    weights = roundings(whole.dtype)["weights"]
    operands = weights if case.rotation is not None else 0
    assert_within_budget(found, *dense, operands=operands, weights=weights)


BF16, FP16 = torch.bfloat16, torch.float16
CASES = {
    "plain": Pieced(),
    "decode": Pieced(problem=Problem(queries=1, heads=8, dtype=BF16), splits=3),
    "not moved": Pieced(problem=Problem(heads=2, dtype=FP16), rotation=None, splits=2),
    "interleaved": Pieced(problem=Problem(heads=8, kv_heads=1, head_dim=16, dtype=FP16), rotation="interleaved"),
    "partial": Pieced(problem=Problem(head_dim=80, dtype=BF16), rotation="partial", splits=2),
    "window": Pieced(problem=Problem(window=25, queries=3), splits=2),
    "window over a gap": Pieced(problem=Problem(window=9, queries=1, dtype=BF16), splits=5),
    "window, not causal": Pieced(problem=Problem(window=40, causal=False, dtype=FP16)),
    "scattered": Pieced(problem=Problem(sparse=True, queries=11, dtype=BF16), splits=2),
    "scattered, in a window": Pieced(problem=Problem(sparse=True, window=20, heads=8), rotation="interleaved"),
    "padding": Pieced(problem=Problem(padding=True, dtype=FP16), splits=3),
    "padding, scattered": Pieced(problem=Problem(padding=True, sparse=True, head_dim=64, causal=False)),
    "softcap": Pieced(problem=Problem(softcap=3.0, head_dim=128, kv_heads=4, dtype=BF16)),
    "one row": Pieced(problem=Problem(batch=1, queries=40, softcap=3.0, window=50), rotation="partial", splits=5),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_pieces(case: Pieced) -> None:
    check(case, case.found())


def test_keys_are_where_they_were_moved_to() -> None:
    case = Pieced()
    whole, table = case.whole(), case.table()
    keys, values = (torch.zeros(2, 2, COLUMNS, 32) for _ in range(2))
    there = torch.zeros(2, COLUMNS, dtype=torch.bool)
    for row, own in enumerate(ROWS):
        for piece, column, shift in own[: 4 if row == 0 else 2]:
            at, key = slice(column, column + TOKENS[piece]), table.keys[piece]
            by = SHIFTS[shift] if shift >= 0 else 0
            keys[row, :, at] = case.turning().rotate(key, by, torch.empty_like(key))
            values[row, :, at], there[row, at] = table.values[piece], True
    seen = Visibility(causal=False, keep=there)
    truth, _ = reference.attend(whole.call(visibility=seen, partial=True), keys, values)
    torch.testing.assert_close(case.found()[0], truth, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("damage", ["another shift", "no values", "another column", "another window"])
def test_damage_is_found(damage: str) -> None:
    case = Pieced(problem=Problem(window=30, dtype=BF16))
    table, visibility = case.table(), case.whole().visibility()
    if damage == "another shift":
        rows = torch.where(table.rows[..., 2:] >= 0, torch.tensor([0, 0, -1]), 0) + table.rows
        table = replace(table, rows=rows.clamp_min(-1), places=None)
    elif damage == "no values":
        table = replace(table, values=tuple(each * (each.shape[1] != 5) for each in table.values), places=None)
    elif damage == "another column":
        case, table = Pieced(problem=Problem(window=30, dtype=BF16)), replace(table, columns=COLUMNS - 1)
    else:
        visibility = replace(visibility, window=29)
    with pytest.raises(AssertionError, match="off by"):
        check(case, case.found(table, visibility))


def test_pieces_and_what_is_behind_them_make_all() -> None:
    whole = Problem(batch=1, queries=5, columns=COLUMNS + 5)
    key, value = whole.kv()
    cuts = (0, 16, 53, 58, COLUMNS)
    rows = torch.tensor([[(i, column, -1) for i, column in enumerate(cuts[:-1])]])
    spans = list(pairwise(cuts))
    table = PieceTable(*(tuple(each[0, :, a:b] for a, b in spans) for each in (key, value)), rows, COLUMNS)  # type: ignore[arg-type, call-arg]
    call, before = whole.call(partial=True), kernel_calls()
    with use_tier("triton"):
        parts = [
            ops.attend_pieces(call, table, whole.columns),
            ops.attend(call, key[:, :, COLUMNS:], value[:, :, COLUMNS:]),
        ]
    called = kernel_calls() - before
    assert called == {"triton.attend_pieces": 1, "triton.attend": 1}
    found = merge(parts, None, whole.dtype)
    whole.check((found, no_log(found.device)))


@pytest.mark.parametrize("asked", [{}, {"sinks": True, "softcap": 3.0}, {"window": 45}], ids=str)
def test_pieces_and_what_is_behind_them_are_parts_of_one_tensor(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (dense, mixed):  # so that both are split
        monkeypatch.setattr(module, "device_of", lambda device: Device(12, 64 * 1024, interpreted=True))
    whole = Problem(batch=1, queries=5, columns=COLUMNS + 40, **asked)
    key, value = whole.kv()
    cuts = (0, 16, 53, 58, COLUMNS)
    rows = torch.tensor([[(i, column, -1) for i, column in enumerate(cuts[:-1])]])
    own = [tuple(each[0, :, a:b] for a, b in pairwise(cuts)) for each in (key, value)]
    table = PieceTable(own[0], own[1], rows, COLUMNS)
    kv, call = PiecedKV(table, key[:, :, COLUMNS:], value[:, :, COLUMNS:]), whole.call()
    rest = call._replace(sinks=None, partial=True)
    plans = (
        pieces.plan(call, table, Device(12, 64 * 1024, interpreted=True)),
        dense.plan(rest, kv.keys, kv.values),
    )
    assert all(plan.splits > 1 for plan in plans)
    found = mixed.attend(call, rest, kv)
    whole.check((found, no_log(found.device)))


@pytest.mark.daily
@pytest.mark.parametrize("odd", ["address", "dtype"])
def test_an_odd_piece_is_left_to_others(odd: str) -> None:
    whole = Problem(batch=1, queries=2, columns=10)
    buffer = torch.randn(2 * 8 * 32 + 1)
    key = buffer[1:].view(2, 8, 32) if odd == "address" else buffer[:-1].view(2, 8, 32)
    table = PieceTable((key,), (key if odd == "address" else key.half(),), torch.tensor([[(0, 0, -1)]]), 8)
    assert table.places is None
    before = kernel_calls()
    with use_tier("triton"):
        ops.attend_pieces(whole.call(), table, 10)
    assert kernel_calls() - before == {"reference.attend_pieces": 1}
