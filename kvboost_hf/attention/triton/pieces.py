"""Attention in Triton over pieces that lie anywhere on the device, some of them moved to other positions.

Keys stay as they are: with R(d) the rotation by which a piece is moved, `q · R(d) k = R(-d) q · k`, so that a tile of
queries is turned back once for each piece.
"""

from dataclasses import replace
from functools import lru_cache

import torch
import triton
import triton.language as tl

from kvboost_hf.attention.call import AttentionCall, Part
from kvboost_hf.attention.triton.dense import take_block
from kvboost_hf.attention.triton.tile import combine, softmax_end
from kvboost_hf.attention.triton.tiling import (
    Device,
    Tiling,
    device_of,
    empty_parts,
    is_taken,
    padded_dim,
    plan_splits,
    plan_tiling,
    power_of_2,
    round_columns,
)
from kvboost_hf.handles import PieceTable
from kvboost_hf.triton_launch import LaunchArguments, Launcher

_MANY = 128  # pieces, up to which the kernel is compiled once
_MAX_TURNED = 64 * 128  # sums of a program that keeps its queries as they are and as they are turned


def can_attend(query: torch.Tensor, table: PieceTable) -> bool:
    """Whether `attend_pieces` takes these."""
    return (
        is_taken(query, query.shape[3])
        and table.places is not None
        and table.keys[0].dtype == query.dtype
        and query.stride(3) == 1
    )


def attend_pieces(call: AttentionCall, table: PieceTable, total: int, tiling: Tiling | None = None) -> Part:
    """Compute attention over pieces, as `ops.attend_pieces` describes it. Without `tiling` it takes that of `plan`."""
    query = call.query
    tiling = tiling or plan(call, table, device_of(query.device))
    out, lse = empty_parts(query, tiling.splits)
    launch(call, table, total, out, lse, tiling)
    return (out[0], lse[0]) if tiling.splits == 1 else combine(out, lse, sinks=None, dtype=torch.float32)


def plan(call: AttentionCall, table: PieceTable, device: Device) -> Tiling:
    """Choose the tiling of a call: parts are of as many columns, in however many pieces."""
    query, window = call.query, call.visibility.window
    (batch, heads, queries, head_dim), kv_heads = query.shape, table.keys[0].shape[0]
    columns = min(table.columns, window + queries) if window else table.columns
    shape = batch * kv_heads, queries * (heads // kv_heads), head_dim, round_columns(columns)
    return _plan(*shape, query.itemsize, device, table.cos is not None)


@lru_cache(maxsize=1024)
def _plan(heads: int, rows: int, head_dim: int, columns: int, itemsize: int, device: Device, turns: bool) -> Tiling:
    padded = padded_dim(head_dim)
    tiling = plan_tiling(min(rows, _MAX_TURNED // padded) if turns else rows, head_dim, itemsize, device)
    if turns and tiling.block_m * padded >= _MAX_TURNED // 2:
        stages, border_stages = min(tiling.stages, 2), min(tiling.border_stages, 2)
        tiling = replace(tiling, block_n=min(tiling.block_n, 32), warps=8, stages=stages, border_stages=border_stages)
    programs = -(-rows // tiling.block_m) * heads
    per_processor = 2 if tiling.block_m <= 64 else 1
    return replace(tiling, splits=plan_splits(programs, columns, tiling.block_n, device, per_processor=per_processor))


def launch(
    call: AttentionCall, table: PieceTable, total: int, out: torch.Tensor, lse: torch.Tensor, tiling: Tiling
) -> None:
    """Write the parts of `attend_pieces` into `out` [splits, …] and `lse` [splits, …]."""
    given = launch_arguments(call, table, total, out, lse, tiling)
    query = call.query
    grid = tiling.grid(query, table.keys[0].shape[0])
    _launch(grid, query.device, given, warps=tiling.warps, stages=tiling.stages)


def launch_arguments(
    call: AttentionCall, table: PieceTable, total: int, out: torch.Tensor, lse: torch.Tensor, tiling: Tiling
) -> LaunchArguments:
    """Return the arguments of `fwd_pieces`."""
    query, visibility, softcap = call.query, call.visibility, call.softcap
    assert call.scale > 0
    assert table.places is not None
    keep = visibility.keep.contiguous().view(torch.uint8) if visibility.keep is not None else None
    columns = visibility.columns.contiguous() if visibility.columns is not None else None
    _, heads, queries, head_dim = query.shape
    kv_heads, pieces = table.keys[0].shape[0], table.places.shape[1]
    return (
        (query, table.places, table.cos, table.sin, table.partner, out, lse, keep, columns),
        query.stride()[:3],
        (
            *(keep.shape[1] if keep is not None else 0, kv_heads, queries),
            *(pieces, table.columns, total, visibility.window or None),
        ),
        (call.scale / softcap if softcap else float(call.scale), softcap or None),
        (
            *(visibility.causal, heads // kv_heads, head_dim, max(_MANY, power_of_2(pieces))),
            *(tiling.block_m, tiling.block_n, padded_dim(head_dim), tiling.border_stages, 16 // query.itemsize),
        ),
    )


@triton.jit(
    do_not_specialize="keep_batch kv_heads queries pieces pieced total window".split(),
    do_not_specialize_on_alignment=["keep"],
)
def fwd_pieces(
    query, places, cos, sin, partner, out, lse, keep, columns,
    query_batch, query_head, query_row, keep_batch, kv_heads, queries, pieces, pieced, total, window, scale, softcap,
    CAUSAL: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, PIECES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BORDER_STAGES: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK_M rows of one head of keys, and one part of the columns; row r is query r // GROUPS."""
    batch, kv_head = (tl.program_id(1) // kv_heads).to(tl.int64), (tl.program_id(1) % kv_heads).to(tl.int64)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    i, head = row // GROUPS, kv_head * GROUPS + row % GROUPS
    there = i < queries
    own = i + total - queries
    if columns is not None:
        own = tl.load(columns + batch * queries + i, mask=there, other=0)
    earliest, latest = tl.min(tl.where(there, own, total), 0), tl.max(tl.where(there, own, 0), 0)
    low, high = 0, pieced
    if CAUSAL:
        high = tl.minimum(pieced, latest + 1)
    if window is not None:
        low = tl.maximum(earliest - window + 1, 0)
    part = tl.cdiv(tl.cdiv(high - low, BLOCK_N), tl.num_programs(2)) * BLOCK_N
    low += part * tl.program_id(2)
    high = tl.minimum(high, low + part)

    d = tl.arange(0, BLOCK_D)
    at = query + batch * query_batch + head[:, None] * query_head + i.to(tl.int64)[:, None] * query_row
    inside = there[:, None] & (d < HEAD_DIM)[None, :]
    q = tl.load(at + d[None, :], mask=inside, other=0.0)
    if keep is not None:
        keep += batch * keep_batch
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)

    # Pieces are in order: of those that begin before `high`, the last one that begins at or before `low` is the first.
    places += batch * pieces * 9
    piece = tl.arange(0, PIECES)
    starts = tl.load(places + piece * 9 + 7, mask=piece < pieces, other=-1)
    last = tl.sum(((starts >= 0) & (starts < high)).to(tl.int32), 0)
    first = tl.maximum(tl.sum(((starts >= 0) & (starts <= low)).to(tl.int32), 0) - 1, 0)
    for index in range(first, last):
        place = places + index * 9
        start = tl.load(place + 7).to(tl.int32)
        begin = tl.maximum(start, low)
        end = tl.maximum(tl.minimum(start + tl.load(place + 6).to(tl.int32), high), begin)
        turned = q
        if cos is not None:
            shift = tl.load(place + 8)
            moves = d < tl.where(shift >= 0, HEAD_DIM, 0)
            cosine = tl.load(cos + shift * HEAD_DIM + d, mask=moves, other=1.0)
            sine = tl.load(sin + shift * HEAD_DIM + d, mask=moves, other=0.0)
            other = tl.load(at + tl.load(partner + d, mask=d < HEAD_DIM, other=0)[None, :], mask=inside, other=0.0)
            turned = (q.to(tl.float32) * cosine[None, :] + other.to(tl.float32) * sine[None, :]).to(q.dtype)
        key, key_row = _first(place, 0, start, kv_head, query.dtype.element_ty, ALIGNED)
        value, value_row = _first(place, 1, start, kv_head, query.dtype.element_ty, ALIGNED)

        # Of [begin, end), all rows see [plain, plain + wholly).
        plain, wholly = begin, end - begin
        if CAUSAL:
            wholly = tl.minimum(end, earliest + 1) - begin
        if window is not None:
            plain += tl.cdiv(tl.maximum(tl.minimum(latest - window + 1, end) - begin, 0), BLOCK_N) * BLOCK_N
            wholly -= plain - begin
        wholly = tl.maximum(wholly, 0) // BLOCK_N * BLOCK_N
        for column in range(plain, plain + wholly, BLOCK_N):
            sums, peak, norm = take_block(
                sums, peak, norm, turned, key, value, keep, None, None, own, there, column, end, end, key_row,
                value_row, window, scale, softcap, CAUSAL, HEAD_DIM, HEAD_DIM, BLOCK_N, BLOCK_D, BLOCK_D, False,
            )  # fmt: skip
        for at_border in tl.range(begin, end - wholly, BLOCK_N, num_stages=BORDER_STAGES):
            column = at_border + tl.where(at_border >= plain, wholly, 0)
            sums, peak, norm = take_block(
                sums, peak, norm, turned, key, value, keep, None, None, own, there, column, end, end, key_row,
                value_row, window, scale, softcap, CAUSAL, HEAD_DIM, HEAD_DIM, BLOCK_N, BLOCK_D, BLOCK_D, True,
            )  # fmt: skip

    found, log = softmax_end(sums, peak, norm, None)
    batches, heads = tl.num_programs(1) // kv_heads, kv_heads * GROUPS
    batch += tl.program_id(2).to(tl.int64) * batches
    tl.store(out + ((batch * queries + i) * heads + head)[:, None] * HEAD_DIM + d[None, :], found, mask=inside)
    tl.store(lse + (batch * heads + head) * queries + i, log, mask=there)


_launch = Launcher(fwd_pieces)


@triton.jit
def _first(place, which: tl.constexpr, start, head, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """Where column 0 of a head of keys (0) or values (1) would be, and the stride of its columns."""
    # The hints are where they survive: on what is loaded, and not on a sum, which the compiler may put differently.
    whole = tl.multiple_of(tl.load(place + which).to(tl.pointer_type(dtype)), 16)
    of_head = tl.multiple_of(tl.load(place + 2 + 2 * which), ALIGNED)
    row = tl.multiple_of(tl.load(place + 3 + 2 * which), ALIGNED)
    return whole + (head * of_head - start * row), row
