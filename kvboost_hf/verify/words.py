"""A report in words: its table and its verdict."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvboost_hf.verify.report import ArmResult, CorrectnessReport, PromptResult

_HEADS = ("arm", "mean KL", "max KL", "agreement", "diverged", "from token")
_COSTS, _READ = ("moved", "computed"), ("as codes",)


def table(arms: Sequence["ArmResult"]) -> str:
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


def _cells(arm: "ArmResult") -> tuple[str, ...]:
    tokens = sum(prompt.prompt_tokens for prompt in arm.prompts)
    shares = (arm.moved_tokens / tokens, arm.forwarded_share)
    return (
        arm.name,
        *(f"{value:.2g}" for value in (arm.mean_kl, arm.max_kl)),
        f"{arm.agreement:.1%}",
        f"{arm.diverged} of {len(arm.prompts)}",
        "-" if arm.first_divergence is None else f"{arm.first_divergence}",
        *(f"{share:.1%}" for share in ((arm.coded_tokens / tokens,) if arm.arm.kind == "coded" else shares)),
    )


def verdict(report: "CorrectnessReport") -> str:
    """What follows from a report."""
    if report.wrong:
        said = _what_is_wrong(report.wrong[0], len(report.wrong), report)
    else:
        said = _what_to_reuse(report)
    return "\n".join([said, *(_what_codes_do(arm, report) for arm in report.coded)])


def _what_to_reuse(report: "CorrectnessReport") -> str:
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
    if not measured:
        why = _first_reason(report)
        moved = f"nothing could be moved{f' ({why})' if why else ''}"
    elif measured < report.min_prompts:
        moved = (
            f"something was moved in {measured} of {len(report.exact.prompts)} prompts, and it takes "
            f"{report.min_prompts} of them to recommend that"
        )
    elif any(arm.touched and arm.meets(report.max_kl, report.min_agreement) for arm in report.blended):
        moved = "no policy that moves chunks and meets the thresholds computes less"
    else:
        moved = (
            f"no policy that moves chunks keeps the mean KL within {report.max_kl:g} and the agreement at "
            f"{report.min_agreement:.1%} or above"
        )
    return f"{right} and computes {exact_share} of the tokens; {moved}, so exact reuse is recommended."


def _what_codes_do(arm: "ArmResult", report: "CorrectnessReport") -> str:
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


def _chances(arm: "ArmResult") -> str:
    changed = f"{arm.changed or 'None'} of {len(arm.judged)} answers changed"
    if arm.changed == len(arm.judged):
        return f"{changed}."
    return f"{changed}: with 95% confidence, no more than {arm.changed_at_most:.0%} of such answers do."


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
    prompts = [prompt for arm in report.blended for prompt in arm.prompts]
    reasons = [prompt.bypass_reason or prompt.moved_reason for prompt in prompts]
    return next((reason for reason in reasons if reason), None)
