"""Reads API keys from files, and makes salts of them."""

import hashlib
import stat
import sys
from pathlib import Path


def read_keys(path: Path) -> tuple[str, ...]:
    """Read the keys of a file, one a line; blank lines and those that begin with `#` are left out.

    Args:
        path: Of a file that nobody else may read; its group may.

    Returns:
        One key at least.

    Raises:
        ValueError: others may read or write it, it cannot be read, or it holds no key.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"The file of keys {path} cannot be read: {error}. Pass a text file with a key a line."
        ) from error
    require_closed(path, f"file of keys {path}")
    lines = (line.strip() for line in text.splitlines())
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ValueError(f"The file of keys {path} must hold a key a line, but there is none. Write one into it.")
    return keys


def require_closed(path: Path, what: str) -> None:
    """Raise ValueError for a file that other users may read or write; its group may read it.

    Args:
        path: Of a file that is there.
        what: The file in the error.
    """
    mode = path.stat().st_mode
    if sys.platform != "win32" and mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP):
        raise ValueError(
            f"The {what} must be closed to other users, but its mode is {stat.S_IMODE(mode):04o}. "
            f"Run: chmod 600 {path}"
        )


def prompt_salt(salt: str, api_key: str | None, cache_key: str | None = None, cache_salt: str | None = None) -> bytes:
    """The salt that separates the K/V of clients who must not find each other's prompts.

    Args:
        salt: Of the server, or of what is warmed for it.
        api_key: Who asks; None where nobody needs a key.
        cache_key: A request's `prompt_cache_key`.
        cache_salt: A request's `cache_salt`.

    Returns:
        For caches and stores; that of a `ChunkStore` without one if there is nothing to tell apart.
    """
    if api_key is None and cache_key is None and cache_salt is None:
        return salt.encode()
    told: tuple[str | None, ...] = (api_key, cache_key, salt) if salt else (api_key, cache_key)
    if cache_salt is not None:
        told = (*told, "cache_salt", cache_salt)  # K/V that was stored without one stays found
    return hashlib.sha256(repr(told).encode()).digest()
