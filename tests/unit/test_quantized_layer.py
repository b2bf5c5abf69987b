"""Layers that hold codes: what is exact, what is encoded and when, and what it takes."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from kvboost_hf.config import KVQuantConfig
from tests.internals.cache import (
    CodedTensor,
    GrowingLayer,
    QuantizedLayer,
    ReuseLayer,
    bytes_per_column,
    exact_layers,
    live_bytes,
    make_codec,
)

pytestmark = pytest.mark.daily

SINKS, WINDOW, HEADS, DIM = 4, 16, 2, 64
CONFIGS = [
    KVQuantConfig(method="kivi", key_bits=2, value_bits=2, group_size=16, sink_tokens=SINKS, window=WINDOW),
    KVQuantConfig(method="kivi", key_bits=8, value_bits=8, group_size=32, sink_tokens=SINKS, window=WINDOW),
    KVQuantConfig(method="turboquant", key_bits=4, value_bits=3, sink_tokens=SINKS, window=WINDOW),
]
configs = pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.method}{c.key_bits}")


class Counting:
    """A codec that counts the columns that it encodes."""

    lossless = False
    name = "counting"

    def __init__(self) -> None:
        self.encoded = 0

    def encode(self, x: torch.Tensor, role: Any, rotations: Sequence[Any]) -> dict[str, torch.Tensor]:
        self.encoded += x.shape[0] * x.shape[2]
        return {"rounded": (x * 4).round().to(torch.int8)}

    def decode(
        self, planes: Mapping[str, torch.Tensor], shape: Any, dtype: torch.dtype, role: Any, rotation: Any
    ) -> torch.Tensor:
        return planes["rounded"].to(dtype) / 4

    def nbytes(self, shape: Any, dtype: torch.dtype, role: Any) -> int:
        raise NotImplementedError


def coded(codec: Any = None) -> CodedTensor:
    return CodedTensor(codec if codec is not None else Counting(), "keys", None, SINKS, WINDOW)  # type: ignore[arg-type]


def columns(n: int, batch: int = 1, seed: int = 0, heads: int = HEADS, dim: int = DIM) -> torch.Tensor:
    return torch.randn(batch, heads, n, dim, generator=torch.Generator().manual_seed(seed))


def planes_of(tensor: CodedTensor) -> dict[str, torch.Tensor]:
    return {name: plane.view() for name, plane in tensor._planes.items()}


@configs
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_the_same_however_the_columns_came(config: KVQuantConfig, batch: int, dtype: torch.dtype) -> None:
    x = columns(150, batch).to(dtype)
    ways = [[150], [1] * 150, [50, 50, 50], [3, 40, 1, 1, 70, 35]]
    found = []
    for way in ways:
        tensor = coded(make_codec(config))
        for part in x.split(way, dim=2):
            tensor.append(part)
        found.append(tensor)
    first = planes_of(found[0])
    assert found[0]._blocks == [WINDOW] * 8
    for other in found[1:]:
        assert other._blocks == found[0]._blocks
        for name, plane in planes_of(other).items():
            assert torch.equal(plane, first[name]), name
        assert torch.equal(other.read(0, 150), found[0].read(0, 150))


@configs
def test_rows_are_encoded_as_if_alone(config: KVQuantConfig) -> None:
    x = columns(150, batch=3)
    together, alone = coded(make_codec(config)), coded(make_codec(config))
    together.append(x)
    alone.append(x[1:2])
    assert torch.equal(together.read(0, 150, slice(1, 2)), alone.read(0, 150))


@pytest.mark.parametrize("length", range(1, 120, 7))
def test_what_is_exact(length: int) -> None:
    codec = Counting()
    tensor, x = coded(codec), columns(length)
    for at in range(length):
        seen = tensor.append_and_view(x[:, :, at : at + 1])
        assert torch.equal(seen[:, :, at:], x[:, :, at : at + 1])
        end = SINKS + sum(tensor._blocks)
        assert at + 1 - end < 2 * WINDOW
        assert not tensor._blocks or at + 1 - end >= WINDOW
    exact = (tensor.read(0, length) == x).all(dim=(0, 1, 3))
    assert exact[:SINKS].all()
    assert exact[SINKS + codec.encoded :].all()
    assert not exact[SINKS : SINKS + codec.encoded].any()
    assert codec.encoded == sum(tensor._blocks)


def test_a_forward_attends_to_itself_exactly() -> None:
    tensor, x = coded(), columns(300)
    assert torch.equal(tensor.append_and_view(x[:, :, :100]), x[:, :, :100])
    before = tensor.read(0, 100)
    assert not torch.equal(before, x[:, :, :100])
    seen = tensor.append_and_view(x[:, :, 100:])
    assert torch.equal(seen, torch.cat([before, x[:, :, 100:]], dim=2))


def test_parts_are_read_as_the_whole() -> None:
    tensor = coded()
    tensor.append(columns(200, batch=2))
    tensor.truncate(90)
    tensor.append(columns(60, batch=2, seed=1))
    whole = tensor.read(0, 150)
    for start in range(0, 150, 13):
        for stop in range(start + 1, 151, 17):
            assert torch.equal(tensor.read(start, stop, slice(1, 2)), whole[1:, :, start:stop])


def test_what_is_cut_keeps_its_codes() -> None:
    codec = Counting()
    tensor, x = coded(codec), columns(200)
    tensor.append(x)
    before, encoded = tensor.read(0, 200), codec.encoded
    tensor.truncate(SINKS + 2 * WINDOW + 5)
    assert tensor._blocks == [WINDOW, WINDOW, 5]
    assert torch.equal(tensor.read(0, tensor.stop), before[:, :, : tensor.stop])
    new = columns(2 * WINDOW, seed=1)
    tensor.append(new[:, :, :-1])
    assert codec.encoded == encoded
    tensor.append(new[:, :, -1:])
    assert tensor._blocks == [WINDOW, WINDOW, 5, WINDOW]
    assert codec.encoded == encoded + WINDOW
    cut = SINKS + 2 * WINDOW + 5
    assert torch.equal(tensor.read(0, cut), before[:, :, :cut])
    assert torch.equal(tensor.read(cut + WINDOW, tensor.stop), new[:, :, WINDOW:])


@pytest.mark.parametrize("length", [0, 1, SINKS, SINKS + 1, SINKS + WINDOW, 100, 200])
def test_a_cut_anywhere(length: int) -> None:
    tensor, x = coded(), columns(200)
    tensor.append(x)
    before = tensor.read(0, 200)
    tensor.truncate(length)
    assert tensor.stop == length
    assert torch.equal(tensor.read(0, length), before[:, :, :length])
    tensor.append(x[:, :, length:])
    assert tensor.stop == 200


def test_twins_go_their_own_ways() -> None:
    tensor, x = coded(), columns(100)
    tensor.append(x)
    twin, before = tensor.share(), tensor.read(0, 100)
    twin.truncate(30)
    twin.append(columns(200, seed=1))
    assert torch.equal(tensor.read(0, 100), before)
    tensor.append(columns(100, seed=2))
    assert torch.equal(tensor.read(0, 100)[:, :, :60], before[:, :, :60])
    assert torch.equal(twin.read(0, 30), before[:, :, :30])


# Layers


def layer_of(config: KVQuantConfig) -> QuantizedLayer:
    return QuantizedLayer(make_codec(config), config, None)


@configs
def test_columns_are_filled_in_again(config: KVQuantConfig) -> None:
    """In another layer, and behind padding."""
    layer = layer_of(config)
    layer.update(columns(100), columns(100, seed=1))
    piece = layer.columns(0, 0, 100)
    assert piece is not None
    other = layer_of(config)
    other.expect_padding(10)
    short = tuple(part[:, :90] for part in piece)
    other.fill(0, 100, [[piece], [short], [tuple(p[:, :40] for p in piece), tuple(p[:, 40:] for p in piece)]])
    assert other.length == 100
    for row, kept in enumerate((piece, None, piece)):
        found = other.columns(row, 0, 100)
        assert found is not None
        for ours, theirs in zip(found, kept or piece, strict=True):
            if kept is None:
                assert not ours[:, :10].any()
                assert torch.equal(ours[:, 10 : 10 + SINKS], theirs[:, :SINKS])
            else:
                assert torch.equal(ours[:, : 10 + SINKS], theirs[:, : 10 + SINKS])
    assert bytes_per_column(layer) * 100 == sum(part.nbytes for part in piece)


def test_every_row_begins_exactly() -> None:
    layer, keys = layer_of(CONFIGS[0]), columns(200, batch=2)
    layer.expect_padding(50)
    layer.update(keys, keys)
    found = layer.columns(1, 0, 200)
    assert found is not None
    assert torch.equal(found[0][:, : 50 + SINKS], keys[1, :, : 50 + SINKS])
    assert not torch.equal(found[0][:, : 51 + SINKS], keys[1, :, : 51 + SINKS])


def test_no_layer_keeps_what_it_has_decoded() -> None:
    layer, held = layer_of(CONFIGS[0]), []
    for at in range(3):
        out = layer.update(columns(100, seed=at), columns(100, seed=at))
        held += [weakref.ref(part) for part in out]
        del out
    assert [ref() for ref in held[2:]] == [None] * 4
    buffers = [weakref.ref(plane.buffer) for tensor in layer._tensors for plane in tensor._tensors()]
    del layer
    assert not any(ref() is not None for ref in buffers)


def test_gradients_reach_what_a_forward_computes() -> None:
    layer = layer_of(CONFIGS[0])
    for at in range(3):
        keys = columns(30, seed=at).requires_grad_()
        seen, _ = layer.update(keys, keys)
        seen.sum().backward()
        assert keys.grad is not None
        assert torch.equal(keys.grad, torch.ones_like(keys))


@pytest.mark.parametrize(("layers", "ends"), [(1, 0), (3, 0), (4, 1), (8, 2), (80, 2)])
def test_no_more_than_a_quarter_at_either_end_is_exact(layers: int, ends: int) -> None:
    assert exact_layers(KVQuantConfig(), layers) == ends


# Bytes


def real_bytes(layers: Sequence[ReuseLayer]) -> int:
    """Of all storages that can be reached from the layers."""
    found: dict[int, int] = {}

    def visit(thing: Any) -> None:
        if isinstance(thing, torch.Tensor):
            found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, dict | list | tuple):
            for part in thing.values() if isinstance(thing, dict) else thing:
                visit(part)
        elif type(thing).__module__.startswith("kvboost_hf.cache") and not hasattr(thing, "encode"):
            slots = (name for cls in type(thing).__mro__ for name in getattr(cls, "__slots__", ()))
            for name in getattr(thing, "__dict__", None) or slots:
                visit(getattr(thing, name))

    visit(list(layers))
    return sum(found.values())


@torch.no_grad()
@pytest.mark.parametrize("tokens", [100, 4096, 32_768])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_bytes_are_those_of_the_formula(tokens: int, bits: int) -> None:
    config = KVQuantConfig(method="kivi", key_bits=bits, value_bits=bits)
    layers: list[Any] = [GrowingLayer(), *(layer_of(config) for _ in range(2)), GrowingLayer()]
    x = columns(tokens, heads=1, dim=128).bfloat16()
    for layer in layers:
        layer.update(x, x.clone())
    taken = real_bytes(layers)
    assert taken == sum(layer.nbytes for layer in layers)
    assert taken == pytest.approx(live_bytes(config, tokens=tokens, layers=4, kv_heads=1, head_dim=128), rel=0.02)


@torch.no_grad()
@pytest.mark.parametrize("bits", [2, 3, 3.5, 4])
def test_bytes_of_rotated_codes(bits: float) -> None:
    config = KVQuantConfig(key_bits=bits, value_bits=bits)
    layers: list[Any] = [GrowingLayer(), *(layer_of(config) for _ in range(2)), GrowingLayer()]
    x = columns(4096, heads=2, dim=128).bfloat16()
    for layer in layers:
        layer.update(x, x.clone())
    expected = live_bytes(config, tokens=4096, layers=4, kv_heads=2, head_dim=128)
    assert real_bytes(layers) == pytest.approx(expected, rel=0.02)
    assert layers[1].nbytes < layers[0].nbytes * (bits / 16 + 0.12)  # scales, window, and room to spare


def test_the_formula_takes_what_caches_take() -> None:
    shapes: Any = {"tokens": 4096, "layers": 8, "kv_heads": 2, "head_dim": 128}
    for bits in (4, "4", "turboquant"):
        assert live_bytes(bits, **shapes) == live_bytes(KVQuantConfig(), **shapes)
    assert live_bytes("int8", **shapes) == live_bytes(KVQuantConfig(method="kivi", key_bits=8, value_bits=8), **shapes)
    exact = 8 * 2 * columns(4096, heads=2, dim=128).bfloat16().nbytes
    assert live_bytes(None, **shapes) == live_bytes("raw", **shapes) == pytest.approx(exact * 9 / 8, rel=0.02)


@torch.no_grad()
def test_the_formula_bounds_what_decoding_takes() -> None:
    config = KVQuantConfig(method="kivi", window=32)
    layers: list[Any] = [layer_of(config) for _ in range(2)]
    x = columns(3000, heads=1, dim=128).bfloat16()
    for at in range(0, 3000, 10):
        for layer in layers:
            layer.update(x[:, :, at : at + 10], x[:, :, at : at + 10])
        bound = live_bytes(config, tokens=at + 10, layers=2, kv_heads=1, head_dim=128)
        assert 0.85 * bound < real_bytes(layers) <= bound
