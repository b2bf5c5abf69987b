"""Attention in Triton over codes, which are decoded in registers, a tile at a time.

The kernel rotates nothing: queries are rotated before it as keys were, and its result is rotated back after it.
Scales of vectors are factors of logits and of weights, and the mean of a block's keys is added to logits.
"""

from dataclasses import replace
from functools import cache, lru_cache
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

from kvboost_hf.attention.call import AttentionCall, Part
from kvboost_hf.attention.triton.code_tiles import (
    block_of,
    columns_of,
    dim_of,
    load_factors,
    load_grouped,
    load_halfwords,
    load_pairs,
    start_of,
)
from kvboost_hf.attention.triton.combine import combine
from kvboost_hf.attention.triton.halfwords import count_of, instructions, load_table, numbers, scaled
from kvboost_hf.attention.triton.tile import LOG2E, softmax_end, softmax_step, tanh
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
)
from kvboost_hf.handles import CodePlanes
from kvboost_hf.triton_dot import dot
from kvboost_hf.triton_launch import Arguments, Launcher

_BITS = (1, 2, 3, 4, 8)
_MAX_ROWS = 32  # of a program: more would leave its registers no room for what codes become
_MIN_RUN = 32  # columns: 8 for each warp


def can_attend(query: torch.Tensor, keys: CodePlanes, values: CodePlanes) -> bool:
    """Whether `attend_codes` takes these."""
    head_dim = query.shape[3]
    whole = keys.least is None or _block_of(keys.group_size, keys.codes.shape[3]) >= 16
    return (
        is_taken(query, head_dim)
        and head_dim % 16 == 0
        and keys.bits in _BITS
        and values.bits in _BITS
        and values.mean is None
        and whole
        and _are_readable((keys.codes, keys.least, keys.step, values.codes, values.least, values.step))
    )


def _are_readable(planes: tuple[torch.Tensor | None, ...]) -> bool:
    """Whether `start_of` takes their strides, and they can be read as words of two numbers, or as halfwords."""
    for each in planes:
        if each is None:
            continue
        if each.data_ptr() % 4 or (each.storage_offset() | each.stride(0) | each.stride(1)) % 2:
            return False
        if each.stride(1) >= 2**31:  # scales and means have less room in a block than codes
            return False
    return True


def attend_codes(
    call: AttentionCall, keys: CodePlanes, values: CodePlanes, lengths: torch.Tensor, tiling: Tiling | None = None
) -> Part:
    """Compute attention over codes, as `ops.attend_codes` describes it. Without `tiling` it takes that of `plan`."""
    query = call.query
    tiling = tiling or plan(query, keys, values, device_of(query.device))
    out, lse = empty_parts(query, tiling.splits)
    launch(call, keys, values, lengths, out, lse, tiling)
    found, log = (out[0], lse[0]) if tiling.splits == 1 else combine(out, lse, sinks=None, dtype=torch.float32)
    return found if values.rotation is None else found @ values.rotation, log


def plan(query: torch.Tensor, keys: CodePlanes, values: CodePlanes, device: Device) -> Tiling:
    """Choose the tiling of a call."""
    (batch, heads, queries, head_dim), (_, blocks, kv_heads, tokens, _) = query.shape, keys.codes.shape
    shape = batch * kv_heads, queries * (heads // kv_heads), head_dim, blocks, tokens
    most = _block_of(keys.group_size if keys.least is not None else tokens, tokens)
    return _plan(
        *shape, most, _run_of(values.bits, values.group_size, head_dim), keys.mean is not None, query.itemsize, device
    )


@lru_cache(maxsize=1024)
def _plan(
    heads: int,
    rows: int,
    head_dim: int,
    blocks: int,
    tokens: int,
    most: int,
    run: int,
    turned: bool,  # the mean of keys, which takes registers, and time enough for one tile ahead to arrive
    itemsize: int,
    device: Device,
) -> Tiling:
    tiling = plan_tiling(min(rows, _MAX_ROWS), head_dim, itemsize, device)
    largest = 64 if tiling.block_m * head_dim <= 16 * 128 else 32
    block_n = min(tiling.block_n, largest, most)
    programs = -(-rows // tiling.block_m) * heads
    columns = blocks * -(-tokens // block_n) * block_n
    splits = plan_splits(programs, columns, block_n, device, per_processor=2 if turned else 3)
    warps = min(tiling.warps, block_of(run) // 8)  # with 8 columns each
    stages = min(tiling.stages, 2) if turned else tiling.stages
    return replace(tiling, block_n=block_n, warps=warps, stages=stages, splits=splits)


def _block_of(group: int, tokens: int) -> int:
    """The most tokens, a power of two, of a tile that lies in one group of keys."""
    return power_of_2(tokens) if group >= tokens else group & -group


@cache
def _run_of(bits: int, group: int, head_dim: int) -> int:
    """The columns of values that are taken at a time: those of one group if they fill a product, else all."""
    columns: int = columns_of(head_dim, bits)
    run = gcd(columns, group // 2)
    return run if run >= _MIN_RUN else columns


def launch(
    call: AttentionCall,
    keys: CodePlanes,
    values: CodePlanes,
    lengths: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    tiling: Tiling,
) -> None:
    """Write the parts of `attend_codes`, before values are rotated back, into `out` [splits, …] and `lse`."""
    given = launch_arguments(call, keys, values, lengths, out, lse, tiling)
    query = call.query
    grid = tiling.grid(query, keys.codes.shape[2])
    _launch(grid, query.device, given, warps=tiling.warps, stages=tiling.stages)


def launch_arguments(
    call: AttentionCall,
    keys: CodePlanes,
    values: CodePlanes,
    lengths: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    tiling: Tiling,
) -> Arguments:
    """Return the arguments of `fwd_codes`."""
    query, softcap = call.query, call.softcap
    assert call.scale > 0
    assert keys.least is None or tiling.block_n <= _block_of(keys.group_size, keys.codes.shape[3])
    (_, heads, queries, head_dim), (_, blocks, kv_heads, tokens, _) = query.shape, keys.codes.shape
    query = query.contiguous()
    rotated = query
    if keys.rotation is not None:
        rotated = (query.float() @ keys.rotation.mT).to(query.dtype)
    cos = keys.cos.to(query.dtype) if keys.cos is not None else None
    sin = keys.sin.to(query.dtype) if keys.sin is not None else None
    packed = query.itemsize == 2 and not knobs.runtime.interpret and not torch.version.hip
    packed = packed and (keys.step is None or keys.step.dtype == query.dtype)
    packed = packed and (values.step is None or values.step.dtype == query.dtype)
    key_ptx = instructions(keys.bits, query.dtype, codebook=keys.codebook is not None) if packed else None
    value_ptx = instructions(values.bits, query.dtype, codebook=values.codebook is not None) if packed else None
    return (
        (
            *(query if keys.mean is not None else None, rotated),
            *(*_planes(keys), _plane(keys.mean), cos, sin, keys.partner if cos is not None else None),
            *(*_planes(values), lengths, out, lse),
        ),
        (),
        (kv_heads, queries, blocks),
        (call.scale / softcap if softcap else float(call.scale), softcap or None),
        (
            *(tokens, heads // kv_heads, head_dim, keys.bits, keys.group_size, values.bits),
            *(min(values.group_size, head_dim), _run_of(values.bits, values.group_size, head_dim)),
            *(tiling.block_m, tiling.block_n, padded_dim(head_dim), key_ptx, value_ptx),
        ),
    )


def _planes(codes: CodePlanes) -> tuple[Any, ...]:
    halfwords = codes.codes.view(torch.int16)
    return _plane(halfwords), _plane(codes.least), _plane(codes.step), _plane(codes.scale), codes.codebook


def _plane(x: torch.Tensor | None) -> tuple[torch.Tensor, int, int] | None:
    """A plane [batch, blocks, …], with the two strides that are free."""
    return (x, x.stride(0), x.stride(1)) if x is not None else None


@triton.jit(do_not_specialize=["kv_heads", "queries", "blocks"])
def fwd_codes(
    query, rotated,
    key_codes, key_least, key_step, key_scale, key_codebook, mean, cos, sin, partner,
    value_codes, value_least, value_step, value_scale, value_codebook,
    lengths, out, lse, kv_heads, queries, blocks, scale, softcap,
    TOKENS: tl.constexpr, GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr,
    KEY_BITS: tl.constexpr, KEY_GROUP: tl.constexpr,
    VALUE_BITS: tl.constexpr, VALUE_GROUP: tl.constexpr, VALUE_RUN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    KEY_PTX: tl.constexpr, VALUE_PTX: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK_M rows of one head of keys, and one part of the tiles; row r is query r // GROUPS.

    A tile is BLOCK_N tokens of a block. First come the first ones of all blocks, then the second ones, and so on: what
    belongs to places in blocks is loaded once for many blocks.

    Dimensions are in the order of `halfwords`: there is one product for each nibble and byte of a column.
    """
    dtype: tl.constexpr = rotated.dtype.element_ty
    batch, kv_head = (tl.program_id(1) // kv_heads).to(tl.int64), tl.program_id(1) % kv_heads
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    i, head = row // GROUPS, kv_head * GROUPS + row % GROUPS
    there = i < queries
    heads = kv_heads * GROUPS
    at = ((batch * heads + head) * queries + i)[:, None] * HEAD_DIM

    key_columns: tl.constexpr = columns_of(HEAD_DIM, KEY_BITS)
    key_column = tl.arange(0, block_of(key_columns))
    key_groups: tl.constexpr = 0 if key_least is None else (TOKENS + KEY_GROUP - 1) // KEY_GROUP
    key_table, value_table = None, None
    if key_codebook is not None:
        key_table = load_table(key_codebook, KEY_BITS, dtype, KEY_PTX is not None)
    if value_codebook is not None:
        value_table = load_table(value_codebook, VALUE_BITS, dtype, VALUE_PTX is not None)
    q: tl.tuple = ()
    for n in tl.static_range(count_of(KEY_BITS)):
        inside = there[:, None] & (key_column < key_columns)[None, :]
        dim = dim_of(HEAD_DIM, n, 0) + 2 * key_column
        q += (tl.load(rotated + at + dim[None, :], mask=inside, other=0.0),)
    d = tl.arange(0, BLOCK_D)
    plain: tl.tensor = None
    partners: tl.tensor = None
    if cos is not None:
        partners = tl.load(partner + d, mask=d < HEAD_DIM, other=0)
    if mean is not None:
        plain = tl.load(query + at + d[None, :], mask=there[:, None] & (d < HEAD_DIM)[None, :], other=0.0)

    runs: tl.constexpr = columns_of(HEAD_DIM, VALUE_BITS) // VALUE_RUN
    value_column = tl.arange(0, block_of(VALUE_RUN))
    sums: tl.tuple = ()
    for _ in tl.static_range(runs * count_of(VALUE_BITS)):
        sums += (tl.zeros([BLOCK_M, block_of(VALUE_RUN)], tl.float32),)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)

    tiles = tl.cdiv(TOKENS, BLOCK_N) * blocks
    part = tl.cdiv(tiles, tl.num_programs(2))
    low = part * tl.program_id(2)
    high = tl.minimum(low + part, tiles)
    for place in range(low // blocks, tl.cdiv(high, blocks)):
        first = place * BLOCK_N
        token = first + tl.arange(0, BLOCK_N)
        cosines, sines = None, None
        if cos is not None:
            turn = token[None, :] * HEAD_DIM + d[:, None]
            turns = (token < TOKENS)[None, :] & (d < HEAD_DIM)[:, None]
            cosines = tl.load(cos + turn, mask=turns, other=0.0)
            sines = tl.load(sin + turn, mask=turns, other=0.0)
        begin, end = tl.maximum(low - place * blocks, 0), tl.minimum(high - place * blocks, blocks)
        factors = load_factors(
            lengths, key_scale, value_scale, batch, begin, kv_head, token, TOKENS, BLOCK_N
        )  # fmt: skip
        for block in range(begin, end):
            now = factors
            # Loaded for the next block: they are too small for what copies tiles ahead.
            factors = load_factors(
                lengths, key_scale, value_scale, batch, tl.minimum(block + 1, end - 1), kv_head, token, TOKENS, BLOCK_N
            )  # fmt: skip
            h = load_halfwords(
                key_codes, batch, block, kv_head, token[None, :], key_column[:, None], 0, key_columns,
                TOKENS, BLOCK_N, HEAD_DIM, KEY_BITS,
            )  # fmt: skip
            k = numbers(h, key_table, KEY_BITS, dtype, KEY_PTX)
            scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            if key_least is not None:
                group = (kv_head * key_groups + first // KEY_GROUP) * HEAD_DIM
                steps, leasts = start_of(key_step, batch, block) + group, start_of(key_least, batch, block) + group
                for nibble in tl.static_range(count_of(KEY_BITS) // 2):
                    at_dim = nibble * (HEAD_DIM // 2)
                    step = load_pairs(
                        steps, at_dim, key_column, key_columns, key_step[0].dtype.element_ty, KEY_PTX is not None
                    )
                    least = load_pairs(
                        leasts, at_dim, key_column, key_columns, key_least[0].dtype.element_ty, KEY_PTX is not None
                    )
                    for byte in tl.static_range(2):
                        codes = k[2 * nibble + byte]
                        keys = scaled(codes, step[byte], least[byte], dtype, KEY_PTX is not None)
                        scores = dot(q[2 * nibble + byte], keys, scores)
            else:
                for n in tl.static_range(count_of(KEY_BITS)):
                    scores = dot(q[n], k[n], scores)
            if key_scale is not None:
                scores *= now[-1].to(tl.float32)[None, :]
            if mean is not None:
                of_head = start_of(mean, batch, block) + kv_head * HEAD_DIM
                center = tl.load(of_head + d, mask=d < HEAD_DIM, other=0.0).to(dtype)[None, :]
                if cos is not None:
                    own = scaled(plain, center, tl.zeros_like(center), dtype, KEY_PTX is not None)
                    center = tl.load(of_head + partners, mask=d < HEAD_DIM, other=0.0).to(dtype)[None, :]
                    other = scaled(plain, center, tl.zeros_like(center), dtype, KEY_PTX is not None)
                    scores = dot(other, sines, dot(own, cosines, scores))
                else:
                    scores += tl.sum(plain.to(tl.float32) * center.to(tl.float32), 1)[:, None]
            factor = scale * LOG2E
            if softcap is not None:
                scores, factor = tanh(scores * scale), softcap * LOG2E
            scores = tl.where((token < tl.minimum(now[0], TOKENS))[None, :], scores, float("-inf"))
            weights, fade, peak = softmax_step(scores, factor, peak)
            norm = norm * fade[:, None] + weights

            if value_scale is not None:
                weights *= now[1].to(tl.float32)[None, :]
            weights = weights.to(dtype)
            summed: tl.tuple = ()
            for run in tl.static_range(runs):
                h = load_halfwords(
                    value_codes, batch, block, kv_head, token[:, None], value_column[None, :], run * VALUE_RUN,
                    VALUE_RUN, TOKENS, BLOCK_N, HEAD_DIM, VALUE_BITS,
                )  # fmt: skip
                v = numbers(h, value_table, VALUE_BITS, dtype, VALUE_PTX)
                for nibble in tl.static_range(count_of(VALUE_BITS) // 2):
                    if value_least is not None:
                        step, least = load_grouped(
                            start_of(value_step, batch, block), start_of(value_least, batch, block), kv_head, token,
                            value_column, dim_of(HEAD_DIM, 2 * nibble, run * VALUE_RUN),
                            TOKENS, BLOCK_N, HEAD_DIM, VALUE_GROUP, VALUE_RUN, VALUE_PTX is not None,
                        )  # fmt: skip
                    for byte in tl.static_range(2):
                        values = v[2 * nibble + byte]
                        if value_least is not None:
                            values = scaled(values, step, least, dtype, VALUE_PTX is not None)
                        before = sums[run * count_of(VALUE_BITS) + 2 * nibble + byte] * fade[:, None]
                        summed += (dot(weights, values, before),)
            sums = summed

    norm = tl.sum(norm, 1)
    part_batch = batch + tl.program_id(2).to(tl.int64) * (tl.num_programs(1) // kv_heads)
    at = ((part_batch * queries + i) * heads + head)[:, None] * HEAD_DIM
    for run in tl.static_range(runs):
        for n in tl.static_range(count_of(VALUE_BITS)):
            found = sums[run * count_of(VALUE_BITS) + n]
            found, log = softmax_end(found, peak, norm, None)
            dim = dim_of(HEAD_DIM, n, run * VALUE_RUN) + 2 * value_column
            inside = there[:, None] & (value_column < VALUE_RUN)[None, :]
            tl.store(out + at + dim[None, :], found, mask=inside)
            if run == 0 and n == 0:
                tl.store(lse + (part_batch * heads + head) * queries + i, log, mask=there)


_launch = Launcher(fwd_codes)
