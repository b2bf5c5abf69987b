"""K/V on its way from a GPU to host memory, without a GPU: streams and events that do as they are told."""

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.internals.cache import Block, Staging
from tests.internals.top import device_link


class FakeEvent:
    def __init__(self) -> None:
        self.done = threading.Event()

    def synchronize(self) -> None:
        assert self.done.wait(10)


class FakeStream:
    def wait_event(self, event: FakeEvent) -> None:
        event.synchronize()


class FakeLink:
    """Everything but what is computed is done at once."""

    def __init__(self) -> None:
        self.computing = FakeStream()  # what the model computes by
        self.made = FakeEvent()  # set once that is done

    def stream(self, name: str, device: torch.device) -> Any:
        return FakeStream()

    def current(self, device: torch.device) -> Any:
        return self.computing

    def using(self, stream: Any) -> Any:
        return nullcontext()

    def record(self, stream: Any) -> Any:
        if stream is self.computing:
            return self.made
        copied = FakeEvent()
        copied.done.set()
        return copied

    def pinned(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def free_bytes(self, device: torch.device) -> int:
        return 8 * 4096


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> FakeLink:
    found = FakeLink()
    monkeypatch.setattr(device_link, "link", found)
    return found


def block_of(staging: Staging, x: torch.Tensor) -> Block:
    planes = {"exact": x}
    block = Block.raw(x[None])
    return Block(planes, block.shape, x.dtype, "keys", block.codec, (None,), x.device, ready=staging.submit(planes))


def test_nobody_waits_until_it_is_read(link: FakeLink) -> None:
    staging, x = Staging(torch.device("cpu")), torch.randn(2, 4, 8)
    block = block_of(staging, x)  # the model still computes
    assert block.planes["exact"] is x
    assert block.nbytes == x.nbytes
    assert block.ready is not None
    assert not block.ready.done()  # type: ignore[attr-defined]
    x += 1  # by what was queued before
    link.made.done.set()
    block.wait()
    assert block.planes["exact"] is not x
    assert torch.equal(block.planes["exact"], x)


def test_no_more_than_an_eighth_of_the_memory_waits(link: FakeLink) -> None:
    staging = Staging(torch.device("cpu"))
    blocks = [block_of(staging, torch.randn(2, 16, 32))]  # 4 KiB: all that may wait
    full = threading.Thread(target=lambda: blocks.append(block_of(staging, torch.randn(2, 16, 32))))
    full.start()
    full.join(0.2)
    assert full.is_alive()
    link.made.done.set()
    full.join(10)
    assert not full.is_alive()
    assert all(block.ready is not None and block.ready.done() for block in blocks)  # type: ignore[attr-defined]
    assert staging._waiting == 0


def test_what_fails_is_told_to_whoever_reads(link: FakeLink, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: Any, event: Any) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(FakeStream, "wait_event", failing)
    staging = Staging(torch.device("cpu"))
    block = block_of(staging, torch.randn(2, 4, 8))
    with pytest.raises(RuntimeError, match="the device is gone"):
        block.wait()
    assert staging._waiting == 0
