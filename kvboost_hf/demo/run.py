"""Running the demo's workloads and timing them.

The time to the first token is that from the call of generate() to the token's arrival on the host (a streamer takes it
there), planning, copying and storing included. Both arms run the same prompts in turn, turn by turn; medians are taken
over repetitions of a whole workload, each starting with an empty cache and store.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from kvboost_hf.assets.world import Document
from kvboost_hf.cache.reuse import ChunkReuseCache
from kvboost_hf.cache.store import ChunkStore
from kvboost_hf.compat import input_device
from kvboost_hf.demo.workloads import (
    CHAT_SHAPE,
    LONG_DOCUMENT_TOKENS,
    NUM_QUESTIONS,
    Message,
    chat_turn,
    encode,
    long_document,
)

Progress = Callable[[], None]  # called after each generate()


@dataclass(frozen=True, slots=True)
class Call:
    """One generate() call."""

    ids: list[int]  # of the answer
    ttft_ms: float
    total_ms: float


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


class _FirstToken(BaseStreamer):
    """Notes when the first new token is on the host."""

    def __init__(self) -> None:
        self.seen_prompt = False
        self.at: float | None = None

    def put(self, value: torch.Tensor) -> None:
        if self.seen_prompt and self.at is None:
            self.at = time.perf_counter()
        self.seen_prompt = True

    def end(self) -> None:
        pass


def timed_generate(model: PreTrainedModel, ids: Sequence[int], max_new_tokens: int, **kwargs: Any) -> Call:
    """Greedy generate() under a clock that starts at the call."""
    prompt = torch.tensor([list(ids)], device=input_device(model))
    streamer = _FirstToken()
    generate: Any = model.generate
    start = time.perf_counter()
    out = generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        streamer=streamer,
        **kwargs,
    )
    answer = out[0, len(ids) :].tolist()
    end = time.perf_counter()
    first = streamer.at if streamer.at is not None else end
    return Call(answer, 1000 * (first - start), 1000 * (end - start))


class Demo:
    """Both workloads on one model.

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

    @property
    def num_calls(self) -> int:
        """How often `progress` will be called."""
        return 2 * self.repeats * (len(CHAT_SHAPE) + NUM_QUESTIONS)

    def warm_up(self) -> None:
        """One short untimed call, so that the first timed one does not pay for the start of the process."""
        timed_generate(self.model, encode(self.tokenizer, [{"role": "user", "content": "Hello."}]), 2)

    def chat(self) -> list[Row]:
        """An 8-turn chat whose prompts grow as in `CHAT_SHAPE`; the model's answers go back in as text."""
        return self._median([self._chat_once() for _ in range(self.repeats)])

    def questions(self) -> list[Row]:
        """Several questions about one long document, each in a prompt of its own."""
        return self._median([self._questions_once() for _ in range(self.repeats)])

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

    def _both(
        self, label: str, messages: Sequence[Message], question: str, expected: str, cache: ChunkReuseCache
    ) -> Row:
        ids = encode(self.tokenizer, messages)
        plain = timed_generate(self.model, ids, self.max_new_tokens)
        self._progress()
        reuse = timed_generate(self.model, ids, self.max_new_tokens, past_key_values=cache)
        self._progress()
        report = cache.report
        answer = str(self.tokenizer.decode(plain.ids, skip_special_tokens=True)).strip()
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

    def _fresh_cache(self) -> ChunkReuseCache:
        return ChunkReuseCache(self.model, ChunkStore(self.model, max_bytes=2**30))

    @staticmethod
    def _median(runs: Sequence[Sequence[Row]]) -> list[Row]:
        rows: list[Row] = []
        for same_prompt in zip(*runs, strict=True):
            first = same_prompt[0]

            def median(field: str, rows: Sequence[Row] = same_prompt) -> float:
                return float(statistics.median(getattr(row, field) for row in rows))

            rows.append(
                Row(
                    label=first.label,
                    prompt_tokens=first.prompt_tokens,
                    plain_ttft_ms=median("plain_ttft_ms"),
                    reuse_ttft_ms=median("reuse_ttft_ms"),
                    plain_total_ms=median("plain_total_ms"),
                    reuse_total_ms=median("reuse_total_ms"),
                    reused_tokens=first.reused_tokens,
                    forwarded_tokens=first.forwarded_tokens,
                    same_tokens=all(row.same_tokens for row in same_prompt),
                    question=first.question,
                    answer=first.answer,
                    right=all(row.right for row in same_prompt),
                )
            )
        return rows
