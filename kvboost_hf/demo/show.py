"""Formats the results of the demo: tables, a figure, JSON."""

import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvboost_hf.demo.measure import Row, ShuffledRow

_PLAIN, _REUSE, _BLEND = "#9a9a9a", "#1f6fb2", "#d9822b"


def table(title: str, what: str, rows: Sequence[Row]) -> Table:
    """Rows as a table for the terminal."""
    shown = _empty_table(
        title,
        (what, ""),
        ("prompt", "tokens"),
        ("TTFT", "plain, ms"),
        ("TTFT", "reuse, ms"),
        ("speed-up", ""),
        ("reused", ""),
        ("tokens", "forwarded"),
        ("same", "tokens"),
    )
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


def shuffled_table(title: str, rows: Sequence[ShuffledRow]) -> Table:
    """Rows of three arms as a table for the terminal."""
    shown = _empty_table(
        title,
        ("no.", ""),
        ("prompt", "tokens"),
        ("plain", "TTFT"),
        ("exact", "TTFT"),
        ("blend", "TTFT"),
        ("exact", "reused"),
        ("blend", "reused"),
        ("blend", "forwarded"),
        ("exact", "same"),
        ("blend", "same"),
        ("blend", "right"),
    )
    shown.padding = (0, 0)  # so many columns in 80 characters
    for row in rows:
        shown.add_row(
            row.label,
            f"{row.prompt_tokens}",
            *(f"{ms:.1f}" for ms in (row.plain_ttft_ms, row.exact_ttft_ms, row.blend_ttft_ms)),
            *(f"{count / row.prompt_tokens:.0%}" for count in (row.exact_reused_tokens, row.blend_reused_tokens)),
            f"{row.blend_forwarded_tokens}",
            "yes" if row.exact_same_tokens else "NO",
            "yes" if row.blend_same_tokens else "no",
            "yes" if row.blend_right else "no",
        )
    return shown


def _empty_table(title: str, *columns: tuple[str, str]) -> Table:
    shown = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        shown.add_column("\n".join(column), justify="right", no_wrap=True)
    return shown


def figure(
    path: Path, name: str, chat: Sequence[Row], questions: Sequence[Row], shuffled: Sequence[ShuffledRow]
) -> None:
    """Write a PNG of the time to the first token: by turn, by question, by order of the documents."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn, axes = pyplot.subplots(1, 3, figsize=(15, 4.2), sharey=True, layout="constrained")
    for axis, what, rows in (
        (axes[0], "Chat: turn", chat),
        (axes[1], "One long document: question", questions),
        (axes[2], "Shuffled documents: question", shuffled),
    ):
        axis.set_xticks(range(len(rows)), [f"{row.label}\n{row.prompt_tokens}" for row in rows])
        axis.set_xlabel(f"{what}, prompt tokens below")
        axis.grid(axis="y", alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        _draw(axis, [row.plain_ttft_ms for row in rows], "plain generate()", _PLAIN)
    for axis, same in ((axes[0], chat), (axes[1], questions)):
        _draw(axis, [row.reuse_ttft_ms for row in same], "with ChunkReuseCache", _REUSE, same[-1].speed_up)
    _draw(axes[2], [row.exact_ttft_ms for row in shuffled], "exact reuse", _REUSE)
    _draw(axes[2], [row.blend_ttft_ms for row in shuffled], "moved chunks, repaired", _BLEND, shuffled[-1].speed_up)
    slowest = max(line.get_ydata().max() for axis in axes for line in axis.get_lines())
    axes[0].set_ylim(0, 1.15 * slowest)  # shared by all
    axes[0].set_ylabel("Time to first token (ms)")
    axes[0].legend(frameon=False, loc="upper left")
    axes[2].legend(frameon=False)
    drawn.suptitle(f"Time to first token, {name}, {hardware()}")
    drawn.savefig(path, dpi=130)
    pyplot.close(drawn)


def _draw(axis: Any, times_ms: Sequence[float], label: str, colour: str, speed_up: float | None = None) -> None:
    """A line, with the speed-up above its last point."""
    axis.plot(range(len(times_ms)), times_ms, "o-", color=colour, label=label)
    if speed_up is not None:
        axis.annotate(
            f"{speed_up:.1f}x",
            (len(times_ms) - 1, times_ms[-1]),
            xytext=(0, 8),
            textcoords="offset points",
            ha="center",
            color=colour,
            weight="bold",
        )


def as_json(name: str, chat: Sequence[Row], questions: Sequence[Row], shuffled: Sequence[ShuffledRow]) -> str:
    """All figures with where they come from."""
    content: dict[str, Any] = {
        "model": name,
        "hardware": hardware(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "chat": [row.as_dict() for row in chat],
        "questions": [row.as_dict() for row in questions],
        "shuffled": [row.as_dict() for row in shuffled],
    }
    return json.dumps(content, indent=2)


def hardware() -> str:
    """The GPU, or the processor and its threads."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, threads: {torch.get_num_threads()}"
