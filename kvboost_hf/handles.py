"""Handles of keys and values, so that an attention reads them where a cache holds them.

`Cache.update` may return two `KVHandle` in place of keys and values. `kvboost_fa2` reads the pieces or codes that they
refer to; for any other operation they turn into the tensors that they stand for.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map

ATTENTION = "kvboost_fa2"  # as transformers knows the attention that can read them


@dataclass(frozen=True, slots=True, eq=False)
class CodePlanes:
    """Keys or values as codes that a kernel can decode, in blocks of the same number of tokens.

    Either `least` and `step` are there, and a number is `least + step * code`; or `scale` and `codebook` are, and a
    vector is `(scale * codebook[codes]) @ rotation`, with `mean` turned to its token's position added to it.

    Codes share bytes as `cache/codecs/base.py` says: with `bits` 1, 2, 4 and `width = head_dim * bits / 8`, code j
    is in byte `j % width`, `bits * (j // width)` bits up. With 3 bits, the lower two are so in the first
    `head_dim / 4` bytes, and the third one in the `head_dim / 8` bytes behind them.
    """

    bits: int  # 1, 2, 3, 4 or 8
    codes: torch.Tensor  # [batch, blocks, heads, tokens, bytes], uint8. Only the first two strides are free.
    # The least value of each group. For keys, [batch, blocks, heads, groups of tokens, head_dim]; for values,
    # [batch, blocks, heads, tokens, groups of dimensions].
    least: torch.Tensor | None = None
    step: torch.Tensor | None = None  # like `least`
    group_size: int = 0  # tokens, or dimensions, in a group; the last one may be shorter
    scale: torch.Tensor | None = None  # [batch, blocks, heads, tokens]
    codebook: torch.Tensor | None = None  # [2 ** bits], float32, ascending; each number's opposite is in it, too
    rotation: torch.Tensor | None = None  # [head_dim, head_dim], float32
    mean: torch.Tensor | None = None  # [batch, blocks, heads, head_dim], or None
    cos: torch.Tensor | None = None  # [tokens, head_dim], float32, or None where the mean is the same at each position
    # Like `cos`, signed: the mean at token t is `mean * cos[t] + mean[partner] * sin[t]`.
    sin: torch.Tensor | None = None
    partner: torch.Tensor | None = None  # [head_dim], int32: the dimension that each one turns with


@dataclass(frozen=True, slots=True, eq=False)
class CodedKV:
    """K/V of a layer of which some columns in the middle are codes."""

    keys: CodePlanes  # codes of the keys from column `first` on
    values: CodePlanes  # codes of the values of the same columns
    lengths: torch.Tensor  # [blocks], int32: how many of the first tokens of each block are columns
    coded: int  # the number of columns that are codes: the sum of `lengths`
    first: int  # the first of them
    exact_keys: torch.Tensor  # [batch, num_kv_heads, columns, head_dim]: the keys before and behind the codes
    exact_values: torch.Tensor  # the values of the same columns


@dataclass(frozen=True, slots=True, eq=False)
class PieceTable:
    """K/V of the first columns of a layer, in pieces that lie anywhere on the device."""

    keys: tuple[torch.Tensor, ...]  # the keys of each piece, [num_kv_heads, tokens, head_dim]; the last stride is 1
    values: tuple[torch.Tensor, ...]  # the values of each piece, like `keys`
    # [batch, pieces, 3], int64, in host memory: for each row its pieces in order, as the number of the piece,
    # the column of its first token, and the row of `cos` and `sin` that moves its keys, or -1. Rows with fewer
    # pieces end in -1, -1, -1.
    rows: torch.Tensor
    columns: int  # the number of these columns, the same for all rows
    cos: torch.Tensor | None = None  # [shifts, head_dim], float32, or None where nothing moves
    # Like `cos`, signed: a query is turned back by `query * cos + query[partner] * sin`.
    sin: torch.Tensor | None = None
    partner: torch.Tensor | None = None  # [head_dim], int32
    # [batch, pieces, 9], int64, on the device: for a kernel, of each piece of a row the addresses of its keys
    # and of its values, the strides of the heads and tokens of both, its tokens, the column of the first one,
    # and the row of `cos` and `sin`. Made of the other ones, where all are of one dtype and aligned to 16 bytes.
    places: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.places is None:
            object.__setattr__(self, "places", _places(self.keys, self.values, self.rows))


def _places(keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], rows: torch.Tensor) -> torch.Tensor | None:
    if len({each.dtype for each in (*keys, *values)}) > 1:
        return None
    pieces = []
    for key, value in zip(keys, values, strict=True):
        starts, strides = (key.data_ptr(), value.data_ptr()), (*key.stride()[:2], *value.stride()[:2])
        if any(at % 16 for at in starts) or any(stride * key.itemsize % 16 for stride in strides):
            return None
        pieces.append((*starts, *strides, key.shape[1]))
    none = (0,) * 7
    found = [[(*(pieces[i] if i >= 0 else none), column, shift) for i, column, shift in row] for row in rows.tolist()]
    return torch.tensor(found, dtype=torch.int64).view(*rows.shape[:2], 9).to(keys[0].device)


@dataclass(frozen=True, slots=True, eq=False)
class PiecedKV:
    """K/V of a layer of which the first columns are in pieces. All queries are behind these."""

    table: PieceTable  # the columns [0, table.columns)
    keys: torch.Tensor  # [batch, num_kv_heads, columns, head_dim]: the keys of the columns behind the pieces
    values: torch.Tensor  # the values of the same columns
    # [batch, columns], bool: False for padding among the columns behind the pieces, where no column of a piece
    # is padding; None where the mask tells it.
    keep: torch.Tensor | None = None


MixedKV = CodedKV | PiecedKV  # some columns are pieces or codes, and the others tensors


class KVHandle(torch.Tensor):
    """A tensor that stands for the keys or the values [batch, num_kv_heads, columns, head_dim] of a layer.

    Args:
        kv: Keys and values, as the cache holds them.
        dense: Makes the tensor of all columns; called at most once.
        like: A tensor with the batch size, heads, head_dim, dtype and device.
        columns: The number of columns.
    """

    kv: MixedKV

    @staticmethod
    def __new__(cls, kv: MixedKV, dense: Callable[[], torch.Tensor], like: torch.Tensor, columns: int) -> "KVHandle":
        shape = (*like.shape[:2], columns, like.shape[3])
        made: KVHandle = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        return made

    def __init__(self, kv: MixedKV, dense: Callable[[], torch.Tensor], like: torch.Tensor, columns: int) -> None:
        self.kv = kv
        self._make = dense
        self._made: torch.Tensor | None = None
        self._version_made = 0

    def dense(self) -> torch.Tensor:
        """Return all columns in one tensor, which is made once."""
        if self._made is None:
            self._made = self._make()
            self._version_made = -1 if self._made.is_inference() else self._made._version
        return self._made

    @property
    def is_written(self) -> bool:
        """Whether somebody has written to it; only the tensor made by `dense` has the change, not the cache."""
        if not self.is_inference() and self._version:
            return True
        made = self._made
        return made is not None and not made.is_inference() and made._version != self._version_made

    @property
    def is_dense(self) -> bool:
        """Whether `dense` has made its tensor."""
        return self._made is not None

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"KVHandle({type(self.kv).__name__}, shape={tuple(self.shape)})"

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        def plain(value: Any) -> Any:
            return value.dense() if isinstance(value, KVHandle) else value

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


Reader = Callable[[type[MixedKV], torch.device], bool]
_readers: dict[str, Reader] = {}


def read_in_place(kind: type[MixedKV], device: torch.device) -> bool:
    """Whether a registered attention reads K/V of this kind in place on a device, faster than it is made dense."""
    return any(reads(kind, device) for reads in _readers.values())


def register_reader(name: str, reads: Reader) -> None:
    """Register an attention under a name; `read_in_place` asks `reads` for what it reads."""
    _readers[name] = reads
