"""Layers are read as they would be one by one, in whatever order."""

import pytest
import torch

from tests.internals.cache import Block, LayerKV, LayerKVReader, Planes, layer_kv, make_codec
from tests.internals.compat import LayerRotation

pytestmark = pytest.mark.daily

SHAPE = (2, 32, 64)
TURNS = [LayerRotation(10.0 ** -torch.arange(32), "half", 0), LayerRotation(2.0 ** -torch.arange(32), "half", 0)]
ROTATIONS = (TURNS[0], TURNS[0], TURNS[0], TURNS[1], TURNS[1], None, TURNS[0])


def chunk(spec: str) -> LayerKV:
    codec, device = make_codec(spec), torch.device("cpu")
    x = torch.randn(len(ROTATIONS), *SHAPE, generator=torch.Generator().manual_seed(0))
    block = Block(codec.encode(x, "keys", ROTATIONS), SHAPE, x.dtype, "keys", codec, ROTATIONS, device)
    return LayerKV((block,), tuple(((0, layer),) for layer in range(len(ROTATIONS))))


def alone(block: Block, layer: int) -> torch.Tensor:
    planes: Planes = {name: plane[layer] for name, plane in block.planes.items()}
    return block.codec.decode(planes, block.shape, block.dtype, block.role, block.rotations[layer])


@pytest.mark.parametrize("spec", ["raw", "int4", "turboquant:3.5"])
@pytest.mark.parametrize("order", [range(7), [6, 0, 1, 5, 2, 1, 3], [4, 4, 3]], ids=["in order", "mixed", "back"])
def test_layers_are_those_decoded_alone(spec: str, order: list[int]) -> None:
    stored = chunk(spec)
    reader = LayerKVReader(stored)
    for layer in order:
        piece = reader.layer(layer)
        assert piece is not None
        assert torch.equal(piece[0], alone(stored.blocks[0], layer))
        assert not torch.equal(piece[0], alone(stored.blocks[0], (layer + 1) % 7))


def test_a_run_is_of_layers_that_rotate_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    block = chunk("turboquant").blocks[0]
    assert [block.run(at) for at in (0, 1, 3, 5, 6)] == [range(3), range(1, 3), range(3, 5), range(5, 6), range(6, 7)]
    monkeypatch.setattr(layer_kv, "_RUN", 2 * 2 * 32 * 64)
    assert [block.run(at) for at in (0, 1, 2)] == [range(2), range(1, 3), range(2, 3)]
    assert chunk("raw").blocks[0].run(4) == range(7)  # views: nothing is decoded
