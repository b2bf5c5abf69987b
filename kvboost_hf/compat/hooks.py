"""Hooks on parts of a model: on its decoder layers, and behind the last one. They are counted as this package's."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

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
        own_hook(module.register_forward_pre_hook, _LayerHook(called, idx).before, with_kwargs=True)
        for idx, module in enumerate(decoder_layers(model))
    ]


LAST = -1  # in place of a layer's number: the last hidden states, which the head of a model takes
_ASKED = "output_hidden_states"


class Shown(NamedTuple):
    """What a forward shows of hidden states, or what is to be shown in their place."""

    last: torch.Tensor  # the last ones, which go to the head of the model, [batch, m, hidden_size]
    # Those that transformers returns as `hidden_states`, by their numbers there; None for others.
    layers: tuple[torch.Tensor | None, ...] = ()

    def of(self, layer: int) -> torch.Tensor | None:
        """The hidden states of a layer, or of `LAST`; None if they are not shown."""
        if layer == LAST:
            return self.last
        return self.layers[layer] if layer < len(self.layers) else None


class ShowsHidden(Protocol):
    """A cache that takes the hidden states of its forwards.

    Attributes:
        hidden_layers: The layers whose hidden states it wants, besides `LAST`, by their numbers.
        take_hidden_states: Takes what a forward has computed, and returns what is to be shown; None to leave it.
    """

    hidden_layers: Sequence[int]
    take_hidden_states: Any


def hook_hidden_states(model: PreTrainedModel, *, selects: bool | None = None, count: int = 0) -> None:
    """Pass the hidden states of each forward to its cache, if that is one that `ShowsHidden`.

    What that returns goes to the head of the model, and to the caller that has asked for it. The hooks stay on the
    model; a model whose head cannot be told from the rest gets none.

    Args:
        model: The model.
        selects: Whether the model returns the layers that numbers choose, and not all; None leaves what is known.
        count: The hidden states that the model returns if all are asked for; 0 leaves what is known.
    """
    if (inner := text_model(model)) is None:
        return
    with _hooking:
        owners = [getattr(hook, "__self__", None) for hook in inner._forward_hooks.values()]
        hook = next((owner for owner in owners if isinstance(owner, _HiddenHook)), None)
        if hook is None:
            hook = _HiddenHook()
            own_hook(inner.register_forward_pre_hook, hook.before, with_kwargs=True)
            own_hook(inner.register_forward_hook, hook.after, with_kwargs=True)
        hook.selects = hook.selects if selects is None else selects
        hook.count = count or hook.count


_hooking = forks.lock()


class OwnHooks:
    """Counts the hooks of this package. All others are somebody else's.

    Attributes:
        lock: Held while PyTorch has counted one of them, and this package has not yet.
        registered: How many this package has registered.
    """

    lock = forks.rlock()
    registered = 0


def own_hook(register: Callable[..., RemovableHandle], hook: Callable[..., Any], **how: Any) -> RemovableHandle:
    """Register a hook of this package by a method such as `module.register_forward_hook`, and count it as one."""
    with OwnHooks.lock:
        handle = register(hook, **how)
        OwnHooks.registered += 1
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
    selects = True  # numbers choose layers; False: any number gives all
    count = 0  # hidden states in all; 0 if that is not known

    def before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        layers: Sequence[int] = getattr(cache_in(kwargs), "hidden_layers", ())
        if all(layer == LAST for layer in layers) and not (layers and _may_cut(module)):
            return None
        return args, _asking_for(module, kwargs, layers, selects=self.selects)

    def after(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        cache = cache_in(kwargs)
        take = getattr(cache, "take_hidden_states", None)
        return _with_hidden_states(output, take, kwargs.get(_ASKED), self.count) if take is not None else None


class _Also(list[int]):
    """The layers whose hidden states a forward is to show.

    Args:
        layers: Their numbers.
        asked: The value that the caller has passed.
    """

    def __init__(self, layers: Sequence[int], asked: Any) -> None:
        super().__init__(layers)
        self.asked = asked


class _All(int):
    """All layers, for a caller that has asked for none, and a model that takes no choice: an int that is true."""

    asked = False


# A compiled model breaks its graph here, rather than tracing what is not arithmetic.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _asking_for(module: Any, kwargs: dict[str, Any], layers: Sequence[int], *, selects: bool) -> dict[str, Any]:
    """The arguments by which a forward shows these layers, and those that its caller has asked for."""
    asked = kwargs.get(_ASKED)
    asked = getattr(module.config, _ASKED, None) if asked is None else asked
    if asked is True or (asked and not selects):
        return kwargs
    if not selects:
        return {**kwargs, _ASKED: _All(1)}
    theirs = [] if not asked else [asked] if isinstance(asked, int) else list(asked)
    ours = [layer for layer in layers if layer != LAST] or [0]  # a model that is asked for any computes all tokens
    return {**kwargs, _ASKED: _Also([*ours, *theirs], asked)}


def _may_cut(module: Any) -> bool:
    """Whether a model may compute the last tokens alone in its last layers: Gemma 4, in those that share K/V."""
    return bool(getattr(module.config, "num_kv_shared_layers", 0))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _with_hidden_states(output: Any, take: Any, asked: Any, count: int) -> Any:
    """The output to give in place of `output`, or None."""
    in_tuple = isinstance(output, tuple)
    last = output[0] if in_tuple else getattr(output, "last_hidden_state", None)
    if not isinstance(last, torch.Tensor) or last.ndim != 3:
        return None
    layers = getattr(output, "hidden_states", None) or ()
    if count not in (0, len(layers)):  # transformers 5.17 leaves out others of a list, and numbers it otherwise
        layers = ()
    shown = Shown(last, tuple(layers))
    wanted: Shown = take(shown)
    if in_tuple:
        return (wanted.last, *output[1:]) if wanted.last is not last else None
    if isinstance(asked, _Also | _All):
        found = wanted.layers
        if not asked.asked:
            rest = {name: value for name, value in output.items() if name != "hidden_states"}
            return type(output)(**{**rest, "last_hidden_state": wanted.last})
        theirs = {n % len(found) for n in ([asked.asked] if isinstance(asked.asked, int) else asked.asked)}
        wanted = wanted._replace(layers=tuple(each if n in theirs else None for n, each in enumerate(found)))
    if wanted is shown:
        return None
    output["last_hidden_state"] = wanted.last
    if layers:
        output["hidden_states"] = wanted.layers
    return output
