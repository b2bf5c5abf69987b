"""Drafts beside the arguments of generate(): answers, scores, streams and errors are those of plain decoding."""

import logging
import string
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    LogitsProcessor,
    LogitsProcessorList,
    MarianConfig,
    MarianMTModel,
    MptConfig,
    MptForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForCausalLM,
    WhisperForConditionalGeneration,
)

from kvboost_hf import (
    ChunkReuseCache,
    ChunkStore,
    StreamingConfig,
    TreeDecoding,
    load_assistant,
    load_streamed,
    lookup_assistant,
    speculation_stats,
    with_streaming,
)
from tests.conftest import VOCAB, as_inputs, make_model, random_ids
from tests.internals.assisted import learned_positions

IDS = random_ids(30, seed=3)
NEW = 12


pytestmark = pytest.mark.filterwarnings("ignore:The draft has")  # no fewer weights than its target


def near(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """A draft that is right at times."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return model


def ways(target: PreTrainedModel) -> dict[str, dict[str, Any]]:
    return {
        "load_assistant": {"assistant_model": load_assistant(near(make_model("llama")), target=target)},
        "trees": {"custom_generate": TreeDecoding(near(make_model("llama")))},
        "lookup": {"assistant_model": lookup_assistant(target, ChunkStore(target))},
    }


def letters() -> PreTrainedTokenizerFast:
    """A tokenizer with a letter, or a few of them, for each id."""
    tokens = [*string.printable[:94], *map("".join, product(string.ascii_lowercase, repeat=2))][:VOCAB]
    found = Tokenizer(models.BPE({token: n for n, token in enumerate(tokens)}, []))
    found.pre_tokenizer, found.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=found)


class Counting(LogitsProcessor):
    """Prefers tokens by how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.calls += 1
        scores = scores.clone()
        scores[:, 37 * self.calls % VOCAB] += 8.0
        return scores


class Fifth(StoppingCriteria):
    """Ends a text when it is asked the fifth time."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        self.calls += 1
        return torch.full((len(input_ids),), self.calls >= 5)


class Seen:
    """A streamer."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.tokens.append(-1)


def answer(model: PreTrainedModel, **given: Any) -> tuple[Any, list[int]]:
    made = {name: value() if callable(value) and isinstance(value, type) else value for name, value in given.items()}
    for name, kind in (("logits_processor", LogitsProcessorList), ("stopping_criteria", StoppingCriteriaList)):
        if name in made:
            made[name] = kind([made[name]])
    seen = Seen()
    settings = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, "streamer": seen}
    settings |= made
    return model.generate(**as_inputs(IDS), **settings), seen.tokens


ARGUMENTS: dict[str, dict[str, Any]] = {
    "guidance": {"guidance_scale": 1.6, "negative_prompt_ids": random_ids(12, seed=9)},
    "guidance alone": {"guidance_scale": 1.4},
    "a processor that counts": {"logits_processor": Counting},
    "criteria that count": {"stopping_criteria": Fifth},
    "a watermark": {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3)},
    "allowed tokens": {"prefix_allowed_tokens_fn": lambda _, ids: [(7 * int(ids[-1]) + n) % VOCAB for n in range(9)]},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "min_new_tokens": 12},
    "forced": {"forced_eos_token_id": 5, "suppress_tokens": [3, 4], "exponential_decay_length_penalty": (3, 1.1)},
    "scores": {"output_scores": True, "output_logits": True},
    "time": {"max_time": 60.0},
}


@pytest.fixture(scope="module")
def drafting() -> tuple[PreTrainedModel, dict[str, dict[str, Any]]]:
    model = make_model("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return model, ways(model)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_answers_are_those_of_plain_decoding(name: str, drafting: Any) -> None:
    model, given = drafting
    expected, plainly = answer(model, **ARGUMENTS[name])
    for way in given.values():
        found, streamed = answer(model, **ARGUMENTS[name], **way)
        assert found.sequences.equal(expected.sequences)
        assert streamed == plainly
        for kind in ("scores", "logits"):
            ours, theirs = getattr(found, kind), getattr(expected, kind)
            assert (ours is None) == (theirs is None)
            if ours is not None:
                assert torch.allclose(torch.stack(ours), torch.stack(theirs), atol=1e-3)


def test_stop_strings_end_at_the_same_token(drafting: Any) -> None:
    (model, given), tokenizer = drafting, letters()
    said = answer(model)[0].sequences[0, IDS.shape[1] :].tolist()
    texts = [tokenizer.decode([token]) for token in said]
    before = speculation_stats(given["load_assistant"]["assistant_model"]).accepted
    for stop in ([texts[1]], [texts[5]], [texts[8] + texts[9]], texts[6:8], list(string.ascii_lowercase)):
        asked = {"stop_strings": stop, "tokenizer": tokenizer}
        expected, plainly = answer(model, **asked)
        for way in given.values():
            found, streamed = answer(model, **asked, **way)
            assert found.sequences.equal(expected.sequences)
            assert streamed == plainly
    assert speculation_stats(given["load_assistant"]["assistant_model"]).accepted > before + 5


@pytest.mark.parametrize("kind", [torch.tensor, np.array, np.int64, tuple], ids=lambda kind: kind.__name__)
def test_tokens_that_end_a_text_may_be_of_any_kind(kind: Any, drafting: Any) -> None:
    model, given = drafting
    said = answer(model)[0].sequences[0, IDS.shape[1] :].tolist()
    end = kind(said[5]) if kind is np.int64 else kind([said[5], said[8]])
    expected, plainly = answer(model, eos_token_id=end)
    assert expected.sequences.shape[1] < IDS.shape[1] + NEW
    for way in given.values():
        found, streamed = answer(model, eos_token_id=end, **way)
        assert found.sequences.equal(expected.sequences)
        assert streamed == plainly


def test_looked_up_text_ends_at_a_stop_string() -> None:
    """The whole draft is right, and would be accepted with a token of the target behind it."""
    model, tokenizer = make_model("llama"), letters()
    store = ChunkStore(model, chunk_size=16)
    cache = ChunkReuseCache(model, store)
    said = answer(model, cache=cache)[0].sequences[0, IDS.shape[1] :].tolist()
    cache.store_tails()
    for stop in range(1, NEW - 1):
        asked = {"stop_strings": tokenizer.decode([said[stop]]), "tokenizer": tokenizer}
        expected, plainly = answer(model, **asked)
        found, streamed = answer(model, **asked, assistant_model=lookup_assistant(model, store))
        assert found.sequences.equal(expected.sequences)
        assert streamed == plainly


def test_a_pause_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model("llama")
    draft = load_assistant(near(make_model("llama")), target=model)
    with caplog.at_level(logging.WARNING, logger="kvboost_hf"):
        for _ in range(2):
            answer(model, logits_processor=Counting, assistant_model=draft)
    assert [record.getMessage().split(" may")[0] for record in caplog.records] == ["No drafts: Counting"]
    assert speculation_stats(draft).rounds == 0
    answer(model, assistant_model=draft)
    assert speculation_stats(draft).rounds > 0


def test_padding_and_stop_strings_together() -> None:
    """Such a draft runs transformers' own loop, which has no tokenizer."""
    model, tokenizer = make_model("llama"), letters()
    padded = {"input_ids": IDS.clone(), "attention_mask": torch.ones_like(IDS)}
    padded["attention_mask"][:, :4] = 0
    said = model.generate(**padded, max_new_tokens=NEW, do_sample=False)[0, IDS.shape[1] :].tolist()
    asked = {
        "stop_strings": [tokenizer.decode([said[len(said) // 2]])],
        "tokenizer": tokenizer,
        "max_new_tokens": NEW,
        "do_sample": False,
    }
    expected = model.generate(**padded, **asked)
    draft = load_assistant(near(make_model("llama")), target=model)
    assert model.generate(**padded, **asked, assistant_model=draft).equal(expected)
    assert speculation_stats(draft).rounds > 0


def test_what_trees_cannot_do_is_refused() -> None:
    trees = TreeDecoding(near(make_model("llama")))
    with pytest.raises(ValueError, match="`synced_gpus` must be False"):
        answer(make_model("llama"), custom_generate=trees, synced_gpus=True)
    with pytest.raises(ValueError, match="leave out `cache` and `cache_implementation`"):
        answer(make_model("llama"), custom_generate=trees, cache_implementation="static")


_SMALL: dict[str, Any] = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 199}
LEARNED: dict[str, Callable[[], PreTrainedModel]] = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=40, **_SMALL)),
    "opt": lambda: OPTForCausalLM(
        OPTConfig(
            hidden_size=16,
            ffn_dim=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=40,
            word_embed_proj_dim=16,
            **_SMALL,
        )
    ),
    "mpt": lambda: MptForCausalLM(MptConfig(d_model=16, n_layers=1, n_heads=2, max_seq_len=40, **_SMALL)),
}


@pytest.mark.parametrize("length", [30, 40, 41])
@pytest.mark.parametrize("kind", LEARNED)
def test_a_draft_with_fewer_positions_than_the_text(kind: str, length: int) -> None:
    model, inputs = make_model("llama"), {**as_inputs(random_ids(length)), "max_new_tokens": NEW, "do_sample": False}
    expected = model.generate(**inputs)
    draft = load_assistant(LEARNED[kind]().eval(), target=model)
    assert learned_positions(draft) == 40
    assert model.generate(**inputs, assistant_model=draft).equal(expected)
    assert (speculation_stats(draft).drafted > 0) == (length < 40)
    if kind != "mpt":
        assert model.generate(**inputs, custom_generate=TreeDecoding(LEARNED[kind]().eval())).equal(expected)


def test_rotary_models_have_no_such_limit() -> None:
    assert learned_positions(make_model("llama")) is None


_PAIR: dict[str, Any] = {
    "d_model": 16,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "bos_token_id": 0,
    "decoder_start_token_id": 3,
}
_PAIR |= {f"{part}_layers": 1 for part in ("encoder", "decoder")} | {"vocab_size": 60, "init_std": 0.3}
_PAIR |= {f"{part}_{of}": n for part in ("encoder", "decoder") for of, n in (("attention_heads", 2), ("ffn_dim", 16))}
_T5: dict[str, Any] = {"vocab_size": 60, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
_T5 |= {"decoder_start_token_id": 0, "initializer_factor": 3.0}
_WHISPER: dict[str, Any] = {**_PAIR, "num_mel_bins": 4, "max_source_positions": 10, "max_target_positions": 40}
_WHISPER |= {"suppress_tokens": None, "begin_suppress_tokens": None}
PAIRS: dict[str, tuple[Any, Any, Any]] = {
    "t5": (T5ForConditionalGeneration, T5ForConditionalGeneration, lambda: T5Config(**_T5)),
    "bart": (BartForConditionalGeneration, BartForConditionalGeneration, lambda: BartConfig(**_PAIR)),
    "marian": (MarianMTModel, MarianMTModel, lambda: MarianConfig(**_PAIR)),
    "whisper": (WhisperForConditionalGeneration, WhisperForConditionalGeneration, lambda: WhisperConfig(**_WHISPER)),
    "a decoder of whisper": (WhisperForConditionalGeneration, WhisperForCausalLM, lambda: WhisperConfig(**_WHISPER)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_encoder_decoders(name: str, tmp_path: Any) -> None:
    target_class, draft_class, config = PAIRS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        target, draft = target_class(config()).eval(), draft_class(config()).eval()
    whisper = "whisper" in name
    inputs = {"input_features": torch.randn(1, 4, 20)} if whisper else as_inputs(torch.arange(4, 13)[None])
    settings = {"max_new_tokens": 10, "do_sample": False, "num_beams": 1}
    expected = target.generate(**inputs, **settings)
    draft.save_pretrained(tmp_path)
    by_name = [str(tmp_path)] if draft_class is target_class else []
    for each in (draft, *by_name):
        assistant = load_assistant(each, target=target)
        assert target.generate(**inputs, **settings, assistant_model=assistant).equal(expected)
        assert speculation_stats(assistant).rounds > 0


def test_drafts_of_another_kind_are_refused() -> None:
    pair, llama = BartForConditionalGeneration(BartConfig(**_PAIR)), make_model("llama")
    with pytest.raises(ValueError, match="a decoder of text, as its target is, got BartForConditionalGeneration"):
        load_assistant(pair, target=llama)
    with pytest.raises(
        ValueError, match=r"takes `encoder_outputs`, got LlamaForCausalLM\. Load one with AutoModelFor"
    ):
        load_assistant(llama, target=pair)
    old = OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match="whose forward takes no cache"):
        load_assistant(old, target=llama)


@pytest.mark.parametrize("name", ["", "folder"])
def test_a_name_of_no_model(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of transformers that names neither the model nor a remedy went through."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    calls: list[Callable[[], Any]] = [
        lambda: load_assistant(name, target=make_model("llama")),
        lambda: load_streamed(name, device="cpu"),
        lambda: with_streaming(name, StreamingConfig()),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=rf"The model '{name}' does not load: .* no config\.json\. Pass"):
            call()
