"""The page lists each reason for which reuse is off, in the words of the report, and no other one."""

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvboost_hf
from tests.docs.pages import ROOT
from tests.internals.cache import (
    CompileCosts,
    admission,
    blend_reason,
    holder_of_cache,
    read_inputs,
    read_prompt,
    reason_for_eager,
)
from tests.internals.compat import key_rotation, known_reason, padding_reason, probe_reason, training_reason

PAGE = (ROOT / "docs" / "reasons.md").read_text("utf-8")
ROWS = [row.split(" | ")[0][2:] for row in PAGE.splitlines() if row.startswith("| ")]
REASONS = [row for row in ROWS if row not in ("reason", "---")]
CONSTANTS = [
    text for name, text in vars(admission).items() if name.isupper() and isinstance(text, str) and " " in text
]
SOURCES = [
    CompileCosts.reason_against,
    blend_reason,
    holder_of_cache,
    key_rotation,
    known_reason,
    padding_reason,
    probe_reason,
    read_inputs,
    read_prompt,
    reason_for_eager,
    training_reason,
]
UNREPORTED = {
    "tokens one by one give other logits than at once (by … standard deviations)",  # of steps_reason
    "compiling is worth it after … more prompts that end in up to … new tokens",  # logged, at the level of debugging
}


def template(node: ast.AST) -> str | None:
    """The text of a string, with … for what is filled in; None for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return " ".join(node.value.split())
    if isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        return " ".join("".join(map(str, parts)).split())
    return None


def texts(source: str) -> set[str]:
    """All strings of a file, and what `attempt` makes of those that it is given."""
    tree = list(ast.walk(ast.parse(source)))
    calls = (node for node in tree if isinstance(node, ast.Call) and len(node.args) == 3)
    failures = (call.args[2] for call in calls if ast.unparse(call.func) == "attempt")
    found = {text for node in tree if (text := template(node)) is not None}
    return found | {f"{text} (…: …)" for node in failures if (text := template(node)) is not None}


def returned(source: str) -> Iterator[str]:
    """The sentences that functions return which may return a text in place of what was asked for, or None."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and re.search(r"\bstr \| |\| str\b", ast.unparse(node.returns or node)):
            for each in ast.walk(node):
                text = template(each.value) if isinstance(each, ast.Return) and each.value is not None else None
                if text is not None and " " in text and text.strip("… "):  # what has no word of its own is a name
                    yield text


def listed(reason: str) -> bool:
    return " ".join(reason.split()) in REASONS


@pytest.mark.daily
@pytest.mark.parametrize("reason", CONSTANTS)
def test_each_refusal_is_listed(reason: str) -> None:
    assert listed(reason)


@pytest.mark.daily
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
def test_each_reason_of_a_model_or_its_arguments_is_listed(source: Callable[..., object]) -> None:
    file = inspect.getsourcefile(inspect.unwrap(source))
    assert file is not None
    found = set(returned(Path(file).read_text("utf-8"))) - UNREPORTED
    assert found
    assert [reason for reason in found if not listed(reason)] == []


def test_nothing_is_listed_that_no_code_says() -> None:
    files = Path(kvboost_hf.__file__).parent.rglob("*.py")
    said = set().union(*(texts(file.read_text("utf-8")) for file in files))
    assert [reason for reason in REASONS if reason not in said] == []
    assert len(CONSTANTS) > 15
