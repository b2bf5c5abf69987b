"""Layers on several devices, and weights that come from the host for each forward."""

import pytest
from transformers import PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, check_model_compatibility
from tests.conftest import make_model, random_ids
from tests.gpu.device import DEVICE, ON_GPU
from tests.internals.cache import ModelFingerprint
from tests.parity.compare import same_as_plain

accelerate = pytest.importorskip("accelerate")
FIRST = 0 if ON_GPU else "cpu"
SPLIT = {"model.embed_tokens": FIRST, "model.layers.0": FIRST, "model.layers.1": "cpu", "model.norm": "cpu",
         "model.rotary_emb": FIRST, "lm_head": "cpu"}  # fmt: skip


def check(model: PreTrainedModel) -> ChunkReuseCache:
    check_model_compatibility(model)
    ids = random_ids(100, seed=1).to(DEVICE)
    store = ChunkStore(model, chunk_size=32)
    cache = ChunkReuseCache(model, store)
    assert same_as_plain(model, cache, ids, atol=1e-3) == 0
    assert same_as_plain(model, cache, ids, atol=1e-3) == 99
    assert same_as_plain(model, ChunkReuseCache(model, store), ids, atol=1e-3) >= 96
    return cache


def test_two_devices() -> None:
    """accelerate runs what is mapped to "cpu" on the main device, with its weights brought there."""
    model = accelerate.dispatch_model(make_model("llama"), SPLIT, main_device=FIRST)
    assert all(layer.keys.device.type == DEVICE.type for layer in check(model).layers)


def test_layers_computed_where_they_are() -> None:
    model = accelerate.dispatch_model(make_model("llama"), SPLIT, main_device="cpu")
    assert [layer.keys.device.type for layer in check(model).layers] == [DEVICE.type, "cpu"]


@pytest.mark.filterwarnings("ignore:You are calling .generate")  # transformers looks at weights that are elsewhere
def test_offloaded_to_the_host() -> None:
    cache = check(accelerate.cpu_offload(make_model("llama"), DEVICE))
    assert all(layer.keys.device.type == DEVICE.type for layer in cache.layers)


def test_every_weight_is_read_on_the_device() -> None:
    model, fingerprint = make_model("llama").to(DEVICE), ModelFingerprint()
    before = fingerprint.current(model, full=True)
    assert fingerprint.current(model, full=True) == before
    model.lm_head.weight.data[8, 5] += 1
    assert fingerprint.current(model, full=True) != before
