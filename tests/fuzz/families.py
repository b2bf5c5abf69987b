"""Tiny models that are made once: one of each family that is served, one that nobody touches, and a draft."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from kvboost_hf import load_assistant
from kvboost_hf.assets import load_embedded
from tests.architectures.models import make_architecture
from tests.fuzz.history import TEXTS
from tests.internals.compat import cache_argument, cache_in, decoder_layers
from tests.parity.test_assistants import noisy

# How often each is drawn: states, windows and learned positions have rules of their own, and some models are slow.
FAMILIES: dict[str, int] = {
    "llama": 5,
    "qwen3": 3,
    "gpt2": 3,
    "opt": 2,
    "bloom": 2,
    "mistral": 4,
    "gemma2": 3,
    "gemma3_text": 1,
    "gpt_oss": 3,
    "llama4_text": 1,
    "deepseek_v3": 3,
    "mixtral": 2,
    "qwen3_next": 4,
    "falcon_h1": 7,
    "olmo_hybrid": 8,
    "lfm2": 5,
    "nemotron_h": 2,
    "granitemoehybrid": 1,
    "mamba2": 1,
    "zamba2": 1,
    "qwen3_5_text": 2,
    "kimi_linear": 1,
    "inkling_text": 1,
    "zaya": 2,
    "qwen4_exp_text": 1,
    "deepseek_v4": 1,
    "deepseek_v32": 1,
    "gemma4_text": 2,
}
# They keep states, of which nothing can be taken back, so that nothing is drafted for them.
STATEFUL = (
    *("qwen3_next", "falcon_h1", "olmo_hybrid", "lfm2", "nemotron_h", "granitemoehybrid", "mamba2", "zamba2"),
    *("qwen3_5_text", "kimi_linear", "inkling_text", "zaya", "qwen4_exp_text", "deepseek_v4"),
)
FULL = ("llama", "qwen3", "gpt2", "opt", "bloom", "deepseek_v3", "mixtral")  # all layers hold all tokens
# Their K/V can be used behind other text.
MOVABLE = ("llama", "qwen3", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "mixtral", "gemma4_text")
# Plain decoding without a draft is what they must say.
OWN_DRAFTS = ("load_assistant", "trees", "lookup", "looked-up trees")
DRAFTED = 3
_HIDDEN = 5  # column
# How far logits may be off at least, in their standard deviations. A history that fails in float32 is played in
# float64, too: what is off by more there is no matter of rounding, nor of experts or tokens that score alike.
SAME = {torch.float32: 2e-3, torch.float64: 1e-4}


@dataclass(frozen=True, slots=True)
class Family:
    """Models of equal weights: the one that is served, and one that nobody touches."""

    served: PreTrainedModel
    plain: PreTrainedModel
    same: float  # how far logits may be off, in their standard deviations
    steady: bool  # plain transformers computes the same whether a text comes whole or in parts


@cache
def family(name: str, dtype: torch.dtype = torch.float32) -> Family:
    """The models of a family, made at the first call."""
    served, plain = (_made(name, dtype) for _ in range(2))
    own = _own_error(plain)
    return Family(served, plain, max(SAME[dtype], 10 * own), own < 1e-4)


@torch.no_grad()
def _own_error(plain: Any) -> float:
    """How far logits are off where plain transformers computes a text in parts."""
    worst = 0.0
    for text in TEXTS:
        ids, cache = text[:, :60], DynamicCache(config=plain.config.get_text_config(decoder=True))
        for part in ids.split((24, 1, 1, 34), dim=1):
            found = plain(part, **{cache_argument(plain): cache}, use_cache=True).logits[:, -1]
        whole = plain(ids).logits[:, -1]
        worst = max(worst, float((found - whole).abs().max() / whole.std()))
    return worst


def _made(name: str, dtype: torch.dtype) -> PreTrainedModel:
    made: Any = make_architecture(name)
    made.to(dtype)
    if dtype == torch.float64:  # grouped products know no such numbers
        made.set_experts_implementation("eager")
    return made


@contextmanager
def model_as(model: Any, changed: tuple[str, int] | None) -> Iterator[None]:
    """With a model that was changed in one of the `CHANGES`, the more the higher the number; it is changed back."""
    if changed is None:
        yield
        return
    how = changed[0]
    layer = decoder_layers(model)[0]
    if how in ("hook", "function"):
        with _scaled_output(layer, how, 1 + changed[1] / 4):
            yield
        return
    owner, name, before = [
        (module, name, each)
        for module in layer.modules()
        for name, each in module.named_parameters(recurse=False)
        if each.dim() >= 2
    ][-1]
    kept = before.detach().clone()
    _set(owner, name, how, kept + changed[1] / 4 * kept.flip(0))
    try:
        yield
    finally:
        _set(owner, name, how, kept)


@contextmanager
def user_code(model: Any, name: str | None) -> Iterator[None]:
    """With one of the `USERS`' pieces of code on a model."""
    if name is None:
        yield
        return
    change = {"mask of steps": _hide_a_column, "no use of the cache": _use_no_cache}.get(name, _change_ids)
    if name == "ids prepared":
        prepare = model.prepare_inputs_for_generation
        model.prepare_inputs_for_generation = lambda *args, **kwargs: change(prepare(*args, **kwargs))
        try:
            yield
        finally:
            del model.prepare_inputs_for_generation
        return

    def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, change(dict(kwargs))

    handle = model.register_forward_pre_hook(hook, with_kwargs=True, prepend=name != "ids behind")
    try:
        yield
    finally:
        handle.remove()


def _change_ids(given: dict[str, Any]) -> dict[str, Any]:
    ids = given.get("input_ids")
    return given if ids is None else {**given, "input_ids": torch.where(ids % 4 == 3, ids - 1, ids)}


def _use_no_cache(given: dict[str, Any]) -> dict[str, Any]:
    """The cache is passed, and so it grows all the same."""
    ids = given.get("input_ids")
    return given if ids is None or ids.shape[1] == 1 else {**given, "use_cache": False}


def _hide_a_column(given: dict[str, Any]) -> dict[str, Any]:
    """Hide a column from single tokens behind it, whatever the form of the mask."""
    ids, mask, held = given.get("input_ids"), given.get("attention_mask"), cache_in(given)
    if ids is None or ids.shape[1] > 1 or held is None or (before := int(held.get_seq_length())) <= _HIDDEN:
        return given
    if mask is None:
        mask = torch.ones(len(ids), before + 1, dtype=torch.long)
    kinds = {kind: _hidden(each) for kind, each in mask.items()} if isinstance(mask, dict) else _hidden(mask)
    return {**given, "attention_mask": kinds}


def _hidden(mask: torch.Tensor | None) -> torch.Tensor | None:
    if mask is not None and mask.shape[-1] > _HIDDEN:
        mask = mask.clone()
        mask[..., _HIDDEN] = torch.finfo(mask.dtype).min if mask.is_floating_point() else 0
    return mask


@contextmanager
def mode(name: str | None) -> Iterator[None]:
    """Within one of the `MODES`."""
    if name in ("inference mode", "autocast"):
        with torch.inference_mode() if name == "inference mode" else torch.autocast("cpu", torch.bfloat16):
            yield
        return
    before, strict = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    torch.set_default_dtype(
        {"bfloat16 by default": torch.bfloat16, "float64 by default": torch.float64}.get(name, before)
    )
    torch.use_deterministic_algorithms(strict or name == "deterministic algorithms")
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        torch.use_deterministic_algorithms(strict)


@contextmanager
def _scaled_output(layer: Any, how: str, factor: float) -> Iterator[None]:
    """With another output of the last norm of a layer."""
    part = [each for each in layer.modules() if "Norm" in type(each).__name__][-1]
    if how == "hook":
        handle = part.register_forward_hook(lambda module, given, found: found * factor)
        try:
            yield
        finally:
            handle.remove()
        return
    plain = part.forward
    part.forward = lambda *args, **kwargs: plain(*args, **kwargs) * factor
    try:
        yield
    finally:
        del part.forward


@torch.no_grad()
def _set(owner: torch.nn.Module, name: str, how: str, values: torch.Tensor) -> None:
    parameter = getattr(owner, name)
    if how == "in place":
        parameter.copy_(values)
    elif how == "data":
        parameter.data = values
    elif how == "load_state_dict":
        owner.load_state_dict({**owner.state_dict(), name: values})
    else:
        setattr(owner, name, torch.nn.Parameter(values, requires_grad=parameter.requires_grad))


@cache
def draft(name: str, dtype: torch.dtype, kind: str) -> PreTrainedModel:
    """A draft that often agrees with the model of a family; each kind of drafting has one of its own."""
    made: PreTrainedModel = noisy(_made(name, dtype))
    config = made.generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = DRAFTED, "constant"
    config.assistant_confidence_threshold = 0.0
    if kind != "load_assistant":
        return made
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is no smaller
        told: dict[str, Any] = {"schedule": "constant", "num_assistant_tokens": DRAFTED, "clock": count().__next__}
        return load_assistant(made, target=family(name, dtype).served, **told)


@cache
def tokenizer() -> PreTrainedTokenizerBase:
    """One for stop strings, which knows all ids of the models."""
    return load_embedded()[1]
