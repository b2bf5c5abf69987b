"""Loads the K/V that a plan takes from stored chunks into the layers while the model computes.

The columns are opened in every layer before the forward, and filled while it runs. What is in host memory is copied to
a device by a stream of its own: all copies are queued before the forward, and on the device each layer of the model
waits for its own columns. Where a kernel can read pinned memory, it takes the place of all copies of a layer. What is
in a file is read by a thread, and the host waits where the model comes to a layer that is not ready. Where K/V turns
out to be damaged, its columns are computed in a forward of their own, in the middle of the one that wants them. A
kernel reads the columns of many chunks by one table, which is made here.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch

from kvboost_hf import device_link
from kvboost_hf.cache.forward.fill import Spans, chunks_of, pieces_of, spans_of
from kvboost_hf.cache.kv import StoredChunk
from kvboost_hf.cache.kv.layer_kv import Groups, LayerKV
from kvboost_hf.cache.layers.base import Piece, ReuseLayer
from kvboost_hf.cache.layers.growing import GrowingLayer
from kvboost_hf.cache.layers.growing_tensor import write_row
from kvboost_hf.cache.layers.hidden_states import HiddenStates
from kvboost_hf.cache.planning.plan import ReusePlan
from kvboost_hf.cache.tiers.record import DamagedBlobError

# Copied together to a device at first, and at most: an H100 takes 1 and 10 ms for it. Each copy costs the host time.
_FIRST_BYTES, _MOST_BYTES = 2**26, 2**29
_ALIGNED_BYTES = 16
# Row, first column, columns, first token in the chunk, tokens of the chunk; then an address for each block.
_FIELDS = 5


class Loading:
    """Fills the columns [held, filled) of every layer from stored chunks.

    All chunks of the plan are loaded, checked or not, and none of its rows is to be computed ahead. If something is
    damaged, `lose` is told of the chunk, and `compute` computes these columns: for each layer, for each row, its piece
    without padding.
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
        self._chunks = [chunk for chunk in chunks_of(plan) if chunk.loaded is not None]
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
                    planes = [_plane(block.planes) for chunk in self._chunks for block in chunk.kv.blocks]
                    link.keep(planes, link.record(self._streams[device]))
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
                link.gather(opened, table, [(_FIELDS + block, at) for block, at in places])
            else:
                self._copy(idx)
            for part in opened:
                if part.device in streams:  # its memory may be let go of before it is written
                    link.hold(part, streams[part.device])
            self._events[idx] = {device: link.record(stream) for device, stream in streams.items()}

    def _copy(self, idx: int) -> None:
        opened, plan = self._opened[idx], self._plan
        if self._spans is None:
            layer_bytes = max(1, sum(chunk.kv.nbytes for chunk in self._chunks) // len(self._layers))
            self._spans = spans_of(plan, groups_of(layer_bytes))
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
                if _can_gather(chunks, device):
                    self._tables[device] = _table_of(_runs_of(self._plan), chunks[0], device)
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


def groups_of(layer_bytes: int) -> Groups:
    """How many tensors to copy together, of which most layers have two in a block."""
    return Groups(*(2 * max(1, nbytes // layer_bytes) for nbytes in (_FIRST_BYTES, _MOST_BYTES)))


class _LayerRun(NamedTuple):
    """Consecutive tokens of one chunk, and where they go."""

    kv: LayerKV | None  # None for columns that are zeroed
    at: int  # first token in the chunk
    length: int  # tokens
    row: int
    column: int  # of the first token, among those that a layer has opened


def _runs_of(plan: ReusePlan) -> Iterator[_LayerRun]:
    """What goes where, of all rows: what a row has ends with the last column, and zeros are before it."""
    for number, (row, pad) in enumerate(zip(plan.rows, plan.pads, strict=True)):
        start, stop, own = plan.held - pad, plan.filled - pad, []
        for segment in row.segments:
            chunk, begin, end = segment.chunk, max(segment.start, start), min(segment.stop, stop)
            if isinstance(chunk, StoredChunk) and chunk.loaded is not None and begin < end:
                own.append((chunk.loaded, begin - segment.start + segment.offset, end - begin))
        column = plan.filled - plan.held - sum(length for _, _, length in own)
        if column:
            yield _LayerRun(None, 0, column, number, 0)
        for kv, at, length in own:
            yield _LayerRun(kv, at, length, number, column)
            column += length


def _note(chunks: Sequence[StoredChunk], seconds: float) -> None:
    """Tell the tiers how fast they were."""
    found = [chunk.found for chunk in chunks if chunk.found is not None]
    for tier in {each.tier for each in found}:
        tier.took((sum(each.entry.nbytes for each in found if each.tier is tier), seconds))


def _can_gather(chunks: Sequence[LayerKV], device: torch.device) -> bool:
    """Whether a kernel can read the tensors of chunks, as they are, where they are.

    They must have arrived: their planes are where they are going to stay.
    """
    link = device_link.link
    return all(
        block.codec.lossless
        and block.blob is None
        and block.shape[1] == kv.blocks[0].shape[1]
        and plane.data_ptr() % _ALIGNED_BYTES == 0
        and (plane.device == device or link.is_pinned(plane))
        for kv in chunks
        for block in kv.blocks
        for plane in block.planes.values()
    ) and all(kv.is_like(chunks[0]) for kv in chunks[1:])


def _table_of(runs: Iterable[_LayerRun], like: LayerKV, device: torch.device) -> torch.Tensor:
    """Make the table [runs, 5 + blocks] of runs, int64, on a device: one copy, behind the current stream's work."""
    addresses: dict[int, tuple[int, ...]] = {}
    rows: list[tuple[int, ...]] = []
    for kv, at, length, row, column in runs:
        if kv is None:
            rows.append((row, column, length, at, 0, *(0 for _ in like.blocks)))
            continue
        own = addresses.get(id(kv))
        if own is None:
            own = addresses[id(kv)] = tuple(_plane(block.planes).data_ptr() for block in kv.blocks)
        rows.append((row, column, length, at, kv.blocks[0].shape[1], *own))
    shape = torch.Size((len(rows), _FIELDS + len(like.blocks)))
    host = device_link.link.pinned(shape, torch.int64)
    host.copy_(torch.tensor(rows, dtype=torch.int64, device="cpu").view(shape))
    return device_link.link.send(host, device)


def _plane(planes: dict[str, torch.Tensor]) -> torch.Tensor:
    (plane,) = planes.values()
    return plane
