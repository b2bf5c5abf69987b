"""Writes the results of commands to a file, or to standard output for `-`."""

import os
import sys
from pathlib import Path
from typing import Any

STANDARD_OUTPUT = Path("-")


def output_path(text: str) -> Path:
    """The path that an argument of a command line names: a writable file, or `-`.

    Raises:
        ValueError: the folder does not exist, or the file cannot be written.
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
    """Write text to a file, or to standard output.

    Raises:
        OSError: it cannot be written, for want of room, say.
    """
    if path == STANDARD_OUTPUT:
        sys.stdout.write(text + "\n")
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror}. Make room, or name another file.") from error


def say(console: Any, text: str, end: str = "\n") -> None:
    """Print text as it is: without markup, colours of its own, or wrapping.

    Args:
        console: Of rich.
        text: To print.
        end: Behind it.
    """
    console.print(text, end=end, highlight=False, markup=False, soft_wrap=True)


def written(*paths: Path | None) -> list[str]:
    """A line for each file that was written.

    Args:
        paths: Given on the command line; None for no file.
    """
    return [f"Written: {path}" for path in paths if path not in (None, STANDARD_OUTPUT)]
