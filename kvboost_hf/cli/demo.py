"""`kvboost-hf demo`: plain generate() beside generate() with a ChunkReuseCache."""

import argparse
import shlex

import torch

from kvboost_hf.cli.arguments import Commands, add_json, figure, needs_extra, positive
from kvboost_hf.cli.models import add_model, load_model
from kvboost_hf.demo.measure import Demo
from kvboost_hf.offload.checkpoint import without_bars
from kvboost_hf.outputs import STANDARD_OUTPUT, write


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
        from rich.console import Console

        from kvboost_hf.demo import show
        from kvboost_hf.demo.progress import progress

    console = Console(stderr=options.json == STANDARD_OUTPUT)
    with without_bars():
        model, tokenizer, name = load_model(options)
    parameters = sum(p.numel() for p in model.parameters())
    told = f"{name}, {parameters / 1e6:.1f} M parameters, {str(model.dtype).removeprefix('torch.')}"
    console.print(f"[bold]{told}[/bold], on {show.hardware()}", highlight=False)
    repeats = options.repeats or (3 if options.model is None else 1)
    with progress(console if console.is_terminal else Console(stderr=True), "answering") as advance:
        demo = Demo(
            model,
            tokenizer,
            embedded=options.model is None,
            max_new_tokens=options.max_new_tokens,
            repeats=repeats,
            seed=options.seed,
            progress=advance,
        )
        measured = demo.run(lambda one: console.print(show.table(one)))
    console.print(show.summary(measured))
    for remark in show.remarks(measured, repeats, model.dtype):
        console.print(remark, highlight=False, markup=False)
    if options.json is not None:
        write(options.json, show.as_json(name, measured, repeats))
    if options.figure is not None:
        show.figure(options.figure, told, measured)
        console.print(f"Figure: {options.figure}", highlight=False)
    console.print(next_steps(options.model), highlight=False, markup=False, soft_wrap=True)
    # In float32 the tokens must be the same; in half precision they may part where two logits all but tie. Blended
    # answers may differ: they are shown, not judged.
    same = all(figures.same_tokens for one in measured for figures in one.arms["exact"])
    return 0 if same or model.dtype != torch.float32 else 1


def next_steps(model: str | None) -> str:
    """What to type after the demo.

    Args:
        model: A hub name or a folder; None for the embedded model.
    """
    name = shlex.quote(model or "NAME")
    steps = [
        (f"kvboost-hf check --model {name}", "whether it can reuse K/V, and why not"),
        (f"kvboost-hf bench --model {name}", "all ways of reuse beside each other, in minutes"),
        (f"kvboost-hf verify --model {name} --prompts FILE", "what reuse does to answers on your prompts"),
        (f"kvboost-hf serve --model {name}", "OpenAI's API, and a page, at http://127.0.0.1:8000"),
    ]
    if model is None:
        steps.insert(0, (f"kvboost-hf demo --model {name}", "this on a real model: a hub name or a folder"))
    lines = [f"  {command}   # {what}" for command, what in steps]
    return "\n".join(["", "Next:", *lines, "In Python: model.generate(..., past_key_values=ChunkReuseCache(model))"])
