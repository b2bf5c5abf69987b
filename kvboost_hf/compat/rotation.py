"""Moving stored keys to other positions: with rotary embeddings, rotating them by the distance.

A key at position p is R(p)·k, so that the one at p + shift is R(shift) times it. All tokens of a chunk move by the
same distance: one vector of cosines and sines serves them all. What a model multiplies its cosines with (the
attention factor of YaRN and LongRoPE) is in the stored keys already, and stays there.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch

Style = Literal["half", "interleaved"]

# Elements that are rotated at once on a CPU, so that they stay in its caches between the steps.
_CPU_BLOCK = 1 << 18


@dataclass(frozen=True, slots=True, eq=False)
class LayerRotation:
    """How the keys of a layer rotate with their positions.

    Args:
        inv_freq: Radians per position, [pairs], float32, in host memory; negative where a model turns the other way.
        style: Which rotated dimensions are a pair: `"half"` for i and i + pairs, `"interleaved"` for 2i and 2i + 1.
        offset: The first rotated one of a head's dimensions; they are [offset, stop).
        tensor: Which of the tensors that a cache keeps they are: 0 for its keys; 1 for its values, where models with
            latent attention keep the rotated part of their keys, and keep the rest compressed as keys.
    """

    inv_freq: torch.Tensor
    style: Style
    offset: int
    tensor: int = 0

    @property
    def stop(self) -> int:
        """The first dimension behind the rotated ones."""
        return self.offset + 2 * self.inv_freq.numel()

    def rotate(self, keys: torch.Tensor, shift: int, out: torch.Tensor) -> torch.Tensor:
        """Write keys [..., tokens, head_dim], moved by `shift`, to `out`, and return it."""
        return self._turn(keys, _cos_sin(self.inv_freq.double() * shift, keys.device), out)

    def rotate_each(self, keys: torch.Tensor, shifts: range, out: torch.Tensor) -> torch.Tensor:
        """Write keys [..., heads, tokens, head_dim], token t moved by `shifts[t]`, to `out`, and return it."""
        return self._turn(keys, _cos_sin_each(self, shifts, keys.device), out)

    def partners(self, keys: torch.Tensor) -> torch.Tensor:
        """A copy of keys [..., head_dim], in which dimensions that rotate together have changed places."""
        pairs = (2, -1) if self.style == "half" else (-1, 2)
        swapped = keys.clone()
        rotated = torch.unflatten(keys[..., self.offset : self.stop], -1, pairs)
        swapped[..., self.offset : self.stop] = rotated.flip(-2 if self.style == "half" else -1).flatten(-2)
        return swapped

    def _turn(self, keys: torch.Tensor, cos_sin: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        cos, sin = cos_sin
        turn = _turn_half if self.style == "half" else _turn_interleaved
        for part, part_out in _blocks(keys, out):
            part_out[..., : self.offset].copy_(part[..., : self.offset])
            part_out[..., self.stop :].copy_(part[..., self.stop :])
            rotated, target = part[..., self.offset : self.stop], part_out[..., self.offset : self.stop]
            if keys.dtype == torch.float32:
                turn(rotated, cos, sin, target)
            else:
                whole = rotated.float()
                target.copy_(turn(whole, cos, sin, torch.empty_like(whole)))
        return out


@dataclass(frozen=True, slots=True, eq=False)
class KeyRotation:
    """How the keys of a model rotate with their positions.

    Args:
        layers: One for each layer of the model's cache; None where keys tell no positions, or there are none. Layers
            that rotate alike share one object.
    """

    layers: tuple[LayerRotation | None, ...]

    def rotated(self, layer_idx: int) -> int:
        """Which of a layer's tensors, keys and values, tells positions; the other one does not."""
        layer = self.layers[layer_idx]
        return layer.tensor if layer is not None else 0

    @torch.no_grad()
    def rotate(self, layer_idx: int, keys: torch.Tensor, shift: int, out: torch.Tensor | None = None) -> torch.Tensor:
        """Move keys by `shift` positions.

        Args:
            layer_idx: A layer of the cache.
            keys: The layer's `rotated` tensor, [..., tokens, head_dim], on any device. Those of layers that rotate
                alike may be stacked: [layers, heads, tokens, head_dim].
            shift: New positions minus old ones, the same for all tokens.
            out: Where to write: shaped like `keys`, and apart from them in memory.

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
            return keys if out is None else out.copy_(keys)
        return layer.rotate(keys, shift, torch.empty_like(keys) if out is None else out)


def _cos_sin(angles: torch.Tensor, device: torch.device) -> torch.Tensor:
    # Of float64, and on the CPU, for not all devices have it: a float32 angle of 16,384 radians is off by 0.001.
    return torch.stack([angles.cos(), angles.sin()]).float().to(device)


@lru_cache(maxsize=16)  # layers that rotate alike share it, and so do chunks of the same length
def _cos_sin_each(layer: LayerRotation, shifts: range, device: torch.device) -> torch.Tensor:
    return _cos_sin(torch.tensor(shifts, dtype=torch.float64)[:, None] * layer.inv_freq.double(), device)


def _blocks(keys: torch.Tensor, out: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Both, cut alike along their first dimension."""
    if keys.device.type != "cpu" or keys.numel() <= _CPU_BLOCK:
        return [(keys, out)]
    if keys.ndim > 3:
        return [block for pair in zip(keys, out, strict=True) for block in _blocks(*pair)]
    size = max(1, _CPU_BLOCK * keys.shape[0] // keys.numel())
    return list(zip(torch.split(keys, size), torch.split(out, size), strict=True))


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
