"""A forward over what no stored chunk serves, and over what moved chunks need computed again.

plan      what moved chunks can serve                       moved.py, pure
place     stored K/V into the layers, keys rotated          moved.py
look      where the end of the prompt attends to            attention_scores.py, for repairs that ask
choose    what to compute again                             planning/repair.py, pure
scatter   the caller's forward over the chosen columns      scatter.py
"""

import math
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from kvboost_hf.cache.forward.admission import MOVED_NOTHING, MOVED_SAVES_LITTLE, reason_against_moving
from kvboost_hf.cache.forward.attention_scores import attention_of_the_end, num_queries
from kvboost_hf.cache.forward.lend import root_of
from kvboost_hf.cache.forward.moved import BlendPlan, choose_columns, place, plan_blend
from kvboost_hf.cache.forward.moved_probe import needs_no_mask, repair_for
from kvboost_hf.cache.forward.repair_later import goes_on
from kvboost_hf.cache.forward.reused import PromptColumns, note_miss
from kvboost_hf.cache.forward.running import CacheParts, Forward, Request, note_hooks, offer
from kvboost_hf.cache.forward.scatter import Columns, Narrowing, ScatterPass
from kvboost_hf.cache.planning.chunks import Tokens
from kvboost_hf.cache.planning.match import find_moved
from kvboost_hf.cache.planning.plan import ReusePlan, RowPlan, trim_row
from kvboost_hf.cache.planning.repair import Mask, Measure, MovedColumns, Repair, Scores, budget
from kvboost_hf.cache.prompt.hook import Kwargs
from kvboost_hf.cache.prompt.inputs import without_router_logits
from kvboost_hf.compat import KeyRotation, key_rotation, rope_regime
from kvboost_hf.config import ReusePolicy

_MEASURED_LAYER = 1  # values of layer 0 depend on nothing but the token
_SLACK = (1.15, 1.0)  # a few more columns than wanted go on from it, and are measured again in the next layer


def plan_moved(
    parts: CacheParts,
    model: PreTrainedModel,
    prompt: PromptColumns,
    exact: ReusePlan,
    *,
    media: bool,
    stores_whole: bool,
) -> "Moved | None":
    """The forward over a prompt with moved chunks, or None where there is to be none.

    Args:
        parts: Of the cache.
        model: The model.
        prompt: Its columns.
        exact: What the store can serve of it as it stands.
        media: It has images, sound or video.
        stores_whole: Store all of the prompt when it is done.
    """
    policy, live, inputs = parts.binding.policy, parts.live, prompt.inputs
    if policy.mode != "blend" or inputs.computes_all or (exact.filled >= prompt.limit and not exact.ahead):
        return None
    live.tally.moved_reason = reason_against_moving(parts, model, media=media)
    if live.tally.moved_reason is not None:
        return None
    repair = repair_for(model, policy.repair, len(live.layers))
    plan = _find(parts, prompt, exact)
    if plan is None:
        live.tally.moved_reason = MOVED_NOTHING
        return None
    measures = _measures(plan, repair, policy)
    if max(0.0, _saving(plan, exact, repair, measures, policy, len(live.layers))) < policy.min_prefill_saving:
        live.tally.moved_reason = MOVED_SAVES_LITTLE
        return None
    for row, (row_plan, pad) in enumerate(zip(exact.rows, plan.pads, strict=True)):
        note_miss(parts, row, prompt.ids[row, pad:], row_plan)
    return Moved(parts, prompt, plan, repair, measures, stores_whole=stores_whole)


def movable_spans(parts: CacheParts, ids: torch.Tensor, start: int) -> list[tuple[int, int]]:
    """Which tokens from `start` on of a prompt [1, tokens] chunks could serve that stood elsewhere; half-open."""
    model, tokens = parts.binding.model, ids[0].cpu().numpy().astype(np.int64, copy=False)
    if parts.binding.policy.mode != "blend" or model is None or rope_regime(model, len(tokens)):
        return []
    root = root_of(parts, len(tokens))
    if root is None or reason_against_moving(parts, model, media=False) is not None:
        return []
    start, index = max(start, parts.binding.policy.sink_tokens), parts.binding.store.moved_index(root)
    return [(found.start, found.stop) for found in find_moved(tokens, start, len(tokens) - 1, index)]


def _find(parts: CacheParts, prompt: PromptColumns, exact: ReusePlan) -> BlendPlan | None:
    """A plan with moved chunks, all of them loaded; None where nothing can be moved."""
    ledger, store = parts.live.ledger, parts.binding.store
    assert ledger is not None
    pads, index, rows = ledger.log.pads.tolist(), store.moved_index(ledger.root), exact.rows
    sink, logits = parts.binding.policy.sink_tokens, prompt.inputs.logits
    while (plan := plan_blend(prompt.ids, pads, prompt.held, logits, rows, index, sink)) is not None:
        fetched = store.fetch(plan.chunks)
        if fetched.keys() >= {chunk.key for chunk in plan.chunks}:
            return plan.with_loaded(fetched)
        rows = tuple(_up_to_lost(row, fetched.keys()) for row in rows)
    return None


class Moved(Forward):
    """A forward over chosen columns, whose other columns are in the layers already.

    Args:
        parts: Of the cache.
        prompt: Its columns.
        plan: Which chunks serve them.
        repair: Chooses what to compute again.
        measures: What has to be measured to choose.
        stores_whole: Store all of the prompt when it is done.
    """

    takes_kv = True
    can_settle_later = True

    def __init__(
        self,
        parts: CacheParts,
        prompt: PromptColumns,
        plan: BlendPlan,
        repair: Repair,
        measures: Measure,
        *,
        stores_whole: bool,
    ) -> None:
        super().__init__(parts, plan.held)
        self._prompt, self._plan, self._stores_whole = prompt, plan, stores_whole
        self._repair, self._measures = repair, measures
        self._looked = [0] * len(parts.live.layers)  # tokens through each layer, to see what the end attends to
        self._scatter: ScatterPass | None = None

    @property
    def beginning(self) -> Tokens:
        """See `Forward`."""
        return self._prompt.ids

    def begin(self, request: Request) -> Kwargs:
        """See `Forward`."""
        plan, layers, policy = self._plan, self.parts.live.layers, self.parts.binding.policy
        model, first, ids = request.model, self._prompt.first, self._prompt.inputs.input_ids
        rotation = key_rotation(model)
        assert not isinstance(rotation, str)
        place(layers, plan, rotation)
        scores: Scores | None = None
        if self._measures is Measure.ATTENTION:
            scores, self._looked = attention_of_the_end(model, layers, plan, ids, first)
        narrowing: Narrowing | None = None
        unmasked = needs_no_mask(model)
        if self._measures is Measure.DEVIATION:
            narrowing, columns = self._narrowing(rotation, unmasked=unmasked)
        else:
            may_compute = np.zeros((len(plan.rows), plan.columns), dtype=bool)
            may_compute[:, first:] = True
            columns = _choose(plan, self._repair, policy, scores, may_compute, 1.0)
        self._scatter = ScatterPass(
            model, request.cache, layers, columns, plan.pads, narrowing=narrowing, unmasked=unmasked
        )
        given = {name: value for name, value in request.kwargs.items() if name != "cache_position"}
        return {**given, **without_router_logits(model, given), **self._scatter.arguments(ids, first)}

    def _narrowing(self, rotation: KeyRotation, *, unmasked: bool) -> tuple[Narrowing, Columns]:
        """How layers choose the columns that go on, and those to begin with."""
        plan, repair, policy = (
            self._plan,
            self._repair,
            self.parts.binding.policy,
        )  # not `self`: it has the `ScatterPass`

        def narrow(measured: Scores, step: int) -> Columns:
            return _choose(plan, repair, policy, measured, ~(measured < 0), _SLACK[step])

        # A few exact columns more, if that makes it a whole prompt, save more than they cost: it needs no mask.
        few = unmasked and not self._prompt.first and plan.first_computed <= plan.columns // 16
        start = 0 if few else plan.first_computed
        columns = np.arange(start, plan.columns)[None].repeat(len(plan.rows), axis=0)
        return Narrowing(_MEASURED_LAYER, len(_SLACK), narrow, 1 - rotation.rotated(_MEASURED_LAYER)), columns

    def update(
        self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See `Forward`."""
        return self._scatter.update(layer_idx, keys, values) if self._scatter is not None else None

    def record(self, output: Any) -> Any:
        """See `Forward`."""
        assert self._scatter is not None
        self._scatter.close()
        parts, plan, ledger = self.parts, self._plan, self.parts.live.ledger
        if ledger is not None:
            moved = plan.moved
            stale = moved.copy()
            np.put_along_axis(stale, self._scatter.columns, False, axis=1)
            seams = sum(len(row.seams) for row in plan.rows)
            progressive = goes_on(parts.binding.policy, int(moved.sum()), seams)
            if ledger.blended is not None:
                ledger.blended = ledger.blended.extend(moved, stale)
                ledger.progressive |= progressive
            elif stale.any():
                ledger.blended, ledger.progressive = MovedColumns(moved, stale), progressive
            self._count(moved, stale, self._scatter.layer_tokens)
        parts.live.filled(self._prompt.ids[:, plan.held :], plan.columns)
        note_hooks(parts, confirmed=not self._prompt.inputs.verifies)

    def _count(self, moved: Mask, stale: Mask, layer_tokens: list[int]) -> None:
        plan, tally = self._plan, self.parts.live.tally
        layers = [a + b for a, b in zip(layer_tokens, self._looked, strict=True)]
        before = tally.layers or (0,) * len(layers)
        tally.layers = tuple(a + b for a, b in zip(before, layers, strict=True))
        again = (moved & ~stale).sum(axis=1).tolist()
        for row, placed in enumerate(plan.placed):
            for piece in placed:
                tally.count(piece.chunk.tier, piece.stop - piece.start)
                if plan.rows[row].moved[piece.start]:
                    tally.count_moved(piece.shift, piece.stop - piece.start)
            tally.rows[row] += sum(piece.stop - piece.start for piece in placed) - again[row]
        tally.moved += int(moved.sum())
        tally.recomputed += int(moved.sum() - stale.sum())
        missed = any(row.computed.any() for row in plan.rows)
        self.parts.binding.store.record_use(plan.chunks, missed=missed, moved=True)

    def settle(self) -> None:
        """See `Forward`."""
        confirmed = not self._prompt.inputs.verifies
        self.parts.binding.store.promote(self._plan.chunks)
        offer(self.parts, self._plan.columns, confirmed=confirmed, root_checked=True)
        if confirmed and self._stores_whole:
            self.parts.writer.offer_tails()

    def abandon(self) -> None:
        """See `Forward`."""
        if self._scatter is not None:
            self._scatter.close()
        super().abandon()


def _choose(
    plan: BlendPlan, repair: Repair, policy: ReusePolicy, scores: Scores | None, may_compute: Mask, slack: float
) -> Columns:
    """The columns to compute, of those that may be."""
    wanted = [
        row.computed | repair.choose(row, policy, scores[at] if scores is not None else None, slack)
        for at, row in enumerate(plan.rows)
    ]
    return choose_columns(wanted, list(may_compute))


def _saving(
    plan: BlendPlan, exact: ReusePlan, repair: Repair, measures: Measure, policy: ReusePolicy, layers: int
) -> float:
    """Tokens that are not computed, compared to what exact reuse would leave."""
    columns, batch = plan.columns, len(plan.rows)
    without = exact.ahead + batch * (columns - exact.filled)
    chosen = [int((row.computed | repair.choose(row, policy)).sum()) for row in plan.rows]
    if measures is not Measure.NOTHING:
        at_least = [int(row.computed.sum()) + budget(row, policy.recompute_ratio) for row in plan.rows]
        chosen = [max(pair) for pair in zip(chosen, at_least, strict=True)]
    computed = float(max(chosen))
    if measures is Measure.DEVIATION:
        whole = min(_MEASURED_LAYER + 1, layers)
        computed += (columns - plan.first_computed - computed) * whole / layers
    elif measures is Measure.ATTENTION:
        computed += num_queries(plan)
    return without - batch * computed


def _measures(plan: BlendPlan, repair: Repair, policy: ReusePolicy) -> Measure:
    """The measurement that a repair needs for a prompt: none, where positions alone decide."""
    needed = any(repair.needs_scores(row, policy) for row in plan.rows)
    return repair.measure if needed or repair.measure is Measure.DEVIATION else Measure.NOTHING


def _up_to_lost(plan: RowPlan, there: Collection[bytes]) -> RowPlan:
    """The plan of a row up to the first chunk that could not be loaded."""
    return trim_row(plan, lambda segment: 0.0 if segment.chunk.key in there else -math.inf)
