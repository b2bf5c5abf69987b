"""The tokens and chunk borders behind the K/V of a cache, and what of it is offered to the store."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from kvboost_hf.cache.kv.layer_kv import LayerKV
from kvboost_hf.cache.kv.layer_states import LayerStates, copy_states
from kvboost_hf.cache.kv.model_form import ColumnFormat, copy_columns
from kvboost_hf.cache.layers.base import ReuseLayer
from kvboost_hf.cache.planning.chunks import HEAD_TOKENS, Tokens, content_only_key, prefix_key, text_key, whole_pieces
from kvboost_hf.cache.planning.moved import MovedColumns
from kvboost_hf.cache.planning.plan import (
    Border,
    ReusePlan,
    RowPlan,
    Segment,
    cut_off,
    plan_batch,
    plan_row,
    plan_shared,
)
from kvboost_hf.cache.prompt.token_log import TokenLog
from kvboost_hf.cache.store.chunk_store import ChunkStore, Put
from kvboost_hf.compat import Ranks
from kvboost_hf.config import Progressive


@dataclass(slots=True)
class KnownRow:
    """What a store could serve of a prompt of one row that nothing is held of, when it was looked up."""

    root: bytes
    tokens: Tokens  # the tokens of the prompt, [tokens]
    filled: int  # how many of them the store could serve
    plan: RowPlan | None  # serves them; None once the store has changed
    is_current: Callable[[], bool]  # tells whether the store is as it was
    # What serves tokens from `moved_from` on that stood elsewhere; None if it was not looked for.
    moved: tuple[Segment, ...] | None = None
    moved_from: int = 0

    def let_go(self) -> None:
        """Hold none of the store's K/V any longer, if the store has changed: some of it may have been evicted."""
        if self.plan is not None and not self.is_current():
            self.plan = self.moved = None

    def of(self, root: bytes, tokens: Tokens, limit: int) -> RowPlan | None:
        """The plan for the first `tokens` of the prompt, of which `limit` may be served; None to look it up again."""
        self.let_go()
        plan = self.plan
        if plan is None or root != self.root or plan.hit > limit:
            return None
        return plan if np.array_equal(self.tokens[: len(tokens)], tokens) else None

    def moved_of(self, root: bytes, tokens: Tokens, start: int, stop: int) -> tuple[Segment, ...] | None:
        """What serves [start, stop) of the first `tokens` that stood elsewhere; None to look for it again."""
        self.let_go()
        if self.moved is None or root != self.root or start != self.moved_from:
            return None
        found = tuple([segment for segment in self.moved if segment.start < stop])
        if found and found[-1].stop > stop:
            return None
        return found if np.array_equal(self.tokens[: len(tokens)], tokens) else None


@dataclass(slots=True)
class Ledger:
    """Ids and chunk borders of every row, beside the layers that hold their K/V."""

    log: TokenLog
    borders: list[list[Border]]  # per row, the chunk borders so far; the root first
    root: bytes  # the root of all chains: model, weights and salt
    # `ReuseLayer.version` when the ledger was last brought up to date; another one means that the layers were changed
    # behind its back.
    version: int = 0
    unconfirmed: bool = False  # the last columns are candidates that `crop()` has yet to judge
    blended: MovedColumns | None = None  # what of the K/V is not that of a plain forward, or None
    progressive: Progressive = False  # how that is computed again after the prompt; False if it is not
    # With `ReusePolicy(reproducible=True)`, columns [0, in_pieces) were computed in whole pieces: only these are
    # stored, and kept for the next prompt. None stores and keeps all.
    in_pieces: int | None = None
    quiet: tuple[int, int] = 0, 0  # A size of chunks, and a column before which no row has a new one of that size
    # The keys of what was stored to be found by its content only.
    content_keys: set[bytes] = field(default_factory=set)

    @classmethod
    def empty(cls, pads: NDArray[np.int64], root: bytes) -> "Ledger":
        """A ledger of layers that hold nothing yet."""
        return cls(TokenLog(pads), [[Border(0, root)] for _ in pads], root)

    @property
    def rows(self) -> range:
        """The numbers of the rows."""
        return range(self.log.batch_size)

    def copy(self) -> "Ledger":
        """A ledger of the same, that can be kept on its own."""
        borders = [list(row) for row in self.borders]
        return replace(self, log=self.log.copy(), borders=borders, content_keys=set(self.content_keys))

    def rewind(self, length: int) -> None:
        """Forget columns from `length` on."""
        self.log.crop(length)
        self.quiet = 0, 0
        if self.in_pieces is not None:
            self.in_pieces = min(self.in_pieces, whole_pieces(length))
        before, self.blended = self.blended, self.blended.crop(length) if self.blended is not None else None
        for row, (pad, borders) in enumerate(zip(self.log.pads, self.borders, strict=True)):
            if _is_tainted(before, row) and not _is_tainted(self.blended, row):
                del borders[1:]  # its pieces do not end where chunks do
            while borders[-1].at > max(0, self.log.length - pad):
                borders.pop()

    def repaired(self, columns: NDArray[np.bool_]) -> None:
        """Tainted columns [batch, length] were computed again: those of `MovedColumns.next_tainted`."""
        before = self.blended
        assert before is not None
        self.blended = before.repaired(columns)
        self.quiet = 0, 0
        for row, borders in enumerate(self.borders):
            if before.is_tainted(row) and not _is_tainted(self.blended, row):
                del borders[1:]  # its pieces do not end where chunks do

    def select(self, rows: NDArray[np.int64]) -> None:
        """Make row i what row `rows[i]` was."""
        self.log.select(rows)
        self.quiet = 0, 0
        self.blended = self.blended.select(rows) if self.blended is not None else None
        self.borders = [list(self.borders[row]) for row in rows]

    def plan(
        self,
        ids: Tokens,
        held: int,
        limit: int,
        store: ChunkStore,
        min_saving: int,
        *,
        stateful: bool,
        stems_to: int = 0,
        first: int = 0,
        without: frozenset[bytes] = frozenset(),
        ranks: Ranks | None = None,
        known: KnownRow | None = None,
    ) -> ReusePlan:
        """Plan the columns [held, limit) of `ids` [batch, columns], without what is under some keys.

        See `plan_shared` for `stems_to` and `first`. What one of `ranks` cannot serve, none does. What is `known` of
        the only row is not looked up again.
        """
        pads = self.log.pads.tolist()
        plans: list[RowPlan] = []
        same: dict[bytes, RowPlan] = {}  # beams and num_return_sequences repeat rows
        if known is not None and not held and not without and pads == [0]:
            if (found := known.of(self.root, ids[0], limit)) is not None:
                same[ids[0].tobytes()] = found
        for row, pad in enumerate(pads):
            tokens = ids[row, pad:]
            key = tokens.tobytes()
            if key not in same:
                border = self.borders[row][-1]
                own = max(held - pad, 0)
                index = store.view(self.root, tokens, border, stateful=stateful, without=without, is_piece=own > 0)
                same[key] = store.worth(
                    plan_row(tokens, own, border, limit - pad, store.chunker, index, stateful=stateful)
                )
            plans.append(same[key])
        if ranks is not None:
            hits = ranks.least([plan.hit for plan in plans])
            plans = [cut_off(plan, hit) for plan, hit in zip(plans, hits, strict=True)]
        alone = plan_batch(plans, pads, held, limit, min_saving)
        if len(plans) == 1 or stems_to <= held:
            return alone
        return plan_shared(alone, [ids[row, pad:] for row, pad in enumerate(pads)], first, limit, stems_to, min_saving)

    # What the store may be offered

    def storable(self, row: int) -> Tokens:
        """The tokens of a row that the store may be offered."""
        tokens = self.log.row(row)
        return tokens if self.in_pieces is None else tokens[: max(self.in_pieces - int(self.log.pads[row]), 0)]

    def has_new_chunk(self, chunk_size: int) -> bool:
        """Whether some row may have a new complete chunk; reads no ids."""
        if self.blended is not None and any(
            self.blended.run_ends(row, int(pad) + borders[-1].at)
            for row, (pad, borders) in enumerate(zip(self.log.pads, self.borders, strict=True))
        ):
            return True
        nearest = chunk_size + min([pad + row[-1].at for pad, row in zip(self.log.pads, self.borders, strict=True)])
        if (self.log.length if self.in_pieces is None else self.in_pieces) >= nearest:
            return True
        if self.blended is None and self.in_pieces is None:
            self.quiet = chunk_size, int(nearest)
        return False

    def tainted(self, row: int) -> MovedColumns | None:
        """What of the K/V is not that of a plain forward, if a row has some of it."""
        return self.blended if self.blended is not None and self.blended.is_tainted(row) else None

    def last_border(self, limit: int, store: ChunkStore, ids: Tokens) -> int:
        """The last column, at most `limit`, at which the chunk of the longest row of `ids` [batch, columns] ends."""
        row = int(np.argmin(self.log.pads))
        pad = int(self.log.pads[row])
        tokens, at = ids[row, pad:limit], self.borders[row][-1].at
        while (cut := store.chunker.next_cut(tokens, at)) is not None:
            at = cut
        return at + pad

    def first_unstored(self) -> int:
        """The first column that some row has not offered to the store yet."""
        return min(borders[-1].at + int(pad) for borders, pad in zip(self.borders, self.log.pads, strict=True))


def _is_tainted(blended: MovedColumns | None, row: int) -> bool:
    return blended is not None and blended.is_tainted(row)


Copier = Callable[[], LayerKV] | None  # None where some columns have left a window


@dataclass(frozen=True, slots=True)
class Offering:
    """What is offered of the rows that a ledger knows; the ledger is told where chunks end."""

    ledger: Ledger
    layers: Sequence[ReuseLayer]
    store: ChunkStore
    pinned: bool = False  # never evict it

    def chunks(self, row: int, *, again: bool = False, unseen: bool = True) -> list[Put]:
        """Offer a row's complete chunks: those since the last border, or all of them `again`.

        Without `unseen`, where storing has not paid, only those that come again.
        """
        ledger, store = self.ledger, self.store
        tokens, borders = ledger.storable(row), ledger.borders[row]
        if again:
            del borders[1:]
            ledger.quiet = 0, 0
        if (blended := ledger.tainted(row)) is not None:
            return self._blended_chunks(blended, row)
        results: list[Put] = []
        while (cut := store.chunker.next_cut(tokens, borders[-1].at)) is not None:
            border = borders[-1]
            key = prefix_key(border.key, tokens[border.at : cut])
            if not self.pinned and store.is_in_memory(key):
                result = Put.PRESENT  # there is nothing to copy
            elif unseen or store.expects(key):
                result = self._put(row, border, tokens[border.at : cut])
            else:
                result = Put.UNSEEN
            if result is Put.NO_PARENT and not again:  # an ancestor was evicted from the store, but is still here
                return self.chunks(row, again=True, unseen=unseen)
            results.append(result)
            borders.append(Border(cut, key))
        return results

    def tail(self, row: int) -> Put:
        """Offer the tokens after a row's last border as a short chunk."""
        blended = self.ledger.tainted(row)
        if blended is not None:
            self.chunks(row)  # moved chunks are no part of the tail
        border, tokens = self.ledger.borders[row][-1], self.ledger.storable(row)
        tail = tokens[border.at :]
        if len(tail) < HEAD_TOKENS:
            return Put.PRESENT
        if blended is not None:
            return self._put_piece(blended, row, border, border.piece or text_key(tokens, border.at), tail, True)
        return self._put(row, border, tail, unfinished=True)

    def _blended_chunks(self, blended: MovedColumns, row: int) -> list[Put]:
        """Offer what was computed of a row with moved chunks: the pieces between them, each cut from its beginning."""
        ledger = self.ledger
        tokens, borders, pad = ledger.log.row(row), ledger.borders[row], int(ledger.log.pads[row])
        results: list[Put] = []
        while borders[-1].at < len(tokens):
            border = borders[-1]
            moved, stop = blended.run_at(row, border.at + pad)
            end = min(stop - pad, len(tokens)) if stop is not None else None
            cut, own = end, None
            if not moved:
                cut = self.store.chunker.next_cut(tokens[:end], border.at) or end
                if cut is None:
                    break
                parent, piece = border.piece or text_key(tokens, border.at), tokens[border.at : cut]
                results.append(self._put_piece(blended, row, border, parent, piece, cut == end))
                own = content_only_key(ledger.root, parent, border.at, piece)
            assert cut is not None
            borders.append(Border(cut, prefix_key(border.key, tokens[border.at : cut]), own))
        return results

    def _put_piece(
        self, blended: MovedColumns, row: int, border: Border, parent: bytes, tokens: Tokens, unfinished: bool
    ) -> Put:
        """Offer tokens under their prefix key only if nothing before them was moved, else by their content alone."""
        ledger = self.ledger
        first = int(ledger.log.pads[row]) + border.at
        if first + len(tokens) <= blended.tainted_from(row):
            if len(tokens) < HEAD_TOKENS:
                return Put.TOO_SHORT
            return self._put(row, border, tokens, unfinished=unfinished)
        how, at_start = (self.layers, self.store.column_format), border.at == 0
        nbytes, copy_kv = copier(row, first, first + len(tokens), *how, at_start=at_start)
        with torch.inference_mode(False), torch.no_grad():
            put = self.store.put_content(
                ledger.root, tokens, border.at, nbytes, copy_kv, parent=parent, pinned=self.pinned
            )
        if put is Put.STORED:
            ledger.content_keys.add(content_only_key(ledger.root, parent, border.at, tokens))
        return put

    def _put(self, row: int, border: Border, tokens: Tokens, *, unfinished: bool = False) -> Put:
        first, how = int(self.ledger.log.pads[row]) + border.at, (self.layers, self.store.column_format)
        nbytes, copy_kv = copier(row, first, first + len(tokens), *how, at_start=border.at == 0)
        place = self.ledger.root, border.key, border.at
        # Outside inference mode: tensors made inside could not be used freely later.
        with torch.inference_mode(False), torch.no_grad():
            return self.store.put(*place, tokens, nbytes, copy_kv, pinned=self.pinned, unfinished=unfinished)

    def content(self, start: int) -> list[Put]:
        """Offer the only row's tokens from `start` on, cut from there, to be found by content only."""
        ledger, form = self.ledger, self.store.column_format

        def copies(at: int, stop: int) -> tuple[int, Copier]:
            return copier(0, at, stop, self.layers, form, at_start=at == 0)

        with torch.inference_mode(False), torch.no_grad():
            return offer_content(self.store, ledger.root, ledger.log.row(0), start, copies, pinned=self.pinned)

    def states(self, row: int) -> Put:
        """Offer a row's states as they are now, and the K/V that goes with them."""
        ledger, layers = self.ledger, self.layers
        if ledger.log.batch_size > 1 and any(layer.single_row for layer in layers):
            return Put.GONE
        if ledger.in_pieces not in (None, ledger.log.length):  # they sum up tokens of no whole piece, too
            return Put.PRESENT
        tokens, borders = ledger.log.row(row), ledger.borders[row]
        border = borders[-1]
        if len(tokens) == border.at and len(borders) > 1:  # they belong to the chunk that ends there
            border = borders[-2]
        elif len(tokens) - border.at < HEAD_TOKENS:  # too few to be found again
            return Put.PRESENT
        elif self.tail(row) is Put.NO_PARENT:
            self.chunks(row, again=True)
            self.tail(row)
        form, tail = self.store.state_format, tokens[border.at :]

        def copy() -> LayerStates:
            return form.encode(copy_states(layers, row))

        with torch.inference_mode(False), torch.no_grad():
            nbytes = form.nbytes(layers, row)
            return self.store.put_states(ledger.root, border.key, tail, nbytes, copy, pinned=self.pinned)

    def earlier_states(self, saved: Iterable[tuple[int, bool, Sequence[LayerStates]]]) -> None:
        """Offer states of earlier columns, whose K/V has been offered as far as it fills chunks.

        `saved` has columns, at most the length of the log, whether host memory alone is to keep what is there, and the
        states of each row.
        """
        ledger, store = self.ledger, self.store
        form = store.state_format
        for column, spare, rows in saved:
            for row, states in enumerate(rows):
                at, borders = column - int(ledger.log.pads[row]), ledger.borders[row]
                if at <= 0:
                    continue
                number = next(n for n in reversed(range(len(borders))) if not n or borders[n].at < at)
                tail = ledger.log.row(row)[borders[number].at : at]
                if len(tail) < HEAD_TOKENS:  # too few to be found again
                    continue
                if number + 1 < len(borders):
                    found = store.holds(borders[number + 1].key)
                else:
                    found = self.tail(row) in (Put.STORED, Put.PRESENT)
                if found:
                    nbytes, encode = form.nbytes_of(states), partial(form.encode, states)
                    with torch.inference_mode(False), torch.no_grad():
                        store.put_states(ledger.root, borders[number].key, tail, nbytes, encode, spare=spare)


def copier(
    row: int, start: int, stop: int, layers: Sequence[ReuseLayer], form: ColumnFormat, *, at_start: bool
) -> tuple[int, Copier]:
    """The bytes of a row's columns [start, stop), and what copies them; `at_start` says that the row begins there."""
    nbytes = form.nbytes(layers, stop - start, at_start=at_start)
    copy_kv = partial(copy_columns, layers, row, start, stop, form, at_start=at_start)
    return nbytes, copy_kv if start >= max([layer.first for layer in layers]) else None


def offer_content(
    store: ChunkStore,
    root: bytes,
    tokens: Tokens,
    start: int,
    copies: Callable[[int, int], tuple[int, Copier]],
    *,
    pinned: bool = False,
) -> list[Put]:
    """Offer row tokens from `start` on as chunks that are found by content only; those before it name the history.

    `copies` gives the bytes of the chunk in an interval, and what copies it, see `copier`.
    """
    results: list[Put] = []
    parent, at = prefix_key(root, tokens[:start]), start
    while at < len(tokens):
        cut = store.chunker.next_cut(tokens, at) or len(tokens)
        chunk = tokens[at:cut]
        nbytes, copy_kv = copies(at, cut)
        results.append(store.put_content(root, chunk, at, nbytes, copy_kv, parent=parent, pinned=pinned))
        parent, at = content_only_key(root, parent, at, chunk), cut
    return results
