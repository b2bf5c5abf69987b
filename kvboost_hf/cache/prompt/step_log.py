"""Records the token ids of compiled decoding steps, in which no hook runs, by operations of the graph itself."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from kvboost_hf.cache.planning.chunks import shifted_ids
from kvboost_hf.cache.prompt.positions import text_positions
from kvboost_hf.cache.prompt.token_log import TokenLog
from kvboost_hf.handles import read_reach

# By layer type, the columns that a token can attend to, itself included; 0 for all. Types without a window come first.
Windows = Mapping[str, int]

_NOTES = 5  # token id, place in the row, position, first visible column, visible columns


class StepLog:
    """Stores the token id, positions and visible columns of each token that a compiled forward was given.

    Args:
        columns: As many as the cache can hold.
        windows: The layer types of the model.
    """

    def __init__(self, columns: int, windows: Windows) -> None:
        self._columns, self._windows = columns, windows
        self._window = next(iter(windows.values()))  # of the mask that is noted
        self._notes: torch.Tensor | None = None  # [4, batch, columns]

    def reset(self, batch: int, device: torch.device) -> None:
        """Clear the log, for `batch` rows."""
        if self._notes is None or self._notes.shape[1] != batch or self._notes.device != device:
            with torch.inference_mode(False):
                self._notes = torch.empty((_NOTES, batch, self._columns), dtype=torch.long, device=device)
            torch._dynamo.mark_static_address(self._notes)
        self._notes.fill_(-1)

    def record(self, length: torch.Tensor, kwargs: dict[str, Any]) -> None:
        """Record the arguments of a forward that appends to `length` columns, by tensor operations only."""
        ids, positions, mask = kwargs.get("input_ids"), kwargs.get("position_ids"), kwargs.get("attention_mask")
        if self._notes is None or not isinstance(ids, torch.Tensor) or ids.shape[0] != self._notes.shape[1]:
            return
        columns = torch.arange(ids.shape[1], device=ids.device) + length.to(ids.device)
        if positions is None:
            positions = columns[None, :]
        seen = seen_columns(mask, self._windows, columns, self._columns)
        if mask is None:
            begin = torch.clamp(columns + 1 - self._window, min=0) if self._window else torch.zeros_like(columns)
            first, count = begin.expand_as(ids), (columns + 1 - begin).expand_as(ids)
        elif seen is not None:
            first, count = seen.to(torch.uint8).argmax(-1), seen.sum(-1)
        else:
            first, count = -torch.ones_like(ids), -torch.ones_like(ids)  # nothing is known
        where = text_positions(positions, columns - first)
        notes = torch.stack([note.expand_as(ids) for note in (ids, *where, first, count)])
        self._notes.index_copy_(2, columns.to(self._notes.device), notes.to(self._notes))

    def forget(self, start: int) -> None:
        """Clear the log from a column on."""
        if self._notes is not None:
            self._notes[:, :, start:] = -1

    def append_to(self, log: TokenLog, stop: int) -> bool:
        """Append columns up to `stop` to `log`, if each had the visible history that its column implies."""
        if self._notes is None or stop <= log.length or self._notes.shape[1] != log.batch_size:
            return False
        ids, places, positions, first, count = self._notes[:, :, log.length : stop].clone().cpu().numpy()
        self._notes[:, :, log.length : stop] = -1  # steps that cannot be recorded may follow a crop()
        columns, pads = np.arange(log.length, stop)[None, :], log.pads[:, None]
        begin = np.maximum(pads, columns + 1 - self._window) if self._window else pads
        own = columns - pads
        if not ((places == own) & (positions >= 0) & (first == begin) & (count == columns + 1 - begin)).all():
            return False
        log.extend(shifted_ids(ids, positions - own))
        return True

    def copy(self) -> "StepLog":
        """An independent copy."""
        twin = StepLog(self._columns, self._windows)
        if self._notes is not None:
            twin.reset(self._notes.shape[1], self._notes.device)
            assert twin._notes is not None
            twin._notes.copy_(self._notes)
        return twin


def seen_columns(mask: Any, windows: Windows, own: torch.Tensor, total: int) -> torch.Tensor | None:
    """The columns that queries see by the masks that generate() has made for a step, or None if that is unknown.

    Args:
        mask: A 4-D mask, or one for each layer type.
        windows: The layer types of the model.
        own: [queries], the column of each.
        total: Columns of a cache of a fixed size.

    Returns:
        [batch, queries, columns], bool, for layers without a window, if there are any. A query whose masks of other
        layer types disagree sees nothing.
    """
    found = [mask.get(kind) for kind in windows] if isinstance(mask, dict) else [mask]
    if isinstance(mask, dict) and len(mask) == len(windows) == 1:
        found = list(mask.values())
    seen = [_seen(each, own, total) for each in found]
    if len(seen) != len(windows) or any(each is None for each in seen):
        return None
    widest, *others = (each for each in seen if each is not None)
    if not others:
        return widest
    (narrow,) = others
    widest = widest[:, :, : narrow.shape[2]]  # as stock caches have it before their windows are full
    column = torch.arange(widest.shape[2], device=own.device)
    within = widest & (own[:, None] - column < windows["sliding_attention"])
    return widest & (narrow == within).all(dim=-1, keepdim=True)


def _seen(mask: Any, own: torch.Tensor, total: int) -> torch.Tensor | None:
    """As `seen_columns`, for one mask of sdpa, eager attention or `kvboost_fa2`."""
    if not isinstance(mask, torch.Tensor) or mask.ndim != 4:
        return None
    if mask.dtype == torch.int32:
        keep, columns, reach = read_reach(mask, len(own))
        if columns is None:  # queries are the last columns
            columns, total = own[None], keep.shape[-1] if keep is not None else total
        behind = columns[:, :, None] - torch.arange(total, device=mask.device)
        seen = behind >= 0
        seen = seen if keep is None else seen & keep[:, None]
        return seen if reach is None else seen & (behind < reach[:, None])
    if mask.dtype == torch.bool or mask.is_floating_point():
        return mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] == 0
    return None


def is_of_all_columns(mask: torch.Tensor, total: int) -> bool:
    """Whether a 4-D mask is for a cache of a fixed size, whose columns behind the queries it hides."""
    return mask.shape[2] == 2 if mask.dtype == torch.int32 else mask.shape[3] == total
