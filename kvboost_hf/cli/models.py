"""Loads the model that a command names, or the embedded one."""

import argparse
from pathlib import Path
from typing import Any

import torch

from kvboost_hf.assets import EMBEDDED_MODEL_DIR, load_embedded
from kvboost_hf.compat import available_device
from kvboost_hf.config import StreamingConfig
from kvboost_hf.engine.load import load
from kvboost_hf.offload.checkpoint import without_bars
from kvboost_hf.progress import Progress


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add `--model`, `--device` and `--dtype`."""
    parser.add_argument("--model", help="a hub name or a folder (default: the embedded model)")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = "where it runs (default: cuda where there is one, or cpu)"
    parser.add_argument("--device", default=device, help=text)
    text = "auto, float32, bfloat16 or float16 (default: auto)"
    known = ("auto", "float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=known, metavar="DTYPE", default="auto", help=text)


def require_device(device: str) -> None:
    """Raise ValueError for a device that is not here."""
    wrong = f"`--device` must be one that PyTorch finds here, such as cpu, got {device!r}."
    try:
        found = available_device(device)
    except ValueError as error:
        raise ValueError(wrong) from error
    if found.type == "meta":
        raise ValueError(wrong)


def load_model(options: argparse.Namespace, streaming: StreamingConfig | None = None) -> tuple[Any, Any, str]:
    """The model of the options on its device, its tokenizer, and the name to show.

    Args:
        options: Parsed, with those of `add_model`.
        streaming: Which layers are streamed; None for none.

    Raises:
        ValueError: the model does not load, or the embedded one is to be streamed.
    """
    if options.model is not None:
        return *load(options.model, streaming, options.device, {"dtype": options.dtype}), _shown(options.model)
    if streaming is not None:
        raise ValueError("`--awq-streaming` needs `--model`: the embedded model fits any device.")
    model, tokenizer = load_embedded(None if options.dtype == "auto" else getattr(torch, options.dtype))
    return model.to(options.device), tokenizer, f"embedded {EMBEDDED_MODEL_DIR.name}"


def load_shown(
    options: argparse.Namespace, shown: Progress, streaming: StreamingConfig | None = None
) -> tuple[Any, Any, str]:
    """See `load_model`; shows that the model is being loaded, in place of the bars of transformers."""
    shown.show(f"loading {options.model or 'the embedded model'}")
    with without_bars():
        return load_model(options, streaming)


def _shown(name: str) -> str:
    """A hub name as it is; of a folder, its name and that of the folder around it, which often says more."""
    return "/".join(Path(name).resolve().parts[-2:]) if Path(name).is_dir() else name
