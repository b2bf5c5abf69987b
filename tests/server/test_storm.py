"""The server in a storm, and after it."""

import os
import random
from collections import deque
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import Listening
from tests.server.fake_engine import FakeEngine

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def storm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark, as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module("server_storm")


def test_a_storm_leaves_nothing_behind(storm: Any) -> None:
    result = storm.run(150, 8, 0)
    assert not result["first_errors"]
    assert result["counts"]["compared"] > 80
    assert {kind.__name__ for kind in storm.KINDS} < {*result["counts"]}


def test_wrong_answers_are_noticed(storm: Any, at: Listening, engine: FakeEngine) -> None:
    """Of an engine that says the same to everybody."""
    port = at.http.base_url.port
    rage = storm.Storm(storm.Process(os.getpid(), port), storm.Prompts(0, 0), 0)
    client = storm.Client(port, rage.tally)
    rage.work(client, deque([storm.chat] * 3), random.Random(0))
    client.close()
    assert len(rage.tally.errors) == 3
