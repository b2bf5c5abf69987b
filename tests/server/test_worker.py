"""The thread that runs the model: each answer is that of plain generate(), whatever runs beside it."""

import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from kvboost_hf import ChunkStore, ReusePolicy
from kvboost_hf.assets import load_embedded
from kvboost_hf.errors import StoreClosedError
from tests.architectures.models import make_architecture
from tests.conftest import as_inputs, counted, make_model, random_ids
from tests.internals.cache import Loans, view_states
from tests.internals.compat import kv_bytes_per_token
from tests.internals.disk import DiskTier
from tests.internals.server import (
    BatchKV,
    DrainingError,
    EngineLimits,
    Finished,
    Intake,
    Job,
    JobEvent,
    ModelEngine,
    ModelRunner,
    Progress,
    QueueFullError,
    SamplingOptions,
    Task,
    TooLongError,
    WaitingLine,
    _BatchLayer,
    _piece_end,
    choose_attention,
)
from tests.internals.top import common_prefix, kernel_calls
from tests.server.wire import until

WAIT_S = 60


class Told:
    """Listens, and waits for the end."""

    def __init__(self, at: Callable[[JobEvent], None] = lambda event: None) -> None:
        self.events: list[JobEvent] = []
        self._at, self._ended = at, threading.Event()

    def __call__(self, event: JobEvent) -> None:
        self.events.append(event)
        self._at(event)
        if isinstance(event, Finished):
            self._ended.set()

    @property
    def end(self) -> Finished:
        assert self._ended.wait(WAIT_S), "the job did not end"
        *_, last = self.events
        assert isinstance(last, Finished)
        return last

    @property
    def text(self) -> str:
        assert self.end
        return "".join(event.text for event in self.events if isinstance(event, Progress))


@pytest.fixture(scope="module")
def reader() -> tuple[PreTrainedModel, Any]:
    return load_embedded()


@cache
def numbers() -> PreTrainedTokenizerFast:
    """A tokenizer for models that know no text: token 7 is "7,"."""
    found = Tokenizer(WordLevel({f"{i},": i for i in range(300)}, unk_token="0,"))
    found.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=found)


def job(ids: torch.Tensor, count: int, **more: Any) -> Job:
    return Job(ids=ids[0].tolist(), options=SamplingOptions(max_tokens=count), **more)


def plain(model: PreTrainedModel, ids: torch.Tensor, count: int) -> str:
    said = model.generate(**as_inputs(ids), max_new_tokens=count, eos_token_id=None, do_sample=False)
    return str(numbers().decode(said[0, ids.shape[1] :].tolist()))


@pytest.fixture
def engines() -> Iterator[Callable[..., ModelEngine]]:
    made: list[ModelEngine] = []

    def make(model: PreTrainedModel, **told: Any) -> ModelEngine:
        told = {"store": ChunkStore(model, chunk_size=16), "prefill_chunk_size": 16, **told}
        made.append(ModelEngine(model, numbers(), **told))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


MODELS = ["llama", "qwen2", "gpt2", "deepseek_v3", "gemma2", "mistral", "gpt_oss", "qwen3_next", "bloom"]


@pytest.mark.parametrize("name", MODELS)
def test_answers_beside_others(name: str, engines: Any) -> None:
    """Rows of unequal length that come and go in the middle of others."""
    model, rng = make_model(name), random.Random(0)
    engine = engines(model, max_batch_size=3)
    prompts = [random_ids(rng.choice((1, 5, 20, 40, 70)), seed) for seed in range(12)]
    prompts[6] = torch.cat([prompts[3], random_ids(8, 99)], 1)
    counts = [rng.randint(1, 24) for _ in prompts]
    told = [Told() for _ in prompts]
    for ids, count, listener in zip(prompts, counts, told, strict=True):
        engine.submit(job(ids, count), listener)
    for ids, count, listener in zip(prompts, counts, told, strict=True):
        assert listener.text == plain(model, ids, count)
        assert listener.end.reason == "length"
        assert listener.end.completion_tokens == count
        assert listener.end.prompt_tokens == ids.shape[1]
    assert engine.stats()["running"] == engine.stats()["waiting"] == 0


def test_figures_that_take_long_keep_nobody_waiting(engines: Any, tmp_path: Path) -> None:
    """A lower tier hangs while somebody asks it for its figures."""
    asked, answers = threading.Event(), threading.Event()

    class Hangs(DiskTier):
        def stats(self) -> Any:
            asked.set()
            assert answers.wait(WAIT_S)
            return super().stats()

    model, ids = make_model("llama"), random_ids(40)
    answers.set()  # the store asks it as it is opened
    engine = engines(model, store=ChunkStore(model, chunk_size=16, tiers=[Hangs(tmp_path, 2**20)]))
    engine.store.flush()
    asked.clear()
    answers.clear()
    with ThreadPoolExecutor(1) as pool:
        figures = pool.submit(engine.stats)
        try:
            assert asked.wait(WAIT_S)
            told = Told()
            engine.submit(job(ids, 4), told)
            assert told.text == plain(model, ids, 4)
            assert not figures.done()
        finally:
            answers.set()
        assert figures.result()["store"]["tiers"]["disk"]["chunks"] >= 0


IN_PLACE = {"llama": True, "qwen2": True, "deepseek_v3": False, "gemma2": False, "mistral": False, "bloom": False}


@pytest.mark.parametrize("name", IN_PLACE)
def test_rows_that_begin_alike_read_it_together(name: str, engines: Any) -> None:
    """Each row beside others that begin like it, for longer or shorter, and that come and go."""
    plain_model, model, rng = make_model(name), make_model(name), random.Random(1)
    model.set_attn_implementation("kvboost_fa2")
    engine = engines(model, max_batch_size=5)
    assert engine._runner.in_place is IN_PLACE[name]
    first, second = random_ids(100, 1), random_ids(90, 2)
    beginnings = [first, first, torch.cat([first, second], 1), second, first[:, :80], random_ids(3, 3)]
    prompts = [torch.cat([rng.choice(beginnings), random_ids(rng.randint(1, 80), seed)], 1) for seed in range(14)]
    counts = [rng.randint(1, 24) for _ in prompts]
    told = [Told() for _ in prompts]
    with engine._intake.changed:
        for ids, count, listener in zip(prompts, counts, told, strict=True):
            engine.submit(job(ids, count, salt=rng.choice([b"", b"a"])), listener)
    for ids, count, listener in zip(prompts, counts, told, strict=True):
        assert listener.text == plain(plain_model, ids, count)


@pytest.mark.daily
@pytest.mark.parametrize(
    ("name", "asked", "chosen"),
    [
        ("llama", None, "kvboost_fa2"),
        ("gemma2", None, "its own"),
        ("bloom", None, "its own"),
        ("llama", "eager", "eager"),
    ],
)
def test_the_attention_of_a_server_on_a_cpu(name: str, asked: str | None, chosen: str) -> None:
    model = make_model(name)
    own = model.config._attn_implementation
    choose_attention(model, asked)
    assert model.config._attn_implementation == (own if chosen == "its own" else chosen)


def test_the_model_is_not_looked_through_for_each_token(engines: Any) -> None:
    """Nobody but the engine runs it; what is stored is still looked after."""
    model, told, roots = make_model(), Told(), 0
    store = ChunkStore(model, chunk_size=16)
    real = store.root

    def root(*args: Any, **how: Any) -> bytes | None:
        nonlocal roots
        roots += 1
        return real(*args, **how)

    store.root = root
    engine = engines(model, store=store)
    engine.submit(job(random_ids(20), 40), told)
    assert told.end.completion_tokens == 40
    assert 0 < roots < 16


def test_what_is_shared_is_not_copied() -> None:
    """Eight rows of which 200 tokens are the same: read together, but by the one of another owner."""
    model = make_model()
    model.set_attn_implementation("kvboost_fa2")
    batch, shared = BatchKV(model, in_place=True), random_ids(200, 1)
    per_token = kv_bytes_per_token(model.config, model.dtype)
    for seed in range(8):
        ids = torch.cat([shared, random_ids(9, seed + 2)], 1)
        cache = DynamicCache(config=model.config)
        model(ids, past_key_values=cache, use_cache=True)
        batch.join(
            [(layer.keys, layer.values) for layer in cache.layers], ids[0].tolist(), "owner" if seed else "other"
        )
    tables = [layer.table for layer in batch._layers if layer is not None and layer.table is not None]
    assert [sorted(key.shape[1] for key in table.keys) for table in tables] == [[9, 200, 209]] * len(batch._layers)
    assert batch.nbytes < 8 * 200 * per_token
    before = kernel_calls()
    batch.step([1] * 8)
    assert (kernel_calls() - before)["cpu.decode"] == len(batch._layers)
    for _ in range(7):
        batch.leave(0)
    tables = [layer.table for layer in batch._layers if layer is not None and layer.table is not None]
    assert [sorted(key.shape[1] for key in table.keys) for table in tables] == [[209]] * len(batch._layers)


@torch.no_grad()
def test_kv_of_a_row_that_has_left_is_let_go_of() -> None:
    """The others read what they began with in K/V of their own, and go on as they would have."""
    model = make_model()
    model.set_attn_implementation("kvboost_fa2")
    batch, shared, kept = BatchKV(model, in_place=True), random_ids(70, 1), []
    texts = [torch.cat([shared, random_ids(tokens, tokens)], 1) for tokens in (300, 80, 5)]
    for ids in texts:
        cache = DynamicCache(config=model.config)
        model(ids, past_key_values=cache, use_cache=True)
        batch.join([(layer.keys, layer.values) for layer in cache.layers], ids[0].tolist())
        kept.append(weakref.ref(cache.layers[0].keys.untyped_storage()))
    del cache
    for left, staying in (([], [0, 1, 2]), ([0], [2, 1]), ([0, 2], [1])):
        if left:
            batch.leave(0)
        assert not [place for place in left if kept[place]() is not None]
        logits = batch.step([7] * len(batch.lengths))
        for row, text in enumerate(staying):
            texts[text] = torch.cat([texts[text], torch.tensor([[7]])], 1)
            torch.testing.assert_close(logits[row], model(texts[text]).logits[0, -1], atol=1e-4, rtol=1e-4)
    batch.clear()
    assert not [storage for storage in kept if storage() is not None]
    assert batch.nbytes == len(batch.lengths) == 0


def _in_row(batch: BatchKV, model: PreTrainedModel, ids: torch.Tensor) -> None:
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache, use_cache=True)
    states = [view_states(layer, 0) if isinstance(layer, LinearAttentionLayer) else None for layer in cache.layers]
    pairs = [(layer.keys, layer.values) if isinstance(layer, DynamicLayer) else None for layer in cache.layers]
    batch.join(pairs, ids[0].tolist(), states=states)


@pytest.mark.parametrize(
    ("name", "in_place", "least"),
    [
        ("llama", False, 1),
        ("llama", True, 1),
        ("llama", True, 64),
        ("qwen3_next", False, 64),
        ("falcon_h1", False, 64),
    ],
)
@torch.no_grad()
def test_without_memory_for_a_row_the_others_go_on(
    name: str, in_place: bool, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of the allocations it is that fails, and whether or not all columns have to move for the row."""
    model, stock, left = make_model(name), torch.Tensor.new_zeros, [-1]
    model.set_attn_implementation("kvboost_fa2" if in_place else "sdpa")

    def new_zeros(*given: Any, **told: Any) -> torch.Tensor:
        left[0] -= 1
        if not left[0]:
            raise torch.OutOfMemoryError("none left")
        return stock(*given, **told)

    monkeypatch.setattr(torch.Tensor, "new_zeros", new_zeros)
    fails = 0
    for count in range(1, 40):
        batch = BatchKV(model, in_place=in_place, least=least)
        texts = [random_ids(30, 1), random_ids(20, 2)]
        late = torch.cat([texts[0], random_ids(270, 3)], 1)
        for ids in texts:
            _in_row(batch, model, ids)
        for step in range(3):
            if step == 1:
                held, left[0] = batch.nbytes, count
                try:
                    _in_row(batch, model, late)
                except torch.OutOfMemoryError:
                    fails += 1
                    assert batch.nbytes <= 1.25 * held  # with room to spare; there was memory again to move back to
                left[0] = -1
            if step == 2 and len(batch.lengths) == 2:
                _in_row(batch, model, late)
            if step and len(batch.lengths) == 3 and len(texts) == 2:
                texts.append(late)
            logits = batch.step([7] * len(batch.lengths))
            texts = [torch.cat([ids, torch.tensor([[7]])], 1) for ids in texts]
            for row, ids in enumerate(texts):
                torch.testing.assert_close(logits[row], model(ids).logits[0, -1], atol=2e-4, rtol=2e-4)
    assert 0 < fails < 39


@pytest.mark.daily
@pytest.mark.parametrize("rows", [2, 3])  # two fill the buffers
@pytest.mark.parametrize("tokens", [25, 300])
@torch.no_grad()
def test_a_row_that_cannot_be_added_leaves_no_room_behind(rows: int, tokens: int) -> None:
    model = make_model()
    batch = BatchKV(model)
    for seed in range(rows):
        _in_row(batch, model, random_ids(30 - seed, seed))

    def held() -> list[Any]:
        return [(layer.rows, layer.stop, len(layer.buffers[0])) for layer in batch._layers if layer is not None]

    before, kept = held(), [pair[0].clone() for pair in batch.read(0, 20) if pair is not None]
    cache = DynamicCache(config=model.config)
    model(random_ids(tokens, 9), past_key_values=cache)
    pairs = [(layer.keys, layer.values) for layer in cache.layers]
    pairs[-1] = (pairs[-1][0][..., 1:], pairs[-1][1])  # the others are added by then
    with pytest.raises(RuntimeError, match="must match"):
        batch.join(pairs, [0] * tokens)
    assert held() == before
    assert all(map(torch.equal, kept, [pair[0] for pair in batch.read(0, 20) if pair is not None]))


@torch.no_grad()
def test_without_memory_to_find_what_is_shared_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    model.set_attn_implementation("kvboost_fa2")
    batch, texts = BatchKV(model, in_place=True, least=1), [random_ids(30, 1), random_ids(20, 2)]
    for ids in texts:
        _in_row(batch, model, ids)

    def fail(*_: Any) -> int:
        raise MemoryError("none left")

    with monkeypatch.context() as patch:
        patch.setattr(type(batch._tree), "add", fail)
        with pytest.raises(MemoryError, match="none left"):
            _in_row(batch, model, random_ids(40, 3))
    logits = batch.step([7, 7])
    for row, ids in enumerate(texts):
        wanted = model(torch.cat([ids, torch.tensor([[7]])], 1)).logits[0, -1]
        torch.testing.assert_close(logits[row], wanted, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_without_memory_to_move_to_rows_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    texts = [random_ids(600, 1), random_ids(30, 2), random_ids(20, 3)]
    batch = BatchKV(model)
    for ids in texts:
        _in_row(batch, model, ids)

    def fail(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("none left")

    held = batch.nbytes
    monkeypatch.setattr(torch.Tensor, "new_zeros", fail)
    batch.leave(0)
    monkeypatch.undo()
    assert batch.nbytes == held
    texts = [texts[2], texts[1]]
    for _ in range(2):
        logits = batch.step([7, 7])
        texts = [torch.cat([ids, torch.tensor([[7]])], 1) for ids in texts]
        for row, ids in enumerate(texts):
            torch.testing.assert_close(logits[row], model(ids).logits[0, -1], atol=1e-4, rtol=1e-4)
    batch.leave(1)  # there is memory again
    assert batch.nbytes < held / 2
    last = model(torch.cat([texts[0], torch.tensor([[7]])], 1)).logits[0, -1]
    torch.testing.assert_close(batch.step([7])[0], last, atol=1e-4, rtol=1e-4)


def _long_rope() -> PreTrainedModel:
    """A model whose frequencies are others beyond 48 tokens."""
    config = make_model().config
    config.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "original_max_position_embeddings": 48,
        "short_factor": [1.0] * 8,
        "long_factor": [3.0] * 8,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize(
    ("name", "most", "together"),
    [("bart", None, False), ("roberta", None, False), ("longrope", None, False), ("longrope", 48, True)],
)
def test_rows_that_others_would_change(name: str, most: int | None, together: bool, engines: Any) -> None:
    """Some models count padding, or change the frequencies of all rows for a long one."""
    model = _long_rope() if name == "longrope" else make_architecture(name)
    engine = engines(model, max_model_len=most)
    lengths = (40, 5, 60, 1) if most is None else (40, 5, 33, 1)
    prompts = [random_ids(length, length) for length in lengths]
    told = [Told() for _ in prompts]
    with engine._intake.changed:
        for ids, listener in zip(prompts, told, strict=True):
            engine.submit(job(ids, 8), listener)
    assert engine.drain(WAIT_S)  # the frequencies in use are kept on the model: nothing else may run
    for ids, listener in zip(prompts, told, strict=True):
        assert listener.text == plain(model, ids, 8)
    assert engine._runner.batchable == together


def test_what_was_said_is_not_computed_again(engines: Any) -> None:
    model = make_model()
    engine = engines(model)
    ids = random_ids(50, 1)
    first = Told()
    engine.submit(job(ids, 30), first)
    said = [int(each) for each in first.text.split(",")[:-1]]
    longer = torch.cat([ids, torch.tensor([said]), random_ids(5, 2)], 1)
    with counted(model) as work:
        second = Told()
        engine.submit(job(longer, 4), second)
        assert second.end.cached_tokens >= 79
    assert second.text == plain(model, longer, 4)
    assert work.tokens <= 85 - 79 + 3


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_a_long_prompt_keeps_nobody_waiting(name: str, engines: Any) -> None:
    model = make_model(name)
    engine = engines(model)
    order: list[str] = []
    with engine._intake.changed:  # both are there when the thread looks
        long, short = (Told(lambda event, name=name: order.append(name)) for name in ("long", "short"))
        engine.submit(job(random_ids(150, 1), 2), long)
        engine.submit(job(random_ids(10, 2), 2), short)
    assert {long.end.reason, short.end.reason} == {"length"}
    assert order[:3] == ["short"] * 3


def test_many_short_prompts_come_between_two_tokens_eight_at_most(engines: Any) -> None:
    engine = engines(make_model(), prefill_chunk_size=64, max_batch_size=32)
    order: list[str] = []
    answer = Told(lambda event: order.append("answer"))
    engine.submit(job(random_ids(20, 1), 60), answer)
    until(lambda: order, "the answer has not begun")
    shorts = [Told(lambda event, n=n: order.append(f"{n}")) for n in range(20)]
    with engine._intake.changed:  # all of them are there when the thread looks
        for n, short in enumerate(shorts):
            engine.submit(job(random_ids(2, 100 + n), 1), short)
    assert {short.end.reason for short in [*shorts, answer]} == {"length"}
    between = " ".join(order).split("answer")
    assert max(len(set(names.split())) for names in between) == 8


def test_the_queue_is_bounded(engines: Any) -> None:
    engine = engines(make_model(), max_batch_size=2, max_queue_size=3)
    told = [Told() for _ in range(6)]
    with engine._intake.changed:  # all come before the thread looks: two would run, and three wait
        for listener in told[:5]:
            engine.submit(job(random_ids(20, 0), 3), listener)
        with pytest.raises(QueueFullError, match="5 requests are waiting, and 5 may") as refused:
            engine.submit(job(random_ids(20, 0), 3), told[5])
        assert refused.value.retry_after_s >= 1
    assert all(listener.end.reason == "length" for listener in told[:5])
    assert all(0 <= listener.end.queue_s <= listener.end.total_s for listener in told[:5])
    assert not told[5].events


def test_places_to_run_that_are_taken_hold_no_request_that_waits() -> None:
    intake = Intake(EngineLimits(max_batch_size=2, max_queue_size=3))

    def submit() -> None:
        intake.submit(Task(job(random_ids(3, 0), 3), Told(), 0.0))

    submit()
    assert len(intake.admit()) == 1
    for _ in range(4):
        submit()
    with pytest.raises(QueueFullError, match="4 requests are waiting, and 4 may"):
        submit()
    assert len(intake.admit()) == 1
    with pytest.raises(QueueFullError, match="3 requests are waiting, and 3 may"):
        submit()


def test_who_finds_no_place_is_told_how_long_the_others_take() -> None:
    intake = Intake(EngineLimits(max_batch_size=2, max_queue_size=6))

    def task(started: float | None = None) -> Task:
        return Task(job(random_ids(3, 0), 3), Told(), 0.0, started=started)

    def told() -> float:
        with pytest.raises(QueueFullError) as refused:
            intake.submit(task())
        return refused.value.retry_after_s

    for _ in range(8):
        intake.submit(task())
    assert len(intake.admit()) == 2
    assert told() == 1.0
    for _ in range(30):
        intake.end(task(time.perf_counter() - 10), "length")
    assert told() == pytest.approx(6 * 10 / 2, rel=0.02)  # six before it, two at a time
    intake.end(task(), "timeout")  # one that never began
    assert told() == pytest.approx(0.8 * 6 * 10 / 2, rel=0.02)


def test_cancelling_and_time_limits(engines: Any) -> None:
    model = make_model()
    engine = engines(model, max_batch_size=1)
    tickets: list[Any] = []
    running = Told(lambda event: tickets[0].cancel() if len(running.events) == 3 else None)
    with engine._intake.changed:
        tickets.append(engine.submit(job(random_ids(20, 0), 500), running))
        waiting, late, last = Told(), Told(), Told()
        engine.submit(job(random_ids(20, 1), 5), waiting).cancel()
        engine.submit(job(random_ids(20, 2), 5, timeout_s=0.0), late)
        engine.submit(job(random_ids(20, 3), 5), last)
    assert running.end.reason == "cancelled"
    assert running.end.completion_tokens == 3
    assert waiting.end.reason == "cancelled"
    assert waiting.end.completion_tokens == 0
    assert late.end.reason == "timeout"
    assert last.text == plain(model, random_ids(20, 3), 5)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("cpmant", "fails on a prompt of 7 tokens"), ("minimax", "cache class of its own"), ("xlstm", "cache class of")],
)
def test_models_that_cannot_be_served(name: str, reason: str, engines: Any) -> None:
    with pytest.raises(ValueError, match=f"cannot be served: it .*{reason}.* Call its own generate"):
        engines(make_architecture(name))


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_next"])
def test_a_store_that_is_closed_meanwhile(name: str, engines: Any, caplog: pytest.LogCaptureFixture) -> None:
    """In the middle of prompts and of answers."""
    model = make_model(name)
    store = ChunkStore(model, chunk_size=16)
    engine = engines(model, store=store, max_batch_size=3)
    same = random_ids(40, 5)
    prompts = [torch.cat([same, random_ids(3 + 20 * (n % 3), n)], 1) for n in range(7)]

    def close(event: JobEvent) -> None:
        if len(told[0].events) == 3:
            store.close()

    told = [Told(close if not n else lambda event: None) for n in range(7)]
    with engine._intake.changed:
        for ids, listener in zip(prompts, told, strict=True):
            engine.submit(job(ids, 9), listener)
    for ids, listener in zip(prompts, told, strict=True):
        assert listener.text == plain(model, ids, 9)
        assert listener.end.reason == "length"
    with pytest.raises(StoreClosedError):
        store.warm([1, 2, 3])
    assert engine.stats()["store"]["chunks"] == engine.stats()["store"]["states"] == 0
    again = Told()
    engine.submit(job(prompts[0], 4), again)
    assert again.text == plain(model, prompts[0], 4)
    assert again.end.cached_tokens == 0
    said = [record.getMessage() for record in caplog.records if record.name == "kvboost_hf.server"]
    assert said == ["The store was closed: from now on nothing is kept."]


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_next"])
def test_prompts_may_part_at_any_token(name: str, engines: Any) -> None:
    """So that clients need not say where: the third one goes on from what the first two have in common."""
    engine = engines(make_model(name), max_batch_size=1)
    cached = []
    for seed in range(3):
        told = Told()
        engine.submit(job(torch.cat([random_ids(45, 1), random_ids(9, 2 + seed)], 1), 1), told)
        cached.append(told.end.cached_tokens)
    assert cached == [0, 45 if name != "qwen3_next" else cached[1], 45]


@torch.no_grad()
def test_what_runs_lends_its_beginning_to_what_may_use_it() -> None:
    """A chunk of it or more, of the same salt, under the same policy, and while it is kept in the same store."""
    model = make_model()
    store = ChunkStore(model, chunk_size=16)
    runner = ModelRunner(model, store, ReusePolicy(mode="blend"), None, 512)
    ids = random_ids(40, 1)
    first = Task(job(ids, 3, salt=b"a"), Told(), 0.0)
    first.cache, _ = runner.open(first, [])
    runner.forward(first.cache, ids, 0)

    def lent(same: int, count: int = 3, **more: Any) -> int:
        asked = torch.cat([ids[:, :same], random_ids(20, 2)], 1)
        cache, found = runner.open(Task(job(asked, count, **{"salt": b"a", **more}), Told(), 0.0), [first])
        assert bool(cache.get_seq_length()) is bool(found)
        return found

    assert lent(40) == 0  # nothing of it is computed yet, as far as is known
    first.done = 32
    assert (lent(40), lent(25), lent(16), lent(15)) == (32, 25, 16, 0)
    assert lent(40, salt=b"b") == 0
    assert runner.policy_of(job(ids, 0)) != runner.policy_of(first.job)
    assert lent(40, 0) == 0
    runner.store = store.without_room(with_roots=False)
    assert lent(40) == 0


def test_a_forward_that_fails(engines: Any) -> None:
    model = make_model()
    engine = engines(model)
    calls = [0]

    def fail(*_: object) -> None:
        calls[0] += 1
        if calls[0] in (2, 6):
            raise RuntimeError("out of luck")

    handle = model.model.layers[1].register_forward_hook(fail)
    told = [Told() for _ in range(4)]
    for seed, listener in enumerate(told):
        engine.submit(job(random_ids(12, seed), 6), listener)
    ends = [listener.end for listener in told]
    handle.remove()
    failed = [end for end in ends if end.reason == "error"]
    assert failed
    assert all(end.error == "RuntimeError: out of luck" for end in failed)
    for seed in range(4):
        listener = Told()
        engine.submit(job(random_ids(12, seed), 6), listener)
        assert listener.text == plain(model, random_ids(12, seed), 6)


def test_what_cannot_be_stored_is_still_an_answer(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(Loans, "extend", fail)
    model = make_model()
    engine = engines(model)
    told = Told()
    engine.submit(job(random_ids(20, 0), 5), told)
    assert told.text == plain(model, random_ids(20, 0), 5)
    assert engine.drain(WAIT_S)
    assert engine.stats()["batch_bytes"] == 0
    assert sum(isinstance(event, Finished) for event in told.events) == 1


def test_a_row_that_cannot_go_on_alone(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends, and the long prompt that is under way beside it does not."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(Loans, "extend", fail)
    plain_model, model = make_model(), make_model()
    model.set_attn_implementation("kvboost_fa2")
    engine = engines(model)
    told, prompts = [Told() for _ in range(3)], [random_ids(5, 0), random_ids(6, 1), random_ids(400, 2)]
    with engine._intake.changed:
        for ids, count, listener in zip(prompts, (3, 99, 4), told, strict=True):
            engine.submit(job(ids, count), listener)
    assert told[1].end.error == "RuntimeError: no memory"
    for place, count in ((0, 3), (2, 4)):
        assert told[place].text == plain(plain_model, prompts[place], count)


@pytest.mark.parametrize("method", ["add", "remove"])
def test_a_batch_that_fails(method: str, engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the layers have changed. A row that cannot join ends alone; else nothing is used any more."""
    stock, calls = getattr(_BatchLayer, method), [0]

    def fail(*given: Any) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise RuntimeError("no memory")
        stock(*given)

    model = make_model()
    engine = engines(model)
    monkeypatch.setattr(_BatchLayer, method, fail)
    told = [Told() for _ in range(2)]
    with engine._intake.changed:
        for seed, listener in enumerate(told):
            engine.submit(job(random_ids(20 + seed, seed), 5 + seed), listener)
    ended = [listener.end.reason for listener in told]
    assert "error" in ended
    if method == "add":
        assert sorted(ended) == ["error", "length"]
        place = ended.index("length")
        assert told[place].text == plain(model, random_ids(20 + place, place), 5 + place)
    again = Told()
    engine.submit(job(random_ids(30, 7), 5), again)
    assert again.text == plain(model, random_ids(30, 7), 5)


def test_tenants_do_not_see_each_other(engines: Any) -> None:
    engine = engines(make_model())
    found = []
    for salt in (b"a", b"b", b"a"):
        listener = Told()
        engine.submit(job(random_ids(40, 1), 2, salt=salt), listener)
        found.append(listener.end.cached_tokens)
    assert found == [0, 0, 39]


def test_what_is_too_long_is_refused(engines: Any) -> None:
    engine = engines(make_model(), max_model_len=40, max_live_tokens=30)
    with pytest.raises(TooLongError, match="takes 31, which exceeds the memory of this server of 30") as refused:
        engine.submit(job(random_ids(21, 0), 10), Told())
    assert refused.value.max_prompt_tokens == 20
    with pytest.raises(TooLongError, match="exceeds the context window of 40"):
        engine.submit(job(random_ids(31, 0), 10), Told())
    with pytest.raises(ValueError, match="at least one token"):
        engine.submit(Job(ids=[], options=SamplingOptions(max_tokens=1)), Told())
    told = [Told() for _ in range(4)]  # two at once have no room
    for seed, listener in enumerate(told):
        engine.submit(job(random_ids(20, seed), 8), listener)
    assert all(listener.end.reason == "length" for listener in told)
    assert engine.stats()["steps"] == 4 * 7


def test_draining(engines: Any) -> None:
    engine = engines(make_model())
    told = [Told() for _ in range(3)]
    for seed, listener in enumerate(told):
        engine.submit(job(random_ids(20, seed), 10), listener)
    assert engine.drain(WAIT_S)
    assert all(listener.end.reason == "length" for listener in told)
    with pytest.raises(DrainingError):
        engine.submit(job(random_ids(20, 0), 1), Told())


def test_closing_ends_everything(engines: Any) -> None:
    engine = engines(make_model(), max_batch_size=1)
    told = [Told() for _ in range(3)]
    for seed, listener in enumerate(told):
        engine.submit(job(random_ids(20, seed), 2000), listener)
    engine.close()
    assert [listener.end.reason for listener in told] == ["cancelled"] * 3
    assert engine.drain(0)
    assert engine.stats()["batch_bytes"] == 0


def test_many_at_once(engines: Any) -> None:
    """64 jobs from 8 threads, some of them cancelled: every other answer is right, and nothing is left over."""
    model = make_model()
    engine = engines(model, max_batch_size=6, max_queue_size=64)
    shared = random_ids(48, 7)
    prompts = [torch.cat([shared[:, : 16 * (i % 4)], random_ids(1 + i % 9, i)], 1) for i in range(64)]
    wanted = [plain(model, ids, 3 + i % 7) for i, ids in enumerate(prompts)]
    told = [Told() for _ in prompts]

    def submit(start: int) -> None:
        for i in range(start, 64, 8):
            ticket = engine.submit(job(prompts[i], 3 + i % 7), told[i])
            if i % 11 == 5:
                ticket.cancel()

    threads = [threading.Thread(target=submit, args=(start,)) for start in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, listener in enumerate(told):
        assert listener.end.reason in ("length", "cancelled")
        assert listener.text == wanted[i] or listener.end.reason == "cancelled"
        assert wanted[i].startswith(listener.text)
    assert sum(engine.stats()["finished"].values()) == 64
    assert engine.stats()["batch_bytes"] == 0


def waits(*ids: int, salt: bytes = b"", client: bytes = b"") -> Job:
    return Job(ids=ids, options=SamplingOptions(max_tokens=1), salt=salt, client=client)


def line_of(*jobs: Job) -> WaitingLine[Job]:
    line: WaitingLine[Job] = WaitingLine(lambda job: job)
    for each in jobs:
        line.append(each)
    return line


def taken(line: WaitingLine[Job], n: int) -> list[tuple[int, ...]]:
    return [tuple(each.ids) for each in (line.take() for _ in range(n)) if each is not None]


def test_the_line() -> None:
    line = line_of(waits(1, 2, 3), waits(9, 9), waits(1, 2, 4), waits(1, 5))
    assert taken(line, 4) == [(1, 2, 3), (1, 2, 4), (1, 5), (9, 9)]
    assert line.take() is None
    line.append(waits(9, 9))
    for i in range(20):  # nobody waits for ever
        line.append(waits(1, 2, i))
    assert taken(line, 1) == [(9, 9)]  # what was taken last
    line.append(waits(5, 5))
    line.append(waits(1, 2, 3))
    assert (5, 5) in taken(line, 29)
    assert line.take(lambda ids: False) is None


@pytest.mark.daily
@pytest.mark.parametrize("client", [b"", b"other"])
def test_the_order_of_the_line_tells_nothing_of_other_salts(client: bytes) -> None:
    for salt, ids in ((b"a", (1, 2, 3)), (b"a", (7, 8, 9)), (b"b", (7, 8, 9))):
        others = [(5, 5), (1, 2, 3), (7, 8, 9)]
        first = waits(*ids, salt=salt, client=client if salt == b"a" else b"")
        line = line_of(first, *(waits(*ids, salt=b"b") for ids in others))
        assert line.take() is first
        own = salt == b"b"  # its own prompt may be followed by what begins as it does
        assert taken(line, 3) == ([others[2], *others[:2]] if own else others)


def test_clients_take_turns() -> None:
    many = [waits(1, n, client=b"a") for n in range(20)]
    line = line_of(*many)
    assert taken(line, 3) == [(1, 0), (1, 1), (1, 2)]
    for n in range(3):
        line.append(waits(2, n, client=b"b"))
    line.append(waits(*range(9), client=b"c"))
    assert line.clients == {b"a", b"b", b"c"}
    assert (line.of(b"a"), line.of(b"b"), line.of(b"nobody")) == (17, 3, 0)
    order = taken(line, 9)
    assert [ids[0] for ids in order] == [1, 2, 0, 1, 2, 1, 2, 1, 1]  # the long one counts for more than one
    line.append(waits(2, 3, client=b"b"))  # what it has not asked for meanwhile is not owed to it
    line.append(waits(2, 4, client=b"b"))
    assert [ids[0] for ids in taken(line, 4)].count(2) == 2
    assert line.remove(many[-1])
    assert not line.remove(many[-1])
    assert not line.remove(waits(1, client=b"nobody"))


def test_a_piece_has_room_for_tokens_beside_moved_ones_and_ends_in_none_of_these() -> None:
    moved, stops = [(4, 20), (30, 40)], {(0, 4): 4, (0, 5): 21, (4, 1): 21, (19, 1): 21, (20, 1): 21, (0, 14): 30}
    for (start, room), stop in {**stops, (0, 15): 41, (10, 15): 45, (35, 9): 49}.items():
        ends = [_piece_end(start, room, moved, end) for end in (100, stop, stop - 1)]
        assert ends == [stop, stop, stop - 1]


def test_common_prefix() -> None:
    rng = random.Random(1)
    for _ in range(200):
        one, other = ([rng.randint(0, 1) for _ in range(rng.randint(0, 9))] for _ in range(2))
        same = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
        assert common_prefix(one, other) == (min(len(one), len(other)) if same is None else same)


def test_a_prompt_without_an_answer_is_kept(engines: Any) -> None:
    engine = engines(make_model(), batch_window_ms=1)
    for cached in (0, 48):
        listener = Told()
        engine.submit(job(random_ids(50, 1), 0), listener)
        assert listener.end.reason == "length"
        assert listener.end.completion_tokens == 0
        assert listener.end.cached_tokens == cached
