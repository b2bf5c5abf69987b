"""A speed that is told stands in what was measured: by which command, on what, and at which commit."""

import re
from pathlib import Path

import pytest

from tests.docs.claims import PAGES, RESULTS, ROOT, claims, git, is_told, unbacked, unknown_commits

REMEDY = (
    "These numbers stand in nothing that was measured. Correct them, leave them out, link the file of "
    "benchmarks/results where they stand, or tell command, hardware and commit beside them. What is no speed is "
    "marked in its section: <!-- no speed: reason -->"
)
FIRST_MEASURED = "0b0ca32"  # a repository without it has another history, or none
IS_WHOLE = (ROOT / ".git").exists() and git("rev-parse", "--is-shallow-repository") == "false"
HAS_HISTORY = IS_WHOLE and not unknown_commits(f"commit {FIRST_MEASURED}")
needs_history = pytest.mark.skipif(not HAS_HISTORY, reason="commits can be looked up in a whole clone only")


@pytest.mark.daily
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_speed_was_measured(page: Path) -> None:
    found = unbacked(page, page.read_text("utf-8"))
    assert not found, f"{page.relative_to(ROOT)}: {'; '.join(found)}\n{REMEDY}"


@pytest.mark.daily
@pytest.mark.parametrize("result", RESULTS, ids=lambda result: result.name)
def test_each_result_tells_how_it_was_measured(result: Path) -> None:
    assert is_told(result.read_text("utf-8"))


@pytest.mark.daily
@pytest.mark.parametrize("page", [*PAGES, *RESULTS], ids=lambda page: page.name)
def test_each_script_exists(page: Path) -> None:
    named = re.findall(r"\bbenchmarks/\w+\.py", page.read_text("utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []


@needs_history
@pytest.mark.parametrize("page", [*PAGES, *RESULTS], ids=lambda page: page.name)
def test_each_commit_exists(page: Path) -> None:
    assert unknown_commits(page.read_text("utf-8")) == []


TOLD = "`python benchmarks/reuse.py`, AMD EPYC, commit 0b0ca32"
LINKED = "[table](benchmarks/results/reuse-cpu.md)"


@pytest.mark.daily
@pytest.mark.parametrize(
    "claim",
    (
        "100x faster, 4.5\u00d7, 12-fold, Ten times faster, ten times the speed, 40% faster, 20% less time, "
        "twice as fast, half the time, halves, speed-up of 12, 3 ms, ten milliseconds, 50 µs, 0.3 s, 12 seconds, "
        "2 minutes, 9,000 tokens/s, 900 tok/s, 40 tokens/second, 900 tokens per second, 25 GB/s, 12 msec, "
        "10 percent faster"
    ).split(", "),
)
def test_claims_are_seen(claim: str) -> None:
    (found,) = claims(f"On a Mac it is {claim}, see why.")
    assert claim.startswith(found.text)


@pytest.mark.daily
@pytest.mark.parametrize("claim", ["10-20x", "10\u201320x", "5-10 ms"])
def test_the_end_of_a_range_is_seen(claim: str) -> None:
    (found,) = claims(f"It is {claim} there.")
    assert claim.endswith(found.text)


@pytest.mark.daily
@pytest.mark.parametrize(
    "text",
    "timeout of 30 s, every 10 s, in ten seconds, 512 MiB, 8x512, 2 \u00d7 3, 2.13.0, 1.8 times as large".split(", "),
)
def test_settings_and_sizes_are_none(text: str) -> None:
    assert claims(text) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"6.5x, six times as fast, 0.912 s, 912 ms, 50% slower, {LINKED}", []),
        (f"6.3x, forty 913 ms, {LINKED}", ["#: 6.3x, 913 ms"]),
        (f"100x and 2000x, which are counts of tokens, {LINKED}", ["#: 100x, 2000x"]),
        (f"# A\n6.76x, {TOLD}\n## B\nand 6.47x\n## C\nand 77x\n# D\n6.47x\n", ["#c: 77x", "#d: 6.47x"]),
        ("# A\n77x, `make demo`, AMD EPYC, commit 0b0ca32\n## B\nand 77x, 78x\n", ["#b: 78x"]),  # it is the record
        ("77x on two threads, `make demo`", ["#: 77x"]),  # when?
        ("77x, `make demo`, commit 0b0ca32", ["#: 77x"]),  # where?
        ("77x. We make sure of it: commit fffffff, several threads.", ["#: 77x"]),  # how?
        ("77x. `python benchmarks/fast.py`, commit 0b0ca32, AMD EPYC", ["#: 77x"]),  # by what?
        (f"# A\n{LINKED}\n# B\n6.47x, 50x on Monday, see [why](#a).", ["#b: 50x"]),
        ("```\n# 77x\n```\n<!-- no speed: a zoom -->", []),
    ],
)
def test_what_is_not_backed_is_found(text: str, found: list[str]) -> None:
    assert unbacked(ROOT / "page.md", text) == found


@pytest.mark.daily
@pytest.mark.parametrize(
    ("name", "heading", "text", "lost"),
    [
        (
            "docs/speed.md",
            "# How fast",
            "### In short\n\nOn an H100, `kvboost_hf` answers 100x faster than vLLM, at 90,000 tokens/s.",
            "100x, 90,000 tokens/s",
        ),
        (
            "docs/faq.md",
            "# Questions",
            "Ten times faster, 4.5\u00d7 on a Mac, 40% faster than vLLM, a speed-up of 12, 900 tok/s, "
            "900 tokens per second, 0.3 s.",
            "Ten times faster, 4.5\u00d7, 40% faster, speed-up of 12, 900 tok/s, 900 tokens per second, 0.3 s",
        ),
        ("docs/faq.md", "# Questions", "50x on Monday, see [why](moved.md#how-good-how-fast).", "50x"),
        ("docs/policy.md", "## Other choices", "99x. We make sure of it: commit fffffff, several threads.", "99x"),
        ("CHANGELOG.md", "### Changed", "1000x faster than vLLM.", "1000x"),
    ],
)
def test_false_speeds_are_found_in_our_pages(name: str, heading: str, text: str, lost: str) -> None:
    page = ROOT / name
    told = page.read_text("utf-8")
    assert heading in told
    found = "; ".join(unbacked(page, told.replace(heading, f"{heading}\n\n{text}\n", 1)))
    assert [claim for claim in lost.split(", ") if claim not in found] == []


@needs_history
def test_unknown_commits_are_found() -> None:
    assert unknown_commits(f"commit {FIRST_MEASURED}, commit fffffff") == ["fffffff"]
