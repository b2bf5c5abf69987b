"""`kvboost-hf demo`, `bench` and `verify`: the time of answers with reuse and without, and how reuse changes them."""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvboost_hf.assets.texts import encode
from kvboost_hf.bench.arms import ARMS, CHOICE
from kvboost_hf.bench.peers import CHOSEN_PEERS, PEERS
from kvboost_hf.bench.workloads import REAL_WORKLOADS, WORKLOADS
from kvboost_hf.cache.codecs import live_config
from kvboost_hf.cache.planning.chunks import ContentChunker
from kvboost_hf.cache.store.chunk_store import ChunkStore
from kvboost_hf.cli.arguments import (
    add_json,
    add_model,
    figure,
    load_shown,
    needs_extra,
    next_steps,
    one_of,
    output,
    positive,
    read_text,
    require_figures,
    typed,
)
from kvboost_hf.config import KVQuantConfig
from kvboost_hf.demo.measure import Demo
from kvboost_hf.demo.workloads import LONG_DOCUMENT_TOKENS, linked_documents
from kvboost_hf.outputs import STANDARD_OUTPUT, Progress, duration, say, write, written
from kvboost_hf.verify import CorrectnessReport, verify_correctness
from kvboost_hf.verify import figure as draw_report
from kvboost_hf.verify.arms import CHOSEN_ARMS, named_policies

_MADE_UP_PROMPTS = 16


def add_demo(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add_model(parser)
    text = (
        "measure these in place of all else: a prompt on each line, or a JSON list of texts and of lists of messages"
    )
    parser.add_argument("--prompts", type=Path, metavar="FILE", help=text)
    text = "repetitions to take medians over (default: 1 for a model that is named, else 3)"
    parser.add_argument("--repeats", type=positive, help=text)
    parser.add_argument("--max-new-tokens", type=positive, default=24, help="length of an answer (default: 24)")
    parser.add_argument("--seed", type=int, default=0, help="of the texts (default: 0)")
    parser.add_argument("--figure", type=figure, metavar="PNG", help="draw the times to the first token")
    add_json(parser)
    parser.set_defaults(run=run_demo)


def run_demo(options: argparse.Namespace) -> int:
    """Measure and show; returns 1 if exact reuse changed a token in float32."""
    with needs_extra("demo", "demo"):
        from rich.console import Console, RenderableType

        from kvboost_hf.demo import show

        require_figures(options.figure)

    console = Console(stderr=options.json == STANDARD_OUTPUT)
    prompts = None if options.prompts is None else read_prompts(options.prompts)
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
            prompts=prompts,
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


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
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
    parser.set_defaults(run=run_bench)


def run_bench(options: argparse.Namespace) -> int:
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


def add_verify(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
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
    text = (
        f"how moved chunks are repaired, beside exact and naive reuse (default: {' '.join(CHOSEN_ARMS)}); also query, "
        "cacheblend and first_k at six ratios or at one, as in query:15, and all"
    )
    parser.add_argument("--arms", nargs="+", metavar="NAME", help=text)
    text = "judge codecs of stored K/V, too, read back from a store: int8, int8:4, int4, turboquant:3.5, …"
    parser.add_argument("--codec", nargs="+", default=[], metavar="CODEC", help=text)
    text = "the same for K/V in use, by bits from 1 to 4, or by codec; and each pair of the two"
    parser.add_argument("--live-quant", nargs="+", type=_live, default=[], metavar="BITS", help=text)
    parser.add_argument("--max-new-tokens", type=positive, default=32, help="length of an answer (default: 32)")
    parser.add_argument("--max-kl", type=float, default=0.01, help="threshold: mean KL in nats (default: 0.01)")
    parser.add_argument("--min-agreement", type=float, default=0.99, help="threshold: share of steps (default: 0.99)")
    parser.add_argument("--figure", type=figure, metavar="PNG", help="draw quality against computed tokens")
    add_json(parser)
    parser.set_defaults(run=run_verify)


def run_verify(options: argparse.Namespace) -> int:
    """Measure and show; returns 1 if the report is false."""
    with needs_extra("demo", "verify"):
        from rich.console import Console

        require_figures(options.figure)

    console = Console(stderr=options.json == STANDARD_OUTPUT)
    given = None if options.prompts is None else read_prompts(options.prompts)
    policies = None if options.arms is None else named_policies(options.arms)
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
            policies=policies,
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
