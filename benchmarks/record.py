"""The record of a benchmark: what was measured, what failed and what was left out, written after each case.

A benchmark that is ended from outside has its record; one that may take so many minutes begins no case after them.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch
from shapes import SHAPES
from targets import Result, verdicts


def add_options(parser: argparse.ArgumentParser, *, rounds: int | None = None) -> None:
    """The options that benchmarks of several cases share.

    Args:
        parser: That gets them.
        rounds: Of each case, unless others are asked for; None where there are none.
    """
    parser.add_argument("--out", type=Path, help="folder for the JSON and the table; none writes neither")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help="that are timed, of each case")
    parser.add_argument("--minutes", type=float, help="of this process, after which no case begins any more")


def add_shape(parser: argparse.ArgumentParser, default: str) -> None:
    """The option that says of what shape models are.

    Args:
        parser: That gets it.
        default: Its value.
    """
    parser.add_argument("--shape", default=default, choices=SHAPES, help="of the model; see shapes.py")


class Record:
    """What a benchmark has found so far.

    Args:
        name: Of its files.
        options: Those of `add_options`.
        result: What the JSON holds; gets `failed`, `skipped` and the `seconds` of each case.
        markdown: Makes the table of it.
    """

    def __init__(
        self, name: str, options: argparse.Namespace, result: Result, markdown: Callable[[Result], str]
    ) -> None:
        self._name, self._options, self._markdown = name, options, markdown
        self.result = result
        result.update(failed=[], skipped=[], seconds={})

    def measure(self, case: str, work: Callable[[], object]) -> None:
        """Have a case add to the result, if there is time, and write it. If it fails, the others are measured.

        Args:
            case: Its name, among others.
            work: Measures it.
        """
        begin, minutes = time.monotonic(), self._options.minutes
        if minutes is not None and time.time() - psutil.Process().create_time() > 60 * minutes:
            self.result["skipped"].append(f"{case}: {minutes:.3g} min are over")
            print(f"Skipped: {self.result['skipped'][-1]}", flush=True)
        else:
            try:
                work()
            except Exception as error:  # of whatever kind
                self.result["failed"].append(f"{case}: {reason(error)}")
                print(f"Failed: {self.result['failed'][-1]}", flush=True)
            self.result["seconds"][case] = round(time.monotonic() - begin, 1)
            print(f"{case}: {self.result['seconds'][case]} s", flush=True)
        self._write()
        gc.collect()
        if self._options.device == "cuda":
            torch.cuda.empty_cache()

    def show(self) -> None:
        """Print the table and the targets."""
        print(self._text())
        print("\n".join(map(str, verdicts(self._name, self.result))))

    def _text(self) -> str:
        return self._markdown(self.result) + "".join(f"{line}\n" for line in _remarks(self.result))

    def _write(self) -> None:
        write(self._options.out, self._name, self.result, self._text())


def write(out: Path | None, name: str, result: Result, table: str) -> None:
    """Write `name.json` and `name.md`.

    Args:
        out: The folder, which is made; None writes neither.
        name: Of the files.
        result: What the JSON holds.
        table: The Markdown.
    """
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        (out / f"{name}.md").write_text(table)


def reason(error: Exception) -> str:
    """What failed, in a line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def _remarks(result: Result) -> Iterator[str]:
    """What a table does not show."""
    for title in ("failed", "skipped"):
        for line in result[title]:
            yield f"\n{title.capitalize()}: {line}"
