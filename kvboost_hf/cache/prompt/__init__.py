"""Reads calls of a model: the hooks around its forward, and the reader of their arguments.

`ForwardHook` passes the arguments and the output of each forward to the cache. `read_forward` finds the tokens, and
whether their K/V depends on these alone.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.cache_utils import Cache

from kvboost_hf.cache.identity import ModelState
from kvboost_hf.cache.identity.hooks import FORWARD_WATCH, HOOK_WATCH, note_call
from kvboost_hf.cache.planning.chunks import Tokens
from kvboost_hf.cache.prompt.media import MEDIA_ARGUMENTS, TYPES, takes_media
from kvboost_hf.cache.prompt.token_log import computed_positions
from kvboost_hf.compat import (
    LAST,
    OF_EACH_TOKEN,
    SHARED_KV,
    KeyRotation,
    PrivateCache,
    attn_implementation,
    cache_argument,
    cache_in,
    cache_left_out,
    calling,
    checkpointing_reason,
    forward_arguments,
    hidden_form,
    in_generate,
    key_rotation,
    may_draft,
    needs_positions,
    outputs_read,
    own_hook,
    reads_last_logits,
    take_newest_name,
    whole_of_piece,
    with_cache_by,
)

Kwargs = dict[str, Any]
Changed = tuple[tuple[Any, ...], Kwargs] | None  # arguments in place of the caller's


# The modes of `torch.export` and fake tensors, of `make_fx`, and of functionalization.
_MODES = torch._C._TorchDispatchModeKey
_FAKE, _PROXY, _FUNCTIONAL = _MODES.FAKE, _MODES.PROXY, _MODES.FUNCTIONAL
# In the error of `torch.compile(model, fullgraph=True)`.
_NOT_IN_ONE_GRAPH = (
    "a ChunkReuseCache is chosen and filled outside of graphs: compile without fullgraph=True, or detach(model)"
)


class HookedCache(Protocol):
    """A cache that wants to see each forward of its model."""

    recorded: bool  # PyTorch records or transforms the forward that is about to begin

    @property
    def is_compileable(self) -> bool:
        """As transformers asks of a `Cache`: whether the next forward may be compiled."""

    @property
    def begins_text(self) -> bool:
        """Whether the next forward begins a text, or the one under way is not a step in a graph."""

    def begin_anew(self) -> None:
        """Take the ids of the next forward for the start of a prompt."""

    def before_forward(self, model: PreTrainedModel, kwargs: Kwargs) -> Kwargs:
        """Called with the keyword arguments of a forward; returns those to run it with."""

    def after_forward(self, output: Any) -> Any:
        """Called with what the forward has returned; returns what to return in its place, or None."""


class ForwardHook:
    """The hooks of one model. It holds no reference to the model, so that it can be pickled and copied with it."""

    leaves_kv_alone = True  # read by the fingerprint: other hooks may change what a model computes
    changes_arguments = True  # others' hooks on the same module are watched by this one, therefore
    _name = ""  # of the model's argument for a cache, once it is known

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: Kwargs) -> Changed:
        """torch forward pre-hook."""
        if torch.compiler.is_compiling() and _is_compileable(kwargs):
            assert isinstance(model, PreTrainedModel)
            kwargs = self._by_name(model, args, kwargs)
            return (), cache_in(kwargs).before_forward(model, kwargs)
        if torch.compiler.is_compiling() and _needs_no_hook(model, kwargs):
            return None
        changed: Changed = self._before(model, args, kwargs)
        return changed

    def after(self, model: nn.Module, args: tuple[Any, ...], kwargs: Kwargs, output: Any) -> Any:
        """torch forward hook."""
        if torch.compiler.is_compiling() and _is_compileable(kwargs):
            return cache_in(kwargs).after_forward(output)
        if torch.compiler.is_compiling() and _needs_no_hook(model, kwargs):
            return None
        return self._after(model, kwargs, output)

    def _by_name(self, model: PreTrainedModel, args: tuple[Any, ...], kwargs: Kwargs) -> Kwargs:
        """All arguments by name, with the cache by the one that the model's forward takes."""
        self._name = name = self._name or cache_argument(model)
        kwargs = {**names_of(model, args), **kwargs} if args else dict(kwargs)
        return kwargs if name in kwargs else with_cache_by(name, kwargs)

    # A compiled model breaks its graph here, rather than tracing what is not arithmetic.
    @torch.compiler.disable(reason=_NOT_IN_ONE_GRAPH)  # type: ignore[untyped-decorator, no-untyped-call]
    def _before(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Kwargs
    ) -> tuple[tuple[Any, ...], Kwargs] | None:
        assert isinstance(model, PreTrainedModel)
        kwargs = self._by_name(model, args, kwargs)
        name = self._name
        cache = kwargs.get(name)
        # A graph must not depend on what is stored when it is made, and tensors of a transform have no memory. (For
        # `torch.compile` this function runs outside its graphs.)
        recorded: bool = (
            torch._C._get_tracing_state() is not None
            or torch._C._are_functorch_transforms_active()
            or torch._C._get_dispatch_mode(_FAKE) is not None
            or torch._C._get_dispatch_mode(_PROXY) is not None
            or torch._C._get_dispatch_mode(_FUNCTIONAL) is not None
            or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())  # type: ignore[no-untyped-call]
        )
        if cache is None and _is_hooked(left_out := cache_left_out(model, kwargs.get("input_ids"))):
            left_out.begin_anew()
            cache = kwargs[name] = left_out
        if not _is_hooked(cache):
            if isinstance(cache, PrivateCache) and cache.given is not None:
                given, cache.given = cache.given, None
                note_call(model, given)
                return (), given
            attached = ModelState.of(model).attached
            cache = attached.stand_in(model, cache, kwargs, recorded) if attached is not None else None
            if cache is None:
                note_call(model, kwargs)
                return None
            kwargs[name] = cache
        cache.recorded = recorded
        given = cache.before_forward(model, kwargs)
        if FORWARD_WATCH in model.__dict__:
            note_call(model, given)
        if (watch := model.__dict__.get(HOOK_WATCH)) is not None:  # another thread may take it away
            watch.pass_on(id(cache), (given,))
        return (), given

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after(self, model: nn.Module, kwargs: Kwargs, output: Any) -> Any:
        assert isinstance(model, PreTrainedModel)
        cache = kwargs.get(self._name or cache_argument(model))
        if _is_hooked(cache):
            if (watch := model.__dict__.get(HOOK_WATCH)) is not None:
                watch.compare(id(cache), model, (kwargs,))
            given: Any = output.get(self._name) if isinstance(output, dict) else None
            if type(given) is EncoderDecoderCache and id(given.self_attention_cache) == id(cache):
                # GPT-2 with cross-attention puts it into a pair. It computes an encoder's K/V at each forward, then.
                output[self._name] = cache
            return cache.after_forward(output)
        return None


def names_of(model: PreTrainedModel, args: tuple[Any, ...]) -> dict[str, Any]:
    """Arguments that came by position, by their names."""
    parameters = inspect.signature(model.forward).parameters
    names = tuple(parameters)
    if any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters.values()):  # it passes all of them on
        names = forward_arguments(model).positional
    return dict(zip(names, args, strict=False))


def _is_hooked(cache: Any) -> TypeGuard[HookedCache]:
    return isinstance(cache, Cache) and hasattr(cache, "before_forward")


def _is_compileable(kwargs: Kwargs) -> bool:
    """Whether a forward comes with a cache of a fixed size, whose hooks are tensor operations while compiling."""
    cache = cache_in(kwargs)
    return _is_hooked(cache) and not cache.begins_text and cache.is_compileable


def _needs_no_hook(model: nn.Module, kwargs: Kwargs) -> bool:
    """Whether a forward that is compiled or exported comes without a cache of ours, and none will stand in for it."""
    cache = cache_in(kwargs)
    if _is_hooked(cache):
        return False
    # The function that says so is True for all that is compiled with torch 2.11.
    exports = torch.compiler._is_exporting_flag
    if exports or (isinstance(cache, Cache) and type(cache) is not DynamicCache):
        return True
    assert isinstance(model, PreTrainedModel)
    return ModelState.of(model).attached is None and FORWARD_WATCH not in model.__dict__


def install(model: PreTrainedModel) -> None:
    """Put the hooks on `model`, unless they are there."""
    with ModelState.of(model).lock:
        take_newest_name(model)
        if not _handles(model):
            hook = ForwardHook()
            own_hook(model.register_forward_pre_hook, hook.before, with_kwargs=True)
            own_hook(model.register_forward_hook, hook.after, with_kwargs=True)


def has_other_hooks(module: nn.Module) -> bool:
    """Whether a module has forward hooks that are not of this package."""
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return any(not _is_ours(hook) for hook in hooks)


def others_see_output(model: PreTrainedModel) -> bool:
    """Whether a forward hook that is not of this package is given what `model` returns."""
    return any(not _is_ours(hook) for hook in model._forward_hooks.values())


def _handles(model: PreTrainedModel) -> list[Any]:
    return [hook for hook in model._forward_pre_hooks.values() if _is_ours(hook)]


def _is_ours(hook: Any) -> bool:
    return isinstance(getattr(hook, "__self__", None), ForwardHook)


_HIDDEN = "output_hidden_states"
# Arguments that are read by what decides on reuse.
READ = frozenset(OF_EACH_TOKEN) | frozenset(
    "input_ids attention_mask position_ids past_key_values cache_params cache use_cache logits_to_keep labels "
    f"cache_position {SHARED_KV}".split()
)
# Arguments that change nothing but the form of what is returned, or the loss.
LEAVE_KV_ALONE = frozenset("return_dict num_items_in_batch num_logits_to_keep".split())
# Arguments of generate() that it also passes to forwards. A test compares them with each release.
OF_GENERATE = frozenset("assistant_model assistant_tokenizer streamer synced_gpus tokenizer".split())
ALL_LOGITS = (
    "the logits of all tokens are wanted (pass logits_to_keep=1, as generate() does, or "
    "ReusePolicy(keep_logprobs=True))"
)
_NO_CHOICE = "its forward takes no logits_to_keep, so only generate() can tell which logits are needed"
GRADIENTS = "gradients are enabled (call it under torch.no_grad())"
# Arguments of multimodal models: they are part of the column ids.
OF_MEDIA = MEDIA_ARGUMENTS | frozenset(TYPES)
# Any other argument, if given, may change K/V. A test compares them with those of all architectures.
_HARMLESS = READ | LEAVE_KV_ALONE | OF_GENERATE
# Tokens to compute where K/V is returned for an assistant: behind a cold prompt, that of transformers sees one column
# more than a window is wide. A layer returns one less, and the new ones.
_WITH_SHARED_KV = 2


Settings = Callable[[PreTrainedModel], dict[str, Any]]
HiddenOf = Callable[[Any], tuple[int, ...] | str]


def returns_of_each_token(model: PreTrainedModel) -> dict[str, Any]:
    """What the configuration says where arguments are not given by which a forward returns something of each token."""
    config = model.config
    text = config.get_text_config(decoder=True)
    return {name: getattr(config, name, None) or getattr(text, name, None) for name in OF_EACH_TOKEN}


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """The arguments of one forward, as far as reuse is concerned."""

    input_ids: torch.Tensor  # [batch, m]
    attention_mask: torch.Tensor | None  # [batch, columns]
    position_ids: torch.Tensor | None  # [batch or 1, m], or [planes, batch, m]
    logits: int  # how many of the last m tokens must be computed, for their logits or anything else
    verifies: bool  # several logits were asked for: candidates are being checked, crop() will follow
    computes_all: str | None  # why all tokens of the prompt must be computed, or None
    logits_of_all: bool = False  # those of reused tokens are wanted, too, and can be had
    hidden: tuple[int, ...] = ()  # layers whose hidden states of all tokens are wanted, and can be had


def reason_of_arguments(model: PreTrainedModel, kwargs: Kwargs) -> str | None:
    """Names an argument that K/V may depend on besides tokens, or None."""
    for name, value in kwargs.items():
        if name in _HARMLESS or _says_nothing(model, name, value) or (name in OF_MEDIA and takes_media(model)):
            continue
        return f"`{name}` was passed, which K/V may depend on"
    return None


def read_inputs(
    model: PreTrainedModel,
    kwargs: dict[str, Any],
    all_logits_reason: str | None = ALL_LOGITS,
    settings: Settings = returns_of_each_token,
    hidden_of: HiddenOf | None = None,
) -> ForwardInputs | str:
    """The arguments, or the reason why the K/V of this forward may depend on more than its tokens.

    `all_logits_reason` is why the logits of reused tokens cannot be had, `hidden_of` gives the layers that a value of
    `output_hidden_states` asks for, or why they cannot be had; None where nothing is kept.
    """
    ids, mask, positions = kwargs.get("input_ids"), kwargs.get("attention_mask"), kwargs.get("position_ids")
    if model.training and (reason := checkpointing_reason(model)) is not None:
        return reason
    if not isinstance(ids, torch.Tensor):
        return "no input_ids were passed"
    if ids.ndim != 2 or not ids.numel():
        return f"input_ids have the shape {list(ids.shape)}"
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.ndim != 2):
        return "the attention mask is not 2-D"
    if positions is not None and not _are_positions_of(model, ids, positions):
        return "position_ids are not one for each of the input_ids"
    if kwargs.get("use_cache") is False:
        return "use_cache is False"
    if not kwargs.keys() <= _HARMLESS and (reason := reason_of_arguments(model, kwargs)) is not None:
        return reason
    if (weights := kwargs.get("output_attentions")) and (attention := attn_implementation(model)) != "eager":
        # Falcon computes it in another way then, and without a causal mask in transformers 5.23.
        return f"`output_attentions={weights!r}` may change what {attention} attention computes"
    if (told := _adapters_by_row(model)) is not None:
        return f"`{told}` tells PEFT which adapter each row, or which tokens, of this batch use"
    wants_all = wants_all_logits(kwargs)
    hidden, computes_all = _wanted_of_each_token(model, kwargs, settings, hidden_of)
    if wants_all and not computes_all:  # the last hidden states can be kept, too, where some are
        computes_all = all_logits_reason if not hidden else None
        if computes_all == ALL_LOGITS and "logits_to_keep" not in forward_arguments(model):
            computes_all = _NO_CHOICE
    if computes_all:
        return ForwardInputs(ids, mask, positions, ids.shape[1], False, computes_all)
    if wants_all:
        kept = hidden if not hidden or hidden[-1] == LAST else (*hidden, LAST)
        return ForwardInputs(ids, mask, positions, 1, False, None, logits_of_all=True, hidden=kept)
    logits = min(int(logits_kept(kwargs)), ids.shape[1])
    least = min(max(logits, _WITH_SHARED_KV if kwargs.get(SHARED_KV) else 1), ids.shape[1])
    return ForwardInputs(ids, mask, positions, least, logits > 1 and may_draft(), None, hidden=hidden)


def logits_kept(kwargs: dict[str, Any]) -> Any:
    """`logits_to_keep`; 1 in generate(), which leaves it out where a function in place of the forward hides it."""
    keep, ids = kwargs.get("logits_to_keep"), kwargs.get("input_ids")
    return 1 if keep is None and isinstance(ids, torch.Tensor) and reads_last_logits(ids) else keep


def wants_all_logits(kwargs: dict[str, Any]) -> bool:
    """Whether a forward may want the logits of all its tokens, or a loss over them. What is no number is an index."""
    keep = logits_kept(kwargs)
    return not isinstance(keep, int) or keep <= 0 or kwargs.get("labels") is not None


def new_shape(kwargs: Kwargs) -> tuple[int, int]:
    """Rows and columns of the ids, or embeddings, of a forward."""
    given = kwargs.get("input_ids")
    given = kwargs.get("inputs_embeds") if given is None else given
    return (given.shape[0], given.shape[1]) if isinstance(given, torch.Tensor) and given.ndim > 1 else (0, 0)


def new_tokens(kwargs: Kwargs) -> int:
    """Tokens of a forward, without padding."""
    (rows, columns), mask = new_shape(kwargs), kwargs.get("attention_mask")
    if rows * columns and isinstance(mask, torch.Tensor) and mask.ndim == 2:
        return int((mask[:, -columns:] != 0).sum())
    return rows * columns


def begun_tokens(kwargs: Kwargs) -> int:
    """Tokens of the prompt that a forward begins, without padding and what was drafted.

    All pieces of a prompt are counted: with another cache, nothing tells of the pieces that follow.
    """
    whole = whole_of_piece(kwargs.get("input_ids")) or kwargs
    mask = whole.get("attention_mask")
    if mask is not None and not (isinstance(mask, torch.Tensor) and mask.ndim == 2):  # made for a StaticCache
        whole = {**whole, "attention_mask": calling().mask}
    return new_tokens(whole) - new_shape(whole)[0] * (drafted_tokens(kwargs) if in_generate() else 0)


def drafted_tokens(kwargs: Kwargs) -> int:
    """How many of the last ids of each row generate(), which is under way, has drafted."""
    keep = kwargs.get("logits_to_keep")
    if type(keep) is not int or keep <= 1 or not may_draft():
        return 0
    return max(0, min(keep, new_shape(kwargs)[1]) - 1)


def _are_positions_of(model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor) -> bool:
    batch, columns = ids.shape
    if positions.ndim != 2 and not (positions.ndim == 3 and takes_media(model)):
        return False
    return positions.shape[-1] == columns and positions.shape[-2] in (1, batch)


def _says_nothing(model: PreTrainedModel, name: str, value: Any) -> bool:
    if value is False:  # which says something where the default is True, as with `is_causal`
        return forward_arguments(model).defaults.get(name) is False
    return value is None or (isinstance(value, dict) and not value)


def with_positions(model: PreTrainedModel, kwargs: dict[str, Any], held: int) -> dict[str, Any]:
    """The arguments, with the positions that the model's forward would compute from the whole ids.

    Args:
        model: The model.
        kwargs: The arguments of its forward.
        held: Columns that the ids follow: 0 for a text that begins, whatever its cache still holds.
    """
    ids = kwargs.get("input_ids")
    if kwargs.get("position_ids") is not None or not isinstance(ids, torch.Tensor):
        return kwargs
    if not needs_positions(model):
        hidden = _hidden_positions(model, ids, kwargs.get("attention_mask"))
        return kwargs if hidden is None else {**kwargs, "position_ids": hidden}
    positions = computed_positions(model, kwargs if held else {**kwargs, cache_argument(model): None})
    if positions is None:
        positions = torch.arange(held, held + ids.shape[1], device=ids.device).expand(ids.shape[0], -1)
    return {**kwargs, "position_ids": positions}


def _hidden_positions(model: PreTrainedModel, ids: torch.Tensor, mask: Any) -> torch.Tensor | None:
    """The positions of a padded batch that generate() leaves out.

    generate() does so where a function in place of the forward hides them, and where the model counts columns instead.
    Rotary attention is the same with and without them, for only distances count.
    """
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2 or bool(mask.all()):
        return None
    parameters = inspect.signature(model.forward).parameters.values()
    if not any(each.name == "position_ids" or each.kind is each.VAR_KEYWORD for each in parameters):
        return None
    if "position_ids" not in forward_arguments(model):
        return None
    if not in_generate() or not isinstance(key_rotation(model), KeyRotation):
        return None
    return (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]


def _wanted_of_each_token(
    model: PreTrainedModel, kwargs: dict[str, Any], settings: Settings, hidden_of: HiddenOf | None
) -> tuple[tuple[int, ...], str | None]:
    """The layers whose hidden states are wanted, if those of reused tokens can be had; and why all are computed."""
    hidden: tuple[int, ...] = ()
    asked, reason = _asks_for_each_token(model, kwargs, settings), None
    value, shown = asked.pop(_HIDDEN, (None, ""))
    if shown and hidden_of is not None and not asked and not gradients_enabled(model):
        in_tuple = kwargs.get("return_dict") is False or not model.config.return_dict
        found = "`return_dict` is False" if in_tuple else hidden_of(value)
        if isinstance(found, str):
            reason = found
        else:
            hidden, shown = found, ""
    if asked and not shown:
        _, shown = next(iter(asked.values()))
    if shown and reason:
        return (), f"`{shown}` returns something of each token, and {reason}"
    if shown:
        return (), f"`{shown}` returns something of each token"
    return hidden, GRADIENTS if gradients_enabled(model) else None


def gradients_enabled(model: PreTrainedModel) -> bool:
    """Whether somebody may want gradients of a forward."""
    return torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters())


def _asks_for_each_token(
    model: PreTrainedModel, kwargs: dict[str, Any], settings: Settings
) -> dict[str, tuple[Any, str]]:
    """By name, each argument or setting by which the caller gets something of each token: its value, and its text."""
    if kwargs["input_ids"].shape[1] == 1:  # which is computed in any case
        return {}
    wanted: dict[str, tuple[Any, str]] = {}
    for name, configured in settings(model).items():
        value = kwargs.get(name)
        if configured if value is None else value:
            text = f"{name}={value!r}" if value is not None else f"config.{name}={configured!r}"
            wanted[name] = (configured if value is None else value), text
    if not wanted:
        return {}
    read = None if others_see_output(model) else outputs_read(kwargs["input_ids"])
    if read is not None and not wanted.keys() <= read:
        hidden_form(model)  # a model that is asked for them gets hooks of transformers, now or in the caller's forward
    return {name: each for name, each in wanted.items() if read is None or name in read}


def without_router_logits(settings: dict[str, Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The argument that turns router logits off, where they are on, for a forward over a part of the tokens.

    Nobody reads them, or all tokens would be computed. Models make a loss of them, which fails where the attention
    mask covers more than the tokens.
    """
    name = "output_router_logits"
    asked = kwargs.get(name)
    return {name: False} if asked or (asked is None and settings[name]) else {}


def _adapters_by_row(model: PreTrainedModel) -> str | None:
    """The argument for whose length PEFT has hooked the adapted layers, as for an aLoRA, or None."""
    if getattr(model, "peft_config", None) is None:
        return None
    layer = next((module for module in model.modules() if "_active_adapter" in module.__dict__), None)
    hooks = [hook for hook in layer._forward_pre_hooks.values() if isinstance(hook, partial)] if layer else []
    names = ("adapter_names", "alora_offsets")
    return next((name for name in names for hook in hooks if name in hook.keywords), None)


def positions_follow_padding(model: PreTrainedModel, inputs: ForwardInputs) -> bool:
    """Whether the model counts positions from the first real token of each row, should there be padding."""
    return inputs.position_ids is not None or "position_ids" not in forward_arguments(model)


def read_pads(mask: torch.Tensor | None, batch: int, columns: int) -> NDArray[np.int64] | None:
    """Columns of left padding of each row, or None where the mask is not of the form 0…01…1 over all `columns`.

    Other numbers than 0 and 1 mean something, too: models with states multiply by them.

    A row may be all padding, as far as it goes: its first real tokens may come with the next piece of the prompt.
    """
    if mask is None:
        return np.zeros(batch, dtype=np.int64)
    values = (mask.float() if mask.dtype == torch.bfloat16 else mask).cpu().numpy()  # NumPy has no bfloat16
    seen = values != 0
    if seen.shape != (batch, columns) or not (seen == values).all():
        return None
    count = seen.sum(axis=1)
    first = np.where(count > 0, seen.argmax(axis=1), columns)
    return first.astype(np.int64) if bool((first + count == columns).all()) else None


def hides_padding_only(mask: torch.Tensor, known: NDArray[np.int64] | None) -> bool:
    """Whether a mask hides padding on the left and nothing else: `known` [batch] columns, where those are known."""
    pads = read_pads(mask, *mask.shape[:2])
    return pads is not None and (known is None or np.array_equal(pads, known))


def positions_count_up(position_ids: torch.Tensor | None, pads: NDArray[np.int64], start: int) -> bool:
    """Whether every real token from column `start` on has its column, less the padding, as its position."""
    if position_ids is None or position_ids.ndim > 2:
        return True  # column ids contain those of several dimensions
    found = (position_ids.float() if position_ids.dtype == torch.bfloat16 else position_ids).cpu().numpy()
    if not pads.any():
        return bool((found == np.arange(start, start + found.shape[1])).all())
    expected = np.arange(start, start + found.shape[1])[None, :] - pads[:, None]
    return bool(((found == expected) | (expected < 0)).all())


def common_columns(held: Tokens, ids: Tokens) -> int:
    """Leading columns in which all rows of `held` and `ids` agree."""
    n = min(held.shape[1], ids.shape[1])
    differ = np.flatnonzero((held[:, :n] != ids[:, :n]).any(axis=0))
    return int(differ[0]) if differ.size else n
