"""Rotated keys are those that the model computes there, as far as each rounding on the way allows."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from tests.conftest import random_ids
from tests.internals.compat import KeyRotation, LayerRotation, key_rotation
from tests.rotations import (
    KINDS,
    LIMITS,
    computed,
    computed_bound,
    make_rotary,
    off,
    pair_sizes,
    rotated_bound,
)

FAR = 32_768
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHIFTS = st.integers(-FAR, FAR)


@cache
def rotary(kind: str, dtype: torch.dtype) -> tuple[PreTrainedModel, KeyRotation]:
    model = make_rotary(kind, dtype)
    rotation = key_rotation(model)
    assert isinstance(rotation, KeyRotation), rotation
    return model, rotation


def layouts() -> st.SearchStrategy[tuple[KeyRotation, torch.Tensor]]:
    """A rotation of one layer, partial or not, and keys for it."""

    def build(pairs: int, rest: int, front: bool, half: bool, dtype: torch.dtype, seed: int):
        inv_freq = 10_000.0 ** -(torch.arange(pairs) / pairs)
        layer = LayerRotation(inv_freq, "half" if half else "interleaved", 0 if front else rest)
        keys = torch.randn(3, 5, 2 * pairs + rest, generator=torch.Generator().manual_seed(seed))
        return KeyRotation((layer,)), keys.to(dtype)

    pairs, rest = st.integers(1, 40), st.sampled_from([0, 2, 16])
    return st.builds(build, pairs, rest, st.booleans(), st.booleans(), st.sampled_from(DTYPES), st.integers(0, 99))


@given(layouts(), SHIFTS, SHIFTS)
def test_one_after_the_other_is_both_at_once(case: tuple[KeyRotation, torch.Tensor], a: int, b: int) -> None:
    rotation, keys = case
    layer, bound = rotation.layers[0], rotated_bound(keys.dtype)
    assert layer is not None
    once, twice = rotation.rotate(0, keys, a + b), rotation.rotate(0, rotation.rotate(0, keys, a), b)
    # The first one's error turns: at most a root of 2 of it ends up in one dimension.
    assert off(layer, twice, once, (2**0.5 + 2) * bound) <= 1
    back = rotation.rotate(0, rotation.rotate(0, keys, a), -a)
    assert off(layer, back, keys, (2**0.5 + 1) * bound) <= 1
    sizes, turned = pair_sizes(layer, keys), pair_sizes(layer, once)
    assert float(((turned - sizes).abs() / sizes).max()) <= 2**0.5 * bound
    assert torch.equal(once[..., : layer.offset], keys[..., : layer.offset])
    assert torch.equal(once[..., layer.stop :], keys[..., layer.stop :])
    assert once.dtype == keys.dtype


@given(layouts(), SHIFTS, st.integers(-3, 3).filter(bool))
def test_each_by_its_own_shift(case: tuple[KeyRotation, torch.Tensor], first: int, step: int) -> None:
    rotation, keys = case
    layer, bound = rotation.layers[0], rotated_bound(keys.dtype)
    assert layer is not None
    shifts = range(first, first + 5 * step, step)
    found = layer.rotate_each(keys, shifts, torch.empty_like(keys))
    for t, shift in enumerate(shifts):
        expected = layer.rotate(keys[:, t : t + 1], shift, torch.empty_like(keys[:, t : t + 1]))
        # How products and sums are joined differs with the layout: both are within the bound.
        assert off(layer, found[:, t : t + 1], expected, 2 * bound) <= 1
    stacked = torch.stack([keys, keys])
    assert off(layer, layer.rotate_each(stacked, shifts, torch.empty_like(stacked))[1], found, 2 * bound) <= 1
    wrong = layer.rotate_each(keys, range(first + 1, first + 1 + 5 * step, step), torch.empty_like(keys))
    assert off(layer, wrong, found, 2 * bound) > 1


@given(layouts(), SHIFTS)
def test_in_float64_it_is_what_the_formula_says(case: tuple[KeyRotation, torch.Tensor], shift: int) -> None:
    rotation, keys = case
    layer = rotation.layers[0]
    assert layer is not None
    turning = keys[..., layer.offset : layer.stop].double()
    by_pair = (2, -1) if layer.style == "half" else (-1, 2)
    first, second = turning.unflatten(-1, by_pair).unbind(-2 if layer.style == "half" else -1)
    cos, sin = (layer.inv_freq.double() * shift).cos(), (layer.inv_freq.double() * shift).sin()
    both = torch.stack([first * cos - second * sin, second * cos + first * sin], -2 if layer.style == "half" else -1)
    expected = keys.double()
    expected[..., layer.offset : layer.stop] = both.flatten(-2)
    assert off(layer, rotation.rotate(0, keys, shift), expected, rotated_bound(keys.dtype)) <= 1


@given(layouts(), SHIFTS)
@settings(max_examples=20)
def test_into_a_place_stacked_or_cut_it_is_the_same(case: tuple[KeyRotation, torch.Tensor], shift: int) -> None:
    """But for how products and sums are joined, which differs with the layout: both are within the bound."""
    rotation, keys = case
    layer = rotation.layers[0]
    assert layer is not None
    expected = rotation.rotate(0, keys, shift)

    def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
        return off(layer, found, wanted.double(), 2 * rotated_bound(keys.dtype)) <= 1

    buffer = torch.full((keys.shape[0], 9, keys.shape[2]), torch.nan, dtype=keys.dtype)
    found = rotation.rotate(0, keys, shift, out=buffer[:, 2:7])
    assert found.data_ptr() == buffer[:, 2:7].data_ptr()
    assert same(buffer[:, 2:7], expected)
    assert buffer[:, :2].isnan().all()
    block = torch.stack([keys, torch.zeros_like(keys), keys, torch.zeros_like(keys)])  # as a chunk keeps its layers
    assert same(rotation.rotate(0, block[::2], shift), torch.stack([expected, expected]))
    assert same(rotation.rotate(0, keys[:, 1:3], shift), expected[:, 1:3])


def test_large_blocks_are_cut_and_are_the_same() -> None:
    for style in ("half", "interleaved"):
        rotation = KeyRotation((LayerRotation(0.5 ** torch.arange(32), style, 0),))
        for dtype in DTYPES:
            keys = torch.randn(5, 7, 600, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
            whole = rotation.rotate(0, keys, 1234)
            assert torch.equal(whole[3, 6, 500:], rotation.rotate(0, keys[3, 6, 500:], 1234))
            assert torch.equal(whole[4], rotation.rotate(0, keys[4], 1234))


def test_nothing_that_need_not_turn_is_touched() -> None:
    rotation = KeyRotation((LayerRotation(torch.ones(4), "half", 0), None))
    keys = torch.randn(2, 3, 8)
    assert rotation.rotate(0, keys, 0) is keys
    assert rotation.rotate(1, keys, 5) is keys
    out = torch.empty_like(keys)
    assert rotation.rotate(1, keys, 5, out=out) is out
    assert torch.equal(out, keys)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_rotated_key_is_the_one_computed_there(kind: str, dtype: torch.dtype) -> None:
    model, rotation = rotary(kind, dtype)
    last = LIMITS.get(kind, 2 * FAR) - 1
    positions = st.integers(0, last) if kind in LIMITS else st.integers(0, FAR)

    @given(positions, positions, st.integers(0, 50))
    @settings(max_examples=15, deadline=None)
    def check(old: int, new: int, seed: int) -> None:
        for idx, (keys, _) in enumerate(computed(model, random_ids(1, seed), old, new)):
            layer, moved = rotation.layers[idx], rotation.rotate(idx, keys[0], new - old)
            if layer is None:
                assert torch.equal(moved, keys[1])
            else:
                assert off(layer, moved, keys[1], computed_bound(layer, dtype, old, new)) <= 1

    check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_control(kind: str, dtype: torch.dtype) -> None:
    """Another shift, style, direction, offset or factor is not within the bounds."""
    model, rotation = rotary(kind, dtype)
    old, new = 17, 400
    for idx, (keys, _) in enumerate(computed(model, random_ids(1), old, new)):
        layer = rotation.layers[idx]
        if layer is None:
            continue
        bound = computed_bound(layer, dtype, old, new)
        other_style = "half" if layer.style == "interleaved" else "interleaved"
        wrong = [
            rotation.rotate(idx, keys[0], new - old + 1),
            KeyRotation((LayerRotation(layer.inv_freq, other_style, layer.offset),)).rotate(0, keys[0], new - old),  # type: ignore[arg-type]
            KeyRotation((LayerRotation(-layer.inv_freq, layer.style, layer.offset),)).rotate(0, keys[0], new - old),
            KeyRotation((LayerRotation(layer.inv_freq * 1.01, layer.style, layer.offset),)).rotate(
                0, keys[0], new - old
            ),
            1.3 * rotation.rotate(idx, keys[0], new - old),
            keys[0],
        ]
        assert all(off(layer, found, keys[1], bound) > 1 for found in wrong)
