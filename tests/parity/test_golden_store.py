"""What an older version stored on disk: this one finds all of it, and reads the K/V that the model computes."""

from collections import Counter
from pathlib import Path
from shutil import copytree

import pytest
import torch
import transformers
from transformers import DynamicCache
from transformers.utils.import_utils import is_kernels_available

from kvboost_hf import ChunkReuseCache, ChunkStore, ReusePolicy
from tests import golden_store
from tests.golden_store import write as golden
from tests.internals.cache import (
    LayerKVReader,
    StoredChunk,
    StoredStates,
    content_only_key,
    prefix_key,
    records_of,
    states_key,
)

REPAIRED = ReusePolicy(mode="blend", repair="first_k", recompute_ratio=1.0, min_prefill_saving=0, sink_tokens=0)
STORED = {
    ("llama", "raw"): {"chunk": 4, "content only": 4},
    **{("llama", codec): {"chunk": 3} for codec in golden.CODECS if codec != "raw"},
    ("qwen3_next", "raw"): {"chunk": 3, "states": 2},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copied = tmp_path / "golden"
    copytree(Path(golden_store.__file__).parent, copied, ignore=lambda _, names: [n for n in names if ".py" in n])
    return copied


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize(("name", "codec"), golden.CASES)
def test_all_of_it_is_found_and_right(name: str, codec: str, indexed: bool, folder: Path) -> None:
    if not indexed:
        (folder / golden.TIER / "index.sqlite3").unlink()
    model = golden.make_model(name)
    with golden.fixed(), golden.open_store(model, folder / golden.TIER, codec) as store:
        store.root(store.salt)  # which tells what belongs to this model
        found = records_of(store).everything()
        stored = Counter(kind_of(each) for each in found)
        assert stored == Counter(STORED[name, codec])
        assert all(each.key == key_of(each) for each in found)
        report = store.check_integrity()
        assert (report.checked, report.wrong) == (stored["chunk"] + stored["states"], 0)


def kind_of(stored: StoredChunk | StoredStates) -> str:
    return "states" if isinstance(stored, StoredStates) else "content only" if stored.content_only else "chunk"


def key_of(stored: StoredChunk | StoredStates) -> bytes:
    """The key that it would be stored under now."""
    if isinstance(stored, StoredStates):
        return states_key(stored.parent, stored.tokens)
    if stored.content_only:
        return content_only_key(stored.root, stored.parent, stored.start, stored.tokens)
    return prefix_key(stored.parent, stored.tokens)


@pytest.mark.parametrize(("name", "codec"), golden.CASES)
def test_prompts_find_it(name: str, codec: str, folder: Path) -> None:
    model = golden.make_model(name)
    with golden.fixed(), golden.open_store(model, folder / golden.TIER, codec) as store:
        cache = ChunkReuseCache(model, store)
        tokens = golden.generate(model, golden.PROMPT, cache)
        kept = 64 if name == "qwen3_next" else 74
        assert cache.report.tier_tokens == {"live": 0, "ram": 0, "disk": kept}, cache.report.explain()
    with golden.fixed(), ChunkStore(model, chunk_size=golden.CHUNK, codec=golden.CODECS[codec]) as new:
        cache = ChunkReuseCache(model, new)
        golden.generate(model, golden.PROMPT, cache)
        cache.reset()
        cache = ChunkReuseCache(model, new)
        assert tokens == golden.generate(model, golden.PROMPT, cache)  # coded alike, so that lossy ones agree, too
        assert cache.report.reused_tokens >= kept
    if store.codec.lossless:
        assert tokens == golden.generate(model, golden.PROMPT)


def test_documents_are_found_and_moved(folder: Path) -> None:
    model = golden.make_model("llama")
    with golden.fixed(), golden.open_store(model, folder / golden.TIER, "raw") as store:
        assert store.warm(documents=golden.DOCUMENTS).forwarded_tokens == 0
        cache = ChunkReuseCache(model, store, REPAIRED)
        assert golden.generate(model, golden.RETRIEVAL, cache) == golden.generate(model, golden.RETRIEVAL)
        # A chunk of each, and of the other the part behind it, up to the last 16 tokens of the prompt.
        assert cache.report.moved_tokens == 32 + 32 + 9, cache.report.moved_reason
        assert cache.report.moved_by == {20: 32, 60: 41}


def test_documents_hold_what_they_are_alone(folder: Path) -> None:
    model = golden.make_model("llama")
    found = 0
    with golden.fixed(), golden.open_store(model, folder / golden.TIER, "raw") as store:
        root = store.root(store.salt)
        for document in golden.DOCUMENTS:
            alone = DynamicCache(config=model.config)
            with torch.no_grad():
                model(document, past_key_values=alone)
            for start, stop in ((0, 32), (32, document.shape[1])):
                if stop - start < 16:
                    continue
                (kept,) = store.moved_index(root).variants(document[0, start:stop].numpy())[:1]
                assert (kept.start, kept.content_only) == (start, True)
                read = LayerKVReader(store.fetch([kept])[kept.key].kv)
                for index, layer in enumerate(alone.layers):
                    for ours, theirs in zip(read.layer(index), (layer.keys, layer.values), strict=True):
                        torch.testing.assert_close(ours, theirs[0, :, start:stop], atol=1e-4, rtol=1e-4)
                        found += 1
    assert found == 12


@pytest.mark.parametrize("attention", ["sdpa", "kvboost_fa2"])
@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_models_have_the_fingerprints_that_they_had(name: str, attention: str) -> None:
    """The keys of real stores begin with them: where one changes, nothing that users have on disk is found."""
    known = golden.fingerprints().get(transformers.__version__)
    if known is None:
        pytest.skip(f"configurations of transformers {transformers.__version__} may have other fields")
    if is_kernels_available():
        pytest.skip("with the package `kernels`, rotary functions are modules that the hub's kernels may replace")
    assert golden.fingerprint(name, attention) == known[f"{name} {attention}"], (
        "kvboost_hf/cache/identity finds something in a model that it did not find before. If that has to be, say in "
        "CHANGELOG.md that stores are computed again: python -m tests.golden_store.write --fingerprints"
    )


def test_what_was_sealed_is_found(folder: Path) -> None:
    model = golden.make_model("llama")
    with golden.fixed(), golden.open_store(model, folder / golden.SEALED, "raw") as store:
        cache = ChunkReuseCache(model, store)
        assert golden.generate(model, golden.PROMPT[:, :40], cache) == golden.generate(model, golden.PROMPT[:, :40])
        assert cache.report.tier_tokens["disk"] == 32
