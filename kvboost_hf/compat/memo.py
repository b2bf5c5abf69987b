"""State and findings about one model, kept on the model itself."""

from collections.abc import Callable, Hashable
from typing import Any, Self, TypeVar

import torch
from transformers import PreTrainedModel

from kvboost_hf import forks

T = TypeVar("T")


class KeptOnModel:
    """Base of objects that are kept on a model, one per class, and never copied or saved with it."""

    _attribute: str

    def __init_subclass__(cls) -> None:
        cls._attribute = f"_kvboost_hf_{cls.__name__}"

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        """The object on `model`, made at the first call."""
        kept = model.__dict__.get(cls._attribute)  # first, for torch.compile traces this, and cannot make a lock
        if kept is None:
            kept = model.__dict__.setdefault(cls._attribute, cls())
        assert isinstance(kept, cls)
        return kept

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()  # a copied or loaded model starts afresh

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)()


class _Findings(KeptOnModel):
    def __init__(self) -> None:
        self.lock = forks.rlock()
        self.known: dict[Hashable, Any] = {}


def remember(model: PreTrainedModel, key: Hashable, find: Callable[[], T]) -> T:
    """The result of `find()`, which is called once per model and `key`.

    Args:
        model: The model that the result is about.
        key: Names the finding, and all that it depends on besides the model, such as the dtype.
        find: Not called again once it has returned.
    """
    findings = _Findings.of(model)
    found: T = findings.known.get(key, findings)  # a look-up is atomic: only the first call needs the lock
    if found is findings:
        with findings.lock:
            if key not in findings.known:
                findings.known[key] = find()
            found = findings.known[key]
    return found


def recall(model: PreTrainedModel, key: Hashable) -> Any:
    """The result that `remember` has for `key`, or None."""
    return _Findings.of(model).known.get(key)


def attempt(probe: Callable[[], T], failure: str) -> T | str:
    """The result of a probe that runs a model, or `failure` with the error it raised.

    Raises:
        torch.OutOfMemoryError: from the probe, since it says nothing of the model.
    """
    try:
        return probe()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # models fail in ways of their own on what they were not written for
        return f"{failure} ({type(error).__name__}: {error})"
