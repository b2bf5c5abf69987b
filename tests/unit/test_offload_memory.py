"""Streamed layers in host memory and in files, and the backends that fetch them, one thing at a time."""

import ctypes
import errno
import gc
import logging
import os
import platform
import shutil
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.internals.offload import (
    CudaBackend,
    FileSource,
    FlatLayout,
    HostSource,
    LayerBackend,
    LayerFolder,
    LayerMemory,
    Origin,
    Pinning,
    ThreadedBackend,
    Timings,
    cuda_pinning,
    disk,
    former_files,
    mapped,
    prune_layers,
)
from tests.internals.top import contents, device_link
from tests.offload.poisoning import PoisoningBackend
from tests.offload.simulated_cuda import BYTES_PER_MS, SimulatedGpu

pytestmark = pytest.mark.daily

CPU = torch.device("cpu")
NBYTES = 5120
LOCKS = {"streamed-layers.lock"} if sys.platform == "win32" else set()
LAYOUT = FlatLayout({"weight": torch.empty(NBYTES, dtype=torch.uint8, device="meta")})


def _names(folder: Path) -> set[str]:
    """The files in a folder, without its lock."""
    return {path.name for path in folder.iterdir()} - LOCKS


def content(seed: int = 0, nbytes: int = NBYTES) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def read(source: FileSource | HostSource) -> torch.Tensor:
    target = torch.zeros(source.nbytes, dtype=torch.uint8)
    source.read_into(target, 0)
    return target


class Pins:
    """What is pinned, by address; more than `limit` bytes cannot be."""

    def __init__(self, limit: int = 2**40) -> None:
        self.held: dict[int, int] = {}
        self.asked: list[int] = []
        self.limit = limit
        self.pinning = Pinning(self.register, self.unregister)

    def register(self, address: int, nbytes: int) -> None:
        self.asked.append(nbytes)
        if sum(self.held.values()) + nbytes > self.limit:
            raise RuntimeError("cudaHostRegister returned 1")
        self.held[address] = nbytes

    def unregister(self, address: int) -> None:
        del self.held[address]


def test_memory_is_pinned_to_the_byte_for_as_long_as_a_view_of_it_lives() -> None:
    pins = Pins()
    memory = LayerMemory(pins.pinning)
    first, second = memory.allocate(5000), memory.allocate(7000)
    assert pins.held == {first.data_ptr(): 5000, second.data_ptr(): 7000}
    assert memory.pinned_bytes == 12000
    assert not first.any()
    view = first[100:200].view(torch.int32)
    view.fill_(7)
    del first
    assert len(pins.held) == 2
    assert view.tolist() == [7] * 25
    del view
    assert list(pins.held) == [second.data_ptr()]
    del second
    assert not pins.held


def test_where_pinning_fails_there_is_one_warning_and_memory_all_the_same(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "release", lambda: "6.8.0-generic")
    pins = Pins(limit=6000)
    memory = LayerMemory(pins.pinning)
    flats = [memory.allocate(5000) for _ in range(4)]
    assert [flat.data_ptr() in pins.held for flat in flats] == [True, False, False, False]
    assert (memory.pinned_bytes, memory.pageable_bytes) == (5000, 15000)
    assert not caplog.records
    memory.close()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.name == "kvboost_hf.offload.host"
    remedy = "close other programs" if sys.platform == "win32" else "`ulimit -l unlimited`"
    for told in ("cudaHostRegister returned 1", "`ulimit -l` is", "more slowly", remedy):
        assert told in record.getMessage()
    flats[1].copy_(content(nbytes=5000))
    assert torch.equal(read(HostSource(flats[1])), content(nbytes=5000))
    del flats, memory
    assert not pins.held


def test_on_wsl_the_warning_names_its_settings(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "release", lambda: "6.6.87.2-microsoft-standard-WSL2")
    memory = LayerMemory(Pins(limit=750_000_000).pinning)
    flats = [memory.allocate(250_000_000) for _ in range(5)]  # zeros, which take no memory
    memory.close()
    assert len(flats) == 5
    assert "pins 0.75 GB of host memory and refuses more" in caplog.text
    assert "0.50 GB of streamed layers are copied through a buffer" in caplog.text
    assert "`memory=` below [wsl2] in .wslconfig" in caplog.text


def test_what_is_smaller_than_what_was_refused_is_tried() -> None:
    pins = Pins(limit=6000)
    memory = LayerMemory(pins.pinning)
    with pytest.raises(RuntimeError, match=r"^9000 bytes .* cannot be pinned \(cudaHostRegister returned 1\)$"):
        memory.allocate(9000, must_pin=True)
    flats = [memory.allocate(nbytes) for nbytes in (4000, 4000, 3000, 2000)]
    assert [flat.data_ptr() in pins.held for flat in flats] == [True, False, False, True]
    assert pins.asked == [9000, 4000, 4000, 3000, 2000]
    assert [memory.allocate(4000).data_ptr() in pins.held for _ in range(3)] == [False] * 3
    assert len(pins.asked) == 5  # each refusal takes time


def test_room_is_kept_for_the_buffers_of_copies() -> None:
    pins = Pins(limit=10000)
    memory = LayerMemory(pins.pinning, kept_bytes=3000)
    assert not pins.held  # as long as nothing is streamed
    flats = [memory.allocate(2000) for _ in range(5)]
    assert [flat.data_ptr() in pins.held for flat in flats] == [True, True, True, False, False]
    memory.close()
    assert sum(pins.held.values()) == 6000 == memory.pinned_bytes


def test_buffers_that_cannot_be_pinned_copy_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    empty, asked = torch.empty, []

    def refuse(*sizes: int, pin_memory: bool = False, **given: Any) -> torch.Tensor:
        asked.append(pin_memory)
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty(*sizes, **given)

    monkeypatch.setattr(torch, "empty", refuse)
    assert device_link.CudaLink().pinned(torch.Size([4096]), torch.uint8, warns=False).shape == (4096,)
    assert asked == [True, False]


def test_memory_that_is_not_to_be_pinned_is_not(caplog: pytest.LogCaptureFixture) -> None:
    memory = LayerMemory(None)
    assert HostSource(memory.allocate(4096)).nbytes == 4096
    assert memory.pinned_bytes == 0
    assert not caplog.records


def test_what_is_unpinned_waits_for_the_device_that_it_was_pinned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    current = 1
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: told.append("unregister"))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "synchronize", told.append)
    memory = LayerMemory(cuda_pinning(torch.device("cuda")))
    flat = memory.allocate(4096)
    current = 0
    del flat
    assert told == [torch.device("cuda", 1), "unregister"]


def test_memory_that_the_driver_refuses_to_pin_is_not_taken_for_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch.zeros

    def zeros(*size: int, **given: Any) -> torch.Tensor:
        if "device" in given and torch.device(given["device"]).type == "cuda":
            raise RuntimeError("the error of before")
        return made(*size, **given)

    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 2))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    pinning = cuda_pinning(torch.device("cuda", 0))
    with pytest.raises(RuntimeError, match="cudaHostRegister returned 2"):
        pinning.register(0, 4096)
    memory = LayerMemory(pinning)
    assert memory.allocate(4096).numel() == 4096
    assert memory.pinned_bytes == 0


@pytest.mark.parametrize("system", ["linux", "win32"])
def test_the_address_of_the_device_is_asked_for(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows and on WSL2 the address of the host is not valid there: to read it would end the process."""
    flat, opened, real = torch.zeros(4096, dtype=torch.uint8), [], ctypes.CDLL

    class Driver:
        """Maps one block of memory."""

        def __init__(self, name: str) -> None:
            opened.append(name)

        @staticmethod
        def cuMemHostGetDevicePointer_v2(found: Any, address: Any, flags: int) -> int:
            if address.value != flat.data_ptr():
                return 1
            ctypes.cast(found, ctypes.POINTER(ctypes.c_uint64))[0] = address.value + (1 << 40)
            return 0

    monkeypatch.setattr(ctypes, "CDLL", Driver)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(torch.version, "hip", None)
    assert mapped._device_address(flat) == flat.data_ptr() + (1 << 40)
    assert opened == ["nvcuda.dll" if system == "win32" else "libcuda.so.1"]
    with pytest.raises(RuntimeError, match="cuMemHostGetDevicePointer returned 1"):
        mapped._device_address(flat[1:])
    monkeypatch.setattr(ctypes, "CDLL", real)
    monkeypatch.setattr(sys, "platform", "win32")  # whose driver is not here
    with pytest.raises(RuntimeError, match="the CUDA driver cannot be asked"):
        mapped._device_address(flat)


@pytest.fixture
def origin(tmp_path: Path) -> Origin:
    """A checkpoint of one file, outside of the folder of layers."""
    path = tmp_path.with_name(f"{tmp_path.name}-checkpoint.safetensors")
    path.write_bytes(content(7, 300_000).numpy().tobytes())
    return Origin("m", (str(path),), "torch.float32")


def layer_file(folder: Path) -> Path:
    (path,) = folder.glob("layer-*.bin")
    return path


def test_a_layer_is_found_again_and_read_in_any_parts(tmp_path: Path, origin: Origin) -> None:
    folder = LayerFolder(tmp_path / "new", origin)
    folder.write(3, content(), LAYOUT)
    assert LayerFolder(tmp_path / "new", origin).find(3, LAYOUT) is None  # it may not have been loaded to the end
    folder.finish()
    source = LayerFolder(tmp_path / "new", origin).find(3, LAYOUT)
    assert source is not None
    assert source.host is None
    assert source.contents == dict(zip(["weight"], contents([content()]), strict=True))
    assert torch.equal(read(source), content())
    for start, end in ((0, 1), (4095, 4097), (300, NBYTES), (NBYTES, NBYTES)):
        target = torch.zeros(end - start, dtype=torch.uint8)
        source.read_into(target, start)
        assert torch.equal(target, content()[start:end])
    names = sorted(_names(tmp_path / "new") - LOCKS)
    assert [name.partition("-")[0] for name in names] == ["checkpoint", "layer"]
    assert all((tmp_path / "new" / name).stat().st_mode & 0o777 == 0o600 for name in names)


def test_a_layer_that_somebody_removes_at_once_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda source, target: (replace(source, target), os.unlink(target)))
    with pytest.raises(FileNotFoundError, match="A streamed layer is gone"):
        LayerFolder(tmp_path).write(0, content(), LAYOUT)


def test_a_layer_that_is_there_is_not_written_again(tmp_path: Path, origin: Origin) -> None:
    """Whoever has written it: a checkpoint, another one with the same layer, or a model that was in memory."""
    LayerFolder(tmp_path, origin).write(0, content(), LAYOUT)
    before = layer_file(tmp_path).stat()
    for other in (origin, None):
        assert torch.equal(read(LayerFolder(tmp_path, other).write(5, content(), LAYOUT)), content())
    after = layer_file(tmp_path).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def _open_as(kind: type[FileIO], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the files of layers opened as objects of this class."""

    def opened(path: str | Path, mode: str, buffering: int, opener: Any = None) -> FileIO:
        assert buffering == 0
        return kind(path, mode, opener=opener)

    monkeypatch.setattr(disk, "open", opened, raising=False)


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="it is what is made short here")
def test_short_reads_and_writes_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {"read": 0, "write": 0}

    class Short(FileIO):
        def write(self, data: Any, /) -> int:
            calls["write"] += 1
            return super().write(data[:1000]) or 0

    def short(file: int, buffers: list[memoryview], offset: int) -> int:
        calls["read"] += 1
        return preadv(file, [buffers[0][:1000]], offset)

    preadv = os.preadv
    _open_as(Short, monkeypatch)
    source = LayerFolder(tmp_path).write(0, content(), LAYOUT)
    monkeypatch.setattr(os, "preadv", short)
    assert torch.equal(read(source), content())
    assert calls == {"read": 6, "write": 6}


def test_layers_of_another_layout_or_index_are_not_found(tmp_path: Path, origin: Origin) -> None:
    folder = LayerFolder(tmp_path, origin)
    folder.write(0, content(), LAYOUT)
    assert folder.find(0, FlatLayout({"weight": torch.empty(NBYTES // 2, dtype=torch.float16)})) is None
    assert folder.find(0, FlatLayout({"other": torch.empty(NBYTES, dtype=torch.uint8)})) is None
    assert folder.find(1, LAYOUT) is None
    assert folder.find(0, LAYOUT) is not None


def test_layers_of_other_checkpoints_stay(tmp_path: Path, origin: Origin) -> None:
    (tmp_path / "layer-of-somebody.bin").touch()
    origins = [origin, replace(origin, settings="torch.bfloat16"), replace(origin, paths=(__file__,))]
    for number, each in enumerate(origins):
        folder = LayerFolder(tmp_path, each)
        assert folder.find(0, LAYOUT) is None
        folder.write(0, content(number), LAYOUT)
        folder.finish()
    for number, each in enumerate(origins):
        found = LayerFolder(tmp_path, each).find(0, LAYOUT)
        assert found is not None
        assert torch.equal(read(found), content(number))


RECORDS = (
    *("", "{", "[]", '{"version": 1, "identity": "a", "layers": {}}', '{"version": 2}'),
    *(
        f'{{"version": 2, "model": "m", "files": {{}}, "layers": {{"0": {entry}}}}}'
        for entry in ("1", '["../x", [], {}]')
    ),
)


@pytest.mark.parametrize("record", [*RECORDS, None])
def test_a_record_that_cannot_be_read_is_written_anew(tmp_path: Path, origin: Origin, record: str | None) -> None:
    for _ in range(2):
        folder = LayerFolder(tmp_path, origin)
        assert folder.find(0, LAYOUT) is None
        assert torch.equal(read(folder.write(0, content(), LAYOUT)), content())
        folder.finish()
        assert LayerFolder(tmp_path, origin).find(0, LAYOUT) is not None
        (path,) = tmp_path.glob("checkpoint-*.json")
        if record is None:
            path.unlink()
            path.symlink_to(tmp_path / "nothing")
        else:
            path.write_text(record)


@pytest.mark.parametrize("same_file", [False, True])
def test_a_checkpoint_of_other_content_is_noticed_whatever_its_times(
    tmp_path: Path, origin: Origin, same_file: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that was only copied has its layers read, not written: their content is what they are named by."""
    folder = LayerFolder(tmp_path, origin)
    folder.write(0, content(), LAYOUT)
    folder.finish()
    path = Path(origin.paths[0])
    before = path.stat()
    other = path.with_suffix(".new")
    other.write_bytes(content(8, 300_000).numpy().tobytes())
    if same_file:  # nor is there another inode, or a time that users cannot set
        path.write_bytes(other.read_bytes())
        real = os.fstat

        def without_ctime(file: int) -> Any:
            found = real(file)
            names = ("st_size", "st_mtime_ns", "st_ino", "st_mode")
            return SimpleNamespace(st_ctime_ns=0, **{name: getattr(found, name) for name in names})

        monkeypatch.setattr(os, "fstat", without_ctime)
    else:
        os.replace(other, path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert LayerFolder(tmp_path, origin).find(0, LAYOUT) is None


def test_a_checkpoint_that_changes_while_it_is_loaded_is_refused(tmp_path: Path, origin: Origin) -> None:
    """It may be half of each; one that is only given other rights is not."""
    folder = LayerFolder(tmp_path, origin)
    folder.write(0, content(), LAYOUT)
    Path(origin.paths[0]).chmod(0o640)
    folder.finish()
    assert LayerFolder(tmp_path, origin).find(0, LAYOUT) is None
    Path(origin.paths[0]).write_bytes(b"another")
    with pytest.raises(
        ValueError, match=r"were changed while it was loaded, and may be of two models\. Load it again"
    ):
        folder.finish()
    assert LayerFolder(tmp_path, origin).find(0, LAYOUT) is None


def test_a_copied_folder_is_read_once_and_used(tmp_path: Path, origin: Origin) -> None:
    folder = LayerFolder(tmp_path / "a", origin)
    folder.write(0, content(), LAYOUT)
    folder.finish()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    copied = LayerFolder(tmp_path / "b", origin)
    assert copied.find(0, LAYOUT) is not None
    before = [path.read_text() for path in (tmp_path / "b").glob("*.json")]
    copied.finish()
    assert [path.read_text() for path in (tmp_path / "b").glob("*.json")] != before  # with the marks of the copies


def test_what_happens_to_a_file(tmp_path: Path, origin: Origin) -> None:
    """It lasts as long as somebody streams it; damage is told, and mended by whoever loads the model next."""
    folder = LayerFolder(tmp_path, origin)

    source = folder.write(0, content(), LAYOUT)
    path = layer_file(tmp_path)
    os.truncate(path, 3000)
    with pytest.raises(OSError, match=rf"{path} must have {NBYTES} bytes, has 3000\. Load the model again"):
        read(source)
    assert folder.find(0, LAYOUT) is None

    source = folder.write(0, content(), LAYOUT)
    path.write_bytes(bytes(NBYTES))
    os.utime(path, ns=(0, 0))
    with pytest.raises(OSError, match="was changed after it was written"):
        read(source)
    assert folder.find(0, LAYOUT) is None

    source = folder.write(0, content(), LAYOUT)
    shutil.rmtree(tmp_path)
    assert torch.equal(read(source), content())
    source.close()
    with pytest.raises(ValueError, match="closed"):
        read(source)


@pytest.mark.skipif(sys.platform == "win32", reason="others may not open it there")
def test_a_layer_with_the_times_of_another_is_not_taken_for_it(tmp_path: Path, origin: Origin) -> None:
    folder = LayerFolder(tmp_path, origin)
    folder.write(0, content(), LAYOUT)
    folder.finish()
    path = layer_file(tmp_path)
    before = path.stat()
    path.write_bytes(content(1).numpy().tobytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    again = LayerFolder(tmp_path, origin)
    assert again.find(0, LAYOUT) is None
    assert torch.equal(read(again.write(0, content(), LAYOUT)), content())


def test_a_forked_child_reads_beside_its_parent(tmp_path: Path) -> None:
    """They share the position in the file, which is not used."""
    if not hasattr(os, "fork"):
        pytest.skip("there are no forks")
    source = LayerFolder(tmp_path).write(0, content(), LAYOUT)
    told, tell = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(tell, bytes([all(bool(torch.equal(read(source), content())) for _ in range(300))]))
        finally:
            os._exit(0)
    assert all(torch.equal(read(source), content()) for _ in range(300))
    os.waitpid(child, 0)
    assert os.read(told, 1) == b"\1"


@pytest.mark.parametrize("place", ["a file", "below a file"])
def test_what_is_no_folder_is_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "a file").touch()
    with pytest.raises(OSError, match="`disk_folder` must be a folder"):
        LayerFolder(tmp_path / "a file" / ("" if place == "a file" else "x"))


def test_a_folder_stays_itself_when_the_process_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    folder = LayerFolder("layers")
    sources = [folder.write(0, content(), LAYOUT)]
    monkeypatch.chdir(tmp_path / "elsewhere")
    sources.append(folder.write(1, content(1), LAYOUT))
    assert [torch.equal(read(source), content(n)) for n, source in enumerate(sources)] == [True, True]
    assert len(list((tmp_path / "layers").iterdir())) == 2 + len(LOCKS)


@pytest.mark.skipif(sys.platform == "win32", reason="there an open file is what cannot be removed, not a lock")
def test_prune_removes_what_nobody_uses(tmp_path: Path, origin: Origin) -> None:
    folder = LayerFolder(tmp_path, origin)
    used, unused = folder.write(0, content(), LAYOUT), folder.write(1, content(1), LAYOUT)
    folder.finish()
    in_memory = LayerFolder(tmp_path).write(0, content(2), LAYOUT)
    (tmp_path / f"layer-{'0' * 32}.tmp").touch()  # of a process that was killed
    (tmp_path / "layer-00000.bin").touch()  # of a release without locks
    for source in (unused, in_memory):
        source.close()
    for dry_run in (True, False):
        found = prune_layers(tmp_path, dry_run=dry_run)
        assert {(each.models, each.in_use): each.nbytes for each in found} == {
            (("m",), True): NBYTES,
            (("m",), False): NBYTES,
            ((), False): NBYTES,
        }
        assert len(list(tmp_path.glob("layer-*"))) == (5 if dry_run else 2)
    assert [path.name for path in former_files(tmp_path)] == ["layer-00000.bin"]
    again = LayerFolder(tmp_path, origin)
    assert again.find(1, LAYOUT) is None
    assert again.find(0, LAYOUT) is not None
    used.close()
    del again
    gc.collect()
    assert [each.in_use for each in prune_layers(tmp_path)] == [False]
    assert _names(tmp_path) == {"layer-00000.bin"}


@pytest.mark.skipif(sys.platform == "win32", reason="there an open file is what cannot be removed, not a lock")
def test_prune_says_what_it_may_not_remove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only Windows refuses to remove a file because it is open: there it is one in use."""
    LayerFolder(tmp_path).write(0, content(), LAYOUT).close()
    (path,) = tmp_path.glob("layer-*.bin")

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(PermissionError, match=path.name):
        prune_layers(tmp_path)
    monkeypatch.setattr("kvboost_hf.offload.prune.sys", SimpleNamespace(platform="win32"))
    assert [each.in_use for each in prune_layers(tmp_path)] == [True]
    monkeypatch.undo()
    assert [each.in_use for each in prune_layers(tmp_path)] == [False]
    assert not path.exists()


def test_prune_refuses_other_folders(tmp_path: Path) -> None:
    assert prune_layers(tmp_path) == []
    (tmp_path / "layer-of-somebody.bin").touch()
    with pytest.raises(ValueError, match="holds no streamed layers"):
        prune_layers(tmp_path)
    with pytest.raises(ValueError, match="There is no folder"):
        prune_layers(tmp_path / "missing")
    with pytest.raises(ValueError, match="must name a folder, got ''"):
        prune_layers("")
    assert _names(tmp_path) == {"layer-of-somebody.bin"}


def test_a_full_disk_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = LayerFolder(tmp_path)
    folder.write(0, content(), LAYOUT)
    before = _names(tmp_path)
    room = 3000

    class UntilFull(FileIO):
        def write(self, data: Any, /) -> int:
            nonlocal room
            if not room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done = super().write(data[:room]) or 0
            room -= done
            return done

    _open_as(UntilFull, monkeypatch)
    with pytest.raises(
        OSError, match=rf"No space left on device\): it takes {NBYTES} bytes.*Make room there"
    ) as found:
        folder.write(1, content(1), LAYOUT)
    assert found.value.errno == errno.ENOSPC
    assert _names(tmp_path) == before
    monkeypatch.undo()
    assert torch.equal(read(folder.write(1, content(1), LAYOUT)), content(1))


@pytest.fixture(params=["cuda", "threaded", "poisoning"])
def backend(request: pytest.FixtureRequest) -> Iterator[LayerBackend]:
    """Each of them."""
    if request.param == "cuda":
        made: LayerBackend = CudaBackend(CPU, SimulatedGpu(0, pins=False), piece_bytes=2048)
    else:
        made = ThreadedBackend(CPU) if request.param == "threaded" else PoisoningBackend()
    yield made
    made.close()


def fetched(backend: LayerBackend, slot: torch.Tensor) -> torch.Tensor:
    """What computation sees that is submitted now."""
    if not isinstance(backend, CudaBackend):
        return slot
    gpu = backend._device_link
    assert isinstance(gpu, SimulatedGpu)
    seen: list[torch.Tensor] = []
    gpu.launch(lambda: seen.append(slot.clone()))
    gpu.run()
    return seen[0]


def test_an_error_of_the_reader_is_raised_by_wait_and_the_backend_goes_on(
    backend: LayerBackend, tmp_path: Path
) -> None:
    source = LayerFolder(tmp_path).write(0, content(), LAYOUT)
    slots = backend.allocate(NBYTES, 2)
    os.truncate(layer_file(tmp_path), 3000)
    backend.issue(0, source)
    backend.issue(1, HostSource(content(1)))
    for _ in range(2):
        with pytest.raises(OSError, match="has 3000"):
            backend.wait(0)
    backend.wait(1)
    assert torch.equal(fetched(backend, slots[1]), content(1))
    backend.release(1)
    backend.issue(0, LayerFolder(tmp_path).write(0, content(), LAYOUT))
    backend.wait(0)
    assert torch.equal(fetched(backend, slots[0]), content())
    backend.release(0)
    assert backend.bytes_copied == 3 * NBYTES


def test_slots_that_were_made_in_inference_mode_can_be_used_outside(backend: LayerBackend) -> None:
    with torch.inference_mode():
        (slot,) = backend.allocate(NBYTES, 1)
        host = LayerMemory(None).allocate(NBYTES)
        backend.issue(0, HostSource(host))
        backend.wait(0)
        backend.release(0)
    host.copy_(content(1))
    backend.issue(0, HostSource(host))
    backend.wait(0)
    assert torch.equal(fetched(backend, slot), content(1))


class Gate:
    """A layer that cannot be read until somebody says so."""

    host = path = None
    nbytes = NBYTES

    def __init__(self) -> None:
        self.begun, self.open = threading.Event(), threading.Event()
        self.reads = 0

    def read_into(self, target: torch.Tensor, start: int) -> None:
        self.reads += 1
        self.begun.set()
        self.open.wait(30)
        target.copy_(content()[start : start + target.numel()])


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("kvboost-layers")]


@pytest.fixture
def no_earlier_threads() -> None:
    """Those of models of other tests end when the collector of garbage comes by."""
    gc.collect()
    for thread in threads():
        thread.join(10)
    assert not threads(), "a test has left a model that streams"


@pytest.mark.usefixtures("no_earlier_threads")
@pytest.mark.parametrize("kind", ["cuda", "threaded"])
def test_later_bytes_win_while_earlier_ones_are_being_read(kind: str) -> None:
    gpu = SimulatedGpu(1)
    made: LayerBackend = CudaBackend(CPU, gpu, piece_bytes=2048) if kind == "cuda" else ThreadedBackend(CPU)
    slot, _ = made.allocate(NBYTES, 2)
    gate, never, behind = Gate(), Gate(), Gate()
    made.issue(0, gate)
    assert gate.begun.wait(30)
    made.issue(0, never)
    made.issue(0, HostSource(content(2)))
    made.issue(1, behind)
    behind.open.set()
    gate.open.set()
    made.wait(1)  # the thread is done with all of them
    made.wait(0)
    assert torch.equal(fetched(made, slot), content(2))
    made.close()
    assert not never.begun.is_set()
    assert not threads()


@pytest.mark.usefixtures("no_earlier_threads")
@pytest.mark.parametrize("kind", ["cuda", "threaded"])
def test_a_backend_that_was_forgotten_ends_its_thread(kind: str) -> None:
    made: LayerBackend = (
        CudaBackend(CPU, SimulatedGpu(1), piece_bytes=2048) if kind == "cuda" else ThreadedBackend(CPU)
    )
    made.allocate(NBYTES, 1)
    gate = Gate()
    made.issue(0, gate)
    assert gate.begun.wait(30)
    (thread,) = threads()
    del made
    gc.collect()
    gate.open.set()
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.slow
def test_at_exit_threads_end_and_memory_is_unpinned() -> None:
    program = """
import torch
from kvboost_hf.offload.backend import ThreadedBackend
from kvboost_hf.offload.host import LayerMemory, HostSource, Pinning

pinning = Pinning(lambda address, nbytes: print("register", nbytes), lambda address: print("unregister"))
kept = LayerMemory(pinning).allocate(4096)
backend = ThreadedBackend(torch.device("cpu"))
backend.allocate(4096, 1)
backend.issue(0, HostSource(kept))
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert told.stdout.split() == ["register", "4096", "unregister"]


def test_a_wait_that_finds_the_bytes_there_is_no_synchronous_load() -> None:
    backend = ThreadedBackend(CPU)
    backend.allocate(NBYTES, 1)
    gate = Gate()
    backend.issue(0, gate)
    threading.Timer(0.05, gate.open.set).start()
    backend.wait(0)
    assert backend.synchronous_loads == 1
    assert backend.stall_s > 0
    assert backend.copy_rate() > 0
    backend.wait(0)
    backend.release(0)
    backend.close()
    assert backend.synchronous_loads == 1


def test_closing_reads_no_further_and_keeps_no_memory() -> None:
    gpu = SimulatedGpu(0, pins=False)
    backend = CudaBackend(CPU, gpu, piece_bytes=2048)
    slots = [weakref.ref(slot) for slot in backend.allocate(NBYTES, 2)]
    gate = Gate()
    backend.issue(1, HostSource(content()))
    backend.wait(1)
    backend.issue(0, gate)
    assert gate.begun.wait(30)
    threading.Timer(0.05, gate.open.set).start()
    backend.close()
    assert gate.reads == 1
    buffers = [weakref.ref(buffer) for buffer in gpu._pinned]
    gpu._pinned.clear()
    assert buffers
    assert not any(found() is not None for found in (*slots, *buffers))


def test_on_a_device_the_host_stands_still_only_for_what_is_being_read() -> None:
    backend = CudaBackend(CPU, SimulatedGpu(0, pins=False), piece_bytes=2048)
    backend.allocate(NBYTES, 1)
    gate = Gate()
    backend.issue(0, gate)
    threading.Timer(0.05, gate.open.set).start()
    backend.wait(0)
    assert backend.synchronous_loads == 1
    backend.wait(0)
    backend.close()
    assert backend.synchronous_loads == 1


@pytest.mark.parametrize("seed", range(10))
def test_a_first_copy_waits_for_work_on_whatever_had_the_memory_before(seed: int) -> None:
    gpu = SimulatedGpu(seed)
    memory, before = content(), []
    gpu.allocate = lambda nbytes, device, stream: memory
    for _ in range(10):
        gpu.launch(lambda: before.append(memory.clone()))
    backend = CudaBackend(CPU, gpu, piece_bytes=2048)
    backend.allocate(NBYTES, 1)
    backend.issue(0, HostSource(content(1)))
    backend.close()
    gpu.run()
    assert all(torch.equal(found, content()) for found in before)


def test_a_copy_that_is_under_way_is_done_before_its_source_may_go() -> None:
    gpu = SimulatedGpu(0)
    backend = CudaBackend(CPU, gpu, piece_bytes=2048)
    (slot,) = backend.allocate(NBYTES, 1)
    backend.issue(0, HostSource(content()))
    assert not torch.equal(slot, content())
    backend.close()
    assert torch.equal(slot, content())


def test_times_come_from_the_device() -> None:
    gpu = SimulatedGpu(0)
    backend = CudaBackend(CPU, gpu, piece_bytes=2048)
    backend.allocate(NBYTES, 1)
    assert backend.copy_rate() == 0
    for _ in range(3):
        backend.issue(0, HostSource(content()))
        backend.wait(0)
        backend.release(0)
        gpu.run()  # so that nothing lies between a copy's beginning and end
    assert backend.copy_rate() == pytest.approx(1000 * BYTES_PER_MS)
    assert 0 < backend.stall_s < 3.001 * NBYTES / BYTES_PER_MS / 1000
    assert backend.synchronous_loads == 0
    assert gpu.copies == 9
    backend.close()


class Moment:
    """An event that has happened once it is `done`. Whoever asks meanwhile lets another thread go first."""

    def __init__(self, ask: Callable[[], object]) -> None:
        self.done, self.ask = False, ask

    def query(self) -> bool:
        done, ask, self.ask = self.done, self.ask, lambda: None
        other = threading.Thread(target=ask)
        other.start()
        other.join(0.1)
        return done

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Any) -> float:
        assert self.done
        assert end_event.done
        return 1000.0


def test_times_may_be_asked_for_by_another_thread() -> None:
    timings = Timings()
    first, second = Moment(timings.totals), Moment(timings.totals)
    timings.add(first, first, 1)
    timings.add(second, second, 2)
    first.done, first.ask = True, timings.totals
    assert timings.totals() == (1.0, 1)
    second.done = True
    assert timings.totals() == (2.0, 3)


def test_copies_share_a_link_of_the_double_while_it_computes() -> None:
    backend = PoisoningBackend(link_bytes_per_s=NBYTES, compute_s=0.25)  # a second for each
    slots = backend.allocate(NBYTES, 2)
    backend.issue(0, HostSource(content(0)))  # ends at 1
    backend.issue(1, HostSource(content(1)))  # ends at 2
    assert all(bool((slot == 0xFF).all()) for slot in slots)
    assert slots[0].view(torch.float16).isnan().all()
    backend.wait(0)
    assert (backend.clock, backend.stall_s) == (1.0, 1.0)
    assert torch.equal(slots[0], content(0))
    backend.release(0)
    assert backend.clock == 1.25
    backend.issue(0, HostSource(content(2)))  # ends at 3
    backend.advance(1.0)
    backend.wait(1)
    assert (backend.clock, backend.stall_s, backend.synchronous_loads) == (2.25, 1.0, 1)
    backend.wait(0)
    assert (backend.clock, backend.stall_s, backend.synchronous_loads) == (3.0, 1.75, 2)
    assert (backend.issues, backend.waits, backend.releases) == (3, 3, 1)
    assert backend.bytes_copied == 3 * NBYTES
    assert backend.copy_rate() == NBYTES


def test_the_double_refuses_calls_in_another_order() -> None:
    backend = PoisoningBackend()
    backend.allocate(NBYTES, 1)
    with pytest.raises(AssertionError, match="after issue"):
        backend.wait(0)
    backend.issue(0, HostSource(content()))
    with pytest.raises(AssertionError, match="after wait"):
        backend.release(0)
    backend.issue(0, HostSource(content()))
    backend.wait(0)
    backend.wait(0)
    backend.release(0)
    backend.wait(0)
    backend.close()
    with pytest.raises(AssertionError, match="after close"):
        backend.issue(0, HostSource(content()))
