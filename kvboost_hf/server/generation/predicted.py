"""Predicted outputs: an answer that runs alone is checked against a text that its client expects."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from kvboost_hf.assisted.branches import Branches
from kvboost_hf.assisted.rounds import Taken, follow
from kvboost_hf.assisted.tree import ROOT, Tree
from kvboost_hf.cache.reuse import ChunkReuseCache
from kvboost_hf.ngrams import MAX_NGRAM, longest_match
from kvboost_hf.server.generation.sampling import Sampler
from kvboost_hf.server.jobs import FinishReason, Job, TokenLogprob

Add = Callable[[int, TokenLogprob | None], FinishReason | None]  # tells of a token, and why the text ends with it

_FIRST, _LEAST, _MOST = 16, 4, 48  # tokens of a draft


class Choosing:
    """Follows a tree of drafts with the tokens that a sampler chooses.

    Args:
        sampler: Chooses the tokens of the answer.
        add: Called with each token, one after the other.

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


def branches_of(model: PreTrainedModel, cache: ChunkReuseCache, length: int, device: torch.device) -> Branches:
    """Branches behind a text of `length` tokens, of which the cache holds all but the last one."""
    held: Any = cache
    held.activate_past_recording()  # or layers with a window could not forget
    return Branches(model, cache, torch.tensor([[length - 1]], device=device))


class PredictedText:
    """Drafts of one answer from the text that its client has predicted.

    Args:
        model: The model.
        device: Of its inputs.
        job: The job of the answer, with a prediction.
        sampler: Chooses its tokens.

    Attributes:
        drafted: Tokens of the prediction that were checked so far.
        accepted: Those of them that are in the answer.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device, job: Job, sampler: Sampler) -> None:
        self.drafted = self.accepted = 0
        self._model, self._device, self._job, self._sampler = model, device, job, sampler
        self._text = np.array(job.prediction, dtype=np.int64)
        self._at = 0  # of the prediction, where the answer has come to
        self._length = _FIRST

    def draft(self, ids: Sequence[int]) -> list[int]:
        """The tokens of the prediction behind what the answer ends with; none where it has left the prediction.

        Args:
            ids: Of the answer; one at least.
        """
        room = self._job.options.max_tokens - len(ids) - 1  # the last token is the model's
        said = np.array(ids[-MAX_NGRAM:], dtype=np.int64)
        places, _ = longest_match(self._text, np.flatnonzero(self._text == said[-1]) + 1, said, MAX_NGRAM)
        if not len(places) or room < 1:
            return []
        behind = places[places > self._at]
        self._at = int(behind[0] if len(behind) else places[-1])
        return [int(token) for token in self._text[self._at : self._at + min(self._length, room)]]

    def run(self, cache: ChunkReuseCache, ids: Sequence[int], draft: Sequence[int], add: Add) -> FinishReason | None:
        """Check a draft in one forward, which adds the tokens that are right and one more.

        Args:
            cache: Holds prompt and answer but for the last token.
            ids: Of the answer; one at least.
            draft: From `draft`.
            add: Called with each token, one after the other.

        Returns:
            Why the text ends; None if it goes on.
        """
        tree, parent = Tree(), ROOT
        for token in draft:
            parent = tree.add(token, parent)
        branches = branches_of(self._model, cache, len(self._job.ids) + len(ids), self._device)
        logits = branches.forward([ids[-1], *tree.tokens], range(-1, len(tree)))
        choosing = Choosing(self._sampler, add)
        taken = choosing.take(tree, logits)
        branches.keep([0, *(node + 1 for node in taken.kept)])
        right = len(taken.path)
        self.drafted, self.accepted, self._at = self.drafted + len(tree), self.accepted + right, self._at + right
        self._length = min(2 * self._length, _MOST) if right == len(tree) else max(right, _LEAST)
        return choosing.reason
