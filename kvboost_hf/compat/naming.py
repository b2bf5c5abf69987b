"""Errors of loading a model that name it."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path

_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
_TOKENIZER_FILES = ("tokenizer*", "*.model", "vocab*", "*.gguf", "spiece*", "tekken*")


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
