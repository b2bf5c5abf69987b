"""Models that cannot generate text, or leave it to a part, are refused in one sentence, with what would do."""

from collections.abc import Callable
from typing import Any

import pytest
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    CLIPTextConfig,
    CLIPTextModel,
    GPT2Config,
    GPT2Model,
    Kosmos2Config,
    Kosmos2ForConditionalGeneration,
    LlamaConfig,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
    PreTrainedModel,
    Qwen2VLConfig,
    T5Config,
    T5EncoderModel,
    ViTConfig,
    ViTForImageClassification,
)

from kvboost_hf import (
    ChunkReuseCache,
    ChunkStore,
    KVBoost,
    StreamingConfig,
    TreeDecoding,
    attach,
    check_model_compatibility,
    load_assistant,
    load_streamed,
    lookup_assistant,
    score_ids,
    verify_correctness,
    what_fits,
)
from tests.conftest import make_model
from tests.internals.compat import loader_of

pytestmark = pytest.mark.daily

_SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VIT: dict[str, Any] = {name: value for name, value in _SIZES.items() if name != "vocab_size"} | {
    "image_size": 16,
    "patch_size": 16,
}
_T5: dict[str, Any] = {"vocab_size": 40, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
_GPT2: dict[str, Any] = {
    "vocab_size": 40,
    "n_embd": 8,
    "n_layer": 1,
    "n_head": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_KOSMOS: dict[str, Any] = {
    "text_config": {"vocab_size": 40, "embed_dim": 8, "layers": 1, "ffn_dim": 8, "attention_heads": 2},
    "vision_config": _VIT,
    "latent_query_num": 1,
}

MODELS: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "base": (lambda: LlamaModel(LlamaConfig(**_SIZES)), "LlamaForCausalLM: AutoModelForCausalLM"),
    "base of another class": (lambda: GPT2Model(GPT2Config(**_GPT2)), "GPT2LMHeadModel: AutoModelForCausalLM"),
    "classifier": (lambda: LlamaForSequenceClassification(LlamaConfig(**_SIZES)), "LlamaForCausalLM"),
    "classifier of tokens": (lambda: LlamaForTokenClassification(LlamaConfig(**_SIZES)), "LlamaForCausalLM"),
    "encoder": (lambda: BertModel(BertConfig(**_SIZES)), "it is an encoder"),
    "encoder with a head": (lambda: BertForMaskedLM(BertConfig(**_SIZES)), "it is an encoder"),
    "encoder of a pair": (lambda: T5EncoderModel(T5Config(**_T5)), "T5ForConditionalGeneration"),
    "whose part generates": (lambda: Kosmos2ForConditionalGeneration(Kosmos2Config(**_KOSMOS)), r"model\.text_model"),
    "of images": (lambda: ViTForImageClassification(ViTConfig(**_VIT)), "no class in transformers"),
    "of texts for images": (lambda: CLIPTextModel(CLIPTextConfig(**_SIZES)), "no class in transformers"),
}


def entries(model: Any) -> dict[str, Callable[[], Any]]:
    llama = make_model("llama")
    return {
        "attach": lambda: attach(model),
        "ChunkReuseCache": lambda: ChunkReuseCache(model),
        "ChunkStore": lambda: ChunkStore(model),
        "check_model_compatibility": lambda: check_model_compatibility(model),
        "KVBoost": lambda: KVBoost(model, object()),
        "score_ids": lambda: score_ids(model, [([1], [2])]),
        "verify_correctness": lambda: verify_correctness(model, [[1, 2]]),
        "TreeDecoding": lambda: TreeDecoding(model),
        "load_assistant": lambda: load_assistant(model, target=llama),
        "its target": lambda: load_assistant(llama, target=model),
        "lookup_assistant": lambda: lookup_assistant(model, ChunkStore(llama)),
    }


@pytest.mark.parametrize("name", MODELS)
def test_each_entry_names_the_class_and_what_would_do(name: str) -> None:
    make, remedy = MODELS[name]
    model = make()
    for entry, call in entries(model).items():
        with pytest.raises(ValueError, match=remedy) as caught:
            call()
        assert type(model).__name__ in str(caught.value), entry
        assert str(caught.value).count(". ") <= 2, entry


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (BertConfig(**_SIZES), "it is an encoder"),
        (T5Config(**_T5), "T5ForConditionalGeneration"),
        (ViTConfig(**_VIT), "no class in transformers"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.model_type,
)
def test_names_of_such_models_too(config: Any, says: str, tmp_path: Any) -> None:
    config.save_pretrained(tmp_path)
    for call in (
        lambda: load_streamed(str(tmp_path), StreamingConfig()),
        lambda: what_fits(config, "1GB"),
        lambda: load_assistant(str(tmp_path), target=make_model("llama")),
    ):
        with pytest.raises(ValueError, match=says) as caught:
            call()
        assert f"of the type {config.model_type!r}" in str(caught.value)


def test_an_encoder_that_was_made_a_decoder_is_one() -> None:
    assert loader_of(BertConfig(**_SIZES, is_decoder=True)).__name__ == "AutoModelForCausalLM"
    assert loader_of(Qwen2VLConfig()).__name__ == "AutoModelForImageTextToText"
