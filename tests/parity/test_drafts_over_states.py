"""Drafts for models with states: chains, whose states go back where drafts are rejected."""

from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from kvboost_hf import (
    ChunkReuseCache,
    ChunkStore,
    DraftTreeConfig,
    KVBoost,
    ReusePolicy,
    TreeDecoding,
    attach,
    check_model_compatibility,
    detach,
    load_assistant,
    lookup_assistant,
    speculation_stats,
)
from tests.architectures.models import make_architecture
from tests.conftest import as_inputs, counted, make_model, random_ids
from tests.internals.assisted import drafting_reason
from tests.parity.test_assistants import noisy
from tests.server.test_worker import numbers

CHUNK = 32
LONG = DraftTreeConfig(policy="tree", depth=5)  # of a length that does not depend on how long anything takes
FAMILIES = (
    "qwen3_next",
    "qwen3_5_text",
    "falcon_h1",
    "nemotron_h",
    "mamba2",
    "lfm2",
    "kimi_linear",
    "zamba2",
    "olmo_hybrid",
    "granitemoehybrid",
    "bamba",
    "zaya",
    "deepseek_v4",
)


def drafting(name: str, kind: str, model: PreTrainedModel, store: ChunkStore) -> TreeDecoding:
    """Drafts that are always right, often wrong, always wrong, or looked up."""
    if kind == "lookup":
        return TreeDecoding(lookup_assistant(model, store), LONG)
    draft = make_model("llama") if kind == "wrong" else make_architecture(name)
    return TreeDecoding(noisy(draft, 0.02) if kind == "noisy" else draft, LONG)


@pytest.mark.daily
@pytest.mark.parametrize(
    ("name", "kind", "length", "count"),
    [
        *((name, "right", CHUNK, 13) for name in FAMILIES),
        *((name, "noisy", CHUNK + 1, 16) for name in FAMILIES),
        ("qwen3_next", "lookup", 2 * CHUNK, 12),
        ("falcon_h1", "lookup", 2 * CHUNK, 12),
        ("qwen3_next", "noisy", 1, 7),
        ("qwen3_next", "wrong", 5, 40),  # more rejected drafts than states may lag behind
        ("mamba2", "wrong", 5, 40),
    ],
)
def test_answers_and_what_is_left(name: str, kind: str, length: int, count: int) -> None:
    """Around borders of chunks, and of drafts; then a second call with the same cache."""
    model = make_architecture(name)
    check_model_compatibility(model)
    assert drafting_reason(model) is None
    base = random_ids(2 * CHUNK, seed=3)
    ids = base[:, :length]
    ids = torch.cat([ids, ids[:, :9]], dim=1) if kind == "lookup" else ids
    stores = [ChunkStore(model, chunk_size=CHUNK) for _ in range(2)]
    left = ChunkReuseCache(model, stores[0])
    plain = model.generate(**as_inputs(ids), max_new_tokens=count, cache=left)
    cache, trees = ChunkReuseCache(model, stores[1]), drafting(name, kind, model, stores[1])
    with counted(model) as work:
        found = model.generate(**as_inputs(ids), max_new_tokens=count, cache=cache, custom_generate=trees)
    assert torch.equal(found, plain)
    assert cache.get_seq_length() == plain.shape[1] - 1
    stats = speculation_stats(trees)
    assert stats.committed + stats.plain == count
    if kind == "right":
        assert stats.acceptance == 1
        assert stats.passes_per_token < 0.25
        assert work.tokens == plain.shape[1] - 1  # nothing twice
    more = torch.cat([plain, base[:, :5]], dim=1)
    texts = [model.generate(**as_inputs(more), max_new_tokens=6, cache=each) for each in (left, cache)]
    assert torch.equal(*texts)
    assert cache.report.forwarded_tokens == left.report.forwarded_tokens
    assert len(stores[0]) == len(stores[1])
    if name != "deepseek_v4":
        assert stores[1].check_integrity().wrong == 0


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "lfm2", "zaya"])
def test_other_caches(name: str) -> None:
    """None, one of transformers, and that of an attached model, for the draft, too."""
    model, draft = make_architecture(name), noisy(make_architecture(name), 0.02)
    told = {**as_inputs(random_ids(40, seed=1)), "max_new_tokens": 30}
    wanted = model.generate(**told)
    stock = DynamicCache(config=model.config)
    for cache in (None, stock):
        assert torch.equal(model.generate(**told, cache=cache, custom_generate=TreeDecoding(draft, LONG)), wanted)
    assert not any(getattr(layer, "record_past", False) for layer in stock.layers)
    assert torch.equal(model.generate(wanted, max_new_tokens=9, cache=stock), model.generate(wanted, max_new_tokens=9))
    for each in (model, draft):
        attach(each, ChunkStore(each, chunk_size=CHUNK))
    for _ in range(2):
        assert torch.equal(model.generate(**told, custom_generate=TreeDecoding(draft, LONG)), wanted)
    detach(model)
    detach(draft)


def test_ends_and_processors() -> None:
    model, draft = make_model("qwen3_next"), make_model("qwen3_next")
    told: dict[str, Any] = {**as_inputs(random_ids(30, seed=2)), "max_new_tokens": 20}
    said = model.generate(**told)[0, 30:].tolist()
    for more in (
        {"eos_token_id": said[7]},  # inside an accepted draft
        {"eos_token_id": said[0]},
        {"repetition_penalty": 1.3},
        {"max_new_tokens": 1},
        {"max_new_tokens": 3},
        {"prefill_chunk_size": 7},
        {"return_dict_in_generate": True, "output_logits": True},
    ):
        cache, asked = ChunkReuseCache(model, ChunkStore(model, chunk_size=CHUNK)), {**told, **more}
        wanted = model.generate(**asked)
        found = model.generate(**asked, cache=cache, custom_generate=TreeDecoding(draft, LONG))
        assert torch.equal(*(each if isinstance(each, torch.Tensor) else each.sequences for each in (found, wanted)))
        if "output_logits" in more:
            torch.testing.assert_close(torch.cat(found.logits), torch.cat(wanted.logits), atol=2e-4, rtol=2e-4)
    padded = {"input_ids": told["input_ids"].clone(), "attention_mask": torch.ones_like(told["input_ids"])}
    padded["input_ids"][:, :6], padded["attention_mask"][:, :6] = 0, 0
    found = model.generate(**padded, max_new_tokens=9, cache=cache, custom_generate=TreeDecoding(draft, LONG))
    assert torch.equal(found, model.generate(**padded, max_new_tokens=9))


@pytest.mark.slow
def test_samples_have_the_distribution_of_the_target() -> None:
    model, draft = make_model("qwen3_next"), noisy(make_model("qwen3_next"), 0.05)
    told = {**as_inputs(random_ids(12, seed=4)), "max_new_tokens": 3, "do_sample": True, "top_k": 2}
    torch.manual_seed(0)
    trees, cache = TreeDecoding(draft, LONG), ChunkReuseCache(model)
    plain = Counter(tuple(row) for row in model.generate(**told, num_return_sequences=600)[:, 12:].tolist())
    found = Counter(
        tuple(model.generate(**told, cache=cache, custom_generate=trees)[0, 12:].tolist()) for _ in range(100)
    )
    assert speculation_stats(trees).accepted > 10
    assert sum(abs(plain[key] / 600 - found[key] / 100) for key in plain | found) < 0.4


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "nemotron_h"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_check_leaves_no_trace(name: str, error: type[BaseException]) -> None:
    model = make_architecture(name)
    assert drafting_reason(model) is None
    ids, seen = random_ids(50, seed=5), 0

    def fail(_: Any, args: Any, kwargs: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == 4:  # with tokens that it carries
            raise error

    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=CHUNK))
    trees = TreeDecoding(noisy(make_architecture(name), 0.02), LONG)
    base: Any = model.base_model
    handle = base.layers[1].register_forward_pre_hook(fail, with_kwargs=True)
    with pytest.raises(error):
        model.generate(**as_inputs(ids), max_new_tokens=20, cache=cache, custom_generate=trees)
    handle.remove()
    for more in (ids, torch.cat([ids, ids[:, :3]], dim=1)):
        wanted = model.generate(**as_inputs(more), max_new_tokens=8)
        assert torch.equal(model.generate(**as_inputs(more), max_new_tokens=8, cache=cache), wanted)
    assert cache.store.check_integrity().wrong == 0


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1", "lfm2", "deepseek_v4"])
def test_crop(name: str) -> None:
    """Whatever comes next: a token, several, other rows, another prompt, a copy, or what a bare forward returns."""
    model = make_architecture(name)
    check_model_compatibility(model)
    ids = random_ids(90, seed=6)
    with torch.no_grad():
        right = model(ids).logits

        def run(cache: ChunkReuseCache, start: int, stop: int, **more: Any) -> int:
            with counted(model) as work:
                found = model(ids[:, start:stop], cache=cache, logits_to_keep=stop - start, **more).logits
            torch.testing.assert_close(found, right[:, start:stop], atol=5e-4, rtol=5e-4)
            assert cache.get_seq_length() == stop
            return work.tokens

        for records, most in (True, 12), (False, 90):
            cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=CHUNK), ReusePolicy(min_prefill_saving=0))
            model(ids[:, :70], cache=cache, logits_to_keep=1)
            if records:
                cache.activate_past_recording()
            run(cache, 70, 78)
            cache.crop(-5)
            cache.crop(-1)
            assert cache.get_seq_length() == 72
            twin = cache.fork()
            assert run(cache, 72, 74) <= most
            cache.crop(73)
            assert run(cache, 73, 74) <= most
            run(cache, 74, 80)
            if records or name == "lfm2":
                continue
            run(twin.fork(), 72, 75, output_hidden_states=True)  # not with others in front of its own
            behind_one = model(ids[:, 72:75], cache=twin.fork(), logits_to_keep=-1).logits
            torch.testing.assert_close(behind_one, right[:, 73:75], atol=5e-4, rtol=5e-4)
            run(twin, 72, 75)
            twin.crop(-2)
            twin.batch_repeat_interleave(2)
            twin.batch_select_indices(torch.tensor([1]))
            run(twin, 73, 80)
            twin.crop(0)
            twin.crop(-80)
            assert twin.get_seq_length() == 0
            run(twin, 0, 30)
            twin.crop(-9)
            other = random_ids(40, seed=7)
            wanted = model.generate(**as_inputs(other), max_new_tokens=5)
            assert torch.equal(model.generate(**as_inputs(other), max_new_tokens=5, cache=twin), wanted)


@pytest.mark.daily
@pytest.mark.parametrize(
    ("name", "records", "by_generate"),
    [*(("qwen3_next", *how) for how in product([True, False], repeat=2)), ("mamba2", True, False)],
)
def test_a_forward_that_fails_leaves_cropped_tokens_to_the_next_one(
    name: str, records: bool, by_generate: bool
) -> None:
    """Also where one was cropped together with a later token, and where ids that follow come with generate()."""
    model: Any = make_architecture(name)
    ids = random_ids(80, seed=6)
    check_model_compatibility(model)

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    with torch.no_grad():
        cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=CHUNK))
        model(ids[:, :70], cache=cache, logits_to_keep=1)
        if records:
            cache.activate_past_recording()
        for start, stop in ((70, 78), (78, 79)):
            model(ids[:, start:stop], cache=cache, logits_to_keep=stop - start)
        cache.crop(-3)
        lag = cache.lag
        assert lag == (6 if records else 76)
        shown = model(ids[:, 76:78], cache=cache.fork(), logits_to_keep=2, output_hidden_states=True)
        assert shown.hidden_states[0].shape[1] == 2  # none of those in front
        for run in (cache.catch_up, lambda: model(ids[:, 76:78], cache=cache, logits_to_keep=2)):
            assert (cache.get_seq_length(), cache.lag) == (76, lag)
            handle = model.base_model.layers[1].register_forward_pre_hook(fail)
            with pytest.raises(KeyboardInterrupt):
                run()
            handle.remove()
        with counted(model) as work:
            if by_generate:
                told = {"attention_mask": torch.ones(1, 80, dtype=torch.long), "max_new_tokens": 3}
                wanted = model.generate(**as_inputs(ids), max_new_tokens=3)
                work.tokens = 0
                assert torch.equal(model.generate(ids[:, 76:], cache=cache, **told), wanted[:, 76:])
            else:
                found = model(ids[:, 76:], cache=cache, logits_to_keep=4).logits
                torch.testing.assert_close(found, model(ids).logits[:, 76:], atol=5e-4, rtol=5e-4)
                work.tokens -= 80
        assert work.tokens <= lag + 6
        if name == "mamba2":
            return
        sized = ChunkReuseCache(model, max_cache_len=80)
        model(ids[:, :70], cache=sized, logits_to_keep=1)
        sized.crop(-2)
        with pytest.raises(ValueError, match="`max_cache_len`=80 is too small"):
            model(random_ids(90, seed=6)[:, 68:], cache=sized, logits_to_keep=1)
        assert sized.get_seq_length() == 68


def test_what_states_cannot_do_is_said() -> None:
    model, draft = make_model("qwen3_next"), make_model("qwen3_next")
    told: dict[str, Any] = {**as_inputs(random_ids(10, seed=0)), "max_new_tokens": 4}
    cache = ChunkReuseCache(model)
    with pytest.raises(ValueError, match="not supported with stateful models"):
        model.generate(**told, assistant_model=load_assistant(make_model("llama"), target=model), cache=cache)
    with pytest.raises(ValueError, match="`num_beams` must be 1"):
        model.generate(**told, custom_generate=TreeDecoding(draft), num_beams=2)
    jamba = make_architecture("jamba")
    with pytest.raises(ValueError, match="several drafted tokens in one forward: a prompt in two parts gives other"):
        jamba.generate(**told, custom_generate=TreeDecoding(draft))
    with torch.no_grad():
        model(told["input_ids"].repeat(2, 1), cache=cache, logits_to_keep=1, position_ids=torch.full((2, 10), 3))
        with pytest.raises(RuntimeError, match="it is not known which tokens they hold"):
            cache.crop(-3)


def test_the_facade() -> None:
    model, tokenizer = make_model("qwen3_next"), numbers()
    plain = KVBoost(model, tokenizer).generate("7,8,9,7,8,9", max_new_tokens=12).output_text
    with pytest.warns(UserWarning, match="drafting will take longer"):
        engine = KVBoost(model, tokenizer, assistant=make_model("qwen3_next"))
    assert engine.generate("7,8,9,7,8,9", max_new_tokens=12).output_text == plain
    stats = engine.speculative_stats()
    assert stats is not None
    assert stats.passes_per_token < 1
