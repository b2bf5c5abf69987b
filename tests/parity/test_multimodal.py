"""Prompts with images, sound and video: what is shown is part of what K/V is found by."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, attach, check_model_compatibility
from kvboost_hf.cache import media
from tests.conftest import counted
from tests.multimodal import FAMILIES, make_model, prompt, text

NEW = 6
BYPASSED = ("paligemma", "qwen2_audio", "mllama")
REUSING = [name for name in FAMILIES if name not in BYPASSED]
# Their images come one by one, so that the first of a chat is known again when the second one comes.
BY_ITEM = [name for name in REUSING if name not in ("idefics3", "smolvlm", "voxtral")]

# Tokens at the end of a prompt that are too few for the store.
TOO_SHORT = {"live": 0, "stored": 7}

HEAD, MIDDLE, TAIL, MORE = text(40, 1), text(20, 2), text(15, 3), text(12, 4)


def ready(name: str) -> PreTrainedModel:
    """A model that has been probed, so that no probe is counted."""
    model = make_model(name)
    check_model_compatibility(model)
    return model


def generate(model: PreTrainedModel, inputs: dict[str, Any], **kwargs: Any) -> Any:
    return model.generate(
        **{name: value.clone() for name, value in inputs.items()},
        **{
            "max_new_tokens": NEW,
            "do_sample": False,
            "output_logits": True,
            "return_dict_in_generate": True,
            "eos_token_id": None,
            **kwargs,
        },
    )


def assert_same(plain: Any, reused: Any) -> None:
    assert torch.equal(plain.sequences, reused.sequences)
    for expected, found in zip(plain.logits, reused.logits, strict=True):
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


def forwarded(model: PreTrainedModel, cache: ChunkReuseCache, inputs: dict[str, Any], **kwargs: Any) -> int:
    """Tokens of a prompt that were forwarded, having compared everything with plain generate()."""
    plain = generate(model, inputs, **kwargs)
    with counted(model) as work:
        reused = generate(model, inputs, past_key_values=cache, **kwargs)
    assert_same(plain, reused)
    assert cache.report.bypass_reason is None
    assert cache.report.prompt_tokens == cache.report.reused_tokens + cache.report.forwarded_tokens
    rows = len(reused.sequences)
    return work.tokens - rows * (reused.sequences.shape[1] - inputs["input_ids"].shape[1] - 1)


class Caches:
    """The live cache of a conversation, or a fresh cache for each prompt."""

    def __init__(self, model: PreTrainedModel, kind: str) -> None:
        self._model, self._kind = model, kind
        self._store = ChunkStore(model, chunk_size=16)
        self._live = ChunkReuseCache(model, self._store)

    def next(self) -> ChunkReuseCache:
        if self._kind == "live":
            return self._live
        self._live.store_all()
        self._live = ChunkReuseCache(self._model, self._store)
        return self._live


@pytest.fixture(params=["live", "stored"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("name", REUSING)
def test_a_chat_about_images(name: str, kind: str) -> None:
    model = ready(name)
    ChunkReuseCache(model)
    caches = Caches(model, kind)
    start = prompt(name, HEAD, 5, MIDDLE)
    size = FAMILIES[name].tokens + 2
    lost = TOO_SHORT[kind]
    assert forwarded(model, caches.next(), prompt(name, HEAD)) == 40
    assert forwarded(model, caches.next(), start) <= size + 20 + lost  # text before the image is found
    assert forwarded(model, caches.next(), start) <= 1 + lost
    assert forwarded(model, caches.next(), prompt(name, HEAD, 5, MIDDLE, TAIL)) <= 15 + lost
    # Another image under the same ids: nothing from its first placeholder on.
    assert forwarded(model, caches.next(), prompt(name, HEAD, 6, MIDDLE, TAIL)) <= size + 20 + 15 + lost
    # The first one again, then another one behind it.
    assert forwarded(model, caches.next(), start) <= 1 + 7
    two = forwarded(model, caches.next(), prompt(name, HEAD, 5, MIDDLE, 6, TAIL))
    if name in BY_ITEM:
        assert two <= size + 15 + lost
    assert forwarded(model, caches.next(), prompt(name, HEAD, 5, MIDDLE, 6, TAIL, MORE)) <= 12 + lost
    # The second image changes.
    forwarded(model, caches.next(), prompt(name, HEAD, 5, MIDDLE, 7, TAIL, MORE))
    # Text only, with the placeholders of nothing.
    assert forwarded(model, caches.next(), prompt(name, HEAD, TAIL)) <= 15 + lost


@pytest.mark.parametrize("name", REUSING)
def test_an_image_at_the_beginning(name: str, kind: str) -> None:
    model = ready(name)
    caches = Caches(model, kind)
    for item in (5, 6):
        forwarded(model, caches.next(), prompt(name, item, MIDDLE))
        assert forwarded(model, caches.next(), prompt(name, item, MIDDLE, TAIL)) <= 15 + TOO_SHORT[kind]


@pytest.mark.parametrize("name", REUSING)
def test_an_answer_comes_back(name: str, kind: str) -> None:
    """Decoded tokens after an image, whose positions may be shifted, are found when the chat goes on."""
    model = ready(name)
    caches = Caches(model, kind)
    inputs = prompt(name, HEAD, 5, MIDDLE)
    n = inputs["input_ids"].shape[1]
    answer = generate(model, inputs, past_key_values=caches.next()).sequences[0, n:].tolist()
    if any(token >= 190 for token in answer):  # a placeholder of nothing
        answer = answer[: next(i for i, token in enumerate(answer) if token >= 190)]
    grown = prompt(name, HEAD, 5, MIDDLE, answer, TAIL)
    assert forwarded(model, caches.next(), grown) <= 15 + 1 + TOO_SHORT[kind]


@pytest.mark.parametrize("name", REUSING)
def test_without_the_hash_another_image_would_match(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the tests above would notice."""
    monkeypatch.setattr(media, "_hash", lambda value: b"all the same")
    model = ready(name)
    cache = ChunkReuseCache(model)
    forwarded(model, cache, prompt(name, HEAD, 5, MIDDLE))
    with pytest.raises(AssertionError):
        forwarded(model, cache, prompt(name, HEAD, 6, MIDDLE))


MODES: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3},
    "return_sequences": {"do_sample": True, "num_return_sequences": 2},
    "prompt_lookup": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "qwen3_vl", "gemma3", "voxtral"])
def test_modes_of_generation(name: str, mode: str) -> None:
    model = ready(name)
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=16))
    for parts in ((HEAD, 5, MIDDLE), (HEAD, 5, MIDDLE, TAIL), (HEAD, 6, MIDDLE), (HEAD, MIDDLE), (HEAD, 5, MIDDLE)):
        torch.manual_seed(1)
        plain = generate(model, prompt(name, *parts), **MODES[mode])
        torch.manual_seed(1)
        reused = generate(model, prompt(name, *parts), past_key_values=cache, **MODES[mode])
        assert_same(plain, reused)
    assert cache.report.bypass_reason is None
    assert cache.report.reused_tokens >= 40
