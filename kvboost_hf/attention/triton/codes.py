"""Attention in Triton over codes, which are decoded in registers, a tile at a time.

The kernel rotates nothing: queries are rotated before it as keys were, and its result is rotated back after it.

Codes are what the tensor cores multiply, as they are read. All that belongs to them is a factor of something smaller:
the steps of keys are factors of the queries of a tile, and those of values are factors of its weights; the least
numbers of a group add one number to the logits of a query, and one to the result. The mean of a block's keys is added
to logits. A tile has tokens in its rows and a few queries in its columns, since tensor cores take no fewer than 16
rows, but 8 columns.

With queries of 16 bits, products are of float16, and sums of float32. Nothing there is too large or too small for
float16: products of queries and steps are parts of logits; queries that meet a codebook are divided by their size; and
weights are relative to the largest product of a weight and a step.
"""

from dataclasses import replace
from functools import cache, lru_cache

import torch
import triton
import triton.language as tl
from triton import knobs

from kvboost_hf.attention.call import AttentionCall, Part
from kvboost_hf.attention.triton.halfwords import (
    block_of,
    columns_of,
    dim_of,
    factor_of,
    groups_of,
    in_bytes,
    instructions,
    load_factors,
    load_halfwords,
    load_pairs,
    load_table,
    log2,
    nibbles_of,
    numbers,
    rounded,
    start_of,
    unit_of,
)
from kvboost_hf.attention.triton.tile import LN2, LOG2E, combine, tanh
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
from kvboost_hf.triton_launch import LaunchArguments, Launcher, dot

_BITS = (1, 2, 3, 4, 8)
_RUN = 32  # columns: with two bytes, 64 rows of a product, which four warps share
LEAST_STEP = tl.constexpr(1e-18)  # which weights count on; vectors of smaller numbers add nothing
HEADROOM = tl.constexpr(12.0)  # weights of float16 are up to 2**12: those of 2**-36 of the largest are not lost


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
    return _plan(*shape, most, keys.mean is not None, max(keys.bits, values.bits), query.itemsize, device)


@lru_cache(maxsize=1024)
def _plan(
    heads: int,
    rows: int,
    head_dim: int,
    blocks: int,
    tokens: int,
    most: int,
    turned: bool,  # the mean of keys, which takes registers, and time enough for one tile ahead to arrive
    bits: int,
    itemsize: int,
    device: Device,
) -> Tiling:
    tiling = plan_tiling(min(rows, 16), head_dim, itemsize, device)
    # More rows would leave registers no room for what codes become.
    few = rows <= 8 or padded_dim(head_dim) != min(head_dim, 128)
    block_m = 8 if few and not device.interpreted and not torch.version.hip else tiling.block_m
    block_n = min(tiling.block_n if device.interpreted or itemsize == 4 else 64, most)
    programs = -(-rows // block_m) * heads
    columns = blocks * -(-tokens // block_n) * block_n
    splits = plan_splits(programs, columns, block_n, device, per_processor=2 if turned or bits == 8 else 3)
    warps = min(tiling.warps, block_n // 16)  # with 16 tokens each
    stages = min(tiling.stages, 2) if turned else tiling.stages
    return replace(tiling, block_m=block_m, block_n=block_n, warps=warps, stages=stages, splits=splits)


def _block_of(group: int, tokens: int) -> int:
    """The most tokens, a power of two, of a tile that lies in one group of keys."""
    return power_of_2(tokens) if group >= tokens else group & -group


@cache
def _run_of(bits: int, group: int, head_dim: int) -> int:
    """The columns of values that are taken at a time: `_RUN` if they divide all, and lie in one group; else all."""
    columns: int = columns_of(head_dim, bits)
    return _RUN if columns % _RUN == 0 and (group >= head_dim or group % (2 * _RUN) == 0) else columns


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
) -> LaunchArguments:
    """Return the arguments of `fwd_codes`."""
    query, softcap = call.query, call.softcap
    assert call.scale > 0
    assert keys.least is None or tiling.block_n <= _block_of(keys.group_size, keys.codes.shape[3])
    (_, heads, queries, head_dim), (_, blocks, kv_heads, tokens, _) = query.shape, keys.codes.shape
    query = query.contiguous()
    if query.data_ptr() % 4:  # it is read as words of two numbers
        query = query.clone()
    rotated = query
    if keys.rotation is not None:
        rotated = (query.float() @ keys.rotation.mT).to(query.dtype)
    products = torch.float32 if query.itemsize == 4 else torch.float16
    cos = keys.cos.to(products) if keys.cos is not None else None
    sin = keys.sin.to(products) if keys.sin is not None else None
    packed = query.itemsize == 2 and not knobs.runtime.interpret and not torch.version.hip
    key_ptx = instructions(keys.bits, codebook=keys.codebook is not None) if packed else None
    value_ptx = instructions(values.bits, codebook=values.codebook is not None) if packed else None
    group = min(values.group_size, head_dim) if values.least is not None else head_dim
    return (
        (
            *(query if keys.mean is not None else None, rotated),
            *(_halfwords(keys), _plane(keys.least), _plane(keys.step), _plane(keys.scale), keys.codebook),
            *(_plane(keys.mean), cos, sin, keys.partner if cos is not None else None),
            *(_halfwords(values), _plane(values.least)),
            _plane(values.scale if values.least is None else values.step),
            *(values.codebook, lengths, out, lse),
        ),
        (),
        (kv_heads, queries, blocks),
        (call.scale / softcap if softcap else float(call.scale), softcap or None),
        (
            *(tokens, heads // kv_heads, head_dim, keys.bits, keys.group_size, values.bits),
            *(group, _run_of(values.bits, group, head_dim)),
            *(tiling.block_m, tiling.block_n, padded_dim(head_dim), key_ptx, value_ptx),
        ),
    )


def _halfwords(codes: CodePlanes) -> tuple[torch.Tensor, int, int] | None:
    return _plane(codes.codes.view(torch.int16))


def _plane(x: torch.Tensor | None) -> tuple[torch.Tensor, int, int] | None:
    """A plane [batch, blocks, …], with the two strides that are free."""
    return (x, x.stride(0), x.stride(1)) if x is not None else None


@triton.jit(do_not_specialize=["kv_heads", "queries", "blocks"])
def fwd_codes(
    query, rotated,
    key_codes, key_least, key_step, key_scale, key_codebook, mean, cos, sin, partner,
    value_codes, value_least, value_step, value_codebook,
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

    Dimensions are in the order of `halfwords`. Scores and weights are [tokens, rows], and sums are [dims, rows].
    """
    packed: tl.constexpr = KEY_PTX is not None
    unit: tl.constexpr = unit_of(KEY_PTX)
    dtype: tl.constexpr = tl.float32 if rotated.dtype.element_ty == tl.float32 else tl.float16
    batch, kv_head = (tl.program_id(1) // kv_heads).to(tl.int64), tl.program_id(1) % kv_heads
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    i, head = row // GROUPS, kv_head * GROUPS + row % GROUPS
    there = i < queries
    heads = kv_heads * GROUPS
    at = ((batch * heads + head) * queries + i)[:, None] * HEAD_DIM

    key_columns: tl.constexpr = columns_of(HEAD_DIM, KEY_BITS)
    key_column = tl.arange(0, block_of(key_columns))[None, :]
    key_inside = key_column < key_columns
    key_groups: tl.constexpr = 0 if key_least is None else (TOKENS + KEY_GROUP - 1) // KEY_GROUP
    key_table, value_table = None, None
    if key_codebook is not None:
        key_table = load_table(key_codebook, KEY_BITS, dtype, packed)
    if value_codebook is not None:
        value_table = load_table(value_codebook, VALUE_BITS, dtype, packed)

    q: tl.tuple = ()
    size = tl.full([BLOCK_M], 1e-30, tl.float32)
    for nibble in tl.static_range(nibbles_of(KEY_BITS)):
        pair = load_pairs(rotated + at + dim_of(HEAD_DIM, nibble, 0), key_column, there[:, None] & key_inside)
        for byte in tl.static_range(2):
            size = tl.maximum(size, tl.max(tl.abs(pair[byte]), 1))
            q += (pair[byte],)
    size = (size.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)  # the power of 2 below it
    divided: tl.tuple = ()
    for n in tl.static_range(2 * nibbles_of(KEY_BITS)):
        if key_least is None:
            divided += (tl.trans(rounded(q[n] / size[:, None], dtype, packed)),)
        else:  # codes in upper nibbles are 16 times as large
            divided += (q[n] * (1 / 16 if n >= 2 else 1.0),)
    q = divided
    scales = tl.full([BLOCK_M], scale, tl.float32)
    if key_least is None:
        scales *= size
    d = tl.arange(0, BLOCK_D)
    plain: tl.tensor = None
    partners: tl.tensor = None
    if cos is not None:
        partners = tl.load(partner + d, mask=d < HEAD_DIM, other=0)
    if mean is not None:
        plain = tl.load(query + at + d[None, :], mask=there[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
        plain = plain.to(tl.float32) / size[:, None]

    value_groups: tl.constexpr = groups_of(HEAD_DIM, VALUE_GROUP)
    step_dtype: tl.constexpr = value_step[0].dtype.element_ty
    runs: tl.constexpr = columns_of(HEAD_DIM, VALUE_BITS) // VALUE_RUN
    nibbles: tl.constexpr = nibbles_of(VALUE_BITS)
    run_block: tl.constexpr = block_of(VALUE_RUN)
    value_column = tl.arange(0, run_block)
    sum_row = tl.arange(0, 2 * run_block)  # in the order of `in_bytes`
    sum_column, sum_byte = sum_row // 16 * 8 + sum_row % 8, sum_row // 8 % 2
    sums: tl.tuple = ()
    for _ in tl.static_range(runs * nibbles):
        sums += (tl.zeros([2 * run_block, BLOCK_M], tl.float32),)
    least_sums: tl.tuple = ()
    if value_least is not None:
        for _ in tl.static_range(value_groups):
            least_sums += (tl.zeros([BLOCK_N, BLOCK_M], tl.float32),)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)

    tiles = tl.cdiv(TOKENS, BLOCK_N) * blocks
    part = tl.cdiv(tiles, tl.num_programs(2))
    low = part * tl.program_id(2)
    high = tl.minimum(low + part, tiles)
    for place in range(low // blocks, tl.cdiv(high, blocks)):
        first = place * BLOCK_N
        token = first + tl.arange(0, BLOCK_N)
        cosines, sines = None, None
        if cos is not None:
            turn = token[:, None] * HEAD_DIM + d[None, :]
            turns = (token < TOKENS)[:, None] & (d < HEAD_DIM)[None, :]
            cosines = tl.load(cos + turn, mask=turns, other=0.0)
            sines = tl.load(sin + turn, mask=turns, other=0.0)
        begin, end = tl.maximum(low - place * blocks, 0), tl.minimum(high - place * blocks, blocks)
        factors = load_factors(
            lengths, key_scale, value_step, value_least, batch, begin, kv_head, token, value_groups, TOKENS, BLOCK_N
        )  # fmt: skip
        for block in range(begin, end):
            now = factors
            # Loaded for the next block: they are too small for what copies tiles ahead.
            factors = load_factors(
                lengths, key_scale, value_step, value_least, batch, tl.minimum(block + 1, end - 1), kv_head, token,
                value_groups, TOKENS, BLOCK_N,
            )  # fmt: skip
            h = load_halfwords(
                key_codes, batch, block, kv_head, token[:, None], key_column, 0, key_columns,
                TOKENS, BLOCK_N, HEAD_DIM, KEY_BITS,
            )  # fmt: skip
            k: tl.tuple = (numbers(h, 0, key_table, KEY_BITS, dtype, KEY_PTX),)
            k += (numbers(h, 1, key_table, KEY_BITS, dtype, KEY_PTX),)
            scores = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            if key_least is not None:
                group = (kv_head * key_groups + first // KEY_GROUP) * HEAD_DIM
                shift = tl.zeros([BLOCK_M, block_of(key_columns)], tl.float32)
                for nibble in tl.static_range(nibbles_of(KEY_BITS)):
                    at_dim = group + dim_of(HEAD_DIM, nibble, 0)
                    step = load_pairs(start_of(key_step, batch, block) + at_dim, key_column, key_inside)
                    least = load_pairs(start_of(key_least, batch, block) + at_dim, key_column, key_inside)
                    for byte in tl.static_range(2):
                        own = q[2 * nibble + byte]
                        scores = dot(k[byte][nibble], tl.trans(rounded(own * step[byte], dtype, packed)), scores)
                        shift += own * (least[byte] * (16.0 if nibble else 1.0))
                scores = scores * (1 / unit) + tl.sum(shift, 1)[None, :]
            else:
                for nibble in tl.static_range(nibbles_of(KEY_BITS)):
                    for byte in tl.static_range(2):
                        scores = dot(k[byte][nibble], q[2 * nibble + byte], scores)
            if key_scale is not None:
                scores *= now[-1].to(tl.float32)[:, None]
            if mean is not None:
                of_head = start_of(mean, batch, block) + kv_head * HEAD_DIM
                center = tl.load(of_head + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
                if cos is not None:
                    other = tl.load(of_head + partners, mask=d < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
                    scores = dot(cosines, tl.trans(rounded(plain * center, dtype, packed)), scores)
                    scores = dot(sines, tl.trans(rounded(plain * other, dtype, packed)), scores)
                else:
                    scores += tl.sum(plain * center, 1)[None, :]
            if softcap is not None:
                scores = tanh(scores * scales[None, :]) * (softcap * LOG2E)
            else:
                scores *= (scales * LOG2E)[None, :]

            # Weights become products of weights and steps, and `inverse` makes them weights again.
            steps: tl.tuple = ()
            for group in tl.static_range(value_groups):
                steps += (factor_of(now, 0, group, value_groups, step_dtype),)
            most = steps[0]
            for group in tl.static_range(1, value_groups):
                most = tl.maximum(most, steps[group])
            log = log2(tl.maximum(most, LEAST_STEP), packed)
            inverse = tl.exp2(-log)
            seen = token < tl.minimum(now[0], TOKENS)
            scores = tl.where(seen[:, None], scores + log[:, None], float("-inf"))
            higher = tl.maximum(peak, tl.max(scores, 0))
            finite = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(scores - (finite - HEADROOM)[None, :])
            fade = tl.exp2(peak - finite)
            peak = higher
            norm = norm * fade[None, :] + weights * inverse[:, None]

            scaled: tl.tuple = ()
            more: tl.tuple = ()
            for group in tl.static_range(value_groups):
                scaled += ((weights * (steps[group] * inverse)[:, None]).to(dtype),)
                if value_least is not None:
                    least = factor_of(now, 1, group, value_groups, step_dtype) * inverse
                    more += (least_sums[group] * fade[None, :] + weights * least[:, None],)
            least_sums = more
            summed: tl.tuple = ()
            for run in tl.static_range(runs):
                h = load_halfwords(
                    value_codes, batch, block, kv_head, token[None, :], value_column[:, None], run * VALUE_RUN,
                    VALUE_RUN, TOKENS, BLOCK_N, HEAD_DIM, VALUE_BITS,
                )  # fmt: skip
                twice: tl.tuple = ()
                for each in tl.static_range(len(h)):
                    twice += (in_bytes(tl.broadcast_to(h[each], [run_block, BLOCK_N]), run_block, BLOCK_N),)
                v = numbers(twice, sum_byte[:, None], value_table, VALUE_BITS, dtype, VALUE_PTX)
                for nibble in tl.static_range(nibbles):
                    result = sums[run * nibbles + nibble] * fade[None, :]
                    dim = dim_of(HEAD_DIM, nibble, run * VALUE_RUN) + 2 * sum_column + sum_byte
                    for group in tl.static_range(
                        dim_of(HEAD_DIM, nibble, run * VALUE_RUN) // VALUE_GROUP,
                        (dim_of(HEAD_DIM, nibble, (run + 1) * VALUE_RUN) - 1) // VALUE_GROUP + 1,
                    ):
                        own = v[nibble]
                        if 2 * VALUE_RUN > VALUE_GROUP or value_groups * VALUE_GROUP != HEAD_DIM:
                            own = tl.where((dim // VALUE_GROUP == group)[:, None], own, 0.0)
                        result = dot(own, scaled[group], result)
                    summed += (result,)
            sums = summed

    norm = tl.sum(norm, 0)
    divisor = tl.where(norm > 0, norm, 1.0)
    part_batch = batch + tl.program_id(2).to(tl.int64) * (tl.num_programs(1) // kv_heads)
    at = ((part_batch * queries + i) * heads + head)[None, :] * HEAD_DIM
    for run in tl.static_range(runs):
        for nibble in tl.static_range(nibbles):
            dim = dim_of(HEAD_DIM, nibble, run * VALUE_RUN) + 2 * sum_column + sum_byte
            found = sums[run * nibbles + nibble]
            if value_least is not None:
                found *= 1 / (unit * (16.0 if nibble else 1.0))
                for group in tl.static_range(value_groups):
                    of_group = dim // VALUE_GROUP == group
                    found += tl.where(of_group[:, None], tl.sum(least_sums[group], 0)[None, :], 0.0)
            inside = there[None, :] & (sum_column < VALUE_RUN)[:, None]
            tl.store(out + at + dim[:, None], found / divisor[None, :], mask=inside)
    log = (peak - HEADROOM + tl.log2(divisor)) * LN2
    tl.store(lse + (part_batch * heads + head) * queries + i, log, mask=there)


_launch = Launcher(fwd_codes)
