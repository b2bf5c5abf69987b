"""Prompts with moved chunks: a forward over what they do not serve, and over what is computed again of them.

plan      what moved chunks can serve                       planning/moved.py, pure
fill      stored K/V into the layers, keys turned           fill.py
look      where the end of the prompt attends to            scatter.py, for repairs that ask
choose    what to compute again                             planning/moved.py, pure
scatter   the caller's forward over the chosen columns      scatter.py
later     what is left, with the tokens that follow         repair_later.py
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from kvboost_hf.cache.forward.admission import (
    MOVED_NOTHING,
    MOVED_SAVES_LITTLE,
    needs_no_mask,
    reason_against_moving,
    repair_for,
    root_of,
)
from kvboost_hf.cache.forward.fill import fill_turned
from kvboost_hf.cache.forward.reused import note_served
from kvboost_hf.cache.forward.running import CacheParts, Forward, PromptColumns, Request, note_hooks, offer
from kvboost_hf.cache.forward.scatter import Columns, Narrowing, ScatterPass, attention_of_the_end, num_queries
from kvboost_hf.cache.kv import Stored
from kvboost_hf.cache.live.ledger import KnownRow
from kvboost_hf.cache.planning.chunks import Tokens
from kvboost_hf.cache.planning.match import find_moved
from kvboost_hf.cache.planning.moved import (
    LAST_TOKENS,
    BlendPlan,
    Mask,
    Measure,
    MovedColumns,
    Repair,
    Scores,
    budget,
    choose_columns,
    plan_blend,
)
from kvboost_hf.cache.planning.plan import ReusePlan, Segment
from kvboost_hf.cache.prompt import Kwargs, returns_of_each_token, without_router_logits
from kvboost_hf.compat import KeyRotation, key_rotation, rope_regime
from kvboost_hf.config import Progressive, ReusePolicy

_MEASURED_LAYER = 1  # values of layer 0 depend on nothing but the token
_TOKENS_FOR_A_SEAM = 1024  # documents of 800 tokens, and what stands between them
_SLACK = (1.15, 1.0)  # a few more columns than wanted go on from it, and are measured again in the next layer


@dataclass(frozen=True, slots=True)
class Moving:
    """How moved chunks take part in a prompt."""

    plan: BlendPlan  # which of its columns they serve
    repair: Repair  # chooses what to compute again
    measures: Measure  # what has to be measured to choose


def plan_moved(
    parts: CacheParts, model: PreTrainedModel, prompt: PromptColumns, exact: ReusePlan, known: KnownRow | None
) -> Moving | None:
    """How moved chunks can take part in a prompt, or None where they are not to.

    `exact` is what the store can serve of it as it stands, `known` what was looked up before of the only row.
    """
    policy, live, ledger = parts.binding.policy, parts.live, parts.live.ledger
    if prompt.inputs.computes_all or (exact.filled >= prompt.limit and not exact.ahead):
        return None
    assert ledger is not None
    live.tally.moved_reason = reason_against_moving(parts, model, media=bool(prompt.new.media.any()))
    if live.tally.moved_reason is not None:
        return None
    repair = repair_for(model, policy.repair, len(live.layers))
    root = ledger.root

    def find(tokens: Tokens, start: int, stop: int) -> tuple[Segment, ...]:
        found = known.moved_of(root, tokens, start, stop) if known is not None else None
        return find_moved(tokens, start, stop, parts.binding.store.moved_index(root)) if found is None else found

    plan = plan_blend(prompt.ids, exact, prompt.inputs.logits, find, policy.sink_tokens)
    if plan is None:
        live.tally.moved_reason = MOVED_NOTHING
        return None
    measures = _measures(plan, repair, policy)
    if max(0.0, _saving(plan, exact, repair, measures, policy, len(live.layers))) < policy.min_prefill_saving:
        live.tally.moved_reason = MOVED_SAVES_LITTLE
        return None
    return Moving(plan, repair, measures)


def moving_of(parts: CacheParts, model: PreTrainedModel, plan: BlendPlan) -> Moving:
    """How moved chunks take part in a text for which somebody else has planned them."""
    repair = repair_for(model, parts.binding.policy.repair, len(parts.live.layers))
    return Moving(plan, repair, _measures(plan, repair, parts.binding.policy))


def movable_spans(parts: CacheParts, ids: torch.Tensor, start: int) -> list[tuple[int, int]]:
    """Which tokens from `start` on of a prompt [1, tokens] chunks could serve that stood elsewhere; half-open.

    They are known, then, where the row is known that the cache runs next.
    """
    model, tokens = parts.binding.model(), ids[0].cpu().numpy().astype(np.int64, copy=False)
    if parts.binding.policy.mode != "blend" or model is None or rope_regime(model, len(tokens)):
        return []
    root = root_of(parts, len(tokens))
    if root is None or reason_against_moving(parts, model, media=False) is not None:
        return []
    start, index = max(start, parts.binding.policy.sink_tokens), parts.binding.store.moved_index(root)
    segments = find_moved(tokens, start, len(tokens) - LAST_TOKENS, index)
    known = parts.live.known
    if known is not None and known.of(root, tokens, len(tokens)) is not None:
        known.moved, known.moved_from = segments, start
    return [(found.start, found.stop) for found in segments]


class Moved(Forward):
    """A forward over chosen columns, whose other columns are in the layers already."""

    can_settle_later = True
    takes_kv = True

    def __init__(
        self, parts: CacheParts, prompt: PromptColumns, loaded: ReusePlan, moving: Moving, *, stores_whole: bool
    ) -> None:
        super().__init__(parts, loaded.held)
        self._prompt, self._loaded, self._plan, self._stores_whole = prompt, loaded, moving.plan, stores_whole
        self._repair, self._measures = moving.repair, moving.measures
        self._served: list[Stored] = []
        self._looked = [0] * len(parts.live.layers)  # tokens through each layer, to see what the end attends to
        self._scatter: ScatterPass | None = None

    @property
    def beginning(self) -> Tokens:
        return self._prompt.ids

    def begin(self, request: Request) -> Kwargs:
        plan, layers, policy = self._plan, self.parts.live.layers, self.parts.binding.policy
        model, first, ids = request.model, self._prompt.first, self._prompt.inputs.input_ids
        rotation = key_rotation(model)
        assert not isinstance(rotation, str)
        fill_turned(layers, self._loaded, rotation)
        scores: Scores | None = None
        if self._measures is Measure.ATTENTION:
            scores, self._looked = attention_of_the_end(model, layers, plan, ids, first)
        narrowing: Narrowing | None = None
        unmasked = needs_no_mask(model)
        if self._measures is Measure.DEVIATION:
            narrowing, columns = self._narrowing(rotation, unmasked=unmasked)
        else:
            may_compute = np.zeros((len(plan.rows), self._prompt.columns), dtype=bool)
            may_compute[:, first:] = True
            columns = _choose(plan, self._repair, policy, scores, may_compute, 1.0)
        self._scatter = ScatterPass(
            model, request.cache, layers, columns, self._loaded.pads, narrowing=narrowing, unmasked=unmasked
        )
        given = {name: value for name, value in request.kwargs.items() if name != "cache_position"}
        settings = self.parts.binding.fact(model, returns_of_each_token)
        return {**given, **without_router_logits(settings, given), **self._scatter.arguments(ids, first)}

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
        few = unmasked and not self._prompt.first and plan.first_computed <= self._prompt.columns // 16
        start = 0 if few else plan.first_computed
        columns = np.arange(start, self._prompt.columns)[None].repeat(len(plan.rows), axis=0)
        return Narrowing(_MEASURED_LAYER, len(_SLACK), narrow, 1 - rotation.rotated(_MEASURED_LAYER)), columns

    def update(
        self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        return self._scatter.update(layer_idx, keys, values) if self._scatter is not None else None

    def record(self, output: Any) -> Any:
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
                ledger.progressive = ledger.progressive or progressive
            elif stale.any():
                ledger.blended, ledger.progressive = MovedColumns(moved, stale), progressive
            self._served = note_served(parts, self._loaded, self._prompt.ids)
            self._note_repaired(moved, stale, self._scatter.layer_tokens)
        parts.live.filled(self._prompt.ids[:, self._loaded.held :], self._prompt.columns)
        note_hooks(parts, confirmed=not self._prompt.inputs.verifies)

    def _note_repaired(self, moved: Mask, stale: Mask, layer_tokens: list[int]) -> None:
        """Count what was computed again of what was served."""
        tally = self.parts.live.tally
        layers = [a + b for a, b in zip(layer_tokens, self._looked, strict=True)]
        before = tally.layers or (0,) * len(layers)
        tally.layers = tuple(a + b for a, b in zip(before, layers, strict=True))
        again = (moved & ~stale).sum(axis=1).tolist()
        tally.rows = [served - computed for served, computed in zip(tally.rows, again, strict=True)]
        tally.moved += int(moved.sum())
        tally.recomputed += sum(again)

    def settle(self) -> None:
        confirmed = not self._prompt.inputs.verifies
        self.parts.binding.store.promote(self._served)
        offer(self.parts, self._prompt.columns, confirmed=confirmed, root_checked=True)
        if confirmed and self._stores_whole:
            self.parts.writer.offer_tails()

    def abandon(self) -> None:
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
    columns, batch = plan.reuse.filled, len(plan.rows)
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


def goes_on(policy: ReusePolicy, moved: int, seams: int) -> Progressive:
    """How what moved chunks have left is computed again with later tokens, where so many tokens have moved."""
    if policy.progressive is not None:
        return policy.progressive
    return "ride" if moved <= _TOKENS_FOR_A_SEAM * seams else False
