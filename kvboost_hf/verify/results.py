"""The measurements of one arm against plain `generate()`: by prompt, and over all prompts."""

import math
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from kvboost_hf.config import ReusePolicy
from kvboost_hf.verify.arms import ComparedArm

_CONFIDENCE = 0.95  # one-sided


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptResult:
    """One prompt by one arm, compared with plain `generate()` up to and including the first token that differs."""

    prompt: int  # which one, counted from 0
    # KL divergence, in nats, of the arm's next-token distribution from the plain one, for each step.
    kl: tuple[float, ...]
    agreeing_steps: int  # steps whose most likely token is the same
    first_divergence: int | None  # index of the first new token that differs, or None
    # There, how far the two best plain logits are apart, in standard deviations of the logits.
    divergence_gap: float | None
    max_difference: float  # largest difference of a logit, in standard deviations of the logits
    prompt_tokens: int  # tokens of the prompt; this and what follows as in `ReuseReport`
    reused_tokens: int  # tokens of the prompt that were not computed
    forwarded_tokens: int  # tokens of the prompt that were computed
    moved_tokens: int  # reused tokens whose K/V was computed at another place
    recomputed_tokens: int  # moved tokens that were computed again
    bypass_reason: str | None  # why nothing, or no more, was reused, or None
    moved_reason: str | None  # why nothing was moved, or None
    # In an arm that keeps K/V in fewer bits, tokens of the prompt that were read as codes: decoded from the
    # store, or held by live quantization; with both, the fewer.
    coded_tokens: int = 0
    first_token: float = 1.0  # time to the first new token, over that of plain `generate()`
    answer: float = 1.0  # time to the last new token that both have, over that of plain `generate()`

    @property
    def mean_kl(self) -> float:
        """Mean over the steps, in nats."""
        return fmean(self.kl)

    @property
    def agreement(self) -> float:
        """Share of the steps whose most likely token is the same."""
        return self.agreeing_steps / len(self.kl)

    def parts_by_rounding(self, tolerance: float, *, same_tokens: bool) -> bool:
        """Whether rounding explains all differences.

        Args:
            tolerance: By how many standard deviations of the logits it may change one.
            same_tokens: Whether no token may differ at all; otherwise one may where the two best logits are no
                further apart than both may change.
        """
        if not self.max_difference <= tolerance:  # False for NaN
            return False
        if self.divergence_gap is None:
            return True
        return not same_tokens and self.divergence_gap <= 2 * tolerance


@dataclass(frozen=True, slots=True)
class ArmResult:
    """All prompts by one arm.

    Quality is averaged over the prompts in which anything was moved, or read as codes, if there are any, so that
    prompts which had to be computed anyway do not make it look better. Costs are over all prompts.
    """

    arm: ComparedArm
    prompts: tuple[PromptResult, ...]

    @property
    def name(self) -> str:
        """Such as `"full"`, `"exact"`, `"naive"`, `"query 15%"`."""
        return self.arm.name

    @property
    def policy(self) -> ReusePolicy | None:
        """None for plain generate()."""
        return self.arm.policy

    @property
    def judged(self) -> tuple[PromptResult, ...]:
        """The prompts that quality is averaged over."""
        return self.touched or self.prompts

    @property
    def touched(self) -> tuple[PromptResult, ...]:
        """The prompts in which anything was moved, or read as codes."""
        return tuple(prompt for prompt in self.prompts if prompt.moved_tokens or prompt.coded_tokens)

    @property
    def changed(self) -> int:
        """Number of `judged` prompts whose answer differs."""
        return sum(prompt.first_divergence is not None for prompt in self.judged)

    @property
    def changed_at_most(self) -> float:
        """The highest share of all answers that `changed` of the judged prompts is compatible with, at 95%.

        It is the upper end of the one-sided interval of Clopper and Pearson (Biometrika, 1934), for prompts that are
        drawn like those to come; with none changed, about 3 by the number of prompts.
        """
        return highest_share(self.changed, len(self.judged))

    @property
    def mean_kl(self) -> float:
        """Mean over the prompts of their means over steps, in nats."""
        return fmean(prompt.mean_kl for prompt in self.judged)

    @property
    def first_token_kl(self) -> float:
        """Mean over the prompts of the KL divergence at the first new token, in nats."""
        return fmean(prompt.kl[0] for prompt in self.judged)

    @property
    def max_kl(self) -> float:
        """The highest KL divergence of any step of any prompt, in nats; NaN if one is NaN."""
        return max((value for prompt in self.judged for value in prompt.kl), key=lambda v: (math.isnan(v), v))

    @property
    def agreement(self) -> float:
        """Mean over the prompts of the share of steps whose most likely token is the same."""
        return fmean(prompt.agreement for prompt in self.judged)

    def agreement_but_ties(self, gap: float) -> float:
        """`agreement`, where a token counts as the same if the two best plain logits are no further apart than `gap`.

        Args:
            gap: In standard deviations of the logits.
        """
        ties = (prompt.divergence_gap is not None and prompt.divergence_gap <= gap for prompt in self.judged)
        return fmean(1.0 if tie else p.agreement for tie, p in zip(ties, self.judged, strict=True))

    @property
    def diverged(self) -> int:
        """Prompts whose answer differs."""
        return sum(prompt.first_divergence is not None for prompt in self.prompts)

    @property
    def first_divergence(self) -> int | None:
        """The lowest index of a new token that differs, or None."""
        found = [prompt.first_divergence for prompt in self.prompts if prompt.first_divergence is not None]
        return min(found, default=None)

    @property
    def moved_tokens(self) -> int:
        """Moved tokens of all prompts; those computed again are included."""
        return sum(prompt.moved_tokens for prompt in self.prompts)

    @property
    def coded_tokens(self) -> int:
        """Tokens of all prompts that were read as codes."""
        return sum(prompt.coded_tokens for prompt in self.prompts)

    @property
    def reused_tokens(self) -> int:
        """Reused tokens of all prompts."""
        return sum(prompt.reused_tokens for prompt in self.prompts)

    @property
    def forwarded_tokens(self) -> int:
        """Computed tokens of all prompts."""
        return sum(prompt.forwarded_tokens for prompt in self.prompts)

    @property
    def forwarded_share(self) -> float:
        """Computed tokens as a share of all prompt tokens."""
        return self.forwarded_tokens / sum(prompt.prompt_tokens for prompt in self.prompts)

    @property
    def first_token(self) -> float:
        """Median over the prompts of the time to the first new token, over that of plain `generate()`."""
        return median(prompt.first_token for prompt in self.prompts)

    @property
    def answer(self) -> float:
        """Median over the prompts of the time of the whole answer, over that of plain `generate()`."""
        return median(prompt.answer for prompt in self.prompts)

    def meets(self, max_kl: float, min_agreement: float) -> bool:
        """Whether it is close enough to plain generate(); False where anything is NaN."""
        return self.mean_kl <= max_kl and self.agreement >= min_agreement

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        names = ("mean_kl", "first_token_kl", "max_kl", "agreement", "diverged", "first_divergence")
        chances = ("changed", "changed_at_most")
        costs = ("forwarded_tokens", "forwarded_share", "reused_tokens", "moved_tokens", "coded_tokens")
        times = ("first_token", "answer")
        coding = self.arm.coding
        return {
            "name": self.name,
            "kind": self.arm.kind,
            "warmed": self.arm.warmed,
            "policy": asdict(self.policy) if self.policy is not None else None,
            "codec": coding.codec.name if coding is not None and coding.codec is not None else None,
            "live_quant": asdict(coding.live_quant) if coding is not None and coding.live_quant is not None else None,
            **{name: getattr(self, name) for name in (*names, *chances, *costs, *times)},
            "prompts": [asdict(prompt) for prompt in self.prompts],
        }


def highest_share(found: int, of: int) -> float:
    """The share at which no more than `found` of `of` draws have a property in just one of 20 cases.

    Example:
        >>> [round(highest_share(0, of), 2) for of in (1, 8, 16, 300)]
        [0.95, 0.31, 0.17, 0.01]
    """
    low, high = found / of, 1.0
    for _ in range(50 if found < of else 0):
        share = (low + high) / 2
        chance = sum(math.comb(of, n) * share**n * (1 - share) ** (of - n) for n in range(found + 1))
        low, high = (share, high) if chance > 1 - _CONFIDENCE else (low, share)
    return high
