"""`check_model_compatibility` reports which kinds of reuse a model supports."""

import json
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from packaging.version import Version
from transformers import PreTrainedModel

from kvboost_hf.cache.forward.admission import blend_reason
from kvboost_hf.cache.identity import ModelState
from kvboost_hf.cache.planning.moved import Measure
from kvboost_hf.compat import decoder_layers, known_reason, probe_reason, require_reusable_model, steps_reason
from kvboost_hf.fields import require_bool
from kvboost_hf.offload.awq.formats import PackedFormat
from kvboost_hf.offload.load import METHOD


@dataclass(frozen=True, slots=True, kw_only=True)
class CompatibilityReport:
    """The findings of `check_model_compatibility`.

    Args:
        architecture: Class name of the model.
        tested: Whether the tests of this library include an architecture of this class that works in the installed
            transformers.
        exact: Whether stored K/V can be reused for the same tokens after the same history.
        reason: Why not, or None.
        moved: Whether K/V can be moved: rotated to other positions, and repaired by the repairs of `ReusePolicy` that
            measure nothing. If rotary frequencies depend on the length, within the original length only.
        moved_reason: Why not, or None.
        streaming: Whether its decoder layers can be streamed.
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
        text = "; ".join(f"{name}: {'yes' if reason is None else f'no, {reason}'}" for name, reason in answers)
        return f"{self.architecture}{'' if self.tested else ' (not tested)'}: {text}"


def check_model_compatibility(model: PreTrainedModel, strict: bool = True) -> CompatibilityReport:
    """Find out which kinds of reuse a model supports, by inspecting it and running it on a few tokens.

    Args:
        model: A causal language model.
        strict: Raise if exact reuse is not possible; else only warn.

    Returns:
        The findings. Nothing is stored.

    Raises:
        ValueError: if `strict` and exact reuse is not possible, if `model` is no causal language model with weights,
            or if `strict` is neither True nor False.

    Warns:
        UserWarning: for an architecture that is not tested, and, if not `strict`, if exact reuse is not possible.

    Example:
        >>> from kvboost_hf.assets import load_embedded
        >>> report = check_model_compatibility(load_embedded()[0])
        >>> print(report)
        LlamaForCausalLM: exact reuse: yes; moved chunks: yes; streaming: yes
    """
    require_bool("strict", strict)
    require_reusable_model(model)
    name = type(model).__name__
    fingerprint = ModelState.of(model).fingerprint
    fingerprint.look(model)
    reason = known_reason(model) or fingerprint.reason_in_training(model) or probe_reason(model)
    if reason is None:
        steps_reason(model)  # decides what is kept of decoded tokens; found out now, not in the first call
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
    """Class names of the models that the tests run, but for those that the installed transformers has broken."""
    rows = json.loads((Path(__file__).parent / "architectures.json").read_text(encoding="utf-8"))
    installed = Version(transformers.__version__)
    return frozenset(name for name, row in rows.items() if "before" not in row or installed < Version(row["before"]))


def moving_reason(model: PreTrainedModel, exact_reason: str | None) -> str | None:
    """Why K/V of the model cannot be used at other positions, or None."""
    return "nothing of it can be reused" if exact_reason is not None else blend_reason(model, Measure.NOTHING)


def streaming_reason(model: PreTrainedModel) -> str | None:
    """Why the decoder layers of the model cannot be loaded one after the other, or None."""
    if not decoder_layers(model):
        return "it has no list of decoder layers"
    if not getattr(model, "is_quantized", False):
        return None
    method: Any = getattr(model, "quantization_method", None)
    if getattr(method, "value", method) in (METHOD, "quanto"):  # loaded by us, or made of tensors that can be streamed
        return None
    config: Any = model.config.quantization_config
    try:
        PackedFormat.of(config if isinstance(config, dict) else config.to_dict())
    except ValueError:
        return "its weights are quantized in a way that keeps its own loading"
    return None
