"""Finds out how a model's keys rotate with positions, by running it on the same tokens at several positions.

Only a model's code says how it arranges pairs of dimensions, and which frequencies each layer uses. Its keys show the
same: since rotary attention is relative, the same tokens at later positions give the same keys, rotated.
"""

import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kvboost_hf.compat.forwards import forward_arguments
from kvboost_hf.compat.memo import attempt, remember
from kvboost_hf.compat.models import cache_layers, position_planes
from kvboost_hf.compat.private import PrivateCache
from kvboost_hf.compat.probes import probe_ids, probe_logits, tolerance
from kvboost_hf.compat.rotation import KeyRotation, LayerRotation, Style

_TOKENS = 4
_POSITIONS = (0, 1, 7, 61, 509)
_STYLES: tuple[Style, ...] = ("half", "interleaved")
# The second best rotation must have an error of so many times the best one's.
_CLEARLY = 4.0
_MIN_ROWS = 3  # the first one included
_UNMASKED = "unmasked window"
_WINDOW = re.compile("sliding|window|chunked", re.IGNORECASE)
_LIBRARIES = ("accelerate", "kvboost_hf", "peft", "torch", "transformers")


def key_rotation(model: PreTrainedModel) -> KeyRotation | str:
    """How the keys of a model rotate with their positions, or why they cannot be moved. One forward of 20 tokens.

    Run once per model and dtype. For models whose frequencies depend on the length it holds where `rope_regime` is
    empty.
    """
    return remember(model, (key_rotation, model.dtype), lambda: _static_reason(model) or _probed(model))


def _static_reason(model: PreTrainedModel) -> str | None:
    config: Any = model.config.get_text_config(decoder=True)
    kinds = {type(layer).__name__ for layer in cache_layers(model)}
    if other := kinds - {"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"}:
        return f"only keys and values can be moved, and it keeps something else ({', '.join(sorted(other))})"
    if "position_ids" not in forward_arguments(model):
        return "its forward takes no position_ids"
    if getattr(config, "alibi", False) or not _frequencies(model):
        return "its positions are not rotary"
    if position_planes(model) is not None or "mrope_section" in str(getattr(config, "rope_parameters", None)):
        return "its positions have several dimensions"
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        return "some of its layers attend within fixed stretches of positions"
    return None


def _probed(model: PreTrainedModel) -> KeyRotation | str:
    with _frequencies_restored(model):
        return attempt(model, lambda: _probe(model), "it fails on a few tokens at later positions")


@torch.no_grad()
def _probe(model: PreTrainedModel) -> KeyRotation | str:
    positions = _positions_within(model)
    if len(positions) < _MIN_ROWS:
        return "it has too few positions to find out how its keys rotate"
    ids = probe_ids(model)[:, :_TOKENS].expand(len(positions), -1)
    starts = torch.tensor(positions, device=ids.device)[:, None]
    cache = PrivateCache(cache_layers(model))
    probe_logits(model, ids, cache, position_ids=starts + torch.arange(_TOKENS, device=ids.device))
    frequencies = _frequencies(model)  # as the forward has left them: those that it has used
    candidates: dict[tuple[int, int], list[LayerRotation]] = {}  # by head_dim and tensor; shared by layers
    rotations: list[LayerRotation | None] = []
    layers: list[Any] = cache.layers
    for layer in layers:
        if layer.keys is None:
            rotations.append(None)
            continue
        kept = layer.keys.float().cpu(), layer.values.float().cpu()
        first_layer = not any(rotations)
        tensor = _rotated_tensor(*kept, positions, layer.keys.dtype, first_layer)
        key = kept[tensor].shape[-1], tensor
        if key not in candidates:
            candidates[key] = _rotations_of(frequencies, *key)
        rotation = _rotation(kept[tensor], kept[1 - tensor], positions, candidates[key], layer.keys.dtype, first_layer)
        if isinstance(rotation, str):
            return rotation
        rotations.append(rotation)
    return KeyRotation(tuple(rotations)) if any(rotations) else "its positions are not rotary"


def _rounding(dtype: torch.dtype) -> float:
    """The relative error of a rotated pair that a model's own rounding explains.

    Models round cosines, sines, products and sums: less than 4 units in the last place, and twice that for kernels
    that differ by the row. In float32 the rounding of angles counts more.
    """
    return 4 * torch.finfo(dtype).eps + 2e-4


def _noise(kept: torch.Tensor, positions: list[int]) -> torch.Tensor:
    """For each row, the largest difference of its first token from that of the first row."""
    return _off(kept, positions, None)[:, :, 0].amax((1, 2))


def _rotated_tensor(
    keys: torch.Tensor, values: torch.Tensor, positions: list[int], dtype: torch.dtype, first_layer: bool
) -> int:
    """1 if values change with positions and keys do not, since a part of the keys is kept as values; else 0."""
    limit = _rounding(dtype) if first_layer else tolerance(dtype)
    changed = [int((_noise(kept, positions) > limit).sum()) for kept in (keys, values)]
    return int(changed[1] > len(positions) - _MIN_ROWS >= changed[0])


def _rotation(
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: list[int],
    candidates: list[LayerRotation],
    dtype: torch.dtype,
    first_layer: bool,
) -> LayerRotation | str | None:
    """The candidate that rotates the first row's keys to the others', None if these are equal, or why there is none.

    The first token attends to itself only, so that only the rotation changes it, apart from rounding, which grows with
    the layers by attention sinks and by near ties between experts. If its values changed, its keys may have, too.

    Args:
        keys: [positions, heads, tokens, head_dim], float32: the tensor that `_rotated_tensor` chooses.
        values: The other tensor.
        positions: The position of the first token of each row; the first row's is 0.
        candidates: Rotations by the model's frequencies.
        dtype: The dtype that they were computed in.
        first_layer: Whether no attention came before.
    """
    bound, noise = _rounding(dtype), _noise(values, positions)
    usable = noise <= (bound if first_layer else tolerance(dtype))
    if usable.sum() < _MIN_ROWS:
        return f"its values depend on positions, too (by {float(noise.max()):.2g} of their size)"

    def misfit(rotation: LayerRotation | None) -> float:
        off = _off(keys, positions, rotation)[usable]
        first = off[:, :, 0].amax((1, 2)) / (bound + 2 * noise[usable])
        later = off[:, :, 1:].mean((1, 3)).median() / tolerance(dtype)
        return float(torch.maximum(first.max(), later))

    fits = sorted((misfit(rotation), at) for at, rotation in enumerate([None, *candidates]))
    best, at = fits[0]
    if not best <= 1:
        return f"its keys change with positions by more than a rotation (by {best:.2g} times what rounding explains)"
    if len(fits) > 1 and fits[1][0] < min(1, _CLEARLY * best):
        return "its keys do not tell which of several rotations is theirs"
    return candidates[at - 1] if at > 0 else None


def _positions_within(model: PreTrainedModel) -> list[int]:
    """First positions of the probe's rows, below the length of learned tables and of changing frequencies."""
    config: Any = model.config.get_text_config(decoder=True)
    limits = (getattr(config, "max_position_embeddings", None), original_length(model))
    limit = min((limit for limit in limits if isinstance(limit, int)), default=None)
    return [p for p in _POSITIONS if limit is None or p + _TOKENS < limit]


def _off(kept: torch.Tensor, positions: list[int], rotation: LayerRotation | None) -> torch.Tensor:
    """The difference of each row from the first, rotated to its positions, relative to the size of rotated pairs."""
    first = expected = kept[0]
    size = first.abs()
    if rotation is not None:
        quarter = LayerRotation(torch.full_like(rotation.inv_freq, torch.pi / 2), rotation.style, rotation.offset)
        size = first.hypot(quarter.rotate(first, 1, torch.empty_like(first)))  # of each pair
        expected = torch.stack([rotation.rotate(first, p, torch.empty_like(first)) for p in positions])
    size = size + first.square().mean(-1, keepdim=True).sqrt()
    return (kept - expected).abs() / size.clamp_min(torch.finfo(size.dtype).tiny)


def _rotations_of(frequencies: list[torch.Tensor], head_dim: int, tensor: int) -> list[LayerRotation]:
    """All rotations of a head by these frequencies; partial ones are at its front or at its end."""
    found = []
    for inv_freq in frequencies:
        offsets = sorted({0, head_dim - 2 * inv_freq.numel()})
        if offsets[0] == 0 and head_dim % 2 == 0:
            found += [
                LayerRotation(sign * inv_freq, style, offset, tensor)
                for sign, style, offset in product((1, -1), _STYLES[: inv_freq.numel()], offsets)
            ]
    return found


def _frequencies(model: PreTrainedModel) -> list[torch.Tensor]:
    """All different rotary frequencies in a model, float32 and in host memory."""
    found: list[torch.Tensor] = []
    for name, buffer in model.named_buffers():
        own = name.rpartition(".")[2]
        if "inv_freq" in own and "original" not in own and buffer.ndim == 1 and not buffer.is_meta:
            inv_freq = buffer.detach().float().cpu()
            if not any(_alike(inv_freq, other) for other in found):
                found.append(inv_freq.clone())
    dim = getattr(model.config, "rotary_dim", None)
    if not found and isinstance(dim, int):  # GPT-J and CodeGen keep tables of sines
        found.append(1.0 / (10_000 ** (torch.arange(0, dim, 2, dtype=torch.int64, device="cpu") / dim)))
    return found


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-6, atol=0)


@contextmanager
def _frequencies_restored(model: PreTrainedModel) -> Iterator[None]:
    """Restore rotary frequencies at the end, which a short forward may reset to their original values."""
    varying = [module for module in model.modules() if frequencies_vary(module)]
    before = [
        (dict(module.__dict__), {n: (b, b.clone()) for n, b in module._buffers.items() if b is not None})
        for module in varying
    ]
    try:
        yield
    finally:
        for module, (attributes, buffers) in zip(varying, before, strict=True):
            module.__dict__.update(attributes)
            for name, (buffer, value) in buffers.items():
                module._buffers[name] = buffer
                if not torch.equal(buffer, value):
                    with torch.inference_mode(buffer.is_inference()):
                        buffer.copy_(value)


def rope_regime(model: PreTrainedModel, length: int) -> bytes | None:
    """The set of rotary frequencies that a forward uses whose last token is number `length`.

    K/V of one regime is never used in another. With "dynamic" scaling every length beyond the original one has its
    own frequencies; with "longrope" all of these share one set. Behind a window that is not masked, what a token sees
    depends on how its prompt was cut.

    Returns:
        A name of the regime: empty for the original frequencies and for models with fixed ones; None for K/V that is
        valid for this length only.
    """
    regime = b""
    for kind, limit in _limits(model):
        if kind == "longrope" and length > limit:
            regime = b"long"
        elif kind == "dynamic" and length >= limit:
            return None
        elif kind == _UNMASKED and length > limit:
            return None
    return regime


def original_length(model: PreTrainedModel) -> int | None:
    """The length up to which frequencies are the original ones, and windows hide nothing; None without a limit."""
    return min((limit for _, limit in _limits(model)), default=None)


def has_unmasked_windows(model: PreTrainedModel) -> bool:
    """Whether a configuration has windows that the code of the model knows nothing of.

    transformers makes cache layers for them, which let go of tokens that the rest of a prompt has seen.
    """
    return any(kind == _UNMASKED for kind, _ in _limits(model))


def frequencies_vary(module: nn.Module) -> bool:
    """Whether a module is a rotary embedding whose frequencies depend on the length."""
    if "rope_type" not in module.__dict__:
        return False
    return any(kind == "longrope" or "dynamic" in kind for kind in _rope_types(module).values())


def _rope_types(module: nn.Module) -> dict[str | None, str]:
    kinds: Any = module.rope_type
    by_layer_type = kinds if isinstance(kinds, dict) else {None: kinds}
    return {layer_type: kind for layer_type, kind in by_layer_type.items() if isinstance(kind, str)}


def _limits(model: PreTrainedModel) -> frozenset[tuple[str, int]]:
    return remember(model, rope_regime, lambda: _find_limits(model))


def _find_limits(model: PreTrainedModel) -> frozenset[tuple[str, int]]:
    """Kinds of rotary embedding that depend on the length, and the length from which on they do; unmasked windows."""
    windows = [int(layer.sliding_window) for layer in cache_layers(model) if getattr(layer, "is_sliding", False)]
    found: set[tuple[str, int]] = {(_UNMASKED, min(windows))} if windows and not _names_windows(model) else set()
    for module in filter(frequencies_vary, model.modules()):
        for layer_type, kind in _rope_types(module).items():
            if kind == "longrope":
                parameters: Any = module.config.rope_parameters  # type: ignore[union-attr]
                parameters = parameters[layer_type] if layer_type is not None else parameters
                found.add(("longrope", int(parameters["original_max_position_embeddings"])))
            elif "dynamic" in kind:
                found.add(("dynamic", int(module.original_max_seq_len)))  # type: ignore[arg-type]
    return frozenset(found)


def _names_windows(model: PreTrainedModel) -> bool:
    """Whether some code of a model's own, not of libraries, mentions windows, as all does that masks them."""
    files = {
        base.__module__
        for kind in {type(module) for module in model.modules()}
        for base in kind.__mro__
        if "forward" in base.__dict__
        and (base.__module__.startswith("transformers.models.") or base.__module__.partition(".")[0] not in _LIBRARIES)
    }
    try:
        return any(_WINDOW.search(inspect.getsource(sys.modules[name])) for name in files)
    except (KeyError, OSError, TypeError):  # there is no source to read
        return True
