"""Measures methods of repair, and writes the page of all that was measured: `python -m benchmarks.leaderboard`.

It can be ended at any time, and run again: what the JSON holds is not measured again.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.leaderboard import page
from benchmarks.leaderboard.measure import Way, measure, primed, ways
from benchmarks.leaderboard.method import load_methods
from benchmarks.leaderboard.results import Cell, Results
from benchmarks.leaderboard.workloads import OF_OTHERS, OF_READER, WORKLOADS, linked
from kvboost_hf.bench.run import provenance
from kvboost_hf.cli.arguments import ModelFlags, positive
from kvboost_hf.cli.loading import load_model
from kvboost_hf.fields import add_flags

NEW, ASKED = 24, 2  # tokens of an answer that is not known; prompts of each seed


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing; returns 1 if a control did not fail."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.leaderboard", description=__doc__)
    add_flags(parser, ModelFlags)
    text = "of benchmarks/leaderboard/methods, or files that end in .py (default: all of that folder)"
    parser.add_argument("--methods", nargs="+", default=(), metavar="METHOD", help=text)
    text = f"{', '.join(WORKLOADS)} (default: {', '.join(OF_READER)} for the embedded model, others for others)"
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, metavar="WORKLOAD", help=text)
    parser.add_argument("--prompts", type=positive, default=4, metavar="N", help="of each workload (default: 4)")
    parser.add_argument(
        "--seed", type=int, default=21, help=f"of the first {ASKED} prompts; the next ones have the next"
    )
    text = "folder for leaderboard.json, .md and .png (default: benchmarks/results)"
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help=text)
    options = parser.parse_args(arguments)
    try:
        chosen = ways(load_methods(options.methods))
    except ValueError as error:
        parser.error(str(error))
    given = sys.argv[1:] if arguments is None else arguments
    options.out.mkdir(parents=True, exist_ok=True)
    results = Results(options.out / "leaderboard.json")
    results.describe(chosen.values())
    fill(results, chosen, options, " ".join(["python -m benchmarks.leaderboard", *given]))
    results.write()
    page.write(results, options.out)
    page.figure(results, options.out / "leaderboard.png")
    failed = results.controls_that_passed()
    for line in (*results.left_out(chosen), *failed):
        print(line, file=sys.stderr)
    return 1 if failed else 0


def fill(results: Results, chosen: dict[str, Way], options: argparse.Namespace, command: str) -> None:
    """Measure the cells that are missing."""
    torch.set_num_threads(1)
    model, tokenizer, name = load_model(options)
    if model.generation_config.pad_token_id is None:
        model.generation_config.pad_token_id = tokenizer.eos_token_id
    conditions = f"{provenance(f'`{command}`', options.device)}; load average at the start {os.getloadavg()[0]:.1f}"
    warm_up(model, tokenizer, chosen)
    for workload in options.workloads or (OF_OTHERS if options.model else OF_READER):
        for first in range(0, options.prompts, ASKED):
            seed = options.seed + first // ASKED
            missing = {}
            for prompt in range(min(ASKED, options.prompts - first)):
                cells = {way: Cell(name, workload, seed, prompt, way) for way in chosen}
                missing[prompt] = {way: cell for way, cell in cells.items() if cell not in results.rows}
            if not any(missing.values()):
                continue
            case = WORKLOADS[workload].draw(tokenizer, seed, ASKED)
            store = primed(model, tokenizer, case)
            for prompt, cells in missing.items():
                wanted = [chosen[way] for way in cells]
                for way, row in measure(model, tokenizer, store, case.asked[prompt], wanted, NEW):
                    results.add(cells[way], row, conditions)
                print(f"{name}, {workload}, seed {seed}, prompt {prompt}: {len(wanted)} ways", flush=True)
                page.write(results, options.out)


def warm_up(model: Any, tokenizer: Any, chosen: dict[str, Way]) -> None:
    """Run all ways on a small prompt: a model is probed once, and not by a control."""
    case = linked(tokenizer, "warm up", 1, 3)
    every = {**ways(load_methods(["none"])), **chosen}
    list(measure(model, tokenizer, primed(model, tokenizer, case), case.asked[0], every.values(), 2))


if __name__ == "__main__":
    sys.exit(main())
