"""A cache of a fixed size whose decoding is compiled: the tokens of eager plain generate(), and one graph for all."""

import copy
from collections.abc import Iterator
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvboost_hf import (
    CacheModelMismatchError,
    ChunkReuseCache,
    ChunkStore,
    attach,
    check_model_compatibility,
    detach,
    last_cache,
)
from tests import multimodal
from tests.architectures.models import make_architecture
from tests.conftest import as_inputs, counted, left_pad, make_model, random_ids
from tests.graphs import Compiler
from tests.internals.cache import StaticReuseLayer, compiled, static_reason

NEW = 10
SIZE = 256
BASE, OTHER = random_ids(300, seed=1), random_ids(300, seed=2)
# Longer, shorter, equal, diverging, unrelated, one token; and how many tokens of each no earlier one shares.
PROMPTS = [
    (BASE[:, :200], 200),
    (torch.cat([BASE[:, :200], OTHER[:, :20]], dim=1), 20),
    (BASE[:, :90], 1),
    (BASE[:, :90], 1),
    (OTHER[:, :150], 150),
    (torch.cat([BASE[:, :77], OTHER[:, :60]], dim=1), 60),
    (BASE[:, :1], 1),
    (BASE[:, :200], 1),
]


@pytest.fixture(autouse=True)
def _no_graphs_of_other_tests() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


@pytest.fixture
def compiler() -> Compiler:
    return Compiler()


def static_cache(model: PreTrainedModel, store: ChunkStore | None = None, size: int = SIZE) -> ChunkReuseCache:
    check_model_compatibility(model)
    store = store if store is not None else ChunkStore(model, chunk_size=32)
    return ChunkReuseCache(model, store, max_cache_len=size)


def generate(model: PreTrainedModel, inputs: dict[str, torch.Tensor], **kwargs: Any) -> torch.Tensor:
    torch.manual_seed(5)
    return model.generate(**inputs, **{"max_new_tokens": NEW, **kwargs})


@pytest.mark.parametrize(
    ("name", "attention"),
    [("llama", "sdpa"), ("qwen2", "sdpa"), ("gpt2", "sdpa"), ("mistral", "sdpa"), ("gemma2", "kvboost_fa2")],
)
def test_one_graph_for_all_prompts(name: str, attention: str, compiler: Compiler) -> None:
    model = make_model(name)
    model.set_attn_implementation(attention)
    cache = static_cache(model)
    graphs = []
    for ids, unseen in PROMPTS:
        plain = generate(model, as_inputs(ids))
        reused = generate(model, as_inputs(ids), past_key_values=cache, compile_config=compiler.config)
        assert torch.equal(plain, reused)
        assert cache.report.bypass_reason is None
        assert cache.report.prompt_tokens == ids.shape[1]
        assert cache.report.forwarded_tokens <= unseen + 16  # of a tail, too few to be found again
        graphs.append(compiler.graphs)
    assert graphs == [2] * len(PROMPTS)  # the model, and what notes its tokens
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2", "granitemoehybrid"])
def test_one_graph_over_states(name: str, compiler: Compiler) -> None:
    """Tokens of plain generate(), and no more work than with buffers that grow."""
    model = make_architecture(name)
    cache, growing = static_cache(model), ChunkReuseCache(model, ChunkStore(model, chunk_size=32))
    for n, (ids, _) in enumerate(PROMPTS[:4]):
        inputs = as_inputs(ids) if n < 3 else left_pad(BASE[:, :60], OTHER[:, :51])
        plain = generate(model, inputs)
        assert torch.equal(plain, generate(model, inputs, cache=cache, compile_config=compiler.config))
        assert torch.equal(plain, generate(model, inputs, cache=growing))
        assert cache.report.bypass_reason is None
        assert cache.report.forwarded_tokens == growing.report.forwarded_tokens
        assert compiler.graphs == (2 if n < 3 else 4)  # the model, and what notes its tokens; both for two rows, too
    assert not counters["graph_break"]
    answer = generate(model, as_inputs(BASE[:, :90]))
    assert torch.equal(answer, generate(model, as_inputs(BASE[:, :90]), cache=cache, compile_config=compiler.config))
    twin, grown = cache.fork(), torch.cat([answer, OTHER[:, :9]], dim=1)
    for each in (twin, cache):
        assert torch.equal(
            generate(model, as_inputs(grown)),
            generate(model, as_inputs(grown), cache=each, compile_config=compiler.config),
        )
        assert each.report.forwarded_tokens == 10


def test_what_is_forwarded(llama: PreTrainedModel) -> None:
    cache = static_cache(llama)
    for ids, unseen in PROMPTS:
        with counted(llama) as work:
            generate(llama, as_inputs(ids), past_key_values=cache, max_new_tokens=1)
        assert work.tokens == cache.report.forwarded_tokens <= unseen + 16


@pytest.mark.parametrize("compiled", [True, False])
def test_decoded_tokens_are_kept(llama: PreTrainedModel, compiler: Compiler, compiled: bool) -> None:
    """The ids of compiled steps are known afterwards: a chat goes on without computing its answers again."""
    how = {"compile_config": compiler.config} if compiled else {}
    store = ChunkStore(llama, chunk_size=32)
    cache = static_cache(llama, store)
    history = BASE[:, :50]
    for turn in range(4):
        plain = generate(llama, as_inputs(history), max_new_tokens=40)
        reused = generate(llama, as_inputs(history), past_key_values=cache, max_new_tokens=40, **how)
        assert torch.equal(plain, reused)
        assert cache.report.forwarded_tokens == (50 if turn == 0 else 8)  # the last answer's last token, and the new
        history = torch.cat([plain, OTHER[:, 7 * turn : 7 * turn + 7]], dim=1)
        assert plain.shape[1] == cache.get_seq_length() + 1
    assert (compiler.graphs > 0) == compiled

    cache.store_tails()
    growing = ChunkReuseCache(llama, store)
    assert torch.equal(reused, generate(llama, as_inputs(reused[:, :-40]), past_key_values=growing, max_new_tokens=40))
    assert growing.report.forwarded_tokens == 1
    generate(llama, as_inputs(reused), past_key_values=growing)
    assert growing.report.tier_tokens["live"] + growing.report.tier_tokens["ram"] == reused.shape[1] - 1


def test_store_shared_with_a_growing_cache(llama: PreTrainedModel, compiler: Compiler) -> None:
    store = ChunkStore(llama, chunk_size=32)
    growing, static = ChunkReuseCache(llama, store), static_cache(llama, store)
    plain = generate(llama, as_inputs(BASE[:, :200]))
    assert torch.equal(plain, generate(llama, as_inputs(BASE[:, :200]), past_key_values=growing))
    growing.store_tails()
    config = compiler.config
    assert torch.equal(plain, generate(llama, as_inputs(BASE[:, :200]), past_key_values=static, compile_config=config))
    assert static.report.tier_tokens == {"live": 0, "ram": 199}
    static.store_tails()  # reads what the compiled steps have left
    for mine, theirs in zip(static.layers, growing.layers, strict=True):
        torch.testing.assert_close(mine.columns(0, 0, 199)[0], theirs.columns(0, 0, 199)[0], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(("name", "attention"), [("llama", "sdpa"), ("mistral", "kvboost_fa2")])
def test_batches(name: str, attention: str, compiler: Compiler) -> None:
    llama = make_model(name)
    llama.set_attn_implementation(attention)
    cache = static_cache(llama)
    batches = [
        left_pad(BASE[:, :150], OTHER[:, :70]),
        left_pad(BASE[:, :200], OTHER[:, :90]),
        left_pad(OTHER[:, :90], BASE[:, :200]),
        left_pad(BASE[:, :180], random_ids(170, seed=9)),
    ]
    forwarded, graphs = [], []
    for batch in batches:
        plain = generate(llama, batch)
        reused = generate(llama, batch, past_key_values=cache, compile_config=compiler.config)
        assert torch.equal(plain, reused)
        assert cache.report.bypass_reason is None
        forwarded.append(cache.report.forwarded_tokens)
        graphs.append(compiler.graphs)
    assert graphs[0] == graphs[-1]
    assert forwarded[1] <= 50 + 20 + 2 * 30
    assert forwarded[2] <= 2 * 32
    # Decoded tokens of padded rows are known, too.
    plain = generate(llama, batches[-1], max_new_tokens=40)
    assert torch.equal(plain, generate(llama, batches[-1], past_key_values=cache, max_new_tokens=40))
    mask = torch.cat([batches[-1]["attention_mask"], torch.ones(2, 40, dtype=torch.long)], dim=1)
    longer = {"input_ids": plain, "attention_mask": mask}
    assert torch.equal(generate(llama, longer), generate(llama, longer, past_key_values=cache))
    assert cache.report.forwarded_tokens == 2


@pytest.mark.parametrize(
    "mode",
    [
        {"num_beams": 3},
        {"do_sample": True, "num_return_sequences": 2},
        {"prompt_lookup_num_tokens": 4},
        {"prefill_chunk_size": 40},
    ],
    ids=lambda mode: next(iter(mode)),
)
def test_modes(mode: dict[str, Any]) -> None:
    model = make_model("qwen2")  # its masks come in a dict, and are None where nothing is hidden
    cache = static_cache(model)
    for ids, unseen in PROMPTS[:3]:
        plain = generate(model, as_inputs(ids), **mode)
        assert torch.equal(plain, generate(model, as_inputs(ids), past_key_values=cache, **mode))
        assert cache.report.bypass_reason is None
        rows = cache.report.prompt_tokens // ids.shape[1]
        assert cache.report.forwarded_tokens <= rows * (unseen + 22)


def test_bare_forwards(llama: PreTrainedModel) -> None:
    """Without generate(): a prompt, steps that the caller compiles, and the prompt again."""
    cache = static_cache(llama)
    step = torch.compile(llama, backend="eager")
    with torch.no_grad():
        for _ in range(2):
            logits = llama(input_ids=BASE[:, :100], past_key_values=cache, logits_to_keep=1).logits
            for column in range(100, 104):
                ids, position = BASE[:, column : column + 1], torch.tensor([[column]])
                logits = step(input_ids=ids, position_ids=position, past_key_values=cache, logits_to_keep=1).logits
            expected = llama(input_ids=BASE[:, :104]).logits[:, -1:]
            torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)
            assert cache.fork().get_seq_length() == 104
            cache.reset()
    assert cache.get_seq_length() == 0


def test_a_window_that_was_filled_does_not_reach_back() -> None:
    """Columns that had left the window when it was filled from the store are zeros, and must not be gone back to."""
    model = make_model("mistral")
    store = ChunkStore(model, chunk_size=32)
    generate(model, as_inputs(BASE[:, :200]), past_key_values=static_cache(model, store))
    cache = static_cache(model, store)
    for length, tier in ((200, "ram"), (100, "ram"), (110, "live"), (105, "live")):
        plain = generate(model, as_inputs(BASE[:, :length]))
        assert torch.equal(plain, generate(model, as_inputs(BASE[:, :length]), past_key_values=cache))
        assert cache.report.tier_tokens[tier] >= 64
    with pytest.raises(RuntimeError, match="goes back further"):
        cache.crop(-80)


def test_wrong_positions_are_not_stored(llama: PreTrainedModel) -> None:
    cache = static_cache(llama)
    step = torch.compile(llama, backend="eager")
    with torch.no_grad():
        llama(input_ids=BASE[:, :60], past_key_values=cache, logits_to_keep=1)
        for column in range(60, 70):
            step(
                input_ids=BASE[:, column : column + 1],
                position_ids=torch.tensor([[column + 1]]),
                past_key_values=cache,
                logits_to_keep=1,
            )
    before = cache.store.stats()["chunks"]
    cache.store_all()
    assert cache.store.stats()["chunks"] == before


def test_forks_and_rows(llama: PreTrainedModel) -> None:
    cache = static_cache(llama)
    generate(llama, as_inputs(BASE[:, :100]), past_key_values=cache)
    twin = cache.fork()
    generate(llama, as_inputs(OTHER[:, :100]), past_key_values=cache)
    plain = generate(llama, as_inputs(BASE[:, :100]))
    assert torch.equal(plain, generate(llama, as_inputs(BASE[:, :100]), past_key_values=twin))
    assert twin.report.tier_tokens == {"live": 99, "ram": 0}
    address = twin.layers[0]._tensors[0].buffer.data_ptr()
    twin.reorder_cache(torch.tensor([0]))  # type: ignore[arg-type]
    assert twin.layers[0]._tensors[0].buffer.data_ptr() == address
    twin.batch_repeat_interleave(2)
    assert twin.layers[0].keys.shape[0] == 2


@pytest.mark.daily
@pytest.mark.parametrize("window", [0, 24])
def test_what_is_assigned_is_what_is_read(window: int) -> None:
    """Keys and values of a fixed layer, up to all that it can hold, in the buffers that it had."""
    for held, columns in product((0, 40), (1, 40, 64)):
        assert_reads_what_is_assigned(window, held, columns)


def assert_reads_what_is_assigned(window: int, held: int, columns: int) -> None:
    layer = StaticReuseLayer(64, window)
    layer.whole = False
    if held:
        layer.update(torch.randn(1, 2, held, 8), torch.randn(1, 2, held, 8))
        layer.close(held)
    buffers = [tensor.buffer for tensor in layer._tensors]
    keys, values = torch.randn(1, 2, columns, 8), torch.randn(1, 2, columns, 8)
    layer.keys, layer.values = keys, values
    assert not layer.intact
    shown = 23 if window and max(held, columns) >= window else columns  # what the next token can attend to
    assert torch.equal(layer.keys, keys[:, :, -shown:])
    assert torch.equal(layer.values, values[:, :, -shown:])
    assert int(layer.get_seq_length()) == (max(held, columns) if window else columns)
    assert not held or all(tensor.buffer is buffer for tensor, buffer in zip(layer._tensors, buffers, strict=True))
    with pytest.raises(ValueError, match="`max_cache_len`=64 holds so many columns at most, got 65"):
        layer.keys = torch.randn(1, 2, 65, 8)


def test_nothing_that_is_assigned_is_believed(llama: PreTrainedModel) -> None:
    """Read back as it was assigned, and computed again by the next call."""
    cache = static_cache(llama)
    generate(llama, as_inputs(BASE[:, :100]), past_key_values=cache)
    for layer in cache.layers:
        changed = layer.keys * 0.5
        layer.keys = changed
        assert torch.equal(layer.keys, changed)
    longer = as_inputs(torch.cat([BASE[:, :100], OTHER[:, :20]], dim=1))
    assert torch.equal(generate(llama, longer, past_key_values=cache), generate(llama, longer))
    assert cache.report.tier_tokens["live"] == 0
    assert not cache.store.check_integrity().wrong


def test_a_prompt_after_one_that_computed_nan(llama: PreTrainedModel) -> None:
    """Columns that attention does not see are multiplied by zero, which would leave a NaN a NaN."""
    cache = static_cache(llama)
    generate(llama, as_inputs(BASE[:, :100]), past_key_values=cache)
    for layer in cache.layers:
        layer.values.fill_(float("nan"))
    cache.reset()
    store = cache.store
    store.invalidate()
    plain = generate(llama, as_inputs(OTHER[:, :20]))
    assert torch.equal(plain, generate(llama, as_inputs(OTHER[:, :20]), past_key_values=cache))


def test_too_long(llama: PreTrainedModel) -> None:
    cache = static_cache(llama, size=64)
    plain = generate(llama, as_inputs(BASE[:, :55]))  # 55 + 10 - 1 just fit
    assert torch.equal(plain, generate(llama, as_inputs(BASE[:, :55]), past_key_values=cache))
    with pytest.raises(ValueError, match="`max_cache_len`=64 is too small for this call: a prompt of 56 tokens"):
        generate(llama, as_inputs(BASE[:, :56]), past_key_values=cache)
    with pytest.raises(ValueError, match="`max_cache_len`=64 is too small: the cache holds 64 tokens and 70 more"):
        llama(input_ids=BASE[:, :70], past_key_values=cache)
    assert torch.equal(plain, generate(llama, as_inputs(BASE[:, :55]), past_key_values=cache))  # nothing is lost
    assert cache.report.tier_tokens == {"live": 54, "ram": 0}


def test_attached(compiler: Compiler) -> None:
    """generate() compiles for a model that was attached with a size, and is given no cache."""
    plain, model = make_model("mistral"), make_model("mistral")
    check_model_compatibility(model)
    store = ChunkStore(model, chunk_size=32)
    generate(model, as_inputs(BASE[:, :70]), past_key_values=ChunkReuseCache(model, store))
    attach(model, store, max_cache_len=SIZE)
    graphs = []
    for ids, reused in ((BASE[:, :90], 64), (BASE[:, :77], 76), (OTHER[:, :50], 0), (BASE[:, :90], 89)):
        expected = generate(plain, as_inputs(ids))
        assert torch.equal(generate(model, as_inputs(ids), compile_config=compiler.config), expected)
        report = last_cache(model).report
        assert (report.bypass_reason, report.reused_tokens) == (None, reused)
        graphs.append(compiler.graphs)
    assert graphs == [2] * 4
    with pytest.raises(ValueError, match=r"`max_cache_len`=256 is .* take 259\. Make .* `max_cache_len=259`"):
        generate(model, as_inputs(BASE[:, :250]))
    others = (
        {"num_beams": 2},
        {"prompt_lookup_num_tokens": 3},
        {"use_cache": False},
        {"cache_implementation": "static"},
    )
    ids = BASE[:, :60]
    for mode in others:
        assert torch.equal(generate(model, as_inputs(ids), **mode), generate(plain, as_inputs(ids), **mode))
    by_hand = ChunkReuseCache(model, store)
    generate(model, as_inputs(ids), past_key_values=by_hand)
    assert by_hand.report.reused_tokens == 59
    with pytest.warns(UserWarning, match="is not attached"):
        twin = copy.deepcopy(model)
    detach(model)
    for each in (twin, model):
        assert torch.equal(generate(each, as_inputs(ids)), generate(plain, as_inputs(ids)))
    assert compiler.graphs == 2
    for wrong in (0, 1.5):
        with pytest.raises(ValueError, match="`max_cache_len` must be a positive int, 'auto' or None"):
            attach(model, store, max_cache_len=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
@pytest.mark.parametrize("lengths", [(25,), (60, 3, 24)])
def test_attached_and_longer_than_a_window(name: str, lengths: tuple[int, ...]) -> None:
    """generate() makes the masks of the prompt then, for a StaticCache: with `kvboost_fa2`, one of no columns."""
    model = make_model(name)
    model.set_attn_implementation("kvboost_fa2")
    inputs = left_pad(*(BASE[:, :n] for n in lengths))
    plain = generate(model, inputs, cache_implementation="static")
    attach(model, ChunkStore(model, chunk_size=16))
    for _ in range(2):
        assert torch.equal(generate(model, inputs, cache_implementation="static"), plain)
        found = last_cache(model)
        assert found is not None
        assert found.report.bypass_reason is None
        assert found.max_cache_len == plain.shape[1] - 1
    assert found.report.reused_tokens > 0


def test_attached_with_states_and_windows_only() -> None:
    """No layer of a StaticCache tells for how many tokens it was made."""
    made = make_architecture("lara_mini")
    made.config.num_hidden_layers, made.config.layer_types = 2, ["linear_attention", "sliding_attention"]
    model = type(made)(made.config).eval()
    plain = generate(model, as_inputs(BASE[:, :50]), cache_implementation="static")
    attach(model, ChunkStore(model, chunk_size=16))
    for reused in (0, 48):
        assert torch.equal(generate(model, as_inputs(BASE[:, :50]), cache_implementation="static"), plain)
        assert last_cache(model).report.reused_tokens == reused


def test_use_cache_false(llama: PreTrainedModel, compiler: Compiler) -> None:
    cache = static_cache(llama, size=70)
    drafted = {"use_cache": False, "prompt_lookup_num_tokens": 3}
    for how in ({"use_cache": False}, {}, {"use_cache": False}, drafted, {}):
        plain = generate(llama, as_inputs(BASE[:, :50]))
        config = compiler.config
        found = generate(llama, as_inputs(BASE[:, :50]), past_key_values=cache, compile_config=config, **how)
        assert torch.equal(plain, found)


def test_candidates_need_room(llama: PreTrainedModel) -> None:
    """Prompt lookup proposes tokens beyond the last one, which must not stop a call in the middle."""
    period = torch.cat([BASE[:, :10]] * 6, dim=1)
    mode = {"prompt_lookup_num_tokens": 6, "max_new_tokens": 5}
    cache = static_cache(llama, size=70)
    with pytest.raises(ValueError, match="with 6 proposed by prompt lookup, take 73"):
        generate(llama, as_inputs(torch.cat([period, period[:, :3]], dim=1)), past_key_values=cache, **mode)
    for n in (50, 60):
        plain = generate(llama, as_inputs(period[:, :n]), **mode)
        assert torch.equal(plain, generate(llama, as_inputs(period[:, :n]), past_key_values=cache, **mode))


class OwnCache(LlamaForCausalLM):
    """A model that no prompt can be reused for, whatever the cache."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False


def test_kv_from_elsewhere(llama: PreTrainedModel) -> None:
    """One token may come from a compiled step, around which no hook has run; more are another model's."""
    sized, growing = static_cache(llama), ChunkReuseCache(llama)
    for cache in (sized, growing):
        generate(llama, as_inputs(BASE[:, :20]), past_key_values=cache)
    for cache, tokens, taken in ((sized, 1, True), (sized, 2, False), (growing, 1, False)):
        given = torch.zeros_like(growing.layers[0].keys[:, :, :tokens])
        if taken:
            cache.update(given, given, 0)
        else:
            with pytest.raises(CacheModelMismatchError, match="K/V reached it from elsewhere"):
                cache.update(given, given, 0)


def test_what_is_refused(llama: PreTrainedModel) -> None:
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="`max_cache_len` must be a positive int, 'auto' or None"):
            ChunkReuseCache(llama, max_cache_len=wrong)  # type: ignore[arg-type]
    for name in ("falcon_h1", "bloom"):
        with pytest.raises(ValueError, match=r"`max_cache_len` is not for .* Leave it out"):
            ChunkReuseCache(make_model(name), max_cache_len=64)
    unserved = OwnCache(LlamaConfig(**llama.config.to_dict()))
    with pytest.raises(ValueError, match="`max_cache_len` is not for OwnCache: it keeps its K/V in a cache class"):
        ChunkReuseCache(unserved, max_cache_len=64)
    with pytest.raises(ValueError, match="`fork` needs a model that can reuse K/V, but it keeps its K/V in"):
        ChunkReuseCache(unserved).fork()
    with pytest.raises(ValueError, match="it keeps states alone"):
        ChunkReuseCache(make_architecture("mamba2"), max_cache_len=64)
    model = make_model("llama")
    windows = [DynamicSlidingWindowLayer(sliding_window=size) for size in (8, 16)]
    for change, reason in (
        (mock.patch.object(model.config, "attention_chunk_size", 8, create=True), "with chunks attend to no fixed"),
        (mock.patch.object(compiled, "cache_layers", return_value=windows), "its windows are of several sizes"),
        (mock.patch.object(type(model), "_can_compile_fullgraph", False), "cannot compile its forward as one graph"),
        (
            mock.patch.object(model.config, "_attn_implementation_internal", "flex_attention"),
            "its attention is 'flex_",
        ),
    ):
        with change:
            assert reason in str(static_reason(model, 64))
    assert static_reason(model, 64) is None


@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "glm4v", "gemma3"])
def test_images(name: str, compiler: Compiler) -> None:
    """Positions in three dimensions, and masks of kinds of layers that the model does not have."""
    model = multimodal.make_model(name)
    cache = static_cache(model)
    head, tail = multimodal.text(40, 1), multimodal.text(15, 2)
    for parts, unseen in (((head, 5, tail), None), ((head, 6, tail), None), ((head, 5, tail), 8), ((head, tail), 16)):
        inputs = multimodal.prompt(name, *parts)
        plain = generate(model, inputs)
        reused = generate(model, inputs, past_key_values=cache, compile_config=compiler.config)
        assert torch.equal(plain, reused)
        assert cache.report.bypass_reason is None
        assert unseen is None or cache.report.forwarded_tokens <= unseen
    assert torch.equal(plain, generate(model, inputs, past_key_values=cache))
    # What was decoded after an image is known, with its shifted positions.
    answer = generate(model, multimodal.prompt(name, head, 5, tail), past_key_values=cache)[0, -NEW:].tolist()
    grown = multimodal.prompt(name, head, 5, tail, [token if token < 190 else 2 for token in answer], tail)
    plain = generate(model, grown)
    assert torch.equal(plain, generate(model, grown, past_key_values=cache, compile_config=compiler.config))
    if max(answer) < 190:
        assert cache.report.forwarded_tokens == 16


def test_cross_attention_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`max_cache_len` is not for Mllama.* attend to an image"):
        ChunkReuseCache(multimodal.make_model("mllama"), max_cache_len=64)


def test_a_foreign_static_cache_still_compiles_as_one_graph(llama: PreTrainedModel, compiler: Compiler) -> None:
    ChunkReuseCache(llama)  # puts the hooks on the model
    plain = generate(llama, as_inputs(BASE[:, :50]))
    config = compiler.config
    assert torch.equal(
        plain, generate(llama, as_inputs(BASE[:, :50]), cache_implementation="static", compile_config=config)
    )
    assert compiler.graphs == 1


def test_a_step_that_was_not_noted_is_not_taken_for_one_that_was(llama: PreTrainedModel) -> None:
    """Notes of steps that were cropped must not be read for what was appended in their place."""
    cache = static_cache(llama)
    step = torch.compile(llama, backend="eager")
    with torch.no_grad():
        embedded = llama.get_input_embeddings()(OTHER[:, :10])
        llama(input_ids=BASE[:, :60], past_key_values=cache, logits_to_keep=1)
        for column in range(60, 70):
            at = slice(column, column + 1)
            step(input_ids=BASE[:, at], position_ids=torch.tensor([[column]]), past_key_values=cache, logits_to_keep=1)
        cache.crop(-10)
        for i in range(10):
            position = torch.tensor([[60 + i]])
            step(inputs_embeds=embedded[:, i : i + 1], position_ids=position, past_key_values=cache, logits_to_keep=1)
    cache.store_all()
    for reader in (cache, ChunkReuseCache(llama, cache.store)):
        plain = generate(llama, as_inputs(BASE[:, :100]))
        assert torch.equal(plain, generate(llama, as_inputs(BASE[:, :100]), past_key_values=reader))
