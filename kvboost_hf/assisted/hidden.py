"""Hidden states of a text on their way to the heads that draft from them."""

from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedModel

from kvboost_hf.compat import LAST, hidden_form


def asking_for(model: PreTrainedModel, layers: Sequence[int]) -> int | bool | list[int]:
    """The value of `output_hidden_states` by which a model that returns hidden states shows these layers."""
    if tuple(layers) == (LAST,):
        return LAST
    form = hidden_form(model)
    return list(layers) if not isinstance(form, str) and form.lists else True


class TextStates:
    """Collects the hidden states of a text until heads read them.

    Args:
        layers: The layers, by their numbers in what transformers returns, or `LAST`.

    Attributes:
        layers: As passed.
        stop: Tokens of the text whose states were appended so far.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers, self.stop = tuple(layers), 0
        self._new: list[Mapping[int, torch.Tensor]] = []

    def append(self, states: Mapping[int, torch.Tensor]) -> None:
        """Append states [1, tokens, hidden_size] of each layer, of the tokens from `stop` on; or nothing."""
        if not states:
            return
        self.stop += states[self.layers[0]].shape[1]
        self._new.append(states)

    def take(self) -> dict[int, torch.Tensor]:
        """The states [1, tokens, hidden_size] of each layer that nobody has taken; none if there are none."""
        new, self._new = self._new, []
        return {layer: torch.cat([states[layer] for states in new], dim=1) for layer in self.layers} if new else {}
