"""Models with streamed layers say what they say with all their weights in place."""

import copy
import errno
import gc
import itertools
import os
import pickle
import threading
import time
import weakref
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_submodules
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, OPTConfig, OPTForCausalLM, PreTrainedModel, pipeline

from kvboost_hf import (
    ChunkReuseCache,
    ChunkStore,
    KVQuantConfig,
    LayerStreamingHook,
    StreamingConfig,
    StreamingError,
    attach,
    load_streamed,
    stop_streaming,
    stream_layers,
    streaming_plan,
    streaming_stats,
    with_streaming,
)
from kvboost_hf.assets import EMBEDDED_MODEL_DIR, load_embedded
from tests.conftest import as_inputs, left_pad, make_model, random_ids
from tests.internals.cache import ModelFingerprint
from tests.internals.offload import ThreadedBackend, disk, use_backend
from tests.offload.poisoning import PoisoningBackend
from tests.parity.compare import same_as_plain
from tests.streaming import FULL_STREAM, double_of, make_layers, stream_except

IDS = random_ids(40, seed=1)
LAYERS = 5
RESIDENT_SETS = [s for size in range(LAYERS) for s in itertools.combinations(range(LAYERS), size)]


def outputs(model: PreTrainedModel, ids: torch.Tensor = IDS) -> list[torch.Tensor]:
    """Logits, all hidden states and all K/V of a prompt and of one token after it."""
    with torch.no_grad():
        first = model(input_ids=ids[:, :-1], output_hidden_states=True, use_cache=True)
        second = model(input_ids=ids[:, -1:], past_key_values=first.past_key_values, output_hidden_states=True)
    kv = [tensor for layer in second.past_key_values.layers for tensor in (layer.keys, layer.values)]
    return [first.logits, *first.hidden_states, second.logits, *second.hidden_states, *kv]


def all_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.fixture(scope="module")
def expected() -> list[torch.Tensor]:
    return outputs(make_layers(LAYERS))


@pytest.mark.parametrize("n_slots", [2, 3])
def test_every_resident_set(expected: list[torch.Tensor], n_slots: int) -> None:
    for resident in RESIDENT_SETS:
        model = make_layers(LAYERS)
        stream = stream_except(model, resident, n_slots)
        for _ in range(2):
            assert all_equal(outputs(model), expected), resident
        streamed = LAYERS - len(resident)
        stats = streaming_stats(model)
        assert stats is not None
        assert stats.layer_calls == 4 * streamed  # four forwards
        assert stats.misses == 1  # the very first
        assert double_of(stream).bytes_copied <= stats.layer_calls * stream.plan.sizes.layer_bytes[0] * 2
        stop_streaming(model)
        assert all_equal(outputs(model), expected)
        assert all(parameter.requires_grad for parameter in model.parameters())
        assert not any("forward" in vars(module) for module in (model, model.model))


def test_copies_are_counted() -> None:
    """Each layer comes once a forward, and no more; one that has its slot for itself comes once in all."""
    for n_layers, n_slots, per_forward in ((4, 2, 4), (5, 2, 5), (5, 3, 4), (3, 3, 0), (3, 2, 2)):
        model = make_layers(n_layers)
        stream = stream_except(model, (), n_slots)
        assert stream is not None
        outputs(model)
        before = double_of(stream).bytes_copied
        outputs(model)
        assert double_of(stream).bytes_copied - before == 2 * per_forward * stream.plan.sizes.layer_bytes[0]


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "gpt_oss", "qwen3_next"])
@pytest.mark.parametrize("mode", ["full_stream", "ffn_only_stream"])
def test_generate(name: str, mode: Any) -> None:
    plain, model = make_model(name), make_model(name)
    with use_backend(PoisoningBackend):
        stream_layers(model, StreamingConfig(residency_mode=mode), device="cpu")
    batch = left_pad(IDS, random_ids(23, seed=2)) if name != "gpt2" else as_inputs(IDS)
    for kwargs in ({}, {"num_beams": 2}, {"do_sample": True}):
        told: dict[str, Any] = {**batch, **kwargs, "max_new_tokens": 6}
        torch.manual_seed(0)
        wanted = plain.generate(**told)
        torch.manual_seed(0)
        assert torch.equal(model.generate(**told), wanted)


def test_feed_forward_parts_of_several_modules() -> None:
    size: Any = {"vocab_size": 200, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64}
    config = OPTConfig(**size, num_hidden_layers=4, num_attention_heads=4)
    model: Any = OPTForCausalLM(config).eval()
    told: dict[str, Any] = {**as_inputs(IDS), "max_new_tokens": 6}
    wanted = model.generate(**told)
    with use_backend(PoisoningBackend):
        stream_layers(model, StreamingConfig(residency_mode="ffn_only_stream"), device="cpu")
    layer = model.model.decoder.layers[0]
    assert len(layer.fc1.weight.unique()) == 1  # an empty slot
    assert len(layer.self_attn.q_proj.weight.unique()) > 1
    assert torch.equal(model.generate(**told), wanted)


def test_exception_within_a_layer(expected: list[torch.Tensor]) -> None:
    model = make_layers(LAYERS)
    stream_except(model, (1,))
    for number in range(LAYERS):
        broken = model.model.layers[number].mlp.register_forward_hook(_fail)
        for error in (RuntimeError, KeyboardInterrupt):
            _fail.error = error  # type: ignore[attr-defined]
            with pytest.raises(error):
                outputs(model)
        broken.remove()
        assert all_equal(outputs(model), expected), number


def _fail(*_: Any) -> None:
    raise _fail.error  # type: ignore[attr-defined]


def test_an_interrupt_holds_no_other_thread_up(expected: list[torch.Tensor]) -> None:
    model = make_layers(LAYERS)
    stream_except(model, ())
    broken = model.model.layers[2].mlp.register_forward_hook(_fail)
    _fail.error = KeyboardInterrupt  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        outputs(model)
    broken.remove()
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(all_equal(outputs(model), expected)), daemon=True)
    thread.start()
    thread.join(30)
    assert found == [True]


@pytest.mark.parametrize("part", ["self_attn", "mlp"])
def test_a_forward_in_the_middle_of_a_layer(expected: list[torch.Tensor], part: str) -> None:
    """As of a cache that finds what it has loaded damaged, and computes it."""
    model = make_layers(LAYERS)
    stream_except(model, (1,))
    nested: list[int] = []

    def compute(*_: Any) -> None:
        if not nested:
            nested.append(1)
            model(input_ids=IDS[:, :7], use_cache=False)
            nested.clear()

    for number in range(LAYERS):
        before = getattr(model.model.layers[number], part).register_forward_pre_hook(compute)
        assert all_equal(outputs(model), expected), number
        before.remove()


def test_early_exit() -> None:
    """A draft by the first layers of the same model: passes that end early, in between."""
    plain, model = make_layers(6), make_layers(6)
    stream_except(model, ())
    for exit_layer in (1, 2, 3, 5):
        told: dict[str, Any] = {**as_inputs(IDS), "max_new_tokens": 12, "assistant_early_exit": exit_layer}
        assert torch.equal(model.generate(**told), plain.generate(**told))


def test_assistant() -> None:
    plain, model, draft = make_model(), make_model(), make_model(seed=1)
    draft.generation_config.assistant_confidence_threshold = 0.0
    stream_except(model, ())
    told: dict[str, Any] = {**as_inputs(IDS), "max_new_tokens": 16}
    wanted = plain.generate(**told)
    assert torch.equal(model.generate(**told, assistant_model=draft), wanted)
    assert torch.equal(model.generate(**told, prompt_lookup_num_tokens=3), wanted)
    cache = ChunkReuseCache(model)
    for _ in range(2):
        assert torch.equal(model.generate(**told, assistant_model=draft, past_key_values=cache), wanted)
    stream_except(draft, ())  # and the draft, too
    assert torch.equal(model.generate(**told, assistant_model=draft), wanted)


@pytest.mark.parametrize("attention", ["sdpa", "kvboost_fa2"])
def test_reuse(attention: str) -> None:
    model = make_layers(LAYERS)
    model.set_attn_implementation(attention)
    told: dict[str, Any] = {**as_inputs(IDS), "max_new_tokens": 4}
    wanted = model.generate(**told)
    stream_except(model, (2,))
    store = ChunkStore(model, chunk_size=16)
    for reused in (0, 32, 32, 32):  # whatever is in the slots
        cache = ChunkReuseCache(model, store)
        assert torch.equal(model.generate(**told, past_key_values=cache), wanted)
        assert cache.report.reused_tokens >= reused
    longer = torch.cat([IDS, random_ids(30, seed=3)], 1)
    if attention == "sdpa":
        assert same_as_plain(model, ChunkReuseCache(model, store), longer) >= 32


def test_what_a_plain_model_left_on_disk_is_found(tmp_path: Path) -> None:
    """Where weights are is no part of what K/V is found by."""
    told: dict[str, Any] = {**as_inputs(IDS), "max_new_tokens": 1}
    for resident in (None, (), (1, 2)):
        model = make_layers(LAYERS)
        if resident is not None:
            stream_except(model, resident)
        with closing(ChunkStore(model, chunk_size=16, tiers=["ram:1GB", f"disk:{tmp_path}:1GB"])) as store:
            cache = ChunkReuseCache(model, store)
            model.generate(**told, past_key_values=cache)
            assert cache.report.reused_tokens == (0 if resident is None else 32)


def test_changed_weights_are_noticed() -> None:
    """The store asks for the weights where they are kept."""
    model = make_layers(LAYERS)
    stream = stream_except(model, ())
    assert stream is not None
    store = ChunkStore(model, chunk_size=16)
    for reused in (0, 32):
        cache = ChunkReuseCache(model, store)
        model.generate(**as_inputs(IDS), past_key_values=cache, max_new_tokens=1)
        assert cache.report.reused_tokens == reused
    kept = model.model.layers[3]._hf_hook.weights_at_rest.values()
    for _, at_rest in kept:
        at_rest.mul_(1.5)
    cache = ChunkReuseCache(model, store)
    model.generate(**as_inputs(IDS), past_key_values=cache, max_new_tokens=1)
    assert cache.report.reused_tokens == 0


def test_blend_and_codes() -> None:
    plain, model = make_layers(LAYERS), make_layers(LAYERS)
    stream_except(model, (0,))
    config = KVQuantConfig(exact_layers=1)
    told: dict[str, Any] = {**as_inputs(IDS), "max_new_tokens": 6}
    caches = [ChunkReuseCache(found, live_quant=config) for found in (plain, model)]
    answers = [
        found.generate(**told, past_key_values=cache) for found, cache in zip((plain, model), caches, strict=True)
    ]
    assert torch.equal(*answers)


def test_attached_pipeline() -> None:
    model, tokenizer = load_embedded()
    asked = "Maria lives in Rome. Where does Maria live?"
    wanted = pipeline("text-generation", model=model, tokenizer=tokenizer)(asked, max_new_tokens=8)
    with use_backend(PoisoningBackend):
        streamed = load_streamed(EMBEDDED_MODEL_DIR, FULL_STREAM)
    pipe = pipeline("text-generation", model=attach(streamed), tokenizer=tokenizer)
    assert [pipe(asked, max_new_tokens=8) for _ in range(2)] == [wanted] * 2


def test_threads(expected: list[torch.Tensor]) -> None:
    """One forward at a time: no thread sees the weights of another one's layer."""
    model = make_layers(LAYERS)
    stream_except(model, ())
    wrong: list[str] = []

    def run() -> None:
        for _ in range(6):
            if not all_equal(outputs(model), expected):
                wrong.append("differs")

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


class _NoWait(PoisoningBackend):
    def wait(self, slot: int) -> None:
        self._loads[slot].copied = True


class _Overwriting(PoisoningBackend):
    """Begins to copy into a slot that is still being read: the next one's bytes are there at once."""

    def wait(self, slot: int) -> None:
        super().wait(slot)
        other = (slot + 1) % len(self._slots)
        self._slots[slot].copy_(self._slots[other])


@pytest.mark.daily
@pytest.mark.parametrize("make", [_NoWait, _Overwriting])
def test_a_wrong_backend_is_seen(expected: list[torch.Tensor], make: Any) -> None:
    model = make_layers(LAYERS)
    stream_except(model, (), make=make)
    assert not all_equal(outputs(model), expected)


def test_memory_of_the_device() -> None:
    """What is not streamed, and the slots: nothing else of the weights is where the model computes."""
    model = make_layers(LAYERS)
    whole = sum(tensor.nbytes for tensor in model.model.layers.parameters())
    stream = stream_except(model, (4,))
    assert stream is not None
    outputs(model)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.model.layers.parameters()}
    layer = stream.plan.sizes.layer_bytes[0]
    assert sum(storages.values()) <= 2 * layer + whole // LAYERS
    assert len(storages) < LAYERS * 9


def test_addresses_never_change() -> None:
    model = make_layers(LAYERS)
    stream_except(model, ())
    before = [p.data_ptr() for p in model.parameters()]
    outputs(model)
    assert [p.data_ptr() for p in model.parameters()] == before


def test_state_dict_has_the_weights(tmp_path: Path) -> None:
    plain, model = make_layers(LAYERS), make_layers(LAYERS)
    stream_except(model, (1,))
    outputs(model)
    found, wanted = model.state_dict(), plain.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    model.save_pretrained(tmp_path)
    saved = type(model).from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(saved[name], wanted[name]) for name in wanted)


class Marked(nn.Module):
    """Has state beside tensors."""

    def get_extra_state(self) -> str:
        return "a mark"


def test_state_dict_has_what_is_no_tensor() -> None:
    model = make_layers(LAYERS)
    model.model.layers[0].mlp.mark = Marked()
    stream_except(model, (1,))
    assert model.state_dict()["model.layers.0.mlp.mark._extra_state"] == "a mark"


def test_what_needs_the_weights_in_place_is_refused() -> None:
    model = make_layers(LAYERS)
    stream_except(model, ())
    with pytest.raises(StreamingError, match="load_state_dict"):
        model.load_state_dict(make_layers(LAYERS).state_dict())
    with pytest.raises(StreamingError, match="copied or pickled"):
        copy.deepcopy(model)
    with pytest.raises(StreamingError, match="copied or pickled"):
        pickle.dumps(model)
    with pytest.raises(StreamingError, match="has hooks"):
        stream_layers(model, FULL_STREAM)
    logits = model(input_ids=IDS).logits  # as somebody calls it who does not think of gradients
    with pytest.raises(StreamingError, match="Gradients cannot pass"):
        logits.sum().backward()
    model.half()
    with pytest.raises(StreamingError, match="has been replaced"):
        model(input_ids=IDS)


@pytest.mark.daily
@pytest.mark.parametrize("device", ["meta", "nothing", 7])
def test_a_device_that_does_not_compute_is_refused(device: Any, expected: list[torch.Tensor]) -> None:
    model = make_layers(LAYERS)
    with pytest.raises(ValueError, match="`device` must be one that PyTorch can use here"):
        stream_layers(model, FULL_STREAM, device=device)
    assert all_equal(outputs(model), expected)


def test_an_adapter_is_loaded_into_streamed_layers(tmp_path: Path) -> None:
    """A state_dict without their own weights."""
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = get_peft_model(make_layers(LAYERS), config)
    adapted.save_pretrained(str(tmp_path))
    expected = adapted(input_ids=IDS).logits
    model = make_layers(LAYERS)
    stream_except(model, (1,))
    loaded = PeftModel.from_pretrained(model, tmp_path)
    assert torch.equal(loaded(input_ids=IDS).logits, expected)
    with pytest.raises(StreamingError, match=r"got .*q_proj\.base_layer\.weight"):
        loaded.load_state_dict(adapted.state_dict())


def test_gradients_through_weights_that_are_gone_are_refused(tmp_path: Path) -> None:
    """Files are read past PyTorch, which would not notice by itself."""
    model = make_layers(LAYERS)
    stream_layers(model, replace(FULL_STREAM, disk_folder=str(tmp_path)), device="cpu")
    embeds = model.get_input_embeddings()(IDS).detach().requires_grad_()
    logits = model(inputs_embeds=embeds, use_cache=False).logits
    with pytest.raises(StreamingError, match="Gradients cannot pass"):
        logits.sum().backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_layers_are_not_computed_again_in_a_backward(expected: list[torch.Tensor], use_reentrant: bool) -> None:
    model = make_layers(LAYERS)
    stream_except(model, ())
    model.train().gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    embeds = model.get_input_embeddings()(IDS).detach().requires_grad_()
    with pytest.raises(StreamingError, match="Gradients cannot pass"):
        model(inputs_embeds=embeds, use_cache=False).logits.sum().backward()
    assert all_equal(outputs(model.eval()), expected)


def test_a_damaged_file_when_streaming_stops(expected: list[torch.Tensor], tmp_path: Path) -> None:
    model = make_layers(LAYERS)
    stream_layers(model, replace(FULL_STREAM, disk_folder=str(tmp_path)), device="cpu")
    path = sorted(tmp_path.glob("layer-*.bin"))[2]
    before, content = path.stat(), path.read_bytes()
    path.write_bytes(content[:100])
    with pytest.raises(OSError, match=path.name):
        stop_streaming(model)
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert all_equal(outputs(model), expected)
    stop_streaming(model)
    assert streaming_stats(model) is None
    assert all_equal(outputs(model), expected)


def test_a_full_disk_leaves_the_model_as_it_was(
    expected: list[torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, written = make_layers(LAYERS), []

    def write(*args: Any) -> Any:
        written.append(args)
        if len(written) > 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return replace_file(*args)

    replace_file = disk._replace
    monkeypatch.setattr(disk, "_replace", write)
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            stream_layers(model, replace(FULL_STREAM, disk_folder=str(tmp_path)), device="cpu")
        assert all_equal(outputs(model), expected)


def test_layers_that_are_the_same() -> None:
    model = make_layers(4)
    first, *others = model.model.layers
    model.model.layers = nn.ModuleList([first, *others, first])
    model.config.num_hidden_layers = 5
    with torch.no_grad():
        wanted = model(input_ids=IDS, use_cache=False).logits
        with use_backend(PoisoningBackend):
            stream_layers(model, FULL_STREAM, device="cpu")
        stats = streaming_stats(model)
        assert stats is not None
        for _ in range(2):
            assert torch.equal(model(input_ids=IDS, use_cache=False).logits, wanted)


def test_hooks_of_others_stay(expected: list[torch.Tensor]) -> None:
    class Counting(ModelHook):
        calls, taken_off = 0, False

        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return args, kwargs

        def detach_hook(self, module: Any) -> Any:
            self.taken_off = True
            return module

    model, counting, elsewhere = make_layers(LAYERS), Counting(), Counting()
    stream_except(model, ())
    add_hook_to_module(model.lm_head, elsewhere)
    add_hook_to_module(model.model.layers[2], counting, append=True)
    assert all_equal(outputs(model), expected)
    assert counting.calls == 2
    stop_streaming(model)
    assert all_equal(outputs(model), expected)
    assert counting.calls == elsewhere.calls == 4
    assert not elsewhere.taken_off
    assert not any(isinstance(getattr(m, "_hf_hook", None), LayerStreamingHook) for m in model.modules())


def test_a_graph_is_refused_before_anything_is_sent(
    monkeypatch: pytest.MonkeyPatch, expected: list[torch.Tensor]
) -> None:
    model = make_layers(LAYERS)
    stream_except(model, ())
    with monkeypatch.context() as patch:
        for name in ("is_initialized", "is_current_stream_capturing"):
            patch.setattr(torch.cuda, name, lambda: True)
        with pytest.raises(StreamingError, match="cannot capture streamed layers"):
            outputs(model)
    stats = streaming_stats(model)
    assert stats is not None
    assert stats.bytes_copied == 0
    assert all_equal(outputs(model), expected)


def test_a_layer_that_shares_all_its_tensors_with_another() -> None:
    model = make_layers(LAYERS)
    layers = model.model.layers
    for mine, other in zip(layers[1].modules(), layers[0].modules(), strict=True):
        mine._parameters.update(other._parameters)
    expected = outputs(model)
    with use_backend(PoisoningBackend):
        stream_layers(model, FULL_STREAM, device="cpu")
    assert not any(hasattr(layer, "_hf_hook") for layer in layers[:2])
    assert all_equal(outputs(model), expected)
    stats = streaming_stats(model)
    assert stats is not None
    assert stats.layer_calls == 2 * (LAYERS - 2)


def test_the_fingerprint_of_the_weights_is_the_same_wherever_they_wait() -> None:
    """Also in another process, and when accelerate has taken the hooks off."""
    model = make_layers(LAYERS)
    expected = ModelFingerprint().durable(model, full=True)
    assert isinstance(expected, bytes)
    stream_except(model, (1,))
    outputs(model)
    assert ModelFingerprint().durable(model, full=True) == expected
    stop_streaming(model)
    assert ModelFingerprint().durable(model, full=True) == expected
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight.view(torch.int32)[-1, -1] ^= 1
    assert ModelFingerprint().durable(model, full=True) != expected


def test_detached_in_part_and_by_accelerate(expected: list[torch.Tensor]) -> None:
    model = make_layers(LAYERS)
    stream_except(model, ())
    outputs(model)
    remove_hook_from_submodules(model.model.layers[1])
    for _ in range(2):
        assert all_equal(outputs(model), expected)
    remove_hook_from_submodules(model)
    assert streaming_stats(model) is None
    assert all_equal(outputs(model), expected)


def test_inference_mode(expected: list[torch.Tensor]) -> None:
    model = make_layers(LAYERS)
    with torch.inference_mode():
        stream_except(model, ())
        assert all_equal(outputs(model), expected)
    assert all_equal(outputs(model), expected)
    with torch.inference_mode():
        assert all_equal(outputs(model), expected)


@pytest.mark.slow
def test_compiled_forward() -> None:
    plain, model = make_layers(2), make_layers(2)
    stream_except(model, (), n_slots=2)
    compiled = torch.compile(model.forward, backend="eager")
    with torch.no_grad():
        wanted = plain(input_ids=IDS, use_cache=False).logits
        for _ in range(2):
            assert torch.equal(compiled(input_ids=IDS, use_cache=False).logits, wanted)


def test_nothing_is_left_behind() -> None:
    model = make_layers(LAYERS)
    stream_except(model, ())
    outputs(model)
    layer = model.model.layers[0]
    alive = weakref.ref(layer)
    del model, layer
    gc.collect()
    assert alive() is None


def test_from_pretrained() -> None:
    config = with_streaming(EMBEDDED_MODEL_DIR, StreamingConfig(keep_first_k=1))
    with use_backend(PoisoningBackend):
        model = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL_DIR, config=config)
    stats = streaming_stats(model)
    assert stats is not None
    plain = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL_DIR)
    told: dict[str, Any] = {**as_inputs(IDS), "max_new_tokens": 8}
    assert torch.equal(model.generate(**told), plain.generate(**told))
    assert not getattr(model, "is_quantized", False)
    assert not hasattr(model.config, "quantization_config")


def test_one_memory() -> None:
    """On a CPU there is nothing to bring: the weights stay, and the model computes with them."""
    model = load_streamed(EMBEDDED_MODEL_DIR, StreamingConfig(keep_first_k=1), device="cpu")
    assert streaming_stats(model) is None
    plain = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL_DIR)
    assert torch.equal(model(input_ids=IDS).logits, plain(input_ids=IDS).logits)


@pytest.mark.daily
@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_in_host_memory(tied: bool) -> None:
    """They leave the device where layers do, unless they are also the head."""
    plain = make_layers(LAYERS)
    plain.config.tie_word_embeddings = tied
    if tied:
        plain.lm_head.weight = plain.model.embed_tokens.weight
    wanted, before = outputs(plain), plain.model.embed_tokens.weight
    with use_backend(PoisoningBackend):
        stream_layers(plain, FULL_STREAM, device="cpu")
    plan = streaming_plan(plain)
    assert plan is not None
    assert plan.host_embeddings is not tied
    assert (plain.model.embed_tokens.weight is before) is tied
    assert plan.sizes.embedding_bytes == (0 if tied else before.nbytes)
    assert all_equal(outputs(plain), wanted)


def test_embeddings_that_cannot_be_mapped_stay(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(flat: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not pinned")

    monkeypatch.setattr("kvboost_hf.offload.build.make_mapping", lambda device: refuse)
    model = make_layers(LAYERS)
    with use_backend(PoisoningBackend):
        stream_layers(model, FULL_STREAM, device="cpu")
    assert "stay on cpu: not pinned" in caplog.text
    plan = streaming_plan(model)
    assert plan is not None
    assert (plan.host_embeddings, plan.sizes.embedding_bytes) == (False, 0)  # counted with what is on the device
    assert "stay on cpu: not pinned" in str(plan)
    assert all_equal(outputs(model), outputs(make_layers(LAYERS)))


def test_damage_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K/V is checked before the forward, not beside it: what is damaged takes a forward of its own."""
    monkeypatch.setattr("kvboost_hf.cache.forward.prompt_plan._MIN_BYTES", 0)
    model = make_layers(LAYERS)
    stream_except(model, ())
    told: dict[str, Any] = {**as_inputs(IDS), "max_new_tokens": 4}
    wanted = model.generate(**told)
    for damaged in (False, True):
        with closing(ChunkStore(model, chunk_size=16, tiers=["ram:1GB", f"disk:{tmp_path}:1GB"])) as store:
            cache = ChunkReuseCache(model, store)
            assert torch.equal(model.generate(**told, past_key_values=cache), wanted)
            assert cache.report.reused_tokens <= (16 if damaged else 0)
        blobs = sorted(tmp_path.rglob("*.safetensors"), key=lambda path: path.stat().st_size)
        assert blobs
        for blob in blobs:
            content = bytearray(blob.read_bytes())
            content[-9] ^= 1
            blob.write_bytes(content)


@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("how", ["merged", "in place", "merged, and streamed no more"])
@pytest.mark.parametrize("from_files", [False, True])
def test_weights_that_are_written_to_in_place_are_refused(
    ran: bool, how: str, from_files: bool, tmp_path: Path
) -> None:
    """They would be lost, or count for other layers that use the same slot. Later forwards have the weights again."""
    model = make_layers(LAYERS)
    if from_files:
        stream_layers(model, replace(FULL_STREAM, disk_folder=str(tmp_path)), device="cpu")
    else:
        stream_except(model, (), make=lambda: ThreadedBackend(torch.device("cpu")))
    expected = outputs(model) if ran else outputs(make_layers(LAYERS))
    time.sleep(0.1 * ran)  # what comes next has been read
    if how == "in place":
        with torch.no_grad():
            model.model.layers[2].mlp.up_proj.weight.mul_(1.5)
    else:
        config = LoraConfig(r=2, target_modules=["down_proj"], init_lora_weights=False)
        adapted = get_peft_model(model, config)
        adapted.merge_adapter()
    with pytest.raises(StreamingError, match=r"written to in place.*stop_streaming\(model\) before such changes"):
        stop_streaming(model) if how.endswith("no more") else model(input_ids=IDS)
    if how != "in place":
        adapted.unload()
    assert all_equal(outputs(model), expected)
    stop_streaming(model)
    assert all_equal(outputs(model), expected)
