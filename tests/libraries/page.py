"""Outcomes as a table in Markdown."""

import re
import subprocess
from collections.abc import Sequence

import torch
import transformers

from tests.libraries.outcome import Outcome

_HEAD = """# Tokens computed inside other libraries

Tokens that went through SmolLM2-135M-Instruct (float32, greedy, 12 new tokens for each call), new tokens included.
*Plain* is without this library, *Ours* after `attach(model)`. *Ideal* computes every token once; ours has about 20
more for each model, to find out whether it gives the same logits for a prompt in two parts. All answers are token by
token those of the plain run, unless a row says **other answers**.

`make libraries` measures this: one core of a CPU, transformers {transformers}, torch {torch}, commit {commit}.

| Path | Plain | Ideal | Ours | What is not reused, and why |
|---|--:|--:|--:|---|
"""


def page(outcomes: Sequence[Outcome]) -> str:
    """The page."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    head = _HEAD.format(transformers=transformers.__version__, torch=torch.__version__, commit=commit)
    alike: dict[tuple[str, ...], list[str]] = {}
    for found in outcomes:
        alike.setdefault((f"{found.package} {found.version}", *_cells(found)), []).append(_code(found.path))
    return head + "".join(
        f"| {who}: {'; '.join(paths)} | {' | '.join(cells)} |\n" for (who, *cells), paths in alike.items()
    )


def _cells(found: Outcome) -> list[str]:
    counts = [f"{count:,}" for count in (found.plain, found.ideal, found.ours)]
    said = found.known or found.failure or ("" if found.as_ideal else found.why)
    notes = " without, ".join(filter(None, found.notes))
    if notes:
        said = f"{said}; {notes} with" if said else f"{notes} with"
    return [*counts, ("" if found.equal else "**other answers** ") + _text(said)]


def _code(path: str) -> str:
    return re.sub(r"[A-Za-z_.]*\w\([^)]*\)+|--[a-z-]+|\w+=", lambda found: f"`{found[0]}`", path.replace("|", r"\|"))


def _text(said: str) -> str:
    return " ".join(said.replace("|", r"\|").split())
