"""Moves encoded planes between devices and pinned host memory, beside the forward that a caller waits for."""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache

import torch

from kvboost_hf import device_link, forks
from kvboost_hf.cache.codecs.base import Planes
from kvboost_hf.device_link import Event


def on_host(planes: Planes) -> tuple[Planes, Future[None] | None]:
    """Planes that nobody else writes to; of a device with memory of its own, there as soon as the future is done."""
    device = next(iter(planes.values())).device
    if not device_link.link.is_apart(device):
        return {name: plane.cpu() for name, plane in planes.items()}, None
    planes = dict(planes)
    return planes, staging_of(device).submit(planes)


class Staging:
    """Brings planes from a device to pinned host memory: in a thread, and by a stream, of its own.

    To pin memory takes longer than to copy into it (8 ms and 0.3 ms for 17 MB beside an H100), and whoever has asked
    for a token waits for neither. Until they have arrived, planes take memory of the device: no more than an eighth of
    what is free there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, device_link.link.stream("staging", device)
        self._thread = ThreadPoolExecutor(1, "kvboost-staging")
        self._lock = forks.lock()
        self._waiting = self._room = 0  # bytes

    def submit(self, planes: Planes) -> Future[None]:
        """Have planes moved, each in its place; they are computed by what was queued on the current stream so far."""
        made = device_link.link.record(device_link.link.current(self._device))
        nbytes = sum(plane.nbytes for plane in planes.values())
        with self._lock:
            if not self._waiting:
                self._room = device_link.link.free_bytes(self._device) // 8
            self._waiting += nbytes
            is_full = self._waiting > self._room
            moved = self._thread.submit(self._move, planes, made, nbytes)
        if is_full:
            wait([moved])
        return moved

    def _move(self, planes: Planes, made: Event, nbytes: int) -> None:
        try:
            hosts = {name: device_link.link.pinned(plane.shape, plane.dtype) for name, plane in planes.items()}
            self._stream.wait_event(made)
            with device_link.link.using(self._stream):
                for name, plane in planes.items():
                    hosts[name].copy_(plane, non_blocking=True)
            device_link.link.record(self._stream).synchronize()
            planes.update(hosts)
        finally:
            with self._lock:
                self._waiting -= nbytes


@cache
def staging_of(device: torch.device) -> Staging:
    return Staging(device)


def on_device(planes: Planes, device: torch.device) -> "tuple[Planes, OnDevice | None]":
    """Copies of planes on a device, and when they are there: behind what is queued there so far."""
    if not device_link.link.is_apart(device):
        return {name: plane.to(device, copy=True) for name, plane in planes.items()}, None
    copies = {name: torch.empty_like(plane, device=device) for name, plane in planes.items()}
    stream = device_link.link.stream("promotion", device)
    # Behind the forward that has asked for a token, which none of these copies holds up.
    stream.wait_event(device_link.link.record(device_link.link.current(device)))
    with device_link.link.using(stream):
        for name, plane in planes.items():
            copies[name].copy_(plane, non_blocking=True)
            device_link.link.hold(copies[name], stream)
    return copies, OnDevice(device, device_link.link.record(stream))


class OnDevice:
    """A copy to a device that is under way.

    Args:
        device: Where to.
        copied: Behind it.
    """

    def __init__(self, device: torch.device, copied: Event) -> None:
        self._device, self._copied = device, copied
        self._is_there = False

    def result(self) -> None:
        """Have work that is queued from now on wait for the copy."""
        if not self._is_there:
            device_link.link.current(self._device).wait_event(self._copied)
            self._is_there = self._copied.query()
