"""`kvboost-hf demo`: times plain generate() beside generate() with a ChunkReuseCache."""

import argparse
from functools import partial
from typing import Any

import torch

from kvboost_hf.cli.arguments import Commands, add_json, figure, needs_extra, positive, require_figures
from kvboost_hf.cli.models import add_model, load_shown
from kvboost_hf.cli.next_steps import next_steps
from kvboost_hf.demo.measure import Demo
from kvboost_hf.outputs import STANDARD_OUTPUT, say, write, written
from kvboost_hf.progress import Progress, duration


def add(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("demo", help="plain generate() beside generate() with a ChunkReuseCache")
    add_model(parser)
    text = "repetitions to take medians over (default: 1 for a model that is named, else 3)"
    parser.add_argument("--repeats", type=positive, help=text)
    parser.add_argument("--max-new-tokens", type=positive, default=24, help="length of an answer (default: 24)")
    parser.add_argument("--seed", type=int, default=0, help="of the texts (default: 0)")
    parser.add_argument("--figure", type=figure, metavar="PNG", help="draw the times to the first token")
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure and show; returns 1 if exact reuse changed a token in float32."""
    with needs_extra("demo", "demo"):
        from rich.console import Console, RenderableType

        from kvboost_hf.demo import show

        require_figures(options.figure)

    console = Console(stderr=options.json == STANDARD_OUTPUT)
    repeats = options.repeats or (3 if options.model is None else 1)
    with Progress() as shown:

        def tell(what: RenderableType) -> None:
            with shown.aside():
                console.print(what, highlight=False)

        model, tokenizer, name = load_shown(options, shown)
        parameters = sum(p.numel() for p in model.parameters())
        told = f"{name}, {parameters / 1e6:.1f} M parameters, {str(model.dtype).removeprefix('torch.')}"
        tell(f"[bold]{told}[/bold], on {show.hardware()}")
        shown.show("warming up")
        demo = Demo(
            model,
            tokenizer,
            embedded=options.model is None,
            max_new_tokens=options.max_new_tokens,
            repeats=repeats,
            seed=options.seed,
            progress=partial(shown.show, "answering"),
        )
        measured = demo.run(lambda one: tell(show.table(one)))
    console.print(show.summary(measured))
    for remark in show.remarks(measured, repeats, model.dtype):
        console.print(remark, highlight=False, markup=False)
    kinds = ", ".join(one.workload.name for one in measured)
    say(console, f"Measured plain generate() and reuse on {kinds} in {duration(shown.seconds)}.")
    if options.json is not None:
        write(options.json, show.as_json(name, measured, repeats))
    if options.figure is not None:
        with Progress("drawing"):
            show.figure(options.figure, told, measured)
    _last_lines(options, console)
    # In float32 the tokens must be the same; in half precision they may part where two logits all but tie. Blended
    # answers may differ: they are shown, not judged.
    same = all(figures.same_tokens for one in measured for figures in one.arms["exact"])
    return 0 if same or model.dtype != torch.float32 else 1


def _last_lines(options: argparse.Namespace, console: Any) -> None:
    for line in written(options.json, options.figure):
        say(console, line)
    real = () if options.model else ("demo",)
    say(console, next_steps(options, *real, "check", "bench", "verify", "serve"), end="")
    say(console, "In Python: model.generate(..., cache=ChunkReuseCache(model))")
