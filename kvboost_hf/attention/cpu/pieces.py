"""Keys and values in pieces: each is read once for all rows that have it."""

from collections import defaultdict

import torch

from kvboost_hf.attention.cpu.blocks import attend_capped, join
from kvboost_hf.attention.cpu.dense import attend_all
from kvboost_hf.attention.merge import Part
from kvboost_hf.attention.visibility import Visibility
from kvboost_hf.handles import PieceTable


def can_attend_pieces(table: PieceTable, visibility: Visibility) -> bool:
    """Whether each row sees all of its pieces, and these are where their keys were computed."""
    told = visibility.window or any(each is not None for each in (visibility.keep, visibility.columns))
    return not told and table.cos is None


def attend_pieces(query: torch.Tensor, table: PieceTable, *, scale: float, softcap: float) -> Part:
    """See `ops.attend_pieces`; for queries behind all pieces, which see them all."""
    rows: defaultdict[int, list[int]] = defaultdict(list)  # by piece
    for row, pieces in enumerate(table.rows[:, :, 0].tolist()):
        for piece in pieces:
            if piece >= 0:
                rows[piece].append(row)
    batch, heads, queries, _ = query.shape
    out = query.new_zeros(batch, heads, queries, table.values[0].shape[2], dtype=torch.float32)
    lse = out.new_full(out.shape[:3], float("-inf"))
    for piece, those in rows.items():
        key, value = table.keys[piece][None], table.values[piece][None]
        together = those[-1] - those[0] + 1 == len(those)  # then they are views
        place = slice(those[0], those[-1] + 1) if together else those
        asked = query[place].transpose(0, 1).reshape(1, heads, len(those) * queries, -1)
        part = (
            attend_capped(asked, key, value, None, scale, softcap) if softcap else attend_all(asked, key, value, scale)
        )
        found, log = (torch.unflatten(each[0], 1, (len(those), queries)).transpose(0, 1) for each in part)
        so_far, log_so_far = out[place], lse[place]
        join(so_far, log_so_far, (found, log))
        if not together:
            out[place], lse[place] = so_far, log_so_far
    return out.transpose(1, 2).contiguous(), lse
