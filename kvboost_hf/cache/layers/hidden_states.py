"""The layer of hidden states.

The head of a model computes logits from the last hidden states, and the heads of drafts candidates from these and
those of other layers. Their layer stands behind the layers of K/V, so that its columns are stored, loaded and cut with
theirs. transformers does not see it: a hook behind the decoder layers (`compat.hook_hidden_states`) gives it what it
keeps.
"""

from collections.abc import Callable

import torch

from kvboost_hf.cache.layers.growing import ColumnsInTensors
from kvboost_hf.cache.layers.growing_tensor import GrowingTensor
from kvboost_hf.compat import LAST


class HiddenStates(ColumnsInTensors):
    """The hidden states of all columns, as one tensor [batch, 1, columns, hidden_size] for each layer that is kept.

    The layers are `which`, by their numbers in what transformers returns, or `LAST`.
    """

    can_branch = True  # nothing of it is lent

    def __init__(self, which: tuple[int, ...] = (LAST,)) -> None:
        self.which = which
        self._tensors: list[GrowingTensor] = [GrowingTensor() for _ in which]

    def fresh(self) -> "HiddenStates":
        return HiddenStates(self.which)

    @property
    def native(self) -> None:
        """None: transformers sees no such layer."""

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        """Whether it holds something."""
        return self._tensors[0].buffer is not None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: its tensors know all that there is to know."""

    def append(self, of: Callable[[int], torch.Tensor | None]) -> None:
        """Append [batch, m, hidden_size] `of` each layer; nothing, if one of them is not known."""
        new = [states for layer in self.which if (states := of(layer)) is not None]
        self.version += 1
        if len(new) == len(self.which):
            with torch.no_grad():
                for kept, states in zip(self._tensors, new, strict=True):
                    kept.append(states.detach()[:, None])

    def view(self, layer: int, start: int) -> torch.Tensor:
        """[batch, columns, hidden_size] of a layer from column `start` on."""
        return self._tensors[self.which.index(layer)].view(start)[:, 0]

    def select(self, rows: torch.Tensor) -> None:
        """Make row i what row `rows[i]` was."""
        self.version += 1
        for kept in self._tensors:
            kept.select(rows)

    def reset(self) -> None:
        self.version += 1
        self._tensors = [GrowingTensor() for _ in self.which]
