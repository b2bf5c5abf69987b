"""The results of a run: summaries of each arm, tables for the terminal, JSON, and a page that loads no other file."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from io import StringIO
from statistics import median, quantiles
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvboost_hf.bench.arms import ARMS, PLAIN
from kvboost_hf.bench.prompts import Workload
from kvboost_hf.bench.run import MeasuredRow, Provenance, Result, Settings

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One arm in one workload, over all counted rounds."""

    workload: str  # the name of the workload
    arm: str  # the name of the arm
    ttft_ms: tuple[float, float, float]  # time to the first token: lower quartile, median, upper quartile
    total_ms: float  # median time of an answer
    # Median, over prompts and rounds, of plain time to the first token over the arm's, of the same prompt in the
    # same round.
    speed_up: float
    prompt_tokens: int  # tokens of all prompts of a round together, as are the next three
    prefilled: int  # tokens that went through the model before the first ones of the answers were there
    forwarded: int  # tokens that went through the model
    reused: int | None  # tokens of prompts that were not computed; None where the arm does not tell
    prompts: int  # how many there are in a round
    same: int  # prompts with the tokens of plain generate(), in every round
    right: int | None  # prompts with a right answer, in every round; None where right answers are not known
    store_bytes: int | None  # bytes that are kept at the end of a round; None where the arm does not tell


def note(rows: Sequence[Summary]) -> str:
    """Explain the columns of these rows."""
    notes = [column.note for column in columns(rows) if column.note]
    return " ".join([*notes, "Short untimed prompts come first."])


class Column(NamedTuple):
    """One figure of each arm."""

    head: tuple[str, str]  # what is above it, in two lines
    cell: Callable[[Summary], str | None]  # the figure of an arm; None where it is not known
    note: str = ""  # explains it; empty where the head is enough


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


_COLUMNS = (
    Column(
        ("TTFT", "ms"),
        lambda row: _short(row.ttft_ms[1]),
        "TTFT: from the call to the first token on the host, over all prompts and rounds.",
    ),
    Column(("quartiles", ""), lambda row: f"{_short(row.ttft_ms[0])}-{_short(row.ttft_ms[2])}"),
    Column(
        ("speed", "up"),
        lambda row: f"{_short(row.speed_up)}x",
        "speed-up: median of the ratios to plain generate(), prompt by prompt.",
    ),
    Column(("total", "ms"), lambda row: _short(row.total_ms)),
    Column(("reused", ""), lambda row: None if row.reused is None else f"{row.reused / row.prompt_tokens:.0%}"),
    Column(
        ("prefill", "tokens"),
        lambda row: f"{row.prefilled}",
        "prefill: tokens through the model before the first one of an answer, all prompts together.",
    ),
    Column(
        ("same", ""), lambda row: f"{row.same}/{row.prompts}", "same: answers with the tokens of plain generate()."
    ),
    Column(
        ("right", ""),
        lambda row: None if row.right is None else f"{row.right}/{row.prompts}",
        "right: answers that hold the value asked for.",
    ),
    Column(
        ("kept", "MB"),
        lambda row: None if row.store_bytes is None else _short(row.store_bytes / 1e6),
        "kept: at the end of a round.",
    ),
)


def columns(rows: Sequence[Summary]) -> list[Column]:
    """The columns of a table; those whose figure is not known of any arm are left out."""
    return [column for column in _COLUMNS if any(column.cell(row) is not None for row in rows)]


def cells(row: Summary, shown: Sequence[Column]) -> list[str]:
    """The figures of one arm; empty where one is not known."""
    return [column.cell(row) or "" for column in shown]


def table(workload: Workload, rows: Sequence[Summary]) -> Table:
    """A workload's arms as a table for the terminal."""
    shown = Table(
        title=f"{workload.name}: {workload.about}",
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 0),
    )
    shown.add_column("arm", no_wrap=True)
    found = columns(rows)
    for column in found:
        shown.add_column("\n".join(column.head), justify="right", no_wrap=True)
    for row in rows:
        shown.add_row(row.arm, *cells(row, found))
    return shown


def remarks(result: Result) -> list[str]:
    """Lines about arms that did not run, failed, or reused nothing."""
    lines = [f"Not run: {name}: {why}" for name, why in result.refused.items()]
    lines += [f"Failed: {name}: {why}" for name, why in result.failed.items()]
    for why in dict.fromkeys(row.served.bypassed for row in result.rows if row.served.bypassed):
        arms = dict.fromkeys(row.arm for row in result.rows if row.served.bypassed == why)
        always = all(row.served.bypassed == why for row in result.rows if row.arm in arms)
        lines.append(f"Reused nothing{'' if always else ' of some prompts'}: {', '.join(arms)}: {why}")
    return lines


def as_json(name: str, where: Provenance, settings: Settings, result: Result, found: Sequence[Summary]) -> str:
    """All figures, those of each answer included, with where they come from."""
    content = {
        "model": name,
        "provenance": asdict(where),
        "settings": asdict(settings),
        "dtype": str(result.dtype).removeprefix("torch."),
        "refused": result.refused,
        "failed": result.failed,
        "summaries": [asdict(row) for row in found],
        "rows": [asdict(row) for row in result.rows],
    }
    return json.dumps(content)


def summaries(rows: Sequence[MeasuredRow]) -> list[Summary]:
    """One summary for each arm in each workload, in the order of the rows.

    Counts are those of the first round; they are the same in all of them, but for `restart`, where K/V is read or
    computed, whichever seems faster.
    """
    plain = {(r.workload, r.round, r.prompt): r.served.ttft_ms for r in rows if r.arm == PLAIN.name}
    groups: dict[tuple[str, str], list[MeasuredRow]] = {}
    for row in rows:
        groups.setdefault((row.workload, row.arm), []).append(row)
    return [_summary(group, plain) for group in groups.values()]


def _summary(rows: Sequence[MeasuredRow], plain: dict[tuple[str, int, int], float]) -> Summary:
    asked = {row.prompt for row in rows}
    first = [row for row in rows if row.round == rows[0].round]
    ttft = [row.served.ttft_ms for row in rows]
    low, middle, high = quantiles(ttft, n=4, method="inclusive") if len(ttft) > 1 else 3 * ttft
    reused = [row.served.reused for row in first if row.served.reused is not None]
    return Summary(
        workload=rows[0].workload,
        arm=rows[0].arm,
        ttft_ms=(low, middle, high),
        total_ms=median(row.served.total_ms for row in rows),
        speed_up=median(plain[row.workload, row.round, row.prompt] / row.served.ttft_ms for row in rows),
        prompt_tokens=sum(row.prompt_tokens for row in first),
        prefilled=sum(row.served.prefilled for row in first),
        forwarded=sum(row.served.forwarded for row in first),
        reused=sum(reused) if len(reused) == len(first) else None,
        prompts=len(first),
        same=len(asked - {row.prompt for row in rows if not row.same}),
        right=None
        if None in {row.right for row in rows}
        else len(asked - {row.prompt for row in rows if not row.right}),
        store_bytes=first[-1].served.store_bytes,
    )


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
        name: The name of the model.
        where: Where the figures come from.
        settings: How much was run.
        workloads: That were run.
        result: All that was measured.
        found: The summaries of its rows.
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
