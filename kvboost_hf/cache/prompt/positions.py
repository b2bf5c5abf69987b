"""Positions of the columns of a prompt, in one dimension, or in three for multimodal models.

Multimodal models take `position_ids` [3 or 4, batch, m]: time, height and width, preceded by the place in the row if
there are four planes. Outside an image all three are equal and count up from the end of the image before: they differ
from the place in the row by a *shift* that is constant until the next image.
"""

import inspect
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationMixin, PreTrainedModel

from kvboost_hf.compat import CACHE

_PLACE_AND_THREE = 4


def position_shifts(
    position_ids: NDArray[np.int64], columns: NDArray[np.int64], pads: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The difference between each position and the place of its column in its row.

    Args:
        position_ids: [planes, batch, m].
        columns: The m columns of the positions.
        pads: Columns of left padding of each row.

    Returns:
        [planes, batch, m]; 0 in padding.
    """
    places = columns[None, :] - pads[:, None]
    shifts: NDArray[np.int64] = np.where(places >= 0, position_ids - places, 0)
    return shifts


def common_shift(shifts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The shift [batch, m] that all planes agree on, and where they do. A plane of places must not be shifted."""
    if len(shifts) == _PLACE_AND_THREE:
        agree = (shifts[0] == 0) & (shifts[1:] == shifts[1]).all(axis=0)
        return shifts[1], agree
    return shifts[0], (shifts == shifts[0]).all(axis=0)


def text_positions(position_ids: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The place in the row and the position of each id of text, [batch or 1, m]; -1 for what its planes disagree on.

    Args:
        position_ids: [batch or 1, m] or [planes, batch or 1, m].
        places: The places where `position_ids` do not contain them.
    """
    if position_ids.ndim == 2:
        return position_ids, position_ids
    if len(position_ids) == _PLACE_AND_THREE:
        places, position_ids = position_ids[0], position_ids[1:]
    agree = (position_ids == position_ids[0]).all(dim=0)
    return places, torch.where(agree, position_ids[0], -1)


def take_positions(position_ids: torch.Tensor, batch: int, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """`position_ids` [(planes,) batch or 1, m] of `rows` [k, 1], of each those `at` [k, n]."""
    expanded = position_ids.expand(*position_ids.shape[:-2], batch, -1)
    return expanded[..., rows, at]


def computed_positions(model: PreTrainedModel, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The positions that the model would compute from the whole ids and images if it was given none, or None.

    Its forward does that, and would compute others from cut ids. As in its forward, the model also keeps the shift for
    later steps.
    """
    compute = getattr(model.base_model, "compute_3d_position_ids", None)
    ids = kwargs["input_ids"]
    if compute is None:
        return None
    accepted = inspect.signature(compute).parameters
    given = {name: value for name, value in kwargs.items() if name in accepted}
    given["inputs_embeds"] = ids[..., None]  # read for its shape and device
    if "audio_seqlens" in accepted and kwargs.get("feature_attention_mask") is not None:
        given["audio_seqlens"] = kwargs["feature_attention_mask"].sum(-1)
    for name, parameter in accepted.items():
        if parameter.default is inspect.Parameter.empty and parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            given.setdefault(name, None)
    positions: torch.Tensor | None = compute(**given)
    return positions


def counts_from_padding_id(model: PreTrainedModel) -> bool:
    """Whether a model that is given no positions counts them from its padding id + 1, not from 0."""
    return hasattr(getattr(model.base_model, "embeddings", None), "create_position_ids_from_input_ids")


def positions_from_start(
    model: PreTrainedModel, ids: torch.Tensor, arguments: dict[str, Any], prepared: dict[str, Any]
) -> torch.Tensor | None:
    """The positions that generate() prepares for a whole prompt on an empty cache.

    generate() prepares positions before the cache knows of the call, and a model that keeps shifts on itself takes the
    contents of the cache for the beginning of this prompt.

    Args:
        model: The model that generates.
        ids: The whole prompt, repeated for beams.
        arguments: What generate() was called with.
        prepared: The arguments it has prepared so far.

    Returns:
        The correct positions; None if those prepared are correct.
    """
    prepare = getattr(type(model), "_prepare_position_ids_for_generation", None)
    prepared_ids = prepared.get("position_ids")
    if (
        prepare in (None, GenerationMixin._prepare_position_ids_for_generation)
        or arguments.get("position_ids") is not None
        or prepared_ids is None
    ):
        return None
    given = arguments.get("input_ids")
    if not isinstance(given, torch.Tensor) or given.ndim != 2:
        return None
    repeats = ids.shape[0] // given.shape[0]
    mask = arguments.get("attention_mask")
    if mask is None:
        found = prepared.get("attention_mask")  # dropped where it is all ones
        mask = found[::repeats] if found is not None else torch.ones_like(given)
    # Not those prepared: images are arguments no longer once they are encoded, but positions depend on them.
    left_out = (CACHE, "past_key_values", "position_ids", "input_ids", "attention_mask")
    whole = {name: value for name, value in arguments.items() if name not in left_out}
    positions: torch.Tensor = prepare(model, given, {**whole, "attention_mask": mask})
    return positions.repeat_interleave(repeats, dim=positions.ndim - 2)
