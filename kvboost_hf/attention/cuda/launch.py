"""Launches `attend.cu`: sets its arguments, the number of blocks, and the shared memory of each."""

import ctypes
from typing import Protocol

import torch

from kvboost_hf.attention.call import AttentionCall, Part, merge_stacked

# As in attend.cu.
_COLUMNS, _PAD = 32, 8
_MIN_SPLIT = 256  # columns that are worth a block
_MAX_SPLITS = 64
MAX_DIM = 256  # with 55 KB of shared memory; a block on sm_75 may have 64 KB


def _pointers(*names: str) -> list[tuple[str, type]]:
    return [(name, ctypes.c_void_p) for name in names]


class Arguments(ctypes.Structure):
    """`Arguments` in attend.cu."""

    _fields_ = (
        *_pointers("query", "key", "value", "keep", "columns", "tree", "mask", "sinks", "out", "wide", "lse"),
        ("query_strides", ctypes.c_longlong * 3),
        ("key_strides", ctypes.c_longlong * 3),
        ("value_strides", ctypes.c_longlong * 3),
        ("mask_strides", ctypes.c_longlong * 4),
        ("keep_strides", ctypes.c_longlong * 2),
        ("columns_strides", ctypes.c_longlong * 2),
        ("tree_strides", ctypes.c_longlong * 2),
        ("queries", ctypes.c_int),
        ("total", ctypes.c_int),
        ("kv_heads", ctypes.c_int),
        ("groups", ctypes.c_int),
        ("causal", ctypes.c_int),
        ("window", ctypes.c_int),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class Kernel(Protocol):
    """`attend` of attend.cu, compiled for some head_dim and value_dim."""

    def __call__(self, arguments: Arguments, grid: tuple[int, int, int], threads: int, shared_bytes: int) -> None:
        """Run it."""


def warps_of(head_dim: int, value_dim: int) -> int:
    """The number of warps of a block; each takes 16 rows of queries."""
    return 4 if head_dim + value_dim <= 256 else 2


def shared_bytes(head_dim: int, value_dim: int) -> int:
    """The shared memory that a block needs."""
    rows = 16 * warps_of(head_dim, value_dim)
    queries = rows * (head_dim + _PAD)
    tiles = _COLUMNS * (head_dim + value_dim + 2 * _PAD)
    halves = max(queries, tiles) if head_dim + value_dim <= 256 else queries + tiles
    return 2 * halves + 4 * rows * (_COLUMNS + _PAD // 2)


def splits_of(blocks: int, columns: int, processors: int) -> int:
    """The number of parts of the columns that gives each processor of the GPU two blocks."""
    return max(1, min(2 * processors // blocks, columns // _MIN_SPLIT, _MAX_SPLITS))


def attend(kernel: Kernel, call: AttentionCall, key: torch.Tensor, value: torch.Tensor, processors: int) -> Part:
    """Compute what `reference.attend` defines.

    Args:
        kernel: Compiled for these dimensions.
        call: Queries, and how their logits are made.
        key: [batch, num_kv_heads, columns, head_dim].
        value: [batch, num_kv_heads, columns, value_dim].
        processors: Streaming multiprocessors of the GPU.
    """
    query, visibility, partial = call.query, call.visibility, call.partial
    batch, heads, queries, head_dim = query.shape
    kv_heads, total, value_dim = value.shape[1:]
    groups, warps = heads // kv_heads, warps_of(head_dim, value_dim)
    tiles = -(-queries * groups // (16 * warps))
    splits = splits_of(max(tiles * batch * kv_heads, 1), total, processors)
    whole = splits == 1 and not partial
    out = query.new_empty(splits, batch, queries, heads, value_dim, dtype=query.dtype if whole else torch.float32)
    lse = query.new_empty(splits, batch, heads, queries, dtype=torch.float32)
    query, key, value = _aligned(query), _aligned(key), _aligned(value)
    seen = {
        "keep": _expand(visibility.keep, batch, total),
        "columns": _expand(visibility.columns, batch, queries),
        "tree": _expand(visibility.tree, batch, queries),
        "mask": _expand(visibility.mask, batch, heads, queries, total),
    }
    sinks = call.sinks.float().contiguous() if call.sinks is not None else None
    tensors = {"query": query, "key": key, "value": value, "sinks": sinks, "lse": lse, **seen}
    arguments = Arguments(
        queries=queries,
        total=total,
        kv_heads=kv_heads,
        groups=groups,
        causal=visibility.causal,
        window=visibility.window if visibility.window < total else 0,
        scale=call.scale,
        softcap=call.softcap,
        **{name: each.data_ptr() for name, each in tensors.items() if each is not None},
        **{f"{name}_strides": each.stride()[:3] for name, each in (("query", query), ("key", key), ("value", value))},
        **{f"{name}_strides": each.stride() for name, each in seen.items() if each is not None},
        **{"out" if whole else "wide": out.data_ptr()},
    )
    if out.numel():
        kernel(arguments, (tiles, batch * kv_heads, splits), 32 * warps, shared_bytes(head_dim, value_dim))
    if splits > 1:
        out, lse = merge_stacked(out, lse)
    else:
        out, lse = out[0], lse[0]
    return (out, lse) if partial else (out.to(query.dtype), lse.new_empty(0))


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied where its rows cannot be read 16 bytes at a time."""
    *strides, last = tensor.stride()
    fits = last == 1 and tensor.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in strides)
    return tensor if fits else tensor.clone(memory_format=torch.contiguous_format)


def _expand(tensor: torch.Tensor | None, *shape: int) -> torch.Tensor | None:
    return tensor.expand(shape) if tensor is not None else None
