"""Every kind of layer keeps every promise of `ReuseLayer`, and the contract notices one that does not."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.internals.cache import GrowingLayer, StateLayer, lending_reason, reading_reason
from tests.layer_contract import FORMS, PROMISES, Form, goes_back, goes_two_ways, holds_what_it_was_given, kinds

pytestmark = pytest.mark.daily

Promise = Callable[[Form], None]


@pytest.mark.parametrize("promise", PROMISES, ids=lambda each: each.__name__)
@pytest.mark.parametrize("name", FORMS)
@torch.no_grad()
def test_kind(name: str, promise: Promise) -> None:
    promise(FORMS[name])


def test_no_kind_is_left_out() -> None:
    assert {kind.__name__ for kind in kinds()} == {name.partition(" ")[0] for name in FORMS}


class Shared(GrowingLayer):
    """Its twin is itself."""

    def share(self) -> Any:
        return self


class Lossy(GrowingLayer):
    """It rounds."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().update(key_states.half().float(), value_states, *args, **kwargs)


class Forgetful(StateLayer):
    """It goes back, and leaves its states as they are."""

    def truncate(self, length: int) -> None:
        pass


@pytest.mark.parametrize(
    ("kind", "promise"), [(Shared, goes_two_ways), (Lossy, holds_what_it_was_given), (Forgetful, goes_back)]
)
@torch.no_grad()
def test_the_contract_notices(kind: type, promise: Promise) -> None:
    stateful = issubclass(kind, StateLayer)
    with pytest.raises(AssertionError):
        promise(Form(kind, columns=0 if stateful else 2, conv=stateful, recurrent=stateful))


def test_what_cannot_be_lent_or_read_says_why() -> None:
    """A reason of the cache comes before those of its layers."""
    growing, state, opaque = (FORMS[name].make() for name in ("GrowingLayer", "StateLayer", "OpaqueLayer"))
    rigid = "its cache has layers of the kind OpaqueLayer"
    lent: list[tuple[str | None, list[Any], str | None, str | None]] = [
        (None, [growing], None, None),
        ("why", [growing], "why", "why"),
        ("why", [state], "why", "why"),
        (None, [growing, state], "its cache has layers of the kind StateLayer", None),
        (None, [opaque], rigid, rigid),
    ]
    for reason, layers, lending, reading in lent:
        live: Any = SimpleNamespace(plain_reason=reason, layers=layers)
        assert (lending_reason(live), reading_reason(live)) == (lending, reading)
