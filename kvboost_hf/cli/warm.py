"""`kvboost-hf warm`: computes K/V of files before the first request, and keeps it in tiers."""

import argparse
import os
import shlex
from functools import partial
from typing import Any

from kvboost_hf.cache.planning.report import ReuseReport
from kvboost_hf.cache.store.chunk_store import ChunkStore
from kvboost_hf.cache.tiers import require_lasting
from kvboost_hf.cache.tiers.base import without_secrets
from kvboost_hf.cli.arguments import needs_extra, next_steps, read_text
from kvboost_hf.cli.loading import load_shown
from kvboost_hf.cli.server_settings import add_secrets, engine_settings, streaming_config
from kvboost_hf.outputs import Progress, say
from kvboost_hf.server.generation.sharing import choose_attention
from kvboost_hf.server.jobs import prompt_salt

_SECRET = ("api_key", "salt")
_OWN = ("help", "config", "documents", "system", "chat", "prefix")  # flags that `serve` does not have, or not as these
_Warmed = list[tuple[str, ReuseReport]]  # each with a name to show


def run_warm(options: argparse.Namespace) -> int:
    """Compute, store and show; returns 1 if no tier has all of it, or one has failed."""
    with needs_extra("demo", "warm"):
        from rich.console import Console

    if sum(map(bool, (options.system, options.chat, options.documents))) > 1:
        raise ValueError(
            "One of `--system`, `--chat` and `--documents` may be given: files are the system messages of chats, "
            "their first messages, or texts that stand anywhere in prompts."
        )
    if options.prefix is not None and not options.documents:
        raise ValueError("`--prefix` needs `--documents`: what prompts start with has nothing before it.")
    if options.disk_cache_dir is None:
        require_lasting(options.tiers)
    flags = _shared_flags(options)
    add_secrets(options, os.environ, ["api_key"])
    kept = engine_settings(options)
    texts = [] if options.chat else [read_text(path) for path in options.files]
    chats = _chats(options, texts)
    prefix = read_text(options.prefix) if options.prefix is not None else None
    console = Console()
    with Progress() as shown:
        model, tokenizer, name = load_shown(options, shown, streaming_config(options))
        shown.show(f"running {name} on a few tokens")
        choose_attention(model, options.attn_implementation)
        store = kept.store(model, tokenizer)
        given = {"tokenizer": tokenizer, "pin": False, "live_quant": kept.live_config}
        if options.documents:
            reports = _warm_documents(store, options, texts, prefix, given, shown)
        else:
            reports = _warm_starts(store, options, chats or [{"text_or_ids": text} for text in texts], given, shown)
        shown.show("writing to tiers")
        store.flush()
        lost, written = len(store.unkept()), store.stats()["tiers"]
        store.close()
    for warmed, report in reports:
        say(console, f"{warmed}: {report}")
    if not chats and any(report.start_reason for _, report in reports):
        say(console, "With `--system`, a file is the system message of chats; with `--chat`, it has their messages.")
    tiers = {tier: stats for tier, stats in written.items() if tier not in ("ram", "device")}
    for tier, stats in tiers.items():
        console.print(f"{name} in {tier}: {stats['chunks']} chunks, {stats['bytes']:,} bytes", highlight=False)
    refused = any(stats["errors"] for stats in tiers.values())
    failed = not tiers or lost > 0 or refused
    for tier, stats in tiers.items():
        if stats["errors"]:
            say(
                console,
                f"{tier} has refused {stats['errors']} writes or reads, and lacks that K/V; the log above says why. "
                "Where a disk is full, make room or name another folder; then run this command again.",
            )
    if lost and tiers and not refused:
        say(console, f"{lost} chunks of it are not there: they have no room beside others. Make room, or warm less.")
    lasting = [without_secrets(tier) for tier in options.tiers if not tier.startswith(("ram", "device"))]
    lasting += [f"disk:{options.disk_cache_dir}"] if options.disk_cache_dir is not None else []
    steps = [(shlex.join(["kvboost-hf", "inspect", "--tiers", *lasting]), "what a tier holds")]
    if not failed:
        steps.insert(0, (shlex.join(["kvboost-hf", "serve", *flags]), "finds it: these flags must be alike"))
    say(console, next_steps(options, *steps), end="")
    return 1 if failed else 0


def _shared_flags(options: argparse.Namespace) -> list[str]:
    """The flags of this call that a server takes, too; keys and passwords are not shown."""
    flags = ["--config", str(options.config)] if options.config is not None else []
    for action in options.parser._actions:
        value = getattr(options, action.dest, None)
        if not action.option_strings or action.dest in _OWN or value == action.default:
            continue  # what `--config` gives is a default, too
        if action.dest in _SECRET:
            flags += [action.option_strings[0], "…"]
            continue
        values = value if isinstance(value, list) else [] if value is True else [value]
        flags += [action.option_strings[0], *(without_secrets(str(each)) for each in values)]
    return flags


def _salts(options: argparse.Namespace) -> list[bytes]:
    return [prompt_salt(options.salt, key) for key in options.api_key or (None,)]


def _warm_documents(
    store: ChunkStore,
    options: argparse.Namespace,
    texts: list[str],
    prefix: str | None,
    given: dict[str, Any],
    shown: Progress,
) -> _Warmed:
    name = f"{len(texts)} documents"
    progress = partial(shown.show, f"computing tokens of {name}")
    progress()
    return [
        (name, store.warm(documents=texts, prefix=prefix, salt=salt, progress=progress, **given))
        for salt in _salts(options)
    ]


def _warm_starts(
    store: ChunkStore,
    options: argparse.Namespace,
    starts: list[dict[str, Any]],
    given: dict[str, Any],
    shown: Progress,
) -> _Warmed:
    reports: _Warmed = []
    for salt in _salts(options):
        for path, start in zip(options.files, starts, strict=True):
            progress = partial(shown.show, f"computing tokens of {path.name}")
            progress()
            reports.append((path.name, store.warm(**start, salt=salt, progress=progress, **given)))
    return reports


def _chats(options: argparse.Namespace, texts: list[str]) -> list[dict[str, Any]]:
    """The arguments of `ChunkStore.warm` for the messages that files have; none where files are texts."""
    if options.system:
        return [{"text_or_ids": [{"role": "system", "content": text}]} for text in texts]
    if not options.chat:
        return []
    with needs_extra("server", "warm --chat"):  # messages and tools are read as a server reads them
        from kvboost_hf.server.requests.texts import read_chat
    return [
        {
            "text_or_ids": [message.body for message in chat.messages or ()],
            "tools": [tool.body for tool in chat.tools or ()],
            "chat_template_kwargs": chat.template_arguments,
        }
        for chat in map(read_chat, options.files)
    ]
