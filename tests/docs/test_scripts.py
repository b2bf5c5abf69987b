"""Every script in examples/ runs, and prints what its reader was promised."""

import re
import runpy
from collections.abc import Callable

import pytest

from tests.docs.pages import ROOT

SCRIPTS = ROOT / "examples"
Run = Callable[[str], str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a script; returns what it has printed."""

    def printed(name: str) -> str:
        runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return printed


def counts(text: str, pattern: str) -> list[int]:
    """The numbers that a pattern finds."""
    return [int(number) for number in re.findall(pattern, text)]


def test_no_script_is_left_out() -> None:
    tested = {name.removeprefix("test_the_").removesuffix("_script") for name in globals() if name.endswith("_script")}
    assert {path.stem for path in SCRIPTS.glob("*.py")} == tested


def test_the_chat_script(run: Run) -> None:
    out = run("chat")
    answers = ["Maria lives in Rome.", "The lamp is red.", "Maria likes soup.", "The lamp stands in the hall."]
    assert [line.partition("  [")[0] for line in out.splitlines()] == answers
    reused = counts(out, r"(\d+) of them reused")
    assert reused[0] == 0
    assert sorted(set(reused)) == reused
    assert reused[-1] > 80


def test_the_retrieval_script(run: Run) -> None:
    out = run("retrieval")
    answers = ["Max lives in Denver.", "The chair is green.", "Jane has six goats."]
    assert re.findall(r"\? (.*?) \(plain: (.*?)\)", out) == [(answer, answer) for answer in answers]
    assert all(moved > 60 for moved in counts(out, r"(\d+) moved"))


def test_the_grpo_script(run: Run) -> None:
    pytest.importorskip("trl", reason="the extra `trl`")
    computed = counts(run("grpo"), r"(\d+) computed")
    assert len(computed) == 2
    assert max(computed) < 120  # of 640


def test_the_pipeline_script(run: Run) -> None:
    out = run("pipeline")
    assert "Maria lives in Rome." in out
    assert "Maria plays the piano." in out
    first, second = counts(out, r"(\d+) reused")
    assert first == 0
    assert second > 150


def test_the_streaming_script(run: Run) -> None:
    out = run("streaming")
    assert "3 layers in files" in out
    assert "Maria lives in Rome.\nMaria likes soup.\n" in out
    assert counts(out, r"(\d+) calls of streamed layers")[0] > 9


def test_the_drafts_script(run: Run) -> None:
    out = run("drafts")
    assert "Maria lives in Rome.\nMaria plays the piano.\n" in out
    assert counts(out, r"of (\d+) drafted tokens")[0] > 5


def test_the_quantized_script(run: Run) -> None:
    out = run("quantized")
    assert out.count("Maria lives in Rome.") == 2
    exact, codes = (float(size) for size in re.findall(r"([\d.]+) MiB", out))
    assert codes < exact / 2


def test_the_client_script(run: Run, server_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBOOST_URL", server_url)
    out = run("client")
    assert "Maria lives in Rome." in out
    assert "Maria plays the piano." in out
    assert counts(out, r"(\d+) of them reused")[1] > 80
