"""The front's part of a request is small: `benchmarks/routed.py` with few requests."""

import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.daily

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
bench = pytest.importorskip("routed")
sys.path.pop(0)


@pytest.mark.parametrize("replicas", [4, 64])
def test_one_core_routes_five_thousand_requests_a_second(replicas: int) -> None:
    """With all news of the replicas; on a machine that is busy, processor time counts."""
    found = bench.routed(bench.make_trace(600), replicas, 2)
    assert found["requests_per_s"] > 5_000, found
    assert 20 < found["pieces"] < 40
    assert found["events"] > 5  # something was published


def test_keys_and_memory_are_bounded() -> None:
    """Loose bounds: what is wrong is wrong by a multiple."""
    assert bench.keys_us(2) < 1_000
    assert bench.bytes_per_key(bench.held_by_front) < 200
    assert bench.bytes_per_key(bench.guessed) < 300
    assert bench.bytes_per_key(bench.held_by_replica) < 1_500
