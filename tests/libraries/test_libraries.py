"""Real libraries over a real model: the same answers, and hardly more tokens than there have to be.

They are in an environment of their own: `make libraries`, or `python -m tests.environments libraries`, and this file
with the interpreter that it names. Elsewhere all of this is skipped.
"""

import json
import os
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from recipes import real_model
from tests.libraries.scenario import Scenario, scenarios

pytestmark = [
    pytest.mark.skipif(
        find_spec("kvpress") is None, reason="`python -m tests.environments libraries` makes its place"
    ),
    pytest.mark.slow,
]


@pytest.fixture(scope="module", autouse=True)
def model() -> None:
    """The model must be here, or to be had."""
    try:
        real_model.fetch()
    except OSError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("what", [pytest.param(what, id=name) for name, what in scenarios().items()])
def test_same_answers_and_no_token_twice(what: Scenario) -> None:
    if what.version is None:
        pytest.skip(f"{what.package} is not installed")
    found = _outcomes(what.file).get(what.name)
    assert found is not None, "the run of its file has ended before it"
    assert found["equal"], (found["failure"], found["answers"])
    least = found["plain"] if found["known"] else found["ideal"]
    assert found["ours"] <= least + found["slack"], (found["why"], found["failure"])


@cache
def _outcomes(file: str) -> dict[str, dict[str, Any]]:
    """What comes of the scenarios of a file, in a process of their own: libraries patch what they find."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "outcomes.json")
        command = [sys.executable, "-m", "tests.libraries", "--file", file, "--json", str(path)]
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        done = subprocess.run(command, cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True)
        assert path.exists(), done.stderr[-4000:]
        return {found["name"]: found for found in json.loads(path.read_text(encoding="utf-8"))}
