"""Checks a store: computes its records again, and compares.

Every check on the way in compares bookkeeping: tokens, positions, weights, who has written to a buffer. This one looks
at the K/V itself, whatever may have happened to it since.
"""

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from transformers import PreTrainedModel

from kvboost_hf.cache.kv import Stored, StoredChunk, StoredStates
from kvboost_hf.cache.kv.checkpoints import Checkpoints, can_segment, mixers_of
from kvboost_hf.cache.kv.layer_kv import LayerKV, LayerKVReader
from kvboost_hf.cache.kv.layer_states import LayerStates, StateFormat, copy_states
from kvboost_hf.cache.kv.model_form import BlobReader, ColumnFormat, copy_columns
from kvboost_hf.cache.layers import make_layers
from kvboost_hf.cache.layers.base import LayerState, ReuseLayer
from kvboost_hf.cache.planning.chunks import Tokens, is_text
from kvboost_hf.cache.store.tiered import TieredRecords
from kvboost_hf.compat import PrivateCache, difference, input_device, rope_regime, run_model, tolerance

_log = logging.getLogger("kvboost_hf")

_STATES = 5  # times as much difference is rounding in models with states
# Standard deviations: kernels of linear attention sum up in float32 whatever the dtype, and in other steps where a
# prompt went on from a state. 1.2e-3 was seen over 700 tokens, with equal tokens and logits.
_LEAST_OF_STATES = 2e-3
# What is computed behind K/V or a state that comes out of a codec differs by more than the codec itself does: 7 times
# as much was seen. Another text, or nothing but zeros, differs by some 0.8 in the mean.
_BEHIND_CODES, _MOST_OF_STATES, _MOST_OF_COLUMNS = 8, 0.25, 0.6


@dataclass(frozen=True, slots=True)
class IntegrityReport:
    """Result of `ChunkStore.check_integrity`.

    Args:
        checked: Chunks and states that were compared.
        wrong: How many of the checked chunks differed. They were taken out of the store, with all that continued them.
        skipped: Chunks that could not be computed again: of other weights, adapters or hooks than the model's now, of
            images, behind moved chunks, over `live_quant` codes, with hidden states, or behind a chunk that is gone.
        forwarded_tokens: Tokens that went through the model.
        largest_difference: How far the worst chunk is off, in standard deviations of its keys or values: the mean over
            its numbers for lossy codecs, else the largest.
    """

    checked: int
    wrong: int
    skipped: int
    forwarded_tokens: int
    largest_difference: float


@torch.no_grad()
def check_integrity(
    model: PreTrainedModel,
    records: TieredRecords,
    is_current: Callable[[Stored, int], bool],
    formats: BlobReader,
    sample: float,
) -> IntegrityReport:
    """Compute records again and compare; see `ChunkStore.check_integrity`.

    `is_current` tells whether the model, as it is now, has computed a record that ends after so many tokens.
    """
    stored = records.everything()
    chunks = {each.key: each for each in stored if isinstance(each, StoredChunk)}
    texts: dict[bytes, Tokens] = {}
    for each in stored:
        text = _text(each, chunks)
        if text is not None and is_current(each, len(text)):
            texts[each.key] = text
    drawn = [each for each in stored if each.key in texts]
    if sample < 1:
        drawn = random.sample(drawn, min(len(drawn), max(1, round(sample * len(drawn))))) if drawn else []
    forwarded, largest, wrong, checked = 0, 0.0, set[bytes](), 0
    in_segments = can_segment(mixers_of(model), make_layers(model))
    for text, group in _by_text(drawn, texts, partial(rope_regime, model), in_segments=in_segments):
        stops = sorted({len(texts[each.key]) for each in group if isinstance(each, StoredStates)} - {len(text)})
        fresh, earlier = _compute(model, text, stops)
        allowed = tolerance(model.dtype)
        if any(layer.is_stateful for layer in fresh):
            allowed = max(allowed * _STATES, _LEAST_OF_STATES)
        if not formats.state_format.codec.lossless:
            allowed = max(allowed, min(_BEHIND_CODES * _error_of_states(fresh, formats.state_format), _MOST_OF_STATES))
        if not formats.column_format.codec.lossless:
            error = _error_of_columns(fresh, len(text), formats.column_format)
            allowed = max(allowed, min(_BEHIND_CODES * error, _MOST_OF_COLUMNS))
        forwarded += len(text)
        for each in group:
            loaded = records.fetch([each]).get(each.key)
            if loaded is None:  # damaged, and gone
                continue
            off = _difference(loaded, fresh, earlier, len(texts[each.key]), formats)
            checked, largest = checked + 1, max(largest, off)
            if not off <= allowed:  # False for NaN
                wrong.add(each.key)
    if wrong:
        records.quarantine(wrong)
        _log.warning("%d of %d stored chunks were not what the model computes, and were dropped.", len(wrong), checked)
    return IntegrityReport(checked, len(wrong), len(stored) - len(texts), forwarded, largest)


def _text(stored: Stored, chunks: dict[bytes, StoredChunk]) -> Tokens | None:
    """All tokens up to the end of something stored; None where they are not known, or are not all text."""
    if isinstance(stored, StoredChunk) and stored.content_only:
        return None
    parts, parent = [stored.tokens], stored.parent
    while parent != stored.root:
        above = chunks.get(parent)
        if above is None:
            return None
        parts.append(above.tokens)
        parent = above.parent
    text = np.concatenate(parts[::-1])
    return text if is_text(text) else None


def _by_text(
    drawn: Sequence[Stored], texts: dict[bytes, Tokens], regime_of: Callable[[int], object], *, in_segments: bool
) -> Iterator[tuple[Tokens, list[Stored]]]:
    """Groups of records that one forward can check, longest texts first.

    `regime_of` tells what K/V of a text with so many tokens depends on besides these. States need a forward that ends
    there, or one in segments, which have more than one token each: see `compat.steps_reason`.
    """
    todo = sorted(drawn, key=lambda each: len(texts[each.key]), reverse=True)
    while todo:
        text = texts[todo[0].key]
        group: list[Stored] = []
        end = len(text)  # where the states begin that were last taken into the group
        for each in todo:
            at = len(texts[each.key])
            fits = isinstance(each, StoredChunk) or at == end or (in_segments and 1 < at < end - 1)
            fits = fits and regime_of(at) == regime_of(len(text))
            if each is todo[0] or (fits and np.array_equal(texts[each.key], text[:at])):
                group.append(each)
                end = end if isinstance(each, StoredChunk) else at
        yield text, group
        done = {each.key for each in group}
        todo = [each for each in todo if each.key not in done]


def _compute(
    model: PreTrainedModel, text: Tokens, stops: Sequence[int]
) -> tuple[list[ReuseLayer], dict[int, LayerStates]]:
    """Layers that hold a text, computed in one forward, and the states that they had after some tokens."""
    layers = make_layers(model)  # those of windows keep all of it: no store has had any yet
    cache = PrivateCache([layer.native for layer in layers])
    checkpoints = Checkpoints(mixers_of(model) if stops else {}, layers, 0, len(text), stops, (), 0)
    checkpoints.start()
    try:
        run_model(model, torch.from_numpy(text)[None].to(input_device(model)), cache, past_hooks=True)
    finally:
        checkpoints.stop()
    return layers, {column: states[0] for column, _, states in checkpoints.states()}


def _difference(
    stored: Stored, fresh: Sequence[ReuseLayer], earlier: dict[int, LayerStates], stop: int, formats: BlobReader
) -> float:
    """Difference between a record that ends at token `stop` and the `fresh` layers, or their `earlier` states."""
    columns, codes = formats.column_format, formats.state_format.codec
    lossless = columns.codec.lossless and codes.lossless  # what is kept as it is was computed behind codes, too
    if isinstance(stored, StoredStates):
        states = earlier[stop] if stop in earlier else copy_states(fresh, 0)
        coded = formats.state_format.encode(states)
        return max(
            (_of_states(stored.states.layer(i), coded.layer(i), lossless=lossless) for i in range(len(coded.layers))),
            default=0.0,
        )
    start = stop - len(stored.tokens)
    right = copy_columns(fresh, 0, start, stop, columns, at_start=start == 0)
    return _of_columns(stored.kv, right, lossless=lossless)


def _of_columns(stored: LayerKV, right: LayerKV, *, lossless: bool) -> float:
    largest, ours, theirs = 0.0, LayerKVReader(stored), LayerKVReader(right)
    for idx in range(len(stored.places)):
        for found, expected in zip(ours.layer(idx) or (), theirs.layer(idx) or (), strict=True):
            found, expected = found.float(), expected.float()
            # A number that falls between two codes may become either: the mean is what counts.
            off = difference(found, expected) if lossless else _mean_difference(found, expected)
            largest = max(largest, off if off == off else float("inf"))
    return largest


def _mean_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    if not expected.numel():
        return 0.0
    return float((found - expected).abs().mean()) / (float(expected.std()) or 1.0)


def _error_of_columns(layers: Sequence[ReuseLayer], stop: int, form: ColumnFormat) -> float:
    """Mean difference that the codec of columns makes in the first `stop` ones of the layers."""
    coded = copy_columns(layers, 0, 0, stop, form, at_start=True)
    return _of_columns(coded, copy_columns(layers, 0, 0, stop), lossless=False)


def _error_of_states(layers: Sequence[ReuseLayer], form: StateFormat) -> float:
    """Mean difference that the codec of states makes in those of the layers."""
    states = copy_states(layers, 0)
    coded = form.encode(states)
    return max(_of_states(coded.layer(i), states.layer(i), lossless=False) for i in range(len(layers)))


def _of_states(stored: LayerState | None, right: LayerState | None, *, lossless: bool) -> float:
    if stored is None or right is None:
        return 0.0 if stored is right else float("inf")
    shapes, theirs = ([None if t is None else t.shape for t in each.tensors] for each in (stored, right))
    if shapes != theirs:
        return float("inf")
    pairs = zip(*([t for t in each.tensors if t is not None] for each in (stored, right)), strict=True)
    off_by = difference if lossless else _mean_difference
    offs = [off_by(a.float(), b.float()) for a, b in pairs if a.is_floating_point()]
    return max((off if off == off else float("inf") for off in offs), default=0.0)
