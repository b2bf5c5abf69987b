"""Windows, states, fixed sizes, images and audits on a CUDA device."""

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig, PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, ReusePolicy, attach, check_model_compatibility, detach
from tests import multimodal
from tests.conftest import STATEFUL, WINDOWED, left_pad, make_model, random_ids
from tests.gpu.device import DEVICE, ON_GPU, needs_gpu
from tests.internals.cache import CompileCosts, costs, decoding_form

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
]
BASE, OTHER = random_ids(200, seed=1), random_ids(200, seed=2)
NEW = 8


def generate(model: PreTrainedModel, inputs: dict[str, Any], **kwargs: Any) -> Any:
    on_gpu = {name: value.to(DEVICE) for name, value in inputs.items()}
    return model.generate(**on_gpu, max_new_tokens=NEW, do_sample=False, **kwargs)


@pytest.mark.parametrize("name", [*WINDOWED, *STATEFUL])
def test_windows_and_states(name: str) -> None:
    model = make_model(name).to(DEVICE)
    check_model_compatibility(model)
    store = ChunkStore(model, chunk_size=32)
    cache = ChunkReuseCache(model, store, ReusePolicy(audit_rate=1.0))
    longer = torch.cat([BASE, OTHER[:, :20]], dim=1)
    for inputs in (left_pad(BASE), left_pad(longer), left_pad(BASE[:, :150], OTHER[:, :90]), left_pad(OTHER)):
        expected = generate(model, inputs)
        for held in (cache, ChunkReuseCache(model, store)):
            assert torch.equal(generate(model, inputs, past_key_values=held), expected)
            assert held.report.bypass_reason is None
    assert store.stats()["audits"] > 0
    assert store.stats()["divergences"] == 0
    assert all(saved.nbytes > 0 for saved in store.inspect().states.values())
    kept = [layer for saved in store.inspect().states.values() for layer in saved.states.layers if layer is not None]
    assert all(t.device.type == "cpu" for layer in kept for t in layer.tensors if t is not None)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])  # the second one replays CUDA graphs
@pytest.mark.parametrize(
    ("name", "attention"),
    [("llama", "sdpa"), ("llama", "kvboost_fa2"), ("mistral", "sdpa"), ("gemma2", "kvboost_fa2")],
)
def test_compiled_decoding(name: str, attention: str, mode: str) -> None:
    model = make_model(name).to(DEVICE)
    model.set_attn_implementation(attention)
    check_model_compatibility(model)
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=32), max_cache_len=256)
    counters.clear()
    graphs = []
    for ids in (BASE, BASE[:, :90], torch.cat([BASE[:, :90], OTHER[:, :60]], dim=1), OTHER[:, :100]):
        expected = generate(model, left_pad(ids))
        found = generate(model, left_pad(ids), past_key_values=cache, compile_config=CompileConfig(mode=mode))
        assert torch.equal(found, expected)
        graphs.append(counters["stats"]["unique_graphs"])
    assert cache.report.forwarded_tokens <= 100
    assert (graphs[0] > 0) == ON_GPU  # elsewhere, transformers compiles nothing
    assert graphs == graphs[:1] * 4  # nothing is compiled again
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert not counters["graph_break"]


@needs_gpu("transformers compiles nothing elsewhere")
def test_attached_with_a_size() -> None:
    """generate() compiles by itself, without a cache that is passed, or a configuration."""
    model = attach(make_model("mistral").to(DEVICE), max_cache_len=256)
    counters.clear()
    for ids in (BASE[:, :90], torch.cat([BASE[:, :90], OTHER[:, :60]], dim=1)):
        assert torch.equal(generate(model, left_pad(ids)), generate(make_model("mistral").to(DEVICE), left_pad(ids)))
    assert counters["stats"]["unique_graphs"] > 0
    assert counters["inductor"]["cudagraph_skips"] == 0
    detach(model)


@needs_gpu("elsewhere, nothing is compiled by default")
@pytest.mark.parametrize(
    ("name", "attention"),
    [("llama", "sdpa"), ("mistral", "sdpa"), ("llama", "kvboost_fa2"), ("gemma2", "kvboost_fa2")],
)
def test_compiled_by_default(name: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No size is named: buffers grow twice, the second graph serves all sizes, and replays give what steps give."""
    monkeypatch.setattr(costs, "TOKENS_PER_GRAPH", 0)
    monkeypatch.setattr(costs, "SAVED_S", 1e9)
    monkeypatch.setattr(decoding_form, "_LEAST_COLUMNS", 64)
    monkeypatch.setattr(decoding_form, "_LEAST_NEW", 1)
    monkeypatch.setattr(decoding_form, "_most_bytes", lambda *given: None)  # the weights of the model are few
    model = make_model(name).to(DEVICE)
    model.set_attn_implementation(attention)
    check_model_compatibility(model)
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=32))
    counters.clear()
    history, graphs, columns = BASE[:, :40], [], []
    for turn in range(6):
        expected = generate(model, left_pad(history))
        assert torch.equal(generate(model, left_pad(history), cache=cache), expected)
        assert cache.report.eager_reason is None
        assert CompileCosts.of(model).failure is None
        graphs.append(counters["stats"]["unique_graphs"])
        columns.append(cache.layers[0].max_cache_len)
        history = torch.cat([expected.cpu(), OTHER[:, 30 * turn : 30 * turn + 30]], dim=1)
    assert columns == [64, 128, 128, 256, 256, 256]
    assert graphs[1:] == graphs[1:2] * 5
    assert counters["inductor"]["cudagraph_skips"] == 0


@needs_gpu("elsewhere, tests/parity/test_suffix_graphs.py does this with other backends")
@pytest.mark.parametrize(
    ("name", "attention"),
    [("llama", "sdpa"), ("llama", "kvboost_fa2"), ("mistral", "sdpa"), ("gemma2", "kvboost_fa2")],
)
def test_first_tokens_in_graphs(name: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends of prompts, padded to a few lengths: compiled, checked and replayed between steps that decode."""
    monkeypatch.setattr(costs, "PROMPTS_PER_GRAPH", 0)
    model = make_model(name).to(DEVICE)
    model.set_attn_implementation(attention)
    check_model_compatibility(model)
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=32), max_cache_len=256)
    generate(model, left_pad(BASE[:, :60]), cache=cache, compile_config=CompileConfig())
    counters.clear()
    for turn, new in enumerate((5, 20, 5, 40, 5, 20, 9, 33, 16, 64)):
        ids = torch.cat([BASE[:, :60], OTHER[:, 10 * turn : 10 * turn + new]], dim=1)
        ids[:, 60] = 2 + 3 * turn
        expected = generate(model, left_pad(ids))
        assert torch.equal(generate(model, left_pad(ids), cache=cache, compile_config=CompileConfig()), expected)
        assert cache.report.forwarded_tokens == new
        assert CompileCosts.of(model).suffix_failure is None
    assert counters["stats"]["unique_graphs"] == 2
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "gemma3"])
def test_images(name: str) -> None:
    model = multimodal.make_model(name).to(DEVICE)
    store = ChunkStore(model, chunk_size=16)
    parts = [multimodal.text(30, 1), 1, multimodal.text(20, 2)]
    other = [multimodal.text(30, 1), 2, multimodal.text(20, 2)]
    for shown in (parts, parts, other):
        inputs = multimodal.prompt(name, *shown)  # type: ignore[arg-type]
        cache = ChunkReuseCache(model, store)
        assert torch.equal(generate(model, inputs, past_key_values=cache), generate(model, inputs))
    assert cache.report.reused_tokens <= 32  # the text before the image
