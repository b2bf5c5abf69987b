"""`CorrectnessReport`: the results of all arms, as a table, a verdict and a figure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from kvboost_hf.config import ReusePolicy
from kvboost_hf.verify.arms import DEFAULT
from kvboost_hf.verify.results import ArmResult, PromptResult

_HEADS = ("arm", "mean KL", "max KL", "agreement", "diverged", "from token")
_COSTS, _READ = ("moved", "computed"), ("as codes",)
_COLOURS = {
    "query": "#1f6fb2",
    "cacheblend": "#d9822b",
    "first_k": "#3a9a5b",
    "selective": "#8e5ea2",
    "auto": "#b0413e",
    "none": "#7a6a53",
}
_POINTS = {"full": "*", "exact": "s", "naive": "X"}
_SMALLEST_KL = 1e-8  # what is smaller is drawn there: the axis is logarithmic


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectnessReport:
    """The result of `verify_correctness`.

    True if exact reuse is right, and each codec and live quantization that was asked for was read from and meets the
    thresholds.

    Args:
        model: Class name of the model.
        dtype: The dtype of the model's weights, such as `"float32"`.
        tolerance: By how many standard deviations of the logits rounding may change one, in this dtype.
        max_kl: Threshold: the highest mean KL divergence that a recommended policy, or K/V in fewer bits, may have, in
            nats.
        min_agreement: Threshold: the lowest share of steps with the same most likely token.
        arms: Plain generate() first, exact reuse second, then the blended policies, then K/V in fewer bits.
    """

    # With moved tokens, to recommend a policy. Fewer would let one pass that changes every third answer.
    min_prompts: ClassVar[int] = 8

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
        found = self.exact.prompts
        return tuple(p for p in found if not p.parts_by_rounding(self.tolerance, same_tokens=self.in_full))

    @property
    def coded(self) -> tuple[ArmResult, ...]:
        """The arms with K/V in fewer bits."""
        return tuple(arm for arm in self.arms if arm.arm.kind == "coded")

    @property
    def blended(self) -> tuple[ArmResult, ...]:
        """The arms that may move chunks."""
        return tuple(arm for arm in self.arms if arm.arm.kind in ("naive", "repaired"))

    def passes(self, arm: ArmResult) -> bool:
        """Whether an arm with K/V in fewer bits was read from, and meets the thresholds.

        In half precision, a token that rounding may have changed does not count against it.
        """
        return bool(arm.touched) and arm.mean_kl <= self.max_kl and self.agreement(arm) >= self.min_agreement

    def agreement(self, arm: ArmResult) -> float:
        """The agreement of an arm; in half precision, near-ties count as agreement, because rounding decides them."""
        return arm.agreement_but_ties(0.0 if self.in_full else 2 * self.tolerance)

    @property
    def in_full(self) -> bool:
        """Whether the model computes in float32 or better."""
        return self.dtype in ("float32", "float64")

    @property
    def recommended_arm(self) -> ArmResult:
        """The arm that computes the fewest tokens among those that meet the thresholds; else that of exact reuse.

        An arm that has moved something in fewer than `min_prompts` prompts is not recommended.
        """
        measured = [arm for arm in self.blended if len(arm.touched) >= self.min_prompts]
        moving = [arm for arm in measured if arm.meets(self.max_kl, self.min_agreement)]
        cheaper = [arm for arm in moving if arm.forwarded_tokens < self.exact.forwarded_tokens]
        return min(cheaper, key=lambda arm: (arm.forwarded_tokens, arm.mean_kl), default=self.exact)

    @property
    def recommended(self) -> ReusePolicy:
        """The policy of `recommended_arm`; `ReusePolicy()` if exact reuse is wrong: nothing can be trusted then."""
        policy = self.recommended_arm.policy
        return policy if policy is not None and not self.wrong else ReusePolicy()

    def __bool__(self) -> bool:
        return not self.wrong and all(map(self.passes, self.coded))

    @property
    def verdict(self) -> str:
        """The conclusion, in a sentence or two."""
        return _verdict(self)

    def __str__(self) -> str:
        tables = [_table(arms) for arms in (self.arms[: len(self.arms) - len(self.coded)], self.coded) if arms]
        if any(arm.policy == DEFAULT for arm in self.arms):
            tables[0] += "\n* ReusePolicy(mode='blend'), the default of moved chunks"
        return "\n\n".join([*tables, self.verdict])

    def as_dict(self) -> dict[str, Any]:
        """All figures, for JSON; numbers that are not finite are None."""
        content = {
            "ok": bool(self),
            "verdict": self.verdict,
            "recommended": asdict(self.recommended),
            "recommended_arm": self.recommended_arm.name,
            **{name: getattr(self, name) for name in ("model", "dtype", "tolerance")},
            **{name: getattr(self, name) for name in ("max_kl", "min_agreement", "min_prompts")},
            "arms": [arm.as_dict() for arm in self.arms],
        }
        return {key: _finite(value) for key, value in content.items()}


def _table(arms: Sequence[ArmResult]) -> str:
    """One line for each arm: KL in nats, then shares; the last ones are of all prompt tokens.

    Args:
        arms: All with K/V in fewer bits, or none.
    """
    lines = [(*_HEADS, *(_READ if arms[0].arm.kind == "coded" else _COSTS)), *map(_cells, arms)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )


def _cells(arm: ArmResult) -> tuple[str, ...]:
    tokens = sum(prompt.prompt_tokens for prompt in arm.prompts)
    shares = (arm.moved_tokens / tokens, arm.forwarded_share)
    return (
        f"{arm.name} *" if arm.policy == DEFAULT else arm.name,
        *(f"{value:.2g}" for value in (arm.mean_kl, arm.max_kl)),
        f"{arm.agreement:.1%}",
        f"{arm.diverged} of {len(arm.prompts)}",
        "-" if arm.first_divergence is None else f"{arm.first_divergence}",
        *(f"{share:.1%}" for share in ((arm.coded_tokens / tokens,) if arm.arm.kind == "coded" else shares)),
    )


def _verdict(report: CorrectnessReport) -> str:
    if report.wrong:
        said = _what_is_wrong(report.wrong[0], len(report.wrong), report)
    else:
        said = _what_to_reuse(report)
    return "\n".join([said, *(_what_codes_do(arm, report) for arm in report.coded)])


def _what_to_reuse(report: CorrectnessReport) -> str:
    right = "Exact reuse gives the answers of plain generate()"
    if not report.in_full and report.exact.diverged:
        right += f" but for near-ties in {report.exact.diverged} of {len(report.exact.prompts)} prompts"
    exact_share, chosen = f"{report.exact.forwarded_share:.0%}", report.recommended_arm
    if chosen is not report.exact:
        repair = chosen.name.replace("naive", "naive reuse").replace(", warmed", " with warmed documents")
        return (
            f"{right} and computes {exact_share} of the tokens; recommended is {repair}, which computes "
            f"{chosen.forwarded_share:.0%}, with a mean KL of {chosen.mean_kl:.2g} and an agreement of "
            f"{chosen.agreement:.1%} over {len(chosen.judged)} prompts with moved tokens. {_chances(chosen)}"
        )
    measured = max((len(arm.touched) for arm in report.blended), default=0)
    good = [arm for arm in report.blended if arm.touched and arm.meets(report.max_kl, report.min_agreement)]
    cheap = [arm for arm in good if arm.forwarded_share < report.exact.forwarded_share]
    if not measured:
        why = _first_reason(report)
        moved = f"nothing could be moved{f' ({why})' if why else ''}"
    elif measured < report.min_prompts:
        moved = (
            f"something was moved in {measured} of {len(report.exact.prompts)} prompts, and it takes "
            f"{report.min_prompts} of them to recommend that{_best_so_far(cheap)}"
        )
    elif cheap:
        best = min(cheap, key=lambda arm: arm.forwarded_share)
        moved = (
            f"{best.name} computes {best.forwarded_share:.0%} and meets the thresholds, but it moved something in "
            f"only {len(best.touched)} prompts, and it takes {report.min_prompts} of them to recommend that"
        )
    elif good:
        moved = "no policy that moves chunks and meets the thresholds computes less"
    else:
        moved = (
            f"no policy that moves chunks keeps the mean KL within {report.max_kl:g} and the agreement at "
            f"{report.min_agreement:.1%} or above"
        )
    return f"{right} and computes {exact_share} of the tokens; {moved}, so exact reuse is recommended."


def _best_so_far(cheap: Sequence[ArmResult]) -> str:
    """What few prompts have shown of the arm that computes least within the thresholds."""
    if not cheap:
        return " (of what was seen, no policy that moves chunks is within the thresholds and computes less)"
    best = min(cheap, key=lambda arm: arm.forwarded_share)
    return (
        f" (of what was seen, {best.name} is best: it computes {best.forwarded_share:.0%}, with a mean KL of "
        f"{best.mean_kl:.2g} and an agreement of {best.agreement:.1%})"
    )


def _what_codes_do(arm: ArmResult, report: CorrectnessReport) -> str:
    if not arm.touched:
        live = arm.arm.coding is not None and arm.arm.coding.live_quant is not None
        why = next((prompt.bypass_reason for prompt in arm.prompts if prompt.bypass_reason), None)
        if why is None and live:
            why = "caches hold codes in layers of full attention alone, and of longer prompts than these"
        return f"{arm.name}: NO VERDICT, for no K/V was read as codes{f' ({why})' if why else ''}."
    found = f"a mean KL of {arm.mean_kl:.2g} and an agreement of {report.agreement(arm):.2%}"
    if not report.in_full:
        found += " but for near-ties"
    if report.passes(arm):
        return f"{arm.name} is within the thresholds, with {found}. {_chances(arm)}"
    return (
        f"{arm.name} is NOT within the thresholds, with {found}, where the mean KL may be {report.max_kl:g} and the "
        f"agreement must be {report.min_agreement:.2%}. {_chances(arm)} Take more bits."
    )


def _chances(arm: ArmResult) -> str:
    changed = f"{arm.changed or 'None'} of {len(arm.judged)} answers changed"
    if arm.changed == len(arm.judged):
        return f"{changed}."
    return f"{changed}: with 95% confidence, no more than {arm.changed_at_most:.0%} of such answers do."


def _what_is_wrong(first: PromptResult, count: int, report: CorrectnessReport) -> str:
    if first.first_divergence is not None and first.divergence_gap is not None:
        what = (
            f"prompt {first.prompt} parts from plain generate() at new token {first.first_divergence}, where the two "
            f"best logits are {first.divergence_gap:.2g} standard deviations apart"
        )
    else:
        what = (
            f"the logits of prompt {first.prompt} are off by {first.max_difference:.2g} standard deviations, where "
            f"rounding explains {report.tolerance:g}"
        )
    return f"Exact reuse is WRONG for {count} of {len(report.exact.prompts)} prompts: {what}. Do not use it here."


def _first_reason(report: CorrectnessReport) -> str | None:
    """The first reason in the reports of blended arms for which nothing was moved; None without one."""
    prompts = [prompt for arm in report.blended for prompt in arm.prompts]
    reasons = [prompt.bypass_reason or prompt.moved_reason for prompt in prompts]
    return next((reason for reason in reasons if reason), None)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, list | tuple) else value


def figure(path: Path | str, report: CorrectnessReport) -> None:
    """Write a PNG: mean KL and agreement against the computed share, a line for each repair.

    Args:
        path: The file.
        report: What `verify_correctness` returned.

    Raises:
        ModuleNotFoundError: without matplotlib, which `pip install 'kvboost_hf[demo]'` brings.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn, axes = pyplot.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    for label, arms in _lines(report).items():
        colour, style = _look(label)
        computed = [100 * arm.forwarded_share for arm in arms]
        axes[0].plot(computed, [max(arm.mean_kl, _SMALLEST_KL) for arm in arms], style, color=colour, label=label)
        axes[1].plot(computed, [100 * arm.agreement for arm in arms], style, color=colour, label=label)
    axes[0].axhline(report.max_kl, color="#b5403f", linestyle=":", linewidth=1)
    axes[1].axhline(100 * report.min_agreement, color="#b5403f", linestyle=":", linewidth=1, label="thresholds")
    axes[0].set_yscale("log")
    axes[0].set_ylabel("Mean KL from plain generate() (nats)")
    axes[1].set_ylabel("Steps with the same most likely token (%)")
    for axis in axes:
        axis.set_xlabel("Prompt tokens computed (%)")
        axis.set_xlim(0, 103)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    lowest = min(100 * arm.agreement for arms in _lines(report).values() for arm in arms)
    axes[1].set_ylim(min(95, lowest - 2), 100.3)
    axes[1].legend(frameon=False)
    prompts = len(report.exact.prompts)
    drawn.suptitle(f"What reuse does to the answers: {report.model}, {report.dtype}, {prompts} prompts")
    drawn.savefig(path, dpi=130)
    pyplot.close(drawn)


def _lines(report: CorrectnessReport) -> dict[str, list[ArmResult]]:
    """Arms by the line that they are points of, from the lowest computed share to the highest."""
    lines: dict[str, list[ArmResult]] = {}
    for arm in (arm for arm in report.arms if arm.arm.kind != "coded"):
        label: str = arm.arm.kind
        if arm.policy is not None and label == "repaired":
            label = arm.policy.repair + arm.arm.goes_on
        lines.setdefault(f"{label}, warmed" if arm.arm.warmed else label, []).append(arm)
    return {label: sorted(arms, key=lambda arm: arm.forwarded_share) for label, arms in lines.items()}


def _look(label: str) -> tuple[str, str]:
    """Colour and format of a line."""
    kind, *more = label.split(", ")
    warmed = "warmed" in more
    if kind in _POINTS:
        return "#999999" if warmed else "#333333", _POINTS[kind]
    marker = "^" if "progressive" in more else "v" if "once" in more else "o"
    return _COLOURS[kind], f"{marker}--" if warmed else f"{marker}-"
