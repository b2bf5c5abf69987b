"""Formats the results of the demo: tables, a figure, JSON."""

import json
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvboost_hf.bench.demo import Measured
from kvboost_hf.bench.run import MeasuredRow

_COLOURS = {"plain": "#9a9a9a", "exact": "#1f6fb2", "blend": "#d9822b"}
_KL = ("KL from", "plain")
_LEGEND = {"plain": "plain generate()", "exact": "with ChunkReuseCache", "blend": "documents moved, repaired"}


def table(measured: Measured) -> RenderableType:
    """A workload, prompt by prompt, for a terminal of 80 characters."""
    about = measured.workload.about
    shown = _empty_table(*(name for name, _ in _columns(measured)))
    columns = [cells for _, cells in _columns(measured)]
    for row in zip(*columns, strict=True):
        shown.add_row(*row)
    return Group(Text(about[0].upper() + about[1:], style="bold"), shown)


def _columns(measured: Measured) -> Iterator[tuple[tuple[str, str], list[str]]]:
    """Head and cells of each column; what does not apply to the workload is left out."""
    yield ("no.", ""), [str(at + 1) for at in range(len(measured.prompts))]
    yield ("prompt", "tokens"), [str(prompt.prompt_tokens) for prompt in measured.prompts]
    for name, rows in measured.arms.items():
        yield (name, "TTFT"), [_time(found.served.ttft_ms) for found in rows]
    yield ("speed", "up"), [f"{measured.speed_up(at):.1f}x" for at in range(len(measured.prompts))]
    best = measured.arms[measured.best]
    yield ("tokens", "computed"), [str(found.served.prefilled) for found in best]
    yield ("same", "answer"), ["yes" if found.same else "no" for found in best]
    if measured.best != "blend":
        return
    if all(found.right is None for found in best):
        yield _KL, [f"{found.kl:.3f}" for found in best]
    else:
        yield ("right", "answer"), ["yes" if found.right else "no" for found in best]


def summary(measured: Sequence[Measured]) -> RenderableType:
    """The last prompt of each workload."""
    shown = _empty_table(
        ("", ""),
        ("prompt", "tokens"),
        ("first", "token"),
        ("with", "reuse"),
        ("speed", "up"),
        ("whole", "answer"),
        ("with", "reuse"),
        ("same", "answers"),
    )
    for one in measured:
        plain, best = one.arms["plain"], one.arms[one.best]
        shown.add_row(
            one.workload.name,
            str(one.prompts[-1].prompt_tokens),
            *(_time(rows[-1].served.ttft_ms) for rows in (plain, best)),
            f"{one.speed_up(-1):.1f}x",
            *(_time(rows[-1].served.total_ms) for rows in (plain, best)),
            f"{sum(found.same for found in best)} of {len(best)}",
        )
    return Group(Text("The last prompt of each: plain, and with reuse", style="bold"), shown)


def remarks(measured: Sequence[Measured], repeats: int, dtype: torch.dtype) -> Iterator[str]:
    """Explain the tables, and show the last answers."""
    runs = "one run" if repeats == 1 else f"medians of {repeats} runs"
    told = (
        "TTFT: time from the call of generate() to the first token on the host, looking up and storing K/V included; "
        f"{runs}, each from an empty cache. exact: K/V of the same text at the same place; it leaves answers as they "
        "are. blend: K/V moves with its text and is repaired in part, so that answers may differ."
    )
    if any(head == _KL for one in measured for head, _ in _columns(one)):
        told += " KL: how far next-token probabilities are from plain ones up to the first other token, in nats."
    yield told
    exact = [found for one in measured for found in one.arms["exact"]]
    same = sum(found.same for found in exact)
    told = f"Exact reuse: {same} of {len(exact)} answers have the tokens of plain generate()."
    if same < len(exact) and dtype != torch.float32:
        told += f" In {_name(dtype)} two tokens may be so close that rounding decides."
    yield told
    last = measured[-1]
    plain, blend = last.arms["plain"], last.arms[last.best]
    if all(found.right is not None for found in plain):
        counts = (f"{name} {sum(bool(row.right) for row in rows)}" for name, rows in last.arms.items())
        yield f"Right answers about shuffled documents, of {len(plain)}: {', '.join(counts)}."
    yield f"The last question: {last.prompts[-1].question}"
    yield f"  plain: {_line(plain[-1])}"
    yield f"  blend: {_line(blend[-1])}"


def _line(row: MeasuredRow) -> str:
    return " ".join(row.answer.split())


def _empty_table(*columns: tuple[str, str]) -> Table:
    shown = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 0))
    for column in columns:
        shown.add_column("\n".join(column), justify="right", no_wrap=True)
    return shown


def _time(value_ms: float) -> str:
    return f"{value_ms / 1000:.2f} s" if value_ms >= 1000 else f"{value_ms:.{0 if value_ms >= 10 else 1}f} ms"


def figure(path: Path, name: str, measured: Sequence[Measured]) -> None:
    """Write a PNG of the time to the first token, prompt by prompt, a panel for each workload."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # Two panels a row, so that a page of text shows them large enough to read.
    lines = -(-len(measured) // 2)
    drawn, grid = pyplot.subplots(lines, 2, figsize=(9, 3.2 * lines), sharey=True, squeeze=False)
    axes = list(grid.flatten())
    for axis in axes[len(measured) :]:
        axis.remove()
    slowest = max(found.served.ttft_ms for one in measured for rows in one.arms.values() for found in rows)
    unit, scale = ("s", 1000.0) if slowest >= 1000 else ("ms", 1.0)
    for axis, one in zip(axes, measured, strict=False):
        lengths = [prompt.prompt_tokens for prompt in one.prompts]
        axis.set_xticks(range(len(lengths)), [str(tokens) for tokens in lengths], fontsize=8)
        axis.set_xlabel("prompt tokens")
        axis.set_title(one.workload.name, loc="left", weight="bold")
        axis.grid(axis="y", alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_ylim(0, 1.15 * slowest / scale)  # shared by all
        for arm, rows in one.arms.items():
            times = [found.served.ttft_ms / scale for found in rows]
            axis.plot(range(len(times)), times, "o-", color=_COLOURS[arm], label=_LEGEND[arm])
        axis.annotate(
            f"{one.speed_up(-1):.1f}x",
            (len(lengths) - 1, one.arms[one.best][-1].served.ttft_ms / scale),
            xytext=(0, 8),
            textcoords="offset points",
            ha="center",
            color=_COLOURS[one.best],
            weight="bold",
        )
        if axis in axes[::2]:
            axis.set_ylabel(f"time to first token ({unit})")
        if axis is axes[0] or one.best == "blend":
            axis.legend(frameon=False, fontsize=9)
    drawn.suptitle(f"{name}, {hardware()}", fontsize=10)
    drawn.tight_layout()
    drawn.savefig(path, dpi=130)
    pyplot.close(drawn)


def as_json(name: str, measured: Sequence[Measured], repeats: int) -> str:
    """All figures with where they come from."""
    content: dict[str, Any] = {
        "model": name,
        "hardware": hardware(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "repeats": repeats,
        "workloads": [one.as_dict() for one in measured],
    }
    return json.dumps(content, indent=2)


def hardware() -> str:
    """The GPU, or the processor and its threads."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, threads: {torch.get_num_threads()}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
