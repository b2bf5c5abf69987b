"""Backends of streaming: whatever is asked of them in whatever order, computation sees the bytes it waited for."""

import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.internals.offload import (
    CudaBackend,
    FlatLayout,
    HostSource,
    LayerBackend,
    LayerFolder,
    Source,
    ThreadedBackend,
)
from tests.offload.poisoning import PoisoningBackend
from tests.offload.simulated_cuda import SimulatedEvent, SimulatedGpu

N_SLOTS, SLOT_BYTES, PIECE_BYTES = 3, 1024, 300
CPU = torch.device("cpu")


class FailingSource:
    """Gives some bytes, and then none."""

    nbytes = SLOT_BYTES
    host = path = None

    def read_into(self, target: torch.Tensor, start: int) -> None:
        target.fill_(0xEE)
        if start + target.numel() > SLOT_BYTES // 2:
            raise OSError("the disk is gone")


class Layer(NamedTuple):
    content: torch.Tensor | None  # None: cannot be read
    source: Source


class Action(NamedTuple):
    name: str
    slot: int
    layer: int
    stream: int


@pytest.fixture(scope="module")
def layers() -> Iterator[list[Layer]]:
    """Three in host memory, three in files, one that cannot be read."""
    generator = torch.Generator().manual_seed(0)
    made: list[Layer] = []
    with tempfile.TemporaryDirectory() as folder:
        files = LayerFolder(folder)
        for number, nbytes in enumerate((SLOT_BYTES, 256, 768, SLOT_BYTES, 256, 768)):
            content = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
            layout = FlatLayout({"weight": content})
            made.append(Layer(content, HostSource(content) if number < 3 else files.write(number, content, layout)))
        yield [*made, Layer(None, FailingSource())]


def perform(
    backend: LayerBackend, actions: Iterable[Action], layers: list[Layer], gpu: SimulatedGpu | None = None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Do what the contract allows of the actions; what computation saw, each with what it should have seen."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    slots = backend.allocate(SLOT_BYTES, N_SLOTS)
    streams = [gpu.computing, gpu.new_stream()] if gpu is not None else []
    addresses = [slot.data_ptr() for slot in slots]
    issued: dict[int, int] = {}
    waited: dict[int, set[int]] = {}  # on which streams
    asked = 0

    def reading(slot: int, content: torch.Tensor) -> Callable[[], None]:
        return lambda: seen.append((slots[slot][: len(content)].clone(), content))

    for name, slot, layer, stream in actions:
        if gpu is not None:
            gpu.computing = streams[stream]
        if name == "issue":
            backend.issue(slot, layers[layer].source)
            asked += layers[layer].source.nbytes
            issued[slot] = layer
            waited.pop(slot, None)
        elif name == "wait" and slot in issued:
            if layers[issued[slot]].content is None:
                with pytest.raises(OSError, match="the disk is gone"):
                    backend.wait(slot)
            else:
                backend.wait(slot)
                waited.setdefault(slot, set()).add(stream)
        elif name == "compute" and stream in waited.get(slot, ()):
            content = layers[issued[slot]].content
            assert content is not None
            (gpu.launch if gpu is not None else _now)(reading(slot, content))
        elif name == "release" and slot in waited:
            backend.release(slot)
            del waited[slot]
    if gpu is not None:
        gpu.run()
    assert backend.bytes_copied == asked
    assert [slot.data_ptr() for slot in slots] == addresses
    backend.close()
    backend.close()
    return seen


def _now(kernel: Callable[[], None]) -> None:
    kernel()


def all_right(seen: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    return all(torch.equal(found, expected) for found, expected in seen)


def passes(n_layers: Iterable[int], times: int) -> list[Action]:
    """Forwards as they are: each layer in its slot, the one after the next issued when it is done."""
    ring = list(n_layers) * times
    actions = [Action("issue", turn % 2, layer, 0) for turn, layer in enumerate(ring[:2])]
    for turn in range(len(ring)):
        actions += [Action(name, turn % 2, 0, 0) for name in ("wait", "compute", "release")]
        if turn + 2 < len(ring):
            actions.append(Action("issue", turn % 2, ring[turn + 2], 0))
    return actions


names = st.sampled_from(["issue", "wait", "compute", "compute", "release"])
sequences = st.lists(
    st.builds(Action, names, st.integers(0, N_SLOTS - 1), st.integers(0, 6), st.integers(0, 1)),
    min_size=15,
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(actions=sequences, seed=st.integers(0, 2**16), pins=st.booleans())
def test_simulated_cuda(layers: list[Layer], actions: list[Action], seed: int, pins: bool) -> None:
    gpu = SimulatedGpu(seed, pins)
    assert all_right(perform(CudaBackend(CPU, gpu, piece_bytes=PIECE_BYTES), actions, layers, gpu))


@settings(max_examples=80, deadline=None)
@given(actions=sequences)
def test_threaded(layers: list[Layer], actions: list[Action]) -> None:
    assert all_right(perform(ThreadedBackend(CPU), actions, layers))


@settings(max_examples=80, deadline=None)
@given(actions=sequences)
def test_poisoning(layers: list[Layer], actions: list[Action]) -> None:
    assert all_right(perform(PoisoningBackend(), actions, layers))


@pytest.mark.parametrize("which", [range(3), range(3, 6), range(6)], ids=["host", "files", "both"])
def test_forwards_on_simulated_cuda(layers: list[Layer], which: range) -> None:
    for seed in range(20):
        gpu = SimulatedGpu(seed)
        backend = CudaBackend(CPU, gpu, piece_bytes=PIECE_BYTES)
        seen = perform(backend, passes(which, 4), layers, gpu)
        assert len(seen) == 4 * len(which)
        assert all_right(seen)
        sizes = [-(-layers[layer].source.nbytes // PIECE_BYTES) for layer in which]
        assert gpu.copies == 4 * sum(sizes)


class WithoutWait(CudaBackend):
    """The computation does not wait for the copy."""

    def wait(self, slot: int) -> None:
        reading = self._slots[slot].load.reading
        if reading is not None:
            reading.result()


class WithoutFree(CudaBackend):
    """The copy does not wait for the computation."""

    def release(self, slot: int) -> None:
        self._slots[slot].readers.clear()


class BuffersAtOnce(SimulatedGpu):
    """A buffer is read into without waiting for the copy from it."""

    def record(self, stream: object, *, timed: bool = False) -> SimulatedEvent:
        event = super().record(stream, timed=timed)  # type: ignore[arg-type]
        event.synchronize = lambda: None
        return event


@pytest.mark.parametrize("which", [range(3), range(3, 6)], ids=["host", "files"])
@pytest.mark.parametrize(
    ("broken", "gpus"),
    [(WithoutWait, SimulatedGpu), (WithoutFree, SimulatedGpu), (CudaBackend, BuffersAtOnce)],
    ids=["no wait", "no free", "no wait for buffers"],
)
def test_a_missing_wait_gives_wrong_bytes(
    layers: list[Layer], which: range, broken: type[CudaBackend], gpus: type[SimulatedGpu]
) -> None:
    wrong = 0
    for seed in range(20):
        gpu = gpus(seed, pins=broken is not CudaBackend)
        wrong += not all_right(perform(broken(CPU, gpu, piece_bytes=PIECE_BYTES), passes(which, 8), layers, gpu))
    assert wrong >= 10


@pytest.mark.parametrize("n_streams", [1, 2])
def test_a_release_left_out_is_made_up_for(layers: list[Layer], n_streams: int) -> None:
    actions, stream = [], 0
    for action in passes(range(6), 4):
        if action.name == "release":
            stream = (stream + 1) % n_streams  # the next layer is issued from another stream than the last one's
        else:
            actions.append(action._replace(stream=stream))
    for seed in range(20):
        gpu = SimulatedGpu(seed)
        seen = perform(CudaBackend(CPU, gpu, piece_bytes=PIECE_BYTES), actions, layers, gpu)
        assert len(seen) == 24
        assert all_right(seen)


@pytest.mark.parametrize(("releases", "issuer"), [(0, 0), (1, 1), (2, 1)])
def test_a_copy_waits_for_all_streams_that_worked_on_what_it_overwrites(
    layers: list[Layer], releases: int, issuer: int
) -> None:
    """Also for one whose work was released before another stream's, with nothing issued in between."""
    for seed in range(20):
        gpu = SimulatedGpu(seed)
        actions = []
        for layer in range(6):
            actions.append(Action("issue", 0, layer, issuer))
            for stream in range(2):
                actions += [Action(name, 0, 0, stream) for name in ("wait", *("compute",) * 8)]
                if stream < releases:
                    actions.append(Action("release", 0, 0, stream))
        seen = perform(CudaBackend(CPU, gpu, piece_bytes=PIECE_BYTES), actions, layers, gpu)
        assert len(seen) == 96
        assert all_right(seen)
