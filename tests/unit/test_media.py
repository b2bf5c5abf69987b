"""Codes, cuts and hashes of prompts with images, without a model."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.internals.cache import (
    Prompt,
    _hash,
    _split_items,
    common_shift,
    has_types_of_media,
    media_ids,
    position_shifts,
    read_prompt,
    shifted_ids,
    text_ids,
    text_positions,
)

pytestmark = pytest.mark.daily


def test_codes_of_text_and_media_never_meet() -> None:
    ids = np.array([0, 5, 2**31 - 1])
    shifts = np.array([0, -(2**20), 2**20])
    text = shifted_ids(ids, shifts)
    assert text_ids(text).tolist() == ids.tolist()
    shown = media_ids(b"seed", 1000)
    assert (text_ids(shown) == -1).all()
    assert len(np.unique(shown)) == 1000
    assert not set(text.tolist()) & set(shown.tolist())
    assert not np.array_equal(shown, media_ids(b"other", 1000))
    assert shifted_ids(ids[:1], np.array([3])) != shifted_ids(ids[:1], np.array([4]))


@pytest.mark.parametrize(
    ("divisible", "cuts"),
    [(True, [0, 1, 2, 2, 2, 5, 6, 6, 8]), (False, [0, 1, 2, 2, 2, 2, 2, 2, 8])],
)
def test_cuts(divisible: bool, cuts: list[int]) -> None:
    media = np.array([[0, 0, 1, 1, 1, 0, 1, 1, 0]], dtype=bool)
    prompt = Prompt(np.zeros((1, 9), dtype=np.int64), media, divisible)
    assert [prompt.cut(column) for column in range(9)] == cuts


def test_no_row_is_cut_inside_an_image() -> None:
    media = np.array([[0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 0]], dtype=bool)
    prompt = Prompt(np.zeros((2, 6), dtype=np.int64), media)
    assert [prompt.cut(column) for column in range(6)] == [0, 1, 2, 2, 2, 5]


def test_a_hash_is_of_shape_and_dtype_too() -> None:
    zeros = torch.zeros(2, 3)
    same = [zeros, zeros.t().contiguous().t(), np.zeros((2, 3), dtype=np.float32)]
    assert len({_hash(value) for value in same}) == 1
    others = [
        zeros,
        zeros.t(),
        zeros.to(torch.int32),
        zeros.bfloat16(),
        [zeros],
        {"a": zeros},
        {"b": zeros},
        None,
        0,
        False,
    ]
    assert len({_hash(value) for value in others}) == len(others)
    assert _hash(object()) != _hash(object())


def test_images_are_told_apart_only_where_that_is_sure() -> None:
    pixels = {"pixel_values": torch.randn(2, 3, 4, 4)}
    one, two = _split_items(pixels, "image", [6, 6])
    assert one != two
    assert _split_items({"pixel_values": pixels["pixel_values"][:1]}, "image", [6]) == [one]
    assert _split_items(pixels, "image", [6, 3]) == []  # a break inside an image, two images side by side
    assert _split_items(pixels, "image", [6, 6, 6]) == []
    assert _split_items({"pixel_values": torch.randn(2, 2, 3, 4, 4)}, "image", [6, 6]) == []  # rows, not images
    assert _split_items({"input_features": torch.randn(2, 8, 4)}, "audio", [6, 6]) == []
    patches = {"pixel_values": torch.randn(12, 5), "image_grid_thw": torch.tensor([[1, 2, 2], [1, 2, 4]])}
    assert len(_split_items(patches, "image", [1, 2])) == 2
    for lengths in ([2, 1], [1, 2, 1]):
        assert _split_items(patches, "image", lengths) == []
    assert _split_items({**patches, "pixel_values": torch.randn(13, 5)}, "image", [1, 2]) == []


def test_shifts_of_positions() -> None:
    place = np.array([[0, 0, 1, 2, 3]])
    three = np.stack([place, place + 2, place + 2, place + 2])
    pads, columns = np.array([1]), np.arange(5)
    shift, agree = common_shift(position_shifts(three, columns, pads))
    assert shift.tolist() == [[0, 2, 2, 2, 2]]
    assert agree.all()
    three[1, 0, 3] += 1
    assert common_shift(position_shifts(three, columns, pads))[1].tolist() == [[True, True, True, False, True]]


def test_types_of_the_last_ids() -> None:
    for types, found in (([1, 1, 1, 0, 0], False), ([0, 0, 0, 0, 1], True), ([0, 0, 0, 1, 0], True)):
        assert has_types_of_media({"mm_token_type_ids": torch.tensor([types]), "token_type_ids": None}, 2) is found


IMAGE = 9
IDS = np.array([[1, 2, IMAGE, IMAGE, 3, 4]])
PIXELS = torch.ones(1, 3, 4, 4)
BESIDE = np.stack([np.arange(6)[None]] * 3)


def read(model: Any = None, ids: Any = IDS, positions: Any = None, **kwargs: Any) -> Prompt | str:
    inserts = SimpleNamespace(get_placeholder_mask=None)
    known: Any = SimpleNamespace(config=SimpleNamespace(image_token_id=IMAGE), base_model=inserts)
    return read_prompt(model or known, ids, positions, np.zeros(len(ids), dtype=np.int64), kwargs, kwargs)


def test_prompts_with_images_are_read_or_said_not_to_be() -> None:
    shown = read(pixel_values=PIXELS)
    assert isinstance(shown, Prompt)
    assert shown.media.tolist() == [[False, False, True, True, False, False]]
    others = [read(pixel_values=PIXELS * 2), read(pixel_values=PIXELS, mm_token_type_ids=torch.tensor(IDS == IMAGE))]
    for other in others:
        assert isinstance(other, Prompt)
        assert (other.column_ids == shown.column_ids).tolist() == [[True, True, False, False, True, True]]
    unknown: Any = SimpleNamespace(config=SimpleNamespace(image_token_id=IMAGE), base_model=SimpleNamespace())
    late, apart = BESIDE.copy(), BESIDE.copy()
    late[1:, 0, 5] += 1
    apart[1:, 0, 2] += 1  # within the image, where positions go another way
    for found, reason in (
        (read(unknown, pixel_values=PIXELS), "it is not known where in the prompt"),
        (read(ids=IDS[:, [0, 1, 2, 4]], pixel_values=PIXELS), "one placeholder may stand for all of an image"),
        (read(ids=IDS[:, :4], mm_token_type_ids=torch.tensor(IDS[:, :4] == IMAGE)), "ends within an image"),
        (read(positions=late, pixel_values=PIXELS), "position_ids of text do not count up"),
        (read(token_type_ids=torch.zeros(1, 5)), "`token_type_ids` are not one for each of the input_ids"),
        (read(token_type_ids=torch.zeros(2, 6)), "`token_type_ids` are not one for each of the input_ids"),
        (read(token_type_ids=torch.zeros(6)), "`token_type_ids` are not one for each of the input_ids"),
        (read(token_type_ids=torch.zeros(1, 4), logits_to_keep=2), "`token_type_ids` are not one for each"),
    ):
        assert isinstance(found, str)
        assert reason in found
    for good in (
        read(positions=apart, pixel_values=PIXELS),
        read(token_type_ids=torch.zeros(1, 5), logits_to_keep=2),  # a candidate has none
        read(token_type_ids=torch.zeros(1, 9)),  # those of what is held come first
    ):
        assert isinstance(good, Prompt)


def test_positions_of_text_in_several_planes() -> None:
    """Where the planes disagree there is no position; the first of four is the place in the row."""
    places, own, three = torch.tensor([[5, 6, 7]]), torch.tensor([[2, 3, 4]]), torch.tensor([[[8, 9, 10]]] * 3)
    three[1, 0, 1] += 1
    assert [each.tolist() for each in text_positions(own, places)] == [own.tolist(), own.tolist()]
    assert [each.tolist() for each in text_positions(three, places)] == [places.tolist(), [[8, -1, 10]]]
    assert [each.tolist() for each in text_positions(torch.cat([own[None], three]), places)] == [
        own.tolist(),
        [[8, -1, 10]],
    ]
