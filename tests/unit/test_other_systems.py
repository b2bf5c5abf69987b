"""Tests of this package as they run on Windows and macOS, as far as Linux can tell: `tests/other_system.py`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHOSEN = (
    "tests/parity/test_all_logits.py",
    "tests/unit/test_offload_memory.py",
    "tests/unit/test_server_structured.py",
)


def _as_on(system: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.other_system", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | {"SYSTEM": system, "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": "-p no:langsmith"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


# They need a disk tier, and timers that send signals.
_WITHOUT = {"darwin": "", "win32": "not outlive_the_process and not load_while_the_model and not time_is_limited"}


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [CHOSEN[1:2], pytest.param(CHOSEN, marks=pytest.mark.nightly)], ids=len)
@pytest.mark.parametrize("system", _WITHOUT)
def test_tests_pass_there(system: str, chosen: tuple[str, ...]) -> None:
    """With each commit, those of files, memory and processes."""
    done = _as_on(system, *chosen, "-k", _WITHOUT[system])
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    assert "failed" not in done.stdout


@pytest.mark.slow
def test_windows_has_no_disk_tier() -> None:
    """A control, too: what Python lacks there is lacking."""
    done = _as_on("win32", *CHOSEN[:1], "-k", "outlive_the_process")
    assert done.returncode == 1
    assert "ImportError: A disk tier needs a POSIX system" in done.stdout
    assert "use the tier file:///C:/FOLDER" in done.stdout
