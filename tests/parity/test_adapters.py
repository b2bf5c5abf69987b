"""Adapters loaded, switched, merged, scaled and deleted between calls: never K/V of another one."""

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from packaging.version import Version
from peft import (
    IA3Config,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from transformers import PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, attach, check_model_compatibility, last_cache
from tests.conftest import as_inputs, left_pad, random_ids
from tests.internals.compat import CACHE
from tests.parity.compare import same_as_plain

BASE = random_ids(100, seed=1)
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*adapter.*:UserWarning", "ignore:Unmerge result:UserWarning", "ignore:Position ids are not:UserWarning"
)


def lora(**settings: Any) -> LoraConfig:
    return LoraConfig(
        **{"target_modules": ["q_proj", "k_proj", "v_proj"], "init_lora_weights": False, "r": 4, **settings}
    )


def ia3() -> IA3Config:
    return IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False
    )


CONFIGS: dict[str, Callable[[], Any]] = {
    "lora": lora,
    "dora": lambda: lora(use_dora=True),
    "rslora on every linear": lambda: lora(use_rslora=True, target_modules="all-linear"),
    "lora with a saved head": lambda: lora(modules_to_save=["lm_head"]),
    "lora with saved embeddings": lambda: lora(modules_to_save=["embed_tokens"]),
    "lora with trained tokens": lambda: lora(trainable_token_indices=[5, 6, 7]),
    "ia3": ia3,
}


@pytest.fixture
def store(llama: PreTrainedModel) -> ChunkStore:
    check_model_compatibility(llama)
    return ChunkStore(llama, chunk_size=32)


def adapted(model: PreTrainedModel, config: Any) -> PeftModel:
    """`model` with the adapters a and b, a in use."""
    torch.manual_seed(0)
    wrapper = get_peft_model(model, config, adapter_name="a")
    wrapper.add_adapter("b", config)
    for name, parameter in wrapper.named_parameters():  # some are made as ones or zeros, or as copies
        if ".b" in name or ".a" in name:
            parameter.data += 0.3 * torch.randn(parameter.shape)
    wrapper.set_adapter("a")
    return wrapper.eval()


@pytest.mark.parametrize("kind", CONFIGS)
def test_switching(llama: PreTrainedModel, store: ChunkStore, kind: str) -> None:
    """In one cache and across caches: another adapter starts from nothing, an earlier one finds its K/V."""
    wrapper = adapted(llama, CONFIGS[kind]())
    assert check_model_compatibility(llama).moved
    live = ChunkReuseCache(llama, store)
    seen: set[str] = set()

    def check(state: str) -> None:
        for cache in (live, ChunkReuseCache(llama, store)):
            reused = same_as_plain(llama, cache, BASE, caller=wrapper)
            assert (reused >= 96) == (state in seen), (state, cache.report)
            seen.add(state)

    for state in ("a", "b", "a", "none", "b", "none", "a"):
        if state == "none":
            with wrapper.disable_adapter():
                check(state)
        else:
            wrapper.set_adapter(state)
            check(state)


def test_parameters_of_a_module(llama: PreTrainedModel, store: ChunkStore) -> None:
    """PEFT writes to them in each forward, and leaves them as they are: found from the third prompt on."""
    wrapper = adapted(llama, lora(target_modules=["q_proj"], target_parameters=["mlp.up_proj.weight"]))
    cache = ChunkReuseCache(llama, store)
    reused = [same_as_plain(llama, cache, BASE, caller=wrapper) for _ in range(4)]
    assert [tokens >= 96 for tokens in reused] == [False, False, True, True]
    with wrapper.disable_adapter():
        assert same_as_plain(llama, cache, BASE, caller=wrapper) == 0
    assert same_as_plain(llama, cache, BASE, caller=wrapper) >= 96


def test_adapters_change_the_answer(llama: PreTrainedModel) -> None:
    """The test above would notice K/V of another adapter."""
    wrapper = adapted(llama, lora())
    answers = [llama(BASE).logits]
    wrapper.set_adapter("b")
    answers.append(llama(BASE).logits)
    with wrapper.disable_adapter():
        answers.append(llama(BASE).logits)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert (answers[one] - answers[other]).abs().max() > 0.1


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
def test_merging(llama: PreTrainedModel, store: ChunkStore, kind: str) -> None:
    wrapper = adapted(llama, CONFIGS[kind]())
    cache = ChunkReuseCache(llama, store)

    def forgets(change: Callable[[], object]) -> None:
        change()
        assert same_as_plain(llama, cache, BASE) == 0
        assert same_as_plain(llama, ChunkReuseCache(llama, store), BASE) >= 96

    assert same_as_plain(llama, cache, BASE) == 0
    forgets(wrapper.merge_adapter)
    forgets(wrapper.unmerge_adapter)
    forgets(lambda: wrapper.merge_adapter(["b"], safe_merge=True))
    forgets(wrapper.unmerge_adapter)
    forgets(lambda: wrapper.delete_adapter("b"))
    merged = wrapper.merge_and_unload()
    assert merged is llama
    assert same_as_plain(llama, cache, BASE) == 0


def test_several_at_once_weighted_and_scaled(llama: PreTrainedModel, store: ChunkStore) -> None:
    wrapper = adapted(llama, lora())
    cache = ChunkReuseCache(llama, store)
    layers = [module for module in llama.modules() if hasattr(module, "lora_A")]

    def scale(factor: float) -> None:
        for layer in layers:
            layer.scale_layer(factor)

    assert same_as_plain(llama, cache, BASE) == 0
    wrapper.base_model.set_adapter(["a", "b"])
    assert same_as_plain(llama, cache, BASE) == 0
    wrapper.base_model.set_adapter(["b", "a"])
    same_as_plain(llama, cache, BASE)
    wrapper.base_model.set_adapter(["a", "b"])
    assert same_as_plain(llama, cache, BASE) >= 96
    scale(2.0)
    assert same_as_plain(llama, cache, BASE) == 0
    scale(0.5)
    assert same_as_plain(llama, cache, BASE) >= 96
    wrapper.add_weighted_adapter(["a", "b"], [0.3, 0.7], adapter_name="both")
    wrapper.set_adapter("both")
    assert same_as_plain(llama, cache, BASE) == 0


def test_loaded_under_the_same_name(llama: PreTrainedModel, store: ChunkStore, tmp_path: Any) -> None:
    wrapper = adapted(llama, lora())
    wrapper.save_pretrained(tmp_path)
    cache = ChunkReuseCache(llama, store)
    assert same_as_plain(llama, cache, BASE) == 0
    for _ in range(2):
        wrapper.delete_adapter("a")
        wrapper.load_adapter(tmp_path / "b", adapter_name="a")
        wrapper.set_adapter("a")
        assert same_as_plain(llama, cache, BASE) == 0


def test_rows_with_different_adapters(llama: PreTrainedModel, store: ChunkStore) -> None:
    """PEFT hooks every layer for the length of such a call; what it computes belongs to that call alone."""
    wrapper = adapted(llama, lora())
    cache = ChunkReuseCache(llama, store)
    batch = {**left_pad(BASE, BASE, random_ids(70, seed=2)), "max_new_tokens": 4}
    same_as_plain(llama, ChunkReuseCache(llama, store), BASE)
    for names in (["a", "b", "__base__"], ["b", "a", "a"]):
        for extra in ({}, {"prefill_chunk_size": 40}):
            found = wrapper.generate(**batch, **extra, adapter_names=names, past_key_values=cache)
            assert torch.equal(found, wrapper.generate(**batch, adapter_names=names))
            assert "which adapter each row" in (cache.report.bypass_reason or "")
    assert same_as_plain(llama, cache, BASE) >= 96


def test_the_wrapper_generates_with_the_cache_of_its_model(llama: PreTrainedModel, store: ChunkStore) -> None:
    wrapper = adapted(llama, lora())
    cache = ChunkReuseCache(wrapper, store)  # type: ignore[arg-type]
    assert same_as_plain(llama, cache, BASE, caller=wrapper) == 0
    assert same_as_plain(llama, cache, BASE) == 99
    assert attach(wrapper, store) is wrapper  # type: ignore[arg-type, comparison-overlap]
    found = wrapper.generate(**as_inputs(BASE), max_new_tokens=4)  # type: ignore[unreachable]
    reused = last_cache(wrapper)
    assert reused is not None
    assert reused.report.reused_tokens >= 96
    assert torch.equal(found, wrapper.generate(**as_inputs(BASE), max_new_tokens=4, past_key_values=cache))


@torch.no_grad()
def test_switched_in_the_middle_of_a_conversation(llama: PreTrainedModel, store: ChunkStore) -> None:
    wrapper = adapted(llama, lora())
    cache, more = ChunkReuseCache(llama, store), random_ids(64, seed=4)
    llama(BASE, past_key_values=cache, logits_to_keep=1)
    wrapper.set_adapter("b")
    llama(more, past_key_values=cache)  # continues K/V of a, as any cache would
    whole = torch.cat([BASE, more], dim=1)
    assert same_as_plain(llama, ChunkReuseCache(llama, store), whole) == 0
    wrapper.set_adapter("a")
    assert 96 <= same_as_plain(llama, ChunkReuseCache(llama, store), whole) < 104


@pytest.mark.usefixtures("any_peft")
class TestTransformersOwn:
    """model.add_adapter() and its kin, without a wrapper."""

    def test_switching(self, llama: PreTrainedModel, store: ChunkStore, tmp_path: Any) -> None:
        cache = ChunkReuseCache(llama, store)
        assert same_as_plain(llama, cache, BASE) == 0
        torch.manual_seed(0)
        for name in ("a", "b"):
            llama.add_adapter(lora(), adapter_name=name)
        llama.eval()
        seen: set[str] = set()
        for name in ("a", "b", "none", "a", "none", "b"):
            llama.disable_adapters() if name == "none" else (llama.enable_adapters(), llama.set_adapter(name))
            assert (same_as_plain(llama, cache, BASE) >= 96) == (name in seen), name
            seen.add(name)
        llama.save_pretrained(tmp_path)
        llama.delete_adapter("a")
        assert same_as_plain(llama, cache, BASE) == 0
        llama.load_adapter(str(tmp_path), adapter_name="c")
        llama.set_adapter("c")
        same_as_plain(llama, cache, BASE)


PROMPTS: dict[str, Callable[[], Any]] = {
    "prompt tuning": lambda: PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=8),
    "p-tuning": lambda: PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=8, encoder_hidden_size=16),
    "prefix tuning": lambda: PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=8),
}
# PEFT passes the prefix as `past_key_values`, beside the `cache` that generate() of transformers 5.24 has made, which
# wins: without this package, too, the wrapper's generate() gives the logits of the model without a prefix.
prefix_is_ignored = pytest.mark.skipif(
    CACHE == "cache" and Version(peft.__version__) < Version("0.22"),
    reason="generate() of transformers 5.24 ignores the prefix that PEFT before 0.22 passes",
)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=prefix_is_ignored if kind == "prefix tuning" else ()) for kind in PROMPTS]
)
@pytest.mark.parametrize("attached", [False, True])
def test_virtual_tokens(llama: PreTrainedModel, store: ChunkStore, kind: str, attached: bool) -> None:
    """Tokens that are no ids: right, and computed as ever, beside calls of the model itself that reuse."""
    torch.manual_seed(0)
    wrapper = get_peft_model(llama, PROMPTS[kind]()).eval()
    for parameter in wrapper.prompt_encoder.parameters():
        parameter.data.normal_()
    with pytest.raises(ValueError, match="its virtual tokens are no part of the prompt"):
        ChunkReuseCache(wrapper)
    inputs = {**as_inputs(BASE), "max_new_tokens": 6}
    plain, alone = wrapper.generate(**inputs), llama.generate(**inputs)
    assert (wrapper(**as_inputs(BASE)).logits[:, -1] - llama(**as_inputs(BASE)).logits[:, -1]).abs().max() > 0.1
    cache = ChunkReuseCache(llama, store)
    given = {} if attached else {"past_key_values": cache}
    if attached:
        attach(llama, store)
    for _ in range(2):
        assert torch.equal(wrapper.generate(**inputs, **given), plain)
        assert torch.equal(llama.generate(**inputs, **given), alone)
        found = last_cache(llama) if attached else cache
        assert found is not None
    assert found.report.reused_tokens >= 96
    assert same_as_plain(llama, ChunkReuseCache(llama, store), BASE) >= 96
