"""Plans a prompt: which columns come from the store, and where forwards of our own end before the caller's."""

from dataclasses import replace

import numpy as np
from transformers import PreTrainedModel

from kvboost_hf.cache.costs import pieces
from kvboost_hf.cache.forward.admission import adds_mask, reason_against_short_hits
from kvboost_hf.cache.forward.loading import can_overlap
from kvboost_hf.cache.forward.reused import PromptColumns
from kvboost_hf.cache.forward.running import CacheParts
from kvboost_hf.cache.forward.spans import needed_for, with_loaded
from kvboost_hf.cache.live.ledger import Ledger
from kvboost_hf.cache.planning.chunks import piece_ends, whole_pieces
from kvboost_hf.cache.planning.plan import ReusePlan, plan_batch
from kvboost_hf.cache.prompt.media import Prompt
from kvboost_hf.compat import weights_come_and_go

_NEVER = 2**62  # tokens that an extra forward must save


def plan_prompt(parts: CacheParts, model: PreTrainedModel, prompt: PromptColumns) -> ReusePlan:
    """Plan the columns [held, limit) of a prompt, with all chunks loaded."""
    live, binding, ids = parts.live, parts.binding, prompt.ids
    ledger = live.ledger
    assert ledger is not None
    min_saving = min_saving_of(parts, prompt)
    stems_to = _stems_to(parts, ledger, prompt)
    lost: frozenset[bytes] = frozenset()
    binding.store.wait_for_others(ledger.root, ids)
    while True:
        plan = ledger.plan(
            ids,
            prompt.held,
            prompt.limit,
            binding.store,
            min_saving,
            stateful=live.stateful,
            stems_to=stems_to,
            first=prompt.first,
            without=lost,
        )
        if ledger.in_pieces is not None:
            plan = replace(plan, filled=whole_pieces(plan.filled))
        wanted = needed_for(plan)
        fetched = binding.store.fetch(wanted, check=not may_overlap(parts, model, plan, prompt))
        if all(fetched.get(each.key) is each for each in wanted):  # nothing had to be loaded
            return plan
        if fetched.keys() >= {each.key for each in wanted}:
            return with_loaded(plan, fetched)
        lost |= {each.key for each in wanted if each.key not in fetched}


def cut_prompt(
    parts: CacheParts, model: PreTrainedModel, prompt: PromptColumns, plan: ReusePlan
) -> tuple[PromptColumns, ReusePlan, list[int]]:
    """Divide what a plan leaves of a prompt into forwards.

    Returns:
        The prompt and the plan, changed where they have to be, and the columns at which forwards end before the
        caller's.
    """
    live = parts.live
    ledger = live.ledger
    assert ledger is not None
    if ledger.in_pieces is not None:
        return prompt, plan, piece_ends(plan.filled, prompt.limit)
    if prompt.new.media.any():
        return prompt, *_whole_media(plan, _state_cuts(parts, plan, ledger, prompt), prompt.new, prompt.limit)
    if live.stateful:
        return prompt, plan, _state_cuts(parts, plan, ledger, prompt)
    if not prompt.first:
        reason = reason_against_short_hits(parts, model, plan, prompt.inputs, ledger)
        if reason is not None:
            prompt, plan = _give_up(parts, prompt, plan, ledger, reason)
    return prompt, plan, _mask_cuts(parts, model, plan, prompt)


def min_saving_of(parts: CacheParts, prompt: PromptColumns) -> int:
    """Tokens that a forward ahead must save.

    Rows computed ahead have a length of their own, and frequencies that depend on it would not be the batch's.
    """
    return parts.binding.policy.min_prefill_saving if not parts.live.regime else prompt.ids.size


def _stems_to(parts: CacheParts, ledger: Ledger, prompt: PromptColumns) -> int:
    """The column up to which what rows begin with may be computed once; 0 if it may not.

    A forward of our own would lack the images of the caller's. States are kept at a border, and what follows it is
    computed once behind that (see `Reused`).
    """
    if prompt.new.media.any():
        return 0
    return ledger.last_border(prompt.limit, parts.binding.store, prompt.ids) if parts.live.stateful else prompt.limit


def may_overlap(parts: CacheParts, model: PreTrainedModel, plan: ReusePlan, prompt: PromptColumns) -> bool:
    """Whether K/V may still be loading while the model computes.

    Damage that is only found then takes a forward in the middle of a forward, which not every model can take.
    """
    return (
        parts.binding.policy.mode == "exact"
        and not parts.binding.policy.reproducible  # which would have to be computed in pieces
        and not prompt.new.media.any()  # where images are cut, the plan is not yet the last one
        and parts.live.static is None
        and can_overlap(parts.live.layers, plan)
        and "forward" not in model.__dict__
        and "_compiled_call_impl" not in model.__dict__
        and not weights_come_and_go(model)
        and not _mask_cuts(parts, model, plan, prompt)
    )


def _state_cuts(parts: CacheParts, plan: ReusePlan, ledger: Ledger, prompt: PromptColumns) -> list[int]:
    """Columns at which states are worth keeping: the last chunk border, where prompts part, the first image."""
    limit, media, store = prompt.limit, prompt.new.media, parts.binding.store
    if not parts.live.stateful or parts.live.regime or limit < plan.filled + (not plan.stems):
        return []
    border = ledger.last_border(limit, store, prompt.ids)
    wanted = {border} if border - plan.filled >= store.chunker.chunk_size // 2 else set()
    if plan.branch is not None:
        wanted.add(plan.branch)
    if plan.stems and border == plan.filled:  # nobody has stored the states that were computed
        wanted.add(border)
    if media.any():  # a whole prompt, as media only come with one
        wanted.add(int(media.any(axis=0).argmax()))
    earliest = plan.filled if plan.stems else plan.filled + 1
    return sorted(cut for cut in wanted if max(earliest, *[pad + 1 for pad in plan.pads]) <= cut <= limit)


def _mask_cuts(parts: CacheParts, model: PreTrainedModel, plan: ReusePlan, prompt: PromptColumns) -> list[int]:
    """Columns at which to begin a new forward, where attention needs a mask behind what is reused."""
    if plan.filled and adds_mask(parts, model, plan, prompt.inputs):
        return pieces(plan.filled, prompt.limit)
    return []


def _give_up(
    parts: CacheParts, prompt: PromptColumns, plan: ReusePlan, ledger: Ledger, reason: str
) -> tuple[PromptColumns, ReusePlan]:
    """Reuse nothing of a prompt after all: the prompt behind empty layers, and an empty plan."""
    live = parts.live
    live.tally.bypass = reason
    live.tally.live = live.tally.moved = 0
    live.tally.rows = [0] * len(plan.rows)
    live.drop()
    live.start_ledger(ledger.log.pads, ledger.root, live.regime)
    nothing = [replace(row, hit=0, segments=(), borders=(), miss=None) for row in plan.rows]
    return replace(prompt, held=0), plan_batch(nothing, plan.pads, 0, prompt.ids.shape[1], _NEVER)


def _whole_media(plan: ReusePlan, cuts: list[int], prompt: Prompt, limit: int) -> tuple[ReusePlan, list[int]]:
    """The plan and the cuts without a forward of our own, which would lack its images, and without a cut in one."""
    rows = [
        row
        if row.states is None
        else replace(row, states={at: s for at, s in row.states.items() if prompt.cut(at + pad) == at + pad})
        for row, pad in zip(plan.rows, plan.pads, strict=True)
    ]
    alone = plan_batch(rows, plan.pads, plan.held, limit, min_saving=_NEVER)
    alone = replace(alone, filled=max(plan.held, prompt.cut(alone.filled)))
    shown = np.flatnonzero(prompt.media[:, alone.filled :].any(axis=0))
    before = alone.filled + int(shown[0]) if len(shown) else limit
    return alone, [cut for cut in cuts if alone.filled < cut <= before]
