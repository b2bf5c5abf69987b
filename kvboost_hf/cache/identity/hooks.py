"""Forward hooks that others have put on a model, and functions in place of its forward: which may change what it
computes, and whether they do.
"""

import functools
import types
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from kvboost_hf.cache.identity.foreign import is_of_package, is_written_where_it_says, name_of, only_looks
from kvboost_hf.compat import own_hook, text_model

HOOK_WATCH = "_kvboost_hf_hook_watch"
FORWARD_WATCH = "_kvboost_hf_forward_watch"
# What a whole model passes on as it is to the part of it that computes hidden states.
_PASSED_ON = ("input_ids", "attention_mask", "position_ids", "inputs_embeds")


def hooks_of_all_modules() -> tuple[dict[int, Any], dict[int, Any]]:
    """Forward hooks that torch calls for each module, before and after its forward."""
    return nn_module._global_forward_pre_hooks, nn_module._global_forward_hooks


class HookWatch:
    """Detects hooks of others that change what a module computes.

    It compares the tensors before the first hook with those behind the last. Most hooks count or record. Once a hook
    replaces or writes to a tensor, nothing of the model can be reused or stored.

    Of a whole model it is told by the hook of this package what that has passed on, and what the forward was given
    then: no hook in front changes what is recorded.
    """

    leaves_kv_alone = True

    def __init__(self) -> None:
        self.alters: Any = None  # the first hook that may have changed a tensor
        self.compiled = False  # hooks have run inside a compiled graph, unobserved
        self.handles: list[RemovableHandle] = []
        self._before: dict[int, list[tuple[Any, Any]]] = {}  # by thread, or by cache

    def first(self, module: nn.Module, *given: Any) -> None:
        """Called before the others."""
        if torch.compiler.is_compiling():
            self.compiled = True
        else:
            self.pass_on(get_ident(), given)

    def last(self, module: nn.Module, *given: Any) -> None:
        """Called after the others."""
        if not torch.compiler.is_compiling():
            self.compare(get_ident(), module, given)

    def pass_on(self, key: int, given: tuple[Any, ...]) -> None:
        """Note what the hooks of others are given, under a key for `compare`."""
        self._before[key] = _marks(given)

    def compare(self, key: int, module: nn.Module, given: tuple[Any, ...]) -> None:
        """Compare it with what they have made of it."""
        before = self._before.pop(key, None)
        if before is None or self.alters is not None:
            return
        if not _are_same(_marks(given), before):
            hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
            self.alters = next((hook for hook in hooks if not only_looks(hook)), self)

    @property
    def reason(self) -> str | None:
        """Why nothing is known of what the module computes, or None."""
        if self.alters is not None:
            return f"a forward hook ({name_of(self.alters)}) changes what the model computes"
        return "forward hooks are compiled, so that it cannot be seen what they change" if self.compiled else None

    def __reduce__(self) -> Any:
        return type(self), ()


class ForwardWatch:
    """Detects a function in place of a whole model's forward that changes what the model is given.

    Most such functions count tokens or take the time, and call the forward that they replace. It compares what the
    model is called with to what reaches the part of it that computes hidden states.
    """

    leaves_kv_alone = True

    def __init__(self, function: Any) -> None:
        self.alters = False
        self.code = code_of(function)
        self.handles: list[RemovableHandle] = []
        self._name = name_of(function)
        self._given: dict[int, list[Any]] = {}  # by thread

    def calls(self, kwargs: dict[str, Any]) -> None:
        """The model is about to be called with these arguments."""
        self._given[get_ident()] = [_marks((kwargs.get(name),)) for name in _PASSED_ON]

    def before(self, module: nn.Module, args: Any, kwargs: dict[str, Any] | None = None) -> None:
        """Called before the forward of the part that computes hidden states."""
        if torch.compiler.is_compiling():
            return
        given = self._given.pop(get_ident(), None)
        if given is not None:
            named = dict(zip(("input_ids", "attention_mask", "position_ids"), args, strict=False)) | (kwargs or {})
            now = [_marks((named.get(name),)) for name in _PASSED_ON]
            self.alters = self.alters or not all(map(_are_same, now, given))

    @property
    def reason(self) -> str | None:
        """Why K/V of the forward under way is not that of the model, or None."""
        return f"a function in place of its forward ({self._name}) changes what it is given" if self.alters else None

    def __reduce__(self) -> Any:
        return type(self), (None,)


def code_of(function: Any) -> Any:
    """The code of a function, which tells it from others: so it may be defined anew for each call."""
    function = _unbound(function)
    return function.__code__ if isinstance(function, types.FunctionType) else function


def _unbound(function: Any) -> Any:
    return function.__func__ if isinstance(function, types.MethodType) else function


def watch_forward(model: nn.Module) -> ForwardWatch | None:
    """The watch over a function of others in place of a whole model's forward; None if there is none to be watched."""
    attributes = model.__dict__
    function, watch = attributes.get("forward"), attributes.get(FORWARD_WATCH)
    watch = watch if watch is not None and watch.handles and watch.code is code_of(function) else None
    inner = text_model(model) if isinstance(model, PreTrainedModel) and function is not None else None
    bare = _unbound(function)
    of_others = _is_function_of_others(bare) or not is_written_where_it_says(bare)  # functools.wraps copies names
    if inner is None or not of_others or hasattr(bare, "_torchdynamo_orig_callable"):  # compiled
        unwatch_forward(model)
        return None
    if watch is None:
        unwatch_forward(model)
        watch = attributes[FORWARD_WATCH] = ForwardWatch(function)
        watch.handles.append(own_hook(inner.register_forward_pre_hook, watch.before, prepend=True, with_kwargs=True))
        _order_below(inner._forward_pre_hooks)
    return None if watch.alters else watch


def unwatch_forward(model: nn.Module) -> None:
    """Undo `watch_forward`."""
    watch: ForwardWatch | None = model.__dict__.pop(FORWARD_WATCH, None)
    for handle in watch.handles if watch is not None else ():
        handle.remove()


def note_call(model: nn.Module, kwargs: dict[str, Any]) -> None:
    """Tell the watch over a model's forward, if there is one, what the model is called with."""
    watch: ForwardWatch | None = model.__dict__.get(FORWARD_WATCH)
    if watch is not None:
        watch.calls(kwargs)


def _are_same(now: list[tuple[Any, Any]], before: list[tuple[Any, Any]]) -> bool:
    """Whether these are the same tensors, and nobody has written to them."""
    return len(now) == len(before) and all(
        a is b and bool(torch.equal(m, n) if isinstance(m, torch.Tensor) else m == n)
        for (a, m), (b, n) in zip(now, before, strict=True)
    )


def _marks(given: tuple[Any, ...]) -> list[tuple[Any, Any]]:
    """All tensors in the arguments of a hook, each with a mark that changes when it is written to."""
    return [(tensor, _mark(tensor)) for tensor in _tensors_in(given)]


def _mark(tensor: torch.Tensor) -> Any:
    """The version; on a CPU, and where there is none, the values, bit by bit."""
    if tensor.device.type != "cpu" and not tensor.is_inference():
        return tensor._version
    return tensor.detach().reshape(-1).clone().view(torch.uint8)


def watch_hooks(module: nn.Module) -> tuple[list[Any], HookWatch | None]:
    """The hooks of a module that may change what is computed, and the watch over those of others, if there are any."""
    attributes = module.__dict__
    found = [
        hook
        for name in ("_forward_pre_hooks", "_forward_hooks")
        for hook in list(attributes[name].values())
        if not only_looks(hook)
    ]
    watch: HookWatch | None = attributes.get(HOOK_WATCH)
    before = list(attributes["_forward_pre_hooks"].values())
    whole = any(_is_method_of(hook, "changes_arguments") for hook in before)
    # Hooks behind the forward of a whole model see its logits: too late to change K/V.
    watched = [hook for hook in found if hook in before] if whole else found
    if not any(map(_is_function_of_others, watched)):
        if watch is not None:  # those that were watched are gone
            del attributes[HOOK_WATCH]
            for handle in watch.handles:
                handle.remove()
        return found, None
    if watch is None:
        watch = attributes[HOOK_WATCH] = HookWatch()
    if whole:  # the hook of this package stands among them
        return found, watch
    for register, hooks in (
        (module.register_forward_pre_hook, attributes["_forward_pre_hooks"]),
        (module.register_forward_hook, attributes["_forward_hooks"]),
    ):
        # Hooks of this package that change the output do so after others have seen it.
        behind = [n for n, hook in list(hooks.items()) if _is_method_of(hook, "stands_behind_others")]
        numbers = [number for number in list(hooks) if number not in behind]
        methods = [(n, hook) for n, hook in list(hooks.items()) if isinstance(hook, types.MethodType)]
        ours = {hook.__name__: number for number, hook in methods if hook.__self__ is watch}
        if not ours:
            watch.handles.append(own_hook(register, watch.first, prepend=True, with_kwargs=True))
            watch.handles.append(own_hook(register, watch.last, with_kwargs=True))
        elif numbers[0] != ours["first"] or numbers[-1] != ours["last"]:
            hooks.move_to_end(ours["first"], last=False)
            hooks.move_to_end(ours["last"])
        if behind and list(hooks)[-len(behind) :] != behind:
            for number in behind:
                hooks.move_to_end(number)
        _order_below(hooks)
    return found, watch


def _order_below(hooks: Any) -> None:
    """Give the `dict` below an `OrderedDict` the same order, in which torch.compile of torch 2.11 looks for hooks.

    Where they differ, as after `prepend=True`, it fails: https://github.com/pytorch/pytorch/issues/160083.
    """
    numbers = list(hooks)
    if list(dict.keys(hooks)) != numbers:
        with suppress(KeyError):  # another thread has just removed one
            # In one call, during which no other thread runs: its forward would miss the hook that is taken out.
            deque(map(hooks.__setitem__, numbers, map(hooks.pop, numbers)), maxlen=0)


def _is_method_of(hook: Any, mark: str) -> bool:
    """Whether a hook is a method of an object of this package that has such a mark."""
    return isinstance(hook, types.MethodType) and hasattr(hook.__self__, mark)


def _is_function_of_others(hook: Any) -> bool:
    """Whether a hook is neither of a package nor a method of an object of one."""
    while isinstance(hook, functools.partial | types.MethodType):
        if isinstance(hook, types.MethodType) and is_of_package(type(hook.__self__)):
            return False
        hook = hook.func if isinstance(hook, functools.partial) else hook.__func__
    return not is_of_package(hook if isinstance(hook, types.FunctionType) else type(hook))


def _tensors_in(given: Any) -> Iterator[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, dict):
        for inner in given.values():
            yield from _tensors_in(inner)
    elif isinstance(given, list | tuple):
        for inner in given:
            yield from _tensors_in(inner)
