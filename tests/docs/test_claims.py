"""A speed that is told says how it was measured: by which command, on what, and at which commit."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GENERATED = {"architectures.md", "flags.md"}  # they tell no speeds
PAGES = [ROOT / "README.md", *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.name not in GENERATED)]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.md"))

SPEED = re.compile(
    r"(?<![\w.-])\d[\d,.]*(?:x|-fold| ?(?:ms|µs)| (?:tokens|answers|requests|GB|MB)/s| times as (?:long|fast))\b"
)
COMMAND = re.compile(r"(?:python(?: -m)?|kvboost-hf|make) (?P<script>[\w./-]+)")
COMMIT = re.compile(r"\bcommit\s+`?[0-9a-f]{7}")
HARDWARE = re.compile(r"\b(?:CPU|EPYC|GPU|RTX|H200|A100|threads?)\b")
NO_SPEED = re.compile(r"<!-- no speed: [\w ,]+ -->")  # what looks like one is something else
RESULT = re.compile(r"\]\((?P<path>[^)#]*benchmarks/results/[^)#]+\.md)")
SECTION = re.compile(r"\]\((?P<page>[^)#]*\.md)?#(?P<anchor>[^)]+)\)")


@dataclass
class Section:
    """A heading, and what is under it, without the sections below."""

    level: int
    anchor: str
    text: str


def read(page: Path) -> list[Section]:
    parts = re.split(r"^(#+) (.*)$", page.read_text("utf-8"), flags=re.MULTILINE)
    found = [Section(0, "", parts[0])]
    for marks, title, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        anchor = re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")
        found.append(Section(len(marks), anchor, text))
    return found


def is_told(text: str) -> bool:
    """Whether a text says how something was measured."""
    return all(pattern.search(text) for pattern in (COMMAND, COMMIT, HARDWARE))


def above(sections: list[Section], index: int) -> str:
    """The text of a section, and of those that it is in."""
    texts, level = [sections[index].text], sections[index].level
    for section in reversed(sections[:index]):
        if section.level < level:
            texts.append(section.text)
            level = section.level
    return "\n".join(texts)


def is_backed(page: Path, sections: list[Section], index: int) -> bool:
    text = above(sections, index)
    if is_told(text) or RESULT.search(text) or NO_SPEED.search(sections[index].text):
        return True
    for found in SECTION.finditer(text):
        other = (page.parent / found["page"]).resolve() if found["page"] else page
        there = read(other) if other.exists() else []
        if any(s.anchor == found["anchor"] and is_told(above(there, i)) for i, s in enumerate(there)):
            return True
    return False


def unbacked(page: Path) -> list[str]:
    sections = read(page)
    return [
        f"#{section.anchor}: {', '.join(dict.fromkeys(SPEED.findall(section.text)))}"
        for i, section in enumerate(sections)
        if SPEED.search(section.text) and not is_backed(page, sections, i)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_speed_is_backed(page: Path) -> None:
    assert unbacked(page) == []


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: result.name)
def test_each_result_tells_how_it_was_measured(result: Path) -> None:
    assert is_told(result.read_text("utf-8"))


@pytest.mark.parametrize("page", [*PAGES, *RESULTS], ids=lambda page: page.name)
def test_each_script_exists(page: Path) -> None:
    named = [found["script"] for found in COMMAND.finditer(page.read_text("utf-8"))]
    assert [name for name in named if name.startswith("benchmarks/") and not (ROOT / name).exists()] == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("# A\nReuse is 4.5x as fast.\n", ["#a: 4.5x"]),
        ("# A\n12 ms, `python benchmarks/reuse.py`, commit 0123abc\n", ["#a: 12 ms"]),  # where?
        ("# A\n12 ms on a CPU, `python benchmarks/reuse.py`\n", ["#a: 12 ms"]),  # when?
        ("# A\n12 ms on a CPU, commit 0123abc\n", ["#a: 12 ms"]),  # how?
        ("# A\n12 ms on a CPU, `python benchmarks/reuse.py`, commit 0123abc\n## B\nand 3x\n# C\n4 µs\n", ["#c: 4 µs"]),
        ("# A\n[3x](benchmarks/results/reuse-cpu.md) for 8x512 layers, version 2.13.0x\n", []),
    ],
)
def test_what_is_not_backed_is_found(text: str, found: list[str], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text, "utf-8")
    assert unbacked(page) == found
