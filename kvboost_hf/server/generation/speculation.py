"""Several tokens of an answer in one forward: drafted by a model or heads, looked up, or expected by its client."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from kvboost_hf.assisted.branches import Branches
from kvboost_hf.assisted.chains import Chain, continuing, drafting_reason, keeps_states
from kvboost_hf.assisted.columns import Account, PassTimes
from kvboost_hf.assisted.heads import DraftedAnswer, Heads, share_of
from kvboost_hf.assisted.hidden import TextStates
from kvboost_hf.assisted.limits import fitted
from kvboost_hf.assisted.lookup import LookupAssistant, LookupDraft, TextStore
from kvboost_hf.assisted.rounds import Drafter, ModelSource, Rounds, Taken, TreeDraft, follow
from kvboost_hf.assisted.tree import ROOT, Tree
from kvboost_hf.cache.reuse import ChunkReuseCache
from kvboost_hf.compat import input_device, steps_reason
from kvboost_hf.config import DraftTreeConfig, KVQuantConfig, ReusePolicy
from kvboost_hf.ngrams import MAX_NGRAM, longest_match
from kvboost_hf.server.generation.answer import Sampler
from kvboost_hf.server.jobs import FinishReason, Job, TokenLogprob

_log = logging.getLogger("kvboost_hf.server")
Add = Callable[[int, TokenLogprob | None], FinishReason | None]  # tells of a token, and why the text ends with it
_AHEAD = 64  # tokens that the draft model has positions for besides, at least, where it has not for the whole answer
_FIRST, _LEAST, _MOST = 16, 4, 48  # tokens of a draft
_RISKED = 4.0  # passes of a batch that drafts may cost at once


class Drafts:
    """The draft model of an engine, and the statistics of all rounds.

    Args:
        model: Checks the drafts.
        draft: A smaller model with the same vocabulary, heads that `load_assistant` has prepared for the model, or a
            `LookupAssistant`.
        config: How large trees are.

    Raises:
        ValueError: for a draft of another vocabulary or model, or that cannot compute drafted tokens in one forward.
    """

    def __init__(self, model: PreTrainedModel, draft: PreTrainedModel, config: DraftTreeConfig) -> None:
        self._heads = Heads.known(draft)
        if self._heads is not None:
            self._heads.require_target(model)
        elif not isinstance(draft, LookupAssistant):
            draft = fitted(draft, model, name="the model")
            if (reason := drafting_reason(draft)) is not None:
                raise ValueError(
                    f"`draft` must be able to compute trees of tokens, got a {type(draft).__name__}: {reason}. Choose "
                    "another one, or none."
                )
        self.model, self.draft, self.config = model, draft, config
        self.rounds, self.device = Rounds(config), input_device(model)
        config_of: Any = draft.config.get_text_config(decoder=True)
        positions = getattr(config_of, "max_position_embeddings", None)
        self._positions: int | None = positions if self._heads is None else None
        self._failed = False
        self._shared_tokens = 0
        self._times, self._accounts = PassTimes(), dict[int, Account]()

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        lending_reason: str | None,
        draft: PreTrainedModel,
        config: DraftTreeConfig | None,
        policy: ReusePolicy,
    ) -> "Drafts | None":
        """Drafts for a model; None and a warning where it, or its caches (`lending_reason`), cannot check them.

        A `policy` that keeps no hidden states has nothing for heads to read.
        """
        if (reason := checking_reason(model, lending_reason)) is not None:
            _log.warning("No drafts: a %s cannot check them, for %s.", type(model).__name__, reason)
            return None
        heads = Heads.known(draft)
        if heads is not None and heads.keeps and not policy.keep_hidden_states:
            _log.warning(
                "No drafts: a %s reads hidden states, and the server keeps none with mode 'blend', `live_quant`, or a "
                "model that cannot give them.",
                type(draft).__name__,
            )
            return None
        return cls(model, draft, config if config is not None else DraftTreeConfig())

    def states(self) -> TextStates | None:
        """What takes the hidden states of one answer's text; None if the draft reads none."""
        states = self._heads.states() if self._heads is not None else ""
        return states if not isinstance(states, str) else None

    def drafting(self, job: Job, sampler: Sampler, store: TextStore, states: TextStates | None) -> Drafter:
        """The drafts of one answer. Of the text in a store, a job sees that of its salt."""
        growth, ends = self.rounds.growth, job.ends
        if self._heads is not None and states is not None:
            return self._heads.drafting(
                DraftedAnswer(states=states, growth=growth, config=self.config, processors=sampler.warpers, ends=ends)
            )
        if isinstance(self.draft, LookupAssistant):
            return LookupDraft(self.draft.searching(store, job.salt), growth, ends)
        chains = keeps_states(self.model)
        source = ModelSource(self.draft, share_of(self.draft, self.model))
        return TreeDraft(source, self.config, growth, sampler.warpers, ends, chains=chains)

    @property
    def last(self) -> tuple[int, ...]:
        """The layers whose hidden states the draft reads of the last token of a text only."""
        states = self.states()
        return states.layers if states is not None and not states.whole else ()

    def account(self, rows: int) -> Account:
        """What passes over so many rows take with drafts and without."""
        if rows not in self._accounts:
            self._accounts[rows] = Account(self._times, rows, _AHEAD, most_passes=_RISKED)
        return self._accounts[rows]

    def take(self, job: Job, said: int) -> bool:
        """Whether to draft behind the first `said` tokens of a job's answer.

        There are no drafts for a job with a constraint, which would have to check each of them, nor for a text that
        the draft model has too few positions for: a failure of the draft model would end drafting for all.
        """
        longest = min(job.longest, len(job.ids) + said + max(self.config.depth, _AHEAD))
        fits = self._positions is None or longest <= self._positions
        return fits and not self._failed and job.options.constraint is None

    def give_up(self, error: BaseException) -> None:
        """Stop drafting, since the draft model has failed."""
        self._failed = True
        _log.error("The draft model has failed: answers go on without drafts, until a restart.", exc_info=error)

    def note_shared(self, tokens: int) -> None:
        """Count tokens of a step that several requests have shared, which has no drafts."""
        self._shared_tokens += tokens

    @property
    def figures(self) -> dict[str, float]:
        """Figures of all rounds so far."""
        stats = self.rounds.stats
        return {
            "rounds": stats.rounds,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "committed_per_round": stats.committed_per_round,
            "plain": stats.plain,
            "shared_tokens": self._shared_tokens,
        }


class AnswerDrafts:
    """The `Drafter` of one answer, with the draft model's K/V. If that model fails, nobody drafts any more."""

    def __init__(self, drafts: Drafts, job: Job, sampler: Sampler, store: TextStore) -> None:
        self._drafts, self._job, self._sampler, self._states = drafts, job, sampler, drafts.states()
        self._drafting = drafts.drafting(job, sampler, store, self._states)
        self.passes, self.share = 0, self._drafting.share

    def run(self, cache: ChunkReuseCache, ids: Sequence[int], add: Add) -> FinishReason | None:
        """Run one round, which adds the drafts that are right and one more token.

        The cache holds prompt and answer except the last token. Returns why the text ends; None if it goes on.
        """
        choosing = Choosing(self._sampler, add)
        text = torch.tensor([[*self._job.ids, *ids]], device=self._drafts.device)
        room = self._job.options.max_tokens - len(ids)
        states = self._states
        if states is not None and states.whole and states.stop < text.shape[1] - 1:  # of the prompt, or of a batch
            states.append(cache.loans.read_hidden(states.layers, states.stop) or {})
            states.cache = cache
        branches = branches_of(self._drafts.model, cache, text.shape[1], text.device, states)
        self._drafts.rounds.run(branches, self, text, room, choosing.take)
        cache.stop_recording()
        return choosing.reason

    def cost(self, said: int) -> tuple[float, int]:
        """What a draft behind the first `said` tokens of the answer is expected to take: see `Account.may_draft`."""
        return self.share, self.behind(len(self._job.ids) + said)

    def chain(self, ids: Sequence[int], show: Callable[[TextStates], None]) -> Tree:
        """A chain behind the answer so far, for a pass over several answers. `show` has heads see what they read."""
        room = self._job.options.max_tokens - len(ids) - 1  # the last token is the model's
        if room <= 0:
            return Tree()
        try:
            if self._states is not None:
                show(self._states)
        except Exception as error:  # of the caches that heads read
            self._drafts.give_up(error)
            return Tree()
        return self.grow(torch.tensor([[*self._job.ids, *ids]]), room, chain=True)

    def behind(self, length: int) -> int:
        """As `Drafter.behind`."""
        return self._drafting.behind(length)

    def grow(self, ids: torch.Tensor, room: int, *, chain: bool = False) -> Tree:
        """As `Drafter.grow`."""
        try:
            tree = self._drafting.grow(ids, room, chain=chain)
        except Exception as error:
            self._drafts.give_up(error)
            return Tree()
        self.passes = self._drafting.passes
        return tree

    def keep(self, path: Sequence[int]) -> None:
        """As `Drafter.keep`: take note of the tokens of the last tree that are in the answer now."""
        try:
            self._drafting.keep(path)
        except Exception as error:
            self._drafts.give_up(error)


class RowDrafts:
    """A step of several answers, of which some may have drafts.

    `texts` has the drafting of each answer, None for those that get no drafts; `show` has heads see what they read.
    """

    def __init__(
        self, drafts: Drafts, texts: Sequence[AnswerDrafts | None], show: Callable[[int, TextStates], None]
    ) -> None:
        self._drafts, self._texts, self._show = drafts, texts, show
        self._account, self._clock = drafts.account(len(texts)), drafts.rounds.clock
        self._trees: list[Tree] = []
        self._behind: list[int] = []  # tokens that drafts take in
        self._began = self._drafted = self._clock()

    def draft(self, ids: Sequence[Sequence[int]]) -> list[Tree]:
        """A chain for each answer, as long as brings most tokens a second; all empty where that is without drafts."""
        self._began = self._clock()
        fixed = self._drafts.config.policy == "tree"
        chosen = self._chosen(ids, everybody=fixed)
        if chosen:
            self._trees = [
                text.chain(said, partial(self._show, place)) if text is not None and place in chosen else Tree()
                for place, (text, said) in enumerate(zip(self._texts, ids, strict=True))
            ]
        chains = [tree.chances for tree in self._trees]
        count = min(max(map(len, chains), default=0), self._drafts.config.max_nodes) if fixed else 0
        if any(chains) and not fixed:
            count = self._account.columns(chains, [0] * len(chains))
        self._drafted = self._clock()
        return [tree.part(tree.likeliest(count)) for tree in self._trees] or [Tree() for _ in self._texts]

    def _chosen(self, ids: Sequence[Sequence[int]], *, everybody: bool) -> set[int]:
        """The places of the answers to draft for: as many as there is time for, those with least to take in first."""
        costs = {
            place: text.cost(len(said))
            for place, (text, said) in enumerate(zip(self._texts, ids, strict=True))
            if text is not None
        }
        order = sorted(costs, key=lambda place: costs[place][1])
        while order and not everybody and not self._account.may_draft([costs[place] for place in order]):
            order.pop()
        self._behind = [costs[place][1] for place in order]
        return set(order)

    def note(
        self,
        checked: Sequence[Tree],
        taken: Sequence[Taken | None],
        said: Sequence[Sequence[int]],
        *,
        timed: bool = True,
    ) -> None:
        """Count the step, and learn from it.

        Args:
            checked: The chains that were checked.
            taken: The outcome for each answer; None for one that has failed.
            said: The tokens that each answer has got.
            timed: Whether nothing else was done in the step, such as storing an answer that has ended.
        """
        stats, growth = self._drafts.rounds.stats, self._drafts.rounds.growth
        for tree, found in zip(checked, taken, strict=True):
            if len(tree) and found is not None:
                stats.add_round(len(tree), len(found.path), found.committed, (0.0, 0.0, 0.0))
        for tree, tokens in zip(self._trees, said, strict=False):
            if len(tree):
                growth.compare(tree, tokens)
        for text, tree, found in zip(self._texts, checked, taken, strict=True):
            if text is not None and len(tree) and found is not None:
                text.keep(found.kept)
        columns = max(map(len, checked))
        if not columns:
            self._drafts.note_shared(len(checked))
        forward = sum(map(len, said)) / len(said)
        draft_s = self._drafted - self._began if self._trees else 0.0
        if timed:
            pass_s = self._clock() - self._drafted
            self._account.note(columns + 1 if columns else 0, forward, draft_s, pass_s, self._behind)


class Choosing:
    """Follows a tree of drafts with the tokens that a sampler chooses.

    Attributes:
        reason: Why the answer has ended; None if it goes on.
    """

    def __init__(self, sampler: Sampler, add: Add) -> None:
        self.reason: FinishReason | None = None
        self._sampler, self._add = sampler, add

    def take(self, tree: Tree, logits: torch.Tensor) -> Taken:
        """Accept tokens of a tree, by logits [1 + tokens, vocab_size] behind the text and behind each of them."""
        greedy = logits.argmax(-1).tolist() if self._sampler.plain else None  # the device is waited for once

        def choose(at: int) -> tuple[int, bool]:
            if greedy is not None:
                token, logprob = self._sampler.take([greedy[at + 1]])
            else:
                token, logprob = self._sampler.choose(logits[at + 1])
            self.reason = self._add(token, logprob)
            return token, self.reason is not None

        return follow(tree, choose)


def checking_reason(model: PreTrainedModel, lending_reason: str | None) -> str | None:
    """Why a model with such caches cannot check drafts; None if it can. Layers with states need not be lent.

    What a check has left to compute again may come with a single token, which must not make a difference.
    """
    if keeps_states(model):
        return drafting_reason(model) or steps_reason(model)
    return lending_reason or drafting_reason(model)


def branches_of(
    model: PreTrainedModel,
    cache: ChunkReuseCache,
    length: int,
    device: torch.device,
    states: TextStates | None = None,
) -> Branches | Chain:
    """Branches behind a text of `length` tokens, of which the cache holds all but the last one.

    `states` takes the hidden states of those that are kept.
    """
    held: Any = cache
    held.activate_past_recording()  # or layers with a window, or with states, could not forget
    return continuing(model, cache, torch.tensor([[length - 1]], device=device), states=states)


def keeping_states(
    policy: ReusePolicy, draft: PreTrainedModel | None, live_quant: KVQuantConfig | None
) -> ReusePolicy:
    """The policy that keeps the hidden states that a draft reads, of all texts; as it is where that cannot be."""
    heads = Heads.known(draft)
    kept = policy.keep_hidden_states
    if heads is None or not heads.keeps or live_quant is not None or policy.mode == "blend" or kept is True:
        return policy
    if kept is False:
        raise ValueError(
            "`keep_hidden_states` must not be False with heads as drafts, which read hidden states. Leave it out."
        )
    if isinstance(layers := heads.keeps, str):
        return policy
    before = () if kept is None else (kept,) if isinstance(kept, int) else kept
    return replace(policy, keep_hidden_states=tuple(dict.fromkeys((*before, *layers))))


class PredictedText:
    """Drafts of one answer from the text that its client has predicted.

    Attributes:
        drafted: Tokens of the prediction that were checked so far.
        accepted: How many of these tokens are in the answer.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device, job: Job, sampler: Sampler) -> None:
        self.drafted = self.accepted = 0
        self._model, self._device, self._job, self._sampler = model, device, job, sampler
        self._text = np.array(job.prediction, dtype=np.int64)
        self._at = 0  # of the prediction, where the answer has come to
        self._length = _FIRST

    def draft(self, ids: Sequence[int]) -> list[int]:
        """The tokens of the prediction behind what the answer ends with; none where it has left the prediction."""
        room = self._job.options.max_tokens - len(ids) - 1  # the last token is the model's
        said = np.array(ids[-MAX_NGRAM:], dtype=np.int64)
        places, _ = longest_match(self._text, np.flatnonzero(self._text == said[-1]) + 1, said, MAX_NGRAM)
        if not len(places) or room < 1:
            return []
        behind = places[places > self._at]
        self._at = int(behind[0] if len(behind) else places[-1])
        return [int(token) for token in self._text[self._at : self._at + min(self._length, room)]]

    def run(self, cache: ChunkReuseCache, ids: Sequence[int], draft: Sequence[int], add: Add) -> FinishReason | None:
        """Check a draft in one forward, which adds the tokens that are right and one more; see `AnswerDrafts.run`."""
        tree, parent = Tree(), ROOT
        for token in draft:
            parent = tree.add(token, parent)
        branches = branches_of(self._model, cache, len(self._job.ids) + len(ids), self._device)
        logits = branches.forward([[ids[-1], *tree.tokens]], [range(-1, len(tree))])[0]
        choosing = Choosing(self._sampler, add)
        taken = choosing.take(tree, logits)
        branches.keep([[0, *(node + 1 for node in taken.kept)]])
        cache.stop_recording()
        right = len(taken.path)
        self.drafted, self.accepted, self._at = self.drafted + len(tree), self.accepted + right, self._at + right
        self._length = min(2 * self._length, _MOST) if right == len(tree) else max(right, _LEAST)
        return choosing.reason
