"""Names of functions that are the same in every process, for fingerprints of stores on disk."""

import functools
import importlib.metadata
import importlib.util
import inspect
import os
import sys
import types
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import transformers

_PACKAGES = frozenset(("accelerate", "bitsandbytes", "peft", "torch", "transformers"))  # named by their versions
_OF_CHECKPOINTS = "transformers_modules."  # code that comes with a checkpoint


def library_versions() -> tuple[str, ...]:
    """The versions of the libraries that K/V may depend on."""
    return torch.__version__, transformers.__version__


def durable_name(code: Any) -> str | None:
    """A name that changes with the code of a function, or None for closures and objects, which have a state.

    Example:
        >>> durable_name(torch.nn.Linear.forward).startswith("torch ")
        True
        >>> durable_name(lambda x: x) is None
        True
    """
    if code is None:
        return "none"
    if isinstance(code, functools.partial):  # accelerate puts the forward of a module that it moves in one
        code = code.func
    if isinstance(code, types.MethodType) or not isinstance(code, types.FunctionType):
        return None
    if not is_written_where_it_says(code):
        return None
    name = code.__qualname__
    # What a decorator has made bears the name of what it was made of, unless it does not care.
    if "<lambda>" in name or ("<locals>" in name and not is_of_package(code)):
        return None
    version = _version(code.__module__)
    module = code.__module__
    if module.startswith(_OF_CHECKPOINTS):  # in a package that is named by the folder of the checkpoint
        module = module.rpartition(".")[2]
    return f"{version} {module}.{name}" if version is not None else None


def is_written_where_it_says(code: Any) -> bool:
    """Whether a function, and all that it wraps, is from the file of its module or from a package.

    A patch made with `functools.wraps` has the name of the function that it replaces, but comes from another file.
    """
    while isinstance(code, types.FunctionType):
        written = code.__code__.co_filename
        source = getattr(sys.modules.get(code.__module__), "__file__", None)
        # Some of Python's own modules are part of the interpreter.
        is_there = written == f"<frozen {code.__module__}>" or os.path.abspath(written) == source
        if not is_there and not written.startswith(_folders()):
            return False
        code = getattr(code, "__wrapped__", None)
    return code is None


@functools.cache
def _folders() -> tuple[str, ...]:
    """The folders of the packages."""
    specs = [importlib.util.find_spec(package) for package in sorted(_PACKAGES)]
    return tuple(f"{place}{os.sep}" for spec in specs if spec for place in spec.submodule_search_locations or ())


def is_of_package(code: Any) -> bool:
    """Whether a function or class is of a package whose version stands for its code."""
    return str(getattr(code, "__module__", "")).partition(".")[0] in _PACKAGES


def is_package_code(function: Any) -> bool:
    """Whether a function is of a package, and unpatched."""
    return is_of_package(function) and is_written_where_it_says(function)


@functools.cache
def _version(module: str) -> str | None:
    package = module.partition(".")[0]
    if package in _PACKAGES:
        return f"{package} {importlib.metadata.version(package)}"
    try:
        source = inspect.getsourcefile(sys.modules[module])
        return blake2b(Path(source).read_bytes(), digest_size=20).hexdigest() if source is not None else None
    except (KeyError, OSError, TypeError):
        return None
