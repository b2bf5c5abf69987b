"""Nobody waits long because of what others ask: counted in tokens that the model computes before a first token."""

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvboost_hf import ChunkStore
from kvboost_hf.assets import load_embedded
from kvboost_hf.config import KVQuantConfig
from tests.conftest import make_model, random_ids
from tests.internals.server import (
    EmbeddingJob,
    EmbeddingTurns,
    EngineLimits,
    Job,
    JobEvent,
    ModelEngine,
    Progress,
    QueueFullError,
    SamplingOptions,
)
from tests.server.test_worker import Told, job, numbers

PIECE = 16
LONG = 500  # tokens: of 31 pieces, as 8,000 are of 256
HOGS = 14


class Watched:
    """An engine whose forwards are counted, and that is asked more while it computes."""

    def __init__(self, model: str = "llama", **told: Any) -> None:
        found = make_model(model)
        store = ChunkStore(found, chunk_size=16)
        told = {"prefill_chunk_size": PIECE, "max_client_share": 0.75, "max_model_len": 2048, **told}
        self.engine = ModelEngine(found, numbers(), store=store, **told)
        self.pieces: list[int] = []  # tokens of each forward over a prompt
        self._then: dict[int, Callable[[], object]] = {}
        self._forward = self.engine._runner.forward
        self.engine._runner.forward = self._count

    def _count(self, cache: Any, ids: torch.Tensor, start: int) -> torch.Tensor:
        if ids.shape[1] > 1 or not start:
            self.pieces.append(ids.shape[1])
            self._then.pop(len(self.pieces), lambda: None)()
        return self._forward(cache, ids, start)

    def at(self, piece: int, call: Callable[[], object]) -> None:
        """Call something in the middle of a forward."""
        self._then[piece] = call

    def submit(self, key: bytes, ids: torch.Tensor, count: int = 4, listener: Told | None = None) -> Told:
        told = listener or Told()
        self.engine.submit(job(ids, count, client=key, salt=key), told)
        return told

    def delay(self, piece: int, key: bytes, tokens: int = 10) -> Callable[[], int]:
        """Ask in the middle of a forward; how many tokens were computed from then on until the first one of this."""
        counted: list[int] = []
        ended = threading.Event()

        def hear(event: JobEvent) -> None:
            if not counted and isinstance(event, Progress):
                counted.append(sum(self.pieces[piece - 1 :]) - tokens)
                ended.set()

        self.at(piece, lambda: self.submit(key, random_ids(tokens, piece), 2, Told(hear)))

        def result() -> int:
            assert ended.wait(60)
            return counted[0]

        return result


Watch = Callable[..., Watched]


@pytest.fixture
def watch() -> Iterator[Watch]:
    made: list[Watched] = []

    def make(*given: Any, **told: Any) -> Watched:
        made.append(Watched(*given, **told))
        return made[-1]

    yield make
    for each in made:
        each.engine.close()


def hogs(watched: Watched, count: int = HOGS, keys: int = 1, known: int = 0) -> list[Told]:
    """Long prompts, all there when the engine looks; of `known` tokens K/V is there already."""
    prompts = [random_ids(LONG, 100 + n) for n in range(count)]
    names = [b"hog %d" % (n % keys) for n in range(count)]
    if known:
        for key, ids in zip(names, prompts, strict=True):
            assert watched.submit(key, ids[:, :known], 1).end.reason == "length"
    watched.pieces.clear()
    with watched.engine._intake.changed:
        return [watched.submit(key, ids) for key, ids in zip(names, prompts, strict=True)]


@pytest.mark.parametrize("key", [b"hog 0", b"another"])
@pytest.mark.parametrize(
    "told",
    [{}, {"max_live_tokens": 4000}, {"max_batch_size": 2}, {"live_quant": KVQuantConfig()}],
    ids=["many", "little memory", "small batch", "codes"],
)
def test_a_short_prompt_waits_for_two_pieces_of_long_ones(watch: Watch, key: bytes, told: dict[str, Any]) -> None:
    watched = watch(**told)
    delays = [watched.delay(piece, key) for piece in (2, 20, 90)]
    hogs(watched)
    assert max(delay() for delay in delays) <= 2 * PIECE


def test_many_keys_with_long_prompts_take_a_piece_each(watch: Watch) -> None:
    watched = watch()
    delays = [watched.delay(piece, b"another") for piece in (2, 40)]
    hogs(watched, keys=4)
    assert max(delay() for delay in delays) <= 5 * PIECE


def test_prompts_that_are_known_are_not_computed_in_a_row(watch: Watch) -> None:
    """Each needs few tokens, but reads the K/V of many."""
    watched = watch()
    delays = [watched.delay(piece, b"another") for piece in (2, 12)]
    hogs(watched, count=8, known=LONG - 1)
    assert max(delay() for delay in delays) <= 2 * LONG  # columns: the forward under way, and one more


def test_a_known_prompt_passes_unknown_ones_of_its_key(watch: Watch) -> None:
    watched = watch()
    first = random_ids(LONG, 1)
    assert watched.submit(b"hog 0", first).end.reason == "length"
    passed: list[int] = []
    heard = threading.Event()

    def hear(event: JobEvent) -> None:
        passed.append(len(watched.pieces))
        heard.set()

    watched.at(5, lambda: watched.submit(b"hog 0", torch.cat([first, random_ids(9, 2)], 1), 2, Told(hear)))
    hogs(watched)
    assert heard.wait(60)
    assert passed[0] <= 5 + 2


def test_long_prompts_are_not_starved_by_short_ones(watch: Watch) -> None:
    """While short ones of the same key never stop to come, the long ones get every fifth piece."""
    watched = watch(max_batch_size=4)
    running = True

    def again(event: JobEvent) -> None:
        if not isinstance(event, Progress) and running:
            watched.submit(b"hog 0", random_ids(PIECE, len(watched.pieces)), 1, Told(again))

    long = [watched.submit(b"hog 0", random_ids(160, n), 1) for n in range(2)]
    for n in range(6):
        watched.submit(b"hog 0", random_ids(PIECE, n), 1, Told(again))
    for each in long:
        assert each.end.reason == "length"
    running = False
    assert len(watched.pieces) <= 2 * (160 // PIECE) * 5 + 20


def test_what_is_cancelled_is_gone_before_the_next_forward(watch: Watch) -> None:
    """Places, planned memory and K/V: of those that run, those whose prompts are computed, and those that wait."""
    watched = watch(max_live_tokens=4000)
    engine, tickets, order = watched.engine, list[Any](), list[bytes]()
    caches: list[weakref.ref[Any]] = []

    def give_up() -> None:
        caches.extend(weakref.ref(task.cache) for task in engine._intake.admitted if task.cache is not None)
        for ticket in tickets:
            ticket.cancel()
        watched.submit(b"hog 0", random_ids(LONG, 7), 2, last)

    def look() -> None:
        order.append(b"next")
        stats = engine.stats()
        assert (stats["prompts"], stats["running"], stats["waiting"]) == (1, 0, 0)
        assert stats["batch_bytes"] == 0
        assert len(caches) >= 2
        assert not [found for found in caches if found() is not None]

    last = Told()
    watched.at(40, give_up)
    watched.at(41, look)
    with engine._intake.changed:
        for n in range(HOGS):
            tickets.append(engine.submit(job(random_ids(LONG, n), 900, client=b"hog 0"), Told()))
    assert last.end.reason == "length"
    assert order == [b"next"]


def asked(tokens: int, client: bytes) -> Job:
    return Job(ids=[1] * tokens, options=SamplingOptions(max_tokens=10), client=client)


def test_shares_of_memory_leave_room_for_others() -> None:
    limits = EngineLimits(max_live_tokens=1000, max_batch_size=100, max_client_share=0.75)
    running: list[Job] = []
    taken = []
    for client in (b"a", b"b", b"c"):
        while limits.has_room(asked(40, client), running):
            running.append(asked(40, client))
        taken.append(sum(each.longest for each in running if each.client == client))
    assert taken == [750, 150, 50]  # three quarters of what is free each time, and one at least
    assert limits.has_room(asked(40, b"d"), running)
    alone = EngineLimits(max_live_tokens=1000, max_batch_size=100)
    running = []
    while alone.has_room(asked(40, b"a"), running):
        running.append(asked(40, b"a"))
    assert len(running) == 20


def test_shares_of_the_queue_leave_places_for_others(watch: Watch) -> None:
    engine = watch(max_batch_size=1, max_queue_size=64).engine

    def submit(client: bytes) -> None:
        engine.submit(job(random_ids(20, 0), 300, client=client), Told())

    with engine._intake.changed:
        for client, count in ((b"a", 48), (b"b", 12), (b"c", 3)):
            for _ in range(count):
                submit(client)
            with pytest.raises(QueueFullError, match=f"{count} of your requests are waiting") as refused:
                submit(client)
            assert refused.value.retry_after_s >= 1
        submit(b"d")


def test_texts_to_embed_take_turns() -> None:
    """The short text of one key beside twenty requests of another, whose texts have ten pieces each."""
    model = load_embedded()[0]
    turns = EmbeddingTurns()
    jobs = [EmbeddingJob([[3] * 160] * 2, b"hog") for _ in range(20)]
    for _ in range(5):
        assert not turns.next(jobs, PIECE).advance(model, PIECE)
    short = EmbeddingJob([[4] * 10], b"another")
    jobs.append(short)
    before = 0
    while (chosen := turns.next(jobs, PIECE)) is not short:
        chosen.advance(model, PIECE)
        before += 1
    assert before <= 1
    assert short.advance(model, PIECE)
    jobs.remove(short)
    long = EmbeddingJob([[5] * 160], b"another")
    jobs.append(long)
    order = []
    for _ in range(40):
        chosen = turns.next(jobs, PIECE)
        order.append(chosen)
        if chosen.advance(model, PIECE):
            jobs.remove(chosen)
        assert sum(not job.between for job in jobs) <= 1  # K/V of one text
    assert order.index(long) <= 10
    assert long.future.done()
    assert len({id(each) for each in order}) > 3


def test_a_text_to_embed_that_nobody_waits_for_is_dropped(watch: Watch) -> None:
    engine = watch().engine
    gone, kept = (engine.embed([[3] * 100], client) for client in (b"a", b"b"))
    gone.cancel()
    assert len(kept.result(60)) == 1
    assert engine.drain(60)
