"""The form that K/V and states have in a store: how columns are encoded and copied there, and read from blobs.

Who wrote a blob is not known, and checksums anybody can make. So shapes, types and places are not taken from it: they
are those of the model, found by running it on a few tokens, and the layout of a blob is compared with them.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import torch
from transformers import PreTrainedModel

from kvboost_hf.cache.codecs.base import Codec, ExactStart, Planes, Role
from kvboost_hf.cache.kv.layer_kv import RAW, Block, LayerKV, Place
from kvboost_hf.cache.kv.layer_states import CodedState, LayerStates, StateCodes, StateFormat, as_columns
from kvboost_hf.cache.layers import make_layers, private_cache
from kvboost_hf.cache.layers.base import LayerState, ReuseLayer, extra_as_json
from kvboost_hf.cache.tiers.base import Kind
from kvboost_hf.cache.tiers.record import Blob, DamagedBlobError
from kvboost_hf.compat import (
    KeyRotation,
    LayerRotation,
    cache_layers,
    key_rotation,
    known_reason,
    probe_ids,
    probe_logits,
)
from kvboost_hf.device_link import on_host

_log = logging.getLogger("kvboost_hf")
K = TypeVar("K")
V = TypeVar("V")
_REMEMBERED = 65_536  # keys
_REMEMBERED_FORMS, _REMEMBERED_CHARACTERS = 64, 2**16  # of layouts, which anybody may have written


class ColumnFormat:
    """Format of columns in a store; whatever else than keys and values layers keep is kept as it is.

    `rotation` tells how the model's keys turn with their positions, where that is known. A layer behind so many
    `layers` of K/V is kept as it is; None if the model may have any number.
    """

    def __init__(self, codec: Codec = RAW, rotation: KeyRotation | None = None, layers: int | None = None) -> None:
        self.codec, self.rotation, self._layers = codec if not codec.lossless else RAW, rotation, layers
        self._at_start = ExactStart(self.codec) if self.codec.sink_tokens else self.codec
        self._known: dict[tuple[int, int, torch.dtype, bool], _TensorFormat] = {}

    def of(self, layer_idx: int, tensor: int, dtype: torch.dtype, *, at_start: bool) -> "_TensorFormat":
        """Format of one of a layer's tensors; `at_start` where its columns are those that a prompt begins with."""
        key = layer_idx, tensor, dtype, at_start
        known = self._known.get(key)
        if known is None and self._layers is not None and layer_idx >= self._layers:
            known = self._known[key] = _TensorFormat(RAW, "values", None)
        if known is None:
            rotation = self.rotation.layers[layer_idx] if self.rotation is not None else None
            keys = tensor == (rotation.tensor if rotation is not None else 0)
            own = self._at_start if at_start else self.codec
            codec = own if tensor < 2 and dtype.is_floating_point else RAW
            known = self._known[key] = _TensorFormat(codec, "keys" if keys else "values", rotation if keys else None)
        return known

    def nbytes(self, layers: Sequence[ReuseLayer], tokens: int, *, at_start: bool) -> int:
        """Bytes of so many columns of one row."""
        total = 0
        alike: dict[tuple[Any, ...], int] = {}  # most layers, and most tensors, are like others
        own = self.rotation is not None or self._layers is not None  # layers may be kept in other ways
        for idx, layer in enumerate(layers):
            specs = layer.column_specs
            of_layer = (specs, idx if own else 0)
            if of_layer not in alike:
                alike[of_layer] = 0
                for at, spec in enumerate(specs):
                    form = self.of(idx, at, spec.dtype, at_start=at_start)
                    key = (form.codec, form.role, spec)
                    if key not in alike:
                        shape = (1, spec.heads, tokens, spec.dim)
                        alike[key] = form.codec.nbytes(shape, spec.dtype, form.role)
                    alike[of_layer] += alike[key]
            total += alike[of_layer]
        return total


class _TensorFormat(NamedTuple):
    codec: Codec
    role: Role
    rotation: LayerRotation | None


def copy_columns(
    layers: Sequence[ReuseLayer],
    row: int,
    start: int,
    stop: int,
    form: ColumnFormat | None = None,
    *,
    at_start: bool = False,
) -> LayerKV:
    """Copy columns [start, stop) of every layer to host memory; without a `form`, as they are.

    `at_start` says that the row begins there.
    """
    form = form or ColumnFormat()
    numbers: dict[tuple[Any, ...], int] = {}  # of the blocks, by what their tensors have in common
    parts: list[list[torch.Tensor]] = []
    rotations: list[list[LayerRotation | None]] = []
    places: list[tuple[Place, ...] | None] = []
    for idx, layer in enumerate(layers):
        columns = layer.columns(row, start, stop)
        own: list[Place] = []
        for at, part in enumerate(columns or ()):
            codec, role, rotation = form.of(idx, at, part.dtype, at_start=at_start)
            key = (part.shape, part.dtype, part.device, layer.is_sliding, codec, "keys" if codec is RAW else role)
            number = numbers.setdefault(key, len(parts))
            if number == len(parts):
                parts.append([])
                rotations.append([])
            own.append((number, len(parts[number])))
            parts[number].append(part)
            rotations[number].append(rotation)
        places.append(tuple(own) if columns is not None else None)
    blocks: list[Block] = []
    for (shape, dtype, device, _, codec, role), number in numbers.items():
        planes, ready = on_host(codec.encode(torch.stack(parts[number]).detach(), role, rotations[number]))
        blocks.append(Block(planes, tuple(shape), dtype, role, codec, tuple(rotations[number]), device, ready=ready))
    return LayerKV(tuple(blocks), tuple(places))


@dataclass(frozen=True, slots=True)
class ColumnForm:
    """Columns of one tensor of a layer."""

    heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, columns: torch.Tensor) -> "ColumnForm":
        """That of [heads, tokens, dim]."""
        return cls(columns.shape[0], columns.shape[2], columns.dtype, columns.device)


@dataclass(frozen=True, slots=True)
class StateForm:
    """The state of one layer, of one row."""

    # Shape and type of each; None where there is nothing.
    tensors: tuple[tuple[tuple[int, ...], torch.dtype] | None, ...]
    extra: Any  # what else the state of each layer needs, as `LayerState` has it
    extra_json: Any  # the same as JSON; None if it has no form outside of this process

    @classmethod
    def of(cls, state: LayerState) -> "StateForm":
        """That of a state."""
        tensors = tuple((tuple(t.shape), t.dtype) if t is not None else None for t in state.tensors)
        return cls(tensors, state.extra, extra_as_json(state.extra))


@dataclass(frozen=True, slots=True)
class ModelForm:
    """Forms of the columns and states of all layers."""

    # Per layer, those of each of its tensors; None for a layer without columns.
    columns: tuple[tuple[ColumnForm, ...] | None, ...]
    states: tuple[StateForm | None, ...]  # per layer; None for a layer without one

    @classmethod
    def of(cls, model: PreTrainedModel, *, hidden_layers: tuple[int, ...] = ()) -> "ModelForm | None":
        """That of a model as it is now, by a forward over a few tokens; None where that fails, as no reuse is safe.

        The hidden states of `hidden_layers` are kept beside K/V, as a layer of their own.
        """
        try:
            layers, ids = make_layers(model, hidden_layers=hidden_layers), probe_ids(model)
            with torch.no_grad():
                probe_logits(model, ids, private_cache(layers))
                held = [layer.columns(0, 0, ids.shape[1]) for layer in layers]
                columns = tuple(tuple(map(ColumnForm.of, own)) if own is not None else None for own in held)
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
    """The forms of chunks that were read before: most blobs are laid out as the one before them."""

    def __init__(self, columns: ColumnFormat, form: ModelForm) -> None:
        self.columns, self.form = columns, form
        self._known: dict[tuple[str, int, bool], ChunkForm] = {}  # by layout, tokens, and `at_start`

    def of(self, blob: Blob) -> ChunkForm:
        """The form of a chunk. DamagedBlobError: its layout is not one that this store makes."""
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

    DamagedBlobError: it holds anything but K/V of this model in this format.
    """
    form = forms.of(blob)
    if blob.names != form.names:
        _require(False, "has more tensors")
    blocks: list[Block] = []
    for number, (expected, shape, dtype, role, codec, rotations, device) in enumerate(form.blocks):
        planes: Planes = {}
        for name, (kind, size) in expected.items():
            planes[name] = blob.require(f"{number}.{name}", kind, size)
        blocks.append(Block(planes, shape, dtype, role, codec, rotations, device, blob, number))
    return LayerKV(tuple(blocks), form.places)


def read_states(blob: Blob, form: ModelForm, kept_as: StateFormat) -> LayerStates:
    """States of all layers, as views of a blob.

    DamagedBlobError: it holds anything but states of this model in this format.
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


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise DamagedBlobError(f"A blob {otherwise} than the model would keep.")


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
    forms = {(form.columns[layer_idx] or ())[tensor] for layer_idx, tensor in owners}  # each has a place
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


@lru_cache(maxsize=64)  # chunks have few lengths
def _plane_forms(
    codec: Codec, role: Role, shape: tuple[int, int, int], dtype: torch.dtype
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of each plane that a codec makes of one tensor, by name."""
    planes = codec.encode(torch.zeros(1, *shape, dtype=dtype, device="cpu"), role, (None,))
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


class BlobReader:
    """Knows the forms that K/V of a model has had under each root, and the format that columns are kept in."""

    def __init__(self, model: Callable[[], PreTrainedModel], codec: Codec, state_format: StateFormat) -> None:
        self._model, self.codec, self.state_format = model, codec, state_format
        self._format: tuple[Codec, ColumnFormat] | None = None  # of the codec
        self._first_form: ModelForm | None = None
        self._kinds: OrderedDict[bytes, tuple[bytes, tuple[int, ...]]] = OrderedDict()  # by root, see `note_root`
        self._forms: OrderedDict[tuple[bytes, tuple[int, ...]], ModelForm | None] = OrderedDict()  # by kind
        self._chunk_forms: ChunkForms | None = None  # of the form that was read last

    @property
    def column_format(self) -> ColumnFormat:
        """The format of columns."""
        if self._format is None or self._format[0] is not self.codec:
            model = self._model()
            rotation = key_rotation(model) if not self.codec.lossless else "not needed"
            known = rotation if not isinstance(rotation, str) else None
            layers = len(cache_layers(model)) if not self.codec.lossless else None
            self._format = self.codec, ColumnFormat(self.codec, known, layers)
        return self._format[1]

    def look_at_model(self) -> None:
        """Find out now what form the K/V of the model has, which takes a moment."""
        model = self._model()
        self._first_form = ModelForm.of(model) if known_reason(model) is None else None

    def note_root(self, root: bytes, fingerprint: bytes, *, hidden_layers: tuple[int, ...]) -> None:
        """Remember which fingerprint of the model a root is of, and which hidden states are kept under it."""
        remember(self._kinds, root, (fingerprint, hidden_layers))

    def note_form(self, root: bytes, form: ModelForm) -> None:
        """Remember the form of what is under a root that is not of the model's own K/V."""
        kind = root, ()
        remember(self._kinds, root, kind)
        remember(self._forms, kind, form)

    def read(self, blob: Blob, root: bytes) -> LayerKV | LayerStates | None:
        """The K/V or the states in a blob, or None where the form that they should have is not known.

        Tried are the form of the model as it was at first, then, where it may have changed since, as it is.
        DamagedBlobError: they have another form.
        """
        kind = self._kinds.get(root)
        if kind is None:
            return None  # nothing of it is in a lower tier
        damage: DamagedBlobError | None = None
        if kind not in self._forms:
            _, hidden_layers = kind
            if self._first_form is not None and not hidden_layers:
                try:
                    return self._read_as(self._first_form, blob)
                except DamagedBlobError as error:
                    damage = error
        if (form := self.form_of(root)) is not None:
            return self._read_as(form, blob)
        if damage is not None:
            raise damage
        return None

    def form_of(self, root: bytes) -> ModelForm | None:
        """The form as the model is now; None where it cannot be told, and for roots that are in no lower tier."""
        kind = self._kinds.get(root)
        if kind is not None and kind not in self._forms:
            remember(self._forms, kind, ModelForm.of(self._model(), hidden_layers=kind[1]))
        return self._forms[kind] if kind is not None else None

    def _read_as(self, form: ModelForm, blob: Blob) -> LayerKV | LayerStates:
        if blob.entry.kind is Kind.STATES:
            return read_states(blob, form, self.state_format)
        known, columns = self._chunk_forms, self.column_format
        if known is None or known.form is not form or known.columns is not columns:
            known = self._chunk_forms = ChunkForms(columns, form)
        return read_kv(blob, known)


def remember(memory: OrderedDict[K, V], key: K, value: V) -> None:
    """Enter the newest of a bounded number of keys."""
    memory[key] = value
    memory.move_to_end(key)
    if len(memory) > _REMEMBERED:
        memory.popitem(last=False)
