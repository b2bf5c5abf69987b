"""Runs `kvboost-hf bench`: measures, prints tables, and writes JSON and HTML."""

import argparse
import shlex
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from kvboost_hf.bench.arms import ARMS, Arm
from kvboost_hf.bench.environments import peers_at_hand
from kvboost_hf.bench.models import ModelOrigin
from kvboost_hf.bench.peers import PEERS
from kvboost_hf.bench.prompts import Workload
from kvboost_hf.bench.run import MeasuredRow, Series, Settings, provenance, run
from kvboost_hf.bench.show import as_json, note, page, remarks, summaries, table
from kvboost_hf.bench.workloads import workloads_of
from kvboost_hf.choices import CHOSEN_BENCH_ARMS, CHOSEN_PEERS
from kvboost_hf.offload.checkpoint import without_bars
from kvboost_hf.outputs import STANDARD_OUTPUT, Progress, duration, say, write, written


@dataclass(frozen=True, slots=True)
class _Plan:
    """Holds all that is measured."""

    source: ModelOrigin
    settings: Settings
    arms: list[Arm]
    peers: list[str]
    workloads: list[Workload]

    @classmethod
    def of(cls, options: argparse.Namespace) -> "_Plan":
        """Read it from the command line."""
        if options.install_peers and options.peers is None:
            raise ValueError("`--install-peers` is for peers: pass `--peers`, with their names or for all of them.")
        if options.json == options.html == STANDARD_OUTPUT:
            raise ValueError("`--json` and `--html` must not both be '-': name a file for one of them.")
        source = ModelOrigin(
            name=options.model, random=options.random, draft=options.draft, device=options.device, dtype=options.dtype
        )
        settings = Settings(
            prompts=options.prompts,
            repeats=options.repeats or (2 if options.model is None else 1),
            max_new_tokens=options.max_new_tokens,
            seed=options.seed,
        )
        named = options.arms is not None or options.peers is not None
        arms = dict.fromkeys(CHOSEN_BENCH_ARMS if options.arms is None else options.arms or ARMS)
        if options.draft is not None and not any(ARMS[name].drafts == "model" for name in arms):
            raise ValueError("`--draft` is for arms that draft with a model: pass `--arms plain draft`, say.")
        peers = dict.fromkeys(options.peers or (PEERS if options.peers == [] else () if named else CHOSEN_PEERS))
        known = workloads_of(source, options.max_new_tokens)
        for name in options.workloads or ():
            if name not in known:
                raise ValueError(f"`--workloads` must be of {', '.join(known)} for this model, got {name}.")
        workloads = [known[name] for name in dict.fromkeys(options.workloads or known)]
        return cls(source, settings, [ARMS[name] for name in arms], list(peers), workloads)


def bench(options: argparse.Namespace, last: str) -> int:
    """Measure and show.

    Args:
        options: The options of the command line; `given` are its arguments as they were given.
        last: Lines to print in the end.

    Returns:
        The exit status: 1 if a lossless arm gave other tokens in float32, or something failed.

    Raises:
        ValueError: for options that do not go together.
    """
    plan = _Plan.of(options)
    source = plan.source
    where = provenance(f"kvboost-hf {shlex.join(options.given)}", options.device)
    console = Console(stderr=STANDARD_OUTPUT in (options.json, options.html))
    console.print(f"[bold]{source.shown}[/bold]; {where}", highlight=False, soft_wrap=True)
    with ExitStack() as stack:
        stack.enter_context(_termination_is_an_exit())
        stack.enter_context(without_bars())
        shown = stack.enter_context(Progress("getting what peers need" if options.install_peers else "starting"))

        def show(workload: Workload, rows: list[MeasuredRow]) -> None:
            if rows:
                with shown.aside():
                    console.print(table(workload, summaries(rows)))

        peers = stack.enter_context(peers_at_hand(plan.peers, source, install=options.install_peers))
        series = [Series(workload, plan.arms) for workload in plan.workloads]
        result = run(source, series, peers, plan.settings, shown.show, show)
    found = summaries(result.rows)
    for remark in remarks(result):
        say(console, remark)
    say(console, note(found))
    arms, asked = dict.fromkeys(row.arm for row in found), dict.fromkeys(row.workload for row in found)
    told = f"Measured {', '.join(arms)} on {', '.join(asked)}" if found else "Measured nothing"
    say(console, f"{told} in {duration(shown.seconds)}.")
    if options.json is not None:
        write(options.json, as_json(source.shown, where, plan.settings, result, found))
    if options.html is not None:
        with Progress("drawing"):
            text = page(source.shown, where, plan.settings, plan.workloads, result, found)
        write(options.html, text)
    for line in written(options.json, options.html):
        say(console, line)
    say(console, last, end="")
    # As in the demo: in float32 what is lossless must give the same tokens, and all else is shown, not judged.
    lossless = {arm.name for arm in ARMS.values() if arm.lossless}
    same = all(row.same == row.prompts for row in found if row.arm in lossless)
    return 0 if not result.failed and (same or result.dtype != torch.float32) else 1


@contextmanager
def _termination_is_an_exit() -> Iterator[None]:
    """Turn signals that end the process into an exception, so that child processes and folders are removed."""

    def leave(number: int, _frame: Any) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # which alone is told of signals
        yield
        return
    numbers = {signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}  # not on Windows
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
