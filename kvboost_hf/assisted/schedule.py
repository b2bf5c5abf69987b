"""Schedules: how many tokens to draft in a round."""

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any, Protocol, runtime_checkable

from transformers import PreTrainedModel

from kvboost_hf.assisted.learner import Calibration, Mean, RoundTimes
from kvboost_hf.assisted.limits import Pauses
from kvboost_hf.compat import weights_come_and_go

_FADE = 0.85  # what the times of a round still count after the next one
_FADE_TOKEN = 0.975  # what a comparison still counts after the next one
_PRIOR_TOKENS, _PRIOR_RATE = 4.0, 0.7  # drafted tokens assumed before any, and the share accepted


def most_tokens(most: int, target: PreTrainedModel, pauses: Pauses) -> int:
    """The most tokens of a draft, for a generation configuration; none in rounds without a draft.

    There is none before the first token of an answer, which so does not wait for it. Passes of a target whose weights
    are fetched for each of them take so long that it checks a draft in the first one, too.

    Args:
        most: Tokens.
        target: Checks the drafts.
        pauses: Decides on the other rounds.
    """
    at_first = target.config.is_encoder_decoder or weights_come_and_go(target)
    return _OfRound(most, at_first, pauses)


class _OfRound(int):
    """A number that is 0 when `int()` is taken of it in a round without a draft.

    transformers copies `num_assistant_tokens` for each answer, and takes `int()` of the copy before each draft. With a
    release that does not, there are drafts in all rounds.
    """

    _at_first: bool
    _pauses: Pauses
    _asked = False

    def __new__(cls, most: int, at_first: bool, pauses: Pauses) -> "_OfRound":
        found = super().__new__(cls, most)
        found._at_first, found._pauses = at_first, pauses
        return found

    def __int__(self) -> int:
        drafts, self._asked = self._asked or self._at_first, True
        return self.real if drafts and not self._pauses() else 0

    def __deepcopy__(self, _: Any) -> "_OfRound":
        return _OfRound(*self.__getnewargs__())

    def __getnewargs__(self) -> Any:
        return self.real, self._at_first, self._pauses


@runtime_checkable
class DraftLength(Protocol):
    """Decides before each round how many tokens are drafted."""

    def length(self, most: int) -> int:
        """Tokens to draft, from 1 to `most`."""

    def learn(self, *, drafted: int, accepted: int, draft_s: float, target_s: float, first: bool = False) -> None:
        """Learn from a round.

        Args:
            drafted: Tokens drafted.
            accepted: How many of them, from the first on, the target accepted.
            draft_s: Seconds of drafting.
            target_s: Seconds of the target's pass over them.
            first: Whether the draft's passes included the prompt. The target's did only if it drafted before its
                first token; see `load_assistant`.
        """


@runtime_checkable
class ConfidentLength(DraftLength, Protocol):
    """Decides after each drafted token whether to draft another; `length` is used where that is not possible."""

    def goes_on(self, sure: Sequence[float]) -> bool:
        """Whether to draft another token.

        Args:
            sure: The probability that the draft gave each of its tokens so far, one at least.
        """

    def compare(self, sure: Sequence[float], accepted: int) -> None:
        """Learn from a draft, before `learn`.

        Args:
            sure: The probability that the draft gave each of its tokens.
            accepted: How many of them, from the first on, the target accepted.
        """


class Constant:
    """A constant number of tokens.

    Args:
        tokens: To draft.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def length(self, most: int) -> int:
        return min(self._tokens, most)

    def learn(self, *, drafted: int, accepted: int, draft_s: float, target_s: float, first: bool = False) -> None:
        """Learn nothing: the length stays."""


class Heuristic:
    """Two more tokens after a fully accepted draft, else one less, as transformers' heuristic schedule.

    Args:
        tokens: To begin with.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def length(self, most: int) -> int:
        return min(self._tokens, most)

    def learn(self, *, drafted: int, accepted: int, draft_s: float, target_s: float, first: bool = False) -> None:
        self._tokens = self._tokens + 2 if accepted == drafted else max(1, self._tokens - 1)


class Adaptive:
    """The number of tokens with the most tokens per second, by measured acceptance and times.

    With an acceptance of `a` for each token, a draft of `n` tokens gives `(1 - a^(n + 1)) / (1 - a)` tokens (Leviathan
    et al., ICML 2023, https://arxiv.org/abs/2211.17192) in the time of one pass of the target and `n` of the draft.
    While drafting, the best `n` only gives the speed to beat: another token is drafted if its chance of acceptance,
    divided by its time, exceeds that speed. The chance is estimated from the probabilities that the draft gave its
    tokens, and from the acceptance of earlier tokens with such probabilities. Earlier rounds fade. A target with
    streamed layers has slow passes, and so gets long drafts.

    Args:
        tokens: For the first round.
        most: The longest draft.
    """

    def __init__(self, tokens: int, most: int) -> None:
        self._tokens, self._most = tokens, most
        self._overall = Mean(_FADE_TOKEN, _PRIOR_TOKENS, _PRIOR_RATE)
        self._calibration, self._times = Calibration(), RoundTimes(_FADE)

    def length(self, most: int) -> int:
        if not self._times.target_s.value:
            return min(self._tokens, self._most, most)
        speeds = self._tokens_per_s()[:most]
        return 1 + speeds.index(max(speeds))

    def goes_on(self, sure: Sequence[float]) -> bool:
        if not self._times.target_s.value or len(sure) >= self._most:
            return len(sure) < min(self._tokens, self._most)
        accepted = prod(map(self._calibration.rate, sure)) * self._overall.value
        return accepted > self._times.draft_s_per_pass * max(self._tokens_per_s())

    def compare(self, sure: Sequence[float], accepted: int) -> None:
        for place, each in enumerate(sure[: accepted + 1]):
            self._calibration.learn(each, hit=place < accepted)

    def learn(self, *, drafted: int, accepted: int, draft_s: float, target_s: float, first: bool = False) -> None:
        """The times of passes over prompts count until there are others."""
        for place in range(min(accepted + 1, drafted)):  # nothing is known of tokens behind the first rejected one
            self._overall.learn(place < accepted)
        told = {"draft_s": draft_s, "target_s": target_s}
        self._times.learn(committed=accepted + 1, passes=drafted, columns=drafted + 1, first=first, **told)

    def _tokens_per_s(self) -> list[float]:
        """The speed with drafts of 1 token, 2 tokens, and so on."""
        per_token, per_pass = self._times.draft_s_per_pass, self._times.target_s.value
        tokens = accumulate(self._overall.value**n for n in range(self._most + 1))
        return [each / (per_pass + n * per_token) for n, each in enumerate(tokens)][1:]
