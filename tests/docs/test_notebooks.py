"""Every notebook runs in a kernel of its own, offline, and prints what its reader was shown."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import nbformat
import psutil
import pytest
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

from tests.docs.notebooks import ALONE, NOTEBOOKS, execute, printed, read, warned, with_parameters

_MARK = "KVBOOST_HF_TEST_OF_NOTEBOOKS"  # a variable that all processes of a notebook have
Run = Callable[[NotebookNode], NotebookNode]

by_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a notebook and looks whether processes of it are left."""
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "jupyter"))
    mark = uuid4().hex

    def ran(notebook: NotebookNode) -> NotebookNode:
        try:
            return execute(notebook, tmp_path, {**ALONE, _MARK: mark})
        finally:
            assert processes_with(mark) == []

    return ran


def processes_with(mark: str) -> list[list[str]]:
    """The commands of the processes that have this mark in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.cmdline())
        except psutil.Error:  # of another user, or gone
            continue
    return found


def code(*sources: str) -> NotebookNode:
    """A notebook of these cells."""
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])


def test_there_are_five() -> None:
    assert len(NOTEBOOKS) == 5


@pytest.mark.slow
@by_notebook
def test_it_prints_what_its_reader_was_shown(path: Path, run: Run) -> None:
    committed = read(path)
    ran = run(committed)
    assert printed(ran) == printed(committed), "run `make notebooks`, and look at what has changed"
    assert warned(ran) == warned(committed) == ""


@by_notebook
def test_it_says_what_it_is_for_takes_a_model_and_goes_on(path: Path) -> None:
    cells = read(path).cells
    assert re.match(r"# .+\n\n\*\*For\*\* .+\n\n\*\*It shows\*\* .+", cells[0].source, re.DOTALL)
    assert cells[1].metadata.tags == ["parameters"]
    assert re.match(r"MODEL = (DRAFT = )?None", cells[1].source)
    assert "## Next\n" in cells[-1].source


@pytest.mark.daily
@by_notebook
def test_its_links_lead_somewhere(path: Path) -> None:
    text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    targets = [target.split()[0] for target in re.findall(r"\]\(([^)#]+)", text)]
    assert len(targets) > 2
    assert [target for target in targets if not (path.parent / target).exists()] == []


def test_a_failing_cell_fails_and_leaves_no_process(run: Run) -> None:
    started = "import subprocess, sys\nslow = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    with pytest.raises(CellExecutionError, match="AssertionError"):
        run(code(started, "assert slow.poll() is not None"))


def test_a_process_that_is_left_would_be_noticed() -> None:
    mark = uuid4().hex
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(command, env={**os.environ, _MARK: mark}) as slow:
        assert processes_with(mark) == [command]
        slow.kill()
    assert processes_with(mark) == []


def test_another_output_or_a_warning_would_be_noticed(run: Run) -> None:
    shown = code("print(1)", "import sys\nsys.stderr.write('careful\\n')\nNone", "'a result'")
    ran = run(shown)
    assert printed(ran) == ["1\n", "careful\n", "'a result'"] != printed(shown)
    assert warned(ran) == "careful\n"


def test_outputs_that_vary_are_not_compared() -> None:
    one = code("print(1)")
    one.cells[0].outputs = [nbformat.v4.new_output("stream", text="1\n")]
    assert printed(one) == ["1\n"]
    one.cells[0].metadata.tags = ["varies"]
    assert printed(one) == [""]


@pytest.mark.daily
@by_notebook
def test_parameters_are_set_behind_their_cell(path: Path) -> None:
    changed = with_parameters(read(path), {"MODEL": "acme/reader", "DRAFT": "acme/draft"})
    lines = changed.cells[2].source.splitlines()
    assert lines == ["MODEL = 'acme/reader'", *["DRAFT = 'acme/draft'"] * (path.stem == "4_drafts")]
