"""Trees of drafts for a model on a CUDA device."""

import pytest
import torch

from kvboost_hf import ChunkReuseCache, DraftTreeConfig, StreamingConfig, TreeDecoding, attention, stream_layers
from tests.conftest import as_inputs, counted, make_model, random_ids
from tests.gpu.device import DEVICE, TIER
from tests.parity.test_assistants import noisy
from tests.streaming import make_layers

WIDE = DraftTreeConfig(policy="tree", depth=4, width=3, branching=3, max_nodes=40)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "mistral"])
@pytest.mark.parametrize("implementation", ["eager", "kvboost_fa2"])
def test_tokens(name: str, implementation: str) -> None:
    target, draft = make_model(name).to(DEVICE), noisy(make_model(name), 0.08).to(DEVICE)
    trees = TreeDecoding(draft, WIDE)
    for model in (target, draft):
        model.set_attn_implementation(implementation)
    told = {**as_inputs(random_ids(70, seed=1).to(DEVICE)), "max_new_tokens": 48, "eos_token_id": None}
    plain = target.generate(**told)
    target.generate(**told, custom_generate=trees)  # whether they can is tried now, and not to be counted
    for cache in (None, ChunkReuseCache(target)):
        before = attention.kernel_calls()
        with counted(target) as work:
            assert torch.equal(target.generate(**told, custom_generate=trees, past_key_values=cache), plain)
        assert work.calls < 40
        if implementation == "kvboost_fa2":
            assert (attention.kernel_calls() - before)[f"{TIER}.attend"] >= work.calls


def test_auto_with_streamed_layers() -> None:
    target, plain = make_layers(6), make_layers(6).to(DEVICE)
    trees = TreeDecoding(make_layers(2).to(DEVICE))
    stream_layers(target, StreamingConfig(residency_mode="full_stream"), device=DEVICE)
    told = {**as_inputs(random_ids(70, seed=2).to(DEVICE)), "max_new_tokens": 48}
    wanted = plain.generate(**told)
    for cache in (None, ChunkReuseCache(target)):
        assert torch.equal(target.generate(**told, custom_generate=trees, past_key_values=cache), wanted)
