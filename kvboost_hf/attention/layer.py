"""Computes the attention of a layer: turns a call of transformers into an `AttentionCall`."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from kvboost_hf.attention import dispatch, ops, reference, sdpa
from kvboost_hf.attention.call import AttentionCall
from kvboost_hf.handles import KVHandle, MixedKV, PiecedKV
from kvboost_hf.kernels import count
from kvboost_hf.visibility import Visibility, read_reach, read_tree

# Weights, which no kernel has; keys chosen by an index of the model's own; sinks that differ between queries.
_NOT_TAKEN = {"output_attentions", "indices", "block_indices", "sinks"}


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of a layer, as transformers calls it.

    Args:
        module: The attention layer; tells whether it is causal.
        query: [batch, heads, queries, head_dim].
        key: [batch, num_kv_heads, columns, head_dim]; may be a `KVHandle`, as `value`.
        value: [batch, num_kv_heads, columns, value_dim].
        attention_mask: None, [batch, 1 or heads, queries, columns] bool or numbers to add, or what
            `visibility.make_reach` or `visibility.make_tree` makes.
        dropout: Must be 0 where there is a softcap or a sink.
        scaling: Factor of the logits; by default 1 / sqrt(head_dim).
        is_causal: Overrides what the module says.
        sliding_window: Columns that a query sees, its own included; None for all.
        **kwargs: `softcap`, the bound of the logits; `s_aux`, [heads], the logits of attention sinks;
            `position_bias`, numbers to add to the logits, [1 or batch, heads, queries, columns]. Arguments of other
            implementations are ignored, but for those that would change the result.

    Returns:
        [batch, queries, heads, value_dim], and None in place of the weights.

    Raises:
        ValueError: for dropout together with a softcap or a sink, for weights (`output_attentions`), for models that
            choose keys in ways of their own, for a mask of queries and columns in integers, and for a tree that is not
            that of the queries, or has no columns for a layer with a window.
    """
    for name in _NOT_TAKEN.intersection(kwargs):
        _require_unset(name, kwargs[name], module)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    causal = is_causal if is_causal is not None else bool(getattr(module, "is_causal", True))
    softcap, sinks, position_bias = kwargs.get("softcap") or 0.0, kwargs.get("s_aux"), kwargs.get("position_bias")
    seen, bias = _read_mask(attention_mask, query, key.shape[2], causal=causal, window=sliding_window or 0)
    if position_bias is not None:
        bias = position_bias if bias is None else position_bias + bias
    if softcap or sinks is not None:
        _require_no_dropout(dropout)
    if not query.dtype == key.dtype == value.dtype:  # as autocast may leave them
        query, key = query.to(value.dtype), key.to(value.dtype)
    call = AttentionCall(query, scale, seen, softcap, sinks)
    if isinstance(key, KVHandle) and isinstance(value, KVHandle):
        if bias is None and not dropout and not query.requires_grad:
            found = _read_in_place(call, key.kv)
            if found is not None:
                return found, None
        key, value = key.dense(), value.dense()
    differentiable = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    if dropout or differentiable or bias is not None:
        return _with_graph(call, key, value, bias, dropout), None
    return ops.attend(call, key, value)[0], None


def _require_unset(name: str, value: Any, module: nn.Module) -> None:
    if value is not None and value is not False:
        raise ValueError(
            f"`{name}` is not taken by 'kvboost_fa2', but {type(module).__name__} asks for it. Use "
            "attn_implementation='sdpa' or 'eager'."
        )


def _require_no_dropout(dropout: float) -> None:
    if dropout:
        raise ValueError(
            f"`attention_dropout` must be 0 with 'kvboost_fa2' for a model with a softcap or attention sinks, got "
            f"{dropout}. Set it to 0 in the model's configuration, or train with attn_implementation='eager'."
        )


def _read_mask(
    mask: torch.Tensor | None, query: torch.Tensor, total: int, *, causal: bool, window: int
) -> tuple[Visibility, torch.Tensor | None]:
    """Return which columns queries see, and what is to be added to the logits."""
    queries = query.shape[2]
    hides = window if window < total else 0
    if mask is None:
        return Visibility(causal, hides), None
    if mask.is_floating_point():
        return Visibility(causal=False), mask
    compact = mask.dtype in (torch.int32, torch.int64) and mask.shape[2] <= 2
    if not compact and mask.dtype != torch.bool:
        raise ValueError(
            f"`attention_mask` of the shape {list(mask.shape)} must be bool, or numbers to add, got {mask.dtype}. "
            "Pass attention_mask.bool()."
        )
    if mask.dtype == torch.int64:
        return _read_tree(mask, len(query), queries, total, causal=causal, window=window), None
    if mask.dtype == torch.int32:
        keep, columns, reach = read_reach(mask, queries)
        if reach is None or window:
            return Visibility(causal, hides, keep, columns), None
        # transformers does not pass the window of this layer: make it a matrix.
        seen = Visibility(causal, keep=keep, columns=columns)
        own = seen.columns_of(queries, total, mask.device)[:, :, None]
        within = own - torch.arange(total, device=mask.device) < reach[:, None]
        return replace(seen, mask=within[:, None]), None
    if queries == mask.shape[1] == 1:
        return Visibility(causal=False, keep=mask[:, 0, 0]), None
    return Visibility(causal=False, mask=mask), None


def _read_tree(mask: torch.Tensor, batch: int, queries: int, total: int, *, causal: bool, window: int) -> Visibility:
    bits, columns = read_tree(mask)
    fits = mask.shape[1] == 1 and bits.shape == (batch, queries) and queries <= 64
    if fits and queries == total:  # as a mask of queries and columns may fit
        fits = bool((bits >> torch.arange(queries, device=mask.device) & 1).all())
    if not fits:
        raise ValueError(
            f"`attention_mask` in int64 must describe a tree of {queries} queries, 64 at most, in {batch} rows, got "
            f"the shape {list(mask.shape)}. Pass make_tree(bits), where each node sees itself, or "
            "attention_mask.bool() if it is no tree."
        )
    if window >= total:  # hides nothing
        window = 0
    if window and columns is None:
        raise ValueError(
            f"`columns` must be given with a tree in a layer with a window of {window}, over {total} columns, got "
            "bits alone. Pass make_tree(bits, columns)."
        )
    return Visibility(causal, window, columns=columns if window else None, tree=bits)


def _with_graph(
    call: AttentionCall, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, dropout: float
) -> torch.Tensor:
    """Compute attention with operations that are differentiable, and that take numbers to add to the logits."""
    if call.softcap or call.sinks is not None:
        count("reference", "with_graph")
        return reference.attend(call, key, value, bias=bias)[0]
    count("sdpa", "with_graph")
    return sdpa.attend(call, key, value, bias=bias, dropout=dropout)


def _read_in_place(call: AttentionCall, kv: MixedKV) -> torch.Tensor | None:
    """Compute attention over K/V that is no tensor of all columns; None where it has to be made one."""
    query, seen = call.query, call.visibility
    if seen.mask is not None:
        return None
    if seen.columns is not None:
        return _read_behind_pieces(call, kv)
    keep = seen.keep
    if isinstance(kv, PiecedKV):
        keep = kv.keep if keep is None else keep[:, kv.table.columns :]
    elif seen.window:
        return None
    elif keep is not None:  # there is no padding among the codes
        keep = torch.cat([keep[:, : kv.first], keep[:, kv.first + kv.coded :]], dim=1)
    behind = seen if keep is seen.keep else Visibility(seen.causal, seen.window, keep, tree=seen.tree)
    rest = AttentionCall(query, call.scale, behind, call.softcap, partial=True)
    if seen.tree is not None:
        call = call._replace(visibility=replace(seen, tree=None))
    if not ops.is_traced(query):
        found = dispatch.attend_mixed(call, rest, kv)
        if found is not None:
            return found
    if isinstance(kv, PiecedKV):
        part = ops.attend_pieces(call, kv.table, kv.table.columns + kv.keys.shape[2])
        exact = kv.keys, kv.values
    else:
        part = ops.attend_codes(call, kv.keys, kv.values, kv.lengths)
        exact = kv.exact_keys, kv.exact_values
    return ops.merge([part, ops.attend(rest, *exact)], call.sinks, query.dtype)


def _read_behind_pieces(call: AttentionCall, kv: MixedKV) -> torch.Tensor | None:
    """Compute attention of queries at any columns behind the pieces, all of which they see; see `_read_in_place`."""
    seen = call.visibility
    if not isinstance(kv, PiecedKV) or seen.window:  # as those of a tree have that are told their columns
        return None
    assert seen.columns is not None
    before, keep = kv.table.columns, seen.keep
    behind = Visibility(keep=keep[:, before:] if keep is not None else kv.keep, columns=seen.columns - before)
    rest = AttentionCall(call.query, call.scale, behind, call.softcap, partial=True)
    call = call._replace(visibility=Visibility())  # the last columns, as far as the pieces know
    part = ops.attend_pieces(call, kv.table, before + kv.keys.shape[2])
    return ops.merge([part, ops.attend(rest, kv.keys, kv.values)], call.sinks, call.query.dtype)
