"""Remembers what is beside the records of a store: roots and salts, evicted keys, what storing pays, and audits.

Loading has to beat the time that the model takes to compute a token, which `ComputePace` measures.
"""

import logging
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedModel

from kvboost_hf import forks
from kvboost_hf.cache.identity import ModelState
from kvboost_hf.cache.identity.foreign import library_versions
from kvboost_hf.cache.identity.walk import ModelParts
from kvboost_hf.cache.kv import Stored, StoredChunk
from kvboost_hf.cache.kv.model_form import BlobReader, ModelForm, remember
from kvboost_hf.cache.planning.chunks import HEAD_TOKENS, Tokens, prefix_key, root_beside, root_key
from kvboost_hf.cache.planning.plan import RowPlan, Segment, trim_row
from kvboost_hf.cache.store.lower import LowerMemory
from kvboost_hf.cache.tiers.base import MadeWith
from kvboost_hf.compat import LAST, KeptOnModel, attn_implementation, input_device
from kvboost_hf.errors import StoreClosedError

_log = logging.getLogger("kvboost_hf")
_MOST_KINDS = 8  # choices of layers whose hidden states are kept, which are tried for each prompt


def salt_bytes(salt: str | bytes) -> bytes:
    """A salt as bytes. ValueError: it is neither text nor bytes."""
    if isinstance(salt, str):
        return salt.encode()
    if isinstance(salt, bytes):
        return salt
    raise ValueError(f"`salt` must be str or bytes, got {type(salt).__name__}.")


class History:
    """Salts of roots, keys that were evicted, and beginnings of prompts; as far as they are remembered."""

    def __init__(self) -> None:
        self._salts: OrderedDict[bytes, bytes] = OrderedDict()  # by root
        self._evicted: OrderedDict[bytes, None] = OrderedDict()  # keys
        self._first_heads: OrderedDict[bytes, bytes] = OrderedDict()  # salt and first tokens -> root last stored under

    def clear(self) -> None:
        """Forget keys and beginnings."""
        self._evicted.clear()
        self._first_heads.clear()

    def note_root(self, root: bytes, salt: bytes) -> None:
        """Remember the salt behind a root."""
        remember(self._salts, root, salt)

    def salt_of(self, root: bytes) -> bytes | None:
        """The salt behind a root."""
        return self._salts.get(root)

    def note_stored(self, chunk: StoredChunk) -> None:
        """Remember how a prompt begins, and that a chunk is here."""
        self._evicted.pop(chunk.key, None)
        salt = self._salts.get(chunk.root)
        if salt is not None and not chunk.content_only and chunk.parent == chunk.root:
            head = prefix_key(salt, chunk.tokens[:HEAD_TOKENS])
            remember(self._first_heads, head, chunk.root)

    def known_under_other_root(self, root: bytes, tokens: Tokens) -> bool:
        """Whether a prompt with this beginning was stored, under the same salt, for the model as it was before."""
        known = self._first_heads.get(prefix_key(self._salts.get(root, b""), tokens[:HEAD_TOKENS]))
        return known is not None and known != root

    def note_evicted(self, stored: Stored) -> None:
        """Remember that a record had to make room."""
        remember(self._evicted, stored.key, None)

    def was_evicted(self, key: bytes | None) -> bool:
        """Whether a record under this key had to make room."""
        return key in self._evicted


class Roots:
    """Derives the roots of a store from its model and salts, and notes them in `History` and `LowerMemory`.

    When weights change, K/V of before is dropped where nothing could ever find it again: in a store without tiers.

    Attributes:
        noted_by: The `Roots` of the store that notes the roots; None for a store that keeps nothing.
        hidden_kinds: The layers whose hidden states were kept of some text, of each text that chose others.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        reader: BlobReader,
        lock: AbstractContextManager[object],
        history: History,
        lower: LowerMemory,
        drop: Callable[[set[bytes]], None],
        *,
        require_open: Callable[[], None],
        mark: bytes,
    ) -> None:
        self._model, self._reader, self._lock = weakref.ref(model), reader, lock
        self._history, self._lower, self._drop = history, lower, drop
        self._require_open, self._mark = require_open, mark
        self.noted_by: Roots | None = self
        self.hidden_kinds: list[tuple[int, ...]] = []
        self._follower = weakref.ref(ModelState.of(model).fingerprint)  # it may hold hooks that hold the model
        self._last: tuple[tuple[Any, ...], bytes] | None = None  # what the last root was derived from, and it
        self._are_shared = bool(lower.tiers)  # there are tiers that other processes may read
        self._age = -1, -1  # of the model
        self._passing: set[bytes] = set()  # roots that last as long as it stays as it is
        self._warned: set[str] = set()

    def root(
        self,
        salt: bytes,
        regime: bytes = b"",
        *,
        read_all: bool = False,
        hidden_layers: tuple[int, ...] = (),
        seen: ModelParts | None = None,
    ) -> bytes | None:
        """The key that all chains of the model, as it is now, start from; None for a store that keeps nothing.

        `regime` names the rotary frequencies that are in force (`compat.rope_regime`). With `read_all`, every weight
        is read to tell whether one has changed. `seen` is what was just found in the model, or None to look at it.
        """
        self._require_open()
        if (noted_by := self.noted_by) is None:
            return None
        if hidden_layers and hidden_layers not in self.hidden_kinds:
            self.hidden_kinds.append(hidden_layers)
            del self.hidden_kinds[:-_MOST_KINDS]
        model, codec = require_model(self._model), self._reader.codec.name + self._reader.state_format.mark
        follower = self._follower() or ModelState.of(model).fingerprint
        regime += self._mark
        with self._lock:
            found = follower.durable(model, full=read_all, found=seen) if noted_by._are_shared else None
            if isinstance(found, str):
                noted_by._note_reason(found)
            durable = isinstance(found, bytes)
            if not isinstance(found, bytes):
                found = follower.current(model, full=read_all, found=seen)
            derived_from = found, salt, regime, codec, read_all, hidden_layers, follower.age
            if self._last is None or self._last[0] != derived_from:
                root = root_key(found, salt, regime + codec.encode() + _kept(hidden_layers))
                noted_by._history.note_root(root, salt)
                if durable:
                    known = seen.facts.get(attn_implementation) if seen is not None else None
                    made_with = MadeWith(
                        codec, regime.decode("latin-1"), known or attn_implementation(model), versions()
                    )
                    noted_by._lower.keep(root, made_with, found, hidden_layers)
                elif not read_all:
                    noted_by._note_passing(root, follower.age)
                self._last = derived_from, root
            return self._last[1]

    def beside(self, root: bytes, mark: bytes, form: ModelForm, *, durable: bool) -> bytes:
        """The root of what others than the model compute of texts, such as heads, beside the chains under `root`.

        No salt is known of it: it is no text that anybody is told of, or looks up. `mark` names who computes it, and
        all that it depends on besides; it is `durable` if other processes name it so, too.
        """
        found = root_beside(root, mark)
        with self._lock:
            if durable:
                self._lower.keep_beside(root, found, form)
            if root in self._passing:
                self._passing.add(found)
        return found

    def _note_passing(self, root: bytes, age: tuple[int, int]) -> None:
        """A root is that of the model at an age of its fingerprint: drop what is under those of an earlier one."""
        if age != self._age:
            self._drop(self._passing)
            self._age, self._passing = age, set()
        self._passing.add(root)

    def _note_reason(self, reason: str) -> None:
        """Say once why K/V of the model stays in host memory, though there are tiers."""
        if reason not in self._warned:
            self._warned.add(reason)
            _log.warning("K/V of this model is kept in host memory only: %s in other processes.", reason)


def _kept(hidden_layers: tuple[int, ...]) -> bytes:
    """What a root says of hidden states; of the last ones alone, releases that knew no others did not say it."""
    layers = f" of {hidden_layers}" if hidden_layers not in ((), (LAST,)) else ""
    return f"hidden states{layers}".encode() if hidden_layers else b""


def require_model(ref: "weakref.ref[PreTrainedModel]") -> PreTrainedModel:
    """The model of a store. StoreClosedError: it no longer exists."""
    model = ref()
    if model is None:
        raise StoreClosedError("The model that this ChunkStore was made for no longer exists. Make a new store.")
    return model


@cache
def versions() -> str:
    """The versions that K/V depends on, for people."""
    return "torch {}, transformers {}".format(*library_versions())


# Storing so many tokens, or what takes as long as computing so many, tells whether it pays.
_STORED_AT_LEAST, _COMPUTED_AT_LEAST = 65_536, 4_096


class Payback:
    """Counts what was stored against what served prompts, and drops from plans what is not worth loading.

    `pays_for` tokens take as long to store as one takes to compute; None stores all that comes.
    """

    def __init__(self, pays_for: int | None, model: PreTrainedModel) -> None:
        self.pays_for = pays_for
        self._model, self._pace = weakref.ref(model), ComputePace.of(model)
        self.clear()

    def clear(self) -> None:
        """Start over."""
        self._unpaid = 0  # tokens stored, less those that serving prompts has paid for
        self._unseen: OrderedDict[bytes, None] = OrderedDict()  # keys of what was not stored when it came first

    def admits(self, key: bytes) -> bool:
        """Whether a new chunk is to be stored: where storing has not paid, one that comes again."""
        if self.pays_for is None or self._unpaid < max(_STORED_AT_LEAST, _COMPUTED_AT_LEAST * self.pays_for):
            return True
        if key in self._unseen:
            del self._unseen[key]
            return True
        remember(self._unseen, key, None)
        return False

    def note_stored(self, tokens: int) -> None:
        """So many tokens were stored that nobody asked to store."""
        self._unpaid += tokens

    def note_served(self, tokens: int) -> None:
        """So many tokens served a prompt, which pays for what was stored before."""
        if self.pays_for is not None:
            self._unpaid = max(0, self._unpaid - self.pays_for * tokens)

    @property
    def seconds_per_token(self) -> float | None:
        """How long the model computes a token; measured or estimated at the first call. None if it does not exist."""
        model = self._model()
        return self._pace.seconds_per_token(model) if model is not None else None

    def worth_loading(self, plan: RowPlan) -> RowPlan:
        """The plan without the end that would take longer to load from lower tiers than to compute."""
        if all(segment.chunk.found is None for segment in plan.segments if isinstance(segment.chunk, StoredChunk)):
            return plan
        per_token = self._pace.seconds_per_token(require_model(self._model))

        def saving(segment: Segment) -> float:
            assert isinstance(segment.chunk, StoredChunk)
            found, computing = segment.chunk.found, (segment.stop - segment.start) * per_token
            return computing - (found.entry.nbytes * found.tier.seconds_per_byte if found is not None else 0.0)

        return trim_row(plan, saving)


_SIDE = 512  # of the matrices that are multiplied to see how fast the device is
LEAST_TOKENS = 64  # a forward over fewer is not representative
_WEIGHT = 0.2  # of the newest measurement in a running average


class ComputePace(KeptOnModel):
    """Seconds that a token of a prompt takes.

    At first estimated as two operations for each parameter, at the speed of a matrix product on the model's device.
    On a CPU, where the end of a forward is its end, corrected by the forwards that follow.
    """

    def __init__(self) -> None:
        self._seconds: float | None = None
        self._observed = False

    def seconds_per_token(self, model: PreTrainedModel) -> float:
        """Seconds for one token; measured or estimated at the first call."""
        if self._seconds is None:
            operations = 2 * sum(parameter.numel() for parameter in model.parameters())
            self._seconds = operations / _operations_per_second(input_device(model), model.dtype)
        return self._seconds

    def observe(self, tokens: int, seconds: float) -> None:
        """A forward over so many tokens of a prompt, of all rows together, took so long, on a CPU."""
        if tokens < LEAST_TOKENS:
            return
        found = seconds / tokens
        if not self._observed or self._seconds is None:
            self._seconds, self._observed = found, True
        else:
            self._seconds += _WEIGHT * (found - self._seconds)


@torch.no_grad()
def _operations_per_second(device: torch.device, dtype: torch.dtype) -> float:
    one = torch.ones(_SIDE, _SIDE, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(2):
        start = time.perf_counter()
        (one @ one)[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - start)
    return 2 * _SIDE**3 / best


class Audits:
    """Spreads audits evenly over reused prompts, and counts them. Safe for threads."""

    def __init__(self) -> None:
        self.count = self.divergences = 0
        self._lock = forks.lock()
        self._debt = 0.0

    def is_due(self, rate: float) -> bool:
        """Whether one more reused prompt brings the share of audited ones up to `rate`."""
        with self._lock:
            self._debt += rate
            due = self._debt >= 1 - 1e-9
            self._debt -= due
        return due

    def record(self, *, diverged: bool) -> None:
        """Count an audit."""
        with self._lock:
            self.count += 1
            self.divergences += diverged
