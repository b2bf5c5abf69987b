"""TurboQuant: a random rotation, after which every coordinate is rounded to the same codebook.

Zandieh et al., "TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate", 2025,
https://arxiv.org/abs/2504.19874. A coordinate of a vector of length sqrt(dim) in a random direction is close to
N(0, 1), whatever the vector was; what is stored is its codes, and a scale for the whole vector.

Three things are not in the paper. The mean of a chunk's keys is kept apart: some channels are large in all tokens,
which would take up most of the codebook's range; it is that of the keys before their rotary rotation, where these
channels agree. The scale gives what is decoded the length that was encoded (`norm_correction`). And a fraction of a
bit is a bit more for the first coordinates.

Scales and means are bfloat16, for its range: a norm need not fit into float16. That adds less than a 100,000th to the
error, as does everything that float32 rounds.

Rotations are drawn by numpy's frozen `RandomState`, whose streams no release changes: what one machine has stored,
another one can decode.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from math import floor, pi, prod, sqrt

import numpy as np
import numpy.typing as npt
import torch

from kvboost_hf.cache.codecs.base import (
    Kivi,
    Planes,
    Role,
    centroids,
    in_blocks,
    look_up,
    narrowed,
    pack,
    packed_width,
    round_to,
    sinks_mark,
    squared_length,
    unpack,
)
from kvboost_hf.compat import LayerRotation
from kvboost_hf.config import KVQuantConfig, Rotation
from kvboost_hf.handles import CodePlanes

_SCALE = torch.bfloat16
_STEP = 16  # coordinates that get a bit more come in multiples of it
_LARGEST, _LEAST = 2.0**56, 2.0**-56  # beyond it numbers are cut off, below it norms are 0: their squares are float32


class TurboQuant:
    """Rotated and rounded to Lloyd-Max codebooks, as a config with method `"turboquant"` says."""

    lossless = False

    def __init__(self, config: KVQuantConfig) -> None:
        self._config = config
        self._bits: dict[Role, float] = {"keys": config.key_bits, "values": config.value_bits}
        self._grouped: Kivi | None = None
        bits = (str(float(each)).removesuffix(".0") for each in (config.key_bits, config.value_bits))
        parts = [":".join(("turboquant", *bits)), config.rotation, f"seed{config.seed}"]
        parts += [name for name in ("qjl", "remove_key_mean", "norm_correction") if getattr(config, name)]
        if config.grouped_values:
            self._grouped = Kivi(int(config.value_bits), int(config.value_bits), config.group_size)
            parts.append(f"grouped_values{config.group_size}")
        self.name = ":".join(parts) + sinks_mark(config.sink_tokens)
        self.sink_tokens = config.sink_tokens

    @torch.no_grad()
    def encode(self, x: torch.Tensor, role: Role, rotations: Sequence[LayerRotation | None]) -> Planes:
        """Numbers beyond 1e16 are cut off there."""
        if role == "values" and self._grouped is not None:
            return self._grouped.encode(x, role, rotations)
        with _full_precision(x):
            return in_blocks(lambda part, own: self._encode(part, role, own), x, rotations)

    def _encode(self, x: torch.Tensor, role: Role, rotations: Sequence[LayerRotation | None]) -> Planes:
        planes: Planes = {}
        x = x.to(torch.float32, copy=True, memory_format=torch.contiguous_format).clamp_(-_LARGEST, _LARGEST)
        if self._removes_mean(role):
            planes["mean"] = _remove_mean(x, rotations)
        dim = x.shape[-1]
        x = rotated(x, self._config.rotation, self._config.seed)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        x.mul_(sqrt(dim) / norm.clamp_min(_LEAST))
        own = x.clone() if self._has_signs(role) else x
        codes = [(round_to(part, bits), bits) for part, bits in self._parts(own, role)]
        planes["codes"] = _joined([pack(*part) for part in codes])
        if self._has_signs(role):
            left = x.sub_(_looked_up(codes))
            projection = random_projection(dim, self._config.seed, x.device)
            planes["signs"] = pack((left @ projection.mT >= 0).view(torch.uint8), 1)
            left_norm = torch.linalg.vector_norm(left, dim=-1, keepdim=True)
            planes["left"] = (left_norm * norm).div_(sqrt(dim)).squeeze(-1).to(_SCALE)
        corrected = self._config.norm_correction and not self._has_signs(role)
        squares = torch.stack([squared_length(*part) for part in codes]).sum(0) if corrected else norm.new_tensor(dim)
        planes["scale"] = (norm * squares.rsqrt()).squeeze(-1).to(_SCALE)
        return planes

    @torch.no_grad()
    def decode(
        self,
        planes: Mapping[str, torch.Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        role: Role,
        rotation: LayerRotation | None,
    ) -> torch.Tensor:
        if role == "values" and self._grouped is not None:
            return self._grouped.decode(planes, shape, dtype, role, rotation)
        with _full_precision(planes["codes"]):
            return narrowed(self._decode(planes, shape[-1], role, rotation), dtype)

    def _decode(
        self, planes: Mapping[str, torch.Tensor], dim: int, role: Role, rotation: LayerRotation | None
    ) -> torch.Tensor:
        device = planes["codes"].device
        x = _looked_up(self._unpacked(planes["codes"], role, dim))
        x.mul_(planes["scale"].float().unsqueeze(-1))
        if self._has_signs(role):
            signs = unpack(planes["signs"], 1, dim, torch.float32).mul_(2).sub_(1)
            signs.mul_(planes["left"].float().unsqueeze(-1) * (sqrt(pi / 2) / dim))
            x.add_(signs @ random_projection(dim, self._config.seed, device))
        x = rotated_back(x, self._config.rotation, self._config.seed)
        if self._removes_mean(role):
            _add_mean(x, planes["mean"], rotation)
        return x

    def nbytes(self, shape: tuple[int, int, int, int], dtype: torch.dtype, role: Role) -> int:
        if role == "values" and self._grouped is not None:
            return self._grouped.nbytes(shape, dtype, role)
        *vectors, dim = shape
        vector = (
            sum(packed_width(stop - start, bits) for start, stop, bits in self._spans(dim, role)) + _SCALE.itemsize
        )
        if self._has_signs(role):
            vector += packed_width(dim, 1) + _SCALE.itemsize
        means = shape[0] * shape[1] * dim * _SCALE.itemsize if self._removes_mean(role) else 0
        return prod(vectors) * vector + means

    def code_planes(
        self,
        planes: Mapping[str, torch.Tensor],
        role: Role,
        rotation: LayerRotation | None,
        tokens: int,
        head_dim: int,
    ) -> CodePlanes | None:
        """None with fractions of bits, and with signs."""
        if role == "values" and self._grouped is not None:
            return self._grouped.code_planes(planes, role, rotation, tokens, head_dim)
        (_, _, bits), *others = self._spans(head_dim, role)
        if others or self._has_signs(role) or head_dim % 8:
            return None
        device = planes["codes"].device
        cos = sin = partner = None
        if rotation is not None and self._removes_mean(role):
            cos, sin = _turns(rotation, tokens, head_dim, device)
            partner = _partners(rotation, head_dim, device)
        return CodePlanes(
            bits,
            planes["codes"],
            scale=planes["scale"],
            codebook=centroids(bits, device),
            rotation=random_rotation(self._config.rotation, head_dim, self._config.seed, device),
            mean=planes.get("mean"),
            cos=cos,
            sin=sin,
            partner=partner,
        )

    def _removes_mean(self, role: Role) -> bool:
        return role == "keys" and self._config.remove_key_mean

    def _has_signs(self, role: Role) -> bool:
        return role == "keys" and self._config.qjl

    def _spans(self, dim: int, role: Role) -> list[tuple[int, int, int]]:
        """Coordinates [start, stop) that have so many bits."""
        average = self._bits[role] - self._has_signs(role)
        bits = floor(average)
        more = min(dim, _STEP * round(dim * (average - bits) / _STEP))
        return [span for span in ((0, more, bits + 1), (more, dim, bits)) if span[0] < span[1]]

    def _parts(self, x: torch.Tensor, role: Role) -> list[tuple[torch.Tensor, int]]:
        return [(x[..., start:stop], bits) for start, stop, bits in self._spans(x.shape[-1], role)]

    def _unpacked(self, codes: torch.Tensor, role: Role, dim: int) -> Iterator[tuple[torch.Tensor, int]]:
        at = 0
        for start, stop, bits in self._spans(dim, role):
            width = packed_width(stop - start, bits)
            yield unpack(codes[..., at : at + width], bits, stop - start, torch.int32), bits
            at += width


def _full_precision(x: torch.Tensor) -> torch.autocast:
    """Under a caller's autocast, products of matrices would be in half precision."""
    return torch.autocast(x.device.type, enabled=False)


def _looked_up(codes: Iterable[tuple[torch.Tensor, int]]) -> torch.Tensor:
    return _joined([look_up(part, bits) for part, bits in codes])


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]


def _remove_mean(keys: torch.Tensor, rotations: Sequence[LayerRotation | None]) -> torch.Tensor:
    """Subtract from keys [layers, heads, tokens, head_dim] what `_add_mean` adds, and return the means."""
    tokens = keys.shape[-2]
    means: list[torch.Tensor] = []
    at = 0
    for rotation, alike in groupby(rotations):
        stop = at + len(list(alike))
        part = keys[at:stop]
        if rotation is None:
            mean = part.sum(dim=-2)
        else:
            cos, sin = _turns(rotation, tokens, keys.shape[-1], keys.device)
            mean = (part * cos).sum(dim=-2).add_(rotation.partners((part * sin).sum(dim=-2)))
        means.append(mean.div_(max(tokens, 1)).to(_SCALE))
        _add_mean(part, -means[-1], rotation)
        at = stop
    return torch.cat(means)


def _add_mean(keys: torch.Tensor, mean: torch.Tensor, rotation: LayerRotation | None) -> None:
    """Add the mean [..., heads, head_dim], as it is at each position from 0 on, to keys [..., tokens, head_dim]."""
    mean = mean.float().unsqueeze(-2)
    if rotation is None:
        keys.add_(mean)
    else:
        cos, sin = _turns(rotation, keys.shape[-2], keys.shape[-1], keys.device)
        keys.addcmul_(mean, cos).addcmul_(rotation.partners(mean), sin)


# Tables that are kept are computed in host memory: once they are copied they are there, whichever stream reads them.
# What a device computes is there for what comes later on the same stream.


@lru_cache(maxsize=16)  # layers that rotate alike share it, and so do chunks of the same length
def _turns(rotation: LayerRotation, tokens: int, dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines [tokens, dim]: a key at position t is `key * cos[t] + partners(key) * sin[t]`.

    Turned back, it is `key * cos[t] + partners(key * sin[t])`.
    """
    ones = torch.ones(1, tokens, dim, dtype=torch.float32, device="cpu")
    there, back = (
        rotation.rotate_each(ones, shifts, torch.empty_like(ones)) for shifts in (range(tokens), range(0, -tokens, -1))
    )
    return ((there + back)[0] / 2).to(device), ((there - back)[0] / 2).to(device)


@lru_cache(maxsize=16)
def _partners(rotation: LayerRotation, dim: int, device: torch.device) -> torch.Tensor:
    """For each dimension the one that it turns with, or itself."""
    return rotation.partners(torch.arange(dim, dtype=torch.int32, device="cpu")).to(device)


_INNER = 16  # dimensions that one small matrix transforms


@lru_cache(maxsize=64)
def random_rotation(kind: Rotation, dim: int, seed: int, device: torch.device) -> torch.Tensor:
    """An orthogonal matrix, drawn at random.

    Args:
        kind: `"hadamard"`: H · diag(±1) / sqrt(dim), with H of Sylvester's construction. There is none unless `dim` is
            a power of two. Blocks of smaller ones would not spread an outlier over all of the dimensions, so that
            other dims get a `"haar"` rotation: QR of a Gaussian matrix, signs fixed. `rotated` is faster with the
            former on a CPU.
        seed: Any count.
        device: Where to keep it.

    Returns:
        [dim, dim], float32, to multiply row vectors with. It is shared: not to be written to.
    """
    draw = _stream(0, dim, seed)
    if kind == "hadamard" and dim & (dim - 1) == 0:
        rotation = _sylvester(dim) * draw.choice([-1.0, 1.0], dim) / dim**0.5
    else:
        q, r = np.linalg.qr(draw.standard_normal((dim, dim)))
        rotation = q * np.sign(np.diag(r))
    return _to_tensor(rotation, device)


def rotated(x: torch.Tensor, kind: Rotation, seed: int) -> torch.Tensor:
    """Rows of `x`, float32, contiguous and written to, times the transpose of `random_rotation`."""
    rotation = random_rotation(kind, x.shape[-1], seed, x.device)
    if not _is_fast(kind, x):
        return x @ rotation.mT
    return _hadamard(x.mul_(rotation[0].sign()))


def rotated_back(x: torch.Tensor, kind: Rotation, seed: int) -> torch.Tensor:
    """The inverse of `rotated`."""
    rotation = random_rotation(kind, x.shape[-1], seed, x.device)
    if not _is_fast(kind, x):
        return x @ rotation
    return _hadamard(x).mul_(rotation[0].sign())


@lru_cache(maxsize=64)
def random_projection(dim: int, seed: int, device: torch.device) -> torch.Tensor:
    """A Gaussian matrix [dim, dim], float32, independent of the rotation of the same seed; not to be written to."""
    return _to_tensor(_stream(1, dim, seed).standard_normal((dim, dim)), device)


def _is_fast(kind: Rotation, x: torch.Tensor) -> bool:
    """Whether passes over `x` are faster than a product of matrices."""
    dim = x.shape[-1]
    return kind == "hadamard" and dim & (dim - 1) == 0 and dim > _INNER and not x.is_cuda


def _hadamard(x: torch.Tensor) -> torch.Tensor:
    """Rows times H / sqrt(dim): sums and differences in place, far apart ones first; the nearest by small matrices."""
    dim = half = x.shape[-1]
    while half > _INNER:
        half //= 2
        first, second = x.view(-1, 2, half).unbind(1)
        first.add_(second)
        torch.add(first, second, alpha=-2, out=second)
    return (x.view(-1, _INNER) @ _inner(dim)).view(x.shape)


@lru_cache(maxsize=64)
def _inner(dim: int) -> torch.Tensor:
    return _to_tensor(_sylvester(_INNER) / dim**0.5, torch.device("cpu"))


def _sylvester(dim: int) -> npt.NDArray[np.float64]:
    hadamard = np.ones((1, 1))
    while len(hadamard) < dim:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    return hadamard


def _stream(purpose: int, dim: int, seed: int) -> np.random.RandomState:
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence([purpose, dim, seed])))


def _to_tensor(matrix: npt.NDArray[np.float64], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(matrix.astype(np.float32)).to(device)
