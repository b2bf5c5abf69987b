"""Modules of the kvboost package, typed as its documentation types them."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost_hf import ChunkReuseCache, ChunkStore, InferenceEngine, KVBoost
from kvboost_hf.assets import load_embedded

pytestmark = pytest.mark.daily

KV = tuple((torch.randn(1, 2, 48, 16), torch.randn(1, 2, 48, 16)) for _ in range(3))


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("kv_quantize", "quantize_kv dequantize_kv QuantizedKV"),
        ("disk_tier", "DiskTier CachedChunk"),
        ("batch", "find_common_chunk_prefix broadcast_kv group_by_prefix"),
        ("cacheblend", "CacheBlendRecompute"),
        ("selective_recompute", "SelectiveRecompute"),
        ("chunk_registry", "ChunkRegistry ChunkStrategy"),
        ("compat", "check_model_compatibility SUPPORTED_ARCHITECTURES UNSUPPORTED_ARCHITECTURES"),
        ("engine", "InferenceEngine KVBoost GenerationMode RecomputeStrategy GenerationResult"),
    ],
)
def test_names_are_where_kvboost_has_them(module: str, names: str) -> None:
    found = importlib.import_module(f"kvboost_hf.{module}")
    package = importlib.import_module("kvboost_hf")
    for name in names.split():
        assert getattr(found, name) is getattr(package, name)
    with pytest.raises((AttributeError, ImportError)):
        _ = found.never_there


@pytest.mark.parametrize(("bits", "error"), [(8, 0.02), (4, 0.3), (16, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kv_quantize(bits: int, error: float, dtype: torch.dtype) -> None:
    kv_quantize = importlib.import_module("kvboost_hf.kv_quantize")
    given = tuple((k.to(dtype), v.to(dtype)) for k, v in KV)
    coded = kv_quantize.quantize_kv(given, bits=bits)
    assert isinstance(coded, kv_quantize.QuantizedKV)
    assert (coded.bits, coded.original_dtype, len(coded.layers)) == (bits, dtype, 3)
    for before, after in zip(given, kv_quantize.dequantize_kv(coded), strict=True):
        for a, b in zip(before, after, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            assert (a.float() - b.float()).abs().max() <= error * (1.5 if dtype == torch.bfloat16 else 1)
    with pytest.raises(ValueError, match="8, 4 or 16, got 3"):
        kv_quantize.quantize_kv(KV, bits=3)
    with pytest.raises(ValueError, match="one layer or more"):
        kv_quantize.quantize_kv(())


@pytest.mark.parametrize(
    ("module", "name", "given", "says"),
    [
        ("batch", "find_common_chunk_prefix", ([[1], [1]], 0), "`chunk_size` must be an int of 1 or more, got 0"),
        ("batch", "find_common_chunk_prefix", ([[1], [1]], 1.5), "`chunk_size` must be an int of 1 or more"),
        ("batch", "broadcast_kv", (KV, -1), "`batch_size` must be an int of 1 or more, got -1"),
        ("batch", "group_by_prefix", (["a"], [[1]], 0), "`chunk_size` must be an int of 1 or more, got 0"),
        ("batch", "group_by_prefix", (["a"], [[1]], 16, 0), "`n_prefix_chunks` must be an int of 1 or more, got 0"),
        ("cacheblend", "CacheBlendRecompute", (3,), "`recompute_ratio` must be from 0 to 1, got 3"),
        (
            "selective_recompute",
            "SelectiveRecompute",
            (-2,),
            "`recompute_overlap` must be an int of 0 or more, got -2",
        ),
        ("chunk_registry", "ChunkRegistry", (64, "fixed", -1), "`min_chunk_tokens` must be an int of 0 or more"),
        ("chunk_registry", "ChunkRegistry", (64, "fixed", 32, 5), "Pass it to a ContentChunker"),
        ("disk_tier", "DiskTier", ("folder", 0), "`max_chunks` must be an int of 1 or more, got 0"),
        ("disk_tier", "DiskTier", ("folder", 4, 1.5), "`slot_bytes` must be an int of 1 or more, got 1.5"),
        ("kv_quantize", "quantize_kv", (torch.ones(3),), "one layer or more"),
        ("kv_quantize", "quantize_kv", (KV[0],), r"\[batch, heads, tokens, head_dim\] for each layer"),
        ("kv_quantize", "quantize_kv", ([(torch.ones(2), torch.ones(2))],), r"\[batch, heads, tokens, head_dim\]"),
    ],
)
def test_values_that_do_not_work_say_what_does(module: str, name: str, given: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        getattr(importlib.import_module(f"kvboost_hf.{module}"), name)(*given)


def test_disk_tier(tmp_path: Path) -> None:
    disk_tier = importlib.import_module("kvboost_hf.disk_tier")
    chunk = disk_tier.CachedChunk("a hash", [1, 2, 3], KV, "text", 64)
    tier = disk_tier.DiskTier(tmp_path, max_chunks=4, slot_bytes=50_000)
    assert tier.write(chunk) is True
    assert tier.read("another") is None
    found = disk_tier.DiskTier(tmp_path, max_chunks=4, slot_bytes=50_000).read("a hash", device="cpu")
    assert (found.chunk_hash, found.token_ids, found.text, found.position) == ("a hash", [1, 2, 3], "text", 64)
    for before, after in zip(KV, found.past_key_values, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert disk_tier.DiskTier(tmp_path, max_chunks=4, slot_bytes=1000).write(chunk) is False
    for number in range(8):
        assert tier.write(disk_tier.CachedChunk(str(number), [number], KV))
    kept = [number for number in range(8) if tier.read(str(number)) is not None]
    assert 2 <= len(kept) <= 5
    assert kept[-1] == 7
    for path in tmp_path.rglob("*"):  # a byte of K/V in each blob
        if path.is_file() and 20_000 < path.stat().st_size < 60_000 and "index" not in path.name:
            data = bytearray(path.read_bytes())
            data[-5] ^= 1
            path.write_bytes(data)
    assert not any(tier.read(str(number)) for number in kept)


def test_batch() -> None:
    batch = importlib.import_module("kvboost_hf.batch")
    assert batch.find_common_chunk_prefix([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]], 2) == 4
    assert batch.find_common_chunk_prefix([[1, 2, 3], [1, 2, 3, 4]], 2) == 2
    assert batch.find_common_chunk_prefix([[1], []], 2) == batch.find_common_chunk_prefix([], 2) == 0
    rows = batch.broadcast_kv(KV, 4)
    assert rows[0][0].shape == (4, 2, 48, 16)
    assert rows[0][0].untyped_storage().data_ptr() == KV[0][0].untyped_storage().data_ptr()
    ids = [[1, 2, 3, 4], [9, 9, 9], [1, 2, 3, 4, 5], [1, 2, 8, 8]]
    assert list(batch.group_by_prefix(["a", "b", "c", "d"], ids, 2, 2).values()) == [[0, 2], [1], [3]]
    assert list(batch.group_by_prefix(["a", "b", "c", "d"], ids, 2, 1).values()) == [[0, 2, 3], [1]]
    with pytest.raises(ValueError, match="1 prompts, but the tokens of 4"):
        batch.group_by_prefix(["a"], ids, 2)


def test_chunk_registry() -> None:
    registry = importlib.import_module("kvboost_hf.chunk_registry")
    ids = list(range(100))
    cuts = [(a, b) for a, b, _ in registry.ChunkRegistry(32, min_chunk_tokens=4).split("", ids)]
    assert cuts == [(0, 32), (32, 64), (64, 96), (96, 100)]
    assert [(a, b) for a, b, _ in registry.ChunkRegistry(32).split("", ids)] == cuts[:3]
    for strategy in registry.ChunkStrategy:
        for start, stop, part in registry.ChunkRegistry(32, strategy, 1).split("", ids):
            assert part == ids[start:stop]
    assert registry.ChunkRegistry(strategy=registry.ChunkStrategy.DOCUMENT).split("", ids) == [(0, 100, ids)]


def test_repairs_are_settings_of_a_cache() -> None:
    package = importlib.import_module("kvboost_hf")
    model, tokenizer = load_embedded()
    ids = tokenizer("Anna lives in Oslo. " * 20, return_tensors="pt").input_ids
    for repair, name in (
        (package.CacheBlendRecompute(0.2), "cacheblend"),
        (package.SelectiveRecompute(8), "selective"),
    ):
        assert (repair.policy.mode, repair.policy.repair) == ("blend", name)
        cache = ChunkReuseCache(model, ChunkStore(model), policy=repair.policy)
        model.generate(ids, past_key_values=cache, max_new_tokens=2, do_sample=False)
        with pytest.raises(TypeError, match="generate"):
            repair.apply(None, model)


def test_settings_in_order() -> None:
    model, tokenizer = load_embedded()
    settings = InferenceEngine(model, tokenizer, 64, 32, 8, "selective", 0.2, 8, None, "cpu").settings
    assert (settings.chunk_size, settings.max_chunks, settings.recompute_overlap) == (64, 32, 8)
    assert (settings.recompute_strategy, settings.recompute_ratio, settings.kv_cache_bits) == ("selective", 0.2, 8)
    assert InferenceEngine(model, tokenizer, 64).verify_correctness(4)
    with pytest.raises(TypeError, match="`chunk_size` was given twice, as 128 and as 64"):
        KVBoost(model, tokenizer, 128, chunk_size=64)
    with pytest.raises(TypeError, match="8 settings in order"):
        KVBoost(model, tokenizer, *range(9))
    with pytest.raises(TypeError, match="Did you mean `chunk_size`"):
        KVBoost(model, tokenizer, chunk_sise=64)
