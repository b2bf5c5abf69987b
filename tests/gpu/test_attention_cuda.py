"""The Triton kernels on a GPU: the cases of the interpreter, larger ones, and models."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch

from kvboost_hf import ChunkReuseCache, ChunkStore, KVQuantConfig
from tests.attention import Problem
from tests.conftest import as_inputs, left_pad, make_model, random_ids
from tests.gpu.device import COMPILER, DEVICE, ON_GPU, needs_gpu
from tests.internals.attention import AttentionCall, Part, active_tier, kernel_calls, ops, use_tier
from tests.internals.cache import PiecedLayer, layers
from tests.internals.top import handles
from tests.parity import test_blend, test_tree_attention, test_triton_codes, test_triton_dense, test_triton_pieces

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0), reason="Triton has no tensor cores"
    ),
]
BF16 = torch.bfloat16
LARGE = {
    "prompt": Problem(dtype=BF16, head_dim=128, heads=8, queries=1500, columns=1500, window=700),
    "suffix": Problem(dtype=BF16, head_dim=128, heads=8, queries=100, columns=20_000, padding=True),
    "suffix in float32": Problem(head_dim=64, heads=8, queries=70, columns=9_000),
    "one token": Problem(dtype=torch.float16, head_dim=96, heads=8, queries=1, columns=40_000, sinks=True),
    "scattered": Problem(dtype=BF16, head_dim=128, heads=8, queries=600, columns=4_000, sparse=True),
    "scattered in a window": Problem(dtype=BF16, head_dim=64, queries=300, columns=3_000, sparse=True, window=512),
    "tree": Problem(dtype=BF16, head_dim=128, heads=8, queries=63, columns=5_000, tree=True),
    "tree in a window": Problem(head_dim=128, heads=8, queries=64, columns=5_000, tree=True, sparse=True, window=700),
    "tree behind a long text": Problem(dtype=BF16, head_dim=64, heads=8, queries=64, columns=60_000, tree=True),
    "softcap": Problem(dtype=BF16, head_dim=256, heads=8, queries=200, columns=3_000, softcap=30.0),
    "mask": Problem(dtype=BF16, head_dim=128, queries=130, columns=2_000, mask=True, causal=False),
}
if not ON_GPU:
    LARGE = {name: replace(problem, queries=1, columns=20) for name, problem in LARGE.items()}
NEW, CHUNK, CHUNKS = (20, 32, 10) if ON_GPU else (2, 16, 1)


def on_gpu(value: Any) -> Any:
    """A tensor, or a dataclass, list or tuple of tensors."""
    if isinstance(value, torch.Tensor):
        return value.to(DEVICE)
    if is_dataclass(value) and not isinstance(value, type):
        given = {each.name: on_gpu(getattr(value, each.name)) for each in fields(value) if each.name != "places"}
        if "rows" in given:  # stay in host memory; where the pieces are has changed
            given |= {"rows": value.rows, "places": None}  # type: ignore[attr-defined]
        return replace(value, **given)
    if isinstance(value, AttentionCall):
        return AttentionCall(*map(on_gpu, value))
    return type(value)(map(on_gpu, value)) if isinstance(value, tuple | list) else value


def on_host(part: Part) -> Part:
    return part[0].cpu(), part[1].cpu()


def attend(problem: Problem) -> Part:
    return ops.attend(problem.call(partial=True), *problem.kv())


@pytest.fixture(autouse=True)
def _all_bits() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(autouse=True)
def _interpreted() -> Iterator[None]:
    """On the host, the kernels have to be asked for."""
    with nullcontext() if ON_GPU else use_tier("triton"):
        yield


def test_it_is_the_triton_tier() -> None:
    assert active_tier() == active_tier(DEVICE, torch.float32) == "triton"


@pytest.mark.parametrize("case", test_triton_dense.CASES, ids=range(len(test_triton_dense.CASES)))
def test_cases_of_the_interpreter(case: dict[str, Any]) -> None:
    problem = replace(test_triton_dense.as_problem(case)[0], device=DEVICE)
    before = kernel_calls()
    found = attend(problem)
    assert dict(kernel_calls() - before) == {"triton.attend": 1}
    problem.check(found)


@pytest.mark.parametrize("name", test_tree_attention.SIZES)
def test_trees_of_any_size(name: str) -> None:
    problem, before = replace(test_tree_attention.SIZES[name], device=DEVICE), kernel_calls()
    found = attend(problem)
    assert dict(kernel_calls() - before) == {"triton.attend": 1}
    problem.check(found)


@pytest.mark.parametrize("problem", LARGE.values(), ids=LARGE)
def test_large_ones(problem: Problem) -> None:
    problem = replace(problem, device=DEVICE)
    problem.check(attend(problem))


@pytest.mark.parametrize("case", test_triton_pieces.CASES.values(), ids=test_triton_pieces.CASES)
def test_pieces(case: test_triton_pieces.Pieced) -> None:
    whole, before = case.whole(), kernel_calls()
    found = ops.attend_pieces(on_gpu(whole.call()), on_gpu(case.table()), whole.columns)
    assert dict(kernel_calls() - before) == {"triton.attend_pieces": 1}
    test_triton_pieces.check(case, on_host(found))


@pytest.mark.parametrize("case", test_triton_codes.CASES.values(), ids=test_triton_codes.CASES)
def test_codes(case: test_triton_codes.Coded) -> None:
    before = kernel_calls()
    found = ops.attend_codes(*map(on_gpu, case.given()))
    assert dict(kernel_calls() - before) == {"triton.attend_codes": 1}
    test_triton_codes.check(case, on_host(found))


def test_a_kernel_that_is_launched_again_says_the_same() -> None:
    """The first launch is Triton's own; others find the compiled kernel, and give it addresses."""
    problem = replace(next(iter(LARGE.values())), device=DEVICE)
    case, coded = next(iter(test_triton_pieces.CASES.values())), next(iter(test_triton_codes.CASES.values()))
    call, table, given = on_gpu(case.whole().call()), on_gpu(case.table()), list(map(on_gpu, coded.given()))
    calls: list[Callable[[], Part]] = [
        lambda: attend(problem),
        lambda: ops.attend_pieces(call, table, table.columns + 9),
        lambda: ops.attend_codes(*given),
    ]
    for run in calls:
        found = [run() for _ in range(3)]
        assert all(torch.equal(one, first) for other in found[1:] for one, first in zip(other, found[0], strict=True))


@needs_gpu("PyTorch's kernels are for its tensors")
def test_a_plain_prompt_goes_to_the_kernels_of_pytorch() -> None:
    problem = Problem(dtype=BF16, queries=300, columns=300, head_dim=64, device=DEVICE)
    before = kernel_calls()
    found = ops.attend(problem.call(), *problem.kv())
    assert dict(kernel_calls() - before) == {"sdpa.square": 1}
    problem.check(found)


@needs_gpu("it captures a graph")
@pytest.mark.parametrize("queries", [1, 40])
def test_it_can_be_captured(queries: int) -> None:
    """A CUDA graph replays it: nothing in a call waits for the device."""
    problem = Problem(dtype=BF16, head_dim=128, heads=8, queries=queries, columns=5_000, device=DEVICE)
    given = problem.call(), *problem.kv()
    expected, _ = ops.attend(*given)  # compiled before it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found, _ = ops.attend(*given)
    found.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, expected)


def test_compiled_by_inductor() -> None:
    model = make_model("llama").to(DEVICE)
    model.set_attn_implementation("kvboost_fa2")
    ids = random_ids(3 * NEW, 1).to(DEVICE)
    with torch.no_grad():
        found = torch.compile(model.forward, fullgraph=True, backend=COMPILER)(ids, use_cache=False).logits
        torch.testing.assert_close(found, model(ids, use_cache=False).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt_oss"])
def test_tokens_are_those_of_eager_attention(name: str) -> None:
    eager, ours = (make_model(name).to(DEVICE) for _ in range(2))
    eager.set_attn_implementation("eager")
    ours.set_attn_implementation("kvboost_fa2")
    rows = random_ids(4 * NEW + 10, 1), random_ids(3 * NEW + 1, 2)
    inputs = {key: each.to(DEVICE) for key, each in left_pad(*rows).items()}
    before = kernel_calls()
    found = ours.generate(**inputs, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    assert dict(kernel_calls() - before) == {"triton.attend": NEW * ours.config.num_hidden_layers}
    assert torch.equal(found, eager.generate(**inputs, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False))


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_logits_of_a_tree_are_those_of_its_paths(name: str) -> None:
    model, tree = make_model(name).to(DEVICE), test_tree_attention.random_tree()
    before = kernel_calls()
    found = test_tree_attention.logits_of(model, tree)
    assert dict(kernel_calls() - before) == {"triton.attend": 2 * model.config.num_hidden_layers}
    truth = test_tree_attention.logits_of_paths(model, tree)
    torch.testing.assert_close(found, truth, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("kernel", "live_quant"),
    [
        ("triton.attend_pieces", None),
        ("triton.attend_codes", KVQuantConfig(method="kivi", group_size=16, window=16, exact_layers=0)),
    ],
)
def test_trees_behind_what_is_read_in_place(
    kernel: str, live_quant: KVQuantConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tree, found = make_model("llama").to(DEVICE), test_tree_attention.random_tree(), []
    model.set_attn_implementation("kvboost_fa2")
    monkeypatch.setattr(layers, "JOINED_ON", ())  # one row is to stay in pieces
    for in_place in (True, False):
        store = ChunkStore(model, chunk_size=16)
        store.warm(random_ids(test_tree_attention.PROMPT, 1)[:, :32])
        before = kernel_calls()
        found.append(test_tree_attention.logits_of(model, tree, ChunkReuseCache(model, store, live_quant=live_quant)))
        assert bool((kernel_calls() - before)[kernel]) == in_place
        monkeypatch.setattr(handles, "_readers", {})  # the second time, all is made dense
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("tiers", [["ram:1GB"], ["device:1GB", "ram:1GB"]], ids=["ram", "device"])
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}], ids=str)
def test_hits_are_read_where_they_are(tiers: list[str], how: dict[str, Any]) -> None:
    model = make_model("llama").to(DEVICE)
    model.set_attn_implementation("kvboost_fa2")
    store, text = ChunkStore(model, chunk_size=CHUNK, tiers=tiers), random_ids(CHUNK * CHUNKS + 80, 1)
    store.warm(text[:, : CHUNK * CHUNKS])
    for stop in (CHUNK * CHUNKS + 10, CHUNK * CHUNKS + 80, CHUNK * CHUNKS - 120)[: None if ON_GPU else 1]:
        rows = [torch.cat([text[:, :stop], random_ids(10, seed)], dim=1) for seed in ((2, 3) if ON_GPU else (2,))]
        inputs = {key: each.to(DEVICE) for key, each in left_pad(*rows).items()}
        cache, told = ChunkReuseCache(model, store), {"max_new_tokens": NEW, "do_sample": False, **how}
        before = kernel_calls()
        torch.manual_seed(0)
        found = model.generate(**inputs, past_key_values=cache, **told)
        assert (kernel_calls() - before)["triton.attend_pieces"]
        torch.manual_seed(0)
        assert torch.equal(found, model.generate(**inputs, **told))
        assert all(layer._rows for layer in cache.layers if isinstance(layer, PiecedLayer))


@pytest.mark.parametrize("config", [KVQuantConfig(window=32), KVQuantConfig(method="kivi", key_bits=8, value_bits=8)])
def test_codes_are_read_where_they_are(config: KVQuantConfig) -> None:
    model = make_model("deep_llama" if ON_GPU else "llama").to(DEVICE)
    inputs = {key: each.to(DEVICE) for key, each in as_inputs(random_ids(700 if ON_GPU else 60, 1)).items()}
    config = config if ON_GPU else replace(config, window=16, group_size=16, exact_layers=0)
    answers = []
    for attention in ("eager", "kvboost_fa2"):
        model.set_attn_implementation(attention)
        cache = ChunkReuseCache(model, ChunkStore(model), live_quant=config)
        before = kernel_calls()
        answers.append(model.generate(**inputs, past_key_values=cache, max_new_tokens=NEW, do_sample=False))
        assert bool((kernel_calls() - before)["triton.attend_codes"]) == (attention == "kvboost_fa2")
    assert torch.equal(*answers)


def test_moved_chunks_are_repaired() -> None:
    model = make_model("llama").to(DEVICE)
    model.set_attn_implementation("kvboost_fa2")
    inputs = {key: each.to(DEVICE) for key, each in as_inputs(test_blend.prompt([2, 0, 3, 1])).items()}
    with use_tier("triton" if ON_GPU else "cpu"):  # so much takes the interpreter a minute
        cache = ChunkReuseCache(model, test_blend.store_with_documents(model), test_blend.blend(ratio=1.0))
        found = model.generate(**inputs, past_key_values=cache, max_new_tokens=20, do_sample=False)
        assert cache.report.moved_tokens
        assert torch.equal(found, model.generate(**inputs, max_new_tokens=20, do_sample=False))


def test_another_tier_can_be_asked_for() -> None:
    problem = Problem(dtype=BF16, device=DEVICE)
    with use_tier("sdpa"):
        found = ops.attend(problem.call(), *problem.kv())
    problem.check(found, weights=2)  # with a mask it may round each part
