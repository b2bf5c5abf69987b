"""Chooses the kernel for a call: that of the backend, where it takes the call, else one that runs on every device.

Backends are imported at their first call: Triton and NVRTC need not be installed.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from kvboost_hf.attention import cpu, reference, sdpa
from kvboost_hf.attention.backends import backend_of
from kvboost_hf.attention.call import AttentionCall, Part, no_log
from kvboost_hf.attention.call import merge as merge_parts
from kvboost_hf.handles import CodePlanes, MixedKV, PiecedKV, PieceTable
from kvboost_hf.kernels import count


def attend(call: AttentionCall, key: torch.Tensor, value: torch.Tensor) -> Part:
    """Run the kernel for `ops.attend`."""
    query = call.query
    backend = backend_of(query.device, query.dtype)
    if backend == "triton" or backend == "cuda":
        case = sdpa.faster_case(call, key, value)
        # Before sm_80, PyTorch's fast kernel takes no grouped heads, and does not split the columns of one query.
        if case and (backend == "triton" or (case == "square" and query.shape[1] == key.shape[1])):
            count("sdpa", case)
            return sdpa.attend(call, key, value), no_log(query.device)
    if backend == "triton":
        import kvboost_hf.attention.triton.dense as dense

        if dense.can_attend(query, key, value):
            count(backend, "attend")
            return dense.attend(call, key, value)
    if backend == "cuda":
        import kvboost_hf.attention.cuda as cuda

        if cuda.can_attend(query, key, value):
            count(backend, "attend")
            return cuda.attend(call, key, value)
    if backend == "cpu":
        count(backend, "attend")
        return cpu.attend(call, key, value)
    if backend != "reference" and not (call.softcap or call.partial or call.sinks is not None):
        count("sdpa", "attend")
        return sdpa.attend(call, key, value), no_log(query.device)
    count("reference", "attend")
    out, lse = reference.attend(call, key, value)
    return out, lse if call.partial else no_log(out.device)


def attend_pieces(call: AttentionCall, table: PieceTable, total: int) -> Part:
    """Run the kernel for `ops.attend_pieces`."""
    backend = backend_of(call.query.device, call.query.dtype)
    if backend == "triton":
        import kvboost_hf.attention.triton.pieces as pieces

        if pieces.can_attend(call.query, table):
            count(backend, "attend_pieces")
            return pieces.attend_pieces(call, table, total)
    if backend == "cpu" and cpu.can_attend_pieces(table, call.visibility):
        count(backend, "attend_pieces")
        return cpu.attend_pieces(call, table)
    count("reference", "attend_pieces")
    return reference.attend_pieces(call, table, total)


def attend_mixed(call: AttentionCall, rest: AttentionCall, kv: MixedKV) -> torch.Tensor | None:
    """Compute attention over all columns of K/V of which some are pieces or codes, and the others tensors.

    Args:
        call: The call over all columns; pieces are seen as its visibility says, and codes by all queries.
        rest: The `partial` call over those that are tensors.
        kv: The columns.

    Returns:
        [batch, queries, heads, value_dim], or None where the backend has no kernels that do this in one go.
    """
    query = call.query
    backend = backend_of(query.device, query.dtype)
    if backend == "triton":
        import kvboost_hf.attention.triton.mixed as mixed

        if mixed.can_attend(query, kv):
            count(backend, "attend_pieces" if isinstance(kv, PiecedKV) else "attend_codes")
            with _without_autocast(query):
                return mixed.attend(call, rest, kv)
    if backend == "cpu" and isinstance(kv, PiecedKV) and rest.visibility.tree is None and cpu.can_decode(call, kv):
        count(backend, "decode")
        return cpu.decode(call, kv)
    return None


def merge(parts: Sequence[Part], sinks: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Run the kernel for `ops.merge`."""
    first = parts[0][0]
    if backend_of(first.device, dtype) == "triton":
        from kvboost_hf.attention.triton import tile, tiling

        if tiling.is_taken(first, first.shape[3]):
            count("triton", "merge")
            outs, logs = (torch.stack(each) for each in zip(*parts, strict=True))
            return tile.combine(outs, logs, sinks=sinks, dtype=dtype)[0]
    return merge_parts(parts, sinks, dtype)


def attend_codes(call: AttentionCall, keys: CodePlanes, values: CodePlanes, lengths: torch.Tensor) -> Part:
    """Run the kernel for `ops.attend_codes`."""
    backend = backend_of(call.query.device, call.query.dtype)
    with _without_autocast(call.query):
        if backend == "triton":
            import kvboost_hf.attention.triton.codes as codes

            if codes.can_attend(call.query, keys, values):
                count(backend, "attend_codes")
                return codes.attend_codes(call, keys, values, lengths)
        if backend == "cpu":
            count(backend, "attend_codes")
            return cpu.attend_codes(call, keys, values, lengths)
        count("reference", "attend_codes")
        return reference.attend_codes(call, keys, values, lengths)


def _without_autocast(query: torch.Tensor) -> AbstractContextManager[object]:
    """Keep a caller's autocast from rotating queries in half precision."""
    device = query.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
