"""What each model allows, and why not.

Tables of architectures go stale; most of what matters can be seen by looking at the cache that transformers itself
would make for the model, and by running it on a few tokens.
"""

import inspect
import json
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

# Largest difference in logits, in standard deviations of the logits, that rounding explains where the same thing is
# computed in matrices of other shapes. Encoder-style attention gives 0.002 and more in float32.
_TOLERANCE = {torch.float32: 2e-4, torch.float64: 2e-4, torch.float16: 5e-2, torch.bfloat16: 2e-1}
# Where even the shapes are the same.
_SAME_SHAPE_TOLERANCE = {torch.float32: 2e-4, torch.float64: 2e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
_PROBE_TOKENS = 8

# Cache layers of transformers that `cache/kinds.py` has a layer for.
SERVED_LAYERS = frozenset(
    (
        "DynamicLayer",
        "DynamicSlidingWindowLayer",
        "DynamicIndexedLayer",
        "LinearAttentionLayer",
        "LinearAttentionAndFullAttentionLayer",
        "LinearAttentionAndSlidingWindowAttentionLayer",
        "DummyLayer",
        "MiniMaxM3VLSparseCacheLayer",
        "DeepseekV4HCACache",
        "DeepseekV4CSACache",
    )
)


class ProbeCache(DynamicCache):
    """The cache of a probe: a type of its own, so that no hook takes it for a user's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompatibilityReport:
    """What `check_model_compatibility` found.

    Args:
        architecture: Class name of the model.
        tested: Whether the tests of this library run an architecture of this class.
        exact: Whether stored K/V can be reused for the same tokens after the same history.
        reason: Why not, or None.
        moved: Whether K/V could be moved: rotated to other positions, and repaired.
        moved_reason: Why not, or None.
        streaming: Whether its decoder layers can be told apart, to be loaded one after the other.
        streaming_reason: Why not, or None.
    """

    architecture: str
    tested: bool
    exact: bool
    reason: str | None
    moved: bool
    moved_reason: str | None
    streaming: bool
    streaming_reason: str | None

    def __str__(self) -> str:
        answers = (
            ("exact reuse", self.reason),
            ("moved chunks", self.moved_reason),
            ("streaming", self.streaming_reason),
        )
        told = "; ".join(f"{name}: {'yes' if reason is None else f'no, {reason}'}" for name, reason in answers)
        return f"{self.architecture}{'' if self.tested else ' (not tested)'}: {told}"


def check_model_compatibility(model: PreTrainedModel, strict: bool = True) -> CompatibilityReport:
    """Find out, by looking and by running it on a few tokens, what a model allows.

    Args:
        model: A causal language model.
        strict: Raise where exact reuse is not possible; else only warn.

    Returns:
        The findings. Nothing is stored.

    Raises:
        ValueError: if `strict` and exact reuse is not possible, and for what is no causal language model with weights.

    Warns:
        UserWarning: for an architecture that is not tested, and, if not `strict`, where exact reuse is not possible.

    Example:
        >>> from kvboost_hf.assets import load_embedded
        >>> report = check_model_compatibility(load_embedded()[0])
        >>> print(report)
        LlamaForCausalLM: exact reuse: yes; moved chunks: yes; streaming: yes
    """
    require_reusable_model(model)
    name = type(model).__name__
    reason = known_reason(model) or probe_reason(model)
    tested = name in known_architectures()
    if reason is not None:
        message = f"{name} cannot reuse K/V: {reason}. Use it without a ChunkReuseCache."
        if strict:
            raise ValueError(message)
        warnings.warn(message, stacklevel=2)
    elif not tested:
        warnings.warn(
            f"{name} is not among the architectures that kvboost_hf is tested with. A run on a few tokens found "
            "nothing wrong; compare some answers with those of plain generate().",
            stacklevel=2,
        )
    moved, streaming = moving_reason(model, reason), streaming_reason(model)
    return CompatibilityReport(
        architecture=name,
        tested=tested,
        exact=reason is None,
        reason=reason,
        moved=moved is None,
        moved_reason=moved,
        streaming=streaming is None,
        streaming_reason=streaming,
    )


@cache
def known_architectures() -> frozenset[str]:
    """Class names of the models that the tests run."""
    return frozenset(json.loads((Path(__file__).parent / "architectures.json").read_text(encoding="utf-8")))


def moving_reason(model: PreTrainedModel, exact_reason: str | None) -> str | None:
    """Why K/V of the model cannot be rotated to other positions, or None."""
    if exact_reason is not None:
        return "nothing of it can be reused"
    kinds = {type(layer).__name__ for layer in cache_layers(model)} - {"DynamicLayer", "DynamicSlidingWindowLayer"}
    if kinds - {"DummyLayer"}:
        return f"only keys and values can be moved, and it keeps something else ({', '.join(sorted(kinds))})"
    rotary = [module for module in model.modules() if "inv_freq" in "".join(module._buffers)]
    config: Any = model.config.get_text_config(decoder=True)
    if not rotary or getattr(config, "alibi", False):
        return "its positions are not rotary"
    if any(map(frequencies_vary, rotary)):
        return "its rotary frequencies depend on the length"
    if "mrope_section" in str(getattr(config, "rope_parameters", None)):
        return "its positions have several dimensions"
    if hasattr(config, "kv_lora_rank"):
        return "its keys are in part latent, and only in part rotated"
    return None


def streaming_reason(model: PreTrainedModel) -> str | None:
    """Why the decoder layers of the model cannot be loaded one after the other, or None."""
    config: Any = model.config.get_text_config(decoder=True)
    count = getattr(config, "num_hidden_layers", None)
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == count]
    if not lists:
        return "it has no list of decoder layers"
    if getattr(model, "is_quantized", False) and str(getattr(model, "quantization_method", "")).lower() != "awq":
        return "its weights are quantized in a way that keeps its own loading"
    return None


def require_reusable_model(model: PreTrainedModel) -> None:
    """Refuse what no kind of K/V reuse can serve.

    Raises:
        ValueError: for anything but a `PreTrainedModel` decoder whose weights are loaded.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(_not_a_model(model))
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} is an encoder-decoder; K/V reuse is for decoder-only models. Use it without a "
            "ChunkReuseCache."
        )
    offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())
    if not offloaded and all(p.is_meta for p in model.parameters()):
        raise ValueError(
            f"All weights of this {type(model).__name__} are on the meta device, so it cannot compute anything. Load "
            "them first, for example with from_pretrained()."
        )


def require_cache(model: PreTrainedModel) -> None:
    """Refuse what a cache cannot be passed to.

    Raises:
        ValueError: as `require_reusable_model` does, and for a model whose forward takes no cache.
    """
    require_reusable_model(model)
    reason = _no_cache_reason(model)
    if reason is not None:
        raise ValueError(
            f"{type(model).__name__} cannot be given a cache: {reason}. Use it without a ChunkReuseCache."
        )


def _not_a_model(found: object) -> str:
    start = f"`model` must be a transformers PreTrainedModel, got {type(found).__name__}. "
    if getattr(getattr(found, "active_peft_config", None), "is_prompt_learning", False):
        return start + (
            "Prompt learning is not supported: its virtual tokens are no part of the prompt. Use it without a "
            "ChunkReuseCache."
        )
    inner = {"get_base_model": "get_base_model()", "_orig_mod": "_orig_mod", "module": "module"}
    remedy = next((f": model.{way}" for name, way in inner.items() if hasattr(found, name)), "")
    return f"{start}Pass the transformers model itself, not a wrapper around it{remedy}."


def cache_layers(model: PreTrainedModel) -> list[Any]:
    """The cache layers that transformers makes for `model`, empty."""
    return list(DynamicCache(config=model.config.get_text_config(decoder=True)).layers)


class KeptOnModel:
    """Something known of one model, kept on the model itself, and never copied or saved with it."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        """The one on `model`, made at the first call."""
        key = f"_kvboost_hf_{cls.__name__}"
        kept = model.__dict__.get(key)  # first, for torch.compile traces this, and cannot make a lock
        if kept is None:
            kept = model.__dict__.setdefault(key, cls())
        assert isinstance(kept, cls)
        return kept

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()  # a copied or loaded model starts afresh

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)()


class _Findings(KeptOnModel):
    """What was found of a model, so that it is found once."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.static: tuple[str | None] | None = None
        self.probed: dict[torch.dtype, str | None] = {}
        self.padded: dict[torch.dtype, str | None] = {}
        self.cache_argument: str | None = None
        self._rope_limits: frozenset[tuple[str, int]] | None = None

    def rope_limits(self, model: PreTrainedModel) -> frozenset[tuple[str, int]]:
        """See `_rope_limits`."""
        if self._rope_limits is None:
            self._rope_limits = _rope_limits(model)
        return self._rope_limits


def known_reason(model: PreTrainedModel) -> str | None:
    """Why reuse is ruled out, as far as can be told without running the model now, or None."""
    found = _Findings.of(model)
    with found.lock:
        if found.static is None:
            found.static = (_static_reason(model),)
        return found.static[0] or found.probed.get(model.dtype)


def probe_reason(model: PreTrainedModel) -> str | None:
    """Why a run on a few tokens rules out reuse, or None. Run once per model and dtype: four short forwards."""
    return _once(model, _Findings.of(model).probed, _probe)


def padding_reason(model: PreTrainedModel) -> str | None:
    """Why a run on a few tokens rules out storing K/V of padded rows, or None. Run once per model and dtype."""
    return _once(model, _Findings.of(model).padded, _probe_padding)


def _once(
    model: PreTrainedModel, known: dict[torch.dtype, str | None], probe: Callable[[PreTrainedModel], str | None]
) -> str | None:
    with _Findings.of(model).lock:
        if model.dtype not in known:
            try:
                known[model.dtype] = probe(model)
            except Exception as error:  # models fail in ways of their own on what they were not written for
                known[model.dtype] = f"it fails on a prompt in parts ({type(error).__name__}: {error})"
        return known[model.dtype]


def _no_cache_reason(model: PreTrainedModel) -> str | None:
    if not cache_argument(model):
        return "its forward takes none"
    if model.config.model_type.startswith("musicgen"):
        return "its own generate() runs only the last token of a prompt once a cache holds anything"
    return None


# What no probe of a few tokens can see, by model type.
_KNOWN_WRONG = {
    "moshi": "transformers applies its sliding window to cached tokens only, so that a prompt in parts differs",
}


def _static_reason(model: PreTrainedModel) -> str | None:
    if (known := _KNOWN_WRONG.get(model.config.model_type)) is not None:
        return known
    if (reason := _no_cache_reason(model)) is not None:
        return reason
    if has_own_cache(model):
        return "it keeps its K/V in a cache class of its own"
    try:
        kinds = {type(layer).__name__ for layer in cache_layers(model)}
    except Exception as error:  # whatever transformers' own cache does not understand
        return f"transformers cannot make a cache for its configuration ({type(error).__name__}: {error})"
    unknown = ", ".join(sorted(kinds - SERVED_LAYERS)) or ("" if kinds else "none at all")
    if unknown:
        return f"its cache has layers of a kind that cannot be served ({unknown})"
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        return "its forward takes no logits_to_keep, so it cannot be known which logits a caller needs"
    return None


def has_own_cache(model: PreTrainedModel) -> bool:
    """Whether the model makes a cache of a class of its own, and takes no other."""
    supports: Any = model._supports_default_dynamic_cache
    return not supports()


def cache_argument(model: PreTrainedModel) -> str:
    """The argument of forward that takes a cache; empty if there is none."""
    found = _Findings.of(model)
    if found.cache_argument is None:
        arguments = inspect.signature(model.forward).parameters
        found.cache_argument = next((name for name in ("past_key_values", "cache_params") if name in arguments), "")
    return found.cache_argument


def rope_regime(model: PreTrainedModel, length: int) -> bytes | None:
    """What rotary frequencies a forward uses whose last token is number `length`, if they depend on it.

    K/V of one regime is never used in another. With "dynamic" scaling every length beyond the original one has its
    own frequencies, with "longrope" all of these share one set.

    Returns:
        A name for the regime, empty for the original one and for models whose frequencies are fixed; None for one that
        no other length shares.
    """
    regime = b""
    for kind, limit in _Findings.of(model).rope_limits(model):
        if kind == "longrope" and length > limit:
            regime = b"long"
        elif kind == "dynamic" and length >= limit:
            return None
    return regime


def frequencies_vary(module: nn.Module) -> bool:
    """Whether a module is a rotary embedding whose frequencies depend on the length."""
    if "rope_type" not in module.__dict__:
        return False
    return any(kind == "longrope" or "dynamic" in kind for kind in _rope_types(module).values())


def _rope_types(module: nn.Module) -> dict[str | None, str]:
    kinds: Any = module.rope_type
    by_layer_type = kinds if isinstance(kinds, dict) else {None: kinds}
    return {layer_type: kind for layer_type, kind in by_layer_type.items() if isinstance(kind, str)}


def _rope_limits(model: PreTrainedModel) -> frozenset[tuple[str, int]]:
    """Kinds of rotary embedding that depend on the length, and the length from which on they do."""
    found: set[tuple[str, int]] = set()
    for module in filter(frequencies_vary, model.modules()):
        for layer_type, kind in _rope_types(module).items():
            if kind == "longrope":
                parameters: Any = module.config.rope_parameters  # type: ignore[union-attr]
                parameters = parameters[layer_type] if layer_type is not None else parameters
                found.add(("longrope", int(parameters["original_max_position_embeddings"])))
            elif "dynamic" in kind:
                found.add(("dynamic", int(module.original_max_seq_len)))  # type: ignore[arg-type]
    return frozenset(found)


@torch.no_grad()
def _probe(model: PreTrainedModel) -> str | None:
    """Two forwards, of two rows and of half a row; three where the cache cannot be cut."""
    ids, cut = _probe_ids(model), _PROBE_TOKENS // 2
    other = torch.cat([ids[:, :cut], ids[:, cut:].flip(1)], dim=1)
    cache = ProbeCache(config=model.config)
    both = _logits(model, torch.cat([ids, other]), cache)
    whole = both[:1]
    off = difference(both[1:, :cut], whole[:, :cut])
    if not off <= _SAME_SHAPE_TOLERANCE.get(model.dtype, 2e-2):
        return f"it is not causal: later tokens change earlier logits (by {off:.2g} standard deviations)"
    if all(keys is not None for keys in _keys(cache)):
        cache.batch_select_indices(torch.tensor([0], device=ids.device))
        cache.crop(cut - _PROBE_TOKENS)
    else:
        cache = ProbeCache(config=model.config)
        _logits(model, ids[:, :cut], cache)
    off = difference(_logits(model, ids[:, cut:], cache), whole[:, cut:])
    if not off <= tolerance(model.dtype):
        return f"a prompt in two parts gives other logits than in one (by {off:.2g} standard deviations)"
    return None


@torch.no_grad()
def _probe_padding(model: PreTrainedModel) -> str | None:
    """Padding on the left must change nothing, in one part and in two."""
    ids, pad, cut = _probe_ids(model), 3, 7
    padded = torch.cat([ids[:, :pad], ids], dim=1)
    mask = torch.ones_like(padded)
    mask[:, :pad] = 0
    # A second row without padding: some models look at the mask of batches only.
    padded, mask = torch.cat([padded, padded]), torch.cat([mask, torch.ones_like(mask)])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    def run(start: int, stop: int, cache: ProbeCache) -> torch.Tensor:
        given = {"position_ids": positions[:, start:stop]} if takes_positions else {}
        return _logits(model, padded[:, start:stop], cache, attention_mask=mask[:, :stop], **given)

    alone = ProbeCache(config=model.config)
    plain = _logits(model, ids, alone)
    whole, parts = ProbeCache(config=model.config), ProbeCache(config=model.config)
    for padded_cache, found in (
        (whole, run(0, padded.shape[1], whole)),
        (parts, torch.cat([run(0, cut, parts), run(cut, padded.shape[1], parts)], dim=1)),
    ):
        # Keys, too: rotated by their columns, they would give the same logits, but not to a row with other padding.
        pairs = [(found[:1, pad:], plain)] + [
            (theirs[:1, :, -_PROBE_TOKENS:], ours)
            for theirs, ours in zip(_keys(padded_cache), _keys(alone), strict=True)
            if ours is not None and theirs is not None
        ]
        off = max(difference(padded_one, one) for padded_one, one in pairs)
        if not off <= tolerance(model.dtype):
            return f"padding changes what it computes (by {off:.2g} standard deviations)"
    return None


def _keys(cache: ProbeCache) -> list[torch.Tensor | None]:
    """The keys of each full-attention layer, [batch, heads, length, dim]."""
    layers: list[Any] = cache.layers
    return [layer.keys if type(layer) is DynamicLayer and layer.is_initialized else None for layer in layers]


def _probe_ids(model: PreTrainedModel) -> torch.Tensor:
    vocab_size = model.get_input_embeddings().weight.shape[0]  # type: ignore[index]
    return (torch.arange(_PROBE_TOKENS, device=input_device(model))[None] * 7919 + 13) % vocab_size


def tolerance(dtype: torch.dtype) -> float:
    """The largest `difference` that rounding explains where the same thing is computed in other shapes."""
    return _TOLERANCE.get(dtype, 2e-1)


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, in standard deviations of what is expected; NaN where there is one on either side."""
    return float((found - expected).abs().max()) / (float(expected.std()) or 1.0)


def _logits(model: PreTrainedModel, ids: torch.Tensor, cache: ProbeCache | None = None, **given: Any) -> torch.Tensor:
    name = cache_argument(model)
    cache = ProbeCache(config=model.config) if cache is None else cache
    if model.config.get_text_config(decoder=True) is not model.config:
        given = {**_multimodal_arguments(model, ids, cache), **given}
    logits: torch.Tensor = model(input_ids=ids, **{name: cache}, use_cache=True, return_dict=True, **given).logits
    return logits.float()


def _multimodal_arguments(model: PreTrainedModel, ids: torch.Tensor, cache: ProbeCache) -> dict[str, Any]:
    """What a processor adds for text: a model might take types of 0 for something else than text.

    Positions, too: some models count from where their last prompt left off if they are given none.
    """
    accepted = inspect.signature(model.forward).parameters
    held = cache.get_seq_length()
    given = {"position_ids": torch.arange(held, held + ids.shape[1], device=ids.device)[None].expand_as(ids)}
    given |= {name: torch.zeros_like(ids) for name in ("token_type_ids", "mm_token_type_ids")}
    return {name: value for name, value in given.items() if name in accepted}


def input_device(model: PreTrainedModel) -> torch.device:
    """Where token ids belong: with the embeddings, or where accelerate brings them when they are needed."""
    embeddings = model.get_input_embeddings()
    weight = embeddings.weight
    assert isinstance(weight, torch.Tensor)
    if not weight.is_meta:
        return weight.device
    hook: Any = getattr(embeddings, "_hf_hook", None)
    return torch.device(getattr(hook, "execution_device", None) or "cpu")


def bytes_per_token(model: PreTrainedModel) -> int:
    """Bytes of K/V per token as the configuration tells it: a lower bound if layers differ, 0 if it does not say."""
    config: Any = model.config.get_text_config(decoder=True)
    layers: Any = getattr(config, "per_layer_config", None) or [config] * int(getattr(config, "num_hidden_layers", 0))
    return sum(_kv_elements(layers[i]) for i in range(len(layers))) * model.dtype.itemsize


def _kv_elements(config: Any) -> int:
    """Elements of K/V of one layer for one token, 0 if its configuration does not say."""
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return 0
    if getattr(config, "multi_query", False):
        heads = 1
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * heads * int(head_dim)
