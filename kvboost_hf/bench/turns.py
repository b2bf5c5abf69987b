"""Lets several servers answer each prompt in turn."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType

from kvboost_hf.bench.served import Served, Server, reason


class Turns:
    """Servers, each on its own: one that fails takes part no longer. A context manager that closes them.

    Args:
        needed: One that all others are compared with: if it fails, so does everything.

    Attributes:
        failed: By name, why.
    """

    def __init__(self, needed: str) -> None:
        self._needed = needed
        self._servers: dict[str, Server] = {}
        self.failed: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._servers)

    def __enter__(self) -> "Turns":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, server in list(self._servers.items()):
            try:
                server.close()
            except Exception as error:
                self._servers.pop(name)
                self._fail(name, error)

    def open(self, name: str, make: Callable[[], Server]) -> None:
        """Let one more take part."""
        try:
            self._servers[name] = make()
        except Exception as error:  # of whatever kind: the others go on
            self._fail(name, error)

    def answer(self, ids: Sequence[int], max_new_tokens: int, first: int) -> dict[str, Served]:
        """The answers of all servers to one prompt, by name.

        Args:
            ids: The prompt.
            max_new_tokens: Length of an answer.
            first: Index of the server that begins, in the order in which they were opened, modulo their number.
        """
        names = list(self._servers)
        found: dict[str, Served] = {}
        for n in range(len(names)):
            name = names[(first + n) % len(names)]
            try:
                found[name] = self._servers[name].answer(ids, max_new_tokens)
            except Exception as error:
                self._fail(name, error)
        return {name: found[name] for name in names if name in found}

    def _fail(self, name: str, error: Exception) -> None:
        if name == self._needed:
            raise error
        self.failed[name] = reason(error)
        if (server := self._servers.pop(name, None)) is not None:
            with suppress(Exception):
                server.close()
