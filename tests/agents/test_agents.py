"""Coding agents work through the server: tools, files, an image, a restart, fifty turns; what is shared is reused."""

from pathlib import Path
from typing import Any

import pytest

from tests.agents.clients import AGENTS, Agent
from tests.agents.day import LONG, Day, live
from tests.agents.service import small_model, tokenizer_with_tools

_SHARE = 0.02  # of a prompt that may be computed although it was computed before
pytestmark = [pytest.mark.nightly, pytest.mark.slow]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizer_with_tools()


def _check(day: Day, turns: dict[str, int]) -> None:
    assert not day.refused
    assert not day.wrong
    assert {name: len(session) for name, session in day.sessions.items()} == turns
    for turn in [*day.aside, *(turn for session in day.sessions.values() for turn in session)]:
        assert turn.cached >= turn.ideal - _SHARE * turn.tokens, turn
    first = day.sessions["second"][0]
    assert first.cached > 0.95 * first.tokens  # computed by the server before


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.command)
def test_an_agent_works_all_day(agent: Agent, tokenizer: Any, tmp_path: Path) -> None:
    if not agent.program.exists():
        pytest.skip(f"{agent.name} is not installed: run `make agents`")
    day = live(agent, small_model(tokenizer), tokenizer, tmp_path)
    _check(day, {"first": 4, "second": 2, "third": 2, "fourth": LONG})


def test_an_agent_works_with_a_real_model(tokenizer: Any, tmp_path: Path) -> None:
    agent = next(agent for agent in AGENTS if agent.command == "opencode")  # has the shortest prompts
    if not agent.program.exists():
        pytest.skip(f"{agent.name} is not installed: run `make agents`")
    from recipes.real_model import load

    day = live(agent, load()[0], tokenizer, tmp_path, long=0)
    _check(day, {"first": 4, "second": 2, "third": 2})
