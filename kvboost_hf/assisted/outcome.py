"""`Outcome` observes how many tokens of a draft the target accepts, by what is cropped from its cache."""

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from transformers import PreTrainedModel

from kvboost_hf.compat import CACHE, own_hook


class Outcome:
    """Waits for the forward of a target that verifies a draft, and for the crop after it.

    `generate()` crops the K/V of rejected tokens as soon as the host knows them. Afterwards neither the model nor its
    cache refers to this object.

    Args:
        target: The model that verifies the draft.
        length: Tokens up to the end of the draft; the forward that reaches it is the one.
        clock: Seconds.
    """

    leaves_kv_alone = True  # read by the fingerprint of models

    def __init__(self, target: PreTrainedModel, length: int, clock: Callable[[], float]) -> None:
        self.known: float | None = None  # when the rejected tokens were known
        self.rollback_s = 0.0  # of the crop
        self.held = 0  # tokens in the cache after it
        self._length, self._clock = length, clock
        self._cache: Callable[[], Any] = lambda: None
        self._handle = own_hook(target.register_forward_hook(self._after))

    def give_up(self) -> None:
        """Stop waiting."""
        self._handle.remove()
        if (cache := self._cache()) is not None:
            vars(cache).pop("crop", None)

    def _after(self, _: torch.nn.Module, __: tuple[Any, ...], output: Any) -> None:
        cache = getattr(output, CACHE)
        if cache is not None and cache.get_seq_length() == self._length:
            self._handle.remove()
            self._cache = ref(cache)
            cache.crop = self._crop

    def _crop(self, tokens_to_remove: int) -> None:
        cache = self._cache()
        del cache.crop  # on the instance
        self.known = self._clock()
        cache.crop(tokens_to_remove)
        self.rollback_s = self._clock() - self.known
        self.held = cache.get_seq_length()
