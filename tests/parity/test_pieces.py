"""Hits that stay where they are: plain generate() over pieces of a store, which are not copied."""

import copy
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, ReusePolicy
from tests.architectures.models import make_architecture
from tests.conftest import as_inputs, counted, left_pad, make_model, random_ids
from tests.internals.attention import kernel_calls, use_tier
from tests.internals.cache import PiecedLayer, layers
from tests.internals.compat import probe_reason
from tests.internals.top import handles


@pytest.fixture
def read_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are handed out without Triton, too, whose interpreter takes its time; plain operations read them."""
    monkeypatch.setitem(handles._readers, "a test", lambda kind, device: True)


def model_of(name: str) -> PreTrainedModel:
    model = make_model(name)
    model.set_attn_implementation("kvboost_fa2")
    return model


def warmed(model: PreTrainedModel, *prompts: torch.Tensor) -> ChunkStore:
    store = ChunkStore(model, chunk_size=16)
    for prompt in prompts:
        store.warm(prompt)
    return store


def generate(model: PreTrainedModel, inputs: dict[str, torch.Tensor], **kwargs: Any) -> torch.Tensor:
    torch.manual_seed(0)
    found: torch.Tensor = model.generate(**inputs, **{"max_new_tokens": 6, "do_sample": False, **kwargs})
    return found


def pieced(cache: ChunkReuseCache) -> list[PiecedLayer]:
    return [layer for layer in cache.layers if isinstance(layer, PiecedLayer) and layer._rows]


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_tokens_work_and_memory(name: str) -> None:
    model = model_of(name)
    prompt = random_ids(37, 1)
    store = warmed(model, prompt[:, :32])
    plain = generate(model, as_inputs(prompt), max_new_tokens=3)
    assert probe_reason(model) is None  # found out once, and not counted
    before = kernel_calls()
    with counted(model) as work, use_tier("triton"):
        cache = ChunkReuseCache(model, store)
        found = generate(model, as_inputs(prompt), past_key_values=cache, max_new_tokens=3)
    calls = kernel_calls() - before
    assert torch.equal(found, plain)
    assert work.tokens == 5 + 2
    layers = pieced(cache)
    assert len(layers) == sum(isinstance(layer, PiecedLayer) for layer in cache.layers) > 0
    assert calls["triton.attend_pieces"] == 3 * len(layers)
    chunks = {plane.data_ptr() for stored in store.inspect().chunks.values() for plane in stored.kv.tensors}
    for layer in layers:
        assert layer._table is not None
        assert layer._tensors[0].first == 32, "the buffer begins behind the hit"
        assert {each.untyped_storage().data_ptr() for each in layer._table.keys} <= chunks, "the hit was copied"


@pytest.mark.usefixtures("read_anywhere")
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt_oss"])
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"num_beams": 3},
        {"do_sample": True, "num_return_sequences": 3},
        {"prompt_lookup_num_tokens": 3},
        {"prefill_chunk_size": 20},
    ],
    ids=lambda how: "-".join(how) or "greedy",
)
def test_in_every_way_of_generating(name: str, how: dict[str, Any]) -> None:
    model = model_of(name)
    prompt = random_ids(70, 1)
    store = warmed(model, prompt[:, :64])
    plain = generate(model, as_inputs(prompt), max_new_tokens=30, **how)
    cache = ChunkReuseCache(model, store)
    assert torch.equal(generate(model, as_inputs(prompt), past_key_values=cache, max_new_tokens=30, **how), plain)
    assert cache.report.exact_tokens
    assert pieced(cache)


@pytest.mark.usefixtures("read_anywhere")
@pytest.mark.parametrize("attention", ["sdpa", "kvboost_fa2"])
def test_chunks_that_the_same_rows_have_are_joined(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where each piece costs the host more than the device."""
    monkeypatch.setattr(layers, "JOINED_ON", ("cpu",))
    model = make_model("llama")
    model.set_attn_implementation(attention)
    shared, ends = random_ids(80, 1), [random_ids(48, seed) for seed in (2, 3)]
    prompts = [torch.cat([shared, end, random_ids(5, 9)], dim=1) for end in ends]
    store = warmed(model, *prompts)
    for rows, new, pieces in ((prompts, 5, 3), (prompts[:1], 5, 0), ([prompts[0][:, :100]], 4, 0)):
        inputs = left_pad(*rows)
        cache = ChunkReuseCache(model, store)
        with counted(model) as work:
            found = generate(model, inputs, past_key_values=cache)
        assert torch.equal(found, generate(model, inputs))
        assert work.tokens == len(rows) * (new + 5)
        assert all(len(layer._table.keys) == pieces for layer in pieced(cache) if layer._table is not None)
        assert bool(pieced(cache)) == (attention == "kvboost_fa2" and len(rows) > 1)


@pytest.mark.usefixtures("read_anywhere")
def test_rows_with_different_pieces() -> None:
    model = model_of("llama")
    first, second = random_ids(80, 1), random_ids(80, 2)
    store = warmed(model, first, second)
    inputs = left_pad(first, second[:, :71], torch.cat([first[:, :40], random_ids(33, 3)], dim=1))
    cache = ChunkReuseCache(model, store)
    found = generate(model, inputs, past_key_values=cache, max_new_tokens=20)
    assert torch.equal(found, generate(model, inputs, max_new_tokens=20))
    assert pieced(cache)
    again = generate(model, inputs, past_key_values=cache, max_new_tokens=20, num_beams=2)
    assert torch.equal(again, generate(model, inputs, max_new_tokens=20, num_beams=2))


@pytest.mark.usefixtures("read_anywhere")
def test_a_conversation_goes_back_into_the_pieces_and_on() -> None:
    model = model_of("llama")
    text = random_ids(200, 1)
    store = warmed(model, text[:, :96])
    cache = ChunkReuseCache(model, store)
    for stop in (100, 150, 50, 30, 131, 97, 200, 1):
        with counted(model) as work:
            found = generate(model, as_inputs(text[:, :stop]), past_key_values=cache)
        assert torch.equal(found, generate(model, as_inputs(text[:, :stop]))), stop
        assert stop in (1, 30, 50, 100) or work.tokens <= 60 + 5
    other = ChunkReuseCache(model, store)
    assert torch.equal(generate(model, as_inputs(text), past_key_values=other), generate(model, as_inputs(text)))
    assert other.report.exact_tokens >= 192, "what was computed behind pieces was not stored whole"


@pytest.mark.usefixtures("read_anywhere")
def test_a_fork_goes_its_own_way() -> None:
    model = model_of("llama")
    text = random_ids(80, 1)
    cache = ChunkReuseCache(model, warmed(model, text[:, :64]))
    generate(model, as_inputs(text), past_key_values=cache)
    twin = cache.fork()
    longer = torch.cat([text, random_ids(20, 2)], dim=1)
    for each, ids in ((cache, text[:, :60]), (twin, longer), (cache, longer)):
        assert torch.equal(generate(model, as_inputs(ids), past_key_values=each), generate(model, as_inputs(ids)))


@pytest.mark.usefixtures("read_anywhere")
@pytest.mark.parametrize("first", [0, 1])
def test_a_row_that_is_all_padding_so_far(first: int) -> None:
    model = model_of("llama")
    rows = random_ids(12, 1), random_ids(100, 2)
    inputs = left_pad(rows[first], rows[1 - first])
    cache = ChunkReuseCache(model, warmed(model, *rows))
    found = generate(model, inputs, past_key_values=cache, prefill_chunk_size=40)
    assert torch.equal(found, generate(model, inputs))
    assert pieced(cache)


@pytest.mark.usefixtures("read_anywhere")
@pytest.mark.parametrize("length", [30, 3])
def test_a_crop_into_padding(length: int) -> None:
    model = model_of("llama")
    rows = random_ids(40, 1), random_ids(80, 2)
    inputs = {name: torch.nn.functional.pad(each, (5, 0)) for name, each in left_pad(*rows).items()}
    cache = ChunkReuseCache(model, warmed(model, *rows))
    found = generate(model, inputs, past_key_values=cache)
    assert pieced(cache)
    cache.crop(length - cache.get_seq_length())
    assert cache.get_seq_length() == length
    assert torch.equal(generate(model, inputs, past_key_values=cache), found)


@pytest.mark.usefixtures("read_anywhere")
def test_keys_and_values_stay_what_they_were_when_they_were_read() -> None:
    model = model_of("llama")
    text = random_ids(80, 1)
    cache = ChunkReuseCache(model, warmed(model, text[:, :64]))
    generate(model, as_inputs(text), past_key_values=cache)
    twin, layer = cache.fork(), pieced(cache)[0]
    assert layer._held is not None
    held = layer._held[0]
    copied, keys = copy.deepcopy(layer), layer.keys
    assert keys is not None
    assert type(keys) is torch.Tensor  # whoever asks may do anything with them
    truth = keys.clone()
    cache.reset()
    assert pieced(twin)
    for found in (twin.layers[0].keys, held, keys, copied.keys):
        assert found is not None
        assert torch.equal(found.clone(), truth)


@pytest.mark.usefixtures("read_anywhere")
def test_a_model_that_cannot_read_pieces_is_given_tensors_from_then_on() -> None:
    model = make_architecture("emu3")  # adds its masks to the logits
    model.set_attn_implementation("kvboost_fa2")
    prompt = random_ids(70, 1)
    cache = ChunkReuseCache(model, warmed(model, prompt[:, :64]))
    assert torch.equal(generate(model, as_inputs(prompt), past_key_values=cache), generate(model, as_inputs(prompt)))
    assert cache.report.exact_tokens == 64
    assert not pieced(cache)


@pytest.mark.usefixtures("read_anywhere")
def test_another_attention_is_given_tensors() -> None:
    model = model_of("llama")
    text = random_ids(80, 1)
    cache = ChunkReuseCache(model, warmed(model, text[:, :64]))
    generate(model, as_inputs(text), past_key_values=cache)
    held_before = pieced(cache)[0]._held
    assert held_before is not None
    held = held_before[0].clone()
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        found = model(random_ids(1, 4), past_key_values=cache).logits
    assert not pieced(cache)
    torch.testing.assert_close(cache.layers[0].keys[:, :, : held.shape[2]], held)
    plain = model(torch.cat([generate(model, as_inputs(text))[:, :-1], random_ids(1, 4)], dim=1)).logits[:, -1:]
    torch.testing.assert_close(found, plain, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("read_anywhere")
def test_moved_chunks_are_put_in_place() -> None:
    model = model_of("llama")
    parts = [random_ids(48, seed) for seed in range(3)]
    store = warmed(model, torch.cat(parts, dim=1))
    moved = as_inputs(torch.cat([parts[0], parts[2], parts[1], random_ids(20, 9)], dim=1))
    policy = ReusePolicy(mode="blend", repair="first_k", recompute_ratio=1.0, min_prefill_saving=0)
    cache = ChunkReuseCache(model, store, policy)
    assert torch.equal(generate(model, moved, past_key_values=cache), generate(model, moved))
    assert cache.report.moved_tokens


@pytest.mark.slow
@pytest.mark.usefixtures("read_anywhere")
def test_a_compiled_model_reads_pieces() -> None:
    model, text, more = model_of("llama"), random_ids(70, 1), random_ids(1, 2)
    del model.model.layers[1]  # tracing takes seconds for each
    model.config.num_hidden_layers = 1
    plain = model(torch.cat([text, more], dim=1)).logits[:, -1:]
    store, compiled = ChunkStore(model, chunk_size=16), torch.compile(model, backend="eager")
    with torch.no_grad():
        for hit in (0, 64):
            cache = ChunkReuseCache(model, store)
            compiled(text, past_key_values=cache, logits_to_keep=1)
            logits = compiled(more, past_key_values=cache).logits
            torch.testing.assert_close(logits, plain, rtol=1e-4, atol=1e-4)
            assert [layer._tensors[0].first for layer in pieced(cache)] == ([hit] if hit else [])
    torch._dynamo.reset()


def test_on_a_cpu_hits_are_copied_once_and_read_at_once() -> None:
    model = model_of("llama")
    prompt = random_ids(70, 1)
    cache = ChunkReuseCache(model, warmed(model, prompt[:, :64]))
    assert torch.equal(generate(model, as_inputs(prompt), past_key_values=cache), generate(model, as_inputs(prompt)))
    assert not pieced(cache)
