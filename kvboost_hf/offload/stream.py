"""`LayerStream` copies the weights of streamed layers into slots on the device as the layers run.

A `LayerStreamingHook` of accelerate on each layer calls it before and after the layer's forward.
"""

import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from accelerate.hooks import ModelHook
from torch import nn

from kvboost_hf import forks
from kvboost_hf.checksum import Content
from kvboost_hf.errors import StreamingError
from kvboost_hf.offload.backend import LayerBackend
from kvboost_hf.offload.plan import ResidencyPlan, Ring
from kvboost_hf.offload.sources import FlatLayout, LayerSource, in_memory
from kvboost_hf.offload.units import Holder, Unit, is_made

_UNUSED = 0x3F  # in each byte of a slot that nothing was copied to


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingStats:
    """Counts since the layers were first streamed.

    Args:
        layer_calls: Forwards of streamed layers.
        hits: Calls for which the copy of the weights had been issued before.
        misses: Calls that issued the copy themselves: the first of all, and those out of order.
        synchronous_loads: Calls in which the host waited for the copy.
        bytes_copied: Bytes copied to the device, or read from files.
        copy_rate: Bytes per second while copies ran; 0.0 if unknown.
        stall_s: Seconds that the computation waited for copies; 0.0 if unknown.
    """

    layer_calls: int
    hits: int
    misses: int
    synchronous_loads: int
    bytes_copied: int
    copy_rate: float
    stall_s: float

    @property
    def hit_rate(self) -> float:
        """Hits per call of a streamed layer; 1.0 if there was none."""
        return self.hits / self.layer_calls if self.layer_calls else 1.0

    def __str__(self) -> str:
        return (
            f"{self.layer_calls} calls of streamed layers, {self.hit_rate:.1%} of them sent for ahead "
            f"({self.misses} were not), {self.bytes_copied / 1e9:.2f} GB copied at {self.copy_rate / 1e9:.2f} GB/s, "
            f"{self.stall_s:.2f} s stood still"
        )


class LayerStream:
    """The streamed layers of one model.

    Args:
        plan: The plan that chose them.
        units: The streamed parts of the layers, in the order in which they run.
        layouts: The layout of the bytes of each unit.
        sources: The bytes of each unit.
        n_slots: Slots on the device.
        backend: Copies the bytes.
        owner: The module whose forward runs the layers; one thread at a time may run it.
    """

    def __init__(
        self,
        plan: ResidencyPlan,
        units: Sequence[Unit],
        layouts: Sequence[FlatLayout],
        sources: Sequence[LayerSource],
        n_slots: int,
        backend: LayerBackend,
        owner: nn.Module,
    ) -> None:
        self.plan, self.backend = plan, backend
        self._units, self._layouts, self._sources = list(units), list(layouts), list(sources)
        self._ring = Ring(len(units), n_slots)
        self._slots = backend.allocate(max(layout.nbytes for layout in layouts), n_slots)
        for slot in self._slots:
            slot.fill_(_UNUSED)  # most that is written changes it, unlike zeros
        self._unused = set(range(n_slots))  # slots that were never sent to
        self._places = [layout.sample() for layout in layouts]
        self._sent: set[int] = set()  # units whose bytes were sent for in the forward of the owner that runs
        self._known: dict[int, torch.Tensor] = {}  # a sample of the bytes of units, in host memory
        self._bound: dict[int, list[tuple[dict[str, Any], str, int]]] = {}  # of each unit: dict, name, address
        self._made: dict[int, list[tuple[Holder, Any]]] = {}  # of each unit: tensors that are made of others
        self._handles: dict[int, list[Any]] = {}
        self._resting: dict[int, dict[int, tuple[torch.Tensor, torch.Tensor | Content]]] = {}
        self._calls = self._hits = 0
        self._closed = False
        self._lock, self._pid = forks.rlock(), os.getpid()
        self._forwards = 0  # of the owner that are under way, each but the first within another one
        self._running: int | None = None  # the unit between enter() and leave(), in the innermost forward
        self._owner, self._replaced = owner, vars(owner).get("forward")
        owner.forward = self._forward = self._one_at_a_time(owner.forward)

    def bind(self, number: int) -> None:
        """Make the tensors of a unit views into its slot.

        Raises:
            StreamingError: all units were unbound before, which closes the stream.
        """
        if self._closed:
            raise StreamingError("These layers are not streamed any more. Call stream_layers(model) to begin anew.")
        self._ring.join(number)
        self._point_to_slot(number)
        layer = self._units[number].layer
        self._handles[number] = [
            layer.register_state_dict_post_hook(functools.partial(self._put_right, number)),  # type: ignore[no-untyped-call]
            layer.register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
                functools.partial(_refuse_loading, self._units[number])
            ),
        ]
        if self._computes_what_it_saves(number):
            hook = functools.partial(self._point_to_rest, number)
            self._handles[number].append(layer.register_state_dict_pre_hook(hook))  # type: ignore[no-untyped-call]

    def unbind(self, number: int) -> None:
        """Give a unit its tensors back, in host memory. The last one closes the backend.

        Raises:
            StreamingError: others have written into its slot.
            OSError: its file cannot be read.
        """
        if number not in self._bound:
            return
        self._start_over_after_fork()
        slot = self._ring.slot(number)
        with suppress(OSError):  # of another unit's file
            if self._ring.held[slot] is not None:
                self.backend.wait(slot)
            self._require_unwritten(slot)
        unit, at_rest = self._units[number], self._at_rest(number)  # if its file is gone, all stays as it is
        del self._bound[number], self._made[number]
        for handle in self._handles.pop(number):
            handle.remove()
        unit.put(at_rest)
        self._ring.leave(number)
        if not self._bound:
            self._closed = True
            if vars(self._owner).get("forward") is self._forward:  # else another has been put around it
                del self._owner.forward
                if self._replaced is not None:
                    self._owner.forward = self._replaced
            self.backend.close()
            for source in self._sources:
                source.close()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def enter(self, number: int) -> None:
        """Prepare a unit's forward: computation submitted from now on sees its weights.

        Raises:
            StreamingError: its tensors are no longer those in the slot, or others have written there.
            OSError: its file cannot be read.
        """
        for tensors, name, address in self._bound[number]:
            tensor = tensors.get(name)
            if tensor is None or tensor.data_ptr() != address:
                self._refuse(number, name)
        for holder, made in self._made[number]:
            if holder.get() is not made:
                self._refuse(number, holder.attribute)
        self._calls += 1
        self._hits += self._ring.holds(number)
        self._bring(number)
        if number not in self._sent:  # somebody may have written since
            self._require_unwritten(self._ring.slot(number))
        elif number not in self._known:
            self._known[number] = self._sample(self._ring.slot(number), number)
        self._running = number

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def leave(self, number: int) -> None:
        """End a unit's forward: its slot is free for the next unit."""
        self._running = None
        self.backend.release(self._ring.slot(number))
        self._send(self._ring.missing(number + 1))

    def stats(self) -> StreamingStats:
        """Counts so far."""
        return StreamingStats(
            layer_calls=self._calls,
            hits=self._hits,
            misses=self._calls - self._hits,
            synchronous_loads=self.backend.synchronous_loads,
            bytes_copied=self.backend.bytes_copied,
            copy_rate=self.backend.copy_rate(),
            stall_s=self.backend.stall_s,
        )

    def _refuse(self, number: int, name: str) -> NoReturn:
        raise StreamingError(
            f"{name} of a streamed {type(self._units[number].module).__name__} has been replaced, as to(), half() and "
            "quantizers do. Call stop_streaming(model) first."
        )

    def _require_unwritten(self, slot: int) -> None:
        """Refuse what others have written into a slot: it would be lost, or count for other layers.

        A sample is compared, for which the host waits. What is written while a copy to the slot is on its way is not
        noticed.
        """
        number = self._ring.held[slot]
        if number is None and slot not in self._unused:  # unknown, after an exception
            return
        found = self._sample(slot, slot if number is None else number)
        if number is None:
            known = torch.full_like(found, _UNUSED)
        elif number in self._known:
            known = self._known[number]
        else:
            known = self._known[number] = in_memory(self._sources[number])[self._places[number]]
        if not torch.equal(found, known):
            for each in range(len(self._units)):
                self._ring.forget(each)
            self._unused.clear()
            raise StreamingError(
                "Weights of streamed layers were written to in place, as an optimizer does, or the merge of an "
                "adapter: this is lost, for they are not in the model. Call stop_streaming(model) before such changes."
            )

    def _sample(self, slot: int, number: int) -> torch.Tensor:
        """Bytes of a slot at the places of a unit's sample, in host memory."""
        return self._slots[slot][self._places[number]].cpu()

    def __reduce__(self) -> NoReturn:
        raise StreamingError(
            "A model with streamed layers cannot be copied or pickled: its weights are not in it. Load it a second "
            "time, or call stop_streaming(model) first."
        )

    def _bring(self, number: int) -> None:
        self._send(self._ring.missing(number))
        try:
            self.backend.wait(self._ring.slot(number))
        except BaseException:
            self._ring.forget(number)
            raise

    def _send(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._ring.forget(number)
            if (slot := self._ring.slot(number)) in self._unused:
                self._require_unwritten(slot)
                self._unused.remove(slot)
            self.backend.issue(slot, self._sources[number])
            self._ring.sent(number)
            self._sent.add(number)

    def _one_at_a_time(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a forward such that one thread at a time runs it. Hooks are not enough: they do not run on interrupts.

        A cache may run the model inside a layer's forward; the layer's slot is restored before the layer continues.
        """

        @functools.wraps(forward)
        def locked(*args: Any, **kwargs: Any) -> Any:
            if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
                raise StreamingError(
                    "A CUDA graph cannot capture streamed layers: a replay would not send for their weights. Run the "
                    "model without a graph, or call stop_streaming(model) first."
                )
            with self._lock:
                self._start_over_after_fork()
                outer, self._running = (self._running if self._forwards else None), None
                if not self._forwards:
                    self._sent.clear()
                self._forwards += 1
                try:
                    return forward(*args, **kwargs)
                finally:
                    self._forwards -= 1
                    self._running = outer
                    if outer is not None:
                        self._bring(outer)

        locked.leaves_kv_alone = self._replaced is None  # type: ignore[attr-defined]  # read by the fingerprint
        found: Callable[..., Any] = torch.compiler.disable(locked, recursive=False)  # type: ignore[no-untyped-call]
        return found

    def _start_over_after_fork(self) -> None:
        """What was on its way into the slots does not arrive in a forked process, nor do forwards end there."""
        if self._pid != os.getpid():
            self._pid, self._forwards, self._running = os.getpid(), 0, None
            for number in range(len(self._units)):
                self._ring.forget(number)

    def _at_rest(self, number: int) -> dict[str, torch.Tensor]:
        """The tensors of a unit in host memory, or read from its file."""
        return self._layouts[number].views(in_memory(self._sources[number]))

    def _point_to_slot(self, number: int) -> None:
        """Make the tensors of a unit views into its slot."""
        unit, views = self._units[number], self._layouts[number].views(self._slots[self._ring.slot(number)])
        unit.put(views)
        holders = unit.holders.values()
        self._bound[number] = [_address(holder) for holder in holders if not is_made(holder.get())]
        self._made[number] = [(holder, made) for holder in holders if is_made(made := holder.get())]
        in_slot = unit.tensors().values()
        kept: Mapping[str, torch.Tensor | Content] = self._sources[number].contents or self._at_rest(number)
        pairs = zip(in_slot, kept.values(), strict=True)
        self._resting[number] = {id(tensor): (tensor, rest) for tensor, rest in pairs}

    def _point_to_rest(self, number: int, *_: Any) -> None:
        """Give a unit its tensors in host memory until `_put_right`."""
        self._units[number].put(self._at_rest(number))

    def _computes_what_it_saves(self, number: int) -> bool:
        """Whether a state_dict() has other tensors than those of the unit: of a library's, or of a CPU's layout."""
        modules = (holder.module for holder in self._units[number].holders.values())
        return bool(self._made[number]) or any(getattr(each, "code_order", None) is not None for each in modules)

    def _put_right(self, number: int, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """Replace the content of the slot in a state_dict() with the unit's weights."""
        if self._computes_what_it_saves(number):
            self._point_to_slot(number)
            return
        at_rest, slot = in_memory(self._sources[number]), self._slots[self._ring.slot(number)]
        for key, value in state.items():  # names may be others than here, and tensors parts of those here
            offset = value.data_ptr() - slot.data_ptr() if isinstance(value, torch.Tensor) else -1
            if key.startswith(prefix) and 0 <= offset < at_rest.numel():
                state[key] = at_rest[offset : offset + value.nbytes].view(value.dtype).view(value.shape)

    def weights_at_rest(self, number: int) -> dict[int, tuple[torch.Tensor, torch.Tensor | Content]]:
        """By the id of each tensor of a unit: the tensor, and its values in host memory or content in a file."""
        return self._resting[number]


def _address(holder: Holder) -> tuple[dict[str, Any], str, int]:
    module, name = holder.module, holder.attribute
    tensors: dict[str, Any] = module._parameters if name in module._parameters else module._buffers
    return tensors, name, tensors[name].data_ptr()


def _refuse_loading(unit: Unit, layer: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Refuse a state_dict with weights of a unit; it may have others of its layer, such as those of an adapter."""
    streamed = {id(holder.module) for holder in unit.holders.values()}
    owners, tensors = set(), set()
    for name, module in layer.named_modules():
        if id(module) in streamed:
            owner = f"{prefix}{name}".removesuffix(".")
            owners.add(owner)
            tensors |= {f"{owner}.{each}" for each in (*module._parameters, *module._buffers)}
    for key in state:
        cuts = [match.start() for match in re.finditer(r"\.", key)]
        if cuts and (key[: cuts[-1]] in owners or any(key[:cut] in tensors for cut in cuts)):
            raise StreamingError(
                f"load_state_dict() cannot change streamed layers, whose weights are not in the model, got {key}. "
                "Call stop_streaming(model) first."
            )


class LayerStreamingHook(ModelHook):  # type: ignore[misc]
    """Waits for the weights of one layer before its forward, and starts copies of later layers after it.

    `load_streamed()` and `stream_layers()` add one to each streamed layer. accelerate's
    `remove_hook_from_submodules(model)` removes them and gives the layers their weights back, in host memory.

    Args:
        stream: The streamed layers of the model.
        number: Which of them the hook is for.
    """

    leaves_kv_alone = True  # read by the fingerprint of models

    def __init__(self, stream: LayerStream, number: int) -> None:
        self.stream, self.number = stream, number

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Make the weights of the module views into the slot."""
        self.stream.bind(self.number)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Wait until the weights are in the slot."""
        self.stream.enter(self.number)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Release the slot. A gradient through the output is refused later, since the weights are gone by then."""
        self.stream.leave(self.number)
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(_refuse_gradient)  # type: ignore[no-untyped-call]
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Give the module its weights back, in host memory."""
        self.stream.unbind(self.number)
        return module

    @property
    def weights_at_rest(self) -> dict[int, tuple[torch.Tensor, torch.Tensor | Content]]:
        return self.stream.weights_at_rest(self.number)


def _refuse_gradient(_: torch.Tensor) -> NoReturn:
    raise StreamingError(
        "Gradients cannot pass through streamed layers, whose weights are gone by then. Call stop_streaming(model) to "
        "train."
    )
