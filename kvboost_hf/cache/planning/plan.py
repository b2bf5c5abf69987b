"""Plans which columns of a prompt come from stored chunks, by pure functions.

    row tokens   [ held | served from the store | computed ]
                 0     held                   hit          n

The K/V of the first `held` tokens is in the live cache already. The walk starts at the last chunk border at or before
`held` and follows the chain of prefix keys through the store, chunk by chunk. Where no whole chunk matches, the stored
chunk that shares most leading tokens with the row serves these (attention is causal: the K/V of a token never depends
on later tokens).

Models with states (linear attention) can only continue from a token at which the states were saved: a hit ends at
such a token.

What several rows of a batch begin with, and the store does not have, is computed once: see `beginnings.py`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kvboost_hf.cache.planning.beginnings import Stem, find_stems, in_groups, paths_of
from kvboost_hf.cache.planning.chunks import HEAD_TOKENS, Chunker, Tokens, common_length, prefix_key


class Chunk(Protocol):
    """A stored chunk, as far as planning needs it."""

    @property
    def key(self) -> bytes: ...
    @property
    def parent(self) -> bytes: ...  # key of the chunk that it was computed directly behind
    @property
    def start(self) -> int: ...  # row token of its first token, when it was computed
    @property
    def tokens(self) -> Tokens: ...
    @property
    def length(self) -> int: ...  # of these
    @property
    def text(self) -> bytes: ...  # `text_of` these
    @property
    def content_only(self) -> bool: ...  # its K/V is not that of a prompt computed whole


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
    piece: bytes | None = None  # key of the chunk that ends there, if that is found by its content only


@dataclass(frozen=True, slots=True)
class Segment:
    """Row tokens [start, stop), which are those of `chunk` from its token `offset` on."""

    chunk: Chunk
    offset: int
    start: int
    stop: int
    moved: bool = False  # the chunk may have stood elsewhere, and behind other tokens
    continues: bool = False  # a moved one that was computed directly behind the text that is before it now: no seam

    @property
    def shift(self) -> int:
        """New position minus old one."""
        return self.start - self.offset - self.chunk.start

    @property
    def to_end(self) -> bool:
        """Whether it goes on to the end of the chunk."""
        return self.offset + self.stop - self.start == self.chunk.length


@dataclass(frozen=True, slots=True)
class Miss:
    """Where the walk through the store ended, for `ReuseReport.explain`."""

    at: int  # the first row token that was not served
    border: Border  # the chunk border before it
    wanted_key: bytes | None  # prefix key of the whole chunk there; None where the row ends before its cut
    nearest: Tokens | None  # tokens, from the border on, of the stored chunk that agrees longest
    is_slow: bool = False  # what is stored there takes longer to load than to compute


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
    """Walk a row through the store, from the last chunk `border` at or before the `held` tokens on.

    At most `limit` tokens may be served: the logits of the rest are wanted. The plan has `hit >= held`, and `hit <=
    max(held, limit)`.
    """
    plan = _walk(tokens, held, border, limit, chunker, index)
    if not stateful:
        return plan
    return replace(plan, states=_states(tokens, held, [border, *plan.borders], plan.hit, index))


def trim_row(plan: RowPlan, saving: Callable[[Segment], float]) -> RowPlan:
    """Cut a row's plan off behind the segment up to which it saves most in all.

    `saving` is the time that serving a segment saves compared to computing it; negative where it costs more.
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
    return RowPlan(hit, plan.segments[:keep], borders, Miss(hit, Border(hit, b""), None, None, is_slow=True), states)


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
                    segments.append(Segment(chunk, at - border.at, at, stop))
                    at = stop
                if stop < cut:
                    break
                border = Border(cut, wanted)
                borders.append(border)
                continue
        nearest, agreed = _nearest(tokens, border, index)
        stop = min(border.at + agreed, limit)
        if nearest is not None and stop > at:
            segments.append(Segment(nearest, at - border.at, at, stop))
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
            if agreed < min(chunk.length, len(rest)) and chunk.tokens[agreed] == rest[agreed]:
                shared = common_length(chunk.tokens, rest)
                if shared > agreed:
                    best, agreed = chunk, shared
    return best, agreed


@dataclass(frozen=True, slots=True)
class ReusePlan:
    """The columns (padding included) that a forward over a batch takes from the store, or has computed ahead."""

    held: int  # columns [0, held) are in the live cache
    filled: int  # columns [held, filled) are taken from the store, or computed for some rows ahead of the others
    rows: tuple[RowPlan, ...]
    pads: tuple[int, ...]  # columns of left padding of each row
    paths: tuple[tuple[Stem, ...], ...] = ()  # of each row, what is computed once for it and others; or no rows
    stems: tuple[tuple[Stem, ...], ...] = ()  # all of these, in the forwards that compute them

    def path(self, row: int) -> tuple[Stem, ...]:
        """What is computed once for a row and others, in order."""
        return self.paths[row] if self.paths else ()

    def reach(self, row: int, stop: int) -> int:
        """The last token of a row, at most `stop`, from which it can be continued; 0 if there is none."""
        plan, path = self.rows[row], self.path(row)
        reached = plan.reach(stop)
        if plan.states is None:
            return max(reached, min(path[-1].stop, stop)) if path else reached
        return max((stem.stop for stem in path if reached < stem.stop <= stop), default=reached)

    def starts(self, row: int) -> int:
        """The column up to which a row can be served, if it is then computed up to `filled`."""
        plan, pad = self.rows[row], self.pads[row]
        if plan.states is None and not self.paths:
            reach = min(plan.hit, self.filled - pad) if plan.segments else 0
        else:
            reach = self.reach(row, self.filled - pad)
        return max(self.held, reach + pad)

    @property
    def last_border(self) -> int:
        """The column at which the next chunk of some row begins: it can only be stored if it is held from there."""
        last: list[int] = []
        for plan, pad in zip(self.rows, self.pads, strict=True):
            ends = [border.at + pad for border in plan.borders if border.at + pad <= self.filled]
            last.append(max(ends, default=self.held))
        return min(last)

    @property
    def cold_groups(self) -> dict[int, list[int]]:
        """Rows that can be served only up to a column before `filled`, by that column: they are prefilled first."""
        groups: dict[int, list[int]] = {}
        unseen: list[int] = []  # rows of which nothing is stored form one group, from where the first of them begins
        for row, pad in enumerate(self.pads):
            start = self.starts(row)
            if start < self.filled and start <= max(self.held, pad):
                unseen.append(row)
            elif start < self.filled:
                groups.setdefault(start, []).append(row)
        if unseen:
            start = max(self.held, min([self.pads[row] for row in unseen]))
            while start in groups:  # rows there have stored K/V, and are no part of this group
                start -= 1
            groups[start] = unseen
        return groups

    @property
    def ahead(self) -> int:
        """Tokens, padding included, in the forwards that run ahead of that over the whole batch."""
        cold = sum([(self.filled - column) * len(group) for column, group in self.cold_groups.items()])
        return cold + sum([max(map(len, group)) * len(group) for group in self.stems])

    def cost(self, limit: int, min_saving: int) -> int:
        """Tokens up to column `limit` that are computed, where each forward ahead counts as `min_saving` more."""
        forwards = len(self.cold_groups) + len(self.stems)
        return self.ahead + len(self.rows) * (limit - self.filled) + min_saving * forwards

    @property
    def branch(self) -> int | None:
        """The column at which stored K/V ends, if behind the last saved states: prompts have branched there."""
        reach = max(plan.hit + pad for plan, pad in zip(self.rows, self.pads, strict=True))
        return reach if reach > self.filled and any(plan.segments for plan in self.rows) else None


def plan_batch(rows: Sequence[RowPlan], pads: Sequence[int], held: int, limit: int, min_saving: int) -> ReusePlan:
    """Combine the plans of rows into one for the batch; at most `limit` columns may be filled.

    A forward computes the same columns of every row. Up to the shortest hit all rows are served. A later cut serves
    more of the warm rows, but needs an extra forward for each group of rows that lack those columns. The cut with the
    fewest computed tokens is chosen, where each extra forward counts as `min_saving` tokens.
    """
    plans = _cuts(ReusePlan(held, held, tuple(rows), tuple(pads)))
    if len(rows) == 1:  # no other row is behind: the later the cut, the less is computed
        return plans[-1]
    return min(plans, key=lambda plan: plan.cost(limit, min_saving))


def plan_shared(
    alone: ReusePlan, tokens: Sequence[Tokens], first: int, limit: int, stems_to: int, min_saving: int
) -> ReusePlan:
    """A plan that also computes once what several rows begin with, if that is less work; else the plan `alone` itself.

    At most `limit` columns may be filled, and at most `stems_to` computed once. The ids that the caller passed begin
    at column `first`.
    """
    pads, held, batch = alone.pads, alone.held, len(alone.rows)
    known = [max(row.reach(limit - pad), held - pad, 0) for row, pad in zip(alone.rows, pads, strict=True)]
    ends = [max(stems_to - pad, 0) for pad in pads]
    found = find_stems([row[:end] for row, end in zip(tokens, ends, strict=True)], known, min_saving)
    if not found:
        return alone
    paths = tuple(map(tuple, paths_of(found, batch)))
    rows = tuple(cut_off(row, path[0].start) if path else row for row, path in zip(alone.rows, paths, strict=True))
    stateful = alone.rows[0].states is not None

    def with_stems(plan: ReusePlan) -> ReusePlan:
        """The plan with the stems that it needs, as far as it needs them."""
        ends = [plan.starts(row) - pad for row, pad in enumerate(pads)]
        needed: list[Stem] = []
        for stem in found:
            stop = min(stem.stop, max(ends[row] for row in stem.rows))
            if stop > stem.start:
                needed.append(replace(stem, stop=stop))
        groups = in_groups(needed, batch, min_saving, padded=any(pads) and not first, equal_starts=stateful)
        if first:  # what is before the first id that was passed cannot be computed again
            groups = [(stem,) for group in groups for stem in group]
        return replace(plan, paths=tuple(map(tuple, paths_of(needed, batch))), stems=tuple(groups))

    plans = [with_stems(plan) for plan in _cuts(replace(alone, filled=held, rows=rows, paths=paths))]
    best = min(plans, key=lambda plan: plan.cost(limit, min_saving))
    return best if best.stems and best.cost(limit, min_saving) < alone.cost(limit, min_saving) else alone


def _cuts(plan: ReusePlan) -> list[ReusePlan]:
    """The plan with each column as `filled` up to which some row can be served."""
    cuts = {plan.held}
    for number, (row, pad) in enumerate(zip(plan.rows, plan.pads, strict=True)):
        path = plan.path(number)
        if row.states is not None:
            # A state takes in padding that comes after it: every row must have begun.
            saved = [*row.states, *(stem.stop for stem in path)]
            cuts |= {at + pad for at in saved if at + pad > max(plan.pads)}
        elif path or row.segments:
            cuts.add((path[-1].stop if path else row.hit) + pad)
    return [replace(plan, filled=cut) for cut in sorted(cuts)]


def cut_off(plan: RowPlan, stop: int) -> RowPlan:
    """The plan of a row of which the store is to serve nothing from `stop` on."""
    segments = tuple(
        replace(segment, stop=min(segment.stop, stop)) for segment in plan.segments if segment.start < stop
    )
    borders = tuple(border for border in plan.borders if border.at <= stop)
    states = {at: saved for at, saved in plan.states.items() if at <= stop} if plan.states is not None else None
    return replace(plan, hit=min(plan.hit, stop), segments=segments, borders=borders, states=states)
