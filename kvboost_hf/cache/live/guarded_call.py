"""Runs what is compiled of a model so that a failure costs time and nothing else.

generate() asks `get_compiled_call` for what it decodes with. `guard` stands before that method. A forward that fails,
while it is compiled, recorded or replayed, is undone in the cache and computed by the model itself; so are all later
ones of its kind. The first ones of each graph are computed twice, and the second result, without the graph, is the one
that counts: a graph that gives something else is used no more.
"""

import logging
import time
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedModel

from kvboost_hf.cache.costs import CompileCosts, Graph
from kvboost_hf.cache.identity.versions import COMPILED_CALL
from kvboost_hf.cache.layers.base import ReuseLayer
from kvboost_hf.cache.layers.static import StaticReuseLayer, StaticStateLayer
from kvboost_hf.cache.live import LiveKV
from kvboost_hf.cache.prompt import Kwargs
from kvboost_hf.compat import cache_in, tolerance

_log = logging.getLogger("kvboost_hf")
_LEAST_TOLERANCE = (
    1e-2  # float32 may be multiplied as TF32, in one order or another; what is wrong differs by far more
)


class GuardedCall:
    """Calls a compiled model by way of the cache that it is given.

    Args:
        compiled: The same, compiled.
    """

    def __init__(self, model: PreTrainedModel, compiled: Callable[..., Any]) -> None:
        self._model, self._compiled = model, compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a decoding step."""
        decode = getattr(cache_in(kwargs), "decode_with", None)
        if decode is None or args:  # a cache of somebody else
            return self._compiled(*args, **kwargs)
        return decode(self._model, self._compiled, kwargs)


def guard(model: PreTrainedModel) -> None:
    """Have generate() decode by `GuardedCall`, if it compiles."""
    if COMPILED_CALL not in model.__dict__:
        setattr(model, COMPILED_CALL, MethodType(_get_compiled_call, model))


def _get_compiled_call(self: PreTrainedModel, *args: Any, **kwargs: Any) -> GuardedCall:
    """Stands before the method of this name."""
    return GuardedCall(self, getattr(type(self), COMPILED_CALL)(self, *args, **kwargs))


def decode(live: LiveKV, model: PreTrainedModel, compiled: Callable[..., Any], kwargs: Kwargs) -> Any:
    """Run a decoding step on layers of a fixed size.

    Args:
        compiled: The same, compiled.

    Returns:
        What the model returns.
    """
    static, costs = live.static, CompileCosts.of(model)
    assert static is not None
    if costs.failure is not None:
        return model(**kwargs)
    for layer in live.static_layers:
        layer.follow()
    held = live.held + static.ahead
    graph = Graph(static.max_cache_len, *static.rows_of(kwargs))
    if not costs.is_checked(graph):
        for state in live.layers:
            if isinstance(state, StaticStateLayer):
                state.keep_state(held)
    static.in_step = True
    output, in_graph = run_checked(
        *(model, live.layers, graph, slice(held, held + 1)),
        compiled=lambda: compiled(**kwargs),
        plain=lambda: model(**kwargs),
        undo=lambda: static.rewind(live.layers, held),
        shown=lambda output: output.logits,
    )
    if in_graph:
        static.ahead += 1
        static.in_step = False
        costs.tokens += 1
    return output


def run_checked(
    model: PreTrainedModel,
    layers: Sequence[ReuseLayer],
    graph: Graph,
    columns: slice,
    *,
    compiled: Callable[[], Any],
    plain: Callable[[], Any],
    undo: Callable[[], bool],
    shown: Callable[[Any], torch.Tensor],
) -> tuple[Any, bool]:
    """Run a forward with a graph, or without one if that fails or is not known to be right yet.

    Args:
        columns: The columns that the forward appends to `layers`.
        compiled: Runs it with the graph.
        plain: Runs it without.
        undo: Takes back what the graph has appended; False if the layers are not as they were.
        shown: The numbers to compare of what either returns.

    Returns:
        What one of both has returned; whether it was the graph.
    """
    costs, name, began = CompileCosts.of(model), type(model).__name__, time.perf_counter()
    is_new = costs.is_new(graph)
    if is_new and costs.compiles(graph):
        _log.warning(
            "%s of %s is being compiled for %d rows and %d tokens: this call waits for it, a minute or more. "
            "`disable_compile=True` for generate(), or `max_cache_len=None` for the cache, turns it off.",
            *(_what(graph), name, graph.rows, graph.columns),
        )
    try:
        output = compiled()
        if is_new:
            seconds = time.perf_counter() - began
            costs.made(graph, seconds)
            _log.info("Compiling took %.1f s.", seconds)
        if costs.is_checked(graph):
            return output, True
        found, written = shown(output).float().clone(), _written(layers, columns)
    except Exception as error:  # of a compiler, of a driver, of a kernel: whatever it is, the model can do without
        if not undo():
            raise
        costs.fail(name, graph, f"a compiled step failed ({type(error).__name__}: {_first_line(error)})")
        return plain(), False
    del output  # its memory is the graph's
    if not undo():
        raise RuntimeError(f"A compiled step of {name} did not append one token to each layer.")
    expected = plain()
    _compare(costs, graph, name, [found, *written], [shown(expected), *_written(layers, columns)])
    return expected, False


def _what(graph: Graph) -> str:
    return f"A forward over up to {graph.tokens} tokens of a prompt" if graph.tokens > 1 else "Decoding"


def _written(layers: Sequence[ReuseLayer], columns: slice) -> list[torch.Tensor]:
    """Copies of the K/V of some columns, and of the states behind them."""
    found: list[torch.Tensor] = []
    for layer in layers:
        if isinstance(layer, StaticReuseLayer):
            found += [buffer[:, :, columns].clone() for buffer in layer.buffers]
        elif isinstance(layer, StaticStateLayer):
            found += layer.copies
    return found


def _compare(
    costs: CompileCosts, graph: Graph, name: str, found: list[torch.Tensor], expected: list[torch.Tensor]
) -> None:
    """Use graphs no more if a forward with one gave something else than a forward without."""
    allowed = max(_LEAST_TOLERANCE, tolerance(expected[0].dtype))
    for one, other in zip(found, expected, strict=True):
        off = float((one.float() - other.float()).norm() / other.float().norm().clamp(min=1e-30))
        if not off <= allowed:
            costs.fail(name, graph, f"a compiled step differed from a plain one by {off:.2g} of its norm")
            return
    costs.passed(graph)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:200]
