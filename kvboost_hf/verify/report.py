"""What was measured, and what follows from it: `CorrectnessReport`."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from kvboost_hf.config import ReusePolicy
from kvboost_hf.verify.arms import Arm
from kvboost_hf.verify.words import table, verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptResult:
    """One prompt by one arm, compared with plain `generate()` up to and including the first token that differs.

    Args:
        prompt: Which one, counted from 0.
        kl: KL divergence, in nats, of the arm's next-token distribution from the plain one, for each step.
        agreeing_steps: Steps whose most likely token is the same.
        first_divergence: Index of the first new token that differs, or None.
        divergence_gap: There, how far the two best plain logits are apart, in standard deviations of the logits.
        max_difference: Largest difference of a logit, in standard deviations of the logits.
        prompt_tokens: Tokens of the prompt; this and what follows as in `ReuseReport`.
        reused_tokens: Of these, not computed.
        forwarded_tokens: Of these, computed.
        moved_tokens: Of these, taken from elsewhere.
        recomputed_tokens: Moved tokens that were computed again.
        bypass_reason: Why nothing, or no more, was reused, or None.
        moved_reason: Why nothing was moved, or None.
    """

    prompt: int
    kl: tuple[float, ...]
    agreeing_steps: int
    first_divergence: int | None
    divergence_gap: float | None
    max_difference: float
    prompt_tokens: int
    reused_tokens: int
    forwarded_tokens: int
    moved_tokens: int
    recomputed_tokens: int
    bypass_reason: str | None
    moved_reason: str | None

    @property
    def mean_kl(self) -> float:
        """Over the steps."""
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

    Quality is averaged over the prompts in which anything was moved, if there are any, so that prompts which had to be
    computed anyway do not make it look better. Costs are over all prompts.
    """

    arm: Arm
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
        return tuple(prompt for prompt in self.prompts if prompt.moved_tokens) or self.prompts

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
        """Of any step of any prompt, in nats; NaN if one is."""
        return max((value for prompt in self.judged for value in prompt.kl), key=lambda v: (math.isnan(v), v))

    @property
    def agreement(self) -> float:
        """Mean over the prompts of the share of steps whose most likely token is the same."""
        return fmean(prompt.agreement for prompt in self.judged)

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
        """Over all prompts; those computed again included."""
        return sum(prompt.moved_tokens for prompt in self.prompts)

    @property
    def reused_tokens(self) -> int:
        """Over all prompts."""
        return sum(prompt.reused_tokens for prompt in self.prompts)

    @property
    def forwarded_tokens(self) -> int:
        """Over all prompts."""
        return sum(prompt.forwarded_tokens for prompt in self.prompts)

    @property
    def forwarded_share(self) -> float:
        """Computed tokens as a share of all prompt tokens."""
        return self.forwarded_tokens / sum(prompt.prompt_tokens for prompt in self.prompts)

    def meets(self, max_kl: float, min_agreement: float) -> bool:
        """Whether it is close enough to plain generate(); False where anything is NaN."""
        return self.mean_kl <= max_kl and self.agreement >= min_agreement

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        names = ("mean_kl", "first_token_kl", "max_kl", "agreement", "diverged", "first_divergence")
        costs = ("forwarded_tokens", "forwarded_share", "reused_tokens", "moved_tokens")
        return {
            "name": self.name,
            "kind": self.arm.kind,
            "warmed": self.arm.warmed,
            "policy": asdict(self.policy) if self.policy is not None else None,
            **{name: getattr(self, name) for name in (*names, *costs)},
            "prompts": [asdict(prompt) for prompt in self.prompts],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectnessReport:
    """What `verify_correctness` found. True if exact reuse is right and what is recommended meets the thresholds.

    Args:
        model: Class name of the model.
        dtype: Of its weights, such as `"float32"`.
        tolerance: By how many standard deviations of the logits rounding may change one, in this dtype.
        max_kl: Threshold: the highest mean KL divergence that a recommended policy may have, in nats.
        min_agreement: Threshold: the lowest share of steps with the same most likely token.
        arms: Plain generate() first, exact reuse second, then the blended policies.
    """

    model: str
    dtype: str
    tolerance: float
    max_kl: float
    min_agreement: float
    arms: tuple[ArmResult, ...]

    @property
    def exact(self) -> ArmResult:
        """The arm of exact reuse."""
        return next(arm for arm in self.arms if arm.arm.kind == "exact")

    @property
    def wrong(self) -> tuple[PromptResult, ...]:
        """Prompts that exact reuse has changed by more than rounding explains: none, unless something is broken.

        In float32 all tokens must be the same, and all logits within `tolerance`. In half precision tokens may differ
        where the two best plain logits are no more than twice the tolerance apart.
        """
        same_tokens = self.dtype in ("float32", "float64")
        found = self.exact.prompts
        return tuple(p for p in found if not p.parts_by_rounding(self.tolerance, same_tokens=same_tokens))

    @property
    def recommended_arm(self) -> ArmResult:
        """The arm that computes the fewest tokens among those that meet the thresholds; else that of exact reuse."""
        moving = [arm for arm in self.arms if arm.moved_tokens and arm.meets(self.max_kl, self.min_agreement)]
        cheaper = [arm for arm in moving if arm.forwarded_tokens < self.exact.forwarded_tokens]
        return min(cheaper, key=lambda arm: (arm.forwarded_tokens, arm.mean_kl), default=self.exact)

    @property
    def recommended(self) -> ReusePolicy:
        """The policy of `recommended_arm`; `ReusePolicy()` if exact reuse is wrong: nothing can be trusted then."""
        policy = self.recommended_arm.policy
        return policy if policy is not None and not self.wrong else ReusePolicy()

    def __bool__(self) -> bool:
        return not self.wrong

    @property
    def verdict(self) -> str:
        """What follows, in a sentence or two."""
        return verdict(self)

    def __str__(self) -> str:
        return f"{table(self.arms)}\n\n{self.verdict}"

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON; what is no finite number is None."""
        content = {
            "ok": bool(self),
            "verdict": self.verdict,
            "recommended": asdict(self.recommended),
            "recommended_arm": self.recommended_arm.name,
            **{name: getattr(self, name) for name in ("model", "dtype", "tolerance", "max_kl", "min_agreement")},
            "arms": [arm.as_dict() for arm in self.arms],
        }
        return {key: _finite(value) for key, value in content.items()}


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value
