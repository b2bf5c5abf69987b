"""The simulated link and computation: exact cases, the ring that misses, and what planning concludes from it."""

import pytest

from benchmarks.ring import Pass, Successor, next_of_slot, simulate
from kvboost_hf.config import StreamingConfig
from tests.internals.offload import ModelSizes, plan_residency

LAYERS = 64


def ahead(layer: int, streamed: int, n_slots: int) -> int:
    """As many layers ahead as there are slots, in whatever slot that one belongs: what misses."""
    return (layer + n_slots) % streamed


def run(resident: list[int], compute: float, *, layers: int = LAYERS, n_slots: int = 2) -> Pass:
    """In units of the time that a layer takes to be copied."""
    return simulate([1] * layers, [compute] * layers, resident, n_slots=n_slots, link_bytes_per_s=1)


def spread(count: int) -> list[int]:
    return [i * LAYERS // count for i in range(count)]


def ends(count: int) -> list[int]:
    return [*range(count // 2), *range(LAYERS - (count - count // 2), LAYERS)]


def test_bound_by_copies() -> None:
    assert run([], 0.25, layers=8) == Pass(seconds=8, stall_s=6, bytes_copied=8, misses=0)


def test_bound_by_computation() -> None:
    assert run([], 2, layers=8) == Pass(seconds=16, stall_s=0, bytes_copied=8, misses=0)


def test_one_more_layer_than_slots() -> None:
    """Layers 0 and 2 share a slot: each can only be copied when the other has been computed."""
    assert run([], 1, layers=3) == Pass(seconds=4, stall_s=1, bytes_copied=3, misses=0)


def test_nothing_streamed() -> None:
    assert run(list(range(LAYERS)), 1) == Pass(seconds=LAYERS, stall_s=0, bytes_copied=0, misses=0)


def test_a_layer_that_is_larger_takes_longer() -> None:
    assert simulate([1, 5, 1, 1], [0] * 4, [], n_slots=2, link_bytes_per_s=2).seconds == 4


@pytest.mark.daily
@pytest.mark.parametrize(("streamed", "misses"), [(6, 0), (7, 2), (8, 0)])
def test_a_ring_that_runs_ahead_misses(streamed: int, misses: int) -> None:
    found = simulate([1] * streamed, [0.25] * streamed, [], n_slots=2, link_bytes_per_s=1, successor=ahead)
    assert (found.misses, found.bytes_copied) == (misses, streamed + misses)


@pytest.mark.daily
@pytest.mark.parametrize("n_slots", [1, 2, 3, 4])
def test_the_next_of_the_slot_never_misses(n_slots: int) -> None:
    rule: Successor = next_of_slot
    for streamed in range(n_slots, 14):
        assert sorted(rule(i, streamed, n_slots) for i in range(streamed)) == list(range(streamed))
        found = run([], 0.5, layers=streamed, n_slots=n_slots)
        assert (found.misses, found.bytes_copied) == (0, streamed)


@pytest.mark.parametrize("compute", [0.015625, 0.25, 0.5, 0.75, 1, 1.5, 2])
@pytest.mark.parametrize("n_slots", [2, 3, 4])
def test_rounding_up_to_a_multiple_of_the_slots_does_not_pay(n_slots: int, compute: float) -> None:
    """It costs the copies of the layers that it adds, and saves 2% at most, where both take about equally long."""
    for streamed in range(n_slots + 1, LAYERS - n_slots):
        rounded = -(-streamed // n_slots) * n_slots
        plain, other = (run(spread(LAYERS - s), compute, n_slots=n_slots).seconds for s in (streamed, rounded))
        assert plain <= 1.02 * other
        if compute < 0.1 and streamed < rounded:
            assert plain <= other - 0.9


@pytest.mark.parametrize("compute", [0.015625, 0.25, 0.5, 0.75, 1, 1.5])
def test_layers_spread_evenly_are_no_slower_than_fixed_ends(compute: float) -> None:
    sizes = ModelSizes(layer_bytes=(1,) * LAYERS, other_bytes=0, kv_bytes=0, activation_bytes=0)
    for count in range(1, LAYERS - 2, 3):
        plan = plan_residency(sizes, StreamingConfig(vram_budget=count + 2), free_bytes=LAYERS)
        assert list(plan.resident) == spread(count)
        assert run(list(plan.resident), compute).seconds <= run(ends(count), compute).seconds


@pytest.mark.daily
@pytest.mark.parametrize(("host_ms", "share"), [(0.5, 0.95), (1.7, 0.95), (2.87, 0.6)])
def test_a_host_that_is_slow_leaves_the_link_idle(host_ms: float, share: float) -> None:
    """15 of 24 layers of 253 MB stay, and the link takes 54.8 GB/s: no copy is waited for where the host is slow."""
    sizes, resident = [253_350_000] * 24, [i * 24 // 15 for i in range(15)]
    found = simulate(sizes, [0.35e-3] * 24, resident, n_slots=2, link_bytes_per_s=54.8e9, host_s=host_ms / 1000)
    assert 9 * 253.35e6 / 54.8e9 / found.seconds == pytest.approx(share, abs=0.05)
    assert (found.stall_s == 0) == (host_ms > 2)


def test_fixed_ends_leave_the_link_idle() -> None:
    """Half of the layers stay, and a layer computes for half as long as it is copied."""
    assert run(spread(32), 0.5).seconds == 32
    assert run(ends(32), 0.5).seconds == 47
