"""The page and the figure."""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.leaderboard.method import FOLDER
from benchmarks.leaderboard.results import Line, Results
from benchmarks.leaderboard.workloads import WORKLOADS

EXAMPLE = FOLDER / "evenly.py"
_SMALLEST_KL = 1e-5  # what is smaller is drawn there: the axis is logarithmic
_PANELS = (("first_token", "Time to the first token, of plain"), ("answer", "Time of the whole answer, of plain"))
_HEAD = """# Leaderboard of repairs

Documents are in a prompt whose K/V was computed in earlier prompts, in other orders. A method reuses it: keys are
rotated to their new positions, and some tokens are computed again. How near is the answer to that of plain
`generate()`, and what does it cost? `docs/moved.md` says how moved K/V works, `docs/policy.md` how to choose.

- **KL**: how far the next-token probabilities are from plain ones, in nats, mean over the tokens of the answer.
- **same first choice**: share of the answer's tokens that are the most likely ones for both.
- **computed**: tokens that go through the model before the first new token, and after it, as shares of the prompt.
- **first token**, **answer**: time over that of plain `generate()`, median over prompts. On a CPU it is the time that
  the process was computing.
- **right**: prompts whose first choices hold the known answer, of those that plain answers right.
- **frontier**: no other method has both a smaller KL and an earlier first token (or whole answer).

Rows are in the order of their KL, rounded as shown, and then of their first token. Few prompts tell a factor of two,
not a difference of a tenth. Zeroed and shuffled K/V must have five times the KL of all others, or the run fails.
"""
_ADD = """## Add a method

A method is a file in `benchmarks/leaderboard/methods/` that assigns a `Method` to `METHOD`: where it is from, what it
does, and a `ReusePolicy` for each of its settings. A rule of its own is a `Repair`, which chooses tokens by place, by
attention or by deviation. This is `{name}`:

```python
{source}```

`python -m benchmarks.leaderboard --methods {stem}` measures it with the embedded reader, and adds it to this page.
What was measured before is not measured again. `--methods my_rule.py` takes a file from anywhere, and
`--model NAME_OR_FOLDER` another model.
"""


def markdown(results: Results) -> str:
    """The page."""
    lines = [_HEAD]
    lines += [f"**{failed}**\n" for failed in results.controls_that_passed()]
    for model in results.models():
        names = results.workloads(model)
        lines += [f"## {model}", ""]
        if len(names) > 1:
            lines += [f"Mean over {len(names)} workloads, {results.overall(model)[0].prompts} prompts in all.", ""]
            lines += [*_table(results, results.overall(model)), ""]
        for name in names:
            workload, found = WORKLOADS[name], results.table(model, name)
            tokens = sorted(row["tokens"] for at, row in results.rows.items() if at[:2] == (model, name))
            lines += [
                f"### {workload.title[0].upper()}{workload.title[1:]}" if len(names) > 1 else "",
                "",
                f"`{name}`: {workload.title}, {workload.about}. {found[0].prompts} prompts of {tokens[0]:.0f} to "
                f"{tokens[-1]:.0f} tokens.",
                "",
                *_table(results, found),
                "",
            ]
    lines += ["![KL against time, with the frontier](leaderboard.png)", "", "## Methods", ""]
    lines += ["| method | from | what it does |", "| --- | --- | --- |"]
    about: dict[tuple[str, str], list[str]] = {}
    for way, method in results.methods.items():
        about.setdefault((method["source"], method["about"]), []).append(way)
    for (source, text), ways in sorted(about.items(), key=lambda item: item[1]):
        lines.append(f"| {'; '.join(ways)} | {source} | {text} |")
    lines += ["", _ADD.format(name=EXAMPLE.name, stem=EXAMPLE.stem, source=EXAMPLE.read_text("utf-8"))]
    return "\n".join([*lines, "## Measured", "", *(f"- {line}" for line in results.provenance), ""])


def _table(results: Results, lines: list[Line]) -> Iterator[str]:
    judged = any(line.figures["judged"] for line in lines)
    first, whole = (results.frontier(lines, figure) for figure, _ in _PANELS)
    yield (
        "| method | KL | same first choice | computed | after it | first token | answer |"
        + (" right |" if judged else "")
        + " frontier |"
    )
    yield "| --- |" + " ---: |" * (6 + judged) + " --- |"
    for way, _, found in lines:
        on = [name for name, ways in (("first token", first), ("answer", whole)) if way in ways]
        yield (
            f"| {f'**{way}**' if on else way} | {found['kl']:.4f} | {found['agreement']:.1%} "
            f"| {found['computed']:.0%} | {found['repaired']:.0%} | {found['first_token']:.2f} "
            f"| {found['answer']:.2f} |"
            + (f" {found['right']:.0f} of {found['judged']:.0f} |" if judged else "")
            + f" {', '.join(on)} |"
        )


def figure(results: Results, path: Path) -> None:
    """Write a PNG: KL against both times, a row for each model, with the frontiers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = results.models()
    families = list(dict.fromkeys(way.partition(",")[0] for way, it in results.methods.items() if not it["control"]))
    colours = dict(zip(sorted(families), pyplot.get_cmap("tab20").colors, strict=False))
    drawn, axes = pyplot.subplots(len(models), 2, figsize=(13, 4.8 * len(models)), layout="constrained", squeeze=False)
    for row, model in zip(axes, models, strict=True):
        lines = results.overall(model)
        for axis, (cost, title) in zip(row, _PANELS, strict=True):
            at = {line.way: (line.figures[cost], max(line.figures["kl"], _SMALLEST_KL)) for line in lines}
            for name, colour in colours.items():
                own = sorted(at[way] for way in at if way.partition(",")[0] == name)
                axis.plot(*zip(*own, strict=True), "o-", color=colour, markersize=7, linewidth=1, label=name)
            controls = [at[line.way] for line in lines if results.methods[line.way]["control"]]
            axis.plot([x for x, _ in controls], [y for _, y in controls], "x", color="#999999", label="controls")
            edge = sorted(at[way] for way in results.frontier(lines, cost))
            axis.step(*zip(*edge, strict=True), where="post", color="#222222", linewidth=1, linestyle=":")
            axis.plot(
                *zip(*edge, strict=True), "o", color="none", markeredgecolor="#222222", markersize=12, label="frontier"
            )
            axis.set_yscale("log")
            axis.set_xlim(left=0)
            axis.set_xlabel(title)
            axis.set_title(model, fontsize=11)
            axis.grid(alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
        row[0].set_ylabel("KL from plain generate() (nats, mean)")
    handles, labels = axes[0][0].get_legend_handles_labels()
    drawn.legend(handles, labels, frameon=False, loc="outside right center")
    drawn.savefig(path, dpi=110)
    pyplot.close(drawn)
