"""Forwards over trees of tokens that continue the rows of a batch, of which each row keeps as many as it accepts.

    cache       [ . . a a a a ]                unchanged; columns that all rows have
                [ b b b b b b ]
    tails       [ a     ]                      accepted tokens behind these, which not all rows have yet
                [ b b b ]
    forward     [ . . a a a a | a     | a a ]  a tree for each row, behind its own tail, by mask and positions
                [ b b b b b b | b b b | b b ]
    keep        the columns that every row now has go into the cache

So a row never waits for another one, no column is moved, and the cache holds what plain decoding would have left.
While no row is ahead and nothing is drafted, a forward is that of plain decoding, with the cache itself.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvboost_hf.assisted.branches import Lender, Pair, Running, lender_of
from kvboost_hf.assisted.hidden import TextStates, asking_for
from kvboost_hf.assisted.tree import as_bits, depths, lineage
from kvboost_hf.compat import hook_layers, run_model
from kvboost_hf.visibility import Visibility

_BITS = 64  # queries of a tree mask of bits, at most


class RowBranches:
    """A tree of tokens behind each row of a batch. A `forward` is followed by `keep`.

    Args:
        model: The model of the cache.
        cache: A `ChunkReuseCache` or a cache of generate(), which was told to record.
        position: The position of the first token behind each row, [rows, 1] or [planes, rows, 1].
        keep: [rows, columns held], bool: the columns that are no padding; None for all.
        branching: Whether there may be trees; else `step` alone is called, which any cache is good for.
        states: For each row, what takes the hidden states of the tokens that are kept, for heads that draft from
            them; none for other drafts.

    Raises:
        ValueError: for a cache whose layers cannot be cropped.
    """

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
        self._tokens: list[Sequence[int]] = []  # of each row, in the forward under way
        self._depths = np.zeros((rows, 0), dtype=np.int64)
        self._seen = np.zeros((rows, 0, 0), dtype=np.bool_)
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
        self._held, self._flushed, self._position, self._keep = (
            self._held + 1,
            self._flushed + 1,
            self._position + 1,
            keep,
        )
        for row in range(len(self._states)):
            self._append(row, found.hidden_states, torch.zeros(1, dtype=torch.long))
        logits: torch.Tensor = found.logits[:, -1:]
        return logits

    # A compiled model breaks its graph here, rather than tracing what is not arithmetic.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def forward(self, tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> torch.Tensor:
        """Compute a tree behind each row. Shorter ones are filled up with tokens that nothing else sees.

        Args:
            tokens: For each row, ids of its tokens, one at least.
            parents: For each row, the index of each token's parent, or -1 for the text.

        Returns:
            Logits [rows, most tokens, vocab_size] behind each token.
        """
        device, count = self._position.device, max(map(len, tokens))
        full: list[Sequence[int]] = [[*row, *row[-1:] * (count - len(row))] for row in map(list, tokens)]
        above = [[*row, *[-1] * (count - len(row))] for row in parents]
        self._tokens = full
        self._depths = np.stack([depths(row) for row in above])
        self._seen = np.stack([lineage(row) for row in above])
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
                position_ids=self._positions(),
                attention_mask=running.masks.stand_in(len(full), device),
            )
        finally:
            for handle in handles:
                handle.remove()
            self._lender.give_back()
        self._kv, self._hidden = running.kv, running.hidden_behind(self._hidden)
        logits: torch.Tensor = found.logits
        return logits

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep tokens of the last forward, for each row a path from the root, and drop the others.

        Args:
            paths: For each row, indices of the tokens to keep, each the child of the one before.
        """
        longest = self._longest
        places = [
            [*range(len(tail)), *(longest + node for node in path)]
            for tail, path in zip(self._tails, paths, strict=True)
        ]
        for tail, row, path in zip(self._tails, self._tokens, paths, strict=True):
            tail += [row[node] for node in path]
        for number, path in enumerate(paths if self._states else ()):
            if path:
                self._append(number, self._hidden, torch.tensor([longest + node for node in path], dtype=torch.long))
        most, ready = max(map(len, places)), min(map(len, places))
        at = torch.tensor([[*row, *[0] * (most - len(row))] for row in places], dtype=torch.long)
        self._kv = [None if pair is None else (_gathered(pair[0], at), _gathered(pair[1], at)) for pair in self._kv]
        self._hidden = {layer: _gathered(found[:, None], at)[:, 0] for layer, found in self._hidden.items()}
        self._flush(ready)

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
        self._kv = [None if pair is None else (pair[0][:, :, rest], pair[1][:, :, rest]) for pair in kv]
        self._hidden = {layer: found[:, rest] for layer, found in hidden.items()}
        if not count:
            return
        ids = torch.tensor([tail[:count] for tail in self._tails], device=self._position.device)
        positions = self._position + torch.arange(count, device=self._position.device)
        first = [None if pair is None else (pair[0][:, :, :count], pair[1][:, :, :count]) for pair in kv]
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
        return self._longest + self._depths.shape[1]

    def _own(self) -> NDArray[np.int64]:
        """How far each token of the trees is behind the cache, [rows, tokens]."""
        own: NDArray[np.int64] = self._depths + np.array([[len(tail)] for tail in self._tails])
        return own

    def _positions(self) -> torch.Tensor:
        return self._position + torch.from_numpy(self._own()).to(self._position.device)

    def see(self, window: int, columns: int, queries: int, device: torch.device) -> Visibility:
        """What the tokens of the trees see of the columns of a layer: those of the cache, the tails, and the trees.

        Args:
            window: Columns that a token sees, itself included; 0 for all.
            columns: The number of columns.
            queries: Tokens of each tree.
            device: The device of the layer.
        """
        before, behind, seen = columns - self.count, self._own(), self._seen
        tails = np.arange(self._longest)[None, None] < np.array([len(tail) for tail in self._tails])[:, None, None]
        own = None
        if window:
            seen = seen & (behind[:, :, None] - behind[:, None] < window)
            tails = tails & (behind[:, :, None] - np.arange(self._longest) < window)
            own = (torch.from_numpy(behind).to(device) + before).int()
        keep = self._keep[:, self._held - before :].to(device) if self._keep is not None else None
        if keep is not None:
            keep = F.pad(keep, (0, self.count), value=True)
        elif not self._longest and queries <= _BITS:
            bits = np.stack([as_bits(row) for row in seen])
            return Visibility(True, window, None, own, tree=torch.from_numpy(bits).to(device))
        tails = np.broadcast_to(tails, (len(seen), queries, self._longest))
        mask = torch.from_numpy(np.concatenate([tails, seen], axis=2)).to(device)
        return Visibility(False, window, keep, own, mask=F.pad(mask, (before, 0), value=True)[:, None])

    def with_new(self, idx: int, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        """Keys and values of a layer behind those of the cache: of the tails, and of the trees."""
        pair = self._kv[idx] if self._kv else None
        return (keys, values) if pair is None else (torch.cat([pair[0], keys], 2), torch.cat([pair[1], values], 2))


def _gathered(tensor: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Columns `at` [rows, columns] of a tensor [rows, heads, columns, dim]."""
    index = at.to(tensor.device)[:, None, :, None].expand(-1, tensor.shape[1], -1, tensor.shape[3])
    return tensor.gather(2, index)
