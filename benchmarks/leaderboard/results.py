"""What was measured: a row of figures for each cell, which is a way to serve one prompt, written as it comes."""

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.leaderboard.measure import Row, Way
from benchmarks.leaderboard.workloads import WORKLOADS

FIGURES = ("kl", "kl_first", "agreement", "computed", "repaired")  # means; of times the median
TIMES = ("first_token", "answer")
ROW = (*FIGURES, *TIMES, "tokens", "right", "wait")  # not every row has the last two
STEP = 0.05  # of plain's time: what is closer is no difference


class Cell(NamedTuple):
    """What one row is about."""

    model: str
    workload: str
    seed: int
    prompt: int
    way: str


class Line(NamedTuple):
    """A way in a table: figures over all prompts."""

    way: str
    prompts: int
    figures: Row

    @property
    def order(self) -> tuple[float, float]:
        """KL and time to the first token, as tables show them."""
        return round(self.figures["kl"], 4), round(self.figures["first_token"], 2)


class Results:
    """The rows of a file, and of what is added to it.

    Args:
        path: The JSON; what it holds is not measured again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        held: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
        self.provenance: list[str] = held.get("provenance", [])
        self.methods: dict[str, dict[str, Any]] = held.get("methods", {})
        self.rows: dict[Cell, Row] = {}
        for row in held.get("rows", []):
            of, figures = row[: len(Cell._fields)], row[len(Cell._fields) :]
            named = zip(held["columns"][len(Cell._fields) :], figures, strict=True)
            self.rows[Cell(*of)] = {name: figure for name, figure in named if figure is not None}

    def describe(self, ways: Iterable[Way]) -> None:
        """Say of ways what their files say."""
        for name, method, _ in ways:
            self.methods[name] = {"source": method.source, "about": method.about, "control": method.control}

    def add(self, cell: Cell, row: Row, conditions: str) -> None:
        """Add a row, and write the file."""
        self.rows[cell] = {name: float(f"{value:.4g}") for name, value in row.items()}
        if conditions not in self.provenance:
            self.provenance.append(conditions)
        self.write()

    def write(self) -> None:
        """Write the file."""
        lines = [json.dumps([*cell, *map(row.get, ROW)]) for cell, row in sorted(self.rows.items())]
        head = {"provenance": self.provenance, "methods": self.methods, "columns": [*Cell._fields, *ROW]}
        text = json.dumps(head, indent=1).removesuffix("\n}")
        part = self._path.with_suffix(".part")
        part.write_text(f'{text},\n "rows": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n", "utf-8")
        part.rename(self._path)  # whoever ends this process leaves a whole file

    def models(self) -> list[str]:
        """The models of which there are rows, the embedded one last."""
        return sorted({cell.model for cell in self.rows}, key=lambda model: (model.startswith("embedded "), model))

    def workloads(self, model: str) -> list[str]:
        """The workloads of which there are rows of a model."""
        found = {cell.workload for cell in self.rows if cell.model == model}
        return [name for name in WORKLOADS if name in found]

    def table(self, model: str, workload: str) -> list[Line]:
        """The ways that have run on all prompts of a workload, in the order of tables."""
        found: dict[str, list[Row]] = {}
        for cell, row in self.rows.items():
            if (cell.model, cell.workload) == (model, workload):
                found.setdefault(cell.way, []).append(row)
        most = max(map(len, found.values()))
        return in_order(Line(way, most, _summary(rows)) for way, rows in found.items() if len(rows) == most)

    def left_out(self, ways: Iterable[str]) -> list[str]:
        """What to run for ways that no table of a workload has, since others have run on more prompts of it."""
        said = []
        for model in self.models():
            for workload in self.workloads(model):
                lines = self.table(model, workload)
                for way in sorted(set(ways) - {line.way for line in lines}):
                    run = sum((cell.model, cell.workload, cell.way) == (model, workload, way) for cell in self.rows)
                    if run:
                        said.append(
                            f"{way} has run on {run} of {lines[0].prompts} prompts ({model}, {workload}), so that the "
                            f"table leaves it out: add `--prompts {lines[0].prompts}`"
                        )
        return said

    def overall(self, model: str) -> list[Line]:
        """The ways that have run on all prompts of all workloads; means over workloads."""
        tables = [{line.way: line for line in self.table(model, workload)} for workload in self.workloads(model)]
        lines = []
        for way in tables[0]:
            if all(way in table for table in tables):
                each = [table[way].figures for table in tables]
                names = (*FIGURES, *TIMES)
                mean = {name: statistics.fmean(figures[name] for figures in each) for name in names}
                if all("wait" in figures for figures in each):
                    mean["wait"] = statistics.fmean(figures["wait"] for figures in each)
                for name in ("right", "judged"):
                    mean[name] = sum(figures[name] for figures in each)
                lines.append(Line(way, sum(table[way].prompts for table in tables), mean))
        return in_order(lines)

    def ranked(self, lines: Iterable[Line]) -> list[Line]:
        """Without controls."""
        return [line for line in lines if self.methods[line.way]["control"] is None]

    def frontier(self, lines: Iterable[Line], figure: str) -> set[str]:
        """The ways of which none is beaten: by another that takes no more time, has no more KL, and less of one."""
        points = {line.way: (line.order[0], round(line.figures[figure] / STEP)) for line in self.ranked(lines)}
        return {
            way
            for way, (kl, cost) in points.items()
            if not any(other != (kl, cost) and other[0] <= kl and other[1] <= cost for other in points.values())
        }

    def controls_that_passed(self) -> list[str]:
        """Controls whose KL is too small: then nothing was measured."""
        passed = []
        for model in self.models():
            for workload in self.workloads(model):
                lines = self.table(model, workload)
                worst = max((line.figures["kl"] for line in self.ranked(lines)), default=0.0)
                for way, _, figures in lines:
                    least = self.methods[way]["control"]
                    if least and not figures["kl"] > least * worst:
                        passed.append(
                            f"control did not fail: {way} has KL {figures['kl']:.2g}, less than {least} times the "
                            f"{worst:.2g} of methods ({model}, {workload})"
                        )
        return passed


def in_order(lines: Iterable[Line]) -> list[Line]:
    """As tables show them."""
    return sorted(lines, key=lambda line: line.order)


def _summary(rows: list[Row]) -> Row:
    found = {name: statistics.fmean(row[name] for row in rows) for name in FIGURES}
    found |= {name: statistics.median(row[name] for row in rows) for name in TIMES}
    if all("wait" in row for row in rows):
        found["wait"] = statistics.median(row["wait"] for row in rows)
    judged = [row["right"] for row in rows if "right" in row]
    return {**found, "right": sum(judged), "judged": len(judged)}
