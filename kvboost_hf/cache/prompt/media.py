"""Finds the columns of images, sound and video in a prompt, and gives them ids from a hash of what they show.

A multimodal model replaces placeholder ids with the features of an image. Two prompts with the same ids and different
images have different K/V from the first placeholder on, so the columns of media get column ids that are drawn from a
hash of the media (see `planning/chunks.py`). Text before the first placeholder is found whatever follows it.

    input_ids   t t t [img img img img] t t [img img] t t    a *run* is a block of neighbouring placeholders
    column_ids  t t t  m1  m2  m3  m4   t t  m5  m6   t t    m1…m4: hash of the run's images, ids, types, positions

Attention within a run may be bidirectional. So the ids of a run are drawn from the whole run, and a prompt is never
cut inside one. Where the arguments tell which image each run shows, a run's ids depend on its own image only, so that
a chat can go on to the next image; otherwise they depend on all media of the call.
"""

from functools import partial
from secrets import token_bytes
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationMixin, PreTrainedModel

from kvboost_hf.cache.planning.chunks import Tokens, digest, media_ids, shifted_ids
from kvboost_hf.cache.prompt.token_log import Prompt, common_shift, position_shifts
from kvboost_hf.compat import remember

try:
    from transformers.generation.utils import _slice_mm_encoder_output
except ImportError:  # before transformers 5.23, which encodes images ahead of the prompt
    _slice_mm_encoder_output = None  # type: ignore[assignment]

Arguments = dict[str, Any]

_digest = partial(digest, size=32)

ENCODED = "mm_encoder_outputs"

# Tensors that a model inserts into a prompt, and their modality. Those of `_LAYOUT` tell how to read them.
_PAYLOAD = {
    "pixel_values": "image",
    "pixel_values_images": "image",
    "pixel_values_videos": "video",
    "input_features": "audio",
    "input_values": "audio",
    ENCODED: "",
}
_LAYOUT = frozenset(
    "image_grid_thw video_grid_thw image_sizes image_sizes_videos second_per_grid_ts pixel_mask pixel_attention_mask "
    "pixel_position_ids image_position_ids video_position_ids input_features_mask feature_attention_mask "
    "audio_feature_lengths audio_mask audio_attention_mask input_values_mask batch_num_images num_local_patches "
    "vision_feature_layer vision_feature_select_strategy use_audio_in_video video_second_per_grid "
    "spatial_shapes".split()
)
MEDIA_ARGUMENTS = _LAYOUT | frozenset(_PAYLOAD)

# One number for each id: 0 for text, others for media. The first two are read by position, and not narrowed.
TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
_NARROWED_TYPES = ("moe_mm_token_type_ids",)

_MODALITIES = ("image", "video", "audio")
_GRIDS = {"image": "image_grid_thw", "video": "video_grid_thw"}
_MERGES = ("get_placeholder_mask", "inputs_merger", "_merge_input_ids_with_audio_features")


def takes_media(model: PreTrainedModel) -> bool:
    """Whether the model has parts for something other than text."""
    return remember(model, takes_media, lambda: model.config.get_text_config(decoder=True) is not model.config)


def payload(arguments: Arguments) -> Arguments:
    """The arguments that contain media."""
    return {name: arguments[name] for name in _PAYLOAD if name in arguments and _given(arguments[name])}


def _given(value: Any) -> bool:
    return value is not None and value is not False and not (isinstance(value, dict) and not value)


def has_types_of_media(kwargs: Arguments, columns: int) -> bool:
    """Whether one of the last `columns` ids has a type other than text."""
    return any(bool(kwargs[name][..., -columns:].any()) for name in TYPES if kwargs.get(name) is not None)


def read_prompt(
    model: PreTrainedModel,
    ids: Tokens,
    position_ids: NDArray[np.int64] | None,
    pads: NDArray[np.int64],
    kwargs: Arguments,
    source: Arguments,
) -> Prompt | str:
    """Read a whole prompt [batch, m], with `position_ids` [planes, batch, m], if they have planes.

    `source` are the arguments with the original images: the same, or those of generate(). Returns the prompt, or the
    reason why its K/V cannot be identified.
    """
    types = _read_types(kwargs, ids)
    if isinstance(types, str):
        return types
    media = np.zeros(ids.shape, dtype=bool) if types is None else (types != 0).any(axis=0)
    shown = payload(kwargs)
    if types is None and position_ids is None and not shown:  # text, and nothing shifted
        return Prompt.of_text(ids)
    columns = np.arange(ids.shape[1])
    hashes: dict[bytes, NDArray[np.bool_]] = {}
    if shown:
        placeholders = _placeholders(model, ids)
        if placeholders is None:
            return "it is not known where in the prompt its images, sound or video are put"
        if _mixes_up_beams(model, ids, kwargs, source):
            return "transformers may give the rows of one prompt, such as its beams, images in another order"
        if not (placeholders[:, 1:] & placeholders[:, :-1]).any():
            return "one placeholder may stand for all of an image"
        media |= placeholders
        hashes = _media_hashes(model, ids, kwargs, source)
    media &= columns[None, :] >= pads[:, None]
    if types is not None and bool(((types[:, :, -1] != 0).any(axis=0)).any()):
        return "the prompt ends within an image"
    if position_ids is None:
        shifts = np.zeros((1, *ids.shape), dtype=np.int64)
    else:
        shifts = position_shifts(position_ids, columns, pads)
    shift, agree = common_shift(shifts)
    if not bool((agree | media).all()):
        return "position_ids of text do not count up"
    column_ids = shifted_ids(ids, np.where(media, 0, shift))
    for row, start, stop in _runs(media):
        inside = np.s_[..., row, start:stop]
        parts = [ids[inside].tobytes(), shifts[-3:][inside].tobytes(), *_hashes_in(hashes, row, start, stop)]
        if types is not None:
            parts.append(types[inside].tobytes())
        column_ids[row, start:stop] = media_ids(_digest(*parts), stop - start)
    return Prompt(column_ids, media, _divisible(model, shown, ids))


def _hashes_in(hashes: dict[bytes, NDArray[np.bool_]], row: int, start: int, stop: int) -> list[bytes]:
    """The hashes that affect columns [start, stop) of a row, each with these columns."""
    found = ((key, at[row, start:stop]) for key, at in hashes.items())
    return sorted(key + at.tobytes() for key, at in found if at.any())


def narrow_media(model: PreTrainedModel, kwargs: Arguments, prompt: Prompt, served: int) -> Arguments:
    """The arguments without the media of the first `served` columns; `served` comes from `Prompt.cut`."""
    narrowed = dict(kwargs)
    for name in _NARROWED_TYPES:
        if kwargs.get(name) is not None:
            narrowed[name] = kwargs[name][:, served - prompt.column_ids.shape[1] :]
    if not prompt.media[:, served:].any():
        for name in MEDIA_ARGUMENTS & narrowed.keys():
            del narrowed[name]
    elif prompt.media[:, :served].any() and payload(kwargs):
        ids = kwargs["input_ids"]
        narrowed[ENCODED] = {
            modality: _rest(output, ids == getattr(model.config, f"{modality}_token_id"), served)
            for modality, output in kwargs[ENCODED].items()
            if output is not None
        }
        narrowed[ENCODED] = {modality: output for modality, output in narrowed[ENCODED].items() if output is not None}
    return narrowed


def _mixes_up_beams(model: PreTrainedModel, ids: Tokens, kwargs: Arguments, source: Arguments) -> bool:
    """Whether K/V may belong to other images than the prompt's, as with GLM-4V in transformers 5.23.

    For beams, it repeats each encoded image in place of all images of a prompt. Such K/V must not be found by prompts
    whose images are in order.
    """
    expand = getattr(type(model), "_expand_multimodal_outputs", None)
    own = expand is not getattr(GenerationMixin, "_expand_multimodal_outputs", None)
    return own and kwargs.get(ENCODED) is not None and len(ids) > len(source.get("input_ids", ids))


def _divisible(model: PreTrainedModel, shown: Arguments, ids: Tokens) -> bool:
    """Whether some of the media can be left out, as generate() itself does with `prefill_chunk_size`."""
    if not shown:
        return True
    if set(shown) != {ENCODED} or _slice_mm_encoder_output is None:
        return False
    for modality, output in shown[ENCODED].items():
        layers = getattr(output, "deepstack_features", None)
        features = getattr(output, "pooler_output", None)
        if not hasattr(model.config, f"{modality}_token_id") or features is None:
            return False
        # GLM-4V puts the frames of videos in the place of ids of images.
        placeholders = int((ids == getattr(model.config, f"{modality}_token_id")).sum())
        if placeholders != sum(part.numel() // part.shape[-1] for part in features):
            return False
        if layers is not None and not isinstance(layers[0][0], torch.Tensor):
            return False
    return True


def _rest(output: Any, placeholders: torch.Tensor, served: int) -> Any:
    """Features of the placeholders from column `served` on; features come in the order of (row, column)."""
    rows = placeholders.flatten().cumsum(0).view_as(placeholders) - 1
    left = rows[:, served:][placeholders[:, served:]]
    return _slice_mm_encoder_output(output, left) if len(left) else None  # type: ignore[arg-type]


def _read_types(kwargs: Arguments, ids: Tokens) -> NDArray[np.int64] | str | None:
    """Types [arguments, batch, m], or None where there are none."""
    found = []
    for name in TYPES:
        types = kwargs.get(name)
        if types is None:
            continue
        missing = max(0, ids.shape[1] - types.shape[1]) if types.ndim == 2 else 0
        kept = kwargs.get("logits_to_keep", 0)
        candidates = kept - 1 if isinstance(kept, int) else 0  # of assisted decoding: text, which has no types yet
        if types.ndim != 2 or len(types) != len(ids) or missing > max(0, candidates):
            return f"`{name}` are not one for each of the input_ids"
        given = types[:, -ids.shape[1] :].cpu().numpy().astype(np.int64)  # those of held columns may come first
        found.append(np.pad(given, ((0, 0), (0, missing))))
    return np.stack(found) if found else None


def _placeholders(model: PreTrainedModel, ids: Tokens) -> NDArray[np.bool_] | None:
    """The placeholders of media [batch, m], if the model inserts media at certain ids and nowhere else."""
    if not any(hasattr(model.base_model, name) or hasattr(model, name) for name in _MERGES):
        return None
    found = np.zeros(ids.shape, dtype=bool)
    for modality in _MODALITIES:
        found |= _is_placeholder(model, ids, modality)
    return found if found.any() else None


def _is_placeholder(model: PreTrainedModel, ids: Tokens, modality: str) -> NDArray[np.bool_]:
    for name in (f"{modality}_token_id", f"{modality}_token_index"):
        token = getattr(model.config, name, None)
        if isinstance(token, int):
            found: NDArray[np.bool_] = ids == token
            return found
    return np.zeros(ids.shape, dtype=bool)


def _runs(media: NDArray[np.bool_]) -> list[tuple[int, int, int]]:
    """Row, start and stop of every block of neighbouring media columns, in order."""
    edges = np.diff(np.pad(media, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    rows, starts = np.nonzero(edges == 1)
    stops = np.nonzero(edges == -1)[1]
    return [(int(r), int(a), int(b)) for r, a, b in zip(rows, starts, stops, strict=True)]


def _media_hashes(
    model: PreTrainedModel, ids: Tokens, kwargs: Arguments, source: Arguments
) -> dict[bytes, NDArray[np.bool_]]:
    """Hashes of media, and the columns [batch, m] whose K/V each of them may affect."""
    own = {name: value for name, value in kwargs.items() if name != ENCODED or not payload(source)}
    given = {name: value for name, value in {**own, **source}.items() if name in MEDIA_ARGUMENTS and _given(value)}
    repeats = len(ids) // len(source["input_ids"]) if "input_ids" in source else 1  # for beams
    before = _placeholders_before(model, ids, repeats)
    hashes: dict[bytes, NDArray[np.bool_]] = {}

    def add(key: bytes, rows: slice, columns: slice) -> None:
        hashes.setdefault(key, np.zeros(ids.shape, dtype=bool))[rows, columns] = True

    def add_everywhere(key: bytes) -> None:
        for row in range(len(ids)):  # rows with equal ids may have different media
            add(_digest(key, before[row].tobytes()), slice(row, row + 1), slice(None))

    for modality in sorted({_PAYLOAD[name] for name in given if name in _PAYLOAD}):
        parts = {name: value for name, value in given.items() if _modality(name) == modality}
        runs = _runs(_is_placeholder(model, ids[::repeats], modality)) if modality else []
        items = _split_items(parts, modality, [stop - start for _, start, stop in runs])
        if not items:
            add_everywhere(_digest(modality.encode(), _hash(parts)))
        for item, (row, start, stop) in zip(items, runs, strict=bool(items)):
            add(_digest(modality.encode(), item), slice(row * repeats, (row + 1) * repeats), slice(start, stop))
    rest = {name: value for name, value in given.items() if _modality(name) is None}
    if rest:
        add_everywhere(_digest(b"common", _hash(rest)))
    return hashes


def _placeholders_before(model: PreTrainedModel, ids: Tokens, repeats: int) -> NDArray[np.int64]:
    """How many placeholders of each modality come before each row, [batch, modalities]."""
    counts = np.stack(
        [_is_placeholder(model, ids[::repeats], modality).sum(axis=1) for modality in _MODALITIES], axis=1
    )
    before: NDArray[np.int64] = (counts.cumsum(axis=0) - counts).repeat(repeats, axis=0)
    return before


def _modality(name: str) -> str | None:
    """The modality that an argument belongs to; None for several."""
    if name in _PAYLOAD:
        return _PAYLOAD[name]
    return {"image_grid_thw": "image", "image_sizes": "image", "video_grid_thw": "video"}.get(name)


def _split_items(parts: Arguments, modality: str, lengths: list[int]) -> list[bytes]:
    """A hash of the one image of each run of placeholders, of all arguments of a modality.

    Empty where images and runs cannot be matched.
    """
    values = list(parts.values())
    if not lengths or not all(isinstance(value, torch.Tensor) and value.ndim for value in values):
        return []
    grid = parts.get(_GRIDS.get(modality, ""))
    if grid is not None:  # patches of all images, one after the other
        patches = grid.prod(-1).tolist()
        if len(patches) != len(lengths):
            return []
        if len({size / length for size, length in zip(patches, lengths, strict=True)}) > 1:
            return []
        if not all(len(value) in (sum(patches), len(patches)) for value in values):
            return []
        divided = [value.split(patches if len(value) == sum(patches) else 1) for value in values]
    else:
        # [images, channels, height, width], or tiles of each image with its size: others are [rows, images, …].
        pixels = parts.get("pixel_values")
        if pixels is None or not (pixels.ndim == 4 or (pixels.ndim == 5 and "image_sizes" in parts)):
            return []
        if len(set(lengths)) > 1:
            return []
        if not all(len(value) == len(lengths) for value in values):
            return []
        divided = [value.split(1) for value in values]
    return [_hash(list(item)) for item in zip(*divided, strict=True)]


def _hash(value: Any) -> bytes:
    """A hash of everything in `value`: tensors by their bytes, on the host, with shape and dtype."""
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        return _digest(str((value.dtype, tuple(value.shape))).encode(), data.tobytes())
    if isinstance(value, dict):
        return _digest(b"dict", *(part for name in sorted(value) for part in (name.encode(), _hash(value[name]))))
    if isinstance(value, list | tuple):
        return _digest(b"list", *(_hash(item) for item in value))
    if value is None or isinstance(value, bool | int | float | str):
        return _digest(b"value", repr(value).encode())
    return token_bytes(32)  # of an unknown type: it never matches
