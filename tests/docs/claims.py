"""Speeds that pages tell, and where they were measured.

A claim is a number with a unit of speed, or a ratio. It has to stand in a record of its section, or of the nearest one
around that has records. Records are the files of `benchmarks/results` that a section links, or that were made by a
command which it tells with hardware and commit; if there is no such file, the section itself. Those of a section that
it links count, too. Numbers agree if they have the same unit, and are equal as far as the page rounds.
"""

import math
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
GENERATED = {"architectures.md", "flags.md", "server-fields.md"}  # they tell no speeds
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md")),
    *sorted((ROOT / "kvboost_hf" / "assets").glob("*/README.md")),
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.name not in GENERATED),
]
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
GPU_BENCHES = re.findall(r"^GPU_BENCHES := (.+)$", MAKEFILE, re.MULTILINE)[0].split()
TARGETS = {*re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE), *(f"gpu-{name}" for name in GPU_BENCHES)}
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.md"))
WORDS = {word: i for i, word in enumerate("two three four five six seven eight nine ten eleven twelve".split(), 2)}
WORDS |= {"twenty": 20, "fifty": 50, "hundred": 100, "thousand": 1000}
NUMBER = rf"(?P<number>(?:\d{{1,3}}(?:,\d{{3}})+|\d+)(?:\.\d+)?(?![.,]?\d)|\b(?:{'|'.join(WORDS)}))"
COMPARED = r"as (?:long|fast|quick)|faster|quicker|slower|longer|the (?:speed|time|throughput)|less time|more time"
UNITS = (
    rf"(?P<ratio>x\b|\u00d7(?! ?\d)|-fold\b| times (?:{COMPARED}))",
    r"(?P<rate> ?(?:tok|tokens?|answers?|requests?|prompts?|[kMG]i?B)(?:/s(?:ec|econd)?\b| (?:per|a|each) second\b))",
    r"(?P<micro> ?(?:µs|us)\b| microseconds?\b)|(?P<milli> ?(?:ms|msec)\b| milliseconds?\b)",
)
SECONDS = r"(?P<second> ?s\b| seconds?\b)|(?P<minute> ?min\b| minutes?\b)"
SCALE = {"micro": 1e-6, "milli": 1e-3, "second": 1.0, "minute": 60.0}
START = r"(?<![\w.])(?<!\D-)(?<!timeout of )(?<!limit of )(?<!every )"  # settings are no speeds; "10-20x" is one
CLAIMS = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        rf"{START}{NUMBER}(?:{'|'.join(UNITS)}|(?P<percent> ?(?:%|percent) (?:{COMPARED})))",
        rf"{START}(?=\d){NUMBER}(?:{SECONDS})",  # in words they are waited or allowed: "within ten seconds"
        rf"\bspeed-?ups? (?:of|by) {NUMBER}(?P<ratio>)(?![\w.]*x)",
        rf"\b(?P<ratio>(?:twice|half) (?:{COMPARED})|halves|doubles the (?:speed|throughput))\b",
    )
]
MEASURED = re.compile(rf"(?<![\w.-]){NUMBER}(?:{'|'.join(UNITS)}|{SECONDS}|(?P<percent> ?%))?")

SCRIPT = re.compile(
    r"\bpython\s+(?P<script>benchmarks/\w+\.py)|\bpython\s+-m\s+(?P<module>(?:kvboost_hf|recipes|benchmarks|tests)\.[\w.]+)"
)
TARGET = re.compile(r"\bmake\s+((?:bench|demo|gpu|libraries|soak)[\w-]*)")
OURS = re.compile(r"\bkvboost-hf\s+(bench|demo|verify)\b")
COMMIT = re.compile(r"\bcommit\s+`?(?P<commit>[0-9a-f]{7,40})\b")
HARDWARE = re.compile(r"\b(?:EPYC|Xeon|RTX|[AHLT]\d{1,3}|Apple M\d|(?:\d+|one|two)(?: CPU)? (?:thread|core)s?)\b")
NO_SPEED = re.compile(r"<!-- no speed: [\w ,]+ -->")
RESULT = re.compile(r"\]\((?P<path>[^)#]*benchmarks/results/[^)#]+\.md)")
SECTION = re.compile(r"\]\((?P<page>[^)#]*\.md)?#(?P<anchor>[^)]+)\)")
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


class Quantity(NamedTuple):
    """A number with what it is of: "ratio", "rate", "time", "percent", or "" where nothing says so."""

    text: str
    value: float  # times in seconds
    rounding: float  # by how much what was measured may differ
    kind: str

    def is_that_of(self, measured: "Quantity") -> bool:
        """Whether this is what was measured; "40% faster" may have been measured as 1.40, too."""
        values = []
        if measured.kind == self.kind or (not measured.kind and self.kind != "time"):
            values.append(measured.value)
        if self.kind == "percent" and measured.kind in ("ratio", ""):
            values.append(100 * abs(measured.value - 1))
        return any(abs(self.value - value) <= self.rounding * 1.001 for value in values)


@dataclass
class Section:
    """A heading, and what is under it, without the sections below."""

    level: int
    anchor: str
    text: str


def quantity(found: re.Match[str]) -> Quantity:
    """From a match whose last group is the unit; "twice" and "halves" have no number, and are about two."""
    unit = found.lastgroup if found.lastgroup != "number" else ""
    number = found.groupdict().get("number", "two").lower()
    value = float(WORDS.get(number, 0) or number.replace(",", ""))
    decimals = len(number.partition(".")[2]) if number[0].isdigit() else 0
    scale = SCALE.get(unit, 1.0)
    return Quantity(found[0], value * scale, 0.5 * 10**-decimals * scale, "time" if unit in SCALE else unit)


def claims(text: str) -> list[Quantity]:
    """The speeds that a text tells."""
    return [quantity(found) for pattern in CLAIMS for found in pattern.finditer(text)]


def measured(text: str) -> Iterator[Quantity]:
    """The numbers of a record, but for whole ones without a unit, which are counts, sizes and names."""
    for found in MEASURED.finditer(text):
        number = quantity(found)
        if number.kind or "." in number.text:
            yield number


def parse(text: str) -> list[Section]:
    """The sections of a page, in order."""
    text = FENCED.sub(lambda block: block[0].replace("\n#", "\n #"), text)  # comments of code are no headings
    parts = re.split(r"^(#+) (.*)$", text, flags=re.MULTILINE)
    found = [Section(0, "", parts[0])]
    for marks, title, below in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        anchor = re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")
        found.append(Section(len(marks), anchor, below))
    return found


def around(sections: list[Section], index: int) -> Iterator[Section]:
    """A section, and those that it stands in, the innermost first."""
    level = math.inf
    for section in reversed(sections[: index + 1]):
        if section.level < level:
            yield section
            level = section.level


def commands(text: str) -> set[str]:
    """Those that measure something, and exist: scripts, modules, our own ones, targets of the Makefile."""
    found = {f"kvboost-hf {name}" for name in OURS.findall(text)}
    found |= {f"make {name}" for name in TARGET.findall(text) if name in TARGETS}
    for script in SCRIPT.finditer(text):
        module = (script["module"] or "").rstrip(".").replace(".", "/")
        paths = [script["script"]] if script["script"] else [f"{module}.py", f"{module}/__main__.py"]
        found |= {path for path in paths if (ROOT / path).exists()}
    return found


def is_told(text: str) -> bool:
    """Whether a text says how something was measured."""
    return bool(commands(text) and COMMIT.search(text) and HARDWARE.search(text))


def records(page: Path, section: Section) -> Iterator[str]:
    """What was measured, according to a section."""
    linked = {(page.parent / found["path"]).resolve() for found in RESULT.finditer(section.text)}
    if is_told(section.text):
        made = commands(section.text)
        files = {result for result in RESULTS if commands(result.read_text("utf-8")) & made}
        linked |= files
        if not files:
            yield section.text
    yield from (file.read_text("utf-8") for file in linked if file in RESULTS)


def backing(page: Path, sections: list[Section], index: int) -> list[str]:
    """The records of a section, or of the nearest around it that has some; those of linked sections are its own."""
    for section in around(sections, index):
        found = list(records(page, section))
        for link in SECTION.finditer(section.text):
            other = (page.parent / link["page"]).resolve() if link["page"] else page
            there = sections if other == page else parse(other.read_text("utf-8")) if other.exists() else []
            found += [record for each in there if each.anchor == link["anchor"] for record in records(other, each)]
        if found:
            return found
    return []


def unbacked(page: Path, text: str) -> list[str]:
    """The claims of a page with this text that no record has, by section."""
    found = []
    sections = parse(text)
    for index, section in enumerate(sections):
        told = [] if NO_SPEED.search(section.text) else claims(section.text)
        known = [number for text in (backing(page, sections, index) if told else ()) for number in measured(text)]
        lost = [claim.text for claim in told if not any(claim.is_that_of(number) for number in known)]
        found += [f"#{section.anchor}: {', '.join(dict.fromkeys(lost))}"] if lost else []
    return found


def unknown_commits(text: str) -> list[str]:
    """The commits that a text names and that are not in the history of this one: others go with their branch."""
    told = {found["commit"] for found in COMMIT.finditer(text)}
    return sorted(commit for commit in told if git("merge-base", "--is-ancestor", commit, "HEAD") is None)


def git(*arguments: str) -> str | None:
    """What git says; None where it fails."""
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
