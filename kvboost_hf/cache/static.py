"""A cache layer of a fixed size, for decoding that is compiled.

`torch.compile` makes one graph for all decoding steps only if no shape and no Python value changes from step to step.
`StaticReuseLayer` therefore has two ways of taking in K/V:

    whole = False   prompts: eager, as in a `GrowingLayer`; attention sees what is held
    whole = True    decoding steps: tensor operations alone; attention sees all `max_cache_len` columns

What steps of the second kind have appended is known to the tensor `length_tensor`; the host reads it when somebody
asks.
"""

from typing import Self

import torch

from kvboost_hf.cache.layers import GrowingLayer


class StaticReuseLayer(GrowingLayer):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Full-attention K/V of one layer in a buffer that never moves: the graph and its guards outlive prompts.

    Args:
        max_cache_len: Columns of the buffer.
    """

    is_compileable = True

    def __init__(self, max_cache_len: int) -> None:
        super().__init__()
        self.max_cache_len = max_cache_len
        self.whole = True
        with torch.inference_mode(False):
            self.length_tensor = torch.zeros((), dtype=torch.long)  # columns held, graphs' steps included

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
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized or self._key_buffer is None or self._value_buffer is None:
            self.lazy_initialization(key_states, value_states)
            self._key_buffer = self._writable(self._key_buffer, 0, key_states)
            self._value_buffer = self._writable(self._value_buffer, 0, value_states)
        columns = torch.arange(key_states.shape[-2], device=self.device) + self.length_tensor
        self.length_tensor.add_(key_states.shape[-2])
        self._key_buffer.index_copy_(2, columns, key_states)
        self._value_buffer.index_copy_(2, columns, value_states)
        return self._key_buffer, self._value_buffer

    def close(self, new: int) -> None:
        """An eager forward over `new` columns has ended; those that follow are decoding steps."""
        if not self.is_initialized:
            return
        if self.whole:
            self.version += 1
            self.length += new
            super()._view()
        elif self._shared and self._key_buffer is not None and self._value_buffer is not None:  # an autograd graph's
            self._key_buffer = self._writable(self._key_buffer, self.length, self._key_buffer)
            self._value_buffer = self._writable(self._value_buffer, self.length, self._value_buffer)
            self._shared = False
            self._view()
        self.whole = True

    def catch_up(self) -> bool:
        """Notice what graphs have appended; whether that was anything."""
        length = int(self.length_tensor)
        if length == self.length or self._key_buffer is None:
            return False
        self.version += 1
        self.length = length
        super()._view()
        return True

    def get_seq_length(self) -> int:
        """Columns held: a tensor between decoding steps, as in stock static layers."""
        return self.length_tensor if self.whole and self.is_initialized else self.length  # type: ignore[return-value]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that attention will see, and where they begin."""
        return (self.max_cache_len if self.whole else self.length + query_length), 0

    def get_max_length(self) -> int:
        """Columns of the buffer."""
        return self.max_cache_len

    def truncate(self, length: int) -> None:
        """Forget all columns from `length` on."""
        if length < self.length and not self._shared:
            for buffer in (self._key_buffer, self._value_buffer):
                if buffer is not None:  # hidden columns are multiplied by 0, which leaves a NaN a NaN
                    buffer[:, :, length : self.length].zero_()
        super().truncate(length)
        self.length_tensor.fill_(self.length)
        self.whole = True

    def reset(self) -> None:
        """Forget everything; the buffers stay where they are."""
        self.truncate(0)
        kept = (None, None) if self._shared else (self._key_buffer, self._value_buffer)
        super().reset()
        self._key_buffer, self._value_buffer = kept

    def share(self) -> Self:
        """A layer that holds the same, in buffers of its own: these must not move."""
        twin = type(self)(self.max_cache_len)
        twin.__dict__.update(self.__dict__)
        with torch.inference_mode(False), torch.no_grad():
            twin.length_tensor = self.length_tensor.clone()
            _keep_address(twin.length_tensor)
            if self._key_buffer is not None and self._value_buffer is not None:
                twin._key_buffer, twin._value_buffer = self._key_buffer.clone(), self._value_buffer.clone()
                _keep_address(twin._key_buffer)
                _keep_address(twin._value_buffer)
        if twin.is_initialized:
            twin._view()
        return twin

    def _select(self, rows: torch.Tensor) -> None:
        before = (self._key_buffer, self._value_buffer)
        super()._select(rows)
        after = (self._key_buffer, self._value_buffer)
        for old, new in zip(before, after, strict=True):
            if old is None or new is None:
                return
            if old.shape == new.shape:
                old.copy_(new)
            else:
                _keep_address(new)
        if before[0] is not None and after[0] is not None and before[0].shape == after[0].shape:
            self._key_buffer, self._value_buffer = before
            self._view()

    def _writable(self, buffer: torch.Tensor | None, held: int, like: torch.Tensor) -> torch.Tensor:
        """`buffer` if it is of the right shape and nobody else reads it, else a copy that is."""
        batch, heads, _, head_dim = like.shape
        shape = (batch, heads, self.max_cache_len, head_dim)
        if buffer is not None and not self._shared and buffer.shape == shape and buffer.dtype == self.dtype:
            if buffer.device == self.device:
                return buffer
        if torch.compiler.is_compiling():
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        with torch.inference_mode(False), torch.no_grad():
            fresh = torch.zeros(shape, dtype=self.dtype, device=self.device)
            if buffer is not None and held:
                fresh[:, :, :held].copy_(buffer[:, :, :held])
        _keep_address(fresh)
        return fresh

    def _view(self) -> None:
        super()._view()
        self.length_tensor.fill_(self.length)


def _keep_address(tensor: torch.Tensor) -> None:
    """Tell CUDA graphs that they need not copy `tensor`."""
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(tensor)
