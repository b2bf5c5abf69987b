"""Estimates the costs of computing and compiling, and decides when one of them is not worth it.

**A prompt on a CPU.** Without a past, SDPA is told that attention is causal, and leaves out most of what that hides.
Behind a past, transformers gives it a mask: SDPA works through what the mask hides, too, and turns it into numbers in
every layer. On a small model that takes longer than it takes to compute a short beginning again. `kvboost_fa2` has no
mask there: it attends to the past and to the rest apart, and merges both, which takes a little. Costs are counted in
operations, not measured, so that the same prompts are served in the same way each time; they follow what forwards of
the embedded model and of one with 8 layers of 512 take, within a tenth.

**Further columns in a decoding step** are measured where they may be free: see `free_columns`.

**A graph of decoding** is compiled when enough tokens are expected of it; `CompileCosts` also notes whether the model
can have one at all.
"""

import logging
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from kvboost_hf.compat import (
    KeptOnModel,
    bytes_per_token,
    input_device,
    layer_configs,
    remember,
    run_model,
    weights_come_and_go,
)

PIECE = 512  # tokens in a forward that follows reused ones; where fewer are left, reuse is never given up

# In the operations that a matrix product does meanwhile.
_MASK = 80  # to make an entry of a mask
_MASK_IN_LAYER = 160  # to turn it into a number
_LAYER = 30_000_000  # to launch what there is to do in a layer, however few tokens there are
_MASKED_PAIR = 0.9  # attention of a query to a key beside one in causal attention, half of which is still hidden
_MERGED = 50  # to merge two results of a query's attention, beside its attention to one token
_COPIED_BYTE = 45  # to copy a byte of K/V into memory that was not touched before
_SQUARE = 24  # operations of a layer for a token, in squares of its width, if it is an ordinary one


def pieces(filled: int, limit: int) -> list[int]:
    """Columns at which to begin a new forward, up to `limit`, behind which logits are wanted.

    In one forward over 1,000 tokens a mask costs more than reusing a tenth of them saves. In pieces, little is hidden.
    """
    return list(range(filled + PIECE, limit - PIECE // 2, PIECE))


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of computing a prompt, in operations."""

    token: int  # operations for a token, attention left out
    pair: int  # attention of a token to another one, or to itself
    layers: int  # how many there are

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Costs":
        """The costs of a decoder: by its parameters, or by its width if that gives more, as with packed weights."""
        layers = layer_configs(model.config)
        squares = sum(config.hidden_size**2 for config in layers)
        heads = sum(_width_of_heads(config) for config in layers)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        return cls(max(_SQUARE * squares, 2 * parameters), 4 * heads, len(layers))

    def whole(self, columns: int) -> float:
        """Operations for a prompt of which nothing is reused."""
        return columns * self.token + columns**2 / 2 * self.pair + self.layers * _LAYER

    def behind(self, filled: int, columns: int) -> float:
        """Operations for what is left of a prompt behind `filled` columns, in pieces, with SDPA."""
        starts = [filled, *pieces(filled, columns - 1)]
        masked = sum((stop - start) * stop for start, stop in zip(starts, [*starts[1:], columns], strict=True))
        per_entry = _MASKED_PAIR * self.pair + _MASK_IN_LAYER * self.layers + _MASK
        return (columns - filled) * self.token + masked * per_entry + len(starts) * self.layers * _LAYER

    def merged(self, filled: int, columns: int) -> float:
        """Operations for what is left of a prompt behind `filled` columns, with `kvboost_fa2`."""
        pairs = (columns**2 - filled**2) / 2
        merging = (columns - filled) * _MERGED
        return (columns - filled) * self.token + (pairs + merging) * self.pair + self.layers * _LAYER


def stored_per_computed(model: PreTrainedModel) -> int | None:
    """Tokens that take as long to store as one takes to compute; None where nobody waits for it, or it is unknown.

    About ten on the embedded model, and hundreds on one of half a billion parameters.
    """
    nbytes = bytes_per_token(model)
    if input_device(model).type != "cpu" or not nbytes:
        return None
    return Costs.of(model).token // (_COPIED_BYTE * nbytes) + 1


def _width_of_heads(config: Any) -> int:
    """All heads of a layer together."""
    heads, head_dim = getattr(config, "num_attention_heads", None), getattr(config, "head_dim", None)
    return heads * head_dim if isinstance(heads, int) and isinstance(head_dim, int) else int(config.hidden_size)


_FREE = 1.25  # times of a decoding step, in which further columns are nearly free
_MOST_FREE, _LEAST_FREE = 256, 8


def free_columns(model: PreTrainedModel) -> int:
    """How many more tokens a forward of one token can take and be a quarter longer at most; 0 where that is none.

    On a GPU a pass over the weights for one token waits for memory, and so does one where layers are streamed: there
    it is measured once, by forwards of the model over so many tokens without a past. On a CPU it is none: with
    135 million parameters in float32, 4 tokens more took 1.8 times as long with one thread, 1.5 times with two.
    """
    device = input_device(model)
    if no_column_is_free(model):
        return 0
    return remember(model, ("free columns", model.dtype, device), lambda: _find_free_columns(model))


def no_column_is_free(model: PreTrainedModel) -> bool:
    """Whether it is known without a measurement that each further token of a forward takes its time."""
    return input_device(model).type == "cpu" and not weights_come_and_go(model)


def _find_free_columns(model: PreTrainedModel) -> int:
    most, found, columns = _FREE * _seconds_of_forward(model, 1), 0, _LEAST_FREE
    while columns <= _MOST_FREE and _seconds_of_forward(model, 1 + columns) <= most:
        found, columns = columns, 2 * columns
    return found


def _seconds_of_forward(model: PreTrainedModel, tokens: int) -> float:
    ids = torch.ones(1, tokens, dtype=torch.long, device=input_device(model))
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        run_model(model, ids, None).logits[0, -1, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - began)
    return best


_log = logging.getLogger("kvboost_hf")

# A compiled token took 11 ms less on an H100 (benchmarks/results/large-cuda.md), and a compilation is expected to take
# 45 s: so many tokens save as much.
SAVED_S = 0.011
TOKENS_PER_GRAPH = 4096
_MOST_COMPILATIONS = 6  # PyTorch makes 8 graphs of a forward at most
_MOST_BUFFERS = 100  # PyTorch records a graph for 128 sets of buffers at most
_COMPILED_S = 2.0  # a first step that took less has found a graph that fits
PROMPTS_PER_GRAPH = 32  # so that a call with a `compile_config` does not wait for what few prompts gain by
CHECKED_STEPS = 3  # CUDA graphs: one runs the kernels, one records them, and one replays them


class Graph(NamedTuple):
    """What a graph is made for."""

    columns: int  # of the buffers
    rows: int
    padded: bool
    tokens: int = 1  # of a forward: more than one for the end of a prompt


class CompileCosts(KeptOnModel):
    """Tokens that were decoded with one model, and the graphs that they have paid for.

    The first graph is made when so many tokens were decoded without one that a graph would have saved the time of its
    compilation. Each further one is made when as many tokens again were decoded, with graphs or without. So nobody
    waits longer for compilations than decoding has taken, and whoever decodes little never waits. The second size of
    buffers makes a graph for all sizes.

    Graphs for the ends of prompts cost no tokens: see `reason_against_suffix`.

    Attributes:
        tokens: How many were decoded, in each row.
        failure: Why no more tokens are decoded with graphs; None if they are.
        suffix_failure: The same of the ends of prompts.
    """

    def __init__(self) -> None:
        self.failure: str | None = None
        self.suffix_failure: str | None = None
        self._suffixes: Counter[int] = Counter()  # ends of prompts by the tokens of their graph
        self.tokens = self._paid = self._compilations = self._buffers = 0
        self._compiling_s = 0.0  # that the last compilation has taken
        self._left: dict[Graph, int] = {}  # of each graph that was asked for, the steps to check

    @property
    def _price(self) -> int:
        """Tokens that the next graph costs."""
        return max(TOKENS_PER_GRAPH, int(self._compiling_s / SAVED_S))

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
        if (missing := self._paid + self._price - self.tokens) > 0:
            return f"compiling is worth it after {missing} more tokens"
        return None

    def reason_against_suffix(self, tokens: int) -> str | None:
        """Why a graph for the end of a prompt, of up to so many tokens, is not worth making now; None if it is.

        To be called once for each such end.
        """
        if self.suffix_failure is not None:
            return self.suffix_failure
        self._suffixes[tokens] += 1
        if (missing := PROMPTS_PER_GRAPH - self._suffixes[tokens]) >= 0:
            return f"compiling is worth it after {missing + 1} more prompts that end in up to {tokens} new tokens"
        return None

    def compiles(self, graph: Graph) -> bool:
        """Whether a graph has to be compiled: PyTorch takes what has changed once for something that changes."""
        ends = graph.tokens > 1
        alike = [other for other in self._left if other[1:3] == graph[1:3] and (other.tokens > 1) == ends]
        columns, tokens = {other.columns for other in alike}, {other.tokens for other in alike}
        return (len(columns) < 2 and graph.columns not in columns) or (len(tokens) < 2 and graph.tokens not in tokens)

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
        if seconds >= _COMPILED_S and graph.tokens == 1:
            self._compilations += 1
            self._paid += self._price
            self._compiling_s = seconds

    def is_checked(self, graph: Graph) -> bool:
        """Whether the first steps with a graph gave what the model gives without one."""
        return self._left.get(graph) == 0

    def passed(self, graph: Graph) -> None:
        """A step with a graph gave what the model gives without one."""
        self._left[graph] -= 1

    def fail(self, model_name: str, graph: Graph, reason: str) -> None:
        """Use no more graphs of this kind for the model."""
        if graph.tokens > 1:
            self.suffix_failure = reason
            _log.warning("From now on, %s computes the ends of prompts without graphs: %s", model_name, reason)
        elif self.failure is None:
            self.failure = reason
            _log.warning("From now on, %s decodes without graphs, which takes longer: %s", model_name, reason)
