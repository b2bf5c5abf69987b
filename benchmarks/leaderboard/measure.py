"""How far the answers of each method are from plain ones, and what they cost.

generate() is made to give the tokens of the plain answer, or of the known one, so that every method is judged in the
same contexts: by the KL divergence of its logits from the plain ones, and by how often its first choice is the plain
one. On a CPU, seconds are those that this process was computing, so that other work on the machine is not counted.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from benchmarks.leaderboard.method import Method
from benchmarks.leaderboard.workloads import Case, Question
from kvboost_hf import ChunkReuseCache, ChunkStore, ContentChunker, ReusePolicy
from kvboost_hf.cache.store.chunk_store import Put

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


class Answer(NamedTuple):
    """What generate() gave."""

    tokens: list[int]
    logits: torch.Tensor  # [tokens, vocabulary]
    first: float  # seconds to the first logits
    wait: float  # seconds between two tokens, at most
    whole: float  # seconds in all
    times: list[float]  # seconds to the logits of each token


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
        tokenizer: Its own.
        store: What it has seen; takes nothing more.
        question: The prompt.
        chosen: The ways, in the order in which they run.
        new: Tokens of an answer, where the question has none.
    """
    ids = question.ids
    plain = answer(model, ids, new if question.answer is None else question.answer)
    choice, target = plain.logits.argmax(-1), plain.logits.double().log_softmax(-1)

    def right(logits: torch.Tensor) -> bool:
        return question.truth is not None and question.truth in tokenizer.decode(logits.argmax(-1))

    for way in chosen:
        report = None
        found = plain
        if way.policy is not None:
            with way.method.running(way.policy, store):
                cache = ChunkReuseCache(model, store, way.policy)
                found = answer(model, ids, plain.tokens, cache)
            report = cache.report
        logs = found.logits.double().log_softmax(-1)
        kl = (target.exp() * (target - logs)).sum(-1)
        row = {
            "kl": float(kl.mean()),
            "kl_first": float(kl[0]),
            "agreement": float((found.logits.argmax(-1) == choice).double().mean()),
            "computed": report.forwarded_tokens / len(ids) if report is not None else 1.0,
            "repaired": report.repaired_tokens / len(ids) if report is not None else 0.0,
            "first_token": found.first / plain.first,
            "wait": found.wait / plain.first,
            "answer": found.whole / plain.whole,
            "tokens": len(ids),
        }
        if right(plain.logits):
            row["right"] = float(right(found.logits))
        yield way.name, row


class _Feed(LogitsProcessor):
    """Has generate() give certain tokens, if there are any, and takes the time at which the logits of each come."""

    def __init__(self, tokens: Sequence[int], device: torch.device) -> None:
        self._tokens, self._device = tokens, device
        self.times: list[float] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.times.append(_now(self._device))
        if not self._tokens:
            return scores
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self._tokens[len(self.times) - 1]] = 0.0
        return forced  # type: ignore[return-value]


def answer(model: PreTrainedModel, ids: Sequence[int], tokens: Sequence[int] | int, cache: Any = None) -> Answer:
    """What generate() gives for a prompt: certain tokens, or so many of its own choice."""
    inputs = torch.tensor([list(ids)], device=model.device)
    given, count = ([], tokens) if isinstance(tokens, int) else (tokens, len(tokens))
    feed = _Feed(given, model.device)
    generate: Any = model.generate
    began = _now(model.device)
    out = generate(
        input_ids=inputs,
        attention_mask=torch.ones_like(inputs),
        past_key_values=cache,
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        logits_processor=LogitsProcessorList([feed]),
        output_logits=True,
        return_dict_in_generate=True,
    )
    ended = _now(model.device)
    logits = torch.stack([step[0] for step in out.logits])
    wait = max((after - before for before, after in pairwise(feed.times)), default=0.0)
    times = [at - began for at in feed.times]
    return Answer(out.sequences[0, len(ids) :].tolist(), logits, times[0], wait, ended - began, times)


def _now(device: torch.device) -> float:
    if device.type == "cpu":
        return time.process_time()
    torch.accelerator.synchronize(device)
    return time.perf_counter()
