"""How far the answers of each method are from plain ones, and what they cost.

generate() is made to give the tokens of the plain answer, or of the known one, so that every method is judged in the
same contexts: by the KL divergence of its logits from the plain ones, and by how often its first choice is the plain
one. On a CPU, seconds are those that this process was computing, so that other work on the machine is not counted.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from benchmarks.leaderboard.method import Method
from benchmarks.leaderboard.workloads import Case, Question
from kvboost_hf import ChunkReuseCache, ChunkStore, ContentChunker, ReusePolicy
from kvboost_hf.cache.store.chunk_store import Put
from kvboost_hf.verify.measure import Call, compare, report_of, timed_generate

Row = dict[str, float]


class FreezableStore(ChunkStore):
    """A store that takes nothing more once it is `frozen`."""

    frozen = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        put, put_content, put_states = self.put, self.put_content, self.put_states
        self.put = lambda *args, **kwargs: Put.NO_ROOM if self.frozen else put(*args, **kwargs)
        self.put_content = lambda *args, **kwargs: Put.NO_ROOM if self.frozen else put_content(*args, **kwargs)
        self.put_states = lambda *args, **kwargs: Put.NO_ROOM if self.frozen else put_states(*args, **kwargs)


class Way(NamedTuple):
    """A method with one of its settings."""

    name: str
    method: Method
    policy: ReusePolicy | None


def ways(methods: dict[str, Method]) -> dict[str, Way]:
    """All settings of methods, by their names in the tables."""
    each = [
        Way(f"{name}, {setting}" if setting else name, method, policy)
        for name, method in methods.items()
        for setting, policy in method.settings.items()
    ]
    return {way.name: way for way in each}


def primed(model: PreTrainedModel, tokenizer: Any, case: Case) -> FreezableStore:
    """A frozen store that has seen what a case says."""
    store = FreezableStore(model, chunker=ContentChunker.for_tokenizer(tokenizer))
    if case.documents:
        store.warm(documents=case.documents, prefix=case.prefix, tokenizer=tokenizer)
    for ids in case.seen:
        store.warm(ids)
    store.frozen = True
    return store


def measure(
    model: PreTrainedModel, tokenizer: Any, store: ChunkStore, question: Question, chosen: Iterable[Way], new: int
) -> Iterator[tuple[str, Row]]:
    """Figures of each way for one question. Plain runs first, whether it is chosen or not.

    Args:
        model: That answers.
        tokenizer: The tokenizer of the model.
        store: What it has seen; takes nothing more.
        question: The prompt.
        chosen: The ways, in the order in which they run.
        new: Tokens of an answer, where the question has none.
    """
    ids = question.ids
    plain = answer(model, ids, new if question.answer is None else question.answer)

    def right(call: Call) -> bool:
        return question.truth is not None and question.truth in tokenizer.decode(call.logits.argmax(-1))

    for way in chosen:
        cache, found = None, plain
        if way.policy is not None:
            with way.method.running(way.policy, store):
                cache = ChunkReuseCache(model, store, way.policy)
                found = answer(model, ids, plain.ids, cache)
        report = report_of(cache, ids)
        told = compare(0, plain, found, report)
        row = {
            "kl": sum(told.kl) / len(told.kl),
            "kl_first": told.kl[0],
            "agreement": told.agreeing_steps / len(told.kl),
            "computed": report.forwarded_tokens / len(ids),
            "repaired": report.repaired_tokens / len(ids),
            "first_token": told.first_token,
            "wait": max((after - before for before, after in pairwise(found.times)), default=0.0) / plain.times[0],
            "answer": found.total_s / plain.total_s,
            "tokens": len(ids),
        }
        if right(plain):
            row["right"] = float(right(found))
        yield way.name, row


class _Feed(LogitsProcessor):
    """Has generate() give certain tokens."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._left = iter(tokens)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, next(self._left)] = 0.0
        return forced  # type: ignore[return-value]


def answer(model: PreTrainedModel, ids: Sequence[int], tokens: Sequence[int] | int, cache: Any = None) -> Call:
    """What generate() gives for a prompt: certain tokens, or so many of its own choice."""
    given, count = ([], tokens) if isinstance(tokens, int) else ([_Feed(tokens)], len(tokens))
    return timed_generate(
        model,
        ids,
        count,
        keep_logits=True,
        clock=partial(_now, model.device),
        min_new_tokens=count,
        logits_processor=LogitsProcessorList(given),
        past_key_values=cache,
    )


def _now(device: torch.device) -> float:
    if device.type == "cpu":
        return time.process_time()
    torch.accelerator.synchronize(device)
    return time.perf_counter()
