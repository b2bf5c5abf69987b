"""Tells that nobody has changed a model, by the numbers with which CPython counts the changes of dicts.

In Python 3.11 to 3.13 each dict has a number that is another one after each change, and that no dict had before.
Attributes, parameters, buffers, children and hooks of modules are in dicts, and so are settings of configurations,
methods of classes and functions of Python's modules. To compare a few thousand numbers takes microseconds; to read
what is in the dicts takes milliseconds. Where changes are not counted, each look at a model reads it.

Python 3.13 has the attributes of an object beside it, where changes are not counted, until its dict gets a key that is
no text: `_count_changes` adds one and takes it away.
"""

import ctypes
import functools
import gc
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import attrgetter, getitem, is_
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvboost_hf.cache.identity.foreign import is_own, is_written_where_it_says, places_of_functions
from kvboost_hf.cache.identity.hooks import hooks_of_all_modules
from kvboost_hf.cache.identity.values import NAME, OF_TORCH
from kvboost_hf.compat import KeptOnModel, shown

# What models note on themselves in the course of a forward. Positions that follow from an image are part of what K/V
# is found by; hooks that only look are put in place when hidden states are first asked for, as with a first image;
# generate() notes the size of the static cache that it has made; what is compiled is the same code; and `attach` puts
# a method before the one that makes caches. One stands before the method that gives generate() a compiled call, too.
PREPARE_CACHE = "_prepare_cache_for_generation"
COMPILED_CALL = "get_compiled_call"
NOTES = frozenset(
    (
        "_get_candidate_generator",  # before which `load_assistant` puts one that knows heads
        *(NAME, PREPARE_CACHE, COMPILED_CALL, "rope_deltas", "_previous_max_cache_length", "_cache", "_use_kernels"),
        *("to", "cuda", "npu", "xpu", "mlu", "musa", "sdaa"),  # accelerate's, which refuse to move what it moves
        *("_output_capturing_hooks_installed", "_compiled_call", "_last_compile_config", "_compiled_call_impl"),
    )
)
# What transformers says of a class, not of how it computes.
_SAID_OF_CLASSES = frozenset(
    (
        *("_tp_plan", "_ep_plan", "_pp_plan", "_fsdp_plan", "_tp_size", "_no_split_modules", "all_tied_weights_keys"),
        *("_skip_keys_device_placement", "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict", "model_tags"),
        *("_keys_to_ignore_on_load_unexpected", "_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_save"),
        *("warnings_issued", "_weight_conversions", "hf_device_map", "peft_config", "_tied_weights_keys"),
    )
)
OURS = "_kvboost_hf_"  # begins the names of what we keep on modules
# Attributes whose values a walk does not look at.
UNREAD = (OF_TORCH - {"training"}) | NOTES | _SAID_OF_CLASSES
INSIDE = ("_parameters", "_buffers", "_modules", "_forward_pre_hooks", "_forward_hooks")  # dicts of each module
HOOKS = INSIDE[3:]
_DICT, _IS_META = attrgetter("__dict__"), attrgetter("is_meta")
_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device))
# Values that a walk does not read, or that never change.
_NEVER_READ = (GenerationConfig, KeptOnModel, type, types.ModuleType, types.BuiltinFunctionType)
_VERSION_AT = object.__basicsize__ + ctypes.sizeof(ctypes.c_ssize_t)  # in a dict, behind the number of its items
_VERSION = np.dtype(np.uint64)
_VALUES_AT = _VERSION_AT + 2 * ctypes.sizeof(ctypes.c_void_p)  # in a dict whose values lie elsewhere, where
_COUNTED_UNTIL = (3, 13)
Dict = dict[Any, Any]
_Items = tuple[list[Dict], list[Any]]  # dicts, and a key in each


def is_read(name: str) -> bool:
    """Whether a walk reads the value of an attribute, not only its name."""
    return name not in UNREAD and not name.startswith(OURS)


class Still:
    """A model as it is now, if all that its K/V depends on is in dicts whose changes are counted.

    Neither its modules nor its tensors are kept alive: with the first module that is gone, the dicts are let go.
    """

    def __init__(self, model: nn.Module) -> None:
        # Containers of configurations and modules, whose changes are not counted: they are written out.
        self._lists: list[Any] = []
        self._kept: list[tuple[list[Dict], _Items, _Items, Callable[[], bytes]]] = []
        modules = _modules_of(model) if _are_counted() else []
        own = list(map(_DICT, modules))
        dicts = [*own, *(attributes[name] for attributes in own for name in INSIDE), *hooks_of_all_modules()]
        kinds = dict.fromkeys(map(type, modules))
        dicts += [vars(place) for place in places_of_functions(model, kinds)]
        dicts += [vars(base) for base in {base: None for kind in kinds for base in kind.__mro__}]
        for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
            for held in (vars(registry), *map(vars, type(registry).__mro__)):
                dicts += [held, *(value for value in list(held.values()) if type(value) is dict)]
        inside = set(map(id, modules))
        values = {
            id(value): value  # many modules have the same configuration
            for attributes in own
            for name, value in list(attributes.items())
            if type(value) not in _PLAIN and is_read(name)
        }
        if not own or not all([self._follow(value, dicts, inside) for value in values.values()]):
            return
        kept = self._kept

        def forget(_: object) -> None:
            kept.clear()

        self._watches = [weakref.ref(module, forget) for module in modules]
        self._kinds, self._bases = list(kinds), list(map(_bases_and_code, kinds))
        filled = _items(attributes[name] for attributes in own for name in INSIDE[:2])
        children = _items(
            chain.from_iterable((attributes["_modules"], *_kernels_in(attributes)) for attributes in own)
        )
        in_place = [model, *map(getitem, *children)]
        self._types, own = list(map(type, in_place)), list(map(_DICT, in_place))
        self._shown = _all_shown(self._lists)
        counted = {id(each): each for each in map(_dict_of, dicts)}
        for each in counted.values():
            _count_changes(each)
        hooks = {id(attributes[name]) for attributes in map(_DICT, modules) for name in HOOKS}
        self._no_hooks = {at: each for at, each in enumerate(counted.values()) if id(each) in hooks and not each}
        numbers = _numbers_of(counted.values())
        self._numbers = numbers()
        kept.append((own, filled, children, numbers))

    def _follow(self, value: Any, dicts: list[Any], modules: set[int]) -> bool:
        """Add the dicts of a value of a module, or of its configuration; returns whether all changes are seen then."""
        if isinstance(value, PreTrainedConfig):
            dicts.append(vars(value))
            for inner in list(vars(value).values()):
                if isinstance(inner, PreTrainedConfig):
                    self._follow(inner, dicts, modules)
                elif type(inner) in (dict, list, tuple):
                    self._lists.append(inner)
            return True
        if type(value) in (list, tuple, set, frozenset):
            self._lists.append(value)
            return all(type(each) in _PLAIN for each in value)
        if type(value) is dict:
            if value and modules.issuperset(map(id, value.values())):
                dicts.append(value)
                return True
            self._lists.append(value)
            return all(type(each) in _PLAIN for pair in value.items() for each in pair)
        if type(value) is functools.partial:
            self._lists.append(value)
            given = [*value.args, *value.keywords.values()]
            return self._follow(value.func, dicts, modules) and all(type(each) in _PLAIN for each in given)
        if isinstance(value, types.MethodType):
            return id(value.__self__) in modules and self._follow(value.__func__, dicts, modules)
        if isinstance(value, types.FunctionType):
            return is_own(value) and is_written_where_it_says(value)
        return isinstance(value, _NEVER_READ)

    def tensors(self, model: nn.Module) -> list[torch.Tensor] | None:
        """The parameters and buffers of a model in which nothing else has changed; None if something may have."""
        kept = self._kept[:1]  # nobody lets go of it while its memory is read
        if not kept:
            return None
        ((own, filled, children, numbers),) = kept
        now = numbers()
        if now != self._numbers and not self._hooks_are_gone(now):
            return None
        try:
            modules = [model, *map(getitem, *children)]
            tensors = list(map(getitem, *filled))
        except KeyError:  # another thread has just taken one away
            return None
        if list(map(type, modules)) != self._types or not all(map(is_, map(_DICT, modules), own)):
            return None
        if list(map(_bases_and_code, self._kinds)) != self._bases or _all_shown(self._lists) != self._shown:
            return None
        return None if any(map(_IS_META, tensors)) else tensors

    def _hooks_are_gone(self, now: bytes) -> bool:
        """Whether no dict has changed but those of hooks, which were empty and are again, as behind moved chunks."""
        changed = np.flatnonzero(np.frombuffer(now, _VERSION) != np.frombuffer(self._numbers, _VERSION)).tolist()
        if not all([at in self._no_hooks and not self._no_hooks[at] for at in changed]):
            return False
        self._numbers = now
        return True


def _bases_and_code(kind: Any) -> list[Any]:
    """What may change in a class, and in its forward and those that it wraps, while no dict does."""
    found, function = [kind.__mro__], kind.forward
    while function is not None:
        found.append(getattr(function, "__code__", None))
        function = getattr(function, "__wrapped__", None)
    return found


def _all_shown(values: list[Any]) -> list[str]:
    """The texts of values that may change in place."""
    try:
        return [repr(value) for value in values]
    except Exception:  # of something in them
        return list(map(shown, values))


def _items(dicts: Iterable[Dict]) -> _Items:
    """Where all values in dicts are, except None."""
    found = [(each, name) for each in dicts for name, value in list(each.items()) if value is not None]
    return [each for each, _ in found], [name for _, name in found]


def _modules_of(model: nn.Module) -> list[nn.Module]:
    """All modules, in the order of a walk."""
    found: dict[int, nn.Module] = {}
    todo = [model]
    while todo:
        module = todo.pop()
        if id(module) not in found:
            found[id(module)] = module
            todo += [child for child in list(module.__dict__["_modules"].values()) if child is not None]
            todo += chain.from_iterable(kernels.values() for kernels in _kernels_in(module.__dict__))
    return list(found.values())


def _kernels_in(attributes: Dict) -> list[Dict]:
    """Dicts of modules without weights that are no children: functions that the package `kernels` may replace."""
    return [
        value
        for name, value in list(attributes.items())
        if type(value) is dict and value and name not in INSIDE and all(map(_is_function, value.values()))
    ]


def _is_function(value: Any) -> bool:
    return isinstance(value, nn.Module) and not any(map(value.__dict__.get, INSIDE[:3]))


def _dict_of(attributes: Any) -> Dict:
    """The dict behind what `vars()` returns of a class."""
    found: Dict = gc.get_referents(attributes)[0] if isinstance(attributes, types.MappingProxyType) else attributes
    return found


def _count_changes(attributes: Dict) -> None:
    """Have Python count all changes of the attributes of an object from now on; they stay as they are."""
    if sys.version_info >= (3, 13) and ctypes.c_void_p.from_address(id(attributes) + _VALUES_AT).value is not None:
        attributes[0] = None
        del attributes[0]


def _numbers_of(dicts: Iterable[Dict]) -> Callable[[], bytes]:
    """What reads the numbers of all these dicts, and keeps them alive."""
    kept = {id(each): each for each in dicts}
    addresses = np.fromiter(kept, dtype=np.int64) + _VERSION_AT
    first = int(addresses.min())
    size = int(addresses.max()) - first + _VERSION.itemsize
    words: Any = (ctypes.c_char * size).from_address(first)
    memory: NDArray[np.uint64] = np.frombuffer(words, dtype=_VERSION)
    places = (addresses - first) // _VERSION.itemsize

    def read(kept: object = kept) -> bytes:
        found: NDArray[np.uint64] = memory.take(places)
        return found.tobytes()

    return read


@functools.cache
def _are_counted() -> bool:
    """Whether this Python counts every change of a dict where it is looked for, as seen with some."""
    if sys.implementation.name != "cpython" or sys.version_info[:2] > _COUNTED_UNTIL:
        return False
    if sysconfig.get_config_var("Py_GIL_DISABLED"):  # other threads change a dict while it is looked at
        return False
    if dict.__basicsize__ != object.__basicsize__ + 4 * ctypes.sizeof(ctypes.c_void_p):  # another form of it
        return False
    return all(map(_counts, (_changes_of_attributes, _changes_of_class, _changes_of_dict)))


def _counts(changes: Callable[[], Iterator[Any]]) -> bool:
    """Whether the number of a dict is another one after each of some changes, and only then."""
    seen: list[bytes] = []
    for attributes in changes():
        numbers = _numbers_of([_dict_of(attributes)])
        seen.append(numbers())
        if numbers() != seen[-1]:
            return False
    return len(set(seen)) == len(seen) > 1


def _changes_of_attributes() -> Iterator[Any]:
    class Owner:
        pass

    class OwnerModule(nn.Module):
        pass

    owner: Any
    for owner in (Owner(), OwnerModule()):
        owner.number = 0
        attributes = vars(owner)
        _count_changes(attributes)
        for number in range(1, 64):  # also as Python sets them once it has done so often
            owner.number = number
            yield attributes
            object.__setattr__(owner, "number", -number)
            yield attributes
        del owner.number
        yield attributes
        vars(owner)["number"] = 1
        yield attributes


def _changes_of_class() -> Iterator[Any]:
    class Owner:
        pass

    owner: Any = Owner
    for number in range(64):
        owner.number = number
        yield vars(owner)
    del owner.number
    yield vars(owner)


def _changes_of_dict() -> Iterator[Any]:
    changed: Dict = {}
    for number in range(64):
        changed["number"] = number
        yield changed
    changed.update(number=-1)
    yield changed
    changed |= {"number": -2}
    yield changed
    changed.setdefault("other", 1)
    yield changed
    changed.pop("other")
    yield changed
    changed.popitem()
    yield changed
    changed.update(dict.fromkeys("abcdefghijk"))
    yield changed
    changed.clear()
    yield changed
