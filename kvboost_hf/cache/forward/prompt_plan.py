"""Plans a prompt: which columns come from the store, and where forwards of our own end before the caller's."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedModel

from kvboost_hf.cache.costs import PIECE, pieces
from kvboost_hf.cache.forward.admission import MOVED_HIDDEN, Admitted, adds_mask, reason_against_short_hits, root_of
from kvboost_hf.cache.forward.fill import chunks_of
from kvboost_hf.cache.forward.moved import Moving, plan_moved
from kvboost_hf.cache.forward.running import CacheParts, PromptColumns, Request, least_of_prompt
from kvboost_hf.cache.kv import Stored, StoredChunk, StoredStates
from kvboost_hf.cache.kv.checkpoints import can_segment, mixers_of, spacing_of
from kvboost_hf.cache.layers.base import ReuseLayer
from kvboost_hf.cache.layers.growing import GrowingLayer
from kvboost_hf.cache.layers.hidden_states import HiddenStates
from kvboost_hf.cache.layers.pieced import PiecedLayer
from kvboost_hf.cache.live.binding import in_order
from kvboost_hf.cache.live.ledger import KnownRow, Ledger
from kvboost_hf.cache.planning.chunks import piece_ends, whole_pieces
from kvboost_hf.cache.planning.plan import ReusePlan, RowPlan, SavedState, Segment, plan_batch
from kvboost_hf.cache.prompt import common_columns
from kvboost_hf.cache.prompt.token_log import Prompt
from kvboost_hf.compat import attn_implementation, hidden_states_reason, hook_hidden_states, weights_come_and_go
from kvboost_hf.handles import ATTENTION

_MIN_BYTES = 2**20  # less is loaded at once
_NEVER = 2**62  # tokens that an extra forward must save


@dataclass(frozen=True, slots=True)
class PlannedPrompt:
    """All that is decided of a prompt before its forward, with what serves it loaded."""

    prompt: PromptColumns
    plan: ReusePlan  # which of them stored chunks serve
    cuts: Sequence[int] = ()  # columns before which to run a forward of our own
    # Columns at which states are saved in the middle of a forward: first all that are wanted in any case.
    stops: Sequence[int] = ()
    spaced: Sequence[int] = ()  # columns at which they are saved there if they fit
    moving: Moving | None = None  # how moved chunks take part in it; None if they do not
    overlaps: bool = False  # K/V may be loaded while the model computes
    # Why a run on a few tokens rules out to give the prompt in parts, so that none of this may be done.
    reason: str | None = None


def plan_prompt(parts: CacheParts, model: PreTrainedModel, prompt: PromptColumns) -> PlannedPrompt:
    """Decide how a prompt runs, and then load what serves it; anew, if some of that turns out to be lost."""
    live, store, ids = parts.live, parts.binding.store, prompt.ids
    ledger, ranks = live.ledger, store.ranks
    assert ledger is not None
    min_saving = min_saving_of(parts, prompt)
    # Up to here, what rows begin with may be computed once. A forward of our own would lack the caller's images.
    # States are kept at a border, and what follows it is computed once behind that (see `Reused`).
    stems_to = 0 if prompt.new.media.any() else prompt.limit
    if stems_to and live.stateful:
        stems_to = ledger.last_border(prompt.limit, store, ids)
    lost: frozenset[bytes] = frozenset()
    store.wait_for_others(ledger.root, ids)
    known, live.known = live.known, None
    while True:
        plan = ledger.plan(
            ids,
            prompt.held,
            prompt.limit,
            store,
            min_saving,
            stateful=live.stateful,
            stems_to=stems_to,
            first=prompt.first,
            without=lost,
            ranks=ranks,
            known=known,
        )
        if ledger.in_pieces is not None:
            plan = replace(plan, filled=whole_pieces(plan.filled))
        planned = _decide(parts, model, prompt, plan, ledger, None if lost else known)
        if planned.reason is not None:
            return planned
        wanted = _needed_for(planned.plan)
        if not wanted:
            return planned
        fetched = store.fetch(wanted.values(), check=not planned.overlaps)
        complete = fetched.keys() == wanted.keys()
        if complete if ranks is None else ranks.all(complete):
            if all([fetched[key] is each for key, each in wanted.items()]):  # nothing had to be loaded
                return planned
            loaded = _with_loaded(planned.plan, fetched)
            overlaps = planned.overlaps and _is_worth_overlapping(live.layers, loaded)
            return replace(planned, plan=loaded, overlaps=overlaps)
        lost |= wanted.keys() - fetched.keys()


def look_up(
    parts: CacheParts,
    ids: torch.Tensor,
    known: Sequence[KnownRow | None] = (),
    is_current: Callable[[], bool] = lambda: False,
) -> KnownRow:
    """What the store can serve now of a prompt [1, tokens], whose last token is left to compute.

    Of the rows that are `known`, the first that says it of this prompt, and still holds, is returned. `is_current`
    tells from now on whether the store is as it is now.
    """
    binding, live, root = parts.binding, parts.live, root_of(parts, ids.shape[1])
    model = binding.model()
    tokens = ids.cpu().numpy().astype(np.int64, copy=False)
    if root is None:
        return KnownRow(b"", tokens[0], 0, None, is_current)
    limit = ids.shape[1] - (least_of_prompt(model) if live.stateful and model is not None else 1)
    for row in known:
        if row is not None and row.of(root, tokens[0], limit) is not None:
            return row
    ledger = Ledger.empty(np.zeros(1, dtype=np.int64), root)
    found = ledger.plan(tokens, 0, limit, binding.store, 0, stateful=live.stateful)
    filled = whole_pieces(found.filled) if binding.policy.reproducible else found.filled
    return KnownRow(root, tokens[0], filled, found.rows[0], is_current)


def choose_hidden(parts: CacheParts, request: Request, found: Admitted, asked: tuple[int, ...]) -> Admitted:
    """Choose the layers whose hidden states are kept of a prompt, and with them the root that it is found under.

    Those that the policy names are kept, and those that the call has `asked` for. Others besides these are kept where
    the store has more of the prompt with them. Returns the prompt with its root.
    """
    binding, live, model = parts.binding, parts.live, request.model
    if live.static is not None or binding.live_quant is not None:
        return found
    wanted = in_order([*binding.always_hidden(model), *asked])
    others = {(), live.hidden_layers, *binding.store.hidden_kinds} - {wanted}
    if binding.policy.mode == "blend" and not asked:  # moved chunks have none
        others = set()
    tokens = {kind: _known_tokens(parts, request, found, kind) for kind in (wanted, *others)} if others else {}
    best = max([wanted, *(kind for kind in others if set(kind) >= set(wanted))], key=lambda kind: tokens.get(kind, 0))
    most = max(tokens.values(), default=0)
    if asked and tokens and tokens[best] < most:
        live.tally.bypass = (
            f"{most - tokens[best]} more tokens are stored without the hidden states that the call asks for: they are "
            "computed once more, and kept with these"
        )
    if best != live.hidden_layers:
        parts.writer.offer_tails()
        binding.hidden_layers = best
        live.keep_hidden_of(model, best)
        if best:
            hook_hidden_states(model)
    # A first call that asks for hidden states has had the model probed, for which transformers has put hooks on it.
    root = binding.root(found.regime, None if binding.has_new_hooks else request.seen)
    return replace(found, root=root) if root is not None else found


def _known_tokens(parts: CacheParts, request: Request, found: Admitted, kind: tuple[int, ...]) -> int:
    """How many tokens of a prompt are known, in the layers or in the store, with the hidden states of some layers."""
    binding, live, ids = parts.binding, parts.live, found.prompt.column_ids
    root, ledger = binding.root(found.regime, request.seen, kind), live.ledger
    if root is None:
        return 0
    held = 0
    if (
        ledger is not None
        and ledger.root == root
        and ledger.log.trusted
        and np.array_equal(ledger.log.pads, found.pads)
    ):
        held = common_columns(ledger.log.columns(), ids) * len(ids)
    limit = ids.shape[1] - 1
    if held >= limit * len(ids):
        return held
    plan = Ledger.empty(found.pads, root).plan(ids, 0, limit, binding.store, 0, stateful=live.stateful)
    return max(held, sum(row.hit for row in plan.rows))


def _decide(
    parts: CacheParts,
    model: PreTrainedModel,
    prompt: PromptColumns,
    plan: ReusePlan,
    ledger: Ledger,
    known: KnownRow | None,
) -> PlannedPrompt:
    """How a prompt runs, given what the store can serve of it as it stands."""
    live = parts.live
    moves = parts.binding.policy.mode == "blend" and not live.hidden_layers
    if live.hidden_layers and parts.binding.policy.mode == "blend":
        live.tally.moved_reason = MOVED_HIDDEN
    if moves and (moving := plan_moved(parts, model, prompt, plan, known)) is not None:
        return PlannedPrompt(prompt, moving.plan.reuse, moving=moving)
    cuts: list[int] = []
    stops: list[int] = []
    spaced: list[int] = []
    if ledger.in_pieces is not None:
        cuts = piece_ends(plan.filled, prompt.limit)
    elif prompt.new.media.any():
        plan = _whole_media(plan, prompt.new, prompt.limit)
        cuts, stops, spaced = _state_cuts(parts, model, plan, ledger, prompt)
    elif live.stateful:
        cuts, stops, spaced = _state_cuts(parts, model, plan, ledger, prompt)
    else:
        if not prompt.first and parts.binding.store.ranks is None:  # who may not decide alone, by times of its own
            reason = reason_against_short_hits(parts, model, plan, prompt.inputs, ledger)
            if reason is not None:
                prompt, plan = _without_reuse(parts, prompt, plan, ledger, reason)
        if plan.filled and prompt.limit > plan.filled + PIECE and adds_mask(parts, model, plan, prompt.inputs):
            cuts = pieces(plan.filled, prompt.limit)
    if plan.filled > prompt.first or cuts or stops or spaced:
        reason = parts.binding.probe_reason(model)
        if reason or (prompt.inputs.logits_of_all and (reason := hidden_states_reason(model))):
            return PlannedPrompt(prompt, plan, cuts, reason=reason)
    live.hand_out(parts.binding.fact(model, attn_implementation) == ATTENTION)  # what overlaps depends on it
    return PlannedPrompt(
        prompt, plan, cuts, stops, spaced, overlaps=not cuts and _may_overlap(parts, model, plan, prompt)
    )


def _needed_for(plan: ReusePlan) -> dict[bytes, Stored]:
    """The chunks and states that must be loaded to carry out a plan, by key."""
    found: dict[bytes, Stored] = {}
    for row, (row_plan, pad) in enumerate(zip(plan.rows, plan.pads, strict=True)):
        reach = plan.starts(row) - pad
        for segment in row_plan.segments:
            if segment.start < reach:
                assert isinstance(segment.chunk, StoredChunk)
                found[segment.chunk.key] = segment.chunk
        if row_plan.states is None:
            continue
        # Where a state comes from the store, either the row or what is computed of it begins.
        at = {reach, *[stem.start for stem in plan.path(row)]}
        for point, saved in row_plan.states.items():
            if point in at:
                assert isinstance(saved, StoredStates)
                found[saved.key] = saved
    return found


def _with_loaded(plan: ReusePlan, loaded: Mapping[bytes, Stored]) -> ReusePlan:
    """The plan with what is loaded, by key, in place of what was not."""
    rows: list[RowPlan] = []
    for row in plan.rows:
        segments: list[Segment] = []
        for segment in row.segments:
            chunk = loaded.get(segment.chunk.key)
            segments.append(replace(segment, chunk=chunk) if isinstance(chunk, StoredChunk) else segment)
        states: dict[int, SavedState] = {}
        for at, saved in (row.states or {}).items():
            assert isinstance(saved, StoredStates)
            found = loaded.get(saved.key)
            states[at] = found if isinstance(found, StoredStates) else saved
        rows.append(replace(row, segments=tuple(segments), states=states if row.states is not None else None))
    return replace(plan, rows=tuple(rows))


def min_saving_of(parts: CacheParts, prompt: PromptColumns) -> int:
    """Tokens that a forward ahead must save.

    Rows computed ahead have a length of their own, and frequencies that depend on it would not be the batch's.
    """
    return parts.binding.policy.min_prefill_saving if not parts.live.regime else prompt.ids.size


def _may_overlap(parts: CacheParts, model: PreTrainedModel, plan: ReusePlan, prompt: PromptColumns) -> bool:
    """Whether K/V may still be loading while the model computes, and it is so much that it should.

    Damage that is only found then takes a forward in the middle of a forward, which not every model can take.
    """
    return (
        plan.filled > prompt.held
        and parts.binding.policy.mode == "exact"
        and not parts.binding.policy.reproducible  # which would have to be computed in pieces
        and not prompt.new.media.any()
        and parts.live.static is None
        and parts.binding.store.ranks is None  # damage must be found before
        and _is_worth_overlapping(parts.live.layers, plan)
        and not torch.is_grad_enabled()
        and all([type(layer) in (GrowingLayer, PiecedLayer, HiddenStates) for layer in parts.live.layers])
        and not plan.ahead
        and "forward" not in model.__dict__
        and "_compiled_call_impl" not in model.__dict__
        and not weights_come_and_go(model)
    )


def _is_worth_overlapping(layers: Sequence[ReuseLayer], plan: ReusePlan) -> bool:
    """Whether what serves a plan is so much that loading it meanwhile saves time.

    It is in lower tiers; or, if nothing is, in host memory and has to be copied to a device.
    """
    chunks = chunks_of(plan)
    nbytes = sum([chunk.found.entry.nbytes for chunk in chunks if chunk.found is not None])
    if nbytes or sum([chunk.nbytes for chunk in chunks]) < _MIN_BYTES:
        return nbytes >= _MIN_BYTES
    if len(plan.rows) > 1 and any([layer.hands_out for layer in layers]):  # rows that share pieces keep them
        return False
    return sum([chunk.kv.nbytes_elsewhere for chunk in chunks]) >= _MIN_BYTES


def _state_cuts(
    parts: CacheParts, model: PreTrainedModel, plan: ReusePlan, ledger: Ledger, prompt: PromptColumns
) -> tuple[list[int], list[int], list[int]]:
    """Columns at which to save states: behind forwards of our own, within a forward, and within one if they fit.

    They are worth keeping at the last chunk border, where prompts part, before the first image, and at even distances
    between these: the next prompt may part anywhere.
    """
    live, limit, media, store = parts.live, prompt.limit, prompt.new.media, parts.binding.store
    if not live.stateful or live.regime:
        return [], [], []
    border = ledger.last_border(limit, store, prompt.ids)
    # Nobody has stored the states of what is computed once for several rows.
    wanted = {border} if plan.stems or border - plan.filled >= store.chunker.chunk_size // 2 else set()
    if plan.branch is not None:
        wanted.add(plan.branch)
    if media.any():  # a whole prompt, as media only come with one
        wanted.add(int(media.any(axis=0).argmax()))
    mixers = parts.binding.fact(model, mixers_of)
    in_segments = can_segment(mixers, live.layers)
    spacing = spacing_of(prompt.inputs.input_ids.device)
    spaced = {
        column
        for column in range(plan.filled + spacing, limit, spacing)
        if all(abs(column - other) >= spacing // 2 for other in wanted)
    }
    earliest = max(
        plan.filled if plan.stems else plan.filled + prompt.least, *[pad + prompt.least for pad in plan.pads]
    )

    def usable(columns: set[int], last: int) -> list[int]:
        found: list[int] = []
        for each in sorted(columns):
            apart = not found or each - found[-1] >= prompt.least
            if apart and earliest <= each <= last and prompt.new.cut(each) == each:
                found.append(each)
        return found

    # A forward of our own would lack the images of the caller's.
    shown = np.flatnonzero(media[:, plan.filled :].any(axis=0))
    before = min(plan.filled + int(shown[0]) if len(shown) else limit, limit)
    if not in_segments:
        return usable(wanted, before), [], []
    if len(plan.rows) > 1 or prompt.inputs.verifies:
        # What rows have alike behind the last of these is computed once.
        cuts = usable(wanted, before)
        return cuts, [], usable(spaced, cuts[-1]) if cuts else []
    return [], usable(wanted, limit), usable(spaced, limit)


def _without_reuse(
    parts: CacheParts, prompt: PromptColumns, plan: ReusePlan, ledger: Ledger, reason: str
) -> tuple[PromptColumns, ReusePlan]:
    """The prompt behind empty layers, and an empty plan, where a few known tokens are computed again."""
    live = parts.live
    live.tally.bypass = reason
    live.tally.live = live.tally.moved = 0
    live.tally.rows = [0] * len(plan.rows)
    live.drop()
    live.start_ledger(ledger.log.pads, ledger.root, live.regime)
    nothing = [replace(row, hit=0, segments=(), borders=(), miss=None) for row in plan.rows]
    return replace(prompt, held=0), plan_batch(nothing, plan.pads, 0, prompt.ids.shape[1], _NEVER)


def _whole_media(plan: ReusePlan, prompt: Prompt, limit: int) -> ReusePlan:
    """The plan without a forward of our own, which would lack its images, and without an end in one."""
    rows = [
        row
        if row.states is None
        else replace(row, states={at: s for at, s in row.states.items() if prompt.cut(at + pad) == at + pad})
        for row, pad in zip(plan.rows, plan.pads, strict=True)
    ]
    alone = plan_batch(rows, plan.pads, plan.held, limit, min_saving=_NEVER)
    return replace(alone, filled=max(plan.held, prompt.cut(alone.filled)))
