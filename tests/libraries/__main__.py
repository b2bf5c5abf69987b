"""`python -m tests.libraries`: run real libraries over a real model, with and without reuse."""

import argparse
import dataclasses
import json
import logging
import subprocess
import sys
import time
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import transformers

from tests.libraries.outcome import Outcome, outcome_of
from tests.libraries.page import page
from tests.libraries.scenario import files, scenarios


def main() -> int:
    """Run scenarios, those of each file in a process of their own; 1 if an answer differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.libraries", description=__doc__)
    parser.add_argument("only", nargs="*", help="a part of the names of those to run")
    parser.add_argument("--file", choices=list(files()), help="run those of this file, in this process")
    parser.add_argument("--json", type=Path, help="where to write outcomes")
    parser.add_argument("--page", type=Path, help="where to write a table of them")
    parser.add_argument("-v", action="count", default=0, help="show what is raised; -vv: every forward")
    given = parser.parse_args()
    if given.file is None:
        outcomes = [found for file in files() for found in _elsewhere(file, given.only, given.v)]
    else:
        _keep_quiet(given.v)
        outcomes = _here(given.file, given.only)
    if given.json:
        given.json.write_text(json.dumps([dataclasses.asdict(found) for found in outcomes], indent=1) + "\n")
    if given.page:
        given.page.write_text(page(outcomes), encoding="utf-8")
    return 0 if all(found.equal for found in outcomes) else 1


def _elsewhere(file: str, only: list[str], verbose: int) -> list[Outcome]:
    if not any(what.file == file and _is_wanted(name, only) for name, what in scenarios().items()):
        return []
    with TemporaryDirectory() as folder:
        path = Path(folder, "outcomes.json")
        command = [sys.executable, "-m", "tests.libraries", *only, "--file", file, "--json", str(path)]
        subprocess.run([*command, *["-v"] * verbose])
        if not path.exists():
            print(f"{file}: the run has died", flush=True)  # noqa: T201
            return []
        return [Outcome(**found) for found in json.loads(path.read_text(encoding="utf-8"))]


def _here(file: str, only: list[str]) -> list[Outcome]:
    outcomes = []
    for name, what in scenarios().items():
        if what.file != file or not _is_wanted(name, only):
            continue
        if what.version is None:
            print(f"{name}: not installed", flush=True)  # noqa: T201
            continue
        start = time.perf_counter()
        outcomes.append(outcome_of(what))
        print(_line(outcomes[-1]), f"[{time.perf_counter() - start:.0f} s]", flush=True)  # noqa: T201
    return outcomes


def _is_wanted(name: str, only: list[str]) -> bool:
    return not only or any(part in name for part in only)


def _keep_quiet(verbose: int) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    logging.getLogger("tests").setLevel([logging.WARNING, logging.INFO, logging.DEBUG][min(2, verbose)])


def _line(found: Outcome) -> str:
    says = f"{found.name}: {found.plain} / {found.ideal} / {found.ours}, {'equal' if found.equal else 'DIFFERENT'}"
    for part in (found.failure, found.why, " | ".join(filter(None, found.notes))):
        says += f"\n    {part}" if part else ""
    if found.answers:
        says += f"\n    {found.answers[0]}\n    {found.answers[1]}"
    return says


if __name__ == "__main__":
    sys.exit(main())
