"""Attention over tensors: one call of PyTorch's flash attention for each tile of queries and columns."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kvboost_hf.attention.call import AttentionCall, Part, no_log
from kvboost_hf.visibility import Visibility

_FEW = 16  # queries: the rows of a batch are computed at once, and the heads of a group, with a mask of their own

_SMALL = 1 << 13  # queries times columns up to which a mask takes less time than two calls; 8 times so for few queries
NUMBERS = 1 << 19  # handled at once, so that intermediate results stay in the cache of a processor
_ROWS = 128  # queries that share a mask: with more of them, more of the work is hidden; with fewer, more calls


class Tile(NamedTuple):
    """A rectangle of queries and columns."""

    rows: slice
    columns: slice
    mask: torch.Tensor | None = None  # [batch or 1, heads or 1, rows, columns], bool; None where all is seen
    causal: bool = False  # as many rows as columns, of which row i sees the first i + 1


def attend(call: AttentionCall, key: torch.Tensor, value: torch.Tensor) -> Part:
    """Compute what `reference.attend` defines. The log-sum-exp is empty unless `call.partial`."""
    columns = _columns_of_step(call, key, value)
    if columns is not None:
        if columns.stop - columns.start < key.shape[2]:
            key, value = key[:, :, columns], value[:, :, columns]
        return _step(call, key, value)
    out, lse = _attend(call, key, value)
    if call.sinks is not None:
        sink = call.sinks.float()[:, None]
        out = out * torch.sigmoid(lse - sink).nan_to_num_(0.0)[..., None]  # no number where nothing is seen at all
        lse = torch.logaddexp(lse, sink)
    out = out.transpose(1, 2).to(torch.float32 if call.partial else call.query.dtype).contiguous()
    return out, lse.contiguous() if call.partial else lse.new_empty(0)


def _columns_of_step(call: AttentionCall, key: torch.Tensor, value: torch.Tensor) -> slice | None:
    """The columns that the one query of each row sees, if they are the same for all rows and lie side by side.

    None where there are more queries, or more than the output is wanted.
    """
    query, seen, total = call.query, call.visibility, key.shape[2]
    if query.shape[2] != 1 or not query.numel() or not total or value.shape[3] != query.shape[3]:
        return None
    if call.softcap or call.partial or call.sinks is not None:
        return None
    if is_plain(seen, 1, total):
        return slice(0, total)
    own = seen.columns
    if own is None or not seen.causal or seen.tree is not None or seen.mask is not None:
        return None
    if len(own) > 1 and bool((own != own[:1]).any()):
        return None
    stop = min(int(own[0, 0]) + 1, total)  # a step in buffers of a fixed size
    if stop < 1:
        return None
    columns = slice(max(0, stop - seen.window) if seen.window else 0, stop)
    if seen.keep is not None and not bool(seen.keep[:, columns].all()):
        return None
    return columns


def _step(call: AttentionCall, key: torch.Tensor, value: torch.Tensor) -> Part:
    """Compute attention as `attend`, with no other operation than the kernel: each takes as long as a short past."""
    query = call.query
    batch, heads, _, dim = query.shape
    out, _ = flash(query.reshape(batch, key.shape[1], -1, dim), key, value, None, scale=call.scale)
    return out.reshape(batch, 1, heads, dim), no_log(query.device)


def _attend(call: AttentionCall, key: torch.Tensor, value: torch.Tensor) -> Part:
    """Attention without sinks, [batch, heads, queries, value_dim], and the log-sum-exp."""
    query, seen = call.query, call.visibility
    queries, stop = query.shape[2], key.shape[2]
    if not (stop and query.numel()):  # the kernel divides by these
        out = query.new_zeros(*query.shape[:3], value.shape[3])
        return out, torch.full(query.shape[:3], float("-inf"), device="cpu")
    if is_plain(seen, queries, stop) and not call.softcap:
        return _flash(query, key, value, None, seen.causal and queries > 1, call.scale)
    small = queries > 1 and queries * stop <= (_SMALL if queries > _FEW else 8 * _SMALL)
    if is_irregular(seen) or (small and not call.softcap):
        dense = seen.dense(queries, stop, query.device)
        return _solve(call, key, value, masked(dense), None)
    if len(query) > 1 and _differ(seen, queries):
        rows = [_attend(_row(call, i), key[i : i + 1], value[i : i + 1]) for i in range(len(query))]
        outs, logs = zip(*rows, strict=True)
        return torch.cat(outs), torch.cat(logs)
    own = seen.columns[0].long() if seen.columns is not None and seen.causal else None
    if own is not None:
        if bool((own.diff() < 0).any()):
            own, order = own.sort()
            ascending = Visibility(window=seen.window, keep=seen.keep, columns=own[None])
            out, lse = _attend(call._replace(query=query[:, :, order], visibility=ascending), key, value)
            back = order.argsort()
            return out[:, :, back], lse[:, :, back]
        stop = int(own[-1]) + 1
    start, keep = _kept(seen, queries, stop)
    blind = max(queries - (stop - start), 0) if seen.causal and seen.tree is None else 0
    if own is not None:
        own = own - start
        blind = int((own < 0).sum())
        own = own[blind:] if bool((own.diff() != 1).any()) else None
    if blind:
        call = call._replace(query=query[:, :, blind:])
    tiles = _tiles(seen, own, queries - blind, stop - start)
    out, lse = _solve(call, key[:, :, start:stop], value[:, :, start:stop], tiles, keep)
    if blind:
        out, lse = F.pad(out, (0, 0, blind, 0)), F.pad(lse, (blind, 0), value=float("-inf"))
    return out, lse


def _differ(seen: Visibility, queries: int) -> bool:
    """Whether the rows of a batch are to be computed one after the other."""
    columns = seen.columns is not None and seen.causal and bool((seen.columns != seen.columns[:1]).any())
    return columns or (seen.keep is not None and queries > _FEW and bool((seen.keep != seen.keep[:1]).any()))


def _row(call: AttentionCall, row: int) -> AttentionCall:
    """The call of one row of the batch."""
    one, seen = slice(row, row + 1), call.visibility
    keep, columns, tree = (each[one] if each is not None else None for each in (seen.keep, seen.columns, seen.tree))
    return call._replace(query=call.query[one], visibility=replace(seen, keep=keep, columns=columns, tree=tree))


def _kept(seen: Visibility, queries: int, stop: int) -> tuple[int, torch.Tensor | None]:
    """Return where the kept columns of [0, stop) begin, and `keep` from there, or None where it is true of all."""
    if seen.keep is None:
        return 0, None
    start = int(seen.keep[:, :stop].any(dim=0).int().argmax())
    start = start if seen.tree is None else min(start, stop - queries)
    keep = seen.keep[:, start:stop]
    return start, None if bool(keep.all()) else keep


def _tiles(seen: Visibility, own: torch.Tensor | None, queries: int, total: int) -> Iterable[Tile]:
    """Tiles of regular queries at columns `own`, or at the last ones, but for `keep`."""
    if seen.tree is not None:
        return tree(seen.tree, total)
    if not seen.causal:
        return [Tile(slice(0, queries), slice(0, total))]
    if own is None and not seen.window:
        return square(queries, total)
    return staircase(own if own is not None else torch.arange(total - queries, total, device="cpu"), seen.window)


def _solve(
    call: AttentionCall, key: torch.Tensor, value: torch.Tensor, tiles: Iterable[Tile], keep: torch.Tensor | None
) -> Part:
    """Compute all tiles and merge them: [batch, heads, queries, value_dim], and the log-sum-exp."""
    query, scale, softcap = call.query, call.scale, call.softcap
    shape = (*query.shape[:3], value.shape[3])
    parts: list[tuple[slice, Part]] = []
    for rows, columns, mask, causal in tiles:
        given = query[:, :, rows], key[:, :, columns], value[:, :, columns]
        kept = keep[:, None, None, columns] if keep is not None else None
        if causal and (softcap or kept is not None):
            mask = torch.ones(1, 1, shape[2], shape[2], dtype=torch.bool, device="cpu").tril()
        if kept is not None:
            mask = mask & kept if mask is not None else kept
        if softcap:
            parts.append((rows, attend_capped(*given, mask, scale, softcap)))
        else:
            parts.append((rows, _flash(*given, mask, causal and mask is None, scale)))
    if len(parts) == 1:
        return parts[0][1]
    out = query.new_zeros(shape, dtype=torch.float32)
    lse = out.new_full(shape[:3], float("-inf"))
    for rows, part in parts:
        join(out[:, :, rows], lse[:, :, rows], part)
    return out, lse


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float
) -> Part:
    """Compute one tile, without a copy of the keys and values for each head of a group."""
    batch, heads, rows, _ = query.shape
    kv_heads, value_dim = key.shape[1], value.shape[3]
    groups = heads // kv_heads
    if value_dim != query.shape[3]:
        dim = max(value_dim, query.shape[3])
        query, key, value = (F.pad(each, (0, dim - each.shape[3])) for each in (query, key, value))
    bias = query.new_zeros(mask.shape).masked_fill_(~mask, float("-inf")) if mask is not None else None
    if groups > 1:
        if not causal and (bias is None or (bias.shape[1] == 1 and rows <= _FEW)):
            query = query.reshape(batch, kv_heads, groups * rows, -1)
            bias = bias.repeat(1, 1, groups, 1) if bias is not None and rows == bias.shape[2] > 1 else bias
        else:
            query = torch.unflatten(query, 1, (kv_heads, groups)).flatten(0, 1)
            key, value = (each.flatten(0, 1)[:, None].expand(-1, groups, -1, -1) for each in (key, value))
            if bias is not None and bias.shape[:2] != (1, 1):
                bias = torch.unflatten(bias.expand(batch, heads, -1, -1), 1, (kv_heads, groups)).flatten(0, 1)
    out, lse = flash(query, key, value, bias, causal=causal, scale=scale)
    out = out.reshape(batch, heads, rows, -1)[..., :value_dim]
    lse = lse.reshape(batch, heads, rows)
    if mask is not None:  # what the kernel gives for queries that see nothing is not said
        nothing = ~mask.any(dim=-1)
        if nothing.any():
            out, lse = out.masked_fill(nothing[..., None], 0.0), lse.masked_fill(nothing, float("-inf"))
    return out, lse


def attend_all(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> Part:
    """Compute attention of queries that see all columns: [batch, heads, queries, value_dim], and the log-sum-exp."""
    return _flash(query, key, value, None, False, scale)


def flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    causal: bool = False,
    scale: float,
) -> Part:
    """Call PyTorch's kernel, which wants as many heads and dimensions in all, and a column; a bias of -inf hides."""
    alone = query.shape[2] == 1 and query.dtype is torch.bfloat16
    if alone:  # its products take up to four times as long for one row in bfloat16 as for two
        query = query.expand(-1, -1, 2, -1)
    # By PyTorch's own binding: `torch.ops` takes a seventh longer.
    out, lse = torch._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=bias, scale=scale
    )
    return (out[:, :, :1], lse[:, :, :1]) if alone else (out, lse)


def is_plain(seen: Visibility, queries: int, total: int) -> bool:
    """Whether one rectangle, or one square, is all there is."""
    own = seen.window or any(each is not None for each in (seen.keep, seen.columns, seen.tree, seen.mask))
    return not own and (queries in (1, total) or not seen.causal)


def is_irregular(seen: Visibility) -> bool:
    """Whether nothing but a mask of all queries and columns tells who sees what."""
    if seen.mask is not None:
        return True
    return seen.window > 0 and not seen.causal if seen.tree is None else seen.window > 0 or seen.columns is not None


def square(queries: int, total: int) -> Iterator[Tile]:
    """Tiles of queries that are the last columns, and see those up to theirs."""
    everyone, first = slice(0, queries), total - queries if queries > 1 else total
    if first:
        yield Tile(everyone, slice(0, first))
    if first < total:
        yield Tile(everyone, slice(first, total), causal=True)


def tree(bits: torch.Tensor, total: int) -> Iterator[Tile]:
    """Tiles of queries that are the last columns; they see all before these, and of these what the bits say."""
    queries = bits.shape[1]
    everyone, first = slice(0, queries), total - queries
    if first:
        yield Tile(everyone, slice(0, first))
    mask = bits[:, None, :, None] >> torch.arange(queries, device=bits.device) & 1
    yield Tile(everyone, slice(first, total), mask.bool())


def staircase(own: torch.Tensor, window: int) -> Iterator[Tile]:
    """Tiles of queries at columns [queries], ascending, that see the `window` columns up to theirs, or all."""
    before = 0 if window else int(own[0])
    if before:
        yield Tile(slice(0, len(own)), slice(0, before))
    for start in range(0, len(own), _ROWS):
        rows = slice(start, min(start + _ROWS, len(own)))
        first = max(int(own[start]) - window + 1, 0) if window else before
        columns = slice(first, int(own[rows.stop - 1]) + 1)
        away = own[rows, None] - torch.arange(columns.start, columns.stop, device=own.device)
        mask = (away >= 0) & (away < window) if window else away >= 0
        yield Tile(rows, columns, mask[None, None] if len(mask) > 1 else None)


def masked(mask: torch.Tensor) -> Iterator[Tile]:
    """Tiles of a mask [batch or 1, heads or 1, queries, columns]."""
    queries, total = mask.shape[2:]
    for start in range(0, queries, _ROWS):
        rows = slice(start, min(start + _ROWS, queries))
        yield Tile(rows, slice(0, total), mask[:, :, rows])


def join(out: torch.Tensor, lse: torch.Tensor, part: Part) -> None:
    """Merge a part into the results [..., queries, value_dim] and [..., queries], which begin as zeros and -inf."""
    total = torch.logaddexp(lse, part[1])
    weight = torch.exp(part[1] - total).nan_to_num_(0.0)  # no number where nothing is seen at all
    out.lerp_(part[0].to(out.dtype), weight[..., None])
    lse.copy_(total)


def weighted(logits: torch.Tensor, weigh: Callable[[torch.Tensor], torch.Tensor]) -> Part:
    """Compute the part of some columns.

    Args:
        logits: [..., queries, columns], float32; overwritten.
        weigh: Multiplies weights of that shape by the values of the columns.
    """
    largest = logits.amax(dim=-1, keepdim=True).clamp_min_(torch.finfo(logits.dtype).min)
    weights = logits.sub_(largest).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    out = weigh(weights).div_(total.clamp_min(torch.finfo(total.dtype).tiny))
    return out, total.log_().add_(largest).squeeze(-1)


def attend_capped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float,
) -> Part:
    """Compute attention with a softcap, which no flash attention on a CPU has.

    Args:
        query: [batch, heads, queries, head_dim].
        key: [batch, num_kv_heads, columns, head_dim].
        value: [batch, num_kv_heads, columns, value_dim].
        mask: [batch or 1, heads or 1, queries, columns], bool, or None where all is seen.
        scale: Factor of the logits.
        softcap: Bound of the logits.

    Returns:
        [batch, heads, queries, value_dim], float32, and the log-sum-exp.
    """
    batch, heads, queries, dim = query.shape
    kv_heads, total = key.shape[1:3]
    shape = (batch, kv_heads, heads // kv_heads, queries, -1)
    rows = query.float().mul(scale / softcap).reshape(batch, kv_heads, -1, dim)
    out = rows.new_zeros(*rows.shape[:3], value.shape[3])
    lse = rows.new_full(rows.shape[:3], float("-inf"))
    step = max(16, NUMBERS // (batch * max(heads * queries, kv_heads * dim)))
    for start in range(0, total, step):
        columns = slice(start, start + step)
        keys, values = (each[:, :, columns].float() for each in (key, value))
        logits = (rows @ keys.mT).tanh_().mul_(softcap)
        if mask is not None:
            part = mask[..., columns]
            part = part.reshape(len(part), kv_heads, -1, *part.shape[2:]) if part.shape[1] > 1 else part[:, None]
            logits.view(shape).masked_fill_(~part, float("-inf"))
        join(out, lse, weighted(logits, values.__rmatmul__))
    return out.view(shape).flatten(1, 2), lse.view(batch, heads, queries)
