"""Whatever others do to a cache, a layer, a module or an attention: no wrong K/V is stored, and answers are plain."""

import copy
import dataclasses
import functools
import pickle
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest.mock import MagicMock

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.hooks import RemovableHandle
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    CompileConfig,
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.cohere import modeling_cohere
from transformers.models.llama import modeling_llama

from kvboost_hf import ChunkReuseCache, ChunkStore, KVQuantConfig, attach, check_model_compatibility, last_cache
from tests import multimodal
from tests.architectures.models import make_architecture
from tests.conftest import _MAKERS as MODELS
from tests.conftest import STATEFUL, as_inputs, counted, make_model, pickles_models, random_ids
from tests.internals.cache import foreign_functions, walk
from tests.internals.compat import CACHE, hook_layers

CHANGED = "the cache was changed by somebody else"
BASE = random_ids(100, seed=1)
Edit = Callable[[Any], Any]


def multiply(cache: Any) -> None:
    for layer in cache.layers:
        layer.values.mul_(0.5)


def multiply_data(cache: Any) -> None:
    for layer in cache.layers:
        layer.values.data.mul_(0.5)


def write_through_numpy(cache: Any) -> None:
    for layer in cache.layers:
        layer.keys.numpy()[:] = 0


def write_one_number(cache: Any) -> None:
    cache.layers[1].keys[0, 0, 5, 3] += 1


def write_one_number_through_a_detached_view(cache: Any) -> None:
    cache.layers[0].values.detach()[0, 0, 2, 7].fill_(3.0)


def assign(cache: Any) -> None:
    for layer in cache.layers:
        layer.values = layer.values * 0.5


def assign_one(cache: Any) -> None:
    cache.layers[1].keys = cache.layers[1].keys + 1


def shorten(cache: Any) -> None:
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, :20], layer.values[:, :, :20]


def forget(cache: Any) -> None:
    for layer in cache.layers:
        layer.keys = layer.values = None


def swap_layers(cache: Any) -> None:
    cache.layers[0], cache.layers[1] = cache.layers[1], cache.layers[0]


def replace_the_list(cache: Any) -> None:
    cache.layers = list(reversed(cache.layers))


def drop_a_layer(cache: Any) -> None:
    cache.layers.pop()


def crop_one_layer(cache: Any) -> None:
    cache.layers[1].crop(-3)


def append_to_one_layer(cache: Any) -> None:
    keys = cache.layers[0].keys
    cache.layers[0].update(keys[:, :, :1] * 0, keys[:, :, :1] * 0)


def write_to_the_buffer(cache: Any) -> None:
    cache.layers[0]._tensors[0].buffer[:, :, 3].zero_()


EDITS: list[Edit] = [
    multiply,
    multiply_data,
    write_through_numpy,
    write_one_number,
    write_one_number_through_a_detached_view,
    assign,
    assign_one,
    shorten,
    forget,
    swap_layers,
    replace_the_list,
    drop_a_layer,
    crop_one_layer,
    append_to_one_layer,
    write_to_the_buffer,
]


def name_of(value: Any) -> str | None:
    return value.__name__ if callable(value) else None


def generate(model: PreTrainedModel, ids: torch.Tensor, cache: Any = None, **given: Any) -> torch.Tensor:
    given.setdefault("max_new_tokens", 8)
    found = model.generate(**as_inputs(ids), past_key_values=cache, **given)
    assert isinstance(found, torch.Tensor)
    return found


def store_of(model: PreTrainedModel) -> ChunkStore:
    check_model_compatibility(model)
    return ChunkStore(model, chunk_size=32)


def require_intact(store: ChunkStore, *, checked: int = 1) -> None:
    """Every stored chunk is what the model computes."""
    found = store.check_integrity()
    assert found.checked >= checked
    assert found.wrong == 0


@pytest.mark.parametrize("edit", EDITS, ids=name_of)
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_edits_between_two_calls(name: str, edit: Edit) -> None:
    model, plain = make_model(name), make_model(name)
    store = store_of(model)
    cache = ChunkReuseCache(model, store)
    first = generate(model, BASE, cache)
    edit(cache)
    second = generate(model, first, cache)
    assert torch.equal(second, generate(plain, first))
    assert cache.report.dropped_reason == CHANGED
    assert CHANGED in cache.report.explain()
    third = ChunkReuseCache(model, store)
    assert torch.equal(generate(model, second, third), generate(plain, second))
    assert third.report.reused_tokens >= 96  # what was stored before and after is served
    require_intact(store)


@pytest.mark.parametrize("edit", EDITS, ids=name_of)
def test_edits_before_the_last_tokens_are_stored(edit: Edit) -> None:
    """The tokens that fill no chunk go to the store when the cache lets go of them: after the edit."""
    model = make_model("llama")
    store = store_of(model)
    cache = ChunkReuseCache(model, store)
    generate(model, BASE, cache)
    before = len(store)
    edit(cache)
    cache.store_tails()
    cache.store_all()
    cache.reset()
    assert len(store) == before
    require_intact(store)
    generate(model, BASE, cache)
    cache.reset()
    assert len(store) > before  # without an edit they are stored


def test_layers_that_come_or_go() -> None:
    model = make_model("llama")
    plain = model.generate(BASE, max_new_tokens=8)
    for edit in (lambda layers: layers.pop(), lambda layers: layers.append(layers[0])):
        cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=16))
        for _ in range(2):
            assert torch.equal(model.generate(BASE, cache=cache, max_new_tokens=8), plain)
            edit(cache.layers)
        assert cache.report.reused_tokens == 96


def test_edits_of_states() -> None:
    for name in STATEFUL:
        for in_place in (True, False):
            model, plain = make_model(name), make_model(name)
            store = store_of(model)
            cache = ChunkReuseCache(model, store)
            first = generate(model, BASE, cache)
            for layer in cache.layers:
                if not hasattr(layer, "recurrent_states"):
                    continue
                if in_place:
                    layer.recurrent_states[0].mul_(0.5)
                else:
                    layer.conv_states[0] = layer.conv_states[0] * 2
            assert torch.equal(generate(model, first, cache), generate(plain, first))
            assert cache.report.dropped_reason == CHANGED
            cache.reset()
            require_intact(store)


def test_edits_of_codes() -> None:
    """Layers that hold codes hand out copies: writing to one changes nothing, setting one is noticed."""
    model = make_model("deep_llama")
    store = store_of(model)
    config = KVQuantConfig(method="kivi", group_size=16, window=16)
    cache, untouched = (ChunkReuseCache(model, store, live_quant=config) for _ in range(2))
    first = generate(model, BASE, cache)
    assert torch.equal(first, generate(model, BASE, untouched))
    expected = generate(model, first, untouched)
    cache.layers[4].keys.zero_()
    assert torch.equal(generate(model, first, cache), expected)
    cache.layers[4].keys = cache.layers[4].keys * 0
    assert torch.equal(generate(model, first, cache), expected)
    assert cache.report.dropped_reason == CHANGED


def test_edits_of_pieces() -> None:
    """A layer whose first columns stay in the store's chunks gives others copies of them."""
    model, plain = make_model("llama"), make_model("llama")
    model.set_attn_implementation("kvboost_fa2")
    plain.set_attn_implementation("kvboost_fa2")
    store = store_of(model)
    generate(model, BASE, ChunkReuseCache(model, store))
    cache = ChunkReuseCache(model, store)
    first = generate(model, BASE, cache)
    for edit in (multiply, multiply_data, write_through_numpy, assign):
        edit(cache)
        assert torch.equal(generate(model, first, cache), generate(plain, first))
        assert cache.report.dropped_reason == CHANGED
    cache.reset()
    require_intact(store)


@pytest.mark.parametrize("size", [None, 160], ids=["growing", "fixed"])
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda cache: cache.fork()], ids=["deep", "copy", "fork"]
)
def test_a_copy_is_a_copy(size: int | None, copied: Edit) -> None:
    model, plain = make_model("llama"), make_model("llama")
    cache = ChunkReuseCache(model, store_of(model), max_cache_len=size)
    first = generate(model, BASE, cache)
    for edit in (multiply, multiply_data, write_through_numpy):
        edit(copied(cache))
        assert torch.equal(generate(model, first, cache), generate(plain, first))
        assert cache.report.dropped_reason is None
        assert cache.report.reused_tokens >= 107


def test_reading_costs_no_reuse() -> None:
    model, plain = make_model("llama"), make_model("llama")
    cache = ChunkReuseCache(model, store_of(model))
    first = generate(model, BASE, cache)
    assert sum(float(layer.keys.sum() + layer.values.sum()) for layer in cache.layers)
    assert torch.equal(generate(model, first, cache), generate(plain, first))
    assert cache.report.reused_tokens == 107
    assert cache.report.dropped_reason is None


@pytest.mark.daily
@pytest.mark.parametrize("edit", [multiply, multiply_data, assign, assign_one, shorten, swap_layers], ids=name_of)
@torch.no_grad()
def test_a_text_that_goes_on_after_an_edit_goes_on_as_in_a_stock_cache(edit: Edit) -> None:
    """Whoever edits a cache and goes on with it by hand means it."""
    model, plain = make_model("llama"), make_model("llama")
    store = store_of(model)
    cache, stock = ChunkReuseCache(model, store), DynamicCache(config=plain.config)
    more = random_ids(40, seed=2)
    for ids in (BASE[:, :50], more, random_ids(1, seed=3), random_ids(1, seed=4), random_ids(7, seed=5)):
        found = model(ids, past_key_values=cache).logits
        torch.testing.assert_close(found, plain(ids, past_key_values=stock).logits, atol=2e-4, rtol=2e-4)
        if ids is more:
            edit(cache)
            edit(stock)
    assert CHANGED in (cache.report.bypass_reason, cache.report.dropped_reason)
    cache.reset()
    require_intact(store)
    whole = torch.cat([BASE[:, :50], more], dim=1)
    assert torch.equal(generate(model, whole, ChunkReuseCache(model, store)), generate(plain, whole))


class EditAt(LogitsProcessor):
    """Edits a cache in the middle of a `generate()` call."""

    def __init__(self, cache: Any, edit: Edit, at: int) -> None:
        self._cache, self._edit, self._at = cache, edit, at

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if input_ids.shape[1] == self._at:
            self._edit(self._cache)
        return scores


@pytest.mark.parametrize("edit", [multiply, multiply_data, assign, write_to_the_buffer], ids=name_of)
def test_edits_in_the_middle_of_a_call(edit: Edit) -> None:
    model, plain = make_model("llama"), make_model("llama")
    store = store_of(model)
    cache = ChunkReuseCache(model, store)
    generate(model, BASE, cache, max_new_tokens=60, logits_processor=LogitsProcessorList([EditAt(cache, edit, 104)]))
    cache.reset()
    require_intact(store)
    assert torch.equal(generate(model, BASE, ChunkReuseCache(model, store)), generate(plain, BASE))


# Hooks


class Press:
    """Keeps the first half of the K/V of a prompt while it is computed, as compression methods do."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def hook(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        cache, hidden = kwargs[CACHE], kwargs["hidden_states"]
        layer = cache.layers[module.layer_idx]
        if hidden.shape[1] > 1:
            half = hidden.shape[1] // 2
            layer.keys, layer.values = layer.keys[:, :, :half], layer.values[:, :, :half]
        return output

    @contextmanager
    def on(self) -> Iterator[None]:
        layers: Any = self._model.model.layers
        handles = [layer.self_attn.register_forward_hook(self.hook, with_kwargs=True) for layer in layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@pytest.mark.parametrize("how", ["attached", "passed"])
def test_a_press_does_what_it_does_without_us(how: str) -> None:
    model, plain = make_model("llama"), make_model("llama")
    store = store_of(model)
    if how == "attached":
        attach(model, store)
    kept = ChunkReuseCache(model, store)

    def ask(ids: torch.Tensor) -> torch.Tensor:
        return generate(model, ids, kept if how == "passed" else None)

    def report() -> Any:
        cache = kept if how == "passed" else last_cache(model)
        assert cache is not None
        return cache.report

    assert torch.equal(ask(BASE), generate(plain, BASE))
    for ids in (BASE, BASE, random_ids(70, seed=6)):
        with Press(model).on(), Press(plain).on():
            expected = generate(plain, ids)
            assert torch.equal(ask(ids), expected)
        assert not torch.equal(expected, generate(plain, ids)), "the press must matter"
        assert "is given the cache" in report().bypass_reason
    assert torch.equal(ask(BASE), generate(plain, BASE))
    assert report().reused_tokens >= 96
    require_intact(store)


def test_a_text_begun_under_a_press_goes_on_after_it() -> None:
    model, plain = make_model("llama"), make_model("llama")
    cache, stock = ChunkReuseCache(model, store_of(model)), DynamicCache(config=plain.config)
    with torch.no_grad():
        with Press(model).on(), Press(plain).on():
            model(BASE, past_key_values=cache)
            plain(BASE, past_key_values=stock)
        assert cache.get_seq_length() == stock.get_seq_length() == 50
        for ids in (random_ids(9, seed=2), random_ids(1, seed=3)):
            found, expected = model(ids, past_key_values=cache).logits, plain(ids, past_key_values=stock).logits
            torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
    assert torch.equal(generate(model, BASE, cache), generate(plain, BASE))


@pytest.mark.parametrize("edit", [multiply, assign, write_one_number], ids=name_of)
def test_a_hook_that_reaches_the_cache_by_itself(edit: Edit) -> None:
    """One that is not given the cache, but knows it."""
    model, plain = make_model("llama"), make_model("llama")
    store = store_of(model)
    cache = ChunkReuseCache(model, store)
    layers: Any = model.model.layers

    def hook(module: Any, args: Any, output: Any) -> None:
        if cache.layers[1].is_initialized:
            edit(cache)

    handle = layers[1].register_forward_hook(hook)
    generate(model, BASE, cache, max_new_tokens=40)
    handle.remove()
    cache.reset()
    require_intact(store, checked=0)
    assert torch.equal(generate(model, BASE, ChunkReuseCache(model, store)), generate(plain, BASE))


@dataclasses.dataclass
class Steering:
    vector: torch.Tensor
    strength: float = 1.0

    def __call__(self, module: Any, args: Any, output: Any) -> Any:
        return output + self.strength * self.vector


def test_a_hook_that_changes_what_is_computed() -> None:
    """Nobody can read off a hook what it will do: with it nothing is reused, nor stored."""
    model, plain = make_model("llama"), make_model("llama")
    store = store_of(model)
    generate(model, BASE, ChunkReuseCache(model, store))
    stored = len(store)
    hooks = [Steering(torch.ones(64)) for _ in range(2)]
    strength = [1.0]

    def scaled(module: Any, args: Any, output: Any) -> Any:
        return output * strength[0]

    handles = []
    for owner, hook in zip((model, plain), hooks, strict=True):
        layers: Any = owner.model.layers
        handles += [layers[0].register_forward_hook(hook), layers[1].mlp.register_forward_hook(scaled)]

    def stronger() -> None:
        for hook in hooks:
            hook.strength = 3.0

    def turned() -> None:
        for hook in hooks:
            hook.vector[:32] = -2.0

    def louder() -> None:
        strength[0] = 1.5

    kept = ChunkReuseCache(model, store)
    for change in (lambda: None, stronger, turned, louder):
        change()
        expected = generate(plain, BASE)
        for cache in (ChunkReuseCache(model, store), kept):
            assert torch.equal(generate(model, BASE, cache), expected)
            assert cache.report.reused_tokens == 0
    assert ".scaled) changes what the model computes" in str(kept.report.bypass_reason)
    assert len(store) == stored
    for handle in handles:
        handle.remove()
    assert torch.equal(generate(model, BASE, kept), generate(plain, BASE))
    assert kept.report.reused_tokens == 96
    require_intact(store)


def test_a_hook_that_counts() -> None:
    """What it can reach is another at each call, and does not matter."""
    model, plain = make_model("llama"), make_model("llama")
    store = store_of(model)
    counts: list[int] = []
    seen: list[torch.Tensor] = []

    def count(module: Any, args: Any) -> None:
        counts.append(args[0].shape[-1])

    def keep(module: Any, args: Any, output: Any) -> Any:
        seen.append(output)
        return output

    model.model.embed_tokens.register_forward_pre_hook(count)
    model.model.layers[1].register_forward_hook(keep)
    model.register_forward_pre_hook(lambda module, args, kwargs: counts.append(0), with_kwargs=True)
    for served in (0, 96, 96, 96):
        cache = ChunkReuseCache(model, store)
        counts.clear()
        assert torch.equal(generate(model, BASE, cache), generate(plain, BASE))
        assert cache.report.reused_tokens == served
        assert sum(counts) == 100 - served + 7
    require_intact(store)


@pytest.mark.parametrize("attached", [False, True], ids=["passed", "attached"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral"])
def test_hooks_that_count_tokens(name: str, attached: bool) -> None:
    """On the model, on the one in it, and on the embeddings: with arguments by name and without."""
    model, plain = make_model(name), make_model(name)
    store = store_of(model)
    kept = None if attached else ChunkReuseCache(model, store)
    if attached:
        attach(model, store)
    counts: dict[Any, list[int]] = {}

    def count(module: Any, args: Any, kwargs: Any, output: Any = None) -> None:
        counts[module].append(kwargs["input_ids"].shape[1])

    def count_embedded(module: Any, args: Any) -> None:
        counts[module].append(args[0].shape[1])

    embeddings: Any = model.get_input_embeddings()
    for module in (model, model.base_model):
        module.register_forward_pre_hook(count, with_kwargs=True)
        module.register_forward_hook(count, with_kwargs=True)
    embeddings.register_forward_pre_hook(count_embedded)
    for forwarded in (100, 4 if attached else 1, 4 if attached else 1):  # three tokens are too few to be stored
        for module in (model, model.base_model, embeddings):
            counts[module] = []
        found = generate(model, BASE, kept, max_new_tokens=1)
        assert torch.equal(found, generate(plain, BASE, max_new_tokens=1))
        assert counts[embeddings] == [forwarded]
        assert counts[model] == counts[model.base_model] == [forwarded, forwarded]
    require_intact(store)


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("by_data", [False, True], ids=["in place", "data"])
@pytest.mark.parametrize("where", ["layers.0", "layers.1.self_attn.k_proj", "layers.1.self_attn.v_proj"])
def test_hooks_that_write_to_one_number_of_a_prompt(where: str, by_data: bool, inference: bool) -> None:
    model, plain = make_model("llama"), make_model("llama")
    store = store_of(model)
    strength = [40.0]

    def nudge(module: Any, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.shape[1] > 1:
            (hidden.data if by_data else hidden)[:, 0, 5] += strength[0]

    handles = [owner.model.get_submodule(where).register_forward_hook(nudge) for owner in (model, plain)]
    kept = ChunkReuseCache(model, store)
    with torch.inference_mode(inference):
        for strength[0] in (40.0, 40.0, 10.0):
            for cache in (kept, ChunkReuseCache(model, store)):
                assert torch.equal(generate(model, BASE, cache), generate(plain, BASE))
    assert len(store) == 0
    for handle in handles:
        handle.remove()
    for cache in (kept, ChunkReuseCache(model, store)):
        assert torch.equal(generate(model, BASE, cache), generate(plain, BASE))
    require_intact(store)


@pytest.mark.parametrize("attached", [False, True], ids=["passed", "attached"])
@pytest.mark.parametrize("edit", [multiply, multiply_data, write_one_number, assign], ids=name_of)
@pytest.mark.parametrize("where", ["", "model"])
def test_hooks_on_whole_models_that_edit_the_cache(where: str, edit: Edit, attached: bool) -> None:
    """They are given it, and are not asked what they do with it."""
    model, plain = make_model("llama"), make_model("llama")
    store = store_of(model)
    if attached:
        attach(model, store)
    kept = None if attached else ChunkReuseCache(model, store)
    generate(model, BASE[:, :60], kept)

    def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        edit(kwargs[CACHE])

    handle = model.get_submodule(where).register_forward_hook(hook, with_kwargs=True)
    for _ in range(2):
        generate(model, BASE, kept)
    handle.remove()
    for _ in range(2):
        assert torch.equal(generate(model, BASE, kept), generate(plain, BASE))
    require_intact(store)


def test_compiled_hooks() -> None:
    """They run, in one graph with the model, and nothing is reused that they may have changed."""
    torch.compiler.reset()
    model, plain = make_model("llama"), make_model("llama")
    store = store_of(model)
    kept = ChunkReuseCache(model, store, max_cache_len=160)
    compiled = CompileConfig(backend="eager", fullgraph=True, mode=None)
    compiled._compile_all_devices = True  # type: ignore[assignment]

    def louder(module: Any, args: Any, output: Any) -> Any:
        return output * 1.5 if output.shape[1] == 1 else None

    handles = [owner.model.layers[0].mlp.register_forward_hook(louder) for owner in (model, plain)]
    handles += [owner.model.layers[0].mlp.register_forward_pre_hook(lambda *_: None) for owner in (model, plain)]
    for ids in (BASE, torch.cat([generate(plain, BASE), BASE[:, :9]], dim=1)):
        assert torch.equal(generate(model, ids, kept, compile_config=compiled), generate(plain, ids))
    # The first steps of a graph are computed without it, too, and there the hooks are seen to change something.
    assert "changes what the model computes" in str(kept.report.bypass_reason)
    for handle in handles:
        handle.remove()
    assert torch.equal(generate(model, BASE, kept), generate(plain, BASE))
    require_intact(store)
    torch.compiler.reset()


@pytest.mark.daily
@pytest.mark.parametrize("name", [*MODELS, *multimodal.FAMILIES])
def test_nothing_of_an_untouched_model_is_of_others(name: str) -> None:
    model = make_model(name) if name in MODELS else multimodal.make_model(name)
    assert foreign_functions(model, dict.fromkeys(map(type, model.modules()))) == []


def test_parts_with_configurations_of_their_own_are_probed_once() -> None:
    """As transformers makes them for some architectures."""
    model = make_architecture("granite_swa")
    store = store_of(model)
    for forwarded in (100, 4):
        cache = ChunkReuseCache(model, store)
        with counted(model) as work:
            generate(model, BASE, cache, max_new_tokens=1)
        assert work.tokens == forwarded == cache.report.forwarded_tokens


def test_a_hook_that_begins_to_change_what_is_computed() -> None:
    """In the middle of a prompt that was reused before anybody could know: it is computed again, whole."""
    model, plain = make_model("llama"), make_model("llama")
    store = store_of(model)
    switch = [1.0]

    def scale(module: Any, args: Any, output: Any) -> Any:
        return output if switch[0] == 1.0 else output * switch[0]

    for owner in (model, plain):
        owner.model.layers[0].register_forward_hook(scale)
    for value in (1.0, 1.0, 0.5, 0.5):
        switch[0] = value
        cache = ChunkReuseCache(model, store)
        assert torch.equal(generate(model, BASE, cache), generate(plain, BASE))
    switch[0] = 1.0
    require_intact(store, checked=0)


def test_a_hook_for_a_part_of_a_call() -> None:
    """Put on and taken off by a processor of logits, or by another thread."""
    model, plain = make_model("llama"), make_model("llama")
    store = store_of(model)
    handles: list[Any] = []
    mlp: Any = model.model.layers[1].mlp

    class Toggles(LogitsProcessor):
        def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
            if input_ids.shape[1] == 103:
                handles.append(mlp.register_forward_hook(lambda module, args, output: output * 3))
            if input_ids.shape[1] == 110:
                handles.pop().remove()
            return scores

    generate(model, BASE, ChunkReuseCache(model, store), max_new_tokens=60, logits_processor=[Toggles()])
    attach(model, store)
    generate(model, BASE[:, :90], max_new_tokens=60, logits_processor=[Toggles()])
    require_intact(store)
    assert torch.equal(generate(model, BASE), generate(plain, BASE))


def test_hooks_of_all_modules() -> None:
    model, plain = make_model("llama"), make_model("llama")
    store = store_of(model)

    def louder(module: Any, args: Any, output: Any) -> Any:
        return output * 1.5 if type(module).__name__ == "LlamaMLP" else None

    for hooked in (False, True, False):
        handle = register_module_forward_hook(louder) if hooked else None
        for _ in range(2):
            cache = ChunkReuseCache(model, store)
            assert torch.equal(generate(model, BASE, cache), generate(plain, BASE))
        assert cache.report.reused_tokens == 96  # found with it and without it, each by itself
        if handle is not None:
            handle.remove()
    require_intact(store)


class ByData:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        output.data.mul_(self.scale)


def by_name(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    kwargs["position_ids"] = kwargs["position_ids"] * 2


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
def test_hooks_that_write_unseen(inference: bool) -> None:
    """Past PyTorch's counter, where there is no counter, and into the arguments by name."""
    model, plain = make_model("llama"), make_model("llama")
    store = store_of(model)
    hook = ByData(2.0)
    for owner in (model, plain):
        owner.model.layers[0].mlp.register_forward_hook(hook)
        owner.model.rotary_emb.register_forward_pre_hook(by_name, with_kwargs=True)
    with torch.inference_mode(inference):
        for scale in (2.0, 2.0, 0.7):
            hook.scale = scale
            cache = ChunkReuseCache(model, store)
            assert torch.equal(generate(model, BASE, cache), generate(plain, BASE))
            assert "changes what the model computes" in str(cache.report.bypass_reason)
    assert len(store) == 0


class Looks(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [Looks, lambda: FlopCounterMode(display=False), lambda: torch.device("cpu")])
def test_work_can_be_counted_by_a_mode(make: Callable[[], Any]) -> None:
    model, plain = make_model("llama"), make_model("llama")
    store = store_of(model)
    generate(model, BASE, ChunkReuseCache(model, store))
    with make():
        cache = ChunkReuseCache(model, store)
        assert torch.equal(generate(model, BASE, cache), generate(plain, BASE))
    assert cache.report.reused_tokens == 96
    require_intact(store)


def test_hooks_stay_who_they_are() -> None:
    """Whoever looks for a hook among those of a module finds it, and no other comes back once it is gone."""
    model = make_model("llama")
    store = store_of(model)
    layer: Any = model.model.layers[0].mlp
    hook = ByData(1.0)
    handle = layer.register_forward_hook(hook)
    generate(model, BASE, ChunkReuseCache(model, store))
    assert any(each is hook for each in layer._forward_hooks.values())
    handle.remove()
    generate(model, BASE, ChunkReuseCache(model, store))
    assert not any(each is hook for each in layer._forward_hooks.values())


def test_a_model_that_sets_methods_of_the_cache() -> None:
    """As RecurrentGemma of transformers 5.17 does in each forward, so that its first layer of attention is asked."""
    model, plain = make_model("llama"), make_model("llama")
    cache = ChunkReuseCache(model, store_of(model))

    def length(self: Any, layer_idx: int = 0) -> Any:
        return self.layers[1].get_seq_length()

    def sizes(self: Any, query_length: int, layer_idx: int) -> Any:
        return self.layers[1].get_mask_sizes(query_length)

    def own_methods(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if any(value is cache for value in kwargs.values()):
            cache.get_seq_length = types.MethodType(length, cache)
            cache.get_mask_sizes = types.MethodType(sizes, cache)

    model.model.register_forward_pre_hook(own_methods, with_kwargs=True)
    for ids in (BASE, torch.cat([generate(plain, BASE), BASE[:, :9]], dim=1), BASE[:, :60], BASE):
        assert torch.equal(generate(model, ids, cache), generate(plain, ids))


@pickles_models
def test_a_model_that_hooks_have_left_can_be_pickled() -> None:
    model = make_model("llama")
    store = store_of(model)
    handle = model.model.layers[0].mlp.register_forward_hook(ByData(1.0))
    generate(model, BASE, ChunkReuseCache(model, store))
    handle.remove()
    pickle.loads(pickle.dumps(model))


def test_hooks_come_and_go_in_another_thread() -> None:
    """Answers of calls that run meanwhile may be either's; what is stored is neither wrong nor lost for good."""
    model, plain = make_model("llama"), make_model("llama")
    store = store_of(model)
    attach(model, store)
    stop = threading.Event()

    def toggle() -> None:
        layer: Any = model.model.layers[1].mlp
        while not stop.is_set():
            handle = layer.register_forward_hook(lambda module, args, output: output * 2)
            time.sleep(0.002)
            handle.remove()
            time.sleep(0.002)

    thread = threading.Thread(target=toggle)
    thread.start()
    try:
        for seed in range(30):
            generate(model, random_ids(70, seed=seed))
    finally:
        stop.set()
        thread.join()
    require_intact(store, checked=0)
    for _ in range(2):
        assert torch.equal(generate(model, BASE), generate(plain, BASE))
    assert last_cache(model).report.reused_tokens == 96


@pytest.mark.parametrize("looked_at", ["value", "text", "module"])
def test_attributes_that_another_thread_sets_and_deletes(monkeypatch: pytest.MonkeyPatch, looked_at: str) -> None:
    """Of modules and of the configuration, in the middle of a look at them."""
    model, changes = make_model("llama"), [0]
    cache, vary = ChunkReuseCache(model, store_of(model)), getattr(walk, "frequencies_vary")  # noqa: B009

    def change(*_: Any) -> None:
        changes[0] += 1
        for place in (model, model.config, *model.model.layers):
            if place.__dict__.pop("zealous", None) is None:
                place.__dict__["zealous"] = [1]

    class Odd:
        __repr__ = lambda self: change() or "odd"  # noqa: E731
        __class__ = property(lambda self: change() or Odd)

    if looked_at == "module":
        change()
        cache.stored_tokens(BASE)
        monkeypatch.setattr(walk, "frequencies_vary", lambda module: change() or vary(module))
    else:
        model.config.odd = Odd() if looked_at == "value" else {1: Odd()}
    for number in range(4):
        model.config.number = number
        assert cache.stored_tokens(BASE) == 0
    assert changes[0] >= 4


def test_a_hook_that_another_thread_registers_for_this_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook is nobody else's at any moment, or what a call beside it computes would not be stored."""
    model, begun, go_on, init = make_model("llama"), threading.Event(), threading.Event(), RemovableHandle.__init__

    def halted(*given: Any, **more: Any) -> None:
        init(*given, **more)
        begun.set()
        assert go_on.wait(30)  # before it is counted

    binding = ChunkReuseCache(model, store_of(model)).parts.binding
    binding.look()
    monkeypatch.setattr(RemovableHandle, "__init__", halted)
    with ThreadPoolExecutor(2) as pool:
        handles = pool.submit(hook_layers, model, MagicMock())
        assert begun.wait(30)
        asked = pool.submit(lambda: binding.has_new_hooks)
        wait((asked,), timeout=0.1)
        go_on.set()
        assert not asked.result()
        assert len(handles.result()) == 2
    assert not binding.has_new_hooks
    model.register_forward_hook(lambda *_: None)
    assert binding.has_new_hooks


def test_objects_that_answer_anything() -> None:
    """A mock says yes to whatever it is asked, and some objects raise at it."""
    model, plain = make_model("llama"), make_model("llama")

    class Raises:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

        def __repr__(self) -> str:
            raise RuntimeError("repr")

        def __call__(self, *args: Any) -> None:
            return None

    mock = MagicMock(side_effect=lambda module, args, output: output * 2)
    for owner in (model, plain):
        owner.model.layers[0].mlp.register_forward_hook(mock)
        owner.model.layers[1].mlp.register_forward_hook(Raises())
    model.note = {Raises()}
    model.config.thing = {"a": Raises()}
    store = ChunkStore(model, chunk_size=32)
    for _ in range(2):
        cache = ChunkReuseCache(model, store)
        assert torch.equal(generate(model, BASE, cache), generate(plain, BASE))
        assert "changes what the model computes" in str(cache.report.bypass_reason)
    assert len(store) == 0


@pytest.mark.parametrize("how", ["layer", "class", "class at first", "cache", "subclass", "copies"])
def test_updates_of_others(how: str) -> None:
    model, plain = make_model("llama"), make_model("llama")
    store = store_of(model)
    cache: Any = ChunkReuseCache(model, store)

    class Scales(type(cache.layers[0])):
        def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
            return super().update(key_states * 2, value_states, *args, **kwargs)

    class ScalingCache(ChunkReuseCache):
        def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
            return super().update(key_states, value_states * 2, *args, **kwargs)

    if how == "subclass":
        cache = ScalingCache(model, store)
    if how != "class at first":
        generate(model, BASE[:, :40], cache)
    if how == "layer":
        own = cache.layers[0].update
        cache.layers[0].update = lambda keys, values, *args, **kwargs: own(keys * 2, values)
    elif how.startswith("class"):
        cache.layers[1].__class__ = Scales
    elif how == "cache":
        theirs = cache.update
        cache.update = lambda keys, values, *args, **kwargs: theirs(keys * 2, values, *args, **kwargs)
    elif how == "copies":
        stock = DynamicCache()
        stock.layers = [copy.copy(layer) for layer in cache.layers]
        stock.crop(-10)
        with torch.no_grad():
            model(random_ids(10, seed=4), past_key_values=stock)
    generate(model, BASE, cache)
    require_intact(store, checked=0)
    assert torch.equal(generate(model, BASE, ChunkReuseCache(model, store)), generate(plain, BASE))


@pytest.mark.parametrize("how", ["layers", "instance", "class"])
def test_stock_caches_that_somebody_has_changed_stay_theirs(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attached call that brings one is not served, and what they do is done."""
    model, plain = make_model("llama"), make_model("llama")
    store = store_of(model)
    attach(model, store)
    generate(model, BASE)

    class Doubles(DynamicLayer):
        def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
            return super().update(key_states, value_states * 2, *args, **kwargs)

    def theirs() -> Any:
        cache = DynamicCache()
        if how == "layers":
            cache.layers = [Doubles(), Doubles()]
        elif how == "instance":
            own = cache.update
            cache.update = lambda keys, values, *args, **kwargs: own(keys, values * 2, *args, **kwargs)
        return cache

    if how == "class":
        stock = DynamicLayer.update
        monkeypatch.setattr(DynamicLayer, "update", lambda self, k, v, *args, **kwargs: stock(self, k, v * 2))
    assert torch.equal(generate(model, BASE, theirs()), generate(plain, BASE, theirs()))
    assert "were replaced" in str(last_cache(model).report.bypass_reason)
    require_intact(store)


@pytest.mark.parametrize("size", [None, 200], ids=["growing", "fixed"])
def test_a_press_on_a_cache_that_is_passed_by_hand(size: int | None) -> None:
    model, plain = make_model("llama"), make_model("llama")
    cache = ChunkReuseCache(model, store_of(model), max_cache_len=size)
    for _ in range(2):
        assert torch.equal(generate(model, BASE, cache), generate(plain, BASE))
    with Press(model).on():
        generate(model, BASE, cache)
        assert "is given the cache" in str(cache.report.bypass_reason)
    assert torch.equal(generate(model, BASE, cache), generate(plain, BASE))
    require_intact(cache.store)


# Patches


def test_an_attention_function_that_writes_to_the_keys() -> None:
    """As kvpress patches all attention functions: it hides keys by writing others in their place."""
    model, plain = make_model("llama"), make_model("llama")
    store = store_of(model)
    generate(model, BASE, ChunkReuseCache(model, store))
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def patched(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if query.shape[2] == key.shape[2]:
            module.masked_key_indices = None
        elif getattr(module, "masked_key_indices", None) is not None:
            key[module.masked_key_indices] = 9.0
        return before(module, query, key, value, *args, **kwargs)

    AttentionInterface.register("sdpa", patched)
    try:
        for ids in (BASE, random_ids(90, seed=8), BASE):
            for owner in (model, plain):
                layers: Any = owner.model.layers
                for layer in layers:  # as a press leaves it behind
                    layer.self_attn.masked_key_indices = (torch.tensor([0]), torch.tensor([1]), torch.tensor([4]))
            cache = ChunkReuseCache(model, store)
            assert torch.equal(generate(model, ids, cache), generate(plain, ids))
            again = ChunkReuseCache(model, store)
            assert torch.equal(generate(model, ids, again), generate(plain, ids))
        assert again.report.reused_tokens >= 96  # outside of presses it is served
        require_intact(store)
    finally:
        AttentionInterface.register("sdpa", before)
    cache = ChunkReuseCache(model, store)
    assert torch.equal(generate(model, BASE, cache), generate(plain, BASE))
    assert cache.report.reused_tokens >= 96
    require_intact(store)


def test_an_attention_function_that_always_writes() -> None:
    model, plain = make_model("llama"), make_model("llama")

    def dimming(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        value.mul_(0.9)
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)

    AttentionInterface.register("dimming", dimming)
    for owner in (model, plain):
        owner.set_attn_implementation("dimming")
    store = ChunkStore(model, chunk_size=32)
    for _ in range(2):
        cache = ChunkReuseCache(model, store)
        assert torch.equal(generate(model, BASE, cache), generate(plain, BASE))
    assert len(store) == 0


def test_a_patched_forward_of_the_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """As methods that evict K/V are often published: a forward in place of the class's own."""
    model, plain = make_model("llama"), make_model("llama")
    store = store_of(model)
    generate(model, BASE, ChunkReuseCache(model, store))
    own = modeling_llama.LlamaAttention.forward

    def evicting(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = own(self, hidden_states, *args, **kwargs)
        layer = kwargs[CACHE].layers[self.layer_idx]
        if hidden_states.shape[1] > 50:
            layer.keys, layer.values = layer.keys[:, :, -50:], layer.values[:, :, -50:]
        return found

    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama.LlamaAttention, "forward", evicting)
        for ids in (BASE, torch.cat([BASE, random_ids(20, seed=3)], dim=1)):
            cache = ChunkReuseCache(model, store)
            assert torch.equal(generate(model, ids, cache), generate(plain, ids))
            assert "was replaced" in str(cache.report.bypass_reason)
    cache = ChunkReuseCache(model, store)
    assert torch.equal(generate(model, BASE, cache), generate(plain, BASE))
    assert cache.report.reused_tokens >= 96
    require_intact(store)


def test_a_patched_function_of_the_modeling_file(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = make_model("llama"), make_model("llama")
    store = store_of(model)
    generate(model, BASE, ChunkReuseCache(model, store))
    own = modeling_llama.apply_rotary_pos_emb

    def backwards(q: Any, k: Any, cos: Any, sin: Any, **kwargs: Any) -> Any:
        return own(q, k, cos, -sin, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama, "apply_rotary_pos_emb", backwards)
        for served in (0, 96):
            cache = ChunkReuseCache(model, store)
            assert torch.equal(generate(model, BASE, cache), generate(plain, BASE))
            assert cache.report.reused_tokens == served
    cache = ChunkReuseCache(model, store)
    assert torch.equal(generate(model, BASE, cache), generate(plain, BASE))
    assert cache.report.reused_tokens == 96


def patches() -> dict[str, tuple[Any, str, Callable[[Any], Any]]]:
    """Where, which name, and what makes another one of what is there."""

    def wrapped(change: Callable[..., Any]) -> Callable[[Any], Any]:
        def make(own: Any) -> Any:
            @functools.wraps(own)
            def patched(*args: Any, **kwargs: Any) -> Any:
                return change(own(*args, **kwargs))

            return patched

        return make

    def turned(found: Any) -> Any:
        return found[0], -found[1]

    return {
        "wraps": (modeling_llama, "apply_rotary_pos_emb", wrapped(turned)),
        "partial": (modeling_llama, "apply_rotary_pos_emb", lambda own: functools.partial(_backwards, own)),
        "another model's": (modeling_llama, "apply_rotary_pos_emb", lambda own: modeling_cohere.apply_rotary_pos_emb),
        "torch's": (torch.nn.functional, "silu", wrapped(lambda found: found * 1.3)),
        "linear": (torch.nn.functional, "linear", wrapped(lambda found: found * 1.01)),
        "call": (modeling_llama.LlamaMLP, "__call__", lambda own: lambda self, x: self.forward(x) * 1.3),
    }


def _backwards(own: Any, q: Any, k: Any, cos: Any, sin: Any, **kwargs: Any) -> Any:
    return own(q, k, cos, -sin, **kwargs)


@pytest.mark.parametrize("name", patches())
def test_patches_by_any_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = make_model("llama"), make_model("llama")
    store = store_of(model)
    before = generate(plain, BASE)
    generate(model, BASE, ChunkReuseCache(model, store))
    place, attribute, make = patches()[name]
    with monkeypatch.context() as patch:
        patch.setattr(place, attribute, make(getattr(place, attribute)), raising=False)
        for _ in range(2):
            cache = ChunkReuseCache(model, store)
            found = generate(model, BASE, cache)
            assert torch.equal(found, generate(plain, BASE))
        assert not torch.equal(found, before) or name == "linear"
    cache = ChunkReuseCache(model, store)
    assert torch.equal(generate(model, BASE, cache), before)
    assert cache.report.reused_tokens == 96
    require_intact(store)


def test_a_patch_that_only_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it can reach is another at each call, and it says that this does not matter."""
    model, plain = make_model("llama"), make_model("llama")
    store = store_of(model)
    own, counts = torch.nn.functional.embedding, [0]

    def counting(ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        counts[0] += ids.numel()
        return own(ids, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "embedding", counting)
    for served, says_so in ((0, False), (0, False), (0, True), (96, True)):
        if says_so:
            counting.leaves_kv_alone = True  # type: ignore[attr-defined]
        cache = ChunkReuseCache(model, store)
        assert torch.equal(generate(model, BASE, cache), generate(plain, BASE))
        assert cache.report.reused_tokens == served
    require_intact(store)


def test_a_mask_function_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = make_model("llama"), make_model("llama")
    store = store_of(model)
    generate(model, BASE, ChunkReuseCache(model, store))
    own = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]

    def sees_all(*args: Any, **kwargs: Any) -> Any:
        mask = own(*args, **{**kwargs, "allow_is_causal_skip": False})
        return mask | (torch.rand(mask.shape, generator=torch.Generator().manual_seed(0)) < 0.3)

    AttentionMaskInterface.register("sdpa", sees_all)
    try:
        cache = ChunkReuseCache(model, store)
        assert torch.equal(generate(model, BASE, cache), generate(plain, BASE))
        assert cache.report.reused_tokens == 0
    finally:
        AttentionMaskInterface.register("sdpa", own)
    require_intact(store)


def test_a_configuration_of_its_own() -> None:
    model, plain = make_model("llama"), make_model("llama")
    store = store_of(model)
    generate(model, BASE, ChunkReuseCache(model, store))
    for owner in (model, plain):
        attention: Any = owner.model.layers[0].self_attn
        attention.config = copy.deepcopy(attention.config)
        attention.config._attn_implementation = "eager"  # with the mask of the others: none, so it is not causal
    for _ in range(2):
        cache = ChunkReuseCache(model, store)
        assert torch.equal(generate(model, BASE, cache), generate(plain, BASE))
        assert cache.report.reused_tokens == 0
    assert "not causal" in str(cache.report.bypass_reason)


@pytest.mark.parametrize("size", [None, 160], ids=["growing", "fixed"])
def test_a_view_that_somebody_has_kept(size: int | None) -> None:
    """Through a fork, and over more calls."""
    model, plain = make_model("llama"), make_model("llama")
    store = store_of(model)
    cache = ChunkReuseCache(model, store, max_cache_len=size)
    first = generate(model, BASE, cache)
    views = [layer.keys for layer in cache.layers]
    twin = cache.fork()
    second = generate(model, first, cache)
    for view in views:
        view.numpy()[:] = 0
    for each in (twin, cache, ChunkReuseCache(model, store)):
        assert torch.equal(generate(model, first, each), generate(plain, first))
        assert torch.equal(generate(model, second, each), generate(plain, second))
        each.reset()
    require_intact(store)


class Scaled(torch.nn.Module):
    """A projection that reads what its owner keeps in containers."""

    def __init__(self, inner: torch.nn.Module, kept: Any) -> None:
        super().__init__()
        self.inner, self.kept = inner, kept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.kept
        while not isinstance(scale, torch.Tensor | float):
            scale = scale.scale if dataclasses.is_dataclass(scale) else next(iter(_values(scale)))
        found: torch.Tensor = self.inner(x) * scale
        return found


class ScaledByItsClass(torch.nn.Module):
    scale = 1.0
    kept: ClassVar[dict[str, float]] = {"scale": 1.0}

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x) * self.scale * self.kept["scale"]
        return found


def test_values_of_classes_of_modules() -> None:
    model, plain = make_model("llama"), make_model("llama")
    for owner in (model, plain):
        attention: Any = owner.model.layers[0].self_attn
        attention.v_proj = ScaledByItsClass(attention.v_proj).eval()
    store = store_of(model)
    try:
        for own, kept, reused in ((1.0, 1.0, 0), (2.0, 1.0, 0), (2.0, 3.0, 0), (1.0, 1.0, 96)):
            ScaledByItsClass.scale, ScaledByItsClass.kept["scale"] = own, kept
            cache = ChunkReuseCache(model, store)
            assert torch.equal(generate(model, BASE, cache), generate(plain, BASE))
            assert cache.report.reused_tokens == reused
    finally:
        ScaledByItsClass.scale, ScaledByItsClass.kept["scale"] = 1.0, 1.0
    require_intact(store)


def _values(container: Any) -> Any:
    return container.values() if isinstance(container, dict) else container


@dataclasses.dataclass
class Kept:
    scale: torch.Tensor


@pytest.mark.parametrize(
    "make",
    [
        lambda scale: (scale,),
        lambda scale: [scale],
        lambda scale: {"scale": scale},
        lambda scale: Kept(scale),
        lambda scale: {"a": [(Kept(scale),)]},
    ],
    ids=["tuple", "list", "dict", "dataclass", "nested"],
)
def test_values_in_containers_of_modules(make: Callable[[torch.Tensor], Any]) -> None:
    model, plain = make_model("llama"), make_model("llama")
    scales = [torch.ones(()), torch.ones(())]
    for owner, scale in zip((model, plain), scales, strict=True):
        attention: Any = owner.model.layers[0].self_attn
        attention.v_proj = Scaled(attention.v_proj, make(scale)).eval()
    store = store_of(model)
    for value in (1.0, 2.0, 1.0):
        for scale in scales:
            scale.fill_(value)
        expected = generate(plain, BASE)
        cache = ChunkReuseCache(model, store)
        assert torch.equal(generate(model, BASE, cache), expected)
    again = ChunkReuseCache(model, store)
    assert torch.equal(generate(model, BASE, again), expected)
    assert again.report.reused_tokens == 96


def test_a_window_cannot_be_changed_behind_what_was_computed_with_it() -> None:
    cache = ChunkReuseCache(make_model("mistral"))
    layer: Any = cache.layers[0]
    with pytest.raises(AttributeError):
        layer.sliding_window = 5


def test_keys_of_another_shape_are_refused() -> None:
    cache = ChunkReuseCache(make_model("llama"))
    layer: Any = cache.layers[0]
    with pytest.raises(ValueError, match=r"`keys` of a cache layer must be .*got a tensor of shape \[3, 4\]"):
        layer.keys = torch.zeros(3, 4)


# The store's own check


def test_check_integrity_finds_what_is_wrong(capsys: Any) -> None:
    model, plain = make_model("llama"), make_model("llama")
    store = store_of(model)
    cache = ChunkReuseCache(model, store)
    for seed in (1, 2):
        generate(model, random_ids(100, seed=seed), cache)
    cache.reset()
    whole = store.check_integrity()
    assert (whole.wrong, whole.skipped) == (0, 0)
    assert whole.checked == len(store) == 8
    assert whole.forwarded_tokens == 2 * 107  # each text once
    some = store.check_integrity(0.25)
    assert 0 < some.checked < whole.checked
    broken = list(store.inspect().chunks.values())[1]
    broken.kv.tensors[0].view(-1)[11] += 0.5
    found = store.check_integrity()
    assert found.wrong == 1
    assert broken.key not in store.inspect().chunks
    assert torch.equal(generate(model, BASE, ChunkReuseCache(model, store)), generate(plain, BASE))
    require_intact(store)
    with pytest.raises(ValueError, match="`sample` must be above 0"):
        store.check_integrity(0)


def test_check_integrity_passes_over_what_it_cannot_compute() -> None:
    model = make_model("llama")
    store = store_of(model)
    generate(model, BASE, ChunkReuseCache(model, store))
    stored = len(store)
    model.model.layers[0].self_attn.scaling *= 2  # K/V of earlier weights would leave the store
    generate(model, random_ids(70, seed=5), ChunkReuseCache(model, store))
    found = store.check_integrity()
    assert (found.wrong, found.skipped) == (0, stored)
    assert found.checked == len(store) - stored


def test_check_integrity_reads_lower_tiers(tmp_path: Any) -> None:
    model = make_model("llama")
    check_model_compatibility(model)
    with ChunkStore(model, chunk_size=32, tiers=[f"disk:{tmp_path}"]) as store:
        generate(model, BASE, ChunkReuseCache(model, store))
        stored = len(store)
    with ChunkStore(model, chunk_size=32, tiers=[f"disk:{tmp_path}"]) as store:
        assert len(store) == 0
        generate(model, BASE[:, :3], ChunkReuseCache(model, store))  # asks for the root
        assert store.check_integrity().checked == stored


def test_checking_forwards_no_more_than_it_says() -> None:
    model = make_model("llama")
    store = store_of(model)
    generate(model, BASE, ChunkReuseCache(model, store))
    with counted(model) as work:
        assert store.check_integrity().forwarded_tokens == 96
    assert work.tokens == 96
