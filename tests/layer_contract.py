"""The contract of cache layers: `tests/unit/test_layers.py` runs it over every kind that there is.

A kind is what `FORMS` has of it: a new class of layers fails until it is there.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from kvboost_hf.config import KVQuantConfig
from tests.internals import cache as own
from tests.internals.cache import Piece, ReuseLayer, make_codec

HEADS, DIM, HIDDEN, WINDOW, MOST = 2, 8, 16, 6, 600


@dataclass(frozen=True, slots=True)
class Form:
    """How a kind of layer is made, and what a forward gives it.

    Args:
        make: An empty layer.
        stock: The layer of transformers in whose place it stands; None for one that never stands alone.
        columns: Tensors that it keeps of each token.
        window: Columns that a token attends to; 0 for all.
        conv, recurrent: Whether it keeps such states.
        states: How many of them.
        exact: Columns come back as they were given.
        fresh: The kind of `fresh()`, where that is another.
    """

    make: Callable[[], Any]
    stock: Callable[[], Any] | None = None
    columns: int = 0
    window: int = 0
    conv: bool = False
    recurrent: bool = False
    states: int = 1
    exact: bool = True
    fresh: type | None = None


class Summed(DynamicLayer):
    """A layer that only its model understands: beside its K/V it has a sum that it writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: dict[str, list[Any]] = {"sum": [None]}
        self.record_past = False  # as layers of transformers have it, whose states may be taken back


def _pieced() -> Any:
    layer = own.PiecedLayer()
    layer.hands_out = True
    return layer


def _quantized() -> Any:
    return own.QuantizedLayer(make_codec("int8"), KVQuantConfig(window=16), None)


FORMS = {
    "GrowingLayer": Form(own.GrowingLayer, DynamicLayer, columns=2),
    "PiecedLayer": Form(_pieced, DynamicLayer, columns=2),
    "QuantizedLayer": Form(_quantized, DynamicLayer, columns=2, exact=False),
    "SlidingLayer": Form(
        lambda: own.SlidingLayer(WINDOW), lambda: DynamicSlidingWindowLayer(WINDOW), columns=2, window=WINDOW
    ),
    "IndexedLayer": Form(own.IndexedLayer, DynamicIndexedLayer, columns=3),
    "SparseLayer": Form(own.SparseLayer, columns=3),
    "HiddenStates": Form(lambda: own.HiddenStates((2, -1)), columns=2),
    "StaticReuseLayer": Form(lambda: own.StaticReuseLayer(MOST), DynamicLayer, columns=2, fresh=own.GrowingLayer),
    "StaticReuseLayer of a window": Form(
        lambda: own.StaticReuseLayer(MOST, WINDOW), columns=2, window=WINDOW, fresh=own.SlidingLayer
    ),
    "StateLayer": Form(own.StateLayer, LinearAttentionLayer, conv=True, recurrent=True),
    "StaticStateLayer": Form(
        own.StaticStateLayer, LinearAttentionLayer, conv=True, recurrent=True, fresh=own.StateLayer
    ),
    "StateLayer of two": Form(
        lambda: own.StateLayer(2), lambda: LinearAttentionLayer(2), conv=True, recurrent=True, states=2
    ),
    "HybridLayer": Form(own.HybridLayer, LinearAttentionAndFullAttentionLayer, columns=2, conv=True, recurrent=True),
    "HybridSlidingLayer": Form(
        lambda: own.HybridSlidingLayer(WINDOW),
        lambda: LinearAttentionAndSlidingWindowAttentionLayer(WINDOW),
        columns=2,
        window=WINDOW,
        conv=True,
    ),
    "EmptyLayer": Form(lambda: own.EmptyLayer(DynamicLayer())),
    "OpaqueLayer": Form(lambda: own.OpaqueLayer(Summed()), Summed),
}


def kinds(kind: type = ReuseLayer) -> Iterator[type]:
    """All classes of layers that the package makes, bases of others left out."""
    below: list[type] = kind.__subclasses__()
    for each in below:
        if (
            each.__module__.startswith("kvboost_hf.")
            and not each.__name__.startswith("_")
            and each not in (own.ColumnLayer, own.ColumnsInTensors)
        ):
            yield each
        yield from kinds(each)


class Run:
    """A layer in use: what it was given, forward by forward.

    Args:
        form: The kind of the layer.
        layer: A layer of the form; None for a new one.
        batch: Rows.
        seed: The seed of all that it is given.
    """

    def __init__(self, form: Form, layer: Any = None, *, batch: int = 2, seed: int = 0) -> None:
        self.form, self.layer = form, form.make() if layer is None else layer
        self.batch = 1 if self.layer.single_row else batch
        self.random = torch.Generator().manual_seed(seed)
        self.given: list[torch.Tensor] = []  # [batch, heads, columns, dim] of each tensor that is kept
        self.states: list[torch.Tensor] = []  # after the last forward

    def _new(self, *shape: int) -> torch.Tensor:
        return torch.randn(self.batch, *shape, generator=self.random)

    @property
    def length(self) -> int:
        """Columns given so far."""
        return self.given[0].shape[2] if self.given else 0

    def forward(self, tokens: int) -> "Run":
        """What a model does with its layer for some tokens, and the cache behind it."""
        layer, form = self.layer, self.form
        new = [self._new(HEADS, tokens, DIM) for _ in range(2)]
        if isinstance(layer, own.HiddenStates):
            new = [self._new(1, tokens, HIDDEN) for _ in range(2)]
            layer.append(lambda which: new[layer.which.index(which)][:, 0])
        elif isinstance(layer, own.OpaqueLayer):
            layer.native.update(*new)
            (held,) = sums = layer.native.sums["sum"]
            sums[0] = new[0].sum(2) if held is None else held.add_(new[0].sum(2))
        elif form.columns:
            if isinstance(layer, own.StaticReuseLayer):
                layer.whole = tokens == 1  # a decoding step, as `StaticDecoding.open` has it
            sizes, end = layer.get_mask_sizes(tokens), self.length + tokens
            seen = layer.update(*new)[0].shape[2]
            assert sizes == (seen, 0 if seen == MOST else end - seen)
        if isinstance(layer, own.IndexedLayer):
            new.append(self._new(1, tokens, DIM))
            layer.update_indexer(new[2][:, 0])
        if isinstance(layer, own.SparseLayer):
            new.append(self._new(1, tokens, DIM))
            layer.update_index(new[2])
        if isinstance(layer, own.StaticReuseLayer):
            layer.close(tokens)
        for number in range(form.states):
            if form.conv:
                layer.update_conv_state(self._new(HIDDEN, 4), number)
            if form.recurrent:
                layer.update_recurrent_state(self._new(HEADS, DIM, DIM), number)
        layer.note_state()
        if form.columns:
            self.given = [torch.cat(pair, 2) for pair in zip(self.given, new, strict=True)] if self.given else new
        self.states = self.states_now()
        return self

    def states_now(self) -> list[torch.Tensor]:
        """Copies of all states of all rows."""
        rows = [self.layer.save_state(row) for row in range(self.batch)]
        return [t.clone() for row in rows if row is not None for t in row.tensors if t is not None]

    def cut(self, length: int) -> None:
        """What was given, up to some column."""
        self.given = [each[:, :, :length] for each in self.given]

    def pieces(self, row: int, start: int, stop: int) -> list[Piece]:
        """Columns of a row, in two pieces where there are two at least, as a store has them."""
        middle = start + (stop - start + 1) // 2
        parts = [(start, middle), (middle, stop)] if stop > middle else [(start, stop)]
        return [tuple(each[row, :, a:b].contiguous() for each in self.given) for a, b in parts]

    def require_held(self, *, until: int | None = None) -> None:
        """All that the layer has let nobody lose is what it was given."""
        layer = self.layer
        if not self.form.columns:
            return
        stop = self.length if until is None else until
        assert layer.length == stop
        start = layer.first
        assert start <= layer.needed_from(stop)
        if not stop:
            return
        for row in range(self.batch):
            found = layer.columns(row, start, stop)
            wanted = tuple(each[row, :, start:stop] for each in self.given)
            assert len(found) == len(wanted)
            for one, other, spec in zip(found, wanted, layer.column_specs, strict=True):
                assert (one.shape, one.dtype) == (other.shape, spec.dtype)
                assert (spec.heads, spec.dim) == (other.shape[0], other.shape[2])
                require_alike(one, other, self.form.exact)


def require_alike(found: torch.Tensor, wanted: torch.Tensor, exact: bool = True) -> None:
    """The same bits, or near to them for what is held in codes."""
    assert torch.equal(found, wanted) if exact else torch.allclose(found, wanted, atol=0.05)


# The promises


def starts_empty(form: Form) -> None:
    layer = form.make()
    assert layer.length in (0, None)
    assert layer.intact
    assert layer.nbytes == 0
    assert layer.columns(0, 0, 0) is None
    assert layer.column_specs == ()
    assert layer.save_state(0) is None or not form.conv
    layer.reset()
    assert type(layer.fresh()) is (form.fresh or type(layer))


def holds_what_it_was_given(form: Form) -> None:
    run = Run(form)
    version = run.layer.version
    for tokens in (5, 1, 9, 1):
        run.forward(tokens)
        run.require_held()
        assert run.layer.intact
        assert run.layer.version > version or not form.columns
        version = run.layer.version
    run.layer.truncate(run.length)  # nothing is behind it
    assert run.layer.version == version
    held = sum(t.nbytes for t in run.given) if not form.window and form.exact else 1
    assert run.layer.nbytes >= (held if form.columns or form.conv else 0)


def is_emptied(form: Form) -> None:
    run = Run(form).forward(12)
    if isinstance(run.layer, own.OpaqueLayer):
        run.layer.native.record_past = True
    run.layer.reset()
    assert getattr(run.layer.native, "record_past", True) or not isinstance(run.layer, own.OpaqueLayer)
    run.layer.note_state()
    assert run.layer.length in (0, None)
    assert run.layer.intact
    again = Run(form, run.layer, seed=1).forward(7)
    again.require_held()
    if form.columns and form.fresh is None and not form.conv:
        again.layer.truncate(0)  # which keeps the buffers
        again.layer.reset()
        assert again.layer.nbytes == 0


def goes_two_ways(form: Form) -> None:
    """`share`, `copy` and `deepcopy`: each of the two goes on without the other."""
    for twin_of in (lambda layer: layer.share(), copy.copy, copy.deepcopy):
        run = Run(form).forward(10)
        twin = Run(form, twin_of(run.layer), seed=2)
        twin.given, twin.states = list(run.given), run.states
        twin.require_held()
        for one, other in ((run, twin), (twin, run)):
            one.forward(3)
            other.require_held()
            assert other.layer.intact
            assert all(map(torch.equal, other.states_now(), other.states))
            one.require_held()


def goes_back(form: Form) -> None:
    """To where a rewind is possible: everything goes on from there as if nothing had come between."""
    run = Run(form).forward(12)
    layer, states = run.layer, run.states
    layer.keep_state(12)
    run.forward(5)
    assert layer.can_rewind(12)
    layer.truncate(12)
    layer.note_state()
    run.cut(12)
    run.require_held()
    assert layer.intact
    assert all(map(torch.equal, run.states_now(), states))
    run.forward(4)
    run.require_held()
    if layer.is_stateful:
        assert not layer.can_rewind(3)
    elif not form.window:
        assert layer.can_rewind(3)
        layer.truncate(3)
        run.cut(3)
        run.require_held()
    if layer.is_stateful:
        assert layer.can_rewind(12)
        layer.truncate(11)  # what was kept lies behind it
        assert not layer.can_rewind(12)
        run.cut(11)
        other = Run(form).forward(5).layer
        assert not other.can_rewind(5)
        other.truncate(4)  # nothing was kept
        assert not other.can_rewind(4)
    layer.truncate(run.length + 9)  # it never was there
    if form.columns:
        assert layer.length == run.length


def is_filled(form: Form) -> None:
    """With what it had before, in pieces; a row that is shorter is padded on its left."""
    if not form.columns or not form.exact:
        return
    run = Run(form).forward(13)
    for start in (0, 13 - form.window + 1 if form.window else 0):
        twin = Run(form, seed=3)
        twin.given = list(run.given)
        twin.layer.fill(start, 13, [run.pieces(0, start, 13), run.pieces(1, start, 13)])
        assert twin.layer.first <= start or start == 0
        twin.require_held()
        assert twin.layer.intact
        twin.forward(2)
        twin.require_held()
    padded = form.make()
    padded.fill(0, 13, [run.pieces(0, 0, 13), run.pieces(1, 4, 13)])
    start = padded.first
    for at, each in enumerate(padded.columns(1, start, 13)):
        wanted = run.given[at][1].clone()
        wanted[:, 4:] = run.given[at][1][:, 4:]
        wanted[:, :4] = 0
        assert each.shape[1] in (9, 13 - start)  # pieces have no padding
        assert torch.equal(each, wanted[:, 13 - each.shape[1] :])


def lets_states_be_saved(form: Form) -> None:
    run = Run(form).forward(9)
    layer = run.layer
    if not layer.is_stateful:
        assert layer.save_state(0) is None
        assert layer.view_state(0) is None
        assert layer.state_bytes() == 0
        return
    saved = [layer.save_state(row) for row in range(run.batch)]
    before = [[t.clone() for t in each.tensors if t is not None] for each in saved]
    assert layer.state_bytes() >= saved[0].nbytes > 0
    sums = [t.clone() for t in layer.native.sums["sum"]] if isinstance(layer, own.OpaqueLayer) else []
    run.forward(1)
    for each, wanted in zip(saved, before, strict=True):  # no forward reaches what was saved
        assert all(map(torch.equal, [t for t in each.tensors if t is not None], wanted))
    assert not all(map(torch.equal, run.states_now(), [t for row in before for t in row]))
    twin = Run(form)
    twin.layer.load_states(saved)
    assert all(map(torch.equal, twin.states_now(), [t for row in before for t in row]))
    layer.load_states(saved)
    assert all(map(torch.equal, run.states_now(), [t for row in before for t in row]))
    assert all(map(torch.equal, layer.native.sums["sum"] if sums else (), sums))
    if not layer.single_row:
        layer.load_states(saved[::-1])
        assert all(map(torch.equal, [t for t in layer.save_state(0).tensors if t is not None], before[1]))


def lets_no_token_be_taken_out_of_a_state(form: Form) -> None:
    opaque = isinstance(form.make(), own.OpaqueLayer)
    if form.conv:  # nothing was recorded
        assert [Run(form).forward(3).layer.can_crop(tokens, 3) for tokens in (0, 1)] == [True, False]
    if form.conv and not form.recurrent:
        layer = Run(form).forward(5).layer
        layer.record_past, recorded = True, torch.randn(2, HIDDEN, 7)  # of three tokens before those of its kernel
        layer.conv_states[0] = recorded
        assert [layer.can_crop(tokens, 20) for tokens in (0, 1, 3, 4)] == [True, True, True, False]
        assert [layer.can_crop(4, held) for held in (6, 7, 8)] == [True, True, False]
        layer.stop_recording()
        assert not layer.record_past
        assert torch.equal(layer.conv_states[0], recorded[..., -4:])
        layer.record_past, layer.conv_states[0] = True, None
        assert not layer.can_crop(1, 20)
    if not form.recurrent and not opaque:
        return
    run = Run(form).forward(5)
    layer = run.layer
    assert layer.can_crop(0, 5)
    assert not layer.can_crop(1, 5)
    if opaque:
        return
    layer.crop(0)
    with pytest.raises(RuntimeError, match=r"`crop\(-1\)` of a layer cannot take tokens out of a recurrent state"):
        layer.crop(-1)
    assert all(map(torch.equal, run.states_now(), run.states))
    layer.load_states([None] * run.batch)
    assert layer.save_state(0) is None
    assert not any(layer.has_previous_state.values())
    layer.load_states([None])
    assert layer.state_bytes() == 0


def moves_rows(form: Form) -> None:
    run = Run(form).forward(8)
    layer = run.layer
    if layer.single_row or isinstance(layer, own.EmptyLayer):
        return
    states = [layer.save_state(row) for row in range(2)]
    if isinstance(layer, own.HiddenStates):
        layer.select(torch.tensor([1, 0]))
        rows = [1, 0]
    else:
        layer.batch_repeat_interleave(2)
        layer.reorder_cache(torch.tensor([2, 0, 0, 3]))
        layer.batch_select_indices(torch.tensor([True, True, False, True]))
        for move in ("offload", "prefetch"):
            getattr(layer, move)()
        rows = [1, 0, 1]
    layer.note_state()
    run.batch, run.given = len(rows), [each[rows] for each in run.given]
    run.require_held()
    assert layer.intact
    for row, source in enumerate(rows):
        found, wanted = layer.save_state(row), states[source]
        assert (found is None) == (wanted is None)
        if found is not None:
            assert all(map(torch.equal, *[[t for t in s.tensors if t is not None] for s in (found, wanted)]))
    run.forward(2)
    run.require_held()


def notices_what_others_write(form: Form) -> None:
    """Through what transformers sees; what was only read stays whole."""
    if form.columns and form.stock is not None:
        for change in (lambda t: t.add_(1), lambda t: t.data.add_(1), lambda t: t.numpy().fill(2.0)):
            run = Run(form).forward(8)
            tensor = run.layer.keys
            assert run.layer.keys.data_ptr() == tensor.data_ptr() or not form.exact  # else only one would count
            assert run.layer.intact
            change(tensor)
            if run.layer.intact:  # it has given out a copy
                assert not form.exact or form.fresh is not None
                run.require_held()
        run = Run(form).forward(8)
        new = torch.randn(2, HEADS, run.layer.keys.shape[2], DIM)
        run.layer.keys = new
        assert not run.layer.intact
        require_alike(run.layer.keys, new, form.exact)
        assert run.layer.get_seq_length() == 8  # it takes the place of the columns that were there
    if isinstance(form.make(), own.StaticReuseLayer):
        layer = Run(form).forward(20).layer
        assert layer.keys.data_ptr() == layer.keys.data_ptr()  # what is written to the first one counts, too
    if form.conv or isinstance(form.make(), own.OpaqueLayer):
        run = Run(form).forward(8)
        tensor = run.layer.conv_states[0] if form.conv else run.layer.native.sums["sum"][0]
        assert run.layer.intact
        tensor.add_(1)
        assert not run.layer.intact
        run.layer.note_state()
        assert run.layer.intact


def becomes_that_of_transformers(form: Form) -> None:
    """In a pickle, which holds copies."""
    if form.stock is None or form.fresh is not None:
        return
    run = Run(form)
    run.layer.stock = form.stock()
    run.forward(5)
    if isinstance(run.layer, own.OpaqueLayer):
        run.layer.stock = None
        return
    before = [each.data_ptr() for each in getattr(run.layer, "buffers", [])]
    found = run.layer.as_stock()
    assert type(found) is type(form.stock())
    states = {at: state.clone() for at, state in getattr(found, "conv_states", {}).items()}
    if form.columns:
        assert found.get_seq_length() == 5
        require_alike(found.keys, run.given[0][:, :, -found.keys.shape[2] :], form.exact)
        run.forward(3)
        assert found.get_seq_length() == 5
        assert [each.data_ptr() for each in getattr(run.layer, "buffers", [])] == before  # it was only read
    if form.conv:
        run.layer.update_conv_state(torch.zeros(2, HIDDEN, 4))
        assert all(torch.equal(found.conv_states[at], state) for at, state in states.items())


def keeps_what_it_needs(form: Form) -> None:
    """`release`, and what `needed_from` says: everything else may go, and the model goes on."""
    run = Run(form).forward(20)
    for _ in range(9):
        run.forward(60)
        run.layer.release(run.length)
        run.require_held()
    if form.window and not isinstance(run.layer, own.StaticReuseLayer):
        assert run.layer.first > 0


def answers_as_transformers(form: Form) -> None:
    """What the model gets of an update, and what generate() asks for."""
    if form.stock is None or form.fresh is not None or not form.columns:
        return
    ours, stock = form.make(), form.stock()
    random = torch.Generator().manual_seed(4)
    for tokens in (1, 3, 1, 1, WINDOW - 1, 1, WINDOW, 1, WINDOW + 1, 20, 1, 1):
        assert ours.get_seq_length() == stock.get_seq_length()
        for queries in (1, 5):
            assert ours.get_mask_sizes(queries) == stock.get_mask_sizes(queries)
        new = [torch.randn(2, HEADS, tokens, DIM, generator=random) for _ in range(2)]
        for one, other in zip(ours.update(*new), stock.update(*new), strict=True):
            require_alike(one, other, form.exact)
        require_alike(ours.keys, stock.keys, form.exact)
        require_alike(ours.values, stock.values, form.exact)


def opens_and_gathers(form: Form) -> None:
    """Columns that are made room for, and read or written anywhere."""
    if not isinstance(form.make(), own.GrowingLayer) or form.columns != 2 or form.conv:
        return
    random = torch.Generator().manual_seed(6)
    keys, values = (torch.randn(2, HEADS, 5, DIM, generator=random) for _ in range(2))
    for held in (0, 4):
        run = Run(form).forward(held) if held else Run(form)
        opened = run.layer.open(held + 5, (keys[0], values[0]), 2)
        for room, new in zip(opened, (keys, values), strict=True):
            assert room.shape == new.shape
            room.copy_(new)
        run.layer.seal()
        given = [keys, values]
        run.given = [torch.cat(pair, 2) for pair in zip(run.given, given, strict=True)] if held else given
        run.require_held()
        assert run.layer.intact
        columns = torch.tensor([[held, held + 3], [held + 4, held + 1]])
        for at, each in enumerate(run.given):
            found = run.layer.gather(at, columns)
            assert all(torch.equal(found[row], each[row][:, columns[row]]) for row in range(2))
    if form.window and form.fresh is None:  # of one that has let go of its first columns
        run = Run(form).forward(1000)
        run.layer.release(1000)
        first = run.layer.first
        assert first > 0
        columns = torch.tensor([[first, 999], [999, first + 1]])
        found = run.layer.gather(1, columns)
        assert all(torch.equal(found[row], run.given[1][row][:, columns[row]]) for row in range(2))


def takes_buffers(form: Form) -> None:
    """Only an empty layer that keeps all columns in buffers of its own."""
    layer = form.make()
    if not isinstance(layer, own.GrowingLayer):
        return
    takes = type(layer) is own.GrowingLayer
    assert layer.can_take(torch.device("cpu")) == takes
    if takes:
        run = Run(form).forward(3)
        assert not run.layer.can_take(torch.device("cpu"))
        twin = Run(form)
        twin.layer.take(run.layer.buffers, 3)
        twin.given = list(run.given)
        twin.require_held()
        twin.forward(2)
        twin.require_held()


def refuses_what_is_no_kv(form: Form) -> None:
    if not form.columns or form.stock is None:
        return
    run = Run(form).forward(4)
    for name in ("keys", "values"):
        with pytest.raises(ValueError, match=rf"`{name}` of a cache layer must be \[batch, .* of shape \[4, 4\]"):
            setattr(run.layer, name, torch.zeros(4, 4))
    run.require_held()
    assert run.layer.intact
    version = run.layer.version
    run.layer.keys = torch.zeros(0)  # nothing
    assert run.layer.version > version


def is_cropped(form: Form) -> None:
    """By how many columns to remove, or by how many to keep."""
    if form.stock is None or form.columns != 2 or form.conv:
        return
    changes: list[tuple[Any, int]] = [(-1, 4), (torch.tensor(-2), 3), (0, 5), (2, 2), (-5, 0), (-9, 0), (9, 5)]
    for change, length in changes:
        run = Run(form).forward(5)  # within a window
        run.layer.crop(change) if form.window == 0 or change <= 0 else run.layer.truncate(int(change))
        run.cut(length)
        run.require_held()
        run.forward(3)
        run.require_held()
        assert run.layer.intact


def goes_back_as_far_as_its_window(form: Form) -> None:
    """Not one column further than where all columns of the window before it are held."""
    if not form.window:
        return
    run = Run(form)
    run.forward(40)
    for _ in range(9):
        run.forward(60)
        run.layer.release(run.length)
    first = run.layer.first
    assert (first > 0) == (form.fresh is None)
    for length in range(run.length + 1):
        reaches = first <= max(0, length - WINDOW + 1)
        assert run.layer.can_rewind(length) == reaches or form.conv
        assert run.layer.needed_from(length) == max(0, length - WINDOW + 1)
    if not form.conv:
        assert form.fresh is not None or not run.layer.can_rewind(run.length + 1)
        back = first + WINDOW - 1 if first else 0
        if first:
            with pytest.raises(RuntimeError, match="goes back further"):
                run.layer.crop(back - 1 - run.length)
            run.require_held()
        run.layer.truncate(back)
        run.cut(back)
        run.require_held()
        run.forward(1)
        run.require_held()


PROMISES = [
    starts_empty,
    holds_what_it_was_given,
    is_emptied,
    goes_two_ways,
    goes_back,
    is_filled,
    lets_states_be_saved,
    lets_no_token_be_taken_out_of_a_state,
    moves_rows,
    notices_what_others_write,
    becomes_that_of_transformers,
    keeps_what_it_needs,
    answers_as_transformers,
    opens_and_gathers,
    takes_buffers,
    refuses_what_is_no_kv,
    is_cropped,
    goes_back_as_far_as_its_window,
]
