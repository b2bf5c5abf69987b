"""`kvboost-hf inspect`: lists what tiers hold."""

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvboost_hf.assets import load_embedded
from kvboost_hf.cache.tiers.addresses import open_tier, open_tiers, parse_tier
from kvboost_hf.cache.tiers.base import Tier
from kvboost_hf.cli.arguments import Commands, add_json, needs_extra, positive, require_lasting
from kvboost_hf.cli.next_steps import next_steps
from kvboost_hf.contents import as_json, as_tables, contents
from kvboost_hf.engine.load import naming
from kvboost_hf.outputs import STANDARD_OUTPUT, say, write, written
from kvboost_hf.progress import Progress


def add(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("inspect", help="show what is stored: tokens, text, bytes, hits, tier")
    text = "what to look into, such as disk:~/.cache/kvboost_hf or redis://localhost:6379"
    parser.add_argument("--tiers", nargs="+", required=True, metavar="ADDRESS", help=text)
    parser.add_argument("--tokenizer", metavar="NAME", help="shows text; a hub name or folder, or 'embedded'")
    parser.add_argument("--limit", type=positive, default=50, help="show those used most (default: 50)")
    add_json(parser, "write all of it ('-' for standard output)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print a table of chunks; returns 1 if a tier has failed."""
    with needs_extra("demo", "inspect"):
        from rich.console import Console

    console = Console(stderr=options.json == STANDARD_OUTPUT)
    require_lasting(options.tiers)
    tokenizer = _tokenizer(options.tokenizer)
    lower = open_tiers([_as_it_is(address) for address in options.tiers], None).lower
    failed = False
    try:
        with Progress("reading what is stored"):
            lines = contents(lower, tokenizer.decode if tokenizer is not None else None)
        shown = sorted(lines, key=lambda line: -(line.hits or 0))[: options.limit]
        for table in as_tables([line for line in lines if line in shown]):
            console.print(table)
        console.print(f"{len(shown)} of {len(lines)} shown" if len(shown) < len(lines) else f"{len(lines)} stored")
        for tier in lower:
            stats = tier.stats()
            failed |= bool(stats["errors"])
            told = ", ".join(f"{name} {stats[name]}" for name in ("chunks", "bytes", "errors"))
            say(console, f"{tier.name} at {tier.location}: {told}")
    finally:
        for tier in lower:
            tier.close()
    if options.json is not None:
        write(options.json, json.dumps(as_json(lines), indent=2, ensure_ascii=False))
        for line in written(options.json):
            say(console, line)
    warm = ("kvboost-hf warm FILE --model NAME --tiers ADDRESS", "adds the K/V of a text")
    serve = ("kvboost-hf serve --model NAME --tiers ADDRESS", "uses it, and says how much of it is found")
    say(console, next_steps(options, warm, serve), end="")
    return 1 if failed else 0


def _tokenizer(name: str | None) -> Any:
    if name is None:
        return None
    if name == "embedded":
        return load_embedded()[1]
    from transformers import AutoTokenizer

    with naming(name):
        return AutoTokenizer.from_pretrained(name)


def _as_it_is(address: str) -> str | Tier:
    """A tier that is there already, opened without a limit that would evict from it."""
    spec = parse_tier(address)
    if spec.kind in ("ram", "device"):
        return address
    if spec.kind != "disk":
        return open_tier(replace(spec, max_bytes=None))
    folder = Path(spec.location).expanduser()
    if not os.path.isdir(folder):
        raise ValueError(f"`--tiers` must name what is there, but there is no folder {spec.location!r}.")
    from kvboost_hf.cache.tiers.disk import holds_blobs

    if not holds_blobs(folder):
        raise ValueError(
            f"`--tiers` must name what is there, but no K/V was ever stored in the folder {spec.location!r}."
        )
    return open_tier(replace(spec, max_bytes=sys.maxsize))
