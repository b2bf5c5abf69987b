"""Attention over keys and values that are codes, which become numbers in registers, a block at a time.

Nothing is rotated there: queries are rotated as the keys were, before, and what is found is rotated back as values
are, behind. Scales of vectors are factors of logits and of weights, and the mean of a block's keys adds to logits.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from kvboost_hf.attention.merge import Part
from kvboost_hf.attention.triton.combine import combine
from kvboost_hf.attention.triton.tile import LOG2E, softmax_end, softmax_step, tanh
from kvboost_hf.attention.triton.tiling import (
    Device,
    Tiling,
    device_of,
    is_taken,
    padded_dim,
    plan_splits,
    plan_tiling,
    power_of_2,
)
from kvboost_hf.handles import CodePlanes
from kvboost_hf.triton_dot import dot
from kvboost_hf.triton_launch import Arguments, Launcher

_BITS = (1, 2, 3, 4, 8)
_MAX_ROWS = 32  # of a program: more would leave its registers no room for what codes become


def can_attend(query: torch.Tensor, keys: CodePlanes, values: CodePlanes) -> bool:
    """Whether `attend_codes` takes these."""
    head_dim = query.shape[3]
    whole = keys.least is None or _block_of(keys.group_size, keys.codes.shape[3]) >= 16
    grouped = values.least is None or values.group_size >= head_dim or _is_power_of_2(values.group_size)
    return (
        is_taken(query, head_dim)
        and head_dim % 16 == 0
        and keys.bits in _BITS
        and values.bits in _BITS
        and values.mean is None
        and whole
        and grouped
    )


def attend_codes(
    query: torch.Tensor,
    keys: CodePlanes,
    values: CodePlanes,
    lengths: torch.Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    tiling: Tiling | None = None,
) -> Part:
    """See `ops.attend_codes`, with a `scale` above 0. Without `tiling` it takes that of `plan`."""
    tiling = tiling or plan(query, keys, device_of(query.device))
    batch, heads, queries, head_dim = query.shape
    out = query.new_empty((tiling.splits, batch, queries, heads, head_dim), dtype=torch.float32)
    lse = query.new_empty((tiling.splits, batch, heads, queries), dtype=torch.float32)
    launch(query, keys, values, lengths, out, lse, scale=scale, softcap=softcap, tiling=tiling)
    found, log = (out[0], lse[0]) if tiling.splits == 1 else combine(out, lse, sinks=None, dtype=torch.float32)
    return found if values.rotation is None else found @ values.rotation, log


def plan(query: torch.Tensor, keys: CodePlanes, device: Device) -> Tiling:
    """The tiling that `attend_codes` takes by itself."""
    (batch, heads, queries, head_dim), (_, blocks, kv_heads, tokens, _) = query.shape, keys.codes.shape
    shape = batch * kv_heads, queries * (heads // kv_heads), head_dim, blocks, tokens
    most = _block_of(keys.group_size if keys.least is not None else tokens, tokens)
    return _plan(*shape, most, query.itemsize, device)


@lru_cache(maxsize=1024)
def _plan(
    heads: int, rows: int, head_dim: int, blocks: int, tokens: int, most: int, itemsize: int, device: Device
) -> Tiling:
    tiling = plan_tiling(min(rows, _MAX_ROWS), head_dim, itemsize, device)
    largest = 64 if tiling.block_m * head_dim <= 16 * 128 else 32
    block_n = min(tiling.block_n, largest, most)
    programs = -(-rows // tiling.block_m) * heads
    columns = blocks * -(-tokens // block_n) * block_n
    splits = plan_splits(programs, columns, block_n, device, per_processor=2)
    return replace(tiling, block_n=block_n, splits=splits)


def _block_of(group: int, tokens: int) -> int:
    """The most tokens, a power of two, of a tile that lies in one group of keys."""
    return power_of_2(tokens) if group >= tokens else group & -group


def _is_power_of_2(x: int) -> bool:
    return x & (x - 1) == 0


def launch(
    query: torch.Tensor,
    keys: CodePlanes,
    values: CodePlanes,
    lengths: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    scale: float,
    softcap: float,
    tiling: Tiling,
) -> None:
    """Write the parts of `attend_codes`, before values are rotated back, into `out` [splits, …] and `lse`."""
    given = launch_arguments(query, keys, values, lengths, out, lse, scale=scale, softcap=softcap, tiling=tiling)
    (batch, heads, queries, _), kv_heads = query.shape, keys.codes.shape[2]
    grid = (-(-queries * (heads // kv_heads) // tiling.block_m), batch * kv_heads, tiling.splits)
    _launch(grid, query.device, given, warps=tiling.warps, stages=tiling.stages)


def launch_arguments(
    query: torch.Tensor,
    keys: CodePlanes,
    values: CodePlanes,
    lengths: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    scale: float,
    softcap: float,
    tiling: Tiling,
) -> Arguments:
    """What `fwd_codes` is called with."""
    assert scale > 0
    assert keys.least is None or tiling.block_n <= _block_of(keys.group_size, keys.codes.shape[3])
    (_, heads, queries, head_dim), (_, blocks, kv_heads, tokens, _) = query.shape, keys.codes.shape
    query = query.contiguous()
    rotated = query
    if keys.rotation is not None:
        rotated = (query.float() @ keys.rotation.mT).to(query.dtype)
    cos = keys.cos.to(query.dtype) if keys.cos is not None else None
    sin = keys.sin.to(query.dtype) if keys.sin is not None else None
    padded = padded_dim(head_dim)
    return (
        (
            *(query if keys.mean is not None else None, rotated),
            *(*_planes(keys), _plane(keys.mean), cos, sin, keys.partner if cos is not None else None),
            *(*_planes(values), lengths, out, lse),
        ),
        (),
        (kv_heads, queries, blocks),
        (scale / softcap if softcap else float(scale), softcap or None),
        (
            *(tokens, heads // kv_heads, head_dim, keys.bits, keys.group_size, values.bits),
            *(padded if values.group_size >= head_dim else values.group_size, tiling.block_m, tiling.block_n, padded),
        ),
    )


def _planes(codes: CodePlanes) -> tuple[Any, ...]:
    return _plane(codes.codes), _plane(codes.least), _plane(codes.step), _plane(codes.scale), codes.codebook


def _plane(x: torch.Tensor | None) -> tuple[torch.Tensor, int, int] | None:
    """A plane [batch, blocks, …], with the two strides that are free."""
    return (x, x.stride(0), x.stride(1)) if x is not None else None


@triton.jit(do_not_specialize=["kv_heads", "queries", "blocks"])
def fwd_codes(
    query,
    rotated,
    key_codes,
    key_least,
    key_step,
    key_scale,
    key_codebook,
    mean,
    cos,
    sin,
    partner,
    value_codes,
    value_least,
    value_step,
    value_scale,
    value_codebook,
    lengths,
    out,
    lse,
    kv_heads,
    queries,
    blocks,
    scale,
    softcap,
    TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KEY_BITS: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    VALUE_GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One program for BLOCK_M rows of one head of keys, and one part of the tiles; row r is query r // GROUPS.

    A tile is BLOCK_N tokens of a block. First come the first ones of all blocks, then the second ones, and so on: what
    belongs to places in blocks is loaded once for many blocks.
    """
    batch, kv_head = (tl.program_id(1) // kv_heads).to(tl.int64), tl.program_id(1) % kv_heads
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    i, head = row // GROUPS, kv_head * GROUPS + row % GROUPS
    there = i < queries
    d = tl.arange(0, BLOCK_D)
    heads = kv_heads * GROUPS
    at = ((batch * heads + head) * queries + i)[:, None] * HEAD_DIM + d[None, :]
    inside = there[:, None] & (d < HEAD_DIM)[None, :]
    q = tl.load(rotated + at, mask=inside, other=0.0)
    plain = q
    if mean is not None:
        plain = tl.load(query + at, mask=inside, other=0.0)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)

    tiles = tl.cdiv(TOKENS, BLOCK_N) * blocks
    part = tl.cdiv(tiles, tl.num_programs(2))
    low = part * tl.program_id(2)
    high = tl.minimum(low + part, tiles)
    for place in range(low // blocks, tl.cdiv(high, blocks)):
        first = place * BLOCK_N
        token = first + tl.arange(0, BLOCK_N)
        known = token < TOKENS
        cosines, sines = None, None
        if cos is not None:
            turn = token[:, None] * HEAD_DIM + d[None, :]
            turns = known[:, None] & (d < HEAD_DIM)[None, :]
            cosines = tl.load(cos + turn, mask=turns, other=0.0)
            sines = tl.load(sin + turn, mask=turns, other=0.0)
        for block in range(tl.maximum(low - place * blocks, 0), tl.minimum(high - place * blocks, blocks)):
            codes = load_codes(_start(key_codes, batch, block), kv_head, token, d, TOKENS, HEAD_DIM, KEY_BITS)
            if key_least is not None:
                key_groups: tl.constexpr = (TOKENS + KEY_GROUP - 1) // KEY_GROUP
                at_group = (kv_head * key_groups + first // KEY_GROUP) * HEAD_DIM + d
                least = tl.load(_start(key_least, batch, block) + at_group, mask=d < HEAD_DIM, other=0.0)
                step = tl.load(_start(key_step, batch, block) + at_group, mask=d < HEAD_DIM, other=0.0)
                k = as_float(codes) * step.to(tl.float32)[None, :] + least.to(tl.float32)[None, :]
                scores = dot(q, tl.trans(k.to(q.dtype)))
            else:
                scores = dot(q, tl.trans(look_up(codes, key_codebook, q.dtype, 0, KEY_BITS)))
                size = tl.load(_start(key_scale, batch, block) + kv_head * TOKENS + token, mask=known, other=0.0)
                scores *= size.to(tl.float32)[None, :]
            if mean is not None:
                of_head = _start(mean, batch, block) + kv_head * HEAD_DIM
                own = plain.to(tl.float32) * tl.load(of_head + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
                if cos is not None:
                    swapped = tl.load(partner + d, mask=d < HEAD_DIM, other=0)
                    other = tl.load(of_head + swapped, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
                    other = plain.to(tl.float32) * other[None, :]
                    scores += dot(own.to(q.dtype), tl.trans(cosines)) + dot(other.to(q.dtype), tl.trans(sines))
                else:
                    scores += tl.sum(own, 1)[:, None]
            factor = scale * LOG2E
            if softcap is not None:
                scores, factor = tanh(scores * scale), softcap * LOG2E
            seen = token < tl.minimum(tl.load(lengths + block), TOKENS)
            scores = tl.where(seen[None, :], scores, float("-inf"))
            weights, fade, peak, norm = softmax_step(scores, factor, peak, norm)

            codes = load_codes(_start(value_codes, batch, block), kv_head, token, d, TOKENS, HEAD_DIM, VALUE_BITS)
            if value_least is not None:
                value_groups: tl.constexpr = (HEAD_DIM + VALUE_GROUP - 1) // VALUE_GROUP
                group = tl.arange(0, BLOCK_D // VALUE_GROUP)
                at_group = (kv_head * TOKENS + token)[:, None] * value_groups + group[None, :]
                within = known[:, None] & (group < value_groups)[None, :]
                least = tl.load(_start(value_least, batch, block) + at_group, mask=within, other=0.0).to(tl.float32)
                step = tl.load(_start(value_step, batch, block) + at_group, mask=within, other=0.0).to(tl.float32)
                v = tl.reshape(as_float(codes), [BLOCK_N, BLOCK_D // VALUE_GROUP, VALUE_GROUP])
                v = tl.reshape(v * step[:, :, None] + least[:, :, None], [BLOCK_N, BLOCK_D]).to(q.dtype)
            else:
                v = look_up(codes, value_codebook, q.dtype, 0, VALUE_BITS)
                size = tl.load(_start(value_scale, batch, block) + kv_head * TOKENS + token, mask=known, other=0.0)
                weights *= size.to(tl.float32)[None, :]
            sums = sums * fade[:, None] + dot(weights.to(q.dtype), v)

    found, log = softmax_end(sums, peak, norm, None)
    batch += tl.program_id(2).to(tl.int64) * (tl.num_programs(1) // kv_heads)
    tl.store(out + ((batch * queries + i) * heads + head)[:, None] * HEAD_DIM + d[None, :], found, mask=inside)
    tl.store(lse + (batch * heads + head) * queries + i, log, mask=there)


_launch = Launcher(fwd_codes)


@triton.jit
def _start(plane, batch, block):
    """Where the numbers of a block are."""
    return plane[0] + batch * plane[1] + tl.cast(block, tl.int64) * plane[2]


@triton.jit
def load_codes(start, head, token, d, TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, BITS: tl.constexpr):
    """The codes [tokens, dims] of a block, int32, as `CodePlanes` says they are packed."""
    width: tl.constexpr = HEAD_DIM * BITS // 8
    row = start + (head * TOKENS + token)[:, None] * width
    inside = (token < TOKENS)[:, None] & (d < HEAD_DIM)[None, :]
    if BITS == 3:
        return _load_part(row, d, inside, HEAD_DIM, 2) + 4 * _load_part(row + HEAD_DIM // 4, d, inside, HEAD_DIM, 1)
    return _load_part(row, d, inside, HEAD_DIM, BITS)


@triton.jit
def _load_part(row, d, inside, HEAD_DIM: tl.constexpr, BITS: tl.constexpr):
    width: tl.constexpr = HEAD_DIM * BITS // 8
    found = tl.load(row + (d % width)[None, :], mask=inside, other=0).to(tl.int32)
    return (found >> (BITS * (d // width))[None, :]) & ((1 << BITS) - 1)


@triton.jit
def as_float(codes):
    """Codes as float32, by way of the last bits of 2 ** 23: a conversion takes a GPU four times as long."""
    return (codes | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def look_up(codes, codebook, dtype: tl.constexpr, FIRST: tl.constexpr, BITS: tl.constexpr):
    """What the codes stand for, chosen bit by bit: the codebook stays in registers."""
    if BITS > 1:
        lower = look_up(codes, codebook, dtype, FIRST, BITS - 1)
        upper = look_up(codes, codebook, dtype, FIRST + (1 << (BITS - 1)), BITS - 1)
    else:
        lower, upper = tl.load(codebook + FIRST).to(dtype), tl.load(codebook + FIRST + 1).to(dtype)
    return tl.where((codes & (1 << (BITS - 1))) != 0, upper, lower)
