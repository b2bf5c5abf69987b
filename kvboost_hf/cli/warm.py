"""`kvboost-hf warm`: computes K/V of files before the first request, and keeps it in tiers."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvboost_hf.cache.planning.report import ReuseReport
from kvboost_hf.cache.store.chunk_store import ChunkStore
from kvboost_hf.cli.arguments import Commands, needs_extra, require_lasting
from kvboost_hf.cli.config_file import add_config
from kvboost_hf.cli.models import add_model, load_model
from kvboost_hf.server.flags import add_api_keys, add_kept, add_streaming
from kvboost_hf.server.keys import prompt_salt
from kvboost_hf.server.options import add_secrets, kept_settings, streaming_config
from kvboost_hf.server.sharing import choose_attention

_Warmed = list[tuple[str, ReuseReport]]  # each with a name to show


def add(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("warm", help="compute K/V of files ahead of the first request, and keep it")
    add_config(parser)
    add_model(parser)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="texts; each is the start of prompts")
    parser.add_argument("--documents", action="store_true", help="they may stand anywhere in prompts (mode 'blend')")
    text = "each is the system message of chats, put into the chat template, as a server does with it"
    parser.add_argument("--system", action="store_true", help=text)
    parser.add_argument("--prefix", type=Path, metavar="FILE", help="with --documents: a text that stands before each")
    finding = parser.add_argument_group(
        "what a server must have alike to find it, by the same flags with the same defaults"
    )
    add_api_keys(finding)
    add_kept(finding)
    add_streaming(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Compute, store and show; returns 1 if no tier has it, or one has failed."""
    with needs_extra("demo", "warm"):
        from rich.console import Console
        from rich.progress import Progress

    if options.system and options.documents:
        raise ValueError("`--system` must be left out with `--documents`, which stand anywhere in prompts.")
    if options.prefix is not None and not options.documents:
        raise ValueError("`--prefix` needs `--documents`: what prompts start with has nothing before it.")
    if options.disk_cache_dir is None:
        require_lasting(options.tiers)
    add_secrets(options, os.environ, ["api_key"])
    kept = kept_settings(options)
    texts = [_read_text(path) for path in options.files]
    prefix = _read_text(options.prefix) if options.prefix is not None else None
    console = Console()
    model, tokenizer, name = load_model(options, streaming_config(options))
    choose_attention(model, options.attn_implementation)
    store = kept.store(model, tokenizer)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("computing", total=None)

        def advance(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        given = {"tokenizer": tokenizer, "pin": False, "progress": advance, "live_quant": kept.live_config}
        if options.documents:
            reports = _warm_documents(store, options, texts, prefix, given)
        else:
            reports = _warm_starts(store, options, texts, given, lambda file: progress.update(task, description=file))
        progress.update(task, description="writing", total=None)
        store.flush()
        written = store.stats()["tiers"]
        store.close()
    for warmed, report in reports:
        console.print(f"{warmed}: {report}", highlight=False, markup=False, soft_wrap=True)
    tiers = {tier: stats for tier, stats in written.items() if tier not in ("ram", "device")}
    for tier, stats in tiers.items():
        console.print(f"{name} in {tier}: {stats['chunks']} chunks, {stats['bytes']:,} bytes", highlight=False)
    failed = not tiers or any(stats["errors"] for stats in tiers.values())
    return 1 if failed else 0


def _salts(options: argparse.Namespace) -> list[bytes]:
    return [prompt_salt(options.salt, key) for key in options.api_key or (None,)]


def _warm_documents(
    store: ChunkStore, options: argparse.Namespace, texts: list[str], prefix: str | None, given: dict[str, Any]
) -> _Warmed:
    return [
        (f"{len(texts)} documents", store.warm(documents=texts, prefix=prefix, salt=salt, **given))
        for salt in _salts(options)
    ]


def _warm_starts(
    store: ChunkStore,
    options: argparse.Namespace,
    texts: list[str],
    given: dict[str, Any],
    begin: Callable[[str], None],
) -> _Warmed:
    reports: _Warmed = []
    for salt in _salts(options):
        for path, text in zip(options.files, texts, strict=True):
            begin(path.name)
            start = _system_message(given["tokenizer"], text) if options.system else text
            reports.append((path.name, store.warm(start, salt=salt, **given)))
    return reports


def _system_message(tokenizer: Any, text: str) -> list[int]:
    """The ids that chats with this system message begin with."""
    if tokenizer.chat_template is None:
        raise ValueError(
            "`--system` needs a model with a chat template. Leave it out, and warm what prompts start with."
        )
    return list(tokenizer.apply_chat_template([{"role": "system", "content": text}], return_dict=False))


def _read_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be a text in UTF-8: {error}.") from error
    if not text:
        raise ValueError(f"{path} must hold a text, but it is empty.")
    return text
