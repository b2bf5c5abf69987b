"""Computes the end of a prompt that nothing could serve, its suffix, in a graph: the first token after a hit.

On a GPU, launching the kernels of a short suffix takes longer than the kernels. A graph needs a fixed shape, so that a
suffix is padded on its right up to the next of a few lengths, `BUCKETS`. No token of the text sees the padding, which
is behind all of them; its K/V is written over with zeros, and its hidden states are cut off:

    hook of the model      `expect`: is the forward that begins to run in a graph?    ledger, narrowing: as for any
    model.forward          calls the model below its head: `BaseCall`
    BaseCall               `compute`: pads, runs the graph, takes the padding back
    model.forward          the head, eagerly, over what it would have been given otherwise

PyTorch asks a module for `_compiled_call_impl` when it is called, and does so only where it is not compiling a module
around it: graphs of decoding steps do not come by.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import CompileConfig, PreTrainedModel
from transformers.masking_utils import create_masks_for_generate

from kvboost_hf.cache.costs import CompileCosts, Graph
from kvboost_hf.cache.live import LiveKV
from kvboost_hf.cache.live.compiled import Suffix
from kvboost_hf.cache.live.decoding_form import reason_of_model
from kvboost_hf.cache.live.guarded_call import run_checked
from kvboost_hf.cache.prompt import Kwargs, names_of, returns_of_each_token
from kvboost_hf.cache.prompt.media import takes_media
from kvboost_hf.compat import CACHE, cache_in, input_device

BUCKETS = (16, 64, 128, 256)  # tokens that a suffix is padded to; a longer one runs eagerly

_log = logging.getLogger("kvboost_hf")
# Arguments with which the model below its head returns its last hidden states and nothing else.
_PLAIN = frozenset(
    "input_ids attention_mask position_ids past_key_values cache_params cache use_cache logits_to_keep "
    "return_dict cache_position inputs_embeds".split()
)


class BaseCall:
    """Calls the model below its head, by way of the cache that it is given; it is that model's `_compiled_call_impl`.

    Args:
        base: The model below its head.
    """

    def __init__(self, base: PreTrainedModel) -> None:
        self._base = base
        self._call: Callable[..., Any] = base._call_impl
        self._made: tuple[CompileConfig, Callable[..., Any]] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a forward."""
        compute = getattr(cache_in(kwargs), "compute_with", None)
        if compute is None:
            return self._call(*args, **kwargs)
        return compute(self._call, {**names_of(self._base, args), **kwargs} if args else kwargs)

    def compiled(self, config: CompileConfig) -> Callable[..., Any]:
        """The same, compiled: as generate() compiles what it decodes with."""
        if self._made is None or self._made[0] != config:
            self._made = config, torch.compile(self._call, **config.to_dict())
        return self._made[1]


def reason_for_eager(model: PreTrainedModel, live: LiveKV, kwargs: Kwargs, config: Any) -> str | None:
    """Why the forward of a prompt that begins with `kwargs` runs eagerly; None if it may run in a graph.

    Args:
        config: The configuration of the generate() call under way, or None.
    """
    static, base, held = live.static, model.base_model, live.held
    ids, mask, positions = (kwargs.get(name) for name in ("input_ids", "attention_mask", "position_ids"))
    if static is None or live.plain_reason is not None or not live.owns_layers:
        return "the cache's layers grow"
    asked = getattr(config, "compile_config", None)
    if asked is None:
        return "no `compile_config` was passed to generate()"
    if config.disable_compile:
        return "`disable_compile` was passed to generate()"
    on_gpu = input_device(model).type == "cuda"
    if not on_gpu and not asked._compile_all_devices:
        return "the model is not on a GPU"
    if on_gpu and threading.current_thread() is not threading.main_thread():
        return "CUDA graphs are replayed in the main thread only"
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
        return "it has no `input_ids`"
    if (bucket := bucket_of(ids.shape[1])) is None:
        return f"more than {BUCKETS[-1]} tokens are new"
    if not held or not all(layer.is_initialized and layer.buffers for layer in live.static_layers):
        return "nothing is reused"
    if held + bucket > static.max_cache_len:
        return f"the cache has no room for {bucket} more tokens"
    if live.stateful:
        return "states would sum up the padding"
    if takes_media(model):
        return "its prompts may have images"
    if not isinstance(positions, torch.Tensor) or positions.shape not in (ids.shape, ids[:1].shape):
        return "`position_ids` are not one for each of the `input_ids`"
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.ndim != 2):
        return "the attention mask is not 2-D"
    if any(name not in _PLAIN and value is not None and value is not False for name, value in kwargs.items()):
        return "it has other arguments than those of a plain prompt"
    if any(returns_of_each_token(model).values()):
        return "it returns something of each token besides logits"
    if base is model or not isinstance(base, PreTrainedModel) or "forward" in base.__dict__ or not _is_free(base):
        return "the model below its head was replaced or compiled by somebody else"
    if (reason := reason_of_model(model)) is not None:
        return reason
    if torch.is_grad_enabled():
        return "gradients are enabled"
    return CompileCosts.of(model).reason_against_suffix(bucket)


def bucket_of(tokens: int) -> int | None:
    """The length that a suffix is padded to, or None if it is too long."""
    return next((bucket for bucket in BUCKETS if tokens <= bucket), None)


def _is_free(base: nn.Module) -> bool:
    return type(base.__dict__.get("_compiled_call_impl")) in (type(None), BaseCall)


def expect(model: PreTrainedModel, live: LiveKV, kwargs: Kwargs, config: Any) -> None:
    """Have the forward of a prompt that begins with `kwargs` run in a graph, if it may."""
    static = live.static
    assert static is not None
    if (reason := reason_for_eager(model, live, kwargs, config)) is not None:
        _log.debug("The end of a prompt runs without a graph: %s.", reason)
        return
    base, ids = model.base_model, kwargs["input_ids"]
    assert isinstance(base, PreTrainedModel)
    if (call := base.__dict__.get("_compiled_call_impl")) is None:
        base._compiled_call_impl = call = BaseCall(base)
    graph = Graph(static.max_cache_len, len(ids), False, bucket_of(ids.shape[1]) or 0)
    static.expect_suffix(Suffix(ids, graph, call.compiled(config.compile_config)))


def compute(model: PreTrainedModel | None, live: LiveKV, plain: Callable[..., Any], kwargs: Kwargs) -> Any:
    """Run a forward of the model below its head: in a graph, if it is the one that is expected to.

    Args:
        plain: Runs it without.
    """
    static = live.static
    suffix = static.take_suffix() if static is not None else None
    if model is None or suffix is None or kwargs.get("input_ids") is not suffix.input_ids:
        return plain(**kwargs)
    held, layers, new = live.held, live.static_layers, suffix.input_ids.shape[1]
    stop = held + suffix.graph.tokens

    def compiled() -> Any:
        for layer in layers:
            layer.whole = True
        output = suffix.compiled(**_padded(model, kwargs, suffix.graph.tokens))
        output["last_hidden_state"] = output.last_hidden_state[:, :new].clone()  # its memory is the graph's
        keep(held + new)
        return output

    def keep(length: int) -> bool:
        for layer in layers:
            layer.close_padded(stop, length)
        return True

    try:
        output, _ = run_checked(
            *(model, live.layers, suffix.graph, slice(held, held + new)),
            compiled=compiled,
            plain=lambda: plain(**kwargs),
            undo=lambda: keep(held),
            shown=lambda output: output.last_hidden_state,
        )
    except BaseException:
        keep(held)
        raise
    return output


def _padded(model: PreTrainedModel, kwargs: Kwargs, columns: int) -> Kwargs:
    """The arguments for a suffix that its last token, at its last position, pads on the right."""
    ids, positions, mask = kwargs["input_ids"], kwargs["position_ids"], kwargs.get("attention_mask")
    ids, positions = (
        torch.cat([each, each[:, -1:].expand(-1, columns - each.shape[1])], dim=1) for each in (ids, positions)
    )
    make_masks = getattr(model, "create_masks_for_generate", create_masks_for_generate)
    masks = make_masks(
        config=model.config,
        inputs_embeds=torch.empty((*ids.shape, 0), dtype=model.dtype, device=ids.device),
        attention_mask=mask,
        position_ids=positions,
        **{CACHE: cache_in(kwargs)},
    )
    return {**kwargs, "input_ids": ids, "position_ids": positions, "attention_mask": masks}
