"""Finds the frame of the generate() call under way."""

import sys
from types import FrameType
from typing import Any

MAX_DEPTH = 40  # frames to look at


def generate_frame(frame: FrameType | None) -> FrameType | None:
    """The frame of the innermost generate() call around `frame`, or None."""
    for _ in range(MAX_DEPTH):
        if frame is None or is_generate(frame):
            return frame
        frame = frame.f_back
    return None


def running_streamer() -> Any:
    """The streamer of the generate() call under way, or None."""
    found = generate_frame(sys._getframe(1))
    return found.f_locals.get("streamer") if found is not None else None


def is_generate(frame: FrameType) -> bool:
    """Whether a frame is that of a generate() call."""
    return frame.f_code.co_name == "generate" and "generation_config" in frame.f_code.co_varnames
