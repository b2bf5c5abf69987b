"""Lists the chunks and states in storage tiers, for `kvboost-hf inspect`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from kvboost_hf.cache.planning.chunks import text_ids
from kvboost_hf.cache.tiers.base import Entry, Kind, Tier

if TYPE_CHECKING:
    from rich.table import Table

_SHOWN_CHARACTERS = 200

Decode = Callable[[list[int]], str]


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


def contents(tiers: Sequence[Tier], decode: Decode | None = None) -> list[Line]:
    """List the contents of tiers, by tier, model and root, in the order of tokens.

    Args:
        tiers: Open tiers.
        decode: Decodes token ids to text.
    """
    found: list[tuple[tuple[Any, ...], Line]] = []
    for tier in tiers:
        hits = tier.hits()
        for entry in tier.entries():
            line = _line(tier, entry, hits.get(entry.key), decode)
            found.append(((tier.name, line.model, line.root, entry.start, entry.key), line))
    return [line for _, line in sorted(found, key=lambda item: item[0])]


def _line(tier: Tier, entry: Entry, hits: int | None, decode: Decode | None) -> Line:
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
