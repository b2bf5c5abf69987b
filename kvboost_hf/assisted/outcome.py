"""What a target makes of a draft, by what is taken back from its cache."""

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from transformers import PreTrainedModel

from kvboost_hf.compat import own_hook


class Outcome:
    """Waits for the next forward of a target that checks a draft.

    `generate()` takes back the K/V of refused tokens as soon as it knows them on the host. Neither the model nor its
    cache keeps a trace of this afterwards.

    Args:
        target: The model that checks the draft.
        length: Tokens up to the end of the draft, by which that forward is known.
        clock: Seconds.
    """

    leaves_kv_alone = True  # as a `ChunkReuseCache` wants to know of hooks

    def __init__(self, target: PreTrainedModel, length: int, clock: Callable[[], float]) -> None:
        self.known: float | None = None  # when it was known what is refused
        self.rollback_s = 0.0  # that taking it back took
        self.held = 0  # tokens that the cache holds then
        self._length, self._clock = length, clock
        self._cache: Callable[[], Any] = lambda: None
        self._handle = own_hook(target.register_forward_hook(self._after))

    def give_up(self) -> None:
        """Wait no longer, if it has not come."""
        self._handle.remove()
        if (cache := self._cache()) is not None:
            vars(cache).pop("crop", None)

    def _after(self, _: torch.nn.Module, __: tuple[Any, ...], output: Any) -> None:
        cache = output.past_key_values
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
