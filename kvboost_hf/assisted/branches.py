"""Forwards over a tree of tokens that continue a text, after which the cache keeps one branch of it.

    cache       [ text ]                       unchanged, until a branch is kept
    forward     [ text | a b c d e ]           children b, c of a, d of b, …, by mask and positions
    keep        [ text | a b d ]

transformers gives all layers of a type one mask without branches. Hooks on the decoder layers replace it during such a
forward.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvboost_hf.assisted.tree import as_bits, depths, lineage
from kvboost_hf.compat import PrivateCache, attn_implementation, hook_layers, kv_sources, mask_form, run_model
from kvboost_hf.handles import ATTENTION, make_tree

_BITS = 64  # queries of a tree mask of bits, at most
_STAND_IN = (1, 1, 1, 1)  # shape of the mask that the model is given, which the hooks replace

Pair = tuple[torch.Tensor, torch.Tensor]  # keys and values, [1, num_kv_heads, tokens, head_dim]


class Lender(Protocol):
    """A cache whose layers a forward may use and then restore, such as `ChunkReuseCache`."""

    def require_branches(self) -> None:
        """Raise a ValueError if its layers cannot be cropped."""
        ...

    def lend(self) -> list[Any]:
        """The layers, for one forward whose columns are removed again."""
        ...

    def give_back(self) -> None:
        """Remove the columns appended since `lend`."""
        ...

    def extend(self, input_ids: torch.Tensor, position_ids: torch.Tensor, kv: Sequence[Pair | None]) -> None:
        """Append columns."""
        ...


class Branches:
    """A tree of tokens that continues the text in a cache. The cache is unchanged between two calls.

    Args:
        model: The model of the cache.
        cache: A `ChunkReuseCache` or a cache of generate(), with one row.
        position: Of the first token, [1, 1] or [planes, 1, 1].
        keep: [1, columns held], bool: the columns that are no padding; None for all.

    Raises:
        ValueError: for a cache whose layers cannot be cropped.
    """

    def __init__(
        self, model: PreTrainedModel, cache: Cache, position: torch.Tensor, keep: torch.Tensor | None = None
    ) -> None:
        self._model, self._position, self._keep = model, position, keep
        self._lender = lender_of(cache)
        self._held = cache.get_seq_length()
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._kv: list[Pair | None] = []  # of each layer, of all tokens so far
        form = mask_form(model.config.get_text_config(decoder=True))
        self._takes_bits = attn_implementation(model) == ATTENTION and form == "compact" and keep is None
        self._mask_dtype = model.dtype if attn_implementation(model) == "eager" else torch.bool

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
            running = _Running(self, layers, len(tokens))
            handles = hook_layers(self._model, running)
            found = run_model(
                self._model,
                torch.tensor([tokens], device=self._position.device),
                running.cache,
                logits=0,
                position_ids=self._positions()[..., -len(tokens) :],
                # Models pass a 4-D mask on as it is; the hooks give each layer its own.
                attention_mask=torch.zeros(_STAND_IN, device=self._position.device, dtype=self._mask_dtype),
            )
        except BaseException:
            del self._tokens[-len(tokens) :], self._parents[-len(tokens) :]
            raise
        finally:
            for handle in handles:
                handle.remove()
            self._lender.give_back()
        self._kv = running.kv
        logits: torch.Tensor = found.logits[0]
        return logits

    def keep(self, path: Sequence[int]) -> None:
        """Append these tokens, each the child of the one before, to the cache, and drop the others."""
        if path:
            at = torch.tensor(path)
            kv = [None if pair is None else (_columns(pair[0], at), _columns(pair[1], at)) for pair in self._kv]
            ids = torch.tensor([[self._tokens[node] for node in path]], device=self._position.device)
            self._lender.extend(ids, self._positions()[..., at], kv)
            self._held += len(path)
            self._position = self._position + len(path)
            if self._keep is not None:
                self._keep = torch.cat([self._keep, self._keep.new_ones(1, len(path))], dim=1)
        self._tokens, self._parents, self._kv = [], [], []

    def _positions(self) -> torch.Tensor:
        """Of all tokens, [1, tokens] or [planes, 1, tokens]."""
        return self._position + torch.from_numpy(depths(self._parents)).to(self._position.device)

    def mask(self, window: int | None, before: int, queries: int, device: torch.device) -> torch.Tensor:
        """The mask of the last `queries` tokens, in the form that the attention takes.

        Args:
            window: Columns that a token sees, itself included; None for all.
            before: How many of the last columns held the layer has.
            queries: Tokens of this forward.
            device: Of the mask.
        """
        depth, seen = depths(self._parents), lineage(self._parents)
        if window is not None:
            seen &= depth[:, None] - depth < window
        own = torch.from_numpy(depth).to(device)[-queries:]
        if self._takes_bits and queries == len(depth) <= _BITS:
            columns = (own + before)[None] if window is not None else None
            return make_tree(torch.from_numpy(as_bits(seen)).to(device)[None], columns)
        there = torch.ones(1, before, dtype=torch.bool, device=device)
        if self._keep is not None:
            there = self._keep[:, self._held - before :].to(device)
        if window is not None:
            there = there & (own[:, None] + before - torch.arange(before, device=device) < window)
        mask = torch.cat([there.expand(queries, -1), torch.from_numpy(seen).to(device)[-queries:]], dim=1)[None, None]
        if self._mask_dtype is torch.bool:
            return mask
        return torch.where(mask, 0.0, torch.finfo(self._mask_dtype).min).to(self._mask_dtype)

    def with_new(self, idx: int, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        """Keys and values of a layer for all tokens, those of the earlier forwards before the new ones."""
        pair = self._kv[idx] if self._kv else None
        return (keys, values) if pair is None else (torch.cat([pair[0], keys], 2), torch.cat([pair[1], values], 2))

    @property
    def count(self) -> int:
        """Tokens so far."""
        return len(self._tokens)


class _Running:
    """One forward: its cache, and the mask of each layer."""

    def __init__(self, branches: Branches, layers: list[Any], queries: int) -> None:
        self.cache = PrivateCache(layers)
        self.kv: list[Pair | None] = [None] * len(layers)
        self.cache.take = _append_behind(branches, layers, self.kv)
        self._queries = queries
        self._branches = branches
        # Before anything is appended.
        sizes = [layer.get_mask_sizes(branches.count)[0] - branches.count if _has_kv(layer) else 0 for layer in layers]
        windows = [getattr(layer, "sliding_window", None) for layer in layers]
        self._kinds = [(windows[i], sizes[i]) for i in kv_sources(branches._model, list(map(_has_kv, layers)))]
        self._masks: dict[tuple[int | None, int, torch.device], torch.Tensor] = {}

    def before_layer(self, idx: int, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Forward pre-hook of a decoder layer."""
        if not any(value is self.cache for value in (*args, *kwargs.values())):
            return None  # another thread's
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        key = (*self._kinds[idx], hidden.device)
        if key not in self._masks:
            self._masks[key] = self._branches.mask(key[0], key[1], self._queries, hidden.device)
        if "attention_mask" in kwargs:
            return args, {**kwargs, "attention_mask": self._masks[key]}
        if not any(map(_is_stand_in, args)):
            raise ValueError("its decoder layers are given no attention_mask")
        return tuple(self._masks[key] if _is_stand_in(value) else value for value in args), kwargs


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
    """The `Lender` for a cache: the cache itself, or a `StockLender`.

    Raises:
        ValueError: for a cache whose layers cannot be cropped.
    """
    found: Lender = cache if hasattr(cache, "lend") else StockLender(cache)
    found.require_branches()
    return found


class StockLender:
    """Lends the layers of a cache of transformers.

    Args:
        cache: With layers of full or sliding attention only.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache, self._held = cache, 0
        self._layers: list[Any] = cache.layers

    def require_branches(self) -> None:
        """See `Lender.require_branches`."""
        types = {type(layer).__name__ for layer in self._layers} - BRANCHING_LAYERS
        if types or self._cache.offloading:
            found = "offloaded layers" if not types else f"layers of the kind {', '.join(sorted(types))}"
            raise ValueError(
                f"K/V of branches cannot be held in {found}. Pass a ChunkReuseCache as `cache`, or leave "
                "out `cache` and `cache_implementation`."
            )

    def lend(self) -> list[Any]:
        """See `Lender.lend`."""
        self._held = self._cache.get_seq_length()
        return self._layers

    def give_back(self) -> None:
        """See `Lender.give_back`."""
        for layer in self._layers:
            if _has_kv(layer):
                layer.crop(self._held - layer.get_seq_length())

    def extend(self, input_ids: torch.Tensor, position_ids: torch.Tensor, kv: Sequence[Pair | None]) -> None:
        """See `Lender.extend`."""
        for layer, pair in zip(self._layers, kv, strict=True):
            if pair is not None:
                layer.update(*pair)
                layer.crop(0)


@contextmanager
def recording(cache: Any) -> Iterator[None]:
    """Undo `activate_past_recording` of a cache at the end, which transformers cannot."""
    quiet = [layer for layer in cache.layers if getattr(layer, "record_past", None) is False]
    try:
        yield
    finally:
        for layer in quiet if not hasattr(cache, "lend") else ():  # ours undo it themselves
            layer.record_past = False


BRANCHING_LAYERS = frozenset(("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"))


def _is_stand_in(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == _STAND_IN


def _has_kv(layer: Any) -> bool:
    return type(layer).__name__ != "DummyLayer"


def _columns(tensor: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return tensor.index_select(2, at.to(tensor.device))
