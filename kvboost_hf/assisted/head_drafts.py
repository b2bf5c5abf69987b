"""`HeadDraft` drafts one answer by heads that read hidden states of its text, with transformers' own generators.

transformers asks these generators for candidates within `generate()`, once a round, with the output of the last
forward. Here they get the same from whoever runs rounds: `TreeDecoding`, and the server.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import transformers
from transformers import LogitsProcessorList
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.modeling_outputs import BaseModelOutput

from kvboost_hf.assisted.hidden import TextStates
from kvboost_hf.assisted.limits import Pauses, before_end
from kvboost_hf.assisted.rounds import DraftSource, SpeculationStats
from kvboost_hf.assisted.schedule import ConfidentLength, DraftLength
from kvboost_hf.assisted.tree import ROOT, Growth, Tree
from kvboost_hf.compat import LAST

_FAR = 256  # tokens of a draft, at most


class HeadDraft:
    """Drafts chains for one answer by heads.

    Args:
        generator: A generator of candidates of transformers, made for this answer, which samples nothing.
        states: Hidden states of the text but for its last token.
        count: How many hidden states the model returns if all are asked for.
        growth: Knows how often tokens were accepted.
        ends: Tokens that end a text.
        share: The time of a draft, over that of a pass of the target, as expected.
    """

    passes = 1  # of the heads, for a draft

    def __init__(
        self, generator: Any, states: TextStates, count: int, growth: Growth, ends: Collection[int], share: float
    ) -> None:
        self._generator, self._states, self._count = generator, states, count
        self._growth, self._ends, self.share = growth, ends, share

    def behind(self, length: int) -> int:
        """As `Drafter.behind`."""
        return self._states.behind(length)

    def grow(self, ids: torch.Tensor, room: int, *, chain: bool = False) -> Tree:
        """Draft behind `ids` [1, tokens], at most `room` tokens; none where hidden states of the text are missing."""
        tree, length = Tree(), ids.shape[1]
        if self._states.stop != length - 1 or not (new := self._states.take()):
            return tree
        ids = ids.to(next(iter(new.values())).device)
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


class ShownSource(DraftSource, Protocol):
    """A source that reads what forwards of the target return.

    Attributes:
        asks: The arguments by which a forward of the target shows what is read.
    """

    asks: dict[str, Any]

    def show(self, output: Any, length: int, pads: int, rejected: int) -> None:
        """Take note of a forward of the target.

        Args:
            output: What it has returned.
            length: Tokens of the text, the last of which has not been computed yet.
            pads: Columns of padding on the left.
            rejected: Tokens at the end of the forward that are not in the text.
        """
        ...


@dataclass(frozen=True, slots=True)
class Chains:
    """How long the chains are that a source drafts for `generate(assistant_model=...)`."""

    lengths: DraftLength  # how many tokens to draft
    threshold: float  # chains end at a token with less probability than that

    def candidates(self, source: ShownSource, config: Any, processors: Any) -> "SourceCandidates":
        """The candidates of one call: see `SourceCandidates`."""
        return SourceCandidates(source, config, processors, self)


class SourceCandidates:
    """Candidates for `generate(assistant_model=...)`, as transformers asks for them: chains, from a source.

    Args:
        source: Continues the text of the call.
        config: The generation configuration of the call.
        processors: Logits processors of the call.
        chains: How long they are.

    Raises:
        ValueError: this version of transformers shows drafts nothing of the target.
    """

    requires_model_outputs = True

    def __init__(self, source: ShownSource, config: Any, processors: Any, chains: Chains) -> None:
        if not hasattr(CandidateGenerator, "requires_model_outputs"):
            raise ValueError(
                f"transformers {transformers.__version__} shows drafts no hidden states, which these heads read; "
                "5.24 does. Pass `custom_generate=TreeDecoding(heads)` in place of `assistant_model`."
            )
        self._source, self._config = source, config
        self._processors: Any = processors if processors is not None else LogitsProcessorList()
        self._lengths, self._threshold = chains.lengths, chains.threshold
        self.model_kwargs_overrides = source.asks
        self._sure: list[float] = []
        self._began = self._ended = 0.0
        self._rounds = 0

    def get_candidates(
        self,
        input_ids: torch.Tensor,
        model_kwargs: Any,
        model_outputs: Any,
        is_first_iteration: bool,
        n_last_matches: int,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As transformers' generators."""
        self._sure = []
        if is_first_iteration:
            return input_ids, None
        self._began = time.perf_counter()
        mask = model_kwargs.get("attention_mask")
        pads = int((mask[0] == 0).sum()) if mask is not None else 0
        ids = input_ids[:, pads:]
        rejected = model_outputs.logits.shape[1] - 1 - int(n_last_matches)
        self._source.show(model_outputs, ids.shape[1], pads, rejected)
        most = min(self._config.max_length - input_ids.shape[1] - 1, _FAR)
        score = self._source.begin(ids) if most > 0 else None
        if score is None:
            return input_ids, None
        confident = self._lengths if isinstance(self._lengths, ConfidentLength) else None
        count = most if confident is not None else self._lengths.length(most)
        found, scores = input_ids, list[torch.Tensor]()
        while True:
            scores.append(self._processors(found, score.to(found.device)))
            likely = scores[-1].softmax(-1)
            token = likely.multinomial(1) if self._config.do_sample else likely.argmax(-1, keepdim=True)
            self._sure.append(float(likely[0, token[0, 0]]))
            found = torch.cat([found, token], dim=1)
            enough = len(scores) >= count or self._sure[-1] < self._threshold
            if enough or (confident is not None and not confident.goes_on(self._sure)):
                break
            score = self._source.forward([int(token)], [len(scores) - 2 if len(scores) > 1 else ROOT])
        self._ended = time.perf_counter()
        return found, torch.stack(scores, dim=1)

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """As transformers' generators."""
        if not self._sure:
            return
        accepted, now = int(num_matches), time.perf_counter()
        if isinstance(self._lengths, ConfidentLength):
            self._lengths.compare(self._sure, accepted)
        self._lengths.learn(
            drafted=len(self._sure),
            accepted=accepted,
            draft_s=self._ended - self._began,
            target_s=now - self._ended,
            first=not self._rounds,
        )
        self._rounds += 1
