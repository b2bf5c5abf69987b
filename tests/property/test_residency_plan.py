"""What holds of every plan."""

import re
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvboost_hf.config import StreamingConfig
from tests.internals.offload import ModelSizes, ResidencyPlan, Ring, plan_residency

LAYERS = st.one_of(
    st.lists(st.integers(1, 400), min_size=1, max_size=24),
    st.builds(lambda nbytes, count: [nbytes] * count, st.integers(1, 400), st.integers(1, 80)),
    st.lists(st.sampled_from([100, 257]), min_size=1, max_size=40),
)
SIZES = st.builds(
    lambda layers, other, kv, activation: ModelSizes(
        layer_bytes=tuple(layers), other_bytes=other, kv_bytes=kv, activation_bytes=activation
    ),
    LAYERS,
    *[st.integers(0, 1000)] * 3,
)
BUDGETS, SLOTS = st.integers(1, 40_000), st.integers(2, 5)


def plan(sizes: ModelSizes, budget: int, n_slots: int = 2, free: int | None = 10**9, **asked: object) -> ResidencyPlan:
    config = StreamingConfig(vram_budget=budget, n_staging_slots=n_slots, **asked)  # type: ignore[arg-type]
    return plan_residency(sizes, config, free_bytes=free)


def least(sizes: ModelSizes, n_slots: int) -> int:
    """The budget that an error names."""
    try:
        return plan(sizes, 1, n_slots).device_bytes
    except ValueError as error:
        found = re.search(r"at least (\d+) bytes", str(error))
        assert found is not None
        return int(found[1])


@given(SIZES, BUDGETS, SLOTS, st.integers(0, 100))
def test_no_plan_exceeds_its_budget(sizes: ModelSizes, budget: int, n_slots: int, reserved: int) -> None:
    try:
        found = plan(sizes, budget, n_slots, reserved=reserved)
    except ValueError:
        return
    layers = sizes.layer_bytes
    streamed = set(range(len(layers))) - set(found.resident)
    slots = n_slots * max((layers[i] for i in streamed), default=0)
    fixed = sizes.other_bytes + sizes.kv_bytes + sizes.activation_bytes + reserved
    assert found.device_bytes == fixed + slots + sum(layers[i] for i in found.resident) <= budget
    assert found.n_slots == (n_slots if streamed else 0)
    assert not 0 < len(streamed) <= n_slots


@given(SIZES, BUDGETS, SLOTS, st.one_of(st.none(), st.integers(1, 20_000)), st.booleans(), st.booleans())
def test_every_layer_is_in_one_place(
    sizes: ModelSizes, budget: int, n_slots: int, host: int | None, disk: bool, shared: bool
) -> None:
    folder = "layers" if disk or host is not None else None
    try:
        found = plan(sizes, budget, n_slots, None if shared else 10**9, host_budget=host, disk_folder=folder)
    except ValueError:
        return
    places = [found.resident, found.in_host, found.on_disk]
    assert sorted(sum(places, ())) == list(range(len(sizes.layer_bytes)))
    assert all(list(place) == sorted(place) for place in places)
    if folder is None or shared:
        assert not (found.on_disk if folder is None else found.in_host)
    elif found.on_disk:
        assert found.host_bytes <= (host or 0)


@given(SIZES, BUDGETS, st.integers(0, 5000), SLOTS)
def test_more_budget_never_keeps_fewer_layers(sizes: ModelSizes, budget: int, more: int, n_slots: int) -> None:
    budget = max(budget, least(sizes, n_slots))
    tight, wide = plan(sizes, budget, n_slots), plan(sizes, budget + more, n_slots)
    assert len(wide.resident) >= len(tight.resident)
    assert wide.streamed_bytes <= tight.streamed_bytes


@given(SIZES, SLOTS)
def test_the_least_budget_is_the_least(sizes: ModelSizes, n_slots: int) -> None:
    budget = least(sizes, n_slots)
    assert plan(sizes, budget, n_slots).device_bytes == budget
    assume(budget > 1)
    with pytest.raises(ValueError, match=f"at least {budget} bytes"):
        plan(sizes, budget - 1, n_slots)


@given(st.integers(1, 400), st.integers(6, 80), BUDGETS)
def test_layers_of_one_size_stay_as_the_formula_says(nbytes: int, count: int, budget: int) -> None:
    sizes = ModelSizes(layer_bytes=(nbytes,) * count, other_bytes=7, kv_bytes=5, activation_bytes=3)
    wanted = (budget - 15 - 2 * nbytes) // nbytes
    assume(wanted >= 0)
    resident = plan(sizes, budget).resident
    assert len(resident) == (wanted if wanted < count - 2 else count)
    gaps = [after - before for before, after in pairwise([*resident, count])]
    assert not gaps or (resident[0] == 0 and max(gaps) - min(gaps) <= 1)


@given(st.data())
def test_no_copy_into_a_slot_is_needless(data: st.DataObject) -> None:
    """Each slot is sent the layer that uses it next, unless it holds it or nobody uses it; the soonest one first."""
    n_layers = data.draw(st.integers(1, 7))
    n_slots = data.draw(st.integers(1, n_layers))
    ring, left, held = Ring(n_layers, n_slots), set[int](), dict[int, int]()
    for _ in range(data.draw(st.integers(1, 12))):
        layer = data.draw(st.integers(0, n_layers - 1))
        what = data.draw(st.sampled_from(["run", "run", "run", "leave", "join", "forget"]))
        if what == "leave":
            ring.leave(layer)
            left.add(layer)
            held = {slot: at for slot, at in held.items() if at != layer}
        elif what == "join":
            ring.join(layer)
            left.discard(layer)
        elif what == "forget":
            ring.forget(layer)
            held.pop(layer % n_slots, None)
        behind = layer + (what == "run" and data.draw(st.booleans()))  # the layer, or the one behind it
        coming = [at % n_layers for at in range(behind, behind + n_layers) if at % n_layers not in left]
        wanted = [at for at in coming if at == next(each for each in coming if each % n_slots == at % n_slots)]
        wanted = [at for at in wanted if held.get(at % n_slots) != at]
        assert ring.missing(behind) == wanted
        for at in wanted:
            ring.sent(at)
            held[at % n_slots] = at
            assert ring.holds(at)
        assert ring.missing(behind) == []
