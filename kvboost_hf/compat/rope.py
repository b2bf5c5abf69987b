"""Detects rotary frequencies that depend on the length of the text."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from kvboost_hf.compat.memo import remember


def rope_regime(model: PreTrainedModel, length: int) -> bytes | None:
    """The set of rotary frequencies that a forward uses whose last token is number `length`.

    K/V of one regime is never used in another. With "dynamic" scaling every length beyond the original one has its
    own frequencies; with "longrope" all of these share one set.

    Returns:
        A name of the regime: empty for the original frequencies and for models with fixed ones; None for frequencies
        of this length only.
    """
    regime = b""
    for kind, limit in _limits(model):
        if kind == "longrope" and length > limit:
            regime = b"long"
        elif kind == "dynamic" and length >= limit:
            return None
    return regime


def original_length(model: PreTrainedModel) -> int | None:
    """The length up to which frequencies are the original ones, or None without a limit."""
    return min((limit for _, limit in _limits(model)), default=None)


def frequencies_vary(module: nn.Module) -> bool:
    """Whether a module is a rotary embedding whose frequencies depend on the length."""
    if "rope_type" not in module.__dict__:
        return False
    return any(kind == "longrope" or "dynamic" in kind for kind in _rope_types(module).values())


def _rope_types(module: nn.Module) -> dict[str | None, str]:
    kinds: Any = module.rope_type
    by_layer_type = kinds if isinstance(kinds, dict) else {None: kinds}
    return {layer_type: kind for layer_type, kind in by_layer_type.items() if isinstance(kind, str)}


def _limits(model: PreTrainedModel) -> frozenset[tuple[str, int]]:
    return remember(model, rope_regime, lambda: _rope_limits(model))


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
