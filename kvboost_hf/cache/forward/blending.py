"""One forward over what no stored chunk serves, and over what moved chunks need computed again.

What happens before it, and in it:

    plan      what moved chunks can serve                       blend.py, pure
    place     stored K/V into the layers, keys rotated          blend.py
    look      where the end of the prompt attends to            scout.py, for repairs that ask
    choose    what to compute again                             repair/, pure
    scatter   the caller's forward over the chosen columns      scatter.py
"""

import math
from collections.abc import Collection, Sequence

import numpy as np
from transformers import PreTrainedModel

from kvboost_hf.cache.forward.attention_scores import attention_of_the_end, num_queries
from kvboost_hf.cache.forward.held import HoldingCache, Running
from kvboost_hf.cache.forward.moved import BlendPlan, choose_columns, place, plan_blend
from kvboost_hf.cache.forward.moved_probe import blend_reason, needs_no_mask
from kvboost_hf.cache.forward.scatter import Columns, Narrowing, ScatterPass
from kvboost_hf.cache.live.ledger import Ledger
from kvboost_hf.cache.planning.blended import Blended
from kvboost_hf.cache.planning.chunks import Tokens
from kvboost_hf.cache.planning.plan import ReusePlan, RowPlan, trim_row
from kvboost_hf.cache.planning.repair import REPAIRS, Mask, Measure, Repair, Scores, budget
from kvboost_hf.cache.prompt.hook import Kwargs
from kvboost_hf.cache.prompt.inputs import ForwardInputs
from kvboost_hf.compat import key_rotation

_MEASURED_LAYER = 1  # values of layer 0 depend on nothing but the token
_SLACK = (1.15, 1.0)  # a few more columns than wanted go on from it, and are measured again in the next layer


class BlendingCache(HoldingCache):
    """A cache that can serve moved chunks."""

    def _blend(
        self,
        model: PreTrainedModel,
        kwargs: Kwargs,
        inputs: ForwardInputs,
        ledger: Ledger,
        ids: Tokens,
        held: int,
        exact: ReusePlan,
        *,
        media: bool,
    ) -> Kwargs | None:
        """The arguments of a forward with moved chunks, which is then under way; None where there is to be none."""
        if self.policy.mode != "blend" or inputs.computes_all or exact.filled >= ids.shape[1] - inputs.logits:
            return None
        self._tally.moved_reason = self._not_blended(model, media=media)
        if self._tally.moved_reason is not None:
            return None
        pads = ledger.log.pads.tolist()
        index = self.store.moved_index(ledger.root)
        rows = exact.rows
        while (plan := plan_blend(ids, pads, held, inputs.logits, rows, index, self.policy.sink_tokens)) is not None:
            fetched = self.store.fetch(plan.chunks)
            if fetched.keys() >= {chunk.key for chunk in plan.chunks}:
                plan = plan.with_loaded(fetched)
                break
            rows = tuple(_up_to_lost(row, fetched.keys()) for row in rows)
        if plan is None:
            self._tally.moved_reason = "no stored chunk has the same tokens as a part of it"
            return None
        repair = REPAIRS[self.policy.repair]
        measures = self._measures(plan, repair)
        if max(0.0, self._saving(plan, exact, repair, measures)) < self.policy.min_prefill_saving:
            self._tally.moved_reason = "moving would save fewer tokens than `min_prefill_saving`"
            return None
        for row, (row_plan, pad) in enumerate(zip(exact.rows, pads, strict=True)):
            self._note_miss(ledger, row, ids[row, pad:], row_plan)
        return self._run_blended(model, kwargs, inputs, ledger, ids, plan, repair, measures)

    def _not_blended(self, model: PreTrainedModel, *, media: bool) -> str | None:
        """Why nothing of this prompt can be moved, or None."""
        if media:
            return "it has images, sound or video"
        if self._static is not None:
            return "the cache has a fixed size (max_cache_len)"
        if self._live_quant is not None:
            return "the cache holds codes (live_quant)"
        if self._regime:
            return "its rotary frequencies depend on the length, and this is longer than what they were trained for"
        return blend_reason(model, REPAIRS[self.policy.repair].measure)

    def _saving(self, plan: BlendPlan, exact: ReusePlan, repair: Repair, measures: Measure) -> float:
        """Tokens that are not computed, compared to what exact reuse would leave."""
        columns, batch = plan.columns, len(plan.rows)
        ahead = sum((exact.filled - column) * len(rows) for column, rows in exact.cold_groups.items())
        without = ahead + batch * (columns - exact.filled)
        chosen = [int((row.computed | repair.choose(row, self.policy)).sum()) for row in plan.rows]
        if measures is not Measure.NOTHING:
            at_least = [int(row.computed.sum()) + budget(row, self.policy.recompute_ratio) for row in plan.rows]
            chosen = [max(pair) for pair in zip(chosen, at_least, strict=True)]
        computed = float(max(chosen))
        if measures is Measure.DEVIATION:
            layers = len(self._layers)
            whole = min(_MEASURED_LAYER + 1, layers)
            computed += (columns - plan.first_computed - computed) * whole / layers
        elif measures is Measure.ATTENTION:
            computed += num_queries(plan)
        return without - batch * computed

    def _measures(self, plan: BlendPlan, repair: Repair) -> Measure:
        """What has to be measured for a prompt: nothing, where places tell all."""
        needed = any(repair.needs_scores(row, self.policy) for row in plan.rows)
        return repair.measure if needed or repair.measure is Measure.DEVIATION else Measure.NOTHING

    def _run_blended(
        self,
        model: PreTrainedModel,
        kwargs: Kwargs,
        inputs: ForwardInputs,
        ledger: Ledger,
        ids: Tokens,
        plan: BlendPlan,
        repair: Repair,
        measures: Measure,
    ) -> Kwargs:
        rotation = key_rotation(model)
        assert not isinstance(rotation, str)
        first = plan.columns - inputs.input_ids.shape[1]
        self._running = Running(plan.held)
        place(self._layers, plan, rotation)
        looked = [0] * len(self._layers)
        scores: Scores | None = None
        if measures is Measure.ATTENTION:
            scores, looked = attention_of_the_end(model, self._layers, plan, inputs.input_ids, first)
        may_compute = np.zeros((len(plan.rows), plan.columns), dtype=bool)
        may_compute[:, first:] = True
        narrowing: Narrowing | None = None
        if measures is Measure.DEVIATION:
            # A few exact columns more, if that makes it a whole prompt, save more than they cost: it needs no mask.
            few = needs_no_mask(model) and not first and plan.first_computed <= plan.columns // 16
            start = 0 if few else plan.first_computed
            columns = np.arange(start, plan.columns)[None].repeat(len(plan.rows), axis=0)

            def narrow(measured: Scores, step: int) -> Columns:
                return self._choose(plan, repair, measured, ~(measured < 0), _SLACK[step])

            narrowing = Narrowing(_MEASURED_LAYER, len(_SLACK), narrow, 1 - rotation.rotated(_MEASURED_LAYER))
        else:
            columns = self._choose(plan, repair, scores, may_compute, 1.0)
        scatter = ScatterPass(
            model, self, self._layers, columns, plan.pads, narrowing=narrowing, unmasked=needs_no_mask(model)
        )
        self._running = Running(
            plan.held,
            plan.columns,
            commit=lambda: self._record_blended(ledger, ids, plan, scatter, looked),
            confirmed=not inputs.verifies,
            root_checked=True,
            scatter=scatter,
        )
        given = {name: value for name, value in kwargs.items() if name != "cache_position"}
        return {**given, **scatter.arguments(inputs.input_ids, first)}

    def _choose(
        self, plan: BlendPlan, repair: Repair, scores: Scores | None, may_compute: Mask, slack: float
    ) -> Columns:
        wanted = [
            row.computed | repair.choose(row, self.policy, scores[at] if scores is not None else None, slack)
            for at, row in enumerate(plan.rows)
        ]
        return choose_columns(wanted, list(may_compute))

    def _record_blended(
        self, ledger: Ledger, ids: Tokens, plan: BlendPlan, scatter: ScatterPass, looked: Sequence[int]
    ) -> None:
        """After the forward: what the layers hold now, and what it took."""
        moved = plan.moved
        stale = moved.copy()
        np.put_along_axis(stale, scatter.columns, False, axis=1)
        known = ledger.blended
        if known is not None:
            ledger.blended = known.extend(moved, stale)
        elif stale.any():
            ledger.blended = Blended(moved, stale)
        ledger.log.extend(ids[:, plan.held :])
        self._columns = plan.columns
        layers = [a + b for a, b in zip(scatter.layer_tokens, looked, strict=True)]
        tally = self._tally
        before = tally.layers or (0,) * len(layers)
        tally.layers = tuple(a + b for a, b in zip(before, layers, strict=True))
        pieces = [piece for row in plan.placed for piece in row]
        for piece in pieces:
            tally.count(piece.chunk.tier, piece.stop - piece.start)
        again = (moved & ~stale).sum(axis=1).tolist()
        for row, placed in enumerate(plan.placed):
            tally.rows[row] += sum(piece.stop - piece.start for piece in placed) - again[row]
        tally.moved += int(moved.sum())
        tally.recomputed += int(moved.sum() - stale.sum())
        missed = any(row.computed.any() for row in plan.rows)
        self.store.record_use([piece.chunk for piece in pieces], missed=missed, moved=True)
        self._fetched += [piece.chunk for piece in pieces]


def _up_to_lost(plan: RowPlan, there: Collection[bytes]) -> RowPlan:
    """The plan of a row up to the first chunk that could not be loaded."""
    return trim_row(plan, lambda segment: 0.0 if segment.chunk.prefix_key in there else -math.inf)
