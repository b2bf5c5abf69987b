"""`kvboost-hf verify`: measures how reuse, and K/V in fewer bits, change a model's answers."""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

from kvboost_hf.assets.chat import encode
from kvboost_hf.cache.codecs import live_config
from kvboost_hf.cache.planning.chunks import ContentChunker
from kvboost_hf.cache.store.chunk_store import ChunkStore
from kvboost_hf.cli.arguments import Commands, add_json, figure, needs_extra, positive, read_text, require_figures
from kvboost_hf.cli.models import add_model, load_shown
from kvboost_hf.cli.next_steps import next_steps, typed
from kvboost_hf.config import KVQuantConfig
from kvboost_hf.demo.workloads import LONG_DOCUMENT_TOKENS, linked_documents
from kvboost_hf.outputs import STANDARD_OUTPUT, say, write, written
from kvboost_hf.progress import Progress, duration
from kvboost_hf.verify import CorrectnessReport, verify_correctness
from kvboost_hf.verify import figure as draw_report

_MADE_UP_PROMPTS = 16


def add(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("verify", help="measure what reuse does to the answers, on your own prompts")
    add_model(parser)
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="a prompt on each line, or a JSON list of texts; taken as they are, without a chat template, and served "
        "in this order (default: made-up documents in changing orders, with questions that need one or two of them)",
    )
    parser.add_argument(
        "--documents",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="texts that the prompts hold, one in each file: measure a second time with these stored first, each "
        "computed alone",
    )
    text = "judge codecs of stored K/V, too, read back from a store: int8, int8:4, int4, turboquant:3.5, …"
    parser.add_argument("--codec", nargs="+", default=[], metavar="CODEC", help=text)
    text = "the same for K/V in use, by bits from 1 to 4, or by codec; and each pair of the two"
    parser.add_argument("--live-quant", nargs="+", type=_live, default=[], metavar="BITS", help=text)
    parser.add_argument("--max-new-tokens", type=positive, default=32, help="length of an answer (default: 32)")
    parser.add_argument("--max-kl", type=float, default=0.01, help="threshold: mean KL in nats (default: 0.01)")
    parser.add_argument("--min-agreement", type=float, default=0.99, help="threshold: share of steps (default: 0.99)")
    parser.add_argument("--figure", type=figure, metavar="PNG", help="draw quality against computed tokens")
    add_json(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure and show; returns 1 if the report is false."""
    with needs_extra("demo", "verify"):
        from rich.console import Console

        require_figures(options.figure)

    console = Console(stderr=options.json == STANDARD_OUTPUT)
    given = None if options.prompts is None else read_prompts(options.prompts)
    documents = [read_text(path).strip() for path in options.documents or ()]
    with Progress() as shown:
        model, tokenizer, name = load_shown(options, shown)
        prompts = _made_up(tokenizer) if given is None else given
        chunker = ContentChunker.for_tokenizer(tokenizer)  # so that documents are cut alike wherever they stand
        shown.show("answering")
        report = verify_correctness(
            model,
            prompts,
            tokenizer=tokenizer,
            documents=documents,
            codecs=options.codec,
            live_quants=options.live_quant,
            max_new_tokens=options.max_new_tokens,
            make_store=lambda model: ChunkStore(model, chunker=chunker),
            max_kl=options.max_kl,
            min_agreement=options.min_agreement,
            progress=partial(shown.show, "answering"),
        )
    told = f"{name}, {report.dtype}, {len(prompts)} prompts, {len(report.arms)} ways, {duration(shown.seconds)}"
    say(console, f"{told}\n\n{report}")
    if options.json is not None:
        write(options.json, json.dumps({"name": name, **report.as_dict()}, indent=2))
    if options.figure is not None:
        with Progress("drawing"):
            draw_report(options.figure, report)
    for line in written(options.json, options.figure):
        say(console, line)
    say(console, _next(options, report), end="")
    return 0 if report else 1


def _next(options: argparse.Namespace, report: CorrectnessReport) -> str:
    """Name the next commands: a server with the policy that the report recommends."""
    if report.wrong:
        return next_steps(options, (typed("doctor", options), "what of this machine and the model works"))
    flags: list[object] = []
    policy = report.recommended
    if policy.mode == "blend":
        flags += ["--recompute-strategy", policy.repair]
        if policy.repair not in ("none", "selective") and policy.recompute_ratio is not None:
            flags += ["--recompute-ratio", policy.recompute_ratio]
    serve = (typed("serve", options, *flags), "OpenAI's API, with the reuse that is recommended here")
    own = () if options.prompts is not None else ("verify",)
    return next_steps(options, *own, serve)


def read_prompts(path: Path) -> list[Any]:
    """The prompts of a file: its lines, or the items of its JSON list.

    Raises:
        ValueError: the file cannot be read, is empty, or begins with a bracket and is no JSON.
    """
    text = read_text(path)
    if not text.lstrip().startswith("["):
        return [line for line in text.splitlines() if line.strip()]
    try:
        found: list[Any] = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"`--prompts` must be a prompt on each line or a JSON list, got {path}: {error}.") from error
    return found


def _made_up(tokenizer: Any) -> list[list[int]]:
    asked = linked_documents(tokenizer, LONG_DOCUMENT_TOKENS, _MADE_UP_PROMPTS, seed=1)
    return [encode(tokenizer, [{"role": "user", "content": question.text}]) for question in asked]


def _live(text: str) -> KVQuantConfig:
    try:
        config = live_config(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if config is None:
        raise argparse.ArgumentTypeError(f"must be bits from 1 to 4 or a lossy codec, got {text}")
    return config
