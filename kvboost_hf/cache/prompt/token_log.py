"""Records the token ids of the K/V in a cache, and of a prompt, and reads their positions.

transformers passes keys and values to a cache, but not their token ids, so the hook records these. Reading an id back
from a GPU stalls its queue; ids therefore stay on their device and are read together when they are needed. In compiled
decoding steps no hook runs: there, `StepLog` in `live/compiled.py` records them by operations of the graph itself.

Multimodal models take `position_ids` [3 or 4, batch, m]: time, height and width, preceded by the place in the row if
there are four planes. Outside an image all three are equal and count up from the end of the image before: they differ
from the place in the row by a *shift* that is constant until the next image.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from kvboost_hf import forks
from kvboost_hf.cache.planning.chunks import Tokens, shifted_ids
from kvboost_hf.compat import position_planes

_PLACE_AND_THREE = 4
_settling = forks.lock()  # while what is pending in a log is read: for all logs, as it takes a moment


@dataclass(frozen=True, slots=True)
class MaskShape:
    """A summary of a 2-D mask of `n` columns, on its device.

    A row has the form 0…01…1 if `first + count == n`; then `first` is the number of padding columns.
    """

    first: torch.Tensor  # [batch], column of the first 1
    count: torch.Tensor  # [batch], number of 1s

    @classmethod
    def of(cls, mask: torch.Tensor) -> "MaskShape":
        """Summarize `mask` [batch, n] without waiting for the device."""
        seen = mask != 0
        return cls(seen.to(torch.uint8).argmax(-1), seen.sum(-1))


@dataclass(frozen=True, slots=True)
class _Append:
    ids: torch.Tensor  # [batch, m]
    position_ids: torch.Tensor | None  # [batch or 1, m] or [planes, batch, m], None where they were left to the model
    mask: MaskShape | None  # None where every column is visible
    start: int  # column of the first id


@dataclass(frozen=True, slots=True)
class Prompt:
    """The column ids of a prompt, and which columns are media."""

    column_ids: Tokens  # [batch, m]
    media: NDArray[np.bool_]  # [batch, m], columns of media, by placeholder or type
    divisible: bool = True  # some of the media can be left out of a forward, not only all

    @classmethod
    def of_text(cls, ids: Tokens) -> "Prompt":
        """A prompt of nothing but text, whose positions count up: `ids` [batch, m]."""
        return cls(ids.copy(), np.zeros(ids.shape, dtype=bool))

    def cut(self, column: int) -> int:
        """The last column, at most `column`, before which all columns may be left out of the forward."""
        shown = self.media.any(axis=0)
        at = np.flatnonzero(shown)
        if not len(at) or column <= at[0] or column > at[-1]:
            return column
        if not self.divisible:
            return int(at[0])
        while column and bool((self.media[:, column] & self.media[:, column - 1]).any()):
            column -= 1
        return column


class TokenLog:
    """Column ids (`planning/chunks.py`) of a batch whose rows start with `pads[row]` columns of padding.

    One thread changes it. Others may read it meanwhile: what is pending is read once, whoever asks first.
    """

    def __init__(self, pads: NDArray[np.int64]) -> None:
        self.pads = pads
        self.length = 0  # columns, padding included
        self._ids: Tokens = np.empty((len(pads), 0), dtype=np.int64)
        self._settled = 0  # columns that are in `_ids`
        self._pending: list[_Append] = []
        self._trusted = True

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return len(self.pads)

    def append(
        self, ids: torch.Tensor, position_ids: torch.Tensor | None = None, mask: MaskShape | None = None
    ) -> None:
        """Append `ids` [batch, m]; their positions and mask are checked when the log is next read."""
        # Copies: the caller may write the next step into the same tensors.
        positions = position_ids.clone() if position_ids is not None else None
        self._pending.append(_Append(ids.clone(), positions, mask, self.length))
        self.length += ids.shape[1]

    def extend(self, ids: Tokens) -> None:
        """Append `ids` [batch, m] that are on the host and known to be in order."""
        self._settle()
        self._reserve(self.length + ids.shape[1])
        self._ids[:, self.length : self.length + ids.shape[1]] = ids
        self.length += ids.shape[1]
        self._settled = self.length

    def row(self, row: int) -> Tokens:
        """All ids of a row, padding left out."""
        self._settle()
        return self._ids[row, self.pads[row] : self._settled]

    def columns(self) -> Tokens:
        """All ids [batch, length], padding included."""
        self._settle()
        return self._ids[:, : self._settled]

    @property
    def trusted(self) -> bool:
        """Whether every appended id had the position and the visible history that its column implies."""
        self._settle()
        return self._trusted

    def crop(self, length: int) -> None:
        """Forget all columns from `length` on."""
        if length < self.length:
            self._settle()
            self.length = self._settled = length

    def copy(self) -> "TokenLog":
        """An independent copy."""
        self._settle()
        twin = TokenLog(self.pads.copy())
        twin.extend(self.columns())
        twin._trusted = self._trusted
        return twin

    def select(self, rows: NDArray[np.int64]) -> None:
        """Make row i what row `rows[i]` was."""
        self._settle()
        self._ids = self._ids[rows]
        self.pads = self.pads[rows]

    def _settle(self) -> None:
        """Read the pending ids, positions and masks, in one transfer each, and check them."""
        if not self._pending:
            return
        with _settling:
            pending = list(self._pending)
            if not pending:  # another thread was faster
                return
            self._reserve(self.length)
            ids = torch.cat([p.ids for p in pending], dim=1).cpu().numpy()
            counted = [p for p in pending if p.position_ids is None or p.position_ids.ndim == 2]
            if len(counted) < len(pending):
                ids = shifted_ids(ids, self._shifts(pending))
            start, stop = pending[0].start, pending[0].start + ids.shape[1]
            self._ids[:, start:stop] = ids
            self._trusted = self._trusted and self._positions_hold(counted) and self._masks_hold(pending)
            self._settled = stop
            del self._pending[: len(pending)]  # last: until then others wait, and an interrupt changes nothing

    def _shifts(self, pending: list[_Append]) -> NDArray[np.int64]:
        """The shift of each id's position from its place in the row, [batch, m]."""
        columns = [np.arange(p.start, p.start + p.ids.shape[1]) for p in pending]
        shifts = [np.zeros((self.batch_size, len(at)), dtype=np.int64) for at in columns]
        by_planes: dict[int, list[int]] = {}
        for i, p in enumerate(pending):
            if p.position_ids is not None and p.position_ids.ndim > 2:
                by_planes.setdefault(len(p.position_ids), []).append(i)
        for at in by_planes.values():  # one transfer for all steps of a generate() call
            given = [pending[i].position_ids for i in at]
            found = torch.cat([g.expand(-1, self.batch_size, -1) for g in given if g is not None], dim=-1)
            where = np.concatenate([columns[i] for i in at])
            shift, agree = common_shift(position_shifts(found.cpu().numpy(), where, self.pads))
            self._trusted = self._trusted and bool(agree.all())
            ends = np.cumsum([len(columns[i]) for i in at])[:-1]
            for i, part in zip(at, np.split(shift, ends, axis=1), strict=True):
                shifts[i] = part
        return np.concatenate(shifts, axis=1)

    def _positions_hold(self, pending: list[_Append]) -> bool:
        given = [p for p in pending if p.position_ids is not None]
        if not given:
            return True
        found = torch.cat([p.position_ids.expand(self.batch_size, -1) for p in given if p.position_ids is not None], 1)
        columns = np.concatenate([np.arange(p.start, p.start + p.ids.shape[1]) for p in given])
        return bool(np.array_equal(found.cpu().numpy(), columns[None, :] - self.pads[:, None]))

    def _masks_hold(self, pending: list[_Append]) -> bool:
        given = [p for p in pending if p.mask is not None]
        if not given:
            return True
        first = torch.stack([p.mask.first for p in given if p.mask is not None]).cpu().numpy()
        count = torch.stack([p.mask.count for p in given if p.mask is not None]).cpu().numpy()
        stops = np.array([p.start + p.ids.shape[1] for p in given])
        return bool((first == self.pads).all() and (count == stops[:, None] - self.pads).all())

    def _reserve(self, length: int) -> None:
        if length > self._ids.shape[1]:
            grown = np.empty((self.batch_size, max(length, 2 * self._ids.shape[1], 64)), dtype=np.int64)
            grown[:, : self._settled] = self._ids[:, : self._settled]
            self._ids = grown


def position_shifts(
    position_ids: NDArray[np.int64], columns: NDArray[np.int64], pads: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The difference between each position [planes, batch, m] and the place of its column in its row; 0 in padding."""
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

    `places` are taken where `position_ids` [batch or 1, m] or [planes, batch or 1, m] do not contain them.
    """
    if position_ids.ndim == 2:
        return position_ids, position_ids
    if len(position_ids) == _PLACE_AND_THREE:
        places, position_ids = position_ids[0], position_ids[1:]
    agree = (position_ids == position_ids[0]).all(dim=0)
    return places, torch.where(agree, position_ids[0], -1)


def one_row(what: str, given: Any, *, least: int = 0) -> torch.Tensor:
    """The ids of one prompt, [1, tokens].

    Args:
        what: What they must be, in errors.
        given: A list, an array or a tensor of integers [tokens] or [1, tokens].
        least: The fewest tokens.

    Raises:
        ValueError: for several rows, another shape, and numbers that are no integers.
        TypeError: for what is no numbers.
    """
    try:
        ids = torch.as_tensor(given)
    except (RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"{what}, got {type(given).__name__}. Pass tokenizer(text).input_ids.") from error
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.ndim != 2 or ids.shape[0] != 1 or ids.shape[1] < least:
        raise ValueError(
            f"{what} of the shape [n] or [1, n]{', n > 0' if least else ''}, got {list(ids.shape)}. Pass the rows of "
            "a batch one by one, without padding."
        )
    if ids.numel() and (ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool):
        raise ValueError(f"{what}, which are integers, got {ids.dtype}. Pass tokenizer(text).input_ids.")
    return ids.long()


def take_positions(position_ids: torch.Tensor, batch: int, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """`position_ids` [(planes,) batch or 1, m] of `rows` [k, 1], of each those `at` [k, n]."""
    expanded = position_ids.expand(*position_ids.shape[:-2], batch, -1)
    return expanded[..., rows, at]


def computed_positions(model: PreTrainedModel, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The positions that the model would compute from the whole ids and images if it was given none, or None.

    Its forward does that, and would compute others from cut ids. As in its forward, the model also keeps the shift for
    later steps.
    """
    compute, ids = position_planes(model), kwargs["input_ids"]
    if compute is None:
        return None
    known = {**kwargs, "inputs_embeds": ids[..., None]}  # read for its shape and device
    given = {name: known.get(name) for name in inspect.signature(compute).parameters}
    return compute(**given)


def counts_from_padding_id(model: PreTrainedModel) -> bool:
    """Whether a model that is given no positions counts them from its padding id + 1, not from 0."""
    return hasattr(getattr(model.base_model, "embeddings", None), "create_position_ids_from_input_ids")
