"""Roots: the keys that the chains of a model start from."""

import logging
from collections.abc import Callable

from transformers import PreTrainedModel

from kvboost_hf.cache.identity.model_state import ModelState
from kvboost_hf.cache.planning.chunks import root_key
from kvboost_hf.cache.store.records.history import History
from kvboost_hf.cache.store.records.lower import LowerMemory

_log = logging.getLogger("kvboost_hf")


class Roots:
    """Derives roots from the model and the salt, and registers them with `History` and `LowerMemory`.

    When weights change, K/V of before is dropped where nothing could ever find it again: in a store without tiers.

    Args:
        history: Remembers the salt of each root.
        lower: Registers roots that other processes derive, too.
        drop: Drops all that is stored under some roots.
    """

    def __init__(self, history: History, lower: LowerMemory, drop: Callable[[set[bytes]], None]) -> None:
        self._history, self._lower, self._drop = history, lower, drop
        self._age = -1, -1  # of the model
        self._passing: set[bytes] = set()  # roots that last as long as it stays as it is
        self._warned: set[str] = set()

    def root(self, model: PreTrainedModel, salt: bytes, regime: bytes, *, read_all: bool, keeps_hidden: bool) -> bytes:
        """The root of a model as it is now.

        Args:
            model: The model.
            salt: Whose prompts they are.
            regime: Of the rotary frequencies, and of the codec.
            read_all: Read every weight to tell whether one has changed.
            keeps_hidden: Hidden states are kept beside K/V.
        """
        follower = ModelState.of(model).fingerprint
        fingerprint = follower.durable(model, full=read_all) if self._lower else None
        if durable := isinstance(fingerprint, bytes):
            found = fingerprint
        else:
            if isinstance(fingerprint, str) and fingerprint not in self._warned:
                self._warned.add(fingerprint)
                _log.warning("K/V of this model is kept in host memory only: %s in other processes.", fingerprint)
            found = follower.current(model, full=read_all)
        root = root_key(found, salt, regime + (b"hidden states" if keeps_hidden else b""))
        self._history.note_root(root, salt)
        if not durable and not read_all:
            if follower.age != self._age:
                self._drop(self._passing)
                self._age, self._passing = follower.age, set()
            self._passing.add(root)
        if durable:
            self._lower.note_root(root, found, keeps_hidden=keeps_hidden)
        return root
