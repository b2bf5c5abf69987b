"""The demo: plain generate() beside generate() with a ChunkReuseCache, prompt by prompt."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvboost_hf.bench.arms import ARMS, FIRST_K, PLAIN, Arm
from kvboost_hf.bench.models import ModelOrigin
from kvboost_hf.bench.prompts import CHAT, DOCUMENT, SHUFFLED, Workload, own_prompts, workloads_for
from kvboost_hf.bench.run import AnswersDone, MeasuredRow, Series, Settings, run
from kvboost_hf.config import ReusePolicy


@dataclass(frozen=True, slots=True)
class Measured:
    """One workload, by all its arms."""

    workload: Workload  # which one
    # A row for each prompt, by arm: `"plain"`, `"exact"` and, where texts move, `"blend"`. Times are medians
    # over rounds, answers are the same if they always were, and counts are those of the first round.
    arms: dict[str, list[MeasuredRow]]

    @classmethod
    def of(cls, workload: Workload, rows: Sequence[MeasuredRow]) -> "Measured":
        """A workload from all its rows."""
        grouped: dict[str, dict[int, list[MeasuredRow]]] = {}
        for row in rows:
            grouped.setdefault(row.arm, {}).setdefault(row.prompt, []).append(row)
        return cls(workload, {arm: [_middle(each) for each in by.values()] for arm, by in grouped.items()})

    @property
    def prompts(self) -> list[MeasuredRow]:
        """A row for each prompt."""
        return self.arms[PLAIN.name]

    @property
    def best(self) -> str:
        """The arm that the workload is about."""
        return list(self.arms)[-1]

    def speed_up(self, at: int) -> float:
        """Plain time to first token over that of the best arm, for one prompt."""
        return self.prompts[at].served.ttft_ms / self.arms[self.best][at].served.ttft_ms

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        rows = [
            {
                "prompt_tokens": prompt.prompt_tokens,
                "question": prompt.question,
                "speed_up": self.speed_up(at),
                "arms": {name: _figures(found[at]) for name, found in self.arms.items()},
            }
            for at, prompt in enumerate(self.prompts)
        ]
        return {"name": self.workload.name, "about": self.workload.about, "rows": rows}


def _middle(rows: Sequence[MeasuredRow]) -> MeasuredRow:
    """A row for all rounds of a prompt."""
    times = {name: statistics.median(getattr(row.served, name) for row in rows) for name in ("ttft_ms", "total_ms")}
    return replace(rows[0], same=all(row.same for row in rows), served=replace(rows[0].served, **times))


def _figures(row: MeasuredRow) -> dict[str, Any]:
    found = row.served
    return {
        "ttft_ms": found.ttft_ms,
        "total_ms": found.total_ms,
        "reused_tokens": found.reused or 0,
        "moved_tokens": found.moved or 0,
        "recomputed_tokens": found.recomputed or 0,
        "forwarded_tokens": found.prefilled,
        "same_tokens": row.same,
        "kl": row.kl,
        "answer": row.answer,
        "right": row.right,
    }


def demo(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    embedded: bool,
    prompts: Sequence[Any] | None = None,
    max_new_tokens: int = 24,
    repeats: int = 3,
    seed: int = 0,
    progress: AnswersDone = lambda what, done, total: None,
    show: Callable[[Measured], None] = lambda measured: None,
) -> list[Measured]:
    """Measure the workloads of the demo on one model.

    Args:
        model: In eval mode, on its device.
        tokenizer: The model's tokenizer.
        embedded: Whether the model is the embedded one, which gets its own text. Others get real text, and an agent's
            transcript.
        prompts: Prompts of one's own to measure in place of all else, as `own_prompts` takes them; None for the
            workloads of the demo.
        max_new_tokens: Tokens per answer at most.
        repeats: Rounds of each workload that medians are taken over.
        seed: The seed of the texts.
        progress: As `run` takes it.
        show: Called with each workload when it is done.

    Raises:
        ValueError: the context of the model is too short.
        RuntimeError: an arm failed.
    """
    found: list[Measured] = []

    def add(workload: Workload, rows: list[MeasuredRow]) -> None:
        found.append(Measured.of(workload, rows))
        show(found[-1])

    series = list(_series(model, embedded, prompts, max_new_tokens))
    settings = Settings(repeats=repeats, max_new_tokens=max_new_tokens, seed=seed)
    source = ModelOrigin(loaded=(model, tokenizer))
    if failed := run(source, series, (), settings, progress, add).failed:
        raise RuntimeError("; ".join(f"{name} failed {why}" for name, why in failed.items()))
    return found


def _series(
    model: PreTrainedModel, embedded: bool, prompts: Sequence[Any] | None, max_new_tokens: int
) -> Iterator[Series]:
    plain, exact = (replace(arm, keep_logits=True) for arm in (PLAIN, ARMS["exact"]))
    policy = FIRST_K if embedded else ReusePolicy(mode="blend")
    blend = Arm(name="blend", policy=policy, kept=True, keep_logits=True)
    if prompts is not None:
        yield Series(own_prompts(prompts), (plain, exact), len(prompts))
        return
    real = {} if embedded else workloads_for(model.config, max_new_tokens)
    yield Series(real.get("chat", CHAT), (plain, exact), 8)
    yield Series(real.get("document", DOCUMENT), (plain, exact), 6)
    if "agent" in real:
        yield Series(real["agent"], (plain, exact), 8)
    yield Series(real.get("shuffled", SHUFFLED), (plain, exact, blend), 6)
