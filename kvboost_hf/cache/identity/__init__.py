"""The fingerprint of a model: a hash of all that its K/V depends on besides tokens.

Stored K/V is valid only for the model as it was when it computed them. Reading all weights at each call would cost
more than reuse saves, so changed weights are detected in cheaper ways, or by a checksum of all on request
(`checksum.py`). Settings that change without a weight changing are read from the modules; switched back, they give the
old fingerprint again. This is all that is looked at before each prompt, and what it stops:

    modules, their classes, attributes and parameters  walk.py      edits, merges, pruning, another layer or adapter
    configurations, precision, autocast                values.py    `config.rope_theta = ...`, a prompt under autocast
    dicts of all of these, by the numbers of changes   versions.py  none: it tells that nothing of them has changed
    forwards and functions that forwards call          foreign.py   patches of objects, classes, modules and registries
    hooks, and functions in place of the forward       hooks.py     steering, compression, masks; those that only count
                                                                    are watched while they run
    what objects, hooks and patches of others reach    values.py    a steering vector that is set or written to
    versions, shapes and memory of weights             weights.py   training, `load_state_dict`, `weight.data = ...`
    steps of optimizers                                weights.py   fused optimizers, which count no writes
    memory that somebody else holds, by its hash       weights.py   writes through `weight.data`, arrays of NumPy
    32 values of each weight                           weights.py   writes that nobody counts
    weights at rest, and the files that have them      values.py    other weights under accelerate or streamed layers

Everything up to the functions is in dicts: while none has changed, none is read. Hooks and code of others, adapters,
offloaded weights and frequencies that vary have a state that no dict shows: with one of them all is read each time.
The weights are always looked at, since memory has no number of changes.
"""

import warnings
from collections.abc import Hashable, Iterable
from dataclasses import replace
from hashlib import blake2b
from typing import Any, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from kvboost_hf import forks
from kvboost_hf.cache.identity.foreign import durable_name, kernels_of_states, library_versions
from kvboost_hf.cache.identity.hooks import ForwardWatch, HookWatch
from kvboost_hf.cache.identity.values import FileWeight, written_config
from kvboost_hf.cache.identity.versions import Still
from kvboost_hf.cache.identity.walk import Layout, ModelParts, Walk
from kvboost_hf.cache.identity.weights import WeightsWatch, lack_memory
from kvboost_hf.checksum import Content, checksum
from kvboost_hf.compat import KeptOnModel, autocast, config_scalars, note_changes, training_reason

_MOST_IN_VAIN = 8  # looks after which it is no longer tried


class ModelWalk:
    """Finds what K/V of one model depends on, again and again."""

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._still: Still | None = None
        self._found = ModelParts()  # without tensors, of the model that is still the same
        self._in_vain = 0  # how often in a row it was not
        self._may_stay = True  # nothing of others was found in it
        self._number = 0  # how often something else was found in the model

    def look(self, model: nn.Module) -> ModelParts:
        """Collect from the model as it is now."""
        if self._still is not None:
            tensors = self._still.tensors(model)
            if tensors is not None and self._found.switches[0] == autocast():
                self._in_vain = 0
                return replace(self._found, tensors=tensors, is_same=True)
        still = Still(model) if self._may_stay and self._in_vain < _MOST_IN_VAIN else None
        walk = self._layout.read(model) if self._layout is not None else None
        if walk is None:
            walk = Walk(model)
            self._layout = Layout(walk) if walk.is_ordinary else None
        found = walk.complete(model)
        self._number += 1
        found.number = self._number
        self._may_stay = self._layout is not None and not found.has_others
        self._still = None
        if still is not None and self._may_stay and still.tensors(model) is not None:
            self._still, self._found = still, replace(found, tensors=[])
            self._in_vain += 1
        return found


class ModelFingerprint:
    """Follows one model; `current()` changes whenever its K/V may have changed."""

    def __init__(self) -> None:
        self._lock = forks.lock(torn=self._forget)
        self.bumps = 0  # how often `bump` was called
        self.number = 0  # of what was last found in the model
        self._weights = WeightsWatch()
        self._walk = ModelWalk()
        # Full or not -> the look that it was found in, what was digested, and the result.
        self._digests: dict[bool, tuple[Hashable, Hashable, bytes]] = {}
        self._parts: dict[int, tuple[Any, int]] = {}  # id -> hook or function and its serial; only those in place
        self._next_serial = 0
        self._settings: tuple[Hashable, bytes] | None = None  # of a model in training mode, and their hash
        self._frequencies: Hashable = ()  # how they were last written
        self.watched: list[HookWatch | ForwardWatch] = []  # others' hooks, as they were when this was last asked
        self._durable: tuple[Hashable, bytes] | None = None  # what was digested, and the result
        self._codes: tuple[int, list[str] | str] | None = None  # names of parts, or why there are none, by look
        self._in_files: dict[Hashable, Content] = {}  # of weights that accelerate reads

    def look(self, model: nn.Module) -> ModelParts:
        """All that `model`, as it is now, depends on; after changes by others it is probed again."""
        with self._lock:
            return self._look(model)

    def current(self, model: nn.Module, *, full: bool = False, found: ModelParts | None = None) -> bytes:
        """The fingerprint of `model` as it is now; `found` is what `look` has found just now, or None to look.

        With `full` every weight is read, so that no change can be missed, and weights that are changed back find their
        old fingerprint again. It never equals one without `full`.
        """
        with self._lock:
            found = self._look(model) if found is None else found
            weights = self._weights_of(found, full=full)
            full = isinstance(weights, bytes)
            known, look = self._digests.get(full), (found.number, weights, self.bumps)
            if known is not None and known[0] == look:
                return known[2]
            in_files = [(before, each.digest) for before, each in found.in_files if isinstance(each, Content)]
            switches = (*found.switches, *sorted(found.files), *in_files, *found.serials)
            state = (switches, weights, self.bumps)
            if known is not None and known[1] == state:
                digest = known[2]
            else:
                digest = self._digest(model, state, b"" if full else self._weights.sample)
            self._digests[full] = look, state, digest
            return digest

    def durable(self, model: nn.Module, *, full: bool = False, found: ModelParts | None = None) -> bytes | str:
        """A fingerprint that is the same in other processes, or the reason why there is none.

        All weights are read at the first call, again when they seem to have changed, and each time with `full`. Code
        counts by the version of its package, or by its source file. Closures and objects used as hooks or functions
        have no such name: with one of them there is no durable fingerprint.
        """
        with self._lock:
            found = self._look(model) if found is None else found
            codes = self._codes_in(found)
            if isinstance(codes, str):
                return codes
            weights = self._weights_of(found, full=full)
            if isinstance(weights, int) and (full or self._weights.without_memory):
                return "weights whose memory is taken from them between forwards cannot be told apart from others"
            switches = (*found.switches, *(() if found.are_all_placed else sorted(found.files)), *codes)
            in_files = tuple(each.digest for _, each in found.in_files if isinstance(each, Content))
            state = (switches, full, weights, in_files, frozenset(found.files), self.bumps)
            if self._durable is None or self._durable[0] != state:
                read = self._checksum(found)
                versions = (*library_versions(), *kernels_of_states(model))
                self._durable = state, self._digest(model, (switches, full, versions), read)
            return self._durable[1]

    def unnamed(self, found: ModelParts) -> str | None:
        """Why some code in what `look` has found just now has no name in other processes; None if all of it has."""
        with self._lock:
            codes = self._codes_in(found)
            return codes if isinstance(codes, str) else None

    def _codes_in(self, found: ModelParts) -> list[str] | str:
        if self._codes is None or self._codes[0] != found.number:
            self._codes = found.number, _codes_of(found.parts)
        return self._codes[1]

    def reason_in_training(self, model: PreTrainedModel) -> str | None:
        """Why K/V of the model, as it was last looked at, may be drawn at random, or None."""
        settings = self._settings
        return training_reason(model, settings[1]) if settings is not None else None

    @property
    def age(self) -> tuple[int, int]:
        """Grows when weights change. What `current` gave at an earlier age, without `full`, it never gives again."""
        return self._weights.last_epoch, self.bumps

    @property
    def altered(self) -> str | None:
        """Why a hook changes, or may change, what the model computes, or None."""
        for watch in self.watched:
            if (reason := watch.reason) is not None:
                return reason
        return None

    def bump(self) -> None:
        """Change the fingerprint, so that all K/V computed before is no longer found."""
        with self._lock:
            self.bumps += 1

    def _forget(self) -> None:
        """After a fork in the middle of a look at the model: begin anew, under another fingerprint."""
        self._weights, self._walk, self._parts = WeightsWatch(), ModelWalk(), {}
        self._digests, self._settings, self._durable, self._codes = {}, None, None, None
        self.bumps += 1

    def _look(self, model: nn.Module) -> ModelParts:
        """Walk through the model."""
        found = self._walk.look(model)
        frequencies: Hashable = ()  # memory and number of writes of each table
        for at in found.frequencies:
            table = found.tensors[at]
            frequencies = frequencies, table.data_ptr(), -1 if table.is_inference() else table._version
        if found.is_same and frequencies == self._frequencies:
            return found
        self._frequencies = frequencies
        self.watched, self.number = found.watched, found.number
        found.serials[:] = self._serials(found.parts)
        if isinstance(model, PreTrainedModel):  # adapters change nothing that is asked, and hooks are watched
            values = tuple(found.configs), tuple(found.flags), frequencies
            note_changes(model, values, tuple(found.serials[found.foreign]))
        settings = (*found.switches, *found.serials) if found.in_training else None
        if settings is None:
            self._settings = None
        elif self._settings is None or self._settings[0] != settings:
            self._settings = settings, blake2b(repr(settings).encode(), digest_size=20).digest()
        return found

    def _weights_of(self, found: ModelParts, *, full: bool) -> bytes | int:
        """A checksum of all weights; or how often they have changed, without `full` and where some have no memory."""
        if full and not lack_memory(found.tensors):
            return checksum(found.tensors, found.used_on)
        return self._weights.epoch(found.tensors, bool(found.watched))

    def _checksum(self, found: ModelParts) -> bytes:
        """A checksum of all weights, those in files included."""
        used_on = dict(found.used_on)
        weights: list[torch.Tensor | Content] = []
        for weight in found.weights:
            if isinstance(weight, FileWeight):
                device, weight = used_on[id(weight)], weight.read(self._in_files)
                used_on[id(weight)] = device
            weights.append(weight)
        return checksum(weights, used_on)

    def _serials(self, parts: Iterable[Any]) -> list[int]:
        """A number for each part: the same as long as it stays in place, never used again."""
        seen: dict[int, tuple[Any, int]] = {}
        numbers: list[int] = []
        for part in parts:
            key = id(part)
            known = seen.get(key) or self._parts.get(key)
            if known is None or known[0] is not part:
                self._next_serial += 1
                known = part, self._next_serial
            seen[key] = known
            numbers.append(known[1])
        self._parts = seen
        return numbers

    def _digest(self, model: nn.Module, state: Hashable, sample: bytes) -> bytes:
        digest = blake2b(digest_size=20)
        _digest_shapes(digest, model)
        digest.update(repr(state).encode())
        digest.update(sample)
        return digest.digest()


def _codes_of(parts: Iterable[Any]) -> list[str] | str:
    """Names of functions and hooks that are the same in every process, or why there are none."""
    found: set[str] = set()
    for part in parts:
        name = durable_name(part)
        if name is None:
            return f"{getattr(part, '__qualname__', type(part).__qualname__)} cannot be told apart from others"
        found.add(name)
    return sorted(found)


def model_name(model: nn.Module) -> bytes:
    """A hash of a model's configuration and shapes, without its weights."""
    digest = blake2b(digest_size=20)
    _digest_shapes(digest, model)
    return digest.digest()


def _digest_shapes(digest: Any, model: nn.Module) -> None:
    config = getattr(model, "config", None)
    try:
        shown = written_config(config) if config is not None else str(type(model))
    except Exception:  # somebody has put something into it that cannot be written
        shown = repr(config_scalars(config))
    digest.update(shown.encode())
    for name, tensor in model.named_parameters():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())


class ModelState(KeptOnModel):
    """Fingerprint, lock and attachment of one model."""

    def __init__(self) -> None:
        self.fingerprint = ModelFingerprint()
        self.lock = forks.rlock()
        self.attached: Any = None  # of `attach.py`: makes a cache for calls that bring none

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        self._warn_of_copy()
        return super().__reduce__()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        self._warn_of_copy()
        return super().__deepcopy__(memo)

    def _warn_of_copy(self) -> None:
        """A copy is not attached: a store belongs to one model, and the salt is a secret that no file may hold."""
        if self.attached is not None:
            warnings.warn(
                "A copied, pickled or saved model is not attached, though this one is: its store belongs to it alone. "
                "Call attach(copy) to have the copy reuse K/V, too.",
                stacklevel=2,
            )
