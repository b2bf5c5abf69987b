"""Runs compiled decoding steps, and goes on without a graph from the first failure on.

generate() asks `get_compiled_call` for what it decodes with. `guard` stands before that method. A step that fails,
while it is compiled, recorded or replayed, is undone in the cache and computed by the model itself; so are all later
ones. The first steps of each graph are computed twice, and the second result, without the graph, is the one that
counts: a graph that gives something else is used no more.
"""

import logging
import time
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedModel

from kvboost_hf.cache.costs.compile_costs import CompileCosts, Graph
from kvboost_hf.cache.identity.versions import COMPILED_CALL
from kvboost_hf.cache.layers.static import StaticReuseLayer
from kvboost_hf.cache.live.live_kv import LiveKV
from kvboost_hf.cache.prompt.hook import Kwargs
from kvboost_hf.compat import cache_in, tolerance

_log = logging.getLogger("kvboost_hf")
_LEAST_TOLERANCE = (
    1e-2  # float32 may be multiplied as TF32, in one order or another; what is wrong differs by far more
)


class GuardedCall:
    """Calls a compiled model by way of the cache that it is given.

    Args:
        model: The model.
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
        live: The layers, and what they hold.
        model: The model.
        compiled: The same, compiled.
        kwargs: The arguments of the step.

    Returns:
        What the model returns.
    """
    static, costs = live.static, CompileCosts.of(model)
    assert static is not None
    if costs.failure is not None:
        return model(**kwargs)
    held, began = live.held + static.ahead, time.perf_counter()
    graph = Graph(static.max_cache_len, *static.rows_of(kwargs))
    is_new, name = costs.is_new(graph), type(model).__name__
    if is_new and costs.compiles(graph):
        _log.warning(
            "Decoding of %s is being compiled for %d rows and %d tokens: this call waits for it, a minute or more. "
            "`disable_compile=True` for generate(), or `max_cache_len=None` for the cache, turns it off.",
            *(name, graph.rows, graph.columns),
        )
    try:
        output = compiled(**kwargs)
        if is_new:
            seconds = time.perf_counter() - began
            costs.made(graph, seconds)
            _log.info("Compiling took %.1f s.", seconds)
        if costs.is_checked(graph):
            static.ahead += 1
            costs.decoded()
            return output
        found, written = output.logits.float().clone(), _written(live.static_layers, held)
    except Exception as error:  # of a compiler, of a driver, of a kernel: whatever it is, the model can do without
        if not static.rewind(live.static_layers, held):
            raise
        costs.fail(name, f"a compiled step failed ({type(error).__name__}: {_first_line(error)})")
        return model(**kwargs)
    del output  # its memory is the graph's
    if not static.rewind(live.static_layers, held):
        raise RuntimeError(f"A compiled step of {name} did not append one token to each layer.")
    expected = model(**kwargs)
    _compare(costs, graph, name, [found, *written], [expected.logits, *_written(live.static_layers, held)])
    return expected


def _written(layers: list[StaticReuseLayer], column: int) -> list[torch.Tensor]:
    """Copies of the K/V of a column."""
    return [buffer[:, :, column].clone() for layer in layers for buffer in layer.buffers]


def _compare(
    costs: CompileCosts, graph: Graph, name: str, found: list[torch.Tensor], expected: list[torch.Tensor]
) -> None:
    """Use graphs no more if a step with one gave something else than a step without."""
    allowed = max(_LEAST_TOLERANCE, tolerance(expected[0].dtype))
    for one, other in zip(found, expected, strict=True):
        off = float((one.float() - other.float()).norm() / other.float().norm().clamp(min=1e-30))
        if not off <= allowed:
            costs.fail(name, f"a compiled step differed from a plain one by {off:.2g} of its norm")
            return
    costs.passed(graph)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:200]
