"""Forwards over trees of tokens that continue the rows of a cache, of which each row keeps one branch.

    cache       [ . . a a a a ]                unchanged; columns that all rows have
                [ b b b b b b ]
    tails       [ a     ]                      accepted tokens behind these, which not all rows have yet
                [ b b b ]
    forward     [ . . a a a a | a     | a a ]  a tree for each row, behind its own tail, by mask and positions
                [ b b b b b b | b b b | b b ]
    keep        the columns that every row now has go into the cache

So a row never waits for another one, no column is moved, and the cache holds what plain decoding would have left: all
that was kept, where there is one row. While no row is ahead and nothing is drafted, a forward is that of plain
decoding, with the cache itself. Hooks on the decoder layers give each its own mask during a forward over trees.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvboost_hf.assisted.hidden import TextStates, asking_for
from kvboost_hf.assisted.tree import ROOT, as_bits, depths, lineage
from kvboost_hf.compat import (
    LayerMasks,
    PrivateCache,
    Shown,
    attempt,
    attn_implementation,
    cache_layers,
    decoder_layers,
    difference,
    forward_arguments,
    frequencies_vary,
    hook_layers,
    kv_sources,
    masks_reason,
    probe_ids,
    probe_logits,
    reads_shared_kv,
    remember,
    run_model,
    tolerance,
)
from kvboost_hf.visibility import Visibility

_BITS = 64  # queries of a tree mask of bits, at most
_TEXT = 3  # tokens of the probe before the branches
_LAYERS = frozenset(("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"))

Pair = tuple[torch.Tensor, torch.Tensor]  # keys and values, [rows, num_kv_heads, tokens, head_dim]


class Lender(Protocol):
    """A cache whose layers a forward may use and then restore, such as the `loans` of a `ChunkReuseCache`."""

    @property
    def kept_layers(self) -> Sequence[int]:
        """The layers whose hidden states `extend` takes besides K/V."""
        ...

    def require_branches(self) -> None:
        """Raise a ValueError if its layers cannot be cropped."""
        ...

    def lend(self) -> list[Any]:
        """The layers, for one forward whose columns are removed again."""
        ...

    def give_back(self) -> None:
        """Remove the columns appended since `lend`."""
        ...

    def read(self, layers: Sequence[int] | None = None, row: int = 0) -> Sequence[Pair | None]:
        """Keys and values of a row that some layers hold, None for all, not to be kept.

        None for a layer that has none.
        """
        ...

    def extend(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        kv: Sequence[Pair | None],
        *,
        hidden: Mapping[int, torch.Tensor],
    ) -> None:
        """Append columns, with their hidden states [1, tokens, hidden_size] of `kept_layers`."""
        ...


class Branches:
    """A tree of tokens behind each row of a cache. After some forwards, `keep` keeps one branch of each tree.

    Args:
        model: The model of the cache.
        cache: A `ChunkReuseCache` or a cache of generate(), which was told to record.
        position: The position of the first token behind each row, [rows, 1] or [planes, rows, 1].
        keep: [rows, columns held], bool: the columns that are no padding; None for all.
        branching: Whether there may be trees; else `step` alone is called, which any cache is good for.
        states: For each row, what takes the hidden states of the tokens that are kept, for heads that draft from
            them; none for other drafts. The model needs `hook_hidden_states` then.

    Raises:
        ValueError: for a cache whose layers cannot be cropped.
    """

    lag = 0  # tokens that the next forward carries in front of its own

    def __init__(
        self,
        model: PreTrainedModel,
        cache: Cache,
        position: torch.Tensor,
        keep: torch.Tensor | None = None,
        *,
        branching: bool = True,
        states: Sequence[TextStates] = (),
    ) -> None:
        self.model, self._cache, self._position, self._keep = model, cache, position, keep
        self._lends = lender_of(cache) if branching else None
        self._held, self._flushed, rows = cache.get_seq_length(), 0, position.shape[-2]
        self._tails: list[list[int]] = [[] for _ in range(rows)]
        self._tokens: list[list[int]] = [[] for _ in range(rows)]  # of the trees, in all forwards so far
        self._parents: list[list[int]] = [[] for _ in range(rows)]
        self._kv: list[Pair | None] = []  # of each layer, of tails and trees
        self._hidden: dict[int, torch.Tensor] = {}  # [rows, tokens, hidden_size] of layers that are kept, likewise
        self._states, self._shown = states, states[0].layers if states else ()
        self._pads = (~keep).sum(-1).tolist() if keep is not None else [0] * rows
        for row, each in enumerate(states):
            each.read_kv = partial(self._read, row)

    @property
    def lengths(self) -> list[int]:
        """For each row, how many tokens were computed and kept."""
        return [self._flushed + len(tail) for tail in self._tails]

    @property
    def is_even(self) -> bool:
        """Whether all rows end where the cache does."""
        return not self._longest

    @torch.no_grad()
    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """Compute and keep one token of each row, as plain decoding does; only while `is_even`.

        Args:
            tokens: The id of each row's token.

        Returns:
            Logits [rows, 1, vocab_size] behind each token.
        """
        cache: Any = self._cache
        more: dict[str, Any] = {"output_hidden_states": asking_for(self.model, self._shown)} if self._shown else {}
        keep = F.pad(self._keep, (0, 1), value=True) if self._keep is not None else None
        found = run_model(
            self.model,
            torch.tensor(tokens, device=self._position.device)[:, None],
            cache,
            position_ids=self._position,
            attention_mask=keep.long() if keep is not None else None,
            **more,
        )
        if self._lends is not None:
            cache.crop(0)  # layers with a window let go of what has left it
        self._held, self._flushed, self._position = self._held + 1, self._flushed + 1, self._position + 1
        self._keep = keep
        for row in range(len(self._states)):
            self._append(row, found.hidden_states, torch.zeros(1, dtype=torch.long))
        logits: torch.Tensor = found.logits[:, -1:]
        return logits

    # A compiled model breaks its graph here, rather than tracing what is not arithmetic.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def forward(self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> torch.Tensor:
        """Add tokens to each tree. Where there are fewer, tokens that nothing else sees fill up.

        Args:
            tokens: For each row, ids of its new tokens, one at least.
            parents: For each row, the index of each token's parent, counted from the first token added since `keep`,
                or -1 for the text.

        Returns:
            Logits [rows, most tokens, vocab_size] behind each new token.
        """
        device, count = self._position.device, max(map(len, tokens))
        full: list[list[int]] = [[*row, *row[-1:] * (count - len(row))] for row in map(list, tokens)]
        for row, (own, above) in enumerate(zip(full, parents, strict=True)):
            self._tokens[row] += own
            self._parents[row] += [*above, *[ROOT] * (count - len(above))]
        layers, handles = self._lender.lend(), list[RemovableHandle]()
        try:
            running = Running(self, layers, count)
            running.show({*self._lender.kept_layers, *self._shown})
            handles = hook_layers(self.model, running)
            found = run_model(
                self.model,
                torch.tensor(full, device=device),
                running.cache,
                logits=0,
                position_ids=self._position + torch.from_numpy(self._own()[:, -count:]).to(device),
                attention_mask=running.masks.stand_in(len(full), device),
            )
        except BaseException:
            for each in (*self._tokens, *self._parents):
                del each[-count:]
            raise
        finally:
            for handle in handles:
                handle.remove()
            self._lender.give_back()
        self._kv, self._hidden = running.kv, running.hidden_behind(self._hidden)
        logits: torch.Tensor = found.logits
        return logits

    def keep(self, paths: Sequence[Sequence[int]]) -> int:
        """Keep tokens of the trees, for each row a path from the root, and drop the others.

        Args:
            paths: For each row, indices of the tokens to keep, each the child of the one before.

        Returns:
            How many columns the cache holds more.
        """
        longest, pairs = self._longest, list(zip(self._tails, paths, strict=True))
        places = [[*range(len(tail)), *(longest + node for node in path)] for tail, path in pairs]
        for number, (tail, path) in enumerate(pairs):
            tail += [self._tokens[number][node] for node in path]
            if self._states and path:
                self._append(number, self._hidden, torch.tensor([longest + node for node in path], dtype=torch.long))
        most, ready = max(map(len, places)), min(map(len, places))
        at = torch.tensor([[*row, *[0] * (most - len(row))] for row in places], dtype=torch.long)
        self._kv = [pair and (_gathered(pair[0], at), _gathered(pair[1], at)) for pair in self._kv]
        self._hidden = {layer: _gathered(found[:, None], at)[:, 0] for layer, found in self._hidden.items()}
        self._tokens, self._parents = [[] for _ in paths], [[] for _ in paths]
        self._flush(ready)
        return ready

    def end(self) -> None:
        """Nothing: the cache holds what was kept."""

    def _append(self, row: int, hidden: Any, at: torch.Tensor) -> None:
        """Show the hidden states of tokens that a row has kept, in columns `at` of [rows, tokens, hidden_size]."""
        found = {layer: hidden[layer][row : row + 1] for layer in self._shown}
        stop = self._held - self._pads[row] + len(self._tails[row])
        states = {layer: each.index_select(1, at.to(each.device)) for layer, each in found.items()}
        self._states[row].append(states, stop)

    def _read(self, row: int, layers: Sequence[int]) -> list[Pair | None]:
        """Keys and values of some layers of a row, padding included."""
        held, own, tail = self._lender.read(layers, row), slice(row, row + 1), slice(len(self._tails[row]))
        found: list[Pair | None] = []
        for layer, pair in zip(layers, held, strict=True):
            if pair is not None and self._kv and (new := self._kv[layer]) is not None:
                pair = (
                    torch.cat([pair[0], new[0][own, :, tail]], dim=2),
                    torch.cat([pair[1], new[1][own, :, tail]], dim=2),
                )
            found.append(pair)
        return found

    def settle(self, length: int) -> None:
        """Leave `length` columns of each row behind the first ones in the cache. All rows must have as many."""
        for tail in self._tails:
            del tail[length - self._flushed :]
        if not self.is_even:
            self._flush(self._longest)

    def _flush(self, count: int) -> None:
        """Move the first columns of all tails into the cache."""
        kv, hidden, rest = self._kv, self._hidden, slice(count, self._longest)
        ahead = count < self._longest
        self._kv = [pair and (pair[0][:, :, rest], pair[1][:, :, rest]) for pair in kv] if ahead else []
        self._hidden = {layer: found[:, rest] for layer, found in hidden.items()} if ahead else {}
        if not count:
            return
        ids = torch.tensor([tail[:count] for tail in self._tails], device=self._position.device)
        positions = self._position + torch.arange(count, device=self._position.device)
        first = [pair and (pair[0][:, :, :count], pair[1][:, :, :count]) for pair in kv]
        self._lender.extend(ids, positions, first, hidden={layer: found[:, :count] for layer, found in hidden.items()})
        for tail in self._tails:
            del tail[:count]
        self._held, self._flushed, self._position = self._held + count, self._flushed + count, self._position + count
        if self._keep is not None:
            self._keep = F.pad(self._keep, (0, count), value=True)

    @property
    def _lender(self) -> Lender:
        assert self._lends is not None, "no trees were announced"
        return self._lends

    @property
    def _longest(self) -> int:
        return max(map(len, self._tails))

    @property
    def count(self) -> int:
        """Columns behind those of the cache: the longest tail, and the trees."""
        return self._longest + len(self._tokens[0])

    def _own(self) -> NDArray[np.int64]:
        """How far each token of the trees is behind the cache, [rows, tokens]."""
        trees = zip(self._tails, self._parents, strict=True)
        own: NDArray[np.int64] = np.stack([len(tail) + depths(row) for tail, row in trees])
        return own

    def see(self, window: int, columns: int, queries: int, device: torch.device) -> Visibility:
        """What the last tokens of the trees see of the columns of a layer: of the cache, the tails, and the trees.

        Args:
            window: Columns that a token sees, itself included; 0 for all.
            columns: The number of columns.
            queries: Tokens of each row in this forward.
            device: The device of the layer.
        """
        before, behind, seen = columns - self.count, self._own(), np.stack([lineage(row) for row in self._parents])
        tails = np.arange(self._longest)[None, None] < np.array([len(tail) for tail in self._tails])[:, None, None]
        own = None
        if window:
            seen &= behind[:, :, None] - behind[:, None] < window
            tails = tails & (behind[:, :, None] - np.arange(self._longest) < window)
            own = (torch.from_numpy(behind[:, -queries:]).to(device) + before).int()
        keep = self._keep[:, self._held - before :].to(device) if self._keep is not None else None
        if keep is not None:
            keep = F.pad(keep, (0, self.count), value=True)
        if not self._longest and queries == behind.shape[1] <= _BITS:
            bits = np.stack([as_bits(row) for row in seen])
            return Visibility(True, window, keep, own, tree=torch.from_numpy(bits).to(device))
        tails = np.broadcast_to(tails, (*seen.shape[:2], self._longest))
        mask = torch.from_numpy(np.concatenate([tails, seen], axis=2)[:, -queries:]).to(device)
        return Visibility(False, window, keep, own, mask=F.pad(mask, (before, 0), value=True)[:, None])

    def with_new(self, idx: int, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        """Keys and values of a layer behind those of the cache: of the tails, and of the trees, the new ones last."""
        pair = self._kv[idx] if self._kv else None
        return (keys, values) if pair is None else (torch.cat([pair[0], keys], 2), torch.cat([pair[1], values], 2))


def _gathered(tensor: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Columns `at` [rows, columns] of a tensor [rows, heads, columns, dim]."""
    index = at.to(tensor.device)
    if len(index) == 1:
        return tensor.index_select(2, index[0])
    return tensor.gather(2, index[:, None, :, None].expand(-1, tensor.shape[1], -1, tensor.shape[3]))


class Running:
    """One forward: its cache, and the masks of its layers.

    Args:
        branches: What it computes.
        layers: The lent layers.
        queries: Tokens of each row.
    """

    def __init__(self, branches: Branches, layers: list[Any], queries: int) -> None:
        self.cache = PrivateCache(layers)
        self.kv: list[Pair | None] = [None] * len(layers)
        self.cache.take = _append_behind(branches, layers, self.kv)
        self.hidden: dict[int, torch.Tensor] = {}  # of the new tokens
        self._queries = queries
        self._branches = branches
        # Before anything is appended.
        columns = [layer.get_mask_sizes(branches.count)[0] if _has_kv(layer) else branches.count for layer in layers]
        windows = [getattr(layer, "sliding_window", None) or 0 for layer in layers]
        sources = kv_sources(branches.model, list(map(_has_kv, layers)))
        self.masks = LayerMasks(branches.model, self.cache, [(windows[at], columns[at]) for at in sources])

    def show(self, layers: Collection[int]) -> None:
        """Have the forward show the hidden states of these layers."""

        def take(shown: Shown) -> Shown:
            self.hidden = {layer: states for layer in layers if (states := shown.of(layer)) is not None}
            return shown

        if layers:
            self.cache.hidden_layers, self.cache.take_hidden_states = sorted(layers), take

    def hidden_behind(self, before: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """The hidden states [rows, tokens, hidden_size] of earlier tokens, and of the new ones behind them."""
        return {
            layer: torch.cat([before[layer], new], dim=1) if layer in before else new
            for layer, new in self.hidden.items()
        }

    def before_layer(self, idx: int, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Forward pre-hook of a decoder layer."""
        if not self.masks.concern(args, kwargs):
            return None
        return self.masks.put(idx, args, kwargs, self._queries, self._branches.see)


def _append_behind(
    branches: Branches, layers: Sequence[Any], kv: list[Pair | None]
) -> Callable[[int, torch.Tensor, torch.Tensor], Pair]:
    """Appends new K/V to lent layers, behind that of earlier forwards, and notes both in `kv`."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def take(layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        pair = kv[layer_idx] = branches.with_new(layer_idx, keys, values)
        found: Pair = layers[layer_idx].update(*pair)
        return found

    taken: Callable[[int, torch.Tensor, torch.Tensor], Pair] = take
    return taken


def lender_of(cache: Any) -> Lender:
    """The `Lender` for a cache: its own `Loans`, or a `StockLender`.

    Raises:
        ValueError: for a cache whose layers cannot be cropped.
    """
    found: Lender = cache.loans if hasattr(cache, "loans") else StockLender(cache)
    found.require_branches()
    return found


class StockLender:
    """Lends the layers of a cache of transformers.

    Args:
        cache: With layers of full or sliding attention only.
    """

    kept_layers: Sequence[int] = ()

    def __init__(self, cache: Cache) -> None:
        self._cache, self._held = cache, 0
        self._layers: list[Any] = cache.layers

    def require_branches(self) -> None:
        types = {type(layer).__name__ for layer in self._layers} - _LAYERS
        if types or self._cache.offloading:
            found = "offloaded layers" if not types else f"layers of the kind {', '.join(sorted(types))}"
            raise ValueError(
                f"K/V of branches cannot be held in {found}. Pass a ChunkReuseCache as `cache`, or leave "
                "out `cache` and `cache_implementation`."
            )

    def lend(self) -> list[Any]:
        self._held = self._cache.get_seq_length()
        return self._layers

    def give_back(self) -> None:
        for layer in self._layers:
            if _has_kv(layer):
                layer.crop(self._held - layer.get_seq_length())

    def read(self, layers: Sequence[int] | None = None, row: int = 0) -> list[Pair | None]:
        chosen, own = self._layers if layers is None else [self._layers[at] for at in layers], slice(row, row + 1)
        return [(layer.keys[own], layer.values[own]) if _has_kv(layer) else None for layer in chosen]

    def extend(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        kv: Sequence[Pair | None],
        *,
        hidden: Mapping[int, torch.Tensor],
    ) -> None:
        for layer, pair in zip(self._layers, kv, strict=True):
            if pair is not None:
                layer.update(*pair)
                layer.crop(0)


@contextmanager
def recording(cache: Any) -> Iterator[None]:
    """Undo `activate_past_recording` of a cache at the end, which transformers cannot."""
    before = [(type(layer), getattr(layer, "record_past", None)) for layer in cache.layers]
    try:
        yield
    finally:
        for layer, found in zip(cache.layers, before, strict=False):  # states may be in copies now
            if found == (type(layer), False) and not hasattr(cache, "loans"):  # ours undo it themselves
                layer.record_past = False


def _has_kv(layer: Any) -> bool:
    return type(layer).__name__ != "DummyLayer"


def branch_reason(model: PreTrainedModel) -> str | None:
    """Why tokens that branch cannot be computed in one forward; None if they can.

    Once per model, dtype and attention: three forwards of a few tokens.
    """
    return remember(model, (branch_reason, model.dtype, attn_implementation(model)), lambda: _reason(model))


def _reason(model: PreTrainedModel) -> str | None:
    config: Any = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if reads_shared_kv(model.config):
        return "it reads K/V of its target, for which load_assistant(draft, target=model) prepares it"
    if (reason := masks_reason(model)) is not None:
        return reason
    if "position_ids" not in forward_arguments(model):
        return "its forward takes no position_ids"
    if any(map(frequencies_vary, model.modules())):
        return "its rotary frequencies depend on the length"
    if getattr(config, "cross_attention_layers", None):
        return "it has layers that attend to images only"
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        return "its attention is chunked"
    return attempt(model, lambda: _layers_reason(model) or _probe(model), "it fails on tokens that branch")


def _layers_reason(model: PreTrainedModel) -> str | None:
    layers = cache_layers(model)
    if unknown := {type(layer).__name__ for layer in layers} - _LAYERS:
        return f"its cache has layers that cannot hold branches ({', '.join(sorted(unknown))})"
    if len(decoder_layers(model)) != len(layers):
        return "its decoder layers cannot be told apart"
    return None


@torch.no_grad()
def _probe(model: PreTrainedModel) -> str | None:
    """Interleave two continuations token by token: the logits must be those of each continuation alone."""
    ids = probe_ids(model)
    text, first = ids[:, :_TEXT], ids[:, _TEXT:]
    ways = torch.cat([first, first.flip(1)])
    plain = probe_logits(model, torch.cat([text.expand(2, -1), ways], dim=1))[:, _TEXT:]
    cache = PrivateCache(cache_layers(model))
    probe_logits(model, text, cache)
    cache.activate_past_recording()  # type: ignore[no-untyped-call]
    branches = Branches(model, cache, torch.tensor([[_TEXT]], device=ids.device))
    tokens = ways.T.flatten().tolist()  # a b a b …
    found = branches.forward([tokens], [[node - 2 if node > 1 else ROOT for node in range(len(tokens))]])[0]
    off = max(difference(found[way::2].float(), plain[way]) for way in range(2))
    if not off <= tolerance(model.dtype):
        return f"tokens that branch have other logits than alone (by {off:.2g} standard deviations)"
    return None
