"""Every kind of layer keeps every promise of `ReuseLayer`, and the contract notices one that does not."""

import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.conftest import make_model
from tests.internals.cache import (
    GrowingLayer,
    LayerState,
    PiecedLayer,
    StateLayer,
    _of_states,
    block_capacity,
    lending_reason,
    make_layers,
    reading_reason,
)
from tests.internals.top import handles
from tests.layer_contract import FORMS, PROMISES, Form, Run, goes_back, goes_two_ways, holds_what_it_was_given, kinds

pytestmark = pytest.mark.daily

Promise = Callable[[Form], None]


@pytest.fixture(autouse=True)
def read_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces stay where they are on a CPU, too."""
    monkeypatch.setitem(handles._readers, "a test", lambda kind, device: kind is handles.PiecedKV)


@pytest.mark.parametrize("promise", PROMISES, ids=lambda each: each.__name__)
@pytest.mark.parametrize("name", FORMS)
@torch.no_grad()
def test_kind(name: str, promise: Promise) -> None:
    promise(FORMS[name])


@torch.no_grad()
def test_states_that_graphs_write_to_stay_where_they_are() -> None:
    run = Run(FORMS["StaticStateLayer"]).forward(12)
    layer = run.layer
    layer.keep_state(12)
    places = [state.data_ptr() for held in (layer.conv_states, layer.recurrent_states) for state in held.values()]
    run.forward(5)
    layer.truncate(12)
    assert [s.data_ptr() for held in (layer.conv_states, layer.recurrent_states) for s in held.values()] == places


def test_no_kind_is_left_out() -> None:
    assert {kind.__name__ for kind in kinds()} == {name.partition(" ")[0] for name in FORMS}


class Shared(GrowingLayer):
    """Its twin is itself."""

    def share(self) -> Any:
        return self


class Lossy(GrowingLayer):
    """It rounds."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(key_states.half().float(), value_states, *args, **kwargs)


class Forgetful(StateLayer):
    """It goes back, and leaves its states as they are."""

    def truncate(self, length: int) -> None:
        pass


@pytest.mark.parametrize(
    ("kind", "promise"), [(Shared, goes_two_ways), (Lossy, holds_what_it_was_given), (Forgetful, goes_back)]
)
@torch.no_grad()
def test_the_contract_notices(kind: type, promise: Promise) -> None:
    stateful = issubclass(kind, StateLayer)
    with pytest.raises(AssertionError):
        promise(Form(kind, columns=0 if stateful else 2, conv=stateful, recurrent=stateful))


def test_a_layer_that_stands_for_none_of_transformers_cannot_be_pickled() -> None:
    with pytest.raises(TypeError, match="Pickle the cache that it is part of"):
        pickle.dumps(FORMS["GrowingLayer"].make())


def test_what_cannot_be_lent_or_read_says_why() -> None:
    """A reason of the cache comes before those of its layers."""
    growing, state, opaque = (FORMS[name].make() for name in ("GrowingLayer", "StateLayer", "OpaqueLayer"))
    rigid = "its cache has layers of the kind OpaqueLayer"
    lent: list[tuple[str | None, list[Any], str | None, str | None]] = [
        (None, [growing], None, None),
        ("why", [growing], "why", "why"),
        ("why", [state], "why", "why"),
        (None, [growing, state], "its cache has layers of the kind StateLayer", None),
        (None, [opaque], rigid, rigid),
    ]
    for reason, layers, lending, reading in lent:
        live: Any = SimpleNamespace(plain_reason=reason, layers=layers)
        assert (lending_reason(live), reading_reason(live)) == (lending, reading)


@torch.no_grad()
def test_bytes_of_a_layer_to_which_another_thread_adds_a_tensor() -> None:
    class Adding(list[torch.Tensor]):
        def __iter__(self) -> Any:
            native.more = torch.zeros(3)
            return super().__iter__()

    layer = FORMS["OpaqueLayer"].make()
    native: Any = layer.native
    before, native.several = layer.nbytes, Adding([torch.zeros(2)])
    assert layer.nbytes - before in (2 * 4, 5 * 4)


def test_what_is_in_codes_stays_so_when_padding_becomes_known() -> None:
    form = FORMS["QuantizedLayer"]
    run = Run(form).forward(80)
    coded = run.layer.num_coded
    assert coded > 0
    run.layer.expect_padding(40)
    run.require_held()
    run.forward(40)
    run.require_held()
    assert run.layer.num_coded > coded
    padded = Run(form)
    padded.layer.expect_padding(40)
    padded.forward(80)
    assert padded.layer.num_coded < coded  # all that the shortest row begins with stays exact
    assert [block_capacity(n) for n in (0, 1, 16, 31, 32, 64)] == [1, 2, 17, 32, 34, 68]


@torch.no_grad()
def test_a_window_of_fixed_size_goes_back_as_far_as_it_was_filled() -> None:
    run, form = Run(FORMS["SlidingLayer"]).forward(20), FORMS["StaticReuseLayer of a window"]
    for change, fits in ((-1, True), (-3, True), (-4, False), (-30, False), (17, True), (16, False)):
        layer = form.make()
        layer.fill(12, 20, [run.pieces(0, 12, 20), run.pieces(1, 12, 20)])
        assert layer.first == 12
        if fits:
            layer.crop(change)
            assert int(layer.get_seq_length()) == (change if change > 0 else 20 + change)
        else:
            with pytest.raises(RuntimeError, match=rf"`crop\({change}\)` goes back further"):
                layer.crop(change)
            assert int(layer.get_seq_length()) == 20


def test_how_far_states_are_off() -> None:
    """Numbers that are on one side only, or arranged otherwise, are as far off as can be."""
    held, numbers = torch.tensor([1.0, -1.0]), torch.tensor([3])
    state = LayerState([held, None, numbers], None)
    infinite = float("inf")
    for other, off, mean in (
        (None, infinite, infinite),
        (state, 0, 0),
        (LayerState([held + torch.tensor([0.0, 2.0]), None, numbers], None), 2 / float(held.std()), None),
        (LayerState([held, None, numbers + 1], None), 0, 0),
        (LayerState([held, held, numbers], None), infinite, infinite),
        (LayerState([None, None, numbers], None), infinite, infinite),
        (LayerState([held[:1], None, numbers], None), infinite, infinite),
        (LayerState([held * float("nan"), None, numbers], None), infinite, infinite),
    ):
        assert _of_states(other, state, lossless=True) == pytest.approx(off)
        assert _of_states(other, state, lossless=False) == pytest.approx(off / 2 if mean is None else mean)
    pair, half = (LayerState([held, by * held], None) for by in (1, 0.5))
    assert _of_states(half, pair, lossless=True) == pytest.approx(0.5 / float(held.std()))
    empty = LayerState([torch.zeros(2, 0)], None)
    assert [_of_states(empty, empty, lossless=lossless) for lossless in (True, False)] == [0, 0]
    assert _of_states(None, None, lossless=True) == 0


# Pieces that stay where they are

ROWS = [[5, 4], [3, 2, 1]]  # tokens of the pieces of each row; the second has three columns of padding
STOP = 9


def _given() -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    random = torch.Generator().manual_seed(5)
    return [
        [(torch.randn(2, n, 8, generator=random), torch.randn(2, n, 8, generator=random)) for n in row] for row in ROWS
    ]


def _pieced(pieces: Any) -> Any:
    layer = FORMS["PiecedLayer"].make()
    layer.fill(0, STOP, pieces)
    return layer


def _joined(pieces: Any, more: torch.Tensor | None = None) -> list[torch.Tensor]:
    """The keys of each row without its padding, and what was appended."""
    rows = [torch.cat([keys for keys, _ in row], 1) for row in pieces]
    return rows if more is None else [torch.cat([row, new], 1) for row, new in zip(rows, more, strict=True)]


def _require(layer: Any, keys: list[torch.Tensor], stop: int) -> None:
    assert layer.length == stop
    for row, wanted in enumerate(keys):
        pad = stop - wanted.shape[1]
        for start in range(pad, stop):
            for end in range(start + 1, stop + 1):
                assert torch.equal(layer.columns(row, start, end)[0], wanted[:, start - pad : end - pad])
    assert layer.intact


@torch.no_grad()
def test_pieces_are_not_copied() -> None:
    pieces = _given()
    layer = _pieced(pieces)
    assert layer.buffers == []
    assert layer.nbytes == sum(2 * keys.nbytes for row in pieces for keys, _ in row)
    assert [tuple(spec) for spec in layer.column_specs] == [(2, 8, torch.float32)] * 2
    _require(layer, _joined(pieces), STOP)
    new = torch.randn(2, 2, 3, 8)
    layer.update(new, new)
    assert layer.first == 0
    _require(layer, _joined(pieces, new), STOP + 3)
    seconds = [torch.cat([values for _, values in row], 1) for row in pieces]
    assert torch.equal(layer.columns(0, 0, STOP)[1], seconds[0])
    layer.reorder_cache(torch.tensor([1, 0]))
    assert layer.nbytes > sum(2 * keys.nbytes for row in pieces for keys, _ in row)
    _require(layer, _joined(pieces, new)[::-1], STOP + 3)
    layer.batch_select_indices(torch.tensor([1, 1, 0]))
    _require(layer, [_joined(pieces, new)[row] for row in (0, 0, 1)], STOP + 3)
    assert torch.equal(layer.keys[0], _joined(pieces, new)[0])  # and those who want a tensor get one
    assert layer.keys[2, :, :3].eq(0).all()


@pytest.mark.parametrize("length", range(STOP + 5))
@torch.no_grad()
def test_pieces_are_cut_anywhere(length: int) -> None:
    pieces = _given()
    for appended in (0, 3):
        layer, new = _pieced(pieces), torch.randn(2, 2, appended, 8)
        if appended:
            layer.update(new, new)
        held = STOP + appended
        layer.truncate(length)
        stop = min(length, held)
        keys = [row[:, : max(0, stop - held + row.shape[1])] for row in _joined(pieces, new)]
        if stop:
            _require(layer, keys, stop)
        assert layer.length == stop
        more = torch.randn(2, 2, 2, 8)
        layer.update(more, more)
        assert layer.length == stop + 2
        assert all(keys.shape[1] for keys in (layer._table.keys if layer._table is not None else ()))
        for row in range(2):
            assert torch.equal(layer.columns(row, stop, stop + 2)[0], more[row])
            assert torch.equal(layer.keys[row, :, stop + 2 - keys[row].shape[1] - 2 : stop], keys[row])
        assert layer.intact


@pytest.mark.parametrize("odd", ["dtype", "address", "stride", "dim", "grad", "behind", "asked"])
@torch.no_grad()
def test_what_cannot_be_read_in_place_is_copied(odd: str) -> None:
    pieces = _given()
    keys, values = pieces[1][2]
    if odd == "dtype":
        pieces[1][2] = keys.double(), values.double()
    elif odd == "address":  # 4 bytes behind a multiple of 16
        moved = torch.empty(keys.numel() + 1)[1:].view(keys.shape)
        pieces[1][2] = moved.copy_(keys), values
    elif odd == "stride":
        pieces[1][2] = torch.empty(2, 1, 9)[:, :, :8].copy_(keys), values
    elif odd == "dim":
        pieces = [[(each, torch.cat([other, other], 2)) for each, other in row] for row in pieces]
    layer = FORMS["PiecedLayer"].make()
    if odd == "behind":
        new = torch.randn(2, 2, 4, 8)
        layer.update(new, new)
    if odd == "asked":
        layer.hands_out = False
    start = 4 if odd == "behind" else 0
    with torch.set_grad_enabled(odd == "grad"):
        layer.fill(start, start + STOP, pieces)
    assert layer.buffers != []
    for row, wanted in enumerate(_joined([[(k.float(), v) for k, v in each] for each in pieces])):
        stop = start + STOP
        assert torch.equal(layer.columns(row, stop - wanted.shape[1], stop)[0], wanted)


@torch.no_grad()
def test_a_hit_may_go_on_in_pieces() -> None:
    pieces, more = _given(), _given()
    layer = _pieced(pieces)
    layer.fill(STOP, STOP + 4, [[row[1]] if row is more[0] else [row[0], row[2]] for row in more])
    assert layer.buffers == []
    wanted = [torch.cat([*[k for k, _ in pieces[0]], more[0][1][0]], 1)]
    _require(layer, wanted, STOP + 4)
    assert torch.equal(layer.columns(1, STOP, STOP + 3)[0], more[1][0][0])
    assert torch.equal(layer.columns(1, STOP + 3, STOP + 4)[0], more[1][2][0])
    same = [pieces[0], pieces[0]]
    twice = FORMS["PiecedLayer"].make()
    twice.fill(0, STOP, same)
    assert twice.nbytes == sum(2 * keys.nbytes for keys, _ in pieces[0])  # once for both rows


@pytest.mark.parametrize("attention", ["kvboost_fa2", "sdpa"])
@pytest.mark.parametrize("contiguous", [False, True])
def test_who_leaves_pieces_where_they_are(attention: str, contiguous: bool) -> None:
    model = make_model("llama")
    model.set_attn_implementation(attention)
    kinds = {type(layer) for layer in make_layers(model, None, contiguous=contiguous)}
    assert kinds == ({PiecedLayer} if attention == "kvboost_fa2" and not contiguous else {GrowingLayer})
