"""No call walks farther through the package than docs/design.md says."""

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

pytestmark = pytest.mark.skipif(
    Version(version("transformers")) < Version("5.24") or sys.version_info >= (3, 13),
    reason="the table is that of the tested release, with a Python that counts the changes of dicts",
)
_ROOT = Path(__file__).parents[2]
_CHAT, _FILES = re.compile(r"a chat request enters (\d+) files"), re.compile(r"^(\d+) files: ", re.M)
_ROW = re.compile(r"^\| (\w+) \| (\d+) \| (\d+) \| (\d+) \|$", re.M)


def _table(text: str) -> dict[str, dict[str, int]]:
    """The rows of the table of walks."""
    rows = _ROW.findall(text)
    return {name: dict(zip(("files", "changes", "calls"), map(int, counts), strict=True)) for name, *counts in rows}


def _walk(*flags: str) -> str:
    """What the script says, in a process of its own: what other tests have left behind is walked through, too."""
    command = [sys.executable, "-W", "ignore", str(_ROOT / "benchmarks" / "walk.py"), *flags]
    env = os.environ | {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=_ROOT, env=env, capture_output=True, text=True, timeout=600, check=True).stdout


def test_a_chat_request_enters_no_more_files_than_the_page_says() -> None:
    allowed, found = _CHAT.search((_ROOT / "docs" / "design.md").read_text()), _FILES.search(_walk("--chat"))
    assert allowed is not None
    assert found is not None
    assert 0 < int(found[1]) <= int(allowed[1])


def test_calls_walk_no_farther_than_the_table_says() -> None:
    allowed = _table((_ROOT / "docs" / "design.md").read_text())
    found = _table(_walk())
    assert allowed.keys() == found.keys()
    own = found.keys() - {"transformers"}
    farther = {name: (found[name], allowed[name]) for name in own if _exceeds(found[name], allowed[name])}
    assert not farther, "found, allowed"


def _exceeds(found: dict[str, int], allowed: dict[str, int]) -> bool:
    return any(found[name] > allowed[name] for name in allowed)


def test_more_than_the_table_says_is_found() -> None:
    row = {"files": 3, "changes": 20, "calls": 40}
    assert not _exceeds(row, row)
    for name in row:
        assert _exceeds(row | {name: row[name] + 1}, row)
