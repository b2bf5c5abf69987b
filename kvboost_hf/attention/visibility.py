"""Describes which columns of K/V each query may attend to, without a matrix of queries and columns."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Visibility:
    """The conditions under which a query sees a column; all of them have to hold.

    Columns are counted from the first one of K/V. Queries are the last columns, unless `columns` says where they are.

    Args:
        causal: Queries see no column behind their own.
        window: Queries see this many columns up to their own, which counts; 0 for all.
        keep: [batch, columns], bool: False for padding, which no query sees.
        columns: [batch, queries], int32: the column of each query, in any order.
        tree: [batch, queries], int64, of 64 queries at most, which are the last columns: bit t says whether the query
            sees the t-th of them. `causal` and `window` then only concern the columns before these; a query's own
            column is that of `columns`, if given.
        mask: [batch or 1, heads or 1, queries, columns], bool: any further condition.
    """

    causal: bool = True
    window: int = 0
    keep: torch.Tensor | None = None
    columns: torch.Tensor | None = None
    tree: torch.Tensor | None = None
    mask: torch.Tensor | None = None

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
