"""How many tokens to draft: pure Python, no tensors."""

from typing import Protocol

_FADE = 0.95  # what the times of a round still count after the next one
_FADE_TOKEN = 0.985  # what a comparison still counts after the next one
_PRIOR_TOKENS, _PRIOR_RATE = 4.0, 0.7  # as if so many drafted tokens had been compared, so many of them accepted


class DraftLength(Protocol):
    """Decides before each round how many tokens are drafted."""

    def length(self, most: int) -> int:
        """Tokens to draft, from 1 to `most`."""

    def learn(self, *, drafted: int, accepted: int, draft_s: float, target_s: float, first: bool = False) -> None:
        """What came of a round.

        Args:
            drafted: Tokens.
            accepted: Of these, the first ones, that the target would have said, too.
            draft_s: Seconds that drafting them took.
            target_s: Seconds of the target's pass over them.
            first: Whether that pass took the prompt in, too.
        """


class Constant:
    """Always as many.

    Args:
        tokens: To draft.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def length(self, most: int) -> int:
        """See `DraftLength`."""
        return min(self._tokens, most)

    def learn(self, *, drafted: int, accepted: int, draft_s: float, target_s: float, first: bool = False) -> None:
        """See `DraftLength`."""


class Heuristic:
    """Two more after a draft that was accepted as a whole, one less after another one, as transformers has it.

    Args:
        tokens: To begin with.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def length(self, most: int) -> int:
        """See `DraftLength`."""
        return min(self._tokens, most)

    def learn(self, *, drafted: int, accepted: int, draft_s: float, target_s: float, first: bool = False) -> None:
        """See `DraftLength`."""
        self._tokens = self._tokens + 2 if accepted == drafted else max(1, self._tokens - 1)


class Adaptive:
    """As many as give the most tokens per second, by what was accepted and how long it took.

    With an acceptance of `a` for each token, a draft of `n` tokens gives `(1 - a^(n + 1)) / (1 - a)` tokens (Leviathan
    et al., ICML 2023, https://arxiv.org/abs/2211.17192) in the time of a target's pass and `n` of the draft's. Earlier
    rounds fade. A target whose layers are streamed takes long for each pass, and wants long drafts.

    Args:
        tokens: For the first round.
        most: The longest draft.
    """

    def __init__(self, tokens: int, most: int) -> None:
        self._tokens, self._most = tokens, most
        self._compared, self._accepted = _PRIOR_TOKENS, _PRIOR_TOKENS * _PRIOR_RATE
        self._draft_s, self._drafted = 0.0, 0.0
        self._target_s, self._passes, self._rough = 0.0, 0.0, True

    def length(self, most: int) -> int:
        """See `DraftLength`."""
        most = min(most, self._most)
        if not self._passes or not self._drafted:
            return min(self._tokens, most)
        rate = self._accepted / self._compared
        per_token, per_pass = self._draft_s / self._drafted, self._target_s / self._passes
        return max(range(1, most + 1), key=lambda n: _expected(rate, n) / (per_pass + n * per_token))

    def learn(self, *, drafted: int, accepted: int, draft_s: float, target_s: float, first: bool = False) -> None:
        """See `DraftLength`. Passes over prompts count until there are others."""
        compared = accepted + (accepted < drafted)  # nothing is known of those behind the first that differs
        kept = _FADE_TOKEN**compared
        self._compared = kept * self._compared + compared
        self._accepted = kept * self._accepted + accepted
        self._drafted = _FADE * self._drafted + drafted
        self._draft_s = _FADE * self._draft_s + draft_s
        if first and not self._rough:
            return
        if self._rough and not first:
            self._rough, self._passes, self._target_s = False, 0.0, 0.0
        self._passes = _FADE * self._passes + 1
        self._target_s = _FADE * self._target_s + target_s


def _expected(rate: float, drafted: int) -> float:
    """Tokens that a round gives."""
    if rate >= 1:
        return drafted + 1.0
    return float((1 - rate ** (drafted + 1)) / (1 - rate))
