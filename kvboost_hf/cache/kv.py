"""What the store keeps of a chunk, of all layers: columns, or the states at a point."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvboost_hf.cache.layers import LayerState, Piece, ReuseLayer


@dataclass(frozen=True, slots=True, eq=False)
class LayerKV:
    """Keys and values of a chunk, owned, in as few blocks as their shapes and devices allow.

    All layers of a chunk come and go together, so that one block, and one transfer, serves them all where the layers
    are alike. Layers with a window have blocks of their own: far from the end of a prompt they are not needed.

    Args:
        blocks: Contiguous tensors [tensors, heads, tokens, dim] in host memory.
        places: Per layer, where each of its tensors is, (block, index); None for a layer without columns.
        devices: Per block, where the model computed it.
    """

    blocks: tuple[torch.Tensor, ...]
    places: tuple[tuple[tuple[int, int], ...] | None, ...]
    devices: tuple[torch.device, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.nbytes for block in self.blocks)

    def reader(self) -> "LayerKVReader":
        """Access where the model computes."""
        return LayerKVReader(self)


class LayerKVReader:
    """Columns of a chunk where the model computes: views on a CPU, else one transfer for each block that is read."""

    def __init__(self, kv: LayerKV) -> None:
        self._kv = kv
        self._blocks: dict[int, tuple[torch.Tensor, ...]] = {}

    def layer(self, index: int) -> Piece | None:
        """The tensors of a layer, [heads, tokens, dim] each, or None if it has no columns."""
        places = self._kv.places[index]
        return tuple(self._block(block)[at] for block, at in places) if places is not None else None

    def _block(self, index: int) -> tuple[torch.Tensor, ...]:
        if index not in self._blocks:
            block = self._kv.blocks[index].to(self._kv.devices[index], non_blocking=True)
            self._blocks[index] = block.unbind()
        return self._blocks[index]


def copy_columns(layers: Sequence[ReuseLayer], row: int, start: int, stop: int) -> LayerKV:
    """Copy a row's columns [start, stop) of every layer to host memory."""
    groups: dict[tuple[torch.device, torch.dtype, torch.Size, bool], list[torch.Tensor]] = {}
    places: list[tuple[tuple[int, int], ...] | None] = []

    def place(part: torch.Tensor, windowed: bool) -> tuple[int, int]:
        group = groups.setdefault((part.device, part.dtype, part.shape, windowed), [])
        group.append(part.detach())
        return next(i for i, other in enumerate(groups.values()) if other is group), len(group) - 1

    for layer in layers:
        columns = layer.columns(row, start, stop)
        places.append(tuple(place(part, layer.is_sliding) for part in columns) if columns is not None else None)
    blocks = tuple(torch.stack(group).cpu() for group in groups.values())
    return LayerKV(blocks, tuple(places), tuple(device for device, *_ in groups))


@dataclass(frozen=True, slots=True, eq=False)
class LayerStates:
    """The states of all layers of one row after some token; None for a layer without one."""

    layers: tuple[LayerState | None, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(state.nbytes for state in self.layers if state is not None)


def copy_states(layers: Sequence[ReuseLayer], row: int) -> LayerStates:
    """Copy a row's states of every layer to host memory."""
    return LayerStates(tuple(layer.save_state(row) for layer in layers))
