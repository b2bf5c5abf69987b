"""Showing the demo's results: a table, a figure, JSON."""

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvboost_hf.demo.run import Row

_PLAIN, _REUSE = "#9a9a9a", "#1f6fb2"


def table(title: str, what: str, rows: Sequence[Row]) -> Table:
    """Rows as a table for the terminal."""
    shown = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for column in (
        what,
        "prompt\ntokens",
        "TTFT\nplain, ms",
        "TTFT\nreuse, ms",
        "speed-up\n",
        "reused\n",
        "tokens\nforwarded",
        "same\ntokens",
    ):
        shown.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        shown.add_row(
            row.label,
            f"{row.prompt_tokens}",
            f"{row.plain_ttft_ms:.1f}",
            f"{row.reuse_ttft_ms:.1f}",
            f"{row.speed_up:.2f}x",
            f"{row.reused_tokens / row.prompt_tokens:.1%}",
            f"{row.forwarded_tokens}",
            "yes" if row.same_tokens else "NO",
        )
    return shown


def figure(path: Path, name: str, chat: Sequence[Row], questions: Sequence[Row]) -> None:
    """Write a PNG of the time to the first token, by turn and by question."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    for axis, rows, what in ((axes[0], chat, "Chat: turn"), (axes[1], questions, "One long document: question")):
        at = range(len(rows))
        axis.plot(at, [row.plain_ttft_ms for row in rows], "o-", color=_PLAIN, label="plain generate()")
        axis.plot(at, [row.reuse_ttft_ms for row in rows], "o-", color=_REUSE, label="with ChunkReuseCache")
        axis.set_xticks(at, [f"{row.label}\n{row.prompt_tokens}" for row in rows])
        axis.set_xlabel(f"{what}, prompt tokens below")
        axis.grid(axis="y", alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        last = rows[-1]
        axis.annotate(
            f"{last.speed_up:.1f}x",
            (len(rows) - 1, last.reuse_ttft_ms),
            xytext=(0, 8),
            textcoords="offset points",
            ha="center",
            color=_REUSE,
            weight="bold",
        )
    slowest = max(max(row.plain_ttft_ms, row.reuse_ttft_ms) for row in (*chat, *questions))
    axes[0].set_ylim(0, 1.15 * slowest)  # shared by both
    axes[0].set_ylabel("Time to first token (ms)")
    axes[0].legend(frameon=False, loc="upper left")
    drawn.suptitle(f"Time to first token, {name}, {hardware()}")
    drawn.savefig(path, dpi=130)
    pyplot.close(drawn)


def as_json(name: str, chat: Sequence[Row], questions: Sequence[Row]) -> str:
    """All figures with where they come from."""
    content: dict[str, Any] = {
        "model": name,
        "hardware": hardware(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "chat": [row.as_dict() for row in chat],
        "questions": [row.as_dict() for row in questions],
    }
    return json.dumps(content, indent=2)


def hardware() -> str:
    """The GPU, or the processor and its threads."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, threads: {torch.get_num_threads()}"
