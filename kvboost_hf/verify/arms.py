"""The ways of serving prompts that are compared."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from kvboost_hf.config import Repair, ReusePolicy

RATIOS = (0.05, 0.10, 0.15, 0.20, 0.30, 0.50)
REPAIRS: tuple[Repair, ...] = ("query", "cacheblend", "first_k")

Kind = Literal["full", "exact", "naive", "repaired"]


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of serving the prompts.

    Args:
        policy: How stored K/V may be used; None for plain generate().
        warmed: Whether documents were stored first, each computed alone.
    """

    policy: ReusePolicy | None
    warmed: bool = False

    @property
    def kind(self) -> Kind:
        """What is to be expected of it."""
        if self.policy is None:
            return "full"
        if self.policy.mode == "exact":
            return "exact"
        return "naive" if self.policy.repair == "none" else "repaired"

    @property
    def name(self) -> str:
        """The repair with its measure: `"query 15%"`, `"selective 16"`."""
        kind, policy = self.kind, self.policy
        if policy is None or kind == "exact":
            return kind
        name: str = kind
        if kind == "repaired":
            seams = policy.repair.startswith("selective")
            name = f"{policy.repair} {policy.seam_tokens if seams else f'{policy.recompute_ratio:.0%}'}"
            if policy.max_recompute_ratio is not None and not seams:
                name += f" to {policy.max_recompute_ratio:.0%}"
        if policy.overlap_k:
            name += f" + {policy.overlap_k}"
        return f"{name}, warmed" if self.warmed else name


FULL, EXACT = Arm(None), Arm(ReusePolicy())
NAIVE = Arm(ReusePolicy(mode="blend", repair="none"))


def default_policies() -> tuple[ReusePolicy, ...]:
    """Every repair at every ratio."""
    return tuple(
        ReusePolicy(mode="blend", repair=repair, recompute_ratio=ratio) for repair in REPAIRS for ratio in RATIOS
    )


def checked_policies(policies: Sequence[ReusePolicy]) -> tuple[ReusePolicy, ...]:
    """`policies`, if each of them moves chunks."""
    for policy in policies:
        if not isinstance(policy, ReusePolicy) or policy.mode != "blend":
            raise ValueError(
                f"`policies` must be ReusePolicy objects with mode 'blend', got {policy!r}. Exact reuse is always "
                f"measured; pass ReusePolicy(mode='blend', repair=…) with one of {get_args(Repair)}."
            )
    return tuple(policies)
