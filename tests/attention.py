"""Problems for attention kernels, and how far from the truth a kernel may be."""

import os
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.internals.attention import AttentionCall, Part, Visibility, reference
from tests.internals.top import CodePlanes


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

    def check(self, found: Part, **allowed: Any) -> None:
        """Assert that the result of `call` is within the budget."""
        assert_within_budget(found, self.call(), *self.kv(), **roundings(self.dtype) | allowed)


UNIT = torch.finfo(torch.float32).eps / 2
SIGMAS = 6  # standard deviations that sums of independent roundings are allowed
EXPONENTIAL = 8 * UNIT  # of an exponential: 2 units in the last place on GPUs, and once more for a part


def roundings(dtype: torch.dtype) -> dict[str, Any]:
    """How often Triton kernels round weights, as `within` takes it.

    Triton's interpreter cuts off what does not fit into bfloat16, where a GPU rounds: it errs by twice as much.
    """
    return {"weights": 2 if dtype == torch.bfloat16 and os.environ.get("TRITON_INTERPRET") == "1" else 1}


def sum_error(terms: int) -> float:
    """What a sum in float32 errs by in any order, as a share of the sum of the sizes of its terms.

    Each addition rounds once, and of many roundings most cancel each other (Higham and Mary, 2019,
    https://doi.org/10.1137/18M1226312).
    """
    return min(terms, SIGMAS * terms**0.5) * UNIT


def within(
    call: AttentionCall,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    operands: float = 0,
    weights: float = 1,
    exponential: float = EXPONENTIAL,
    key_sizes: torch.Tensor | None = None,
    value_sizes: torch.Tensor | None = None,
) -> tuple[Part, Part]:
    """Compute attention in float64, and what a kernel with sums in float32 may be off by, from its arithmetic alone.

    Args:
        call: What the kernel is asked; its result is in float32.
        key: [batch, num_kv_heads, columns, head_dim], exactly.
        value: [batch, num_kv_heads, columns, value_dim], exactly.
        operands: How often queries and keys are rounded to the dtype of the query before they are multiplied.
        weights: How often weights, values and parts of the result are rounded to that dtype.
        exponential: What an exponential is off by, relative to itself.
        key_sizes: [batch, num_kv_heads, columns]: lengths of the keys, or larger ones of what keys are the sum of.
        value_sizes: As `value`: their sizes, or larger ones of what values are the sum of.

    Returns:
        Attention and log-sum-exp in float64, and the largest differences from them.
    """
    out, lse = reference.attend(call._replace(partial=True), key, value, compute=torch.float64)
    groups, (queries, head_dim), columns = call.query.shape[1] // key.shape[1], call.query.shape[2:], key.shape[2]
    query, half = call.query.double(), torch.finfo(call.query.dtype).eps / 2
    key_sizes = key.double().norm(dim=-1) if key_sizes is None else key_sizes.double()
    value_sizes = value.double().abs() if value_sizes is None else value_sizes.double()
    key, key_sizes, value_sizes = (
        each.repeat_interleave(groups, dim=1) for each in (key.double(), key_sizes, value_sizes)
    )

    # Of a logit: products are added up and scaled; its exponent is scaled, the peak is taken away from it.
    logits = query @ key.mT * call.scale
    off = query.norm(dim=-1)[..., None] * key_sizes[..., None, :] * call.scale
    # Rounding is off by `half` at most, and by the square of it over 3 on average: independently for each product.
    off *= sum_error(head_dim) + 2 * UNIT + half * min(operands, SIGMAS * (operands / 3 / head_dim) ** 0.5)
    if call.softcap:
        logits = call.softcap * torch.tanh(logits / call.softcap)
        off += 8 * UNIT * call.softcap
    seen = call.visibility.dense(queries, columns, query.device).expand(*logits.shape)
    peak = logits.masked_fill(~seen, float("-inf")).amax(dim=-1) if columns else torch.full_like(lse, float("-inf"))
    of_norm = torch.zeros_like(lse)
    if call.sinks is not None:
        sinks = call.sinks.double()[:, None].expand_as(lse)
        peak = torch.maximum(peak, sinks)
        of_norm += 4 * UNIT * sinks.abs().nan_to_num(posinf=0.0) + exponential
    finite, lse_there = (torch.where(each.isfinite(), each, 0.0) for each in (peak, lse))
    off += 4 * UNIT * (logits.abs() + finite.abs()[..., None]) + exponential

    # Of a weight, relative to itself; and of sums of weights and of products with values.
    shares = torch.exp(logits - lse_there[..., None]).masked_fill(~seen, 0.0)
    sums = sum_error(2 * columns) + 4 * UNIT
    of_norm += (shares * off).sum(dim=-1) + sums
    of_out = (shares * (off + sums + weights * half)) @ value_sizes + out.transpose(1, 2).abs() * of_norm[..., None]
    least = weights * torch.finfo(call.query.dtype).smallest_normal * half  # below, roundings are not relative
    of_out += least * torch.exp(finite - lse_there)[..., None] * (seen.double() @ value_sizes)
    of_lse = of_norm + 4 * UNIT * (lse_there.abs() + finite.abs())
    return (out, lse), (of_out.transpose(1, 2), of_lse)


def of_codes(keys: CodePlanes, values: CodePlanes) -> dict[str, Any]:
    """Sizes of what numbers are the sum of when they are decoded, as `within` takes them."""

    def sizes(planes: CodePlanes) -> torch.Tensor:
        head_dim = planes.codes.shape[-1] * 8 // planes.bits
        if planes.least is not None:
            assert planes.step is not None
            planes = replace(planes, least=planes.least.abs(), step=planes.step.abs())
            return reference.decode(planes, head_dim, torch.float64)
        found = reference.decode(replace(planes, mean=None), head_dim, torch.float64)
        return torch.hypot(found, reference.decode(planes, head_dim, torch.float64) - found)

    key, value = (sizes(each).transpose(1, 2).flatten(2, 3) for each in (keys, values))
    if values.rotation is not None:  # what each number of a vector is off by is spread over all
        value = value + value.norm(dim=-1, keepdim=True) * value.shape[-1] ** -0.5
    return {"key_sizes": key.norm(dim=-1), "value_sizes": value}


def shares_of_budget(
    found: Part, call: AttentionCall, key: torch.Tensor, value: torch.Tensor, **allowed: Any
) -> list[torch.Tensor]:
    """Divide what a result is off by what it may be off, for each number; up to 1 is rounding.

    Args:
        found: By a kernel. The log-sum-exp may be empty; the rest is rounded once more where it is not in float32.
        call: What was asked.
        key: As `within` takes it.
        value: As `within` takes it.
        allowed: What else `within` takes.

    Returns:
        Of the attention, and of the log-sum-exp if there is one.
    """
    truths, budgets = within(call, key, value, **allowed)
    shares = []
    for ours, truth, budget in zip(found, truths, budgets, strict=True):
        if not ours.numel() and truth.numel():
            continue
        assert ours.shape == truth.shape
        there = torch.isfinite(truth)
        assert torch.equal(torch.isfinite(ours), there), "what is infinite is not the same"
        if ours.dtype.itemsize < 4:
            budget = budget + (truth.abs() + budget) * torch.finfo(ours.dtype).eps / 2
        off = torch.where(there, ours.double() - truth, 0.0).abs()
        shares.append(torch.where(off > 0, off / budget.clamp_min(1e-300), 0.0))
    return shares


def assert_within_budget(
    found: Part, call: AttentionCall, key: torch.Tensor, value: torch.Tensor, **allowed: Any
) -> None:
    """Assert that a result is no further from float64 than its arithmetic explains, as `shares_of_budget` says."""
    of_attention, *of_log = shares_of_budget(found, call, key, value, **allowed)
    for name, share in (("attention", of_attention), *(("log-sum-exp", each) for each in of_log)):
        most = share.max().item() if share.numel() else 0.0
        assert most <= 1, f"{name} is off by {most:.3g} times its budget"
