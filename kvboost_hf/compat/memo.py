"""State and findings about one model, kept on the model itself."""

import copy
import traceback
from collections.abc import Callable, Collection, Hashable
from itertools import pairwise
from types import FrameType
from typing import Any, Self, TypeVar

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from kvboost_hf import forks

T = TypeVar("T")
_PACKAGE = __name__.partition(".")[0]
_PACKAGES = frozenset((_PACKAGE, "torch", "transformers"))
SCALARS = frozenset((float, bool, str, int))
# Where a model comes from, and who wrote its configuration: the same content elsewhere is the same model.
ORIGIN = frozenset(
    ("_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "architectures", "auto_map")
)
_UNREAD = ORIGIN | {"dtype", "model_type"}  # of the weights and the class: not all configurations have them
_claiming = forks.rlock()
_MOST_SETTINGS = 64  # of one model, of which what is known is kept


class KeptOnModel:
    """Base of objects that are kept on a model, one per class, and never copied or saved with it."""

    _attribute: str
    _owner = 0  # the id of the model: `copy.copy(model)` has the same attributes

    def __init_subclass__(cls) -> None:
        cls._attribute = f"_kvboost_hf_{cls.__name__}"

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        """The object on `model`, made at the first call."""
        kept = model.__dict__.get(cls._attribute)  # first, for torch.compile traces this, and cannot make a lock
        if kept is None or not (torch.compiler.is_compiling() or kept._owner == id(model)):
            with _claiming:
                kept = model.__dict__.get(cls._attribute)
                if kept is None or kept._owner not in (0, id(model)):
                    kept = model.__dict__[cls._attribute] = copy.deepcopy(kept) or cls()
                kept._owner = id(model)
        assert isinstance(kept, cls)
        return kept

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()  # a copied or loaded model starts afresh

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)()


class _Findings(KeptOnModel):
    def __init__(self) -> None:
        self.lock = forks.rlock()
        self.settings: Hashable = None  # of the model as it is now; None before they were first noted
        self.first_config = ""  # the model's configuration when something was first remembered, until then
        self.known: dict[Hashable, Any] = {}  # with these settings
        self._with_others: dict[Hashable, dict[Hashable, Any]] = {}

    def change(self, settings: Hashable, *, keeps: bool) -> None:
        """Go on with what is known of other settings, or `keeps` what is known. One thread at a time."""
        if keeps:
            self.settings = settings
            return
        others = self._with_others
        others[self.settings] = self.known
        self.settings, self.known = settings, others.pop(settings, {})
        while len(others) > _MOST_SETTINGS:
            del others[next(iter(others))]


def note_changes(model: PreTrainedModel, values: tuple[Hashable, ...], changes: tuple[Hashable, ...]) -> None:
    """Note the settings of a model: values that it reads, and changes of others in functions. One thread at a time.

    What is remembered holds for the same settings only: after a change the model is asked anew. What was remembered
    before the first note stays if its configuration is the same, and nobody has changed functions.
    """
    findings = _Findings.of(model)
    settings = (values, changes)
    if findings.settings != settings:
        first = findings.settings is None and not changes
        findings.change(settings, keeps=first and findings.first_config in ("", repr(config_scalars(model.config))))


def config_scalars(config: Any) -> list[Hashable]:
    """Values of a configuration and of those in it, which models read at each forward."""
    if config is None:
        return []
    found: list[Hashable] = []
    held = config.__dict__.copy()  # another thread may set one
    for name in sorted(held.keys() - _UNREAD):
        value = held[name]
        kind = type(value)
        if kind in SCALARS:
            found.append(value)
        elif kind is list or kind is tuple or (kind is dict and value):
            found.append(shown(value))
        elif isinstance(value, PreTrainedConfig):  # of a text model or a vision tower
            found += config_scalars(value)
    return found


def shown(value: Any) -> str:
    """The text of a value that may change in place."""
    try:
        return repr(value)
    except Exception:  # of something in it
        return type(value).__name__


def remember(model: PreTrainedModel, key: Hashable, find: Callable[[], T]) -> T:
    """The result of `find()`, which is called once per model, its settings and `key`.

    Args:
        model: The model that the result is about.
        key: Names the finding, and all that it depends on besides the model and its settings, such as the dtype.
        find: Not called again once it has returned anything but a `Passing` reason.
    """
    findings: _Findings = model.__dict__.get(_Findings._attribute) or _Findings.of(model)
    known = findings.known
    found: T = known.get(key, findings)  # a look-up is atomic: only the first call needs the lock
    if found is findings:
        with findings.lock:
            if findings.settings is None and not findings.first_config:
                findings.first_config = repr(config_scalars(model.config))
            if key in known:
                found = known[key]
            elif not isinstance(found := find(), Passing):
                known[key] = found
    return found


def recall(model: PreTrainedModel, key: Hashable) -> Any:
    """The result that `remember` has for `key`, or None."""
    return _Findings.of(model).known.get(key)


class Passing(str):
    """A reason that may soon be none, and is not remembered."""


def attempt(model: PreTrainedModel, probe: Callable[[], T], failure: str) -> T | str:
    """The result of a probe that runs a model, or `failure` with the error it raised.

    With somebody's hooks on the model, or where one has raised that is gone by now, a reason is `Passing`.

    Raises:
        torch.OutOfMemoryError: from the probe, since it says nothing of the model.
    """
    try:
        found = probe()
        return Passing(found) if isinstance(found, str) and _has_hooks(model, _PACKAGES) else found
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # models fail in ways of their own on what they were not written for
        reason = f"{failure} ({type(error).__name__}: {error})"
        return Passing(reason) if _has_hooks(model, {_PACKAGE}) or _has_passed_hook(error) else reason


def _has_passed_hook(error: Exception) -> bool:
    """Whether a hook of somebody else has raised an error, or a function in place of a forward.

    Another thread may have put it there, and taken it back.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(
        _package_of(caller) == "torch" and _package_of(called) not in _PACKAGES and called.f_code.co_name != "forward"
        for caller, called in pairwise(frames)
    )


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _has_hooks(model: PreTrainedModel, packages: Collection[str]) -> bool:
    """Whether a model, or a part of it, has hooks that are of none of these packages."""
    return any(
        str(getattr(hook, "__module__", "")).partition(".")[0] not in packages
        for module in model.modules()
        for hooks in (module._forward_pre_hooks, module._forward_hooks)
        for hook in hooks.values()
    )
