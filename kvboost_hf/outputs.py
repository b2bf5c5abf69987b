"""Where commands write what they found: a file, or standard output for `-`."""

import os
import sys
from pathlib import Path

STANDARD_OUTPUT = Path("-")


def output_path(text: str) -> Path:
    """A file that can be written, or `-`, of a command line.

    Raises:
        ValueError: there is no such folder, or nothing can be written there.
    """
    if text == str(STANDARD_OUTPUT):
        return STANDARD_OUTPUT
    try:
        path = Path(text).resolve()
        place = path if path.exists() else path.parent
        can_be = path.parent.is_dir() and not path.is_dir() and os.access(place, os.W_OK)
    except OSError:  # its name is too long, say
        can_be = False
    if not can_be:
        raise ValueError(f"{text!r} cannot be written: name a file in a folder that there is.")
    return path


def write(path: Path, text: str) -> None:
    """Write text there."""
    if path == STANDARD_OUTPUT:
        sys.stdout.write(text + "\n")
    else:
        path.write_text(text, encoding="utf-8")
