"""Which arguments the forward of a model takes, also where it passes on whatever it is given, and which is its cache.

The cache is called `cache` since transformers 5.24, and `past_key_values` or `cache_params` before. `generate()` and
forwards of a model with our hooks take `cache` with each release. Releases since 5.24 take the names before it by
themselves, with a `FutureWarning`.
"""

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation.utils import ALL_CACHE_NAMES

from kvboost_hf.compat.memo import remember

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
# In this order forwards of transformers take arguments by position.
_USUAL = ("input_ids", "attention_mask", "position_ids")


class ForwardArguments:
    """The arguments of a model's forward.

    A forward with `*args` or `**kwargs` also takes those of what it passes them on to: the function that it wraps, and
    the forward of the class that its own inherits from. If neither names the argument for tokens, as where a model
    runs another one inside, nothing tells what it takes: then any argument may be passed.

    Args:
        positional: Names of arguments that may be passed by position, in their order.
        defaults: All arguments, with their defaults.
        takes_any: Whether any argument may be passed by name.
    """

    def __init__(self, positional: tuple[str, ...], defaults: Mapping[str, Any], *, takes_any: bool) -> None:
        self.positional, self.defaults, self._takes_any = positional, defaults, takes_any

    def __contains__(self, name: str) -> bool:
        return self._takes_any or name in self.defaults


def forward_arguments(model: PreTrainedModel) -> ForwardArguments:
    """The arguments of the forward of a model's class."""
    kind: Any = type(model)
    found: ForwardArguments = _arguments(kind, forward_of(kind))
    return found


def forward_of(kind: type) -> Any:
    """The forward of a class as it is written there: the same object each time, also of a `partialmethod`."""
    return next((vars(each)["forward"] for each in kind.__mro__ if "forward" in vars(each)), None)


@functools.cache
def _arguments(kind: Any, forward: Any) -> ForwardArguments:
    positional: list[str] = []
    defaults: dict[str, Any] = {}
    by_place = by_name = True
    for parameters in _passed_through(kind, forward):
        if by_place:
            positional += [each.name for each in parameters if each.kind in _POSITIONAL and each.name not in defaults]
        named = [each for each in parameters if each.kind in (*_POSITIONAL, inspect.Parameter.KEYWORD_ONLY)]
        defaults |= {each.name: each.default for each in named if each.name not in defaults}
        by_place = by_place and any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters)
        by_name = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
        if not by_place and not by_name:
            break
    if kind.main_input_name in defaults or not by_name:
        return ForwardArguments(tuple(positional), defaults, takes_any=False)
    rest = [name for name in _USUAL if by_place and name not in positional]
    return ForwardArguments((*positional, *rest), defaults, takes_any=True)


def _passed_through(kind: Any, forward: Any) -> Iterator[list[inspect.Parameter]]:
    """The parameters of a forward, and of those that it may pass its arguments on to."""
    classes = kind.__mro__[: kind.__mro__.index(nn.Module)]
    own = [vars(each)["forward"] for each in classes if "forward" in vars(each)]
    for function in (forward, *own[1:]):
        yield _parameters(function)
        yield from _of_inner(function, kind.main_input_name, {id(function)})


def _of_inner(function: Any, main_input: str, seen: set[int]) -> Iterator[list[inspect.Parameter]]:
    """The parameters of the forwards that a function wraps: functions in its closure that take the tokens."""
    for inner in _inside(function):
        if id(inner) not in seen:
            seen.add(id(inner))
            parameters = _parameters(inner)
            if any(each.name == main_input for each in parameters):
                yield parameters
            yield from _of_inner(inner, main_input, seen)


def _parameters(function: Any) -> list[inspect.Parameter]:
    """The parameters of a function, without `self`."""
    if isinstance(function, functools.partialmethod):
        function = function.func
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # it is no function of Python's, and may take anything
        return list(inspect.signature(lambda *args, **kwargs: None).parameters.values())
    return [each for each in found if each.name != "self"]


def _inside(function: Any) -> list[Callable[..., Any]]:
    """The functions that a function may call: those in its closure, or, of an object with `__call__`, on it."""
    while isinstance(function, functools.partial | functools.partialmethod | types.MethodType):
        function = function.__func__ if isinstance(function, types.MethodType) else function.func
    held: list[Any] = []
    if isinstance(function, types.FunctionType):
        for cell in function.__closure__ or ():
            try:
                held.append(cell.cell_contents)
            except ValueError:  # not set yet
                continue
    else:
        held += getattr(function, "__dict__", {}).values()
    return [each for each in held if isinstance(each, types.FunctionType | types.MethodType | functools.partial)]


# What generate() and the outputs of models call it with the installed release.
CACHE: str = ALL_CACHE_NAMES[0]
_NEWEST = "cache"
_OLDER = ("past_key_values", "cache_params")
_NAMES = tuple(dict.fromkeys((CACHE, *_OLDER)))


def cache_argument(model: PreTrainedModel) -> str:
    """The argument of forward that takes a cache; empty if there is none."""
    return remember(model, cache_argument, lambda: _cache_argument(model))


def _cache_argument(model: PreTrainedModel) -> str:
    named = inspect.signature(model.forward).parameters  # before what it may pass on to another forward
    return next((name for each in (named, forward_arguments(model)) for name in _NAMES if name in each), "")


def cache_in(kwargs: Mapping[str, Any]) -> Any:
    """The cache among the arguments of generate() or of a forward, or None."""
    return next((kwargs[name] for name in _NAMES if kwargs.get(name) is not None), None)


def with_cache_by(name: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of generate() or of a forward, with a cache by `name` that was passed by another name.

    Before transformers 5.24, generate_batch() passes pages as `cache`, which are no `Cache`: they stay where they are.
    """
    if not name or name in kwargs:
        return kwargs
    others = _OLDER if name == _NEWEST else (_NEWEST,) if isinstance(kwargs.get(_NEWEST), Cache) else ()
    given = next((each for each in others if each in kwargs), None)
    return {name if each == given else each: value for each, value in kwargs.items()} if given else kwargs


def take_newest_name(model: PreTrainedModel) -> None:
    """Let `generate()` of the model's class take `cache` with releases before transformers 5.24, too."""
    kind: Any = type(model)
    generate = getattr(kind, "generate", None)
    if CACHE != _NEWEST and generate is not None and not hasattr(generate, "leaves_kv_alone"):
        kind.generate = _with_newest_name(generate)


def _with_newest_name(generate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(generate)
    def renamed(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        return generate(self, *args, **with_cache_by(cache_argument(self), kwargs))

    renamed.leaves_kv_alone = True  # type: ignore[attr-defined]  # read by the fingerprint
    return renamed
