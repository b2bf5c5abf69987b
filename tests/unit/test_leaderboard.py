"""The leaderboard of repairs: a method is one file, damaged K/V is worst by far, nothing is measured twice."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.leaderboard import changes, page
from benchmarks.leaderboard.__main__ import main
from benchmarks.leaderboard.measure import Way
from benchmarks.leaderboard.method import FOLDER, load_methods
from benchmarks.leaderboard.results import Cell, Results

pytestmark = pytest.mark.daily

COMMITTED = Path(__file__).parents[2] / "benchmarks" / "results"
Run = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Runs the command on one prompt of the embedded reader."""

    def measured(*methods: str) -> int:
        return main(["--device", "cpu", "--prompts", "1", "--out", str(tmp_path), "--methods", *methods])

    threads = torch.get_num_threads()
    yield measured
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_a_method_is_one_file(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The one that the page shows, beside all that there are."""
    (shown,) = re.findall(r"```python\n(.*?)```", (COMMITTED / "leaderboard.md").read_text("utf-8"), re.DOTALL)
    assert shown == page.EXAMPLE.read_text("utf-8")
    mine = tmp_path / "mine.py"
    mine.write_text(shown, "utf-8")
    assert run(*load_methods(), str(mine)) == 0
    written = (tmp_path / "leaderboard.json").read_bytes()
    rows = {cell.way: row for cell, row in Results(tmp_path / "leaderboard.json").rows.items()}
    table = (tmp_path / "leaderboard.md").read_text("utf-8")
    assert "| mine, 15% |" in table.replace("**", "")  # bold on the frontier
    assert (tmp_path / "leaderboard.png").stat().st_size > 10_000

    for share in ("15%", "30%"):
        mine_row, same = rows[f"mine, {share}"], rows[f"evenly, {share}"]
        assert (mine_row["kl"], mine_row["computed"]) == (same["kl"], same["computed"])
    assert rows["none"]["computed"] < 0.1 < rows["mine, 15%"]["computed"] < rows["mine, 30%"]["computed"] < 0.5
    assert rows["plain"]["kl"] == 0 == rows["plain"]["first_token"] - 1
    # Logits of float32 in matrices of other shapes are off by 1e-4 at most, which makes half the square of that.
    assert max(rows["exact"]["kl"], rows["full"]["kl"]) < 1e-8 < rows["none"]["kl"] / 1e4
    assert rows["full"]["computed"] == rows["exact"]["computed"] > 0.9
    assert rows["progressive, nothing at first"]["repaired"] > 0.8
    assert rows["progressive, nothing at first"]["kl"] < rows["in_thirds, nothing at first"]["kl"] < rows["none"]["kl"]
    assert rows["progressive, nothing at first"]["wait"] > 2 * rows["none"]["wait"] > 0
    assert min(rows[way]["kl"] for way in ("zeroed", "shuffled")) > 5 * rows["none"]["kl"]

    capsys.readouterr()
    assert run("none", str(mine)) == 0
    assert capsys.readouterr().out == ""  # says which prompts it measures
    assert (tmp_path / "leaderboard.json").read_bytes() == written


def test_damage_that_does_nothing_is_noticed(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(changes, "damage", lambda store, kind: None)
    assert run("none", "zeroed") == 1
    assert "control did not fail: zeroed has KL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("unknown", None, "must be one of .*cacheblend.*, or a file that ends in .py, got 'unknown'"),
        ("missing.py", None, "got '.*missing.py'"),
        ("none.py", "METHOD = None", "there is a method 'none' already"),
        ("empty.py", "METHOD = None", "must assign a `Method` to `METHOD`, got None"),
    ],
)
def test_what_is_no_method_is_refused(name: str, text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / name).write_text(text, "utf-8")
    with pytest.raises(ValueError, match=message):
        load_methods([str(tmp_path / name) if name.endswith(".py") else name])


def of(tmp_path: Path, **ways: tuple[float, float, float]) -> Results:
    """Results of one prompt: KL, first token and whole answer of each way."""
    results, (method,) = Results(tmp_path / "leaderboard.json"), load_methods(["none"]).values()
    for way, (kl, first, answer) in ways.items():
        row = {"kl": kl, "first_token": first, "answer": answer}
        row |= dict.fromkeys(("kl_first", "agreement", "computed", "repaired", "tokens"), 0.0)
        results.describe([Way(way, method, None)])
        results.add(Cell("model", "facts", 1, 0, way), row, "here")
    return results


def test_the_frontier_is_what_nothing_beats_in_both(tmp_path: Path) -> None:
    results = of(
        tmp_path,
        plain=(0, 1.0, 1.0),
        near=(0.001, 0.5, 1.2),
        nearly=(0.00104, 0.51, 1.3),  # no difference
        beaten=(0.002, 0.6, 1.25),
        soon=(0.1, 0.1, 0.3),
    )
    lines = results.table("model", "facts")
    assert [line.way for line in lines] == ["plain", "near", "nearly", "beaten", "soon"]
    assert results.frontier(lines, "first_token") == {"plain", "near", "nearly", "soon"}
    assert results.frontier(lines, "answer") == {"plain", "soon"}


def test_ways_that_have_not_run_on_all_prompts_are_left_out(tmp_path: Path) -> None:
    results = of(tmp_path, plain=(0, 1, 1), late=(0.1, 0.5, 0.5))
    results.rows[Cell("model", "facts", 1, 1, "plain")] = results.rows[Cell("model", "facts", 1, 0, "plain")]
    assert [(line.way, line.prompts) for line in results.table("model", "facts")] == [("plain", 2)]
    (said,) = results.left_out(["plain", "late", "never run"])
    assert said.startswith("late has run on 1 of 2 prompts (model, facts)")
    assert said.endswith("add `--prompts 2`")


def test_the_page_is_that_of_the_committed_results() -> None:
    results = Results(COMMITTED / "leaderboard.json")
    assert results.controls_that_passed() == []
    assert page.markdown(results) == (COMMITTED / "leaderboard.md").read_text("utf-8")
    assert {way.partition(",")[0] for way in results.methods} == {path.stem for path in FOLDER.glob("*.py")}
