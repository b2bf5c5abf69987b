"""`load_streamed`: load a model and stream its layers."""

from typing import Any

import torch
from transformers import PreTrainedModel

from kvboost_hf.compat import available_device, loader_of
from kvboost_hf.config import StreamingConfig
from kvboost_hf.offload.quantizer import with_streaming

_OF_CONFIG = ("revision", "token", "cache_dir", "local_files_only", "trust_remote_code", "subfolder")


def load_streamed(
    name: str,
    streaming: StreamingConfig | None = None,
    *,
    device: torch.device | str | None = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """Load a causal language model that may be larger than the memory of its device.

    Weights are loaded layer by layer to where they stay: never all onto the device, and none twice into host memory.
    The checkpoint may be in 4 bits, of AWQ, GPTQ or compressed-tensors, or not quantized.

    Args:
        name: A name on the hub, or a folder with safetensors files.
        streaming: Which layers stay on the device; by default as many as fit.
        device: The device that computes; by default the accelerator, or the CPU if there is none.
        kwargs: For `from_pretrained()`, such as `dtype` and `attn_implementation`.

    Returns:
        A model that works with `generate()`, pipelines, `ChunkReuseCache`, `kvboost_fa2` and assistants as any other.

    Raises:
        ValueError: the model is no decoder of text, the checkpoint is quantized in another way, has other files or is
            incomplete, not even two slots fit into the budget, or the device does not exist.

    Example:
        >>> from kvboost_hf import StreamingConfig, load_streamed
        >>> from kvboost_hf.assets import EMBEDDED_MODEL_DIR
        >>> model = load_streamed(EMBEDDED_MODEL_DIR, StreamingConfig(keep_first_k=1, keep_last_k=1))
    """
    if "gguf_file" in kwargs or str(name).endswith(".gguf"):
        raise ValueError(
            f"{kwargs.get('gguf_file', name)} is a GGUF file, which transformers turns into plain weights in host "
            "memory. Load it with from_pretrained(gguf_file=...) and pass the model to stream_layers()."
        )
    if kwargs.get("quantization_config") is not None:
        raise ValueError(
            f"Weights are streamed as the checkpoint has them, got quantization_config="
            f"{type(kwargs['quantization_config']).__name__}. Leave it out, or load the model without streaming."
        )
    if kwargs.get("output_loading_info"):
        raise ValueError(
            "load_streamed() returns the model alone, got output_loading_info=True. Call "
            "from_pretrained(name, config=with_streaming(name, streaming), output_loading_info=True)."
        )
    if device is not None:
        kwargs["device_map"] = {"": available_device(device)}
    of_config = {key: kwargs[key] for key in _OF_CONFIG if key in kwargs}
    config = with_streaming(kwargs.pop("config", None) or name, streaming or StreamingConfig(), **of_config)
    model = loader_of(config).from_pretrained(name, config=config, **kwargs)
    assert isinstance(model, PreTrainedModel)
    return model
