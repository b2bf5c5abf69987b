"""Ends of prompts in graphs, on a CPU that compiles by a backend that counts: tokens, logits, K/V, and work."""

import copy
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch.fx import GraphModule
from transformers import CompileConfig, PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, ReusePolicy, attach, check_model_compatibility, detach, last_cache
from tests.conftest import as_inputs, counted, left_pad, make_model, random_ids
from tests.graphs import Compiler, StopsAt, pretended_gpu
from tests.internals.cache import BaseCall, CompileCosts, StaticReuseLayer, costs, reason_for_eager_suffix
from tests.parity.test_audit import corrupt

SIZE, HELD = 640, 100
BASE = random_ids(SIZE, seed=1)
BORDERS = (1, 15, 16, 17, 64, 65, 128, 129, 256, 257)
FIRST = {"max_new_tokens": 1, "return_dict_in_generate": True, "output_logits": True}


@pytest.fixture(autouse=True)
def _graphs_at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(costs, "PROMPTS_PER_GRAPH", 0)
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


@pytest.fixture
def compiler() -> Compiler:
    return Compiler()


@pytest.fixture
def llama() -> PreTrainedModel:
    """With one layer: tracing takes seconds for each."""
    return _model("llama", layers=1)


def _model(name: str, attention: str = "sdpa", layers: int | None = None) -> PreTrainedModel:
    model = make_model(name)
    if layers is not None:
        del model.model.layers[layers:]
        model.config.num_hidden_layers = layers
    model.set_attn_implementation(attention)
    check_model_compatibility(model)
    return model


def fixed(model: PreTrainedModel, store: ChunkStore | None = None, size: int = SIZE, **how: Any) -> ChunkReuseCache:
    store = store if store is not None else ChunkStore(model, chunk_size=32)
    return ChunkReuseCache(model, store, max_cache_len=size, **how)


def growing(model: PreTrainedModel) -> ChunkReuseCache:
    return ChunkReuseCache(model, ChunkStore(model, chunk_size=32), max_cache_len=None)


def begun(model: PreTrainedModel, size: int = SIZE) -> tuple[ChunkReuseCache, ChunkReuseCache]:
    """A cache of a fixed size, and one that grows, which hold the beginning of `BASE`."""
    caches = fixed(model, size=size), growing(model)
    for cache in caches:
        first(model, as_inputs(BASE[:, :HELD]), cache=cache)
    return caches


def ending(new: int, seed: int = 0, held: int = HELD) -> torch.Tensor:
    """A prompt whose last `new` tokens follow `held` of `BASE`, the first of them one that no other has there."""
    ids = torch.cat([BASE[:, :held], random_ids(new, seed=1000 + new + seed)], dim=1)
    ids[:, held] = 2 + (new + 7 * seed) % 150
    return ids


def first(model: PreTrainedModel, inputs: dict[str, torch.Tensor], **how: Any) -> Any:
    return model.generate(**inputs, **FIRST, **how)


def same(found: Any, expected: Any) -> bool:
    """Whether tokens are equal, and logits up to rounding."""
    close = all(
        torch.allclose(one, other, atol=2e-4, rtol=2e-4)
        for one, other in zip(found.logits, expected.logits, strict=True)
    )
    return torch.equal(found.sequences, expected.sequences) and close


def require_same_kv(cache: ChunkReuseCache, other: ChunkReuseCache) -> None:
    """K/V of all columns are equal up to rounding, and nothing is left of padding behind them."""
    assert cache.get_seq_length() == other.get_seq_length()
    for mine, theirs in zip(cache.layers, other.layers, strict=True):
        assert isinstance(mine, StaticReuseLayer)
        held = mine.length
        for one, plain in zip(mine.buffers, (theirs.keys, theirs.values), strict=True):
            shown = plain.shape[2]  # a window has let go of the others
            torch.testing.assert_close(one[:, :, held - shown : held], plain, atol=2e-4, rtol=2e-4)
            assert not one[:, :, held:].any()


@pytest.mark.daily
def test_borders_of_buckets(llama: PreTrainedModel, compiler: Compiler) -> None:
    """Two graphs serve all lengths, and a longer end runs eagerly; what is stored is what plain forwards compute."""
    cache, eager = begun(llama)
    runs = []
    for new in BORDERS:
        prompt = as_inputs(ending(new))
        before = compiler.runs
        assert same(first(llama, prompt, cache=cache, compile_config=compiler.config), first(llama, prompt))
        first(llama, prompt, cache=eager)
        assert cache.report.forwarded_tokens == eager.report.forwarded_tokens == new
        assert (cache.report.reused_tokens, cache.report.prompt_tokens) == (HELD, HELD + new)
        require_same_kv(cache, eager)
        runs.append(compiler.runs - before)
    assert runs == [1] * 9 + [0]
    assert compiler.graphs == 2
    assert not counters["graph_break"]
    assert CompileCosts.of(llama).suffix_failure is None
    cache.store_tails()
    reader = ChunkReuseCache(llama, cache.store, ReusePolicy(audit_rate=1.0))
    for new in BORDERS[3:]:
        first(llama, as_inputs(ending(new)), cache=reader)
        assert reader.report.reused_tokens >= (HELD + new - 1) // 32 * 32
        assert reader.report.audit_divergence < 1e-3
    assert cache.store.check_integrity().wrong == 0
    assert cache.store.stats()["divergences"] == 0


def test_what_is_computed(llama: PreTrainedModel, compiler: Compiler) -> None:
    """A graph computes its bucket, and no more: the checked runs the prompt's end once more, as it is."""
    cache, config = fixed(llama), compiler.config
    first(llama, as_inputs(BASE[:, :HELD]), cache=cache)
    computed = []
    for turn in range(5):
        with counted(llama) as work:
            first(llama, as_inputs(ending(20, turn)), cache=cache, compile_config=config)
        computed.append(work.tokens)
    assert computed[1:] == [64 + 20, 64 + 20, 64, 64]  # the first one is traced, too


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "attention"),
    [("gemma2", "eager"), ("mistral", "eager"), ("gemma2", "kvboost_fa2"), ("gpt2", "sdpa"), ("qwen2", "kvboost_fa2")],
)
def test_windows_and_attentions(name: str, attention: str, compiler: Compiler) -> None:
    model = _model(name, attention)
    cache, eager, size = fixed(model, size=256), growing(model), 256
    for at, new in enumerate((120, 5, 40, 16, 60, 1, 17)):
        prompt = as_inputs(ending(new) if at else BASE[:, :new])
        assert prompt["input_ids"].shape[1] + 64 < size
        assert same(first(model, prompt, cache=cache, compile_config=compiler.config), first(model, prompt))
        first(model, prompt, cache=eager)
        assert cache.report.forwarded_tokens <= eager.report.forwarded_tokens  # whose windows have let go of columns
        require_same_kv(cache, eager)
    assert compiler.graphs == 2
    assert compiler.runs == (0 if name == "gpt2" else 6)  # a graph without linear layers is not counted
    assert CompileCosts.of(model).suffix_failure is None


def test_several_rows(llama: PreTrainedModel, compiler: Compiler) -> None:
    """Rows of unequal lengths, padded on the left, whose ends have as many columns in all rows."""
    cache, eager = fixed(llama), growing(llama)
    for at, new in enumerate((0, 9, 30, 16, 70)):
        tail = ending(new)[:, HELD:] if new else BASE[:, :0]
        rows = (BASE[:, :HELD], BASE[:, 200 : 200 + HELD - 33])
        batch = left_pad(*(torch.cat([row, tail], dim=1) for row in rows))
        found = first(llama, batch, cache=cache, compile_config=compiler.config)
        assert same(found, first(llama, batch))
        first(llama, batch, cache=eager)
        assert cache.report.forwarded_tokens == eager.report.forwarded_tokens
        assert compiler.runs == at
    assert CompileCosts.of(llama).suffix_failure is None


@pytest.mark.slow
def test_beside_graphs_of_decoding(llama: PreTrainedModel, compiler: Compiler) -> None:
    """A chat on a GPU that a CPU is taken for: growing, shorter, and other prompts, with their answers decoded."""
    cache, eager = ChunkReuseCache(llama, ChunkStore(llama, chunk_size=32)), growing(llama)
    history, forwarded, how = BASE[:, :70], [], {"max_new_tokens": 12, "compile_config": compiler.config}
    with pretended_gpu(compiler):
        for turn in range(5):
            plain = llama.generate(**as_inputs(history), max_new_tokens=12)
            before = compiler.runs
            assert torch.equal(plain, llama.generate(**as_inputs(history), cache=cache, **how))
            llama.generate(**as_inputs(history), cache=eager, max_new_tokens=12)
            assert cache.report.forwarded_tokens == eager.report.forwarded_tokens
            forwarded.append(cache.report.forwarded_tokens)
            assert compiler.runs - before == 11 + (turn > 0)
            shorter = plain[:, :60] if turn == 2 else plain
            history = torch.cat([shorter, ending(1 + 9 * turn)[:, HELD:]], dim=1)
    assert forwarded == [70, 2, 11, 19, 29]
    assert CompileCosts.of(llama).failure is CompileCosts.of(llama).suffix_failure is None


def test_attached(compiler: Compiler) -> None:
    plain, model = _model("llama", layers=1), _model("llama", layers=1)
    attach(model, ChunkStore(model, chunk_size=32), max_cache_len=SIZE)
    for at, new in enumerate((0, 20, 60)):
        ids = ending(new) if new else BASE[:, :HELD]
        assert same(first(model, as_inputs(ids), compile_config=compiler.config), first(plain, as_inputs(ids)))
        report = last_cache(model).report
        assert report.reused_tokens >= (HELD // 32 * 32 if new else 0)  # its buffers are let go of with the call
        assert compiler.runs == at
    detach(model)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_backends(backend: str, llama: PreTrainedModel) -> None:
    cache, eager = begun(llama)
    config = CompileConfig(backend=backend, mode=None, fullgraph=True)
    config._compile_all_devices = True  # type: ignore[assignment]
    for new in (3, 20, 40, 10, 64):
        prompt = as_inputs(ending(new))
        assert same(first(llama, prompt, cache=cache, compile_config=config), first(llama, prompt))
        first(llama, prompt, cache=eager)
        require_same_kv(cache, eager)
    assert CompileCosts.of(llama).suffix_failure is None
    assert counters["stats"]["unique_graphs"] == 2


# What goes wrong


def _raising(error: BaseException) -> Callable[..., Any]:
    def run(graph: GraphModule, given: Any) -> Any:
        raise error

    return run


def _stopping(writes: int) -> Callable[..., Any]:
    return lambda graph, given: StopsAt(graph, writes).run(*given)


def _changed(graph: GraphModule, given: Any) -> Any:
    return tuple(each * 1.5 if each.is_floating_point() else each for each in graph.forward(*given))


def _with_other_kv(graph: GraphModule, given: Any) -> Any:
    """What it returns is as it should be."""
    found = graph.forward(*given)
    for each in given:
        if each.ndim == 4 and each.shape[2] == SIZE:
            each[:, :, HELD] += 1
    return found


@pytest.mark.parametrize("at", [1, 2, 4, 6])
@pytest.mark.parametrize("writes", [0, 1, 2])
def test_a_failure_ends_graphs_and_not_the_call(
    at: int, writes: int, llama: PreTrainedModel, compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    cache, eager = begun(llama)
    stop = _stopping(writes) if writes else _raising(RuntimeError("CUDA error: no replay"))
    compiler.change = lambda run: stop if run == at else None
    with caplog.at_level(logging.WARNING, "kvboost_hf"):
        for turn in range(8):
            prompt = as_inputs(ending(10, turn))
            assert same(first(llama, prompt, cache=cache, compile_config=compiler.config), first(llama, prompt))
            first(llama, prompt, cache=eager)
            assert cache.report.forwarded_tokens == 10
            require_same_kv(cache, eager)
    assert compiler.runs == at
    assert CompileCosts.of(llama).suffix_failure is not None
    assert CompileCosts.of(llama).failure is None  # decoding has graphs of its own
    assert sum("computes the ends of prompts without graphs" in record.message for record in caplog.records) == 1
    assert cache.store.check_integrity().wrong == 0


@pytest.mark.daily
@pytest.mark.parametrize("other", [_changed, _with_other_kv])
def test_a_graph_that_computes_something_else_is_found(
    llama: PreTrainedModel, compiler: Compiler, other: Callable[..., Any]
) -> None:
    cache = fixed(llama)
    compiler.change = lambda run: other if run == 2 else None
    first(llama, as_inputs(BASE[:, :HELD]), cache=cache)
    for turn in range(4):
        prompt = as_inputs(ending(10, turn))
        assert same(first(llama, prompt, cache=cache, compile_config=compiler.config), first(llama, prompt))
    assert compiler.runs == 2
    assert "differed from a plain one" in (CompileCosts.of(llama).suffix_failure or "")


def test_what_a_checked_graph_computes_is_what_counts(llama: PreTrainedModel, compiler: Compiler) -> None:
    """Negative control: if a graph goes wrong after its checks, these tests see it."""
    cache = fixed(llama)
    compiler.change = lambda run: _changed if run == 4 else None
    first(llama, as_inputs(BASE[:, :HELD]), cache=cache)
    found = []
    for turn in range(5):
        prompt = as_inputs(ending(10, turn))
        found.append(same(first(llama, prompt, cache=cache, compile_config=compiler.config), first(llama, prompt)))
    assert found == [True, True, True, False, True]


@pytest.mark.parametrize("at", [1, 3, 5])
@pytest.mark.parametrize("writes", [0, 1])
def test_interrupts(at: int, writes: int, llama: PreTrainedModel, compiler: Compiler) -> None:
    cache, eager = begun(llama)

    def stop(graph: GraphModule, given: Any) -> Any:
        try:
            StopsAt(graph, writes or 9).run(*given)
        except RuntimeError:
            pass
        raise KeyboardInterrupt

    compiler.change = lambda run: stop if run == at else None
    interrupted = 0
    for turn in range(6):
        prompt = as_inputs(ending(20, turn))
        try:
            first(llama, prompt, cache=cache, compile_config=compiler.config)
        except KeyboardInterrupt:
            interrupted += 1
            prompt = as_inputs(ending(7, turn))  # a shorter one follows
        assert same(first(llama, prompt, cache=cache, compile_config=compiler.config), first(llama, prompt))
        first(llama, prompt, cache=eager)
        assert cache.report.forwarded_tokens in (1, 7)  # it is held by now; of the shorter one, the base is
        require_same_kv(cache, eager)
    assert interrupted == 1
    assert CompileCosts.of(llama).suffix_failure is None
    assert cache.store.check_integrity().wrong == 0


def test_hooks_between_calls(llama: PreTrainedModel, compiler: Compiler) -> None:
    """Hooks of others see what they would see, and nothing is padded for them."""
    cache, seen = fixed(llama), []
    first(llama, as_inputs(BASE[:, :HELD]), cache=cache)
    layer, base = llama.model.layers[0], llama.model
    for turn, module in enumerate((None, layer, None, base, None, llama.lm_head, None)):
        handle = module.register_forward_hook(lambda *given: seen.append(given[-1])) if module is not None else None
        prompt = as_inputs(ending(10, turn))
        before = compiler.runs
        assert same(first(llama, prompt, cache=cache, compile_config=compiler.config), first(llama, prompt))
        assert compiler.runs - before == (handle is None)
        if handle is not None:
            handle.remove()
    assert len(seen) == 6  # three with the cache, three without
    assert not counters["graph_break"]


def test_damaged_chunks(llama: PreTrainedModel, compiler: Compiler) -> None:
    """An audit finds them behind a graph, too, and puts right what is handed out, held and stored."""
    store = ChunkStore(llama, chunk_size=32)
    first(llama, as_inputs(BASE[:, :HELD]), cache=fixed(llama, store))
    corrupt(store, 64)
    cache, prompt = fixed(llama, store, policy=ReusePolicy(audit_rate=1.0)), as_inputs(ending(10, held=96))
    assert same(first(llama, prompt, cache=cache, compile_config=compiler.config), first(llama, prompt))
    assert compiler.runs == 1
    assert store.stats()["divergences"] == 1
    eager = growing(llama)
    first(llama, prompt, cache=eager)
    require_same_kv(cache, eager)


def test_two_threads(llama: PreTrainedModel, compiler: Compiler) -> None:
    """One cache in each, and plain calls in a third: no thread computes the end of another's prompt."""
    caches = [fixed(llama) for _ in range(2)]
    for cache in caches:
        first(llama, as_inputs(BASE[:, :HELD]), cache=cache)
    for new in (10, 20):  # compiled here
        first(llama, as_inputs(ending(new)), cache=caches[0], compile_config=compiler.config)
    expected = {turn: first(llama, as_inputs(ending(20, turn))) for turn in range(12)}
    found: list[bool] = []

    def run(cache: ChunkReuseCache | None) -> None:
        how = {} if cache is None else {"cache": cache, "compile_config": compiler.config}
        for turn in range(12):
            found.append(same(first(llama, as_inputs(ending(20, turn)), **how), expected[turn]))

    threads = [threading.Thread(target=run, args=(cache,)) for cache in (*caches, None)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 36
    assert CompileCosts.of(llama).suffix_failure is None


# Who runs eagerly


def test_nothing_changes_without_a_compile_config(llama: PreTrainedModel) -> None:
    cache = fixed(llama)
    for new in (0, 10, 20):
        first(llama, as_inputs(ending(new) if new else BASE[:, :HELD]), cache=cache)
    assert "_compiled_call_impl" not in llama.model.__dict__


def test_few_prompts_do_not_wait(llama: PreTrainedModel, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "PROMPTS_PER_GRAPH", 3)
    cache, runs = fixed(llama), []
    first(llama, as_inputs(BASE[:, :HELD]), cache=cache)
    for turn in range(6):
        first(llama, as_inputs(ending(10, turn)), cache=cache, compile_config=compiler.config)
        first(llama, as_inputs(ending(100, turn)), cache=cache)  # not asked: it does not count
        runs.append(compiler.runs)
    assert runs == [0, 0, 0, 1, 2, 3]


@pytest.mark.slow
def test_no_room_for_padding(llama: PreTrainedModel, compiler: Compiler) -> None:
    """The last bucket that fits, to the column; behind it a prompt runs eagerly."""
    cache, eager = begun(llama, size=HELD + 64)
    for new, runs in ((40, 1), (64, 2), (3, 3)):
        prompt = as_inputs(ending(new))
        assert same(first(llama, prompt, cache=cache, compile_config=compiler.config), first(llama, prompt))
        assert compiler.runs == runs
    for held, new, runs in ((HELD, 60, 4), (HELD + 49, 5, 4), (HELD + 48, 6, 5)):
        if held > HELD:
            first(llama, as_inputs(ending(60)), cache=cache)
        ids = torch.cat([ending(60)[:, :held], random_ids(new, seed=held)], dim=1)
        ids[:, held] = (ending(60)[:, held] + 1) % 150 + 2 if held > HELD else ids[:, held]
        found = first(llama, as_inputs(ids), cache=cache, compile_config=compiler.config)
        assert same(found, first(llama, as_inputs(ids)))
        first(llama, as_inputs(ids), cache=eager)
        require_same_kv(cache, eager)
        assert compiler.runs == runs


def test_reasons(llama: PreTrainedModel, compiler: Compiler) -> None:
    cache = fixed(llama)
    prompt = as_inputs(BASE[:, :HELD])
    first(llama, prompt, cache=cache)
    live, ids = cache.parts.live, BASE[:, :10]
    positions = torch.arange(HELD, HELD + 10)[None]
    given = {"input_ids": ids, "position_ids": positions, "attention_mask": None, "cache": cache, "use_cache": True}
    config = copy.deepcopy(llama.generation_config)
    config.compile_config = compiler.config

    def reason(how: Any = config, **changed: Any) -> str | None:
        with torch.no_grad():
            return reason_for_eager_suffix(llama, live, {**given, **changed}, how)

    assert reason() is None
    assert reason(how=None) == "no `compile_config` was passed to generate()"
    disabled = copy.deepcopy(config)
    disabled.disable_compile = True
    assert reason(how=disabled) == "`disable_compile` was passed to generate()"
    elsewhere = copy.deepcopy(config)
    elsewhere.compile_config = CompileConfig()
    assert reason(how=elsewhere) == "the model is not on a GPU"
    assert reason(input_ids=None) == "it has no `input_ids`"
    assert reason(input_ids=BASE[:, :257]) == "more than 256 tokens are new"
    assert live.static is not None
    columns = live.static.max_cache_len
    for room, said in ((16, None), (15, "the cache has no room for 16 more tokens")):
        live.static.max_cache_len = HELD + room
        assert reason() == said
    live.static.max_cache_len = columns
    assert reason(position_ids=None) == "`position_ids` are not one for each of the `input_ids`"
    assert reason(position_ids=positions[None].expand(3, -1, -1)) == reason(position_ids=None)
    assert reason(attention_mask=torch.ones(1, 1, 10, 110)) == "the attention mask is not 2-D"
    for name in ("output_attentions", "output_hidden_states", "labels", "token_type_ids"):
        asked: dict[str, Any] = {name: True}
        assert reason(**asked) == "it has other arguments than those of a plain prompt"
    llama.config.output_hidden_states = True
    assert reason() == "it returns something of each token besides logits"
    llama.config.output_hidden_states = False
    llama.train()
    assert reason() == "the model is in training mode, or under autocast"
    llama.eval()
    llama.model._compiled_call_impl = lambda *args, **kwargs: None
    assert reason() == "the model below its head was replaced or compiled by somebody else"
    llama.model._compiled_call_impl = None
    with torch.enable_grad():
        assert reason_for_eager_suffix(llama, live, given, config) == "gradients are enabled"
    live.stateful = True
    assert reason() == "states would sum up the padding"
    live.stateful = False
    cache.reset()
    assert reason() == "nothing is reused"
    live = growing(llama).parts.live
    assert reason() == "the cache's layers grow"


def test_copies_of_a_model(llama: PreTrainedModel, compiler: Compiler) -> None:
    """A copy calls itself, and not the model that it is a copy of."""
    cache = fixed(llama)
    for turn in range(2):
        first(llama, as_inputs(ending(10, turn)), cache=cache, compile_config=compiler.config)
    assert isinstance(llama.model.__dict__["_compiled_call_impl"], BaseCall)
    twin = copy.deepcopy(llama)
    assert twin.model.__dict__.get("_compiled_call_impl") is None
    assert same(first(twin, as_inputs(BASE)), first(llama, as_inputs(BASE)))
