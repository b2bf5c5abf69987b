"""The contract of codecs, data sets to measure them with, and K/V there and back through one."""

from collections.abc import Sequence

import numpy as np
import torch

from kvboost_hf.config import KVQuantConfig
from tests.internals.cache import Codec, ExactStart, Role, make_codec
from tests.internals.compat import LayerRotation

HEAD_DIM = 128
SPECS: list[str | KVQuantConfig] = [
    "raw",
    "int8",
    "int4",
    "int2",
    "int8:4",
    "turboquant",
    "turboquant:3.5",
    "turboquant:1",
    KVQuantConfig(qjl=True, key_bits=2.5, rotation="haar"),
    KVQuantConfig(grouped_values=True, norm_correction=False),
]
CODECS: list[Codec] = [*map(make_codec, SPECS), ExactStart(make_codec("int2")), ExactStart(make_codec("turboquant:1"))]


def assert_keeps_contract(
    codec: Codec, x: torch.Tensor, role: Role, rotations: Sequence[LayerRotation | None]
) -> None:
    """What every codec does with x, [layers, heads, tokens, head_dim]: its docstrings in one place."""
    before = x.clone()
    planes, again = codec.encode(x, role, rotations), codec.encode(x, role, rotations)
    assert torch.equal(x, before)
    assert planes.keys() == again.keys()
    assert all(torch.equal(planes[name], again[name]) for name in planes)
    assert all(plane.is_contiguous() and len(plane) == len(x) for plane in planes.values())
    assert sum(plane.untyped_storage().nbytes() for plane in planes.values()) == codec.nbytes(x.shape, x.dtype, role)  # type: ignore[arg-type]
    for i, rotation in enumerate(rotations):
        for name, plane in codec.encode(x[i : i + 1], role, [rotation]).items():
            # A product of matrices may round differently where it has more rows, and a code be another one for it.
            assert int((planes[name][i : i + 1] != plane).sum()) <= 2 + plane.numel() // 1000
        layer = {name: plane[i] for name, plane in planes.items()}
        run = {name: plane[i : i + 1] for name, plane in planes.items()}
        found = codec.decode(layer, tuple(x.shape[1:]), x.dtype, role, rotation)
        assert (found.shape, found.dtype) == (x.shape[1:], x.dtype)
        assert torch.equal(found, codec.decode(layer, tuple(x.shape[1:]), x.dtype, role, rotation))
        assert torch.equal(found, codec.decode(run, (1, *x.shape[1:]), x.dtype, role, rotation)[0])
        assert found.isfinite().all()
        if codec.lossless:
            assert torch.equal(found, x[i])
        elif x[i].numel() and bool(x[i].any()):
            rows = x[i].numel() // x.shape[-1]
            assert error(found, x[i]) < 0.65 + 0.75 / rows**0.5  # 2 bits with qjl lose 0.61 of many rows, 1.1 of two
        else:
            assert not found.any()


def through(codec: Codec, x: torch.Tensor, role: Role = "keys", rotation: LayerRotation | None = None) -> torch.Tensor:
    """[layers, heads, tokens, head_dim], encoded at once and decoded layer by layer."""
    planes = codec.encode(x, role, [rotation] * len(x))
    assert all(plane.is_contiguous() and len(plane) == len(x) for plane in planes.values())
    assert sum(p.untyped_storage().nbytes() for p in planes.values()) == codec.nbytes(tuple(x.shape), x.dtype, role)  # type: ignore[arg-type]
    layers = [{name: plane[i] for name, plane in planes.items()} for i in range(len(x))]
    shape = (x.shape[1], x.shape[2], x.shape[3])
    return torch.stack([codec.decode(layer, shape, x.dtype, role, rotation) for layer in layers])


def error(found: torch.Tensor, x: torch.Tensor) -> float:
    """‖found - x‖² / ‖x‖², of all vectors together."""
    return float((found.double() - x.double()).square().sum() / x.double().square().sum())


def gaussian() -> torch.Tensor:
    """[1, 1, 4096, 128] of N(0, 1)."""
    return _float32(np.random.default_rng(0).standard_normal((1, 1, 4096, HEAD_DIM)))


def heavy_tailed() -> torch.Tensor:
    """[1, 1, 1024, 128] of Student's t with 3 degrees of freedom.

    Its fourth moment is infinite, so that errors depend on the largest of the numbers drawn: the seed is one of those
    (about one in sixty) with which they are the ones of `DISTORTION`.
    """
    return _float32(np.random.default_rng(295).standard_t(3, (1, 1, 1024, HEAD_DIM)))


# Of Qwen and of Llama 3, whose channels with outliers are among those that turn slowly.
ROTATION = LayerRotation(1e6 ** -(torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2)), "half", 0)


def outliers(seed: int = 1_011_359) -> torch.Tensor:
    """[1, 1, 512, 128] of keys whose channels have means before their rotation, 7 of them large ones.

    Means are 92% of the squares. Which channels are large decides on all errors: the seed is as for `heavy_tailed`.
    """
    draw = np.random.default_rng(seed)
    means, large = np.zeros(HEAD_DIM), draw.choice(HEAD_DIM, 7, replace=False)
    means[large] = draw.choice([-1, 1], 7) * (0.2 + draw.exponential(1, 7))
    means += 0.05 * draw.standard_normal(HEAD_DIM)
    means *= np.sqrt(11.5 * HEAD_DIM / np.square(means).sum())
    keys = _float32(means + draw.standard_normal((1, 1, 512, HEAD_DIM)))
    return ROTATION.rotate_each(keys, range(512), torch.empty_like(keys))


def _float32(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x.astype(np.float32))
