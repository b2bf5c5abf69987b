"""Formats results: tables for the terminal, and JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvboost_hf.bench.provenance import Provenance
from kvboost_hf.bench.run import Result, Settings
from kvboost_hf.bench.summary import Summary
from kvboost_hf.demo.series import Workload

_COLUMNS = (
    ("TTFT", "ms"),
    ("quartiles", ""),
    ("speed", "up"),
    ("total", "ms"),
    ("reused", ""),
    ("prefill", "tokens"),
    ("same", ""),
    ("right", ""),
    ("kept", "MB"),
)
NOTE = (
    "TTFT: from the call to the first token on the host, over all prompts and rounds. speed-up: median of the ratios "
    "to plain generate(), prompt by prompt. prefill: tokens through the model before the first one of an answer, "
    "all prompts together. same: answers with the tokens of plain generate(). right: answers that hold the value "
    "asked for, where it is known. kept: at the end of a round. Short untimed prompts come first."
)


def columns(rows: Sequence[Summary]) -> list[tuple[str, str]]:
    """Heads of the columns; `right` is left out where no right answer is known."""
    return [name for name in _COLUMNS if name[0] != "right" or any(row.right is not None for row in rows)]


def cells(row: Summary) -> list[str]:
    """The figures of one arm in the order of `columns`."""
    low, middle, high = row.ttft_ms
    return [
        _short(middle),
        f"{_short(low)}-{_short(high)}",
        f"{_short(row.speed_up)}x",
        _short(row.total_ms),
        "" if row.reused is None else f"{row.reused / row.prompt_tokens:.0%}",
        f"{row.prefilled}",
        f"{row.same}/{row.prompts}",
        *([] if row.right is None else [f"{row.right}/{row.prompts}"]),
        "" if row.store_bytes is None else _short(row.store_bytes / 1e6),
    ]


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


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
    for name in columns(rows):
        shown.add_column("\n".join(name), justify="right", no_wrap=True)
    for row in rows:
        shown.add_row(row.arm, *cells(row))
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
