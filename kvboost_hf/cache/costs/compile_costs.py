"""Decides when a graph of decoding is worth its compilation, and notes whether the model can have one at all."""

import logging
from typing import NamedTuple

from kvboost_hf.compat import KeptOnModel

_log = logging.getLogger("kvboost_hf")

# A compiled token took 11 ms less on an H100 (benchmarks/results/large-cuda.md), and a compilation is expected to take
# 45 s: so many tokens save as much.
SAVED_S = 0.011
TOKENS_PER_GRAPH = 4096
_MOST_COMPILATIONS = 6  # PyTorch makes 8 graphs of a forward at most
_MOST_BUFFERS = 100  # PyTorch records a graph for 128 sets of buffers at most
_COMPILED_S = 2.0  # a first step that took less has found a graph that fits
CHECKED_STEPS = 3  # CUDA graphs: one runs the kernels, one records them, and one replays them


class Graph(NamedTuple):
    """What a graph of decoding is made for."""

    columns: int  # of the buffers
    rows: int
    padded: bool


class CompileCosts(KeptOnModel):
    """Tokens that were decoded with one model, and the graphs that they have paid for.

    The first graph is made when so many tokens were decoded without one that a graph would have saved the time of its
    compilation. Each further one is made when as many tokens again were decoded, with graphs or without. So nobody
    waits longer for compilations than decoding has taken, and whoever decodes little never waits. The second size of
    buffers makes a graph for all sizes.

    Attributes:
        failure: Why no more graphs are used for the model; None if they are.
    """

    def __init__(self) -> None:
        self.failure: str | None = None
        self._decoded = self._paid = self._compilations = self._buffers = 0
        self._compiling_s = 0.0  # that the last compilation has taken
        self._left: dict[Graph, int] = {}  # of each graph that was asked for, the steps to check

    @property
    def _price(self) -> int:
        """Tokens that the next graph costs."""
        return max(TOKENS_PER_GRAPH, int(self._compiling_s / SAVED_S))

    def decoded(self) -> None:
        """A token was decoded, in each row."""
        self._decoded += 1

    def reason_against(self, graph: Graph) -> str | None:
        """Why a graph is not worth making now; None if it is, or was made."""
        if self._buffers >= _MOST_BUFFERS:
            return f"{_MOST_BUFFERS} caches were decoded in graphs already; keep one cache for several calls"
        if graph in self._left:
            return None
        if self._compilations >= _MOST_COMPILATIONS:
            return f"{_MOST_COMPILATIONS} graphs were compiled already, for other sizes"
        if not self.compiles(graph):
            return None
        if (missing := self._paid + self._price - self._decoded) > 0:
            return f"compiling is worth it after {missing} more tokens"
        return None

    def compiles(self, graph: Graph) -> bool:
        """Whether a graph has to be compiled: PyTorch takes what has changed once for something that changes."""
        return len(self.sizes_like(graph)) < 2

    def sizes_like(self, graph: Graph) -> set[int]:
        """Columns of the graphs so far that differ from one in these alone."""
        return {other.columns for other in self._left if other[1:] == graph[1:]}

    def took_buffers(self) -> None:
        """A cache was given buffers that graphs have to be recorded for."""
        self._buffers += 1

    def is_new(self, graph: Graph) -> bool:
        """Whether no step was decoded with a graph so far."""
        return graph not in self._left

    def made(self, graph: Graph, seconds: float) -> None:
        """The first step with a graph took so long."""
        self._left[graph] = CHECKED_STEPS
        if seconds >= _COMPILED_S:
            self._compilations += 1
            self._paid += self._price
            self._compiling_s = seconds

    def is_checked(self, graph: Graph) -> bool:
        """Whether the first steps with a graph gave what the model gives without one."""
        return self._left.get(graph) == 0

    def passed(self, graph: Graph) -> None:
        """A step with a graph gave what the model gives without one."""
        self._left[graph] -= 1

    def fail(self, model_name: str, reason: str) -> None:
        """Use no more graphs for the model."""
        if self.failure is None:
            self.failure = reason
            _log.warning("From now on, %s decodes without graphs, which takes longer: %s", model_name, reason)
