"""Prompts with images, sound and video: what is shown is part of what K/V is found by."""

import functools
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache, PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, ReusePolicy, attach, check_model_compatibility, last_cache
from tests.architectures.models import NOT_BUILT
from tests.conftest import as_inputs, counted, left_pad
from tests.internals.cache import media
from tests.multimodal import FAMILIES, exaone4_5, hunyuan_vl, make_model, prompt, text

NEW = 4
BYPASSED = ("paligemma", "mllama")
STATEFUL = ("qwen3_5", "lfm2_vl")
REUSING = [name for name in FAMILIES if name not in BYPASSED + STATEFUL and f"{name}-multimodal" not in NOT_BUILT]
# Their images can be told apart, so that the first of a chat is known again when the second one comes.
BY_ITEM = [
    name for name in REUSING if name not in ("idefics3", "smolvlm", "voxtral", "qwen2_audio", "llama4", "glm4v_video")
]

# One of each kind: plain, positions in three dimensions, features in several layers, attention both ways, sound.
SOME = ["llava", "qwen2_vl", "qwen3_vl", "gemma3", "voxtral"]

# Tokens at the end of a prompt that are too few for the store.
TOO_SHORT = {"live": 0, "stored": 7}

HEAD, MIDDLE, TAIL, MORE = text(40, 1), text(20, 2), text(15, 3), text(12, 4)


@functools.cache
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
    if name in BY_ITEM and media._slice_mm_encoder_output is not None:  # type: ignore[attr-defined]
        assert two <= size + 15 + lost
    assert forwarded(model, caches.next(), prompt(name, HEAD, 5, MIDDLE, 6, TAIL, MORE)) <= 12 + lost
    # The second image changes.
    forwarded(model, caches.next(), prompt(name, HEAD, 5, MIDDLE, 7, TAIL, MORE))
    # Text only, with the placeholders of nothing.
    assert forwarded(model, caches.next(), prompt(name, HEAD, TAIL)) <= 15 + lost


@pytest.mark.parametrize("name", STATEFUL)
def test_a_chat_about_images_of_a_model_with_states(name: str, kind: str) -> None:
    """States are kept in front of the first image, at the last border, and where a cache lets go of them."""
    model = ready(name)
    caches = Caches(model, kind)
    head, again = text(60, 1), text(12, 6)
    start = prompt(name, head, 5, MIDDLE)
    n = start["input_ids"].shape[1]
    assert forwarded(model, caches.next(), start) == n
    assert forwarded(model, caches.next(), prompt(name, head, 6, MIDDLE)) <= n - 60 + 1  # START is in front of it
    answer = generate(model, start, past_key_values=caches.next()).sequences[0, n:-1].tolist()
    if not any(token >= 190 for token in answer):  # else: a placeholder of nothing
        left = 12 + 4 if kind == "live" else n - 61 + 12 + 4  # a state whose tail is too short is not stored
        assert forwarded(model, caches.next(), prompt(name, head, 5, MIDDLE + answer + again)) <= left
    for item in (5, 6, 5):
        forwarded(model, caches.next(), prompt(name, head, item, MIDDLE, 7, TAIL))
    forwarded(model, caches.next(), prompt(name, head, TAIL))


@pytest.mark.parametrize("name", SOME)
def test_an_image_at_the_beginning(name: str, kind: str) -> None:
    model = ready(name)
    caches = Caches(model, kind)
    for item in (5, 6):
        forwarded(model, caches.next(), prompt(name, item, MIDDLE))
        assert forwarded(model, caches.next(), prompt(name, item, MIDDLE, TAIL)) <= 15 + TOO_SHORT[kind]


@pytest.mark.parametrize("name", SOME)
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
    cache = ChunkReuseCache(model, ChunkStore(model))
    forwarded(model, cache, prompt(name, HEAD, 5, MIDDLE))
    with pytest.raises(AssertionError):
        forwarded(model, cache, prompt(name, HEAD, 6, MIDDLE))


MODES: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3},
    "return_sequences": {"do_sample": True, "num_return_sequences": 2},
    "prompt_lookup": {"prompt_lookup_num_tokens": 3},
    "prefill_chunks": {"prefill_chunk_size": 30},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "qwen3_vl", "gemma3", "voxtral"])
def test_modes_of_generation(name: str, mode: str) -> None:
    if mode == "prefill_chunks" and (name == "voxtral" or (media._slice_mm_encoder_output is None and "qwen" in name)):  # type: ignore[attr-defined]
        pytest.skip("transformers itself cannot")
    model = ready(name)
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=16))
    for parts in ((HEAD, 5, MIDDLE), (HEAD, 5, MIDDLE, TAIL), (HEAD, 6, MIDDLE), (HEAD, MIDDLE), (HEAD, 5, MIDDLE)):
        torch.manual_seed(1)
        plain = generate(model, prompt(name, *parts), **MODES[mode])
        torch.manual_seed(1)
        reused = generate(model, prompt(name, *parts), past_key_values=cache, **MODES[mode])
        assert_same(plain, reused)
    if mode == "prefill_chunks":
        if media._slice_mm_encoder_output is not None:  # type: ignore[attr-defined]
            found = cache.report.bypass_reason or ("" if cache.report.reused_tokens else "nothing")
            assert not found or "came after the beginning" in found  # no bypass where the first piece was reused
    else:
        assert cache.report.bypass_reason is None
        assert cache.report.reused_tokens >= 40


def test_text_between_two_images_changes(kind: str) -> None:
    """What comes before the change is left out of the forward, and with it the first item only."""
    for name in ("qwen2_vl", "qwen2_vl_video", "glm4v", "glm4v_video"):
        caches = Caches(ready(name), kind)
        forwarded(ready(name), caches.next(), prompt(name, HEAD, 5, MIDDLE, 6, TAIL))
        forwarded(ready(name), caches.next(), prompt(name, HEAD, 5, MORE, 6, TAIL))


@pytest.mark.parametrize("name", ["glm4v", "qwen2_vl"])
def test_beams_that_are_shown_the_images_of_others_leave_nothing(name: str) -> None:
    """transformers 5.23 shows beams of GLM-4V one image twice, where a prompt has two."""
    model = ready(name)
    store = ChunkStore(model, chunk_size=16)
    inputs = prompt(name, HEAD, 5, MIDDLE, 6, TAIL)
    plain = generate(model, inputs, num_beams=2)
    assert_same(plain, generate(model, inputs, num_beams=2, past_key_values=ChunkReuseCache(model, store)))
    forwarded(model, ChunkReuseCache(model, store), inputs)


def batch(name: str, *rows: dict[str, Any]) -> dict[str, Any]:
    """Prompts of one row each as one batch, padded on the left."""
    width = max(row["input_ids"].shape[1] for row in rows)
    found: dict[str, Any] = {}
    for key in {key for row in rows for key in row}:
        values = [row[key] for row in rows if key in row]
        if key in ("input_ids", "attention_mask", FAMILIES[name].types):
            values = [torch.nn.functional.pad(v, (width - v.shape[1], 0)) for v in values]
        found[key] = torch.cat(values)
    return found


@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "qwen3_vl", "gemma3", "glm4v", "voxtral"])
def test_padded_batches(name: str, kind: str) -> None:
    model = ready(name)
    caches = Caches(model, kind)
    lost = 2 * TOO_SHORT[kind]
    one, two = prompt(name, HEAD, 5, MIDDLE), prompt(name, HEAD, MORE, 6)
    two["input_ids"] = torch.cat([two["input_ids"], torch.tensor([MORE])], dim=1)
    two = prompt(name, HEAD, MORE, 6, MORE)
    assert cost(model, caches.next(), batch(name, one, two)) == one["input_ids"].numel() + two["input_ids"].numel()
    assert cost(model, caches.next(), batch(name, one, two)) <= 2 + lost
    grown = batch(name, prompt(name, HEAD, 5, MIDDLE, TAIL), prompt(name, HEAD, MORE, 6, MORE, TAIL))
    assert cost(model, caches.next(), grown) <= 2 * 15 + lost + 20
    swapped = batch(name, prompt(name, HEAD, 6, MIDDLE, TAIL), prompt(name, HEAD, MORE, 5, MORE, TAIL))
    assert cost(model, caches.next(), swapped) >= 2 * FAMILIES[name].tokens
    # A row without an image beside one with.
    mixed = batch(name, prompt(name, HEAD, TAIL), prompt(name, HEAD, 5, MIDDLE, TAIL))
    cost(model, caches.next(), mixed)
    assert cost(model, caches.next(), mixed) <= 2 + lost + 20


@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "gemma3", "idefics3", "voxtral"])
def test_rows_with_the_same_ids_and_other_images(name: str, kind: str) -> None:
    model = ready(name)
    caches = Caches(model, kind)
    for items in ((5, 6), (6, 5), (5, 5), (6, 6), (5, 6)):
        rows = [prompt(name, HEAD, item, MIDDLE) for item in items]
        forwarded(model, caches.next(), batch(name, *rows))


def cost(model: PreTrainedModel, cache: ChunkReuseCache, inputs: dict[str, Any]) -> int:
    """Tokens of a prompt that were forwarded, padding left out, by the report."""
    forwarded(model, cache, inputs)
    return cache.report.forwarded_tokens


@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "gemma3"])
def test_conversations_take_turns_in_one_cache(name: str) -> None:
    """Models that keep the shift of their last prompt on themselves must not use it for another one."""
    model = ready(name)
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=16))
    for parts in (
        (HEAD, 5, MIDDLE),
        (HEAD, TAIL),
        (HEAD, 5, MIDDLE, 6, TAIL),
        (HEAD, TAIL, MORE),
        (HEAD, TAIL, MORE, 6, MORE),
        (5, MIDDLE),
        (MIDDLE,),
        (HEAD, 5, MIDDLE, 6, TAIL, MORE),
    ):
        forwarded(model, cache, prompt(name, *parts))


@torch.no_grad()
@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3", "internvl", "voxtral"])
def test_bare_forwards(name: str) -> None:
    """The model works out positions itself, from ids and images that reuse takes away."""
    model = ready(name)
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=16))
    for parts in (
        (HEAD, 5, MIDDLE),
        (HEAD, 5, MIDDLE, TAIL),
        (HEAD, 6, MIDDLE),
        (HEAD, MIDDLE),
        (HEAD, 5, MIDDLE, TAIL),
    ):
        inputs = prompt(name, *parts)
        if "attention_mask" in inputs:
            del inputs["attention_mask"]
        cache.reset()
        with counted(model) as work:
            found = model(**inputs, past_key_values=cache, logits_to_keep=1).logits
        reused = cache.report.reused_tokens
        assert work.tokens == inputs["input_ids"].shape[1] - reused
        after = model(input_ids=torch.tensor([[7, 8]]), past_key_values=cache).logits
        stock = DynamicCache(config=model.config)
        expected = model(**inputs, past_key_values=stock, logits_to_keep=1).logits
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
        expected = model(input_ids=torch.tensor([[7, 8]]), past_key_values=stock).logits
        torch.testing.assert_close(after, expected, atol=2e-4, rtol=2e-4)
    assert reused > 70


@torch.no_grad()
@pytest.mark.skipif(
    not hasattr(transformers, "HunYuanVLConfig"), reason="this release of transformers has no such model"
)
def test_a_bare_forward_of_a_model_that_computes_positions_from_ids_alone() -> None:
    model, ids = hunyuan_vl(), torch.tensor([HEAD + MIDDLE + TAIL])
    store = ChunkStore(model, chunk_size=16)
    for reused in (0, 64):
        cache = ChunkReuseCache(model, store)
        found = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits
        expected = model(input_ids=ids, past_key_values=DynamicCache(config=model.config), logits_to_keep=1).logits
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
        assert cache.report.reused_tokens == reused


@pytest.mark.skipif(
    not hasattr(transformers, "Exaone4_5_Config"), reason="this release of transformers has no such model"
)
def test_a_kept_cache_of_a_model_whose_layers_count_columns(kind: str) -> None:
    """What the cache still holds is no part of a text that begins, and padding changes no distances."""
    model, first, other = exaone4_5(), torch.tensor([HEAD + MIDDLE]), torch.tensor([HEAD + TAIL + MORE])
    caches, reused = Caches(model, kind), []
    for inputs in (as_inputs(first), as_inputs(other), left_pad(other, first), left_pad(other, first)):
        cache = caches.next()
        forwarded(model, cache, inputs)
        reused.append(cache.report.reused_tokens)
    assert reused[1] >= 32
    assert reused[3] > reused[1]


@torch.no_grad()
def test_an_image_that_follows_what_is_held_is_bypassed() -> None:
    model = ready("llava")
    cache, stock = ChunkReuseCache(model, ChunkStore(model)), DynamicCache(config=model.config)
    for parts in ((HEAD,), (5, MIDDLE), (TAIL,)):
        inputs = prompt("llava", *parts)
        del inputs["attention_mask"]
        found = model(**inputs, past_key_values=cache, logits_to_keep=1)
        expected = model(**inputs, past_key_values=stock, logits_to_keep=1)
        torch.testing.assert_close(found.logits, expected.logits, atol=2e-4, rtol=2e-4)
    assert "came after the beginning" in (cache.report.bypass_reason or "")
    assert forwarded(model, cache, prompt("llava", HEAD, 5, MIDDLE)) > 0


@torch.no_grad()
def test_types_that_follow_what_is_held_are_not_stored_as_text() -> None:
    model = ready("gemma3")
    store = ChunkStore(model, chunk_size=16)
    cache, ids = ChunkReuseCache(model, store), torch.tensor([MIDDLE + MIDDLE])
    model(input_ids=torch.tensor([HEAD]), past_key_values=cache, logits_to_keep=1)
    types = torch.tensor([[0] * len(HEAD) + [1] * ids.shape[1]])
    model(input_ids=ids, past_key_values=cache, token_type_ids=types)  # attends both ways
    cache.store_all()
    for reader in (cache, ChunkReuseCache(model, store)):
        forwarded(model, reader, prompt("gemma3", HEAD, MIDDLE, MIDDLE, TAIL))


@pytest.mark.parametrize("name", ["qwen3_vl", "glm4v", "gemma3"])
def test_candidates_in_the_first_forward(name: str) -> None:
    """generate() gives them no types."""
    model, assistant = ready(name), make_model(name, seed=4)
    assistant.generation_config.num_assistant_tokens = 4
    assistant.generation_config.assistant_confidence_threshold = 0.0
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=16))
    for parts in ((HEAD, 5, MIDDLE), (HEAD, 6, MIDDLE), (HEAD, 5, MIDDLE, TAIL), (HEAD, TAIL)):
        inputs = prompt(name, *parts)
        plain = generate(model, inputs, max_new_tokens=8)
        if (plain.sequences[:, inputs["input_ids"].shape[1] :] >= 190).any():
            continue  # transformers itself takes placeholders that were decoded for images
        assert_same(plain, generate(model, inputs, max_new_tokens=8, past_key_values=cache, assistant_model=assistant))
        assert cache.report.bypass_reason is None
    assert cache.report.reused_tokens >= 40


def test_changed_configurations_are_noticed() -> None:
    """Those of the parts, too, and lists: models read them at each forward."""
    model = make_model("llava")
    check_model_compatibility(model)
    model.config.vision_feature_layer = [-1]
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=16))
    inputs = prompt("llava", HEAD, 5, MIDDLE)
    assert forwarded(model, cache, inputs) == inputs["input_ids"].numel()
    model.config.vision_feature_layer = [-2]
    assert forwarded(model, cache, inputs) == inputs["input_ids"].numel()
    model.config.text_config.num_hidden_layers = 1
    generate(model, inputs, past_key_values=cache)
    assert cache.report.reused_tokens == 0


def test_an_attached_model() -> None:
    model = attach(make_model("qwen2_vl"))
    inputs = prompt("qwen2_vl", HEAD, 5, MIDDLE, 6, TAIL)
    expected = generate(model, inputs, use_cache=True, past_key_values=DynamicCache(config=model.config))
    for _ in range(2):
        assert_same(expected, generate(model, inputs))
    cache = last_cache(model)
    assert cache is not None
    assert cache.report.reused_tokens > 90


REASONS = {
    "paligemma": ("position_ids do not count up from 0", "position_ids do not count up from 0"),
    "mllama": (None, "`aspect_ratio_ids` was passed"),
}


@pytest.mark.filterwarnings("ignore:`hidden_state` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", BYPASSED)
def test_what_is_bypassed(name: str) -> None:
    model = make_model(name)
    cache = ChunkReuseCache(model)
    for parts, reason in zip(((HEAD,), (HEAD, 5, MIDDLE)), REASONS[name], strict=True):
        for _ in range(2):
            inputs = prompt(name, *parts)
            assert_same(generate(model, inputs), generate(model, inputs, past_key_values=cache))
            found = cache.report.bypass_reason
            assert found is None if reason is None else reason in (found or "not bypassed")
    if name == "mllama":
        assert forwarded(model, cache, prompt(name, HEAD)) == 1


def test_a_report_tells_another_image() -> None:
    model = ready("llava")
    store = ChunkStore(model, chunk_size=16)
    generate(model, prompt("llava", HEAD, 5, MIDDLE), past_key_values=ChunkReuseCache(model, store))
    cache = ChunkReuseCache(model, store)
    generate(model, prompt("llava", HEAD, 6, MIDDLE), past_key_values=cache)
    assert "token 41: another image, sound or video than in a stored prompt." in cache.report.explain()
    generate(model, prompt("llava", HEAD, 6, TAIL), past_key_values=(cache := ChunkReuseCache(model, store)))
    assert "-" not in cache.report.explain().split("token", 1)[1]


def test_moved_text_before_an_image_is_left_as_it_is() -> None:
    """To compute it again behind the prompt, the image would have to be shown again."""
    model, document = ready("llava"), text(64, 5)
    policy = ReusePolicy(mode="blend", repair="none", progressive=True, min_prefill_saving=0, sink_tokens=0)
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=32), policy)
    generate(model, prompt("llava", MIDDLE + document), past_key_values=cache, max_new_tokens=1)
    generate(model, prompt("llava", HEAD + document + TAIL), past_key_values=cache, max_new_tokens=1)
    assert cache.report.moved_tokens == 63  # the last 16 tokens of a prompt are computed
    shown = prompt("llava", HEAD + document + TAIL, 5, MORE)
    generate(model, shown, past_key_values=cache)
    assert (cache.report.repaired_tokens, cache.repair()) == (0, 0)
    exact = ChunkReuseCache(model, cache.store)
    cache.reset()
    assert_same(generate(model, shown), generate(model, shown, past_key_values=exact))
