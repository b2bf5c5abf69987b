"""The layers that take the place of a model's, the form that K/V and states have in them, and reading that from blobs.

Who wrote a blob is not known, and checksums anybody can make. So shapes, types and places are not taken from it: they
are those of the model, found by running it on a few tokens, and the layout of a blob is compared with them.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from kvboost_hf.cache.codecs import make_codec
from kvboost_hf.cache.codecs.base import Codec, Planes, Role
from kvboost_hf.cache.kv.blocks import Block, ColumnFormat
from kvboost_hf.cache.kv.layer_kv import LayerKV, Place
from kvboost_hf.cache.kv.layer_states import CodedState, LayerStates, StateCodes, StateFormat, as_columns
from kvboost_hf.cache.layers.base import LayerState, ReuseLayer, extra_as_json, kv_layers
from kvboost_hf.cache.layers.growing import GrowingLayer
from kvboost_hf.cache.layers.pieced import PiecedLayer
from kvboost_hf.cache.layers.quantized import QuantizedLayer, exact_layers
from kvboost_hf.cache.layers.stateful import EmptyLayer, HybridLayer, HybridSlidingLayer, OpaqueLayer, StateLayer
from kvboost_hf.cache.layers.windows import HiddenStates, IndexedLayer, SlidingLayer, SparseLayer
from kvboost_hf.cache.tiers.record import Blob, DamagedBlobError
from kvboost_hf.compat import (
    SERVED_LAYERS,
    KeyRotation,
    LayerRotation,
    PrivateCache,
    Shown,
    attn_implementation,
    cache_layers,
    input_device,
    key_rotation,
    probe_ids,
    probe_logits,
)
from kvboost_hf.config import KVQuantConfig
from kvboost_hf.handles import ATTENTION, PiecedKV, read_in_place

_log = logging.getLogger("kvboost_hf")
_REMEMBERED_FORMS, _REMEMBERED_CHARACTERS = 64, 2**16  # of layouts, which anybody may have written


@dataclass(frozen=True, slots=True)
class ColumnForm:
    """Columns of one tensor of a layer."""

    heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class StateForm:
    """The state of one layer, of one row.

    Args:
        tensors: Shape and type of each; None where there is nothing.
        extra: What else the state of each layer needs, as `LayerState` has it.
        extra_json: The same as JSON; None if it has no form outside of this process.
    """

    tensors: tuple[tuple[tuple[int, ...], torch.dtype] | None, ...]
    extra: Any
    extra_json: Any

    @classmethod
    def of(cls, state: LayerState) -> "StateForm":
        """That of a state."""
        tensors = tuple((tuple(t.shape), t.dtype) if t is not None else None for t in state.tensors)
        return cls(tensors, state.extra, extra_as_json(state.extra))


@dataclass(frozen=True, slots=True)
class ModelForm:
    """Forms of the columns and states of all layers.

    Args:
        columns: Per layer, those of each of its tensors; None for a layer without columns.
        states: Per layer; None for a layer without one.
    """

    columns: tuple[tuple[ColumnForm, ...] | None, ...]
    states: tuple[StateForm | None, ...]

    @classmethod
    def of(cls, model: PreTrainedModel, *, hidden_layers: tuple[int, ...] = ()) -> "ModelForm | None":
        """That of a model as it is now, by a forward over a few tokens; None where that fails, as no reuse is safe.

        Args:
            model: The model.
            hidden_layers: The layers whose hidden states are kept beside K/V, as a layer of their own.
        """
        try:
            layers, ids = make_layers(model, hidden_layers=hidden_layers), probe_ids(model)
            with torch.no_grad():
                probe_logits(model, ids, private_cache(layers))
                columns = tuple(_column_forms(layer, ids.shape[1]) for layer in layers)
                states = tuple(layer.save_state(0) for layer in layers)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # models fail in ways of their own
            _log.warning(
                "K/V of this model is not read from lower tiers: it fails on a few tokens (%s: %s).",
                type(error).__name__,
                error,
            )
            return None
        return cls(columns, tuple(StateForm.of(state) if state is not None else None for state in states))


def _column_forms(layer: ReuseLayer, tokens: int) -> tuple[ColumnForm, ...] | None:
    columns = layer.columns(0, 0, tokens)
    if columns is None:
        return None
    return tuple(ColumnForm(x.shape[0], x.shape[2], x.dtype, x.device) for x in columns)


class _BlockForm(NamedTuple):
    """A block of tensors as the model would keep it: what `Block` has, with a dtype and a shape for each plane."""

    planes: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    shape: tuple[int, int, int]
    dtype: torch.dtype
    role: Role
    codec: Codec
    rotations: tuple[LayerRotation | None, ...]
    device: torch.device


class ChunkForm(NamedTuple):
    """The form of K/V of one length: which tensors a blob of it has, and how they belong together."""

    places: tuple[tuple[Place, ...] | None, ...]
    blocks: tuple[_BlockForm, ...]
    names: frozenset[str]  # of all tensors


class ChunkForms:
    """The forms of chunks that were read before: most blobs are laid out as the one before them.

    Args:
        columns: How the store keeps columns.
        form: The form of the model's chunks.
    """

    def __init__(self, columns: ColumnFormat, form: ModelForm) -> None:
        self.columns, self.form = columns, form
        self._known: dict[tuple[str, int, bool], ChunkForm] = {}  # by layout, tokens, and `at_start`

    def of(self, blob: Blob) -> ChunkForm:
        """The form of a chunk.

        Raises:
            DamagedBlobError: if its layout is not one that this store makes.
        """
        key = blob.layout_text, len(blob.entry.tokens), blob.entry.start == 0
        known = self._known.get(key)
        if known is None:
            known = _chunk_form(blob, self.columns, self.form)
            if len(blob.layout_text) <= _REMEMBERED_CHARACTERS:
                if len(self._known) >= _REMEMBERED_FORMS:
                    self._known.clear()
                self._known[key] = known
        return known


def read_kv(blob: Blob, forms: ChunkForms) -> LayerKV:
    """K/V of a chunk, as views of a blob that are compared with their checksums when they are read.

    Args:
        blob: The blob of the chunk; `entry` tells how many tokens it has.
        forms: The forms of the model's chunks, in the format of the store.

    Raises:
        DamagedBlobError: if it holds anything but K/V of this model in this format.
    """
    form = forms.of(blob)
    if blob.names != form.names:
        raise _damage("has more tensors")
    blocks: list[Block] = []
    for number, (expected, shape, dtype, role, codec, rotations, device) in enumerate(form.blocks):
        planes: Planes = {}
        for name, (kind, size) in expected.items():
            planes[name] = blob.require(f"{number}.{name}", kind, size)
        blocks.append(Block(planes, shape, dtype, role, codec, rotations, device, blob, number))
    return LayerKV(tuple(blocks), form.places)


def read_states(blob: Blob, form: ModelForm, kept_as: StateFormat) -> LayerStates:
    """States of all layers, as views of a blob.

    Args:
        blob: The blob of the states, compared with its checksums.
        form: The form of the model's chunks.
        kept_as: The format of the store.

    Raises:
        DamagedBlobError: if it holds anything but states of this model in this format.
    """
    with _as_damage():
        pairs = zip(blob.layout["layers"], form.states, strict=True)
        states = LayerStates(tuple(_state(blob, idx, pair, kept_as) for idx, pair in enumerate(pairs)))
    _require(blob.names == states.parts()[0].keys(), "has more tensors")
    return states


@contextmanager
def _as_damage() -> Iterator[None]:
    """Turn errors of reading JSON, which may hold anything, into DamagedBlobError."""
    try:
        yield
    except DamagedBlobError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise DamagedBlobError(f"The layout of a blob cannot be read ({type(error).__name__}).") from error


def _damage(otherwise: str) -> DamagedBlobError:
    return DamagedBlobError(f"A blob {otherwise} than the model would keep.")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise _damage(otherwise)


def _chunk_form(blob: Blob, columns: ColumnFormat, form: ModelForm) -> ChunkForm:
    with _as_damage():
        places = tuple(_place_of(own) for own in blob.layout["places"])
        owners = _owners(places, form)
        blocks = tuple(_block_form(blob, number, own, columns, form) for number, own in enumerate(owners))
    names = frozenset(f"{number}.{name}" for number, block in enumerate(blocks) for name in block.planes)
    return ChunkForm(places, blocks, names)


def _place_of(places_json: Any) -> tuple[Place, ...] | None:
    """Places of the tensors of a layer, from JSON."""
    if places_json is None:
        return None
    places = tuple((block, at) for block, at in places_json)
    _require(all(type(number) is int for place in places for number in place), "has other places")
    return places


def _owners(places: Sequence[tuple[Place, ...] | None], form: ModelForm) -> list[list[tuple[int, int]]]:
    """For each block the layer, and the number in it, of each of its tensors; each place is taken once."""
    taken: dict[Place, tuple[int, int]] = {}
    for layer_idx, (own, expected) in enumerate(zip(places, form.columns, strict=True)):
        _require((own is None) == (expected is None), "has columns of other layers")
        for tensor, (place, _) in enumerate(zip(own or (), expected or (), strict=True)):
            _require(place not in taken, "has tensors in fewer places")
            taken[place] = layer_idx, tensor
    owners: list[list[tuple[int, int]]] = []
    for block, at in sorted(taken):
        if block == len(owners):
            owners.append([])
        _require(block == len(owners) - 1 and at == len(owners[-1]), "has tensors in other places")
        owners[-1].append(taken[block, at])
    return owners


def _block_form(
    blob: Blob, number: int, owners: Sequence[tuple[int, int]], columns: ColumnFormat, form: ModelForm
) -> _BlockForm:
    forms = {_form_of(form, *owner) for owner in owners}
    _require(len(forms) == 1, "has tensors of other kinds in a block")
    (own,) = forms
    formats = [columns.of(*owner, own.dtype, at_start=blob.entry.start == 0) for owner in owners]
    codec, role, _ = formats[0]
    _require(codec.lossless or {each[:2] for each in formats} == {(codec, role)}, "has keys in a block of values")
    shape = (own.heads, len(blob.entry.tokens), own.dim)
    layout = blob.layout["blocks"][number]
    expected = _plane_forms(codec, role, shape, own.dtype)  # type: ignore[arg-type]  # codecs hash by identity
    _require(layout["shape"] == list(shape) and layout["planes"] == list(expected), "has blocks of another shape")
    planes = {name: (dtype, (len(owners), *rest)) for name, (rest, dtype) in expected.items()}
    return _BlockForm(planes, shape, own.dtype, role, codec, tuple(each.rotation for each in formats), own.device)


def _form_of(form: ModelForm, layer_idx: int, tensor: int) -> ColumnForm:
    columns = form.columns[layer_idx]
    assert columns is not None, "it has a place"
    return columns[tensor]


@lru_cache(maxsize=64)  # chunks have few lengths
def _plane_forms(
    codec: Codec, role: Role, shape: tuple[int, int, int], dtype: torch.dtype
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of each plane that a codec makes of one tensor, by name."""
    planes = codec.encode(torch.zeros(1, *shape, dtype=dtype), role, (None,))
    return {name: (tuple(plane.shape[1:]), plane.dtype) for name, plane in planes.items()}


def _state(
    blob: Blob, idx: int, pair: tuple[Any, StateForm | None], kept_as: StateFormat
) -> LayerState | CodedState | None:
    layout, form = pair
    if layout is None or form is None:
        _require(layout is form, "has states of other layers")
        return None
    present = [each is not None for each in form.tensors]
    expected = {"present": present, "extra": form.extra_json}
    _require(form.extra_json is not None and layout == expected, "has other states")
    tensors = [
        _state_tensor(blob, f"{idx}.{at}", *each, kept_as) if each is not None else None
        for at, each in enumerate(form.tensors)
    ]
    if kept_as.codec.lossless:
        return LayerState(tensors, form.extra)  # type: ignore[arg-type]
    return CodedState(tuple(tensors), form.extra)


def _state_tensor(
    blob: Blob, name: str, shape: tuple[int, ...], dtype: torch.dtype, kept_as: StateFormat
) -> torch.Tensor | StateCodes:
    if not kept_as.codes(shape, dtype):
        return blob.require(name, dtype, (1, *shape))[0]
    expected = _plane_forms(kept_as.codec, "values", as_columns(shape), dtype)  # type: ignore[arg-type]
    planes = {plane: blob.require(f"{name}.{plane}", kind, (1, *rest)) for plane, (rest, kind) in expected.items()}
    return StateCodes(planes, shape, dtype, kept_as.codec)


# By name: some of them come and go between releases, and some live with their model. Exactly these, no subclasses: a
# class that changes what a layer keeps would be served wrongly.
_MAKERS: dict[str, Callable[[Any], ReuseLayer]] = {
    "DynamicLayer": lambda stock: GrowingLayer(),
    "DynamicSlidingWindowLayer": lambda stock: SlidingLayer(stock.sliding_window),
    "DynamicIndexedLayer": lambda stock: IndexedLayer(),
    "LinearAttentionLayer": lambda stock: StateLayer(stock.number_of_states),
    "LinearAttentionAndFullAttentionLayer": lambda stock: HybridLayer(stock.number_of_states),
    "LinearAttentionAndSlidingWindowAttentionLayer": lambda stock: HybridSlidingLayer(
        stock.sliding_window, stock.number_of_states
    ),
    "DummyLayer": EmptyLayer,
    "MiniMaxM3VLSparseCacheLayer": lambda stock: SparseLayer(),
    "DeepseekV4HCACache": OpaqueLayer,
    "DeepseekV4CSACache": OpaqueLayer,
}
assert frozenset(_MAKERS) == SERVED_LAYERS


def make_layers(
    model: PreTrainedModel,
    live_quant: KVQuantConfig | None = None,
    *,
    hidden_layers: tuple[int, ...] = (),
    contiguous: bool = False,
) -> list[ReuseLayer]:
    """Our layers for a model that `compat` has found to be served.

    With `live_quant`, those of full attention hold codes, but for the first and the last ones. Without it, and where
    `kvboost_fa2` can read chunks where they are, they leave them there, unless they are to be `contiguous`: sums over
    chunks may round otherwise. With `hidden_layers`, one of their hidden states follows.
    """
    stocks = cache_layers(model)
    layers = [_MAKERS[type(stock).__name__](stock) for stock in stocks]
    if live_quant is None:
        if not contiguous and attn_implementation(model) == ATTENTION and read_in_place(PiecedKV, input_device(model)):
            layers = [PiecedLayer() if type(layer) is GrowingLayer else layer for layer in layers]
        return [*in_place_of(stocks, layers), *([HiddenStates(hidden_layers)] if hidden_layers else [])]
    codec, found = make_codec(live_quant), key_rotation(model)
    rotations = found.layers if isinstance(found, KeyRotation) else [None] * len(layers)
    ends = exact_layers(live_quant, len(layers))
    for idx in range(ends, len(layers) - ends):
        if type(layers[idx]) is GrowingLayer:
            layers[idx] = QuantizedLayer(codec, live_quant, rotations[idx])
    return in_place_of(stocks, layers)


def in_place_of(stocks: list[Any], layers: list[ReuseLayer]) -> list[ReuseLayer]:
    """The layers, each with the one of transformers whose place it takes: pickles have that in place of ours."""
    for stock, layer in zip(stocks, layers, strict=True):
        layer.stock = stock
    return layers


def private_cache(layers: Sequence[ReuseLayer]) -> PrivateCache:
    """A cache for a forward of our own, which extends these layers."""
    cache = PrivateCache([layer.native for layer in kv_layers(layers)])
    if isinstance(last := layers[-1], HiddenStates):

        def keep(shown: Shown) -> Shown:
            last.append(shown.of)
            return shown

        cache.hidden_layers, cache.take_hidden_states = last.which, keep
    return cache
