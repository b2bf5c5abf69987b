"""Cache layers of a fixed size, for decoding that is compiled.

`torch.compile` makes one graph for all decoding steps only if no shape and no Python value changes from step to step.
`StaticReuseLayer` therefore has two ways of taking in K/V:

    whole = False   prompts: eager, as in a `GrowingLayer`; attention sees what is held
    whole = True    decoding steps: tensor operations alone; attention sees all `max_cache_len` columns

What steps of the second kind have appended is known to the tensor `length_tensor`; the host reads it when somebody
asks. A layer with a window has as many columns as one without: its mask, or an attention that is told the window,
leaves out those that have left it.
"""

from collections.abc import Callable, Sequence
from typing import Any, Self, cast

import torch

from kvboost_hf.cache.layers.base import LayerState, Piece, Turn, whole_columns
from kvboost_hf.cache.layers.growing import GrowingLayer, SlidingLayer
from kvboost_hf.cache.layers.growing_tensor import GrowingTensor
from kvboost_hf.cache.layers.stateful import StateLayer, states_of
from kvboost_hf.checksum import checksum


class _FixedTensor(GrowingTensor):
    """A tensor [batch, heads, columns, dim] in a buffer that never moves, and that holds so many columns."""

    __slots__ = ("_columns",)

    def __init__(self, columns: int) -> None:
        super().__init__()
        self._columns = columns

    def truncate(self, length: int) -> None:
        self.follow()
        if length < self.stop and not self.shared and self.buffer is not None:
            # Hidden columns are multiplied by 0, which leaves a NaN a NaN.
            self.note_changes()
            self.buffer[:, :, length : self.stop].zero_()
            self.seal()
        super().truncate(length)

    def cast(self, dtype: torch.dtype) -> None:
        """Leave it to the next append, which takes a buffer of its dtype."""

    def skip_to(self, length: int, batch: int) -> None:
        """Begin anew with `batch` rows and columns up to `length` that nobody will look at: zeros."""
        self.truncate(0)
        if self.buffer is not None and self.buffer.shape[0] != batch:
            self.buffer = None
        self.stop = length

    def share(self) -> "_FixedTensor":
        """One that holds the same, in a buffer of its own: these must not move."""
        twin = _FixedTensor(self._columns)
        self.follow()
        twin.stop = self.stop
        if self.buffer is not None:
            with torch.inference_mode(False), torch.no_grad():
                twin.buffer = self.buffer.clone()
            _keep_address(twin.buffer)
            self.note_changes()
            twin.tampered = self.tampered
            twin.seal()
        return twin

    def hand_out(self, start: int) -> torch.Tensor:
        """A copy: the buffer must not move, so that a view of it could be written to at any later time.

        What is written to the copy before the next forward counts; see `follow`.
        """
        if self._seen is None or self._seen[0].shape[2] != self.stop - start:
            self.follow()
            with torch.inference_mode(False):
                copy = self.view(start).clone()
            self._seen = copy, checksum([copy])
        return self._seen[0]

    def follow(self) -> None:
        """Take over what somebody has written to the copy that was handed out."""
        seen, self._seen = self._seen, None
        if seen is None or self.buffer is None:
            return
        if checksum([seen[0]]) != seen[1]:
            with torch.no_grad():
                self.buffer[:, :, self.stop - seen[0].shape[2] : self.stop].copy_(seen[0])
            self.seal()
            self.tampered = True

    def select(self, rows: torch.Tensor) -> None:
        """Make row i what row `rows[i]` was, in the same buffer if the number of rows is the same."""
        before = self.buffer
        super().select(rows)
        if before is None or self.buffer is None:
            return
        if before.shape == self.buffer.shape:
            self._replace(before.copy_(self.buffer))
        else:
            _keep_address(self.buffer)

    def make_writable(self, like: torch.Tensor, held: int, keep_from: int = 0) -> None:
        """Have a buffer of the right shape that nobody else reads."""
        batch, heads, _, dim = like.shape
        shape, old = (batch, heads, self._columns, dim), self.buffer
        if not torch.compiler.is_compiling():
            self.note_changes()
        if (
            old is not None
            and not self.shared
            and (old.shape, old.dtype, old.device) == (shape, like.dtype, like.device)
        ):
            return
        self.shared = False
        if torch.compiler.is_compiling():
            self.buffer = torch.zeros(shape, dtype=like.dtype, device=like.device)
            return
        with torch.inference_mode(False), torch.no_grad():
            fresh = torch.zeros(shape, dtype=like.dtype, device=like.device)
            if old is not None and held:
                fresh[:, :, :held].copy_(old[:, :, :held])
        _keep_address(fresh)
        self._replace(fresh)


class StaticReuseLayer(GrowingLayer):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """K/V of one layer in buffers that never move: the graph and its guards outlive prompts.

    A token can attend to `window` columns, itself included; 0 for all.
    """

    is_compileable = True
    can_branch = False

    def __init__(self, max_cache_len: int, window: int = 0) -> None:
        super().__init__()
        self.max_cache_len = max_cache_len
        self.is_sliding = window > 0
        self._window = window
        self._first = 0  # the first column that was filled: those before it had left the window
        self.whole = True
        self._tensors = [_FixedTensor(max_cache_len) for _ in range(self._num_tensors)]
        with torch.inference_mode(False):
            self.length_tensor = torch.zeros(
                (), dtype=torch.long, device="cpu"
            )  # columns held, graphs' steps included

    @property
    def sliding_window(self) -> int:
        """Columns that a token can attend to, itself included; 0 for all."""
        return self._window

    @property
    def _sliding_window_tensor(self) -> torch.Tensor | None:
        return torch.tensor(self._window) if self.is_sliding else None

    @property
    def _fixed(self) -> "list[_FixedTensor]":
        return cast("list[_FixedTensor]", self._tensors)

    def fresh(self) -> GrowingLayer:
        """An empty layer for rows that are computed ahead, eagerly."""
        return SlidingLayer(self._window) if self.is_sliding else GrowingLayer()

    @property
    def first(self) -> int:
        return self._first

    def needed_from(self, length: int) -> int:
        return max(0, length - self._window + 1) if self.is_sliding else 0

    def can_rewind(self, length: int) -> bool:
        return self._first <= self.needed_from(length)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Note dtype and device."""
        super().lazy_initialization(key_states, value_states)
        if self.length_tensor.device != self.device:
            with torch.inference_mode(False):
                self.length_tensor = self.length_tensor.to(self.device)
        _keep_address(self.length_tensor)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [batch, num_kv_heads, m, head_dim]; returns what is held, or the whole buffers."""
        if not self.whole:
            found = super().update(key_states, value_states, *args, **kwargs)
            self.length_tensor.fill_(self.length)
            return found
        keys, values = self._fixed
        if not self.is_initialized or keys.buffer is None or values.buffer is None:
            self.lazy_initialization(key_states, value_states)
            keys.make_writable(key_states, 0)
            values.make_writable(value_states, 0)
        assert keys.buffer is not None
        assert values.buffer is not None
        columns = torch.arange(key_states.shape[-2], device=self.device) + self.length_tensor
        self.length_tensor.add_(key_states.shape[-2])
        keys.buffer.index_copy_(2, columns, key_states)
        values.buffer.index_copy_(2, columns, value_states)
        return keys.buffer, values.buffer

    def follow(self) -> None:
        """Before a forward: take over what somebody has written to keys and values that were handed out."""
        for tensor in self._fixed:
            tensor.follow()

    def close(self, new: int) -> None:
        """An eager forward over `new` columns has ended; those that follow are decoding steps."""
        if not self.is_initialized:
            return
        if self.whole:
            self._advance_to(self.length + new)
        else:
            for tensor in self._fixed:
                if tensor.shared and tensor.buffer is not None:  # an autograd graph's
                    tensor.make_writable(tensor.buffer, tensor.stop)
            self.length_tensor.fill_(self.length)
        self.whole = True

    def close_padded(self, stop: int, length: int) -> None:
        """A graph has written columns up to `stop`, of which those from `length` on are padding, or are taken back."""
        self._advance_to(stop)
        self.truncate(length)
        self.whole = False  # the forward goes on

    def catch_up(self) -> bool:
        """Notice what graphs have appended; whether that was anything."""
        length = int(self.length_tensor)
        if length == self.length or self._fixed[0].buffer is None:
            return False
        self._advance_to(length)
        return True

    def _advance_to(self, length: int) -> None:
        self.version += 1
        for tensor in self._fixed:
            tensor.stop = length
            tensor.seal()  # graphs do not count what they write

    def get_seq_length(self) -> int:
        """Columns held: a tensor between decoding steps, as in stock static layers."""
        return self.length_tensor if self.whole and self.is_initialized else self.length  # type: ignore[return-value]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that attention will see, and where they begin."""
        if self.whole:
            return self.max_cache_len, 0
        start = self.needed_from(self.length)
        return self.length - start + query_length, start

    def get_max_length(self) -> int:
        """Columns of the buffers."""
        return self.max_cache_len

    def crop(self, tokens_to_remove: int) -> None:
        change = whole_columns(tokens_to_remove)
        if not self.can_rewind(change if change > 0 else max(0, self.length + change)):
            raise RuntimeError(
                f"`crop({change})` goes back further than this sliding-window layer remembers. Call "
                "`reset()` on the cache, and pass the whole text."
            )
        super().crop(change)

    def truncate(self, length: int) -> None:
        super().truncate(length)
        self.length_tensor.fill_(self.length)
        self.whole = True

    def reset(self) -> None:
        """Forget everything; the buffers stay where they are."""
        self.truncate(0)
        self._first = 0
        kept = self._fixed
        super().reset()
        if any(tensor.shared for tensor in kept):
            kept = [_FixedTensor(self.max_cache_len) for _ in kept]
        for tensor in kept:
            tensor.tampered = False
            tensor.seal()
        self._tensors = list(kept)

    def share(self) -> "StaticReuseLayer":
        """A layer that holds the same, in buffers of its own."""
        twin = StaticReuseLayer(self.max_cache_len, self._window)
        twin.__dict__.update(self.__dict__)
        twin._tensors = [tensor.share() for tensor in self._fixed]
        with torch.inference_mode(False), torch.no_grad():
            twin.length_tensor = self.length_tensor.clone()
        _keep_address(twin.length_tensor)
        return twin

    def fill(self, start: int, stop: int, rows: Sequence[Sequence[Piece]], turn: Turn | None = None) -> None:
        if start > self.length:
            self._first = start
            for tensor in self._fixed:
                tensor.skip_to(start, len(rows))
        super().fill(start, stop, rows)
        self.length_tensor.fill_(self.length)

    def open(self, stop: int, like: Piece, batch: int) -> tuple[torch.Tensor, ...]:
        opened = super().open(stop, like, batch)
        self.length_tensor.fill_(self.length)
        return opened

    def _bounds(self, held: int) -> tuple[int, int]:
        return 0, self.needed_from(held)

    def _shown_from(self) -> int:
        return max(self._first, self.needed_from(self.length))

    def _adopt(self, index: int, new: torch.Tensor | None) -> None:
        tensor, columns = self._fixed[index], new.shape[2] if new is not None else 0
        stop = max(tensor.stop, columns) if self.is_sliding and columns else columns
        if stop > self.max_cache_len:
            raise ValueError(
                f"A cache with `max_cache_len`={self.max_cache_len} holds so many columns at most, got {stop}."
            )
        self._first = stop - columns
        tensor.truncate(0)
        if new is not None:
            tensor.skip_to(self._first, new.shape[0])
            tensor.append(new)
        tensor.tampered = True
        self.length_tensor.fill_(self.length)


class StaticStateLayer(StateLayer):
    """States in tensors that never move, unless the number of rows changes: graphs write to them in place."""

    def __init__(self, number_of_states: int = 1) -> None:
        super().__init__(number_of_states)
        self._fixed: dict[tuple[str, int], torch.Tensor] = {}

    def fresh(self) -> StateLayer:
        """An empty layer for rows that are computed ahead, eagerly."""
        return StateLayer(self.number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        super().lazy_initialization(*args, **kwargs)
        self._stay()

    def load_states(self, rows: Sequence[LayerState | None]) -> None:
        super().load_states(rows)
        self._stay()

    def truncate(self, length: int) -> None:
        super().truncate(length)
        self._stay()

    @property
    def copies(self) -> list[torch.Tensor]:
        """Copies of all states."""
        return [state.clone() for state in states_of(self)]

    def _change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super()._change(change)
        self._stay()

    def share(self) -> Self:
        twin = super().share()
        twin._stay()
        twin.note_state()
        return twin

    def _stay(self) -> None:
        """Put new values into the tensors that graphs know, where they fit."""
        if torch.compiler.is_compiling():
            return
        for name in ("conv_states", "recurrent_states"):
            held: dict[int, torch.Tensor | None] = getattr(self, name)
            for number, state in held.items():
                kept = self._fixed.get((name, number))
                if state is None or state is kept:
                    continue
                if kept is not None and kept.shape == state.shape and (kept.dtype, kept.device) == _kind(state):
                    with torch.no_grad():
                        held[number] = kept.copy_(state)
                else:
                    self._fixed[name, number] = state
                    _keep_address(state)


def _kind(tensor: torch.Tensor) -> tuple[torch.dtype, torch.device]:
    return tensor.dtype, tensor.device


def _keep_address(tensor: torch.Tensor) -> None:
    """Tell CUDA graphs that they need not copy `tensor`."""
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(tensor)
