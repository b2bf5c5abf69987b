"""`kvboost-hf inspect` lists what tiers hold, and `kvboost-hf prune` removes unused files of streamed layers.

Without a tokenizer `inspect` needs no torch, which takes a second or more to import.
"""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvboost_hf.cache.planning.chunks import text_ids
from kvboost_hf.cache.tiers import open_tier, open_tiers, parse_tier, require_lasting
from kvboost_hf.cache.tiers.base import Entry, Kind, Tier, without_secrets
from kvboost_hf.cli.arguments import EMBEDDED, needs_extra, next_steps
from kvboost_hf.outputs import STANDARD_OUTPUT, Progress, say, write, written

if TYPE_CHECKING:
    from rich.table import Table

    from kvboost_hf.offload.prune import LayerFile

_SHOWN_CHARACTERS = 200
DecodeText = Callable[[list[int]], str]


def run_inspect(options: argparse.Namespace) -> int:
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
            console.print(table, crop=False)  # a terminal that is too narrow wraps it
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
    tiers = shlex.join(map(without_secrets, options.tiers))
    warm = (f"kvboost-hf warm FILE --model NAME --tiers {tiers}", "adds the K/V of a text")
    serve = (f"kvboost-hf serve --model NAME --tiers {tiers}", "uses it, and says how much of it is found")
    say(console, next_steps(options, warm, serve), end="")
    return 1 if failed else 0


def _tokenizer(name: str | None) -> Any:
    if name is None:
        return None
    from transformers import AutoTokenizer

    from kvboost_hf.assets import load_embedded
    from kvboost_hf.compat import naming

    if name == EMBEDDED:
        return load_embedded()[1]

    with naming(name):
        return AutoTokenizer.from_pretrained(name)


def _as_it_is(address: str) -> str | Tier:
    """A tier that is there already, opened without a limit that would evict from it."""
    spec = parse_tier(address)
    if spec.kind in ("ram", "device"):
        return address
    if spec.kind not in ("disk", "handover"):
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


@dataclass(frozen=True, slots=True)
class Line:
    """A chunk, or states, in a tier.

    Args:
        tier: The name of the tier.
        model: The first digits of the hash of its model's configuration.
        root: The first digits of the root key, which depends on weights, salt and codec.
        kind: `"chunk"`, `"content"` or `"states"`.
        start: Row token of its first token.
        tokens: Number of tokens.
        nbytes: Bytes of the blob.
        hits: How often it was used, if the tier counts that.
        text: The decoded tokens, if a tokenizer is known.
    """

    tier: str
    model: str
    root: str
    kind: str
    start: int
    tokens: int
    nbytes: int
    hits: int | None
    text: str | None


def contents(tiers: Sequence[Tier], decode: DecodeText | None = None) -> list[Line]:
    """List the contents of tiers, by tier, model and root, in the order of tokens."""
    found: list[tuple[tuple[Any, ...], Line]] = []
    for tier in tiers:
        hits = tier.hits()
        for entry in tier.entries():
            line = _line(tier, entry, hits.get(entry.key), decode)
            found.append(((tier.name, line.model, line.root, entry.start, entry.key), line))
    return [line for _, line in sorted(found, key=lambda item: item[0])]


def _line(tier: Tier, entry: Entry, hits: int | None, decode: DecodeText | None) -> Line:
    ids = [token for token in text_ids(entry.tokens).tolist() if token >= 0]
    text = decode(ids) if decode is not None else None
    count = len(entry.tokens)
    names = (entry.model.hex()[:8], entry.root.hex()[:8], entry.kind.value)
    return Line(tier.name, *names, entry.start, count, entry.nbytes, hits, text)


def as_tables(lines: Sequence[Line]) -> Iterator["Table"]:
    """The lines as `rich` tables, one for each tier, model and root."""
    from rich.markup import escape
    from rich.table import Table

    for (tier, model, root), group in groupby(lines, key=lambda line: (line.tier, line.model, line.root)):
        own = list(group)
        with_text = any(line.text is not None for line in own)
        title = f"{tier}, model {model}, root {root}"
        table = Table(title=title, title_justify="left", expand=with_text)
        table.add_column("kind", no_wrap=True, min_width=max(len(line.kind) for line in own))
        for name in ("from", "tokens", "bytes", "hits"):
            table.add_column(name, justify="right", min_width=len(name), no_wrap=True)
        if with_text:
            table.add_column("text", overflow="ellipsis", no_wrap=True, ratio=1)
        for line in own:
            start = str(line.start) if line.kind != Kind.STATES.value else ""
            hits = str(line.hits) if line.hits is not None else ""
            text = escape(repr((line.text or "")[:_SHOWN_CHARACTERS])[1:-1])
            cells = [line.kind, start, str(line.tokens), f"{line.nbytes:,}", hits]
            table.add_row(*cells, *([text] if with_text else []))
        yield table


def as_json(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """The lines as JSON."""
    return [asdict(line) for line in lines]


def run_prune(options: argparse.Namespace) -> int:
    """Print what is in the folder, by model, and what was removed."""
    from kvboost_hf.offload.prune import former_files, prune_layers

    found = prune_layers(options.folder, dry_run=options.dry_run)
    by_model = sorted(found, key=_told)
    lines = [f"{state:<8} {model}: {_total(list(files))}" for (state, model), files in groupby(by_model, _told)]
    unused = [each for each in found if not each.in_use]
    lines.append(f"{'Would remove' if options.dry_run else 'Removed'} {_total(unused)} of {_total(found)}.")
    if former := former_files(options.folder):
        lines.append(
            f"{len(former)} files ({former[0].name} and the like) are of an earlier release, whose processes hold no "
            "locks. Delete them once none of them runs."
        )
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def _told(each: "LayerFile") -> tuple[str, str]:
    return "in use" if each.in_use else "unused", ", ".join(each.models) or "a model that was in memory"


def _total(files: Sequence["LayerFile"]) -> str:
    nbytes = sum(each.nbytes for each in files)
    size = f"{nbytes / 10**9:.1f} GB" if nbytes >= 10**9 else f"{nbytes / 10**6:.1f} MB"
    return f"{len(files)} file{'s' * (len(files) != 1)} ({size})"
