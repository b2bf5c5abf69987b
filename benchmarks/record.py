"""The record of a benchmark: what was measured, what failed and what was left out, written after each case.

A benchmark that is ended from outside has its record; one that may take so many minutes begins no case after them.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import clock
import psutil
from shapes import SHAPES
from targets import Result, verdicts


def add_options(parser: argparse.ArgumentParser, *, rounds: int | None = None) -> None:
    """The options that benchmarks of several cases share.

    Args:
        parser: That gets them.
        rounds: The rounds of each case, unless others are asked for; None where there are none.
    """
    parser.add_argument("--out", type=Path, help="folder for the JSON and the table; none writes neither")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    if rounds is not None:
        parser.add_argument("--rounds", type=int, default=rounds, help="that are timed, of each case")
    parser.add_argument("--minutes", type=float, help="from the start, after which no case begins any more")
    parser.add_argument("--add", action="store_true", help="to what the JSON in that folder holds already")


def add_shape(parser: argparse.ArgumentParser, default: str) -> None:
    """The option that says of what shape models are.

    Args:
        parser: That gets it.
        default: The default value.
    """
    parser.add_argument("--shape", default=default, choices=SHAPES, help="of the model; see shapes.py")


_begun: list[float] = []  # when the benchmark began that runs now, where a process runs several


def begin() -> None:
    """A benchmark begins now, in a process that has run others: its `--minutes` count from here."""
    _begun[:] = [time.time()]


class Record:
    """What a benchmark has found so far.

    Args:
        name: The name of its files.
        options: The options of `add_options`.
        result: What the JSON holds; gets `failed`, `skipped` and the `seconds` of each case. With `--add`, lists and
            dictionaries begin with what an earlier run has written.
        markdown: Makes the table of it.
    """

    def __init__(
        self, name: str, options: argparse.Namespace, result: Result, markdown: Callable[[Result], str]
    ) -> None:
        self._name, self._options, self._markdown = name, options, markdown
        self.result = result
        self._start = _begun[0] if _begun else psutil.Process().create_time()
        result.update(failed=[], skipped=[], seconds={})
        if options.add and options.out is not None and (earlier := options.out / f"{name}.json").exists():
            held = json.loads(earlier.read_text())
            provenances = held.pop("provenances", [held["provenance"]])
            result.update({key: value for key, value in held.items() if key != "provenance"})
            result["provenances"] = [*provenances, result["provenance"]]

    def measure(self, case: str, work: Callable[[], object]) -> None:
        """Have a case add to the result, if there is time, and write it. If it fails, the others are measured.

        Args:
            case: The name of the case, among others.
            work: Measures it.
        """
        begin, minutes = time.monotonic(), self._options.minutes
        if minutes is not None and time.time() - self._start > 60 * minutes:
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
        clock.free(self._options.device)

    def show(self) -> None:
        """Print the table and the targets."""
        print(self._text())
        print("\n".join(map(str, verdicts(self._name, self.result))))

    def _text(self) -> str:
        return self._markdown(self.result) + "".join(f"{line}\n" for line in _remarks(self.result))

    def _write(self) -> None:
        """Write what was found even if no table can be made of it."""
        try:
            table = self._text()
        except Exception as error:
            table = f"no table: {reason(error)}"
            print(f"Failed: {table}", flush=True)
        write(self._options.out, self._name, self.result, table)


def write(out: Path | None, name: str, result: Result, table: str) -> None:
    """Write `name.json` and `name.md`.

    Args:
        out: The folder, which is made; None writes neither.
        name: The name of the files.
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
