"""The base of all layers of a `ChunkReuseCache`: what a cache can ask of each of them.

Two things can be kept of a layer. *Columns* are per token: K/V of any token can be copied out and filled in again.
A *state* sums up all tokens so far (linear attention): it can only be put back as it was when it was saved.
"""

import copy
from collections.abc import Callable, Sequence
from operator import index
from typing import Any, NamedTuple

import torch

Turn = tuple[int, Callable[[torch.Tensor], None]]  # which tensor of a layer, and what turns its new columns in place
Piece = tuple[torch.Tensor, ...]  # of one row, one tensor for each that the layer keeps: [heads, length, dim]

JOINED_ON = ("cuda",)  # where consecutive chunks are copied together; elsewhere they are views, which cost nothing


class ColumnSpec(NamedTuple):
    """The size of one token of one row in a tensor [batch, heads, columns, dim]."""

    heads: int
    dim: int
    dtype: torch.dtype


class LayerState:
    """The state of one row in a layer: enough to go on from the token that it was taken at.

    Args:
        tensors: In an order that only the kind of layer knows; None where there is nothing. In host memory if it was
            saved, else views of the layer's own.
        extra: Whatever else it needs; small.
    """

    __slots__ = ("extra", "tensors")

    def __init__(self, tensors: Sequence[torch.Tensor | None], extra: Any) -> None:
        self.tensors = tuple(tensors)
        self.extra = extra

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors if t is not None)


def whole_columns(tokens_to_remove: Any) -> int:
    """What `crop` is passed: an int, or a number of PyTorch or NumPy that is one.

    Raises:
        ValueError: for anything else.
    """
    try:
        return index(tokens_to_remove)
    except (TypeError, ValueError):  # of a tensor with several numbers
        raise ValueError(
            f"`crop` takes an integer, got {tokens_to_remove!r}. Pass minus the number of columns to remove, or the "
            "number of columns to keep."
        ) from None


def extra_as_json(extra: Any) -> Any:
    """`LayerState.extra` as JSON, or None if there is something in it that has no form outside of this process."""
    try:
        return _as_json(extra)
    except TypeError:
        return None


def _copied(value: Any) -> Any:
    """Copies of tensors, also within dicts; anything else as it is."""
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _as_json(value: Any) -> Any:
    """Lists, tuples, dicts, devices and dtypes as lists that begin with what they are."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if type(value) in (list, tuple):
        return [type(value).__name__, *(_as_json(each) for each in value)]
    if type(value) is dict:
        return ["dict", *([_as_json(key), _as_json(each)] for key, each in value.items())]
    if isinstance(value, torch.device | torch.dtype):
        return [type(value).__name__, str(value).removeprefix("torch.")]
    raise TypeError(f"{type(value).__name__} has no form outside of this process.")


class ReuseLayer:
    """Base of the layers of a cache. The defaults are those of a layer that keeps nothing."""

    version: int = 0  # counts changes, so that whoever keeps records beside the layer can tell if it missed one
    is_stateful = False  # has a state: can only go back to where one was saved
    is_sliding = False  # needs the last columns only
    single_row = False  # cannot be taken apart by rows
    hands_out = False  # may give the attention K/V as it is held, in place of tensors of all columns
    can_branch = False  # can be lent
    stock: Any = None  # the empty layer of transformers that this one takes the place of

    @property
    def native(self) -> Any:
        """The layer that transformers sees; None for one that it does not."""
        return self

    @property
    def intact(self) -> bool:
        """Whether the layer holds what it was given, and nobody else has changed it."""
        return True

    def seal(self) -> None:
        """Accept what the layer holds: what `open` has made room for has just been written."""

    def note_state(self) -> None:
        """The state is what it should be: a forward, or a change to its rows, has just ended."""

    def lend(self) -> Any:
        """The layer for a forward over tokens that may not stay: until `truncate` to the present length."""
        return self.native

    @property
    def length(self) -> int | None:
        """Columns seen so far; None for a layer that does not count them."""
        return None

    @property
    def first(self) -> int:
        """The first column that is still held."""
        return 0

    def fresh(self) -> "ReuseLayer":
        """An empty layer of the same kind."""
        return type(self)()

    def share(self) -> "ReuseLayer":
        """A layer that holds the same and goes its own way."""
        return self.fresh()

    def __copy__(self) -> "ReuseLayer":
        return self.share()

    def __deepcopy__(self, memo: dict[int, Any]) -> "ReuseLayer":
        return self.share()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_stock().__reduce_ex__(protocol)

    def as_stock(self) -> Any:
        """The layer that transformers would have in this place, with copies of what this one holds.

        TypeError: this layer was made on its own, for none of transformers.
        """
        if self.stock is None:
            kind = type(self).__name__
            raise TypeError(f"A {kind} cannot be pickled on its own. Pickle the cache that it is part of.")
        stock = copy.copy(self.stock)
        for name in self._public:
            setattr(stock, name, _copied(self._read(name)))
        return stock

    @property
    def _public(self) -> list[str]:
        """The attributes of transformers' layer."""
        return list(vars(self.stock))

    def _read(self, name: str) -> Any:
        """An attribute as transformers' layer would have it."""
        return getattr(self, name, getattr(self.stock, name, None))

    def reset(self) -> None:
        """Drop everything."""

    def can_rewind(self, length: int) -> bool:
        """Whether `truncate(length)` leaves the layer as it was at `length` columns."""
        return True

    def truncate(self, length: int) -> None:
        """Forget all columns from `length` on."""

    def can_crop(self, tokens: int, held: int) -> bool:
        """Whether transformers' own `crop` can take the last `tokens` of `held` columns out of the state, if any."""
        return True

    def expect_padding(self, columns: int) -> None:
        """The longest padding on the left, as far as it is known before the first token of its row."""

    def needed_from(self, length: int) -> int:
        """The first column that a layer with `length` columns needs to go on."""
        return 0

    def columns(self, row: int, start: int, stop: int) -> Piece | None:
        """Views of a row's columns [start, stop), or None if the layer keeps none."""
        return None

    def fill(self, start: int, stop: int, rows: Sequence[Sequence[Piece]], turn: Turn | None = None) -> None:
        """Make columns [start, stop), computed before, the last ones; those before `start` may be missing if not
        needed.

        A row whose pieces are shorter than `stop - start` is padding on its left, and is zeroed there. `turn` moves
        them to other positions once they are in place: only of full and sliding attention.
        """

    @property
    def column_specs(self) -> tuple[ColumnSpec, ...]:
        """Of each tensor that `columns` returns."""
        return ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, room to spare included."""
        return 0

    def release(self, before: int) -> None:
        """Columns before `before` will not be asked for again, unless the model needs them to go on."""

    def stop_recording(self) -> None:
        """Undo `activate_past_recording`, which transformers cannot: `crop` will not be called."""

    def keep_state(self, column: int) -> None:
        """Keep a copy of the states, which are those at `column`: from now on `truncate` can go back there."""

    def state_bytes(self) -> int:
        """Bytes that `save_state` would take."""
        return 0

    def save_state(self, row: int) -> LayerState | None:
        """A copy of a row's state, or None if there is none."""
        return None

    def view_state(self, row: int) -> LayerState | None:
        """Views of a row's state, which the next forward changes, or None if there is none."""
        return None

    def load_states(self, rows: Sequence[LayerState | None]) -> None:
        """Put back the states of all rows."""


def kv_layers(layers: Sequence[ReuseLayer]) -> list[ReuseLayer]:
    """The layers that transformers sees."""
    return [layer for layer in layers if layer.native is not None]
