"""`kvboost-hf demo`, `bench` and `verify`: the time of answers with reuse and without, and how reuse changes them."""

import argparse
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvboost_hf.assets.texts import encode
from kvboost_hf.bench.demo import demo
from kvboost_hf.bench.prompts import LONG_DOCUMENT_TOKENS, linked_documents
from kvboost_hf.cache.planning.chunks import ContentChunker
from kvboost_hf.cache.store.chunk_store import ChunkStore
from kvboost_hf.cli.arguments import needs_extra, next_steps, read_text, require_figures, typed
from kvboost_hf.cli.loading import load_shown
from kvboost_hf.outputs import STANDARD_OUTPUT, Progress, duration, say, write, written
from kvboost_hf.verify import CorrectnessReport, verify_correctness
from kvboost_hf.verify import figure as draw_report
from kvboost_hf.verify.arms import named_policies

_MADE_UP_PROMPTS = 16


def run_demo(options: argparse.Namespace) -> int:
    """Measure and show; returns 1 if exact reuse changed a token in float32."""
    with needs_extra("demo", "demo"):
        from rich.console import Console, RenderableType

        from kvboost_hf.bench import demo_show as show

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
        measured = demo(
            model,
            tokenizer,
            embedded=options.model is None,
            prompts=prompts,
            max_new_tokens=options.max_new_tokens,
            repeats=repeats,
            seed=options.seed,
            progress=shown.show,
            show=lambda one: tell(show.table(one)),
        )
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
    same = all(row.same for one in measured for row in one.arms["exact"])
    return 0 if same or model.dtype != torch.float32 else 1


def _last_lines(options: argparse.Namespace, console: Any) -> None:
    for line in written(options.json, options.figure):
        say(console, line)
    real = () if options.model else ("demo",)
    say(console, next_steps(options, *real, "check", "bench", "verify", "serve"), end="")
    say(console, "In Python: model.generate(..., cache=ChunkReuseCache(model))")


def run_bench(options: argparse.Namespace) -> int:
    """Measure and show; returns 1 if lossless reuse changed a token in float32, or something failed."""
    with needs_extra("demo", "bench"):
        from kvboost_hf.bench.command import bench

        require_figures(options.html)
    real = ("bench",) if options.model is None else ()
    return bench(options, next_steps(options, *real, "verify", "serve"))


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
    """The prompts of a file: the items of its JSON list, or its lines, which may begin with `[INST]` or `[1]`, too."""
    text = read_text(path)
    if text.lstrip().startswith("["):
        try:
            found: list[Any] = json.loads(text)
            return found
        except json.JSONDecodeError as error:
            if re.match(r"\s*\[\s*[\"\[{]", text):  # a list of texts or messages, with a mistake
                said = f"`--prompts` must be a prompt on each line or a JSON list, got {path}: {error}."
                raise ValueError(said) from error
    return [line for line in text.split("\n") if line.strip()]  # a prompt may hold form feeds and the like


def _made_up(tokenizer: Any) -> list[list[int]]:
    asked = linked_documents(tokenizer, LONG_DOCUMENT_TOKENS, _MADE_UP_PROMPTS, seed=1)
    return [encode(tokenizer, [{"role": "user", "content": question.text}]) for question in asked]
