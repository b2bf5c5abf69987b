"""The model and the device that a command names."""

import argparse
from pathlib import Path
from typing import Any

import torch

from kvboost_hf.assets import EMBEDDED_MODEL_DIR, load_embedded
from kvboost_hf.compat import available_device
from kvboost_hf.config import StreamingConfig
from kvboost_hf.engine.load import load
from kvboost_hf.offload.checkpoint import without_bars
from kvboost_hf.outputs import Progress


def default_device() -> str:
    """The device that runs a model where none is named: cuda where there is one, or cpu."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def set_device(options: argparse.Namespace) -> None:
    """Set the device of the options where none was given, or raise `ValueError` if there is no such device."""
    if options.device is None:
        options.device = default_device()
        options.parser.set_defaults(device=options.device)
    try:
        available_device(options.device)
    except ValueError as error:
        raise ValueError(
            f"`--device` must be one that PyTorch finds here, such as cpu, got {options.device!r}."
        ) from error


def load_model(options: argparse.Namespace, streaming: StreamingConfig | None = None) -> tuple[Any, Any, str]:
    """The model of the options on its device, its tokenizer, and the name to show, or `ValueError`."""
    if options.device is None:
        options.device = default_device()
    if options.model is not None:
        return *load(options.model, streaming, options.device, {"dtype": options.dtype}), _shown(options.model)
    if streaming is not None:
        raise ValueError("`--awq-streaming` needs `--model`: the embedded model fits any device.")
    model, tokenizer = load_embedded(None if options.dtype == "auto" else getattr(torch, options.dtype))
    return model.to(options.device), tokenizer, f"embedded {EMBEDDED_MODEL_DIR.name}"


def load_shown(
    options: argparse.Namespace, shown: Progress, streaming: StreamingConfig | None = None
) -> tuple[Any, Any, str]:
    """`load_model`, with a line of progress in place of the bars of transformers."""
    shown.show(f"loading {options.model or 'the embedded model'}")
    with without_bars():
        return load_model(options, streaming)


def _shown(name: str) -> str:
    """A hub name as it is; of a folder, its name and that of the folder around it, which often says more."""
    return "/".join(Path(name).resolve().parts[-2:]) if Path(name).is_dir() else name
