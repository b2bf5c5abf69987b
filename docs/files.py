"""The page of all files of the package, from their docstrings: `python docs/files.py`, and a page of the site."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_PACKAGE = Path(__file__).parent.parent / "kvboost_hf"
_END = re.compile(r"[:;] |, (?=(?:and|so|which|whose|where|for|as|in|that|after|when|because|while)\b)")
_CLAUSE = 6  # a clause of so many words says what a file is for
_OPENING = """# Every file

**Who needs this:** you look for a file. Each file of the package is here with what its docstring begins with.
[Design](design.md) says how they belong together.
"""


def page() -> str:
    """All folders of the package, and their files, in Markdown."""
    lines = [_OPENING]
    folders = sorted({file.parent for file in _PACKAGE.rglob("*.py")})
    for folder in folders:
        name = folder.relative_to(_PACKAGE).as_posix()
        about = _sentence(folder / "__init__.py")
        lines += [f"## `{name}/`" if name != "." else "## The top", "", about, ""]
        if rows := list(_rows(folder)):
            lines += [*rows, ""]
    return "\n".join(lines)


def _rows(folder: Path) -> Iterator[str]:
    for file in sorted(folder.glob("*.py")):
        if not file.name.startswith("__"):
            yield f"- `{file.name}`: {_opening(_sentence(file))}"


def _sentence(file: Path) -> str:
    """The first sentence of the docstring of a file."""
    found = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    if not found:
        raise ValueError(f"{file} must have a docstring: it is listed on the page of all files. Give it one.")
    paragraph = " ".join(found.split("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) (?=[A-Z`])", paragraph)[0]


def _opening(sentence: str) -> str:
    """The first clause of a sentence, if it can stand alone; else the sentence."""
    for end in _END.finditer(sentence):
        clause = sentence[: end.start()]
        if len(clause.split()) >= _CLAUSE and clause.count("(") == clause.count(")") and clause.count("`") % 2 == 0:
            return f"{clause}."
    return sentence


if __name__ == "__main__":
    sys.stdout.write(page())
