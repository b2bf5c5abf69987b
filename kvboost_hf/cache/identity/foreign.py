"""Whose code runs in a model: names of functions for fingerprints, and hooks, patches and functions of others.

Code of a package counts by the version of the package, and other code by its source file: such names are the same in
every process. Compression methods hook the attention layers and edit the cache that these receive: such a model runs
whole prompts on transformers' own cache layers, as it would without this library. All other hooks are watched
(`hooks.py`). A patch replaces a forward, or a function that a forward calls: it becomes part of the fingerprint, with
the values that it can reach (`values.py`).
"""

import contextlib
import functools
import importlib.metadata
import importlib.util
import inspect
import os
import sys
import types
from collections.abc import Iterable
from functools import cache
from hashlib import blake2b
from operator import is_
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from kvboost_hf.compat import CACHE, attention_function, attn_implementation

_PACKAGES = frozenset(("accelerate", "bitsandbytes", "peft", "torch", "transformers"))  # named by their versions
_OF_CHECKPOINTS = "transformers_modules."  # code that comes with a checkpoint
# Modules whose hooks capture outputs, or count FLOPs.
_LOOKING = frozenset(("transformers.utils.output_capturing", "torch.utils.module_tracker"))
# Functions of transformers that make embeddings require gradients, which it registers anew with each training step.
_LOOKING_FUNCTIONS = frozenset(("PreTrainedModel.enable_input_require_grads.<locals>.make_inputs_require_grads",))
_CACHE_ARGUMENTS = frozenset((CACHE, "past_key_values", "past_key_value", "cache_params", "layer_past"))
_MAKING_INPUTS = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
_ANYTHING = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_KERNELS_OF_STATES = (
    "causal-conv1d",
    "fla-core",
    "flash-linear-attention",
    "mamba-ssm",
)  # transformers runs them if there
_IMPORTED = frozenset(("causal_conv1d", "einops", "kernels", "numpy"))  # packages that modules of transformers import


def library_versions() -> tuple[str, ...]:
    """The versions of the libraries that K/V may depend on."""
    return torch.__version__, transformers.__version__


def kernels_of_states(model: nn.Module) -> tuple[str, ...]:
    """The packages, with versions, that compute states where transformers finds them; none for models without states.

    Which of them a layer runs is decided when transformers is imported, and shows in no function of the model.
    """
    if not any(isinstance(module, nn.Conv1d) for module in model.modules()):
        return ()
    return _installed_kernels()


@functools.cache
def _installed_kernels() -> tuple[str, ...]:
    found = []
    for name in _KERNELS_OF_STATES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return tuple(found)


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


def is_own(function: Any) -> bool:
    """Whether a function or class is of this package, or of one that is named by its version."""
    return is_of_package(function) or str(getattr(function, "__module__", "")).startswith("kvboost_hf.")


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


def only_looks(hook: Any) -> bool:
    """Whether a forward hook, or a replacement of a function, is known not to change what is computed."""
    try:
        if getattr(hook, "__module__", None) in _LOOKING:
            return True
        if is_package_code(hook) and getattr(hook, "__qualname__", None) in _LOOKING_FUNCTIONS:
            return True
        return any(getattr(each, "leaves_kv_alone", False) is True for each in (hook, getattr(hook, "__self__", None)))
    except Exception:  # whatever an object does when it is asked for an attribute
        return False


def name_of(part: Any) -> str:
    """The qualified name of a hook or function, for messages."""
    if isinstance(part, functools.partial):
        part = part.func
    if isinstance(part, types.MethodType):
        return f"{type(part.__self__).__module__}.{part.__func__.__qualname__}"
    kind = part if isinstance(part, types.FunctionType) else type(part)
    return f"{kind.__module__}.{kind.__qualname__}"


def holder_of_cache(model: nn.Module) -> str | None:
    """Why a model must run whole prompts on transformers' own cache layers, as a text that follows "because"; or None.

    The reason is somebody else's code that receives the cache: a forward hook with keyword arguments, or a patched
    forward, on a module whose forward takes a cache. Whole models (`LlamaForCausalLM`, `LlamaModel`) are skipped,
    because hooks on them mostly count.
    """
    todo = [model]
    native: set[type] = set()  # classes whose forward is their own
    while todo:
        module = todo.pop()
        kind: Any = type(module)
        if not _takes_cache(kind):
            continue
        attributes = module.__dict__
        if not issubclass(kind, _CONTAINERS):
            if isinstance(module, PreTrainedModel):
                todo += [child for child in list(attributes["_modules"].values()) if child is not None]
                continue
            for hooks, with_kwargs in (
                (attributes["_forward_pre_hooks"], attributes["_forward_pre_hooks_with_kwargs"]),
                (attributes["_forward_hooks"], attributes["_forward_hooks_with_kwargs"]),
            ):
                for hook in map(hooks.get, list(with_kwargs) if hooks else ()):
                    if hook is not None and not only_looks(hook):
                        return f"a forward hook ({name_of(hook)}) on {kind.__name__} is given the cache"
            if kind not in native or "forward" in attributes:
                if (patch := _patched_forward(module)) is not None:
                    return f"the forward of {kind.__name__} was replaced ({name_of(patch)})"
                native.add(kind)
        todo += [child for child in list(attributes["_modules"].values()) if child is not None]
    return None


def edits_inputs(model: PreTrainedModel) -> bool:
    """Whether code that is neither transformers' nor ours may change the arguments of a forward in generate()."""
    methods = (getattr(model, name) for name in _MAKING_INPUTS)
    if not all(is_own(getattr(method, "__func__", method)) for method in methods):
        return True
    return any(not only_looks(hook) for hook in list(model._forward_pre_hooks.values()))


@cache
def _takes_cache(kind: Any) -> bool:
    """Whether modules of a class, or what they contain, may be given a cache."""
    if issubclass(kind, _CONTAINERS):
        return True
    try:
        _, *parameters = inspect.signature(kind.forward).parameters.values()
    except (TypeError, ValueError):  # it is no function of Python's
        return False
    return any(each.name in _CACHE_ARGUMENTS for each in parameters) or {each.kind for each in parameters} == _ANYTHING


def _patched_forward(module: nn.Module) -> Any:
    """The forward that replaces the one of a module's class, or of its authors, or None."""
    own = module.__dict__.get("forward")
    if own is not None and "_hf_hook" not in module.__dict__ and not _is_native(own, type(module)):
        return own
    forward = type(module).forward
    return None if _is_native(forward, type(module)) else forward


def _is_native(function: Any, kind: type) -> bool:
    """Whether a forward was written by the authors of a class, or by those of transformers and its kin."""
    while isinstance(function, functools.partial | types.MethodType) and not only_looks(function):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    if only_looks(function):
        return True
    if not isinstance(function, types.FunctionType):
        return False
    modules = {base.__module__ for base in kind.__mro__}
    return (function.__module__ in modules or is_of_package(function)) and is_written_where_it_says(function)


def is_stock(cache: Any) -> bool:
    """Whether a cache of transformers, and its layers, are as transformers made them."""
    return all(
        is_package_code(type(each).update) and "update" not in each.__dict__ and is_of_package(type(each))
        for each in (cache, *cache.layers)
        if hasattr(type(each), "update")
    ) and all(is_package_code(kind.update) for kind in (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer))


def foreign_attention(model: PreTrainedModel) -> Any:
    """The function that computes attention, if it is neither transformers' nor ours, or None."""
    function = attention_function(model)
    return None if is_own(function) and is_written_where_it_says(function) else function


def foreign_functions(model: nn.Module, kinds: Iterable[type]) -> list[Any]:
    """Functions of others that forwards call: attention, masks, and patches of modules and classes."""
    found: list[Any] = []
    if isinstance(model, PreTrainedModel):
        mask = ALL_MASK_ATTENTION_FUNCTIONS.get(attn_implementation(model))
        attention = foreign_attention(model)
        found += [] if attention is None else [attention]
        found += [] if mask is None or _is_original(mask) else [mask]
    for place in places_of_functions(model, kinds):
        if (names := _names.get(place)) is None:
            names = _names[place] = _Names(place)
        found += names.replaced()
    return found


def places_of_functions(model: nn.Module, kinds: Iterable[type]) -> list[Any]:
    """The classes and modules of Python in which forwards of modules of these classes look up what they call."""
    bases = (base for kind in kinds for base in kind.__mro__)
    classes = {base: None for base in bases if base.__module__.startswith("transformers.models.")}
    own = attention_function(model) if isinstance(model, PreTrainedModel) else None
    around = [sys.modules[own.__module__]] if own is not None and is_of_package(own) else []
    modules = [sys.modules[name] for name in {each.__module__: None for each in classes}]
    return [F, nn.Module, *around, *classes, *modules]


class _Names:
    """The callables of a module or class under their names, to detect patches."""

    def __init__(self, place: Any) -> None:
        called = {name: value for name, value in list(vars(place).items()) if _is_called(name, value)}
        self._first = {name: value if _is_original(value) else None for name, value in called.items()}
        self._place = place
        self._last: tuple[list[str], list[Any]] = [], []  # when this was last looked at
        self._found: list[Any] = []

    def replaced(self) -> list[Any]:
        """The callables that differ from those at construction, or were not original then."""
        now = dict(vars(self._place))
        names, values = list(now), list(now.values())
        if names != self._last[0] or not all(map(is_, values, self._last[1])):
            first = self._first
            new = [value for name, value in now.items() if name not in first and _is_called(name, value)]
            self._found = new + [now[name] for name, value in first.items() if name in now and now[name] is not value]
            self._last = names, values
        return [value for value in self._found if not only_looks(value)]


_names: dict[Any, _Names] = {}  # of modules and classes, since they were first seen


def _is_called(name: str, value: Any) -> bool:
    """Whether a name may be called. torch.compile puts its own into modules, which begin with two underscores."""
    return (name == "__call__" or not name.startswith("__")) and (callable(value) or hasattr(value, "__get__"))


def _is_original(value: Any) -> bool:
    """Whether a callable in a module or class of a package was written or imported there."""
    if isinstance(value, types.FunctionType):
        return _is_usual(value) and is_written_where_it_says(value)
    return not isinstance(value, functools.partial) and _is_usual(value if isinstance(value, type) else type(value))


def _is_usual(code: Any) -> bool:
    """Whether a function or class is of a package that modules of transformers import, or of Python's library."""
    package = str(getattr(code, "__module__", "")).partition(".")[0]
    return is_own(code) or package in sys.stdlib_module_names or package in _IMPORTED
