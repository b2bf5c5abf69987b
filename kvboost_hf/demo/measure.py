"""Runs the workloads of the demo.

All arms run the same prompts in turn, prompt by prompt; medians are taken over repetitions of a whole workload, each
starting with empty caches and stores. The time to the first token is that from the call of generate() to the token's
arrival on the host (a streamer takes it there), planning, copying and storing included.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvboost_hf.cache.planning.chunks import Chunker, ContentChunker
from kvboost_hf.cache.reuse import ChunkReuseCache
from kvboost_hf.cache.store.chunk_store import ChunkStore
from kvboost_hf.compat import cache_argument
from kvboost_hf.config import ReusePolicy
from kvboost_hf.demo.workloads import CHAT, DOCUMENT, SHUFFLED, AskedPrompt, Workload, own_prompts, workloads_for
from kvboost_hf.verify.measure import Call, compare, report_of, timed_generate

# For the embedded model: the default repair may compute two layers in full, which are half of those that it has.
FIRST_K = ReusePolicy(mode="blend", repair="first_k", recompute_ratio=0.2, progressive=False)
_WARM_UP_TOKENS = 64
CallsDone = Callable[[int, int], None]  # generate() calls done, and to do
RowT = TypeVar("RowT", bound=Any)  # a dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The measurements of one prompt in one arm.

    Args:
        ttft_ms: From the call to the first token on the host.
        total_ms: From the call to its return.
        reused_tokens: Tokens of the prompt that were reused.
        moved_tokens: Those of them that were used at another position, or behind another text.
        recomputed_tokens: Moved tokens of which a part was computed again.
        forwarded_tokens: Tokens of the prompt that were computed, at least in part.
        same_tokens: Whether the answer is that of plain generate().
        kl: Mean KL divergence, in nats, from the distributions of plain generate(), up to the first other token.
        answer: The text of the answer.
        right: Whether the answer is right; None where that is unknown.
    """

    ttft_ms: float
    total_ms: float
    reused_tokens: int
    moved_tokens: int
    recomputed_tokens: int
    forwarded_tokens: int
    same_tokens: bool
    kl: float
    answer: str
    right: bool | None


@dataclass(frozen=True, slots=True)
class Measured:
    """One workload, by all its arms.

    Args:
        workload: Which one.
        prompts: The prompts of the workload.
        arms: Figures for each prompt by arm: `"plain"`, `"exact"` and, where texts move, `"blend"`.
    """

    workload: Workload
    prompts: list[AskedPrompt]
    arms: dict[str, list[Figures]]

    @property
    def best(self) -> str:
        """The arm that the workload is about."""
        return list(self.arms)[-1]

    def speed_up(self, at: int) -> float:
        """Plain time to first token over that of the best arm, for one prompt."""
        return self.arms["plain"][at].ttft_ms / self.arms[self.best][at].ttft_ms

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        rows = [
            {
                "prompt_tokens": len(prompt.ids),
                "question": prompt.question,
                "speed_up": self.speed_up(at),
                "arms": {name: asdict(figures[at]) for name, figures in self.arms.items()},
            }
            for at, prompt in enumerate(self.prompts)
        ]
        return {"name": self.workload.name, "about": self.workload.about, "rows": rows}


class Demo:
    """The workloads on one model.

    Args:
        model: In eval mode, on its device.
        tokenizer: The model's tokenizer.
        prompts: Prompts of one's own to measure in place of all else, as `own_prompts` takes them; None for the
            workloads of the demo.
        embedded: Whether the model is the embedded one, which gets its own text. Others get real text, and an agent's
            transcript.
        max_new_tokens: Tokens per answer at most.
        repeats: Repetitions of each workload that medians are taken over.
        seed: The seed of the texts.
        progress: Called after each generate().

    Raises:
        ValueError: the context of the model is too short.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        embedded: bool,
        prompts: Sequence[Any] | None = None,
        max_new_tokens: int = 24,
        repeats: int = 3,
        seed: int = 0,
        progress: CallsDone = lambda done, total: None,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.max_new_tokens, self.repeats, self.seed = max_new_tokens, repeats, seed
        real = {} if embedded or prompts is not None else workloads_for(model.config, max_new_tokens)
        self._blend = FIRST_K if embedded else ReusePolicy(mode="blend")
        self._plan = [
            (real.get("chat", CHAT), 8, ("plain", "exact")),
            (real.get("document", DOCUMENT), 6, ("plain", "exact")),
            *([(real["agent"], 8, ("plain", "exact"))] if "agent" in real else []),
            (real.get("shuffled", SHUFFLED), 6, ("plain", "exact", "blend")),
        ]
        if prompts is not None:
            self._plan = [(own_prompts(prompts), len(prompts), ("plain", "exact"))]
        self._progress, self._done = progress, 0
        self._chunker = ContentChunker.for_tokenizer(tokenizer)  # cuts documents alike wherever they stand

    def run(self, show: Callable[[Measured], None] = lambda measured: None) -> list[Measured]:
        """Measure all workloads; `show` gets each when it is done."""
        self._warm_up()
        found: list[Measured] = []
        for workload, count, arms in self._plan:
            runs = [self._once(workload, count, arms) for _ in range(self.repeats)]
            middle = {name: medians([run.arms[name] for run in runs]) for name in arms}
            found.append(Measured(workload, runs[0].prompts, middle))
            show(found[-1])
        return found

    def _warm_up(self) -> None:
        """Short untimed calls: the first timed one shall not pay for the start of the process, nor for probes."""
        workload, _, _ = self._plan[0]
        ids = next(workload.ask(self.tokenizer, 1, self.seed)).ids[-2 * _WARM_UP_TOKENS :]
        kwargs: dict[str, Any] = {cache_argument(self.model): self._fresh_cache("exact")}
        for prompt in (ids, [*ids, ids[0]]):
            timed_generate(self.model, prompt, 2, **kwargs)

    def _once(self, workload: Workload, count: int, arms: tuple[str, ...]) -> Measured:
        caches = {name: None if name == "plain" else self._fresh_cache(name) for name in arms}
        found: dict[str, list[Figures]] = {name: [] for name in arms}
        prompts: list[AskedPrompt] = []

        def answer(index: int, prompt: AskedPrompt) -> str:
            plain = self._answer(prompt, None)
            for name, cache in caches.items():
                call = plain if cache is None else self._answer(prompt, cache)
                found[name].append(self._figures(prompt, plain, call, cache))
            prompts.append(prompt)
            return found["plain"][-1].answer

        workload.play(self.tokenizer, count, self.seed, answer)
        return Measured(workload, prompts, found)

    def _answer(self, prompt: AskedPrompt, cache: ChunkReuseCache | None) -> Call:
        kwargs: dict[str, Any] = {} if cache is None else {cache_argument(self.model): cache}
        call = timed_generate(self.model, prompt.ids, self.max_new_tokens, keep_logits=True, **kwargs)
        self._done += 1
        self._progress(self._done, self.repeats * sum(count * len(arms) for _, count, arms in self._plan))
        return call

    def _figures(self, prompt: AskedPrompt, plain: Call, call: Call, cache: ChunkReuseCache | None) -> Figures:
        answer = str(self.tokenizer.decode(call.ids, skip_special_tokens=True)).strip()
        told = compare(0, plain, call, report_of(cache, prompt.ids))
        return Figures(
            ttft_ms=call.ttft_ms,
            total_ms=call.total_ms,
            reused_tokens=told.reused_tokens,
            moved_tokens=told.moved_tokens,
            recomputed_tokens=told.recomputed_tokens,
            forwarded_tokens=told.forwarded_tokens,
            same_tokens=call.ids == plain.ids,
            kl=sum(told.kl) / len(told.kl),
            answer=answer,
            right=None if prompt.answer is None else answer == prompt.answer,
        )

    def _fresh_cache(self, arm: str) -> ChunkReuseCache:
        policy: ReusePolicy | None = None
        chunker: Chunker | None = None
        if arm == "blend":
            policy, chunker = self._blend, self._chunker
        return ChunkReuseCache(self.model, ChunkStore(self.model, chunker=chunker, max_bytes=2**30), policy)


def medians(runs: Sequence[Sequence[RowT]]) -> list[RowT]:
    """One row for each prompt from the rows of several runs.

    Fields in milliseconds become their median, what is true or false is true if it always was, and all else is that of
    the first run.
    """
    return [_median(rows) for rows in zip(*runs, strict=True)]


def _median(rows: Sequence[RowT]) -> RowT:
    found: dict[str, Any] = {}
    for field in fields(rows[0]):
        values = [getattr(row, field.name) for row in rows]
        if field.name.endswith("_ms"):
            found[field.name] = float(statistics.median(values))
        elif isinstance(values[0], bool):
            found[field.name] = all(values)
    first: RowT = rows[0]
    return replace(first, **found)
