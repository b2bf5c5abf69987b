"""`ModelCard`: what a model is, for clients that list models."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

_SIZES = {  # as GGUF files name them, which Ollama's clients read, and as transformers' configurations do
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
}
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What a model is.

    Args:
        family: The type of its architecture, such as `"llama"`.
        parameters: The number of its parameters.
        num_bytes: Bytes of its weights.
        gpu_bytes: Those of them that are on a GPU.
        quantization: How its weights are stored: `"F32"`, `"F16"`, `"BF16"`, or the method of quantization.
        sizes: Its sizes, as GGUF files name them.
    """

    family: str
    parameters: int = 0
    num_bytes: int = 0
    gpu_bytes: int = 0
    quantization: str = "unknown"
    sizes: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Any) -> "ModelCard":
        """The card of a `PreTrainedModel`."""
        config = model.config.get_text_config(decoder=True)
        dtype = str(model.dtype).removeprefix("torch.")
        quantized = getattr(model.config, "quantization_config", None) or {}
        method = (quantized if isinstance(quantized, dict) else quantized.to_dict()).get("quant_method")
        tensors = list(chain(model.parameters(), model.buffers()))
        sizes = {name: getattr(config, attribute, None) for name, attribute in _SIZES.items()}
        return cls(
            family=str(model.config.model_type),
            parameters=int(model.num_parameters()),
            num_bytes=sum(tensor.nbytes for tensor in tensors),
            gpu_bytes=sum(tensor.nbytes for tensor in tensors if tensor.device.type not in ("cpu", "meta")),
            quantization=str(getattr(method, "value", method) or _DTYPES.get(dtype, dtype)),
            sizes={name: size for name, size in sizes.items() if isinstance(size, int)},
        )

    @property
    def parameter_size(self) -> str:
        """The number of parameters, for people, such as `"134.5M"`."""
        for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
            if self.parameters >= unit:
                return f"{self.parameters / unit:.1f}{letter}"
        return str(self.parameters)
