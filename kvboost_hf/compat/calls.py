"""Finds the generate() call and the assisted decoding that a forward belongs to, and the precision of the thread."""

import sys
from collections.abc import Hashable
from functools import cache
from types import FrameType
from typing import Any, NamedTuple

import torch
from transformers import GenerationMixin

MAX_DEPTH = 40  # frames to look at


def generate_frame(frame: FrameType | None) -> FrameType | None:
    """The frame of the innermost generate() call around `frame`, or None."""
    for _ in range(MAX_DEPTH):
        if frame is None:
            return None
        code = frame.f_code
        if code.co_name == "generate" and is_generate(frame):
            return frame
        frame = frame.f_back
    return None


def running_streamer() -> Any:
    """The streamer of the generate() call under way, or None."""
    found = generate_frame(sys._getframe(1))
    return found.f_locals.get("streamer") if found is not None else None


def waits_for_peers() -> bool:
    """Whether the generate() call under way was told that GPUs decode in step."""
    found = generate_frame(sys._getframe(1))
    return found is not None and bool(found.f_locals.get("synced_gpus"))


class AssistedCall(NamedTuple):
    """An assisted decoding under way."""

    ids: torch.Tensor | None  # of the text so far, [1, tokens]
    processors: Any
    criteria: Any


def assisted_call() -> AssistedCall | None:
    """The assisted decoding under way, or None."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(MAX_DEPTH):
        if frame is None or is_generate(frame):
            return None
        if frame.f_code is GenerationMixin._assisted_decoding.__code__:
            processors, criteria = frame.f_locals.get("logits_processor"), frame.f_locals.get("stopping_criteria")
            return AssistedCall(frame.f_locals.get("input_ids"), processors or (), criteria or ())
        frame = frame.f_back
    return None


def give_back_tokenizer() -> None:
    """Let the generate() call that asks a loop of a user's own what it takes keep its tokenizer.

    transformers takes the tokenizer out of the arguments of generate() for its own loops, asks the user's loop for the
    names of further arguments, and drops what is not among them. Stop strings need it later.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(MAX_DEPTH):
        if frame is None:
            return
        if frame.f_code is GenerationMixin._extract_generation_mode_kwargs.__code__:
            taken, rest = frame.f_locals.get("generation_mode_kwargs"), frame.f_locals.get("kwargs")
            if taken and isinstance(rest, dict) and taken.get("tokenizer") is not None:
                rest.setdefault("tokenizer", taken["tokenizer"])
            return
        frame = frame.f_back


def is_generate(frame: FrameType) -> bool:
    """Whether a frame is that of a generate() call."""
    return frame.f_code.co_name == "generate" and "generation_config" in frame.f_code.co_varnames


def autocast() -> Hashable:
    """The precision this thread computes with: float32 matmul precision, and autocast by device type."""
    found: tuple[Hashable, ...] = (torch.get_float32_matmul_precision(),)
    for kind in _device_kinds():
        if torch.is_autocast_enabled(kind):
            found += ((kind, torch.get_autocast_dtype(kind)),)
    return found


@cache
def _device_kinds() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)
