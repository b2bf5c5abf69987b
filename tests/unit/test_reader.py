"""What values hold is read through every kind of container: as deep as promised, and no deeper."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.internals.cache import Reached, Reader

pytestmark = pytest.mark.daily

DEEPEST, MOST = 4, 1000


class Box:
    """With an attribute."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner


class Slotted:
    """With a slot."""

    __slots__ = ("inner", "unset")

    def __init__(self, inner: Any) -> None:
        self.inner = inner


class Holder(nn.Module):
    """With an attribute that is no parameter."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = (inner,)


def _closed(inner: Any) -> Any:
    def function() -> Any:
        return inner

    return function


def _default(inner: Any) -> Any:
    def function(given: Any = inner, *, named: Any = None) -> Any:
        return given

    return function


def _named(inner: Any) -> Any:
    def function(*, named: Any = inner) -> Any:
        return named

    return function


# How many steps deeper each is than what is in it.
KINDS: dict[str, tuple[Callable[[Any], Any], int]] = {
    "list": (lambda inner: [1, inner], 1),
    "tuple": (lambda inner: (inner, 1), 1),
    "dict": (lambda inner: {"a": inner}, 1),
    "object": (Box, 1),
    "slots": (Slotted, 1),
    "module": (Holder, 2),
    "partial": (lambda inner: partial(print, inner), 2),
    "partial by name": (lambda inner: partial(print, end=inner), 2),
    "closure": (_closed, 1),
    "default": (_default, 1),
    "default by name": (_named, 1),
}


def read(value: Any, known: Any = ()) -> Reached:
    reached = Reached()
    Reader(reached, set(known)).read(value)
    return reached


@pytest.mark.parametrize("name", KINDS)
def test_as_deep_as_promised(name: str) -> None:
    make, step = KINDS[name]
    for count in range(1, 10):
        leaf = torch.zeros(1)
        value: Any = leaf
        for _ in range(count):
            value = make(value)
        innermost = step * count - 1  # how deep the last container is that has to be opened
        found = read(value)
        assert [each is leaf for each in found.tensors] == ([True] if innermost <= DEEPEST else [])


@pytest.mark.parametrize("make", [list, tuple, set, frozenset, lambda items: dict.fromkeys(items, 1)])
def test_of_large_containers_the_size_is_read(make: Callable[[Any], Any]) -> None:
    kind = type(make([])).__name__
    for count in (MOST, MOST + 1):
        values = read(make(range(count))).values
        assert values[0] == (kind, count) or values[0][:2] == (kind.removeprefix("frozen"), count)
        assert (len(values) > 1 or len(values[0]) > 2) == (count == MOST)


def test_values_that_print_alike_are_told_apart() -> None:
    for one, other in ((1, "1"), (1.5, "1.5"), (None, "None"), (True, "True"), (b"a", "b'a'")):
        assert read([one]).values != read([other]).values
    assert [read(each).values for each in (torch.bfloat16, torch.device("cpu"))] == [["torch.bfloat16"], ["cpu"]]


def test_each_object_once() -> None:
    inner = [torch.zeros(1)]
    assert len(read([inner, inner, {"a": inner}]).tensors) == 1
    assert read([inner], {id(inner)}).tensors == []
    turning: list[Any] = []
    turning.append(turning)
    assert read(turning).values == [("list", 1)]


def test_arrays_are_told_apart_by_all_that_they_are() -> None:
    zeros = np.zeros((2, 3))
    others = [zeros, zeros.T, zeros.astype(np.float32), zeros + 1, zeros.astype(object)]
    assert len({str(read(each).values) for each in others}) == len(others)
    assert read(zeros).values == read(zeros.copy()).values
    bound = Box([torch.zeros(1)])
    assert len(read(bound.__init__).tensors) == 1
