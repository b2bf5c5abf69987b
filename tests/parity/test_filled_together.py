"""Hits that many layers are given by one copy: the same K/V as layer by layer, and layers that stay apart."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore
from tests.conftest import EOS, FULL_ATTENTION, as_inputs, left_pad, make_model, random_ids
from tests.internals.cache import GrowingLayer, GrowingTensor, fill

TOKENS = 400


def stored(model: PreTrainedModel, ids: torch.Tensor) -> ChunkStore:
    store = ChunkStore(model, chunk_size=64)
    store.warm(ids)
    return store


def served(model: PreTrainedModel, store: ChunkStore, inputs: dict[str, torch.Tensor]) -> tuple[Any, ChunkReuseCache]:
    cache = ChunkReuseCache(model, store)
    out = model.generate(
        **inputs,
        past_key_values=cache,
        max_new_tokens=4,
        do_sample=False,
        pad_token_id=EOS,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out, cache


def tensors(cache: ChunkReuseCache) -> list[GrowingTensor]:
    found = []
    for layer in cache._live.layers:
        assert isinstance(layer, GrowingLayer)
        found += layer._tensors
    return found


def held(cache: ChunkReuseCache) -> list[torch.Tensor]:
    return [kv for layer in cache.layers for kv in (layer.keys, layer.values)]


@pytest.mark.parametrize("rows", ["one row", "a shorter prompt", "padded rows"])
@pytest.mark.parametrize("name", [*FULL_ATTENTION, "gemma2"])
def test_layer_by_layer_gives_the_same(name: str, rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(name)
    ids = random_ids(TOKENS)
    store = stored(model, ids)
    inputs = {
        "one row": as_inputs(torch.cat([ids, random_ids(5, seed=1)], dim=1)),
        "a shorter prompt": as_inputs(ids[:, :200]),
        "padded rows": left_pad(
            torch.cat([ids, random_ids(5, seed=1)], dim=1), torch.cat([ids[:, :200], random_ids(7, seed=2)], dim=1)
        ),
    }[rows]
    taken: list[int] = []
    take = GrowingLayer.take
    monkeypatch.setattr(GrowingLayer, "take", lambda self, *given: (taken.append(1), take(self, *given)))
    together, cache = served(model, store, inputs)
    full = [layer for layer in cache.layers if type(layer) is GrowingLayer]
    assert len(taken) == len(full)  # layers with a window are filled alone
    monkeypatch.setattr(fill, "_fill_together", lambda *given: set())
    alone, other = served(model, store, inputs)
    assert cache.report.reused_tokens == other.report.reused_tokens > 190
    assert torch.equal(together.sequences, alone.sequences)
    # Matrix products round by where heads begin, and so by the room that buffers have.
    assert [tensor.buffer.shape for tensor in tensors(cache)] == [tensor.buffer.shape for tensor in tensors(other)]
    for found, expected in zip(held(cache), held(other), strict=True):
        assert torch.equal(found, expected)
    for found, expected in zip(together.logits, alone.logits, strict=True):
        assert torch.equal(found, expected)


class TestApart:
    """Layers whose memory was made together do not share what others do to one of them."""

    @pytest.fixture
    def filled(self, llama: PreTrainedModel) -> tuple[PreTrainedModel, ChunkStore, ChunkReuseCache]:
        ids = random_ids(TOKENS)
        store = stored(llama, ids)
        cache = served(llama, store, as_inputs(ids))[1]
        assert all(tensor._taken for tensor in tensors(cache))
        return llama, store, cache

    def test_a_write_is_that_of_one_layer(self, filled: tuple[PreTrainedModel, ChunkStore, ChunkReuseCache]) -> None:
        tensors(filled[2])[1].buffer.add_(1)
        assert [layer.intact for layer in filled[2]._live.layers] == [False, True]

    def test_memory_that_is_handed_out(self, filled: tuple[PreTrainedModel, ChunkStore, ChunkReuseCache]) -> None:
        """Not even who writes to the memory behind `keys` reaches another tensor."""
        model, _, cache = filled
        before = [kv.clone() for kv in held(cache)[1:]]
        cache.layers[0].keys.untyped_storage().fill_(0)
        assert all(torch.equal(kv, was) for kv, was in zip(held(cache)[1:], before, strict=True))
        ids = random_ids(TOKENS)
        plain = model.generate(**as_inputs(ids), max_new_tokens=4, do_sample=False)
        found = model.generate(**as_inputs(ids), past_key_values=cache, max_new_tokens=4, do_sample=False)
        assert torch.equal(found, plain)
        assert cache.report.dropped_reason

    def test_bytes(self, filled: tuple[PreTrainedModel, ChunkStore, ChunkReuseCache]) -> None:
        columns = tensors(filled[2])[0].buffer.shape[2]
        assert filled[2].nbytes == 4 * columns * 2 * 16 * 4
        assert TOKENS < columns < TOKENS + 300

    def test_growing_beyond_the_room(self, filled: tuple[PreTrainedModel, ChunkStore, ChunkReuseCache]) -> None:
        model, _, cache = filled
        ids = torch.cat([random_ids(TOKENS), random_ids(300, seed=3)], dim=1)
        plain = model.generate(**as_inputs(ids), max_new_tokens=4, do_sample=False)
        assert torch.equal(model.generate(**as_inputs(ids), past_key_values=cache, max_new_tokens=4), plain)
        assert not any(tensor._taken for tensor in tensors(cache))

    def test_a_fork(self, filled: tuple[PreTrainedModel, ChunkStore, ChunkReuseCache]) -> None:
        model, _, cache = filled
        twin = cache.fork()
        before = [kv.clone() for kv in held(twin)]
        ids = torch.cat([random_ids(TOKENS), random_ids(9, seed=3)], dim=1)
        model.generate(**as_inputs(ids), past_key_values=cache, max_new_tokens=4)
        assert all(torch.equal(kv, was) for kv, was in zip(held(twin), before, strict=True))


def test_under_another_default_device(llama: PreTrainedModel) -> None:
    """Buffers are where the chunks are."""
    ids = random_ids(TOKENS)
    store = stored(llama, ids)
    expected, _ = served(llama, store, as_inputs(ids))
    with torch.device("meta"):
        cache = ChunkReuseCache(llama, store)
        with torch.no_grad():
            out = llama(**as_inputs(ids), past_key_values=cache, use_cache=True, logits_to_keep=1)
    assert cache.report.reused_tokens == TOKENS - 1
    assert torch.equal(out.logits[:, -1], expected.logits[0])
