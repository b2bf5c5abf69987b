"""The page and the figure."""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.leaderboard.method import FOLDER
from benchmarks.leaderboard.results import STEP, Line, Results
from benchmarks.leaderboard.workloads import WORKLOADS

EXAMPLE = FOLDER / "evenly.py"
_SMALLEST_KL = 1e-5  # what is smaller is drawn there: the axis is logarithmic
_PANELS = (("first_token", "Time to the first token, of plain"), ("answer", "Time of the whole answer, of plain"))
_HEAD = f"""# Leaderboard of repairs

Documents are in a prompt whose K/V was computed in earlier prompts, in other orders. A method reuses it: keys are
rotated to their new positions, and some tokens are computed again. How near is the answer to that of plain
`generate()`, and what does it cost? `docs/moved.md` says how moved K/V works, `docs/policy.md` how to choose.

- **KL**: how far the next-token probabilities are from plain ones, in nats, mean over the tokens of the answer.
- **same first choice**: share of the answer's tokens that are the most likely ones for both.
- **right**: prompts whose first choices hold the known answer, of those that plain answers right.
- **first token**, **answer**: time over that of plain `generate()`, median over prompts. On a CPU it is the time that
  the process was computing.
- **wait**: the longest time between two tokens of the answer, over the time to the first token of plain; where it was
  measured.
- **computed**, **later**: tokens that go through the model before the first new token, and with the ones that follow,
  as shares of the prompt.
- **frontier**: no other method has a smaller KL at the same or an earlier first token (or whole answer), or is earlier
  at the same KL. Times are compared in steps of {STEP}: less is noise. Controls do not count.

Rows are in the order of their KL, rounded as shown, and then of their first token. A method is in a table if it has
run on all prompts of it. Few prompts tell a factor of two, not a difference of a tenth. Zeroed and shuffled K/V must
have five times the KL of every method, or the run fails.

![KL against time, with the frontier](leaderboard.png)

Means over workloads; lines join the settings of a method. A KL below 0.00001 is drawn at 0.00001.
"""
_ADD = """## Add a method

A method is a file in `benchmarks/leaderboard/methods/` that assigns a `Method` to `METHOD`: where it is from, what it
does, and a `ReusePolicy` for each of its settings. A rule of its own is a `Repair`, which chooses tokens by place, by
attention or by deviation. This is `{name}`:

```python
{source}```

`python -m benchmarks.leaderboard --methods {stem} --prompts 40` measures it with the embedded model, the
*reader*, on as many prompts as the others, and adds it to the tables of this page. Commit the page with its JSON and
figure: a test compares them. What was measured before is not measured again. `--methods my_rule.py` takes a file from
anywhere, and `--model NAME_OR_FOLDER` another model.
"""


def markdown(results: Results) -> str:
    """The page."""
    lines = [_HEAD]
    lines += [f"**{failed}**\n" for failed in results.controls_that_passed()]
    for model in results.models():
        names, overall = results.workloads(model), results.overall(model)
        lines += [f"## {model}", ""]
        if len(names) > 1 and overall:
            lines += [f"Mean over {len(names)} workloads, of {overall[0].prompts} prompts in all.", ""]
            lines += [*_table(results, overall), ""]
        for name in names:
            workload, found = WORKLOADS[name], results.table(model, name)
            tokens = sorted(row["tokens"] for at, row in results.rows.items() if at[:2] == (model, name))
            lines += [
                f"### {workload.title[0].upper()}{workload.title[1:]}",
                "",
                f"`{name}`: {workload.about}. "
                f"Prompts: {found[0].prompts}, of {tokens[0]:.0f} to {tokens[-1]:.0f} tokens.",
                "",
                *_table(results, found),
                "",
            ]
    lines += ["## Methods", "", "| method | from | what it does |", "| --- | --- | --- |"]
    about = {way.partition(",")[0]: method for way, method in results.methods.items()}
    lines += [f"| {name} | {method['source']} | {method['about']} |" for name, method in sorted(about.items())]
    lines += ["", _ADD.format(name=EXAMPLE.name, stem=EXAMPLE.stem, source=EXAMPLE.read_text("utf-8"))]
    return "\n".join([*lines, "## Measured", "", *(f"- {line}" for line in results.provenance), ""])


def _table(results: Results, lines: list[Line]) -> Iterator[str]:
    judged = any(line.figures["judged"] for line in lines)
    first, whole = (results.frontier(lines, figure) for figure, _ in _PANELS)
    right = " right |" if judged else ""
    yield f"| method | KL | same first choice |{right} first token | wait | answer | computed | later | frontier |"
    yield "| --- |" + " ---: |" * (7 + judged) + " --- |"
    for way, _, found in lines:
        on = [name for name, ways in (("first token", first), ("answer", whole)) if way in ways]
        right = f" {found['right']:.0f} of {found['judged']:.0f} |" if judged else ""
        wait = f"{found['wait']:.2f}" if "wait" in found else ""
        yield (
            f"| {f'**{way}**' if on else way} | {found['kl']:.4f} | {found['agreement']:.1%} |{right} "
            f"{found['first_token']:.2f} | {wait} | {found['answer']:.2f} | {found['computed']:.0%} "
            f"| {found['repaired']:.0%} | {', '.join(on)} |"
        )


def write(results: Results, folder: Path) -> None:
    """Write the page."""
    (folder / "leaderboard.md").write_text(markdown(results), "utf-8")


def figure(results: Results, path: Path) -> None:
    """Write a PNG: KL against both times, a row for each model, with the frontiers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = [model for model in results.models() if results.overall(model)]
    families = sorted({way.partition(",")[0] for way, it in results.methods.items() if it["control"] is None})
    drawn, axes = pyplot.subplots(len(models), 2, figsize=(13, 5 * len(models)), layout="constrained", squeeze=False)
    for row, model in zip(axes, models, strict=True):
        lines = results.overall(model)
        for axis, (cost, title) in zip(row, _PANELS, strict=True):
            at = {line.way: (line.figures[cost], max(line.figures["kl"], _SMALLEST_KL)) for line in lines}
            for number, name in enumerate(families):
                own = sorted(at[way] for way in at if way.partition(",")[0] == name)
                look = "o-" if number < 10 else "s-"
                axis.plot(*_columns(own), look, color=f"C{number % 10}", markersize=7, linewidth=1, label=name)
            controls = [at[line.way] for line in lines if results.methods[line.way]["control"] is not None]
            axis.plot(*_columns(controls), "x", color="#999999", label="controls")
            edge = _columns(sorted(at[way] for way in results.frontier(lines, cost)))
            axis.step(*edge, where="post", color="#222222", linewidth=1, linestyle=":")
            ring = {"markeredgecolor": "#222222", "markersize": 13, "label": "on the frontier"}
            axis.plot(*edge, "o", color="none", **ring)
            axis.set_yscale("log")
            axis.set_xlim(left=0)
            axis.set_xlabel(title)
            axis.set_title(model, fontsize=11)
            axis.grid(alpha=0.3)
            axis.spines[["top", "right"]].set_visible(False)
        row[0].set_ylabel("KL from plain generate() (nats, mean)")
    handles, labels = axes[0][0].get_legend_handles_labels()
    drawn.legend(handles, labels, frameon=False, loc="outside right center")
    drawn.savefig(path, dpi=100)
    pyplot.close(drawn)


def _columns(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
