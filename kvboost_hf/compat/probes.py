"""Finds out whether K/V of a model can be reused, by inspecting it and by running it on a few tokens.

Tables of architectures go stale. Most properties show in the cache that transformers makes for the model, or in its
logits; only the others are in a table.
"""

import inspect
import math
import pickle
import random
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from kvboost_hf.compat.forwards import forward_arguments
from kvboost_hf.compat.hooks import LAST, Shown, hook_hidden_states
from kvboost_hf.compat.memo import attempt, recall, remember
from kvboost_hf.compat.models import (
    SERVED_LAYERS,
    STATEFUL_LAYERS,
    attention_function,
    cache_layers,
    embedding_table,
    has_own_cache,
    input_device,
    no_cache_reason,
    text_model,
)
from kvboost_hf.compat.private import PrivateCache, run_model

# The largest difference of logits, in standard deviations of the logits, that rounding explains if the same forward is
# computed in matrices of other shapes. Encoder-style attention gives 0.002 and more in float32.
_TOLERANCE = {torch.float32: 2e-4, torch.float64: 2e-4, torch.float16: 5e-2, torch.bfloat16: 2e-1}
# If the shapes are the same.
_SAME_SHAPE_TOLERANCE = {torch.float32: 2e-4, torch.float64: 2e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
# The largest difference of states, as a share of their norm; in other dtypes 2e-2.
_STATE_TOLERANCE = {torch.float32: 2e-4, torch.float64: 2e-4}
_PROBE_TOKENS = 8

_LIMIT = "time_step_limit"  # of Mamba-2 mixers
_GROWS = "its forward adds layers to the cache, with K/V of their own"
# Reasons that no probe of a few tokens can find, or that hold for a first prompt, too, by model type.
_KNOWN_WRONG = {
    **dict.fromkeys(("dory", "inkling2_loop", "inkling2_loop_text"), _GROWS),
    "moshi": "transformers applies its sliding window to cached tokens only, so that a prompt in parts differs",
}


def known_reason(model: PreTrainedModel) -> str | None:
    """Why reuse is ruled out, as far as is known without running the model now, or None."""
    static = remember(model, known_reason, lambda: _static_reason(model))
    if static is None and type(model.get_input_embeddings()).__name__ == "_MapInputEmbedding":
        return "transformers maps ids of another tokenizer to its own (do_sample with `assistant_tokenizer`)"
    reason: str | None = static or recall(model, _key(probe_reason, model))
    return reason


def probe_reason(model: PreTrainedModel) -> str | None:
    """Why a run on a few tokens rules out reuse, or None. Once per dtype and attention: 2 or 3 short forwards."""
    return _once(model, probe_reason, _probe)


def padding_reason(model: PreTrainedModel) -> str | None:
    """Why a run on a few tokens rules out storing K/V of padded rows, or None. Run once per dtype and attention."""
    text = model.config.get_text_config(decoder=True)
    if getattr(text, "attn_temperature_tuning", False):  # Llama 4, for columns that a probe does not reach
        return "its attention scales queries by their columns, padding included"
    return _once(model, padding_reason, _probe_padding)


def steps_reason(model: PreTrainedModel) -> str | None:
    """Why the states of tokens that a model was given one by one differ from those of a prompt, or None.

    Models with states have one code path for prompts and another for single tokens. Run once per dtype and attention.
    """
    if not remember(model, _keeps_states, lambda: _keeps_states(model)):
        return None
    return _once(model, steps_reason, _probe_steps)


@contextmanager
def as_steps(model: PreTrainedModel) -> Iterator[None]:
    """Have several tokens computed as one by one, where transformers limits time steps of the former only.

    Zamba2 and Nemotron-H do so: `selective_state_update`, which decodes, is given no `dt_limit`. Other threads that
    run the model meanwhile compute without the limit, too.
    """
    if steps_reason(model) is None:
        yield
        return
    limited: list[Any] = remember(model, as_steps, lambda: [m for m in model.modules() if hasattr(m, _LIMIT)])
    before = [getattr(module, _LIMIT) for module in limited]
    try:
        for module in limited:
            setattr(module, _LIMIT, (0.0, math.inf))
        yield
    finally:
        for module, limit in zip(limited, before, strict=True):
            setattr(module, _LIMIT, limit)


def several_steps_reason(model: PreTrainedModel) -> str | None:
    """Why several tokens at once, computed `as_steps`, have other logits than one by one, or None."""
    if steps_reason(model) is None:
        return None
    return _once(model, several_steps_reason, _probe_several_steps)


def known_hidden_states_reason(model: PreTrainedModel) -> str | None:
    """Why the logits of reused tokens cannot be computed from kept hidden states, as far as is known now, or None."""
    if text_model(model) is None:
        return "its head cannot be told from the rest of it"
    reason: str | None = recall(model, _key(hidden_states_reason, model))
    return reason


def hidden_states_reason(model: PreTrainedModel) -> str | None:
    """Why the logits of reused tokens cannot be computed from kept hidden states, or None.

    Run once per dtype and attention: three short forwards.
    """
    return known_hidden_states_reason(model) or _once(model, hidden_states_reason, _probe_hidden_states)


@dataclass(frozen=True, slots=True)
class HiddenForm:
    """The hidden states that a model returns with `output_hidden_states`."""

    count: int  # how many there are: as a rule one for each layer, and the embeddings in front
    tied: bool  # the last of them are those that the head takes
    selects: bool  # numbers choose among them; else any number gives all
    lists: bool  # a list numbers them as they are returned without one

    def layers(self, asked: Any) -> tuple[int, ...]:
        """The layers, by their numbers or `LAST`, that a value of `output_hidden_states` gives."""
        return self.numbered(asked if self.selects else True)

    def numbered(self, asked: Any) -> tuple[int, ...]:
        """The layers of these numbers. As transformers does it, numbers of no layer choose none."""
        numbers: Iterable[int] = range(self.count)
        if asked is not True:
            numbers = [asked] if isinstance(asked, int) else asked
        found = {int(n) % self.count for n in numbers if -self.count <= n < self.count}
        return tuple(LAST if self.tied and n == self.count - 1 else n for n in sorted(found))


def hidden_form(model: PreTrainedModel) -> HiddenForm | str:
    """The hidden states that a model returns; or why those of reused tokens cannot be returned from kept ones.

    Run once per dtype and attention: five short forwards.
    """
    known = known_hidden_states_reason(model)
    return known if known is not None else remember(model, _key(hidden_form, model), lambda: _find_hidden_form(model))


def _find_hidden_form(model: PreTrainedModel) -> HiddenForm | str:
    return attempt(model, lambda: _probe_hidden_form(model), "it fails to return hidden states of a prompt in parts")


_Reason = Callable[[PreTrainedModel], Any]


def _once(model: PreTrainedModel, name: _Reason, probe: _Reason) -> str | None:
    return remember(
        model, _key(name, model), lambda: attempt(model, lambda: probe(model), "it fails on a prompt in parts")
    )


def _key(name: _Reason, model: PreTrainedModel) -> Hashable:
    """A probe depends on the mode, autocast, the dtype and the attention, beside the settings of the model."""
    autocast = torch.is_autocast_enabled(input_device(model).type)
    return name, model.training, autocast, model.dtype, attention_function(model)


def _static_reason(model: PreTrainedModel) -> str | None:
    if (known := _KNOWN_WRONG.get(model.config.model_type)) is not None:
        return known
    if (reason := no_cache_reason(model)) is not None:
        return reason
    if has_own_cache(model):
        return "it keeps its K/V in a cache class of its own"
    types = attempt(
        model,
        lambda: {type(layer).__name__ for layer in cache_layers(model)},
        "transformers cannot make a cache for its configuration",
    )
    if isinstance(types, str):
        return types
    unknown = ", ".join(sorted(types - SERVED_LAYERS)) or ("" if types else "none at all")
    return f"its cache has layers of a kind that cannot be served ({unknown})" if unknown else None


@torch.no_grad()
def _probe(model: PreTrainedModel) -> str | None:
    """Compare a prompt in two parts with the whole: two forwards; three where the cache cannot be cropped."""
    ids, cut = probe_ids(model), _PROBE_TOKENS // 2
    other = torch.cat([ids[:, :cut], ids[:, cut:].flip(1)], dim=1)
    cache = PrivateCache(cache_layers(model))
    count = len(cache.layers)
    both = probe_logits(model, torch.cat([ids, other]), cache)
    if len(cache.layers) != count:
        return _GROWS
    whole, dtype = both[:1], _computed_in(model, cache)
    off = difference(both[1:, :cut], whole[:, :cut])
    if not off <= _SAME_SHAPE_TOLERANCE.get(dtype, 2e-2):
        return f"it is not causal: later tokens change earlier logits (by {off:.2g} standard deviations)"
    if all(map(_can_be_cut, cache.layers)):
        cache.batch_select_indices(torch.tensor([0], device="cpu"))  # on the host, for layers on any device
        cache.crop(cut - _PROBE_TOKENS)
        parts = cache
    else:
        parts = PrivateCache(cache_layers(model))
        probe_logits(model, ids[:, :cut], parts)
    off = difference(probe_logits(model, ids[:, cut:], parts), whole[:, cut:])
    if not off <= tolerance(dtype):
        return f"a prompt in two parts gives other logits than in one (by {off:.2g} standard deviations)"
    return _states_reason(parts, cache, dtype) if any(map(_holds_states, parts.layers)) else None


def _holds_states(layer: Any) -> bool:
    """Whether a layer keeps states of linear attention or convolutions."""
    return hasattr(layer, "recurrent_states")


def _states_reason(parts: PrivateCache, whole: PrivateCache, dtype: torch.dtype) -> str | None:
    """Why states show that a prompt in two parts is computed as another one than in one, or None.

    Logits need not show it: in half precision, eight tokens may change them by less than rounding does. States of the
    first layer that has some differ by its own rounding only.

    Args:
        parts: The cache behind a prompt in two parts.
        whole: That behind the prompt in one part, in row 0.
        dtype: What they were computed in.
    """
    for ours, theirs in zip(parts.layers, whole.layers, strict=True):
        pairs = list(zip(_states(ours), _states(theirs), strict=True)) if _holds_states(ours) else []
        if pairs:
            off = max(float((a[0] - b[0]).float().norm() / b[0].float().norm().clamp(min=1e-30)) for a, b in pairs)
            if off <= _STATE_TOLERANCE.get(dtype, 2e-2):
                return None
            return f"a prompt in two parts gives other states than in one (by {off:.2g} of their norm)"
    return "it keeps its states elsewhere than in its cache"


def _states(layer: Any) -> list[torch.Tensor]:
    found = (*layer.conv_states.values(), *layer.recurrent_states.values())
    return [state for state in found if state is not None]


def _keeps_states(model: PreTrainedModel) -> bool:
    """Whether some layers of a model keep a sum of what they saw."""
    return any(type(layer).__name__ in STATEFUL_LAYERS for layer in cache_layers(model))


def _probe_steps(model: PreTrainedModel) -> str | None:
    return _compare_steps(model, lambda cache: tolerance(model.dtype))


def _probe_several_steps(model: PreTrainedModel) -> str | None:
    """As `_probe_steps`, of tokens that are only compared: they may be off by the rounding of autocast, too."""
    with as_steps(model):
        return _compare_steps(model, lambda cache: tolerance(_computed_in(model, cache)))


@torch.no_grad()
def _compare_steps(model: PreTrainedModel, allowed: Callable[[PrivateCache], float]) -> str | None:
    ids, cut = probe_ids(model), _PROBE_TOKENS - 2
    whole, cache = probe_logits(model, ids), PrivateCache(cache_layers(model))
    probe_logits(model, ids[:, :cut], cache)
    steps = torch.cat([probe_logits(model, ids[:, [at]], cache) for at in range(cut, _PROBE_TOKENS)], dim=1)
    off = difference(steps, whole[:, cut:])
    if not off <= allowed(cache):
        return f"tokens one by one give other logits than at once (by {off:.2g} standard deviations)"
    return None


@torch.no_grad()
def _probe_hidden_states(model: PreTrainedModel) -> str | None:
    """Compare the logits of a prompt in two parts, the first from hidden states, with those of the whole."""
    ids, cut = probe_ids(model), _PROBE_TOKENS // 2
    kept: list[torch.Tensor] = []

    def keep(shown: Shown) -> Shown:
        kept.append(shown.last)
        return shown._replace(last=torch.cat(kept, dim=1))

    hook_hidden_states(model)
    parts = PrivateCache(cache_layers(model))
    parts.take_hidden_states = keep
    probe_logits(model, ids[:, :cut], parts)
    found, whole = probe_logits(model, ids[:, cut:], parts), probe_logits(model, ids)
    off = difference(found, whole) if found.shape == whole.shape else float("inf")
    if not off <= tolerance(model.dtype):
        return f"its head gives other logits for kept hidden states (by {off:.2g} standard deviations)"
    return None


@torch.no_grad()
def _probe_hidden_form(model: PreTrainedModel) -> HiddenForm | str:
    """Compare the hidden states of a prompt in two parts, the first from kept ones, with those of the whole."""
    ids, cut = probe_ids(model), _PROBE_TOKENS // 2
    whole = _hidden_states(model, ids, PrivateCache(cache_layers(model)), True)
    selected = _hidden_states(model, ids[:, :cut], PrivateCache(cache_layers(model)), [len(whole) - 1])
    lists = len(selected) == len(whole)
    selects = lists and selected[0] is None
    hook_hidden_states(model, selects=selects, count=len(whole))
    parts, kept = PrivateCache(cache_layers(model)), []

    def keep(shown: Shown) -> Shown:
        kept.append(shown)
        of_layers = zip(*[each.layers for each in kept], strict=True)
        return Shown(shown.last, tuple([torch.cat([part for part in of if part is not None], 1) for of in of_layers]))

    parts.hidden_layers, parts.take_hidden_states = range(len(whole)), keep
    _hidden_states(model, ids[:, :cut], parts, False)
    found = _hidden_states(model, ids[:, cut:], parts, True)
    for theirs, ours in zip(whole, found, strict=True):
        if theirs.ndim != 3 or theirs.shape[:2] != ids.shape:
            return f"its hidden states have the shape {list(theirs.shape)} for {list(ids.shape)} tokens"
        off = difference(ours.float(), theirs.float()) if ours.shape == theirs.shape else float("inf")
        if not off <= tolerance(model.dtype):
            return f"a prompt in two parts has other hidden states than in one (by {off:.2g} standard deviations)"
    last, top = kept[0].last, kept[0].layers[-1]
    return HiddenForm(len(whole), top is not None and torch.equal(last, top), selects, lists)


def _hidden_states(model: PreTrainedModel, ids: torch.Tensor, cache: PrivateCache, asked: Any) -> Sequence[Any]:
    given = {"output_hidden_states": asked}
    if model.config.get_text_config(decoder=True) is not model.config:
        given = {**_multimodal_arguments(model, ids, cache), **given}
    states: Sequence[Any] = run_model(model, ids, cache, **given).hidden_states
    return states


@torch.no_grad()
def _probe_padding(model: PreTrainedModel) -> str | None:
    """Compare padded with unpadded rows, for a prompt in one part and in two."""
    ids, pad, cut = probe_ids(model), 3, 7
    padded = torch.cat([ids[:, :pad], ids], dim=1)
    mask = torch.ones_like(padded)
    mask[:, :pad] = 0
    # A second row without padding: some models look at the mask of batches only.
    padded, mask = torch.cat([padded, padded]), torch.cat([mask, torch.ones_like(mask)])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    takes_positions = "position_ids" in forward_arguments(model)

    def run(start: int, stop: int, cache: PrivateCache) -> torch.Tensor:
        given = {"position_ids": positions[:, start:stop]} if takes_positions else {}
        return probe_logits(model, padded[:, start:stop], cache, attention_mask=mask[:, :stop], **given)

    alone = PrivateCache(cache_layers(model))
    plain = probe_logits(model, ids, alone)
    whole, parts = PrivateCache(cache_layers(model)), PrivateCache(cache_layers(model))
    for padded_cache, found in (
        (whole, run(0, padded.shape[1], whole)),
        (parts, torch.cat([run(0, cut, parts), run(cut, padded.shape[1], parts)], dim=1)),
    ):
        # Keys, too: rotated by their columns, they give the same logits here, but not in a row with other padding.
        pairs = [(found[:1, pad:], plain)] + [
            (theirs[:1, :, -_PROBE_TOKENS:], ours)
            for theirs, ours in zip(_keys(padded_cache), _keys(alone), strict=True)
            if ours is not None and theirs is not None
        ]
        off = max(difference(padded_one, one) for padded_one, one in pairs)
        if not off <= tolerance(_computed_in(model, alone)):
            return f"padding changes what it computes (by {off:.2g} standard deviations)"
    return None


def _computed_in(model: PreTrainedModel, cache: PrivateCache) -> torch.dtype:
    """The least exact dtype of a model and of the K/V that it computes: autocast leaves weights as they are."""
    layers: list[Any] = cache.layers
    held = [part for layer in layers for part in (getattr(layer, "keys", None), getattr(layer, "values", None))]
    return max([model.dtype, *(part.dtype for part in held if isinstance(part, torch.Tensor))], key=tolerance)


def _can_be_cut(layer: Any) -> bool:
    """Whether a cache layer of the probe can be cropped to its first half."""
    if not isinstance(layer, DynamicLayer) or not layer.is_initialized:
        return False
    if type(layer) is DynamicSlidingWindowLayer:
        return int(layer.sliding_window) > _PROBE_TOKENS
    return type(layer) is DynamicLayer


def _keys(cache: PrivateCache) -> list[torch.Tensor | None]:
    """The keys of each full-attention layer, [batch, heads, length, dim]."""
    layers: list[Any] = cache.layers
    return [layer.keys if type(layer) is DynamicLayer and layer.is_initialized else None for layer in layers]


def probe_ids(model: PreTrainedModel) -> torch.Tensor:
    """The tokens of a probe, [1, 8], where the model takes them."""
    vocab_size = len(embedding_table(model))
    return (torch.arange(_PROBE_TOKENS, device=input_device(model))[None] * 7919 + 13) % vocab_size


def tolerance(dtype: torch.dtype) -> float:
    """The largest `difference` that rounding explains if the same forward is computed in other shapes."""
    return _TOLERANCE.get(dtype, 2e-1)


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, in standard deviations of `expected`: NaN if either side contains one, 0 if empty."""
    if not expected.numel():  # compressed K/V of a text that is shorter than what is compressed at once
        return 0.0
    return float((found - expected).abs().max()) / (float(expected.std()) or 1.0)


def probe_logits(model: PreTrainedModel, ids: torch.Tensor, cache: Cache | None = None, **given: Any) -> torch.Tensor:
    """Run the model on text as its own generate() would, with more arguments if any are given."""
    cache = PrivateCache(cache_layers(model)) if cache is None else cache
    if model.config.get_text_config(decoder=True) is not model.config:
        given = {**_multimodal_arguments(model, ids, cache), **given}
    logits: torch.Tensor = run_model(model, ids, cache, logits=0, **given).logits
    return logits.float()


def _multimodal_arguments(model: PreTrainedModel, ids: torch.Tensor, cache: Cache) -> dict[str, Any]:
    """The token types and positions that a processor adds for text, since the defaults of some models differ.

    Without positions, some models count on from their last prompt.
    """
    accepted = forward_arguments(model).defaults
    held = cache.get_seq_length()
    given = {"position_ids": torch.arange(held, held + ids.shape[1], device=ids.device)[None].expand_as(ids)}
    given |= {name: torch.zeros_like(ids) for name in ("token_type_ids", "mm_token_type_ids")}
    return {name: value for name, value in given.items() if name in accepted}


_RATE = re.compile("drop|jitter|noise")  # in the names of attributes that modules draw random numbers by
_TOKENS = 4  # in each of two equal rows
_COPIED_BYTES = 2**20  # of a buffer; larger ones hold weights


def training_reason(model: PreTrainedModel, settings: Hashable) -> str | None:
    """Why K/V that `model` computes in training mode may depend on more than tokens, or None.

    Dropout and its kin are found by the attributes of modules, and by a run on a few tokens, which leaves the states
    of random number generators and the buffers as they were. Once per dtype, attention and `settings`.

    Args:
        model: The model, a part of which is in training mode.
        settings: Changes with every attribute and configuration that a forward may read.
    """
    key = training_reason, model.dtype, attention_function(model), settings
    return remember(model, key, lambda: attempt(model, lambda: _find(model), "it fails in training mode"))


def checkpointing_reason(model: PreTrainedModel) -> str | None:
    """Why layers of a model in training mode are computed without a cache, or None."""
    if any(module.training and getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return "gradient checkpointing keeps the cache from the layers (call model.gradient_checkpointing_disable())"
    return None


@torch.no_grad()
def _find(model: PreTrainedModel) -> str | None:
    if (reason := checkpointing_reason(model)) is not None:
        return reason
    for path, module in model.named_modules():
        if module.training and (rate := _rate(module)) is not None:
            name, value = rate
            return (
                f"in training mode, {path or type(module).__name__} changes values at random, by `{name}` = {value} "
                "(make it 0, or call model.eval())"
            )
    states, buffers = _Generators(model), _Buffers(model)
    try:
        rows = probe_logits(model, probe_ids(model)[:, :_TOKENS].expand(2, -1))
    finally:
        drawn, written = states.put_back(), buffers.put_back()
    if drawn or not difference(rows[1], rows[0]) <= tolerance(model.dtype):
        return "in training mode, it draws random numbers (call model.eval(), or make its dropout 0)"
    if written:
        return "in training mode, its forwards write to its buffers (call model.eval())"
    return probe_reason(model)


def _rate(module: nn.Module) -> tuple[str, float] | None:
    """The name and value of an attribute by which a module draws random numbers, or None."""
    rates = {"p": module.p} if isinstance(module, _DropoutNd) else module.__dict__
    for name, value in rates.items():
        if (name == "p" or _RATE.search(name)) and type(value) in (int, float) and value > 0:
            return name, value
    return None


class _Generators:
    """The states of the random number generators that modules draw from by default.

    Args:
        model: The model, for its devices.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._generators: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
            (torch.get_rng_state, torch.set_rng_state),
            (random.getstate, random.setstate),
            (np.random.get_state, np.random.set_state),
        ]
        for device in {parameter.device for parameter in model.parameters()}:
            if device.type not in ("cpu", "meta"):
                module = torch.get_device_module(device)
                takes_device = "device" in inspect.signature(module.get_rng_state).parameters
                given = {"device": device} if takes_device else {}
                self._generators.append(
                    (partial(module.get_rng_state, **given), partial(module.set_rng_state, **given))
                )
        self._states = [get() for get, _ in self._generators]

    def put_back(self) -> bool:
        """Set the generators that have moved to what they were; returns whether one has."""
        moved = False
        for (get, put), state in zip(self._generators, self._states, strict=True):
            if _bytes(get()) != _bytes(state):
                put(state)
                moved = True
        return moved


def _bytes(state: Any) -> bytes:
    return state.numpy().tobytes() if isinstance(state, torch.Tensor) else pickle.dumps(state)


class _Buffers:
    """The contents of the small buffers of a model, such as running means.

    Args:
        model: The model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._kept = [(b, b.clone()) for b in model.buffers() if not b.is_meta and b.nbytes <= _COPIED_BYTES]

    def put_back(self) -> bool:
        """Set the buffers that were written to to what they were; returns whether one was."""
        written = False
        for buffer, kept in self._kept:
            if bool(((buffer != kept) & (kept == kept)).any()):  # what was NaN is equal to nothing
                buffer.copy_(kept)
                written = True
        return written
