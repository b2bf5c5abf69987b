"""Pieces on a CPU, read once for all rows that have them, against attention over copies in float64."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.internals.attention import AttentionCall, Visibility, attention, holders, kernel_calls, reference, use_tier
from tests.internals.top import KVHandle, PiecedKV, PieceTable, make_reach, make_tree

TOKENS = (30, 7, 70, 1)  # of pieces
ROWS = [[0, 2], [0, 1, 3], [], [0, 2], [2]]  # the pieces of each row
OWN = (5, 9, 2, 9, 1)  # columns behind them
SINKS = torch.linspace(-1, 1, 4)


@dataclass
class Layer(torch.nn.Module):
    """What transformers hands to attention."""

    is_causal: bool = True

    def __hash__(self) -> int:
        return 0


def make(kv_heads: int, value_dim: int, queries: int, dtype: torch.dtype) -> tuple[torch.Tensor, PiecedKV]:
    torch.manual_seed(0)
    keys, values = ([torch.randn(kv_heads, n, dim).to(dtype) for n in TOKENS] for dim in (16, value_dim))
    own_keys, own_values = (torch.randn(len(ROWS), kv_heads, max(OWN), dim).to(dtype) for dim in (16, value_dim))
    rows = torch.full((len(ROWS), 3, 3), -1)
    for i, row in enumerate(ROWS):
        column = 0
        for j, piece in enumerate(row):
            rows[i, j] = torch.tensor([piece, column, -1])
            column += TOKENS[piece]
    keep = torch.arange(max(OWN)) >= max(OWN) - torch.tensor(OWN)[:, None]
    table = PieceTable(tuple(keys), tuple(values), rows, 100)
    return torch.randn(len(ROWS), 4, queries, 16).to(dtype), PiecedKV(table, own_keys, own_values, keep)


def truth(query: torch.Tensor, kv: PiecedKV, row: int, softcap: float, sinks: torch.Tensor | None) -> torch.Tensor:
    """Of one row, by copies."""
    parts = [kv.table.keys[piece] for piece in ROWS[row]], [kv.table.values[piece] for piece in ROWS[row]]
    whole = [
        torch.cat([*pieces, own[row, :, max(OWN) - OWN[row] :]], dim=1)[None].double()
        for pieces, own in zip(parts, (kv.keys, kv.values), strict=True)
    ]
    asked = query[row : row + 1].double()
    call = AttentionCall(asked, 0.25, Visibility(), softcap, sinks)
    out, _ = reference.attend(call, *whole, compute=torch.float64)
    return out[0]


def attend(query: torch.Tensor, kv: PiecedKV, softcap: float, sinks: torch.Tensor | None) -> torch.Tensor:
    columns = kv.table.columns + kv.keys.shape[2]
    key, value = (KVHandle(kv, lambda: pytest.fail("copied"), like, columns) for like in (kv.keys, kv.values))
    return attention(Layer(), query, key, value, None, scaling=0.25, softcap=softcap, s_aux=sinks)[0]


@pytest.mark.daily
@pytest.mark.parametrize(("softcap", "sinks"), [(0.0, None), (2.0, None), (0.0, SINKS), (2.0, SINKS)])
@pytest.mark.parametrize(
    ("kv_heads", "value_dim", "tier"),
    [(4, 16, "cpu"), (2, 16, "cpu"), (1, 16, "cpu"), (2, 8, "cpu"), (2, 16, "reference")],
)
def test_a_token_for_each_row(
    kv_heads: int, value_dim: int, softcap: float, sinks: torch.Tensor | None, tier: str
) -> None:
    query, kv = make(kv_heads, value_dim, 1, torch.float32)
    before = kernel_calls()
    with use_tier(tier):  # type: ignore[arg-type]
        found = attend(query, kv, softcap, sinks)
    assert (kernel_calls() - before)["cpu.decode"] == (tier == "cpu")
    for row in range(len(ROWS)):
        torch.testing.assert_close(found[row].double(), truth(query, kv, row, softcap, sinks), rtol=1e-5, atol=1e-5)
    other = PiecedKV(kv.table, kv.keys, kv.values, torch.ones_like(kv.keep))
    assert not torch.allclose(found, attend(query, other, softcap, sinks), atol=1e-3)


@pytest.mark.daily
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_a_token_for_each_row_in_half_precision(softcap: float, dtype: torch.dtype) -> None:
    """Not by one sum of all, in which small weights would be lost."""
    query, kv = make(2, 16, 1, dtype)
    before = kernel_calls()
    found = attend(query, kv, softcap, None)
    assert (kernel_calls() - before)["cpu.attend_pieces"] == 1
    for row in range(len(ROWS)):
        torch.testing.assert_close(found[row].double(), truth(query, kv, row, softcap, None), rtol=2e-2, atol=2e-2)


@pytest.mark.daily
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_several_tokens_for_each_row(softcap: float) -> None:
    query, kv = make(2, 16, 3, torch.float32)
    kv = PiecedKV(kv.table, kv.keys, kv.values)  # queries are the last columns: no padding before them
    before = kernel_calls()
    found = attend(query, kv, softcap, None)
    assert (kernel_calls() - before)["cpu.attend_pieces"] == 1
    with use_tier("reference"):
        torch.testing.assert_close(found, attend(query, kv, softcap, None), rtol=1e-4, atol=1e-5)


@pytest.mark.daily
@pytest.mark.parametrize(("tree", "window"), [(False, 0), (False, 20), (True, 20)])
def test_queries_that_are_told_their_columns(tree: bool, window: int) -> None:
    """They read pieces where they are if all of them see all of these, and are never answered wrongly."""
    query, kv = make(2, 16, 3, torch.float32)
    rows = torch.tensor([[[0, 0, -1], [2, 30, -1]]] * len(ROWS))  # 100 columns without padding
    kv = PiecedKV(PieceTable(kv.table.keys, kv.table.values, rows, 100), kv.keys, kv.values)
    whole = [
        torch.cat([torch.cat([parts[0], parts[2]], dim=1).expand(len(ROWS), -1, -1, -1), own], dim=2)
        for parts, own in ((kv.table.keys, kv.keys), (kv.table.values, kv.values))
    ]
    columns = torch.tensor([[102, 105, 108]]).expand(len(ROWS), -1)
    bits = torch.tensor([[1, 3, 5]]).expand(len(ROWS), -1)
    mask = make_tree(bits, columns) if tree else make_reach(torch.ones(len(ROWS), 109) > 0, window, "cpu", columns)
    how: dict[str, Any] = {"scaling": 0.25, "sliding_window": window}
    expected = attention(Layer(), query, whole[0], whole[1], mask, **how)[0]
    copied: list[int] = []
    for kept in (kv, kv.table):  # K/V of another kind
        handles = [KVHandle(kept, lambda like=like: copied.append(1) or like, like, 109) for like in whole]  # type: ignore
        torch.testing.assert_close(attention(Layer(), query, handles[0], handles[1], mask, **how)[0], expected)
    assert len(copied) == (4 if window else 2)


def test_rows_that_have_a_piece_are_found_together() -> None:
    _, kv = make(2, 16, 1, torch.float32)
    assert {(piece, column): (place, count) for piece, column, place, count in holders(kv.table.rows)} == {
        (0, 0): ([0, 1, 3], 3),
        (2, 30): ([0, 3], 2),
        (1, 30): (slice(1, 2), 1),
        (3, 37): (slice(1, 2), 1),
        (2, 0): (slice(4, 5), 1),
    }
