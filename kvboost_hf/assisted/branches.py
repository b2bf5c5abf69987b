"""Forwards over a tree of tokens that continue a text, after which the cache keeps one branch of it.

    cache       [ text ]                       unchanged, until a branch is kept
    forward     [ text | a b c d e ]           children b, c of a, d of b, …, by mask and positions
    keep        [ text | a b d ]

Hooks on the decoder layers give each its own mask during such a forward.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvboost_hf.assisted.hidden import TextStates
from kvboost_hf.assisted.tree import as_bits, depths, lineage
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

Pair = tuple[torch.Tensor, torch.Tensor]  # keys and values, [1, num_kv_heads, tokens, head_dim]


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
    """A tree of tokens that continues the text in a cache. The cache is unchanged between two calls.

    Args:
        model: The model of the cache.
        cache: A `ChunkReuseCache` or a cache of generate(), with one row.
        position: The position of the first token, [1, 1] or [planes, 1, 1].
        keep: [1, columns held], bool: the columns that are no padding; None for all.
        states: Takes the hidden states of the tokens that are kept, for heads that draft from them. The model needs
            `hook_hidden_states` then.

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
        states: TextStates | None = None,
    ) -> None:
        self.model, self._position, self._keep, self._states = model, position, keep, states
        self._lender = lender_of(cache)
        if states is not None:
            states.read_kv = self._lender.read
        self._held = cache.get_seq_length()
        self._pads = int((~keep).sum()) if keep is not None else 0
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._kv: list[Pair | None] = []  # of each layer, of all tokens so far
        self._hidden: dict[int, torch.Tensor] = {}  # [1, tokens, hidden_size] of layers that are kept, likewise

    # A compiled model breaks its graph here, rather than tracing what is not arithmetic.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def forward(self, tokens: Sequence[int], parents: Sequence[int]) -> torch.Tensor:
        """Add tokens to the tree.

        Args:
            tokens: Ids of the new tokens.
            parents: The index of each token's parent, counted from the first token ever added, or -1 for the text.

        Returns:
            Logits [tokens, vocab_size] behind each new token.
        """
        self._tokens += tokens
        self._parents += parents
        layers, handles = self._lender.lend(), list[RemovableHandle]()
        try:
            running = Running(self, layers, len(tokens))
            running.show({*self._lender.kept_layers, *(self._states.layers if self._states is not None else ())})
            handles = hook_layers(self.model, running)
            found = run_model(
                self.model,
                torch.tensor([tokens], device=self._position.device),
                running.cache,
                logits=0,
                position_ids=self._positions()[..., -len(tokens) :],
                attention_mask=running.masks.stand_in(1, self._position.device),
            )
        except BaseException:
            del self._tokens[-len(tokens) :], self._parents[-len(tokens) :]
            raise
        finally:
            for handle in handles:
                handle.remove()
            self._lender.give_back()
        self._kv, self._hidden = running.kv, running.hidden_behind(self._hidden)
        logits: torch.Tensor = found.logits[0]
        return logits

    def keep(self, path: Sequence[int]) -> int:
        """Append these tokens, each the child of the one before, to the cache, and drop the others.

        Returns:
            How many tokens the cache holds more.
        """
        if path:
            at = torch.tensor(path)
            kv = [None if pair is None else (_columns(pair[0], at), _columns(pair[1], at)) for pair in self._kv]
            ids = torch.tensor([[self._tokens[node] for node in path]], device=self._position.device)
            hidden = {layer: found.index_select(1, at.to(found.device)) for layer, found in self._hidden.items()}
            self._lender.extend(ids, self._positions()[..., at], kv, hidden=hidden)
            self._held += len(path)
            if self._states is not None:
                self._states.append(hidden, self._held - self._pads)
            self._position = self._position + len(path)
            if self._keep is not None:
                self._keep = torch.cat([self._keep, self._keep.new_ones(1, len(path))], dim=1)
        self._tokens, self._parents, self._kv, self._hidden = [], [], [], {}
        return len(path)

    def end(self) -> None:
        """Nothing: the cache holds what was kept."""

    def _positions(self) -> torch.Tensor:
        """Of all tokens, [1, tokens] or [planes, 1, tokens]."""
        return self._position + torch.from_numpy(depths(self._parents)).to(self._position.device)

    def see(self, window: int, columns: int, queries: int, device: torch.device) -> Visibility:
        """What the last `queries` tokens see of the columns of a layer, the last of which are the tree's.

        Args:
            window: Columns that a token sees, itself included; 0 for all.
            columns: The number of columns.
            queries: Tokens of this forward.
            device: The device of the layer.
        """
        depth, seen = depths(self._parents), lineage(self._parents)
        before = columns - len(depth)
        own = None
        if window:
            seen &= depth[:, None] - depth < window
            own = (torch.from_numpy(depth).to(device)[None, -queries:] + before).int()
        keep = self._keep[:, self._held - before :].to(device) if self._keep is not None else None
        if keep is not None:
            keep = F.pad(keep, (0, len(depth)), value=True)
        if queries == len(depth) <= _BITS:
            return Visibility(True, window, keep, own, tree=torch.from_numpy(as_bits(seen)).to(device)[None])
        mask = F.pad(torch.from_numpy(seen).to(device)[-queries:], (before, 0), value=True)
        return Visibility(False, window, keep, own, mask=mask[None, None])

    def with_new(self, idx: int, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        """Keys and values of a layer for all tokens, those of the earlier forwards before the new ones."""
        pair = self._kv[idx] if self._kv else None
        return (keys, values) if pair is None else (torch.cat([pair[0], keys], 2), torch.cat([pair[1], values], 2))

    @property
    def count(self) -> int:
        """Tokens so far."""
        return len(self._tokens)


class Continuing(Protocol):
    """Tokens that continue what a cache holds, in a forward over lent layers."""

    model: PreTrainedModel

    @property
    def count(self) -> int:
        """Columns behind those of the cache."""
        ...

    def see(self, window: int, columns: int, queries: int, device: torch.device) -> Visibility:
        """What the last `queries` tokens see of the columns of a layer."""
        ...

    def with_new(self, idx: int, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        """Keys and values of a layer behind those of the cache, the new ones last."""
        ...


class Running:
    """One forward: its cache, and the masks of its layers.

    Args:
        branches: What it computes.
        layers: The lent layers.
        queries: Tokens of each row.
    """

    def __init__(self, branches: Continuing, layers: list[Any], queries: int) -> None:
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
    branches: Continuing, layers: Sequence[Any], kv: list[Pair | None]
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


def _columns(tensor: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return tensor.index_select(2, at.to(tensor.device))


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
    found = branches.forward(tokens, [node - 2 if node > 1 else -1 for node in range(len(tokens))])
    off = max(difference(found[way::2].float(), plain[way]) for way in range(2))
    if not off <= tolerance(model.dtype):
        return f"tokens that branch have other logits than alone (by {off:.2g} standard deviations)"
    return None
