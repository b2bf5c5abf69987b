"""The layer of hidden states.

The head of a model computes logits from the last hidden states, and the heads of drafts candidates from these and
those of other layers. Their layer stands behind the layers of K/V, so that its columns are stored, loaded and cut with
theirs. transformers does not see it: a hook behind the decoder layers (`compat.hook_hidden_states`) gives it what it
keeps.
"""

from collections.abc import Callable, Sequence

import torch

from kvboost_hf.cache.layers.base import ColumnSpec, Piece, ReuseLayer, Turn
from kvboost_hf.cache.layers.growing_tensor import GrowingTensor
from kvboost_hf.compat import LAST


class HiddenStates(ReuseLayer):
    """The hidden states of all columns, as one tensor [batch, 1, columns, hidden_size] for each layer that is kept.

    Args:
        which: The layers, by their numbers in what transformers returns, or `LAST`.
    """

    can_branch = True  # nothing of it is lent

    def __init__(self, which: tuple[int, ...] = (LAST,)) -> None:
        self.which = which
        self._states = [GrowingTensor() for _ in which]

    def fresh(self) -> "HiddenStates":
        return HiddenStates(self.which)

    @property
    def native(self) -> None:
        """None: transformers sees no such layer."""

    def append(self, of: Callable[[int], torch.Tensor | None]) -> None:
        """Append [batch, m, hidden_size] `of` each layer; nothing, if one of them is not known."""
        new = [states for layer in self.which if (states := of(layer)) is not None]
        self.version += 1
        if len(new) == len(self.which):
            with torch.no_grad():
                for kept, states in zip(self._states, new, strict=True):
                    kept.append(states.detach()[:, None])

    def view(self, layer: int, start: int) -> torch.Tensor:
        """[batch, columns, hidden_size] of a layer from column `start` on."""
        return self._states[self.which.index(layer)].view(start)[:, 0]

    def select(self, rows: torch.Tensor) -> None:
        """Make row i what row `rows[i]` was."""
        self.version += 1
        for kept in self._states:
            kept.select(rows)

    @property
    def intact(self) -> bool:
        return all([kept.intact for kept in self._states])

    def seal(self) -> None:
        for kept in self._states:
            kept.seal()

    @property
    def length(self) -> int:
        """Columns seen so far."""
        return self._states[0].stop

    @property
    def first(self) -> int:
        return self._states[0].first

    def share(self) -> "HiddenStates":
        """A layer that reads the same buffer; whichever of the two writes first copies."""
        twin = self.fresh()
        twin.version, twin._states = self.version, [kept.share() for kept in self._states]
        return twin

    def reset(self) -> None:
        self.version += 1
        self._states = [GrowingTensor() for _ in self.which]

    def truncate(self, length: int) -> None:
        if length < self.length:
            self.version += 1
            for kept in self._states:
                kept.truncate(length)

    def columns(self, row: int, start: int, stop: int) -> Piece | None:
        if self._states[0].buffer is None:
            return None
        return tuple([kept.row(row, start, stop) for kept in self._states])

    def fill(self, start: int, stop: int, rows: Sequence[Sequence[Piece]], turn: Turn | None = None) -> None:
        self.version += 1
        for at, kept in enumerate(self._states):
            kept.fill(start, stop, [[piece[at] for piece in pieces] for pieces in rows])

    def open(self, stop: int, like: Piece, batch: int) -> tuple[torch.Tensor, ...]:
        self.version += 1
        pairs = zip(self._states, like, strict=True)
        return tuple([kept.open(stop, each.expand(batch, -1, -1, -1)) for kept, each in pairs])

    @property
    def column_specs(self) -> tuple[ColumnSpec, ...]:
        return tuple([ColumnSpec(buffer.shape[1], buffer.shape[3], buffer.dtype) for buffer in self.buffers])

    @property
    def buffers(self) -> list[torch.Tensor]:
        return [kept.buffer for kept in self._states if kept.buffer is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, room to spare included."""
        return sum([kept.nbytes for kept in self._states])
