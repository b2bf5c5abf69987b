"""A report in words: its table and its verdict."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvboost_hf.verify.report import ArmResult, CorrectnessReport, PromptResult

_HEADS = ("arm", "mean KL", "max KL", "agreement", "diverged", "from token", "moved", "computed")


def table(arms: Sequence["ArmResult"]) -> str:
    """One line for each arm: KL in nats, then shares; `moved` and `computed` are of all prompt tokens."""
    lines = [_HEADS, *map(_cells, arms)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADS))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    )


def _cells(arm: "ArmResult") -> tuple[str, ...]:
    tokens = sum(prompt.prompt_tokens for prompt in arm.prompts)
    return (
        arm.name,
        *(f"{value:.2g}" for value in (arm.mean_kl, arm.max_kl)),
        f"{arm.agreement:.1%}",
        f"{arm.diverged} of {len(arm.prompts)}",
        "-" if arm.first_divergence is None else f"{arm.first_divergence}",
        f"{arm.moved_tokens / tokens:.1%}",
        f"{arm.forwarded_share:.1%}",
    )


def verdict(report: "CorrectnessReport") -> str:
    """What follows from a report."""
    if report.wrong:
        return _what_is_wrong(report.wrong[0], len(report.wrong), report)
    right = "Exact reuse gives the answers of plain generate()"
    if report.dtype not in ("float32", "float64") and report.exact.diverged:
        right += f" but for near-ties in {report.exact.diverged} of {len(report.exact.prompts)} prompts"
    exact_share, chosen = f"{report.exact.forwarded_share:.0%}", report.recommended_arm
    if chosen is not report.exact:
        repair = chosen.name.replace("naive", "naive reuse").replace(", warmed", " with warmed documents")
        return (
            f"{right} and computes {exact_share} of the tokens; recommended is {repair}, which computes "
            f"{chosen.forwarded_share:.0%}, with a mean KL of {chosen.mean_kl:.2g} and an agreement of "
            f"{chosen.agreement:.1%} over {len(chosen.judged)} prompts with moved tokens."
        )
    if not any(arm.moved_tokens for arm in report.arms):
        why = _first_reason(report)
        moved = f"nothing could be moved{f' ({why})' if why else ''}"
    elif any(arm.moved_tokens and arm.meets(report.max_kl, report.min_agreement) for arm in report.arms):
        moved = "no policy that moves chunks and meets the thresholds computes less"
    else:
        moved = (
            f"no policy that moves chunks keeps the mean KL within {report.max_kl:g} and the agreement at "
            f"{report.min_agreement:.1%} or above"
        )
    return f"{right} and computes {exact_share} of the tokens; {moved}, so exact reuse is recommended."


def _what_is_wrong(first: "PromptResult", count: int, report: "CorrectnessReport") -> str:
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


def _first_reason(report: "CorrectnessReport") -> str | None:
    """Why nothing was moved, as far as a report of a blended arm says."""
    blended = [prompt for arm in report.arms if arm.arm.kind in ("naive", "repaired") for prompt in arm.prompts]
    reasons = [prompt.bypass_reason or prompt.moved_reason for prompt in blended]
    return next((reason for reason in reasons if reason), None)
