"""Codecs that are broken on purpose: a check that one of them passes tells nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch

from kvboost_hf.cache.codecs import Codec, Planes, Role, make_codec
from kvboost_hf.compat import LayerRotation
from kvboost_hf.config import KVQuantConfig
from kvboost_hf.handles import CodePlanes

Damage = Literal["zeroed", "shuffled", "another seed"]


class Sabotaged:
    """A codec that encodes as it should, and decodes something else.

    Args:
        config: Of the codec.
        damage: What becomes of what is decoded: zeros; each token has that of another one; or it is decoded with
            another rotation than it was encoded with.
        role: What it is done to; None for keys and values.
    """

    lossless = False

    def __init__(self, config: KVQuantConfig, damage: Damage, role: Role | None = None) -> None:
        self._codec, self._damage, self._role = make_codec(config), damage, role
        self._other = make_codec(replace(config, seed=config.seed + 1))
        self.name = f"{self._codec.name}:{damage}"

    def encode(self, x: torch.Tensor, role: Role, rotations: Sequence[LayerRotation | None]) -> Planes:
        """See `Codec.encode`."""
        return self._codec.encode(x, role, rotations)

    def decode(
        self,
        planes: Mapping[str, torch.Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        role: Role,
        rotation: LayerRotation | None,
    ) -> torch.Tensor:
        """See `Sabotaged`."""
        spared = self._role not in (None, role)
        codec = self._other if self._damage == "another seed" and not spared else self._codec
        x = codec.decode(planes, shape, dtype, role, rotation)
        if spared or self._damage == "another seed":
            return x
        return torch.zeros_like(x) if self._damage == "zeroed" else x.roll(x.shape[-2] // 2, -2)

    def nbytes(self, shape: tuple[int, int, int, int], dtype: torch.dtype, role: Role) -> int:
        """See `Codec.nbytes`."""
        return self._codec.nbytes(shape, dtype, role)

    def code_planes(
        self,
        planes: Mapping[str, torch.Tensor],
        role: Role,
        rotation: LayerRotation | None,
        tokens: int,
        head_dim: int,
    ) -> CodePlanes | None:
        """See `Codec.code_planes`; codes have to be decoded, to be damaged."""
        return None


def controls(config: KVQuantConfig, role: Role | None = None) -> dict[str, Codec]:
    """All that can be done to a codec; KIVI has no seed."""
    kinds: tuple[Damage, ...] = ("zeroed", "shuffled", "another seed")
    return {kind: Sabotaged(config, kind, role) for kind in kinds[: 2 if config.method == "kivi" else 3]}
