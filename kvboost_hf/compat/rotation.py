"""Moves stored keys to other positions, by rotating them by the distance.

A key at position p is R(p)·k, so that the key at p + shift is R(shift) times that. All tokens of a chunk move by the
same distance, so that a text needs few cosines and sines: `Shifts` copies those of all layers to a device at once. The
factor that YaRN and LongRoPE multiply cosines with is already in the stored keys.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

Style = Literal["half", "interleaved"]

# Elements that are rotated at once on a CPU, so that they stay in its caches between the steps.
_CPU_BLOCK = 1 << 18


@dataclass(frozen=True, slots=True, eq=False)
class LayerRotation:
    """How the keys of a layer rotate with their positions."""

    # Radians per position, [pairs], float32, in host memory; negative where a model turns the other way.
    inv_freq: torch.Tensor
    # Which rotated dimensions are a pair: `"half"` for i and i + pairs, `"interleaved"` for 2i and 2i + 1.
    style: Style
    offset: int  # the first rotated one of a head's dimensions; they are [offset, stop)
    # The cache tensor that is rotated: 0 for keys; 1 for values, in which models with latent attention keep the
    # rotated part of their keys, while the compressed rest is in keys.
    tensor: int = 0

    @property
    def stop(self) -> int:
        """The first dimension behind the rotated ones."""
        return self.offset + 2 * self.inv_freq.numel()

    def rotate(self, keys: torch.Tensor, shift: int, out: torch.Tensor) -> torch.Tensor:
        """Write keys [..., tokens, head_dim], moved by `shift`, to `out`, and return it."""
        return self.rotate_by(keys, _cos_sin(self.inv_freq.double() * shift).to(keys.device), out)

    def rotate_each(self, keys: torch.Tensor, shifts: range, out: torch.Tensor) -> torch.Tensor:
        """Write keys [..., heads, tokens, head_dim], token t moved by `shifts[t]`, to `out`, and return it."""
        return self.rotate_by(keys, _cos_sin_each(self, shifts, keys.device), out)

    def partners(self, keys: torch.Tensor) -> torch.Tensor:
        """A copy of keys [..., head_dim], with the two dimensions of each pair swapped."""
        pairs = (2, -1) if self.style == "half" else (-1, 2)
        swapped = keys.clone()
        rotated = torch.unflatten(keys[..., self.offset : self.stop], -1, pairs)
        swapped[..., self.offset : self.stop] = rotated.flip(-2 if self.style == "half" else -1).flatten(-2)
        return swapped

    def rotate_by(self, keys: torch.Tensor, cos_sin: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write keys [..., tokens, head_dim], turned by cosines and sines [2, ..., pairs], to `out`, and return it.

        `out` is apart from `keys` in memory, or is `keys`.
        """
        turn = _turn_half if self.style == "half" else _turn_interleaved
        for part, part_out, (cos, sin) in _blocks(keys, out, cos_sin):
            if out is not keys:
                part_out[..., : self.offset].copy_(part[..., : self.offset])
                part_out[..., self.stop :].copy_(part[..., self.stop :])
            rotated, target = part[..., self.offset : self.stop], part_out[..., self.offset : self.stop]
            if keys.dtype != torch.float32:
                whole = rotated.float()
                target.copy_(turn(whole, cos, sin, torch.empty_like(whole)))
            else:
                turn(rotated.clone() if out is keys else rotated, cos, sin, target)
        return out


@dataclass(frozen=True, slots=True, eq=False)
class KeyRotation:
    """How the keys of a model rotate with their positions."""

    # One for each layer of the model's cache; None for a layer without keys, or whose keys do not depend on
    # positions. Layers that rotate alike share one object.
    layers: tuple[LayerRotation | None, ...]

    def rotated(self, layer_idx: int) -> int:
        """Which tensor of a layer depends on positions: 0 for keys, 1 for values."""
        layer = self.layers[layer_idx]
        return layer.tensor if layer is not None else 0

    @torch.no_grad()
    def rotate(
        self, layer_idx: int, keys: torch.Tensor, shift: "int | Shifts", out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Move keys by `shift` positions.

        Args:
            layer_idx: A layer of the cache.
            keys: The layer's `rotated` tensor, [..., tokens, head_dim], on any device. Those of layers that rotate
                alike may be stacked: [layers, heads, tokens, head_dim].
            shift: New positions minus old ones: the same for all tokens, or the `Shifts` of keys
                [batch, heads, tokens, head_dim].
            out: Where to write: `keys`, or a tensor of their shape in other memory.

        Returns:
            `out`, or a new tensor like `keys`; without `out`, `keys` itself if nothing turns. It is computed in
            float32, and rounded once.

        Example:
            >>> rotation = KeyRotation((LayerRotation(torch.tensor([torch.pi / 2]), "half", 0), None))
            >>> rotation.rotate(0, torch.tensor([[2.0, 0.0]]), shift=1).round().abs()
            tensor([[0., 2.]])
        """
        layer = self.layers[layer_idx]
        if layer is None or shift == 0:
            return keys if out is None or out is keys else out.copy_(keys)
        out = torch.empty_like(keys) if out is None else out
        if isinstance(shift, Shifts):
            return layer.rotate_by(keys, shift.cos_sin(layer, keys.device), out)
        return layer.rotate(keys, shift, out)


class Shifts:
    """By how many positions each token of a batch moves: cosines and sines for all layers, on each device once.

    Args:
        rotation: The rotation of the model.
        shifts: [batch, tokens], new positions minus old ones.
        send: Copies a tensor to a device: once to each, whatever the number of layers, and of shifts.
    """

    def __init__(
        self,
        rotation: KeyRotation,
        shifts: NDArray[np.int64],
        send: Callable[[torch.Tensor, torch.device], torch.Tensor] = torch.Tensor.to,
    ) -> None:
        distinct, self._which = np.unique(shifts, return_inverse=True)
        self._shape = shifts.shape
        self._kinds = list(dict.fromkeys(layer for layer in rotation.layers if layer is not None))
        angles = [torch.from_numpy(distinct)[:, None] * kind.inv_freq.double() for kind in self._kinds]
        self._tables = [_cos_sin(each) for each in angles]  # [2, distinct shifts, pairs]
        self._send = send
        self._on: dict[torch.device, dict[LayerRotation, torch.Tensor]] = {}

    def cos_sin(self, layer: LayerRotation, device: torch.device) -> torch.Tensor:
        """Cosines and sines for each token, [2, batch, 1, tokens, pairs], float32."""
        if device not in self._on:
            self._on[device] = self._copied(device)
        return self._on[device][layer]

    def _copied(self, device: torch.device) -> dict[LayerRotation, torch.Tensor]:
        numbers = torch.from_numpy(self._which.reshape(-1).astype(np.int32))
        parts = [numbers, *(table.view(torch.int32).flatten() for table in self._tables)]
        which, *tables = torch.split(self._send(torch.cat(parts), device), [part.numel() for part in parts])
        found: dict[LayerRotation, torch.Tensor] = {}
        for kind, table, host in zip(self._kinds, tables, self._tables, strict=True):
            each = table.view(torch.float32).view(host.shape).index_select(1, which)
            found[kind] = each.view(2, self._shape[0], 1, self._shape[1], host.shape[2])
        return found


def _cos_sin(angles: torch.Tensor) -> torch.Tensor:
    # Of float64, and on the CPU, for not all devices have it: a float32 angle of 16,384 radians is off by 0.001.
    return torch.stack([angles.cos(), angles.sin()]).float()


@lru_cache(maxsize=16)  # layers that rotate alike share it, and so do chunks of the same length
def _cos_sin_each(layer: LayerRotation, shifts: range, device: torch.device) -> torch.Tensor:
    return _cos_sin(torch.tensor(shifts, dtype=torch.float64, device="cpu")[:, None] * layer.inv_freq.double()).to(
        device
    )


def _blocks(
    keys: torch.Tensor, out: torch.Tensor, cos_sin: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """All three, cut alike along their tokens; cosines and sines that all tokens share are not cut."""
    if keys.device.type != "cpu" or keys.numel() <= _CPU_BLOCK:
        yield keys, out, cos_sin
        return
    size = max(1, _CPU_BLOCK * keys.shape[-2] // keys.numel())
    for start in range(0, keys.shape[-2], size):
        tokens = slice(start, start + size)
        own = cos_sin[..., tokens, :] if cos_sin.ndim > 2 else cos_sin
        yield keys[..., tokens, :], out[..., tokens, :], own


def _turn_half(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    first, second = keys.chunk(2, dim=-1)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
    return out


def _turn_interleaved(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    pairs, out_pairs = (torch.view_as_complex(torch.unflatten(kept, -1, (-1, 2))) for kept in (keys, out))
    torch.mul(pairs, torch.complex(cos, sin), out=out_pairs)
    return out
