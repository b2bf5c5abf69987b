"""What a `KVBoost` is given in place of settings, and what does not go together."""

import copy
import pickle
from itertools import pairwise
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedModel

from kvboost_hf import ChunkStore, ContentChunker, GenerationMode, KVBoost, KVQuantConfig, ReusePolicy
from kvboost_hf.assets import EMBEDDED_MODEL_DIR, load_embedded
from tests.internals.cache import FixedChunker
from tests.internals.engine import EngineSettings, PromptEncoder
from tests.internals.prompts import shuffled_documents

pytestmark = pytest.mark.daily

NEW = 6
DOCUMENT = "Maria lives in Rome. She owns the lamp. It is red and costs ten coins. " * 12
QUESTION = "Where does Maria live?"


@pytest.fixture(scope="module")
def embedded() -> tuple[PreTrainedModel, Any]:
    return load_embedded()


def plain(engine: KVBoost, prompt: str) -> tuple[int, ...]:
    chat = [{"role": "user", "content": prompt}]
    inputs = engine.tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = engine.model.generate(**inputs, do_sample=False, max_new_tokens=NEW)
    return tuple(out[0, inputs["input_ids"].shape[1] :].tolist())


def test_a_codec_is_that_of_the_store(embedded: tuple[PreTrainedModel, Any]) -> None:
    engine = KVBoost(*embedded, codec="turboquant:3.5")
    assert engine.cache_stats()["codec"].startswith("turboquant:3.5")
    engine.warm(DOCUMENT)
    raw = KVBoost(*embedded)
    raw.warm(DOCUMENT)
    assert engine.cache_stats()["bytes"] < raw.cache_stats()["bytes"] / 2
    assert engine.generate(DOCUMENT + QUESTION, NEW).kv_reuse_ratio > 0.9


def test_live_codes_are_found_by_what_warmed_them(embedded: tuple[PreTrainedModel, Any]) -> None:
    config = KVQuantConfig(window=16, exact_layers=0)
    engine, raw = KVBoost(*embedded, live_quant=config), KVBoost(*embedded)
    for each in (engine, raw):
        each.warm(DOCUMENT)
        assert each.generate(DOCUMENT + QUESTION, NEW).kv_reuse_ratio > 0.9
        assert all(one.cached_tokens for one in each.generate_batch([DOCUMENT + QUESTION, DOCUMENT + "Who?"], 1))
    held = [each._runner._caches[GenerationMode.PREFIX_CACHE].nbytes for each in (engine, raw)]
    assert held[0] < held[1] / 2
    assert EngineSettings(live_quant=3.5).live_config == KVQuantConfig(key_bits=3.5, value_bits=3.5)


def test_a_store_that_is_given_is_used_and_shared(embedded: tuple[PreTrainedModel, Any]) -> None:
    model, tokenizer = embedded
    store = ChunkStore(model, chunk_size=64, codec="int8")
    first, second = KVBoost(model, tokenizer, store=store), KVBoost(model, tokenizer, store=store)
    first.warm(DOCUMENT)
    assert second.store is store
    assert second.generate(DOCUMENT + QUESTION, NEW).kv_reuse_ratio > 0.9
    assert second.verify_correctness([DOCUMENT + QUESTION, DOCUMENT + "Who?"], 1).exact.reused_tokens > 100


def test_a_policy_that_is_given_is_used(embedded: tuple[PreTrainedModel, Any]) -> None:
    engine = KVBoost(*embedded, policy=ReusePolicy(mode="blend", repair="none", min_prefill_saving=0))
    engine.store.warm(documents=[DOCUMENT], tokenizer=engine.tokenizer)
    assert engine.generate("It is noon. " * 4 + DOCUMENT + QUESTION, NEW).report.moved_tokens > 100
    full = KVBoost(*embedded, policy=ReusePolicy(weights_check="full"))
    full.warm(DOCUMENT)
    result = full.generate(DOCUMENT + QUESTION, NEW)
    assert result.kv_reuse_ratio > 0.9
    assert result.token_ids == plain(full, DOCUMENT + QUESTION)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"codec": "zip"}, "'int8'"),
        ({"codec": "int8", "kv_cache_bits": 8}, "one of the two"),
        ({"live_quant": 8}, "Pass 'int8'"),
        ({"live_quant": "zip"}, "'int8'"),
        ({"live_quant": 4, "recompute_strategy": "query"}, "cannot be moved"),
        ({"live_quant": 4, "policy": ReusePolicy(mode="blend")}, "cannot be moved"),
        ({"policy": "blend"}, r"Pass ReusePolicy\(mode='blend'\)"),
        ({"policy": ReusePolicy(), "recompute_ratio": 0.3}, "`recompute_ratio` must be left out beside a `policy`"),
        ({"chunk_boundary_window": 200}, "less than `chunk_size`"),
        ({"chunk_boundary_window": 8, "chunk_size": 16}, "at least 32"),
        ({"chunk_boundary_window": -1}, "`chunk_boundary_window` must be .* got -1"),
        ({"recompute_overlap": -1}, "`recompute_overlap` must be 0 or more"),
        ({"chat_template": "{{ messages }}"}, r"Set tokenizer\.chat_template"),
    ],
)
def test_what_does_not_go_together_is_refused(
    embedded: tuple[PreTrainedModel, Any], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        KVBoost(*embedded, **options)
    with pytest.raises(ValueError, match=says):
        KVBoost.from_pretrained(EMBEDDED_MODEL_DIR, device="cpu", **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"disk_cache_dir": ""}, "there is no path"),
        ({"tiers": "ram:1GB"}, r"Pass \[text\]"),
        ({"tier_key": b"short"}, "`tier_key` must be 32 bytes or more, got 5 bytes"),
        ({"assistant": 3}, "A draft must be a model, or the name of one, got 3"),
    ],
)
def test_what_needs_the_model_to_be_judged_is_refused(
    embedded: tuple[PreTrainedModel, Any], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        KVBoost(*embedded, **options)


def test_what_is_no_tokenizer_is_refused(embedded: tuple[PreTrainedModel, Any]) -> None:
    for given in (None, "reader"):
        with pytest.raises(ValueError, match=r"AutoTokenizer\.from_pretrained"):
            KVBoost(embedded[0], given)


def test_messages_that_the_template_cannot_take_are_refused(embedded: tuple[PreTrainedModel, Any]) -> None:
    engine = KVBoost(*embedded)
    for messages in ([{"role": "user"}], [{"content": "Hi"}], [{"role": "user", "content": [{"text": "Hi"}]}]):
        for method in (engine.generate, engine.warm):
            with pytest.raises(ValueError, match="The chat template refuses these messages: "):
                method(messages)
    with pytest.raises(ValueError, match="Pass a list"):
        engine.generate_many(None)


def test_a_text_behind_the_template_begins_as_its_chat_does() -> None:
    tokenizer = load_embedded()[1]
    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
    tokenizer.chat_template = bos + tokenizer.chat_template
    chat = [{"role": "user", "content": QUESTION}]
    text = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    assert tokenizer(text)["input_ids"][:2] == [tokenizer.bos_token_id] * 2  # the tokenizer adds another one
    assert PromptEncoder(tokenizer).encode(text).tolist() == PromptEncoder(tokenizer).encode(chat).tolist()
    raw = PromptEncoder(tokenizer, templated=False)
    assert raw.encode(QUESTION).tolist() == tokenizer(QUESTION)["input_ids"]


def test_an_engine_says_why_it_cannot_be_pickled(embedded: tuple[PreTrainedModel, Any]) -> None:
    for each in (KVBoost(*embedded), ChunkStore(embedded[0])):
        for copied in (pickle.dumps, copy.deepcopy):
            with pytest.raises(TypeError, match=rf"A {type(each).__name__} can be neither pickled .* Make a new one"):
                copied(each)


def test_a_store_beside_what_it_has_itself_is_refused(embedded: tuple[PreTrainedModel, Any]) -> None:
    store = ChunkStore(embedded[0])
    for more in ({"codec": "int8"}, {"salt": "me"}, {"chunk_size": 64}, {"tiers": ["ram:1GB"]}):
        with pytest.raises(ValueError, match=f"`{next(iter(more))}` must be left out beside a `store`"):
            KVBoost(*embedded, store=store, **more)
    with pytest.raises(ValueError, match="another model"):
        KVBoost(*load_embedded(), store=store)
    with pytest.raises(ValueError, match="must be a ChunkStore"):
        KVBoost(*embedded, store="disk:/tmp/x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not there yet"):
        KVBoost.from_pretrained(EMBEDDED_MODEL_DIR, device="cpu", store=store)
    lossy = ChunkStore(embedded[0], codec="int8")
    with pytest.raises(ValueError, match="audit_rate"):
        KVBoost(*embedded, store=lossy, policy=ReusePolicy(audit_rate=0.1))


def test_cuts_are_by_content_where_the_tokenizer_allows_it(embedded: tuple[PreTrainedModel, Any]) -> None:
    tokenizer = embedded[1]
    by_content = EngineSettings().chunker(tokenizer)
    assert isinstance(by_content, ContentChunker)
    assert by_content.boundary_window == 16
    for settings, known in (
        (EngineSettings(chunk_boundary_window=0), tokenizer),
        (EngineSettings(chunk_size=16), tokenizer),
        (EngineSettings(), object()),
    ):
        assert isinstance(settings.chunker(known), FixedChunker)


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{{ messages[0]['content'][0]['text'] }}"])
def test_a_chat_template_that_takes_other_chats_keeps_nothing_from_starting(template: str) -> None:
    model, tokenizer = load_embedded()
    tokenizer.chat_template = template
    assert KVBoost(model, tokenizer, chat_template=False).generate(QUESTION, 1).generated_tokens == 1


def test_a_chat_template_that_gives_no_text_is_told() -> None:
    model, tokenizer = load_embedded()
    tokenizer.chat_template = "{{ messages[0]['content'][0]['text'] }}"
    with pytest.raises(ValueError, match="chat_template=False"):
        KVBoost(model, tokenizer).generate(QUESTION, 1)


def test_shuffled_documents_are_found_however_they_are_cut(embedded: tuple[PreTrainedModel, Any]) -> None:
    """And a chat that grows is reused to the token, whichever way it is cut."""
    shuffled = [question.text for question in shuffled_documents(embedded[1], 1000, 6, seed=1)]
    documents = shuffled[0].split("\n\n")
    found: dict[int, int] = {}
    for window in (16, 0):
        blend = KVBoost(*embedded, recompute_strategy="none", chunk_boundary_window=window)
        found[window] = sum(blend.generate(prompt, 1).cached_tokens for prompt in shuffled)
        exact = KVBoost(*embedded, chunk_boundary_window=window, chat_template=False)
        for before, after in pairwise(exact.generate("\n\n".join(documents[:at]), 1) for at in range(1, 6)):
            assert after.cached_tokens >= before.prompt_tokens - 1
    assert found[16] >= found[0] > 0.95 * 5 * (len(embedded[1](shuffled[0]).input_ids) - 40)
