"""Progress is shown on standard error, on a terminal and elsewhere, and each command says what to type next."""

import argparse
import json
import os
import re
import shlex
import shutil
import sys
import threading
from io import StringIO
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

from kvboost_hf.assets import EMBEDDED_MODEL_DIR
from tests.internals.cli import command_line, main, next_steps
from tests.internals.disk import DiskTier
from tests.internals.top import Progress, duration

pytestmark = pytest.mark.daily

TEXT = "Anna lives in Oslo. She plays the piano. The lamp is red. It costs ten coins. " * 8


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


class Gone(StringIO):
    """A reader that has left, as `head` does."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands on small models take less than two seconds."""
    for name in ("_FIRST_LINE_S", "_LINE_EVERY_S", "_REWRITE_S"):
        monkeypatch.setattr(f"kvboost_hf.outputs.{name}", 0.002)


def typed(out: str) -> list[str]:
    """The commands at the end of an output, which must be ones that there are."""
    _, _, last = out.partition("\nNext:\n")
    commands = re.findall(r"^  kvboost-hf (.*)$", last, re.MULTILINE)
    for command in commands:
        command_line().parse_args(shlex.split(command, comments=True))
    return [command.split()[0] for command in commands]


def until(text: str, written: StringIO) -> None:
    """Wait for a thread to have written a text, in which durations are 0 s: on a busy machine they may be longer."""
    for _ in range(2000):
        if text in re.sub(r"\(\d+ s\)", "(0 s)", written.getvalue()):
            return
        threading.Event().wait(0.005)
    pytest.fail(f"{text!r} is not in {written.getvalue()!r}")


@pytest.mark.usefixtures("quick")
def test_lines_where_no_terminal_is(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    with Progress("loading it") as shown:
        until("loading it (0 s)\n", stderr)  # without a call that would say so
        shown.show("answering", 1000, 2000)
        until("answering: 1,000 of 2,000 (0 s)\n", stderr)
    told = stderr.getvalue()
    assert "\r" not in told
    threading.Event().wait(0.02)
    assert stderr.getvalue() == told


def test_what_is_quick_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for stderr in (StringIO(), Terminal()):
        monkeypatch.setattr(sys, "stderr", stderr)
        with Progress("loading it") as shown:
            shown.show("answering", 1, 2)
        assert stderr.getvalue() == ""


def test_lines_in_a_log_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    with monkeypatch.context() as patch:
        patch.setattr("threading.Thread.start", lambda thread: None)
        patch.setattr("threading.Thread.join", lambda thread: None)
        lines: list[str] = []
        shown = Progress("loading it", lines.append)
        patch.setattr(shown._ended, "wait", lambda seconds: waits.append(seconds) or len(waits) > 3)
        shown._run()
    assert waits == [2, 10, 10, 10]
    assert lines == ["loading it (0 s)"] * 3


@pytest.mark.usefixtures("quick")
def test_one_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("COLUMNS", "40")
    with Progress("loading it") as shown:
        until("loading it", stderr)
        shown.show("a long step " * 10)
        until("a long step", stderr)
        with shown.aside():
            until_now = len(stderr.getvalue())
            assert not stderr.getvalue().rpartition("\r")[2].strip()  # the line is gone
            threading.Event().wait(0.02)
            assert len(stderr.getvalue()) == until_now  # and stays away
    told = stderr.getvalue()
    assert "\n" not in told
    assert max(map(len, told.split("\r"))) < 40
    assert not told.rpartition("\r")[2].strip()


@pytest.mark.usefixtures("quick")
@pytest.mark.skipif(not hasattr(os, "openpty"), reason="a terminal of Unix")
def test_a_terminal_of_unknown_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `script` and containers make one: 0 columns and 0 lines."""
    monkeypatch.delenv("COLUMNS", raising=False)
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w") as stderr, os.fdopen(ours, "rb", buffering=0) as screen:
        monkeypatch.setattr(sys, "stderr", stderr)
        with Progress("loading it"):
            assert b"loading it" in b"".join(screen.read(20) for _ in range(3))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("closed", [True, False])
def test_a_reader_that_has_left_ends_no_command(closed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = StringIO() if closed else Gone()
    monkeypatch.setattr(sys, "stderr", stderr)
    with Progress("loading it") as shown:
        if closed:
            stderr.close()
        shown._thread.join(5)
        assert not shown._thread.is_alive()


def test_durations() -> None:
    assert [duration(seconds) for seconds in (0.2, 59.4, 59.6, 3600)] == ["0 s", "59 s", "1 min 0 s", "60 min 0 s"]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("command", "steps"),
    [
        ("check", ["demo", "verify"]),
        ("doctor", []),
        ("bench --random 1x64 --arms exact --workloads few-shot --prompts 2 --repeats 1 --max-new-tokens 2", None),
    ],
)
def test_commands_show_that_they_go_on(
    command: str, steps: list[str] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    main(command.split())
    told = capsys.readouterr()
    assert re.search(r"^[a-z].* \(\d+ s\)$", told.err, re.MULTILINE)
    assert not re.search(r"\(\d+ s\)$", told.out, re.MULTILINE)
    assert typed(told.out) == (["bench", "verify", "serve"] if steps is None else steps)
    if command == "doctor":
        assert "kvboost-hf d" in told.out.splitlines()[-1]


@pytest.mark.usefixtures("quick")
def test_bench_shows_each_step_and_leaves_out_what_does_not_apply(capsys: pytest.CaptureFixture[str]) -> None:
    command = "bench --random 1x64 --arms exact --workloads few-shot chat --prompts 2 --max-new-tokens 2 --json -"
    assert main(command.split()) == 0
    told = capsys.readouterr()
    assert {row["right"] for row in json.loads(told.out)["rows"]} == {None}  # random weights know nothing
    assert "right" not in told.err
    for step in ("few-shot, warming up: 0 of 16 ", "few-shot, round 1 of 2: ", "chat, round 2 of 2: "):
        assert step in told.err
    assert "Measured plain, exact on few-shot, chat in " in told.err
    assert typed(told.err) == ["bench", "verify", "serve"]


@pytest.mark.usefixtures("quick")
def test_verify_and_warm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, tier = tmp_path / "text.txt", f"disk:{tmp_path / 'tier'}"
    text.write_text(TEXT, encoding="utf-8")
    assert main(["verify", "--prompts", str(text), "--max-new-tokens", "2", "--json", "-"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["ok"]
    assert re.search(r"^answering: \d of \d+ \(\d+ s\)$", told.err, re.MULTILINE)
    assert typed(told.err) == ["serve"]
    command = ["warm", str(text), "--tiers", tier, "--salt", "secret", "--chunk-size", "64", "--dtype", "float32"]
    assert main(command) == 0
    told = capsys.readouterr()
    assert "(0 s)" in told.err
    assert f"--dtype float32 --chunk-size 64 --tiers {tier} --salt '…'" in told.out
    assert "secret" not in told.out
    assert typed(told.out) == ["serve", "inspect"]
    assert main(["inspect", "--tiers", tier]) == 0
    assert typed(capsys.readouterr().out) == ["warm", "serve"]


@pytest.mark.parametrize("model", [None, "acme/my model"])
def test_the_next_commands_are_for_the_same_model(model: str | None) -> None:
    options = argparse.Namespace(model=model, dtype="bfloat16")
    lines = next_steps(options, "demo", "check", "bench", "verify", "serve")
    assert len(typed(lines)) == 5
    assert lines.count(f"--model {shlex.quote(model or 'NAME')} --dtype bfloat16") == 5


@pytest.mark.parametrize("command", ["demo --figure", "verify --figure", "bench --html"])
def test_without_matplotlib_nothing_is_measured(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*command.split(), str(tmp_path / "figure.png")]) == 2
    assert "needs matplotlib: pip install '.[demo]' in a clone" in capsys.readouterr().err


def test_without_jinja_it_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("transformers.utils.chat_template_utils.is_jinja_available", lambda: False)
    _compile_jinja_template.cache_clear()
    assert main(["demo"]) == 2
    assert "kvboost-hf: apply_chat_template requires jinja2 to be installed" in capsys.readouterr().err


def test_what_does_not_load_is_named_with_the_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = ("check", "bench", "fits --vram-budget 1GB")
    for command in commands:
        assert main([*command.split(), "--model", str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert f"The model '{tmp_path}' does not load: the folder has no config.json. Pass the name" in error
    shutil.copy(EMBEDDED_MODEL_DIR / "config.json", tmp_path)
    assert main(["check", "--model", str(tmp_path)]) == 2
    assert "the folder has no tokenizer (tokenizer.json). Pass the name" in capsys.readouterr().err
    missing = tmp_path / "missing.txt"
    for flag in ("--prompts", "--documents"):
        assert main(["verify", flag, str(missing)]) == 2
        assert f"{missing} must be a file that can be read" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["demo", "--repeats", "many"])
    assert "must be a whole positive number, got many" in capsys.readouterr().err


def test_who_stops_reading_sees_no_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As `kvboost-hf check | head -1` does."""
    read, write = os.pipe()
    os.close(read)
    with monkeypatch.context() as patch, os.fdopen(write, "w") as pipe:
        patch.setattr(sys, "stdout", pipe)
        assert main(["check"]) == 141
    assert "kvboost-hf: " not in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a file of Linux")
def test_a_full_disk_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    DiskTier(tmp_path, 10**6).close()
    assert main(["inspect", "--tiers", f"disk:{tmp_path}", "--json", "/dev/full"]) == 2
    assert "/dev/full cannot be written: No space left on device. Make room, or name" in capsys.readouterr().err
