"""`HeadDraft` drafts one answer by heads that read hidden states of its text, with transformers' own generators.

transformers asks these generators for candidates within `generate()`, once a round, with the output of the last
forward. Here they get the same from whoever runs rounds: `TreeDecoding`, and the server.
"""

import time
from collections.abc import Collection, Sequence
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutput

from kvboost_hf.assisted.hidden import TextStates
from kvboost_hf.assisted.limits import Pauses, before_end
from kvboost_hf.assisted.rounds import SpeculationStats
from kvboost_hf.assisted.tree import ROOT, Growth, Tree
from kvboost_hf.compat import LAST


class HeadDraft:
    """Drafts chains for one answer by heads.

    Args:
        generator: A generator of candidates of transformers, made for this answer, which samples nothing.
        states: Hidden states of the text but for its last token.
        count: How many hidden states the model returns if all are asked for.
        growth: Knows how often tokens were accepted.
        ends: Tokens that end a text.
    """

    passes = 1  # of the heads, for a draft

    def __init__(self, generator: Any, states: TextStates, count: int, growth: Growth, ends: Collection[int]) -> None:
        self._generator, self._states, self._count = generator, states, count
        self._growth, self._ends = growth, ends

    def grow(self, ids: torch.Tensor, room: int, *, chain: bool = False) -> Tree:
        """Draft behind `ids` [1, tokens], at most `room` tokens; none where hidden states of the text are missing."""
        tree, length = Tree(), ids.shape[1]
        if self._states.stop != length - 1:
            return tree
        new = self._states.take()
        found, logits = self._generator.get_candidates(
            ids,
            model_kwargs={"position_ids": torch.arange(length, device=ids.device)[None], "attention_mask": None},
            model_outputs=BaseModelOutput(hidden_states=self._numbered(new)),  # type: ignore[arg-type]
            is_first_iteration=False,
            n_last_matches=next(iter(new.values())).shape[1] - 1,
        )
        tokens = found[0, length:][:room].tolist()
        if not tokens:
            return tree
        odds = logits[0, : len(tokens)].float().softmax(-1).cpu()
        parent, chance = ROOT, 1.0
        for token, of_all in zip(tokens, odds, strict=True):
            probability = float(of_all[token])
            chance *= self._growth.calibration.rate(probability)
            parent = tree.add(token, parent, chance, probability)
            if token in self._ends:
                break
        return tree

    def keep(self, path: Sequence[int]) -> None:
        """Nothing: the generator cuts its K/V back by the text that comes with the next call."""

    def _numbered(self, states: dict[int, torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
        """In the places that a model returns them in."""
        found: list[torch.Tensor | None] = [None] * self._count
        for layer, each in states.items():
            found[layer if layer != LAST else self._count - 1] = each
        return tuple(found)


class CountedCandidates:
    """A generator of candidates whose rounds are counted, and that drafts nothing that would change the answer.

    There are no candidates in a call whose processors or criteria have to see each token (`Pauses`), and none that
    completes a stop string.

    Args:
        inner: The generator.
        stats: Takes the counts.
    """

    requires_model_outputs = True

    def __init__(self, inner: Any, stats: SpeculationStats) -> None:
        self._inner, self._stats, self._pauses = inner, stats, Pauses(None)
        self._drafted = 0
        self._seconds = 0.0, 0.0  # of drafting, and on the clock when it ended

    @property
    def model_kwargs_overrides(self) -> dict[str, Any]:
        """What each forward of the target is to be passed."""
        found: dict[str, Any] = self._inner.model_kwargs_overrides
        return found

    def get_candidates(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        """As transformers' generators."""
        began, length = time.perf_counter(), input_ids.shape[1]
        found, logits = (input_ids, None) if self._pauses() else self._inner.get_candidates(input_ids, **kwargs)
        self._drafted = before_end(input_ids, found[0, length:].tolist())
        ended = time.perf_counter()
        self._seconds = ended - began, ended
        if not self._drafted:
            return input_ids, None
        return found[:, : length + self._drafted], logits[:, : self._drafted] if logits is not None else None

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """As transformers' generators."""
        if not self._drafted:
            self._stats.plain += 1
            return
        self._inner.update_candidate_strategy(input_ids, scores, num_matches)
        accepted, (draft_s, ended) = int(num_matches), self._seconds
        self._stats.add_round(self._drafted, accepted, accepted + 1, (draft_s, time.perf_counter() - ended, 0.0))
