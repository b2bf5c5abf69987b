"""Finding out what is right for a model: by looking at it, and by running it on a few tokens.

Tables of architectures go stale; most of what matters can be seen in the cache that transformers itself would make for
the model, and in its logits. Only what neither can show is in a table.
"""

import inspect
import threading
from collections.abc import Callable, Hashable
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from kvboost_hf.compat.attention import attention_function
from kvboost_hf.compat.kept import KeptOnModel
from kvboost_hf.compat.models import (
    SERVED_LAYERS,
    STATEFUL_LAYERS,
    cache_argument,
    cache_layers,
    has_own_cache,
    input_device,
    no_cache_reason,
)

# Largest difference in logits, in standard deviations of the logits, that rounding explains where the same thing is
# computed in matrices of other shapes. Encoder-style attention gives 0.002 and more in float32.
_TOLERANCE = {torch.float32: 2e-4, torch.float64: 2e-4, torch.float16: 5e-2, torch.bfloat16: 2e-1}
# Where even the shapes are the same.
_SAME_SHAPE_TOLERANCE = {torch.float32: 2e-4, torch.float64: 2e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
_PROBE_TOKENS = 8

# What no probe of a few tokens can see, by model type.
_KNOWN_WRONG = {
    "moshi": "transformers applies its sliding window to cached tokens only, so that a prompt in parts differs",
}


class ProbeCache(DynamicCache):
    """The cache of a probe: a type of its own, so that no hook takes it for a user's."""


# What was run: the dtype, the function that computes attention, and what others have changed in the model.
_Probed = tuple[torch.dtype, object, Hashable]


class _Findings(KeptOnModel):
    """What was found of a model, so that it is found once."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.static: tuple[str | None] | None = None
        self.changes: Hashable = ()  # by others, in functions and configurations of parts
        self.probed: dict[_Probed, str | None] = {}
        self.padded: dict[_Probed, str | None] = {}
        self.steps: dict[_Probed, str | None] = {}


def known_reason(model: PreTrainedModel) -> str | None:
    """Why reuse is ruled out, as far as can be told without running the model now, or None."""
    found = _Findings.of(model)
    with found.lock:
        if found.static is None:
            found.static = (_static_reason(model),)
        return found.static[0] or found.probed.get(_now(model))


def probe_reason(model: PreTrainedModel) -> str | None:
    """Why a run on a few tokens rules out reuse, or None. Once per dtype and attention: 2 or 3 short forwards."""
    return _once(model, _Findings.of(model).probed, _probe)


def padding_reason(model: PreTrainedModel) -> str | None:
    """Why a run on a few tokens rules out storing K/V of padded rows, or None. Run once per dtype and attention."""
    return _once(model, _Findings.of(model).padded, _probe_padding)


def steps_reason(model: PreTrainedModel) -> str | None:
    """Why what a model keeps of tokens that it was given one by one is not what it keeps of a prompt, or None.

    Models with states have one way for prompts and another for single tokens. Run once per dtype and attention.
    """
    return _once(model, _Findings.of(model).steps, _probe_steps)


def _once(
    model: PreTrainedModel, known: dict[_Probed, str | None], probe: Callable[[PreTrainedModel], str | None]
) -> str | None:
    now = _now(model)
    with _Findings.of(model).lock:
        if now not in known:
            try:
                known[now] = probe(model)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # models fail in ways of their own on what they were not written for
                known[now] = f"it fails on a prompt in parts ({type(error).__name__}: {error})"
        return known[now]


def _now(model: PreTrainedModel) -> _Probed:
    return model.dtype, attention_function(model), _Findings.of(model).changes


def note_changes(model: PreTrainedModel, changes: Hashable) -> None:
    """What others have changed in the functions of a model, or in the configurations of its parts, so far.

    With other changes it is probed again.
    """
    _Findings.of(model).changes = changes


def _static_reason(model: PreTrainedModel) -> str | None:
    if (known := _KNOWN_WRONG.get(model.config.model_type)) is not None:
        return known
    if (reason := no_cache_reason(model)) is not None:
        return reason
    if has_own_cache(model):
        return "it keeps its K/V in a cache class of its own"
    try:
        kinds = {type(layer).__name__ for layer in cache_layers(model)}
    except Exception as error:  # whatever transformers' own cache does not understand
        return f"transformers cannot make a cache for its configuration ({type(error).__name__}: {error})"
    unknown = ", ".join(sorted(kinds - SERVED_LAYERS)) or ("" if kinds else "none at all")
    if unknown:
        return f"its cache has layers of a kind that cannot be served ({unknown})"
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        return "its forward takes no logits_to_keep, so it cannot be known which logits a caller needs"
    return None


@torch.no_grad()
def _probe(model: PreTrainedModel) -> str | None:
    """Two forwards, of two rows and of half a row; three where the cache cannot be cut."""
    ids, cut = probe_ids(model), _PROBE_TOKENS // 2
    other = torch.cat([ids[:, :cut], ids[:, cut:].flip(1)], dim=1)
    cache = ProbeCache(config=model.config)
    both = probe_logits(model, torch.cat([ids, other]), cache)
    whole = both[:1]
    off = difference(both[1:, :cut], whole[:, :cut])
    if not off <= _SAME_SHAPE_TOLERANCE.get(model.dtype, 2e-2):
        return f"it is not causal: later tokens change earlier logits (by {off:.2g} standard deviations)"
    if all(map(_can_be_cut, cache.layers)):
        cache.batch_select_indices(torch.tensor([0]))  # on the host, for layers on any device
        cache.crop(cut - _PROBE_TOKENS)
    else:
        cache = ProbeCache(config=model.config)
        probe_logits(model, ids[:, :cut], cache)
    off = difference(probe_logits(model, ids[:, cut:], cache), whole[:, cut:])
    if not off <= tolerance(model.dtype):
        return f"a prompt in two parts gives other logits than in one (by {off:.2g} standard deviations)"
    return None


@torch.no_grad()
def _probe_steps(model: PreTrainedModel) -> str | None:
    if not {type(layer).__name__ for layer in cache_layers(model)} & STATEFUL_LAYERS:
        return None
    ids, cut = probe_ids(model), _PROBE_TOKENS - 2
    whole, cache = probe_logits(model, ids), ProbeCache(config=model.config)
    probe_logits(model, ids[:, :cut], cache)
    steps = torch.cat([probe_logits(model, ids[:, [at]], cache) for at in range(cut, _PROBE_TOKENS)], dim=1)
    off = difference(steps, whole[:, cut:])
    if not off <= tolerance(model.dtype):
        return f"tokens one by one give other logits than at once (by {off:.2g} standard deviations)"
    return None


@torch.no_grad()
def _probe_padding(model: PreTrainedModel) -> str | None:
    """Padding on the left must change nothing, in one part and in two."""
    ids, pad, cut = probe_ids(model), 3, 7
    padded = torch.cat([ids[:, :pad], ids], dim=1)
    mask = torch.ones_like(padded)
    mask[:, :pad] = 0
    # A second row without padding: some models look at the mask of batches only.
    padded, mask = torch.cat([padded, padded]), torch.cat([mask, torch.ones_like(mask)])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    def run(start: int, stop: int, cache: ProbeCache) -> torch.Tensor:
        given = {"position_ids": positions[:, start:stop]} if takes_positions else {}
        return probe_logits(model, padded[:, start:stop], cache, attention_mask=mask[:, :stop], **given)

    alone = ProbeCache(config=model.config)
    plain = probe_logits(model, ids, alone)
    whole, parts = ProbeCache(config=model.config), ProbeCache(config=model.config)
    for padded_cache, found in (
        (whole, run(0, padded.shape[1], whole)),
        (parts, torch.cat([run(0, cut, parts), run(cut, padded.shape[1], parts)], dim=1)),
    ):
        # Keys, too: rotated by their columns, they would give the same logits, but not to a row with other padding.
        pairs = [(found[:1, pad:], plain)] + [
            (theirs[:1, :, -_PROBE_TOKENS:], ours)
            for theirs, ours in zip(_keys(padded_cache), _keys(alone), strict=True)
            if ours is not None and theirs is not None
        ]
        off = max(difference(padded_one, one) for padded_one, one in pairs)
        if not off <= tolerance(model.dtype):
            return f"padding changes what it computes (by {off:.2g} standard deviations)"
    return None


def _can_be_cut(layer: Any) -> bool:
    """Whether a cache layer of the probe can be cut back to its first half."""
    if not isinstance(layer, DynamicLayer) or not layer.is_initialized:
        return False
    if type(layer) is DynamicSlidingWindowLayer:
        return int(layer.sliding_window) > _PROBE_TOKENS
    return type(layer) is DynamicLayer


def _keys(cache: ProbeCache) -> list[torch.Tensor | None]:
    """The keys of each full-attention layer, [batch, heads, length, dim]."""
    layers: list[Any] = cache.layers
    return [layer.keys if type(layer) is DynamicLayer and layer.is_initialized else None for layer in layers]


def probe_ids(model: PreTrainedModel) -> torch.Tensor:
    """The tokens of a probe, [1, 8], where the model takes them."""
    vocab_size = model.get_input_embeddings().weight.shape[0]  # type: ignore[index]
    return (torch.arange(_PROBE_TOKENS, device=input_device(model))[None] * 7919 + 13) % vocab_size


def tolerance(dtype: torch.dtype) -> float:
    """The largest `difference` that rounding explains where the same thing is computed in other shapes."""
    return _TOLERANCE.get(dtype, 2e-1)


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, in standard deviations of what is expected; NaN where there is one on either side."""
    return float((found - expected).abs().max()) / (float(expected.std()) or 1.0)


def probe_logits(model: PreTrainedModel, ids: torch.Tensor, cache: Cache | None = None, **given: Any) -> torch.Tensor:
    """Run the model on text as its own generate() would, with more arguments if any are given."""
    name = cache_argument(model)
    cache = ProbeCache(config=model.config) if cache is None else cache
    if model.config.get_text_config(decoder=True) is not model.config:
        given = {**_multimodal_arguments(model, ids, cache), **given}
    logits: torch.Tensor = model(input_ids=ids, **{name: cache}, use_cache=True, return_dict=True, **given).logits
    return logits.float()


def _multimodal_arguments(model: PreTrainedModel, ids: torch.Tensor, cache: Cache) -> dict[str, Any]:
    """What a processor adds for text: a model might take types of 0 for something else than text.

    Positions, too: some models count from where their last prompt left off if they are given none.
    """
    accepted = inspect.signature(model.forward).parameters
    held = cache.get_seq_length()
    given = {"position_ids": torch.arange(held, held + ids.shape[1], device=ids.device)[None].expand_as(ids)}
    given |= {name: torch.zeros_like(ids) for name in ("token_type_ids", "mm_token_type_ids")}
    return {name: value for name, value in given.items() if name in accepted}
