"""`kvboost-hf fits`: plans which layers of a model stay on a device, and how fast the others can be streamed."""

import argparse
import sys
from typing import Any

import torch

from kvboost_hf.cli.arguments import Commands, positive
from kvboost_hf.cli.next_steps import next_steps, typed
from kvboost_hf.config import StreamingConfig
from kvboost_hf.engine.load import naming
from kvboost_hf.offload.awq.formats import PackedFormat
from kvboost_hf.offload.sizes import what_fits
from kvboost_hf.progress import Progress


def add(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("fits", help="say what of a model stays on a device, and how fast the rest can come")
    parser.add_argument("--model", required=True, help="a hub name or a folder; only its configuration is read")
    parser.add_argument("--vram-budget", required=True, metavar="SIZE", help="of the device, such as 8GB or 7.5GiB")
    parser.add_argument("--bits", type=int, choices=(4, 16), help="of weights (default: those of the checkpoint)")
    parser.add_argument("--max-tokens", type=positive, default=4096, help="in the context (default: 4096)")
    parser.add_argument("--prefill-chunk-size", type=positive, metavar="TOKENS", help="in one forward (default: all)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the plan."""
    from transformers import AutoConfig

    with naming(options.model):
        config = AutoConfig.from_pretrained(options.model)
    streaming = StreamingConfig(max_tokens=options.max_tokens, prefill_chunk_size=options.prefill_chunk_size)
    dtype = config.dtype or torch.float16
    with Progress(f"planning {options.model}"):
        plan = what_fits(config, options.vram_budget, streaming=streaming, bits=options.bits, dtype=dtype)
    sys.stdout.write(f"{plan}\n")
    if (other := _other_weights(config, options.bits)) is not None:
        sys.stdout.write(f"\nThis is a plan for other weights than {options.model} has: {other}.\n")
        return 0
    serve = typed("serve", options, "--awq-streaming", "--vram-budget", options.vram_budget)
    sys.stdout.write(next_steps(options, (serve, "serve it within this budget")))
    return 0


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
