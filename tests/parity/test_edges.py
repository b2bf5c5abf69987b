"""What a review by a sceptic found: each of these once gave wrong tokens, lost reuse, or crashed."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    BartConfig,
    BartForCausalLM,
    BertConfig,
    BertLMHeadModel,
    DynamicCache,
    PreTrainedModel,
    RwkvConfig,
    RwkvForCausalLM,
)

from kvboost_hf import ChunkReuseCache, ChunkStore, KVQuantConfig, ReusePolicy, attach, check_model_compatibility
from kvboost_hf.errors import StoreClosedError
from tests.architectures.models import TRIED, make_architecture
from tests.conftest import VOCAB, as_inputs, counted, left_pad, make_model, random_ids
from tests.internals.compat import padding_reason, probe_reason
from tests.internals.top import device_link

BASE = random_ids(200, seed=1)
NEXT = random_ids(10, seed=2)


def prompt(model: PreTrainedModel, cache: ChunkReuseCache, ids: torch.Tensor = BASE[:, :100]) -> torch.Tensor:
    """Tokens after `ids`, which must be those of the model as it is now."""
    found = model.generate(**as_inputs(ids), past_key_values=cache, max_new_tokens=6)
    assert torch.equal(found, model.generate(**as_inputs(ids), max_new_tokens=6))
    return found


@pytest.fixture
def store(llama: PreTrainedModel) -> ChunkStore:
    check_model_compatibility(llama)
    return ChunkStore(llama, chunk_size=32)


class TestWhatKvDependsOn:
    """Things besides weights and tokens: K/V computed with them must not be found without them, and the reverse."""

    def test_a_hook_on_a_layer(self, llama: PreTrainedModel, store: ChunkStore) -> None:
        prompt(llama, ChunkReuseCache(llama, store))
        handle = llama.model.layers[0].register_forward_hook(lambda _m, _i, out: out + 0.5)
        prompt(llama, ChunkReuseCache(llama, store))
        handle.remove()
        cache = ChunkReuseCache(llama, store)
        prompt(llama, cache)
        assert cache.report.reused_tokens == 96  # what was stored without the hook counts again

    def test_a_scalar_attribute(self, llama: PreTrainedModel, store: ChunkStore) -> None:
        prompt(llama, ChunkReuseCache(llama, store))
        for layer in llama.model.layers:
            layer.self_attn.scaling *= 2
        prompt(llama, ChunkReuseCache(llama, store))

    def test_autocast(self, llama: PreTrainedModel, store: ChunkStore) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            llama.generate(**as_inputs(BASE), past_key_values=ChunkReuseCache(llama, store), max_new_tokens=1)
        cache = ChunkReuseCache(llama, store)
        prompt(llama, cache, BASE)
        assert cache.report.reused_tokens == 0

    @pytest.mark.parametrize(
        ("backend", "what", "precision"),
        [
            ("cuda", "matmul", "tf32"),
            ("mkldnn", "matmul", "bf16"),
            ("cuda", "conv", "ieee"),
            ("mkldnn", "conv", "bf16"),
        ],
    )
    def test_the_precision_of_a_backend(
        self, llama: PreTrainedModel, store: ChunkStore, backend: str, what: str, precision: str
    ) -> None:
        """Settings since PyTorch 2.9: behind one of products, the older setting of all raises an error."""
        prompt(llama, ChunkReuseCache(llama, store), BASE)
        before = torch._C._get_fp32_precision_getter(backend, what)
        torch._C._set_fp32_precision_setter(backend, what, precision)
        try:
            cache = ChunkReuseCache(llama, store)
            prompt(llama, cache, BASE)
            assert cache.report.reused_tokens == 0
        finally:
            torch._C._set_fp32_precision_setter(backend, what, before)
        cache = ChunkReuseCache(llama, store)
        prompt(llama, cache, BASE)
        assert cache.report.reused_tokens > 0

    @pytest.mark.parametrize(
        "name", ["fp16_accumulation", "fp16_reduced_precision_reduction", "bf16_reduced_precision_reduction"]
    )
    def test_how_sums_are_rounded(self, llama: PreTrainedModel, store: ChunkStore, name: str) -> None:
        settings, name = torch.backends.cuda.matmul, f"allow_{name}"
        usual = getattr(settings, name)
        prompt(llama, ChunkReuseCache(llama, store), BASE)
        setattr(settings, name, not usual)
        try:
            cache = ChunkReuseCache(llama, store)
            prompt(llama, cache, BASE)
            assert cache.report.reused_tokens == 0
        finally:
            setattr(settings, name, usual)
        cache = ChunkReuseCache(llama, store)
        prompt(llama, cache, BASE)
        assert cache.report.reused_tokens > 0

    def test_a_part_in_training_mode(self, llama: PreTrainedModel, store: ChunkStore) -> None:
        llama.model.layers[0].train().self_attn.attention_dropout = 0.1
        cache = ChunkReuseCache(llama, store)
        llama.generate(**as_inputs(BASE), past_key_values=cache, max_new_tokens=1)
        assert "model.layers.0.self_attn changes values at random" in cache.report.bypass_reason
        assert len(store) == 0

    @pytest.mark.filterwarnings("ignore:.*adapter.*:UserWarning")
    def test_adapters(self) -> None:
        model = make_model("llama")
        config = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        adapted = get_peft_model(model, config, adapter_name="a")
        adapted.add_adapter("b", config)
        store = ChunkStore(model, chunk_size=32)
        prompt(model, ChunkReuseCache(model, store))
        for switch in (
            lambda: adapted.set_adapter("b"),
            lambda: adapted.base_model.disable_adapter_layers(),
            lambda: adapted.base_model.enable_adapter_layers(),
            lambda: adapted.set_adapter("a"),
            lambda: [m.scaling.update(a=3.0) for m in model.modules() if hasattr(m, "lora_A")],
            lambda: adapted.merge_adapter(),
        ):
            switch()
            prompt(model, ChunkReuseCache(model, store))

    def test_a_weight_that_is_not_contiguous(self, llama: PreTrainedModel, store: ChunkStore) -> None:
        projection = llama.model.layers[0].self_attn.v_proj
        projection.weight = nn.Parameter(projection.weight.detach().t().contiguous().t())
        prompt(llama, ChunkReuseCache(llama, store))
        projection.weight.data += 0.3
        prompt(llama, ChunkReuseCache(llama, store))

    @torch.no_grad()
    def test_changed_and_changed_back_inside_a_chunk(self, llama: PreTrainedModel, store: ChunkStore) -> None:
        cache, ids = ChunkReuseCache(llama, store), random_ids(64, seed=5)
        llama(ids[:, :33], past_key_values=cache, logits_to_keep=1)
        for column in range(33, 64):
            handle = llama.model.layers[0].register_forward_hook(lambda _m, _i, out: out + 1) if column == 40 else None
            llama(ids[:, column : column + 1], past_key_values=cache)
            if handle is not None:
                handle.remove()
        fresh = ChunkReuseCache(llama, store)
        prompt(llama, fresh, torch.cat([ids, NEXT], dim=1))
        assert fresh.report.reused_tokens == 32


class TestPadding:
    def test_positions_that_count_padding(self) -> None:
        """BART's decoder takes no position_ids and counts columns: padded rows must not be stored."""
        model = BartForCausalLM(
            BartConfig(
                vocab_size=VOCAB, d_model=32, decoder_layers=2, decoder_attention_heads=2, decoder_ffn_dim=32,
                init_std=0.3, pad_token_id=0, bos_token_id=1, eos_token_id=2, is_encoder_decoder=False,
                forced_eos_token_id=None,
            )
        ).eval()  # fmt: skip
        assert probe_reason(model) is None
        assert "padding changes" in (padding_reason(model) or "")
        store = ChunkStore(model, chunk_size=32)
        cache = ChunkReuseCache(model, store)
        batch = left_pad(BASE[:, :100], BASE[:, :70])
        found = model.generate(**batch, past_key_values=cache, max_new_tokens=4)
        assert torch.equal(found, model.generate(**batch, max_new_tokens=4))
        assert "padding changes" in (cache.report.bypass_reason or "")
        prompt(model, cache, BASE[:, :70])

    @pytest.mark.parametrize(("cold", "warm"), [(22, 176), (2, 176), (90, 176)])
    def test_padding_is_not_computed_ahead(
        self, llama: PreTrainedModel, store: ChunkStore, cold: int, warm: int
    ) -> None:
        store.warm(BASE[:, :warm])
        assert padding_reason(llama) is None
        batch = left_pad(BASE[:, :warm], random_ids(cold, seed=7))
        cache = ChunkReuseCache(llama, store)
        with counted(llama) as work:
            found = llama.generate(**batch, past_key_values=cache, max_new_tokens=1)
        assert torch.equal(found, llama.generate(**batch, max_new_tokens=1))
        report = cache.report
        assert report.prompt_tokens == warm + cold == report.reused_tokens + report.forwarded_tokens
        assert work.tokens <= report.forwarded_tokens + (176 - cold if cold < 64 else 0)
        assert work.tokens <= 2 * (176 - 144) if cold < 64 else work.tokens == cold + 1

    def test_a_row_that_is_padding_throughout_a_piece(self, llama: PreTrainedModel, store: ChunkStore) -> None:
        store.warm(BASE[:, :150])
        batch = left_pad(BASE[:, :150], BASE[:, :40])
        cache = ChunkReuseCache(llama, store)
        found = llama.generate(**batch, past_key_values=cache, max_new_tokens=6, prefill_chunk_size=20)
        assert torch.equal(found, llama.generate(**batch, max_new_tokens=6))
        report = cache.report
        assert report.bypass_reason is None
        assert report.prompt_tokens == 190 == report.reused_tokens + report.forwarded_tokens
        assert report.reused_tokens >= 100


class TestWhichCall:
    """What generate() was called with, which a cache is never told."""

    @pytest.mark.parametrize(
        ("name", "extra"),
        [
            ("llama", {}),
            ("llama", {"prefill_chunk_size": 4}),
            ("bloom", {}),
            ("mistral", {}),
            ("gpt2", {"token_type_ids": torch.zeros(1, 110, dtype=torch.long)}),
        ],
    )
    @torch.no_grad()
    def test_only_the_ids_that_follow(self, name: str, extra: dict[str, Any]) -> None:
        model = make_model(name)
        first = {k: v[:, :100] for k, v in extra.items() if isinstance(v, torch.Tensor)}
        whole = torch.cat([BASE[:, :100], NEXT], dim=1)
        answers = []
        for cache in (ChunkReuseCache(model), DynamicCache(config=model.config)):
            model(**as_inputs(BASE[:, :100]), **first, past_key_values=cache)
            mask = torch.ones_like(whole)
            out = model.generate(NEXT, attention_mask=mask, past_key_values=cache, max_new_tokens=6, **extra)
            answers.append(out[:, 10:])
        assert torch.equal(*answers)
        if "prefill_chunk_size" not in extra:  # there, stock transformers 5.17 is wrong itself
            assert torch.equal(answers[0], model.generate(**as_inputs(whole), max_new_tokens=6, **extra)[:, 110:])

    @torch.no_grad()
    def test_a_call_that_failed_before_its_first_forward(self, llama: PreTrainedModel, store: ChunkStore) -> None:
        cache = ChunkReuseCache(llama, store)
        llama(BASE[:, :50], past_key_values=cache)
        with pytest.raises(ValueError, match="batch_size"):
            llama.generate(**left_pad(BASE, BASE), past_key_values=cache, prompt_lookup_num_tokens=3, max_new_tokens=2)
        found = llama(NEXT, past_key_values=cache).logits
        expected = llama(torch.cat([BASE[:, :50], NEXT], dim=1)).logits[:, 50:]
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)

    @pytest.mark.daily
    @pytest.mark.parametrize("reason", ["use_cache is False", "is given the cache"])
    def test_use_cache_false(self, llama: PreTrainedModel, store: ChunkStore, reason: str) -> None:
        batch = left_pad(BASE, BASE[:, :40])
        cache, expected = ChunkReuseCache(llama, store), llama.generate(**batch, max_new_tokens=6)
        layer = llama.model.layers[0]
        hook = layer.register_forward_hook(lambda *given: None, with_kwargs=True) if "given" in reason else None
        for _ in range(2):
            found = llama.generate(**batch, past_key_values=cache, max_new_tokens=6, use_cache=False)
            assert torch.equal(found, expected)
            assert cache.report.prompt_tokens == cache.report.forwarded_tokens == BASE.shape[1] + 40
        drafted = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 6}  # transformers crops the cache of each forward
        for _ in range(2):
            found = llama.generate(**as_inputs(BASE), past_key_values=cache, use_cache=False, **drafted)
            assert torch.equal(found, llama.generate(**as_inputs(BASE), max_new_tokens=6))
            assert cache.report.prompt_tokens == cache.report.forwarded_tokens == BASE.shape[1]
        assert reason in str(cache.report.bypass_reason)
        with pytest.raises(ValueError, match=r"`use_cache` must be True with `prefill_chunk_size` \(16\)"):
            llama.generate(**batch, past_key_values=cache, max_new_tokens=6, use_cache=False, prefill_chunk_size=16)
        if hook is not None:
            hook.remove()
        prompt(llama, cache)


class TestTheUnsupported:
    def test_pieces_of_a_prompt_without_reuse_count(self, llama: PreTrainedModel) -> None:
        hook = llama.model.layers[0].register_forward_hook(lambda *given: None, with_kwargs=True)
        cache = ChunkReuseCache(llama)
        llama(BASE[:, :50], past_key_values=cache)
        assert "is given the cache" in str(cache.report.bypass_reason)
        assert cache.report.prompt_tokens == cache.report.forwarded_tokens == 50
        llama.generate(**as_inputs(BASE[:, :90]), past_key_values=cache, max_new_tokens=2, prefill_chunk_size=40)
        hook.remove()
        assert cache.report.prompt_tokens == cache.report.forwarded_tokens == 90

    @pytest.mark.skipif(
        not hasattr(transformers, "UnlimitedOcrConfig"), reason="this release of transformers has no such model"
    )
    def test_layers_that_are_told_of_the_prompt_before_its_first_forward(self) -> None:
        part = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}
        sam = {**part, "mlp_dim": 32, "output_channels": 8, "global_attn_indexes": []}
        text = {
            "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "n_routed_experts": 2,
            "num_experts_per_tok": 1, "moe_intermediate_size": 16, "sliding_window": 24, "initializer_range": 0.3,
        }  # fmt: skip
        vision = {"sam_config": sam, "encoder_config": {**part, "intermediate_size": 32}}
        config = transformers.UnlimitedOcrConfig(text_config=text, vision_config=vision)
        torch.manual_seed(0)
        model = transformers.UnlimitedOcrForConditionalGeneration(config).eval()
        told = {**as_inputs(BASE[:, :60]), "max_new_tokens": 4, "prefill_chunk_size": 20, "eos_token_id": None}
        expected, cache = model.generate(**told), ChunkReuseCache(model)
        for _ in range(2):
            assert torch.equal(model.generate(**told, past_key_values=cache), expected)
            assert cache.report.prompt_tokens == cache.report.forwarded_tokens == 60

    def test_states_alone_forget_drafts(self) -> None:
        made = make_architecture("lfm3")
        made.config.num_hidden_layers, made.config.layer_types = 2, ["conv", "conv"]
        model = type(made)(made.config).eval()
        ids = torch.cat([BASE[:, :60], BASE[:, :60]], dim=1)
        expected = model.generate(**as_inputs(ids), max_new_tokens=9)
        hook = model.model.layers[0].register_forward_hook(lambda *given: None, with_kwargs=True)
        drafted = {"prompt_lookup_num_tokens": 4, "past_key_values": ChunkReuseCache(model)}
        assert torch.equal(model.generate(**as_inputs(ids), max_new_tokens=9, **drafted), expected)
        hook.remove()

    def test_candidates_are_no_tokens_of_a_prompt_that_is_computed_as_it_stands(self, llama: PreTrainedModel) -> None:
        mask, cache = torch.ones(1, 120, dtype=torch.long), ChunkReuseCache(llama)
        mask[0, 5] = 0  # a hole
        ids, lookup = torch.cat([BASE[:, :60], BASE[:, :60]], dim=1), {"prompt_lookup_num_tokens": 4}
        llama.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=9, **lookup)
        assert cache.report.prompt_tokens == cache.report.forwarded_tokens == 119

    @pytest.mark.parametrize("attached", [True, False])
    def test_windows_with_prompt_lookup(self, attached: bool) -> None:
        model, ids = make_model("mistral"), torch.cat([BASE[:, :60], BASE[:, :60]], dim=1)
        expected = model.generate(**as_inputs(ids), max_new_tokens=30, prompt_lookup_num_tokens=4)
        cache = ChunkReuseCache(attach(model) if attached else model)
        kwargs = {} if attached else {"past_key_values": cache}
        for _ in range(2):
            found = model.generate(**as_inputs(ids), max_new_tokens=30, prompt_lookup_num_tokens=4, **kwargs)
            assert torch.equal(found, expected)

    def test_not_causal_and_prefilled_in_pieces(self) -> None:
        config = BertConfig(
            vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            initializer_range=0.3, pad_token_id=0, max_position_embeddings=256,
        )  # fmt: skip
        model = BertLMHeadModel(config).eval()
        cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=32))
        for _ in range(2):
            found = model.generate(
                **as_inputs(BASE[:, :100]), past_key_values=cache, max_new_tokens=3, prefill_chunk_size=40
            )
            expected = model.generate(**as_inputs(BASE[:, :100]), max_new_tokens=3, prefill_chunk_size=40)
            assert torch.equal(found, expected)
        assert "not causal" in (cache.report.bypass_reason or "")
        with pytest.raises(ValueError, match="BertLMHeadModel cannot reuse K/V: it is not causal"):
            check_model_compatibility(model)

    def test_models_with_other_caches(self) -> None:
        model = RwkvForCausalLM(
            RwkvConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32)
        )
        with pytest.warns(UserWarning, match="its forward takes none"):
            assert not check_model_compatibility(model, strict=False).exact
        for make in (attach, ChunkReuseCache, ChunkStore):
            with pytest.raises(ValueError, match="RwkvForCausalLM cannot be given a cache: its forward takes none"):
                make(model)

    def test_early_exit(self, llama: PreTrainedModel, store: ChunkStore) -> None:
        attach(llama, store)
        plain = make_model("llama")
        for kwargs in ({"assistant_early_exit": 1}, {}, {"assistant_early_exit": 1}):
            found = llama.generate(**as_inputs(BASE), max_new_tokens=6, **kwargs)
            assert torch.equal(found, plain.generate(**as_inputs(BASE), max_new_tokens=6))


HOST: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "memory": ({}, {}, {}),
    "a codec": ({}, {"codec": "int8"}, {}),
    "another codec": ({}, {"codec": "turboquant"}, {}),
    "moved": ({"mode": "blend", "repair": "query", "recompute_ratio": 1.0}, {}, {}),
    "logits of all tokens": ({"keep_logprobs": True}, {}, {}),
    "codes": ({}, {}, {"live_quant": KVQuantConfig(key_bits=4, value_bits=4)}),
    "a fixed size": ({}, {}, {"max_cache_len": 300}),
}


@pytest.mark.parametrize("how", HOST)
def test_another_default_device(how: str, tmp_path: Path) -> None:
    """What belongs on the host is there also after `torch.set_default_device`, as scripts for GPUs call it."""
    (policy, kept, made), model = HOST[how], make_model("llama")
    moved = torch.cat([BASE[:, :40], random_ids(30, seed=3), BASE[:, 40:]], dim=1)
    asked = [(as_inputs(ids), model.generate(**as_inputs(ids), max_new_tokens=4)) for ids in (BASE, moved, BASE)]
    with torch.device("meta"):
        for _ in range(2):
            store = ChunkStore(model, chunk_size=16, tiers=["ram:1GB", f"disk:{tmp_path}:1GB"], **kept)
            for inputs, expected in asked:
                cache = ChunkReuseCache(model, store, ReusePolicy(**policy, min_prefill_saving=0), **made)
                found = model.generate(**inputs, cache=cache, max_new_tokens=4)
                assert torch.equal(found, expected) or "codec" in kept
                cache.store_tails()
            assert cache.report.reused_tokens == 199
            store.close()
        assert device_link.link.pinned(torch.Size([4]), torch.int64).device.type == "cpu"


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
@pytest.mark.parametrize(
    ("ones", "dtype", "reused"),
    [
        (2.0, torch.float32, 0),
        pytest.param(0.5, torch.float32, 0, marks=pytest.mark.daily),
        (1.0, torch.bfloat16, 1),
    ],
)
def test_masks_of_any_numbers(name: str, ones: float, dtype: torch.dtype, reused: int) -> None:
    """Models with states multiply by them."""
    model, ids = make_architecture(name), BASE % 100
    given = {"attention_mask": torch.full(ids.shape, ones, dtype=dtype), "position_ids": torch.arange(200)[None]}
    if dtype is torch.bfloat16:
        given["position_ids"] = given["position_ids"].to(dtype)
    expected, store = model(ids, **given, logits_to_keep=1).logits, ChunkStore(model, chunk_size=32)
    model.generate(**as_inputs(ids), past_key_values=ChunkReuseCache(model, store), max_new_tokens=1)
    for _ in range(2):
        cache = ChunkReuseCache(model, store)
        found = model(ids, **given, past_key_values=cache, logits_to_keep=1).logits
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
        assert min(cache.report.reused_tokens, 1) == reused


class TestLifetimes:
    @torch.no_grad()
    def test_the_caller_may_reuse_its_ids_buffer(self, llama: PreTrainedModel, store: ChunkStore) -> None:
        cache, ids, buffer = ChunkReuseCache(llama, store), random_ids(64, seed=6), torch.empty(1, 1, dtype=torch.long)
        for column in range(64):
            llama(buffer.copy_(ids[:, column : column + 1]), past_key_values=cache)
        fresh = ChunkReuseCache(llama, store)
        prompt(llama, fresh, torch.cat([ids, NEXT], dim=1))
        assert fresh.report.reused_tokens == 64

    @torch.no_grad()
    def test_broadcast_positions(self, llama: PreTrainedModel, store: ChunkStore) -> None:
        cache = ChunkReuseCache(llama, store)
        llama(BASE, position_ids=torch.zeros(1, 1, dtype=torch.long), past_key_values=cache, logits_to_keep=1)
        assert "position_ids" in (cache.report.bypass_reason or "")
        assert len(store) == 0

    @torch.no_grad()
    def test_a_fork_after_an_interruption(self, llama: PreTrainedModel, store: ChunkStore) -> None:
        cache = ChunkReuseCache(llama, store)
        llama(BASE[:, :50], past_key_values=cache)

        def fail(*_: Any) -> None:
            raise RuntimeError

        handle = llama.model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError):
            llama(BASE[:, 50:51], past_key_values=cache)
        handle.remove()
        expected = llama(BASE[:, :51]).logits[:, -1:]
        for held in (cache.fork(), cache):
            found = llama(BASE[:, 50:51], past_key_values=held).logits
            torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)

    def test_gradients_through_queries_alone(self, llama: PreTrainedModel, store: ChunkStore) -> None:
        for name, parameter in llama.named_parameters():
            parameter.requires_grad_("q_proj" in name)
        cache = ChunkReuseCache(llama, store)
        loss = sum(llama(BASE[:, at : at + 10], past_key_values=cache).logits.square().mean() for at in (0, 10))
        loss.backward()

    def test_warm_pins_what_covers_it(self, llama: PreTrainedModel, store: ChunkStore) -> None:
        cache = ChunkReuseCache(llama, store)
        prompt(llama, cache, BASE[:, :100])
        store.warm(BASE[:, :50])
        assert store.stats()["pinned_chunks"] == 2

    def test_a_closed_store_lets_its_cache_be_reset(self, llama: PreTrainedModel) -> None:
        cache = ChunkReuseCache(llama)
        prompt(llama, cache)
        cache.store.close()
        cache.reset()
        prompt(llama, ChunkReuseCache(llama))  # the default store is a new one

    def test_a_forward_in_which_the_store_is_closed_has_run_or_has_not(
        self, llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whoever is told that it is closed may run the forward again."""
        for moment in range(1, 99):
            store, left = ChunkStore(llama, chunk_size=16), [moment]
            cache, root = ChunkReuseCache(llama, store), store.root

            def close(
                *given: Any, store: ChunkStore = store, root: Any = root, left: list[int] = left, **more: Any
            ) -> bytes | None:
                left[0] -= 1
                if not left[0]:
                    store.close()
                return root(*given, **more)

            monkeypatch.setattr(store, "root", close)
            for start, stop in ((0, 30), *((n, n + 1) for n in range(30, 34))):  # which fill two chunks
                try:
                    llama(BASE[:, start:stop], past_key_values=cache)
                    assert cache.get_seq_length() == stop
                except StoreClosedError:
                    assert cache.get_seq_length() == start
                    break
            if left[0] > 0:
                return
        pytest.fail("it was asked for more often")

    def test_a_store_keeps_no_weights_alive(self) -> None:
        model = make_model("llama")
        cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=32))
        prompt(model, cache)
        weight = weakref.ref(model.lm_head.weight.untyped_storage())
        layer = weakref.ref(model.model.layers[0])
        del model
        gc.collect()
        assert layer() is None
        del weight
        cache.reset()


def test_positions_that_a_model_counts_otherwise_than_generate() -> None:
    model = make_architecture("roberta")
    ids = random_ids(50, 1)
    store = ChunkStore(model, chunk_size=16)
    assert "does not count from 0" in str(store.warm(ids[:, :32]).bypass_reason)
    plain = model.generate(**as_inputs(ids), max_new_tokens=4)
    for reused in (0, 48):
        cache = ChunkReuseCache(model, store)
        assert torch.equal(model.generate(**as_inputs(ids), past_key_values=cache, max_new_tokens=4), plain)
        assert cache.report.exact_tokens >= reused
    with torch.no_grad():
        logits = model(ids, past_key_values=ChunkReuseCache(model, store), logits_to_keep=1).logits[:, -1]
        torch.testing.assert_close(logits, model(ids).logits[:, -1], atol=2e-4, rtol=2e-4)


@pytest.mark.skipif("dory" not in TRIED, reason="only since transformers 5.24")
def test_a_forward_that_adds_layers_to_the_cache_is_noticed() -> None:
    """By a run, also where no table knows the model."""
    assert probe_reason(make_architecture("dory")) == "its forward adds layers to the cache, with K/V of their own"
