"""Runs each workload with each arm and peer, and records the commit, hardware, versions and command.

All arms get the same prompts in the same order. Within a prompt they take turns, and each prompt begins with another
arm. A round begins with empty caches and stores, after a few short prompts that are not counted.
"""

import platform
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import active_children, get_context
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol, TypeVar

import torch
import transformers
from transformers.utils.logging import disable_progress_bar

from kvboost_hf import __version__
from kvboost_hf.bench.arms import PLAIN, Arm
from kvboost_hf.bench.models import ModelOrigin, Models
from kvboost_hf.bench.prompts import AskedPrompt, Workload
from kvboost_hf.bench.served import Served, Server, ServerTurns, reason
from kvboost_hf.verify.measure import divergences, first_difference

AnswersDone = Callable[[str, int, int], None]  # what is done, answers so far, and all
_WARM_UP_TOKENS = 300  # at the end of a prompt


class Contender(Protocol):
    """An `Arm`, or a peer."""

    @property
    def name(self) -> str:
        """The name on the command line."""
        ...

    def refusal(self, models: Models, tokenizer: Any) -> str | None:
        """Why it cannot serve this model here, or None."""
        ...

    def open(self, models: Models, tokenizer: Any, folder: Path | None) -> Server:
        """A server that keeps nothing yet but what is in the folder."""
        ...


T = TypeVar("T", bound=Contender)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRow:
    """One prompt of one round, served by one arm."""

    workload: str  # whose prompt it is
    arm: str  # who served it
    round: int  # which repetition of the workload, counted from 0
    prompt: int  # which prompt of the workload, counted from 0
    prompt_tokens: int  # the number of tokens of the prompt
    question: str  # what the prompt asks, as a person reads it
    answer: str  # the text of the answer
    same: bool  # whether the answer's tokens are those of plain generate()
    # Whether the answer holds the value that was asked for; None where that is not known, and for random
    # weights.
    right: bool | None
    # Mean KL divergence, in nats, from the distributions of plain generate(), up to the first other token; None
    # for an arm that keeps no logits.
    kl: float | None
    served: Served  # what was measured, without logits


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The size of a run.

    Raises:
        ValueError: for a number out of range.
    """

    prompts: int = 6  # the number of prompts of each workload; 2 or more, and at most 8
    repeats: int = 2  # counted rounds of each workload
    max_new_tokens: int = 16  # length of an answer
    seed: int = 0  # the seed of documents and questions

    def __post_init__(self) -> None:
        for name, low, high in (("prompts", 2, 8), ("repeats", 1, 1000), ("max_new_tokens", 1, 1000)):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"`{name}` must be from {low} to {high}, got {value}.")


@dataclass(frozen=True, slots=True)
class Series:
    """One workload, and who serves it."""

    workload: Workload  # makes the prompts
    arms: Sequence[Arm]  # ways of this package; plain generate() is always run, first
    prompts: int | None = None  # the number of its prompts; None for that of the settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The results of a run."""

    rows: list[MeasuredRow]  # all that was measured
    refused: dict[str, str]  # arms and peers that did not run, and why
    failed: dict[str, str]  # arms, peers and workloads that did not get to their end, in which workload, and why
    dtype: torch.dtype  # the dtype of the model


def run(
    source: ModelOrigin,
    series: Sequence[Series],
    peers: Sequence[Contender],
    settings: Settings,
    progress: AnswersDone = lambda what, done, total: None,
    show: Callable[[Workload, list[MeasuredRow]], None] = lambda workload, rows: None,
) -> Result:
    """Run the workloads.

    Args:
        source: The model.
        series: What is asked, and of whom.
        peers: Ways of others. They keep nothing for other processes, and are left out where one is started.
        settings: How much.
        progress: Called when a step begins, and after each prompt.
        show: Called after each workload with its rows.
    """
    with tempfile.TemporaryDirectory() as folder:
        bench = _Bench(source, Path(folder), settings, progress)
        ours = {PLAIN.name: PLAIN} | {arm.name: arm for one in series for arm in one.arms}
        idle = all(one.workload.restarts for one in series)
        tried: list[Contender] = [*ours.values(), *(() if idle else peers)]
        refused: dict[str, str] = {}
        for contender in tried:
            bench.begin(f"trying {contender.name}")
            if (why := contender.refusal(bench.models, bench.tokenizer)) is not None:
                refused[contender.name] = why
        if idle:
            refused |= {peer.name: "it keeps nothing for another process" for peer in peers}
        others = [peer for peer in peers if peer.name not in refused]
        named = [list(dict.fromkeys((PLAIN.name, *(arm.name for arm in one.arms)))) for one in series]
        chosen = [[ours[name] for name in names if name not in refused] for names in named]
        for one, arms in zip(series, chosen, strict=True):
            bench.expect(one, len(arms) + (0 if one.workload.restarts else len(others)))
        rows: list[MeasuredRow] = []
        for one, arms in zip(series, chosen, strict=True):
            found = bench.restarted(one, arms) if one.workload.restarts else bench.served(one, [*arms, *others])
            show(one.workload, found)
            rows += found
        return Result(rows=rows, refused=refused, failed=bench.failed, dtype=bench.models.get().model.dtype)


class _Bench:
    def __init__(self, source: ModelOrigin, folder: Path, settings: Settings, progress: AnswersDone) -> None:
        self.models, self.tokenizer = Models(source, folder / "layers"), source.tokenizer()
        self._folder, self._settings, self._progress = folder, settings, progress
        self._done = self._total = 0
        self._what = ""
        self.failed: dict[str, str] = {}

    def expect(self, series: Series, servers: int) -> None:
        """Add the answers of so many servers to those that `progress` counts."""
        self._total += servers * self._prompts(series) * self._settings.repeats

    def begin(self, what: str) -> None:
        """Tell `progress` what is done from now on."""
        self._what = what
        self._advance(0)

    def _prompts(self, series: Series) -> int:
        return self._settings.prompts if series.prompts is None else series.prompts

    def served(self, series: Series, contenders: Sequence[Contender]) -> list[MeasuredRow]:
        """A workload in this process."""
        workload, rows = series.workload, list[MeasuredRow]()
        for number in range(-1, self._settings.repeats):
            self.begin(f"{workload.name}, warming up" if number < 0 else self._round_name(workload, number))
            with ServerTurns(PLAIN.name) as turns:
                for one in self._left(contenders):
                    turns.open(one.name, partial(one.open, self.models, self.tokenizer, None))
                if number < 0:
                    warm_up(turns, next(workload.ask(self.tokenizer, 1, self._settings.seed)).ids)
                else:
                    rows += self._round(series, number, turns)
            self._note(workload, turns.failed)
        return [row for row in rows if row.arm not in self.failed]

    def _round_name(self, workload: Workload, number: int) -> str:
        repeats = self._settings.repeats
        return workload.name if repeats == 1 else f"{workload.name}, round {number + 1} of {repeats}"

    def _left(self, contenders: Sequence[T]) -> list[T]:
        return [one for one in contenders if one.name not in self.failed]

    def _note(self, workload: Workload, failed: dict[str, str]) -> None:
        self.failed |= {name: f"in {workload.name}, {why}" for name, why in failed.items()}

    def _round(self, series: Series, number: int, turns: ServerTurns) -> list[MeasuredRow]:
        workload, rows = series.workload, list[MeasuredRow]()

        def answer(index: int, prompt: AskedPrompt) -> str:
            answers = turns.answer(prompt.ids, self._settings.max_new_tokens, index)
            rows.extend(self._rows(workload, number, index, prompt, answers))
            self._advance(len(turns))
            return self._text(answers[PLAIN.name])

        workload.play(self.tokenizer, self._prompts(series), self._settings.seed, answer)
        return rows

    def restarted(self, series: Series, arms: Sequence[Arm]) -> list[MeasuredRow]:
        """A workload whose later half a new process serves, from what the first half has left on disk."""
        workload, settings, count = series.workload, self._settings, self._prompts(series)
        prompts = list(workload.ask(self.tokenizer, count, settings.seed))
        half = count // 2
        rows: list[MeasuredRow] = []
        for number in range(settings.repeats):
            self.begin(self._round_name(workload, number))
            folders = {arm.name: self._folder / f"{number}-{arm.name}" for arm in arms}
            for arm in self._left(arms):
                with ServerTurns(PLAIN.name) as turns:
                    turns.open(arm.name, partial(arm.open, self.models, self.tokenizer, folders[arm.name]))
                    for prompt in prompts[:half]:
                        turns.answer(prompt.ids, settings.max_new_tokens, 0)
                self._note(workload, turns.failed)
                self._advance(half)
            self.begin(f"{self._round_name(workload, number)}, in a new process")
            task = _Later(
                models=Models(self.models.source, self.models.folder),
                arms=self._left(arms),
                folders=folders,
                prompts=[prompt.ids for prompt in prompts[half:]],
                max_new_tokens=settings.max_new_tokens,
                threads=torch.get_num_threads(),
            )
            try:
                found, failed = _in_new_process(task)
            except BrokenExecutor as error:  # for want of memory, say: what else was measured is still good
                self.failed[workload.name] = reason(error)
                return []
            self._note(workload, failed)
            for index, answers in enumerate(found, start=half):
                rows += self._rows(workload, number, index, prompts[index], answers)
            self._advance(len(task.arms) * (count - half))
        return [row for row in rows if row.arm not in self.failed]

    def _rows(
        self, workload: Workload, number: int, index: int, prompt: AskedPrompt, answers: dict[str, Served]
    ) -> list[MeasuredRow]:
        plain = answers[PLAIN.name]
        answers_matter = self.models.source.random is None  # random weights give no right ones
        return [
            MeasuredRow(
                workload=workload.name,
                arm=name,
                round=number,
                prompt=index,
                prompt_tokens=len(prompt.ids),
                question=prompt.question,
                answer=self._text(found),
                same=found.ids == plain.ids,
                right=prompt.value in self._text(found) if prompt.value is not None and answers_matter else None,
                kl=_divergence(plain, found),
                served=replace(found, logits=None),
            )
            for name, found in answers.items()
        ]

    def _text(self, found: Served) -> str:
        return str(self.tokenizer.decode(found.ids, skip_special_tokens=True)).strip()

    def _advance(self, answers: int) -> None:
        self._done += answers
        self._progress(self._what, self._done, self._total)


def _divergence(plain: Served, found: Served) -> float | None:
    """The `kl` of a row."""
    if plain.logits is None or found.logits is None:
        return None
    steps = first_difference(plain.ids, found.ids)
    stop = min(len(plain.ids), len(found.ids)) if steps is None else steps + 1
    return fmean(divergences(plain.logits[:stop], found.logits[:stop]))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Later:
    """The later half of a workload, which a new process answers from the folders of the first half."""

    models: Models
    arms: Sequence[Arm]
    folders: dict[str, Path]
    prompts: Sequence[list[int]]
    max_new_tokens: int
    threads: int

    def run(self) -> tuple[list[dict[str, Served]], dict[str, str]]:
        """Returns the answers to each prompt by arm, and the reasons of the arms that have failed."""
        torch.set_num_threads(self.threads)
        disable_progress_bar()  # type: ignore[no-untyped-call]
        tokenizer = self.models.source.tokenizer()
        with ServerTurns(PLAIN.name) as turns:
            for arm in self.arms:
                turns.open(arm.name, partial(arm.open, self.models, tokenizer, self.folders[arm.name]))
            warm_up(turns, self.prompts[0])
            return [turns.answer(ids, self.max_new_tokens, at) for at, ids in enumerate(self.prompts)], turns.failed


def warm_up(turns: ServerTurns, ids: Sequence[int]) -> None:
    """Let all servers answer the end of a prompt three times.

    PyTorch starts; then, when there is something to reuse, and something to move, the model is probed.
    """
    for tokens in (_WARM_UP_TOKENS, _WARM_UP_TOKENS, _WARM_UP_TOKENS - 16):
        turns.answer(ids[-tokens:], 2, 0)


def _in_new_process(task: _Later) -> tuple[list[dict[str, Served]], dict[str, str]]:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        try:
            return pool.submit(task.run).result()
        except BaseException:  # who interrupts does not want to wait for its end
            for child in active_children():
                child.kill()
            raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The conditions of a run."""

    command: str  # that repeats it
    commit: str | None  # the commit of the checkout, with a plus where files differ from it; None outside of one
    hardware: str  # the GPU, or the processor
    threads: int  # the number of PyTorch's threads
    versions: dict[str, str]  # the versions of this package, PyTorch, transformers and Python

    def __str__(self) -> str:
        told = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        commit = "not in a checkout" if self.commit is None else f"commit {self.commit}"
        return f"{self.hardware}, threads: {self.threads}; {told}; {commit}; {self.command}"


def provenance(command: str, device: str) -> Provenance:
    """The conditions of a run in this process.

    Args:
        command: That was given.
        device: Where the model runs.
    """
    place = torch.device(device)
    return Provenance(
        command=command,
        commit=_commit(),
        hardware=torch.cuda.get_device_name(place) if place.type == "cuda" else _processor(),
        threads=torch.get_num_threads(),
        versions={
            "kvboost_hf": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "Python": platform.python_version(),
        },
    )


def _processor() -> str:
    told = Path("/proc/cpuinfo")
    lines = told.read_text(encoding="utf-8").splitlines() if told.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else f"{platform.machine()} CPU"


def _commit() -> str | None:
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():  # installed: whatever repository holds it is not ours
        return None
    try:
        head = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=root, text=True).strip()
        changed = subprocess.check_output(["git", "status", "--porcelain", "-uno"], cwd=root, text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed else "")
