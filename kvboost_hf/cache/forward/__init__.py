"""One forward: decides whether it computes the whole prompt, or the part that no stored K/V serves.

A forward over the columns [held, n) of a batch, as the hook sees it:

    admit     may it use stored K/V at all?                   admission.py
    plan      which columns can come from the store           prompt_plan.py; planning/plan.py, pure
    cut       with states: [filled, cut) runs on its own      prompt_plan.py
    fetch     the stored K/V of the plan is loaded            prompt_plan.py; the store
    fill      [held, filled) is put into the layers           reused.py, moved.py; fill.py, loading.py
    narrow    the model is given what is left                 reused.py
    forward   the unmodified model
    record    what the layers hold now                        live/
    settle    chunks that are now complete go to the store    live/binding.py
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from kvboost_hf.cache.forward.admission import (
    ALL_LOGITS_OF_MEDIA,
    HIDDEN_OF_MEDIA,
    Admitted,
    admit_more,
    admit_piece,
    admit_prompt,
    agreed,
    length_matters,
    reason_for_stock_layers,
)
from kvboost_hf.cache.forward.moved import Moved
from kvboost_hf.cache.forward.prompt_plan import choose_hidden, min_saving_of, plan_prompt
from kvboost_hf.cache.forward.repair_later import (
    RidingStep,
    columns_per_token,
    may_repair,
    repair_more,
    riding_columns,
)
from kvboost_hf.cache.forward.reused import Reused
from kvboost_hf.cache.forward.running import (
    CacheParts,
    Forward,
    PromptColumns,
    Request,
    Settled,
    Step,
    Unrecorded,
    hides_known_padding,
    least_of_prompt,
    leave_prompts,
)
from kvboost_hf.cache.identity.walk import ModelParts
from kvboost_hf.cache.live import CHANGED, Behind
from kvboost_hf.cache.live.ledger import Ledger
from kvboost_hf.cache.planning.chunks import HEAD_TOKENS, whole_pieces
from kvboost_hf.cache.planning.report import Tally
from kvboost_hf.cache.prompt import (
    ForwardInputs,
    Kwargs,
    begun_tokens,
    common_columns,
    drafted_tokens,
    new_shape,
    new_tokens,
    read_inputs,
    returns_of_each_token,
    with_positions,
)
from kvboost_hf.cache.prompt.token_log import MaskShape
from kvboost_hf.compat import (
    Ranks,
    assisted_call,
    attn_implementation,
    cache_argument,
    forward_arguments,
    has_own_cache,
    layer_forms,
    running_config,
)
from kvboost_hf.handles import ATTENTION

# Arguments with which a forward can carry more tokens: what it returns of these is left out.
_PLAIN = frozenset(
    "input_ids attention_mask position_ids past_key_values cache_params cache use_cache logits_to_keep "
    "return_dict".split()
)
_OTHER_ROWS = (
    "`input_ids` has {given} rows, and the ChunkReuseCache holds {rows}, so that no text is continued. Pass {rows}, "
    "or make the cache hold {given} with `batch_repeat_interleave` or `batch_select_indices`. For new texts, pass the "
    "whole of them to generate(), or call reset() before."
)


def carrying_forward(parts: CacheParts, request: Request, behind: Behind) -> Forward:
    """The next forward, with tokens in front of its own that the layers lag behind."""
    try:
        request.kwargs, request.carries = _carry(request.kwargs, behind), True
        found = next_forward(parts, request)
    except BaseException:
        parts.live.behind = behind
        raise
    found.behind = behind
    return found


def may_carry(model: PreTrainedModel, kwargs: Kwargs, rows: int) -> bool:
    """Whether a forward of `rows` can compute tokens in front of its own, and return nothing of them."""
    ids, mask, positions = (kwargs.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
    keep = kwargs.get("logits_to_keep")
    return (
        isinstance(ids, torch.Tensor)
        and ids.ndim == 2
        and len(ids) == rows
        and (mask is None or (isinstance(mask, torch.Tensor) and mask.ndim == 2))
        and (positions is None or positions.shape[-1] == ids.shape[1])
        and (keep is None or (type(keep) is int and keep >= 0))
        and kwargs.get("use_cache") is not False
        and all(name in _PLAIN or value is None or value is False for name, value in kwargs.items())
        and not any(returns_of_each_token(model).values())
        and "logits_to_keep" in forward_arguments(model)
    )


def _carry(kwargs: Kwargs, behind: Behind) -> Kwargs:
    """The arguments of a forward with those tokens in front of its own."""
    own, positions = kwargs["input_ids"], kwargs.get("position_ids")
    ids = behind.ids.to(own.device)
    given: Kwargs = {"input_ids": torch.cat([ids, own], dim=1)}
    given["logits_to_keep"] = min(kwargs.get("logits_to_keep") or own.shape[1], own.shape[1])
    if positions is not None:
        before = behind.positions
        if before is None or before.shape[:-1] != positions.shape[:-1]:
            before = positions[..., :1] + torch.arange(-ids.shape[1], 0, device=positions.device)
        given["position_ids"] = torch.cat([before.to(positions.device), positions], dim=-1)
    return {**kwargs, **given}


def next_forward(parts: CacheParts, request: Request) -> Forward:
    """The forward that a model is to run for a request; it is under way from its `begin` on.

    Raises:
        ValueError: for more columns than a cache of a fixed size has room for, and for ids that continue other rows.
    """
    live, model = parts.live, request.model
    if live.static is not None:
        parts.writer.confirm_steps()
    held = 0 if request.armed else live.held
    if not held:
        _begin_text(parts, request)
        held = 0 if request.armed else live.held
    elif live.plain_reason is None and not live.owns_layers:
        live.follow_others()
    if live.plain_reason is not None:
        return _plain(parts, request, live.plain_reason)
    request.kwargs = seen = with_positions(model, request.kwargs, held)
    if (static := live.static) is not None:  # generate() may have made a 4-D mask, of which a 2-D one is read
        static.require_fits(seen, held)
        request.kwargs, seen = static.read_mask(seen, held, live.ledger.log.pads if live.ledger is not None else None)
    # Where text goes on, nobody has looked at the model yet.
    settings = partial(parts.binding.fact, find=returns_of_each_token) if not held else returns_of_each_token
    hidden_of = partial(_hidden_layers, parts, held) if live.static is None else None
    request.inputs = read_inputs(model, seen, parts.binding.all_logits_reason, settings, hidden_of)
    if not held:
        if (ranks := parts.binding.store.ranks) is None:
            return _prompt(parts, request)
        with ranks.together():
            return _prompt(parts, request)
    single = isinstance(request.inputs, ForwardInputs) and request.inputs.input_ids.shape[1] == 1
    request.is_step = single and (live.static is None or not request.in_prefill)
    return _more(parts, request, held)


def _hidden_layers(parts: CacheParts, held: int, asked: Any) -> tuple[int, ...] | str:
    """The layers that a value of `output_hidden_states` asks for; or why those of reused tokens cannot be had."""
    found, kept = parts.binding.hidden_layers_of(asked), parts.live.hidden_layers
    return "the text has begun without them" if held and not set(found) <= set(kept) else found


def _begin_text(parts: CacheParts, request: Request) -> None:
    """Take the layers for a text: transformers' own if somebody else's code is given the cache."""
    live, reason = parts.live, reason_for_stock_layers(parts, request)
    seen = request.seen
    if reason is not None and live.plain_reason is not None:
        live.plain_reason = reason
    elif (
        reason != live.plain_reason
        or not live.owns_layers
        or (seen is not None and seen.number != live.looked and not _fits(parts, seen, request))
    ):
        parts.writer.offer_tails()
        live.begin_text(request.model, reason)


def _fits(parts: CacheParts, seen: ModelParts, request: Request) -> bool:
    """Whether the layers are those that the model takes now: its configuration may be another one than at first."""
    parts.live.looked = seen.number
    return parts.live.plain_reason is not None or parts.live.forms == parts.binding.fact(request.model, layer_forms)


def _plain(parts: CacheParts, request: Request, reason: str) -> Forward:
    """Run a text on the layers that transformers would have given it."""
    live = parts.live
    if request.armed and live.plain_used:
        live.drop()
    if not live.plain_used:
        live.tally = Tally(bypass=reason)
    own = has_own_cache(request.model)
    if own and not live.plain_used:
        live.tally.prompt = live.tally.forwarded = begun_tokens(request.kwargs)
    elif not own and (not live.plain_used or request.in_prefill):
        _count_computed(live.tally, request)
    live.plain_used = True
    if own or _wants_none(request.kwargs):
        request.kwargs = {**request.kwargs, cache_argument(request.model): None}
    return Unrecorded(parts, 0, 0)


def _wants_none(kwargs: Kwargs) -> bool:
    """Whether a generate() call without a cache passes the one it was given all the same.

    It passes the whole sequence at each step. Of other callers, who continue what they have passed it with, the layers
    take K/V, as those of transformers do; assisted decoding, which crops the cache that its forwards return, is one.

    Raises:
        ValueError: for a call that passes its prompt in pieces.
    """
    if kwargs.get("use_cache") is not False or getattr(config := running_config(), "use_cache", None) is not False:
        return False
    if (size := getattr(config, "prefill_chunk_size", None)) is not None:
        raise ValueError(
            f"`use_cache` must be True with `prefill_chunk_size` ({size}), got False: without K/V a piece of a prompt "
            "does not see the pieces before it. Leave out one of the two."
        )
    return assisted_call() is None


def _bypass(parts: CacheParts, request: Request, reason: str) -> Forward:
    """Run a prompt as it stands, on empty layers that nothing is known of."""
    parts.writer.offer_tails()
    parts.live.drop()
    tally = parts.live.tally
    tally.bypass, tally.rows = reason, [0] * len(tally.rows)
    tally.prompt = tally.forwarded = tally.live = tally.moved = 0
    _count_computed(tally, request)
    if _wants_none(request.kwargs):
        return _without_cache(parts, request)
    return Unrecorded(parts, 0, new_shape(request.kwargs)[1])


def _without_cache(parts: CacheParts, request: Request) -> Forward:
    request.kwargs = {**request.kwargs, cache_argument(request.model): None}
    return Unrecorded(parts, 0, new_shape(request.kwargs)[1])


def _lose_track(parts: CacheParts, request: Request, held: int, reason: str) -> Forward:
    """Run what follows as it stands; nothing more is known of what the layers hold."""
    parts.live.ledger = None
    tally, (_, columns) = parts.live.tally, new_shape(request.kwargs)
    known = request.inputs if isinstance(request.inputs, ForwardInputs) else None
    more = columns - _candidates(request) > 1 or request.in_prefill
    if more or not tally.live + tally.stored:  # else it is of no concern to the prompt
        tally.bypass = tally.bypass or reason
    if more:
        _count_computed(tally, request)
    return Unrecorded(parts, held, held + columns, known)


def _prompt(parts: CacheParts, request: Request) -> Forward:
    """A prompt starts at column 0: keep what the layers hold of it, and look for the rest."""
    live = parts.live
    if request.kwargs.get("use_cache") is False and not request.armed and _wants_none(request.kwargs):  # a later token
        return _without_cache(parts, request)
    tally = live.tally = Tally()
    asks = request.kwargs.get("output_hidden_states") or getattr(request.model.config, "output_hidden_states", False)
    asks = asks or (type(request.inputs) is ForwardInputs and request.inputs.hidden)
    if asks and parts.binding.has_new_hooks:  # those of transformers, for the model was probed for hidden states
        request.seen = parts.binding.look()
    found = admit_prompt(parts, request)
    if (ranks := parts.binding.store.ranks) is not None:
        found = agreed(ranks, found, parts)
    if isinstance(found, str):
        return _bypass(parts, request, found)
    inputs, pads, policy = found.inputs, found.pads, parts.binding.policy
    batch, columns = inputs.input_ids.shape
    if (inputs.logits_of_all or inputs.hidden) and found.prompt.media.any():  # not every model has been seen to
        reason = HIDDEN_OF_MEDIA if inputs.hidden else ALL_LOGITS_OF_MEDIA  # take them in parts
        inputs = replace(inputs, logits=columns, computes_all=reason, logits_of_all=False, hidden=())
    if inputs.hidden or live.hidden_layers or policy.keep_hidden_states or parts.binding.store.hidden_kinds:
        found = choose_hidden(parts, request, found, inputs.hidden)
    least = least_of_prompt(request.model) if live.stateful else 1
    held = _keep_common(parts, found, columns - max(inputs.logits, least))
    if ranks is not None:
        held = _agreed_columns(ranks, parts, found, held)
    if live.changed:
        tally.dropped = CHANGED
    live.changed = False
    ledger = live.start_ledger(pads, found.root, found.regime)
    candidates = _candidates(request) if inputs.logits > 1 else 0
    tally.prompt = int((columns - candidates - pads).sum())
    tally.rows = np.maximum(held - pads, 0).tolist()
    tally.live = sum(tally.rows)
    tally.moved = ledger.blended.tainted_columns(held) if ledger.blended is not None else 0
    tally.forwarded = -candidates * batch
    tally.bypass = inputs.computes_all or tally.bypass
    return _reuse(parts, request, PromptColumns(inputs, found.prompt, found.prompt.column_ids, held, least))


def _more(parts: CacheParts, request: Request, held: int) -> Forward:
    """Ids follow what the layers hold: a decoding step, candidates to verify, or more of a prompt."""
    live, model, inputs = parts.live, request.model, request.inputs
    if live.ledger is not None and isinstance(inputs, ForwardInputs):
        if (given := inputs.input_ids.shape[0]) != (rows := len(live.ledger.log.pads)):
            raise ValueError(_OTHER_ROWS.format(given=given, rows=rows))
    ledger = live.in_step(look=live.stateful or not request.is_step)
    known = inputs if isinstance(inputs, ForwardInputs) else None
    if live.untracked and (request.is_step or request.carries or (known is not None and known.verifies)):
        return Unrecorded(parts, held, held + new_shape(request.kwargs)[1], known)
    reason = admit_more(parts, request, ledger, held)
    is_piece = (
        known is not None
        and not request.carries
        and (known.input_ids.shape[1] > known.logits or (known.computes_all is not None and request.in_prefill))
    )
    if is_piece and (ranks := parts.binding.store.ranks) is not None:
        with ranks.together():
            reason = agreed(ranks, reason, parts)
            if reason is None:
                assert ledger is not None
                return _piece(parts, request, ledger, held)
    if reason is not None:
        return _lose_track(parts, request, held, reason)
    assert ledger is not None
    assert isinstance(inputs, ForwardInputs)
    if ledger.unconfirmed:
        parts.writer.confirm(ledger)
    new = inputs.input_ids.shape[1]
    if is_piece:
        return _piece(parts, request, ledger, held)
    if new == 1 and request.in_prefill:  # the last piece of a prompt
        _count_computed(live.tally, request)
    if (live.stateful or live.static is not None) and leave_prompts(parts, model):
        return Unrecorded(parts, held, held + new, inputs)
    shown, told = inputs.attention_mask, request.kwargs
    mask = MaskShape.of(shown) if shown is not None else None
    if shown is None or hides_known_padding(parts, request, shown, ledger.log.pads):
        live.hand_out(parts.binding.fact(model, attn_implementation) == ATTENTION)
        if shown is not None and not ledger.log.pads.any() and live.static is None:
            # Releases of transformers before 5.23 pass a mask of ones, which no kernel need read.
            request.kwargs = {**request.kwargs, "attention_mask": None}
    repair: Callable[[], None] | None = None
    if ledger.blended is not None and ledger.progressive is not False and may_repair(live):
        if ledger.progressive is True:
            repair = partial(repair_more, live, model, new * columns_per_token(live))
        elif not request.carries and may_carry(model, request.kwargs, len(inputs.input_ids)):
            if most := riding_columns(live, model):
                return RidingStep(parts, held, inputs, mask, most)
    settled: Settled | None = None
    if request.is_step and not request.carries and ledger.blended is None:
        if not length_matters(parts, model) and live.static is None:
            settled = Settled.of(request, told, live.hands_out)
    return Step(parts, held, inputs, mask, repair, settled)


def _piece(parts: CacheParts, request: Request, ledger: Ledger, held: int) -> Forward:
    """More of a prompt, as with `prefill_chunk_size`."""
    found = admit_piece(parts, request, ledger, held)
    if (ranks := parts.binding.store.ranks) is not None:
        found = agreed(ranks, found, parts)
    if isinstance(found, str):
        return _lose_track(parts, request, held, found)
    ledger.log.pads = found.pads
    parts.live.expect_padding(found.pads)
    batch, columns = len(found.pads), held + found.inputs.input_ids.shape[1]
    if len(parts.live.tally.rows) != batch:  # a copy of a cache has no counts of its own yet
        parts.live.tally.rows = [0] * batch
    parts.live.tally.bypass = parts.live.tally.bypass or found.inputs.computes_all
    parts.live.tally.prompt += int((columns - np.maximum(found.pads, held)).sum())
    ids = np.concatenate([ledger.log.columns(), found.prompt.column_ids], axis=1)
    least = least_of_prompt(request.model) if parts.live.stateful else 1
    return _reuse(parts, request, PromptColumns(found.inputs, found.prompt, ids, held, least))


def _reuse(parts: CacheParts, request: Request, prompt: PromptColumns) -> Forward:
    """Look for a prompt in the store."""
    planned = plan_prompt(parts, request.model, prompt)
    if planned.reason is not None:
        if prompt.first:  # earlier pieces of the prompt are in the layers, and must stay
            return _lose_track(parts, request, prompt.held, planned.reason)
        return _bypass(parts, request, planned.reason)
    if planned.moving is not None:
        return Moved(parts, prompt, planned.plan, planned.moving, stores_whole=request.stores_whole)
    return Reused(
        parts,
        planned.prompt,
        planned.plan,
        planned.cuts,
        planned.stops,
        planned.spaced,
        overlaps=planned.overlaps,
        share_from=min_saving_of(parts, prompt) if not prompt.new.media.any() else None,
        stores_whole=request.stores_whole,
    )


def _agreed_columns(ranks: Ranks, parts: CacheParts, found: Admitted, held: int) -> int:
    """Rewind the layers to what the live caches of all ranks hold of a prompt."""
    while True:
        low, alike = ranks.agree(held)
        if alike:
            return held
        held = _keep_common(parts, found, low)


def _keep_common(parts: CacheParts, found: Admitted, limit: int) -> int:
    """Rewind the layers to the columns that the new prompt shares with them; returns how many those are."""
    live, writer, prompt = parts.live, parts.writer, found.prompt
    ledger = live.in_step(owned=True)  # as `_begin_text` has seen to
    if ledger is not None and ledger.unconfirmed:
        writer.confirm(ledger)
    known = ledger is not None and ledger.root == found.root and ledger.log.trusted
    if ledger is None or not known or not np.array_equal(ledger.log.pads, found.pads):
        writer.offer_tails()
        live.drop()
        return 0
    common = common_columns(ledger.log.columns(), prompt.column_ids)
    if ledger.blended is not None and parts.binding.policy.mode == "exact":  # which it was not for the prompt before
        common = min(common, ledger.blended.exact_columns)
    held = prompt.cut(min(common, max(limit, 0)))
    if ledger.in_pieces is not None:
        held = min(whole_pieces(held), ledger.in_pieces)
    if held <= int(found.pads.max()):  # some row keeps nothing
        held = 0
    if held < ledger.log.length and not live.can_rewind(held):
        writer.offer_tails()  # the store has what is needed to go back
        live.drop()
        return 0
    if ledger.log.length - held >= HEAD_TOKENS:
        writer.offer_tails_from(ledger, held)
    live.rewind(held)
    return held


def _candidates(request: Request) -> int:
    """How many of the last ids of each row generate() has drafted."""
    return drafted_tokens(request.kwargs) if request.in_generate else 0


def _count_computed(tally: Tally, request: Request) -> None:
    """Count the tokens of a forward that computes all of them, without padding and what was drafted."""
    tokens = new_tokens(request.kwargs) - new_shape(request.kwargs)[0] * _candidates(request)
    tally.prompt += tokens
    tally.forwarded += tokens
