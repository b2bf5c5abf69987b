"""A day of a coding agent: a session with tools, the same after a restart of the server, a new one, a long one."""

import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.agents.clients import Agent
from tests.agents.scripted import Turn
from tests.agents.service import Service, serving

LONG = 50  # turns of the long session


@dataclass
class Day:
    """What has happened.

    Attributes:
        sessions: By name, the turns of each session.
        aside: Requests beside the sessions, such as those for titles.
        refused: Each request that was answered with an error: path, status and body.
        ignored: What the server has named as ignored.
        wrong: What the agent did not do, in sentences.
    """

    sessions: dict[str, list[Turn]] = field(default_factory=dict)
    aside: list[Turn] = field(default_factory=list)
    refused: list[tuple[str, int, str]] = field(default_factory=list)
    ignored: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)

    def add(self, service: Service) -> None:
        """Add what a server has seen until it ended."""
        for turn in service.engine.turns:
            (self.sessions.setdefault(turn.errand, []) if turn.errand else self.aside).append(turn)
        self.refused += service.refused
        self.ignored |= service.ignored

    def expect(self, done: bool, what: str) -> None:
        """Note what was to be done, unless it was."""
        if not done:
            self.wrong.append(what)


def live(agent: Agent, model: Any, tokenizer: Any, folder: Path, long: int = LONG) -> Day:
    """Let an agent work through two servers, the second of which finds the K/V of the first on disk.

    Args:
        agent: Which.
        model: The model of the servers; its answers are scripted.
        tokenizer: The tokenizer of the model.
        folder: An empty folder, for the project, the agent's home and the K/V.
        long: Turns of the long session; 0 for none.
    """
    home, project, kv = (folder / name for name in ("home", "project", "kv"))
    home.mkdir()
    project.mkdir()
    image = project / "square.png"
    image.write_bytes(_png())
    scripts = {
        "first": agent.work("first", str(image)),
        "second": agent.look("second"),
        "third": agent.look("third"),
        "fourth": agent.repeat("fourth", long),
    }
    day = Day()

    def ask(service: Service, name: str, resume: bool = False) -> None:
        told = agent.ask(f"Do errand-{name}.", home=home, project=project, url=service.url, resume=resume)
        day.expect(f"{name}-done" in told, f"The {name} errand did not end with its answer: {told[-300:]}")

    with serving(model, tokenizer, kv, scripts) as service:
        ask(service, "first")
        written = project / "first.txt"
        day.expect(
            written.exists() and written.read_text(encoding="utf-8") == "written by first\n", "No file is there."
        )
    day.add(service)
    with serving(model, tokenizer, kv, scripts) as service:
        ask(service, "second", resume=True)
        ask(service, "third")
        if long:
            ask(service, "fourth")
    day.add(service)
    return day


def _png() -> bytes:
    """A red square of 8 by 8 points."""

    def part(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    rows = (b"\0" + b"\xff\0\0" * 8) * 8
    header = struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", header) + part(b"IDAT", zlib.compress(rows)) + part(b"IEND", b"")
