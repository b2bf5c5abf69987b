"""The server in a storm, and after it."""

import json
import os
import random
import signal
import time
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_server_that_was_killed_knows_what_it_said(storm: Any, tmp_path: Path) -> None:
    prompts = storm.Prompts(0, 0)
    prompts.save(str(tmp_path / "model"))
    command = [*storm.OURS, *storm.OPTIONS.split(), "--model", str(tmp_path / "model"), "--model-name", "reader"]
    body = {"model": "reader", "messages": prompts.chats[0], "max_tokens": 12, "temperature": 0}
    known = []
    for _ in range(2):
        given = [*command, "--disk-cache-dir", str(tmp_path / "kept")]
        with storm.serving(given, environment={"TMPDIR": str(tmp_path)}) as server:
            client = storm.Client(server.port, storm.Tally())
            answer = json.loads(client.post("/v1/chat/completions", body))
            assert answer["choices"][0]["message"]["content"] == prompts.said(0, 12)
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            # On a model this small, it is a matter of the machine whether loading is faster than computing.
            known.append(cached + client.get("/v1/stats")["store"]["not_worth_loading"])
            until = time.monotonic() + 60
            while not client.get("/v1/stats")["store"]["tiers"]["disk"]["chunks"]:
                assert time.monotonic() < until, "Nothing was written."
                time.sleep(0.02)
            client.close()
            os.kill(server.pid, signal.SIGKILL)
    assert known[0] == 0 < known[1]
