"""A forward over some columns of a prompt whose other columns are in the layers already, in any order.

    layers    [ held | moved | computed | moved | … | computed ]     all columns, before the forward
    model       only the chosen columns, at their true positions
    update()    their keys and values are put in place, and everything is handed to the attention

Hooks on the decoder layers give each its own mask: a token attends to every column at or before its own, and in a
layer with a window to those inside it. Where tokens are chosen by what an early layer shows, the same hooks narrow
what goes on.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvboost_hf.cache.layers.base import Piece, ReuseLayer
from kvboost_hf.cache.layers.growing import GrowingLayer, SlidingLayer
from kvboost_hf.cache.planning.moved import BlendPlan
from kvboost_hf.compat import LayerMasks, PrivateCache, hook_layers, kv_sources, run_model
from kvboost_hf.visibility import Visibility

Columns = NDArray[np.int64]  # [batch, m], ascending in each row
_MAX_QUERIES = 32
_OPERATOR = "kvboost_hf.attend.default"


@dataclass(frozen=True, slots=True)
class Narrowing:
    """Choosing columns by what layers show: see `Measure.DEVIATION`."""

    first: int  # the layer that is the first to be measured, for all columns, and to be narrowed
    steps: int  # how many layers are measured
    # Called with the deviations [batch, columns], below zero where none was measured, and the number of the step;
    # returns the columns to go on with, a part of those so far.
    choose: Callable[[NDArray[np.float64], int], Columns]
    tensor: int = 1  # what is compared with what is stored: values, or keys where those tell no positions


class TakesColumns(Protocol):
    """A layer of another cache that takes new K/V over some of the columns that it holds, as `GrowingLayer` does."""

    @property
    def length(self) -> int | None:
        """Columns held."""
        ...

    @property
    def first(self) -> int:
        """The first column that is still held."""
        ...

    @property
    def window(self) -> int:
        """Columns that a token attends to, itself included; 0 for all."""
        ...

    def scatter(
        self, columns: torch.Tensor, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write [batch, num_kv_heads, m, head_dim] over `columns` [batch, m]; returns what there is to attend to."""
        ...


class _Measured(Exception):
    """Ends a layer's forward when its keys and values are known."""


class Stopped(Exception):
    """Ends a forward that nobody waits for."""


class ScatterPass:
    """One such forward.

    Args:
        cache: What the forward is given as its cache; tells its layers' calls from those of other threads.
        pads: Columns of left padding of each row.
        present: [batch, columns], columns that are there to attend to; None for all.
        narrowing: Or None where `columns` go through all layers.
        unmasked: Layers that are given a whole prompt need no mask.
        compact: Where the attention can be told the columns of its queries, do not make a matrix of both.
        new: How many of the last columns the layers do not hold yet: whoever calls `update` makes room for them.
        stop: Ends the forward with `Stopped` once it is set. It is set, too, where another forward of the model comes
            by a layer.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: Cache,
        layers: Sequence[ReuseLayer | TakesColumns],
        columns: Columns,
        pads: Sequence[int],
        *,
        present: NDArray[np.bool_] | None = None,
        narrowing: Narrowing | None = None,
        unmasked: bool = False,
        compact: bool = True,
        new: int = 0,
        stop: threading.Event | None = None,
    ) -> None:
        self.columns = self._all = columns
        self.layer_tokens = [0] * len(layers)  # that went through each layer, padding left out
        self.writes = 0  # to layers
        self.current = 0  # the layer that has asked for its keys and values last
        self._layers, self._narrowing = layers, narrowing
        self._sources = kv_sources(
            model, [isinstance(layer, GrowingLayer) or not isinstance(layer, ReuseLayer) for layer in layers]
        )
        self._pads = np.asarray(pads)
        self._length, self._stop = max(layer.length or 0 for layer in layers) + new, stop
        self._present, self._unmasked = present, unmasked
        windows = [_window(layer) for layer in layers]
        kinds = [(windows[source], self._length - layers[source].first) for source in self._sources]
        self._masks = LayerMasks(model, cache, kinds, compact=compact)
        self._at: dict[torch.device, torch.Tensor] = {}
        self._rows: torch.Tensor | None = None  # where the present columns are among all of them, once it was narrowed
        self._taken: dict[int, tuple[Any, Any]] = {}  # by id: what the model gives each layer, and what is left of it
        self._scores: NDArray[np.float64] | None = None
        self._steps = 0  # how often it was narrowed
        self._measuring = False
        # By hand, or with the cache of a forward that failed: the layers do not keep it alive.
        self.close = weakref.finalize(self, _remove, hook_layers(model, self))

    @property
    def first_column(self) -> int:
        """The first column that the current layer holds."""
        return self._layers[self.current].first

    def arguments(self, ids: torch.Tensor, first: int) -> dict[str, Any]:
        """The arguments of the model, where the caller passed `ids` [batch, m] from column `first` on."""
        return self.arguments_of(ids.gather(1, torch.from_numpy(self.columns).to(ids.device) - first))

    def arguments_of(self, ids: torch.Tensor) -> dict[str, Any]:
        """The arguments of the model, where `ids` [batch, m] are those of the chosen columns."""
        at = torch.from_numpy(self.columns).to(ids.device)
        return {
            "input_ids": ids,
            "position_ids": (at - torch.from_numpy(self._pads).to(ids.device)[:, None]).clamp(min=0),
            "attention_mask": self._masks.stand_in(len(ids), ids.device),
        }

    # A compiled model breaks its graph here, rather than tracing what is not arithmetic.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def update(self, idx: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Put keys and values [batch, heads, m, dim] in place; returns those of all columns."""
        layer = self._layers[idx]
        assert isinstance(layer, GrowingLayer) or not isinstance(layer, ReuseLayer)
        self._require_wanted()
        self.current = idx
        at = self._columns_on(values.device)
        if self._measuring or self._measures(idx):
            assert isinstance(layer, GrowingLayer)
            self._scores = self._deviation(layer, at, (keys, values))
        found = layer.scatter(at, keys, values)
        self.writes += 1
        if self._measuring:
            raise _Measured
        if self._narrowing is None or idx != self._narrowing.first:  # that one was counted when it was measured
            self._count(idx)
        return found

    def _see(self, window: int, columns: int, queries: int, device: torch.device) -> Visibility | None:
        """What the last `queries` tokens of each row see of the last `columns`; None if the layer has its own mask."""
        whole = self.columns.shape[1] == queries == self._length and not self._pads.any()
        if self._unmasked and whole and not window:
            return None
        first = self._length - columns
        keep = torch.arange(first, self._length, device=device) >= torch.from_numpy(self._pads).to(device)[:, None]
        if self._present is not None:
            keep &= torch.from_numpy(self._present[:, first:]).to(device)
        own = self._columns_on(device)[:, -queries:] - first
        return Visibility(window=window, keep=keep, columns=own.int())

    def before_layer(self, idx: int, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Forward pre-hook of a decoder layer."""
        if not self._masks.concern(args, kwargs):
            if self._stop is not None:
                self._stop.set()
            return None
        self._require_wanted()
        kwargs = dict(kwargs)
        if self._narrowing is not None and idx == self._narrowing.first:
            self._measuring = True
            try:
                module.forward(*args, **kwargs)
            except _Measured:
                self._count(idx)
            finally:
                self._measuring = False
        hidden: torch.Tensor = kwargs.pop("hidden_states") if "hidden_states" in kwargs else args[0]
        rest = args[1:]
        if self._scores is not None and self._narrowing is not None:
            hidden = self._narrow(self._narrowing, self._scores, hidden)
        if self.columns.shape != self._all.shape:  # the model goes on giving each layer what belongs to all columns
            rest = tuple(map(self._own, rest))
            kwargs = {name: value if name == "attention_mask" else self._own(value) for name, value in kwargs.items()}
        source = self._sources[idx]
        if source != idx:  # update() will not be called
            self.current = source
            self._count(idx)
        # Layers without K/V of their own may be shown only those of the last tokens whose logits are wanted.
        return self._masks.put(idx, (hidden, *rest), kwargs, hidden.shape[-2], self._see)

    def _require_wanted(self) -> None:
        if self._stop is not None and self._stop.is_set():
            raise Stopped

    def _own(self, given: Any) -> Any:
        """The part for the present columns of an argument that every layer is given for all; taken once."""
        if id(given) not in self._taken:
            assert self._rows is not None
            self._taken[id(given)] = given, _take(given, self._rows, self._all.shape[1])
        return self._taken[id(given)][1]

    def _count(self, idx: int) -> None:
        self.layer_tokens[idx] += int((self.columns >= self._pads[:, None]).sum())

    def _measures(self, idx: int) -> bool:
        """Whether a layer's own forward is measured; the first one is before that, for all columns."""
        found = self._narrowing
        return found is not None and idx > found.first and self._steps < found.steps

    def _narrow(self, narrowing: Narrowing, scores: NDArray[np.float64], hidden: torch.Tensor) -> torch.Tensor:
        """Choose columns, and take their hidden states [batch, m, dim]."""
        chosen = narrowing.choose(scores, self._steps)
        rows = _places(self.columns, chosen)
        self._scores, self._steps = None, self._steps + 1
        taken: torch.Tensor = _take(hidden, rows, self.columns.shape[1])
        self._masks.forget()
        self.columns, self._at, self._taken = chosen, {}, {}
        self._rows = _places(self._all, chosen).to(hidden.device)
        return taken

    def _deviation(self, layer: GrowingLayer, at: torch.Tensor, new: Piece) -> NDArray[np.float64]:
        """How far keys or values are from those in the layer, as [batch, columns]."""
        assert self._narrowing is not None
        tensor = self._narrowing.tensor
        stored = layer.gather(tensor, at)
        off = (new[tensor].float() - stored.float()).square().sum(dim=(1, 3)).double().cpu().numpy()
        scores = np.full((len(off), self._length), -1.0)
        np.put_along_axis(scores, self.columns, off, axis=1)
        return scores

    def _columns_on(self, device: torch.device) -> torch.Tensor:
        if device not in self._at:
            self._at[device] = torch.from_numpy(self.columns).to(device)
        return self._at[device]


def _window(layer: ReuseLayer | TakesColumns) -> int:
    """Columns that a token attends to, itself included; 0 for all."""
    if isinstance(layer, SlidingLayer):
        return layer.sliding_window or 0
    return 0 if isinstance(layer, ReuseLayer) else layer.window


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _places(columns: Columns, chosen: Columns) -> torch.Tensor:
    """Where `chosen` ones are among `columns`, both [batch, …]."""
    return torch.from_numpy(
        np.stack([np.searchsorted(have, want) for have, want in zip(columns, chosen, strict=True)])
    )


def _take(value: Any, rows: torch.Tensor, width: int) -> Any:
    """The chosen `rows` [batch, m] of each tensor that has `width` rows, [batch or 1, width, …]."""
    if isinstance(value, torch.Tensor):
        if value.ndim < 2 or value.shape[1] != width or value.shape[0] not in (1, len(rows)):
            return value
        at = rows.to(value.device).reshape(*rows.shape, *[1] * (value.ndim - 2))
        return value.expand(len(rows), *value.shape[1:]).gather(1, at.expand(-1, -1, *value.shape[2:]))
    if isinstance(value, tuple | list):
        return type(value)(_take(inner, rows, width) for inner in value)
    if type(value) is dict:
        return {name: _take(inner, rows, width) for name, inner in value.items()}
    return value


def attention_of_the_end(
    model: PreTrainedModel, layers: Sequence[ReuseLayer], plan: BlendPlan, ids: torch.Tensor, first: int
) -> tuple[NDArray[np.float64], list[int]]:
    """Run the last tokens over the stored keys, and see where they look; the caller's `ids` begin at column `first`.

    Their own K/V is put into the layers on the way; whoever asks must compute them again. Returns per row how much
    attention each column gets from them [batch, columns], as `AttentionProbe.scores`, and the tokens through each
    layer.
    """
    queries = num_queries(plan)
    columns = np.arange(plan.reuse.filled - queries, plan.reuse.filled)[None].repeat(len(plan.rows), axis=0)
    present = plan.present
    present[:, -queries:] = True
    cache = PrivateCache([layer.native for layer in layers])
    scatter = ScatterPass(model, cache, layers, columns, plan.reuse.pads, present=present, compact=False)
    cache.take = scatter.update
    try:
        given = scatter.arguments(ids, first)
        with AttentionProbe(scatter, plan.reuse.filled) as probe:
            run_model(model, cache=cache, past_hooks=True, **given)
    finally:
        scatter.close()
        cache.take = None
    return probe.scores, scatter.layer_tokens


def num_queries(plan: BlendPlan) -> int:
    """How many tokens look: the last ones, which are computed in every row that has begun."""
    ends = [int(row.computed[::-1].cumprod().sum()) for row in plan.rows]
    return min(_MAX_QUERIES, *(end for end in ends if end > 0))  # a row without an end is all padding so far


class AttentionProbe(TorchFunctionMode):
    """Sums up the attention weights of a forward in this thread: of SDPA, of a softmax, or of `kvboost_fa2`."""

    def __init__(self, running: ScatterPass, columns: int) -> None:
        super().__init__()
        self._pass, self._columns = running, columns
        self._sum: torch.Tensor | None = None

    @property
    def scores(self) -> NDArray[np.float64]:
        """[batch, columns]: of each layer the square root of what a column gets, summed over layers.

        What a column gets is the sum over queries, and the mean over heads. Its root lets no layer decide alone.
        """
        assert self._sum is not None, "no attention was seen"
        return self._sum.double().cpu().numpy()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            weights, found = _attend(*args, **kwargs)
            self._add(weights)
            return found
        if str(func) == _OPERATOR:
            self._add(_weights(*args, **kwargs))
        found = func(*args, **kwargs)
        if func is F.softmax and found.ndim == 4:
            self._add(found)
        return found

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # as `ScatterPass.update`
    def _add(self, weights: torch.Tensor) -> None:
        """Add [batch, heads, queries, keys]; keys may be followed by an attention sink."""
        first = self._pass.first_column
        got = weights[..., : self._columns - first].float().mean(dim=1).sum(dim=1).sqrt()
        if self._sum is None:
            self._sum = torch.zeros(len(got), self._columns, device=got.device)
        self._sum[:, first:] += got.to(self._sum.device)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of `F.scaled_dot_product_attention`, [batch, heads, queries, keys] in float32, and its result."""
    scores = _products(query, key.float()) * (scale or query.shape[-1] ** -0.5)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = scores.softmax(dim=-1)
    return weights, _products(weights, value.float().mT).to(query.dtype)


def _products(rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Of `rows` [batch, heads, m, dim] with `others` [batch, kv_heads, n, dim], each of which several heads share."""
    batch, heads, m, dim = rows.shape
    grouped = rows.float().reshape(batch, others.shape[1], -1, dim)
    return (grouped @ others.mT).view(batch, heads, m, -1)


def _weights(
    key: torch.Tensor,
    value: torch.Tensor,
    query: torch.Tensor,
    scale: float,
    seen: Sequence[torch.Tensor | None],
    causal: bool,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    partial: bool,
) -> torch.Tensor:
    """The weights of the operator of `kvboost_fa2`, [batch, heads, queries, keys, and sinks] in float32.

    Its arguments are those of `kvboost_hf::attend`. A mask says which keys are seen; that of a single query is `keep`.
    """
    keep, _, _, mask = seen
    scores = _products(query, key.float()) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    for there in (mask, keep[:, None, None] if keep is not None else None):
        if there is not None:
            scores = scores.masked_fill(~there, float("-inf"))
    if sinks is not None:
        column = sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    return scores.softmax(dim=-1)
