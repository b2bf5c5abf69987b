"""Codecs that are broken on purpose: a check that one of them passes tells nothing."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch

from kvboost_hf.cache.codecs import Codec, Role, make_codec
from kvboost_hf.compat import LayerRotation
from kvboost_hf.config import KVQuantConfig
from kvboost_hf.verify.measure import WatchedCodec

Damage = Literal["zeroed", "shuffled", "another seed"]


def sabotaged(config: KVQuantConfig, damage: Damage, role: Role | None = None) -> WatchedCodec:
    """A codec that encodes as it should, and decodes something else.

    Args:
        config: The config of the codec.
        damage: What becomes of what is decoded: zeros; each token has that of another one; or it is decoded with
            another rotation than it was encoded with.
        role: What it is done to; None for keys and values.
    """
    codec, other = make_codec(config), make_codec(replace(config, seed=config.seed + 1))

    def decode(
        planes: Mapping[str, torch.Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        decoded: Role,
        rotation: LayerRotation | None,
    ) -> torch.Tensor:
        spared = role not in (None, decoded)
        by = other if damage == "another seed" and not spared else codec
        x = by.decode(planes, shape, dtype, decoded, rotation)
        if spared or damage == "another seed":
            return x
        return torch.zeros_like(x) if damage == "zeroed" else x.roll(x.shape[-2] // 2, -2)

    return WatchedCodec(codec, f"{codec.name}:{damage}", decode)


def controls(config: KVQuantConfig, role: Role | None = None) -> dict[str, Codec]:
    """All that can be done to a codec; KIVI has no seed."""
    kinds: tuple[Damage, ...] = ("zeroed", "shuffled", "another seed")
    return {kind: sabotaged(config, kind, role) for kind in kinds[: 2 if config.method == "kivi" else 3]}
