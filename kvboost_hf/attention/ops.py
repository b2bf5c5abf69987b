"""The operators of `torch.library`: what is compiled and traced. Which kernel runs is decided inside.

Each has tensors and numbers for arguments, as operators must; `attend`, `attend_pieces` and `attend_codes` take the
dataclasses that these are in. Where nobody looks on, they call what is inside at once: an operator written in Python
takes longer than a kernel of few queries.
"""

from collections.abc import Sequence

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from kvboost_hf.attention import dispatch
from kvboost_hf.attention.merge import Part
from kvboost_hf.attention.visibility import Visibility
from kvboost_hf.handles import CodePlanes, PieceTable

_MaybeTensors = Sequence[torch.Tensor | None]

# Defined one by one: what `torch.library.custom_op` does around each call takes longer than the kernel of a small one.
torch.library.define(
    "kvboost_hf::attend",
    "(Tensor query, Tensor key, Tensor value, Tensor?[] seen, Tensor? sinks, float scale, bool causal, SymInt window, "
    "float softcap, bool partial) -> (Tensor, Tensor)",
)
torch.library.define(
    "kvboost_hf::attend_pieces",
    "(Tensor query, Tensor[] keys, Tensor[] values, Tensor rows, Tensor?[] turn, Tensor?[] seen, SymInt columns, "
    "SymInt total, float scale, bool causal, SymInt window, float softcap) -> (Tensor, Tensor)",
)
torch.library.define(
    "kvboost_hf::attend_codes",
    "(Tensor query, Tensor?[] keys, Tensor?[] values, int[] forms, Tensor lengths, float scale, float softcap) "
    "-> (Tensor, Tensor)",
)
torch.library.define("kvboost_hf::merge", "(Tensor[] outs, Tensor[] logs, Tensor? sinks, ScalarType dtype) -> Tensor")


def is_traced(query: torch.Tensor) -> bool:
    """Whether an operator is wanted: by torch.compile, by a mode that sees all of them, or for shapes alone."""
    if torch.compiler.is_dynamo_compiling() or type(query) is not torch.Tensor:
        return True
    return query.is_meta or is_in_torch_dispatch_mode() or torch._C._len_torch_function_stack() > 0


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    visibility: Visibility,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    partial: bool = False,
) -> Part:
    """See `reference.attend`. Not differentiable. The log-sum-exp is there if `partial`, else it is empty."""
    if not is_traced(query):
        return dispatch.attend(
            query, key, value, scale=scale, visibility=visibility, softcap=softcap, sinks=sinks, partial=partial
        )
    seen = (visibility.keep, visibility.columns, visibility.tree, visibility.mask)
    causal, window = visibility.causal, visibility.window
    out, lse = torch.ops.kvboost_hf.attend.default(
        query, key, value, seen, sinks, scale, causal, window, softcap, partial
    )
    return out, lse


def attend_pieces(
    query: torch.Tensor,
    table: PieceTable,
    *,
    scale: float,
    total: int,
    visibility: Visibility,
    softcap: float = 0.0,
) -> Part:
    """A part of `reference.attend`: over the first columns, in pieces.

    Args:
        query: [batch, heads, queries, head_dim].
        table: The pieces.
        scale: Factor of the logits.
        total: Columns in all, of which the pieces hold the first ones; for queries that are the last of them.
        visibility: Over all columns; without `tree`, whose columns are the last ones, and without `mask`.
        softcap: As in `reference.attend`.

    Returns:
        [batch, queries, heads, head_dim] and [batch, heads, queries], float32.
    """
    assert visibility.tree is None
    assert visibility.mask is None
    if not is_traced(query):
        return dispatch.attend_pieces(query, table, scale=scale, total=total, visibility=visibility, softcap=softcap)
    seen, turn = (visibility.keep, visibility.columns), (table.cos, table.sin, table.partner, table.places)
    causal, window = visibility.causal, visibility.window
    given = table.keys, table.values, table.rows, turn, seen
    out, lse = torch.ops.kvboost_hf.attend_pieces.default(
        query, *given, table.columns, total, scale, causal, window, softcap
    )
    return out, lse


def attend_codes(
    query: torch.Tensor,
    keys: CodePlanes,
    values: CodePlanes,
    lengths: torch.Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
) -> Part:
    """A part of `reference.attend`: over columns that are codes, all of which every query sees.

    Args:
        query: [batch, heads, queries, head_dim].
        keys: Codes.
        values: Codes of the same columns.
        lengths: [blocks], int32: how many of the first tokens of each block there are.
        scale: Factor of the logits.
        softcap: As in `reference.attend`.

    Returns:
        [batch, queries, heads, head_dim] and [batch, heads, queries], float32.
    """
    if not is_traced(query):
        return dispatch.attend_codes(query, keys, values, lengths, scale=scale, softcap=softcap)
    forms = [keys.bits, keys.group_size, values.bits, values.group_size]
    out, lse = torch.ops.kvboost_hf.attend_codes.default(
        query, _planes(keys), _planes(values), forms, lengths, scale, softcap
    )
    return out, lse


def merge(parts: Sequence[Part], sinks: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """See `merge.merge`."""
    if not is_traced(parts[0][0]):
        return dispatch.merge(parts, sinks, dtype)
    merged: torch.Tensor = torch.ops.kvboost_hf.merge.default(*map(list, zip(*parts, strict=True)), sinks, dtype)
    return merged


def _planes(codes: CodePlanes) -> _MaybeTensors:
    turn = codes.mean, codes.cos, codes.sin, codes.partner
    return [codes.codes, codes.least, codes.step, codes.scale, codes.codebook, codes.rotation, *turn]


def _as_codes(planes: _MaybeTensors, bits: int, group_size: int) -> CodePlanes:
    codes, least, step, *others = planes
    assert codes is not None
    return CodePlanes(bits, codes, least, step, group_size, *others)


@torch.library.impl("kvboost_hf::attend", "default")
def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: Sequence[torch.Tensor | None],
    sinks: torch.Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    partial: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    visibility = Visibility(causal, window, *seen)
    out, lse = dispatch.attend(
        query, key, value, scale=scale, visibility=visibility, softcap=softcap, sinks=sinks, partial=partial
    )
    return out, lse if partial else lse.new_empty(0)  # what an operator returns is new


@torch.library.register_fake("kvboost_hf::attend")  # type: ignore[untyped-decorator]
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: Sequence[torch.Tensor | None],
    sinks: torch.Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
    partial: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, queries, _ = query.shape
    dtype = torch.float32 if partial else query.dtype
    out = query.new_empty(batch, queries, heads, value.shape[3], dtype=dtype)
    return out, query.new_empty((batch, heads, queries) if partial else (0,), dtype=torch.float32)


@torch.library.impl("kvboost_hf::attend_pieces", "default")
def _attend_pieces(
    query: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    rows: torch.Tensor,
    turn: Sequence[torch.Tensor | None],
    seen: Sequence[torch.Tensor | None],
    columns: int,
    total: int,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    table = PieceTable(tuple(keys), tuple(values), rows, columns, *turn)
    visibility = Visibility(causal, window, *seen)
    return dispatch.attend_pieces(query, table, scale=scale, total=total, visibility=visibility, softcap=softcap)


@torch.library.register_fake("kvboost_hf::attend_pieces")  # type: ignore[untyped-decorator]
def _(
    query: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    rows: torch.Tensor,
    turn: Sequence[torch.Tensor | None],
    seen: Sequence[torch.Tensor | None],
    columns: int,
    total: int,
    scale: float,
    causal: bool,
    window: int,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _part_like(query)


@torch.library.impl("kvboost_hf::attend_codes", "default")
def _attend_codes(
    query: torch.Tensor,
    keys: Sequence[torch.Tensor | None],
    values: Sequence[torch.Tensor | None],
    forms: Sequence[int],
    lengths: torch.Tensor,
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    planes = _as_codes(keys, forms[0], forms[1]), _as_codes(values, forms[2], forms[3])
    return dispatch.attend_codes(query, *planes, lengths, scale=scale, softcap=softcap)


@torch.library.register_fake("kvboost_hf::attend_codes")  # type: ignore[untyped-decorator]
def _(
    query: torch.Tensor,
    keys: Sequence[torch.Tensor | None],
    values: Sequence[torch.Tensor | None],
    forms: Sequence[int],
    lengths: torch.Tensor,
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _part_like(query)


@torch.library.impl("kvboost_hf::merge", "default")
def _merge(
    outs: Sequence[torch.Tensor], logs: Sequence[torch.Tensor], sinks: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    return dispatch.merge(list(zip(outs, logs, strict=True)), sinks, dtype)


@torch.library.register_fake("kvboost_hf::merge")  # type: ignore[untyped-decorator]
def _(
    outs: Sequence[torch.Tensor], logs: Sequence[torch.Tensor], sinks: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    return outs[0].new_empty(outs[0].shape, dtype=dtype)


def _part_like(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, queries, head_dim = query.shape
    out = query.new_empty(batch, queries, heads, head_dim, dtype=torch.float32)
    return out, query.new_empty(batch, heads, queries, dtype=torch.float32)
