"""Runs a prompt of which the store serves the beginning, or nothing."""

import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from kvboost_hf.cache.forward.ahead import audit, put_right, run_ahead
from kvboost_hf.cache.forward.fill import compute_columns, fill_layers
from kvboost_hf.cache.forward.loading import Loading
from kvboost_hf.cache.forward.running import CacheParts, Forward, PromptColumns, Request, note_hooks, offer
from kvboost_hf.cache.kv import Stored, StoredChunk, StoredStates
from kvboost_hf.cache.kv.checkpoints import Checkpoints, mixers_of
from kvboost_hf.cache.layers.base import Piece
from kvboost_hf.cache.layers.hidden_states import HiddenStates
from kvboost_hf.cache.live.ledger import Ledger, Offering
from kvboost_hf.cache.planning.chunks import PIECE, Tokens
from kvboost_hf.cache.planning.plan import ReusePlan, RowPlan, plan_shared
from kvboost_hf.cache.planning.report import BATCH, LIVE, Missed, Tally
from kvboost_hf.cache.prompt import OF_MEDIA, Kwargs, returns_of_each_token, without_router_logits
from kvboost_hf.cache.prompt.media import narrow_media
from kvboost_hf.cache.store.history import LEAST_TOKENS, ComputePace
from kvboost_hf.compat import LAST, Shown, cache_argument

_log = logging.getLogger("kvboost_hf")
NOT_SHOWN = (
    "`output_hidden_states` was passed, and the model has run its decoder past the hooks by which the cache adds "
    "those of reused tokens. Pass ReusePolicy(keep_hidden_states=False), so that such prompts are computed whole."
)


class Reused(Forward):
    """A forward over what the store could not serve.

    `cuts`, `stops`, `spaced` and `overlaps` are those of `PlannedPrompt`. Computing once what rows have alike must
    save `share_from` tokens; None if it may not be done.
    """

    can_settle_later = True

    def __init__(
        self,
        parts: CacheParts,
        prompt: PromptColumns,
        plan: ReusePlan,
        cuts: Sequence[int],
        stops: Sequence[int],
        spaced: Sequence[int],
        *,
        overlaps: bool,
        share_from: int | None,
        stores_whole: bool,
    ) -> None:
        super().__init__(parts, prompt.held)
        self._share_from = share_from
        self._prompt, self._plan, self._cuts = prompt, plan, cuts
        self._stops, self._spaced = stops, spaced
        self._checkpoints: Checkpoints | None = None
        self._overlaps, self._stores_whole = overlaps, stores_whole
        self._loading: Loading | None = None
        self._fetched: list[Stored] = []  # what has served, some of it from lower tiers
        self._confirmed = not prompt.inputs.verifies or stores_whole  # no crop() will follow
        self._audited: Kwargs | None = None  # the caller's arguments, if the prompt may be computed a second time
        self._only_if_altered = self._changed = False
        self._shows = False  # the hidden states of reused tokens were put in front of those of the others
        self._began = 0.0

    @property
    def beginning(self) -> Tokens:
        return self._prompt.ids

    def begin(self, request: Request) -> Kwargs:
        parts, prompt, plan, model = self.parts, self._prompt, self._plan, request.model
        live = parts.live
        if self._overlaps:
            self._loading, self.takes_kv = self._load_meanwhile(model), True
            self._loading.start()  # not before it is known here: an interrupt has to stop it
        elif plan.filled > prompt.held:
            live.tally.forwarded += fill_layers(model, live.layers, plan, prompt.inputs, prompt.first)
        self._note_filled()
        self._run_to_cuts(model)
        self._share_rest(model)
        if plan.filled > prompt.first == 0:
            rate = parts.binding.policy.audit_rate
            due = rate > 0 and parts.binding.store.audits.is_due(rate)
            fingerprint = parts.binding.fingerprint
            if due or (fingerprint is not None and fingerprint.watched):
                name = cache_argument(model)
                self._audited = {key: value for key, value in request.kwargs.items() if key != name}
                self._only_if_altered = not due
        if self._stops or self._spaced:
            self._checkpoints = self._start_checkpoints(model, prompt.columns, self._stops)
        self._began = time.perf_counter()
        settings = parts.binding.fact(model, returns_of_each_token)
        return _narrow(model, settings, request.kwargs, prompt, self.length - prompt.first)

    def update(
        self, layer_idx: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        if self._loading is not None:
            self._loading.wait(layer_idx)
        return None

    def take_hidden_states(self, shown: Shown) -> Shown:
        hidden, prompt = self.parts.live.hidden, self._prompt
        if hidden is None:
            return shown
        if self._loading is not None:
            self._loading.wait(len(self.parts.live.layers) - 1)
        super().take_hidden_states(shown)
        if self.length == prompt.first:
            return shown
        self._shows = hidden.length == prompt.columns
        last = _own(hidden.view(LAST, prompt.first)) if prompt.inputs.logits_of_all else shown.last
        layers = _whole(hidden, shown, prompt.first) if prompt.inputs.hidden and self._shows else shown.layers
        return Shown(last, layers)  # copies: a head may write to them

    def record(self, output: Any) -> Any:
        if self._loading is not None:
            self._loading.finish()
        live, prompt = self.parts.live, self._prompt
        if prompt.inputs.hidden and self.length > prompt.first and not self._shows:
            raise RuntimeError(NOT_SHOWN)
        self._note_pace()
        if self._checkpoints is not None:
            self._checkpoints.stop()
        live.filled(prompt.ids[:, self.length :], prompt.columns)
        if prompt.columns - self.length == PIECE:
            self._note_pieces(prompt.columns)
        changed = None
        if live.ledger is not None and self._audited is not None:
            if not self._only_if_altered or self.parts.binding.altered is not None:
                changed = self._audit(live.ledger, self._audited, output)
        self._changed = changed is not None
        note_hooks(self.parts, confirmed=self._confirmed)
        return changed

    def settle(self) -> None:
        parts, computed = self.parts, self._loading is not None and self._loading.computed
        if not self._changed and not computed:  # it has served well
            parts.binding.store.promote(self._fetched)
        if parts.live.ledger is not None and self._confirmed and (computed or self._changed):
            parts.writer.offer_again(parts.live.ledger)
        offer(parts, self._prompt.columns, confirmed=self._confirmed, root_checked=True)
        if self._checkpoints is not None and parts.live.ledger is not None and self._confirmed and not self._changed:
            parts.writer.offer_earlier_states(parts.live.ledger, self._checkpoints.states(), root_checked=True)
        if self._confirmed and self._stores_whole:
            parts.writer.offer_tails()

    def abandon(self) -> None:
        if self._loading is not None:
            self._loading.stop()
        if self._checkpoints is not None:
            self._checkpoints.stop()
        super().abandon()

    def _load_meanwhile(self, model: PreTrainedModel) -> Loading:
        plan, layers, tally = self._plan, self.parts.live.layers, self.parts.live.tally
        inputs, first = self._prompt.inputs, self._prompt.first  # not `self`, which has the `Loading`
        served, rows = tally.tiers.copy(), list(tally.rows)

        def compute() -> list[list[Piece]]:
            tally.tiers, tally.rows = served, rows
            tally.forwarded += sum(plan.filled - max(plan.held, pad) for pad in plan.pads)
            return compute_columns(model, layers, plan, inputs, first)

        return Loading(layers, plan, compute, self.parts.binding.store.lose)

    def _note_filled(self) -> None:
        """Record what was filled."""
        plan, ids = self._plan, self._prompt.ids
        live, tally, ledger = self.parts.live, self.parts.live.tally, self.parts.live.ledger
        assert ledger is not None
        live.filled(ids[:, plan.held : plan.filled], plan.filled)
        self._note_pieces(plan.filled)
        if plan.stems:
            count_stems(tally, plan)
        for row, (row_plan, pad) in enumerate(zip(plan.rows, plan.pads, strict=True)):
            stop = plan.filled - pad
            ledger.borders[row] += [border for border in row_plan.borders if border.at <= stop]
        self._fetched = note_served(self.parts, plan, ids)
        tally.forwarded += int((self._prompt.columns - np.maximum(plan.filled, ledger.log.pads)).sum())
        self.length = plan.filled

    def _run_to_cuts(self, model: PreTrainedModel) -> None:
        """Compute up to each cut, and keep states there."""
        parts, prompt = self.parts, self._prompt
        live, ledger, store = parts.live, parts.live.ledger, parts.binding.store
        assert ledger is not None
        for cut in self._cuts:
            columns = slice(self.length, cut)
            checkpoints = None
            if self.length < cut:
                checkpoints = self._start_checkpoints(model, cut, ())
                try:
                    run_ahead(model, live.layers, prompt.inputs, columns, prompt.first)
                finally:
                    if checkpoints is not None:
                        checkpoints.stop()
                live.filled(prompt.ids[:, columns], cut)
                self._note_pieces(cut)
            self.length = cut
            if live.stateful and store.usable:
                parts.writer.offer_new(ledger)
                offering = Offering(ledger, live.layers, store)
                if checkpoints is not None:
                    offering.earlier_states(checkpoints.states())
                for row in ledger.rows:
                    offering.states(row)

    def _start_checkpoints(self, model: PreTrainedModel, columns: int, stops: Sequence[int]) -> Checkpoints | None:
        """Have states saved within the next forward, which ends at `columns`; None if none are wanted."""
        parts, start, store = self.parts, self.length, self.parts.binding.store
        stops = [column for column in stops if start < column < columns]
        spaced = [column for column in self._spaced if start < column < columns]
        if not stops + spaced or not store.usable:
            return None
        mixers = parts.binding.fact(model, mixers_of)
        checkpoints = Checkpoints(mixers, parts.live.layers, start, columns, stops, spaced, store.room_for_states)
        checkpoints.start()
        return checkpoints

    def _share_rest(self, model: PreTrainedModel) -> None:
        """Compute once what rows have alike behind the column up to which the plan goes, at which states were kept."""
        live, prompt, ledger = self.parts.live, self._prompt, self.parts.live.ledger
        pads = self._plan.pads
        if self._share_from is None or not live.stateful or len(pads) == 1 or self.length <= max(pads):
            return
        assert ledger is not None
        rows = tuple(RowPlan(self.length - pad, (), (), None, {}) for pad in pads)
        alone = ReusePlan(self.length, self.length, rows, pads)
        tokens = [prompt.ids[row, pad:] for row, pad in enumerate(pads)]
        plan = plan_shared(alone, tokens, prompt.first, prompt.limit, prompt.limit, self._share_from)
        if plan.filled > self.length:
            computed = fill_layers(model, live.layers, plan, prompt.inputs, prompt.first)
            live.filled(prompt.ids[:, self.length : plan.filled], plan.filled)
            live.tally.forwarded += computed - len(pads) * (plan.filled - self.length)
            count_stems(live.tally, plan)
            self.length = plan.filled

    def _note_pieces(self, stop: int) -> None:
        """All columns up to `stop` were computed in whole pieces, if that is asked for."""
        ledger = self.parts.live.ledger
        if ledger is not None and ledger.in_pieces is not None:
            ledger.in_pieces = stop

    def _note_pace(self) -> None:
        """Tell how fast the model is. On a GPU the host's clock does not."""
        model = self.parts.binding.model()
        if model is not None and self._loading is None and self._prompt.inputs.input_ids.device.type == "cpu":
            tokens = len(self._prompt.ids) * (self._prompt.columns - self.length)
            if tokens >= LEAST_TOKENS:
                ComputePace.of(model).observe(tokens, time.perf_counter() - self._began)

    def _audit(self, ledger: Ledger, kwargs: Kwargs, output: Any) -> Any:
        """Compute the prompt a second time; returns the output to give in place of `output`, if it was wrong."""
        live, model = self.parts.live, self.parts.binding.model()
        assert model is not None
        at = int(kwargs.get("labels") is not None)  # of the logits in a tuple: behind the loss
        logits = output["logits"] if isinstance(output, ModelOutput) else output[at]
        found = audit(model, live.layers, ledger, self.parts.binding.store, kwargs, logits)
        live.tally.audit_tokens, live.tally.audit_divergence = found.tokens, found.divergence
        if found.logits is None:
            return None
        with live.changing():
            put_right(live.layers, found.layers, ledger)
            if ledger.in_pieces is not None:
                ledger.in_pieces = 0
        if isinstance(output, ModelOutput):
            output["logits"] = found.logits
            if at:
                output["loss"] = found.loss
            if self._prompt.inputs.hidden and (hidden := live.hidden) is not None:
                output["hidden_states"] = _whole(
                    hidden, Shown(found.logits, output["hidden_states"]), self._prompt.first
                )
            return output
        return (*(found.loss,) * at, found.logits, *output[at + 1 :])


def count_stems(tally: Tally, plan: ReusePlan) -> None:
    """Count what was computed once as computed for one row, and reused by the others."""
    for stem in (stem for group in plan.stems for stem in group):
        tokens: dict[int, int] = {}  # that each row has of it
        for row in sorted(stem.rows):
            pad = plan.pads[row]
            tokens[row] = max(min(stem.stop, plan.starts(row) - pad) - max(stem.start, plan.held - pad), 0)
        tokens[max(tokens, key=lambda row: tokens[row])] -= len(stem)
        for row, reused in tokens.items():
            tally.tiers[BATCH] += reused
            tally.rows[row] += reused


def note_served(parts: CacheParts, plan: ReusePlan, ids: Tokens) -> list[Stored]:
    """Count what stored chunks have served of each row of `ids` [batch, columns], and why they could serve no more.

    Returns what has served.
    """
    tally, store, ledger = parts.live.tally, parts.binding.store, parts.live.ledger
    assert ledger is not None
    found: list[Stored] = []
    for row, (row_plan, pad) in enumerate(zip(plan.rows, plan.pads, strict=True)):
        reach = plan.starts(row) - pad  # what follows was computed ahead
        chunks: list[StoredChunk] = []
        has_moved = is_edit = False
        for segment in row_plan.segments:
            if segment.start < reach:
                assert isinstance(segment.chunk, StoredChunk)
                if segment.chunk.tier == LIVE:
                    is_edit = True
                else:
                    chunks.append(segment.chunk)
                tokens = min(segment.stop, reach) - segment.start
                tally.tiers[segment.chunk.tier] += tokens
                tally.rows[row] += tokens
                if segment.moved:
                    tally.moved_by[segment.shift] += tokens
                    has_moved = True
        miss, saved = row_plan.miss, row_plan.states.get(plan.filled - pad) if row_plan.states is not None else None
        states = saved if isinstance(saved, StoredStates) else None
        if not is_edit:  # which asks no store
            missed = miss is not None and not miss.is_slow
            store.record_use(chunks, missed=missed, states=states, moved=has_moved)
        found += [*chunks, *([states] if states is not None else [])]
        if miss is not None:
            tokens_of = ids[row, pad:]
            evicted = store.was_evicted(miss.wanted_key)
            other = store.known_under_other_root(ledger.root, tokens_of)
            tally.misses.append(Missed(row, tokens_of.copy(), miss, evicted, other))
    return found


def _narrow(model: PreTrainedModel, settings: Kwargs, kwargs: Kwargs, prompt: PromptColumns, served: int) -> Kwargs:
    """The arguments without their first `served` columns. A mask stays whole: it covers the cache, too."""
    if served == 0:
        return kwargs
    inputs = prompt.inputs
    shown = kwargs if OF_MEDIA.isdisjoint(kwargs) else narrow_media(model, kwargs, prompt.new, served)
    narrowed = {**shown, **without_router_logits(settings, kwargs)}
    narrowed["input_ids"] = _own(inputs.input_ids[:, served:])
    if inputs.position_ids is not None:
        narrowed["position_ids"] = _own(inputs.position_ids[..., served:])
    if inputs.attention_mask is None and "attention_mask" in kwargs:
        narrowed["attention_mask"] = None
    if kwargs.get("cache_position") is not None:
        narrowed["cache_position"] = kwargs["cache_position"][served:]
    return narrowed


def _whole(hidden: HiddenStates, shown: Shown, first: int) -> tuple[torch.Tensor | None, ...]:
    """The hidden states that a forward shows of new columns, with those of reused ones, from `first` on, in front."""
    found: list[torch.Tensor | None] = []
    for number, states in enumerate(shown.layers):
        layer = number if number in hidden.which else LAST
        found.append(_own(hidden.view(layer, first)).to(states.device) if states is not None else None)
    return tuple(found)


def _own(part: torch.Tensor) -> torch.Tensor:
    """A copy with the strides of its shape: a compiled forward has a graph for each stride that it sees."""
    return part.clone(memory_format=torch.contiguous_format)
