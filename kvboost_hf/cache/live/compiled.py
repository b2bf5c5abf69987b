"""A cache of a fixed size under generate(): prompts run eagerly, decoding steps may be compiled.

What generate() decides by asking the cache, and what it is told (the same in transformers 5.17 and 5.23):

    before the prompt    _sample         is decoding to be compiled?                  is_compileable: yes
    for the prompt       _prefill        4-D masks over all `max_cache_len` columns?  is_compileable: no
    for each step        _sample         4-D masks?                                   is_compileable: yes

So the hook sees a prompt with its 2-D mask, as with any other cache, and a graph sees masks of one shape.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from kvboost_hf.cache.costs import Graph
from kvboost_hf.cache.layers import EmptyLayer, in_place_of
from kvboost_hf.cache.layers.base import ReuseLayer
from kvboost_hf.cache.layers.static import StaticReuseLayer, StaticStateLayer
from kvboost_hf.cache.live.ledger import Ledger
from kvboost_hf.cache.planning.chunks import shifted_ids
from kvboost_hf.cache.prompt.token_log import TokenLog, text_positions
from kvboost_hf.compat import TAKE_MASKS, GenerateCall, cache_layers, forward_arguments, known_reason, rope_regime
from kvboost_hf.visibility import read_reach

# By layer type, the columns that a token can attend to, itself included; 0 for all. Types without a window come first.
Windows = Mapping[str, int]
_NOTES = 5  # token id, place in the row, position, first visible column, visible columns
_WITH_COLUMNS = {"DynamicLayer", "DynamicSlidingWindowLayer"}
_WITHOUT_COLUMNS = {"LinearAttentionLayer", "DummyLayer"}


class Suffix(NamedTuple):
    """The end of a prompt that is to be computed in a graph."""

    input_ids: torch.Tensor  # [batch, m], the object that the model is given
    graph: Graph
    compiled: Callable[..., Any]  # the model below its head


class StaticDecoding:
    """The state of a `ChunkReuseCache` of a fixed size beside its layers.

    Raises:
        ValueError: for a model that cannot decode with static shapes here.
    """

    def __init__(self, model: PreTrainedModel, max_cache_len: int) -> None:
        if not isinstance(max_cache_len, int) or isinstance(max_cache_len, bool) or max_cache_len < 1:
            raise ValueError(f"`max_cache_len` must be a positive int, 'auto' or None, got {max_cache_len!r}.")
        reason = static_reason(model, max_cache_len)
        if reason is not None:
            raise ValueError(f"`max_cache_len` is not for {type(model).__name__}: {reason}. Leave it out.")
        self.max_cache_len = max_cache_len
        self._windows = _windows(model)
        self.step_log = StepLog(max_cache_len, self._windows)
        self.in_use = True  # the last generate() call was not told use_cache=False
        self.ahead = 0  # steps of graphs that the layers do not count yet
        self.padded = False  # the last generate() call may have padding
        self.in_step = False  # a step of a graph is under way, or was interrupted
        self._new = 0  # columns of the forward under way
        self._suffix: Suffix | None = None  # it is to run in a graph

    def make_layers(self, model: PreTrainedModel) -> list[ReuseLayer]:
        """Empty layers, for the configuration that the model has now."""
        if (windows := _windows(model)) != self._windows:
            self._windows, self.step_log = windows, StepLog(self.max_cache_len, windows)
        stocks = cache_layers(model)
        return in_place_of(stocks, [self._make_layer(stock) for stock in stocks])

    def _make_layer(self, stock: Any) -> ReuseLayer:
        kind = type(stock).__name__
        if kind in _WITH_COLUMNS:
            return StaticReuseLayer(self.max_cache_len, _window(stock))
        return EmptyLayer(stock) if kind == "DummyLayer" else StaticStateLayer(stock.number_of_states)

    def require_call_fits(self, call: GenerateCall, held: int) -> None:
        """Refuse a generate() call that may outgrow the cache.

        Raises:
            ValueError: before anything has changed.
        """
        if call.max_length is None or call.num_ids is None:
            return
        before = held if call.follows(held) else 0
        new = call.max_length - call.num_ids
        prompt = before + call.num_ids
        needed = prompt + new - 1 + call.candidates  # the last token is not run through the model
        if needed > self.max_cache_len:
            proposed = f", with {call.candidates} proposed by prompt lookup," if call.candidates else ""
            raise ValueError(
                f"`max_cache_len`={self.max_cache_len} is too small for this call: a prompt of {prompt} tokens and up "
                f"to {new} new ones{proposed} take {needed}. Make a cache with `max_cache_len={needed}` or "
                "more, pass a smaller `max_new_tokens`, or shorten the prompt."
            )

    def require_fits(self, kwargs: dict[str, Any], held: int) -> None:
        """Refuse a forward that would outgrow the cache.

        Raises:
            ValueError: before anything has changed.
        """
        new = _columns(kwargs)
        if held + new > self.max_cache_len:
            raise ValueError(
                f"`max_cache_len`={self.max_cache_len} is too small: the cache holds {held} tokens and {new} more "
                f"were passed. Make a cache with `max_cache_len={held + new}` or more, or pass fewer tokens."
            )

    def read_mask(
        self, kwargs: dict[str, Any], held: int, pads: NDArray[np.int64] | None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The arguments to run a forward with, and the same with the 2-D mask that its 4-D mask was made from.

        Args:
            held: Columns before the forward.
            pads: The columns of padding of each row, which may have left a window; None if they are not known.
        """
        mask, new = kwargs.get("attention_mask"), _columns(kwargs)
        if isinstance(mask, dict):  # that of states is for prompts, and follows from the 2-D mask
            mask = {kind: mask[kind] for kind in self._windows if kind in mask}
        if isinstance(mask, dict) and all(mask.get(kind) is None for kind in self._windows):
            kwargs, mask = {**kwargs, "attention_mask": None}, None
        given = _tensors(mask)
        if not given or given[0].ndim != 4 or new == 0:
            return kwargs, kwargs
        own, windows = torch.arange(held, held + new, device=given[0].device), self._windows
        if isinstance(mask, dict) and len(windows) > 1:
            windows = {kind: size for kind, size in windows.items() if mask.get(kind) is not None}
            mask = {kind: mask[kind] for kind in windows}
        told = len(windows) == len(self._windows)  # if not, layers of some kind hide nothing
        seen = seen_columns(mask, windows, own, self.max_cache_len)
        if seen is None or seen.shape[1] != new or seen.shape[2] < held + new:
            return kwargs, kwargs
        seen = seen[:, :, : held + new]
        behind = own[:, None] - torch.arange(held + new, device=own.device)
        window, kept = next(iter(windows.values())), seen.any(dim=1)
        if window and pads is not None and len(pads) == len(kept):  # what has left the window of all queries
            there = own[0] - behind[0] >= torch.from_numpy(pads).to(own.device)[:, None]
            kept = kept | ((behind[0] >= window) & there)
        flat = {**kwargs, "attention_mask": kept.long()}
        if new == 1 and told and all(is_of_all_columns(mask, self.max_cache_len) for mask in given):
            return kwargs, flat  # a decoding step keeps its mask, whose shape a graph may count on
        within = (behind >= 0) & (behind < window) if window else behind >= 0
        fits = (seen == (kept[:, None] & within)).all() & (kept.all() | told)
        return (flat, flat) if bool(fits) else (kwargs, kwargs)

    def rows_of(self, kwargs: dict[str, Any]) -> tuple[int, bool]:
        """Rows of a decoding step, and whether some are padded."""
        return kwargs["input_ids"].shape[0], self.padded

    def rewind(self, layers: Sequence[ReuseLayer], held: int) -> bool:
        """Undo a step that a graph has begun or done; whether the layers are as they were with the `held` columns."""
        used = [layer for layer in layers if isinstance(layer, StaticReuseLayer) and layer.is_initialized]
        states = [layer for layer in layers if isinstance(layer, StaticStateLayer)]
        if not all(held <= int(layer.length_tensor) <= held + 1 for layer in used):
            return False
        if not all(layer.can_rewind(held) for layer in states):
            return False
        for layer in used:
            layer.length_tensor.fill_(held)
            layer.seal()  # graphs do not count what they write
        for state in states:
            state.truncate(held)
            state.note_state()
        self.step_log.forget(held)
        self.in_step = False
        return True

    def open(self, layers: Sequence[StaticReuseLayer], kwargs: dict[str, Any], *, step: bool) -> None:
        """An eager forward with `kwargs` is about to begin; `step` if it decodes a token."""
        self._new, self.ahead, self._suffix = _columns(kwargs), 0, None
        masks = [mask for mask in _tensors(kwargs.get("attention_mask")) if mask.ndim == 4]
        if masks:
            step = all(is_of_all_columns(mask, self.max_cache_len) for mask in masks)
        for layer in layers:
            layer.follow()
            layer.whole = step and not torch.is_grad_enabled()
        ids = kwargs.get("input_ids")
        if isinstance(ids, torch.Tensor) and not step:
            self.step_log.reset(ids.shape[0], ids.device)

    def expect_suffix(self, suffix: Suffix) -> None:
        """The forward that has been opened is to run in a graph."""
        self._suffix = suffix

    def take_suffix(self) -> Suffix | None:
        """What is to run in a graph, once."""
        suffix, self._suffix = self._suffix, None
        return suffix

    def close(self, layers: Sequence[StaticReuseLayer]) -> None:
        """The forward has ended."""
        for layer in layers:
            layer.close(self._new)

    def is_torn(self, layers: Sequence[StaticReuseLayer], held: int) -> bool:
        """Whether states may sum up other tokens than the layers hold: a step was interrupted or not watched.

        Args:
            layers: The layers of K/V, which have read what graphs have appended.
            held: Columns that they held before.
        """
        return self.in_step or any(layer.is_initialized and layer.length != held + self.ahead for layer in layers)

    def catch_up(self, layers: Sequence[StaticReuseLayer], ledger: Ledger | None) -> bool:
        """Read what graphs have appended; whether `ledger`, which was in step before, still is."""
        self.ahead = 0
        used = [layer for layer in layers if layer.is_initialized]
        shortest = min(layer.length for layer in used)
        for layer in used:  # a graph may have been interrupted
            layer.truncate(shortest)
        return ledger is not None and self.step_log.append_to(ledger.log, shortest)


def _columns(kwargs: dict[str, Any]) -> int:
    for name in ("input_ids", "inputs_embeds"):
        given = kwargs.get(name)
        if isinstance(given, torch.Tensor) and given.ndim >= 2:
            return given.shape[1]
    return 0


def _tensors(mask: Any) -> list[torch.Tensor]:
    """The mask, or those of all kinds of layers."""
    return [each for each in (mask.values() if isinstance(mask, dict) else [mask]) if isinstance(each, torch.Tensor)]


def _window(stock: Any) -> int:
    return stock.sliding_window if type(stock).__name__ == "DynamicSlidingWindowLayer" else 0


def _windows(model: PreTrainedModel) -> Windows:
    sizes = {_window(stock) for stock in cache_layers(model) if type(stock).__name__ in _WITH_COLUMNS}
    return {"sliding_attention" if size else "full_attention": size for size in sorted(sizes)}


def static_reason(model: PreTrainedModel, max_cache_len: int) -> str | None:
    """Why a model cannot decode in a cache of a fixed size here, or None."""
    reason = known_reason(model)
    if reason is not None:
        return reason
    kinds = {type(layer).__name__ for layer in cache_layers(model)}
    if others := kinds - _WITH_COLUMNS - _WITHOUT_COLUMNS:
        return f"its cache has layers other than full attention, windows and states ({', '.join(sorted(others))})"
    if not kinds & _WITH_COLUMNS:
        return "it keeps states alone, and no column tells how many tokens these sum up"
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "attention_chunk_size", None):
        return "tokens of its layers with chunks attend to no fixed number of columns"
    if len({_window(layer) for layer in cache_layers(model)} - {0}) > 1:
        return "its windows are of several sizes"
    if getattr(config, "cross_attention_layers", None):
        return "layers that attend to an image hold that, and not the tokens"
    if rope_regime(model, max_cache_len) != b"":
        return f"its rotary frequencies depend on the length within {max_cache_len} tokens"
    if not model._can_compile_fullgraph:
        return "transformers cannot compile its forward as one graph"
    if "position_ids" not in forward_arguments(model):
        return "it takes its positions from the attention mask, whose shape would have to change"
    attention = model.config._attn_implementation
    if attention not in TAKE_MASKS:
        return f"its attention is {attention!r}, and only {' and '.join(map(repr, TAKE_MASKS))} take fixed masks"
    return None


class StepLog:
    """Stores the token id, positions and visible columns of each token that a compiled forward was given.

    Args:
        columns: As many as the cache can hold.
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
            first = count = torch.zeros_like(ids)  # nothing is known: a step sees itself
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
        own: [queries], the column of each.

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
        if keep is not None:  # a mask of the caller's own prompt ends with it: no query sees a column behind that
            seen = seen & nn.functional.pad(keep, (0, total - keep.shape[-1]), value=True)[:, None]
        return seen if reach is None else seen & (behind < reach[:, None])
    if mask.dtype == torch.bool or mask.is_floating_point():
        return mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] == 0
    return None


def is_of_all_columns(mask: torch.Tensor, total: int) -> bool:
    """Whether a 4-D mask is for a cache of a fixed size, whose columns behind the queries it hides."""
    return mask.shape[1] > 2 if mask.dtype == torch.int32 else mask.shape[3] == total
