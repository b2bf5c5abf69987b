"""Hooks on parts of a model: on its decoder layers, and behind the last one. They are counted as this package's."""

import itertools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from kvboost_hf import forks
from kvboost_hf.compat.forwards import cache_in
from kvboost_hf.compat.models import decoder_layers, text_model


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


def hook_hidden_states(model: PreTrainedModel) -> None:
    """Pass the last hidden states of each forward to its cache, if the cache has `take_hidden_states`.

    What that returns goes to the head of the model. The hook stays on the model; a model whose head cannot be told
    from the rest gets none.
    """
    if (inner := text_model(model)) is None:
        return
    with _hooking:
        if not any(isinstance(getattr(hook, "__self__", None), _HiddenHook) for hook in inner._forward_hooks.values()):
            own_hook(inner.register_forward_hook(_HiddenHook().after, with_kwargs=True))


_hooking = forks.lock()
_own = itertools.count()


class OwnHooks:
    """Attribute `registered`: how many hooks this package has registered. All others are somebody else's."""

    registered = 0


def own_hook(handle: RemovableHandle) -> RemovableHandle:
    """Count a hook as one of this package."""
    OwnHooks.registered = next(_own) + 1
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


class _HiddenHook:
    """The hook behind the part of a model that computes hidden states. It holds no reference to the model."""

    leaves_kv_alone = True  # read by the fingerprint
    stands_behind_others = True  # who are watched for changes of the output

    def after(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        cache = cache_in(kwargs)
        take = getattr(cache, "take_hidden_states", None)
        return _with_hidden_states(output, take) if take is not None else None


# A compiled model breaks its graph here, rather than tracing what is not arithmetic.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _with_hidden_states(output: Any, take: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The output to give in place of `output`, or None."""
    in_tuple = isinstance(output, tuple)
    states = output[0] if in_tuple else getattr(output, "last_hidden_state", None)
    if not isinstance(states, torch.Tensor) or states.ndim != 3:
        return None
    wanted = take(states)
    if wanted is states:
        return None
    if in_tuple:
        return (wanted, *output[1:])
    output["last_hidden_state"] = wanted
    return output
