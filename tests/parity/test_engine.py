"""`KVBoost`: its answers against plain generate(), and what it computes for them."""

import random
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import kvboost_hf
from kvboost_hf import (
    DraftTreeConfig,
    GenerationMode,
    KVBoost,
    RecomputeStrategy,
    ReusePolicy,
    StreamingConfig,
    TreeDecoding,
    attach,
    detach,
    load_streamed,
)
from kvboost_hf.assets import EMBEDDED_DRAFT_DIR, EMBEDDED_MODEL_DIR, load_embedded, load_embedded_draft
from kvboost_hf.config import Repair
from kvboost_hf.errors import StoreFullError
from tests.conftest import FULL_ATTENTION, STATEFUL, VOCAB, WINDOWED, counted, make_model, random_ids
from tests.internals.assets import ChatTurn, chat_messages, make_documents
from tests.internals.cache import REPAIRS
from tests.internals.engine import EngineSettings, Watch
from tests.internals.engine import kvboost as engine_module
from tests.internals.migration import TABLE

NEW = 10
DOCUMENTS = [
    "Maria lives in Rome. She owns the lamp. It is red and costs ten coins. " * 6,
    "Anna lives in Oslo. She plays the piano. The bridge is long and old. " * 6,
]
QUESTIONS = ["Where does Maria live?", "What colour is the lamp that she owns, and what does it cost?", "Who?"]


@pytest.fixture(scope="module")
def embedded() -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    return load_embedded()


@pytest.fixture
def engine(embedded: tuple[PreTrainedModel, Any]) -> KVBoost:
    return KVBoost(*embedded, chunk_size=32)


def plain(engine: KVBoost, prompt: str, **kwargs: Any) -> tuple[int, ...]:
    ids = torch.tensor([sent(engine, prompt)])
    given = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": NEW, **kwargs}
    return tuple(engine.model.generate(ids, **given)[0, ids.shape[1] :].tolist())


def sent(engine: KVBoost, prompt: str) -> list[int]:
    """What a prompt is to the model: a user's message, where there is a template that was not applied yet."""
    if engine.tokenizer.chat_template is None or "<|im_start|>" in prompt:
        return list(engine.tokenizer(prompt)["input_ids"])
    turn = [{"role": "user", "content": prompt}]
    return list(engine.tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False))


def chat(engine: KVBoost, question: str) -> str:
    turn = [{"role": "user", "content": f"{DOCUMENTS[0]}\n\n{question}"}]
    return str(engine.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))


def tokens_of(engine: KVBoost, text: str) -> int:
    return len(engine.tokenizer(text)["input_ids"])


# Single prompts


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_every_mode_without_a_strategy_gives_the_answers_of_plain_generate(engine: KVBoost, mode: str) -> None:
    for prompt in (DOCUMENTS[0] + QUESTIONS[0], DOCUMENTS[0] + QUESTIONS[1], DOCUMENTS[1] + QUESTIONS[2]):
        result = engine.generate(prompt, NEW, mode)
        assert result.token_ids == plain(engine, prompt)
        assert result.output_text == engine.tokenizer.decode(result.token_ids, skip_special_tokens=True)
        assert (result.mode, result.prompt, result.generated_tokens) == (mode, prompt, len(result.token_ids))
        assert result.prompt_tokens == len(sent(engine, prompt))
        assert 0 < result.ttft_ms <= result.total_ms
        assert result.tokens_per_sec == pytest.approx(1000 * result.generated_tokens / result.total_ms)


def test_a_prompt_that_was_seen_is_computed_from_where_it_differs(engine: KVBoost) -> None:
    engine.generate(DOCUMENTS[0] + QUESTIONS[0], 1)
    prompt = DOCUMENTS[0] + QUESTIONS[1]
    shared = tokens_of(engine, DOCUMENTS[0])
    for mode, most in ((GenerationMode.CHUNK_KV_REUSE, 40), (GenerationMode.PREFIX_CACHE, 40 + 32)):
        with counted(engine.model) as work:
            result = engine.generate(prompt, 1, mode)
        assert work.tokens == result.prompt_tokens - result.cached_tokens < most
        assert result.kv_reuse_ratio == result.cached_tokens / result.prompt_tokens > 0.5
        assert result.report.reused_tokens == result.cached_tokens
    assert result.cached_tokens >= shared - 32
    with counted(engine.model) as work:
        result = engine.generate(prompt, 1, GenerationMode.BASELINE)
    assert work.tokens == result.prompt_tokens == result.report.forwarded_tokens
    assert result.cached_tokens == 0


def test_a_baseline_of_an_attached_model_is_refused(embedded: tuple[PreTrainedModel, Any]) -> None:
    engine = KVBoost(*embedded)
    attach(engine.model)
    try:
        with pytest.raises(ValueError, match="detach"):
            engine.generate("Who?", mode="baseline")
        with pytest.raises(ValueError, match="detach"):
            KVBoost(*embedded)
    finally:
        detach(engine.model)


def test_sampling_draws_what_plain_generate_draws(engine: KVBoost) -> None:
    prompt = DOCUMENTS[0] + QUESTIONS[0]
    engine.warm(DOCUMENTS[0])
    torch.manual_seed(3)
    expected = plain(engine, prompt, do_sample=True, temperature=1.5, top_k=50)
    torch.manual_seed(3)
    assert engine.generate(prompt, NEW, temperature=1.5, do_sample=True, top_k=50).token_ids == expected


def test_stop_strings_need_no_tokenizer(engine: KVBoost) -> None:
    prompt = DOCUMENTS[1] + QUESTIONS[0]
    full = engine.generate(prompt, NEW)
    stop = engine.tokenizer.decode(full.token_ids[1])
    assert engine.generate(prompt, NEW, stop_strings=[stop]).token_ids == plain(
        engine, prompt, stop_strings=[stop], tokenizer=engine.tokenizer
    )
    assert engine.generate(prompt, NEW, stopping_criteria=None).token_ids == full.token_ids


def test_prefill_chunks_are_a_setting(embedded: tuple[PreTrainedModel, Any]) -> None:
    engine = KVBoost(*embedded, prefill_chunk_size=48)
    prompt = DOCUMENTS[0] + QUESTIONS[0]
    with counted(engine.model) as work:
        result = engine.generate(prompt, NEW)
    assert result.token_ids == plain(engine, prompt)
    assert work.calls == -(-result.prompt_tokens // 48) + result.generated_tokens - 1
    with counted(engine.model) as work:
        engine.generate(prompt, 2, GenerationMode.BASELINE, prefill_chunk_size=0)  # all at once
    assert work.calls == 2
    with pytest.raises(ValueError, match="`prefill_chunk_size` must be an int of 0 or more, got -2"):
        engine.generate(prompt, prefill_chunk_size=-2)


def test_methods_of_kvboost_that_are_gone_say_what_to_do(engine: KVBoost) -> None:
    for entry in TABLE["methods"]:
        for name in entry.names:
            if not hasattr(KVBoost, name.removeprefix("KVBoost.")):
                with pytest.raises(AttributeError, match=re.escape(f"no `{name}`. {entry.note}")):
                    getattr(engine, name.removeprefix("KVBoost."))
    with pytest.raises(AttributeError, match=r"no `KVBoost.nothing`\.$"):
        engine.nothing  # type: ignore[attr-defined]  # noqa: B018


# Texts and chats

SYSTEM = {"role": "system", "content": "You read documents and answer questions about them. You do it with care."}


def asked(document: str, question: str) -> str:
    return f"{document}\n\n{question}"


def test_texts_are_answered_as_a_users_message(engine: KVBoost) -> None:
    prompt = asked(DOCUMENTS[0], QUESTIONS[0])
    rendered = chat(engine, QUESTIONS[0])
    found = [engine.generate(prompt), engine.generate(rendered), engine.chat([{"role": "user", "content": prompt}])]
    assert [result.output_text for result in found] == ["Maria lives in Rome."] * 3
    assert {result.prompt_tokens for result in found} == {len(sent(engine, rendered))}
    assert [result.prompt for result in found[:2]] == [prompt, rendered]


def test_texts_are_sent_as_they_are_where_that_is_asked_for(embedded: tuple[PreTrainedModel, Any]) -> None:
    raw = KVBoost(*embedded, chunk_size=32, chat_template=False)
    prompt = asked(DOCUMENTS[0], QUESTIONS[0])
    warmed, result = raw.warm(DOCUMENTS[0]), raw.generate(prompt, NEW)
    ids = raw.tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    out = raw.model.generate(**ids, max_new_tokens=NEW, do_sample=False)
    assert result.token_ids == tuple(out[0, ids["input_ids"].shape[1] :].tolist())
    assert warmed.token_count == tokens_of(raw, DOCUMENTS[0])
    assert raw.chat([{"role": "user", "content": prompt}]).output_text == "Maria lives in Rome."


@pytest.mark.parametrize("templated", [True, False])
@pytest.mark.parametrize(("ends", "goes_on"), [(" ", ""), ("", " "), ("", "\n\n"), ("\n\n", "")])
def test_what_is_warmed_is_what_prompts_begin_with(
    embedded: tuple[PreTrainedModel, Any], templated: bool, ends: str, goes_on: str
) -> None:
    engine = KVBoost(*embedded, chunk_size=32, chat_template=templated)
    text = DOCUMENTS[0].strip() + ends
    warmed = engine.warm(text)
    assert warmed.token_count >= tokens_of(engine, text) - 1
    lost = 0 if templated else 1  # a space at the end becomes a part of the next word
    assert engine.generate(text + goes_on + QUESTIONS[0], 1).cached_tokens >= warmed.token_count - lost


def test_a_system_message_is_warmed_for_chats(engine: KVBoost) -> None:
    warmed = engine.warm([SYSTEM])
    messages = [SYSTEM, {"role": "user", "content": asked(DOCUMENTS[0], QUESTIONS[0])}]
    result = engine.chat(messages, NEW)
    assert result.cached_tokens >= warmed.token_count > tokens_of(engine, SYSTEM["content"])
    assert result.token_ids == plain(
        engine, engine.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    )
    assert result.prompt == messages
    assert "".join(engine.stream(messages, NEW)) == result.output_text
    assert engine.generate_many([messages, "Who?"], NEW)[0].token_ids == result.token_ids
    grown = [*messages, {"role": "assistant", "content": result.output_text}]
    assert engine.warm(grown).cached_tokens >= result.prompt_tokens - 32


def test_messages_need_a_template() -> None:
    engine = words_engine("llama")
    with pytest.raises(ValueError, match=r"Messages need a chat template, .* set tokenizer.chat_template"):
        engine.chat([{"role": "user", "content": "w2 w3"}])
    assert engine.generate("w2 w3", 1).prompt_tokens == 2


# Strategies


@pytest.mark.parametrize("strategy", list(RecomputeStrategy))
def test_strategies_find_documents_in_another_order(
    embedded: tuple[PreTrainedModel, Any], strategy: RecomputeStrategy
) -> None:
    engine = KVBoost(*embedded, recompute_strategy=strategy, chunk_size=32, sink_tokens=4)
    engine.generate("".join(DOCUMENTS) + QUESTIONS[0], 1)
    prompt = "".join(DOCUMENTS[::-1]) + QUESTIONS[0]
    exact = engine.generate(prompt, NEW, GenerationMode.PREFIX_CACHE)
    assert exact.cached_tokens < 32
    assert exact.token_ids == plain(engine, prompt)
    engine.reset_cache()
    engine.generate("".join(DOCUMENTS) + QUESTIONS[0], 1)
    result = engine.generate(prompt, 1)
    assert result.report.moved_tokens > result.prompt_tokens / 2
    assert (result.report.recomputed_tokens == 0) == (strategy is RecomputeStrategy.NONE)
    assert result.cached_tokens == result.report.reused_tokens > result.prompt_tokens / 4


def test_strategies_are_the_repairs_of_these_names() -> None:
    assert set(RecomputeStrategy) == set(get_args(Repair)) == {"auto", *REPAIRS}
    for strategy in RecomputeStrategy:
        settings = EngineSettings(recompute_strategy=strategy, recompute_overlap=7, overlap_k=3)
        assert settings.policy() == ReusePolicy(
            mode="blend",
            repair=strategy.value,
            seam_tokens=7,
            overlap_k=3,
        )


def diverged(embedded: tuple[PreTrainedModel, Any], strategy: str) -> list[int]:
    """Which prompts about linked documents, seen in another order before, are answered otherwise than plainly."""
    engine = KVBoost(
        *embedded,
        recompute_strategy=strategy,
        progressive=False,
        chunk_size=32,
        chunk_boundary_window=8,
        min_prefill_saving=0,
    )
    found = []
    for seed in range(12):
        rng = random.Random(seed)
        documents = make_documents(rng, 4, num_words=48, pronoun_start=True)  # "She" is who the one before names
        asked = documents[rng.randrange(1, 4)].facts[0]
        engine.reset_cache()
        for ordered in (documents[::-1], documents):
            messages = chat_messages([ChatTurn(tuple(ordered), asked)])
            prompt = engine.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            result = engine.generate(prompt, NEW)
        assert result.report.moved_tokens
        if result.token_ids != plain(engine, prompt):
            found.append(seed)
    return found


def test_selective_mends_what_moving_alone_breaks(embedded: tuple[PreTrainedModel, Any]) -> None:
    assert len(diverged(embedded, "none")) >= 3
    assert diverged(embedded, "selective") == []


def test_everything_computed_again_gives_the_answers_of_plain_generate(embedded: tuple[PreTrainedModel, Any]) -> None:
    engine = KVBoost(
        *embedded, recompute_strategy="cacheblend", recompute_ratio=1.0, chunk_size=32, min_prefill_saving=0
    )
    engine.generate("".join(DOCUMENTS) + QUESTIONS[0], 1)
    prompt = "".join(DOCUMENTS[::-1]) + QUESTIONS[0]
    result = engine.generate(prompt, NEW)
    assert result.report.moved_tokens
    assert result.token_ids == plain(engine, prompt)


# Other architectures


def words_engine(name: str, **options: Any) -> KVBoost:
    """A tiny random model that reads `w2 w3 …`."""
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w1"))
    words.pre_tokenizer = WhitespaceSplit()
    return KVBoost(make_model(name), PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0"), **options)


def words(n: int, seed: int) -> str:
    return " ".join(f"w{i}" for i in random_ids(n, seed)[0].tolist()) + " "


@pytest.mark.parametrize("name", [*FULL_ATTENTION, *WINDOWED, *STATEFUL])
def test_architectures_are_answered_as_by_plain_generate(name: str) -> None:
    engine = words_engine(name, chunk_size=32)
    document = words(100, seed=1)
    prompts = [document + words(n, seed=n) for n in (5, 40, 12)]
    alone = [plain(engine, prompt) for prompt in prompts]
    engine.warm(document)
    with counted(engine.model) as work:
        results = [engine.generate(prompt, NEW) for prompt in prompts]
    assert [result.token_ids for result in results] == alone
    assert sum(result.cached_tokens for result in results) >= 3 * 96
    assert work.tokens == sum(r.prompt_tokens - r.cached_tokens + r.generated_tokens - 1 for r in results)
    engine.reset_cache()
    batch = engine.generate_batch(prompts, NEW)
    assert [result.token_ids for result in batch] == alone
    if name not in STATEFUL:  # whose rows cannot be padded
        assert sum(result.cached_tokens for result in batch) >= 2 * 64
    assert [result.token_ids for result in engine.generate_many(prompts[::-1], NEW)] == alone[::-1]


def test_answers_come_from_what_is_stored() -> None:
    """The control: with zeroed K/V the answer must be another one."""
    engine = words_engine("llama", chunk_size=32)
    prompt = words(100, seed=1)
    engine.warm(prompt)
    for chunk in engine.store.inspect().chunks.values():
        for block in chunk.kv.tensors:
            block.zero_()
    assert engine.generate(prompt, NEW).token_ids != plain(engine, prompt)


# Streams


@pytest.mark.parametrize("drafts", [None, "chain", "tree"])
def test_pieces_join_to_the_text(embedded: tuple[PreTrainedModel, Any], drafts: str | None) -> None:
    trees = TreeDecoding(load_embedded_draft(), DraftTreeConfig(depth=4)) if drafts == "tree" else None
    engine = KVBoost(*embedded, assistant=trees or (load_embedded_draft() if drafts else None))
    prompt = chat(engine, QUESTIONS[0])
    pieces = list(engine.stream(prompt, 24))
    assert len(pieces) > 1
    assert all(pieces)
    result = engine.generate(prompt, 24)
    assert "".join(pieces) == result.output_text
    assert result.token_ids == plain(engine, prompt, max_new_tokens=24)
    stats = engine.speculative_stats()
    assert (stats is not None and stats.rounds > 0) == (drafts is not None)


def test_closing_a_stream_ends_the_call(engine: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled, calls = threading.Event(), 0

    def wait_at_the_20th(*_: Any) -> None:
        nonlocal calls
        calls += 1
        assert calls < 20 or cancelled.wait(60)

    cancel = Watch.cancel
    monkeypatch.setattr(Watch, "cancel", lambda watch: (cancel(watch), cancelled.set()))
    hook = engine.model.lm_head.register_forward_hook(wait_at_the_20th)
    stream = engine.stream(chat(engine, QUESTIONS[0]), 500, min_new_tokens=500)
    assert next(stream)
    stream.close()  # type: ignore[attr-defined]
    hook.remove()
    assert calls <= 20
    prompt = DOCUMENTS[0] + QUESTIONS[0]
    assert engine.generate(prompt, NEW).token_ids == plain(engine, prompt)


def test_errors_reach_whoever_reads_a_stream(engine: KVBoost) -> None:
    with pytest.raises(ValueError, match="max_new_tokens"):
        engine.stream("Who?", 0)
    hook = engine.model.lm_head.register_forward_hook(_fail)
    stream = engine.stream("Who lives in Rome?", NEW)
    with pytest.raises(RuntimeError, match="broken on purpose"):
        list(stream)
    hook.remove()
    assert "".join(engine.stream("Who lives in Rome?", NEW)) == engine.generate("Who lives in Rome?", NEW).output_text


def test_a_tokenizer_that_fails_ends_a_stream(engine: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = threading.active_count()
    stream = engine.stream("Who lives in Rome?", NEW)
    with monkeypatch.context() as patch:
        patch.setattr(engine.tokenizer, "decode", _fail)
        with pytest.raises(RuntimeError, match="broken on purpose"):
            list(stream)
    for _ in engine.stream("Who lives in Rome?", NEW):
        break
    assert threading.active_count() == threads


def _fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("broken on purpose")


def test_calls_of_several_threads_do_not_meet(engine: KVBoost) -> None:
    prompts = [DOCUMENTS[at % 2] + QUESTIONS[at % 3] for at in range(6)]
    stream = engine.stream(prompts[0], NEW)
    first = next(stream)
    with ThreadPoolExecutor(3) as threads:
        results = list(threads.map(lambda prompt: engine.generate(prompt, NEW), prompts))
    assert [result.token_ids for result in results] == [plain(engine, prompt) for prompt in prompts]
    assert first + "".join(stream) == results[0].output_text


# Many prompts


def test_unequal_rows_of_a_batch_are_answered_as_alone(engine: KVBoost) -> None:
    prompts = [DOCUMENTS[0] + question for question in QUESTIONS] + [DOCUMENTS[0] + DOCUMENTS[1] + QUESTIONS[0]]
    alone = [plain(engine, prompt) for prompt in prompts]
    with counted(engine.model) as work:
        results = engine.generate_batch(prompts, NEW)
    assert [result.token_ids for result in results] == alone
    assert [result.prompt for result in results] == prompts
    shared = tokens_of(engine, DOCUMENTS[0])
    total = sum(result.prompt_tokens for result in results)
    computed = total - sum(result.cached_tokens for result in results)
    first, *others = sorted(result.cached_tokens for result in results)
    assert first == 0  # one of them has computed what all begin with
    assert others[0] > shared - 32
    report = results[0].report
    assert computed == report.prompt_tokens - report.reused_tokens
    assert computed <= report.forwarded_tokens < computed + 32  # rows with less to reuse go ahead of the others
    # Padding and decoding go through the model, too.
    width = max(result.prompt_tokens for result in results)
    assert report.forwarded_tokens <= work.tokens <= shared + len(prompts) * (width - shared + NEW)


def test_rows_end_each_for_itself(engine: KVBoost) -> None:
    prompts = [chat(engine, question) for question in QUESTIONS]
    results = engine.generate_batch(prompts, 30)
    assert [result.token_ids for result in results] == [plain(engine, prompt, max_new_tokens=30) for prompt in prompts]
    assert len({result.generated_tokens for result in results}) > 1
    assert all(result.token_ids[-1] == engine.model.generation_config.eos_token_id for result in results)
    end = engine.model.generation_config.eos_token_id
    for told in (torch.tensor([end]), torch.tensor(end), np.array([end])):
        again = engine.generate_batch(prompts, 30, eos_token_id=told)
        assert [result.token_ids for result in again] == [result.token_ids for result in results]


def test_any_prompts_are_answered_in_their_order(engine: KVBoost) -> None:
    prompts = [DOCUMENTS[at % 2] + QUESTIONS[at % 3] for at in range(5)] + ["Who lives in Rome?"]
    results = engine.generate_many(prompts, NEW, max_batch_size=2)
    assert [result.prompt for result in results] == prompts
    assert [result.token_ids for result in results] == [plain(engine, prompt) for prompt in prompts]
    computed = sum(result.prompt_tokens - result.cached_tokens for result in results)
    assert computed < 2 * tokens_of(engine, "".join(DOCUMENTS))
    with pytest.raises(ValueError, match=r"`max_batch_size` must be an int of 1 or more, got 1\.5"):
        engine.generate_many(prompts, NEW, max_batch_size=1.5)  # type: ignore[arg-type]
    assert engine.generate_many([]) == engine.generate_batch([]) == []


def test_batches_leave_the_assistant_out(
    embedded: tuple[PreTrainedModel, Any], caplog: pytest.LogCaptureFixture
) -> None:
    engine = KVBoost(*embedded, assistant=str(EMBEDDED_DRAFT_DIR))
    prompts = [DOCUMENTS[0] + question for question in QUESTIONS]
    for _ in range(2):
        assert [each.token_ids for each in engine.generate_batch(prompts, NEW)] == [plain(engine, p) for p in prompts]
    assert caplog.text.count("without the assistant") == 1


def test_batches_with_a_tree_decoding(embedded: tuple[PreTrainedModel, Any]) -> None:
    trees = TreeDecoding(load_embedded_draft(), DraftTreeConfig(policy="tree", depth=3, max_nodes=12))
    prompts = ["Maria lives in Rome. Where does Maria live?", "Tom has a red lamp and a cat. What does Tom have?"]
    found = KVBoost(*embedded, assistant=trees).generate_batch(prompts, max_new_tokens=12)
    wanted = KVBoost(*embedded).generate_batch(prompts, max_new_tokens=12)
    assert [each.token_ids for each in found] == [each.token_ids for each in wanted]
    assert trees.stats.accepted > 4


# The store


def test_warm_tells_what_it_stored(embedded: tuple[PreTrainedModel, Any]) -> None:
    engine, document = KVBoost(*embedded, chunk_size=32, chunk_boundary_window=0), DOCUMENTS[0].strip()
    first, second = engine.warm(document), engine.warm(document)
    end = tokens_of(engine, "<|im_end|>\n<|im_start|>assistant\n")
    tokens = len(sent(engine, document)) - end
    assert first
    assert second
    assert first.chunks_stored == -(-tokens // 32) == engine.cache_stats()["chunks"]
    assert (first.token_count, first.cached_tokens) == (tokens, 0)
    assert (second.chunks_stored, second.cached_tokens) == (0, tokens - 1)
    assert first.partial_tail_tokens == tokens % 32
    assert first.chunk_boundary_aligned == (tokens % 32 == 0)
    assert f"The last {tokens % 32} of {tokens} tokens" in (first.alignment_warning or "")
    with counted(engine.model) as work:
        engine.generate(document + QUESTIONS[0], 1)
    assert work.tokens <= tokens_of(engine, QUESTIONS[0]) + end + 1


def test_a_text_that_is_too_short_to_be_stored(engine: KVBoost) -> None:
    result = engine.warm("Who?")
    assert not result
    assert "too few to be stored" in (result.alignment_warning or "")


def test_a_text_that_fills_its_chunks_warns_of_nothing() -> None:
    result = words_engine("llama", chunk_size=32, chunk_boundary_window=0).warm(words(64, seed=1))
    assert result.chunk_boundary_aligned
    assert (result.chunks_stored, result.partial_tail_tokens, result.alignment_warning) == (2, 0, None)
    assert int(result) == 2


def test_pinned_texts_that_do_not_fit_are_refused(embedded: tuple[PreTrainedModel, Any]) -> None:
    engine = KVBoost(*embedded, chunk_size=32, max_chunks=2)
    assert engine.warm(DOCUMENTS[0])
    with pytest.raises(StoreFullError):
        engine.warm(DOCUMENTS[1], pin=True)
    stats = engine.cache_stats()
    assert stats["bytes"] <= stats["max_bytes"]
    assert stats["chunks"] == 2


def test_nothing_is_left_after_a_reset(engine: KVBoost) -> None:
    prompt = DOCUMENTS[0] + QUESTIONS[0]
    engine.generate(prompt, NEW)
    engine.reset_cache()
    assert engine.cache_stats()["chunks"] == 0
    assert engine.generate(prompt, NEW).cached_tokens == 0


def test_a_folder_serves_the_next_engine(embedded: tuple[PreTrainedModel, Any], tmp_path: Any) -> None:
    folder = tmp_path / "k:v"
    first = KVBoost(*embedded, chunk_size=32, disk_cache_dir=folder)
    first.warm(DOCUMENTS[0])
    first.store.close()
    second = KVBoost(*embedded, chunk_size=32, disk_cache_dir=str(folder))
    assert second.cache_stats()["tiers"]["disk"]["chunks"] > 0
    prompt = DOCUMENTS[0] + QUESTIONS[0]
    assert second.generate(prompt, NEW).token_ids == plain(second, prompt)
    second.store.close()


@pytest.mark.daily
@pytest.mark.parametrize(("bits", "codec"), [(16, "raw"), (8, "kivi:8"), (4, "kivi:4"), (None, "raw")])
def test_bits_choose_the_codec(embedded: tuple[PreTrainedModel, Any], bits: int | None, codec: str) -> None:
    assert KVBoost(*embedded, kv_cache_bits=bits).cache_stats()["codec"].startswith(codec)


def test_chunks_are_cut_where_sentences_end(embedded: tuple[PreTrainedModel, Any]) -> None:
    engine = KVBoost(*embedded, chunk_size=32, chunk_boundary_window=8)
    prompt = DOCUMENTS[0] + QUESTIONS[0]
    engine.warm(DOCUMENTS[0])
    result = engine.generate(prompt, NEW)
    assert result.token_ids == plain(engine, prompt)
    assert result.kv_reuse_ratio > 0.8


def test_correctness_is_measured_with_the_settings(embedded: tuple[PreTrainedModel, Any]) -> None:
    exact = KVBoost(*embedded, chunk_size=32).verify_correctness(max_new_tokens=3)
    assert exact
    assert exact.exact.reused_tokens
    blend = KVBoost(*embedded, chunk_size=32, recompute_strategy="first_k").verify_correctness(max_new_tokens=3)
    assert blend
    assert any(arm.policy is not None and arm.policy.repair == "first_k" and arm.moved_tokens for arm in blend.arms)
    assert blend.recommended.mode == "exact"  # something was moved in few prompts


@pytest.mark.parametrize("bits", [8, 4])
def test_compressed_answers_are_measured(embedded: tuple[PreTrainedModel, Any], bits: int) -> None:
    """Through the codec: that a live cache gives the same answer again says nothing."""
    engine = KVBoost(*embedded, chunk_size=32, kv_cache_bits=bits)
    report = engine.verify_correctness([DOCUMENTS[0] + QUESTIONS[0]] * 3, max_new_tokens=3)
    assert report, report.verdict
    (arm,) = report.coded
    assert arm.name == f"int{bits}"
    assert arm.coded_tokens == sum(prompt.prompt_tokens - 1 for prompt in arm.prompts)
    assert 0 < arm.mean_kl < 0.01
    assert "WRONG" not in report.verdict


# Loading


def test_models_are_loaded_by_name(embedded: tuple[PreTrainedModel, Any]) -> None:
    engine = KVBoost.from_pretrained(
        EMBEDDED_MODEL_DIR, dtype=torch.float32, chunk_size=64, device="cpu", assistant=str(EMBEDDED_DRAFT_DIR)
    )
    prompt = DOCUMENTS[0] + QUESTIONS[0]
    assert engine.store.chunker.chunk_size == 64
    assert engine.generate(prompt, NEW).token_ids == plain(KVBoost(*embedded), prompt)
    assert engine.streaming_stats() is None


def test_the_name_has_the_names_that_it_has_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine_module.DEFAULT_MODEL == "TinyLlama/TinyLlama-1.1B-Chat-v1.0"
    monkeypatch.setattr(engine_module, "DEFAULT_MODEL", EMBEDDED_MODEL_DIR)
    folder = str(EMBEDDED_MODEL_DIR)
    for given in ({}, {"model_name": folder, "strict": True}, {"model_name_or_path": folder}, {"name": folder}):
        engine = KVBoost.from_pretrained(device="cpu", max_cache_bytes="2GB", **given)
        assert engine.generate("Who?", 1).generated_tokens == 1
        assert engine.cache_stats()["max_bytes"] == 2 * 10**9
    with pytest.raises(ValueError, match="`model_name` must be given once"):
        KVBoost.from_pretrained(folder, name=folder)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is there")
def test_devices_that_are_not_there(embedded: tuple[PreTrainedModel, Any]) -> None:
    for device in ("cuda", "cuda:7", "gpu"):
        says = f"`device` must be one that PyTorch can use here, got '{device}': .*Pass 'cpu'"
        with pytest.raises(ValueError, match=says):
            KVBoost(*embedded, device=device)
        for config in (None, StreamingConfig(keep_first_k=1)):
            with pytest.raises(ValueError, match=says):
                KVBoost.from_pretrained(EMBEDDED_MODEL_DIR, device=device, streaming_config=config)


def test_a_damaged_file_is_named(embedded: tuple[PreTrainedModel, Any], tmp_path: Path) -> None:
    embedded[0].save_pretrained(tmp_path, max_shard_size="1MB")
    embedded[1].save_pretrained(tmp_path)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:100_000])
    for config in (None, StreamingConfig(keep_first_k=1)):
        with pytest.raises(ValueError, match=rf"{shard} must be a whole .* of 100000 bytes .* download it again"):
            KVBoost.from_pretrained(tmp_path, device="cpu", streaming_config=config)


def test_streamed_models_are_loaded_by_name(embedded: tuple[PreTrainedModel, Any]) -> None:
    engine = KVBoost.from_pretrained(
        EMBEDDED_MODEL_DIR, dtype=torch.float32, device="cpu", streaming_config=StreamingConfig(keep_first_k=1)
    )
    prompt = DOCUMENTS[0] + QUESTIONS[0]
    assert engine.generate(prompt, NEW).token_ids == plain(KVBoost(*embedded), prompt)


# What is refused


@pytest.mark.daily
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"recompute_strategy": "magic"}, "cacheblend"),
        ({"kv_cache_bits": 3}, "16, 8 or 4"),
        ({"max_chunks": 2, "max_cache_bytes": 2**30}, "one of the two"),
        ({"max_chunks": 0}, "1 or more"),
        ({"max_cache_bytes": 2e9}, "8GB"),
        ({"disk_cache_dir": 3}, "`disk_cache_dir` must name a folder or be None, got 3"),
        ({"tiers": 3}, "`tiers` must be a sequence of addresses"),
        ({"tiers": "ram:1GB"}, "`tiers` must be a sequence, got the text"),
        ({"min_deviation": 0.01}, "min_coverage"),
        ({"recency_window_chunks": 8}, "pin=True"),
        ({"speculative_config": object()}, "assistant"),
        ({"tree_speculative_config": object()}, "TreeDecoding"),
        ({"awq_path": "x"}, "load_streamed"),
        ({"recompute_ratio": 2, "recompute_strategy": "cacheblend"}, "from 0 to 1"),
    ],
)
def test_settings_that_do_not_work_say_what_does(
    embedded: tuple[PreTrainedModel, Any], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        KVBoost(*embedded, **options)
    with pytest.raises(ValueError, match=says):
        KVBoost.from_pretrained(EMBEDDED_MODEL_DIR, device="cpu", **options)


def test_unknown_settings_are_refused(embedded: tuple[PreTrainedModel, Any]) -> None:
    with pytest.raises(TypeError, match=r"no setting `chunk_sise`\. Did you mean `chunk_size`\?"):
        KVBoost(*embedded, chunk_sise=64)
    with pytest.raises(TypeError, match=r"no setting `chunk_sise`\. Did you mean `chunk_size`\?"):
        KVBoost.from_pretrained(EMBEDDED_MODEL_DIR, device="cpu", chunk_sise=64)


def test_a_model_in_place_of_its_name(embedded: tuple[PreTrainedModel, Any]) -> None:
    with pytest.raises(ValueError, match=r"got LlamaForCausalLM\. .* KVBoost\(model, tokenizer\)"):
        KVBoost.from_pretrained(embedded[0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"got LlamaForCausalLM\. .* stream_layers\(model\)"):
        load_streamed(embedded[0])  # type: ignore[arg-type]


@pytest.mark.daily
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"temperature": 0.7}, "do_sample=True"),
        ({"temperature": 0, "do_sample": True}, "positive"),
        ({"temperature": None, "do_sample": True}, "`temperature` must be a positive number"),
        ({"temperature": "0.7", "do_sample": True}, "`temperature` must be a positive number"),
        ({"do_sample": "no"}, "`do_sample` must be True or False, got 'no'"),
        ({"stopping_criteria": lambda ids, scores: False}, r"must be a list, got function. Pass \[criterion\]"),
        ({"max_new_tokens": 0}, "1 or more"),
        ({"mode": "magic"}, "prefix_cache"),
        ({"on_token": print}, "stream"),
        ({"cacheable_prefix_len": 3}, "salt"),
        ({"kv_cache_bits": 8}, "setting"),
        ({"past_key_values": None}, "set by the engine"),
        ({"cache_implementation": "static"}, "set by the engine"),
        ({"num_beams": 2}, "set by the engine"),
    ],
)
def test_arguments_that_do_not_work_say_what_does(engine: KVBoost, options: dict[str, Any], says: str) -> None:
    for call in (engine.generate, engine.stream):
        with pytest.raises(ValueError, match=says):
            call("Who?", **options)


def test_prompts_must_be_texts(engine: KVBoost) -> None:
    with pytest.raises(ValueError, match="one token or more"):
        engine.generate("")
    with pytest.raises(ValueError, match="must be a text"):
        engine.generate([1, 2])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="one message or more"):
        engine.chat([])
    with pytest.raises(ValueError, match=r"Pass \[text\]"):
        engine.generate_batch("Who?")
    with pytest.raises(ValueError, match="stop_strings"):
        engine.generate_batch(["Who?", "Where?"], stop_strings=["."])
    with pytest.raises(ValueError, match="documents"):
        engine.warm("Who?", position_offset=16)


def test_the_package_says_what_its_names_are(engine: KVBoost) -> None:
    assert kvboost_hf.KVBoost is kvboost_hf.InferenceEngine is KVBoost
    with pytest.raises(ImportError, match="Models stay"):
        kvboost_hf.default_device  # type: ignore[attr-defined]  # noqa: B018
