"""Hidden states of a text on their way to the heads that draft from them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from kvboost_hf.compat import LAST, hidden_form


def asking_for(model: PreTrainedModel, layers: Sequence[int]) -> int | bool | list[int]:
    """The value of `output_hidden_states` by which a model that returns hidden states shows these layers."""
    if tuple(layers) == (LAST,):
        return LAST
    form = hidden_form(model)
    return list(layers) if not isinstance(form, str) and form.lists else True


ReadKV = Callable[[Sequence[int]], Sequence[tuple[torch.Tensor, torch.Tensor] | None]]


class TextStates:
    """Collects the hidden states of a text until heads read them.

    Args:
        layers: The layers, by their numbers in what transformers returns, or `LAST`.
        whole: Whether those of all tokens are read, or of the last one only.

    Attributes:
        layers: As passed.
        whole: As passed.
        stop: Tokens of the text up to the last one whose states were appended.
        taken: Tokens of the text up to the last one whose states were taken.
        read_kv: Reads keys and values [1, num_kv_heads, columns, head_dim] of some layers, of all of the text but its
            last token, as far as a layer holds them. Set by whoever runs rounds.
        cache: The cache that holds the text but for its last token, where one does. Set by whoever runs rounds.
        row: The row of the cache that holds it.
    """

    def __init__(self, layers: Sequence[int], *, whole: bool = True) -> None:
        self.layers, self.whole, self.stop, self.taken, self.row = tuple(layers), whole, 0, 0, 0
        self.read_kv: ReadKV | None = None
        self.cache: Any = None
        self._new: list[Mapping[int, torch.Tensor]] = []

    def append(self, states: Mapping[int, torch.Tensor], stop: int | None = None) -> None:
        """Append states [1, tokens, hidden_size] of each layer, or nothing.

        Args:
            states: Hidden states of the tokens from `stop` of this on; of any later ones where the last is enough.
            stop: Tokens of the text up to the last of these, where it is known.
        """
        if not states:
            return
        if self.whole or stop is None:
            stop = self.stop + states[self.layers[0]].shape[1]
        self.stop = stop
        self._new = [*self._new, states] if self.whole else [states]

    def behind(self, length: int) -> int:
        """How many tokens of a text of `length` heads take in with their next draft: all but the last one."""
        return length - 1 - self.taken

    def take(self) -> dict[int, torch.Tensor]:
        """The states [1, tokens, hidden_size] of each layer that nobody has taken; none if there are none."""
        new, self._new, self.taken = self._new, [], self.stop
        return {layer: torch.cat([states[layer] for states in new], dim=1) for layer in self.layers} if new else {}
