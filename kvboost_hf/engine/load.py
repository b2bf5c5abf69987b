"""A model and its tokenizer, by name."""

from os import PathLike
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from kvboost_hf.config import StreamingConfig
from kvboost_hf.offload.build import default_device
from kvboost_hf.offload.load import load_streamed

_OF_TOKENIZER = ("revision", "token", "cache_dir", "local_files_only", "trust_remote_code", "subfolder", "gguf_file")


def load(
    name: str | PathLike[str],
    streaming: StreamingConfig | None,
    device: torch.device | str | None,
    options: dict[str, Any],
) -> tuple[PreTrainedModel, Any]:
    """Load a causal language model and its tokenizer.

    Args:
        name: A name on the hub, or a folder.
        streaming: Which layers are streamed; None for a model that is loaded as a whole.
        device: Where it computes; None for the accelerator, or the CPU where there is none.
        options: For transformers' `from_pretrained()`.
    """
    tokenizer = AutoTokenizer.from_pretrained(name, **{key: options[key] for key in _OF_TOKENIZER if key in options})
    if streaming is not None:
        return load_streamed(str(name), streaming, device=device, **options), tokenizer
    where = {"": default_device() if device is None else torch.device(device)}
    return AutoModelForCausalLM.from_pretrained(name, **{"device_map": where, **options}), tokenizer
