"""Keys from files, which do not stand in the list of processes."""

import os
import stat
from pathlib import Path


def read_keys(path: Path) -> tuple[str, ...]:
    """The keys in a file: one a line; blank lines and those that begin with `#` are left out.

    Args:
        path: Of a file that nobody else may read; its group may.

    Returns:
        One key at least.

    Raises:
        ValueError: others may read or write it, it cannot be read, or it holds no key.
    """
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"The file of keys {path} cannot be read: {error}. Pass a text file with a key a line."
        ) from error
    if os.name == "posix" and mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP):
        raise ValueError(
            f"The file of keys {path} must be closed to other users, but its mode is {stat.S_IMODE(mode):04o}. "
            f"Run: chmod 600 {path}"
        )
    lines = (line.strip() for line in text.splitlines())
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ValueError(f"The file of keys {path} must hold a key a line, but there is none. Write one into it.")
    return keys
