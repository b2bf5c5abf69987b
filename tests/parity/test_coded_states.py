"""States in fewer bits: `ChunkStore(state_codec=)`."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, ReusePolicy, check_model_compatibility
from tests.architectures.models import make_architecture
from tests.conftest import STATEFUL, as_inputs, counted, left_pad, make_model, random_ids
from tests.internals.cache import (
    RAW,
    Blob,
    DamagedBlobError,
    Kind,
    LayerState,
    LayerStates,
    ModelForm,
    StateCodes,
    StateFormat,
    dump,
    foreign,
    make_codec,
    read_states,
)
from tests.parity.test_loading import blobs, flip

CHUNK, NEW = 32, 8
TEXT, TAIL = random_ids(200, seed=1), random_ids(40, seed=2)
OTHER = torch.cat([TEXT, TAIL], dim=1)


@torch.no_grad()
def answer(model: PreTrainedModel, cache: ChunkReuseCache, ids: torch.Tensor = OTHER) -> tuple[int, float]:
    """Prompt tokens that were forwarded, and how far the logits of the last one are from plain, in deviations."""
    expected = model(**as_inputs(ids)).logits[0, -1]
    with counted(model) as work:
        found = model(**as_inputs(ids), past_key_values=cache, logits_to_keep=1).logits[0, -1]
    assert cache.report.bypass_reason is None
    return work.tokens, float((found - expected).abs().max() / expected.std())


def primed(model: PreTrainedModel, **settings: Any) -> ChunkStore:
    check_model_compatibility(model)
    store = ChunkStore(model, chunk_size=CHUNK, **settings)
    model.generate(**as_inputs(TEXT), max_new_tokens=NEW, past_key_values=ChunkReuseCache(model, store))
    return store


@pytest.mark.parametrize("name", [*STATEFUL, "mamba2"])
def test_they_are_smaller_and_nearly_the_same(name: str) -> None:
    model = make_architecture(name)
    raw = primed(model)
    count, size = raw.stats()["states"], _bytes(raw)
    tokens, off = answer(model, ChunkReuseCache(model, raw))
    assert tokens <= len(TAIL[0]) + 8
    assert off < 1e-3
    assert raw.stats()["codec"] == "raw"
    for codec, most_bytes, most_off in (("int8", 0.5, 0.01), ("int4", 0.4, 0.1), ("turboquant", 0.4, 0.1)):
        store = primed(model, state_codec=codec)
        assert store.stats()["states"] == count
        assert _bytes(store) < most_bytes * size
        again, off = answer(model, ChunkReuseCache(model, store))
        assert again == tokens
        assert 0 < off < most_off
        assert store.stats()["codec"].startswith("raw;states:")
        store._records.check_consistency()
        held = [c.kv.nbytes + c.tokens.nbytes for c in store.inspect().chunks.values()]
        held += [s.states.nbytes + s.tokens.nbytes for s in store.inspect().states.values()]
        assert store.stats()["bytes"] == sum(held)
        assert store.check_integrity().wrong == 0


def _bytes(store: ChunkStore) -> int:
    return sum(saved.states.nbytes for saved in store.inspect().states.values())


@pytest.mark.parametrize("name", STATEFUL)
def test_zeroed_codes_are_noticed(name: str) -> None:
    model = make_model(name)
    store = primed(model, state_codec="int8")
    _, off = answer(model, ChunkReuseCache(model, primed(model, state_codec="int8")))
    states = store.inspect().states
    for saved in states.values():
        for layer in saved.states.layers:
            for coded in layer.tensors if layer is not None else ():
                for plane in coded.planes.values() if isinstance(coded, StateCodes) else ():
                    plane.zero_()
    assert answer(model, ChunkReuseCache(model, store))[1] > 5 * off
    assert store.check_integrity().wrong >= len(states)


@pytest.mark.usefixtures("loading_is_worth_it")
@pytest.mark.parametrize("name", STATEFUL)
def test_they_outlive_the_process_and_damage_is_found(name: str, disk: str, tmp_path: Path) -> None:
    def restart(codec: str | None) -> tuple[PreTrainedModel, ChunkStore]:
        model = make_model(name)
        check_model_compatibility(model)
        return model, ChunkStore(model, chunk_size=CHUNK, tiers=[disk], state_codec=codec)

    primed(make_model(name), tiers=[disk], state_codec="int8").close()
    model, store = restart("int8")
    tokens, off = answer(model, ChunkReuseCache(model, store))
    assert 8 + len(TAIL[0]) <= tokens <= 16 + len(TAIL[0])  # 8 show the form of what is read
    assert 0 < off < 0.05
    assert store.check_integrity().wrong == 0  # among them states that were computed behind codes
    store.close()
    for other in (None, "int4"):  # in other bits they are not found
        model, store = restart(other)
        assert answer(model, ChunkReuseCache(model, store), TEXT)[0] >= len(TEXT[0])
        store.close()
    for path in blobs(tmp_path):
        flip(path, 0.9)
    model, store = restart("int8")
    tokens, off = answer(model, ChunkReuseCache(model, store))
    assert tokens >= len(OTHER[0])
    assert off < 1e-3
    assert store.stats()["lost"] > 0
    store.close()


def test_blobs_of_another_codec_are_damage(disk: str, tmp_path: Path) -> None:
    """Whoever can write to a tier can write a layout: shapes and types are those of the model and of the store."""
    model = make_model("qwen3_next")
    primed(model, tiers=[disk], state_codec="int8").close()
    form, checked = ModelForm.of(model), 0
    assert form is not None
    for path in blobs(tmp_path):
        blob = Blob(memoryview(path.read_bytes()))
        if blob.entry.kind is not Kind.STATES:
            continue
        checked += 1
        states = read_states(blob, form, StateFormat(make_codec("int8")))
        assert any(isinstance(t, StateCodes) for layer in states.layers if layer for t in layer.tensors)
        for codec in ("raw", "int4", "turboquant"):
            with pytest.raises(DamagedBlobError):
                read_states(blob, form, StateFormat(make_codec(codec)))
        tensors, layout = states.parts()
        for change in ({"0.9.codes": torch.zeros(1, 4)}, {next(iter(tensors)): torch.zeros(1, 3)}):
            _, parts = dump(blob.entry, {**tensors, **change}, layout)
            with pytest.raises(DamagedBlobError):
                read_states(Blob(memoryview(b"".join(parts))), form, StateFormat(make_codec("int8")))
    assert checked


def test_what_cannot_be_exact_is_refused() -> None:
    model = make_model("qwen3_next")
    store = ChunkStore(model, state_codec="int8")
    for policy, told in ((ReusePolicy(reproducible=True), "`reproducible`"), (ReusePolicy(audit_rate=0.5), "`audit")):
        with pytest.raises(ValueError, match=f"{told}.*raw;states:kivi:8:8"):
            ChunkReuseCache(model, store, policy)
    with pytest.raises(ValueError, match="must be 'raw', 'int8'"):
        ChunkStore(model, state_codec="int9")


@pytest.mark.daily
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shapes(dtype: torch.dtype) -> None:
    """Recurrent states by groups of their last dimension, convolutions by tokens; what gets no smaller stays."""
    drawn = [torch.randn(shape).to(dtype) for shape in ((3, 16, 64), (96, 4), (2, 2, 8, 70), (2, 3), (64,))]
    form = StateFormat(make_codec("int8"))
    states = LayerStates((LayerState([*drawn, None, torch.arange(6).view(2, 3)], ("plain", 1)), None))
    coded = form.encode(states)
    assert coded.nbytes == form.nbytes_of(states) < states.nbytes
    assert coded.layer(1) is None
    found = coded.layer(0)
    assert found is not None
    for right, got in zip(states.layers[0].tensors, found.tensors, strict=True):
        if right is None:
            assert got is None
            continue
        assert got.shape == right.shape
        assert got.dtype == right.dtype
        off = float((got - right).abs().max())
        assert off == 0 if right.ndim == 1 or right.shape == (2, 3) else 0 < off < 0.05
    own = coded.owned()
    own.layers[0].tensors[0].planes["codes"].zero_()
    assert coded.layer(0).tensors[0].abs().sum() > 1
    assert StateFormat(RAW).encode(states) is states
    whole = LayerStates((LayerState([drawn[0]], {"a layer of a model's own": drawn[0]}),))
    assert form.encode(whole).layers[0] is whole.layers[0]
    assert not form.encode(whole).can_be_written


@pytest.mark.usefixtures("loading_is_worth_it")
def test_states_of_other_kernels_are_not_found(disk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers computes states by packages where they are installed, and rounds otherwise without them."""
    for installed, found in (((), False), (("fla-core 0.4.0",), False), (("fla-core 0.4.1",), False), ((), True)):
        monkeypatch.setattr(foreign, "_installed_kernels", functools.partial(tuple, installed))
        for name in ("qwen3_next", "llama"):
            model = make_model(name)
            check_model_compatibility(model)
            with ChunkStore(model, chunk_size=CHUNK, tiers=[disk]) as store:
                tokens, _ = answer(model, ChunkReuseCache(model, store), TEXT)
                known = found or (name == "llama" and bool(installed))
                assert (tokens < 100) == known


@torch.no_grad()
@pytest.mark.parametrize("name", STATEFUL)
def test_rows(name: str) -> None:
    model = make_model(name)
    inputs = left_pad(OTHER, torch.cat([TEXT, random_ids(30, seed=3)], dim=1))
    one: dict[str, Any] = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True}
    expected = model.generate(**inputs, **one).logits[0]
    for codec, least, most in (("raw", 0, 1e-3), ("int8", 1e-7, 0.05)):
        cache = ChunkReuseCache(model, primed(model, state_codec=codec))
        with counted(model) as work:
            found = model.generate(**inputs, **one, past_key_values=cache).logits[0]
        assert least <= float((found - expected).abs().max() / expected.std()) < most
        assert work.tokens < inputs["input_ids"].numel() / 2


def test_the_same_budget_holds_more_of_them() -> None:
    model = make_architecture("qwen3_next")
    size = max(saved.states.nbytes for saved in primed(model).inspect().states.values())
    counts = []
    for codec in ("raw", "int8"):
        store = primed(model, max_bytes=40 * size, state_share=0.5, state_codec=codec)
        for seed in (5, 6, 7):
            ids = random_ids(1200, seed=seed)
            assert answer(model, ChunkReuseCache(model, store), ids)[0] == 1200
        assert _bytes(store) <= 20 * size
        counts.append(store.stats()["states"])
    assert counts[1] > 2 * counts[0]
