"""Formats results: tables for the terminal, and JSON."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvboost_hf.bench.provenance import Provenance
from kvboost_hf.bench.run import Result, Settings
from kvboost_hf.bench.summary import Summary
from kvboost_hf.demo.series import Workload


class Column(NamedTuple):
    """One figure of each arm.

    Args:
        head: What is above it, in two lines.
        cell: The figure of an arm; None where it is not known.
        note: Explains it; empty where the head is enough.
    """

    head: tuple[str, str]
    cell: Callable[[Summary], str | None]
    note: str = ""


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


def note(rows: Sequence[Summary]) -> str:
    """Explain the columns of these rows."""
    notes = [column.note for column in columns(rows) if column.note]
    return " ".join([*notes, "Short untimed prompts come first."])


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
