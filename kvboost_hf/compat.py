"""What each model allows, and why not.

Tables of architectures go stale; most of what matters can be seen by looking at the cache that transformers itself
would make for the model, and by running it on a few tokens.
"""

import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

# Largest difference in logits, in standard deviations of the logits, that rounding explains where the same thing is
# computed in matrices of other shapes. Encoder-style attention gives 0.002 and more in float32.
_TOLERANCE = {torch.float32: 2e-4, torch.float64: 2e-4, torch.float16: 5e-2, torch.bfloat16: 2e-1}
# Where even the shapes are the same.
_SAME_SHAPE_TOLERANCE = {torch.float32: 2e-4, torch.float64: 2e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
_PROBE_TOKENS = 12


class ProbeCache(DynamicCache):
    """The cache of a probe: a type of its own, so that no hook takes it for a user's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompatibilityReport:
    """What `check_model_compatibility` found.

    Args:
        architecture: Class name of the model.
        exact: Whether stored K/V can be reused for the same tokens after the same history.
        reason: Why not, or None.
    """

    architecture: str
    exact: bool
    reason: str | None


def check_model_compatibility(model: PreTrainedModel, strict: bool = True) -> CompatibilityReport:
    """Find out, by looking and by running it on 12 tokens, whether K/V reuse is right for a model.

    Args:
        model: A causal language model.
        strict: Raise if it is not.

    Returns:
        The finding. Nothing is stored.

    Raises:
        ValueError: if `strict` and exact reuse is not possible, and for what is no causal language model with weights.

    Example:
        >>> from kvboost_hf.assets import load_embedded
        >>> check_model_compatibility(load_embedded()[0]).exact
        True
    """
    require_reusable_model(model)
    reason = known_reason(model) or probe_reason(model)
    if strict and reason is not None:
        raise ValueError(f"{type(model).__name__} cannot reuse K/V: {reason}. Use it without a ChunkReuseCache.")
    return CompatibilityReport(architecture=type(model).__name__, exact=reason is None, reason=reason)


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
        kept = model.__dict__.setdefault(f"_kvboost_hf_{cls.__name__}", cls())
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
            known[model.dtype] = probe(model)
        return known[model.dtype]


def _static_reason(model: PreTrainedModel) -> str | None:
    if model.config.get_text_config(decoder=True) is not model.config:
        return "models with inputs other than text are not supported yet"
    kinds = {type(layer) for layer in cache_layers(model)}
    if kinds != {DynamicLayer}:
        names = ", ".join(sorted(kind.__name__ for kind in kinds - {DynamicLayer})) or "no layers"
        return f"its cache has layers other than full attention ({names}), which are not supported yet"
    varying = {"dynamic", "longrope"} & _rope_types(model.config)
    if varying:
        return f"its rotary frequencies depend on the length ({', '.join(sorted(varying))}), not supported yet"
    arguments = inspect.signature(model.forward).parameters
    if "past_key_values" not in arguments:
        return "its forward takes no past_key_values"
    if "logits_to_keep" not in arguments:
        return "its forward takes no logits_to_keep, so it cannot be known which logits a caller needs"
    return None


def _rope_types(config: Any) -> set[str]:
    found: set[str] = set()

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            kind = value.get("rope_type", value.get("type"))
            if isinstance(kind, str):
                found.add(kind)
            for inner in value.values():
                walk(inner)

    walk(getattr(config, "rope_parameters", None))
    walk(getattr(config, "rope_scaling", None))
    return found


@torch.no_grad()
def _probe(model: PreTrainedModel) -> str | None:
    ids, cut = _probe_ids(model), _PROBE_TOKENS // 2
    other = torch.cat([ids[:, :cut], ids[:, cut:].flip(1)], dim=1)
    whole = _logits(model, ids)
    off = _difference(_logits(model, other)[:, :cut], whole[:, :cut])
    if not off <= _SAME_SHAPE_TOLERANCE.get(model.dtype, 2e-2):
        return f"it is not causal: later tokens change earlier logits (by {off:.2g} standard deviations)"
    cache = ProbeCache(config=model.config)
    parts = torch.cat([_logits(model, ids[:, :cut], cache), _logits(model, ids[:, cut:], cache)], dim=1)
    off = _difference(parts, whole)
    if not off <= _TOLERANCE.get(model.dtype, 2e-1):
        return f"a prompt in two parts gives other logits than in one (by {off:.2g} standard deviations)"
    return None


@torch.no_grad()
def _probe_padding(model: PreTrainedModel) -> str | None:
    """Padding on the left must change nothing, in one part and in two."""
    ids, pad, cut = _probe_ids(model), 3, 8
    padded = torch.cat([ids[:, :pad], ids], dim=1)
    mask = torch.ones_like(padded)
    mask[:, :pad] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    def run(start: int, stop: int, cache: ProbeCache) -> torch.Tensor:
        given = {"position_ids": positions[:, start:stop]} if takes_positions else {}
        return _logits(model, padded[:, start:stop], cache, attention_mask=mask[:, :stop], **given)

    plain = _logits(model, ids)
    cache = ProbeCache(config=model.config)
    for found in (
        run(0, padded.shape[1], ProbeCache(config=model.config)),
        torch.cat([run(0, cut, cache), run(cut, padded.shape[1], cache)], dim=1),
    ):
        off = _difference(found[:, pad:], plain)
        if not off <= _TOLERANCE.get(model.dtype, 2e-1):
            return f"padding changes what it computes (by {off:.2g} standard deviations)"
    return None


def _probe_ids(model: PreTrainedModel) -> torch.Tensor:
    vocab_size = model.get_input_embeddings().weight.shape[0]  # type: ignore[index]
    return (torch.arange(_PROBE_TOKENS, device=input_device(model))[None] * 7919 + 13) % vocab_size


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max()) / (float(expected.std()) or 1.0)


def _logits(model: PreTrainedModel, ids: torch.Tensor, cache: ProbeCache | None = None, **given: Any) -> torch.Tensor:
    cache = ProbeCache(config=model.config) if cache is None else cache
    logits: torch.Tensor = model(
        input_ids=ids, past_key_values=cache, use_cache=True, return_dict=True, **given
    ).logits
    return logits.float()


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
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return 0
    if getattr(config, "multi_query", False):
        heads = 1
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * head_dim * model.dtype.itemsize)
