"""Runs the workloads of the demo.

All arms run the same prompts in turn, prompt by prompt; medians are taken over repetitions of a whole workload, each
starting with empty caches and stores.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvboost_hf.assets.chat import Message, encode
from kvboost_hf.assets.world import Document
from kvboost_hf.cache.planning.chunks import Chunker
from kvboost_hf.cache.planning.cutting import ContentChunker
from kvboost_hf.cache.reuse import ChunkReuseCache
from kvboost_hf.cache.store.chunk_store import ChunkStore
from kvboost_hf.compat import cache_argument
from kvboost_hf.config import ReusePolicy
from kvboost_hf.demo.timing import Call, medians, timed_generate
from kvboost_hf.demo.workloads import (
    CHAT_SHAPE,
    LONG_DOCUMENT_TOKENS,
    NUM_QUESTIONS,
    Question,
    chat_turn,
    long_document,
    shuffled_documents,
)

# The default repair computes two layers in full, which are half of those that the embedded model has.
BLEND = ReusePolicy(mode="blend", repair="first_k", recompute_ratio=0.2)

Progress = Callable[[], None]  # called after each generate()


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt, by both arms; times are medians in milliseconds."""

    label: str
    prompt_tokens: int
    plain_ttft_ms: float
    reuse_ttft_ms: float
    plain_total_ms: float
    reuse_total_ms: float
    reused_tokens: int
    forwarded_tokens: int
    same_tokens: bool
    question: str
    answer: str
    right: bool  # whether plain generate() answers as the document says

    @property
    def speed_up(self) -> float:
        """Plain time to first token over that with reuse."""
        return self.plain_ttft_ms / self.reuse_ttft_ms

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        return {**asdict(self), "speed_up": self.speed_up}


@dataclass(frozen=True, slots=True)
class ShuffledRow:
    """One prompt of documents in a new order, by three arms; times are medians in milliseconds."""

    label: str
    prompt_tokens: int
    plain_ttft_ms: float
    exact_ttft_ms: float
    blend_ttft_ms: float
    exact_reused_tokens: int
    blend_reused_tokens: int
    blend_moved_tokens: int
    blend_recomputed_tokens: int
    blend_forwarded_tokens: int
    exact_same_tokens: bool  # as plain generate()
    blend_same_tokens: bool  # they may differ: moved K/V is repaired only in part
    question: str
    plain_answer: str
    blend_answer: str
    plain_right: bool  # whether plain generate() answers as the document says
    blend_right: bool

    @property
    def speed_up(self) -> float:
        """Plain time to first token over that with moved chunks."""
        return self.plain_ttft_ms / self.blend_ttft_ms

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        return {**asdict(self), "speed_up": self.speed_up}


class Demo:
    """The workloads on one model.

    Args:
        model: In eval mode, on its device.
        tokenizer: Its tokenizer.
        max_new_tokens: Tokens per answer at most.
        repeats: Repetitions of each workload that medians are taken over.
        seed: Of the documents.
        progress: Called after each generate().
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_new_tokens: int = 24,
        repeats: int = 3,
        seed: int = 0,
        progress: Progress = lambda: None,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.max_new_tokens, self.repeats, self.seed = max_new_tokens, repeats, seed
        self._progress = progress
        self._chunker = ContentChunker.for_tokenizer(tokenizer)  # cuts documents alike wherever they stand

    @property
    def num_calls(self) -> int:
        """How often `progress` will be called."""
        return self.repeats * (2 * len(CHAT_SHAPE) + 2 * NUM_QUESTIONS + 3 * NUM_QUESTIONS)

    def warm_up(self) -> None:
        """One short untimed call, so that the first timed one does not pay for the start of the process."""
        timed_generate(self.model, encode(self.tokenizer, [{"role": "user", "content": "Hello."}]), 2)

    def chat(self) -> list[Row]:
        """An 8-turn chat whose prompts grow as in `CHAT_SHAPE`; the model's answers go back in as text."""
        return medians([self._chat_once() for _ in range(self.repeats)])

    def questions(self) -> list[Row]:
        """Several questions about one long document, each in a prompt of its own."""
        return medians([self._questions_once() for _ in range(self.repeats)])

    def shuffled(self) -> list[ShuffledRow]:
        """Questions about the same documents, which each prompt holds in another order."""
        return medians([self._shuffled_once() for _ in range(self.repeats)])

    def _chat_once(self) -> list[Row]:
        cache = self._fresh_cache()
        messages: list[Message] = []
        documents: list[Document] = []
        rows: list[Row] = []
        for turn, target in enumerate(CHAT_SHAPE):
            question, document = chat_turn(self.tokenizer, messages, documents, target, seed=1000 * self.seed + turn)
            documents.append(document)
            messages.append({"role": "user", "content": question.text})
            row = self._both(str(turn + 1), messages, question.fact.question, question.fact.answer, cache)
            messages.append({"role": "assistant", "content": row.answer})
            rows.append(row)
        return rows

    def _questions_once(self) -> list[Row]:
        cache = self._fresh_cache()
        questions = long_document(self.tokenizer, LONG_DOCUMENT_TOKENS, NUM_QUESTIONS, self.seed)
        return [
            self._both(str(n + 1), [{"role": "user", "content": q.text}], q.fact.question, q.fact.answer, cache)
            for n, q in enumerate(questions)
        ]

    def _shuffled_once(self) -> list[ShuffledRow]:
        exact, blend = self._fresh_cache(), self._fresh_cache(BLEND, self._chunker)
        questions = shuffled_documents(self.tokenizer, LONG_DOCUMENT_TOKENS, NUM_QUESTIONS, self.seed)
        return [self._all_three(str(n + 1), question, exact, blend) for n, question in enumerate(questions)]

    def _all_three(
        self, label: str, question: Question, exact: ChunkReuseCache, blend: ChunkReuseCache
    ) -> ShuffledRow:
        ids = encode(self.tokenizer, [{"role": "user", "content": question.text}])
        plain, same, moved = self._timed(ids), self._timed(ids, exact), self._timed(ids, blend)
        plain_answer, blend_answer = self._text(plain), self._text(moved)
        report = blend.report
        return ShuffledRow(
            label=label,
            prompt_tokens=report.prompt_tokens,
            plain_ttft_ms=plain.ttft_ms,
            exact_ttft_ms=same.ttft_ms,
            blend_ttft_ms=moved.ttft_ms,
            exact_reused_tokens=exact.report.reused_tokens,
            blend_reused_tokens=report.reused_tokens,
            blend_moved_tokens=report.moved_tokens,
            blend_recomputed_tokens=report.recomputed_tokens,
            blend_forwarded_tokens=report.forwarded_tokens,
            exact_same_tokens=plain.ids == same.ids,
            blend_same_tokens=plain.ids == moved.ids,
            question=question.fact.question,
            plain_answer=plain_answer,
            blend_answer=blend_answer,
            plain_right=plain_answer == question.fact.answer,
            blend_right=blend_answer == question.fact.answer,
        )

    def _both(
        self, label: str, messages: Sequence[Message], question: str, expected: str, cache: ChunkReuseCache
    ) -> Row:
        ids = encode(self.tokenizer, messages)
        plain, reuse = self._timed(ids), self._timed(ids, cache)
        report, answer = cache.report, self._text(plain)
        return Row(
            label=label,
            prompt_tokens=report.prompt_tokens,
            plain_ttft_ms=plain.ttft_ms,
            reuse_ttft_ms=reuse.ttft_ms,
            plain_total_ms=plain.total_ms,
            reuse_total_ms=reuse.total_ms,
            reused_tokens=report.reused_tokens,
            forwarded_tokens=report.forwarded_tokens,
            same_tokens=plain.ids == reuse.ids,
            question=question,
            answer=answer,
            right=answer == expected,
        )

    def _timed(self, ids: Sequence[int], cache: ChunkReuseCache | None = None) -> Call:
        kwargs: dict[str, Any] = {} if cache is None else {cache_argument(self.model): cache}
        call = timed_generate(self.model, ids, self.max_new_tokens, **kwargs)
        self._progress()
        return call

    def _text(self, call: Call) -> str:
        return str(self.tokenizer.decode(call.ids, skip_special_tokens=True)).strip()

    def _fresh_cache(self, policy: ReusePolicy | None = None, chunker: Chunker | None = None) -> ChunkReuseCache:
        return ChunkReuseCache(self.model, ChunkStore(self.model, chunker=chunker, max_bytes=2**30), policy)
