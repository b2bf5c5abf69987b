"""Decoding in graphs where nobody has named a size: on a GPU, which a CPU is taken for here."""

import gc
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.fx import GraphModule
from transformers import PreTrainedModel

from kvboost_hf import (
    ChunkReuseCache,
    ChunkStore,
    InterruptedForwardError,
    KVQuantConfig,
    ReusePolicy,
    TreeDecoding,
    attach,
    check_model_compatibility,
    detach,
    last_cache,
)
from tests.conftest import as_inputs, left_pad, make_model, random_ids
from tests.graphs import Compiler, StopsAt, pretended_gpu
from tests.internals.cache import (
    COMPILED_CALL,
    NOT_ON_GPU,
    TOKENS_PER_GRAPH,
    CompileCosts,
    Graph,
    StaticReuseLayer,
    columns_for,
    decoding_form,
    reason_of_model,
)
from tests.internals.compat import bytes_per_token

BASE, OTHER = random_ids(300, seed=1), random_ids(300, seed=2)


@pytest.fixture(autouse=True)
def _no_graphs_of_other_tests() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def compiler() -> Compiler:
    return Compiler()


@pytest.fixture
def llama() -> PreTrainedModel:
    """With one layer: tracing takes seconds for each."""
    return _with_one_layer(make_model("llama"))


def _with_one_layer(model: PreTrainedModel) -> PreTrainedModel:
    del model.model.layers[1]
    model.config.num_hidden_layers = 1
    check_model_compatibility(model)
    return model


def generate(model: PreTrainedModel, inputs: dict[str, torch.Tensor], **kwargs: Any) -> torch.Tensor:
    torch.manual_seed(5)
    return model.generate(**inputs, **{"max_new_tokens": 30, **kwargs})


def columns_of(cache: ChunkReuseCache) -> int | None:
    """Columns of the buffers, if they are of a fixed size."""
    layer = cache.layers[0]
    return layer.max_cache_len if isinstance(layer, StaticReuseLayer) else None


@pytest.mark.slow
def test_a_chat_that_grows(llama: PreTrainedModel, compiler: Compiler) -> None:
    """Eager until enough tokens were decoded; then few graphs, and no token is computed again as buffers grow."""
    growing = ChunkReuseCache(llama, ChunkStore(llama, chunk_size=32), max_cache_len=None)
    cache = ChunkReuseCache(llama, ChunkStore(llama, chunk_size=32))
    history, graphs, eager, columns = BASE[:, :20], [], [], []
    with pretended_gpu(compiler, tokens_per_graph=40):
        for turn in range(8):
            plain = generate(llama, as_inputs(history))
            assert torch.equal(plain, generate(llama, as_inputs(history), cache=growing))
            before = compiler.runs
            assert torch.equal(plain, generate(llama, as_inputs(history), cache=cache))
            assert cache.report.forwarded_tokens == growing.report.forwarded_tokens == (20 if turn == 0 else 8)
            assert (cache.report.eager_reason is None) == (turn > 0)
            graphs.append(compiler.graphs)
            eager.append(plain.shape[1] - history.shape[1] - 1 - compiler.runs + before)
            columns.append(columns_of(cache))
            history = torch.cat([plain, OTHER[:, 7 * turn : 7 * turn + 7]], dim=1)
    assert columns == [None, 128, 128, 256, 256, 256, 512, 512]
    assert graphs == [0, 2, 2, 4, 4, 4, 4, 4]  # the model, and what notes its tokens; the second one takes any size
    assert eager == [29] + [0] * 7  # steps without a graph
    assert growing.report.eager_reason == "`max_cache_len` is None"


def test_a_cache_for_each_call(llama: PreTrainedModel, compiler: Compiler) -> None:
    """A graph serves all caches, and what it has decoded is in the store when the call returns."""
    store = ChunkStore(llama, chunk_size=32)
    history = BASE[:, :20]
    with pretended_gpu(compiler):
        for turn in range(3):
            plain = generate(llama, as_inputs(history), max_new_tokens=40)
            cache = ChunkReuseCache(llama, store)
            just_enough = (64 << turn) * bytes_per_token(llama)
            with mock.patch.object(decoding_form, "_most_bytes", return_value=just_enough):
                assert torch.equal(plain, generate(llama, as_inputs(history), cache=cache, max_new_tokens=40))
            gc.collect()  # compilers may leave frames of the call in cycles
            complete = (history.shape[1] - 7) // 32 * 32 if turn else 0  # its tail is stored by nobody
            assert cache.report.reused_tokens >= complete
            assert columns_of(cache) == 64 << turn
            history = torch.cat([plain, OTHER[:, :7]], dim=1)
    assert compiler.graphs == 4


@pytest.mark.parametrize(("name", "attention"), [("mistral", "sdpa"), ("gemma2", "kvboost_fa2"), ("qwen2", "eager")])
def test_windows_and_batches(name: str, attention: str, compiler: Compiler) -> None:
    model = make_model(name)
    model.set_attn_implementation(attention)
    check_model_compatibility(model)
    store = ChunkStore(model, chunk_size=32)
    cache, growing = ChunkReuseCache(model, store), ChunkReuseCache(model, ChunkStore(model, chunk_size=32))
    batches = [
        left_pad(BASE[:, :150], OTHER[:, :70]),
        left_pad(BASE[:, :180], OTHER[:, :90]),
        left_pad(OTHER[:, :90], BASE[:, :240]),
    ]
    generate(model, batches[0], cache=cache, max_new_tokens=8)  # eager: layers with a window let go of columns
    graphs = []
    for batch in batches:
        plain = generate(model, batch, max_new_tokens=12)
        generate(model, batch, cache=growing, max_new_tokens=12)
        with pretended_gpu(compiler):
            assert torch.equal(plain, generate(model, batch, cache=cache, max_new_tokens=12))
        assert cache.report.eager_reason is None
        assert cache.report.forwarded_tokens <= growing.report.forwarded_tokens
        graphs.append(compiler.graphs)
    assert graphs == [2, 2, 2]  # 256 columns for all
    single = as_inputs(BASE[:, :120])
    plain = generate(model, single)
    assert torch.equal(plain, generate(model, single, cache=cache))  # grows again, and holds what was computed
    assert columns_of(cache) is None
    assert cache.report.reused_tokens >= 96


def test_attached(llama: PreTrainedModel, compiler: Compiler) -> None:
    plain = _with_one_layer(make_model("llama"))
    attach(llama, ChunkStore(llama, chunk_size=32))
    with pretended_gpu(compiler, tokens_per_graph=40):
        reasons = []
        for ids, reused in ((BASE[:, :90], 0), (BASE[:, :77], 64), (BASE[:, :90], 76), (OTHER[:, :50], 0)):
            expected = generate(plain, as_inputs(ids))
            assert torch.equal(generate(llama, as_inputs(ids)), expected)
            report = last_cache(llama).report
            assert (report.bypass_reason, report.reused_tokens >= reused) == (None, True)
            reasons.append(report.eager_reason)
        assert reasons == [f"compiling is worth it after {missing} more tokens" for missing in (40, 11)] + [None, None]
        assert compiler.graphs == 2
        for mode in ({"num_beams": 2}, {"prompt_lookup_num_tokens": 3}, {"use_cache": False}, {"max_new_tokens": 4}):
            assert torch.equal(
                generate(llama, as_inputs(BASE[:, :60]), **mode), generate(plain, as_inputs(BASE[:, :60]), **mode)
            )
        attach(llama, max_cache_len=None)
        generate(llama, as_inputs(BASE[:, :60]))
        assert last_cache(llama).report.eager_reason == "`max_cache_len` is None"
    detach(llama)
    assert compiler.graphs == 2


def test_nothing_changes_on_a_cpu(llama: PreTrainedModel) -> None:
    cache = ChunkReuseCache(llama, ChunkStore(llama, chunk_size=32))
    for _ in range(TOKENS_PER_GRAPH):
        CompileCosts.of(llama).tokens += 1
    for ids in (BASE[:, :60], BASE[:, :90]):
        plain = generate(llama, as_inputs(ids), max_new_tokens=100)
        with mock.patch.object(torch, "compile", side_effect=AssertionError("compiled")):
            assert torch.equal(plain, generate(llama, as_inputs(ids), cache=cache, max_new_tokens=100))
        assert cache.report.eager_reason == NOT_ON_GPU
        assert not cache.is_compileable
        assert columns_of(cache) is None
    assert COMPILED_CALL not in llama.__dict__


# What fails, and the runs of the model's graph after it

Failure = Callable[[Compiler], None]


def _raise(text: str) -> None:
    raise RuntimeError(text)


def _while_compiling(compiler: Compiler) -> None:
    compiler.change = lambda run: None if run else _raise("no C compiler")


def _at_run(number: int) -> Failure:
    def change(compiler: Compiler) -> None:
        compiler.change = lambda run: _raise("capture failed") if run == number else None

    return change


def _within_run(number: int, writes: int) -> Failure:
    """Raises when some of the layers, or all of them, have got K/V of a step."""

    def change(compiler: Compiler) -> None:
        def stop(graph: GraphModule, given: Any) -> Any:
            return StopsAt(graph, writes).run(*given)

        compiler.change = lambda run: stop if run == number else None

    return change


def _wrong_logits(compiler: Compiler) -> None:
    def change(graph: GraphModule, given: Any) -> Any:
        return tuple(each + 1 if each.shape[-1] == 200 else each for each in graph.forward(*given))

    compiler.change = lambda run: change if run == 3 else None


def _wrong_kv(compiler: Compiler) -> None:
    def change(graph: GraphModule, given: Any) -> Any:
        found = graph.forward(*given)
        for each in given:
            if each.ndim == 4 and each.shape[2] == 128:
                each.mul_(torch.where(torch.arange(128)[:, None] < 71, 1, 2))
        return found

    compiler.change = lambda run: change if run == 2 else None


FAILURES: dict[str, tuple[Failure, int]] = {
    "compiling": (_while_compiling, 0),
    "first run": (_at_run(1), 1),
    "recording": (_at_run(2), 2),
    "first replay": (_at_run(3), 3),
    "in the middle": (_at_run(20), 20),
    "first run, one layer written": (_within_run(1, 2), 1),
    "in the middle, one layer written": (_within_run(20, 3), 20),
    "in the middle, all layers written": (_within_run(20, 4), 20),
    "wrong logits": (_wrong_logits, 3),
    "wrong keys and values": (_wrong_kv, 2),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_ends_graphs_and_not_the_call(
    failure: str, compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model("llama")
    check_model_compatibility(model)
    store = ChunkStore(model, chunk_size=32)
    cache = ChunkReuseCache(model, store)
    change, runs = FAILURES[failure]
    change(compiler)
    history = BASE[:, :70]
    with pretended_gpu(compiler), caplog.at_level(logging.WARNING, "kvboost_hf"):
        for turn in range(3):
            prompt, plain = history, generate(model, as_inputs(history), max_new_tokens=40)
            found = generate(
                model,
                as_inputs(history),
                cache=cache,
                max_new_tokens=40,
                return_dict_in_generate=True,
                output_logits=True,
            )
            assert torch.equal(plain, found.sequences)  # type: ignore[attr-defined]
            assert cache.report.forwarded_tokens == (70 if turn == 0 else 8)  # the answer is held
            assert cache.report.eager_reason == CompileCosts.of(model).failure
            history = torch.cat([plain, OTHER[:, 7 * turn : 7 * turn + 7]], dim=1)
    how = {"return_dict_in_generate": True, "output_logits": True}
    expected = generate(model, as_inputs(prompt), max_new_tokens=40, **how)
    for mine, theirs in zip(found.logits, expected.logits, strict=True):  # type: ignore[attr-defined]
        torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=2e-4)
    assert compiler.runs == runs
    told = [record.message for record in caplog.records if "decodes without graphs" in record.message]
    assert len(told) == 1
    assert columns_of(cache) is None  # later calls do not even try
    # What was stored is what a plain forward computes.
    cache.store_tails()
    reader = ChunkReuseCache(model, store, ReusePolicy(audit_rate=1.0))
    generate(model, as_inputs(history), cache=reader)
    assert reader.report.reused_tokens >= 128
    assert reader.report.audit_divergence < 1e-3
    assert store.stats()["divergences"] == 0


@pytest.mark.parametrize("failure", ["first run", "first replay", "first run, one layer written", "wrong logits"])
def test_states_are_put_back_where_a_first_step_fails(failure: str, compiler: Compiler) -> None:
    model = make_model("qwen3_next")
    check_model_compatibility(model)
    cache, history = ChunkReuseCache(model, ChunkStore(model, chunk_size=32)), BASE[:, :70]
    change, runs = FAILURES[failure]
    change(compiler)
    with pretended_gpu(compiler):
        for turn in range(2):
            plain = generate(model, as_inputs(history), max_new_tokens=40)
            assert torch.equal(plain, generate(model, as_inputs(history), cache=cache, max_new_tokens=40))
            assert cache.report.forwarded_tokens == (70 if turn == 0 else 8)  # the answer is held
            history = torch.cat([plain, OTHER[:, 7 * turn : 7 * turn + 7]], dim=1)
    assert compiler.runs == runs
    assert CompileCosts.of(model).failure is not None


@pytest.mark.parametrize("writes", [1, 2])
def test_states_are_dropped_where_a_later_step_fails(writes: int, compiler: Compiler) -> None:
    """No copy of them is made for each token: the call fails, and nothing that may be wrong is gone on with."""
    model = make_model("qwen3_next")
    check_model_compatibility(model)
    cache, history = ChunkReuseCache(model, ChunkStore(model, chunk_size=32)), BASE[:, :70]
    _within_run(20, writes)(compiler)
    plain = generate(model, as_inputs(history), max_new_tokens=40)
    with pretended_gpu(compiler):
        with pytest.raises(RuntimeError, match="the graph stopped"):
            generate(model, as_inputs(history), cache=cache, max_new_tokens=40)
        with pytest.raises(InterruptedForwardError), torch.no_grad():
            model(plain[:, -1:], cache=cache)
        for _ in range(2):
            assert torch.equal(plain, generate(model, as_inputs(history), cache=cache, max_new_tokens=40))
    cache.store_tails()
    assert cache.store.check_integrity().wrong == 0
    assert cache.report.forwarded_tokens < 70


def test_the_first_steps_are_checked(llama: PreTrainedModel, compiler: Compiler) -> None:
    """Those of each graph run without it, too: as often as it takes to run, to record and to replay it."""
    cache = ChunkReuseCache(llama, ChunkStore(llama, chunk_size=32))
    passed = mock.patch.object(CompileCosts, "passed", autospec=True, side_effect=CompileCosts.passed)
    with pretended_gpu(compiler), passed as checks:
        for length, checked in ((50, 3), (50, 3), (120, 6), (120, 6)):
            generate(llama, as_inputs(BASE[:, :length]), cache=cache)
            assert checks.call_count == checked
    assert compiler.runs == 4 * 29
    assert CompileCosts.of(llama).failure is None


def test_it_says_so(llama: PreTrainedModel, compiler: Compiler, caplog: pytest.LogCaptureFixture) -> None:
    cache = ChunkReuseCache(llama, ChunkStore(llama, chunk_size=32))
    with pretended_gpu(compiler), caplog.at_level(logging.INFO, "kvboost_hf"):
        for _ in range(2):
            generate(llama, as_inputs(BASE[:, :50]), cache=cache)
    begun, took = (record for record in caplog.records if "ompil" in record.message)
    assert begun.levelno == logging.WARNING
    assert "1 rows and 128 tokens" in begun.message
    assert took.message.startswith("Compiling took ")


# Who decodes eagerly


def test_how_sums_are_rounded_is_no_autocast(llama: PreTrainedModel, compiler: Compiler) -> None:
    settings, inputs = torch.backends.cuda.matmul, as_inputs(BASE[:, :60])
    plain, cache = generate(llama, inputs), ChunkReuseCache(llama, ChunkStore(llama, chunk_size=32))
    settings.allow_fp16_accumulation = True
    try:
        with pretended_gpu(compiler):
            assert torch.equal(generate(llama, inputs, cache=cache), plain)
    finally:
        settings.allow_fp16_accumulation = False
    assert cache.report.eager_reason is None
    assert columns_of(cache) is not None


def test_who_decodes_eagerly(llama: PreTrainedModel, compiler: Compiler) -> None:
    store = ChunkStore(llama, chunk_size=32)
    inputs = as_inputs(BASE[:, :60])
    plain = generate(llama, inputs)

    def reason(cache: ChunkReuseCache | None = None, **kwargs: Any) -> str:
        cache = ChunkReuseCache(llama, store) if cache is None else cache
        expected = generate(llama, inputs, **kwargs)
        assert torch.equal(generate(llama, inputs, cache=cache, **kwargs), expected)
        assert columns_of(cache) is None
        assert cache.report.eager_reason is not None
        return cache.report.eager_reason

    loop = "it is no plain greedy search or sampling that returns tokens alone"
    with pretended_gpu(compiler):
        for mode in ({"num_beams": 2}, {"prompt_lookup_num_tokens": 3}, {"assistant_model": make_model("llama")}):
            assert reason(**mode) == loop
        assert reason(use_cache=False) == loop
        assert reason(disable_compile=True) == "`disable_compile` was passed to generate()"
        assert reason(max_new_tokens=4) == "it may decode fewer than 8 tokens"
        assert reason(ChunkReuseCache(llama, store, max_cache_len=None)) == "`max_cache_len` is None"
        grows = "`live_quant`, mode 'blend' and `reproducible` need buffers that grow"
        for policy in (ReusePolicy(mode="blend"), ReusePolicy(reproducible=True)):
            assert reason(ChunkReuseCache(llama, store, policy)) == grows
        quantized = ChunkReuseCache(llama, store, live_quant=KVQuantConfig())
        generate(llama, inputs, cache=quantized)
        assert quantized.report.eager_reason == grows
        with mock.patch.object(decoding_form, "has_triton", return_value=False):
            assert reason().startswith("Triton")
        with mock.patch.object(decoding_form, "_most_bytes", return_value=128 * bytes_per_token(llama) - 1):
            assert "would take more than half of the free memory" in reason()
        with mock.patch.object(decoding_form, "weights_come_and_go", return_value=True):
            assert reason().startswith("hooks of accelerate")
        handle = llama.model.layers[0].mlp.register_forward_hook(lambda module, args, output: None)
        assert reason() == "its modules have hooks, at which a graph would break"
        handle.remove()
        llama.hf_quantizer = mock.Mock(is_compileable=True)
        assert reason() == "its weights are quantized"
        del llama.hf_quantizer
        with torch.autocast("cpu", torch.bfloat16):
            assert reason() == "the model is in training mode, or under autocast"
        told = torch.OutOfMemoryError("out of memory")
        with mock.patch.object(StaticReuseLayer, "fill", side_effect=told):
            cache = ChunkReuseCache(llama, store)
            generate(llama, inputs, cache=cache, max_new_tokens=4)
            assert reason(cache) == "there was no memory for buffers of 128 tokens (out of memory)"
            assert cache.report.forwarded_tokens == 1  # it has kept what it held
        for policy in (ReusePolicy(keep_logprobs=True), ReusePolicy(keep_hidden_states=-1)):
            assert reason(ChunkReuseCache(llama, store, policy)) == "hidden states are kept, in buffers that grow"
    for name in ("falcon_h1", "bloom"):
        model = make_model(name)
        cache = ChunkReuseCache(model)
        with pretended_gpu(compiler):
            generate(model, inputs, cache=cache)
        assert cache.report.eager_reason is not None
    assert compiler.graphs == 0
    assert torch.equal(plain, generate(llama, inputs))


def test_calls_of_other_threads_are_eager(llama: PreTrainedModel, compiler: Compiler) -> None:
    import threading

    cache, plain, found = ChunkReuseCache(llama), generate(llama, as_inputs(BASE[:, :60])), []
    with pretended_gpu(compiler):
        thread = threading.Thread(target=lambda: found.append(generate(llama, as_inputs(BASE[:, :60]), cache=cache)))
        thread.start()
        thread.join()
    assert torch.equal(plain, found[0])
    assert cache.report.eager_reason == "CUDA graphs are replayed in the main thread only"


@pytest.mark.slow
def test_other_uses_of_a_cache_whose_buffers_are_fixed(llama: PreTrainedModel, compiler: Compiler) -> None:
    """Whatever growing buffers can do goes on to work after a call in a graph, and nothing is computed again."""
    store = ChunkStore(llama, chunk_size=32)
    inputs = as_inputs(BASE[:, :60])

    def decoded() -> tuple[ChunkReuseCache, torch.Tensor]:
        cache = ChunkReuseCache(llama, store)
        with pretended_gpu(compiler):
            answer = generate(llama, inputs, cache=cache)
        assert columns_of(cache) == 128
        return cache, answer

    modes = ({"num_beams": 3}, {"prompt_lookup_num_tokens": 4}, {"custom_generate": TreeDecoding(make_model("llama"))})
    for mode in modes:
        cache, answer = decoded()
        plain = generate(llama, as_inputs(answer), **({} if "custom_generate" in mode else mode))
        assert torch.equal(plain, generate(llama, as_inputs(answer), cache=cache, **mode))
        assert columns_of(cache) is None
        assert cache.report.reused_tokens >= 89
    cache, answer = decoded()
    with torch.no_grad():  # more than the buffers have room for
        found = llama(input_ids=BASE[:, :200], cache=cache, logits_to_keep=1).logits
        expected = llama(input_ids=torch.cat([answer[:, :-1], BASE[:, :200]], dim=1), logits_to_keep=1).logits
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
    cache, answer = decoded()
    update = cache.update
    cache.update = lambda *args, **kwargs: update(*args, **kwargs)
    plain = generate(llama, as_inputs(BASE[:, :200]))
    for _ in range(2):
        assert torch.equal(plain, generate(llama, as_inputs(BASE[:, :200]), cache=cache))
    assert cache.report.bypass_reason == "`update` of this ChunkReuseCache was replaced"
    del cache.update
    assert torch.equal(plain, generate(llama, as_inputs(BASE[:, :200]), cache=cache))
    assert cache.report.bypass_reason is None
    cache, answer = decoded()
    twin = cache.fork()
    for each in (twin, cache):
        assert torch.equal(generate(llama, as_inputs(answer)), generate(llama, as_inputs(answer), cache=each))
        assert each.report.tier_tokens["live"] == 89
    cache, answer = decoded()
    more = torch.cat([answer, OTHER[:, :100]], dim=1)  # only what follows, with a mask over everything: larger buffers
    given = {"input_ids": more[:, 89:], "attention_mask": torch.ones_like(more)}
    plain = generate(llama, as_inputs(more))
    with pretended_gpu(compiler):
        assert torch.equal(plain[:, 89:], generate(llama, given, cache=cache))
    assert columns_of(cache) == 256
    cache.crop(-20)
    assert cache.get_seq_length() == plain.shape[1] - 1 - 20
    cache.reset()
    assert torch.equal(plain, generate(llama, as_inputs(more), cache=cache))


def test_a_forward_by_hand_grows_what_a_graph_has_left(llama: PreTrainedModel, compiler: Compiler) -> None:
    """A text may be longer than the buffers that were made for the call."""
    cache = ChunkReuseCache(llama, ChunkStore(llama, chunk_size=32))
    with pretended_gpu(compiler):
        answer = generate(llama, as_inputs(BASE[:, :60]), cache=cache)
    assert columns_of(cache) == 128
    with torch.no_grad():
        found = llama(input_ids=BASE[:, :200], cache=cache, logits_to_keep=1).logits
        expected = llama(input_ids=torch.cat([answer[:, :-1], BASE[:, :200]], dim=1), logits_to_keep=1).logits
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
    assert columns_of(cache) is None


def test_who_asks_is_not_made_to_wait(llama: PreTrainedModel, compiler: Compiler) -> None:
    """A `compile_config` compiles at the first call, wherever it says so, with a cache of which no size was named."""
    cache = ChunkReuseCache(llama, ChunkStore(llama, chunk_size=32))
    plain = generate(llama, as_inputs(BASE[:, :60]))
    assert torch.equal(plain, generate(llama, as_inputs(BASE[:, :60]), cache=cache, compile_config=compiler.config))
    assert (compiler.graphs, compiler.runs) == (2, 29)
    assert columns_of(cache) == 1024


# Pure decisions


def test_which_models_are_better_not_compiled(llama: PreTrainedModel) -> None:
    devices = [torch.zeros(1), torch.zeros(1, device="meta")]
    for change, reason in (
        (mock.patch.object(decoding_form, "ranks_of", return_value=object()), "several ranks compute it"),
        (mock.patch.object(llama, "parameters", return_value=devices), "it is on several devices"),
        (mock.patch.object(llama, "forward", llama.forward), decoding_form.REPLACED),
        (mock.patch.object(llama, "_compiled_call_impl", object()), decoding_form.REPLACED),
        (mock.patch.object(decoding_form, "holder_of_cache", return_value="somebody has it"), "somebody has it"),
    ):
        with change:
            assert str(reason_of_model(llama)).startswith(reason)
    assert reason_of_model(llama) is None


def test_whoever_has_compiled_a_model_is_told_so(llama: PreTrainedModel) -> None:
    """Unless the call was decoded in a graph all the same."""
    form = ChunkReuseCache(llama).parts.form
    cases = ("slow", True, decoding_form.REPLACED), ("slow", False, "slow"), (None, True, None)
    for form.reason, is_compiled, told in cases:
        with mock.patch.object(decoding_form, "is_compiled", return_value=is_compiled):
            assert form.reason_told == told


def test_sizes() -> None:
    found = {columns_for(tokens) for tokens in range(1, 40_000)}
    assert sorted(found) == [1024, 2048, 4096, 8192, 16384, 24576, 32768, 40960]
    assert all(tokens <= columns_for(tokens) for tokens in range(1, 40_000, 7))
    assert [columns_for(tokens) for tokens in (1024, 1025, 8192, 8193)] == [1024, 2048, 8192, 16384]


def test_the_smallest_buffers_that_fit_are_taken() -> None:
    costs = CompileCosts()
    for columns in (2048, 8192):
        costs.made(Graph(columns, 1, False), 1.0)

    def chosen(tokens: int, there: int | None = None) -> int:
        live: Any = SimpleNamespace(static=there and SimpleNamespace(max_cache_len=there), held=0)
        call: Any = SimpleNamespace(max_length=tokens + 1, rows=1, mask=None, follows=lambda held: False)
        return decoding_form._graph(costs, live, call).columns

    assert [chosen(tokens) for tokens in (1, 1500, 2048, 2049, 8192, 8193)] == [2048, 2048, 2048, 8192, 8192, 16384]
    assert [chosen(3000, there) for there in (2048, 4096, 16384)] == [8192, 4096, 8192]
    assert [chosen(20_000, there) for there in (4 * 24_576, 4 * 24_576 + 1)] == [4 * 24_576, 24_576]


def test_what_graphs_cost() -> None:
    """Whoever decodes little does not wait, and compilations take no longer than the tokens before have saved."""
    costs = CompileCosts()
    graph, wider, widest, rows = (
        Graph(1024, 1, False),
        Graph(2048, 1, False),
        Graph(4096, 1, False),
        Graph(1024, 2, False),
    )
    assert costs.reason_against(graph) == "compiling is worth it after 4096 more tokens"
    for _ in range(4096):
        costs.tokens += 1
    assert costs.reason_against(graph) is None
    costs.made(graph, 45.0)
    assert costs.reason_against(graph) is None
    assert costs.reason_against(wider) == "compiling is worth it after 4096 more tokens"
    for _ in range(4096):
        costs.tokens += 1
    assert costs.reason_against(wider) is None
    costs.made(wider, 90.0)  # twice as long, and so the next one costs twice as many tokens
    assert costs.reason_against(widest) is None  # of the second size, PyTorch has made a graph for all
    assert costs.reason_against(rows) == "compiling is worth it after 8181 more tokens"
    costs.made(widest, 0.2)
    assert costs.reason_against(rows) == "compiling is worth it after 8181 more tokens"
    for others in range(3, 7):
        costs.made(Graph(1024, others, False), 45.0)
    assert costs.reason_against(rows) == "6 graphs were compiled already, for other sizes"
    assert costs.reason_against(graph) is None
    for _ in range(100):
        costs.took_buffers()
    assert "keep one cache for several calls" in costs.reason_against(graph)
