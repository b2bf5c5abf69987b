"""Slots on a CUDA device: layers from pinned memory, from other memory and from files."""

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.device import DEVICE, ON_GPU, needs_gpu
from tests.internals.offload import CudaBackend, FlatLayout, HostSource, LayerFolder, LayerMemory, Source, cuda_pinning
from tests.offload.at_once import HostLink

UNIT = 1 << 20 if ON_GPU else 1 << 10
NBYTES, PIECE_BYTES = 10 * UNIT, 3 * UNIT  # the last piece of a layer is a short one
N_LAYERS, N_SLOTS = 6, 2
LONG = 200_000_000  # cycles of the device: about a tenth of a second


@pytest.fixture(scope="module")
def contents() -> list[torch.Tensor]:
    """Bytes of each layer."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 256, (NBYTES,), dtype=torch.uint8, generator=generator) for _ in range(N_LAYERS)]


def make_backend() -> CudaBackend:
    return CudaBackend(DEVICE, None if ON_GPU else HostLink(), piece_bytes=PIECE_BYTES)


@pytest.fixture
def backend() -> Iterator[CudaBackend]:
    """Closed in the end."""
    made = make_backend()
    yield made
    made.close()


def pinned(contents: list[torch.Tensor]) -> list[Source]:
    memory = LayerMemory(cuda_pinning(DEVICE) if ON_GPU else None)
    sources: list[Source] = []
    for content in contents:
        flat = memory.allocate(NBYTES)
        flat.copy_(content)
        assert flat.is_pinned() == ON_GPU
        sources.append(HostSource(flat))
    assert memory.pinned_bytes == ON_GPU * NBYTES * len(contents)
    return sources


def in_files(contents: list[torch.Tensor], folder: Path) -> list[Source]:
    files = LayerFolder(folder)
    return [files.write(n, content, FlatLayout({"weight": content})) for n, content in enumerate(contents)]


def forwards(backend: CudaBackend, sources: list[Source], *, releases: bool) -> list[torch.Tensor]:
    """What computation saw of each layer; it is always late, so that nothing is right by chance."""
    slots = backend.allocate(NBYTES, N_SLOTS)
    ring = sources * 3
    seen = []
    for turn in range(N_SLOTS):
        backend.issue(turn, ring[turn])
    for turn in range(len(ring)):
        slot = turn % N_SLOTS
        backend.wait(slot)
        torch.cuda._sleep(LONG // 50)
        seen.append(slots[slot].clone())
        if releases:
            backend.release(slot)
        if turn + N_SLOTS < len(ring):
            backend.issue(slot, ring[turn + N_SLOTS])
    torch.cuda.synchronize()
    return [flat.cpu() for flat in seen]


def same(seen: list[torch.Tensor], contents: list[torch.Tensor]) -> bool:
    assert seen
    return all(torch.equal(found, contents[turn % N_LAYERS]) for turn, found in enumerate(seen))


@pytest.mark.parametrize("place", ["pinned", "unpinned", "files", "mixed"])
@pytest.mark.parametrize("releases", [True, False])
def test_computation_sees_what_it_waited_for(
    backend: CudaBackend, contents: list[torch.Tensor], tmp_path: Path, place: str, releases: bool
) -> None:
    if place == "pinned":
        sources = pinned(contents)
    elif place == "unpinned":
        sources = [HostSource(content) for content in contents]
    else:
        sources = in_files(contents, tmp_path)
        if place == "mixed":
            sources[::2] = pinned(contents[::2])
    assert same(forwards(backend, sources, releases=releases), contents)
    assert backend.bytes_copied == 3 * N_LAYERS * NBYTES
    assert backend.copy_rate() > 1e8
    assert backend.stall_s >= 0
    if place == "pinned":
        assert backend.synchronous_loads == 0


def test_callers_on_other_streams(backend: CudaBackend, contents: list[torch.Tensor]) -> None:
    sources = pinned(contents)
    slots = backend.allocate(NBYTES, 1)
    seen = []
    for turn in range(3 * N_LAYERS):
        backend.issue(0, sources[turn % N_LAYERS])
        with torch.cuda.stream(torch.cuda.Stream()):
            backend.wait(0)
            torch.cuda._sleep(LONG // 50)
            seen.append(slots[0].clone())
            if turn % 2:
                backend.release(0)
    torch.cuda.synchronize()
    assert same([flat.cpu() for flat in seen], contents)


@needs_gpu("its copies are late")
def test_a_copy_that_is_not_waited_for_is_noticed(backend: CudaBackend, contents: list[torch.Tensor]) -> None:
    (slot,) = backend.allocate(NBYTES, 1)
    (source,) = pinned(contents[:1])
    slot.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(backend._copies.stream):  # type: ignore[arg-type]
        torch.cuda._sleep(LONG)
    backend.issue(0, source)
    early = slot.clone()
    backend.wait(0)
    late = slot.clone()
    assert not torch.equal(early.cpu(), contents[0])
    assert torch.equal(late.cpu(), contents[0])
    assert backend.stall_s > 0


@needs_gpu("its copies are late")
def test_a_copy_that_does_not_wait_is_noticed(backend: CudaBackend, contents: list[torch.Tensor]) -> None:
    (slot,) = backend.allocate(NBYTES, 1)
    first, second = pinned(contents[:2])
    backend.issue(0, first)
    backend.wait(0)
    torch.cuda.synchronize()
    backend._slots[0].readers.clear()
    torch.cuda._sleep(LONG)
    backend.issue(0, second)
    assert not torch.equal(slot.clone().cpu(), contents[0])


@needs_gpu("CUDA pins")
def test_host_memory_that_is_refused_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    pinning = cuda_pinning(DEVICE)
    flat = LayerMemory(pinning).allocate(NBYTES)
    with pytest.raises(RuntimeError, match="cudaHostRegister returned"):
        pinning.register(flat.data_ptr(), NBYTES)  # for the second time
    assert (torch.ones(8, device=DEVICE) + 1).sum().item() == 16  # is not blamed for it
    assert flat.is_pinned()
    view = flat[:8]
    del flat
    assert view.is_pinned()
    del view
    assert LayerMemory(pinning).allocate(NBYTES).is_pinned()
    assert not caplog.records


def test_an_error_of_the_reader_is_raised_by_wait(
    backend: CudaBackend, contents: list[torch.Tensor], tmp_path: Path
) -> None:
    slots = backend.allocate(NBYTES, 2)
    sources = in_files(contents[:2], tmp_path)
    wanted = contents[0].numpy().tobytes()
    os.truncate(next(path for path in tmp_path.glob("layer-*.bin") if path.read_bytes() == wanted), 3000)
    backend.issue(0, sources[0])
    backend.issue(1, sources[1])
    with pytest.raises(OSError, match="has 3000"):
        backend.wait(0)
    backend.wait(1)
    assert torch.equal(slots[1].cpu(), contents[1])
    backend.issue(0, sources[1])
    backend.wait(0)
    assert torch.equal(slots[0].cpu(), contents[1])


@needs_gpu("its copies are late")
def test_a_backend_that_is_forgotten_ends_its_thread_and_harms_nobody(contents: list[torch.Tensor]) -> None:
    made = make_backend()
    made.allocate(NBYTES, N_SLOTS)
    sources = pinned(contents[:1])
    with torch.cuda.stream(made._copies.stream):  # type: ignore[arg-type]
        torch.cuda._sleep(LONG)
    made.issue(0, sources[0])
    made.issue(1, HostSource(contents[1]))
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("kvboost-layers")]
    assert len(threads) == 1
    del made  # but not the sources: memory that is unpinned waits for the device
    gc.collect()
    others = [torch.full((NBYTES,), 7, dtype=torch.uint8, device=DEVICE) for _ in range(N_SLOTS)]
    threads[0].join(60)
    assert not threads[0].is_alive()
    torch.cuda.synchronize()
    assert all(bool((other == 7).all()) for other in others)
