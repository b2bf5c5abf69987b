"""The `kvboost-hf` command."""

import argparse
import json
import os
import signal
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvboost_hf import __version__
from kvboost_hf.assets import EMBEDDED_MODEL_DIR, load_embedded
from kvboost_hf.bench.arms import ARMS
from kvboost_hf.bench.peers import PEERS
from kvboost_hf.bench.workloads import WORKLOADS
from kvboost_hf.cache.codecs import live_config
from kvboost_hf.cache.planning.cutting import ContentChunker
from kvboost_hf.cache.planning.report import ReuseReport
from kvboost_hf.cache.store.chunk_store import ChunkStore
from kvboost_hf.cache.tiers.addresses import open_tier, open_tiers, parse_tier
from kvboost_hf.cache.tiers.base import Tier
from kvboost_hf.compat import available_device
from kvboost_hf.compatibility import check_model_compatibility
from kvboost_hf.config import KVQuantConfig, StreamingConfig
from kvboost_hf.contents import as_json, as_tables, contents
from kvboost_hf.engine.load import load
from kvboost_hf.errors import KVBoostError
from kvboost_hf.offload.sizes import what_fits
from kvboost_hf.outputs import STANDARD_OUTPUT, output_path, write
from kvboost_hf.server.keys import prompt_salt
from kvboost_hf.server.options import (
    add_api_keys,
    add_kept,
    add_options,
    add_secrets,
    add_streaming,
    draft_trees,
    engine_settings,
    kept_settings,
    server_settings,
    streaming_config,
)
from kvboost_hf.server.sharing import choose_attention
from kvboost_hf.verify import figure as draw_report
from kvboost_hf.verify import validate_turboquant, verify_correctness
from kvboost_hf.verify.turboquant import CODECS

_VERIFIED_PROMPTS = 16  # where the user brings none


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    options = command_line().parse_args(given)
    options.given = given
    try:
        if hasattr(options, "device"):
            _require_device(options.device)
        return int(options.run(options))
    except (KVBoostError, ValueError, OSError) as error:
        sys.stderr.write(f"kvboost-hf: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("kvboost-hf: interrupted\n")
        return 128 + signal.SIGINT


def serve() -> int:
    """Run the command `kvboost-server`: `kvboost-hf serve` by another name; returns its exit status."""
    return main(["serve", *sys.argv[1:]])


def command_line() -> argparse.ArgumentParser:
    """The parser of all commands; `docs/flags.md` is made from it."""
    parser = argparse.ArgumentParser(prog="kvboost-hf", description="K/V reuse for Hugging Face transformers.")
    parser.add_argument("--version", action="version", version=f"kvboost_hf {__version__}")
    commands = parser.add_subparsers(required=True)

    demo = commands.add_parser("demo", help="plain generate() beside generate() with a ChunkReuseCache")
    _add_model_options(demo)
    demo.add_argument("--repeats", type=_positive, default=3, help="repetitions to take medians over (default: 3)")
    demo.add_argument("--max-new-tokens", type=_positive, default=24, help="length of an answer (default: 24)")
    demo.add_argument("--seed", type=int, default=0, help="of the documents (default: 0)")
    demo.add_argument("--figure", type=_figure, metavar="PNG", help="draw the times to the first token")
    demo.add_argument("--json", type=_output, metavar="FILE", help="write all figures ('-' for standard output)")
    demo.set_defaults(run=_demo)

    bench = commands.add_parser("bench", help="measure ways of serving the same prompts, and others' ways beside them")
    _add_model_options(bench)
    bench.add_argument(
        "--random", type=_sizes, metavar="LxW", help="a random model of L layers, W wide, such as 8x512"
    )
    bench.add_argument("--draft", metavar="NAME", help="a draft model (default: the embedded one, where it fits)")
    for flag, known, text in (("--arms", ARMS, "ways to serve"), ("--workloads", WORKLOADS, "what is asked")):
        names = list(known)
        bench.add_argument(flag, nargs="+", choices=names, default=names, metavar="NAME", help=_of(names, text))
    text = "ways of others; all if none is named (default: none)"
    bench.add_argument("--peers", nargs="*", choices=list(PEERS), metavar="NAME", help=_of(PEERS, text))
    text = "let pip get what peers need into virtual environments that are thrown away afterwards"
    bench.add_argument("--install-peers", action="store_true", help=text)
    bench.add_argument("--prompts", type=_positive, default=6, help="of each workload, from 2 to 8 (default: 6)")
    bench.add_argument("--repeats", type=_positive, default=2, help="counted rounds of each workload (default: 2)")
    bench.add_argument("--max-new-tokens", type=_positive, default=16, help="length of an answer (default: 16)")
    bench.add_argument("--seed", type=int, default=0, help="of documents and questions (default: 0)")
    bench.add_argument(
        "--html", type=_output, metavar="FILE", help="write a page with figures ('-' for standard output)"
    )
    bench.add_argument("--json", type=_output, metavar="FILE", help="write all figures ('-' for standard output)")
    bench.set_defaults(run=_bench)

    check = commands.add_parser("check", help="say whether a model can reuse K/V, and why not")
    _add_model_options(check)
    check.set_defaults(run=_check)

    verify = commands.add_parser("verify", help="measure what reuse does to the answers, on your own prompts")
    _add_model_options(verify)
    verify.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="a prompt on each line, or a JSON list of texts; taken as they are, without a chat template, and served "
        "in this order (default: made-up documents in ever other orders, with questions that need one or two of them)",
    )
    verify.add_argument(
        "--documents",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="texts that the prompts hold, one in each file: measure a second time with these stored first, each "
        "computed alone",
    )
    text = "judge codecs of stored K/V, too, read back from a store: int8, int4, turboquant:3.5, …"
    verify.add_argument("--codec", nargs="+", default=[], metavar="CODEC", help=text)
    text = "the same for K/V in use, by bits from 1 to 4, or by codec; and each pair of the two"
    verify.add_argument("--live-quant", nargs="+", type=_live, default=[], metavar="BITS", help=text)
    verify.add_argument("--max-new-tokens", type=_positive, default=32, help="length of an answer (default: 32)")
    verify.add_argument("--max-kl", type=float, default=0.01, help="threshold: mean KL in nats (default: 0.01)")
    verify.add_argument("--min-agreement", type=float, default=0.99, help="threshold: share of steps (default: 0.99)")
    verify.add_argument("--figure", type=_figure, metavar="PNG", help="draw quality against computed tokens")
    verify.add_argument("--json", type=_output, metavar="FILE", help="write all figures ('-' for standard output)")
    verify.add_argument(
        "--turboquant",
        nargs="*",
        metavar="CODEC",
        help="instead, measure what codecs do to the model's K/V (default: turboquant with 4, 3.5, 3 and 2 bits)",
    )
    verify.set_defaults(run=_verify)

    fits = commands.add_parser("fits", help="say what of a model stays on a device, and how fast the rest can come")
    fits.add_argument("--model", required=True, help="a hub name or a folder; only its configuration is read")
    fits.add_argument("--vram-budget", required=True, metavar="SIZE", help="of the device, such as 8GB or 7.5GiB")
    fits.add_argument("--bits", type=int, choices=(4, 16), help="of weights (default: those of the checkpoint)")
    fits.add_argument("--max-tokens", type=_positive, default=4096, help="in the context (default: 4096)")
    fits.add_argument("--prefill-chunk-size", type=_positive, metavar="TOKENS", help="in one forward (default: all)")
    fits.set_defaults(run=_fits)

    warm = commands.add_parser("warm", help="compute K/V of files ahead of the first request, and keep it")
    _add_model_options(warm)
    warm.add_argument("files", type=Path, nargs="+", metavar="FILE", help="texts; each is the start of prompts")
    warm.add_argument("--documents", action="store_true", help="they may stand anywhere in prompts (mode 'blend')")
    text = "each is the system message of chats, put into the chat template, as a server does with it"
    warm.add_argument("--system", action="store_true", help=text)
    warm.add_argument("--prefix", type=Path, metavar="FILE", help="with --documents: a text that stands before each")
    finding = warm.add_argument_group(
        "what a server must have alike to find it, by the same flags with the same defaults"
    )
    add_api_keys(finding)
    add_kept(finding)
    add_streaming(warm)
    warm.set_defaults(run=_warm)

    serve = commands.add_parser("serve", help="answer requests as OpenAI's API does")
    _add_model_options(serve)
    add_options(serve)
    serve.set_defaults(run=_serve)

    inspect = commands.add_parser("inspect", help="show what is stored: tokens, text, bytes, hits, tier")
    _add_tiers(inspect, "what to look into, such as disk:~/.cache/kvboost_hf or redis://localhost:6379")
    inspect.add_argument("--tokenizer", metavar="NAME", help="shows text; a hub name or folder, or 'embedded'")
    inspect.add_argument("--limit", type=_positive, default=50, help="show those used most (default: 50)")
    inspect.add_argument("--json", type=_output, metavar="FILE", help="write all of it ('-' for standard output)")
    inspect.set_defaults(run=_inspect)
    return parser


def _add_tiers(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--tiers", nargs="+", required=True, metavar="ADDRESS", help=text)


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="a hub name or a folder (default: the embedded model)")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = "where it runs (default: cuda where there is one, or cpu)"
    parser.add_argument("--device", default=device, help=text)
    text = "auto, float32, bfloat16 or float16 (default: auto)"
    known = ("auto", "float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=known, metavar="DTYPE", default="auto", help=text)


def _require_device(device: str) -> None:
    wrong = f"`--device` must be one that PyTorch finds here, such as cpu, got {device!r}."
    try:
        found = available_device(device)
    except ValueError as error:
        raise ValueError(wrong) from error
    if found.type == "meta":
        raise ValueError(wrong)


def _output(text: str) -> Path:
    try:
        return output_path(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _figure(text: str) -> Path:
    if not text.endswith((".png", ".pdf", ".svg")):
        raise argparse.ArgumentTypeError(f"{text!r} is no figure: name a file that ends in .png, .pdf or .svg")
    return _output(text)


def _live(text: str) -> KVQuantConfig:
    try:
        config = live_config(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if config is None:
        raise argparse.ArgumentTypeError(f"must be bits from 1 to 4 or a lossy codec, got {text}")
    return config


def _positive(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text}")
    return value


def _of(names: Iterable[str], text: str) -> str:
    return f"{text}, of {', '.join(names)}"


def _sizes(text: str) -> tuple[int, int]:
    layers, _, width = text.partition("x")
    if not (layers.isdecimal() and width.isdecimal()):
        raise argparse.ArgumentTypeError(f"must be layers x width, such as 8x512, got {text}")
    return int(layers), int(width)


def _load(options: argparse.Namespace) -> tuple[Any, Any, str]:
    if options.model is None:
        model, tokenizer = load_embedded(None if options.dtype == "auto" else getattr(torch, options.dtype))
        return model.to(options.device), tokenizer, f"embedded {EMBEDDED_MODEL_DIR.name}"
    return *load(options.model, None, options.device, {"dtype": options.dtype}), Path(options.model).name


def _load_served(options: argparse.Namespace) -> tuple[Any, Any, str]:
    """As `_load`, for a server or what is warmed for one: perhaps with streamed layers."""
    streaming = streaming_config(options)
    if streaming is None:
        return _load(options)
    if options.model is None:
        raise ValueError("`--awq-streaming` needs `--model`: the embedded model fits any device.")
    return *load(options.model, streaming, options.device, {"dtype": options.dtype}), Path(options.model).name


def _load_draft(options: argparse.Namespace, model: Any) -> Any:
    """The model that drafts for another one; None for no drafts."""
    if draft_trees(options) is None:
        return None
    from transformers import AutoModelForCausalLM

    draft = AutoModelForCausalLM.from_pretrained(options.speculative_draft_model, dtype=model.dtype)
    return draft.to(options.device).eval()


def _check(options: argparse.Namespace) -> int:
    model, _, name = _load(options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # all that they say is in the report
        found = check_model_compatibility(model, strict=False)
    sys.stdout.write(f"{name}: {found}\n")
    return 0 if found.exact else 1


def _fits(options: argparse.Namespace) -> int:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(options.model)
    streaming = StreamingConfig(max_tokens=options.max_tokens, prefill_chunk_size=options.prefill_chunk_size)
    plan = what_fits(
        config,
        options.vram_budget,
        streaming=streaming,
        bits=options.bits,
        dtype=config.dtype or torch.float16,
    )
    sys.stdout.write(f"{plan}\n")
    return 0


def _demo(options: argparse.Namespace) -> int:
    try:
        from rich.console import Console
        from rich.progress import Progress

        from kvboost_hf.demo.run import Demo
        from kvboost_hf.demo.show import as_json, figure, hardware, shuffled_table, table
    except ModuleNotFoundError as error:
        raise ValueError(f"the demo needs {error.name}: pip install 'kvboost_hf[demo]'") from error

    console = Console(stderr=options.json == STANDARD_OUTPUT)
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
        chat, questions, shuffled = demo.chat(), demo.questions(), demo.shuffled()
    console.print(table("A chat that grows; the model's own answers go back in as text", "turn", chat))
    console.print(table("Questions about one long document", "no.", questions))
    console.print(shuffled_table("The same documents in another order for each question; TTFT in ms", shuffled))
    console.print(
        "TTFT: from the call of generate() to the first token on the host, storing included; medians of "
        f"{options.repeats}\ninterleaved runs, each from an empty cache, after one short untimed call. "
        "exact, as above: same\nhistory only. blend: documents move, are repaired in part, and answers may differ.",
        soft_wrap=True,
    )
    rows, asked = [*chat, *questions], len(chat) + len(questions) + len(shuffled)
    right = sum(row.right for row in rows) + sum(row.plain_right for row in shuffled)
    console.print(
        f"Answers that the documents bear out: plain {right} of {asked}, blend "
        f"{sum(row.blend_right for row in shuffled)} of {len(shuffled)}. The last one: {shuffled[-1].question} "
        f"[bold]{shuffled[-1].blend_answer}[/bold]"
    )
    if options.json is not None:
        write(options.json, as_json(name, chat, questions, shuffled))
    if options.figure is not None:
        figure(options.figure, name, chat, questions, shuffled)
        console.print(f"Figure: {options.figure}")
    # In float32 the tokens must be the same; in half precision they may part where two logits all but tie. Blended
    # answers may differ: they are shown, not judged.
    same = all(row.same_tokens for row in rows) and all(row.exact_same_tokens for row in shuffled)
    return 0 if same or model.dtype != torch.float32 else 1


def _bench(options: argparse.Namespace) -> int:
    try:
        from kvboost_hf.bench.command import bench

        if options.html is not None:
            import matplotlib  # noqa: F401  # before anything is measured
    except ModuleNotFoundError as error:
        raise ValueError(f"`kvboost-hf bench` needs {error.name}: pip install 'kvboost_hf[demo]'") from error
    return bench(options)


def _verify(options: argparse.Namespace) -> int:
    if options.turboquant is not None:
        return _validate(options)
    try:
        from rich.console import Console
        from rich.progress import Progress

        from kvboost_hf.assets.chat import encode
        from kvboost_hf.demo.workloads import LONG_DOCUMENT_TOKENS, linked_documents
    except ModuleNotFoundError as error:
        raise ValueError(f"`kvboost-hf verify` needs {error.name}: pip install 'kvboost_hf[demo]'") from error

    console = Console(stderr=options.json == STANDARD_OUTPUT)
    model, tokenizer, name = _load(options)
    if options.prompts is not None:
        prompts = _read_prompts(options.prompts)
    else:
        asked = linked_documents(tokenizer, LONG_DOCUMENT_TOKENS, _VERIFIED_PROMPTS, seed=1)
        prompts = [encode(tokenizer, [{"role": "user", "content": question.text}]) for question in asked]
    chunker = ContentChunker.for_tokenizer(tokenizer)  # so that documents are cut alike wherever they stand
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("generating", total=None)
        report = verify_correctness(
            model,
            prompts,
            tokenizer=tokenizer,
            documents=[path.read_text(encoding="utf-8").strip() for path in options.documents or ()],
            codecs=options.codec,
            live_quants=options.live_quant,
            max_new_tokens=options.max_new_tokens,
            make_store=lambda model: ChunkStore(model, chunker=chunker),
            max_kl=options.max_kl,
            min_agreement=options.min_agreement,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    console.print(
        f"{name}, {report.dtype}, {len(prompts)} prompts\n\n{report}", highlight=False, markup=False, soft_wrap=True
    )
    if options.json is not None:
        write(options.json, json.dumps({"name": name, **report.as_dict()}, indent=2))
    if options.figure is not None:
        draw_report(options.figure, report)
        console.print(f"Figure: {options.figure}")
    return 0 if report else 1


def _validate(options: argparse.Namespace) -> int:
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ModuleNotFoundError as error:
        raise ValueError(f"`kvboost-hf verify` needs {error.name}: pip install 'kvboost_hf[demo]'") from error

    for flag in ("figure", "documents", "codec", "live_quant"):
        if getattr(options, flag):
            raise ValueError(
                f"`--{flag.replace('_', '-')}` does not go with `--turboquant`, which names codecs itself, and whose "
                "figures `--json` writes. Leave out one of the two."
            )
    console = Console(stderr=options.json == STANDARD_OUTPUT)
    model, tokenizer, name = _load(options)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=None)
        report = validate_turboquant(
            model,
            tokenizer,
            prompts=_read_prompts(options.prompts) if options.prompts is not None else None,
            codecs=options.turboquant or CODECS,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    console.print(f"{name}, {report.dtype}\n\n{report}", highlight=False, markup=False, soft_wrap=True)
    if options.json is not None:
        write(options.json, json.dumps({"name": name, **report.as_dict()}, indent=2))
    return 0 if report else 1


def _warm(options: argparse.Namespace) -> int:
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ModuleNotFoundError as error:
        raise ValueError(f"`kvboost-hf warm` needs {error.name}: pip install 'kvboost_hf[demo]'") from error

    if options.system and options.documents:
        raise ValueError("`--system` must be left out with `--documents`, which stand anywhere in prompts.")
    if options.prefix is not None and not options.documents:
        raise ValueError("`--prefix` needs `--documents`: what prompts start with has nothing before it.")
    if options.disk_cache_dir is None:
        _require_lasting(options.tiers)
    add_secrets(options, os.environ, ["api_key"])
    kept = kept_settings(options)
    texts = [_read_text(path) for path in options.files]
    prefix = _read_text(options.prefix) if options.prefix is not None else None
    console = Console()
    model, tokenizer, name = _load_served(options)
    choose_attention(model, options.attn_implementation)
    store = kept.store(model, tokenizer)
    salts = [prompt_salt(options.salt, key) for key in options.api_key or (None,)]
    reports: list[tuple[str, ReuseReport]] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("computing", total=None)

        def advance(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        given = {"tokenizer": tokenizer, "pin": False, "progress": advance, "live_quant": kept.live_config}
        for salt in salts:
            if options.documents:
                found = store.warm(documents=texts, prefix=prefix, salt=salt, **given)
                reports.append((f"{len(texts)} documents", found))
                continue
            for path, text in zip(options.files, texts, strict=True):
                progress.update(task, description=path.name)
                start = _system_message(tokenizer, text) if options.system else text
                reports.append((path.name, store.warm(start, salt=salt, **given)))
        progress.update(task, description="writing", total=None)
        store.flush()
        written = store.stats()["tiers"]
        store.close()
    for what, report in reports:
        console.print(f"{what}: {report}", highlight=False, markup=False, soft_wrap=True)
    tiers = {tier: stats for tier, stats in written.items() if tier not in ("ram", "device")}
    for tier, stats in tiers.items():
        console.print(f"{name} in {tier}: {stats['chunks']} chunks, {stats['bytes']:,} bytes", highlight=False)
    failed = not tiers or any(stats["errors"] for stats in tiers.values())
    return 1 if failed else 0


def _system_message(tokenizer: Any, text: str) -> list[int]:
    """What chats with this system message begin with."""
    if tokenizer.chat_template is None:
        raise ValueError(
            "`--system` needs a model with a chat template. Leave it out, and warm what prompts start with."
        )
    return list(tokenizer.apply_chat_template([{"role": "system", "content": text}], return_dict=False))


def _serve(options: argparse.Namespace) -> int:
    try:
        from kvboost_hf.server.listen import require_free
        from kvboost_hf.server.serve import serve as run
    except ModuleNotFoundError as error:
        raise ValueError(f"`kvboost-hf serve` needs {error.name}: pip install 'kvboost_hf[server]'") from error

    add_secrets(options, os.environ)
    kept, trees = engine_settings(options), draft_trees(options)
    # All of it refuses now, not when the model is there.
    if (tls := server_settings(options, "model", None).tls) is not None:
        tls.context()
    require_free(options.host, options.port)
    model, tokenizer, _ = _load_served(options)
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    settings = server_settings(options, _model_name(options.model), positions)
    run(
        model,
        tokenizer,
        settings,
        kept,
        draft=_load_draft(options, model),
        draft_trees=trees,
        attn_implementation=options.attn_implementation,
        warm=options.warm,
        log_level=options.log_level,
    )
    return 0


def _model_name(model: str | None) -> str:
    """What clients call a model: a name of the hub, or the last part of a folder, whose path is nobody's business."""
    folder = Path(model or EMBEDDED_MODEL_DIR).expanduser()
    return folder.resolve().name if model is None or folder.is_dir() else model


def _inspect(options: argparse.Namespace) -> int:
    try:
        from rich.console import Console
    except ModuleNotFoundError as error:
        raise ValueError(f"`kvboost-hf inspect` needs {error.name}: pip install 'kvboost_hf[demo]'") from error

    tokenizer: Any = None
    if options.tokenizer == "embedded":
        tokenizer = load_embedded()[1]
    elif options.tokenizer is not None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    console = Console(stderr=options.json == STANDARD_OUTPUT)
    _require_lasting(options.tiers)
    lower = open_tiers([_as_it_is(address) for address in options.tiers], None).lower
    failed = False
    try:
        lines = contents(lower, tokenizer.decode if tokenizer is not None else None)
        shown = sorted(lines, key=lambda line: -(line.hits or 0))[: options.limit]
        for table in as_tables([line for line in lines if line in shown]):
            console.print(table)
        console.print(f"{len(shown)} of {len(lines)} shown" if len(shown) < len(lines) else f"{len(lines)} stored")
        for tier in lower:
            stats = tier.stats()
            failed |= bool(stats["errors"])
            told = ", ".join(f"{name} {stats[name]}" for name in ("chunks", "bytes", "errors"))
            console.print(f"{tier.name} at {tier.location}: {told}", highlight=False, markup=False, soft_wrap=True)
    finally:
        for tier in lower:
            tier.close()
    if options.json is not None:
        write(options.json, json.dumps(as_json(lines), indent=2, ensure_ascii=False))
    return 1 if failed else 0


def _require_lasting(tiers: Sequence[str]) -> None:
    if all(parse_tier(address).kind in ("ram", "device") for address in tiers):
        raise ValueError(f"`--tiers` must have one that outlives a process, got {list(tiers)}. Pass disk:FOLDER.")


def _as_it_is(address: str) -> str | Tier:
    """A tier that must be there, and gives nothing up for a budget."""
    spec = parse_tier(address)
    if spec.kind != "disk":
        return address
    if not Path(spec.location).expanduser().is_dir():
        raise ValueError(f"`--tiers` must name what is there, but there is no folder {spec.location!r}.")
    return open_tier(replace(spec, max_bytes=sys.maxsize))


def _read_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be a text in UTF-8: {error}.") from error
    if not text:
        raise ValueError(f"{path} must hold a text, but it is empty.")
    return text


def _read_prompts(path: Path) -> list[Any]:
    text = path.read_text(encoding="utf-8")
    if not text.lstrip().startswith("["):
        return [line for line in text.splitlines() if line.strip()]
    try:
        found: list[Any] = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"`--prompts` must be a prompt on each line or a JSON list, got {path}: {error}.") from error
    return found


if __name__ == "__main__":
    sys.exit(main())
