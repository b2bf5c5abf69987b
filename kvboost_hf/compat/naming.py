"""Loading a model by its name: errors that name it, and the arguments that its configuration takes."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
_OF_CONFIG = ("revision", "token", "cache_dir", "local_files_only", "trust_remote_code", "subfolder")
_TOKENIZER_FILES = ("tokenizer*", "*.model", "vocab*", "*.gguf", "spiece*", "tekken*")


def for_config(arguments: dict[str, Any]) -> dict[str, Any]:
    """Those arguments of `from_pretrained()` that are also for the one of a configuration."""
    return {key: arguments[key] for key in _OF_CONFIG if key in arguments}


@contextmanager
def naming(
    model: str | PathLike[str], errors: tuple[type[Exception], ...] = (ImportError, OSError, ValueError)
) -> Iterator[None]:
    """Turn an error of transformers inside the context into one that names the model and says what to do.

    Args:
        model: A name on the hub, or a folder, as it was given.
        errors: That mean that there is no such model, or not all of it.

    Raises:
        ValueError: there is no such model, not all of it, or a package for it is not installed. Other errors of the
            system, such as too many open files, stay what they are.
    """
    try:
        yield
    except errors as error:
        if getattr(error, "errno", None) not in (None, *_NOT_THERE):
            raise
        folder = Path(model)
        no_model = folder.is_dir() and not (folder / "config.json").is_file()
        why = " ".join(str(error).split())
        no_tokenizer = "tokenizer" in why and folder.is_dir() and not any(map(any, map(folder.glob, _TOKENIZER_FILES)))
        if no_model or no_tokenizer:
            why = f"the folder has no {'config.json' if no_model else 'tokenizer (tokenizer.json)'}."
        raise ValueError(
            f"The model {str(model)!r} does not load: {why} Pass the name of a model on the hub, or a folder with "
            "config.json, the weights and the files of the tokenizer."
        ) from error
