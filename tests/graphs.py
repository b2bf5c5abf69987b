"""A backend of torch.compile that counts graphs and runs, and fails when it is told to; and a CPU taken for a GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.fx import GraphModule, Interpreter, Node
from transformers import CompileConfig, GenerationMixin, PreTrainedModel

from tests.internals.cache import costs, decoding_form
from tests.internals.compat import calls


class Compiler:
    """A backend that runs graphs as they are, and counts them.

    Attributes:
        graphs: Those that were made.
        runs: How often they have run.
        change: Called before the making of a graph with 0, and before each run with its number; may raise. What it
            returns for a run, if anything, runs in place of the graph, and is given it and its inputs.
    """

    def __init__(self) -> None:
        self.graphs = self.runs = 0
        self.change: Callable[[int], Any] = lambda run: None

    def __call__(self, graph: GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.change(0)
        self.graphs += 1
        writes = any(node.op == "call_method" and node.target == "index_copy_" for node in graph.graph.nodes)

        def run(*given: Any) -> Any:
            if not writes or not is_of_model(graph):
                return graph.forward(*given)
            self.runs += 1
            other = self.change(self.runs)
            return graph.forward(*given) if other is None else other(graph, given)

        return run

    def __deepcopy__(self, memo: dict[int, Any]) -> "Compiler":
        return self  # CompileConfig copies what it holds

    @property
    def config(self) -> CompileConfig:
        """To be passed to generate() on a CPU."""
        config = CompileConfig(backend=self, fullgraph=True, mode=None)
        config._compile_all_devices = True  # type: ignore[assignment]
        return config


def is_of_model(graph: GraphModule) -> bool:
    """Whether a graph is that of a model, and not the one that notes its tokens."""
    return sum(node.target in ("linear", torch._C._nn.linear) for node in graph.graph.nodes) > 1


class StopsAt(Interpreter):
    """Runs a graph up to the n-th write to a buffer, and raises."""

    def __init__(self, graph: GraphModule, writes: int) -> None:
        super().__init__(graph)
        self._left = writes

    def run_node(self, n: Node) -> Any:
        found = super().run_node(n)
        if n.op == "call_method" and n.target == "index_copy_":
            self._left -= 1
            if not self._left:
                raise RuntimeError("CUDA error: the graph stopped")
        return found


@contextmanager
def pretended_gpu(compiler: Compiler, *, tokens_per_graph: int = 0) -> Iterator[None]:
    """Have generate(), and what decides on graphs, take the CPU for a GPU.

    Args:
        compiler: Compiles there.
        tokens_per_graph: How many tokens a graph costs.
    """
    ask = GenerationMixin._valid_auto_compile_criteria

    def on_gpu(self: Any, *args: Any, **kwargs: Any) -> bool:
        with mock.patch.object(PreTrainedModel, "device", torch.device("cuda")):
            return bool(ask(self, *args, **kwargs))

    with (
        mock.patch.object(GenerationMixin, "_valid_auto_compile_criteria", on_gpu),
        mock.patch.object(PreTrainedModel, "_default_compile_config", return_value=compiler.config),
        mock.patch.object(calls, "_COMPILED", ("cpu",)),
        mock.patch.object(decoding_form, "has_triton", return_value=True),
        mock.patch.object(costs, "TOKENS_PER_GRAPH", tokens_per_graph),
        mock.patch.object(costs, "SAVED_S", 1e9),
        mock.patch.object(decoding_form, "_LEAST_COLUMNS", 64),
        mock.patch.object(decoding_form, "_LEAST_NEW", 8),
    ):
        yield
