"""K/V on its way from a GPU to host memory, without a GPU: streams and events that do as they are told."""

import threading
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kvboost_hf.cache.kv import Block, _Staging


class FakeEvent:
    def __init__(self, **given: Any) -> None:
        self.done = threading.Event()

    def record(self, stream: Any) -> None:
        self.done.set()

    def synchronize(self) -> None:
        assert self.done.wait(10)


class FakeStream:
    def __init__(self, device: Any = None) -> None:
        self.made = FakeEvent()  # of what is computed: set once it is

    def record_event(self) -> FakeEvent:
        return self.made

    def wait_event(self, event: FakeEvent) -> None:
        event.synchronize()


@pytest.fixture
def computing(monkeypatch: pytest.MonkeyPatch) -> FakeStream:
    """The stream that the model computes by."""
    stream = FakeStream()

    @contextmanager
    def using(given: Any) -> Any:
        yield

    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", using)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 * 4096, 1 << 30))
    return stream


def block_of(staging: _Staging, x: torch.Tensor) -> Block:
    planes = {"exact": x}
    block = Block.raw(x[None])
    return Block(planes, block.shape, x.dtype, "keys", block.codec, (None,), x.device, ready=staging.submit(planes))


def test_nobody_waits_until_it_is_read(computing: FakeStream) -> None:
    staging, x = _Staging(torch.device("cpu")), torch.randn(2, 4, 8)
    block = block_of(staging, x)  # the model still computes
    assert block.planes["exact"] is x
    assert block.nbytes == x.nbytes
    assert block.ready is not None
    assert not block.ready.done()
    x += 1  # by what was queued before
    computing.made.done.set()
    block.wait()
    assert block.planes["exact"] is not x
    assert torch.equal(block.planes["exact"], x)


def test_no_more_than_an_eighth_of_the_memory_waits(computing: FakeStream) -> None:
    staging = _Staging(torch.device("cpu"))
    blocks = [block_of(staging, torch.randn(2, 16, 32))]  # 4 KiB: all that may wait
    full = threading.Thread(target=lambda: blocks.append(block_of(staging, torch.randn(2, 16, 32))))
    full.start()
    full.join(0.2)
    assert full.is_alive()
    computing.made.done.set()
    full.join(10)
    assert not full.is_alive()
    assert all(block.ready is not None and block.ready.done() for block in blocks)
    assert staging._waiting == 0


def test_what_fails_is_told_to_whoever_reads(computing: FakeStream, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: Any, event: Any) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(FakeStream, "wait_event", failing)
    staging = _Staging(torch.device("cpu"))
    block = block_of(staging, torch.randn(2, 4, 8))
    with pytest.raises(RuntimeError, match="the device is gone"):
        block.wait()
    assert staging._waiting == 0
