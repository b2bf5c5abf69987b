"""kvboost 0.9.0 as a peer: in a process of its own, which waits while others have their turn."""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from kvboost_hf.assets import EMBEDDED_MODEL_DIR
from kvboost_hf.bench.models import Models
from kvboost_hf.bench.served import Served, Server
from kvboost_hf.bench.source import ModelSource

_SCRIPT = Path(__file__).with_name("kvboost_process.py")


class KVBoostProcess:
    """The process; a context manager that ends it.

    Args:
        python: An interpreter that has kvboost.
        source: The model.
        folder: For a random model's weights, and for what the process says.
    """

    def __init__(self, python: str, source: ModelSource, folder: Path) -> None:
        name = source.name or str(EMBEDDED_MODEL_DIR)
        if source.random is not None:
            source.load().save_pretrained(folder)
            source.tokenizer().save_pretrained(folder)
            name = str(folder)
        command = [python, "-I", str(_SCRIPT), name, source.device, source.dtype, str(torch.get_num_threads())]
        self._said = (folder / "kvboost.log").open("w+", encoding="utf-8")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True
        )

    def __enter__(self) -> "KVBoostProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()
        self._said.close()

    def peers(self) -> "list[KVBoostPeer]":
        """One for each of its ways to repair."""
        return [KVBoostPeer(f"kvboost-{way}", way, self) for way in ("none", "selective", "cacheblend")]

    def ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Send a line and wait for its answer.

        Raises:
            OSError: the process has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._said.seek(0)
            last = [text for text in self._said if text.strip()][-1:]
            raise OSError(f"kvboost has ended with status {self._process.wait()}: {''.join(last).strip()}")
        told: dict[str, Any] = json.loads(line)
        return told


@dataclass(frozen=True, slots=True)
class KVBoostPeer:
    """One of its ways to repair."""

    name: str
    strategy: str
    process: KVBoostProcess

    def refusal(self, models: Models, tokenizer: Any) -> str | None:
        """Why it cannot serve this model here, or None."""
        try:
            self.open(models, tokenizer, None)
        except OSError as error:
            return str(error)
        return None

    def open(self, models: Models, tokenizer: Any, folder: Path | None) -> Server:
        """A new engine; it keeps nothing in folders."""
        self.process.ask({"open": self.strategy})
        return _Engine(self, tokenizer)


class _Engine:
    def __init__(self, peer: KVBoostPeer, tokenizer: Any) -> None:
        self._peer, self._tokenizer = peer, tokenizer

    def answer(self, ids: Sequence[int], max_new_tokens: int) -> Served:
        """See `Server.answer`; what it says to have reused is what it says."""
        asked = {"engine": self._peer.strategy, "text": self._tokenizer.decode(ids), "max_new_tokens": max_new_tokens}
        found = self._peer.process.ask(asked)
        seen = found.pop("prompt_tokens")
        assert seen == len(ids), f"kvboost saw {seen} tokens of {len(ids)}"
        return Served(**found)

    def close(self) -> None:
        """See `Server.close`."""
