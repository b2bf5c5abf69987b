"""Loads a model and its tokenizer by name."""

import logging
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils.hub import cached_file

from kvboost_hf.compat import available_device, loader_of, naming
from kvboost_hf.config import StreamingConfig
from kvboost_hf.offload.awq.formats import PackedFormat
from kvboost_hf.offload.build import default_device
from kvboost_hf.offload.checkpoint import open_shard
from kvboost_hf.offload.load import load_streamed

_log = logging.getLogger(__name__)

_OF_HUB = ("revision", "token", "cache_dir", "local_files_only", "subfolder")
_OF_TOKENIZER = (*_OF_HUB, "trust_remote_code", "gguf_file")


def load(
    name: str | PathLike[str],
    streaming: StreamingConfig | None,
    device: torch.device | str | None,
    options: dict[str, Any],
) -> tuple[PreTrainedModel, Any]:
    """Load a causal language model and its tokenizer.

    A checkpoint in 4 bits for which transformers needs a package that is not installed is loaded as streamed ones are,
    with all layers on the device.

    Args:
        name: A name on the hub, or a folder.
        streaming: Which layers are streamed; None for a model that is loaded as a whole.
        device: Where it computes; None for the accelerator, or the CPU where there is none.
        options: For transformers' `from_pretrained()`.

    Raises:
        ValueError: there is no such model or device, a file of the checkpoint is missing or damaged, or a package for
            it is not installed.
    """
    if not isinstance(name, str | PathLike):
        raise ValueError(
            f"`model` must be a name on the hub or a folder, got {type(name).__name__}. A model that is there already "
            "goes to KVBoost(model, tokenizer)."
        )
    if str(name).startswith(("/", "./", "../", "~")) and not Path(name).is_dir():
        raise ValueError(f"`model` must be a name on the hub or a folder, got {str(name)!r}, which is no folder here.")
    where = default_device() if device is None else available_device(device)
    with naming(name):
        tokenizer = AutoTokenizer.from_pretrained(
            name, **{key: options[key] for key in _OF_TOKENIZER if key in options}
        )
    if streaming is not None:
        return load_streamed(str(name), streaming, device=device, **options), tokenizer
    try:
        with naming(name, (OSError,)):  # a ValueError may be about the options
            return _loader(name, options).from_pretrained(name, **{"device_map": {"": where}, **options}), tokenizer
    except ImportError as error:
        with naming(name, (ImportError,)):
            if not _is_packed(name, options):
                raise
        _log.warning(
            "%s has 4-bit weights, which are loaded without the package that transformers needs (%s).", name, error
        )
        whole = StreamingConfig(residency_mode="full_resident")
        return load_streamed(str(name), whole, device=device, **options), tokenizer
    except SafetensorError:
        config = cached_file(name, "config.json", **{key: options[key] for key in _OF_HUB if key in options})
        for shard in sorted(Path(str(config)).parent.glob("*.safetensors")):
            open_shard(str(shard))  # names the one that is damaged
        raise


def _loader(name: str | PathLike[str], options: dict[str, Any]) -> Any:
    """The class that loads a checkpoint as a decoder of text."""
    return AutoModelForCausalLM if "gguf_file" in options else loader_of(_config(name, options))


def _config(name: str | PathLike[str], options: dict[str, Any]) -> Any:
    given = options.get("config")
    if given is not None and not isinstance(given, str | PathLike):
        return given
    return AutoConfig.from_pretrained(
        name if given is None else given, **{key: options[key] for key in _OF_TOKENIZER if key in options}
    )


def _is_packed(name: str | PathLike[str], options: dict[str, Any]) -> bool:
    """Whether layer streaming reads the 4-bit weights of a checkpoint."""
    config = _config(name, options)
    found = getattr(config, "quantization_config", None)
    try:
        return found is not None and bool(PackedFormat.of(found))
    except ValueError:
        return False
