"""Codecs: K/V as it is, or in fewer bits."""

import re

from kvboost_hf.cache.codecs.base import Codec, Kivi, Planes, Raw, Role
from kvboost_hf.cache.codecs.turboquant import TurboQuant
from kvboost_hf.config import KVQuantConfig

__all__ = ["Codec", "Planes", "Role", "config_of", "live_config", "make_codec"]

_SPECS = (
    "'raw', 'int8', 'int4', 'int2', 'int8:4', 'int8:2', 'int4:2', 'turboquant', 'turboquant:BITS' or "
    "'turboquant:KEY_BITS:VALUE_BITS'"
)


LiveQuant = str | float | KVQuantConfig | None  # as `live_config` takes it


def make_codec(spec: str | KVQuantConfig | Codec | None) -> Codec:
    """The codec that is meant.

    Args:
        spec: None or `"raw"`: K/V as it is. `"int8"`, `"int4"`, `"int2"`: KIVI; `"int8:4"` has 8 bits for keys and 4
            for values. `"turboquant"`: TurboQuant with 4
            bits; `"turboquant:3.5"` with as many as that, `"turboquant:4:2"` with 4 for keys and 2 for values.
            Anything else is set by a `KVQuantConfig`. A codec is meant itself.

    Raises:
        ValueError: for another spec, or bits that the method does not have.

    Example:
        >>> import torch
        >>> make_codec("int4").nbytes((1, 2, 128, 128), torch.bfloat16, "values")
        18432
    """
    if isinstance(spec, Raw | Kivi | TurboQuant):
        return spec
    config = config_of(spec)  # type: ignore[arg-type]
    if config is None:
        return Raw()
    if config.method == "kivi":
        return Kivi(int(config.key_bits), int(config.value_bits), config.group_size, config.sink_tokens)
    return TurboQuant(config)


def config_of(spec: str | KVQuantConfig | None) -> KVQuantConfig | None:
    """The settings that are meant by a spec of `make_codec`; None for K/V as it is."""
    if spec is None or spec == "raw" or isinstance(spec, KVQuantConfig):
        return spec if isinstance(spec, KVQuantConfig) else None
    if rounded := re.fullmatch(r"int([842])(?::([42]))?", str(spec)):
        return KVQuantConfig(method="kivi", key_bits=int(rounded[1]), value_bits=int(rounded[2] or rounded[1]))
    bits = re.fullmatch(r"turboquant(?::(\d+(?:\.\d+)?))?(?::(\d+(?:\.\d+)?))?", str(spec))
    if bits is None:
        raise ValueError(f"A codec must be {_SPECS}, or a KVQuantConfig, got {spec!r}.")
    key_bits = float(bits[1] or 4)
    return KVQuantConfig(key_bits=key_bits, value_bits=float(bits[2] or key_bits))


def live_config(spec: LiveQuant) -> KVQuantConfig | None:
    """Settings for K/V of a live cache, for `ChunkReuseCache(live_quant=...)`.

    Args:
        spec: Bits of TurboQuant, as a number or as text; else as `make_codec` takes it. None and `"raw"`: as it is.

    Raises:
        ValueError: for another spec, or bits that the method does not have.

    Example:
        >>> live_config("3.5") == live_config(3.5) == live_config("turboquant:3.5")
        True
    """
    text = str(spec)
    if isinstance(spec, bool) or not re.fullmatch(r"\d+(?:\.\d+)?", text):
        return config_of(spec)  # type: ignore[arg-type]
    if not 1 <= float(text) <= 4:
        raise ValueError(f"Live K/V must have from 1 to 4 bits, got {text}. Pass 'int8' for 8 bits.")
    return config_of(f"turboquant:{text}")
