"""Runs a prompt beside the caller's forward: columns ahead of it, and all of it again for an audit.

Everything else keeps reuse from going wrong; an audit finds out whether it did: memory that lost a bit, a model that
is not as deterministic as it seemed, an error of ours. Where the logits differ, what was computed plainly takes the
place of what was reused, so that the caller gets the plain answer, and the stored chunks that differ are taken out of
the store.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from kvboost_hf.cache.kv import StoredChunk, StoredStates
from kvboost_hf.cache.kv.layer_kv import LayerKVReader
from kvboost_hf.cache.layers import private_cache
from kvboost_hf.cache.layers.base import LayerState, Piece, ReuseLayer
from kvboost_hf.cache.live.ledger import Ledger
from kvboost_hf.cache.planning.beginnings import Stem
from kvboost_hf.cache.planning.chunks import HEAD_TOKENS
from kvboost_hf.cache.prompt import ForwardInputs
from kvboost_hf.cache.prompt.token_log import take_positions
from kvboost_hf.cache.store.chunk_store import ChunkStore
from kvboost_hf.compat import cache_argument, difference, run_model, tolerance


@dataclass(frozen=True, slots=True)
class Part:
    """Row tokens [start, stop) that are computed ahead."""

    row: int
    start: int
    stop: int


class Ahead:
    """Rows that were computed ahead, in layers of their own, in the order of `parts`. All end at the same column."""

    def __init__(self, layers: Sequence[ReuseLayer], parts: Sequence[Part]) -> None:
        self._layers = layers
        self._columns = max(part.stop for part in parts)
        self._at = {part.row: number for number, part in enumerate(parts)}
        self._stops = {part.row: part.stop for part in parts}

    def tokens(self, row: int, layer_idx: int, start: int, stop: int) -> Piece | None:
        """Tokens [start, stop) of a row, or fewer: a layer may not hold the first ones."""
        layer, padding = self._layers[layer_idx], self._columns - self._stops[row]
        return layer.columns(self._at[row], max(start + padding, layer.first), stop + padding)

    def state(self, row: int, layer_idx: int) -> LayerState | None:
        """The state of a row at its end."""
        return self._layers[layer_idx].save_state(self._at[row])


class StemReader:
    """Reads a stem where it was computed, as a `LayerKVReader` reads a chunk."""

    def __init__(self, ahead: Ahead, stem: Stem) -> None:
        self._ahead, self._stem = ahead, stem
        self._pieces: dict[int, Piece | None] = {}  # rows that share a piece are given the same views

    def layer(self, layer_idx: int) -> Piece | None:
        """The columns of the stem in a layer, or None if the layer keeps none."""
        if layer_idx not in self._pieces:
            stem = self._stem
            self._pieces[layer_idx] = self._ahead.tokens(stem.rows[0], layer_idx, stem.start, stem.stop)
        return self._pieces[layer_idx]

    def state(self, layer_idx: int) -> LayerState | None:
        """The state of a layer behind it."""
        return self._ahead.state(self._stem.rows[0], layer_idx)


def run_ahead(
    model: PreTrainedModel, layers: Sequence[ReuseLayer], inputs: ForwardInputs, columns: slice, first: int
) -> None:
    """Compute columns of all rows, ahead of the caller's forward, whose ids begin at column `first`."""
    rows = torch.arange(len(inputs.input_ids), device=inputs.input_ids.device)[:, None]
    at = torch.arange(columns.start - first, columns.stop - first, device=rows.device).expand(len(rows), -1)
    mask = inputs.attention_mask[:, : columns.stop] if inputs.attention_mask is not None else None
    run_behind(model, layers, inputs, rows, at, mask)


def run_behind(
    model: PreTrainedModel,
    layers: Sequence[ReuseLayer],
    inputs: ForwardInputs,
    rows: torch.Tensor,
    at: torch.Tensor,
    mask: torch.Tensor | None,
) -> None:
    """Compute the ids `at` [k, m] of `rows` [k, 1] of a call, behind layers that hold them; `mask` [k, columns]."""
    positions = inputs.position_ids
    if mask is not None:
        mask = mask.to(inputs.attention_mask.dtype) if inputs.attention_mask is not None else None
    run_model(
        model,
        inputs.input_ids[rows, at],
        private_cache(layers),
        attention_mask=mask,
        position_ids=take_positions(positions, len(inputs.input_ids), rows, at) if positions is not None else None,
        past_hooks=True,
    )


_log = logging.getLogger("kvboost_hf")


@dataclass(frozen=True, slots=True)
class Finding:
    """The finding of one audit."""

    divergence: float  # largest difference of a logit, in standard deviations of the logits
    tokens: int  # tokens that were computed for it
    # The plain ones, [batch, k, vocab], if they are to take the place of the others.
    logits: torch.Tensor | None = None
    layers: Sequence[ReuseLayer] = ()  # with these, layers that hold the prompt as it was computed
    loss: torch.Tensor | None = None  # and the plain loss, if labels were passed


@torch.no_grad()
def audit(
    model: PreTrainedModel,
    layers: Sequence[ReuseLayer],
    ledger: Ledger,
    store: ChunkStore,
    kwargs: dict[str, Any],
    logits: torch.Tensor,
) -> Finding:
    """Run a prompt whole, with the caller's own arguments, and compare with the `logits` [batch, k, vocab] of reuse.

    Stored chunks that differ are quarantined.
    """
    fresh = [layer.fresh() for layer in layers]
    ours = (cache_argument(model), "use_cache", "return_dict")
    given = {name: value for name, value in kwargs.items() if name not in ours}
    output = run_model(model, cache=private_cache(fresh), logits=0, past_hooks=True, **given)
    plain: torch.Tensor = output.logits[:, -logits.shape[1] :]
    off = difference(logits.float(), plain.float())
    tokens = int(kwargs["input_ids"].numel())
    if off <= tolerance(model.dtype):  # False for NaN
        store.audits.record(diverged=False)
        return Finding(off, tokens)
    culprits = _culprits(fresh, ledger, store, tolerance(model.dtype))
    store.audits.record(diverged=True)
    store.quarantine(culprits)
    _log.warning(
        "An audited prompt of %d tokens differed from plain computation by %.2g standard deviations of its logits. "
        "It was answered plainly, and %d stored chunks were taken out of service.",
        tokens,
        off,
        len(culprits),
    )
    return Finding(off, tokens, plain, fresh, output.get("loss"))


def _culprits(fresh: Sequence[ReuseLayer], ledger: Ledger, store: ChunkStore, allowed: float) -> set[bytes]:
    """Keys of the stored chunks of the prompt whose K/V is not that of `fresh`, and of all its states.

    States cannot be compared where they were saved, so they are not given the benefit of the doubt.
    """
    found: set[bytes] = set()
    for row, pad in enumerate(ledger.log.pads.tolist()):
        tokens = ledger.log.row(row)
        for chunk, start, shared in store.chain(ledger.root, tokens):
            if _differs(chunk, shared, fresh, row, pad + start, allowed):
                found.add(chunk.key)
        for border in ledger.borders[row]:
            if len(rest := tokens[border.at :]) >= HEAD_TOKENS:
                view = store.view(ledger.root, tokens, border, stateful=True)
                states = view.states_after(border.key, rest[:HEAD_TOKENS])
                found |= {saved.key for saved in states if isinstance(saved, StoredStates)}
    return found


def _differs(
    chunk: StoredChunk, shared: int, fresh: Sequence[ReuseLayer], row: int, start: int, allowed: float
) -> bool:
    """Whether the first `shared` tokens of a chunk, at column `start` of a row, are not those of `fresh`."""
    reader = LayerKVReader(chunk.kv)
    for idx, layer in enumerate(fresh):
        begin = max(start, layer.first)  # what has left a window cannot be compared
        stored, columns = reader.layer(idx), layer.columns(row, begin, start + shared)
        if stored is None or columns is None or begin >= start + shared:
            continue
        for ours, theirs in zip(stored, columns, strict=True):
            if not difference(ours[:, begin - start : shared].float(), theirs.float()) <= allowed:
                return True
    return False


def put_right(layers: Sequence[ReuseLayer], fresh: Sequence[ReuseLayer], ledger: Ledger) -> None:
    """Give `layers` what `fresh` hold."""
    rows = range(ledger.log.batch_size)
    for layer, right in zip(layers, fresh, strict=True):
        layer.reset()
        stop = right.length or 0
        pieces = [right.columns(row, right.first, stop) for row in rows]
        if any(piece is not None for piece in pieces):
            layer.fill(right.first, stop, [[piece] if piece is not None else [] for piece in pieces])
        if layer.is_stateful:
            layer.load_states([right.save_state(row) for row in rows])
