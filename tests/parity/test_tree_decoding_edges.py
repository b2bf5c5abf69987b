"""Trees of drafts where something else is going on: state of a user's own, caches kept for later, odd arguments."""

import warnings
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, DraftTreeConfig, KVQuantConfig, TreeDecoding, speculation_stats
from tests import multimodal
from tests.conftest import as_inputs, counted, make_model, random_ids
from tests.internals.cache import CodedTensor, PiecedLayer
from tests.internals.top import handles
from tests.parity.test_assistants import noisy

WIDE = DraftTreeConfig(policy="tree", depth=4, width=3, branching=3, max_nodes=40)


def pair(name: str = "llama", config: DraftTreeConfig = WIDE) -> tuple[PreTrainedModel, TreeDecoding]:
    """A target, and trees for it by a draft that often agrees."""
    return make_model(name), TreeDecoding(noisy(make_model(name), 0.08), config)


class _Counting(LogitsProcessor):
    """Has a say that depends on how often it was asked, and notes for what texts."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.texts.append(input_ids[0].tolist())
        scores[:, len(self.texts) * 37 % 190 + 2 :] -= 5.0
        return scores


def test_processors_are_asked_about_what_is_said_only() -> None:
    target, trees = pair()
    told = {**as_inputs(random_ids(20, 1)), "max_new_tokens": 12}
    ways: list[dict[str, Any]] = [{}, {"custom_generate": trees}]
    plain, ours = _Counting(), _Counting()
    wanted, found = (
        target.generate(**told, **way, logits_processor=[each]) for way, each in zip(ways, (plain, ours), strict=True)
    )
    assert torch.equal(found, wanted)
    assert ours.texts == plain.texts
    wanted, found = (target.generate(**told, **way, guidance_scale=1.5) for way in ways)  # by one with a cache
    assert torch.equal(found, wanted)
    assert not torch.equal(found, target.generate(**told))


def test_the_same_random_numbers_give_the_same_answer() -> None:
    target, trees = pair()
    for seed in range(4):
        told = {**as_inputs(random_ids(20, seed)), "max_new_tokens": 15, "do_sample": True, "temperature": 0.7}
        texts = []
        for way in ({}, {"custom_generate": trees}):
            torch.manual_seed(seed)
            texts.append(target.generate(**told, **way))
        assert torch.equal(*texts)
    assert speculation_stats(trees).committed_per_round > 1.2


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral"])
def test_a_stock_cache_is_left_as_plain_decoding_leaves_it(name: str) -> None:
    """Windows included, which would otherwise keep all that leaves them from then on."""
    target, trees = pair(name)
    caches = [DynamicCache(config=target.config) for _ in range(2)]
    text = random_ids(30, 1)
    for way in ({"custom_generate": trees}, {}):
        texts = [
            target.generate(**as_inputs(text), max_new_tokens=20, past_key_values=cache, **more)
            for cache, more in zip(caches, ({}, way), strict=True)
        ]
        assert torch.equal(*texts)
        for plain, ours in zip(*(cache.layers for cache in caches), strict=True):
            assert plain.get_seq_length() == ours.get_seq_length()
            assert torch.allclose(plain.keys, ours.keys, atol=1e-4)
            assert torch.allclose(plain.values, ours.values, atol=1e-4)
            assert getattr(plain, "record_past", None) == getattr(ours, "record_past", None)
        text = torch.cat([texts[0], random_ids(9, 2)], dim=1)


def test_what_ids_do_not_tell_is_refused() -> None:
    target, trees = pair()
    ids = random_ids(20, 3)
    embeds = target.get_input_embeddings()(ids).detach()
    told = {"inputs_embeds": embeds, "attention_mask": torch.ones_like(ids), "custom_generate": trees}
    for more in ({"max_length": 24}, {"input_ids": ids, "max_new_tokens": 4}):
        with pytest.raises(ValueError, match="`inputs_embeds` must be None"):
            target.generate(**told, **more)
    target, trees = pair("gpt2")
    with pytest.raises(ValueError, match="`token_type_ids` must be None"):
        target.generate(**as_inputs(ids), token_type_ids=torch.ones_like(ids), custom_generate=trees, max_new_tokens=4)
    cache = ChunkReuseCache(target, max_cache_len=64)
    with counted(target) as work, pytest.raises(ValueError, match="layers of the kind StaticReuseLayer"):
        target.generate(**as_inputs(ids), past_key_values=cache, custom_generate=trees, max_new_tokens=4)
    assert work.tokens == 0
    with pytest.raises(ValueError, match="layers that attend to images only"):
        TreeDecoding(multimodal.make_model("mllama"))


def test_types_that_tell_images_are_taken() -> None:
    target = multimodal.make_model("gemma3")
    trees = TreeDecoding(noisy(multimodal.make_model("gemma3"), 0.05), WIDE)
    told = multimodal.prompt("gemma3", multimodal.text(7, 1), 1, multimodal.text(9, 2))
    told |= {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    assert "token_type_ids" in told
    assert torch.equal(target.generate(**told, custom_generate=trees), target.generate(**told))


def test_pieces_of_a_store_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(handles._readers, "a test", lambda kind, device: True)
    target, trees = pair()
    target.set_attn_implementation("kvboost_fa2")
    store = ChunkStore(target, chunk_size=16)
    store.warm(random_ids(50, 0))
    told = {**as_inputs(random_ids(50, 0)), "max_new_tokens": 20}
    cache = ChunkReuseCache(target, store)
    found = target.generate(**told, custom_generate=trees, past_key_values=cache)
    assert all(isinstance(layer, PiecedLayer) and layer._rows for layer in cache.layers)
    assert all(layer.length == 69 and layer._tensors[0].first == 48 for layer in cache.layers)
    assert torch.equal(found, target.generate(**told))


def test_codes_are_decoded_once_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    target, trees = pair("deep_llama")
    calls, whole = [0], CodedTensor.whole

    def counting(self: CodedTensor, blocks: int, exact: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return whole(self, blocks, exact)

    monkeypatch.setattr(CodedTensor, "whole", counting)
    cache = ChunkReuseCache(target, live_quant=KVQuantConfig(exact_layers=1, window=16, sink_tokens=4))
    told = {**as_inputs(random_ids(60, 2)), "max_new_tokens": 20, "custom_generate": trees}
    target.generate(**told)  # finds out that it can
    with counted(target) as work:
        target.generate(**told, past_key_values=cache)
    assert calls[0] == 2 * 6 * (work.calls - 1)  # keys and values of the layers with codes; the prompt had none yet


def test_no_warning_of_weights_at_rest() -> None:
    accelerate = pytest.importorskip("accelerate")
    target, trees = pair()
    told = {**as_inputs(random_ids(30, 1)), "max_new_tokens": 6}
    wanted = target.generate(**told)
    accelerate.cpu_offload(target, execution_device=torch.device("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "You are calling .generate")  # of transformers 5.17, whoever decodes
        assert torch.equal(target.generate(**told, custom_generate=trees), wanted)
