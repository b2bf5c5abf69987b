"""Bad input gets an error that says the value, the constraint and the remedy, and nothing is lost."""

import copy
import gc
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from kvboost_hf import (
    CacheModelMismatchError,
    ChunkReuseCache,
    ChunkStore,
    ContentChunker,
    KVQuantConfig,
    ReusePolicy,
    StoreClosedError,
    StoreFullError,
    StreamingConfig,
    TreeDecoding,
    attach,
    check_model_compatibility,
    detach,
    last_cache,
    live_bytes,
    load_assistant,
    lookup_assistant,
    score,
    score_ids,
    speculation_stats,
)
from kvboost_hf.assets import load_embedded
from tests.conftest import as_inputs, make_model, random_ids

pytestmark = pytest.mark.daily

IDS = random_ids(100, seed=1)


@pytest.mark.parametrize("size", [0, -1, 100.5])
def test_chunk_size(llama: PreTrainedModel, size: int) -> None:
    with pytest.raises(ValueError, match=f"positive multiple of 16 tokens, got {size}"):
        ChunkStore(llama, chunk_size=size)


@pytest.mark.parametrize("budget", [0, -5, 1.5, True, "2", "lots"])
def test_budget(llama: PreTrainedModel, budget: int | str) -> None:
    with pytest.raises(ValueError, match="`max_bytes` must be 1 or more bytes"):
        ChunkStore(llama, max_bytes=budget)


@pytest.mark.parametrize("share", [-0.1, 1.1, True, "half", float("nan")])
def test_a_share_of_states(llama: PreTrainedModel, share: Any) -> None:
    with pytest.raises(ValueError, match=f"`state_share` must be a number from 0 to 1, got {share!r}"):
        ChunkStore(llama, state_share=share)
    for right in (0, 0.5, 1):
        ChunkStore(llama, state_share=right)


def test_a_budget_may_be_text(llama: PreTrainedModel) -> None:
    store = ChunkStore(llama, max_bytes="2GB")
    assert store.stats()["max_bytes"] == 2 * 10**9
    store.max_bytes = "1GiB"
    assert store.max_bytes == store.stats()["max_bytes"] == 2**30
    for none in (-5, 1.5, True, None, "2", "lots"):
        with pytest.raises(ValueError, match="`max_bytes` must be 0 or more bytes"):
            store.max_bytes = none  # type: ignore[assignment]


def test_flags_are_no_texts(llama: PreTrainedModel) -> None:
    """A text would count as True."""
    with pytest.raises(ValueError, match="`strict` must be True or False, got 'no'"):
        check_model_compatibility(llama, strict="no")  # type: ignore[arg-type]
    store = ChunkStore(llama)
    with pytest.raises(ValueError, match="`pin` must be True or False, got 'no'"):
        store.warm(IDS, pin="no")  # type: ignore[arg-type]
    assert not store.stats()["chunks"]


@pytest.mark.parametrize("codec", ["raw", "int4"])
def test_tiers_must_hold_a_chunk(llama: PreTrainedModel, codec: str, tmp_path: Path) -> None:
    for address in (f"disk:{tmp_path}/kv:10B", "ram:10B", "device:10B"):
        with pytest.raises(ValueError, match=f"'{address}' .* at least one chunk, which is .* bytes, got 10"):
            ChunkStore(llama, tiers=[address], codec=codec)
    assert not list(tmp_path.iterdir())


def test_what_is_no_tier_policy_or_store(llama: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match=r"`tiers` must be addresses or `Tier` objects, got 3\. Examples: 'ram:4GB'"):
        ChunkStore(llama, tiers=[3])  # type: ignore[list-item]
    for make in (ChunkReuseCache, attach):
        with pytest.raises(ValueError, match=r"`policy` must be a ReusePolicy, got 'blend'. Pass ReusePolicy\(mode="):
            make(llama, policy="blend")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="`store` must be a ChunkStore, got 'ram:4GB'"):
            make(llama, "ram:4GB")  # type: ignore[arg-type]


def test_policy_and_store_of_a_cache_are_checked_when_they_are_set(llama: PreTrainedModel) -> None:
    cache, other = ChunkReuseCache(llama, ChunkStore(llama)), make_model("llama", seed=1)
    coded, closed = ChunkStore(llama, codec="int4"), ChunkStore(llama)
    closed.close()
    for name, value, error, told in (
        ("policy", "blend", ValueError, r"`policy` must be a ReusePolicy, got 'blend'"),
        ("policy", None, ValueError, r"`policy` must be a ReusePolicy, got None"),
        ("store", None, ValueError, r"`store` must be a ChunkStore, got None"),
        ("store", ChunkStore(other), ValueError, r"`store` was made for another model object"),
        ("store", closed, StoreClosedError, "was closed"),
    ):
        with pytest.raises(error, match=told):
            setattr(cache, name, value)
    cache.policy = ReusePolicy(audit_rate=0.5)
    with pytest.raises(ValueError, match="`audit_rate` must be 0 with a store with codec"):
        cache.store = coded
    cache.policy = ReusePolicy()
    cache.store = coded
    with pytest.raises(ValueError, match="`audit_rate` must be 0 with a store with codec"):
        cache.policy = ReusePolicy(audit_rate=0.5)


@pytest.mark.parametrize("found", ["m", None, 5, LlamaConfig()])
def test_only_models_are_detached_and_asked_for_their_cache(found: Any) -> None:
    told = f"`model` must be a transformers PreTrainedModel, got {type(found).__name__}"
    for call in (detach, last_cache):
        with pytest.raises(ValueError, match=told):
            call(found)


def test_a_budget_smaller_than_one_chunk(llama: PreTrainedModel) -> None:
    # 2 layers, keys and values, 2 heads of 16, 4 bytes each, and 8 bytes of token id
    needed = (2 * 2 * 2 * 16 * 4 + 8) * 32
    with pytest.raises(ValueError, match=f"at least one chunk, which is {needed} bytes"):
        ChunkStore(llama, chunk_size=32, max_bytes=needed - 1)
    store = ChunkStore(llama, chunk_size=32, max_bytes=needed)
    store.warm(IDS[:, :32])
    assert store.stats()["bytes"] == needed


def test_policy() -> None:
    with pytest.raises(ValueError, match="`mode` must be one of"):
        ReusePolicy(mode="fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0 or more, got -1"):
        ReusePolicy(min_prefill_saving=-1)
    with pytest.raises(ValueError, match="must be an int"):
        ReusePolicy(min_prefill_saving=0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"`weights_check` must be one of \('sample', 'full'\), got 'all'"):
        ReusePolicy(weights_check="all")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda model: ChunkStore(model, chunker=3), "`chunker` must be a ContentChunker .* got 3.*`chunk_size`"),  # type: ignore[arg-type]
        (lambda model: ChunkStore(model, tiers=3), "`tiers` must be a sequence of addresses .* got 3"),  # type: ignore[arg-type]
        (lambda model: KVQuantConfig(qjl="no"), "`qjl` must be True or False, got 'no'"),  # type: ignore[arg-type]
        (lambda model: StreamingConfig(pin_memory="no"), "`pin_memory` must be True or False, got 'no'"),  # type: ignore[arg-type]
        (lambda model: ContentChunker(separators=[13]), r"sequences of ids, got 13\. Pass \[\(13,\)\]"),  # type: ignore[list-item]
        (lambda model: ContentChunker.for_tokenizer(load_embedded()[1], separators="##"), "got the text '##'"),
        (lambda model: live_bytes(4, tokens=-1, layers=2, kv_heads=2, head_dim=16), "`tokens` .* 0 or more, got -1"),
        (lambda model: live_bytes(4, tokens=9, layers=-1, kv_heads=2, head_dim=16), "`layers` .* 1 or more, got -1"),
        (
            lambda model: live_bytes(4, tokens=9, layers=2, kv_heads=2, head_dim=16, dtype="float16"),  # type: ignore[arg-type]
            "`dtype` must be a torch.dtype, got 'float16'",
        ),
        (lambda model: load_assistant(model, schedule=3), "`schedule` must be 'adaptive', .* got 3.*'constant'"),  # type: ignore[arg-type]
        (lambda model: load_assistant(model, target=make_model("llama"), schedule="fast"), "`schedule` .* got 'fast'"),  # type: ignore[arg-type]
        (lambda model: load_assistant(model, target="llama"), "must be a transformers PreTrainedModel, got str"),  # type: ignore[arg-type]
        (lambda model: load_assistant(model, confidence_threshold="high"), "`confidence_threshold` .* got 'high'"),  # type: ignore[arg-type]
        (lambda model: lookup_assistant("llama"), "must be a transformers PreTrainedModel, got str"),  # type: ignore[arg-type]
        (
            lambda model: lookup_assistant(model, ChunkReuseCache(model)),  # type: ignore[arg-type]
            "`store` must be a ChunkStore .*`cache.store`",
        ),
        (lambda model: lookup_assistant(model, num_assistant_tokens=1.5), "`num_assistant_tokens` .* got 1.5"),  # type: ignore[arg-type]
        (lambda model: lookup_assistant(model, max_ngram="8"), "`max_ngram` must be at most 8 tokens, .* got '8'"),  # type: ignore[arg-type]
        (lambda model: TreeDecoding(make_model("llama"), 8), "`config` must be a DraftTreeConfig or None, got 8"),  # type: ignore[arg-type]
        (lambda model: speculation_stats(3), "`assistant` must be a model that load_assistant.* got int"),  # type: ignore[arg-type]
        (lambda model: score_ids("llama", [([5], [6])]), "must be a transformers PreTrainedModel, got"),  # type: ignore[arg-type]
        (lambda model: score(model, None, "a", ["b"]), "`tokenizer` must be a tokenizer of transformers, got None"),
        (
            lambda model: score(model, load_embedded()[1], "a", None),
            "`continuations` a sequence of texts, .* and None",
        ),
        (
            lambda model: score_ids(model, [(5, 6)]),  # type: ignore[list-item]
            r"prefix of pair 0 must be ids of the shape",
        ),
        (lambda model: score_ids(model, [[5, 6, 7]]), r"Pair 0 must be ids .* got \[5, 6, 7\]"),  # type: ignore[list-item]
        (lambda model: score_ids(model, [([5], [6])], cache=DynamicCache()), "`cache` must be .*, got DynamicCache"),  # type: ignore[arg-type]
    ],
)
def test_other_types(llama: PreTrainedModel, call: Callable[[Any], object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        call(llama)


def test_salt(llama: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="`salt` must be str or bytes, got int"):
        ChunkReuseCache(llama, salt=5)  # type: ignore[arg-type]


def test_encoder_decoder() -> None:
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)  # type: ignore[call-arg]
    )
    with pytest.raises(ValueError, match="encoder-decoder"):
        ChunkReuseCache(model)


def test_a_model_on_meta() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
        )
    with pytest.raises(ValueError, match=r"meta device.*Load"):
        ChunkReuseCache(model)


def test_not_a_model() -> None:
    with pytest.raises(ValueError, match="must be a transformers PreTrainedModel, got Linear"):
        ChunkReuseCache(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


class TestAnotherModel:
    """Made for one model, passed to another."""

    @pytest.mark.parametrize("other_has_hooks", [True, False])
    def test_generate(self, llama: PreTrainedModel, other_has_hooks: bool) -> None:
        other = make_model("llama", seed=3)
        if other_has_hooks:
            ChunkReuseCache(other)
        cache = ChunkReuseCache(llama)
        with pytest.raises(CacheModelMismatchError, match=r"ChunkReuseCache\("):
            other.generate(**as_inputs(IDS), past_key_values=cache, max_new_tokens=2)
        assert len(cache.store) == 0
        found = llama.generate(**as_inputs(IDS), past_key_values=cache, max_new_tokens=2)
        assert torch.equal(found, llama.generate(**as_inputs(IDS), max_new_tokens=2))
        cache = ChunkReuseCache(make_model("llama"))
        with pytest.raises(CacheModelMismatchError, match=r"for a model that no longer exists, .*ChunkReuseCache\("):
            other.generate(**as_inputs(IDS), past_key_values=cache, max_new_tokens=2)

    def test_the_model_inside(self, llama: PreTrainedModel) -> None:
        for size in (None, 256):
            with pytest.raises(CacheModelMismatchError, match="not to a part of it"):
                llama.model(IDS, past_key_values=ChunkReuseCache(llama, max_cache_len=size))

    def test_a_store_of_another_model(self, llama: PreTrainedModel) -> None:
        with pytest.raises(ValueError, match="made for another model object"):
            ChunkReuseCache(make_model("llama"), ChunkStore(llama))


@pytest.mark.parametrize("given", [{}, {"input_ids": IDS[0]}], ids=["no ids", "one dimension"])
def test_a_forward_without_a_batch_raises_what_the_model_raises(llama: Any, given: dict[str, Any]) -> None:
    with pytest.raises((ValueError, IndexError, RuntimeError)) as plain:
        llama(**given, use_cache=True)
    with pytest.raises(type(plain.value)) as found:
        llama(**given, past_key_values=ChunkReuseCache(llama))
    assert str(found.value) == str(plain.value)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")
def test_a_store_in_place_of_a_cache(llama: Any, name: str) -> None:
    store: Any = ChunkStore(llama)
    for call in (llama, partial(llama.generate, max_new_tokens=2)):
        with pytest.raises(AttributeError, match=r"got a ChunkStore\. Pass ChunkReuseCache\(model, store\)"):
            call(IDS, **{name: store})
    with pytest.raises(AttributeError, match="'ChunkStore' object has no attribute 'warmth'"):
        store.warmth  # noqa: B018


class TestWarm:
    def test_text_needs_a_tokenizer(self, llama: PreTrainedModel) -> None:
        with pytest.raises(ValueError, match="needs `tokenizer`"):
            ChunkStore(llama).warm("hello")

    @pytest.mark.parametrize("ids", [[], [[1, 2], [3, 4]], torch.empty(1, 0, dtype=torch.long)])
    def test_shapes(self, llama: PreTrainedModel, ids: torch.Tensor) -> None:
        with pytest.raises(ValueError, match=r"ids of the shape \[n\] or \[1, n\]"):
            ChunkStore(llama).warm(ids)

    def test_more_than_fits(self, llama: PreTrainedModel) -> None:
        store = ChunkStore(llama, chunk_size=32, max_bytes=3 * (2 * 2 * 2 * 16 * 4 + 8) * 32)
        store.warm(IDS[:, :32])
        with pytest.raises(StoreFullError, match="A text of 200 tokens does not fit"):
            store.warm(random_ids(200, seed=2))
        assert store.stats()["pinned_chunks"] == 1
        store.warm(random_ids(200, seed=2), pin=False)
        assert store.stats()["bytes"] <= store.max_bytes
        cache = ChunkReuseCache(llama, store)
        llama.generate(**as_inputs(IDS[:, :40]), past_key_values=cache, max_new_tokens=1)
        assert cache.report.reused_tokens == 32  # what was pinned is still there

    def test_warming_twice_computes_once(self, llama: PreTrainedModel) -> None:
        store = ChunkStore(llama, chunk_size=32)
        assert store.warm(IDS).forwarded_tokens == 100
        assert store.warm(IDS[0].tolist()).forwarded_tokens == 4
        assert store.stats()["tokens"] == 96  # a tail of 4 is too short to be stored
        assert store.stats()["pinned_chunks"] == 3


def test_a_copy_of_a_cache_whose_model_is_gone() -> None:
    model = make_model("llama")
    cache = ChunkReuseCache(model)
    del model
    gc.collect()
    for copied in (cache.fork, partial(copy.copy, cache), partial(copy.deepcopy, cache)):
        with pytest.raises(ValueError, match="need the model that the cache was made for, which no longer exists"):
            copied()


def test_a_closed_store(llama: PreTrainedModel) -> None:
    store = ChunkStore(llama)
    cache = ChunkReuseCache(llama, store)
    store.close()
    with pytest.raises(StoreClosedError, match="Make a new one"):
        store.warm([1, 2, 3])
    with pytest.raises(StoreClosedError):
        llama.generate(**as_inputs(IDS), past_key_values=cache, max_new_tokens=1)


def test_salts_keep_apart(llama: PreTrainedModel) -> None:
    store = ChunkStore(llama, chunk_size=32)
    for salt, reused in [("a", 0), ("b", 0), ("a", 96), (b"b", 96), (None, 0)]:
        cache = ChunkReuseCache(llama, store, salt=salt)  # type: ignore[arg-type]
        llama.generate(**as_inputs(IDS), past_key_values=cache, max_new_tokens=1)
        assert cache.report.reused_tokens == reused
        if not reused:
            assert "never seen" in cache.report.explain()  # nor does the explanation tell


def test_two_threads_one_store(llama: PreTrainedModel) -> None:
    """Right answers and an exact budget, with evictions all the time."""
    check_model_compatibility(llama)
    store = ChunkStore(llama, chunk_size=32, max_bytes=12 * (2 * 2 * 2 * 16 * 4 + 8) * 32)
    prompts = [torch.cat([IDS[:, : 12 * i], random_ids(40, seed=i)], dim=1) for i in range(8)]
    expected = [llama.generate(**as_inputs(p), max_new_tokens=4) for p in prompts]
    problems: list[str] = []

    def work(offset: int) -> None:
        cache = ChunkReuseCache(llama, store)
        for i in range(25):
            at = (i * 3 + offset) % 8
            found = llama.generate(**as_inputs(prompts[at]), past_key_values=cache, max_new_tokens=4)
            if not torch.equal(found, expected[at]):
                problems.append(f"wrong answer to {at}")
            if store.stats()["bytes"] > store.max_bytes:
                problems.append("over budget")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert store.stats()["evictions"] > 0
    assert store.stats()["bytes"] == sum(c.nbytes for c in store.inspect().chunks.values())


def test_an_evicted_ancestor_comes_back(llama: PreTrainedModel) -> None:
    """The live cache goes on with a conversation whose beginning the store has given up."""
    check_model_compatibility(llama)
    store = ChunkStore(llama, chunk_size=32, max_bytes=6 * (2 * 2 * 2 * 16 * 4 + 8) * 32)
    cache = ChunkReuseCache(llama, store)
    llama.generate(**as_inputs(IDS), past_key_values=cache, max_new_tokens=1)
    store.clear()
    longer = torch.cat([IDS, random_ids(60, seed=2)], dim=1)
    llama.generate(**as_inputs(longer), past_key_values=cache, max_new_tokens=1)
    fresh = ChunkReuseCache(llama, store)
    found = llama.generate(**as_inputs(longer), past_key_values=fresh, max_new_tokens=5)
    assert fresh.report.reused_tokens == 159
    assert torch.equal(found, llama.generate(**as_inputs(longer), max_new_tokens=5))
