"""Rotations on a GPU: what is found of a model there, and what it gives."""

import pytest
import torch

from tests.gpu.device import DEVICE
from tests.internals.compat import KeyRotation, LayerRotation, key_rotation
from tests.rotations import KINDS, make_rotary, off, rotated_bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_is_found_as_on_a_cpu(kind: str, dtype: torch.dtype) -> None:
    model = make_rotary(kind)
    expected = key_rotation(model)
    found = key_rotation(make_rotary(kind, dtype).to(DEVICE))
    assert isinstance(expected, KeyRotation), expected
    assert isinstance(found, KeyRotation), found
    for one, other in zip(found.layers, expected.layers, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert (one.style, one.offset) == (other.style, other.offset)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("shift", [1, -4_000, 32_000])
def test_it_gives_what_it_gives_on_a_cpu(style: str, dtype: torch.dtype, shift: int) -> None:
    layer = LayerRotation(10_000.0 ** -(torch.arange(32) / 32), style, 16)  # type: ignore[arg-type]
    rotation = KeyRotation((layer,))
    keys = torch.randn(4, 300, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = rotation.rotate(0, keys.to(DEVICE), shift)
    assert found.device.type == DEVICE.type
    expected = rotation.rotate(0, keys, shift)
    assert off(layer, found.cpu(), expected, 2 * rotated_bound(dtype)) <= 1
