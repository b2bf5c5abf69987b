"""`kvboost-hf check` and `fits`: whether a model can reuse K/V, and what of it fits on a device."""

import argparse
import sys
import warnings
from dataclasses import replace
from typing import Any

import torch

from kvboost_hf.cli.arguments import next_steps, typed
from kvboost_hf.cli.loading import load_shown
from kvboost_hf.compat import naming
from kvboost_hf.compatibility import check_model_compatibility
from kvboost_hf.config import PLANNED, StreamingConfig
from kvboost_hf.fields import given
from kvboost_hf.offload.awq.formats import PackedFormat
from kvboost_hf.offload.cuda import link_rate
from kvboost_hf.offload.sizes import what_fits
from kvboost_hf.outputs import Progress


def run_check(options: argparse.Namespace) -> int:
    """Print the report; returns 1 if exact reuse is not possible."""
    with Progress() as shown:
        model, _, name = load_shown(options, shown)
        shown.show(f"running {name} on a few tokens")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # all that they say is in the report
            found = check_model_compatibility(model, strict=False)
    sys.stdout.write(f"{name}: {found}\n")
    if not found.exact:
        again = ("kvboost-hf check --model NAME", "another model: this one runs without reuse")
        sys.stdout.write(next_steps(options, again))
        return 1
    sys.stdout.write(next_steps(options, "demo", "verify"))
    return 0


def run_fits(options: argparse.Namespace) -> int:
    """Print the plan."""
    from transformers import AutoConfig

    with naming(options.model):
        config = AutoConfig.from_pretrained(options.model)
    device = "cuda" if options.on == "gpu" else "cpu"
    streaming = StreamingConfig(**{**given(StreamingConfig, options, PLANNED), "vram_budget": None})
    with Progress(f"planning {options.model}"):
        plan = what_fits(config, options.vram_budget, streaming=streaming, bits=options.bits, device=device)
        if options.on == "gpu" and torch.cuda.is_available():
            plan = replace(plan, copy_rate=link_rate(torch.device("cuda")))
    sys.stdout.write(f"{plan}\n")
    if (other := _other_weights(config, options.bits)) is not None:
        sys.stdout.write(f"\nThis is a plan for other weights than {options.model} has: {other}.\n")
        return 0
    step = typed("serve", options, "--awq-streaming", *_flags(options, served=True)), "serve it within this budget"
    if plan.device_bytes > (StreamingConfig(vram_budget=options.vram_budget).vram_bytes or 0):
        folder = ["--on", options.on, "--disk-folder", "FOLDER"]
        step = typed("fits", options, *_flags(options), *folder), "a plan within this budget: layers in files"
    sys.stdout.write(next_steps(options, step))
    return 0


def _flags(options: argparse.Namespace, *, served: bool = False) -> list[object]:
    """The flags of a plan that are not the defaults, as `fits` has them, or as a server does."""
    usual = StreamingConfig()
    told = {name: value for name, value in given(StreamingConfig, options, PLANNED).items() if value is not None}
    told = {name: value for name, value in told.items() if value != getattr(usual, name)}
    if served and {"max_tokens", "prefill_chunk_size"} & set(told):
        told.pop("max_tokens", None)
        told["max_live_tokens"] = options.max_tokens
    if served and options.on == "cpu":
        told["device"] = "cpu"
    return [text for name, value in told.items() for text in (f"--{name.replace('_', '-')}", value)]


def _other_weights(config: Any, bits: int | None) -> str | None:
    """Why a checkpoint cannot be served as it was planned with so many bits, and what to do; None if it can."""
    stored = getattr(config, "quantization_config", None)
    if bits is None or (stored is None and bits == 16):
        return None
    if stored is None:
        return "its own are not quantized. Name a checkpoint of it in 4 bits, or leave out `--bits`"
    try:
        PackedFormat.of(stored)
    except ValueError as error:
        return str(error).rstrip(".")
    return None if bits == 4 else "its own have 4 bits. Leave out `--bits`, or name a checkpoint that is not quantized"
