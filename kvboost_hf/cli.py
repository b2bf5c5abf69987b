"""The `kvboost-hf` command."""

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvboost_hf import __version__
from kvboost_hf.assets import EMBEDDED_MODEL_DIR, load_embedded
from kvboost_hf.compat import check_model_compatibility
from kvboost_hf.errors import KVBoostError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (KVBoostError, ValueError, OSError) as error:
        sys.stderr.write(f"kvboost-hf: {error}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvboost-hf", description="K/V reuse for Hugging Face transformers.")
    parser.add_argument("--version", action="version", version=f"kvboost_hf {__version__}")
    commands = parser.add_subparsers(required=True)

    demo = commands.add_parser("demo", help="plain generate() beside generate() with a ChunkReuseCache")
    _add_model_options(demo)
    demo.add_argument("--repeats", type=_positive, default=3, help="repetitions to take medians over (default: 3)")
    demo.add_argument("--max-new-tokens", type=_positive, default=24, help="length of an answer (default: 24)")
    demo.add_argument("--seed", type=int, default=0, help="of the documents (default: 0)")
    demo.add_argument("--figure", type=Path, metavar="PNG", help="draw the times to the first token")
    demo.add_argument("--json", type=Path, metavar="FILE", help="write all figures ('-' for standard output)")
    demo.set_defaults(run=_demo)

    check = commands.add_parser("check", help="say whether a model can reuse K/V, and why not")
    _add_model_options(check)
    check.set_defaults(run=_check)
    return parser


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="a hub name or a folder (default: the embedded model)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: auto)")


def _positive(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text}")
    return value


def _load(options: argparse.Namespace) -> tuple[Any, Any, str]:
    if options.model is None:
        model, tokenizer = load_embedded(None if options.dtype == "auto" else getattr(torch, options.dtype))
        return model.to(options.device), tokenizer, f"embedded {EMBEDDED_MODEL_DIR.name}"
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=options.dtype).to(options.device).eval()
    return model, AutoTokenizer.from_pretrained(options.model), Path(options.model).name


def _check(options: argparse.Namespace) -> int:
    model, _, name = _load(options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # all that they say is in the report
        found = check_model_compatibility(model, strict=False)
    sys.stdout.write(f"{name}: {found}\n")
    return 0 if found.exact else 1


def _demo(options: argparse.Namespace) -> int:
    try:
        from rich.console import Console
        from rich.progress import Progress

        from kvboost_hf.demo.run import Demo
        from kvboost_hf.demo.show import as_json, figure, hardware, table
    except ModuleNotFoundError as error:
        raise ValueError(f"the demo needs {error.name}: pip install 'kvboost_hf[demo]'") from error

    console = Console(stderr=options.json == Path("-"))
    model, tokenizer, name = _load(options)
    parameters = sum(p.numel() for p in model.parameters())
    console.print(f"[bold]{name}[/bold], {parameters / 1e6:.1f} M parameters, {model.dtype}, on {hardware()}")
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
        chat, questions = demo.chat(), demo.questions()
    console.print(table("A chat that grows; the model's own answers go back in as text", "turn", chat))
    console.print(table("Questions about one long document", "no.", questions))
    rows = [*chat, *questions]
    console.print(
        "TTFT: from the call of generate() to the first token on the host, storing included; medians of "
        f"{options.repeats}\ninterleaved runs, each from an empty cache, after one short untimed call."
    )
    console.print(
        f"Answers that the documents bear out: {sum(row.right for row in rows)} of {len(rows)}. The last one: "
        f"{rows[-1].question} [bold]{rows[-1].answer}[/bold]"
    )
    if options.figure is not None:
        figure(options.figure, name, chat, questions)
        console.print(f"Figure: {options.figure}")
    if options.json is not None:
        text = as_json(name, chat, questions)
        if options.json == Path("-"):
            sys.stdout.write(text + "\n")
        else:
            options.json.write_text(text, encoding="utf-8")
    # In float32 the tokens must be the same; in half precision they may part where two logits all but tie.
    return 0 if all(row.same_tokens for row in rows) or model.dtype != torch.float32 else 1


if __name__ == "__main__":
    sys.exit(main())
