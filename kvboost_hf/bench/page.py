"""Writes the results as one HTML page that loads no other file."""

from collections.abc import Sequence
from html import escape
from io import StringIO
from typing import Any

from kvboost_hf.bench.arms import ARMS, PLAIN
from kvboost_hf.bench.provenance import Provenance
from kvboost_hf.bench.run import Result, Settings
from kvboost_hf.bench.show import cells, columns, note, remarks
from kvboost_hf.bench.summary import Summary
from kvboost_hf.demo.series import Workload

_INK = "#123456"  # becomes the colour of the page's text
_PLAIN, _OURS, _PEERS = "#9a9a9a", "#3f8fd2", "#d9822b"
_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .15rem .6rem; text-align: right; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; }
.scroll { overflow-x: auto; }
svg { max-width: 100%; height: auto; }
.note { opacity: .75; font-size: 13px; }
"""


def page(
    name: str,
    where: Provenance,
    settings: Settings,
    workloads: Sequence[Workload],
    result: Result,
    found: Sequence[Summary],
) -> str:
    """The whole page.

    Args:
        name: Of the model.
        where: Where the figures come from.
        settings: How much was run.
        workloads: That were run.
        result: All that was measured.
        found: Its summaries.
    """
    dtype = str(result.dtype).removeprefix("torch.")
    rounds = (
        f"In {dtype}. Prompts of each workload: {settings.prompts}, rounds: {settings.repeats}, seed: {settings.seed}"
    )
    parts = [
        f"<h1>Benchmark: {escape(name)}</h1>",
        f"<p>{escape(rounds)}.<br>{escape(str(where).replace(f'; {where.command}', ''))}.<br>"
        f"<code>{escape(where.command)}</code></p>",
        f"<p class=note>{escape(note(found))} Grey is plain generate(), blue this package, orange others; lines are "
        "quartiles.</p>",
    ]
    for workload in workloads:
        rows = [row for row in found if row.workload == workload.name]
        if not rows:
            continue
        shown = columns(rows)
        heads = ["arm", *(" ".join(column.head).strip() for column in shown)]
        head = "".join(f"<th>{escape(text)}</th>" for text in heads)
        lines = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in (row.arm, *cells(row, shown))) + "</tr>"
            for row in rows
        )
        about = workload.about[0].upper() + workload.about[1:]
        parts.append(f"<h2>{escape(workload.name)}</h2><p>{escape(about)}.</p>{_figure(rows)}")
        parts.append(f"<div class=scroll><table><tr>{head}</tr>{lines}</table></div>")
    if told := "".join(f"<li>{escape(remark)}</li>" for remark in remarks(result)):
        parts.append(f"<h2>Remarks</h2><ul>{told}</ul>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(name)}</title><style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _figure(rows: Sequence[Summary]) -> str:
    """Time to the first token by arm, as SVG in the page's own colours."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "bench", "font.family": "sans-serif"}
    style |= dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK)
    with pyplot.rc_context(style):
        drawn, axis = pyplot.subplots(figsize=(9, 0.6 + 0.26 * len(rows)), layout="constrained")
        middles = [row.ttft_ms[1] for row in rows]
        spread = [[row.ttft_ms[1] - row.ttft_ms[0] for row in rows], [row.ttft_ms[2] - row.ttft_ms[1] for row in rows]]
        axis.barh(range(len(rows)), middles, xerr=spread, color=[_colour(row.arm) for row in rows], ecolor=_INK)
        axis.set_yticks(range(len(rows)), [row.arm for row in rows])
        axis.invert_yaxis()
        axis.set_xlabel("Time to the first token (ms)")
        axis.spines[["top", "right"]].set_visible(False)
        written = StringIO()
        drawn.savefig(written, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        pyplot.close(drawn)
    svg = written.getvalue()
    return svg[svg.index("<svg") :].replace(_INK, "currentColor")


def _colour(arm: str) -> str:
    return _PLAIN if arm == PLAIN.name else _OURS if arm in ARMS else _PEERS
