"""Layers that keep less than all K/V: sliding windows, and the states of linear attention."""

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from kvboost_hf import (
    ChunkReuseCache,
    ChunkStore,
    InterruptedForwardError,
    ReusePolicy,
    attach,
    check_model_compatibility,
    detach,
)
from tests.architectures.models import make_architecture
from tests.architectures.sizes import SIZES
from tests.conftest import STATEFUL, WINDOWED, as_inputs, counted, left_pad, make_model, random_ids
from tests.internals.cache import SlidingLayer, TokenLog, bytes_per_column
from tests.internals.compat import CACHE, cache_argument, steps_reason

NEW = 8
CHUNK = 32
BASE, OTHER = random_ids(300, seed=1), random_ids(300, seed=2)


def join(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts, dim=1)


def generate(model: PreTrainedModel, inputs: dict[str, torch.Tensor], **kwargs: Any) -> Any:
    return model.generate(
        **inputs, max_new_tokens=NEW, do_sample=False, output_logits=True, return_dict_in_generate=True, **kwargs
    )


def check(model: PreTrainedModel, cache: ChunkReuseCache, inputs: dict[str, torch.Tensor], **mode: Any) -> int:
    """Parity with plain generate(); returns prompt tokens that were really forwarded, padding included."""
    plain = generate(model, inputs, **mode)
    with counted(model) as work:
        reused = generate(model, inputs, past_key_values=cache, **mode)
    assert torch.equal(plain.sequences, reused.sequences)
    for expected, found in zip(plain.logits, reused.logits, strict=True):
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
    assert cache.report.bypass_reason is None
    return work.tokens - len(inputs["input_ids"]) * (NEW - 1)


@pytest.fixture(params=[*WINDOWED, *STATEFUL])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    made = make_model(request.param)
    check_model_compatibility(made)
    return made


@pytest.mark.parametrize(
    ("name", "dtype", "reason"),
    [
        *[(name, torch.bfloat16, "other states than in one") for name in ("mamba", "falcon_mamba", "jamba", "zamba")],
        ("zamba", torch.float32, "other states than in one"),
        ("recurrent_gemma", torch.bfloat16, "it keeps its states elsewhere than in its cache"),
    ],
)
def test_states_that_are_lost_are_not_reused(
    name: str, dtype: torch.dtype, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in ("initializer_range", "initializer_factor"):  # logits of eight tokens hardly depend on the first four
        monkeypatch.setitem(SIZES, each, 0.02)
    model = make_architecture(name)
    torch.nn.Module.to(model, dtype)
    cache, inputs = ChunkReuseCache(model, ChunkStore(model, chunk_size=CHUNK)), as_inputs(BASE % 200)
    for mode in ({}, {"num_beams": 2}):
        plain = generate(model, inputs, **mode)
        reused = generate(model, inputs, past_key_values=cache, **mode)
        assert reason in str(cache.report.bypass_reason)
        assert torch.equal(plain.sequences, reused.sequences)
        assert all(torch.equal(one, other) for one, other in zip(plain.logits, reused.logits, strict=True))


def test_prompts_that_grow_shrink_repeat_and_part(model: PreTrainedModel) -> None:
    store = ChunkStore(model, chunk_size=CHUNK)
    cache = ChunkReuseCache(model, store)
    stateful = any(layer.is_stateful for layer in cache._live.layers)
    # A state can be gone on from at the last chunk border of an earlier prompt, and where earlier prompts parted.
    for ids, most in [
        (BASE[:, :200], 200),
        (join(BASE[:, :200], OTHER[:, :20]), 20 + 8 + (200 - 192 if stateful else 0)),
        (BASE[:, :200], 8 if stateful else 1),
        (BASE[:, :1], 1),
        (OTHER[:, :150], 150),
        (join(BASE[:, :150], OTHER[:, :100]), 250 if stateful else 100),  # parts where no state was kept
        (join(BASE[:, :150], OTHER[:, 100:200]), 100),  # but now it is
        (join(BASE[:, :200], OTHER[:, :40]), 48 if stateful else 40),
    ]:
        assert check(model, cache, as_inputs(ids)) <= most
    for ids in (BASE[:, :200], join(BASE[:, :150], OTHER[:, 100:200])):  # and through the store alone
        assert check(model, ChunkReuseCache(model, store), as_inputs(ids)) <= CHUNK


@pytest.mark.parametrize("mode", [{"num_beams": 3}, {"prefill_chunk_size": 50}, {"num_return_sequences": 2}])
def test_modes(model: PreTrainedModel, mode: dict[str, Any]) -> None:
    if "num_return_sequences" in mode:
        mode = {**mode, "num_beams": 2}
    store = ChunkStore(model, chunk_size=CHUNK)
    cache = ChunkReuseCache(model, store)
    for ids, least in (BASE[:, :120], 0), (join(BASE[:, :120], OTHER[:, :30]), 90), (BASE[:, :120], 90):
        plain = generate(model, as_inputs(ids), **mode)
        reused = generate(model, as_inputs(ids), past_key_values=cache, **mode)
        assert torch.equal(plain.sequences, reused.sequences)
        if "prefill_chunk_size" in mode:  # each piece goes on from a state of its own
            least = min(least, 60)
        assert cache.report.reused_tokens >= least


@pytest.mark.parametrize("name", [*STATEFUL, "olmo_hybrid", "lfm2"])
@pytest.mark.parametrize(("lengths", "piece"), [((2, 17, 29), 24), ((33, 40, 7), 16)])
def test_rows_that_begin_in_a_later_piece(name: str, lengths: tuple[int, ...], piece: int) -> None:
    """Beside rows whose states are in the store, and rows that earlier pieces have left in the layers."""
    model = make_architecture(name)
    check_model_compatibility(model)
    store = ChunkStore(model, chunk_size=16)
    known = next(length for length in lengths if length % 16 == 1 and length > 1)
    policy = ReusePolicy(min_prefill_saving=0)
    generate(model, as_inputs(BASE[:, :known]), past_key_values=ChunkReuseCache(model, store, policy))
    rows = [BASE[:, :n] if n == known else OTHER[:, i : i + n] for i, n in enumerate(lengths)]
    inputs, told = left_pad(*rows), {"prefill_chunk_size": piece}
    cache = ChunkReuseCache(model, store, policy)
    plain, found = generate(model, inputs, **told), generate(model, inputs, past_key_values=cache, **told)
    assert torch.equal(plain.sequences, found.sequences)
    for right, other in zip(plain.logits, found.logits, strict=True):
        scale = right.std()  # states that are computed in parts are off by 2e-4 of it in transformers, too
        torch.testing.assert_close(other / scale, right / scale, atol=1e-3, rtol=1e-3)
    assert cache.report.reused_tokens > 0
    assert store.check_integrity().wrong == 0


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize("kwargs", [{"prompt_lookup_num_tokens": 4}, {"assistant_model": True}])
def test_candidates_over_a_window(name: str, kwargs: dict[str, Any]) -> None:
    model = make_model(name)
    if "assistant_model" in kwargs:
        assistant = make_model("llama", seed=7)
        assistant.generation_config.num_assistant_tokens = 5
        assistant.generation_config.assistant_confidence_threshold = 0.0
        kwargs = {"assistant_model": assistant}
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=CHUNK))
    for ids in (join(BASE[:, :80], BASE[:, :80]), join(BASE[:, :80], BASE[:, :80], OTHER[:, :9]), BASE[:, :100]):
        expected = model.generate(**as_inputs(ids), max_new_tokens=30)
        found = model.generate(**as_inputs(ids), max_new_tokens=30, past_key_values=cache, **kwargs)
        assert torch.equal(found, expected)
    assert cache.report.reused_tokens >= 80


def test_batches_with_a_cold_row(model: PreTrainedModel) -> None:
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=CHUNK))
    check(model, cache, as_inputs(BASE[:, :260]))
    check(model, ChunkReuseCache(model, cache.store), as_inputs(BASE[:, :265]))
    check(model, cache, left_pad(BASE[:, :265], OTHER[:, :200]))
    assert cache.report.reused_tokens >= 256
    assert cache.report.forwarded_tokens <= 200 + 9
    check(model, cache, left_pad(OTHER[:, :220], BASE[:, :259], BASE[:, 100:130]))


def test_chat(model: PreTrainedModel) -> None:
    """Ids that continue what is held cost nothing but themselves."""
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=CHUNK))
    history, seen = random_ids(54, seed=20), 0
    for turn in range(5):
        history = join(history, random_ids(30, seed=30 + turn))
        plain = model.generate(**as_inputs(history), max_new_tokens=20)
        with counted(model) as work:
            reused = model.generate(**as_inputs(history), max_new_tokens=20, past_key_values=cache)
        assert torch.equal(plain, reused)
        assert work.tokens == history.shape[1] - seen + reused.shape[1] - history.shape[1] - 1
        history, seen = reused, reused.shape[1] - 1


def test_two_conversations_take_turns(model: PreTrainedModel) -> None:
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=CHUNK))
    talks = [random_ids(100, seed=40), random_ids(100, seed=41)]
    for _ in range(3):
        for i in range(2):
            talks[i] = join(talks[i], random_ids(20, seed=50 + i))
            with counted(model) as work:
                found = model.generate(
                    **as_inputs(talks[i]), max_new_tokens=20, min_new_tokens=20, past_key_values=cache
                )
            assert torch.equal(found, model.generate(**as_inputs(talks[i]), max_new_tokens=20, min_new_tokens=20))
            talks[i] = found
    assert work.tokens <= 20 + 1 + 19 + 8  # what the cache let go of is in the store, to the last 8 tokens


def test_warm_and_attach(model: PreTrainedModel) -> None:
    store = ChunkStore(model, chunk_size=CHUNK)
    store.warm(BASE[:, :205])
    assert store.stats()["pinned_chunks"] >= 7
    attach(model, store)
    ids = join(BASE[:, :205], OTHER[:, :10])
    with counted(model) as work:
        found = model.generate(**as_inputs(ids), max_new_tokens=NEW)
    detach(model)
    assert torch.equal(found, model.generate(**as_inputs(ids), max_new_tokens=NEW))
    assert work.tokens == 10 + NEW - 1


def test_forks_go_their_own_way(model: PreTrainedModel) -> None:
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=CHUNK))
    check(model, cache, as_inputs(BASE[:, :100]))
    for i, twin in enumerate((cache.fork(), copy.deepcopy(cache))):
        held = twin.get_seq_length()
        ids = join(generate(model, as_inputs(BASE[:, :100])).sequences[:, :held], OTHER[:, i : i + 9])
        assert check(model, twin, as_inputs(ids)) == 9
    ids = join(generate(model, as_inputs(BASE[:, :100])).sequences[:, :107], OTHER[:, 20:25])
    assert check(model, cache, as_inputs(ids)) == 5


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_forward_leaves_no_trace(model: PreTrainedModel, error: type[BaseException]) -> None:
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=CHUNK))
    check(model, cache, as_inputs(BASE[:, :80]))

    def fail(*_: Any) -> None:
        raise error

    for layer, ids in [(1, BASE), (0, OTHER[:, :90]), (1, BASE[:, :150])]:
        handle = model.model.layers[layer].register_forward_pre_hook(fail)
        with pytest.raises(error):
            generate(model, as_inputs(ids), past_key_values=cache)
        handle.remove()
        check(model, cache, as_inputs(BASE[:, :150]))


@pytest.mark.parametrize("name", STATEFUL)
def test_states_are_in_the_budget(name: str) -> None:
    model = make_model(name)
    store = ChunkStore(model, chunk_size=CHUNK, max_bytes=150_000)
    cache = ChunkReuseCache(model, store)
    for seed in range(12):
        check(model, cache, as_inputs(random_ids(100, seed=seed)))
        stats = store.stats()
        assert stats["bytes"] <= 150_000
        held = [c.kv.nbytes + c.tokens.nbytes for c in store.inspect().chunks.values()]
        held += [s.states.nbytes + s.tokens.nbytes for s in store.inspect().states.values()]
        assert stats["bytes"] == sum(held)
        assert stats["states"] == len(store.inspect().states)
    assert store.stats()["evictions"] > 0


@pytest.mark.parametrize("name", STATEFUL)
def test_zeroed_states_are_noticed(name: str) -> None:
    """The control: were the stored states not used, the tests above would prove nothing."""
    model = make_model(name)
    store = ChunkStore(model, chunk_size=CHUNK)
    check(model, ChunkReuseCache(model, store), as_inputs(BASE[:, :100]))
    for saved in store.inspect().states.values():
        for layer in saved.states.layers:
            for tensor in layer.tensors if layer is not None else ():
                if tensor is not None:
                    tensor.zero_()
    with pytest.raises(AssertionError):
        check(model, ChunkReuseCache(model, store), as_inputs(BASE[:, :100]))


def test_a_window_lets_go_of_what_has_left_it() -> None:
    model = make_model("mistral")
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=CHUNK))
    long = random_ids(1500, seed=9)
    with counted(model) as work:
        model.generate(**as_inputs(long), max_new_tokens=2, past_key_values=cache)
    assert work.tokens == 1501
    layer = cache._live.layers[0]
    assert isinstance(layer, SlidingLayer)
    assert layer.first > 1000
    assert cache.nbytes < 1500 * bytes_per_column(layer)  # two layers
    # Going back further than the cache remembers: the store has it.
    assert check(model, cache, as_inputs(join(long[:, :700], OTHER[:, :20]))) <= 20 + CHUNK
    assert check(model, cache, as_inputs(long)) <= CHUNK


@torch.no_grad()
def test_stock_sliding_layers_show_the_same() -> None:
    from transformers.cache_utils import DynamicSlidingWindowLayer

    ours, stock = SlidingLayer(8), DynamicSlidingWindowLayer(8)
    for m in (1, 3, 5, 1, 12, 1, 1, 2):
        assert ours.get_mask_sizes(m) == stock.get_mask_sizes(m)
        new = torch.randn(1, 2, m, 4), torch.randn(1, 2, m, 4)
        for found, expected in zip(ours.update(*new), stock.update(*new), strict=True):
            assert torch.equal(found, expected)
        assert torch.equal(ours.keys, stock.keys)
        assert ours.get_seq_length() == stock.get_seq_length()


@pytest.mark.parametrize("part", [300, 500])
def test_a_long_part_goes_on_from_a_window(part: int) -> None:
    """Keys and values must let go of the same columns, although the keys are there first."""
    model = make_model("mistral")
    long = random_ids(1000 + part, seed=9)
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=CHUNK))
    with torch.no_grad():
        model(long[:, :1000], past_key_values=cache, logits_to_keep=1)
        found = model(long[:, 1000:], past_key_values=cache, logits_to_keep=1).logits
        torch.testing.assert_close(found, model(long, logits_to_keep=1).logits, atol=2e-4, rtol=2e-4)


def test_what_follows_a_part_of_a_chunk_is_stored_where_windows_are_shorter_than_chunks() -> None:
    model = make_model("mistral")
    store = ChunkStore(model, chunk_size=CHUNK)
    ids = join(BASE[:, :156], OTHER[:, :200])  # parts 28 tokens after a border, more than the window has
    check(model, ChunkReuseCache(model, store), as_inputs(BASE[:, :200]))
    check(model, ChunkReuseCache(model, store), as_inputs(ids))
    assert check(model, ChunkReuseCache(model, store), as_inputs(ids)) <= CHUNK


@pytest.mark.parametrize("window", [2, 24])
def test_rows_that_begin_far_behind_the_piece_before(window: int) -> None:
    """A row that is computed ahead has nothing in the window of what is held: its window is all padding."""
    model = make_model("mistral")
    model.config.sliding_window = window
    store = ChunkStore(model, chunk_size=CHUNK)
    policy = ReusePolicy(min_prefill_saving=0)
    generate(model, as_inputs(BASE[:, :120]), past_key_values=ChunkReuseCache(model, store, policy))
    inputs = left_pad(OTHER[:, :50], BASE[:, :120], OTHER[:, 100:149])
    plain = generate(model, inputs, prefill_chunk_size=40)
    reused = generate(model, inputs, prefill_chunk_size=40, past_key_values=ChunkReuseCache(model, store, policy))
    assert torch.equal(plain.sequences, reused.sequences)
    for expected, found in zip(plain.logits, reused.logits, strict=True):
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


def test_a_row_with_states_where_an_unseen_row_begins(model: PreTrainedModel) -> None:
    """Both start at column 32, one from a state and one from nothing."""
    store = ChunkStore(model, chunk_size=CHUNK)
    policy = ReusePolicy(min_prefill_saving=0)
    check(model, ChunkReuseCache(model, store, policy), as_inputs(BASE[:, :101]))
    check(model, ChunkReuseCache(model, store, policy), as_inputs(OTHER[:, :40]))
    rows = BASE[:, :101], join(OTHER[:, :32], BASE[:, 200:269]), random_ids(69, seed=3)
    cache = ChunkReuseCache(model, store, policy)
    check(model, cache, left_pad(*rows))
    report = cache.report
    assert report.prompt_tokens == report.reused_tokens + report.forwarded_tokens
    assert report.tier_tokens["ram"] == report.reused_tokens >= 96


def test_the_report_of_rows_that_reach_further_than_their_states() -> None:
    model = make_model("qwen3_next")
    store = ChunkStore(model, chunk_size=CHUNK)
    policy = ReusePolicy(min_prefill_saving=0)
    check(model, ChunkReuseCache(model, store, policy), as_inputs(BASE[:, :150]))
    check(model, ChunkReuseCache(model, store, policy), as_inputs(OTHER[:, :150]))
    cache = ChunkReuseCache(model, store, policy)
    check(model, cache, left_pad(BASE[:, :150], join(OTHER[:, :100], BASE[:, :50])))
    report = cache.report
    assert report.prompt_tokens == report.reused_tokens + report.forwarded_tokens
    assert report.tier_tokens["ram"] == report.reused_tokens


@pytest.mark.parametrize("kwargs", [{"prompt_lookup_num_tokens": 4}, {"assistant_model": True}])
def test_candidates_over_a_window_with_convolutions(kwargs: dict[str, Any]) -> None:
    model = make_architecture("inkling_text")
    if "assistant_model" in kwargs:
        assistant = make_model("llama", seed=7)
        assistant.generation_config.assistant_confidence_threshold = 0.0
        kwargs = {"assistant_model": assistant}
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=CHUNK))
    for ids in (join(BASE[:, :80], BASE[:, :80]), join(BASE[:, :80], BASE[:, :80], OTHER[:, :9]), BASE[:, :100]):
        expected = model.generate(**as_inputs(ids), max_new_tokens=20, do_sample=False)
        found = model.generate(**as_inputs(ids), max_new_tokens=20, do_sample=False, past_key_values=cache, **kwargs)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("architecture", ["mistral", "lfm2"])
def test_recording_ends_with_the_call_that_asked_for_it(architecture: str) -> None:
    model = make_model("mistral") if architecture == "mistral" else make_architecture(architecture)
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=CHUNK))
    generate(model, as_inputs(BASE[:, :100]), past_key_values=cache, prompt_lookup_num_tokens=4)
    nbytes = cache.nbytes
    check(model, cache, as_inputs(join(BASE[:, :100], OTHER)))
    check(model, cache, as_inputs(join(BASE[:, :100], OTHER, OTHER[:, ::2])))
    assert not any(getattr(layer, "record_past", False) for layer in cache.layers)
    assert cache.nbytes < 10 * nbytes
    cache.activate_past_recording()  # what the user asks for stays
    check(model, cache, as_inputs(BASE[:, :120]))
    cache.crop(-3)


def test_a_new_text_is_not_computed_behind_what_was_cropped() -> None:
    """Not even where its first forward cannot compute what was left for the next one."""
    model, rows = make_architecture("lfm2"), left_pad(OTHER, OTHER[:, 3:])
    found: list[int] = []
    for cropped in (0, 0, 3):  # the first time, the model is probed
        cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=CHUNK))
        generate(model, as_inputs(BASE[:, :100]), past_key_values=cache)
        cache.crop(-cropped)
        assert (cache.lag > 0) == (cropped > 0)
        with counted(model) as work:
            generate(model, rows, past_key_values=cache)
        found.append(work.tokens)
    assert found[2] == found[1]


def test_a_window_lets_go_of_what_can_never_be_stored() -> None:
    model = make_model("mistral")
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=CHUNK))
    with torch.no_grad():
        for at in range(1200):
            position = torch.tensor([[at + (at > 3)]])
            model(BASE[:, at % 300, None], position_ids=position, past_key_values=cache, logits_to_keep=1)
    layer = cache._live.layers[0]
    assert layer.first > 500
    assert layer.nbytes < 600 * bytes_per_column(layer)


def test_gradients_flow_through_a_window_that_was_trimmed() -> None:
    model = make_model("mistral")
    found = []
    for cache in (DynamicCache(config=model.config), ChunkReuseCache(model)):
        model.zero_grad()
        with torch.enable_grad():
            model(random_ids(1000, seed=5), past_key_values=cache, logits_to_keep=1)
            model(BASE[:, :10], past_key_values=cache).logits.square().sum().backward()
        gradient = model.get_submodule("model.layers.0.self_attn.k_proj").weight.grad
        assert isinstance(gradient, torch.Tensor)
        found.append(gradient.clone())
    torch.testing.assert_close(found[1], found[0], atol=1e-3, rtol=1e-3)


@pytest.mark.daily
@pytest.mark.parametrize("name", STATEFUL)
def test_rows_moved_in_inference_mode_are_written_outside(name: str) -> None:
    model = make_model(name)
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=CHUNK))
    with torch.inference_mode():
        model(BASE[:, :50], past_key_values=cache, logits_to_keep=1)
        cache.reorder_cache(torch.tensor([0]))  # type: ignore[arg-type]
        cache.batch_select_indices(torch.tensor([0]))
        cache.batch_repeat_interleave(2)
    with torch.no_grad():
        found = model(BASE[:, 50:51].expand(2, -1), past_key_values=cache, logits_to_keep=1).logits
        expected = model(BASE[:, :51], logits_to_keep=1).logits
    torch.testing.assert_close(found, expected.expand_as(found), atol=2e-4, rtol=2e-4)


def test_rows_of_layers_that_cannot_be_taken_apart_are_not_stored() -> None:
    model = make_architecture("deepseek_v4")
    store = ChunkStore(model, chunk_size=CHUNK)
    cache = ChunkReuseCache(model, store)
    with torch.no_grad():
        model(BASE[:, :110], past_key_values=cache, logits_to_keep=1)
    stored = store.stats()["states"]
    cache.batch_repeat_interleave(2)
    cache.reset()
    assert store.stats()["states"] == stored
    check(model, ChunkReuseCache(model, store), as_inputs(BASE[:, :125]))


def test_a_chat_goes_on_from_layers_that_cannot_be_taken_apart() -> None:
    model = make_architecture("deepseek_v4")
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=CHUNK))
    check(model, cache, as_inputs(BASE[:, :110]))
    told = generate(model, as_inputs(BASE[:, :110])).sequences
    assert check(model, cache, as_inputs(join(told, OTHER[:, :30]))) == 31  # the answer's last token, and what is new


@torch.no_grad()
def test_states_of_unknown_tokens_have_a_length() -> None:
    """No layer has columns that could be counted."""
    model = make_architecture("mamba2")
    cache = ChunkReuseCache(model)
    model(BASE[:, :40], cache=cache, logits_to_keep=1)
    model(inputs_embeds=model.get_input_embeddings()(BASE[:, 40:45]), cache=cache)
    assert "no input_ids" in str(cache.report.bypass_reason)
    assert cache.get_seq_length() == 45


@torch.no_grad()
def test_the_state_of_a_convolution_has_the_columns_of_its_kernel() -> None:
    """Also while earlier ones are kept for a rewind."""
    model, states = make_architecture("lfm2"), list[torch.Tensor]()
    for is_recording in (False, True):
        cache = ChunkReuseCache(model)
        model(BASE[:, :40], cache=cache, logits_to_keep=1)
        if is_recording:
            cache.activate_past_recording()
        model(BASE[:, 40:45], cache=cache)
        found = cache.get_conv_state(0)
        assert found is not None
        states.append(found)
    assert states[0].shape[-1] == 3
    assert torch.equal(*states)


def test_bare_forwards_of_a_model_that_must_be_given_positions() -> None:
    model, ids = make_architecture("bamba"), BASE[:, :120]
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=CHUNK))
    with torch.no_grad():
        model(ids[:, :70], cache=cache, logits_to_keep=1)
        parts = [model(part, cache=cache, logits_to_keep=1).logits for part in (ids[:, 70:119], ids[:, 119:])]
        whole = model(ids).logits[:, [118, 119]]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("architecture", ["nemotron_h", "zamba2"])
def test_what_single_steps_leave_is_not_taken_for_a_prompt_s(architecture: str) -> None:
    """In these, single tokens skip the lower limit of the time step that prompts have."""
    model = make_architecture(architecture)
    assert "one by one" in str(steps_reason(model))
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=CHUNK))
    check(model, cache, as_inputs(BASE[:, :110]))
    told = generate(model, as_inputs(BASE[:, :110])).sequences
    assert check(model, cache, as_inputs(join(told, OTHER[:, :30]))) == told.shape[1] + 30 - 110
    assert check(model, ChunkReuseCache(model, cache.store), as_inputs(join(told, OTHER[:, :40]))) <= 50


def test_states_are_looked_up_by_their_first_tokens() -> None:
    model = make_architecture("lfm2")
    store = ChunkStore(model, chunk_size=CHUNK)
    for seed in range(20):
        check(model, ChunkReuseCache(model, store), as_inputs(random_ids(40, seed=seed)))
    (root,) = {saved.parent for saved in store.inspect().states.values()}
    for saved in store.inspect().states.values():
        found = store.view(root, saved.tokens, stateful=True)
        assert saved in found.states_after(root, saved.tokens[:8])
        assert len(list(found.states_after(root, saved.tokens[:8]))) < 3
    assert store.stats()["states"] >= 20


def test_a_cache_that_the_model_calls_cache_params() -> None:
    model = make_architecture("mamba2")
    check_model_compatibility(model)
    name = cache_argument(model)
    assert name == ("cache_params" if CACHE == "past_key_values" else CACHE)
    store = ChunkStore(model, chunk_size=CHUNK)
    cache = ChunkReuseCache(model, store)
    for ids, reuser, most in [
        (BASE[:, :200], cache, 200),
        (join(BASE[:, :200], OTHER[:, :20]), cache, 36),
        (BASE[:, :200], ChunkReuseCache(model, store), 8),
    ]:
        expected = generate(model, as_inputs(ids))
        with counted(model) as work:
            found = generate(model, as_inputs(ids), **{name: reuser})
        assert torch.equal(found.sequences, expected.sequences)
        torch.testing.assert_close(found.logits[0], expected.logits[0], atol=2e-4, rtol=2e-4)
        assert work.tokens - (NEW - 1) <= most
    if CACHE == "past_key_values":  # since transformers 5.24, all names are taken
        with pytest.raises(ValueError, match="past_key_values"):
            generate(model, as_inputs(BASE[:, :20]), past_key_values=cache)


def test_an_interrupt_before_a_forward_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state alone does not tell how many tokens it has seen."""
    model = make_architecture("mamba2")
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=CHUNK))

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with torch.no_grad():
        model(BASE[:, :100], cache_params=cache, use_cache=True, logits_to_keep=1)
        monkeypatch.setattr(TokenLog, "append", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(BASE[:, 100:101], cache_params=cache, use_cache=True, logits_to_keep=1)
    monkeypatch.undo()
    inputs = as_inputs(join(BASE[:, :100], OTHER[:, :20]))
    found, expected = generate(model, inputs, cache_params=cache), generate(model, inputs)
    torch.testing.assert_close(found.logits[0], expected.logits[0], atol=2e-4, rtol=2e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", [*WINDOWED, *STATEFUL])
def test_a_loop_by_hand_that_is_interrupted(name: str) -> None:
    """What can be taken back is; else the cache says so, rather than going on from nothing."""
    model = make_model(name)
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=CHUNK))
    model(BASE[:, :50], past_key_values=cache)

    def fail(*_: Any) -> None:
        raise RuntimeError

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError):
        model(BASE[:, 50:60], past_key_values=cache)
    handle.remove()
    if name in STATEFUL:
        for _ in range(2):
            with pytest.raises(InterruptedForwardError, match="Call reset"):
                model(BASE[:, 50:60], past_key_values=cache)
        cache.reset()
        found = model(BASE[:, :60], past_key_values=cache).logits[:, 50:]
    else:
        found = model(BASE[:, 50:60], past_key_values=cache).logits
    torch.testing.assert_close(found, model(BASE[:, :60]).logits[:, 50:], atol=2e-4, rtol=2e-4)
    check(model, cache, as_inputs(BASE[:, :100]))


def test_states_are_kept_on_the_host() -> None:
    model = make_architecture("deepseek_v4")
    store = ChunkStore(model, chunk_size=CHUNK)
    check(model, ChunkReuseCache(model, store), as_inputs(BASE[:, :100]))
    check(model, ChunkReuseCache(model, store), as_inputs(BASE[:, :110]))
    kept = [layer for saved in store.inspect().states.values() for layer in saved.states.layers if layer is not None]
    assert kept
    assert all(t.device.type == "cpu" and not t.requires_grad for s in kept for t in s.tensors if t is not None)


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "mamba2", "lfm2", "kimi_linear", "nemotron_h", "bamba"])
def test_prompts_go_on_close_to_where_they_part(name: str) -> None:
    """A second prompt with the same head, and one with a token edited, go on from less than 64 tokens before that."""
    model = make_architecture(name)
    check_model_compatibility(model)
    store = ChunkStore(model)
    for seed, most in (1, 700), (2, 100 + 64), (3, 100):
        ids = join(random_ids(600, seed=8), random_ids(100, seed=seed))
        assert check(model, ChunkReuseCache(model, store), as_inputs(ids)) <= most
    for place in (77, 400, 655):
        edited = ids.clone()
        edited[0, place] = 3 + (edited[0, place] + 1) % 100
        assert check(model, ChunkReuseCache(model, store), as_inputs(edited)) <= 700 - place + 64 + 8
    store.check_consistency()
    assert store.check_integrity(0.2).wrong == 0


def test_states_keep_to_their_share(caplog: pytest.LogCaptureFixture) -> None:
    """The states of a prompt are thinned evenly, and those of one that is used stay."""
    model = make_architecture("qwen3_next")
    check_model_compatibility(model)
    one = ChunkStore(model)
    generate(model, as_inputs(BASE), past_key_values=ChunkReuseCache(model, one))
    size = next(iter(one.inspect().states.values())).nbytes
    store = ChunkStore(model, max_bytes=100 * size, state_share=0.24)
    long = random_ids(1500, seed=21)
    for ids in (long, long, *(random_ids(600, seed=30 + i) for i in range(6))):
        check(model, ChunkReuseCache(model, store), as_inputs(ids))
        assert sum(each.nbytes for each in store.inspect().states.values()) <= 0.24 * store.max_bytes
    assert check(model, ChunkReuseCache(model, store), as_inputs(join(long, OTHER[:, :9]))) <= 9 + 128 + 8
    assert "keeps none" not in caplog.text
    few = ChunkStore(model, max_bytes=100 * size, state_share=0.005)
    for ids in (BASE, join(BASE, OTHER)):
        check(model, ChunkReuseCache(model, few), as_inputs(ids))
    assert few.stats()["states"] == 0
    told = [record.getMessage() for record in caplog.records if "keeps none" in record.getMessage()]
    assert len(told) == 1
    assert str(int(0.005 * few.max_bytes)) in told[0]
    with pytest.raises(ValueError, match="from 0 to 1, got 2"):
        ChunkStore(model, state_share=2)


@pytest.mark.parametrize("name", ["nemotron_h", "zamba2"])
def test_a_single_token_is_not_left_of_a_prompt(name: str) -> None:
    """These compute one token otherwise than a prompt: its logits, and the states that it leaves, would be others."""
    model = make_architecture(name)
    check_model_compatibility(model)
    store = ChunkStore(model, chunk_size=16)
    for length in (33, 34, 33, 65, 33, 32):
        cache = ChunkReuseCache(model, store)
        plain = model(BASE[:, :length]).logits[:, -1]
        found = generate(model, as_inputs(BASE[:, :length]), past_key_values=cache)
        torch.testing.assert_close(found.logits[0] / plain.std(), plain / plain.std(), atol=5e-5, rtol=0)
        generate(model, as_inputs(OTHER[:, :20]), past_key_values=cache)  # lets go of what it holds
    assert store.check_integrity().wrong == 0


@pytest.mark.daily
@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_integrity_of_compressed_attention(codec: str) -> None:
    """DeepSeek V4 compresses K/V of many tokens at once: states behind few tokens have tensors without numbers."""
    model = make_architecture("deepseek_v4")
    check_model_compatibility(model)
    store = ChunkStore(model, chunk_size=16, codec=codec)
    for seed in (1, 2):
        generate(
            model,
            as_inputs(join(BASE[:, :60], random_ids(20, seed=seed))),
            past_key_values=ChunkReuseCache(model, store),
        )
    found = store.check_integrity()
    assert found.checked > 3
    assert found.wrong == 0


def test_integrity_of_states_beside_windows() -> None:
    """ZAYA's code takes states of convolutions as they are, also while transformers records longer ones."""
    model = make_architecture("zaya")
    check_model_compatibility(model)
    store = ChunkStore(model, chunk_size=16)
    for seed in (1, 2):
        ids = join(BASE[:, :60], random_ids(80, seed=seed))
        generate(model, as_inputs(ids), past_key_values=ChunkReuseCache(model, store))
    found = store.check_integrity()
    assert found.checked > 8
    assert found.wrong == 0
