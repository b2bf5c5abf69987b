"""From an operator to a kernel: that of the tier, where it can do what is asked, else what every device can do."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from kvboost_hf.attention import cpu, reference, sdpa
from kvboost_hf.attention.backends import active_tier
from kvboost_hf.attention.merge import Part, no_log
from kvboost_hf.attention.merge import merge as merge_parts
from kvboost_hf.attention.visibility import Visibility
from kvboost_hf.handles import CodePlanes, HeldKV, PiecedKV, PieceTable
from kvboost_hf.kernel_calls import count


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    visibility: Visibility,
    softcap: float,
    sinks: torch.Tensor | None,
    partial: bool,
) -> Part:
    """See `ops.attend`."""
    tier = active_tier(query.device, query.dtype)
    # Before sm_80, PyTorch's fast kernel takes no grouped heads.
    own = tier == "triton" or (tier == "cuda" and query.shape[1] == key.shape[1])
    if own and sdpa.is_faster(query, key, value, visibility, softcap, sinks, partial=partial):
        count("sdpa", "square")
        return sdpa.attend(query, key, value, scale=scale, visibility=visibility)
    if tier == "triton":
        import kvboost_hf.attention.triton.dense as dense

        if dense.can_attend(query, key, value):
            count(tier, "attend")
            return dense.attend(
                query, key, value, scale=scale, visibility=visibility, softcap=softcap, sinks=sinks, partial=partial
            )
    if tier == "cuda":
        import kvboost_hf.attention.cuda as cuda

        if cuda.can_attend(query, key, value, visibility):
            count(tier, "attend")
            return cuda.attend(
                query, key, value, scale=scale, visibility=visibility, softcap=softcap, sinks=sinks, partial=partial
            )
    if tier == "cpu":
        count(tier, "attend")
        return cpu.attend(
            query, key, value, scale=scale, visibility=visibility, softcap=softcap, sinks=sinks, partial=partial
        )
    if tier != "reference" and not (softcap or partial or sinks is not None):
        count("sdpa", "attend")
        return sdpa.attend(query, key, value, scale=scale, visibility=visibility)
    count("reference", "attend")
    out, lse = reference.attend(
        query, key, value, scale=scale, visibility=visibility, softcap=softcap, sinks=sinks, partial=partial
    )
    return out, lse if partial else no_log(out.device)


def attend_pieces(
    query: torch.Tensor,
    table: PieceTable,
    *,
    scale: float,
    total: int,
    visibility: Visibility,
    softcap: float,
) -> Part:
    """See `ops.attend_pieces`."""
    tier = active_tier(query.device, query.dtype)
    if tier == "triton":
        import kvboost_hf.attention.triton.pieces as pieces

        if pieces.can_attend(query, table):
            count(tier, "attend_pieces")
            return pieces.attend_pieces(query, table, scale=scale, total=total, visibility=visibility, softcap=softcap)
    if tier == "cpu" and cpu.can_attend_pieces(table, visibility):
        count(tier, "attend_pieces")
        return cpu.attend_pieces(query, table, scale=scale, softcap=softcap)
    count("reference", "attend_pieces")
    return reference.attend_pieces(query, table, scale=scale, total=total, visibility=visibility, softcap=softcap)


def attend_held(
    query: torch.Tensor,
    kv: HeldKV,
    *,
    scale: float,
    before: Visibility,
    behind: Visibility,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor | None:
    """Attention over all that is held, [batch, queries, heads, value_dim]; None where no kernels do it in one go.

    Args:
        query: [batch, heads, queries, head_dim].
        kv: The columns.
        scale: Factor of the logits.
        before: Of all columns, as pieces are asked it; codes are seen by all.
        behind: Of the columns that are tensors.
        softcap: As in `reference.attend`.
        sinks: As in `reference.attend`.
    """
    tier = active_tier(query.device, query.dtype)
    if tier == "triton":
        import kvboost_hf.attention.triton.held as held

        if held.can_attend(query, kv):
            count(tier, "attend_pieces" if isinstance(kv, PiecedKV) else "attend_codes")
            with _without_autocast(query):
                return held.attend(query, kv, scale=scale, before=before, behind=behind, softcap=softcap, sinks=sinks)
    if tier == "cpu" and isinstance(kv, PiecedKV) and behind.tree is None and cpu.can_decode(query, kv, before):
        count(tier, "decode")
        return cpu.decode(query, kv, scale=scale, softcap=softcap, sinks=sinks)
    return None


def merge(parts: Sequence[Part], sinks: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """See `merge.merge`."""
    first = parts[0][0]
    if active_tier(first.device, dtype) == "triton":
        from kvboost_hf.attention.triton import combine, tiling

        if tiling.is_taken(first, first.shape[3]):
            count("triton", "merge")
            outs, logs = (torch.stack(each) for each in zip(*parts, strict=True))
            return combine.combine(outs, logs, sinks=sinks, dtype=dtype)[0]
    return merge_parts(parts, sinks, dtype)


def attend_codes(
    query: torch.Tensor, keys: CodePlanes, values: CodePlanes, lengths: torch.Tensor, *, scale: float, softcap: float
) -> Part:
    """See `ops.attend_codes`."""
    with _without_autocast(query):
        return _attend_codes(query, keys, values, lengths, scale, softcap)


def _without_autocast(query: torch.Tensor) -> AbstractContextManager[object]:
    """A caller's would turn queries in half precision."""
    device = query.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _attend_codes(
    query: torch.Tensor, keys: CodePlanes, values: CodePlanes, lengths: torch.Tensor, scale: float, softcap: float
) -> Part:
    tier = active_tier(query.device, query.dtype)
    if tier == "triton":
        import kvboost_hf.attention.triton.codes as codes

        if codes.can_attend(query, keys, values):
            count(tier, "attend_codes")
            return codes.attend_codes(query, keys, values, lengths, scale=scale, softcap=softcap)
    if tier == "cpu":
        count(tier, "attend_codes")
        return cpu.attend_codes(query, keys, values, lengths, scale=scale, softcap=softcap)
    count("reference", "attend_codes")
    return reference.attend_codes(query, keys, values, lengths, scale=scale, softcap=softcap)
