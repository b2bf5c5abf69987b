"""A cache that holds codes, in plain generate(): the words of plain generate(), and how far its logits are off."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, KVQuantConfig, ReusePolicy, check_model_compatibility
from kvboost_hf.assets import load_embedded
from tests.conftest import as_inputs, counted, left_pad, make_model, random_ids
from tests.internals.cache import GrowingLayer, QuantizedLayer, make_codec

# As good as lossless, so that words must not change; and in small blocks, so that every prompt fills several.
EIGHT = KVQuantConfig(method="kivi", key_bits=8, value_bits=8, group_size=16, window=16, exact_layers=0)
FOUR = KVQuantConfig(window=16, exact_layers=0)
QUESTIONS = [
    "Anna lives in Oslo. She plays the piano. Ben lives in Rome. He plays the drums.\n\nWhat does Anna play?",
    "Ben lives in Rome. He plays the drums. Anna lives in Oslo. She plays the piano.\n\nWhere does Ben live?",
]


@pytest.fixture(scope="module")
def reader() -> tuple[Any, Any]:
    return load_embedded()


def prompt(tokenizer: Any, question: str, repeats: int = 4) -> torch.Tensor:
    documents, asked = question.split("\n\n")
    messages = [
        {"role": "system", "content": "You read documents and answer questions about them."},
        {"role": "user", "content": " ".join([documents] * repeats) + "\n\n" + asked},
    ]
    ids: torch.Tensor = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )["input_ids"]
    return ids


def live(model: PreTrainedModel, store: ChunkStore | None = None, config: KVQuantConfig = EIGHT) -> ChunkReuseCache:
    store = store if store is not None else ChunkStore(model, chunk_size=32)
    return ChunkReuseCache(model, store, live_quant=config)


def generate(model: Any, inputs: dict[str, torch.Tensor], **kwargs: Any) -> torch.Tensor:
    torch.manual_seed(3)
    found: torch.Tensor = model.generate(**inputs, **{"max_new_tokens": 48, "min_new_tokens": 48, **kwargs})
    return found


def coded_columns(cache: ChunkReuseCache) -> int:
    """Columns in codes, of the layer that has the fewest."""
    layers = [layer for layer in cache.layers if isinstance(layer, QuantizedLayer)]
    return min(sum(tensor._blocks) for layer in layers for tensor in layer._tensors)


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"do_sample": True, "top_k": 5},
        {"num_beams": 3},
        {"do_sample": True, "num_return_sequences": 3},
        {"prefill_chunk_size": 40},
        {"prompt_lookup_num_tokens": 4},
    ],
    ids=lambda how: "-".join(how) or "greedy",
)
def test_words_are_those_of_plain_generate(reader: tuple[Any, Any], question: str, how: dict[str, Any]) -> None:
    model, tokenizer = reader
    inputs = as_inputs(prompt(tokenizer, question))
    cache = live(model)
    plain, found = generate(model, inputs, **how), generate(model, inputs, **how, past_key_values=cache)
    assert torch.equal(plain, found)
    assert coded_columns(cache) >= found.shape[1] - 2 * 16 - EIGHT.sink_tokens - 5
    assert cache.report.bypass_reason is None


@pytest.mark.parametrize("how", [{}, {"prefill_chunk_size": 30}, {"num_beams": 2}], ids=lambda how: "".join(how))
def test_padded_rows(reader: tuple[Any, Any], how: dict[str, Any]) -> None:
    """Also where a row begins in the second piece of a prompt only."""
    model, tokenizer = reader
    inputs = left_pad(prompt(tokenizer, QUESTIONS[0]), prompt(tokenizer, QUESTIONS[1], repeats=2))
    cache = live(model)
    assert torch.equal(generate(model, inputs, **how), generate(model, inputs, **how, past_key_values=cache))
    padding = int((inputs["attention_mask"][1] == 0).sum())
    assert padding > 32
    exact = cache.get_seq_length() - coded_columns(cache)
    assert padding + EIGHT.sink_tokens + 16 <= exact < padding + EIGHT.sink_tokens + 2 * 16


def test_assisted_decoding(reader: tuple[Any, Any]) -> None:
    model, tokenizer = reader
    inputs, cache = as_inputs(prompt(tokenizer, QUESTIONS[0])), live(model)
    helper, _ = load_embedded(torch.bfloat16)
    plain = generate(model, inputs)
    assert torch.equal(plain, generate(model, inputs, assistant_model=helper, past_key_values=cache))


def test_a_chat_that_goes_on_and_goes_back(reader: tuple[Any, Any]) -> None:
    model, tokenizer = reader
    check_model_compatibility(model)  # which takes a forward
    first, cache = prompt(tokenizer, QUESTIONS[0]), live(model)
    said = generate(model, as_inputs(first), past_key_values=cache)
    longer = torch.cat([said, prompt(tokenizer, QUESTIONS[1])], dim=1)
    for ids in (longer, first, first[:, :60], longer[:, :200]):
        with counted(model) as work:
            found = generate(model, as_inputs(ids), past_key_values=cache, max_new_tokens=8, min_new_tokens=8)
        assert torch.equal(found, generate(model, as_inputs(ids), max_new_tokens=8, min_new_tokens=8))
        assert work.tokens == cache.report.forwarded_tokens + 7
        assert cache.report.reused_tokens > 0


def test_reuse_through_the_store(reader: tuple[Any, Any]) -> None:
    model, tokenizer = reader
    ids, store = prompt(tokenizer, QUESTIONS[0]), ChunkStore(model, chunk_size=32)
    plain = generate(model, as_inputs(ids))
    assert torch.equal(plain, generate(model, as_inputs(ids), past_key_values=live(model, store)))
    again = live(model, store)
    assert torch.equal(plain, generate(model, as_inputs(ids), past_key_values=again))
    assert again.report.tier_tokens["ram"] >= ids.shape[1] // 32 * 32 - 1


def test_what_is_stored_is_found_by_its_like_only(reader: tuple[Any, Any]) -> None:
    model, tokenizer = reader
    ids, store = prompt(tokenizer, QUESTIONS[0]), ChunkStore(model, chunk_size=32)
    others = [None, FOUR, KVQuantConfig(window=32, exact_layers=0), KVQuantConfig(window=16, exact_layers=1)]
    others += [KVQuantConfig(window=16, exact_layers=0, sink_tokens=5)]
    for known in (False, True):
        for config in others:
            cache = ChunkReuseCache(model, store, live_quant=config)
            generate(model, as_inputs(ids), past_key_values=cache, max_new_tokens=1, min_new_tokens=1)
            assert cache.report.reused_tokens == (ids.shape[1] // 32 * 32 if known else 0)


def test_forks_go_their_own_ways(reader: tuple[Any, Any]) -> None:
    model, tokenizer = reader
    ids = prompt(tokenizer, QUESTIONS[0])
    cache = live(model)
    said = generate(model, as_inputs(ids), past_key_values=cache)
    twin = cache.fork()
    assert twin.nbytes == cache.nbytes
    for mine, question in ((twin, QUESTIONS[1]), (cache, QUESTIONS[0])):
        longer = torch.cat([said, prompt(tokenizer, question)], dim=1)
        found = generate(model, as_inputs(longer), past_key_values=mine)
        assert torch.equal(found, generate(model, as_inputs(longer)))
        assert mine.report.tier_tokens["live"] >= said.shape[1] - 1


def test_after_the_model_has_changed_its_dtype() -> None:
    model, tokenizer = load_embedded()
    inputs, cache = as_inputs(prompt(tokenizer, QUESTIONS[0])), live(model)
    generate(model, inputs, past_key_values=cache)
    model.to(torch.bfloat16)  # type: ignore[arg-type]
    found = generate(model, inputs, past_key_values=cache)
    assert cache.report.reused_tokens == 0
    assert cache.layers[0].dtype == torch.bfloat16
    assert torch.equal(found, generate(model, inputs))


@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "bloom", "deepseek_v3", "mistral", "gemma2", "qwen3_next", "falcon_h1"]
)
def test_a_window_longer_than_the_text_changes_nothing(name: str) -> None:
    model = make_model(name)
    inputs = as_inputs(random_ids(150))
    kwargs: dict[str, Any] = {"output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 20}
    exact = ChunkReuseCache(model, ChunkStore(model, chunk_size=32))
    cache = live(model, config=KVQuantConfig(window=256, exact_layers=0))
    theirs: Any = model.generate(**inputs, **kwargs, past_key_values=exact)
    ours: Any = model.generate(**inputs, **kwargs, past_key_values=cache)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert all(torch.equal(a, b) for a, b in zip(ours.logits, theirs.logits, strict=True))


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "bloom", "deepseek_v3", "mistral", "gemma2", "qwen3_next"])
def test_other_layers_stay_as_they_are(name: str) -> None:
    model = make_model(name)
    cache, exact = live(model, config=FOUR), ChunkReuseCache(model, ChunkStore(model))
    for ours, theirs in zip(cache._live.layers, exact._live.layers, strict=True):
        assert type(ours) is (QuantizedLayer if type(theirs) is GrowingLayer else type(theirs))
    found = generate(model, as_inputs(random_ids(150)), past_key_values=cache)
    assert found.shape[1] == 198
    assert cache.report.bypass_reason is None


def test_the_layers_at_both_ends_stay_exact() -> None:
    cache = live(make_model("deep_llama"), config=KVQuantConfig(exact_layers=2))
    assert [type(layer) is GrowingLayer for layer in cache.layers] == [True] * 2 + [False] * 4 + [True] * 2


@contextmanager
def decoded_tensors() -> Iterator[list[int]]:
    """At each update of a layer, how many earlier ones have left a whole history behind."""
    refs: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    original = QuantizedLayer.update

    def update(self: QuantizedLayer, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        alive.append(sum(ref() is not None for ref in refs))
        found = original(self, *args, **kwargs)
        refs[:] = [weakref.ref(tensor) for tensor in found]
        return found

    QuantizedLayer.update = update
    try:
        yield alive
    finally:
        QuantizedLayer.update = original


def test_the_history_of_one_layer_at_a_time_is_whole(llama: PreTrainedModel) -> None:
    model = make_model("deep_llama")
    with decoded_tensors() as alive:
        generate(model, as_inputs(random_ids(200)), past_key_values=live(model, config=FOUR))
    assert len(alive) == 8 * 48
    assert not any(alive)


def test_inside_and_outside_of_inference_mode(llama: PreTrainedModel) -> None:
    cache = live(llama)
    with torch.inference_mode():
        said = generate(llama, as_inputs(random_ids(100)), past_key_values=cache)
    twin = cache.fork()
    longer = as_inputs(torch.cat([said, random_ids(40, seed=1)], dim=1))
    found = generate(llama, longer, past_key_values=cache)
    with torch.inference_mode():
        assert torch.equal(generate(llama, longer, past_key_values=twin), found)


def test_a_compiled_layer() -> None:
    """With the backend that traces and guards only."""
    model: Any = make_model("llama")
    del model.model.layers[1]  # tracing takes seconds for each
    model.config.num_hidden_layers = 1
    inputs = as_inputs(random_ids(50))
    eager = generate(model, inputs, past_key_values=live(model), min_new_tokens=4, max_new_tokens=4)
    torch._dynamo.reset()
    model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    cache = live(model)
    assert torch.equal(generate(model, inputs, past_key_values=cache, min_new_tokens=4, max_new_tokens=4), eager)
    assert coded_columns(cache) == 32
    torch._dynamo.reset()


def test_what_it_cannot_be_combined_with(llama: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="`max_cache_len` must be None with `live_quant`"):
        ChunkReuseCache(llama, live_quant=FOUR, max_cache_len=100)
    with pytest.raises(ValueError, match="`audit_rate` must be 0 with `live_quant`"):
        ChunkReuseCache(llama, policy=ReusePolicy(audit_rate=0.5), live_quant=FOUR)
    store = ChunkStore(llama, chunk_size=32)
    cache = ChunkReuseCache(llama, store, ReusePolicy(mode="blend"), live_quant=FOUR)
    generate(llama, as_inputs(random_ids(150)), past_key_values=cache)
    assert cache.report.moved_reason == "the cache holds codes (live_quant)"


# How far it is off


def divergence(model: Any, ids: torch.Tensor, cache: Any, start: int = 40, step: int = 1) -> tuple[float, float]:
    """Mean KL of the next token from that of a whole forward, fed token by token; and how often the first choice is
    the same."""
    with torch.no_grad():
        truth = model(ids).logits[0, start:].double().log_softmax(-1)
        found = [model(ids[:, :start], past_key_values=cache).logits[0, -1:]]
        found += [
            model(ids[:, at : at + step], past_key_values=cache).logits[0] for at in range(start, ids.shape[1], step)
        ]
        ours = torch.cat(found)[1:].double().log_softmax(-1)
    kl = (truth.exp() * (truth - ours)).sum(-1).mean()
    return float(kl), float((truth.argmax(-1) == ours.argmax(-1)).float().mean())


class Zeroed:
    """A codec that gives back zeros for keys."""

    def __init__(self, codec: Any) -> None:
        self._codec = codec

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codec, name)

    def decode(self, planes: Any, shape: Any, dtype: Any, role: Any, rotation: Any) -> torch.Tensor:
        found: torch.Tensor = self._codec.decode(planes, shape, dtype, role, rotation)
        return found.zero_() if role == "keys" else found


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        (EIGHT, 3e-5),
        (KVQuantConfig(method="kivi", group_size=16, window=16, exact_layers=0), 0.005),
        (FOUR, 0.005),
    ],
    ids=["kivi8", "kivi4", "turboquant4"],
)
def test_logits_stay_close_across_blocks(reader: tuple[Any, Any], config: KVQuantConfig, limit: float) -> None:
    model, tokenizer = reader
    ids = prompt(tokenizer, QUESTIONS[0], repeats=6)
    exact, _ = divergence(model, ids, DynamicCache(config=model.config))
    assert exact < limit / 1000  # rounding in matrices of other shapes: 4e-9 on some CPUs
    cache = live(model, config=config)
    off, same = divergence(model, ids, cache)
    assert coded_columns(cache) >= 5 * 16
    assert exact < off < limit
    assert same > 0.97

    zeroed = live(model, config=config)
    for layer in zeroed.layers:
        assert isinstance(layer, QuantizedLayer)
        layer._codec = Zeroed(make_codec(config))
        layer.reset()
    off, _ = divergence(model, ids, zeroed)
    assert off > 0.5
