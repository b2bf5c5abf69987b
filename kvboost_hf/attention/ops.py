"""The operators of `torch.library`, which torch.compile and tracers see as one node each.

Operators take tensors and numbers, so that an `AttentionCall`, a `PieceTable` and `CodePlanes` are flattened for them.
Where nothing traces, the functions here call `dispatch` directly: an operator written in Python takes longer than a
kernel of few queries.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from kvboost_hf.attention import dispatch
from kvboost_hf.attention.call import AttentionCall, Part
from kvboost_hf.handles import CodePlanes, PieceTable
from kvboost_hf.visibility import Visibility

_MaybeTensors = Sequence[torch.Tensor | None]

_CALL = (
    "Tensor query, float scale, Tensor?[] seen, bool causal, SymInt window, float softcap, Tensor? sinks, bool partial"
)
# Defined one by one: what `torch.library.custom_op` does around each call takes longer than the kernel of a small one.
torch.library.define("kvboost_hf::attend", f"(Tensor key, Tensor value, {_CALL}) -> (Tensor, Tensor)")
torch.library.define(
    "kvboost_hf::attend_pieces",
    "(Tensor[] keys, Tensor[] values, Tensor rows, SymInt columns, Tensor?[] turn, SymInt total, "
    f"{_CALL}) -> (Tensor, Tensor)",
)
torch.library.define(
    "kvboost_hf::attend_codes",
    f"(Tensor?[] keys, Tensor?[] values, int[] forms, Tensor lengths, {_CALL}) -> (Tensor, Tensor)",
)
torch.library.define("kvboost_hf::merge", "(Tensor[] outs, Tensor[] logs, Tensor? sinks, ScalarType dtype) -> Tensor")


def is_traced(query: torch.Tensor) -> bool:
    """Whether an operator is wanted: by torch.compile, by a mode that sees all of them, or for shapes alone."""
    if torch.compiler.is_dynamo_compiling() or type(query) is not torch.Tensor:
        return True
    return query.is_meta or is_in_torch_dispatch_mode() or torch._C._len_torch_function_stack() > 0


def attend(call: AttentionCall, key: torch.Tensor, value: torch.Tensor) -> Part:
    """Compute what `reference.attend` defines, with the fastest kernel for it. Not differentiable.

    Args:
        call: Queries, and how their logits are made.
        key: [batch, num_kv_heads, columns, head_dim].
        value: [batch, num_kv_heads, columns, value_dim].

    Returns:
        [batch, queries, heads, value_dim] and the log-sum-exp, which is empty unless `call.partial`.
    """
    if not is_traced(call.query):
        return dispatch.attend(call, key, value)
    part: Part = torch.ops.kvboost_hf.attend.default(key, value, *_flat(call))
    return part


def attend_pieces(call: AttentionCall, table: PieceTable, total: int) -> Part:
    """Compute attention over the first columns, which are in pieces.

    Args:
        call: Queries, and how their logits are made. Its visibility is that of all columns, without `mask` and
            without `tree`, whose columns are the last ones.
        table: The pieces.
        total: How many columns there are with those behind the pieces. Queries are the last of them.

    Returns:
        [batch, queries, heads, head_dim] and [batch, heads, queries], float32.
    """
    assert call.visibility.tree is None
    assert call.visibility.mask is None
    if not is_traced(call.query):
        return dispatch.attend_pieces(call, table, total)
    turn = table.cos, table.sin, table.partner, table.places
    given = table.keys, table.values, table.rows, table.columns, turn, total
    part: Part = torch.ops.kvboost_hf.attend_pieces.default(*given, *_flat(call))
    return part


def attend_codes(call: AttentionCall, keys: CodePlanes, values: CodePlanes, lengths: torch.Tensor) -> Part:
    """Compute attention over columns that are codes. Every query sees all of them, whatever `call.visibility` says.

    Args:
        call: Queries, and how their logits are made.
        keys: Codes.
        values: Codes of the same columns.
        lengths: [blocks], int32: how many of the first tokens of each block are columns.

    Returns:
        [batch, queries, heads, head_dim] and [batch, heads, queries], float32.
    """
    if not is_traced(call.query):
        return dispatch.attend_codes(call, keys, values, lengths)
    forms = [keys.bits, keys.group_size, values.bits, values.group_size]
    given = _planes(keys), _planes(values), forms, lengths
    part: Part = torch.ops.kvboost_hf.attend_codes.default(*given, *_flat(call))
    return part


def merge(parts: Sequence[Part], sinks: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Merge parts as `kvboost_hf.attention.call.merge` does, with the fastest kernel for it."""
    if not is_traced(parts[0][0]):
        return dispatch.merge(parts, sinks, dtype)
    merged: torch.Tensor = torch.ops.kvboost_hf.merge.default(*map(list, zip(*parts, strict=True)), sinks, dtype)
    return merged


def _flat(call: AttentionCall) -> tuple[Any, ...]:
    """The arguments of an operator that `_CALL` declares."""
    seen = call.visibility
    tensors = [seen.keep, seen.columns, seen.tree, seen.mask]
    return call.query, call.scale, tensors, seen.causal, seen.window, call.softcap, call.sinks, call.partial


def _call(query: torch.Tensor, scale: float, seen: _MaybeTensors, *rest: Any) -> AttentionCall:
    """The inverse of `_flat`."""
    causal, window, *others = rest
    return AttentionCall(query, scale, Visibility(causal, window, *seen), *others)


def _planes(codes: CodePlanes) -> _MaybeTensors:
    turn = codes.mean, codes.cos, codes.sin, codes.partner
    return [codes.codes, codes.least, codes.step, codes.scale, codes.codebook, codes.rotation, *turn]


def _codes(planes: _MaybeTensors, bits: int, group_size: int) -> CodePlanes:
    codes, least, step, *others = planes
    assert codes is not None
    return CodePlanes(bits, codes, least, step, group_size, *others)


@torch.library.impl("kvboost_hf::attend", "default")
def _attend(key: torch.Tensor, value: torch.Tensor, *given: Any) -> Part:
    call = _call(*given)
    out, lse = dispatch.attend(call, key, value)
    return out, lse if call.partial else lse.new_empty(0)  # what an operator returns is new


@torch.library.register_fake("kvboost_hf::attend")  # type: ignore[untyped-decorator]
def _(key: torch.Tensor, value: torch.Tensor, *given: Any) -> Part:
    call = _call(*given)
    out, lse = _like(call.query, value.shape[3])
    return (out, lse) if call.partial else (out.to(call.query.dtype), lse.new_empty(0))


@torch.library.impl("kvboost_hf::attend_pieces", "default")
def _attend_pieces(
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    rows: torch.Tensor,
    columns: int,
    turn: _MaybeTensors,
    total: int,
    *given: Any,
) -> Part:
    return dispatch.attend_pieces(_call(*given), PieceTable(tuple(keys), tuple(values), rows, columns, *turn), total)


@torch.library.register_fake("kvboost_hf::attend_pieces")  # type: ignore[untyped-decorator]
def _(keys: object, values: object, rows: object, columns: object, turn: object, total: object, *given: Any) -> Part:
    return _like(given[0])


@torch.library.impl("kvboost_hf::attend_codes", "default")
def _attend_codes(
    keys: _MaybeTensors, values: _MaybeTensors, forms: Sequence[int], lengths: torch.Tensor, *given: Any
) -> Part:
    return dispatch.attend_codes(_call(*given), _codes(keys, *forms[:2]), _codes(values, *forms[2:]), lengths)


@torch.library.register_fake("kvboost_hf::attend_codes")  # type: ignore[untyped-decorator]
def _(keys: object, values: object, forms: object, lengths: object, *given: Any) -> Part:
    return _like(given[0])


@torch.library.impl("kvboost_hf::merge", "default")
def _merge(
    outs: Sequence[torch.Tensor], logs: Sequence[torch.Tensor], sinks: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    return dispatch.merge(list(zip(outs, logs, strict=True)), sinks, dtype)


@torch.library.register_fake("kvboost_hf::merge")  # type: ignore[untyped-decorator]
def _(outs: Sequence[torch.Tensor], logs: object, sinks: object, dtype: torch.dtype) -> torch.Tensor:
    return outs[0].new_empty(outs[0].shape, dtype=dtype)


def _like(query: torch.Tensor, value_dim: int | None = None) -> Part:
    """A part without numbers; values have as many dimensions as queries by default."""
    batch, heads, queries, head_dim = query.shape
    shape = batch, queries, heads, head_dim if value_dim is None else value_dim
    return query.new_empty(shape, dtype=torch.float32), query.new_empty(batch, heads, queries, dtype=torch.float32)
