"""Runs a scenario with and without reuse, and says what came of it."""

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import set_seed

from kvboost_hf import attach
from recipes import real_model
from tests.libraries.scenario import Answers, Scenario, Session
from tests.libraries.watch import Forward, Watch, ideal, tokens_given

_NOT_WORTH_IT = 3  # so few tokens of a prompt may be computed where they could be copied


@dataclass(frozen=True, slots=True)
class Outcome:
    """Tokens that went through the model, all calls of a scenario together.

    Args:
        name: The name of the scenario.
        package: The library.
        path: The way through the library.
        version: The version of the library.
        plain: Tokens without reuse.
        ideal: As few as could be.
        ours: Tokens with reuse.
        slack: How many more than those that could be these may be.
        equal: Whether the answers are the same.
        why: What kept the library from reusing, as caches and reports say.
        failure: What was raised, and in which of the two runs, or "".
        known: What the scenario says of it.
        notes: What the scenario says of each run.
        answers: Those without reuse, and those with, where they differ.
    """

    name: str
    package: str
    path: str
    version: str
    plain: int
    ideal: int
    ours: int
    slack: int
    equal: bool
    why: str
    failure: str
    known: str
    notes: tuple[str, str]
    answers: tuple[Answers, Answers] | None

    @property
    def as_ideal(self) -> bool:
        """Whether no token was computed twice."""
        return self.ours <= self.ideal + self.slack


def outcome_of(what: Scenario) -> Outcome:
    """Run a scenario twice, each time over a model of its own."""
    plain = _run(what, lambda model: model)
    ours = _run(what, attach)
    equal = plain.answers == ours.answers and plain.raised.partition(":")[0] == ours.raised.partition(":")[0]
    reasons = dict.fromkeys(forward.why for forward in ours.forwards if forward.why)
    return Outcome(
        what.name,
        what.package,
        what.path,
        what.version or "",
        plain.tokens,
        ideal(plain.forwards) + plain.unseen,
        ours.tokens,
        what.probe + _NOT_WORTH_IT * sum(forward.begins for forward in plain.forwards),
        equal,
        "; ".join(reasons),
        _failure(plain.raised, ours.raised),
        what.known,
        ("; ".join(plain.notes), "; ".join(ours.notes)),
        None if equal else (plain.answers, ours.answers),
    )


def _failure(plain: str, ours: str) -> str:
    if plain == ours:
        return f"It fails without this library, too: {plain}" if plain else ""
    failures = {"without reuse": plain, "with reuse": ours}
    return "; ".join(f"{when}, {raised}" for when, raised in failures.items() if raised)


@dataclass(frozen=True, slots=True)
class _Run:
    answers: Answers
    tokens: int
    unseen: int
    forwards: list[Forward]
    notes: list[str]
    raised: str


def _run(what: Scenario, attaching: Callable[[Any], Any]) -> _Run:
    gc.collect()
    torch.compiler.reset()
    set_seed(0)
    model, tokenizer = real_model.load()
    watch = Watch(model)
    session = Session(model, tokenizer, attaching, watch)
    answers: Answers = []
    raised = ""
    with watch.counting():
        try:
            answers = what.calls(session)
        except Exception as error:  # whatever a library comes up with
            logging.getLogger(__name__).info("%s", what.name, exc_info=True)
            raised = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    compiled = what.counts == "forward"
    tokens = tokens_given(watch.forwards) if compiled else watch.embedded
    for forward in watch.forwards:
        logging.getLogger(__name__).debug("%s", forward.line())
    return _Run(answers, tokens, 0 if compiled else watch.unseen, watch.forwards, session.notes, raised)
