"""Forward hooks that pass the arguments and the output of each forward to the cache."""

import inspect
from typing import Any, Protocol, TypeGuard

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from kvboost_hf.cache.identity.fingerprint import ModelState
from kvboost_hf.cache.identity.hooks import FORWARD_WATCH, note_call
from kvboost_hf.compat import cache_argument, cache_in, forward_arguments, own_hook, take_newest_name, with_cache_by

Kwargs = dict[str, Any]
Changed = tuple[tuple[Any, ...], Kwargs] | None  # arguments in place of the caller's


class HookedCache(Protocol):
    """A cache that wants to see each forward of its model."""

    @property
    def is_compileable(self) -> bool:
        """See `Cache.is_compileable`."""

    def before_forward(self, model: PreTrainedModel, kwargs: Kwargs) -> Kwargs:
        """Called with the keyword arguments of a forward; returns those to run it with."""

    def after_forward(self, output: Any) -> Any:
        """Called with what the forward has returned; returns what to return in its place, or None."""


class Attachment(Protocol):
    """Gives caches to the calls of an attached model."""

    def stand_in(self, model: PreTrainedModel, theirs: Any, kwargs: Kwargs) -> HookedCache | None:
        """The cache to use in place of `theirs`, a caller's own cache or None; None to leave the call alone."""
        ...


class ForwardHook:
    """The hooks of one model. It holds no reference to the model, so that it can be pickled and copied with it."""

    leaves_kv_alone = True  # read by the fingerprint: other hooks may change what a model computes
    changes_arguments = True  # others' hooks on the same module cannot be watched, therefore
    _name = ""  # of the model's argument for a cache, once it is known

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: Kwargs) -> Changed:
        """torch forward pre-hook."""
        if torch.compiler.is_compiling() and _is_compileable(kwargs):
            assert isinstance(model, PreTrainedModel)
            kwargs = self._by_name(model, args, kwargs)
            return (), cache_in(kwargs).before_forward(model, kwargs)
        if torch.compiler.is_compiling() and _is_foreign(kwargs):
            return None
        changed: Changed = self._before(model, args, kwargs)
        return changed

    def after(self, model: nn.Module, args: tuple[Any, ...], kwargs: Kwargs, output: Any) -> Any:
        """torch forward hook."""
        if torch.compiler.is_compiling() and _is_compileable(kwargs):
            return cache_in(kwargs).after_forward(output)
        if torch.compiler.is_compiling() and _is_foreign(kwargs):
            return None
        return self._after(model, kwargs, output)

    def _by_name(self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: Kwargs) -> Kwargs:
        """All arguments by name, with the cache by the one that the model's forward takes."""
        self._name = name = self._name or cache_argument(model)
        kwargs = {**_names(model, args), **kwargs} if args else dict(kwargs)
        return kwargs if name in kwargs else with_cache_by(name, kwargs)

    # A compiled model breaks its graph here, rather than tracing what is not arithmetic.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Kwargs
    ) -> tuple[tuple[Any, ...], Kwargs] | None:
        assert isinstance(model, PreTrainedModel)
        kwargs = self._by_name(model, args, kwargs)
        name = self._name
        cache = kwargs.get(name)
        if not _is_hooked(cache):
            attached = ModelState.of(model).attached
            cache = attached.stand_in(model, cache, kwargs) if attached is not None else None
            if cache is None:
                note_call(model, kwargs)
                return None
            kwargs[name] = cache
        given = cache.before_forward(model, kwargs)
        if FORWARD_WATCH in model.__dict__:
            note_call(model, given)
        return (), given

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after(self, model: nn.Module, kwargs: Kwargs, output: Any) -> Any:
        assert isinstance(model, PreTrainedModel)
        cache = kwargs.get(self._name or cache_argument(model))
        if _is_hooked(cache):
            return cache.after_forward(output)
        return None


def _names(model: PreTrainedModel, args: tuple[Any, ...]) -> dict[str, Any]:
    """Arguments that came by position, by their names."""
    parameters = inspect.signature(model.forward).parameters
    names = tuple(parameters)
    if any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters.values()):  # it passes all of them on
        names = forward_arguments(model).positional
    return dict(zip(names, args, strict=False))


def _is_hooked(cache: Any) -> TypeGuard[HookedCache]:
    return isinstance(cache, Cache) and hasattr(cache, "before_forward")


def _is_compileable(kwargs: Kwargs) -> bool:
    """Whether a forward comes with a cache of a fixed size, whose hooks are tensor operations while compiling."""
    cache = cache_in(kwargs)
    return _is_hooked(cache) and cache.is_compileable


def _is_foreign(kwargs: Kwargs) -> bool:
    """Whether a forward comes with a cache that is not ours and that none of ours will stand in for."""
    cache = cache_in(kwargs)
    return isinstance(cache, Cache) and not _is_hooked(cache) and type(cache) is not DynamicCache


def install(model: PreTrainedModel) -> None:
    """Put the hooks on `model`, unless they are there."""
    with ModelState.of(model).lock:
        take_newest_name(model)
        if not _handles(model):
            hook = ForwardHook()
            own_hook(model.register_forward_pre_hook(hook.before, with_kwargs=True))
            own_hook(model.register_forward_hook(hook.after, with_kwargs=True))


def has_other_hooks(module: nn.Module) -> bool:
    """Whether a module has forward hooks that are not of this package."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return any(not _is_ours(hook) for hook in hooks)


def others_see_output(model: PreTrainedModel) -> bool:
    """Whether a forward hook that is not of this package is given what `model` returns."""
    return any(not _is_ours(hook) for hook in model._forward_hooks.values())


def _handles(model: PreTrainedModel) -> list[Any]:
    return [hook for hook in model._forward_pre_hooks.values() if _is_ours(hook)]


def _is_ours(hook: Any) -> bool:
    return isinstance(getattr(hook, "__self__", None), ForwardHook)
