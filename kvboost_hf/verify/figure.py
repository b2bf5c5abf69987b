"""Draws a report: quality against the share of tokens that is computed."""

from pathlib import Path

from kvboost_hf.verify.report import CorrectnessReport
from kvboost_hf.verify.results import ArmResult

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
