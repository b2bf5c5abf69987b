"""`python -m tests.agents`: a day of each agent, as a table in Markdown for docs/recipes/coding-agents.md."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.agents.clients import AGENTS
from tests.agents.day import live
from tests.agents.service import small_model, tokenizer_with_tools

_HEAD = """\
| client | version | session | turns | tokens of prompts | shared with a prompt before | of these reused |
| --- | --- | --- | ---: | ---: | ---: | ---: |"""
_KINDS = {
    "first": "new",
    "second": "resumed, after a restart of the server",
    "third": "new, with a known head",
    "fourth": "long",
}


def main() -> None:
    """Print the table."""
    tokenizer, told = tokenizer_with_tools(), [_HEAD]
    for agent in AGENTS:
        with TemporaryDirectory(dir=Path.home()) as folder:  # Codex CLI takes no home in /tmp
            day = live(agent, small_model(tokenizer), tokenizer, Path(folder))
        for name, turns in day.sessions.items():
            tokens, ideal = (sum(getattr(turn, what) for turn in turns) for what in ("tokens", "ideal"))
            reused = sum(min(turn.cached, turn.ideal) for turn in turns) / max(ideal, 1)
            cells = (agent.name, agent.version, _KINDS[name], len(turns), f"{tokens:,}", f"{ideal:,}", f"{reused:.1%}")
            told.append(f"| {' | '.join(map(str, cells))} |")
        told += [f"{agent.name}: {path} was refused with {status}: {body}" for path, status, body in day.refused]
        told += [f"{agent.name}: {wrong}" for wrong in day.wrong]
        told.append(f"{agent.name}: ignored, and named: {', '.join(sorted(day.ignored)) or 'nothing'}.")
    sys.stdout.write("\n".join(told) + "\n")


if __name__ == "__main__":
    main()
