"""Which columns of K/V each query may attend to, without a matrix of queries and columns.

`Visibility` describes it. Models pass it on to `kvboost_fa2` as a compact mask, since a matrix is as large as the
product of queries and columns: each column has a reach, which is how far behind it a query may be, its own included,
to see it. Padding has none. Compact masks have four dimensions, as models expect of masks.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True, eq=False)
class Visibility:
    """The conditions under which a query sees a column; all of them have to hold.

    Columns are counted from the first one of K/V. Queries are the last columns, unless `columns` says where they are.
    """

    causal: bool = True  # queries see no column behind their own
    window: int = 0  # queries see this many columns up to their own, which counts; 0 for all
    keep: torch.Tensor | None = None  # [batch, columns], bool: False for padding, which no query sees
    columns: torch.Tensor | None = None  # [batch, queries], int32: the column of each query, in any order
    # [batch, queries], int64, of 64 queries at most, which are the last columns: bit t says whether the query
    # sees the t-th of them. `causal` and `window` then only concern the columns before these; a query's own
    # column is that of `columns`, if given.
    tree: torch.Tensor | None = None
    mask: torch.Tensor | None = None  # [batch or 1, heads or 1, queries, columns], bool: any further condition

    def columns_of(self, queries: int, total: int, device: torch.device) -> torch.Tensor:
        """Return the columns [batch or 1, queries] of the queries."""
        if self.columns is not None:
            return self.columns
        return torch.arange(total - queries, total, device=device)[None]

    def dense(self, queries: int, total: int, device: torch.device) -> torch.Tensor:
        """Make the matrix [batch or 1, heads or 1, queries, columns], bool: True where the query sees the column."""
        own = self.columns_of(queries, total, device)[:, :, None]
        column = torch.arange(total, device=device)[None, None]
        seen = torch.ones(1, queries, total, dtype=torch.bool, device=device)
        if self.causal:
            seen = seen & (column <= own)
        if self.window:
            seen = seen & (own - column < self.window)
        if self.tree is not None:
            bits = self.tree[:, :, None] >> torch.arange(queries, device=device) & 1
            seen = torch.cat([seen[:, :, :-queries].expand(len(bits), -1, -1), bits.bool()], dim=-1)
        if self.keep is not None:
            seen = seen & self.keep[:, None]
        found = seen[:, None]
        return found & self.mask if self.mask is not None else found

    @property
    def is_compact(self) -> bool:
        """Whether `compact` can say it."""
        return self.causal and self.mask is None and (self.tree is None or self.keep is None)

    def compact(self, device: torch.device) -> torch.Tensor | None:
        """Make the mask that causal layers of `kvboost_fa2` take; None where only the causal order hides a column."""
        if self.tree is not None:
            return make_tree(self.tree, self.columns)
        return make_reach(self.keep, self.window, device, self.columns)


def make_reach(
    keep: torch.Tensor | None, window: int, device: torch.device | str, columns: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Make the compact mask of causal layers that `kvboost_fa2` takes.

    Args:
        keep: [batch, columns], bool: False for padding. None where there is none.
        window: Columns that a query sees, its own included; 0 for all.
        device: The device of the mask.
        columns: [batch, queries]: the column of each query, where they are not the last ones; without `keep`, of one
            query.

    Returns:
        None where nothing but the causal order hides a column. Else int32: [batch, 1, 1, columns], 0 for padding and 1
        for all others; with a window, its size in place of 1, and that twice, [batch, 2, 1, columns]. Where all
        columns are alike, there is one in place of all, and without `columns` one row. With `columns` there are two
        more in the second dimension, which begin with these, the last one first: so the mask is that of the last
        queries, too, of which models may cut masks in the last but one dimension (Gemma 4).
    """
    if keep is None and columns is None:
        return torch.full((1, 2, 1, 1), window, dtype=torch.int32, device=device) if window else None
    if keep is None:
        assert columns is not None
        assert columns.shape[1] == 1
        reach = torch.full(columns.shape, window or 1, dtype=torch.int32, device=device)
    else:
        reach = keep.int() * (window or 1)
    found = reach[:, None].expand(-1, 2 if window else 1, -1)
    if columns is not None:
        begun = F.pad(columns.int().flip(-1), (0, reach.shape[1] - columns.shape[1]))
        found = torch.cat([found, begun[:, None].expand(-1, 2, -1)], dim=1)
    return found[:, :, None]


def read_reach(
    mask: torch.Tensor, queries: int
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Read a mask of `make_reach`: `keep`, `columns`, and with a window the reach [batch or 1, columns or 1]."""
    reach = mask[:, 0, 0]
    keep = reach > 0 if mask.shape[3] > 1 else None
    columns = mask[:, -1, 0, :queries].flip(-1) if mask.shape[1] > 2 else None
    return keep, columns, reach if mask.shape[1] in (2, 4) else None


def make_tree(bits: torch.Tensor, columns: torch.Tensor | None = None) -> torch.Tensor:
    """Make the compact mask of causal layers whose queries are the nodes of a tree, for `kvboost_fa2`.

    Args:
        bits: [batch, queries], int64, of 64 queries at most, which are the last columns: bit t says whether the query
            sees the t-th of them, as it sees itself, and all columns before them, which are no padding.
        columns: [batch, queries]: where each query would be if only its ancestors were behind those columns, counted
            from the first column that the layer holds. A layer with a window needs them to ask which of the columns
            before the tree are inside it; `bits` leave out the ancestors that are not.

    Returns:
        [batch, 1, 1, queries], int64; with `columns`, [batch, 1, 2, queries], of which these are the second row.
    """
    return torch.stack([bits] if columns is None else [bits, columns.long()], dim=1)[:, None]


def read_tree(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Read a mask of `make_tree`: `bits`, and `columns` in int32."""
    return mask[:, 0, 0], mask[:, 0, 1].int() if mask.shape[2] == 2 else None
