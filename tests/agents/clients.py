"""The coding agents: how each is configured, started, resumed, and what its tools are called."""

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.agents.scripted import Step

FOLDER = Path(__file__).with_name("node_modules")
MODEL = "coder"


@dataclass(frozen=True)
class Agent:
    """A coding agent.

    Args:
        name: The client's name for people.
        package: The npm package.
        command: The name of its program.
        first: Arguments that ask it something, before the text.
        again: Arguments that go on with the last session, before the text.
        configure: Writes its settings: takes its home folder and the server's address, returns its environment.
        shell: The call of a tool that runs a command: takes the mark of the step and the command.
        read_image: The call of a tool that looks at an image: takes its path.
    """

    name: str
    package: str
    command: str
    first: tuple[str, ...]
    again: tuple[str, ...]
    configure: Callable[[Path, str], dict[str, str]]
    shell: Callable[[str, str], str]
    read_image: Callable[[str], str]

    @property
    def program(self) -> Path:
        """Where npm has put it."""
        return FOLDER / ".bin" / self.command

    @property
    def version(self) -> str:
        """The installed version."""
        return str(json.loads((FOLDER / self.package / "package.json").read_text(encoding="utf-8"))["version"])

    def ask(self, text: str, *, home: Path, project: Path, url: str, resume: bool = False) -> str:
        """Run it in a project until it ends; returns what it prints.

        Raises:
            AssertionError: it failed, or took more than ten minutes.
        """
        environment = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "TERM")}
        environment |= {"HOME": str(home), "NO_PROXY": "*"} | self.configure(home, url)
        command = [str(self.program), *(self.again if resume else self.first), text]
        ended = subprocess.run(
            command,
            cwd=project,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert ended.returncode == 0, f"{command}: {ended.returncode}\n{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
        return ended.stdout + ended.stderr

    def work(self, mark: str, image: str) -> list[Step]:
        """Files are listed, one is written, an image is looked at."""
        return [
            Step(f"{mark}-list", self.shell(f"{mark}-list", "ls -a")),
            Step(f"{mark}-write", self.shell(f"{mark}-write", f"echo 'written by {mark}' > {mark}.txt")),
            Step(image, self.read_image(image)),
            _done(mark),
        ]

    def look(self, mark: str) -> list[Step]:
        """What was written is read."""
        return [Step(f"{mark}-read", self.shell(f"{mark}-read", "cat *.txt")), _done(mark)]

    def repeat(self, mark: str, turns: int) -> list[Step]:
        """So many turns with a call of a tool, the last one without."""
        marks = [f"{mark}-{turn:03}" for turn in range(1, turns)]
        return [*(Step(each, self.shell(each, f"seq {turn}")) for turn, each in enumerate(marks)), _done(mark)]


def _done(mark: str) -> Step:
    return Step(f"{mark}-done", f"All is done: {mark}-done.")


def called(name: str, **arguments: Any) -> str:
    """A call of a tool, as Hermes and Qwen write it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _claude(home: Path, url: str) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "CLAUDE_CONFIG_DIR": str(home / "claude"),
    }


def _codex(home: Path, url: str) -> dict[str, str]:
    folder = home / "codex"
    folder.mkdir(parents=True, exist_ok=True)
    settings = f"""
model = "{MODEL}"
model_provider = "kvboost"
model_context_window = 65536
check_for_update_on_startup = false

[model_providers.kvboost]
name = "kvboost"
base_url = "{url}/v1"
wire_api = "responses"
"""
    (folder / "config.toml").write_text(settings, encoding="utf-8")
    return {"CODEX_HOME": str(folder)}


def _opencode(home: Path, url: str) -> dict[str, str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {MODEL: {"limit": {"context": 65536, "output": 32000}}},
    }
    settings = {
        "model": f"kvboost/{MODEL}",
        "small_model": f"kvboost/{MODEL}",
        "provider": {"kvboost": provider},
        "autoupdate": False,
        "permission": {"*": "allow"},
    }
    folder = home / ".config" / "opencode"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "opencode.json").write_text(json.dumps(settings), encoding="utf-8")
    return {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"}


_CLAUDE_TOOLS = ("--allowedTools", "Bash,Read,Write,Edit", "-p")
AGENTS = (
    Agent(
        name="Claude Code",
        package="@anthropic-ai/claude-code",
        command="claude",
        first=_CLAUDE_TOOLS,
        again=("--continue", *_CLAUDE_TOOLS),
        configure=_claude,
        shell=lambda mark, command: called("Bash", command=command, description=mark),
        read_image=lambda path: called("Read", file_path=path),
    ),
    Agent(
        name="Codex CLI",
        package="@openai/codex",
        command="codex",
        first=("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        again=("exec", "resume", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--last"),
        configure=_codex,
        shell=lambda mark, command: called("exec_command", cmd=f"{command} # {mark}"),
        read_image=lambda path: called("view_image", path=path),
    ),
    Agent(
        name="OpenCode",
        package="opencode-ai",
        command="opencode",
        first=("run",),
        again=("run", "--continue"),
        configure=_opencode,
        shell=lambda mark, command: called("bash", command=command, description=mark),
        read_image=lambda path: called("read", filePath=path),
    ),
)
