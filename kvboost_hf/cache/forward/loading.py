"""Readers of the K/V that a plan takes from stored chunks, and loading it into the layers while the model computes.

The columns are opened in every layer before the forward, and filled while it runs. What is in host memory is copied to
a device by a stream of its own: all copies are queued before the forward, and on the device each layer of the model
waits for its own columns. Where a kernel can read pinned memory, it takes the place of all copies of a layer. What is
in a file is read by a thread, and the host waits where the model comes to a layer that is not ready. Where K/V turns
out to be damaged, its columns are computed in a forward of their own, in the middle of the one that wants them.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import itemgetter
from typing import Protocol

import torch

from kvboost_hf import device_link
from kvboost_hf.cache.kv.blocks import Groups
from kvboost_hf.cache.kv.layer_kv import (
    JoinedKVReader,
    LayerKV,
    LayerKVReader,
    Run,
    can_gather,
    places_in_table,
    planes_of,
    table_of,
)
from kvboost_hf.cache.kv.records import StoredChunk
from kvboost_hf.cache.layers.base import Piece, ReuseLayer
from kvboost_hf.cache.layers.growing import GrowingLayer
from kvboost_hf.cache.layers.growing_tensor import write_row
from kvboost_hf.cache.layers.pieced import PiecedLayer
from kvboost_hf.cache.layers.windows import HiddenStates
from kvboost_hf.cache.planning.plan import ReusePlan, Segment
from kvboost_hf.cache.tiers.record import DamagedBlobError

_MIN_BYTES = 2**20  # less is loaded at once
# Copied together to a device at first, and at most: an H100 takes 1 and 10 ms for it. Each copy costs the host time.
_FIRST_BYTES, _MOST_BYTES = 2**26, 2**29
_JOINED = 16  # chunks at most: while they are copied together, they are on the device twice


def is_worth_overlapping(layers: Sequence[ReuseLayer], plan: ReusePlan) -> bool:
    """Whether what serves a plan is so much that loading it meanwhile saves time.

    It is in lower tiers; or, if nothing is, in host memory and has to be copied to a device.
    """
    chunks = _chunks_of(plan)
    nbytes = sum([chunk.found.entry.nbytes for chunk in chunks if chunk.found is not None])
    if nbytes or sum([chunk.nbytes for chunk in chunks]) < _MIN_BYTES:
        return nbytes >= _MIN_BYTES
    if len(plan.rows) > 1 and any([layer.hands_out for layer in layers]):  # rows that share pieces keep them
        return False
    return sum([chunk.kv.nbytes_elsewhere for chunk in chunks]) >= _MIN_BYTES


def can_overlap(layers: Sequence[ReuseLayer], plan: ReusePlan) -> bool:
    """Whether what serves a plan may be loaded while the model computes."""
    return (
        not torch.is_grad_enabled()
        and all([type(layer) in (GrowingLayer, PiecedLayer, HiddenStates) for layer in layers])
        and not plan.ahead
    )


def _groups(layer_bytes: int) -> Groups:
    """How to copy layers of so many bytes each, of which most have two tensors in a block."""
    first, most = (2 * max(1, nbytes // max(1, layer_bytes)) for nbytes in (_FIRST_BYTES, _MOST_BYTES))
    return Groups(first, most)


class Loading:
    """Fills the columns [held, filled) of every layer from stored chunks.

    Args:
        layers: They hold `plan.held` columns, and `plan.filled` from now on.
        plan: All of its chunks are loaded, checked or not, and none of its rows is to be computed ahead.
        compute: Computes these columns: for each layer, for each row, its piece without padding. Only called if
            something is damaged.
        lose: Told of a chunk that is damaged, and how.
    """

    def __init__(
        self,
        layers: Sequence[ReuseLayer],
        plan: ReusePlan,
        compute: Callable[[], list[list[Piece]]],
        lose: Callable[[StoredChunk, DamagedBlobError], None],
    ) -> None:
        self.computed = False  # something was damaged
        self._layers = layers
        self._sealed: set[int] = set()  # layers whose columns are there
        self._plan, self._compute, self._lose = plan, compute, lose
        self._chunks = [chunk for chunk in _chunks_of(plan) if chunk.loaded is not None]
        self._spans: Spans | None = None  # where a layer is copied
        self._tables: dict[torch.device, torch.Tensor | None] = {}  # of the columns; None for a device to copy to
        self._ready = [threading.Event() for _ in layers]
        self._stopped = self._damaged = False
        self._opened = [self._open(layer, idx) for idx, layer in enumerate(layers)]
        link = device_link.link
        devices = {part.device for parts in self._opened for part in parts if link.is_apart(part.device)}
        self._streams = {device: link.stream("loading", device) for device in devices}
        for device, stream in self._streams.items():
            stream.wait_event(link.record(link.current(device)))
        self._events: list[dict[torch.device, device_link.Event]] = [{} for _ in layers]
        # Only files make it wait: a second thread that queues work would slow down the one that runs the model.
        reads = any(block.blob is not None for chunk in self._chunks for block in chunk.kv.blocks)
        self._thread = threading.Thread(target=self._run, name="kvboost_hf-loading", daemon=True) if reads else None

    def start(self) -> None:
        """Begin; whoever holds this can `stop` it from now on."""
        if self._thread is not None:
            self._thread.start()
        else:
            self._run()

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # as `ScatterPass.update`
    def wait(self, layer_idx: int) -> None:
        """Return once a layer has its columns."""
        self._ready[layer_idx].wait()
        for device, event in self._events[layer_idx].items():
            device_link.link.current(device).wait_event(event)
        if self._damaged:
            self._repair()
        if layer_idx not in self._sealed:  # once: what is written later may be somebody else's
            self._sealed.add(layer_idx)
            self._layers[layer_idx].seal()

    def finish(self) -> None:
        """Return once all layers have their columns."""
        for idx in range(len(self._ready)):
            self.wait(idx)

    def stop(self) -> None:
        """Give up: the columns will not be used."""
        self._stopped = True
        self._join()

    def _join(self) -> None:
        """Return once nothing is written any more, by the thread or after what was given to the devices."""
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()
        for device, stream in self._streams.items():
            device_link.link.current(device).wait_event(device_link.link.record(stream))

    def _open(self, layer: ReuseLayer, layer_idx: int) -> tuple[torch.Tensor, ...]:
        chunk = self._chunks[0]
        places = chunk.kv.places[layer_idx]
        if places is None:
            return ()
        assert isinstance(layer, GrowingLayer | HiddenStates)
        like: list[torch.Tensor] = []
        for number, _ in places:
            block = chunk.kv.blocks[number]
            heads, _, dim = block.shape
            like.append(torch.empty(heads, 0, dim, dtype=block.dtype, device=block.device))
        return layer.open(self._plan.filled, tuple(like), len(self._plan.rows))

    def _run(self) -> None:
        begin = time.perf_counter()
        try:
            with torch.inference_mode(False), torch.no_grad():
                for idx in range(len(self._ready)):
                    if self._stopped:
                        return
                    self._fill(idx)
                    self._ready[idx].set()
            _note(self._chunks, time.perf_counter() - begin)
        except DamagedBlobError:
            self._damaged = True
        except BaseException:
            self._damaged = True
            raise
        finally:
            for device, table in self._tables.items():
                if table is not None:  # chunks may be evicted before the device has read them
                    link = device_link.link
                    link.keep(planes_of(chunk.kv for chunk in self._chunks), link.record(self._streams[device]))
            for ready in self._ready:
                ready.set()

    def _fill(self, idx: int) -> None:
        opened, link = self._opened[idx], device_link.link
        streams = {device: self._streams[device] for part in opened if (device := part.device) in self._streams}
        with ExitStack() as queued:
            for stream in streams.values():
                queued.enter_context(link.using(stream))
            table, places = self._table(opened), self._chunks[0].kv.places[idx]
            if table is not None and places is not None:
                link.gather(opened, table, places_in_table(places))
            else:
                self._copy(idx)
            for part in opened:
                if part.device in streams:  # its memory may be let go of before it is written
                    link.hold(part, streams[part.device])
            self._events[idx] = {device: link.record(stream) for device, stream in streams.items()}

    def _copy(self, idx: int) -> None:
        opened, plan = self._opened[idx], self._plan
        if self._spans is None:
            layer_bytes = sum(chunk.kv.nbytes for chunk in self._chunks) // len(self._layers)
            self._spans = spans_of(plan, _groups(layer_bytes))
        for row, (spans, pad) in enumerate(zip(self._spans, plan.pads, strict=True)):
            pieces = pieces_of(spans, idx, plan.held - pad, plan.filled - pad)
            write_row([part[row] for part in opened], pieces)

    def _table(self, opened: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The table of all columns on the device of a layer, made by its stream; None if the layer is to be copied."""
        if not opened or opened[0].device not in self._streams:
            return None
        device, dtype = opened[0].device, self._chunks[0].kv.blocks[0].dtype
        if any(part.device != device or part.stride()[2:] != (part.shape[3], 1) for part in opened):
            return None
        if any(part.dtype != dtype for part in opened):  # a layer may keep another one
            return None
        if device not in self._tables:
            self._tables[device] = None
            if device_link.link.gathers(device):
                chunks = [chunk.kv for chunk in self._chunks]
                for kv in chunks:
                    for block in kv.blocks:
                        block.wait()
                if can_gather(chunks, device):
                    self._tables[device] = table_of(_runs_of(self._plan), chunks[0], device)
        return self._tables[device]

    def _repair(self) -> None:
        """Compute what could not be loaded."""
        self._damaged, self.computed = False, True
        self._join()
        for chunk in self._chunks:
            if chunk.found is not None:
                try:
                    chunk.kv.check()
                except DamagedBlobError as error:
                    self._lose(chunk, error)
        with torch.inference_mode(False), torch.no_grad():
            for opened, rows in zip(self._opened, self._compute(), strict=True):
                for row, piece in enumerate(rows):
                    write_row([part[row] for part in opened], [piece])


def _runs_of(plan: ReusePlan) -> Iterator[Run]:
    """What goes where, of all rows: what a row has ends with the last column, and zeros are before it."""
    for number, (row, pad) in enumerate(zip(plan.rows, plan.pads, strict=True)):
        start, stop, own = plan.held - pad, plan.filled - pad, []
        for segment in row.segments:
            chunk, begin, end = segment.chunk, max(segment.start, start), min(segment.stop, stop)
            if isinstance(chunk, StoredChunk) and chunk.loaded is not None and begin < end:
                own.append((chunk.loaded, begin - segment.start + segment.offset, end - begin))
        column = plan.filled - plan.held - sum(length for _, _, length in own)
        if column:
            yield Run(None, 0, column, number, 0)
        for kv, at, length in own:
            yield Run(kv, at, length, number, column)
            column += length


def _chunks_of(plan: ReusePlan) -> list[StoredChunk]:
    """All chunks of a plan, each once."""
    chunks = [segment.chunk for row in plan.rows for segment in row.segments]
    return list({chunk.key: chunk for chunk in chunks if isinstance(chunk, StoredChunk)}.values())


def _note(chunks: Sequence[StoredChunk], seconds: float) -> None:
    """Tell the tiers how fast they were."""
    found = [chunk.found for chunk in chunks if chunk.found is not None]
    for tier in {each.tier for each in found}:
        tier.took((sum(each.entry.nbytes for each in found if each.tier is tier), seconds))


class ColumnReader(Protocol):
    """Has K/V of consecutive tokens."""

    def layer(self, layer_idx: int, /) -> Piece | None:
        """The tensors of a layer, [heads, tokens, dim] each, or None if it keeps no columns."""


class Zeros:
    """Reads zeros, for columns that are computed when all others are in place.

    Args:
        like: Has tensors of the same shapes and types.
        tokens: How many there are at most.
    """

    def __init__(self, like: ColumnReader, tokens: int) -> None:
        self._like, self._tokens = like, tokens
        self._made: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        self._last: tuple[int, Piece | None] | None = None  # a layer is read for all rows before the next one

    def layer(self, layer_idx: int) -> Piece | None:
        """Zeros for each tensor of a layer, [heads, tokens, dim], or None if it keeps no columns."""
        if self._last is None or self._last[0] != layer_idx:
            like = self._like.layer(layer_idx)
            self._last = layer_idx, None if like is None else tuple([self._zeros(each) for each in like])
        return self._last[1]

    def _zeros(self, like: torch.Tensor) -> torch.Tensor:
        kind = like.dtype, like.device
        if kind not in self._made:
            self._made[kind] = torch.zeros((), dtype=like.dtype, device=like.device)
        return self._made[kind].expand(like.shape[0], self._tokens, like.shape[2])


@dataclass(frozen=True, slots=True)
class Span:
    """Row tokens [start, stop), which a reader has from row token `origin` on."""

    reader: ColumnReader
    origin: int
    start: int
    stop: int


Spans = Sequence[Sequence[Span]]  # of each row, in order
_Loaded = tuple[Segment, bytes, LayerKV]  # with the key and the K/V of its chunk
_KEY = itemgetter(1)


def spans_of(plan: ReusePlan, groups: Groups | None = None, *, zeros: bool = False) -> list[list[Span]]:
    """Readers for the segments of a plan whose chunks are loaded; rows with the same chunks have the same readers.

    On a GPU, consecutive chunks that the same rows have are one span: its host takes longer to launch what there is to
    do for each chunk and layer than the GPU to do it.

    Args:
        plan: What comes from where.
        groups: How many tensors to move together: see `LayerKV.reader`.
        zeros: Have zeros between `plan.held` and `plan.filled` where no chunk serves.
    """
    readers: dict[tuple[bytes, ...], LayerKVReader | JoinedKVReader] = {}  # by the chunks that they read
    spans: list[list[Span]] = []
    for runs in _runs(plan):
        own: list[Span] = []
        for run in runs:
            keys = tuple(map(_KEY, run))
            if keys not in readers:
                of = LayerKVReader(run[0][2], groups)
                readers[keys] = (
                    of if len(run) == 1 else JoinedKVReader([of, *(LayerKVReader(kv, groups) for *_, kv in run[1:])])
                )
            first, last = run[0][0], run[-1][0]
            own.append(Span(readers[keys], first.start - first.offset, first.start, last.stop))
        spans.append(own)
    if not zeros:
        return spans
    nothing = Zeros(next(iter(readers.values())), plan.filled)
    return [
        _with_zeros(row, nothing, plan.held - pad, plan.filled - pad)
        for row, pad in zip(spans, plan.pads, strict=True)
    ]


def _runs(plan: ReusePlan) -> list[list[list[_Loaded]]]:
    """The loaded segments of each row, those together that one reader can have."""
    rows: list[list[_Loaded]] = []
    for row in plan.rows:
        rows.append([])
        for segment in row.segments:
            chunk = segment.chunk
            if isinstance(chunk, StoredChunk) and chunk.loaded is not None:
                rows[-1].append((segment, chunk.key, chunk.loaded))
    some = next((kv for own in rows for *_, kv in own), None)
    if some is None or not some.can_follow(some):
        return [[[each] for each in own] for own in rows]
    users: dict[bytes, list[int]] = {}  # of each chunk, the rows
    for number, own in enumerate(rows):
        for _, key, _ in own:
            users.setdefault(key, []).append(number)
    joined: list[list[list[_Loaded]]] = []
    for own in rows:
        runs: list[list[_Loaded]] = []
        for each in own:
            if runs and len(runs[-1]) < _JOINED and _can_follow(each, runs[-1][-1], users):
                runs[-1].append(each)
            else:
                runs.append([each])
        joined.append(runs)
    return joined


def _can_follow(this: _Loaded, last: _Loaded, users: Mapping[bytes, list[int]]) -> bool:
    """Whether one reader can have two segments of a row."""
    (segment, key, kv), (before, key_before, kv_before) = this, last
    return (
        before.stop == segment.start
        and segment.offset == 0
        and before.to_end
        and users[key_before] == users[key]
        and kv.can_follow(kv_before)
    )


def _with_zeros(spans: Sequence[Span], zeros: Zeros, start: int, stop: int) -> list[Span]:
    """The spans of a row with zeros between them, from row token `start` to `stop`, padding left out."""
    found: list[Span] = []
    at = max(start, 0)
    for span in (*spans, Span(zeros, stop, stop, stop)):
        if at < span.start:
            found.append(Span(zeros, at, at, span.start))
        if span.start < span.stop:
            found.append(span)
        at = span.stop
    return found


def pieces_of(spans: Sequence[Span], layer_idx: int, start: int, stop: int) -> list[Piece]:
    """K/V of a row's tokens [start, stop), as far as it has them, as pieces of what is stored."""
    pieces: list[Piece] = []
    for span, at, length in parts_of(spans, start, stop):
        piece = span.reader.layer(layer_idx)
        if piece is not None:
            whole = piece[0].shape[1] == length  # all of them have as many tokens
            pieces.append(piece if whole else tuple([kv.narrow(1, at, length) for kv in piece]))
    return pieces


def parts_of(spans: Sequence[Span], start: int, stop: int) -> list[tuple[Span, int, int]]:
    """The spans that have some of a row's tokens [start, stop): where these begin in the reader, and how many."""
    found: list[tuple[Span, int, int]] = []
    for span in spans:
        begin, end = max(span.start, start), min(span.stop, stop)
        if begin < end:
            found.append((span, begin - span.origin, end - begin))
    return found
