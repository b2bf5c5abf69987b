"""A layer that holds its K/V as codes, and what a cache of such layers takes."""

from collections.abc import Sequence
from functools import lru_cache, partial

import torch
from transformers.cache_utils import CacheLayerMixin

from kvboost_hf.cache.codecs import make_codec
from kvboost_hf.cache.codecs.base import Codec
from kvboost_hf.cache.layers.base import ColumnSpec, Piece, Turn
from kvboost_hf.cache.layers.coded import CodedTensor, block_capacity
from kvboost_hf.cache.layers.growing import ColumnLayer
from kvboost_hf.cache.layers.growing_tensor import capacity, write_behind_padding
from kvboost_hf.compat import LayerRotation
from kvboost_hf.config import KVQuantConfig
from kvboost_hf.handles import CodedKV, CodePlanes, KVHandle, read_in_place


class QuantizedLayer(ColumnLayer):  # type: ignore[no-untyped-call]
    """Full-attention K/V of one layer, in codes but for the first and the last columns; see `coded.py`.

    An attention that can read codes is given them. Any other is given all columns, decoded into tensors that nobody
    else keeps: at any time, those of one layer are whole. What is computed within one forward attends to itself
    exactly. No gradient reaches earlier forwards.

    Args:
        codec: Encodes keys and values.
        config: How many columns stay exact.
        rotation: How the keys turn with their positions, or None.
    """

    can_branch = True
    _tensors: list[CodedTensor]

    def __init__(self, codec: Codec, config: KVQuantConfig, rotation: LayerRotation | None) -> None:
        CacheLayerMixin.__init__(self)  # type: ignore[no-untyped-call]
        self._codec, self._config, self._rotation = codec, config, rotation
        self.version = 0
        self._tampered = False  # somebody else has set keys or values
        self._tensors = self._empty()

    # What transformers calls

    # A compiled model breaks its graph here: shapes and lists change at each step.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [batch, num_kv_heads, m, head_dim] and return everything that may be attended to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.version += 1
        keys, values = self._tensors
        if self.hands_out and not torch.is_grad_enabled() and read_in_place(CodedKV, key_states.device):
            codes = keys.code_planes(), values.code_planes()
            if codes[0] is not None and codes[1] is not None:
                return self._hand_out(codes[0], codes[1], key_states, value_states)
        return keys.append_and_view(key_states), values.append_and_view(value_states)

    def _hand_out(
        self, key_codes: CodePlanes, value_codes: CodePlanes, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append, and return what was codes before as it is held."""
        keys, values = self._tensors
        blocks = keys.blocks
        exact = keys.append(key_states), values.append(value_states)
        lengths = _lengths(blocks, key_states.device)
        kv = CodedKV(key_codes, value_codes, lengths, sum(blocks), keys.sinks, *exact)
        made = (
            KVHandle(kv, partial(tensor.whole, len(blocks), part), part, part.shape[2] + kv.coded)
            for tensor, part in zip(self._tensors, exact, strict=True)
        )
        return next(made), next(made)

    def reset(self) -> None:
        """Drop everything."""
        self.version += 1
        self.is_initialized = self._tampered = False
        self._tensors = self._empty()

    # What the cache calls

    @property
    def intact(self) -> bool:
        """See `ReuseLayer.intact`."""
        return not self._tampered and super().intact

    @property
    def num_coded(self) -> int:
        """Columns held as codes."""
        return sum(self._tensors[0].blocks)

    def fresh(self) -> "QuantizedLayer":
        """An empty layer of the same kind."""
        return QuantizedLayer(self._codec, self._config, self._rotation)

    def lend(self) -> "QuantizedLayer":
        """See `ReuseLayer.lend`: what has become codes cannot be taken back, so that it is another layer."""
        twin = self.share()
        twin.hands_out = self.hands_out
        return twin

    def expect_padding(self, columns: int) -> None:
        """Keep exact what every row of a batch begins with: all columns up to the first tokens of its shortest row."""
        for tensor in self._tensors:
            tensor.keep_first(columns + self._config.sink_tokens)

    def columns(self, row: int, start: int, stop: int) -> Piece | None:
        """A row's columns [start, stop), decoded."""
        if not self.is_initialized:
            return None
        return tuple(tensor.read(start, stop, slice(row, row + 1))[0] for tensor in self._tensors)

    def fill(self, start: int, stop: int, rows: Sequence[Sequence[Piece]], turn: Turn | None = None) -> None:
        """See `ReuseLayer.fill`."""
        assert start == self.length, "every column is needed"
        like = next(piece for pieces in rows for piece in pieces)
        if not self.is_initialized:
            self.lazy_initialization(like[0], like[1])
        self.version += 1
        for i, tensor in enumerate(self._tensors):
            heads, _, dim = like[i].shape
            new = like[i].new_empty(len(rows), heads, stop - start, dim)
            for out, pieces in zip(new, rows, strict=True):
                write_behind_padding(out, [piece[i] for piece in pieces])
            tensor.append(new)

    @property
    def column_specs(self) -> tuple[ColumnSpec, ...]:
        """See `ReuseLayer.column_specs`; decoded."""
        held = [tensor.like for tensor in self._tensors] if self.is_initialized else []
        return tuple(ColumnSpec(like.shape[1], like.shape[3], like.dtype) for like in held)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and exact columns, room to spare included."""
        return sum(tensor.nbytes for tensor in self._tensors)

    def _empty(self) -> list[CodedTensor]:
        rotation = self._rotation if self._rotation is not None and self._rotation.tensor == 0 else None
        sizes = self._config.sink_tokens, self._config.window
        keys = CodedTensor(self._codec, "keys", rotation, *sizes)
        return [keys, CodedTensor(self._codec, "values", None, *sizes)]

    def _hand_out_tensor(self, index: int) -> torch.Tensor:
        """Decoded, in a tensor that nobody else reads."""
        return self._tensors[index].read(0, self._tensors[index].stop)

    def _adopt(self, index: int, new: torch.Tensor | None) -> None:
        self._tampered = True
        self._tensors[index] = self._empty()[index]
        if new is not None:
            self._tensors[index].append(new)

    @property
    def _batch_size(self) -> int:
        return self._tensors[0].like.shape[0]


@lru_cache(maxsize=16)  # layers have the same blocks, and keep them for many steps
def _lengths(blocks: tuple[int, ...], device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor(blocks, dtype=torch.int32, device=device)


def exact_layers(config: KVQuantConfig, layers: int) -> int:
    """How many layers at either end of a model with so many stay exact."""
    return min(config.exact_layers, layers // 4)


def mark(config: KVQuantConfig) -> bytes:
    """Names all that K/V computed on top of codes depends on."""
    parts = (make_codec(config).name, config.window, config.exact_layers)  # its name tells the `sink_tokens`
    return repr(parts).encode()


def live_bytes(
    config: KVQuantConfig,
    *,
    tokens: int,
    layers: int,
    kv_heads: int,
    head_dim: int,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> int:
    """Bytes of a cache with live quantization after a prompt, room to spare included.

    While tokens are decoded one by one, it is what the cache takes at most: its buffers grow by an eighth at a time.

    Args:
        config: As it was passed as `live_quant`.
        tokens: Columns that the cache holds: padding and all.
        layers: Of the model; all with full attention.
        kv_heads: Heads of keys, and of values.
        head_dim: Of both.
        batch: Rows, without padding.
        dtype: Of the model.

    Example:
        >>> config = KVQuantConfig(key_bits=4, value_bits=4)  # 4 GiB as it is
        >>> shapes = {"layers": 32, "kv_heads": 8, "head_dim": 128}
        >>> f"{live_bytes(config, tokens=32_768, **shapes) / 2**30:.2f} GiB"
        '1.55 GiB'
    """
    codec, window = make_codec(config), config.window
    column = batch * kv_heads * head_dim * dtype.itemsize
    blocks = max((tokens - config.sink_tokens) // window - 1, 0)
    coded = 2 * column * (config.sink_tokens + 2 * window)
    if blocks:
        shape = (batch * block_capacity(blocks), kv_heads, window, head_dim)
        coded += codec.nbytes(shape, dtype, "keys") + codec.nbytes(shape, dtype, "values")
    exact = 2 * exact_layers(config, layers)
    return exact * 2 * column * capacity(tokens) + (layers - exact) * coded
