"""Saves states at columns in the middle of a forward.

A token mixer (linear attention, Mamba-2, a short convolution) is given its columns in segments, and the state of its
layer is copied between them. Everything else of the model sees one forward over all columns; so do the projections
at both ends of a mixer, which in pieces would take longer.
"""

import contextlib
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvboost_hf.cache.kv.layer_states import LayerStates
from kvboost_hf.cache.layers.base import LayerState, ReuseLayer
from kvboost_hf.compat import own_hook, weights_come_and_go

_CPU_SPACING = 64  # tokens: the kernels of transformers go through a prompt in chunks of 64
_DEVICE_SPACING = 512  # each segment launches all kernels of a mixer anew
_DURABLE_SPACING = 512  # tokens between two that are written to lower tiers, too


def spacing_of(device: torch.device) -> int:
    """Tokens between two states that are saved within a forward."""
    return _CPU_SPACING if device.type == "cpu" else _DEVICE_SPACING


def mixers_of(model: PreTrainedModel) -> Mapping[int, nn.Module]:
    """The token mixers of a model that can be run in segments, by layer; none where one may be seen or compiled."""
    found: dict[int, nn.Module] = {}
    if weights_come_and_go(model):
        return {}
    for module in model.modules():
        if getattr(module, "_compiled_call_impl", None) is not None:
            return {}
        idx = module.__dict__.get("layer_idx")
        if isinstance(idx, int) and any(isinstance(child, nn.Conv1d) for child in module.children()):
            if idx in found or "forward" in module.__dict__:
                return {}
            found[idx] = module
    return found


def can_segment(mixers: Mapping[int, nn.Module], layers: Sequence[ReuseLayer]) -> bool:
    """Whether each layer with a state has a mixer that nobody else watches."""
    stateful = {idx for idx, layer in enumerate(layers) if layer.is_stateful}
    watched = any(_is_watched(part) for mixer in mixers.values() for part in mixer.modules())
    return stateful == set(mixers) and not watched


def _is_watched(module: nn.Module) -> bool:
    """Whether a hook that is not of this file would see segments in place of all columns."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return any(not isinstance(hook, _Hook) for hook in hooks)


class _Hook:
    """A hook that ends with the object that it calls: a forward that raises an error does not end it."""

    leaves_kv_alone = True  # read by the fingerprint: other hooks may change what a model computes

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, *args: Any) -> Any:
        method = self._method()
        return method(*args) if method is not None else None

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Hook":
        return self


class Checkpoints:
    """The states of all layers at some columns of one forward, before which they hold `start`.

    States are wanted at `stops` in any case, and at `spaced` columns if they fit into `room` bytes with these.
    """

    def __init__(
        self,
        mixers: Mapping[int, nn.Module],
        layers: Sequence[ReuseLayer],
        start: int,
        columns: int,
        stops: Sequence[int],
        spaced: Sequence[int],
        room: int,
    ) -> None:
        self._mixers, self._layers = mixers, layers
        self._start, self._columns = start, columns
        self._stops, self._spaced, self._room = tuple(stops), tuple(spaced), room
        self._cuts = sorted({*stops, *spaced})
        self._fits: bool | None = None  # None until the size of a state is known
        self._saved: dict[int, dict[int, list[LayerState | None]]] = {}  # by column and layer: of each row
        self._outputs: dict[int, list[Any]] = {}  # of the segments so far, by layer
        self._segment: _Segment | None = None  # that which a mixer is computing
        self._handles: list[RemovableHandle] = []
        self._entered: list[RemovableHandle] = []

    def start(self) -> None:
        """Begin: the next forward over these layers is the one."""
        for module in self._mixers.values():
            before, after = _Hook(self.before), _Hook(self.after)
            self._handles.append(own_hook(module.register_forward_pre_hook, before, with_kwargs=True))
            self._handles.append(own_hook(module.register_forward_hook, after, prepend=True, with_kwargs=True))

    def stop(self) -> None:
        """End, with whatever was saved."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._outputs.clear()
        self._leave()

    def __del__(self) -> None:
        self.stop()

    def states(self) -> Iterator[tuple[int, bool, list[LayerStates]]]:
        """Columns, in order, whether host memory alone is to keep what is there, and the states of each row."""
        durable = self._start
        for column, by_layer in sorted(self._saved.items()):
            if by_layer.keys() != self._mixers.keys():  # some mixer was not called as expected
                continue
            spare = column not in self._stops and column - durable < _DURABLE_SPACING
            durable = durable if spare else column
            every = [by_layer.get(idx) for idx in range(len(self._layers))]
            rows = range(len(next(iter(by_layer.values()))))
            yield column, spare, [LayerStates(tuple(each[row] if each else None for each in every)) for row in rows]

    # Hooks of each token mixer

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        """torch forward pre-hook: run all segments but the last."""
        if self._segment is not None and self._segment.thread == threading.get_ident():
            self._leave()  # an error has ended the call that it was for
        hidden = self._hidden(module, args, kwargs)
        if hidden is None or kwargs is None:
            return None
        idx, start = int(module.layer_idx), self._start  # type: ignore[arg-type]
        layer, outputs = self._layers[idx], list[Any]()
        segment = self._enter(module, hidden)
        while (stop := self._next(start)) is not None:
            part = slice(start - self._start, stop - self._start)
            with _short_chunks(module, hidden.device):
                cut, named = segment.narrow(args, kwargs, part)
                outputs.append(segment.output(module.forward(*cut, **named)))
            if self._fits is None:
                self._choose(layer.state_bytes() * len(hidden) * len(self._mixers))
            if stop == self._next(start):  # it was not left out just now
                rows = [layer.save_state(row) for row in range(len(hidden))]
                self._saved.setdefault(stop, {})[idx] = rows
            start = stop
        self._outputs[idx] = outputs
        segment.is_last = True
        return segment.narrow(args, kwargs, slice(start - self._start, None))

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any = None) -> Any:
        """torch forward hook: join what all segments have returned."""
        cache = _cache_in(args, kwargs) if isinstance(kwargs, dict) else None
        idx = int(module.layer_idx)  # type: ignore[arg-type]
        if cache is None or not self._is_ours(cache, idx):
            return None
        outputs = self._outputs.pop(idx, [])
        self._leave()
        if not outputs:
            return None
        if isinstance(output, torch.Tensor):
            return torch.cat([*outputs, output], dim=1)
        parts = list(zip(*outputs, output, strict=True))
        # All that have a column for each token, such as ZAYA's queries, keys and values. Attention weights are None.
        return tuple(torch.cat(each, dim=1) if isinstance(each[-1], torch.Tensor) else each[-1] for each in parts)

    # Hooks of the projections of a mixer, while it runs

    def _enter(self, mixer: nn.Module, hidden: torch.Tensor) -> "_Segment":
        self._segment = _Segment(hidden)
        for module in mixer.modules():
            if type(module) is nn.Linear and "forward" not in module.__dict__:
                self._entered.append(own_hook(module.register_forward_pre_hook, _Hook(self.before_projection)))
                self._entered.append(own_hook(module.register_forward_hook, _Hook(self.after_projection)))
        return self._segment

    def _leave(self) -> None:
        self._segment = None
        for handle in self._entered:
            handle.remove()
        self._entered.clear()

    def before_projection(self, module: nn.Linear, args: tuple[Any, ...]) -> Any:
        """torch forward pre-hook: project no column where that is done for all columns at once."""
        segment = self._segment
        if segment is None or segment.thread != threading.get_ident() or len(args) != 1:
            return None
        return segment.before(module, args[0])

    def after_projection(self, module: nn.Linear, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor | None:
        """torch forward hook: return the columns of the segment."""
        segment = self._segment
        if segment is None or segment.thread != threading.get_ident():
            return None
        return segment.after(module, output)

    def _hidden(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> torch.Tensor | None:
        """The hidden states [batch, columns, width] that a mixer is given, if they are those of the forward."""
        if kwargs is None or torch.compiler.is_compiling():  # torch leaves them out when the hook was just removed
            return None
        hidden, cache = args[0] if args else kwargs.get("hidden_states"), _cache_in(args, kwargs)
        idx = int(module.layer_idx)  # type: ignore[arg-type]
        if not isinstance(hidden, torch.Tensor) or cache is None or not self._is_ours(cache, idx):
            return None
        return hidden if hidden.ndim == 3 and hidden.shape[1] == self._columns - self._start else None

    def _is_ours(self, cache: Cache, idx: int) -> bool:
        """Whether a forward extends the layers: other threads may run the same model."""
        return idx < len(cache.layers) and cache.layers[idx] is self._layers[idx].native

    def _next(self, start: int) -> int | None:
        at = bisect_right(self._cuts, start)
        return self._cuts[at] if at < len(self._cuts) else None

    def _choose(self, nbytes: int) -> None:
        """Leave out so many of the others, evenly, that the states, of `nbytes` each, fit."""
        self._fits = True
        most = max(self._room // max(nbytes, 1) - len(self._stops), 0)
        if len(self._spaced) > most:
            count = len(self._spaced)
            self._spaced = tuple(self._spaced[(number * count + count // 2) // most] for number in range(most))
            self._cuts = sorted({*self._stops, *self._spaced})


@dataclass(eq=False)
class _Segment:
    """The columns that a mixer is computing, and its projections of all columns.

    A projection of the hidden states themselves is computed when the first segment asks for it. The projection whose
    output the mixer returns waits for the last segment; the first segment shows which one that is.
    """

    hidden: torch.Tensor  # what the mixer was given, [batch, columns, width]
    thread: int = field(default_factory=threading.get_ident)  # other threads may run the same modules
    columns: slice = field(default_factory=lambda: slice(0))
    # Refers to their hidden states, which live as long as the call of the mixer with them.
    part: Callable[[], torch.Tensor | None] = lambda: None
    projected: dict[nn.Linear, torch.Tensor] = field(default_factory=dict)
    sliced: bool = False  # whether the projection that is being computed is one of the hidden states
    returned: tuple[nn.Linear, torch.Tensor] | None = None  # the output of the last projection, and its module
    # The projection whose output the mixer returns; None if not known, or if that is something else.
    final: nn.Linear | None = None
    # The inputs of the final projection from all segments but the first.
    waiting: list[torch.Tensor] = field(default_factory=list)
    is_last: bool = False  # whether no segment follows

    def narrow(self, args: tuple[Any, ...], kwargs: dict[str, Any], columns: slice) -> tuple[Any, dict[str, Any]]:
        """Begin with some columns: the arguments of the mixer for them."""
        cut, named = _cut(args, self.hidden, columns), _cut(kwargs, self.hidden, columns)
        self.columns, self.part = columns, weakref.ref(cut[0] if cut else named["hidden_states"])
        return cut, named

    def before(self, module: nn.Linear, given: torch.Tensor) -> Any:
        """The input [batch, columns, width] that a projection is to have in place of `given`; None for that."""
        part = self.part()
        if part is None:
            return None
        if given is part:
            if module not in self.projected:
                self.projected[module] = module(self.hidden)
            self.sliced = True
            return (given[:, :0],)
        if module is not self.final:
            return None
        self.waiting.append(given)
        return (torch.cat(self.waiting, dim=1) if self.is_last else given[:, :0],)

    def after(self, module: nn.Linear, output: torch.Tensor) -> torch.Tensor | None:
        """The output of a projection in place of `output`; None for that."""
        if self.sliced:
            self.sliced = False
            return self.projected[module][:, self.columns].contiguous()
        self.returned = module, output
        return None

    def output(self, output: Any) -> Any:
        """The output of a segment, which may have no columns: those of the last one."""
        module, projected = self.returned or (None, None)
        assert self.final is None or output is projected, "A mixer returned another tensor than in its first segment."
        self.final = module if output is projected else None
        return output


@contextlib.contextmanager
def _short_chunks(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Mamba-2 in transformers pads a segment to whole chunks, which often have 256 tokens: have it take shorter ones.

    What it computes does not depend on their length, so that another thread may find the attribute changed.
    """
    size = module.__dict__.get("chunk_size")
    if not isinstance(size, int) or size <= _CPU_SPACING or device.type != "cpu":
        yield
        return
    module.chunk_size = _CPU_SPACING  # type: ignore[assignment]
    try:
        yield
    finally:
        module.chunk_size = size  # type: ignore[assignment]


def _cache_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Cache | None:
    return next((each for each in (*args, *kwargs.values()) if isinstance(each, Cache)), None)


def _cut(given: Any, hidden: torch.Tensor, part: slice) -> Any:
    """Arguments of a mixer for some of its columns: all tensors in them that have as many as `hidden`."""
    if isinstance(given, torch.Tensor):
        return given[:, part] if given.ndim > 1 and given.shape[1] == hidden.shape[1] else given
    if isinstance(given, tuple):
        return tuple(_cut(each, hidden, part) for each in given)
    return {name: _cut(each, hidden, part) for name, each in given.items()} if isinstance(given, dict) else given
