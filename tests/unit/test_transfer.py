"""What goes over the link to a device: in how many copies, by which stream, and what the model waits for."""

from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore
from kvboost_hf.cache.codecs import lloyd_max, turboquant
from kvboost_hf.cache.forward import loading
from kvboost_hf.cache.forward import moved as blend
from kvboost_hf.cache.kv import transfer
from kvboost_hf.cache.kv.blocks import Block
from kvboost_hf.cache.kv.column_format import RAW
from kvboost_hf.cache.kv.layer_kv import LayerKV
from kvboost_hf.cache.layers.growing import GrowingLayer
from kvboost_hf.cache.planning.repair import RepairRow
from kvboost_hf.compat import KeyRotation, LayerRotation
from tests.conftest import make_model, random_ids
from tests.device_double import CUDA, DoubleDevice, DoubleTensor

IDS = random_ids(170, seed=1)
LAYER_BYTES = 5 * 2 * 2 * 32 * 16 * 4  # 5 chunks of 32 tokens, keys and values, 2 heads of 16 dims, float32


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[DoubleDevice]:
    monkeypatch.setattr(loading, "_MIN_BYTES", 1)
    monkeypatch.setattr(loading, "_FIRST_BYTES", LAYER_BYTES)
    monkeypatch.setattr(loading, "_MOST_BYTES", 4 * LAYER_BYTES)
    with DoubleDevice().in_place() as found:
        yield found


def on_device(name: str) -> PreTrainedModel:
    model = make_model(name)
    model.set_attn_implementation("eager")
    return model.to(CUDA)


def generate(model: PreTrainedModel, ids: torch.Tensor, cache: Any = None) -> list[int]:
    call: Any = model.generate
    return call(ids.to(CUDA), past_key_values=cache, max_new_tokens=2, do_sample=False).tolist()[0]


@pytest.fixture
def arrived(gpu: DoubleDevice, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes from the store that have arrived where each layer of a forward goes on."""
    found: list[int] = []
    wait = loading.Loading.wait

    def noted(self: loading.Loading, layer_idx: int) -> None:
        wait(self, layer_idx)
        if layer_idx == len(found):
            found.append(gpu.sent_by("loading", gpu.stream("compute", CUDA).clock["loading"]))

    monkeypatch.setattr(loading.Loading, "wait", noted)
    return found


@cache
def plain() -> list[int]:
    return make_model("deep_llama").generate(IDS, max_new_tokens=2, do_sample=False).tolist()[0]


def stored(gpu: DoubleDevice, **settings: Any) -> tuple[PreTrainedModel, ChunkStore]:
    """A model with a prompt in its store, which has served once, so that nothing is left to be looked at."""
    model = on_device("deep_llama")
    store = ChunkStore(model, chunk_size=32, **settings)
    for _ in range(2):
        assert generate(model, IDS, ChunkReuseCache(model, store)) == plain()
    return model, store


def test_a_layer_waits_for_its_own_bytes_alone(gpu: DoubleDevice, arrived: list[int]) -> None:
    model, store = stored(gpu)
    groups = [1, 3, 3, 7, 7, 7, 7, 8]  # layers that have arrived: copies are of one layer, of two, of four
    assert arrived == [LAYER_BYTES * layers for layers in groups]
    waits: list[int] = []
    for ids in (IDS, random_ids(170, seed=2)):
        before = len(gpu.blocking)
        cache = ChunkReuseCache(model, store)
        generate(model, ids, cache)
        waits.append(len(gpu.blocking) - before)
        assert cache.report.tier_tokens["ram"] == (160 if ids is IDS else 0)
    assert waits[0] <= waits[1]  # the host waits for nothing besides what it waits for in any prompt
    assert not gpu.races


def test_the_control_all_in_one_group(gpu: DoubleDevice, arrived: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_FIRST_BYTES", 8 * LAYER_BYTES)
    stored(gpu)
    assert arrived == [8 * LAYER_BYTES] * 8


def test_the_control_layers_that_do_not_wait(gpu: DoubleDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading.Loading, "wait", lambda self, layer_idx: self._layers[layer_idx].seal())
    stored(gpu)
    assert any("does not wait for what loading has written" in race for race in gpu.races)


def test_what_is_promoted_holds_up_no_token(gpu: DoubleDevice) -> None:
    model, store = stored(gpu, tiers=["device:1GB"])
    loaded = gpu.sent_by("loading")
    assert loaded == gpu.sent_by("promotion") == 8 * LAYER_BYTES
    compute = gpu.stream("compute", CUDA)
    assert compute.clock["promotion"] == 0
    cache = ChunkReuseCache(model, store)
    assert generate(model, IDS, cache) == plain()
    assert cache.report.tier_tokens["device"] == 160
    assert gpu.sent_by("loading") == loaded  # it is there
    assert compute.clock["promotion"] > 0  # and was waited for
    assert not gpu.races


def test_pinned_memory_goes_with_its_chunks(gpu: DoubleDevice) -> None:
    budget = 4 * (2 * LAYER_BYTES // 5 + 32 * 8)  # of 6 chunks of each prompt
    model = on_device("llama")
    store = ChunkStore(model, chunk_size=32, max_bytes=budget)
    for seed in range(4):
        generate(model, random_ids(200, seed=seed), ChunkReuseCache(model, store))
        for chunk in store.inspect().chunks.values():
            assert all(plane.device.type == "cpu" for plane in chunk.kv.tensors)
        assert 0 < gpu.pinned_bytes <= budget


def test_tables_of_codecs_are_there_for_every_stream(gpu: DoubleDevice) -> None:
    rotation = LayerRotation(torch.ones(8), "half", 0)
    lloyd_max._squares_of_pairs.cache_clear()
    with gpu.using(gpu.stream("loading", CUDA)):
        tables = [*turboquant._turns(rotation, 32, 16, CUDA), turboquant._partners(rotation, 16, CUDA)]
        tables.append(lloyd_max._squares_of_pairs(4, CUDA))
    assert all(isinstance(table.add(1), DoubleTensor) for table in tables)  # by a stream that has waited for nothing
    assert not gpu.races
    with gpu.using(gpu.stream("loading", CUDA)):
        made = tables[0] * 2
    made.add(1)
    assert gpu.races  # the control


def placed(gpu: DoubleDevice, num_layers: int, num_pieces: int, *, style: str = "half") -> tuple[int, int, int]:
    """Put moved chunks into layers, and count operations on the device, copies to it, and waits of the host."""
    layout = LayerRotation(0.5 ** torch.arange(8), style, 0)  # type: ignore[arg-type]
    random = torch.Generator().manual_seed(0)
    pieces: list[blend.Placed] = []
    wanted: list[torch.Tensor] = []
    columns = 0
    for number in range(num_pieces):
        exact = torch.randn(2 * num_layers, 2, 32, 16, generator=random)
        plane = gpu.pinned(exact.shape, exact.dtype).copy_(exact)
        block = Block({"exact": plane}, (2, 32, 16), plane.dtype, "keys", RAW, (None,) * len(plane), CUDA)
        chunk: Any = SimpleNamespace(
            kv=LayerKV((block,), tuple(((0, 2 * idx), (0, 2 * idx + 1)) for idx in range(num_layers))),
            prefix_key=bytes([number]),
        )
        pieces.append(blend.Placed(columns + 3, columns + 35, chunk, 0, 7 * number + 5))
        turned = KeyRotation((layout,)).rotate(0, exact[2], 7 * number + 5)
        wanted += [torch.zeros(2, 3, 16), turned]
        columns += 35
    row = RepairRow(np.zeros(columns, dtype=bool), np.zeros(columns, dtype=bool), ())
    plan = blend.BlendPlan(0, columns, (0,), (tuple(pieces),), (row,))
    layers = [GrowingLayer() for _ in range(num_layers)]
    before, sent, blocking = sum(gpu.work.values()), len(gpu.sent), len(gpu.blocking)
    blend.place(layers, plan, KeyRotation((layout,) * num_layers))
    counts = sum(gpu.work.values()) - before, len(gpu.sent) - sent, len(gpu.blocking) - blocking
    keys, _ = layers[1].columns(0, 0, columns) or ()
    torch.testing.assert_close(keys.cpu(), torch.cat(wanted, dim=1))
    return counts


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_moved_chunks_cost_so_much_a_layer_and_so_much_a_piece(gpu: DoubleDevice, style: str) -> None:
    work, sent, waited = placed(gpu, 32, 16, style=style)
    few, *_ = placed(gpu, 32, 2, style=style)
    assert work - few == 16 - 2  # one copy for each piece, whatever the layers
    assert few <= 10 * 32 + 8
    assert sent == 16 + 1  # and one table for all layers
    assert waited == 0
    assert not gpu.races


@pytest.mark.parametrize(
    ("layer_bytes", "ends"),
    [(2**27, [2, 6, 14, 22, 30]), (2**25, [4, 12, 28, 60, 92]), (2**20, [128, 384, 896, 1920, 2944])],
)
def test_groups_are_larger_where_layers_are_small(layer_bytes: int, ends: list[int]) -> None:
    groups, found = loading._groups(layer_bytes), [0]
    while len(found) <= len(ends):
        found.append(groups.end(found[-1]))
        assert groups.end(found[-1] - 1) == found[-1]
    assert found[1:] == ends


def test_stored_kv_that_cannot_be_pinned_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    empty = torch.empty

    def refuse(shape: torch.Size, *, dtype: torch.dtype, pin_memory: bool = False) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be ...")
        return empty(shape, dtype=dtype)

    monkeypatch.setattr(torch, "empty", refuse)
    transfer._warn_pageable.cache_clear()
    for columns in (3, 4):
        assert transfer.CudaLink().pinned(torch.Size([2, columns]), torch.float16).shape == (2, columns)
    (record,) = caplog.records
    assert "can be pinned for stored K/V (CUDA error: out of memory)" in record.getMessage()
    assert ".wslconfig" in record.getMessage()
