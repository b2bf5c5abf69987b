"""Which arguments the forward of a model takes, also where it passes on whatever it is given."""

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

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
