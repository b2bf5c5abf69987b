"""A `GrowingTensor` under each writer, in each state of its buffer: what it holds, whom it reaches, when it moves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.internals.cache import GrowingTensor, buffers_for, capacity

pytestmark = pytest.mark.daily

HEADS, DIM, HELD, NEW = 2, 16, 6, 3  # a column of a head is 64 bytes: no rounding of sizes


def columns(n: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, HEADS, n, DIM, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _open(tensor: GrowingTensor, new: torch.Tensor) -> None:
    tensor.open(tensor.stop + new.shape[2], new).copy_(new)
    tensor.seal()


def _fill(tensor: GrowingTensor, new: torch.Tensor) -> None:
    tensor.fill(tensor.stop, tensor.stop + new.shape[2], [[row[:, :1], row[:, 1:]] for row in new])


def _with_graph(tensor: GrowingTensor, new: torch.Tensor) -> None:
    with torch.enable_grad():
        tensor.append_and_view(new, 0, 0)


APPENDS: dict[str, Callable[[GrowingTensor, torch.Tensor], Any]] = {
    "append": lambda tensor, new: tensor.append(new),
    "append_and_view": lambda tensor, new: tensor.append_and_view(new, 0, 0),
    "open": _open,
    "fill": _fill,
    "with_graph": _with_graph,
}
OTHERS: dict[str, Callable[[GrowingTensor], Any]] = {
    "scatter": lambda tensor: tensor.scatter(torch.tensor([[1], [2]]), columns(1, seed=9)),
    "select": lambda tensor: tensor.select(torch.tensor([1, 0])),
    "cast": lambda tensor: tensor.cast(torch.float64),
    "share": lambda tensor: tensor.share(),
}


def held(room: Callable[[int], int] = capacity, n: int = HELD) -> GrowingTensor:
    tensor = GrowingTensor(room)
    tensor.append(columns(n))
    return tensor


def _shared() -> tuple[GrowingTensor, Any]:
    tensor = held()
    return tensor, tensor.share().view()


def _twin() -> tuple[GrowingTensor, Any]:
    tensor = held()
    return tensor.share(), tensor.view()


def _given() -> tuple[GrowingTensor, Any]:
    tensor = held()
    return tensor, tensor.hand_out(0)


def _taken() -> tuple[GrowingTensor, Any]:
    ((_, made),) = buffers_for(2, (2, HEADS, HELD, DIM), torch.float32, torch.device("cpu"), 1 << 20)
    made[:, :, :, :HELD] = columns(HELD)
    tensor = GrowingTensor()
    tensor.take(made[1], HELD)
    return tensor, None


# By name: a tensor of `HELD` columns, a view that must not change, and whether its buffer is written to in place.
STATES: dict[str, tuple[Callable[[], tuple[GrowingTensor, Any]], bool]] = {
    "with room": (lambda: (held(), None), True),
    "with just enough room": (lambda: (held(lambda n: n + NEW if n == HELD else n), None), True),
    "with too little room": (lambda: (held(lambda n: n + NEW - 1), None), False),
    "shared": (_shared, False),
    "a twin": (_twin, False),
    "handed out": (_given, False),
    "taken": (_taken, True),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", APPENDS)
@torch.no_grad()
def test_append(name: str, state: str) -> None:
    make, in_place = STATES[state]
    tensor, reader = make()
    seen, before, new = None if reader is None else reader.clone(), tensor.buffer, columns(NEW, seed=1)
    APPENDS[name](tensor, new)
    assert torch.equal(tensor.view(), torch.cat([columns(HELD), new], 2))
    assert (tensor.buffer is before) == (in_place and name != "with_graph")
    assert reader is None or torch.equal(reader, seen)
    assert tensor.intact
    APPENDS[name](tensor, new)  # once it has a buffer of its own, it stays there
    assert torch.equal(tensor.view(), torch.cat([columns(HELD), new, new], 2))
    assert tensor.intact


@pytest.mark.parametrize("state", STATES)
@torch.no_grad()
def test_scatter(state: str) -> None:
    make, _ = STATES[state]
    tensor, reader = make()
    seen, before, new = None if reader is None else reader.clone(), tensor.buffer, columns(2, seed=1)
    tensor.scatter(torch.tensor([[0, 4], [5, 1]]), new)
    wanted = columns(HELD)
    wanted[0, :, [0, 4]], wanted[1, :, [5, 1]] = new[0], new[1]
    assert torch.equal(tensor.view(), wanted)
    assert (tensor.buffer is before) == (reader is None)  # it needs no room
    assert reader is None or torch.equal(reader, seen)
    assert tensor.intact


def writers() -> dict[str, Callable[[GrowingTensor], Any]]:
    by_append = {name: lambda tensor, way=way: way(tensor, columns(NEW, seed=1)) for name, way in APPENDS.items()}
    return by_append | OTHERS


@pytest.mark.parametrize("name", writers())
@pytest.mark.parametrize("handed", [False, True])
@torch.no_grad()
def test_no_write_hides_that_of_somebody_else(name: str, handed: bool) -> None:
    """Nor is a write of our own taken for one."""
    ways: list[Callable[[torch.Tensor], object]] = [lambda t: t.add_(1)]
    if handed:
        ways += [lambda t: t.data.add_(1), lambda t: t.numpy().fill(2.0)]
    for change in ways:
        tensor = held()
        theirs = tensor.hand_out(0) if handed else tensor.buffer
        assert theirs is not None
        change(theirs)
        writers()[name](tensor)
        assert not tensor.intact
    tensor = held()
    if handed:
        tensor.hand_out(0)
    writers()[name](tensor)
    assert tensor.intact
    writers()[name](tensor)
    assert tensor.intact


@pytest.mark.parametrize("name", sorted(set(writers()) - {"open", "scatter", "fill"}))
@torch.no_grad()
def test_what_is_put_in_place_of_a_view_is_followed(name: str) -> None:
    for change, length in [
        (lambda t: t.set_(columns(HELD, seed=5)), HELD),
        (lambda t: setattr(t, "data", columns(HELD - 2, seed=5)), HELD - 2),
    ]:
        tensor = held()
        change(tensor.hand_out(0))
        writers()[name](tensor)
        assert not tensor.intact
        rows = columns(length, seed=5)
        assert torch.equal(tensor.view()[:, :, :length].float(), rows[[1, 0]] if name == "select" else rows)
        assert tensor.stop == length + (NEW if name in APPENDS else 0)


@torch.no_grad()
def test_the_same_view_is_handed_out_until_something_is_written() -> None:
    tensor = held()
    view = tensor.hand_out(2)
    assert tensor.hand_out(2) is view
    assert torch.equal(view, columns(HELD)[:, :, 2:])
    wider = tensor.hand_out(0)
    assert wider is not view
    assert torch.equal(wider, columns(HELD))
    wider[:, :, 0].data.add_(1)  # in front of the first view
    assert not tensor.intact
    twin = held()
    first = twin.hand_out(0)
    twin.append(columns(1, seed=2))
    assert twin.hand_out(0) is not first


@pytest.mark.parametrize("state", STATES)
@torch.no_grad()
def test_what_changes_nothing_leaves_others_their_buffer(state: str) -> None:
    make, _ = STATES[state]
    tensor, reader = make()
    seen = None if reader is None else reader.clone()
    tensor.cast(torch.float32)
    tensor.move(torch.device("cpu"))
    assert not tensor.trim(0)
    tensor.truncate(HELD)
    tensor.scatter(torch.tensor([[0], [0]]), columns(1, seed=1))
    assert reader is None or torch.equal(reader, seen)
    twin = tensor.share()
    tensor.scatter(torch.tensor([[0], [0]]), columns(1, seed=2))
    assert torch.equal(twin.view()[:, :, :1], columns(1, seed=1))


@torch.no_grad()
def test_a_twin_is_not_reached_through_what_was_handed_out() -> None:
    tensor = held()
    view = tensor.hand_out(0)
    twin = tensor.share()
    view.add_(1)
    assert torch.equal(twin.view(), columns(HELD))
    assert torch.equal(tensor.view(), columns(HELD) + 1)
    assert twin.intact
    assert not tensor.intact
    assert GrowingTensor().share().buffer is None
    other = held()
    other.buffer.add_(1)
    assert not other.share().intact
    assert not other.intact


@torch.no_grad()
def test_parts() -> None:
    tensor, all_of_it = held(), columns(HELD)
    for start in range(-1, HELD + 2):
        assert torch.equal(tensor.view(start), all_of_it[:, :, max(0, start) :])
        for stop in range(max(start, 0), HELD + 3):
            assert torch.equal(tensor.row(1, start, stop), all_of_it[1, :, max(0, start) : stop])
    tensor.truncate(HELD + 1)
    assert tensor.stop == HELD
    tensor.truncate(4)
    assert torch.equal(tensor.view(), all_of_it[:, :, :4])
    assert tensor.intact


@torch.no_grad()
def test_the_first_columns_may_go_when_a_buffer_is_full() -> None:
    given = torch.cat([columns(HELD), columns(NEW, seed=1)], 2)
    for keep_from, first in [(0, 0), (4, 4), (HELD, HELD), (HELD + 2, HELD)]:  # never what is appended
        for append in (
            lambda t, new, keep=keep_from: t.append(new, keep),
            lambda t, new, keep=keep_from: t.append_and_view(new, keep, 0),
        ):
            tensor = held(lambda n: n)
            append(tensor, columns(NEW, seed=1))
            assert (tensor.first, tensor.stop) == (first, HELD + NEW)
            assert torch.equal(tensor.view(), given[:, :, first:])
            assert torch.equal(tensor.view(first + 1), given[:, :, first + 1 :])
            assert torch.equal(tensor.row(0, 0, HELD + 1), given[0, :, first : HELD + 1])
            assert tensor.buffer.shape[2] == HELD + NEW - first
            tensor.scatter(torch.tensor([[HELD], [HELD]]), columns(1, seed=3))
            assert torch.equal(tensor.view(HELD)[:, :, :1], columns(1, seed=3))
            tensor.truncate(0)
            assert tensor.stop == first
            roomy = held()
            append(roomy, columns(NEW, seed=1))
            assert roomy.first == 0


@torch.no_grad()
def test_a_step_with_room_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also into the last column of a buffer that does not begin with the first."""
    tensor = held(lambda n: n)
    tensor.room = lambda n: n + 2
    tensor.append(columns(1, seed=1), 4)
    assert (tensor.first, tensor.stop, tensor.buffer.shape[2]) == (4, 7, 5)
    before = tensor.buffer
    tensor.append(columns(1, seed=2))
    assert tensor.buffer is before
    tensor.truncate(7)
    monkeypatch.delattr(GrowingTensor, "append")
    for stop in (8, 9):
        seen = tensor.append_and_view(columns(1, seed=stop), 0, 6)
        assert torch.equal(seen[:, :, -1:], columns(1, seed=stop))
        assert (seen.shape[2], tensor.stop) == (stop - 6, stop)
    tensor.truncate(5)
    seen = tensor.append_and_view(columns(2), 0, 0)
    assert torch.equal(seen[:, :, -2:], columns(2))
    assert (seen.shape[2], tensor.stop) == (3, 7)
    assert tensor.append_and_view(columns(1), 0, 9).shape[2] == 0
    assert tensor.intact


@torch.no_grad()
def test_a_window_goes_on_and_on() -> None:
    tensor, given = GrowingTensor(lambda n: n + 2), columns(60)
    for stop in range(1, 61):
        tensor.append(given[:, :, stop - 1 : stop], stop - 5)
        assert torch.equal(tensor.view(), given[:, :, tensor.first : stop])
        assert max(0, stop - 9) <= tensor.first <= max(0, stop - 5)
    moved = tensor.share()
    moved.move(torch.device("meta"))
    assert moved.buffer.device.type == "meta"
    assert (moved.first, moved.stop) == (tensor.first, 60)
    GrowingTensor().move(torch.device("meta"))


@pytest.mark.parametrize(("room", "trims"), [(3, True), (4, False)])
@torch.no_grad()
def test_memory_is_given_back_if_less_than_half_is_needed(room: int, trims: bool) -> None:
    tensor = held(lambda n: n + room, 8)  # 8 + room columns; 2 are needed, and their room
    assert tensor.trim(6) == trims
    assert tensor.first == (6 if trims else 0)
    assert tensor.buffer.shape[2] == (2 + room if trims else 8 + room)
    assert torch.equal(tensor.view(6), columns(8)[:, :, 6:])
    assert not GrowingTensor().trim(0)


def test_a_graph_is_not_cut_where_memory_is_given_back() -> None:
    tensor = GrowingTensor(lambda n: n)
    leaf = columns(8).requires_grad_()
    tensor.append_with_graph(leaf * 2)
    assert tensor.trim(6)
    assert torch.equal(tensor.view(), leaf[:, :, 6:] * 2)
    tensor.view().sum().backward()
    assert leaf.grad[:, :, 6:].eq(2).all()
    assert leaf.grad[:, :, :6].eq(0).all()
    tensor.append_with_graph(columns(4, seed=1).requires_grad_())
    tensor.truncate(11)
    assert tensor.trim(10)
    assert (tensor.first, tensor.stop) == (10, 11)
    assert torch.equal(tensor.buffer, columns(4, seed=1)[:, :, 2:3])


@torch.no_grad()
def test_begins_anew_where_what_is_filled_lies_further_on() -> None:
    tensor = held()
    tensor.fill(HELD + 2, HELD + 5, [[row] for row in columns(3, seed=1)])
    assert (tensor.first, tensor.stop) == (HELD + 2, HELD + 5)
    assert torch.equal(tensor.view(), columns(3, seed=1))
    near = held()
    turned: list[torch.Tensor] = []
    near.fill(HELD, HELD + 3, [[columns(3, seed=1)[0]], [columns(3, seed=1)[1, :, 1:]]], turned.append)
    assert torch.equal(near.view(), torch.cat([columns(HELD), turned[0]], 2))
    assert torch.equal(turned[0][0], columns(3, seed=1)[0])
    assert torch.equal(turned[0][1, :, 1:], columns(3, seed=1)[1, :, 1:])
    assert turned[0][1, :, 0].eq(0).all()  # padding


@torch.no_grad()
def test_types_are_joined_as_those_of_stock_layers() -> None:
    for one, other in [
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.float64),
    ]:
        tensor = GrowingTensor()
        tensor.append(columns(3, dtype=one))
        tensor.cast(other)
        tensor.append(columns(2, seed=1, dtype=other))
        wanted = torch.cat([columns(3, dtype=one), columns(2, seed=1, dtype=other)], 2)
        assert torch.equal(tensor.view(), wanted)
        assert tensor.buffer.dtype == wanted.dtype
    for append in APPENDS.values():  # nothing is left of what was emptied
        emptied = held(lambda n: n, 2)
        emptied.truncate(0)
        append(emptied, columns(NEW, seed=1, dtype=torch.bfloat16))
        assert torch.equal(emptied.view(), columns(NEW, seed=1, dtype=torch.bfloat16))
        assert emptied.buffer.dtype == torch.bfloat16
    same = held()
    before = same.buffer
    same.cast(torch.float32)
    same.move(torch.device("cpu"))
    assert same.buffer is before


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.enable_grad, torch.no_grad])
def test_a_buffer_can_be_written_to_in_every_mode(mode: Callable[[], Any]) -> None:
    tensor = GrowingTensor(lambda n: n + 2)
    with mode():
        tensor.append(columns(3))
    assert not tensor.buffer.is_inference()
    with torch.no_grad():
        tensor.append(columns(1, seed=1))
    assert torch.equal(tensor.view(), torch.cat([columns(3), columns(1, seed=1)], 2))
    tensor.buffer.add_(1)
    assert not tensor.intact  # writes are counted


@torch.inference_mode()
def test_writes_to_what_was_made_in_inference_mode_are_not_counted() -> None:
    tensor = held()
    tensor.adopt(columns(HELD), HELD)
    tensor.truncate(4)
    assert tensor.buffer.is_inference()
    tensor.shared = False  # what writes to it in place must not ask for its version
    seen = tensor.append_and_view(columns(1, seed=1), 0, 0)
    assert torch.equal(seen, torch.cat([columns(HELD)[:, :, :4], columns(1, seed=1)], 2))


def test_sizes() -> None:
    assert [capacity(n) for n in (0, 1, 1024, 1032, 8000)] == [128, 129, 1152, 1161, 9000]
    for dim, dtype, n, wanted in [(16, torch.float32, 5, 5), (8, torch.float16, 5, 8), (24, torch.bfloat16, 5, 8)]:
        tensor = GrowingTensor(lambda n: n)
        tensor.append(torch.zeros(1, 1, n, dim, dtype=dtype))
        assert tensor.buffer.shape[2] == wanted  # heads begin at multiples of 64 bytes
        assert tensor.nbytes == wanted * dim * dtype.itemsize
    assert GrowingTensor().nbytes == 0


def test_buffers_are_made_several_at_a_time() -> None:
    shape, one = (2, HEADS, HELD, DIM), 2 * HEADS * (HELD + 128) * DIM * 4
    for at_once, wanted in [
        (1, [(0, 1), (1, 2), (2, 3)]),
        (2 * one - 1, [(0, 1), (1, 2), (2, 3)]),
        (2 * one, [(0, 2), (2, 3)]),
        (9 * one, [(0, 3)]),
    ]:
        made = list(buffers_for(3, shape, torch.float32, torch.device("cpu"), at_once))
        assert [(run.start, run.stop) for run, _ in made] == wanted
        assert all(buffers.shape == (len(run), 2, HEADS, HELD + 128, DIM) for run, buffers in made)
    tensor = GrowingTensor()
    tensor.take(made[0][1][1], HELD)
    assert tensor.nbytes == one  # its part of the memory that it has with others
    view = tensor.hand_out(0)  # others' memory is not handed out
    assert view.untyped_storage().nbytes() == one
