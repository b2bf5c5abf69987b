"""`kvboost-hf bench`: reads the flags; `kvboost_hf.bench` serves the same prompts in several ways, and measures."""

import argparse

from kvboost_hf.bench.arms import ARMS, CHOICE
from kvboost_hf.bench.peers import CHOSEN_PEERS, PEERS
from kvboost_hf.bench.workloads import REAL_WORKLOADS, WORKLOADS
from kvboost_hf.cli.arguments import Commands, add_json, needs_extra, one_of, output, positive, require_figures
from kvboost_hf.cli.models import add_model
from kvboost_hf.cli.next_steps import next_steps


def add(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "bench", help="measure ways of serving the same prompts, and others' ways beside them"
    )
    add_model(parser)
    parser.add_argument(
        "--random", type=_sizes, metavar="LxW", help="a random model of L layers, W wide, such as 8x512"
    )
    parser.add_argument("--draft", metavar="NAME", help="a draft model (default: the embedded one, where it fits)")
    text = f"ways to serve; all if none is named (default: {', '.join(CHOICE)})"
    parser.add_argument("--arms", nargs="*", choices=list(ARMS), metavar="NAME", help=one_of(ARMS, text))
    asked = dict.fromkeys((*WORKLOADS, *REAL_WORKLOADS))
    real = f"(default: all; for `--model`, those on real text: {', '.join(REAL_WORKLOADS)})"
    text = one_of(asked, f"what is asked {real}")
    parser.add_argument("--workloads", nargs="+", choices=list(asked), metavar="NAME", help=text)
    text = f"ways of others; all if none is named (default: {', '.join(CHOSEN_PEERS)}, or none with `--arms`)"
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), metavar="NAME", help=one_of(PEERS, text))
    text = "let pip get what peers need into virtual environments that are thrown away afterwards"
    parser.add_argument("--install-peers", action="store_true", help=text)
    parser.add_argument("--prompts", type=positive, default=6, help="of each workload, from 2 to 8 (default: 6)")
    text = "rounds of each workload (default: 1 for `--model`, else 2)"
    parser.add_argument("--repeats", type=positive, help=text)
    parser.add_argument("--max-new-tokens", type=positive, default=16, help="length of an answer (default: 16)")
    parser.add_argument("--seed", type=int, default=0, help="of texts and questions (default: 0)")
    text = "write a page with figures ('-' for standard output)"
    parser.add_argument("--html", type=output, metavar="FILE", help=text)
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure and show; returns 1 if lossless reuse changed a token in float32, or something failed."""
    with needs_extra("demo", "bench"):
        from kvboost_hf.bench.command import bench

        require_figures(options.html)
    real = ("bench",) if options.model is None else ()
    return bench(options, next_steps(options, *real, "verify", "serve"))


def _sizes(text: str) -> tuple[int, int]:
    layers, _, width = text.partition("x")
    if not (layers.isdecimal() and width.isdecimal()):
        raise argparse.ArgumentTypeError(f"must be layers x width, such as 8x512, got {text}")
    return int(layers), int(width)
