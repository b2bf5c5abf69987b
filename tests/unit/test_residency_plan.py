"""Where layers lie, for what is asked and what there is."""

import math
import re
from dataclasses import replace
from typing import Any

import pytest

from kvboost_hf.config import StreamingConfig
from tests.internals.offload import ModelSizes, ResidencyPlan, plan_residency

pytestmark = pytest.mark.daily

SIZES = ModelSizes(layer_bytes=(100,) * 10, other_bytes=40, kv_bytes=30, activation_bytes=20)
TOTAL = 1090


def plan(free: int | None = 10**6, sizes: ModelSizes = SIZES, **asked: Any) -> ResidencyPlan:
    return plan_residency(sizes, StreamingConfig(**asked), free_bytes=free)


def test_layers_that_are_asked_for_stay() -> None:
    found = plan(keep_first_k=2, keep_last_k=3)
    assert found.resident == (0, 1, 7, 8, 9)
    assert found.in_host == (2, 3, 4, 5, 6)
    assert (found.n_slots, found.slot_bytes, found.on_disk, found.notes) == (2, 100, (), ())
    assert found.device_bytes == 90 + 700
    assert plan(keep_first_k=20).resident == tuple(range(10))


def test_as_many_stay_as_fit_spread_evenly() -> None:
    found = plan(vram_budget=90 + 200 + 399, n_staging_slots=2)
    assert found.resident == (0, 3, 6)
    assert found.device_bytes == 590
    assert plan(vram_budget=690).resident == (0, 2, 5, 7)


def test_slots_and_what_is_reserved_take_from_the_budget() -> None:
    assert len(plan(vram_budget=690, n_staging_slots=3).resident) == 3
    assert len(plan(vram_budget=690, reserved=101).resident) == 2


def test_nine_tenths_of_what_is_free_without_a_budget() -> None:
    assert plan(free=767) == plan(vram_budget=690)
    assert len(plan(free=766).resident) == 3


def test_no_more_than_nine_tenths_of_what_is_free() -> None:
    """The rest is for what CUDA loads, and for what lies between tensors."""
    found = plan(free=767, vram_budget=1000)
    assert len(found.resident) == 4
    (note,) = found.notes
    assert note.startswith("Of the `vram_budget`, 1000 bytes, only 767 are free on the device, and 90% of these are")
    assert "nvidia-smi" in note
    assert plan(free=690, vram_budget=690).notes == ()
    with pytest.raises(
        ValueError, match=r"at least 290 bytes .*, got 288: .* 90% of the 321 bytes that are free"
    ) as told:
        plan(free=321, vram_budget=1000)
    assert "Raise `vram_budget`" not in str(told.value)
    assert "close other programs that use it" in str(told.value)
    assert plan(free=323, vram_budget=1000).resident == plan(free=323).resident == ()


def test_what_is_asked_for_beyond_what_is_free_is_planned_and_noted() -> None:
    (note,) = plan(free=700, keep_first_k=7).notes
    assert note == "The plan takes 990 bytes of the device, of which only 700 are free."


def test_a_model_that_fits_has_no_slots() -> None:
    found = plan(vram_budget=TOTAL)
    assert (found.resident, found.n_slots, found.slot_bytes) == (tuple(range(10)), 0, 0)
    assert (found.streamed_bytes, found.device_bytes, found.notes) == (0, TOTAL, ())
    assert plan(vram_budget=TOTAL - 1).n_slots == 2


def test_streamed_layers_that_all_have_a_slot_stay() -> None:
    found = plan(keep_first_k=7, n_staging_slots=3)
    assert (found.resident, found.n_slots) == (tuple(range(10)), 0)
    assert "a slot for each of 3 streamed ones" in found.notes[0]
    assert plan(keep_first_k=6, n_staging_slots=3).n_slots == 3


@pytest.mark.parametrize("mode", ["full_stream", "full_resident"])
def test_all_or_nothing(mode: str) -> None:
    found = plan(residency_mode=mode)
    assert len(found.resident) == (0 if mode == "full_stream" else 10)
    need = found.device_bytes
    assert plan(residency_mode=mode, vram_budget=need) == found
    with pytest.raises(ValueError, match=f"at least {need} bytes"):
        plan(residency_mode=mode, vram_budget=need - 1)


def test_a_budget_that_is_too_small() -> None:
    with pytest.raises(ValueError, match=r"must be at least 290 bytes \(0\.01 GB\)") as caught:
        plan(vram_budget=289)
    assert "got 289: 2 slots 0.00 GB, embeddings, norms, head 0.00 GB, K/V" in str(caught.value)
    assert "`max_tokens`, `prefill_chunk_size`, `reserved` or `n_staging_slots`" in str(caught.value)
    assert plan(vram_budget=290).resident == ()


def test_layers_that_do_not_fit_into_host_memory_are_in_files() -> None:
    found = plan(keep_first_k=2, host_budget=450, disk_folder="layers")
    assert (found.in_host, found.on_disk) == ((2, 4, 6, 8), (3, 5, 7, 9))
    assert plan(keep_first_k=2, host_budget=800, disk_folder="layers").on_disk == ()
    assert plan(keep_first_k=2, host_budget=99, disk_folder="layers").in_host == ()
    assert plan(keep_first_k=2, disk_folder="layers").in_host == ()
    assert plan(keep_first_k=2).on_disk == ()


def test_shared_memory_holds_all_layers() -> None:
    for asked in ({}, {"vram_budget": 600}, {"keep_first_k": 2}, {"disk_folder": "layers"}):
        found = plan(free=None, **asked)
        assert (len(found.resident), found.n_slots) == (10, 0)
        assert "since host and device share their memory" in found.notes[0]
    assert plan(free=None, residency_mode="full_resident").notes == ()
    assert "`host_budget` is not used" in plan(free=None, disk_folder="layers", host_budget=1000).notes[1]


def test_shared_memory_with_files() -> None:
    found = plan(free=None, vram_budget=690, disk_folder="layers")
    assert (found.resident, found.in_host, found.notes) == ((0, 2, 5, 7), (), ())
    assert found.on_disk == (1, 3, 4, 6, 8, 9)
    found = plan(free=None, keep_last_k=4, disk_folder="layers", host_budget=1000)
    assert (found.on_disk, found.in_host) == ((0, 1, 2, 3, 4, 5), ())
    assert found.notes == ("`host_budget` is not used, since host and device share their memory.",)


def test_the_largest_layers_stay() -> None:
    sizes = ModelSizes(layer_bytes=(50, 300, 50, 300, 50, 50), other_bytes=0, kv_bytes=0, activation_bytes=0)
    assert plan(sizes=sizes, vram_budget=750).resident == (0, 1, 3)
    assert plan(sizes=sizes, vram_budget=750).slot_bytes == 50
    assert plan(sizes=sizes, vram_budget=699).resident == ()


def test_how_fast_it_can_be() -> None:
    found = plan(keep_first_k=2, host_budget=450, disk_folder="layers")
    assert found.tokens_per_s(1600) == 2
    assert found.tokens_per_s(1600, disk_bytes_per_s=400) == 1
    assert plan(vram_budget=TOTAL).tokens_per_s(1) == math.inf


def test_in_a_terminal() -> None:
    million = ModelSizes(
        layer_bytes=(250 * 10**6,) * 10, other_bytes=2 * 10**9, kv_bytes=10**9, activation_bytes=5 * 10**8
    )
    text = str(plan(free=10**10, sizes=million, vram_budget="5GB", host_budget="1GB", disk_folder="layers"))
    assert re.findall(r"^(.+?) +([\d.]+) GB$", text, re.MULTILINE) == [
        ("4 resident layers", "1.000"),
        ("2 slots", "0.500"),
        ("embeddings, norms, head", "2.000"),
        ("K/V", "1.000"),
        ("activations", "0.500"),
        ("workspaces", "0.000"),
        ("reserved", "0.000"),
        ("device, in all", "5.000"),
        ("4 layers in host memory", "1.000"),
        ("2 layers in files", "0.500"),
    ]
    assert text.endswith("Each forward reads 0.500 GB from files; how fast is measured as it runs.")
    in_host = plan(free=10**10, sizes=million, vram_budget="5GB")
    assert str(in_host).endswith("At 25 GB/s at most 16.67 tokens/s.")
    assert str(replace(in_host, copy_rate=3e9)).endswith("At 3.00 GB/s, as measured, at most 2.00 tokens/s.")
    assert "tokens/s" not in str(plan(vram_budget=TOTAL))
