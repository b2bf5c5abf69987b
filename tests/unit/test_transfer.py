"""What goes over the link to a device: in how many copies, by which stream, and what the model waits for."""

import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore
from tests.conftest import make_model, random_ids
from tests.device_double import CUDA, DoubleDevice, DoubleTensor
from tests.internals.cache import (
    RAW,
    Block,
    GrowingLayer,
    LayerKV,
    ReusePlan,
    RowPlan,
    Segment,
    StoredChunk,
    fill,
    loading,
    make_codec,
    packing,
    prompt_plan,
    turboquant,
)
from tests.internals.compat import KeyRotation, LayerRotation
from tests.internals.top import device_link

IDS = random_ids(170, seed=1)
LAYER_BYTES = 5 * 2 * 2 * 32 * 16 * 4  # 5 chunks of 32 tokens, keys and values, 2 heads of 16 dims, float32


@pytest.fixture
def gathers() -> bool:
    """Whether a kernel reads pinned memory."""
    return False


@pytest.fixture
def gpu(gathers: bool, monkeypatch: pytest.MonkeyPatch) -> Iterator[DoubleDevice]:
    monkeypatch.setattr(prompt_plan, "_MIN_BYTES", 1)
    monkeypatch.setattr(loading, "_FIRST_BYTES", LAYER_BYTES)
    monkeypatch.setattr(loading, "_MOST_BYTES", 4 * LAYER_BYTES)
    with DoubleDevice(gathers=gathers).in_place() as found:
        yield found


def on_device(name: str) -> PreTrainedModel:
    model = make_model(name)
    model.set_attn_implementation("eager")
    return model.to(CUDA)


def generate(model: PreTrainedModel, ids: torch.Tensor, cache: Any = None) -> list[int]:
    call: Any = model.generate
    return call(ids.to(CUDA), past_key_values=cache, max_new_tokens=2, do_sample=False).tolist()[0]


def stored_chunk(number: int, kv: LayerKV, tokens: int) -> StoredChunk:
    ids = np.zeros((tokens, 1), dtype=np.int64)
    return StoredChunk(number.to_bytes(2, "big"), b"", b"", 0, ids, kv, kv.nbytes, len(ids))


@dataclass(frozen=True, kw_only=True)
class Hit:
    """Rows whose chunks are in pinned memory.

    Args:
        rows: The chunks of each row: the number, and the tokens [start, stop) that are taken of it.
        tokens: The tokens of each chunk.
        dims: The head dimensions of keys and values.
        pads: The pads of each row.
        held: Columns in the layers before.
        pinned: Whether the chunks are in pinned memory.
        codec: The codec of the chunks.
    """

    rows: tuple[tuple[tuple[int, int, int], ...], ...]
    tokens: tuple[int, ...]
    dims: tuple[int, int] = (16, 16)
    pads: tuple[int, ...] = (0,)
    held: int = 0
    heads: int = 2
    layers: int = 2
    dtype: torch.dtype = torch.float16
    pinned: bool = True
    codec: str = "raw"

    def chunks(self, gpu: DoubleDevice) -> list[StoredChunk]:
        draw, found = torch.Generator().manual_seed(0), []
        for number, tokens in enumerate(self.tokens):
            blocks = []
            for dim, count in Counter(self.dims).items():
                exact = torch.randn(count * self.layers, self.heads, tokens, dim, generator=draw).to(self.dtype)
                codec = RAW if self.codec == "raw" else make_codec(self.codec)
                planes = codec.encode(exact, "values", [None] * len(exact))
                if self.pinned:
                    planes = {name: gpu.pinned(each.shape, each.dtype).copy_(each) for name, each in planes.items()}
                shape = (self.heads, tokens, dim)
                blocks.append(Block(planes, shape, self.dtype, "values", codec, (None,) * len(exact), CUDA))
            alike = len(blocks) == 1
            places = tuple(((0, 2 * i), (0, 2 * i + 1)) if alike else ((0, i), (1, i)) for i in range(self.layers))
            found.append(stored_chunk(number, LayerKV(tuple(blocks), places), tokens))
        return found

    def load(self, gpu: DoubleDevice) -> tuple[list[torch.Tensor], loading.Loading]:
        """The layers' columns, and what has loaded them."""
        chunks, rows, filled = self.chunks(gpu), [], 0
        for own, pad in zip(self.rows, self.pads, strict=True):
            at, segments = self.held - pad, []
            for number, start, stop in own:
                segments.append(Segment(chunks[number], start, at, at + stop - start))
                at += stop - start
            rows.append(RowPlan(at, tuple(segments), (), None))
            filled = max(filled, at + pad)
        plan = ReusePlan(self.held, filled, tuple(rows), self.pads)
        layers = [GrowingLayer() for _ in range(self.layers)]
        if self.held:
            for layer in layers:
                layer.update(
                    *(
                        torch.ones(len(rows), self.heads, self.held, dim, dtype=self.dtype).to(CUDA)
                        for dim in self.dims
                    )
                )
        gpu.sent.clear()
        gpu.work.clear()
        found = loading.Loading(layers, plan, list, lambda chunk, error: None)
        found.start()
        found.finish()
        return [each.view() for layer in layers for each in layer._tensors], found


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


@pytest.mark.parametrize("gathers", [True])
def test_a_kernel_brings_each_layer(gpu: DoubleDevice, arrived: list[int]) -> None:
    model, store = stored(gpu)
    table = 5 * 6 * 8  # bytes
    assert arrived == [table + LAYER_BYTES * layers for layers in range(1, 9)]
    cache, gathered = ChunkReuseCache(model, store), gpu.work["gather"]
    assert generate(model, IDS, cache) == plain()
    assert cache.report.tier_tokens["ram"] == 160
    assert gpu.work["gather"] - gathered == 8
    assert not gpu.races


@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize("count", [4, 64, 512])
def test_a_hit_takes_few_launches_whatever_its_chunks(gpu: DoubleDevice, gathers: bool, count: int) -> None:
    row, layers = tuple((number, 0, 16) for number in range(count)), 1 if count > 100 else 3
    hit = Hit(rows=(row,), tokens=(16,) * count, heads=1, layers=layers)
    found, _ = hit.load(gpu)
    moves = {name: gpu.work[name] for name in ("gather", "_to_copy", "copy_", "cat")}
    if gathers:
        assert moves == {"gather": hit.layers, "_to_copy": 1, "copy_": 0, "cat": 0}  # one table
        assert len(gpu.sent) == hit.layers + 1
    else:  # the control
        assert moves["_to_copy"] == len(gpu.sent) >= count
    wanted = torch.cat([chunk.kv.blocks[0].planes["exact"] for chunk in hit.chunks(gpu)], dim=2)
    for tensor, exact in zip(found, wanted, strict=True):
        assert torch.equal(tensor[0].cpu(), exact)
    assert not gpu.races


HITS = {
    "unequal rows": Hit(rows=(((0, 0, 20), (1, 0, 33)), ((2, 0, 16),)), tokens=(20, 33, 16), pads=(0, 37)),
    "cut chunks": Hit(rows=(((0, 3, 20), (1, 0, 9)),), tokens=(20, 33)),
    "behind what is held": Hit(
        rows=(((1, 5, 33), (0, 0, 1)), ((1, 5, 16), (0, 2, 20))), tokens=(20, 33), held=7, pads=(0, 0)
    ),
    "shared chunks": Hit(rows=(((0, 0, 20), (1, 0, 33)), ((0, 0, 20), (2, 0, 16))), tokens=(20, 33, 16), pads=(0, 17)),
    "values that are narrower": Hit(rows=(((0, 2, 20), (1, 0, 9)),), tokens=(20, 33), dims=(24, 16)),
    "odd widths": Hit(rows=(((0, 0, 20),),), tokens=(20,), dims=(5, 3), heads=3),
    "float32": Hit(rows=(((0, 0, 20),),), tokens=(20,), dtype=torch.float32, layers=3),
}


@pytest.mark.daily
@pytest.mark.parametrize("hit", HITS.values(), ids=HITS)
@pytest.mark.parametrize("gathers", [True])
def test_a_kernel_writes_what_copies_write(gpu: DoubleDevice, hit: Hit) -> None:
    found, how = hit.load(gpu)
    assert gpu.work["gather"] == hit.layers
    (kept,) = gpu.kept  # chunks that are evicted now are still there for the kernel
    assert {each.data_ptr() for each in kept[0]} == {
        plane.data_ptr() for chunk in how._chunks for block in chunk.kv.blocks for plane in block.planes.values()
    }
    gpu._gathers = False
    copied, _ = hit.load(gpu)
    assert not gpu.work["gather"]
    for ours, theirs in zip(found, copied, strict=True):
        assert torch.equal(ours.cpu(), theirs.cpu())
    assert not gpu.races


@pytest.mark.daily
@pytest.mark.parametrize("given", [{"pinned": False}, {"codec": "int8"}], ids=str)
@pytest.mark.parametrize("gathers", [True])
def test_what_a_kernel_cannot_read_is_copied(gpu: DoubleDevice, given: dict[str, Any]) -> None:
    _, how = replace(HITS["cut chunks"], **given).load(gpu)
    assert not gpu.work["gather"]
    assert not gpu.kept
    assert set(how._tables.values()) == {None}


def test_memory_is_kept_until_it_was_read() -> None:
    class Passing:
        passed = False

        def query(self) -> bool:
            return self.passed

        def synchronize(self) -> None:
            raise AssertionError("nobody waits")

    kept, events = device_link.Kept(), [Passing(), Passing()]
    tensors = [torch.zeros(3) for _ in events]
    held = [weakref.ref(tensor) for tensor in tensors]
    for tensor, event in zip(tensors, events, strict=True):
        kept.add([tensor], event)
    del tensor, tensors
    kept.let_go()
    assert all(each() is not None for each in held)
    events[0].passed = True
    kept.let_go()
    assert [each() is not None for each in held] == [False, True]


def test_a_kernel_that_cannot_read_pinned_memory_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """As here, where nothing is pinned."""
    device_link._gathers.cache_clear()
    with caplog.at_level("INFO"):
        assert not device_link.CudaLink().gathers(torch.device("cpu"))
        assert not device_link.CudaLink().gathers(torch.device("cpu"))
    device_link._gathers.cache_clear()
    assert caplog.text.count("is copied to cpu chunk by chunk: ") == 1


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
    packing._squares_of_pairs.cache_clear()
    with gpu.using(gpu.stream("loading", CUDA)):
        tables = [*turboquant._turns(rotation, 32, 16, CUDA), turboquant._partners(rotation, 16, CUDA)]
        tables.append(packing._squares_of_pairs(4, CUDA))
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
    pieces: list[Segment] = []
    wanted: list[torch.Tensor] = []
    columns = 0
    for number in range(num_pieces):
        exact = torch.randn(2 * num_layers, 2, 32, 16, generator=random)
        plane = gpu.pinned(exact.shape, exact.dtype).copy_(exact)
        block = Block({"exact": plane}, (2, 32, 16), plane.dtype, "keys", RAW, (None,) * len(plane), CUDA)
        kv = LayerKV((block,), tuple(((0, 2 * idx), (0, 2 * idx + 1)) for idx in range(num_layers)))
        shift = 7 * number + 5
        ids, start = np.zeros(32, dtype=np.int64), columns + 3
        chunk = StoredChunk(bytes([number]), b"", b"", start - shift, ids, kv, kv.nbytes, len(ids))
        pieces.append(Segment(chunk, 0, start, start + 32, moved=True))
        turned = KeyRotation((layout,)).rotate(0, exact[2], shift)
        wanted += [torch.zeros(2, 3, 16), turned]
        columns += 35
    plan = ReusePlan(0, columns, (RowPlan(columns, tuple(pieces), (), None),), (0,))
    layers = [GrowingLayer() for _ in range(num_layers)]
    before, sent, blocking = sum(gpu.work.values()), len(gpu.sent), len(gpu.blocking)
    fill.fill_turned(layers, plan, KeyRotation((layout,) * num_layers))
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


@pytest.mark.daily
@pytest.mark.parametrize(
    ("layer_bytes", "ends"),
    [(2**27, [2, 6, 14, 22, 30]), (2**25, [4, 12, 28, 60, 92]), (2**20, [128, 384, 896, 1920, 2944])],
)
def test_groups_are_larger_where_layers_are_small(layer_bytes: int, ends: list[int]) -> None:
    groups, found = loading.groups_of(layer_bytes), [0]
    while len(found) <= len(ends):
        found.append(groups.end(found[-1]))
        assert groups.end(found[-1] - 1) == found[-1]
    assert found[1:] == ends


def test_stored_kv_that_cannot_be_pinned_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    empty = torch.empty

    def refuse(shape: torch.Size, *, dtype: torch.dtype, device: str, pin_memory: bool = False) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be ...")
        return empty(shape, dtype=dtype, device=device)

    monkeypatch.setattr(torch, "empty", refuse)
    device_link._warn_pageable.cache_clear()
    for columns in (3, 4):
        assert device_link.CudaLink().pinned(torch.Size([2, columns]), torch.float16).shape == (2, columns)
    (record,) = caplog.records
    assert "can be pinned for stored K/V (CUDA error: out of memory)" in record.getMessage()
    assert ".wslconfig" in record.getMessage()
