"""Audits: a reused prompt is computed once more, whole, on empty layers, and compared.

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

from kvboost_hf.cache.kv.records import StoredChunk, StoredStates
from kvboost_hf.cache.layers import private_cache
from kvboost_hf.cache.layers.base import ReuseLayer
from kvboost_hf.cache.live.ledger import Ledger
from kvboost_hf.cache.planning.plan import HEAD_TOKENS
from kvboost_hf.cache.store.chunk_store import ChunkStore
from kvboost_hf.compat import cache_argument, difference, run_model, tolerance

_log = logging.getLogger("kvboost_hf")


@dataclass(frozen=True, slots=True)
class Finding:
    """The finding of one audit.

    Args:
        divergence: Largest difference of a logit, in standard deviations of the logits.
        tokens: Tokens that were computed for it.
        logits: The plain ones, [batch, k, vocab], if they are to take the place of the others.
        layers: With these, layers that hold the prompt as it was computed.
        loss: And the plain loss, if labels were passed.
    """

    divergence: float
    tokens: int
    logits: torch.Tensor | None = None
    layers: Sequence[ReuseLayer] = ()
    loss: torch.Tensor | None = None


@torch.no_grad()
def audit(
    model: PreTrainedModel,
    layers: Sequence[ReuseLayer],
    ledger: Ledger,
    store: ChunkStore,
    kwargs: dict[str, Any],
    logits: torch.Tensor,
) -> Finding:
    """Run a prompt whole, and compare.

    Args:
        model: The model.
        layers: They hold the prompt, in part from reuse.
        ledger: The ledger of these layers.
        store: What served them; chunks that differ are quarantined.
        kwargs: The caller's arguments, before anything was left out of them.
        logits: What came out with reuse, [batch, k, vocab].
    """
    fresh = [layer.fresh() for layer in layers]
    ours = (cache_argument(model), "use_cache", "return_dict")
    given = {name: value for name, value in kwargs.items() if name not in ours}
    output = run_model(model, cache=private_cache(fresh), logits=0, **given)
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
    reader = chunk.kv.reader()
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
