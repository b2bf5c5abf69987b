"""Random rotations of head_dim, the same wherever a seed is the same.

They are drawn by numpy's frozen `RandomState`, whose streams no release changes: what one machine has stored, another
one can decode.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from kvboost_hf.config import Rotation

_INNER = 16  # dimensions that one small matrix transforms


@lru_cache(maxsize=64)
def random_rotation(kind: Rotation, dim: int, seed: int, device: torch.device) -> torch.Tensor:
    """An orthogonal matrix, drawn at random.

    Args:
        kind: `"hadamard"`: H · diag(±1) / sqrt(dim), with H of Sylvester's construction. There is none unless `dim` is
            a power of two. Blocks of smaller ones would not spread an outlier over all of the dimensions, so that
            other dims get a `"haar"` rotation: QR of a Gaussian matrix, signs fixed. `rotated` is faster with the
            former on a CPU.
        dim: Rows and columns.
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
