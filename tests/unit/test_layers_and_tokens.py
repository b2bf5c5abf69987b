"""GrowingLayer against DynamicLayer, and the record of ids beside it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cache_utils import DynamicLayer

from tests.internals.cache import GrowingLayer, MaskShape, TokenLog

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("update"), st.integers(1, 150)),
        st.tuples(st.just("crop"), st.integers(0, 40)),
        st.tuples(st.just("reorder"), st.integers(0, 7)),
        st.tuples(st.just("repeat"), st.just(2)),
        st.tuples(st.just("share"), st.booleans()),
    ),
    max_size=12,
)


@settings(deadline=None)
@given(OPERATIONS)
def test_growing_layer_does_what_dynamic_layer_does(operations: list[tuple[str, int]]) -> None:
    stock, ours = DynamicLayer(), GrowingLayer()
    twins: list[tuple[GrowingLayer, torch.Tensor]] = []
    batch = 2
    generator = torch.Generator().manual_seed(0)
    for name, n in [("update", 3), *operations]:
        if name == "update":
            k, v = torch.randn(2, batch, 2, n, 4, generator=generator)
            expected, found = stock.update(k, v), ours.update(k, v)
            assert torch.equal(expected[0], found[0])
            assert torch.equal(expected[1], found[1])
        elif name == "crop":
            n = min(n, stock.get_seq_length())
            stock.crop(-n)
            ours.crop(-n)
        elif name == "reorder":
            rows = torch.randint(0, batch, (batch,), generator=generator)
            if stock.get_seq_length():
                stock.reorder_cache(rows)  # type: ignore[arg-type]
                ours.reorder_cache(rows)  # type: ignore[arg-type]
        elif name == "repeat" and batch < 8 and stock.get_seq_length():
            batch *= n
            stock.batch_repeat_interleave(n)
            ours.batch_repeat_interleave(n)
        elif name == "share":
            twin = ours.share()
            if n:
                ours, twin = twin, ours
            twins.append((twin, twin.keys.clone()))
        assert ours.get_seq_length() == stock.get_seq_length()
        assert ours.get_mask_sizes(3) == stock.get_mask_sizes(3)
        assert torch.equal(ours.keys, stock.keys)
        assert torch.equal(ours.values, stock.values)
    for twin, before in twins:  # what was forked off never changes
        assert torch.equal(twin.keys, before)


@torch.no_grad()
def test_appends_are_in_place() -> None:
    layer = GrowingLayer()
    keys, _ = layer.update(torch.zeros(1, 2, 1000, 4), torch.zeros(1, 2, 1000, 4))
    address, copies = keys.data_ptr(), 0
    for _ in range(1000):
        keys, _ = layer.update(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4))
        copies += keys.data_ptr() != address
        address = keys.data_ptr()
    assert copies <= 7
    assert layer.nbytes <= 2 * 2 * 4 * 4 * 2000 * 1.2


def test_buffers_from_inference_mode_can_be_appended_to_outside() -> None:
    layer = GrowingLayer()
    with torch.inference_mode():
        layer.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))
        layer.reorder_cache(torch.tensor([0]))  # type: ignore[arg-type]
    layer.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))
    assert layer.keys.sum() == 48


def test_with_gradients_nothing_is_overwritten() -> None:
    layer = GrowingLayer()
    k = torch.ones(1, 2, 3, 4, requires_grad=True)
    first, _ = layer.update(k * 2, k * 3)
    second, _ = layer.update(k * 5, k * 7)
    (first.square().sum() + second.square().sum()).backward()  # raises if a saved tensor was changed in place
    assert k.grad is not None
    with torch.no_grad():
        layer.update(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4))
    assert layer.get_seq_length() == 7


def test_crop_takes_what_both_supported_releases_pass() -> None:
    layer = GrowingLayer()
    layer.update(torch.ones(1, 2, 8, 4), torch.ones(1, 2, 8, 4))
    layer.crop(torch.tensor(-3))  # type: ignore[arg-type]
    layer.crop(0)
    assert layer.get_seq_length() == 5
    layer.crop(9)
    assert layer.get_seq_length() == 5
    layer.crop(2)  # how many to keep, as older releases had it
    assert layer.get_seq_length() == 2


class TestTokenLog:
    def test_rows_leave_padding_out(self) -> None:
        log = TokenLog(np.array([0, 2]))
        log.append(torch.tensor([[1, 2, 3], [0, 0, 4]]))
        log.append(torch.tensor([[5], [6]]), torch.tensor([[3], [1]]))
        assert log.row(0).tolist() == [1, 2, 3, 5]
        assert log.row(1).tolist() == [4, 6]
        assert log.trusted

    def test_crop_and_select(self) -> None:
        log = TokenLog(np.array([0, 1]))
        log.append(torch.tensor([[1, 2, 3], [0, 5, 6]]))
        log.crop(2)
        log.select(np.array([1, 1]))
        log.extend(np.array([[7], [8]]))
        assert log.columns().tolist() == [[0, 5, 7], [0, 5, 8]]
        assert log.pads.tolist() == [1, 1]

    @pytest.mark.parametrize("positions", [[[4]], [[2]], [[0]]])
    def test_odd_positions_are_noticed(self, positions: list[list[int]]) -> None:
        log = TokenLog(np.array([0]))
        log.append(torch.tensor([[1, 2, 3]]))
        log.append(torch.tensor([[4]]), torch.tensor(positions))
        assert not log.trusted

    @pytest.mark.parametrize(
        ("mask", "trusted"),
        [([[0, 1, 1, 1]], True), ([[1, 1, 1, 1]], False), ([[0, 1, 0, 1]], False), ([[0] * 4], False)],
    )
    def test_odd_masks_are_noticed(self, mask: list[list[int]], trusted: bool) -> None:
        log = TokenLog(np.array([1]))
        log.append(torch.tensor([[0, 2, 3]]))
        log.append(torch.tensor([[4]]), None, MaskShape.of(torch.tensor(mask)))
        assert log.trusted is trusted
