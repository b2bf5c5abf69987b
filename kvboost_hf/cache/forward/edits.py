"""Edits what a cache holds, as a prompt whose moved chunks are copies of the live layers.

before    [ a | b | c | d | e ]    drop b, replace c, move e before d
after     [ a | new | e | d ]      `source` names the column of each token before, -1 for new ones

refuse    what cannot be moved stays as it is               `require_editable`
edit      what is taken away, put in and moved              `planning.edits`, pure
plan      where the text before serves the text after       `plan_edit`, pure
fill      and all that follows                              `Moved`, as for a prompt with stored chunks
"""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from kvboost_hf.cache.forward.admission import MOVED_HIDDEN, UNKNOWN, reason_against_moving
from kvboost_hf.cache.forward.moved import Moved, moving_of
from kvboost_hf.cache.forward.running import CacheParts, PromptColumns, Request
from kvboost_hf.cache.kv import StoredChunk
from kvboost_hf.cache.kv.layer_kv import Block, LayerKV, Place
from kvboost_hf.cache.live import Behind
from kvboost_hf.cache.live.ledger import Ledger
from kvboost_hf.cache.planning.chunks import HEAD_TOKENS, is_text
from kvboost_hf.cache.planning.edits import NEW, Edited
from kvboost_hf.cache.planning.match import MIN_MOVED_TOKENS
from kvboost_hf.cache.planning.moved import LAST_TOKENS, BlendPlan, RepairRow
from kvboost_hf.cache.planning.plan import Chunk, ReusePlan, RowPlan, Segment
from kvboost_hf.cache.planning.report import LIVE, Tally
from kvboost_hf.cache.prompt import ForwardInputs
from kvboost_hf.cache.prompt.token_log import Prompt
from kvboost_hf.compat import PrivateCache, input_device, require_known_ids, run_model


def plan_edit(text: Edited, sink_tokens: int, chunk_of: Callable[[int, int, int], Chunk]) -> BlendPlan | None:
    """How K/V of the text before, rows without padding, serves the text after an edit; as `plan_blend` plans a prompt.

    `chunk_of` gives a chunk of what the layers hold of a row in an interval of columns before the edit. None if no run
    of text that has moved is long enough to be used.
    """
    (batch, columns), held = text.ids.shape, text.first
    runs = _runs(text.source, max(held, sink_tokens), columns - LAST_TOKENS)
    if not runs:
        return None
    moved, computed = np.zeros(columns, dtype=bool), np.zeros(columns, dtype=bool)
    computed[held:] = True
    for start, stop in runs:
        moved[start:stop] = True
    repair = RepairRow(computed & ~moved, moved, tuple(start for start, _ in runs))
    rows: list[RowPlan] = []
    for row in range(batch):
        segments = tuple(
            Segment(chunk_of(row, at, at + stop - start), 0, start, stop, moved=True)
            for start, stop in runs
            for at in (int(text.source[start]),)
        )
        rows.append(RowPlan(columns, segments, (), None))
    return BlendPlan(ReusePlan(held, columns, tuple(rows), (0,) * batch), (repair,) * batch)


def _runs(source: NDArray[np.int64], start: int, stop: int) -> list[tuple[int, int]]:
    """Intervals of columns within [start, stop) that stood one behind the other before, the short ones left out."""
    if stop <= start:
        return []
    of = source[start:stop]
    borders = np.flatnonzero((np.diff(of) != 1) | (of[:-1] == NEW)) + 1
    ends = [start, *(start + borders).tolist(), stop]
    return [(begin, end) for begin, end in pairwise(ends) if source[begin] != NEW and end - begin >= MIN_MOVED_TOKENS]


_MODE = (
    "`edit` moves K/V, so that answers may differ from those of plain generate(): it needs a cache with mode 'blend', "
    "and this one has 'exact'. Make it with ReusePolicy(mode='blend'), or pass the edited prompt to generate(), which "
    "computes again what is behind the edit."
)
_PASS_IT = "Pass the edited prompt to generate(): what the store has of it is found by its content."


def require_editable(parts: CacheParts) -> Ledger:
    """The ledger of a text that can be edited where it is held.

    Raises:
        ValueError: for a cache that does not blend, and for a text that cannot be moved; the message says why.
        StoreClosedError: if the store was closed.
    """
    live, binding, model = parts.live, parts.binding, parts.binding.model()
    binding.store.require_open()
    if binding.policy.mode == "exact":
        raise ValueError(_MODE)
    if not live.held:
        raise ValueError("`edit` needs a cache that holds a text, and this one is empty. Pass it to generate() first.")
    reason = live.plain_reason
    ledger = None if reason is not None else parts.writer.storable()
    if reason is None and (ledger is None or model is None):
        reason = f"{UNKNOWN}, or the model has changed since"
    if reason is None and model is not None:
        reason = binding.reason_in_training or reason_against_moving(parts, model, media=False)
    if reason is not None:
        raise ValueError(f"The text of this cache cannot be edited: {reason}. {_PASS_IT}")
    assert ledger is not None
    if ledger.log.pads.any():
        raise ValueError(
            "`edit` takes rows without padding, which have their tokens in the same columns, got a batch of unequal "
            "rows. Give each row a cache of its own."
        )
    if not is_text(ledger.log.columns()):
        raise ValueError(f"A text with images, sound or video cannot be edited where it is held. {_PASS_IT}")
    if live.hidden_layers:
        raise ValueError(f"The text of this cache cannot be edited: {MOVED_HIDDEN}. {_PASS_IT}")
    if gone := max(layer.first for layer in live.layers):
        raise ValueError(
            f"The text of this cache cannot be edited: layers with a sliding window have let go of tokens before "
            f"{gone}. {_PASS_IT}"
        )
    return ledger


def plan_live(parts: CacheParts, ledger: Ledger, text: Edited) -> Moved | None:
    """A forward that makes an edited text of what the layers hold, which are not changed yet.

    None if nothing that has moved is long enough to be used. An edit that leaves nothing, and ids that the model does
    not know, are a ValueError.
    """
    model, layers = parts.binding.model(), parts.live.layers
    assert model is not None
    if not text.ids.shape[1]:
        raise ValueError("An edit must leave at least one token, and this one drops all of them. Call reset().")
    require_known_ids(model, text.ids, "New text of `replace`")

    def chunk_of(row: int, start: int, stop: int) -> StoredChunk:
        blocks: list[Block] = []
        places: list[tuple[Place, ...] | None] = []
        for layer in layers:
            piece = layer.columns(row, start, stop)
            own = tuple((len(blocks) + at, 0) for at in range(len(piece or ())))
            blocks += [Block.raw(part[None].detach().clone()) for part in piece or ()]
            places.append(own if piece is not None else None)
        tokens = ledger.log.row(row)[start:stop].copy()
        key, kv = b"live %d %d" % (row, start), LayerKV(tuple(blocks), tuple(places))
        return StoredChunk(key, ledger.root, b"", start, tokens, kv, 0, stop - start, tier=LIVE)

    with torch.no_grad():
        plan = plan_edit(text, parts.binding.policy.sink_tokens, chunk_of)
    if plan is None:
        return None
    ids = torch.from_numpy(text.ids).to(input_device(model))
    inputs = ForwardInputs(ids, None, None, logits=1, verifies=False, computes_all=None)
    prompt = PromptColumns(inputs, Prompt.of_text(text.ids), text.ids, text.first)
    return Moved(parts, prompt, plan.reuse, moving_of(parts, model, plan), stores_whole=False)


def cut_live(parts: CacheParts, ledger: Ledger, text: Edited) -> None:
    """Forget what the edited text does not begin with."""
    live, (batch, columns), held = parts.live, text.ids.shape, text.first
    if ledger.log.length - held >= HEAD_TOKENS:
        parts.writer.offer_tails_from(ledger, held)  # other prompts may find it
    live.rewind(held)
    tally = live.tally = Tally(prompt=batch * columns, live=batch * held, rows=[held] * batch)
    tally.moved = ledger.blended.tainted_columns(held) if ledger.blended is not None else 0


def leave_behind(parts: CacheParts, text: Edited) -> None:
    """Leave all of the edited text that the layers do not hold to the next forward."""
    live, (batch, columns), held = parts.live, text.ids.shape, text.first
    if held < columns:
        live.behind = Behind(held, torch.from_numpy(text.ids[:, held:].copy()), None)
        live.tally.forwarded = batch * (columns - held)


def run_live(parts: CacheParts, model: PreTrainedModel, moved: Moved) -> None:
    """Run and record the forward of `plan_live`, behind what `cut_live` has left."""
    cache = PrivateCache([layer.native for layer in parts.live.layers])
    request = Request(cache, model, {}, False, True, True, True, False)

    def take(layer_idx: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = moved.update(layer_idx, keys, values)
        assert found is not None
        return found

    given = moved.begin(request)
    cache.take = take
    try:
        output = run_model(model, cache=cache, **given)
    finally:
        cache.take = None
    moved.record(output)
    tally = parts.live.tally
    tally.live += tally.tiers.pop(LIVE, 0)
