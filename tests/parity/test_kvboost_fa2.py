"""Models with `attn_implementation="kvboost_fa2"` say what they say with eager attention."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from triton import knobs

from kvboost_hf import ChunkReuseCache, ChunkStore
from tests.architectures.models import TRIED, make_architecture
from tests.architectures.table import of_tested_release
from tests.conftest import as_inputs, left_pad, make_model, random_ids
from tests.internals.attention import backends, kernel_calls, use_tier

MODELS = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt_oss", "phi", "gpt2", "deepseek_v3", "bloom"]


def both(name: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The same model with eager attention, and with ours."""
    eager, ours = (make_model(name) for _ in range(2))
    eager.set_attn_implementation("eager")
    ours.set_attn_implementation("kvboost_fa2")
    return eager, ours


def calls_within(before: dict[str, int]) -> dict[str, int]:
    return dict(kernel_calls() - before)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_tokens(name: str, cache: str) -> None:
    eager, ours = both(name)
    inputs = (
        left_pad(random_ids(37, 1), random_ids(50, 2), random_ids(12, 3))
        if name != "gpt2"
        else {"input_ids": random_ids(50, 2)}
    )
    given = {"max_new_tokens": 12, "do_sample": False}
    if cache == "static":
        given["cache_implementation"] = "static"  # type: ignore[assignment]
    before = kernel_calls()
    found = ours.generate(**inputs, **given)
    calls = calls_within(before)
    assert torch.equal(found, eager.generate(**inputs, **given))
    if name != "bloom":  # computes attention itself
        assert sum(calls.values()) == 12 * ours.config.num_hidden_layers, calls


@pytest.mark.daily
@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "gemma4_text"])
def test_pieces_in_a_cache_of_a_fixed_size(kind: str) -> None:
    """Gemma 4 computes the last query alone in layers that share K/V, with the last row of each mask."""
    model = make_architecture(kind)
    told = {"max_new_tokens": 2, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    call: Any = model.generate
    for inputs in (as_inputs(random_ids(58)), left_pad(random_ids(58), random_ids(49))):
        found = []
        for attention in ("eager", "kvboost_fa2"):
            model.set_attn_implementation(attention)
            found.append(call(**inputs, **told, cache_implementation="static", prefill_chunk_size=17).logits)
        torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("padded", [False, True])
def test_logits_of_a_suffix(name: str, padded: bool) -> None:
    eager, ours = both(name)
    inputs = left_pad(random_ids(80, 1), random_ids(61, 2)) if padded else {"input_ids": random_ids(80, 1)}
    mask = inputs.get("attention_mask")
    found = []
    for model in (eager, ours):
        cache, steps = DynamicCache(config=model.config), []
        for start, stop in ((0, 50), (50, 51), (51, 80)):
            given = {"attention_mask": mask[:, :stop]} if mask is not None else {}
            ids = inputs["input_ids"][:, start:stop]
            with torch.no_grad():
                steps.append(model(ids, past_key_values=cache, **given).logits)
        logits = torch.cat(steps, dim=1)
        found.append(logits[mask.bool()] if mask is not None else logits)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("given", ["DynamicCache", "ChunkReuseCache", "ChunkReuseCache, a mask of ones"])
def test_one_query_goes_to_pytorch_where_nothing_is_hidden(
    given: str, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU: here tensors say that they are there, and kernels are interpreted."""
    eager, ours = (model.half() for model in both("llama"))
    inputs = left_pad(random_ids(37, 1), random_ids(30 if padded else 37, 2))
    told: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "output_logits": True}
    expected = eager.generate(**inputs, **told, return_dict_in_generate=True)
    if "mask" in given:  # as transformers before 5.23 makes it
        prepare = ours.prepare_inputs_for_generation

        def with_mask(ids: torch.Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
            made = prepare(ids, *args, **kwargs)
            return made if made.get("attention_mask") is not None else {**made, "attention_mask": torch.ones_like(ids)}

        monkeypatch.setattr(ours, "prepare_inputs_for_generation", with_mask)

    def make_cache() -> Any:
        return ChunkReuseCache(ours, ChunkStore(ours)) if "Reuse" in given else DynamicCache(config=ours.config)

    ours.generate(**inputs, **told, past_key_values=make_cache())  # what is asked of a model once
    cache = make_cache()
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    before, layers = kernel_calls(), ours.config.num_hidden_layers
    with use_tier("triton"):
        found = ours.generate(**inputs, **told, return_dict_in_generate=True, past_key_values=cache)
    calls = {"triton.attend": 4 * layers} if padded else {"sdpa.square": layers, "sdpa.decode": 3 * layers}
    assert calls_within(before) == calls
    assert torch.equal(found.sequences, expected.sequences)
    # About eight values that are rounded to float16 on the way through each layer, in both models.
    budget = 2 * 8 * layers * torch.finfo(torch.float16).eps / 2
    for logits, truth in zip(found.logits, expected.logits, strict=True):
        assert float((logits - truth).abs().max()) <= budget * float(truth.abs().max())
    mask, truth = inputs["attention_mask"].clone(), expected.logits[0]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    mask[:, -3] = 0  # a kernel that leaves out one column is far off
    with torch.no_grad():
        other = eager(inputs["input_ids"], attention_mask=mask, position_ids=positions).logits[:, -1]
    assert float((other - truth).abs().max()) > 2 * budget * float(truth.abs().max())


def test_a_window_is_obeyed_where_the_layer_does_not_tell_it() -> None:
    """phimoe gives its attention no `sliding_window`: FlashAttention 2 attends to everything there."""
    model = make_architecture("phimoe")
    window = model.config.sliding_window
    assert window
    assert window < 60
    ids = torch.randint(3, 60, (1, 60), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.set_attn_implementation("eager")
        eager = model(ids).logits
        model.set_attn_implementation("kvboost_fa2")
        torch.testing.assert_close(model(ids).logits, eager, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("padded", [False, True])
def test_a_prefix_that_sees_itself_is_obeyed(padded: bool) -> None:
    """PaliGemma's layers say that they are not causal, and its masks say which tokens are."""
    model = make_architecture("paligemma-multimodal")
    inputs = left_pad(random_ids(40, 1) % 60, random_ids(27, 2) % 60) if padded else as_inputs(random_ids(40, 1) % 60)
    with torch.no_grad():
        found = []
        for attention in ("eager", "kvboost_fa2"):
            model.set_attn_implementation(attention)
            found.append(model(**inputs).logits[inputs["attention_mask"].bool()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_masks_stay_small() -> None:
    """A suffix over a long cache is given no matrix of queries and columns, padded or not, with or without window."""
    model = make_model("gpt_oss")
    model.set_attn_implementation("kvboost_fa2")
    sizes: list[int] = []

    def watch(module: Any, args: Any, kwargs: Any) -> None:
        mask = kwargs["attention_mask"]
        sizes.append(mask.untyped_storage().nbytes() // mask.itemsize if mask is not None else 0)

    for layer in model.model.layers:
        layer.register_forward_pre_hook(watch, with_kwargs=True)
    inputs = left_pad(random_ids(90, 1), random_ids(80, 2))
    with torch.no_grad():
        for start in (0, 60):
            cache = DynamicCache(config=model.config)
            for begin, stop in ((0, start), (start, 90)):
                if begin < stop:
                    given = {name: each[:, begin:stop] for name, each in inputs.items() if name == "input_ids"}
                    model(**given, attention_mask=inputs["attention_mask"][:, :stop], past_key_values=cache)
        model(inputs["input_ids"])
    assert sizes
    assert max(sizes) <= 2 * 90


def test_from_pretrained_takes_it(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="kvboost_fa2")
    before = kernel_calls()
    model.generate(random_ids(9), max_new_tokens=2)
    assert (kernel_calls() - before)["cpu.attend"] == 2 * model.config.num_hidden_layers


def test_gradients_are_those_of_eager_attention() -> None:
    for name in ("llama", "gpt_oss"):
        eager, ours = both(name)
        ids = random_ids(40, 1, batch=2)
        for model in (eager, ours):
            model.train()
            model(ids, labels=ids).loss.backward()
        for parameter, ours_too in zip(eager.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(ours_too.grad, parameter.grad, rtol=1e-3, atol=1e-4)


def test_dropout() -> None:
    model = make_model("llama")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.set_attn_implementation("kvboost_fa2")
    model.train()
    ids = random_ids(40)
    assert not torch.equal(model(ids).logits, model(ids).logits)
    model = make_model("gpt_oss").train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.set_attn_implementation("kvboost_fa2")
    with pytest.raises(ValueError, match="`attention_dropout` must be 0"):
        model(ids)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gemma2"])
def test_autocast(name: str) -> None:
    eager, ours = both(name)
    ids, logits = random_ids(40), []
    for model in (eager, ours):
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            logits.append(model(ids).logits.float())
    assert (logits[1] - logits[0]).square().mean().sqrt() < 0.05 * logits[0].std()


def test_weights_are_refused() -> None:
    model = make_model()
    model.set_attn_implementation("kvboost_fa2")
    with pytest.raises(ValueError, match="`output_attentions` is not taken"):
        model(random_ids(9), output_attentions=True)


def test_a_mask_of_numbers_is_added() -> None:
    eager, ours = both("llama")
    bias = torch.randn(1, 1, 20, 20).tril() + torch.full((20, 20), torch.finfo(torch.float32).min).triu(1)
    with torch.no_grad():
        torch.testing.assert_close(
            ours(random_ids(20), attention_mask=bias).logits,
            eager(random_ids(20), attention_mask=bias).logits,
            rtol=1e-4,
            atol=1e-4,
        )


def test_a_mask_of_integers_is_refused() -> None:
    model = make_model()
    model.set_attn_implementation("kvboost_fa2")
    with pytest.raises(ValueError, match=r"must be bool, or numbers to add, got torch\.int64"):
        model(random_ids(20), attention_mask=torch.ones(1, 1, 20, 20, dtype=torch.long).tril())


@pytest.mark.parametrize("padded", [False, True])
def test_compiles_as_one_graph(padded: bool) -> None:
    model = make_model("mistral")
    model.set_attn_implementation("kvboost_fa2")
    inputs = left_pad(random_ids(40, 1), random_ids(31, 2)) if padded else {"input_ids": random_ids(40, 1)}
    compiled = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    before = kernel_calls()
    with torch.no_grad():
        found = compiled(**inputs, use_cache=False).logits
        assert (kernel_calls() - before)["cpu.attend"] == model.config.num_hidden_layers
        torch.testing.assert_close(found, model(**inputs, use_cache=False).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["mistral", "gemma2"])  # by `sdpa`, and by `reference`
def test_compiles_as_one_graph_with_gradients(name: str) -> None:
    model = make_model(name)
    model.set_attn_implementation("kvboost_fa2")
    inputs = left_pad(random_ids(24, 1), random_ids(19, 2))

    def gradient(forward: Callable[..., Any]) -> torch.Tensor:
        weight = model.get_input_embeddings().weight
        weight.grad = None
        forward(**inputs, use_cache=False).logits.logsumexp(-1).sum().backward()
        assert weight.grad is not None
        return weight.grad

    compiled = torch.compile(model.forward, fullgraph=True, backend="eager")
    torch.testing.assert_close(gradient(compiled), gradient(model.forward), rtol=1e-3, atol=1e-4)


def test_the_tier_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    backends._choose.cache_clear()
    model = make_model()
    model.set_attn_implementation("kvboost_fa2")
    with caplog.at_level(logging.INFO, "kvboost_hf"):
        model.generate(random_ids(9), max_new_tokens=3)
    told = [record.message for record in caplog.records]  # with transformers 5.17, of a call in float16, too
    assert told.count("kvboost_fa2 on cpu in float32: PyTorch's CPU flash attention, in parts without a mask.") == 1


def test_tiers_that_there_are_not() -> None:
    with pytest.raises(ValueError, match="`tier` must be one of"), use_tier("fast"):  # type: ignore[arg-type]
        pass


@pytest.mark.daily
@pytest.mark.skipif(torch.cuda.is_available(), reason="they run here")
@pytest.mark.parametrize(("tier", "needs"), [("triton", "a GPU, or TRITON_INTERPRET=1"), ("cuda", "a CUDA GPU")])
def test_tiers_that_do_not_run_here(tier: Any, needs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    with pytest.raises(ValueError, match=f"`tier` must be one that runs here, got '{tier}', which needs {needs}"):
        use_tier(tier).__enter__()


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt_oss"])
def test_tokens_of_the_triton_kernels(name: str) -> None:
    eager, ours = both(name)
    inputs = left_pad(random_ids(30, 1), random_ids(19, 2))
    given = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    before = kernel_calls()
    with use_tier("triton"):
        found = ours.generate(**inputs, **given)
    assert dict(kernel_calls() - before) == {"triton.attend": 4 * ours.config.num_hidden_layers}
    assert torch.equal(found, eager.generate(**inputs, **given))


# Models that choose keys by an index of their own, or have sinks that differ between queries.
REFUSED = {
    "axk2",
    "deepseek_v32",
    "dots3_note",
    "dots3_note_text",
    "glm_moe_dsa",
    "hy_v4",
    "inkling2_loop_text",
    "inkling2_text",
    "minimax_m3_vl_text",
}


@of_tested_release
@pytest.mark.parametrize("model_type", TRIED)
def test_every_architecture(model_type: str) -> None:
    """Prompts with and without padding: the logits of eager attention, or a refusal."""
    model = make_architecture(model_type)
    ids = torch.randint(3, 60, (2, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :13] = 0
    found = []
    for attention in ("eager", "kvboost_fa2"):
        model.set_attn_implementation(attention)
        if attention == "kvboost_fa2" and model_type in REFUSED:
            with pytest.raises(ValueError, match="is not taken by 'kvboost_fa2'"):
                model(ids)
            return
        with torch.no_grad():
            found.append(torch.cat([model(ids).logits[:1], model(ids, attention_mask=mask).logits[1:, 13:]], dim=1))
    assert (found[1] - found[0]).abs().max() < 1e-3 * found[0].std()
