"""Hooks on the decoder layers of a model, and a count of the hooks that this package has registered."""

import itertools
import weakref
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from kvboost_hf.compat.models import decoder_layers


class BeforeLayers(Protocol):
    """Receives the calls of `hook_layers`."""

    def before_layer(self, idx: int, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """A forward pre-hook of decoder layer `idx`."""
        ...


def hook_layers(model: PreTrainedModel, called: BeforeLayers) -> list[RemovableHandle]:
    """Register forward pre-hooks on the decoder layers of a model.

    Args:
        model: The model.
        called: Called before each forward of a layer, but not by a copy of the model. It is referred to weakly.

    Returns:
        The handles that remove the hooks, one for each layer.
    """
    return [
        own_hook(module.register_forward_pre_hook(_LayerHook(called, idx).before, with_kwargs=True))
        for idx, module in enumerate(decoder_layers(model))
    ]


_own = itertools.count()
_registered = 0


def own_hooks() -> int:
    """How many hooks this package has registered so far."""
    return _registered


def own_hook(handle: RemovableHandle) -> RemovableHandle:
    """Count a hook as one of this package."""
    global _registered
    _registered = next(_own) + 1
    return handle


class _LayerHook:
    """A hook that the fingerprint of the model ignores."""

    leaves_kv_alone = True

    def __init__(self, called: BeforeLayers | None, idx: int) -> None:
        self._called = weakref.ref(called) if called is not None else lambda: None
        self._idx = idx

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # it looks at who else runs the model
    def before(self, module: nn.Module, args: Any, kwargs: dict[str, Any] | None = None) -> Any:
        called = self._called()
        if called is None or kwargs is None:  # torch leaves them out when another thread has just removed the hook
            return None
        return called.before_layer(self._idx, module, args, kwargs)

    def __reduce__(self) -> Any:
        return _LayerHook, (None, self._idx)
