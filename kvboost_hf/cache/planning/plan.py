"""Plans which columns of a prompt come from stored chunks, by pure functions.

    row tokens   [ held | served from the store | computed ]
                 0     held                   hit          n

The K/V of the first `held` tokens is in the live cache already. The walk starts at the last chunk border at or before
`held` and follows the chain of prefix keys through the store, chunk by chunk. Where no whole chunk matches, the stored
chunk that shares most leading tokens with the row serves these (attention is causal: the K/V of a token never depends
on later tokens).

Models with states (linear attention) can only continue from a token at which the states were saved: a hit ends at
such a token.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kvboost_hf.cache.planning.chunks import Chunker, Tokens, common_length, prefix_key

# A stored chunk can serve a part of itself only if at least this many of its leading tokens agree.
HEAD_TOKENS = 8


class Chunk(Protocol):
    """A stored chunk, as far as planning needs it."""

    @property
    def prefix_key(self) -> bytes: ...
    @property
    def tokens(self) -> Tokens: ...


class SavedState(Protocol):
    """Stored states, as far as planning needs them."""

    @property
    def tokens(self) -> Tokens: ...  # from the chunk border before them to where they were saved


class ChunkIndex(Protocol):
    """The lookups of a store that planning needs."""

    def find(self, key: bytes, tokens: Tokens) -> "Chunk | None":
        """The chunk under prefix key `key`, if its tokens are `tokens`."""
        ...

    def siblings(self, parent: bytes, head: Tokens) -> "Iterable[Chunk]":
        """Chunks that continue `parent` and start with the `HEAD_TOKENS` tokens `head`."""
        ...

    def states_after(self, parent: bytes, head: Tokens) -> "Iterable[SavedState]":
        """States saved in the chunk after `parent`, or at its end, that starts with `head`."""
        ...


@dataclass(frozen=True, slots=True)
class Border:
    """A chunk border of a row: the prefix key of all that is before it."""

    at: int  # in row tokens
    key: bytes


@dataclass(frozen=True, slots=True)
class Segment:
    """Row tokens [start, stop), served by a chunk that starts at row token `origin`."""

    chunk: Chunk
    origin: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Miss:
    """Where the walk through the store ended, for `ReuseReport.explain`."""

    at: int  # the first row token that was not served
    border: Border  # the chunk border before it
    wanted_key: bytes | None  # prefix key of the whole chunk there; None where the row ends before its cut
    nearest: Tokens | None  # tokens, from the border on, of the stored chunk that agrees longest


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The part of a row that the store can serve."""

    hit: int  # K/V of row tokens [0, hit) need no computing
    segments: tuple[Segment, ...]
    borders: tuple[Border, ...]  # chunk borders after those of the held tokens, up to `hit`
    miss: Miss | None  # None where only the limit ended the walk
    states: Mapping[int, SavedState] | None = None  # by row token, up to `hit`; None for a model without states

    def reach(self, stop: int) -> int:
        """The last row token, at most `stop`, from which the row can be continued; 0 if there is none."""
        if self.states is None:
            return min(self.hit, stop) if self.segments else 0
        return max((at for at in self.states if at <= stop), default=0)


def plan_row(
    tokens: Tokens,
    held: int,
    border: Border,
    limit: int,
    chunker: Chunker,
    index: ChunkIndex,
    *,
    stateful: bool = False,
) -> RowPlan:
    """Walk a row through the store.

    Args:
        tokens: All tokens of the row, held and new.
        held: How many of them the live cache holds.
        border: The last chunk border at or before `held`.
        limit: At most this many row tokens may be served; the logits of the rest are wanted.
        chunker: Where chunks end.
        index: The store.
        stateful: The model can only continue from saved states.

    Returns:
        The plan. `hit >= held`, and `hit <= max(held, limit)`.
    """
    plan = _walk(tokens, held, border, limit, chunker, index)
    if not stateful:
        return plan
    return replace(plan, states=_states(tokens, held, [border, *plan.borders], plan.hit, index))


def trim_row(plan: RowPlan, saving: Callable[[Segment], float]) -> RowPlan:
    """Drop segments at the end of a row's plan that save nothing.

    Args:
        plan: Of the row.
        saving: The time that serving a segment saves compared to computing it; negative where it costs more.

    Returns:
        The plan up to the segment with the largest saving in all.
    """
    total = best = 0.0
    keep = 0
    for number, segment in enumerate(plan.segments, start=1):
        total += saving(segment)
        if total >= best:
            best, keep = total, number
    if keep == len(plan.segments):
        return plan
    hit = plan.segments[keep].start
    states = {at: saved for at, saved in plan.states.items() if at <= hit} if plan.states is not None else None
    borders = tuple(border for border in plan.borders if border.at <= hit)
    return RowPlan(hit, plan.segments[:keep], borders, None, states)


def _states(
    tokens: Tokens, held: int, borders: Sequence[Border], hit: int, index: ChunkIndex
) -> dict[int, SavedState]:
    """The states of a row that were saved at tokens in (held, hit]."""
    found: dict[int, SavedState] = {}
    for border in borders:
        rest = tokens[border.at :]
        for saved in index.states_after(border.key, rest[:HEAD_TOKENS]) if len(rest) >= HEAD_TOKENS else ():
            at = border.at + len(saved.tokens)
            if held < at <= hit and common_length(saved.tokens, rest) == len(saved.tokens):
                found[at] = saved
    return found


def _walk(tokens: Tokens, held: int, border: Border, limit: int, chunker: Chunker, index: ChunkIndex) -> RowPlan:
    segments: list[Segment] = []
    borders: list[Border] = []
    at = held
    while at < limit:
        cut = chunker.next_cut(tokens, border.at)
        wanted = None
        if cut is not None:
            wanted = prefix_key(border.key, tokens[border.at : cut])
            chunk = index.find(wanted, tokens[border.at : cut])
            if chunk is not None:
                stop = min(cut, limit)
                if stop > at:
                    segments.append(Segment(chunk, border.at, at, stop))
                    at = stop
                if stop < cut:
                    break
                border = Border(cut, wanted)
                borders.append(border)
                continue
        nearest, agreed = _nearest(tokens, border, index)
        stop = min(border.at + agreed, limit)
        if nearest is not None and stop > at:
            segments.append(Segment(nearest, border.at, at, stop))
            at = stop
        if at < limit:
            miss = Miss(at, border, wanted, None if nearest is None else nearest.tokens)
            return RowPlan(at, tuple(segments), tuple(borders), miss)
    return RowPlan(at, tuple(segments), tuple(borders), None)


def _nearest(tokens: Tokens, border: Border, index: ChunkIndex) -> tuple[Chunk | None, int]:
    """The stored chunk after `border` that shares most leading tokens with the row, and how many."""
    rest = tokens[border.at :]
    best: Chunk | None = None
    agreed = 0
    if len(rest) >= HEAD_TOKENS:
        for chunk in index.siblings(border.key, rest[:HEAD_TOKENS]):
            shared = common_length(chunk.tokens, rest)
            if shared > agreed:
                best, agreed = chunk, shared
    return best, agreed


@dataclass(frozen=True, slots=True)
class ReusePlan:
    """The columns (padding included) that a forward over a batch takes from the store."""

    held: int  # columns [0, held) are in the live cache
    filled: int  # columns [held, filled) are taken from the store, or computed for some rows ahead of the others
    rows: tuple[RowPlan, ...]
    pads: tuple[int, ...]  # columns of left padding of each row

    def starts(self, row: int) -> int:
        """The column up to which a row can be served, if it is then computed up to `filled`."""
        return max(self.held, self.rows[row].reach(self.filled - self.pads[row]) + self.pads[row])

    @property
    def last_border(self) -> int:
        """The column at which the next chunk of some row begins: it can only be stored if it is held from there."""
        return min(
            max((border.at + pad for border in plan.borders if border.at + pad <= self.filled), default=self.held)
            for plan, pad in zip(self.rows, self.pads, strict=True)
        )

    @property
    def cold_groups(self) -> dict[int, list[int]]:
        """Rows that can be served only up to a column before `filled`, by that column: they are prefilled first."""
        behind = [row for row in range(len(self.rows)) if self.starts(row) < self.filled]
        # Rows of which nothing is stored form one group, from where the first of them begins.
        unseen = [row for row in behind if self.starts(row) <= max(self.held, self.pads[row])]
        groups: dict[int, list[int]] = {}
        for row in behind:
            if row not in unseen:
                groups.setdefault(self.starts(row), []).append(row)
        if unseen:
            start = max(self.held, min(self.pads[row] for row in unseen))
            while start in groups:  # rows there have stored K/V: one more column of padding keeps the groups apart
                start -= 1
            groups[start] = unseen
        return groups

    @property
    def branch(self) -> int | None:
        """The column at which stored K/V ends, if behind the last saved states: prompts have branched there."""
        reach = max(plan.hit + pad for plan, pad in zip(self.rows, self.pads, strict=True))
        return reach if reach > self.filled and any(plan.segments for plan in self.rows) else None


def plan_batch(rows: Sequence[RowPlan], pads: Sequence[int], held: int, limit: int, min_saving: int) -> ReusePlan:
    """Combine the plans of rows into one for the batch.

    A forward computes the same columns of every row. Up to the shortest hit all rows are served. A later cut serves
    more of the warm rows, but needs an extra forward for each group of rows that lack those columns. The cut with the
    fewest computed tokens is chosen, where each extra forward counts as `min_saving` tokens.

    Args:
        rows: The plan of each row.
        pads: Columns of left padding of each row.
        held: Columns in the live cache.
        limit: At most this many columns may be filled.
        min_saving: Tokens that an extra forward must save.
    """
    cuts = {held}
    for plan, pad in zip(rows, pads, strict=True):
        if plan.states is not None:
            # A state takes in padding that comes after it: every row must have begun.
            cuts |= {at + pad for at in plan.states if at + pad > max(pads)}
        elif plan.segments:
            cuts.add(plan.hit + pad)
    plans = [ReusePlan(held=held, filled=cut, rows=tuple(rows), pads=tuple(pads)) for cut in sorted(cuts)]

    def cost(plan: ReusePlan) -> int:
        ahead = sum((plan.filled - column) * len(group) for column, group in plan.cold_groups.items())
        return ahead + len(rows) * (limit - plan.filled) + min_saving * len(plan.cold_groups)

    return min(plans, key=cost)
