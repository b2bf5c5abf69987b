"""Problems for attention kernels, and how far from the truth a kernel may be."""

from dataclasses import dataclass
from typing import Any

import torch

from kvboost_hf.attention import reference
from kvboost_hf.attention.call import AttentionCall, Part
from kvboost_hf.attention.visibility import Visibility


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One call of `attend`, by its shape."""

    queries: int = 7
    columns: int = 40
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    dtype: torch.dtype = torch.float32
    causal: bool = True
    window: int = 0
    softcap: float = 0.0
    padding: bool = False  # each row begins later than the one before it
    sparse: bool = False  # queries are anywhere; those of a tree as far behind its root as they are deep
    tree: bool = False
    mask: bool = False
    sinks: bool = False
    device: torch.device | str = "cpu"
    seed: int = 0

    @property
    def scale(self) -> float:
        """Factor of the logits: larger than usual, so that some weights are near 1."""
        return 2 * self.head_dim**-0.5

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, as models give it (a transposed view), key and value."""
        draw = torch.Generator().manual_seed(self.seed)
        query = torch.randn(self.batch, self.queries, self.heads, self.head_dim, generator=draw).transpose(1, 2)
        shape = (self.batch, self.kv_heads, self.columns, self.head_dim)
        key, value = (torch.randn(shape, generator=draw) for _ in range(2))
        return tuple(each.to(self.device, self.dtype) for each in (query, key, value))  # type: ignore[return-value]

    def visibility(self) -> Visibility:
        """Who sees what."""
        draw = torch.Generator().manual_seed(self.seed + 1)
        keep = columns = tree = mask = None
        if self.padding:
            starts = torch.arange(self.batch)[:, None] * (self.columns // (2 * self.batch))
            keep = torch.arange(self.columns)[None] >= starts
        if self.sparse:
            order = torch.rand(self.batch, self.columns, generator=draw).argsort(dim=1)
            columns = order[:, : self.queries].sort(dim=1).values.int()
        if self.tree:  # each node's parent is any one before it
            seen = torch.eye(self.queries, dtype=torch.bool).repeat(self.batch, 1, 1)
            for row in seen:
                for node in range(1, self.queries):
                    row[node] |= row[int(torch.randint(node, (1,), generator=draw))]
            tree = (seen.long() << torch.arange(self.queries)).sum(dim=-1)
            if self.sparse:
                columns = (self.columns - self.queries + seen.sum(dim=-1) - 1).int()
        if self.mask:
            mask = torch.rand(self.batch, 1, self.queries, self.columns, generator=draw) > 0.3
        given = (each.to(self.device) if each is not None else None for each in (keep, columns, tree, mask))
        return Visibility(self.causal, self.window, *given)

    def sink_logits(self) -> torch.Tensor | None:
        """[heads], or None."""
        draw = torch.Generator().manual_seed(self.seed + 2)
        return torch.randn(self.heads, generator=draw).to(self.device) if self.sinks else None

    def call(self, *, partial: bool = False, **changed: Any) -> AttentionCall:
        """Everything but keys and values, with some fields of the call changed."""
        call = AttentionCall(
            self.tensors()[0], self.scale, self.visibility(), self.softcap, self.sink_logits(), partial=partial
        )
        return call._replace(**changed)

    def kv(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value."""
        return self.tensors()[1:]

    def solve(self, compute: torch.dtype, *, partial: bool = True) -> Part:
        """What PyTorch makes of it, computed in a dtype."""
        return reference.attend(self.call(partial=partial), *self.kv(), compute=compute)


def assert_within_budget(
    found: torch.Tensor, truth: torch.Tensor, same: torch.Tensor, dtype: torch.dtype, size: float = 4.0
) -> None:
    """Compare a result with float64, allowing twice what plain PyTorch in the same dtype is off, and one rounding.

    Args:
        found: By a kernel.
        truth: In float64.
        same: By plain PyTorch operations in the dtype of the inputs.
        dtype: That dtype.
        size: Of the largest numbers, which a rounding is relative to.
    """
    assert found.shape == truth.shape
    there = torch.isfinite(truth)
    assert torch.equal(torch.isfinite(found), there), "what is infinite is not the same"
    off, allowed = ((each.double() - truth)[there].abs().max().item() for each in (found, same))
    budget = 2 * allowed + size * torch.finfo(dtype).eps
    assert off <= budget, f"off by {off:.2e}, budget {budget:.2e}"
