"""Decides whether a generate() call decodes in a graph, and gives the cache the buffers that this takes.

With `max_cache_len="auto"`, which is the default, `reason_for_eager` is the list of all calls that decode eagerly, as
they do without this file.
"""

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Literal

import torch
from torch.utils._triton import has_triton
from transformers import PreTrainedModel

from kvboost_hf import device_link
from kvboost_hf.cache.costs import CompileCosts, Graph
from kvboost_hf.cache.identity.foreign import holder_of_cache
from kvboost_hf.cache.live import LiveKV
from kvboost_hf.cache.live.binding import Binding, StoreWriter
from kvboost_hf.cache.live.compiled import StaticDecoding, static_reason
from kvboost_hf.cache.live.guarded_call import decode, guard
from kvboost_hf.cache.prompt import Kwargs, has_other_hooks
from kvboost_hf.compat import (
    GenerateCall,
    at_end,
    bytes_per_token,
    input_device,
    is_compiled,
    ranks_of,
    running_config,
    under_autocast,
    weights_come_and_go,
)

MaxCacheLen = int | Literal["auto"] | None
Settle = Callable[[], None]

AUTO: Final = "auto"  # `max_cache_len` of a cache whose calls decide
NOT_ON_GPU = "the model is not on a GPU"
GROWS = "`max_cache_len` is None"
NOT_YET = "no token was decoded in a graph yet"
REPLACED = "its forward was replaced or compiled by somebody else"
_LEAST_COLUMNS = 1024
_STEP = 8192  # sizes are powers of two up to here, and its multiples behind it
_LEAST_NEW = 64  # a call may decode so many tokens, or it is not worth moving what the cache holds
_ROOM = 4  # buffers up to so many times as large as needed are kept


class DecodingForm:
    """Whether a cache holds K/V in buffers that grow, or in ones of a fixed size that graphs decode in.

    A size that was named stays. With `"auto"`, the buffers are of a fixed size from the beginning of a generate() call
    that is to decode in a graph up to any use of the cache by something else; K/V moves from one form to the other.

    Args:
        asked: The cache's `max_cache_len`.

    Attributes:
        reason: Why the last generate() call decodes without a graph; None if it decodes in one.
        reason_elsewhere: The same for a call that `GenerateCall.compiles` rules out: it has no use for `choose`.
    """

    def __init__(
        self, model: PreTrainedModel, asked: MaxCacheLen, binding: Binding, live: LiveKV, writer: StoreWriter
    ) -> None:
        self.asked, self.costs = asked, CompileCosts.of(model)
        self.reason: str | None = None
        self.reason_elsewhere = NOT_ON_GPU if asked == AUTO else GROWS if asked is None else NOT_YET
        self._binding, self._live, self._writer = binding, live, writer
        self._chosen: weakref.ref[Any] | None = None  # the configuration of the call that the buffers are for
        if live.static is not None:
            guard(model)

    @property
    def reason_told(self) -> str | None:
        """The reason for reports: graphs that the model's user has compiled are looked for only here."""
        model = self._binding.model()
        return REPLACED if self.reason is not None and model is not None and is_compiled(model) else self.reason

    def reason_for(self, call: GenerateCall, settle: Settle) -> str | None:
        """Why a generate() call would decode without a graph, or None.

        Args:
            call: The call.
            settle: Ends what is under way in the cache, and takes over what graphs have decoded.
        """
        model = self._binding.model()
        if model is None or not call.compiles(model):
            return NOT_ON_GPU
        settle()
        return reason_for_eager(model, self._binding, self._live, call)

    def choose(self, call: GenerateCall, settle: Settle) -> None:
        """Take buffers of a fixed size for a call that is to decode in a graph, and leave them for any other."""
        self.reason = GROWS if self.asked is None else NOT_YET
        if self.asked != AUTO:
            return
        reason, model = self.reason_for(call, settle), self._binding.model()
        if reason is None and model is not None:
            reason = self._take(model, call)
        if reason is not None:
            self.leave(settle)
            self.reason = reason

    def _take(self, model: PreTrainedModel, call: GenerateCall) -> str | None:
        live, columns = self._live, _graph(self.costs, self._live, call).columns
        if live.static is None or live.static.max_cache_len != columns:
            try:
                live.take_form(model, StaticDecoding(model, columns))
            except torch.OutOfMemoryError as error:
                return f"there was no memory for buffers of {columns} tokens ({error})"
            self.costs.took_buffers()
            guard(model)
        config = running_config()
        self._chosen = weakref.ref(config)
        at_end(config, partial(_confirm_steps, weakref.ref(self._writer)))
        return None

    def leave(self, settle: Settle) -> None:
        """Go on with buffers that grow, unless a size was named."""
        model = self._binding.model()
        if self.asked == AUTO and self._live.static is not None and model is not None:
            settle()
            self._live.take_form(model, None)
            self._chosen = None

    def grow(self, settle: Settle) -> None:
        """Go on with buffers that grow, for good."""
        if self.asked is not None:
            self.asked = AUTO
            self.leave(settle)
            self.asked, self.reason_elsewhere = None, GROWS

    def serves(self, running: Callable[[], Any]) -> bool:
        """Whether buffers of a fixed size are for the generate() call whose configuration `running` gives."""
        if self.asked != AUTO:
            return True
        config = self._chosen() if self._chosen is not None else None
        return config is not None and config is running()

    def decode(self, model: PreTrainedModel, compiled: Callable[..., Any], kwargs: Kwargs) -> Any:
        """Run a decoding step of generate(), which has compiled the model."""
        if self._live.static is None or self._live.plain_reason is not None:
            return compiled(**kwargs)
        output = decode(self._live, model, compiled, kwargs)
        self.reason = self.costs.failure
        return output


def _confirm_steps(writer: "weakref.ref[StoreWriter]") -> None:
    """Have the store get what graphs have decoded."""
    if (found := writer()) is not None:
        found.confirm_steps()


def columns_for(tokens: int) -> int:
    """Columns of the buffers for a call of so many tokens: few sizes, so that few graphs are made."""
    if tokens > _STEP:
        return -(-tokens // _STEP) * _STEP
    return max(_LEAST_COLUMNS, 1 << (tokens - 1).bit_length())


def reason_for_eager(model: PreTrainedModel, binding: Binding, live: LiveKV, call: GenerateCall) -> str | None:
    """Why a generate() call decodes eagerly, on layers that grow; None if it may decode in a graph."""
    asked, costs = call.compile_config is not None, CompileCosts.of(model)
    if costs.failure is not None:
        return costs.failure
    if call.disables_compile:
        return "`disable_compile` was passed to generate()"
    if not call.samples or not call.uses_cache or call.max_length is None or call.num_ids is None or not call.rows:
        return "it is no plain greedy search or sampling that returns tokens alone"
    policy = binding.policy
    if binding.live_quant is not None or policy.mode != "exact" or policy.reproducible:
        return "`live_quant`, mode 'blend' and `reproducible` need buffers that grow"
    if binding.hidden_layers or policy.keep_hidden_states:
        return "hidden states are kept, in buffers that grow"
    if live.plain_reason is not None or not live.owns_layers:
        return live.plain_reason or "its layers were replaced by somebody else"
    if call.max_length - call.num_ids < _LEAST_NEW and not asked:
        return f"it may decode fewer than {_LEAST_NEW} tokens"
    if _held(live, call) and live.ledger is None:
        return "nothing is known of what the cache holds"
    graph = _graph(costs, live, call)
    if not asked and (reason := costs.reason_against(graph)) is not None:
        return reason
    if (reason := reason_of_model(model)) is not None or (reason := static_reason(model, graph.columns)) is not None:
        return reason
    if not asked and threading.current_thread() is not threading.main_thread():
        return "CUDA graphs are replayed in the main thread only"
    if not asked and not has_triton():
        return "Triton, which PyTorch compiles with, does not run here"
    needed, most = graph.columns * graph.rows * bytes_per_token(model), _most_bytes(model, input_device(model))
    if most is not None and needed > most and (live.static is None or live.static.max_cache_len != graph.columns):
        return (
            f"buffers of {needed / 2**30:.1f} GiB would take more than half of the free memory, or each token would "
            "read more of them than of the weights (pass a smaller `max_new_tokens`)"
        )
    return None


def _graph(costs: CompileCosts, live: LiveKV, call: GenerateCall) -> Graph:
    """The graph for a call: in buffers that are there, or were there before, if these are not far too large."""
    assert call.max_length is not None
    assert call.rows is not None
    tokens = max(1, _held(live, call) + call.max_length - 1)  # the last token is not run through the model
    graph = Graph(columns_for(tokens), call.rows, call.mask is not None)
    there = {live.static.max_cache_len} if live.static is not None else set()
    fitting = [size for size in there | costs.sizes_like(graph) if tokens <= size <= _ROOM * graph.columns]
    return graph._replace(columns=min(fitting, default=graph.columns))


def _most_bytes(model: PreTrainedModel, device: torch.device) -> int | None:
    """Bytes that buffers may take; None for any. PyTorch's attention reads all of them for each token."""
    if device.type != "cuda":
        return None
    return min(device_link.link.free_bytes(device) // 2, sum(parameter.nbytes for parameter in model.parameters()))


def _held(live: LiveKV, call: GenerateCall) -> int:
    """Columns of the cache that the ids of a call follow."""
    return live.held if call.follows(live.held) else 0


def reason_of_model(model: PreTrainedModel) -> str | None:
    """Why a model is better not compiled without being asked for, or None."""
    if ranks_of(model) is not None:
        return "several ranks compute it (tp_plan), each of which would compile it at a time of its own"
    if model.training or under_autocast():
        return "the model is in training mode, or under autocast"
    if weights_come_and_go(model):
        return "hooks of accelerate fetch its weights, or move its inputs from device to device"
    if getattr(model, "hf_quantizer", None) is not None or getattr(model, "quantization_method", None) is not None:
        return "its weights are quantized"
    if len({parameter.device for parameter in model.parameters()}) > 1:
        return "it is on several devices"
    if "forward" in model.__dict__ or getattr(model, "_compiled_call_impl", None) is not None:
        return REPLACED
    if (reason := holder_of_cache(model)) is not None:
        return reason
    if any(has_other_hooks(module) for module in model.modules()):
        return "its modules have hooks, at which a graph would break"
    return None
