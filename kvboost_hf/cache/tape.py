"""The token ids of forwards that ran as a graph, where no hook can note them: the graph notes them itself."""

from typing import Any

import torch

from kvboost_hf.cache.codes import shifted_codes
from kvboost_hf.cache.positions import told_positions
from kvboost_hf.cache.tokens import TokenLog

_NOTES = 5  # token id, place in the row, position, first visible column, visible columns


class DecodeTape:
    """By row and column, what a compiled forward was given.

    Args:
        columns: As many as the cache can hold.
    """

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._notes: torch.Tensor | None = None  # [4, batch, columns]

    def rewind(self, batch: int, device: torch.device) -> None:
        """Forget everything; what follows has `batch` rows."""
        if self._notes is None or self._notes.shape[1] != batch or self._notes.device != device:
            with torch.inference_mode(False):
                self._notes = torch.empty((_NOTES, batch, self._columns), dtype=torch.long, device=device)
            torch._dynamo.mark_static_address(self._notes)
        self._notes.fill_(-1)

    def note(self, length: torch.Tensor, kwargs: dict[str, Any]) -> None:
        """Write down the arguments of a forward that appends to `length` columns. Tensor operations alone."""
        ids, positions = kwargs.get("input_ids"), kwargs.get("position_ids")
        mask = only_mask(kwargs.get("attention_mask"))
        if self._notes is None or not isinstance(ids, torch.Tensor) or ids.shape[0] != self._notes.shape[1]:
            return
        columns = torch.arange(ids.shape[1], device=ids.device) + length.to(ids.device)
        if positions is None:
            positions = columns[None, :]
        if mask is None:
            first, count = torch.zeros_like(ids), (columns + 1).expand_as(ids)
        elif isinstance(mask, torch.Tensor) and mask.ndim == 4:
            seen = visible(mask)[:, 0]
            first, count = seen.to(torch.uint8).argmax(-1), seen.sum(-1)
        else:
            first, count = -torch.ones_like(ids), -torch.ones_like(ids)  # nothing that can be relied on
        told = told_positions(positions, columns - first)
        notes = torch.stack([note.expand_as(ids) for note in (ids, *told, first, count)])
        self._notes.index_copy_(2, columns.to(self._notes.device), notes.to(self._notes))

    def play(self, log: TokenLog, stop: int) -> bool:
        """Append columns up to `stop` to `log`, unless they were not all visible history at their own positions."""
        if self._notes is None or stop <= log.length or self._notes.shape[1] != log.batch_size:
            return False
        ids, places, positions, first, count = self._notes[:, :, log.length : stop].clone().cpu().numpy()
        self._notes[:, :, log.length : stop] = -1  # steps that cannot be noted may follow a crop()
        own = torch.arange(log.length, stop).numpy()[None, :] - log.pads[:, None]
        if not ((places == own) & (positions >= 0) & (first == log.pads[:, None]) & (count == own + 1)).all():
            return False
        log.extend(shifted_codes(ids, positions - own))
        return True

    def copy(self) -> "DecodeTape":
        """A tape of the same, that can be written on its own."""
        twin = DecodeTape(self._columns)
        if self._notes is not None:
            twin.rewind(self._notes.shape[1], self._notes.device)
            assert twin._notes is not None
            twin._notes.copy_(self._notes)
        return twin


def only_mask(mask: Any) -> Any:
    """The mask of full attention, the only kind of layers here, where generate() has made one for each kind."""
    if not isinstance(mask, dict):
        return mask
    return next(iter(mask.values())) if len(mask) == 1 else mask.get("full_attention", mask)


def visible(mask: torch.Tensor) -> torch.Tensor:
    """A 4-D mask as booleans, whether it was made for sdpa or for eager attention."""
    return mask if mask.dtype == torch.bool else mask == 0
