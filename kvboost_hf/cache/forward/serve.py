"""What a forward is given: the whole prompt, or what is left of it when all that can be reused has been put in place.

A forward over the columns [held, n) of a batch, as the hook sees it:

    plan      which columns can come from the store           plan.py, pure
    fill      [held, filled) is copied into the layers        fill.py
    cut       with states: [filled, cut) runs on its own      _run_to_cuts
    narrow    the model is given what is left                 _narrow
    forward   the unmodified model
    index     chunks that are now complete go to the store    held.py, ledger.py
"""

import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from kvboost_hf.cache.forward.audit import audit
from kvboost_hf.cache.forward.blending import BlendingCache
from kvboost_hf.cache.forward.fill import (
    compute_columns,
    fill_layers,
    needed_for,
    run_ahead,
    stored_chunk,
    with_loaded,
)
from kvboost_hf.cache.forward.held import CHANGED, Running
from kvboost_hf.cache.forward.loading import Loading, can_overlap
from kvboost_hf.cache.identity.foreign import holder_of_cache, hooks_registered
from kvboost_hf.cache.identity.model_state import ModelState
from kvboost_hf.cache.identity.walk import autocast
from kvboost_hf.cache.layers.base import Piece
from kvboost_hf.cache.live.compiled import StaticDecoding
from kvboost_hf.cache.live.ledger import Ledger
from kvboost_hf.cache.planning.chunks import Tokens
from kvboost_hf.cache.planning.plan import HEAD_TOKENS, ReusePlan, plan_batch
from kvboost_hf.cache.planning.report import Tally
from kvboost_hf.cache.prompt.generate_call import GenerateCall, encoded_from, in_generate
from kvboost_hf.cache.prompt.hook import Kwargs
from kvboost_hf.cache.prompt.inputs import (
    ForwardInputs,
    common_columns,
    positions_count_up,
    positions_follow_padding,
    read_inputs,
    read_pads,
    with_positions,
)
from kvboost_hf.cache.prompt.media import ENCODED, Prompt, has_types_of_media, narrow_media, payload, read_prompt
from kvboost_hf.cache.prompt.positions import counts_from_padding_id
from kvboost_hf.cache.prompt.token_log import MaskShape
from kvboost_hf.cache.store.chunk_store import StoredStates
from kvboost_hf.cache.store.compute_pace import ComputePace
from kvboost_hf.cache.store.costs import PIECE, Costs, pieces
from kvboost_hf.compat import (
    attention_kind,
    cache_argument,
    has_own_cache,
    padding_reason,
    probe_reason,
    rope_regime,
    steps_reason,
)
from kvboost_hf.errors import CacheModelMismatchError, InterruptedForwardError
from kvboost_hf.handles import ATTENTION

_NEVER = 2**62  # tokens that an extra forward must save
_CHANGED = "position_ids or the attention mask changed on the way"
_MASKED = (
    "on this CPU it takes less time to compute its few known tokens again than to make the attention mask that reuse "
    "needs (ReusePolicy(min_prefill_saving=0) reuses them all the same)"
)
_LENGTH = "its rotary frequencies depend on the length, and this is longer than what they were trained for"


class ServingCache(BlendingCache):
    """A cache that leaves out of each forward what it or its store holds already."""

    _call: GenerateCall | None = None  # the generate() call that has armed the cache
    _begins_anew = False  # the next forward brings a prompt, whatever the layers hold
    _hides_padding_only = True  # the mask of the last generate() call, if it went on from what the layers hold
    stores_prompts_whole = False  # nobody will tell when a call has ended: store all of a prompt at once
    in_own_loop = False  # whoever calls the model leaves it as it is between the tokens of a text, as generate() does

    def begin_anew(self) -> None:
        """Take the ids of the next forward for the start of a prompt, as generate() has it, not for what follows.

        What the layers hold of it is used, and the rest forgotten.
        """
        self._begins_anew = True

    # Before a forward

    def before_forward(self, model: PreTrainedModel, kwargs: Kwargs) -> Kwargs:
        """See `HookedCache`."""
        if self._static is not None and torch.compiler.is_compiling():
            self._static.tape.note(self._static_layers[0].length_tensor, kwargs)
            return kwargs
        if model is not self._model():
            raise CacheModelMismatchError(
                f"This ChunkReuseCache was made for another {type(self._model()).__name__} object than the "
                f"{type(model).__name__} that it was passed to. Make one for it: ChunkReuseCache(model)."
            )
        self._recover()
        self._hand_out(False)
        call, self._call = self._call, None
        armed = self._begins_anew or (call is not None and call.contains(sys._getframe()))
        self._begins_anew = False
        if self._lost and not armed:
            raise InterruptedForwardError(
                "The last forward with this ChunkReuseCache was interrupted, and the states that it held cannot be "
                "taken back, so that nothing can be continued. Call reset(), and pass the whole text."
            )
        held = self._held()
        if armed or not held:
            self._choose_layers(model)
            held = self._held()
        elif self._plain is None and not self._owns_layers:
            self._follow_others()
        if self._plain is not None:
            return self._run_plain(kwargs, self._plain, armed=armed)
        kwargs = with_positions(model, kwargs)
        if self._static is not None:
            return self._before_static(self._static, model, kwargs, held, armed=armed)
        inputs = read_inputs(model, kwargs)
        if held and not armed:
            return self._continue(model, kwargs, inputs, held)
        return self._begin(model, kwargs, inputs, armed=armed)

    def _before_static(
        self, static: StaticDecoding, model: PreTrainedModel, kwargs: Kwargs, held: int, *, armed: bool
    ) -> Kwargs:
        """The same for a cache of a fixed size, where generate() may have made a 4-D mask."""
        start = 0 if armed else held
        static.require_fits(kwargs, start)
        pads = self._ledger.log.pads if self._ledger is not None else None
        kwargs, seen = static.read_mask(kwargs, start, pads)
        inputs = read_inputs(model, seen)
        if start:
            kwargs = self._continue(model, kwargs, inputs, held)
        else:
            kwargs = self._begin(model, kwargs, inputs, armed=armed)
        step = start > 0 and not isinstance(inputs, str) and inputs.input_ids.shape[1] == 1
        static.open(self._static_layers, kwargs, step=step)
        return kwargs

    def _hand_out(self, allowed: bool) -> None:
        """Let layers give the attention K/V as it is held: if it can read that, and only padding is hidden."""
        for layer in self._layers:
            layer.hands_out = allowed

    def _run_plain(self, kwargs: Kwargs, reason: str, *, armed: bool) -> Kwargs:
        """Run a text that cannot reuse K/V on the layers that transformers would have given it."""
        if armed and self._used:
            self._drop()
        if not self._used:
            self._tally = Tally(bypass=reason)
            self._count_all(kwargs)
        self._used = True
        self._running = Running(0)
        model = self._model()
        if model is not None and has_own_cache(model):
            return {**kwargs, cache_argument(model): None}
        return kwargs

    def _begin(self, model: PreTrainedModel, kwargs: Kwargs, inputs: ForwardInputs | str, *, armed: bool) -> Kwargs:
        """A prompt starts at column 0: keep what the layers hold of it, and look for the rest."""
        self._tally = Tally()
        if isinstance(inputs, str):
            return self._bypass(kwargs, inputs)
        if self._static is not None and (reason := holder_of_cache(model)) is not None:
            return self._bypass(kwargs, reason)
        batch, columns = inputs.input_ids.shape
        pads = read_pads(inputs.attention_mask, batch, columns)
        if pads is None:
            return self._bypass(kwargs, "the attention mask hides more than padding on the left")
        if pads.any() and not positions_follow_padding(model, inputs):
            return self._bypass(kwargs, "there is padding but no position_ids, so that positions do not follow it")
        if not positions_count_up(inputs.position_ids, pads, 0):
            return self._bypass(kwargs, "position_ids do not count up from 0")
        if inputs.position_ids is None and counts_from_padding_id(model):
            return self._bypass(kwargs, "without position_ids, which generate() passes, it does not count from 0")
        if pads.any() and (reason := padding_reason(model)):
            return self._bypass(kwargs, reason)
        prompt = _read_prompt(model, inputs, kwargs, pads)
        if isinstance(prompt, str):
            return self._bypass(kwargs, prompt)
        ids = prompt.codes
        if batch > 1 and any(layer.single_row for layer in self._layers):
            return self._bypass(kwargs, "its cache has layers whose rows cannot be told apart; pass one row")
        regime = rope_regime(model, columns - int(pads.min()))
        if regime is None:
            return self._bypass(kwargs, _LENGTH)
        root = self._root(regime)
        if root is None:
            return self._bypass(kwargs, "a part of the model is in training mode (call model.eval())")
        fingerprint = ModelState.of(model).fingerprint
        if fingerprint.altered is not None:
            return self._bypass(kwargs, fingerprint.altered)
        if self._stateful and not pads.any():
            inputs = replace(inputs, attention_mask=None)  # it says nothing, and some models cannot take a part of it
        held = self._keep_common(prompt, pads, root, columns - inputs.logits)
        if self._changed:
            self._tally.dropped = CHANGED
        self._changed = False
        self._expect_padding(pads)
        ledger = self._ledger = self._ledger or Ledger.empty(pads, root)
        self._regime = regime
        candidates = inputs.logits - 1 if armed and not inputs.computes_all else 0
        self._tally.prompt = int((columns - candidates - pads).sum())
        self._tally.rows = np.maximum(held - pads, 0).tolist()
        self._tally.live = sum(self._tally.rows)
        self._tally.moved = ledger.blended.tainted_columns(held) if ledger.blended is not None else 0
        self._tally.forwarded = -candidates * batch
        self._tally.bypass = inputs.computes_all
        return self._serve(model, kwargs, inputs, ledger, ids, held, prompt)

    def _continue(self, model: PreTrainedModel, kwargs: Kwargs, inputs: ForwardInputs | str, held: int) -> Kwargs:
        """Ids follow what the layers hold: a decoding step, candidates to verify, or more of a prompt."""
        step = not isinstance(inputs, str) and inputs.input_ids.shape[1] == 1
        ledger = self._in_step(look=self._stateful or not step)
        if self._untracked and not isinstance(inputs, str) and inputs.input_ids.shape[1] == 1:
            self._running = Running(held, held + 1)
            return kwargs
        if isinstance(inputs, str) or ledger is None:
            return self._lose_track(kwargs, held, inputs if isinstance(inputs, str) else self._why_unknown())
        new = inputs.input_ids.shape[1]
        if rope_regime(model, held + new - int(ledger.log.pads.min())) != self._regime:
            return self._lose_track(kwargs, held, _LENGTH)
        if self.in_own_loop or in_generate():
            changed = self._hooks != hooks_registered() or self._precision != autocast()
            if changed and self._root(self._regime) != ledger.root:
                return self._lose_track(kwargs, held, "the model was changed after the beginning of the prompt")
        else:
            if self._root(self._regime) != ledger.root:
                return self._lose_track(kwargs, held, "the model was changed after the beginning of the prompt")
            if has_types_of_media(kwargs, new):
                return self._lose_track(kwargs, held, "types of images came after the beginning of the prompt")
        padded = bool(ledger.log.pads.any()) and self._counting is not None  # states have no more use for a mask
        if padded and (inputs.attention_mask is None or not positions_follow_padding(model, inputs)):
            return self._lose_track(kwargs, held, "the attention mask or position_ids of a padded batch are missing")
        if payload(kwargs):
            return self._lose_track(kwargs, held, "images, sound or video came after the beginning of the prompt")
        if ledger.unconfirmed:
            self._confirm(ledger)
        if new > inputs.logits:
            return self._extend(model, kwargs, inputs, ledger, held)
        if steps_reason(model) is not None:
            # What is kept of decoded tokens is not what a prompt would leave: let the store have what there is.
            self.store_tails()
            self._ledger, self._untracked = None, True
            self._running = Running(held, held + new)
            return kwargs
        mask = MaskShape.of(inputs.attention_mask) if inputs.attention_mask is not None else None
        # Any other mask may hide anything, and to read it would make a GPU wait.
        if mask is None or (in_generate() and self._hides_padding_only):
            self._hand_out(attention_kind(model) == ATTENTION)
        self._running = Running(
            held,
            held + new,
            commit=lambda: ledger.log.append(inputs.input_ids, inputs.position_ids, mask),
            confirmed=not inputs.verifies,
        )
        return kwargs

    def _why_unknown(self) -> str:
        return CHANGED if self._changed else "nothing is known of what the cache holds"

    def _extend(
        self, model: PreTrainedModel, kwargs: Kwargs, inputs: ForwardInputs, ledger: Ledger, held: int
    ) -> Kwargs:
        """More of a prompt, as with `prefill_chunk_size`."""
        batch, new = inputs.input_ids.shape
        pads = read_pads(inputs.attention_mask, batch, held + new)
        if pads is None or not _same_padding(ledger.log.pads, pads, held):
            return self._lose_track(kwargs, held, _CHANGED)
        if not (ledger.log.trusted and positions_count_up(inputs.position_ids, pads, held)):
            return self._lose_track(kwargs, held, _CHANGED)
        if self._root(self._regime) != ledger.root:
            return self._lose_track(kwargs, held, "the model was changed after the beginning of the prompt")
        if self._stateful and not pads.any():
            inputs = replace(inputs, attention_mask=None)
        ledger.log.pads = pads
        self._expect_padding(pads)
        if isinstance(prompt := _read_prompt(model, inputs, kwargs, pads - held), str) or prompt.media.any():
            return self._lose_track(kwargs, held, _CHANGED)
        self._tally.prompt += int((held + new - np.maximum(pads, held)).sum())
        ids = np.concatenate([ledger.log.columns(), prompt.codes], axis=1)
        return self._serve(model, kwargs, inputs, ledger, ids, held, prompt)

    def _serve(
        self,
        model: PreTrainedModel,
        kwargs: Kwargs,
        inputs: ForwardInputs,
        ledger: Ledger,
        ids: Tokens,
        held: int,
        prompt: Prompt,
    ) -> Kwargs:
        """Plan, fill and narrow: `ids` are all columns, of which the layers hold `held`; `prompt` are the new ones."""
        columns = ids.shape[1]
        limit = columns - inputs.logits
        # Rows computed ahead have a length of their own, and frequencies that depend on it would not be the batch's.
        min_saving = self.policy.min_prefill_saving if not self._regime else columns * len(ids)
        plan = self._plan(model, inputs, ledger, ids, held, limit, min_saving, prompt)
        cuts = self._cuts(plan, ledger, ids, limit, prompt)
        first = columns - inputs.input_ids.shape[1]  # column of the first id that the caller passed
        media = prompt.media.any()
        if (blended := self._blend(model, kwargs, inputs, ledger, ids, held, plan, media=bool(media))) is not None:
            return blended
        if media:
            plan, cuts = _whole_media(plan, cuts, prompt, limit)
        elif not self._stateful:
            if not first and self._costs_more(model, plan, inputs, ledger):
                plan, ledger = self._give_up(plan, ledger, columns)
                held = 0
            cuts = self._pieces(model, plan, inputs, limit)
        if (plan.filled > first or cuts) and (reason := probe_reason(model)):
            if first:  # earlier pieces of the prompt are in the layers, and must stay
                return self._lose_track(kwargs, held, reason)
            return self._bypass(kwargs, reason)
        self._hand_out(attention_kind(model) == ATTENTION)
        self._running = Running(held)
        loading = None
        if plan.filled > held:
            if self._may_overlap(model, plan, inputs, limit, prompt):
                loading = self._load_meanwhile(model, plan, inputs, first)
                self._running = Running(held, loading=loading)  # before it starts: an interrupt has to stop it
                loading.start()
            else:
                self._tally.forwarded += fill_layers(model, self._layers, plan, inputs, first)
        self._take_over(plan, ledger, ids)
        self._tally.forwarded += int((columns - np.maximum(plan.filled, ledger.log.pads)).sum())
        start = self._run_to_cuts(model, inputs, ledger, ids, plan.filled, cuts, first)
        rest = ids[:, start:]
        reused = plan.filled > first == 0
        audited = reused and self.store.audit_is_due(self.policy.audit_rate)
        hooked = reused and bool(ModelState.of(model).fingerprint.watched)
        self._running = Running(
            start,
            columns,
            commit=lambda: ledger.log.extend(rest),
            confirmed=not inputs.verifies or self.stores_prompts_whole,
            root_checked=True,
            loading=loading,
            began=time.perf_counter() if inputs.input_ids.device.type == "cpu" and loading is None else None,
            audited=kwargs if audited or hooked else None,
            audit_if_altered=hooked and not audited,
        )
        return _narrow(model, kwargs, inputs, prompt, start - first)

    def _plan(
        self,
        model: PreTrainedModel,
        inputs: ForwardInputs,
        ledger: Ledger,
        ids: Tokens,
        held: int,
        limit: int,
        min_saving: int,
        prompt: Prompt,
    ) -> ReusePlan:
        """What serves the columns [held, limit), all of it loaded."""
        lost: frozenset[bytes] = frozenset()
        while True:
            plan = ledger.plan(ids, held, limit, self.store, min_saving, stateful=self._stateful, without=lost)
            wanted = needed_for(plan)
            fetched = self.store.fetch(wanted, check=not self._may_overlap(model, plan, inputs, limit, prompt))
            if all(fetched.get(each.key) is each for each in wanted):  # nothing had to be loaded
                return plan
            if fetched.keys() >= {each.key for each in wanted}:
                return with_loaded(plan, fetched)
            lost |= {each.key for each in wanted if each.key not in fetched}

    def _may_overlap(
        self, model: PreTrainedModel, plan: ReusePlan, inputs: ForwardInputs, limit: int, prompt: Prompt
    ) -> bool:
        """Whether K/V may still be loading while the model computes.

        Damage that is only found then takes a forward in the middle of a forward, which not every model can take.
        """
        return (
            self.policy.mode == "exact"
            and not prompt.media.any()  # where images are cut, the plan is not yet the last one
            and self._static is None
            and can_overlap(self._layers, plan)
            and "forward" not in model.__dict__
            and "_compiled_call_impl" not in model.__dict__
            and not any("_hf_hook" in module.__dict__ for module in model.modules())  # whose weights come and go
            and not self._pieces(model, plan, inputs, limit)
        )

    def _load_meanwhile(self, model: PreTrainedModel, plan: ReusePlan, inputs: ForwardInputs, first: int) -> Loading:
        served, rows = dict(self._tally.tiers), list(self._tally.rows)

        def compute() -> list[list[Piece]]:
            self._tally.tiers, self._tally.rows = served, rows
            self._tally.forwarded += sum(plan.filled - max(plan.held, pad) for pad in plan.pads)
            return compute_columns(model, self._layers, plan, inputs, first)

        return Loading(self._layers, plan, compute, self.store.lose)

    def _cuts(self, plan: ReusePlan, ledger: Ledger, ids: Tokens, limit: int, prompt: Prompt) -> list[int]:
        """Columns at which states are worth keeping: the last chunk border, where prompts part, the first image."""
        if not self._stateful or self._regime or limit <= plan.filled:
            return []
        border = ledger.last_border(limit, self.store, ids)
        wanted = {border} if border - plan.filled >= self.store.chunker.chunk_size // 2 else set()
        if plan.branch is not None:
            wanted.add(plan.branch)
        if prompt.media.any():  # a whole prompt, as media only come with one
            wanted.add(int(prompt.media.any(axis=0).argmax()))
        return sorted(cut for cut in wanted if max(plan.filled, *plan.pads) < cut <= limit)

    def _pieces(self, model: PreTrainedModel, plan: ReusePlan, inputs: ForwardInputs, limit: int) -> list[int]:
        """Columns at which to begin a new forward, where attention needs a mask behind what is reused."""
        return pieces(plan.filled, limit) if plan.filled and self._adds_mask(model, plan, inputs) else []

    def _adds_mask(self, model: PreTrainedModel, plan: ReusePlan, inputs: ForwardInputs) -> bool:
        """Whether attention needs a mask only because something is reused; on a CPU: elsewhere it is not measured."""
        if any(plan.pads) or self._regime or self._static is not None:
            return False  # padding needs a mask in any case
        return inputs.input_ids.device.type == "cpu" and attention_kind(model) == "sdpa"

    def _costs_more(self, model: PreTrainedModel, plan: ReusePlan, inputs: ForwardInputs, ledger: Ledger) -> bool:
        """Whether to compute a whole prompt is quicker than what is left of it behind a short beginning.

        What somebody has pinned is always reused.
        """
        if not plan.filled or not self.policy.min_prefill_saving or not self._adds_mask(model, plan, inputs):
            return False
        columns = inputs.input_ids.shape[1]
        if columns - plan.filled < PIECE or any(layer.is_sliding for layer in self._layers):  # a mask in any case
            return False
        costs = Costs.of(model)
        if costs.behind(plan.filled, columns) < costs.whole(columns):
            return False
        segments = [stored_chunk(segment).key for row in plan.rows for segment in row.segments]
        return not self.store.has_pinned([*segments, *(border.key for row in ledger.borders for border in row)])

    def _give_up(self, plan: ReusePlan, ledger: Ledger, columns: int) -> tuple[ReusePlan, Ledger]:
        """Reuse nothing of a prompt after all: an empty plan, and the ledger of empty layers."""
        self._tally.bypass = _MASKED
        self._tally.live = self._tally.moved = 0
        self._tally.rows = [0] * len(plan.rows)
        self._fetched.clear()
        self._drop()
        self._ledger = ledger = Ledger.empty(ledger.log.pads, ledger.root)
        nothing = [replace(row, hit=0, segments=(), borders=(), miss=None) for row in plan.rows]
        return plan_batch(nothing, plan.pads, 0, columns, _NEVER), ledger

    def _run_to_cuts(
        self,
        model: PreTrainedModel,
        inputs: ForwardInputs,
        ledger: Ledger,
        ids: Tokens,
        start: int,
        cuts: list[int],
        first: int,
    ) -> int:
        """Compute up to each cut, and keep states there; returns the column that is left to start from."""
        for cut in cuts:
            self._running = Running(start)
            run_ahead(model, self._layers, inputs, range(len(ids)), slice(start, cut), first)
            ledger.log.extend(ids[:, start:cut])
            self._note_layers(ledger)
            self._columns = start = cut
            if self._stateful and self.store.usable:
                self._store_new(ledger)
                for row in range(len(ids)):
                    ledger.store_states(row, self._layers, self.store)
        return start

    def _take_over(self, plan: ReusePlan, ledger: Ledger, ids: Tokens) -> None:
        """Record what was filled, and where and why the store could give no more."""
        ledger.log.extend(ids[:, plan.held : plan.filled])
        self._note_layers(ledger)
        self._columns = plan.filled
        for row, (row_plan, pad) in enumerate(zip(plan.rows, plan.pads, strict=True)):
            stop = plan.filled - pad
            ledger.borders[row] += [border for border in row_plan.borders if border.at <= stop]
            reach = plan.starts(row) - pad  # what follows up to `stop` was computed ahead
            served = [segment for segment in row_plan.segments if segment.start < reach]
            for segment in served:
                tokens = min(segment.stop, reach) - segment.start
                self._tally.count(stored_chunk(segment).tier, tokens)
                self._tally.rows[row] += tokens
            chunks = [stored_chunk(segment) for segment in served]
            saved = (row_plan.states or {}).get(stop)
            states = saved if isinstance(saved, StoredStates) else None
            self.store.record_use(chunks, missed=row_plan.miss is not None, states=states)
            self._fetched += [*chunks, *([states] if states is not None else [])]
            self._note_miss(ledger, row, ids[row, pad:], row_plan)

    def _bypass(self, kwargs: Kwargs, reason: str) -> Kwargs:
        """Run a prompt as it stands, on empty layers that nothing is known of."""
        self.store_tails()
        self._drop()
        self._tally.bypass = reason
        self._count_all(kwargs)
        self._running = Running(0, _new_columns(kwargs))
        if kwargs.get("use_cache") is False:
            # generate() passes its cache even where it is not to be used, and then the whole sequence at each step.
            model = self._model()
            assert model is not None
            return {**kwargs, cache_argument(model): None}
        return kwargs

    def _count_all(self, kwargs: Kwargs) -> None:
        ids = kwargs.get("input_ids")
        if isinstance(ids, torch.Tensor) and ids.ndim == 2:
            self._tally.prompt = self._tally.forwarded = ids.numel()

    def _lose_track(self, kwargs: Kwargs, held: int, reason: str) -> Kwargs:
        """Run what follows as it stands; nothing more is known of what the layers hold."""
        self._ledger = None
        ids = kwargs.get("input_ids")
        more = isinstance(ids, torch.Tensor) and ids.ndim == 2 and ids.shape[1] > 1
        if more or not self._tally.live + self._tally.stored:  # else it is of no concern to the prompt
            self._tally.bypass = self._tally.bypass or reason
        if isinstance(ids, torch.Tensor) and more:
            self._tally.prompt += ids.numel()
            self._tally.forwarded += ids.numel()
        self._running = Running(held, held + _new_columns(kwargs))
        return kwargs

    def _keep_common(self, prompt: Prompt, pads: NDArray[np.int64], root: bytes, limit: int) -> int:
        """Rewind the layers to the columns that the new prompt shares with them; returns how many those are."""
        ledger = self._in_step()
        if ledger is not None and ledger.unconfirmed:
            self._confirm(ledger)
        usable = ledger is not None and ledger.root == root and ledger.log.trusted
        if ledger is None or not usable or not np.array_equal(ledger.log.pads, pads):
            self.store_tails()
            self._drop()
            return 0
        held = prompt.cut(min(common_columns(ledger.log.columns(), prompt.codes), max(limit, 0)))
        if held <= int(pads.max()):  # some row keeps nothing
            held = 0
        if held < ledger.log.length and not all(layer.can_rewind(held) for layer in self._layers):
            self.store_tails()  # the store has what is needed to go back
            self._drop()
            return 0
        if ledger.log.length - held >= HEAD_TOKENS:
            self._store_tails(ledger, held)
        self._truncate(held)
        ledger.rewind(held)
        self._note_layers(ledger)
        return held

    # After a forward

    def after_forward(self, output: Any) -> Any:
        """See `HookedCache`."""
        running, ledger = self._running, self._ledger
        if running is None:  # after a compiled step
            return None
        self._hand_out(False)  # other forwards may be run on the layers, in a stock cache
        if self._static is not None:
            self._static.close(self._static_layers)
        if running.scatter is not None:
            running.scatter.close()
        if running.loading is not None:
            running.loading.finish()
        self._columns = running.stop
        if running.began is not None and (model := self._model()) is not None:
            rows = ledger.log.batch_size if ledger is not None else 1
            tokens = rows * (running.stop - running.length)
            ComputePace.of(model).observe(tokens, time.perf_counter() - running.began)
        changed = None
        if running.commit is not None and ledger is not None:
            running.commit()
            if running.audited is not None and (not running.audit_if_altered or self._altered()):
                changed = self._audit(ledger, running, running.audited, output)
            self._note_layers(ledger)
            ledger.unconfirmed = not running.confirmed
            if self._hooks != hooks_registered():
                self._ledger = ledger = None  # somebody has put a hook somewhere in the course of the forward
            elif (altered := self._altered()) is not None:
                self._tally.bypass = self._tally.bypass or altered
        self._running = None  # only now: an interrupt before this undoes the forward
        fetched, self._fetched = self._fetched, []
        if changed is None and (running.loading is None or not running.loading.computed):  # it has served well
            self.store.promote(fetched)
        if running.commit is None or ledger is None:
            self._release(running.stop)
        elif running.confirmed:
            if running.loading is not None and running.loading.computed:
                self._store_again(ledger)
            self._confirm(ledger, root_checked=running.root_checked)
            if self.stores_prompts_whole and running.root_checked:
                self.store_tails()
        return changed

    def _altered(self) -> str | None:
        model = self._model()
        return ModelState.of(model).fingerprint.altered if model is not None else None

    def _store_again(self, ledger: Ledger) -> None:
        """Offer all chunks to the store: what was computed takes the place of what was wrong."""
        if self._may_store(ledger):
            for row in range(ledger.log.batch_size):
                ledger.store_row(row, self._layers, self.store, again=True)

    def _audit(self, ledger: Ledger, running: Running, kwargs: Kwargs, output: Any) -> Any:
        """Compute the prompt a second time; returns the output to give in place of `output`, if it was wrong."""
        model = self._model()
        assert model is not None
        logits = output["logits"] if isinstance(output, ModelOutput) else output[0]
        found = audit(model, self._layers, ledger, self.store, kwargs, logits)
        self._tally.audit_tokens, self._tally.audit_divergence = found.tokens, found.divergence
        if found.logits is None:
            return None
        if running.confirmed:
            self._store_again(ledger)
        if isinstance(output, ModelOutput):
            output["logits"] = found.logits
            return output
        return (found.logits, *output[1:])


def _new_columns(kwargs: Kwargs) -> int:
    given = kwargs.get("input_ids")
    given = kwargs.get("inputs_embeds") if given is None else given
    return int(given.shape[1]) if isinstance(given, torch.Tensor) and given.ndim > 1 else 0


def _same_padding(before: NDArray[np.int64], now: NDArray[np.int64], held: int) -> bool:
    """Whether the padding of each row is what it was; rows that were all padding so far may have more of it."""
    return bool(((now == before) | ((before == held) & (now >= held))).all())


def _read_prompt(
    model: PreTrainedModel, inputs: ForwardInputs, kwargs: Kwargs, pads: NDArray[np.int64]
) -> Prompt | str:
    ids = inputs.input_ids.cpu().numpy().astype(np.int64, copy=False)
    positions = inputs.position_ids
    found = positions.cpu().numpy() if positions is not None and positions.ndim > 2 else None
    source = encoded_from(kwargs.get(ENCODED)) or kwargs
    return read_prompt(model, ids, found, pads, kwargs, source)


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


def _narrow(model: PreTrainedModel, kwargs: Kwargs, inputs: ForwardInputs, prompt: Prompt, served: int) -> Kwargs:
    """The arguments without their first `served` columns. A mask stays whole: it covers the cache, too."""
    if served == 0:
        return kwargs
    narrowed = {**narrow_media(model, kwargs, prompt, served), "input_ids": _own(inputs.input_ids[:, served:])}
    if inputs.position_ids is not None:
        narrowed["position_ids"] = _own(inputs.position_ids[..., served:])
    if inputs.attention_mask is None and "attention_mask" in kwargs:
        narrowed["attention_mask"] = None
    if kwargs.get("cache_position") is not None:
        narrowed["cache_position"] = kwargs["cache_position"][served:]
    return narrowed


def _own(part: torch.Tensor) -> torch.Tensor:
    """A copy with the strides of its shape: a compiled forward has a graph for each stride that it sees."""
    return part.clone(memory_format=torch.contiguous_format)
