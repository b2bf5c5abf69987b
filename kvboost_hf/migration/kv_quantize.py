"""`kvboost.kv_quantize`: K/V of a prompt as codes of 8 or 4 bits, by the codecs `"int8"` and `"int4"` (KIVI)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvboost_hf.cache.codecs import make_codec
from kvboost_hf.cache.codecs.base import Planes, Role

__all__ = ["QuantizedKV", "QuantizedLayer", "dequantize_kv", "quantize_kv"]

PastKV = Sequence[tuple[torch.Tensor, torch.Tensor]]
_CODECS = {8: "int8", 4: "int4", 16: "raw"}


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """Codes of one layer."""

    keys: Planes  # codes and scales, as the codec makes them
    values: Planes
    shapes: tuple[torch.Size, torch.Size]  # of keys and values, each [batch, heads, tokens, head_dim]


@dataclass(frozen=True, slots=True)
class QuantizedKV:
    """K/V of all layers as codes."""

    layers: list[QuantizedLayer]
    bits: int  # 8, 4, or 16 for K/V as it is
    original_dtype: torch.dtype


def quantize_kv(kv: PastKV, bits: int = 8) -> QuantizedKV:
    """Encode K/V, keys for each channel and values for each token (KIVI, https://arxiv.org/abs/2402.02750).

    Args:
        kv: Keys and values of each layer, [batch, heads, tokens, head_dim].
        bits: 8, 4, or 16 for K/V as it is.
    """
    if bits not in _CODECS:
        raise ValueError(f"`bits` must be 8, 4 or 16, got {bits!r}.")
    if not isinstance(kv, Sequence) or not kv:
        raise ValueError("`kv` must have the keys and values of one layer or more, got none.")
    if not all(len(pair) == 2 and all(x.ndim == 4 for x in pair) for pair in kv):
        raise ValueError("`kv` must have keys and values [batch, heads, tokens, head_dim] for each layer.")
    codec = make_codec(_CODECS[bits])

    def encoded(x: torch.Tensor, role: Role) -> Planes:
        return {"raw": x} if codec.lossless else codec.encode(x.flatten(0, 1)[None], role, [None])

    layers = [QuantizedLayer(encoded(k, "keys"), encoded(v, "values"), (k.shape, v.shape)) for k, v in kv]
    return QuantizedKV(layers, bits, kv[0][0].dtype)


def dequantize_kv(qkv: QuantizedKV) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """Decode what `quantize_kv` has made, in the data type that the K/V had."""
    codec = make_codec(_CODECS[qkv.bits])

    def decoded(planes: Planes, shape: torch.Size, role: Role) -> torch.Tensor:
        if codec.lossless:
            return planes["raw"]
        batch, heads, tokens, dim = shape
        entries = {name: plane[0] for name, plane in planes.items()}
        return codec.decode(entries, (batch * heads, tokens, dim), qkv.original_dtype, role, None).view(shape)

    return tuple(
        (decoded(layer.keys, layer.shapes[0], "keys"), decoded(layer.values, layer.shapes[1], "values"))
        for layer in qkv.layers
    )
