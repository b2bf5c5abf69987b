"""What drafts gain where the target's layers are streamed, on a simulated link.

    python benchmarks/speculation_streamed.py --out benchmarks/results [--answers 40] [--forms 2]

The embedded reader keeps one of its four layers, and the others come through two slots, on the double that tests use:
two copies a pass, for one of the three has a slot for itself. The work is that of `speculation.py`. Copies take bytes
over bandwidth, T for each pass of the target, whose computation takes no time. Each forward of the draft takes D. The
clock is that of the double; `load_assistant` goes by it.

The bound is `committed per round * T / (T + drafted per round * D)`, with the tokens that came to the target. Two
things part from it. Forwards of the draft whose tokens did not come to the target, behind an end of the text, are in
vain. And while the draft computes, copies go on into the slot that is free, so that the time of one copy, half of T,
may be hidden. That is much: of a large model with 48 streamed layers, two copies are a 24th. So the speed-up is given
as measured, and as it would be with nothing hidden.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from record import write
from reuse import Result, measured_on, provenance
from speculation import WORK, Task, assisted, plain

from kvboost_hf import load_assistant, streaming_stats
from kvboost_hf.assets import load_embedded, load_embedded_draft
from tests.speculation import LENGTH, Reader

RATIOS = (5, 20, 60, 200)  # T/D
ENOUGH = 0.95  # of the bound


def measure(ratio: float, schedule: Any, tasks: list[Task]) -> Result:
    reader = Reader("sdpa", streamed=True, pass_s=ratio)
    backend, target = reader.backend, reader.model
    expected = plain(target, tasks)
    began, forwards = backend.clock, 0
    draft = load_embedded_draft()

    def drafted(*_: object) -> None:
        nonlocal forwards
        forwards += 1
        backend.advance(1.0)

    draft.register_forward_hook(drafted)
    assistant = load_assistant(
        draft, target=target, schedule=schedule, num_assistant_tokens=LENGTH, clock=lambda: backend.clock
    )
    found = assisted(target, assistant, tasks, expected)
    rounds, stats = len(found.rounds), streaming_stats(target)
    assert stats is not None
    shown = rounds * ratio + forwards
    result: Result = {
        "ratio": ratio,
        "plain_pass_s": began / sum(map(len, expected)),
        "rounds": rounds,
        "committed_per_round": found.committed_per_round,
        "drafted_per_round": found.drafted / rounds,
        "in_vain_per_round": (forwards - found.drafted) / rounds,
        "hidden_per_round": (shown - (backend.clock - began)) / rounds,
        "misses": stats.misses,
        "speed_up": began / (backend.clock - began),
        "nothing_hidden": began / shown,
        "bound": found.committed_per_round * ratio / (ratio + found.drafted / rounds),
    }
    for name in ("speed_up", "nothing_hidden"):
        result[f"{name}_of_bound"] = result[name] / result["bound"]
    return result


def markdown(result: Result) -> str:
    lines = [measured_on(result["provenance"])]
    for name in WORK:
        lines += [
            "",
            f"## {name.capitalize()}",
            "",
            f"{result[name]['texts']} {name}, the same in every arm. Per round, in forwards of the draft: what was "
            "drafted in vain, and what was hidden behind copies.",
            "",
            "| T/D | schedule | committed per round | drafted | in vain | hidden | misses | bound | measured | of the "
            "bound | nothing hidden | of the bound |",
            "| ---: | --- |" + " ---: |" * 10,
        ]
        for row in result[name]["rows"]:
            cells = [f"{row['ratio']}", row["schedule"], f"{row['committed_per_round']:.2f}"]
            cells += [f"{row[key]:.2f}" for key in ("drafted_per_round", "in_vain_per_round", "hidden_per_round")]
            cells += [f"{row['misses']}", f"{row['bound']:.2f}x"]
            for key in ("speed_up", "nothing_hidden"):
                share = row[f"{key}_of_bound"]
                cells += [f"{row[key]:.2f}x", f"{share:.1%}" + ("" if share >= ENOUGH else f", below {ENOUGH:.0%}")]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the JSON and the table; none writes neither")
    parser.add_argument("--answers", type=int, default=40)
    parser.add_argument("--forms", type=int, default=2)
    parser.add_argument("--seed", type=int, default=2, help="below 10 000, so that the prompts are held out")
    parser.add_argument("--threads", type=int, default=1, help="more take longer with models this small")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result: Result = {"provenance": provenance(sys.argv[1:], "speculation_streamed.py")}
    tokenizer = load_embedded()[1]
    for name, make in WORK.items():
        tasks, rows = make(tokenizer, getattr(options, name), options.seed), []
        for ratio in RATIOS:
            for schedule in ("adaptive", "constant"):
                rows.append({"schedule": schedule, **measure(ratio, schedule, tasks)})
                print(rows[-1], flush=True)
        result[name] = {"texts": len(tasks), "rows": rows}
    write(options.out, "speculation-streamed", result, markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
