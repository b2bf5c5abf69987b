"""Attention over tensors: one call of PyTorch's flash attention for each tile of queries and columns."""

from collections.abc import Iterable
from dataclasses import replace

import torch
import torch.nn.functional as F

from kvboost_hf.attention.call import AttentionCall, Part
from kvboost_hf.attention.cpu.blocks import attend_capped, join
from kvboost_hf.attention.cpu.tiles import Tile, is_irregular, is_plain, masked, square, staircase, tree
from kvboost_hf.attention.merge import no_log
from kvboost_hf.visibility import Visibility

_FEW = 16  # queries: the rows of a batch are computed at once, and the heads of a group, with a mask of their own

_SMALL = 1 << 13  # queries times columns up to which a mask takes less time than two calls; 8 times so for few queries


def attend(call: AttentionCall, key: torch.Tensor, value: torch.Tensor) -> Part:
    """Compute what `reference.attend` defines. The log-sum-exp is empty unless `call.partial`."""
    if _is_step(call, key, value):
        return _step(call, key, value)
    out, lse = _attend(call, key, value)
    if call.sinks is not None:
        sink = call.sinks.float()[:, None]
        out = out * torch.sigmoid(lse - sink).nan_to_num_(0.0)[..., None]  # no number where nothing is seen at all
        lse = torch.logaddexp(lse, sink)
    out = out.transpose(1, 2).to(torch.float32 if call.partial else call.query.dtype).contiguous()
    return out, lse.contiguous() if call.partial else lse.new_empty(0)


def _is_step(call: AttentionCall, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether one query of each row sees all columns, and only its output is wanted."""
    query, bounded = call.query, bool(call.softcap or call.partial or call.sinks is not None)
    one = query.shape[2] == 1 and bool(query.numel()) and 0 < key.shape[2]
    return one and not bounded and value.shape[3] == query.shape[3] and is_plain(call.visibility, 1, key.shape[2])


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
        return out, torch.full(query.shape[:3], float("-inf"))
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
    return staircase(own if own is not None else torch.arange(total - queries, total), seen.window)


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
            mask = torch.ones(1, 1, shape[2], shape[2], dtype=torch.bool).tril()
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
    # By PyTorch's own binding: `torch.ops` takes a seventh longer.
    part: Part = torch._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=bias, scale=scale
    )
    return part
