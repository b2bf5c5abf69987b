"""What generate() returns after `attach` can be used as what transformers returns."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, attach
from kvboost_hf.errors import CacheModelMismatchError
from tests.conftest import as_inputs, make_model, random_ids
from tests.internals.compat import CACHE

IDS, NEW = random_ids(30, seed=3), random_ids(80, seed=4)
KINDS: dict[str, dict[str, Any]] = {"growing": {"max_cache_len": None}, "fixed": {"max_cache_len": 96}, "static": {}}
COPIES: dict[str, Callable[[Any], Any]] = {
    "same": lambda cache: cache,
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "DynamicCache": DynamicCache,
}


def held_by(out: Any) -> Any:
    """The cache that generate() has returned, whatever this release calls it."""
    return out[CACHE]


def _saved(out: Any) -> Any:
    file = io.BytesIO()
    torch.save(out, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _mask(cache: Any, new: int) -> torch.Tensor:
    return torch.ones(1, int(cache.get_seq_length()) + new, dtype=torch.long)


def _continued(model: PreTrainedModel, cache: Any, new: int) -> Any:
    return model.generate(input_ids=NEW[:, :new], attention_mask=_mask(cache, new), **{CACHE: cache}, max_new_tokens=5)


def _updated(cache: Any, new: int) -> list[torch.Tensor]:
    at = next(at for at, layer in enumerate(cache.layers) if getattr(layer, "keys", None) is not None)
    keys, values = (
        t[:, :, :1].clone().expand(-1, -1, new, -1) for t in (cache.layers[at].keys, cache.layers[at].values)
    )
    return list(cache.update(keys, values, at))


def _other(name: str, *, attached: bool) -> PreTrainedModel:
    model = make_model(name)
    return attach(model) if attached else model


USES: dict[str, Callable[[PreTrainedModel, Any, str, int], Any]] = {
    "iteration": lambda model, out, name, new: [t for layer in held_by(out) for t in layer[:2]],
    "isinstance": lambda model, out, name, new: isinstance(held_by(out), DynamicCache),
    "attributes": lambda model, out, name, new: [
        held_by(out).is_compileable,
        len(held_by(out)),
        held_by(out).get_max_length(),
    ],
    "save": lambda model, out, name, new: _continued(model, held_by(_saved(out)), new),
    "another model": lambda model, out, name, new: [
        _other(name, attached=False)(NEW[:, :new], **{CACHE: held_by(out)}).logits,
        _continued(_other(name, attached=False), held_by(out), new),
    ],
    "another attached model": lambda model, out, name, new: _continued(_other(name, attached=True), held_by(out), new),
    "update": lambda model, out, name, new: _updated(held_by(out), new),
} | {
    f"{use}, {way}": lambda model, out, name, new, use=use, way=way: use_of[use](
        model, out, COPIES[way](held_by(out)), new
    )
    for use in ("a part of the model", "generate", "forward", "whole text")
    for way in COPIES
    if (use, way) != ("whole text", "DynamicCache")
}
use_of: dict[str, Callable[[PreTrainedModel, Any, Any, int], Any]] = {
    "a part of the model": lambda model, out, cache, new: (
        model.base_model(NEW[:, :new], **{CACHE: cache}).last_hidden_state
    ),
    "generate": lambda model, out, cache, new: _continued(model, cache, new),
    "forward": lambda model, out, cache, new: model(NEW[:, :new], **{CACHE: cache}).logits,
    "whole text": lambda model, out, cache, new: model.generate(
        **as_inputs(torch.cat([out.sequences, NEW[:, :new]], dim=1)), **{CACHE: cache}, max_new_tokens=5
    ),
}


def _out(model: PreTrainedModel, **kwargs: Any) -> Any:
    return model.generate(**as_inputs(IDS), max_new_tokens=6, return_dict_in_generate=True, **kwargs)


@pytest.mark.parametrize(
    ("name", "kind"), [*(("llama", kind) for kind in KINDS), ("mistral", "fixed"), ("falcon_h1", "growing")]
)
def test_uses(name: str, kind: str) -> None:
    implementation = {"cache_implementation": "static"} if kind == "static" else {}
    plain, model = make_model(name), make_model(name)
    for new in (1, 5, 80):  # 80 are more than a cache of a fixed size has room for
        for use, run in USES.items():
            if (new != 5 and not use.endswith("same")) or (name == "falcon_h1" and "DynamicCache" in use):
                continue  # states are not what one iterates over, as in transformers
            store = ChunkStore(model, chunk_size=16)
            attach(model, store, **KINDS[kind])
            _out(model, **implementation)  # whose buffers serve the next call
            out = _out(model, **implementation)
            expected = run(plain, _out(plain), name, new)
            found = run(model, out, name, new)
            torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4, msg=lambda m, use=use: f"{use}: {m}")
            again = model.generate(**as_inputs(IDS), max_new_tokens=6, **implementation)
            assert torch.equal(again, plain.generate(**as_inputs(IDS), max_new_tokens=6)), use
        assert store.check_integrity().wrong == 0


def test_a_pickled_cache_is_of_transformers_alone(llama: PreTrainedModel) -> None:
    cache = ChunkReuseCache(llama, ChunkStore(llama, chunk_size=16))
    llama.generate(**as_inputs(IDS), **{CACHE: cache}, max_new_tokens=2)
    data = pickle.dumps(cache)
    assert b"kvboost_hf" not in data
    loaded = pickle.loads(data)
    assert type(loaded) is DynamicCache
    assert loaded.get_seq_length() == cache.get_seq_length()


def test_a_cache_that_its_user_made_is_for_its_model_alone(llama: PreTrainedModel) -> None:
    cache = ChunkReuseCache(llama, ChunkStore(llama, chunk_size=16))
    llama.generate(**as_inputs(IDS), **{CACHE: cache}, max_new_tokens=2)
    with pytest.raises(CacheModelMismatchError, match="not to a part of it"):
        llama.model(NEW[:, :2], **{CACHE: cache})
    with pytest.raises(CacheModelMismatchError, match="made for one Llama"):
        make_model("llama").generate(**as_inputs(IDS), **{CACHE: cache}, max_new_tokens=1)


@pytest.mark.parametrize("off", [-3, -1, 1, 40])
@pytest.mark.parametrize("new", [1, 2, 20])
@pytest.mark.parametrize(
    ("name", "attention", "size"),
    [("llama", None, None), ("llama", None, 100), ("llama", "kvboost_fa2", None), ("falcon_h1", None, None)],
)
def test_a_mask_that_does_not_fit(name: str, attention: str | None, size: int | None, new: int, off: int) -> None:
    """generate() goes on from what is held, with a mask that is too short or too long: the answer is plain's."""
    answers = []
    for is_plain in (True, False):
        model = make_model(name)
        if attention is not None and not is_plain:
            model.set_attn_implementation(attention)
        store = ChunkStore(model, chunk_size=16)
        cache = DynamicCache(config=model.config) if is_plain else ChunkReuseCache(model, store, max_cache_len=size)
        model.generate(**as_inputs(IDS), **{CACHE: cache}, max_new_tokens=4)
        held = int(cache.get_seq_length())
        mask = torch.ones(1, held + new + off, dtype=torch.long)
        mask[:, : new - 1] = 0  # transformers drops a mask of ones
        if mask.shape[1] == new:
            pytest.skip("a mask as long as the ids: they are the whole text")
        answers.append(model.generate(input_ids=NEW[:, :new], attention_mask=mask, **{CACHE: cache}, max_new_tokens=5))
        if isinstance(cache, ChunkReuseCache):
            assert "the attention mask is not as long as" in (cache.report.bypass_reason or "")
            whole = torch.cat([IDS, NEW], dim=1)
            again = model.generate(**as_inputs(whole), **{CACHE: cache}, max_new_tokens=2) if size is None else None
            if again is not None:
                assert torch.equal(again, make_model(name).generate(**as_inputs(whole), max_new_tokens=2))
            assert store.check_integrity().wrong == 0
    assert torch.equal(*answers)


@pytest.mark.daily
@pytest.mark.parametrize("name", ["llama", "falcon_h1"])
def test_ids_that_follow_what_is_held_are_stored_with_it(name: str) -> None:
    model, plain = make_model(name), make_model(name)
    given: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    store, answers = ChunkStore(model, chunk_size=16), []
    for each, cache in ((plain, DynamicCache(config=plain.config)), (model, ChunkReuseCache(model, store))):
        first = each.generate(**as_inputs(IDS), **{CACHE: cache}, **given)
        held = int(cache.get_seq_length())
        mask = torch.ones(1, held + NEW.shape[1], dtype=torch.long)
        answers.append(each.generate(input_ids=NEW, attention_mask=mask, **{CACHE: cache}, **given))
        if isinstance(cache, ChunkReuseCache):
            assert cache.report.bypass_reason is None
            cache.reset()
            whole = torch.cat([first[:, :held], NEW], dim=1)
            again = ChunkReuseCache(model, store)
            model.generate(**as_inputs(whole), **{CACHE: again}, max_new_tokens=1)
            assert again.report.reused_tokens >= held + NEW.shape[1] - 16
    assert torch.equal(*answers)
