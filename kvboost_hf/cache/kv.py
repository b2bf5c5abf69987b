"""K/V of one chunk in every layer, as the store keeps it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvboost_hf.cache.layers import GrowingLayer, Piece


@dataclass(frozen=True, slots=True, eq=False)
class LayerKV:
    """Keys and values of a chunk, owned, in as few blocks as their shapes and devices allow.

    All layers of a chunk come and go together, so that one block, and one transfer, serves them all where the layers
    are alike.

    Args:
        blocks: Contiguous tensors [tensors, num_kv_heads, tokens, head_dim] in host memory.
        places: Per layer, where its keys and its values are, (block, index) each; None for a layer without K/V.
        devices: Per block, where the model computed it.
    """

    blocks: tuple[torch.Tensor, ...]
    places: tuple[tuple[tuple[int, int], tuple[int, int]] | None, ...]
    devices: tuple[torch.device, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(block.nbytes for block in self.blocks)

    def load(self) -> list[Piece | None]:
        """Keys and values of every layer, where the model computes: views on a CPU, else one transfer a block."""
        blocks = [b.to(d, non_blocking=True).unbind() for b, d in zip(self.blocks, self.devices, strict=True)]
        return [
            (blocks[place[0][0]][place[0][1]], blocks[place[1][0]][place[1][1]]) if place is not None else None
            for place in self.places
        ]


def copy_columns(layers: Sequence[GrowingLayer], row: int, start: int, stop: int) -> LayerKV:
    """Copy a row's columns [start, stop) of every layer to host memory."""
    groups: dict[tuple[torch.device, torch.dtype, torch.Size], list[torch.Tensor]] = {}
    places: list[tuple[tuple[int, int], tuple[int, int]] | None] = []

    def place(kv: torch.Tensor) -> tuple[int, int]:
        part = kv[row, :, start:stop].detach()
        group = groups.setdefault((part.device, part.dtype, part.shape), [])
        group.append(part)
        return next(i for i, other in enumerate(groups.values()) if other is group), len(group) - 1

    for layer in layers:
        places.append((place(layer.keys), place(layer.values)) if layer.is_initialized else None)
    blocks = tuple(torch.stack(group).cpu() for group in groups.values())
    return LayerKV(blocks, tuple(places), tuple(device for device, _, _ in groups))
