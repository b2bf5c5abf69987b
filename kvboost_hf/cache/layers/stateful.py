"""Layers with a state: linear attention, alone or beside attention.

A state sums up all tokens so far. It cannot be rewound, only put back as it was when it was saved.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from transformers.cache_utils import (
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from kvboost_hf.cache.layers.base import LayerState, ReuseLayer, whole_columns
from kvboost_hf.cache.layers.growing import GrowingLayer, SlidingLayer
from kvboost_hf.cache.layers.growing_tensor import version_of

Marks = list[tuple[torch.Tensor, int]]  # tensors, and how often each had been written to


class _Kept(NamedTuple):
    """A copy of the states as they were at a column, on their device."""

    column: int
    states: list[torch.Tensor | None]
    had_previous: dict[int, bool]


class _WithStates(ReuseLayer):
    """Base of layers with states, whatever else they keep."""

    is_stateful = True
    _marks: Marks | None = None  # of the states after the last forward
    _kept: "_Kept | None" = None

    @property
    def intact(self) -> bool:
        """Models write states in place, which only the next `note_state` tells apart."""
        return super().intact and are_as_marked(states_of(self), self._marks)

    def note_state(self) -> None:
        self._marks = marks_of(states_of(self))

    def can_rewind(self, length: int) -> bool:
        return self._kept is not None and self._kept.column == length and super().can_rewind(length)

    def truncate(self, length: int) -> None:
        super().truncate(length)
        kept = self._kept
        if kept is None or kept.column > length:
            self._kept = None
        elif kept.column == length:
            self._put_back(kept)

    def _put_back(self, kept: _Kept) -> None:
        layer: Any = self
        n = layer.number_of_states
        layer.has_previous_state = dict(kept.had_previous)
        with torch.inference_mode(False), torch.no_grad():
            for i in range(n):
                conv, recurrent = kept.states[i], kept.states[n + i]
                if conv is not None:
                    layer.conv_states[i] = conv.clone()  # it may be longer now
                if recurrent is not None:
                    layer.recurrent_states[i].copy_(recurrent)

    def keep_state(self, column: int) -> None:
        layer: Any = self
        with torch.inference_mode(False), torch.no_grad():
            copies = [state.detach().clone() if state is not None else None for state in _current(layer)]
        self._kept = _Kept(column, copies, dict(layer.has_previous_state))

    def can_crop(self, tokens: int, held: int) -> bool:
        """Whether the last tokens of `held` can be taken out by what was recorded: of convolutions only."""
        layer: Any = self
        if not tokens or not layer.record_past or any(layer.is_recurrent_states_initialized.values()):
            return not tokens
        found = [(state, layer.conv_kernel_size[i]) for i, state in layer.conv_states.items() if state is not None]
        return bool(found) and all(state.shape[-1] >= min(tokens + kernel, held) for state, kernel in found)

    def stop_recording(self) -> None:
        layer: Any = self
        self._kept = None
        if layer.record_past:
            layer.record_past = False
            with torch.inference_mode(False), torch.no_grad():
                recent = {i: _recent(layer, i) for i in range(layer.number_of_states)}
                layer.conv_states |= {i: state.clone() for i, state in recent.items() if state is not None}

    def state_bytes(self) -> int:
        return sum(t[0].nbytes for t in _current(self) if t is not None)

    def save_state(self, row: int) -> LayerState | None:
        found = view_states(self, row)
        if found is None:
            return None
        with torch.inference_mode(False), torch.no_grad():
            # A copy in any case: models write states in place.
            copies = [None if t is None else torch.empty_like(t, device="cpu").copy_(t) for t in found.tensors]
        return LayerState(copies, found.extra)

    def view_state(self, row: int) -> LayerState | None:
        return view_states(self, row)

    def load_states(self, rows: Sequence[LayerState | None]) -> None:
        self._kept = None
        load_states(self, rows)


class StateLayer(_WithStates, LinearAttentionLayer):
    """Convolution and recurrent states of linear attention, [batch, …] each, `number_of_states` of both."""

    def __init__(self, number_of_states: int = 1) -> None:
        LinearAttentionCacheLayerMixin.__init__(self, number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Make the states outside inference mode, which they outlive."""
        with torch.inference_mode(False):
            super().lazy_initialization(*args, **kwargs)

    def fresh(self) -> "StateLayer":
        return type(self)(self.number_of_states)

    def share(self) -> Self:
        """A layer with copies of the states: models write them in place."""
        twin = type(self)(self.number_of_states)
        twin.stock = self.stock
        copy_states(self, twin)
        twin.note_state()
        return twin

    def reset(self) -> None:
        self._kept = None
        _reset_states(self)

    def crop(self, tokens_to_remove: int) -> None:
        """Only states of convolutions can be cropped, while they are recorded."""
        _crop_states(self, tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Make row i what row `beam_idx[i]` was."""
        self._change(_selecting(beam_idx))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`, numbers or a mask."""
        self._change(_selecting(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        self._change(lambda state: state.repeat_interleave(repeats, dim=0))

    def _change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        _change_states(self, change)

    @property
    def nbytes(self) -> int:
        """Bytes of all states."""
        return sum(t.nbytes for t in states_of(self))


class _BesideAttention(_WithStates, GrowingLayer):  # type: ignore[no-untyped-call]
    """Base of growing layers with states beside their K/V."""

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """K/V come by position, states by name."""
        if args:
            GrowingLayer.lazy_initialization(self, *args)
        else:
            with torch.inference_mode(False):
                LinearAttentionLayer.lazy_initialization(self, **kwargs)  # type: ignore[arg-type]

    def share(self) -> Self:
        twin = super().share()
        _reset_states(twin)
        copy_states(self, twin)
        twin.note_state()
        return twin

    def reset(self) -> None:
        super().reset()
        self._kept = None
        _reset_states(self)

    def _select(self, rows: torch.Tensor) -> None:
        super()._select(rows)
        _change_states(self, _selecting(rows))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        super().batch_repeat_interleave(repeats)
        if not self.is_initialized:  # it has states alone
            _change_states(self, lambda state: state.repeat_interleave(repeats, dim=0))

    def crop(self, tokens_to_remove: int) -> None:
        """States can only be cropped while they are recorded, and if none is recurrent."""
        _crop_states(self, tokens_to_remove)
        super().crop(tokens_to_remove)

    @property
    def nbytes(self) -> int:
        """Bytes of buffers and states."""
        return super().nbytes + sum(t.nbytes for t in states_of(self))


class HybridLayer(_BesideAttention, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc, override]
    """Full attention and linear attention in one layer."""

    def __init__(self, number_of_states: int = 1) -> None:
        GrowingLayer.__init__(self)
        LinearAttentionCacheLayerMixin.__init__(self, number_of_states)  # type: ignore[no-untyped-call]

    def fresh(self) -> "HybridLayer":
        return HybridLayer(self.number_of_states)


class HybridSlidingLayer(  # type: ignore[misc, override]
    _BesideAttention, SlidingLayer, LinearAttentionAndSlidingWindowAttentionLayer
):
    """Sliding-window attention and linear attention in one layer."""

    def __init__(self, window: int, number_of_states: int = 1) -> None:
        SlidingLayer.__init__(self, window)
        LinearAttentionCacheLayerMixin.__init__(self, number_of_states)  # type: ignore[no-untyped-call]

    def fresh(self) -> "HybridSlidingLayer":
        return HybridSlidingLayer(self.sliding_window, self.number_of_states)

    def activate_past_recording(self) -> None:
        SlidingLayer.activate_past_recording(self)
        LinearAttentionCacheLayerMixin.activate_past_recording(self)  # type: ignore[no-untyped-call]


# States of linear attention, wherever they are. `conv_states[i]` is [batch, channels, kernel], or longer while crop()
# may be called; `recurrent_states[i]` is [batch, …].


def marks_of(tensors: Sequence[torch.Tensor]) -> Marks:
    return [(tensor, version_of(tensor)) for tensor in tensors]


def are_as_marked(tensors: Sequence[torch.Tensor], marks: Marks | None) -> bool:
    """Whether these are the same tensors as were marked, and nobody has written to them."""
    return marks is None or (
        len(tensors) == len(marks)
        and all(
            tensor is marked and version_of(tensor) == version
            for tensor, (marked, version) in zip(tensors, marks, strict=True)
        )
    )


def states_of(layer: Any) -> list[torch.Tensor]:
    """All states of a layer of transformers, or of ours."""
    return [
        t for states in (layer.conv_states, layer.recurrent_states) for t in list(states.values()) if t is not None
    ]


def _recent(layer: Any, index: int) -> torch.Tensor | None:
    """The part of a convolution state that is needed to go on."""
    state, kernel = layer.conv_states[index], layer.conv_kernel_size[index]
    if state is None or not layer.has_previous_state[index]:
        return None
    recent: torch.Tensor = state[..., -kernel:]
    return torch.nn.functional.pad(recent, (kernel - recent.shape[-1], 0))


def _recurrent(layer: Any, index: int) -> torch.Tensor | None:
    state: torch.Tensor | None = layer.recurrent_states[index]
    return state if layer.is_recurrent_states_initialized[index] else None


def _current(layer: Any) -> list[torch.Tensor | None]:
    n = layer.number_of_states
    return [*(_recent(layer, i) for i in range(n)), *(_recurrent(layer, i) for i in range(n))]


def view_states(layer: Any, row: int) -> LayerState | None:
    """Views of a row's states; None where there are none."""
    states = _current(layer)
    if all(state is None for state in states):
        return None
    devices = [None if state is None else state.device for state in states]
    rows = [None if state is None else state[row] for state in states]
    return LayerState(rows, (layer.device, layer.dtype, dict(layer.has_previous_state), devices))


def load_states(layer: Any, rows: Sequence[LayerState | None]) -> None:
    """Give a layer copies of the states of its rows, in place of those that it has."""
    saved = [state for state in rows if state is not None]
    if not saved:
        _reset_states(layer)
        return
    assert len(saved) == len(rows), "either every row has a state or none"
    n, devices = layer.number_of_states, saved[0].extra[3]
    with torch.inference_mode(False), torch.no_grad():
        stacked = [_stack([state.tensors[i] for state in saved], devices[i]) for i in range(2 * n)]
    _reset_states(layer)
    layer.device, layer.dtype, previous, _ = saved[0].extra
    layer.has_previous_state = dict(previous)
    for i in range(n):
        conv, recurrent = stacked[i], stacked[n + i]
        if conv is not None:
            layer.conv_states[i], layer.conv_kernel_size[i] = conv, conv.shape[-1]
            layer.is_conv_states_initialized[i] = True
        if recurrent is not None:
            layer.recurrent_states[i], layer.is_recurrent_states_initialized[i] = recurrent, True


def _crop_states(layer: Any, tokens_to_remove: int) -> None:
    change = whole_columns(tokens_to_remove)
    if change and any(layer.is_recurrent_states_initialized.values()):
        raise RuntimeError(
            f"`crop({change})` of a layer cannot take tokens out of a recurrent state. Call `crop` of "
            "its ChunkReuseCache, which computes from the last states that it has."
        )
    if change or layer.record_past:
        LinearAttentionCacheLayerMixin.crop(layer, change)


def _stack(rows: Sequence[torch.Tensor | None], device: torch.device | None) -> torch.Tensor | None:
    found = [row for row in rows if row is not None]
    return torch.stack(found).to(device) if found else None


def _reset_states(layer: Any) -> None:
    recording, device, dtype = layer.record_past, layer.device, layer.dtype
    LinearAttentionCacheLayerMixin.__init__(layer, layer.number_of_states)
    layer.record_past = recording
    if isinstance(layer, GrowingLayer):
        layer.device, layer.dtype = device, dtype


def copy_states(source: Any, target: Any) -> None:
    """Give a layer copies of the states of another one."""
    target.record_past, target.device, target.dtype = source.record_past, source.device, source.dtype
    for name in ("conv_kernel_size", "has_previous_state"):
        setattr(target, name, dict(getattr(source, name)))
    for name in ("conv_states", "recurrent_states"):
        states = {i: None if t is None else t.clone() for i, t in getattr(source, name).items()}
        setattr(target, name, states)
        setattr(target, f"is_{name}_initialized", {i: t is not None for i, t in states.items()})


def _selecting(rows: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda state: state[rows.to(state.device).clone()]


def _change_states(layer: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Outside inference mode, for models write states in place, there and elsewhere."""
    with torch.inference_mode(False):
        for states in (layer.conv_states, layer.recurrent_states):
            for i, state in states.items():
                if state is not None:
                    states[i] = change(state)
