"""`kvboost-hf demo`: plain generate() beside generate() with a ChunkReuseCache."""

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from kvboost_hf.cli.arguments import Commands, add_json, figure, needs_extra, positive
from kvboost_hf.cli.models import add_model, load_model
from kvboost_hf.demo.measure import Demo, Row, ShuffledRow
from kvboost_hf.outputs import STANDARD_OUTPUT, write


def add(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("demo", help="plain generate() beside generate() with a ChunkReuseCache")
    add_model(parser)
    parser.add_argument("--repeats", type=positive, default=3, help="repetitions to take medians over (default: 3)")
    parser.add_argument("--max-new-tokens", type=positive, default=24, help="length of an answer (default: 24)")
    parser.add_argument("--seed", type=int, default=0, help="of the documents (default: 0)")
    parser.add_argument("--figure", type=figure, metavar="PNG", help="draw the times to the first token")
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure and show; returns 1 if exact reuse changed a token in float32."""
    with needs_extra("demo", "demo"):
        from rich.console import Console
        from rich.progress import Progress

        from kvboost_hf.demo import show

    console = Console(stderr=options.json == STANDARD_OUTPUT)
    model, tokenizer, name = load_model(options)
    parameters = sum(p.numel() for p in model.parameters())
    console.print(f"[bold]{name}[/bold], {parameters / 1e6:.1f} M parameters, {model.dtype}, on {show.hardware()}")
    with Progress(console=console, transient=True) as progress:
        demo = Demo(
            model,
            tokenizer,
            max_new_tokens=options.max_new_tokens,
            repeats=options.repeats,
            seed=options.seed,
            progress=lambda: progress.advance(task),
        )
        task = progress.add_task("generating", total=demo.num_calls)
        demo.warm_up()
        chat, questions, shuffled = demo.chat(), demo.questions(), demo.shuffled()
    _print(console, chat, questions, shuffled, options.repeats)
    if options.json is not None:
        write(options.json, show.as_json(name, chat, questions, shuffled))
    if options.figure is not None:
        show.figure(options.figure, name, chat, questions, shuffled)
        console.print(f"Figure: {options.figure}")
    # In float32 the tokens must be the same; in half precision they may part where two logits all but tie. Blended
    # answers may differ: they are shown, not judged.
    same = all(row.same_tokens for row in (*chat, *questions)) and all(row.exact_same_tokens for row in shuffled)
    return 0 if same or model.dtype != torch.float32 else 1


def _print(
    console: Any, chat: Sequence[Row], questions: Sequence[Row], shuffled: Sequence[ShuffledRow], repeats: int
) -> None:
    """Three tables, and how to read them."""
    from kvboost_hf.demo.show import shuffled_table, table

    console.print(table("A chat that grows; the model's own answers go back in as text", "turn", chat))
    console.print(table("Questions about one long document", "no.", questions))
    console.print(shuffled_table("The same documents in another order for each question; TTFT in ms", shuffled))
    console.print(
        "TTFT: from the call of generate() to the first token on the host, storing included; medians of "
        f"{repeats}\ninterleaved runs, each from an empty cache, after one short untimed call. "
        "exact, as above: same\nhistory only. blend: documents move, are repaired in part, and answers may differ.",
        soft_wrap=True,
    )
    right = sum(row.right for row in (*chat, *questions)) + sum(row.plain_right for row in shuffled)
    console.print(
        f"Answers that the documents bear out: plain {right} of {len(chat) + len(questions) + len(shuffled)}, blend "
        f"{sum(row.blend_right for row in shuffled)} of {len(shuffled)}. The last one: {shuffled[-1].question} "
        f"[bold]{shuffled[-1].blend_answer}[/bold]"
    )
