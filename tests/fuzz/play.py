"""Plays a history: every call beside plain `generate()`, and what is stored beside a forward of the model."""

import copy
import pickle
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any
from unittest.mock import patch

import torch
from transformers import DynamicCache, LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from kvboost_hf import (
    ChunkReuseCache,
    ChunkStore,
    KVQuantConfig,
    ReusePolicy,
    TreeDecoding,
    attach,
    check_model_compatibility,
    detach,
    last_cache,
    lookup_assistant,
)
from kvboost_hf.errors import KVBoostError, StoreClosedError
from tests.conftest import as_inputs, left_pad
from tests.fuzz.families import OWN_DRAFTS, STATEFUL, Family, draft, family, mode, model_as, tokenizer, user_code
from tests.fuzz.history import EDITS, REUSES, TEXTS, Call, History, Row
from tests.internals.cache import ComputePace, chunk_bytes, make_codec
from tests.internals.compat import CACHE, cache_argument, cache_in, decoder_layers

INNER = Row(text=3, head=33)  # what is asked in the middle of a call
# Errors that plain generate() has not, as documented: parts of their messages.
DOCUMENTED = (
    "max_cache_len",
    "to draft for several rows",  # what looks at all rows together
    "`streamer` must be None for several rows",
    "K/V of branches cannot be held",
    "cannot compute trees of tokens",
    "cannot be returned with trees of drafts",
    "is not taken by 'kvboost_fa2'",
    "requires a cache that can be cropped",  # transformers, of its static caches with windows
)


class Wrong(Exception):
    """A history does not give what plain `generate()` gives.

    Args:
        kind: In a word or two: the same for what is likely the same fault.
        detail: What was found.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind


class Refused(Exception):
    """A history cannot be played: the cache is refused, as documented."""


class Planned(Exception):
    """Raised in the middle of a call that is to be interrupted."""


class _Parted(Exception):
    """Two tokens score alike, and each side has taken another one: what follows cannot be compared."""


@dataclass(slots=True)
class Step:
    """A call with its ids.

    Args:
        call: The call.
        inputs: Ids and mask of the whole prompt.
        of: The number of the step whose cache it goes on with, with new ids only.
        held: How many columns that holds.
        expected: What plain `generate()` gives, or raises.
    """

    call: Call
    inputs: dict[str, torch.Tensor]
    of: int | None
    held: int
    expected: Any


@contextmanager
def watched(read: Callable[[], object]) -> Iterator[None]:
    """Call `read` over and over in another thread, while threads take turns all the time.

    Raises:
        Wrong: if it has raised.
    """
    interval, ended, failed = sys.getswitchinterval(), threading.Event(), list[str]()

    def watch() -> None:
        while not ended.is_set() and not failed:
            try:
                read()
            except Exception:
                failed.append(traceback.format_exc())

    thread = threading.Thread(target=watch)
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(interval)
    if failed:
        raise Wrong("watched", failed[0])


def read_cache(cache: ChunkReuseCache) -> None:
    """Read what users may watch of a cache, whoever uses it meanwhile."""
    cache.report.explain()
    for name in ("nbytes", "root", "content_keys", "max_cache_len", "is_croppable", "policy", "salt", "store"):
        getattr(cache, name)
    repr(cache), len(cache), cache.get_seq_length(), cache.stored_tokens(TEXTS[0][:, :40])


def read_store(store: ChunkStore, *, integrity: bool) -> None:
    """Read what users may watch of a store; with `integrity`, also whether what it holds is right."""
    for read in (store.stats, store.inspect, store.pinned_keys):
        read()
    store.continuation(TEXTS[0][0, :40].tolist(), 4)
    store.check_consistency()
    if integrity and (found := store.check_integrity(0.2)).wrong:
        raise ValueError(f"{found.wrong} of {found.checked} chunks are wrong")


def play(history: History, dtype: torch.dtype = torch.float32) -> int:
    """Play a history; returns the calls that were compared.

    Raises:
        Wrong: if something is not as with plain `generate()`.
        Refused: if no such cache can be made.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        models = family(history.family, dtype)
        try:
            # What `kvboost_fa2` computes is compared, too, unless a query may see nothing, which is undefined.
            eager = history.attention == "kvboost_fa2" and all(call.mask != "right" for call in history.calls)
            for model in (models.served, models.plain):
                model.set_attn_implementation("eager" if eager and model is models.plain else history.attention)
                check_model_compatibility(model, strict=False)  # its probes run now, in no call that is interrupted
        except ValueError as error:
            raise Refused(str(error)) from error
        steps = prepare(history, models, dtype)
        with _Played(history, models, dtype) as played, watched(played.read) if history.watched else nullcontext():
            played.run(steps)
    return len(steps)


def confirmed(history: History, wrong: Wrong) -> Wrong | None:
    """What is wrong with a history in float64, too; None if it was a matter of rounding."""
    if history.attention == "kvboost_fa2" or wrong.kind not in ("answer", "stored"):
        return wrong
    try:
        play(history, torch.float64)
    except Wrong as found:
        return found
    except Refused:
        return wrong
    return None


# What plain generate() says


def prepare(history: History, models: Family, dtype: torch.dtype) -> list[Step]:
    """The calls of a history, each with what plain `generate()` says."""
    steps: list[Step] = []
    for number, call in enumerate(history.calls):
        before = number - call.follows * history.threads
        earlier = steps[before] if call.follows and before >= 0 else None
        if earlier is None or not isinstance(earlier.expected, dict) or earlier.call.raises is not None:
            inputs, of, held = left_pad(*(row.ids for row in call.rows)), None, 0
        else:
            inputs, of, held = _continued(history, call, earlier, before)
            rounded = "autocast" in (earlier.call.within, call.within)
            if earlier.call.changed != call.changed or rounded or earlier.call.embeds == "other":
                of = None  # what it holds is not what the model computes of its tokens
            if earlier.call.user is not None or call.user is not None:
                of = None  # nor is it then
            drafted = call.options.keys() & {"draft", "prompt_lookup_num_tokens"}
            if earlier.call.mask == "right" or (earlier.call.mask == "holes" and drafted):
                of = None  # plain generate() that goes on with a cache says something else there
            pieces = earlier.call.options.get("prefill_chunk_size") is not None and history.family in STATEFUL
            if (pieces or history.family == "deepseek_v4") and not earlier.inputs["attention_mask"].all():
                of = None  # nor there: it takes padding into states
            latest = max((i for i in range(number % history.threads, number, history.threads)), default=None)
            gone_on = any(step.of == of for step in steps) if history.reuse == "attach" else of != latest
            if of is not None and gone_on:
                of = None  # the cache holds another text by now
        if of is None:
            inputs = _masked(inputs, call.mask)
        expected = _plain(history.family, history.attention, dtype, _key(inputs), _frozen(call))
        steps.append(Step(call, inputs, of, held, expected))
    return steps


def _continued(
    history: History, call: Call, earlier: Step, number: int
) -> tuple[dict[str, torch.Tensor], int | None, int]:
    """The prompt behind an earlier answer; the step whose cache can go on, and what that holds."""
    sequences, width = earlier.expected["sequences"], earlier.inputs["input_ids"].shape[1]
    mask, copies = earlier.inputs["attention_mask"], len(sequences) // len(earlier.inputs["input_ids"])
    mask = mask.repeat_interleave(copies, dim=0)
    grown = bool((sequences[:, width:] == 0).any())  # padding behind an answer
    # Beams leave other rows than those of the answer, and a static cache has no room behind it.
    can = call.only_new and not grown and not history.moves
    can = can and history.reuse != REUSES[2]  # another thread may have put another text into it
    can = can and not earlier.call.options.keys() & {"num_beams", "cache_implementation"}
    can = can and earlier.call.options.get("use_cache", True) and sequences.shape[1] > width
    can = can and not call.options.keys() & {"num_beams", "num_return_sequences", "use_cache"}  # nor can plain caches
    chains = call.options.keys() & {"draft", "prompt_lookup_num_tokens"} and not _trees(call)
    can = can and not (len(sequences) > 1 and chains)
    if can:
        more = call.rows[0].end.expand(len(sequences), -1)
        ids = torch.cat([sequences, more], dim=1)
        ones = torch.ones(len(ids), ids.shape[1] - width, dtype=mask.dtype)
        return {"input_ids": ids, "attention_mask": torch.cat([mask, ones], dim=1)}, number, sequences.shape[1] - 1
    rows = []
    for i, row in enumerate(call.rows):
        of = i % len(sequences)
        answered = sequences[of, width:]
        told = torch.cat([sequences[of, :width][mask[of].bool()], answered[answered != 0]])
        rows.append(torch.cat([told[None], row.end], dim=1))
    return left_pad(*rows), None, 0


def _masked(inputs: dict[str, torch.Tensor], how: str | None) -> dict[str, torch.Tensor]:
    """A prompt with another mask, see `MASKS`."""
    ids, mask = (inputs[name].clone() for name in ("input_ids", "attention_mask"))
    width = ids.shape[1]
    if how == "holes" and width > 2:
        mask[0, width // 2] = 0
    elif how == "right":
        for row, pads in enumerate((width - mask.sum(1)).tolist()):
            ids[row], mask[row] = ids[row].roll(-pads), mask[row].roll(-pads)
    return {"input_ids": ids, "attention_mask": mask}


def _key(inputs: dict[str, torch.Tensor]) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    ids, mask = (tuple(map(tuple, inputs[name].tolist())) for name in ("input_ids", "attention_mask"))
    return ids, mask


def _frozen(call: Call) -> tuple[int, str]:
    takes_part = (call.nested, *(call.raises or ())[:1])
    return call.new, repr(
        replace(
            Call(mask=call.mask, embeds=call.embeds, within=call.within, changed=call.changed, user=call.user),
            options={**call.options, **({"streamer": True} if "streamer" in takes_part else {})},
        )
    )


@lru_cache(maxsize=512)
def _plain(name: str, attention: str, dtype: torch.dtype, inputs: Any, told: tuple[int, str]) -> Any:
    """What plain `generate()` gives, or the exception that it raises."""
    ids, mask = (torch.tensor(part).reshape(len(part), -1).long() for part in inputs)
    call = replace(eval(told[1]), new=told[0])
    given, model = _arguments(call, name, dtype, None), family(name, dtype).plain
    try:
        with model_as(model, call.changed), mode(call.within), user_code(model, call.user):
            return _generate(model, {"input_ids": ids, "attention_mask": mask}, call, given)
    except Exception as error:
        return error


def _generate(model: Any, inputs: dict[str, torch.Tensor], call: Call, given: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    told: dict[str, Any] = {"max_new_tokens": call.new, "output_logits": True, "return_dict_in_generate": True}
    if call.embeds is not None:
        found = model.get_input_embeddings()(inputs["input_ids"])
        inputs = {**inputs, "inputs_embeds": found * (1.0 if call.embeds == "same" else 1.5)}
    if (
        call.mask == "none"
        and inputs["attention_mask"].shape == inputs["input_ids"].shape
        and inputs["attention_mask"].all()
    ):
        inputs = {name: given for name, given in inputs.items() if name != "attention_mask"}
    return dict(model.generate(**inputs, **{**told, **given}))


def _loop(model: Any, inputs: dict[str, torch.Tensor], call: Call, given: dict[str, Any]) -> Any:
    """The same as `_generate` gives, by forwards of the model, each of which may be asked for one token's logits."""
    ids, mask, cache = inputs["input_ids"], inputs["attention_mask"], given.get(CACHE)
    told, found = [ids], []
    with torch.no_grad():
        for _ in range(call.new):
            taking = {cache_argument(model): cache} if cache is not None else {}
            out = model(input_ids=ids, attention_mask=mask, use_cache=True, logits_to_keep=1, **taking)
            found.append(out.logits[:, -1].float())
            ids, cache = found[-1].argmax(-1, keepdim=True), cache_in(out)
            mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
            told.append(ids)
    return {"sequences": torch.cat(told, dim=1), "logits": tuple(found), CACHE: cache}


def _copy(cache: Any, how: str | None) -> Any:
    """A copy of a cache, as users make one."""
    if how == "deepcopy":
        return copy.deepcopy(cache)
    if how == "pickle":
        return pickle.loads(pickle.dumps(cache))
    return DynamicCache(cache) if how == "DynamicCache" else cache


def _arguments(call: Call, name: str, dtype: torch.dtype, store: ChunkStore | None) -> dict[str, Any]:
    """The arguments that the options of a call stand for; without a store, those of plain `generate()`."""
    told: dict[str, Any] = {"do_sample": False, **call.options}
    kind = told.pop("draft", None)
    if kind == "plain" or (kind == "load_assistant" and store is not None):
        told["assistant_model"] = draft(name, dtype, kind)
    elif kind == "lookup" and store is not None:
        told["assistant_model"] = lookup_assistant(family(name, dtype).served, store)
    elif kind == "looked-up trees" and store is not None:
        told["custom_generate"] = TreeDecoding(lookup_assistant(family(name, dtype).served, store))
    elif kind == "trees" and store is not None:
        told["custom_generate"] = TreeDecoding(draft(name, dtype, kind))
    if told.get("stop_strings"):
        told["tokenizer"] = tokenizer()
    if told.pop("streamer", False):
        told["streamer"] = _Streamer(lambda: None)
    return told


# What takes part in a call


class _Streamer(BaseStreamer):
    def __init__(self, do: Any) -> None:
        self._do = do

    def put(self, value: torch.Tensor) -> None:
        self._do()

    def end(self) -> None:
        pass


class _Processor(LogitsProcessor):
    def __init__(self, do: Any) -> None:
        self._do = do

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self._do()
        return scores


class _Criterion(StoppingCriteria):
    def __init__(self, do: Any) -> None:
        self._do = do

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> Any:
        self._do()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class _At:
    """Does something at the n-th time that it is called, from 1 on."""

    leaves_kv_alone = True  # as a hook, as far as the fingerprint is to know

    def __init__(self, number: int, do: Any) -> None:
        self._left, self._do = number, do

    def __call__(self, *args: Any) -> None:
        self._left -= 1
        if self._left == 0:
            self._do()


def _raise() -> None:
    raise Planned


@contextmanager
def _with_place(place: str, at: _At, model: Any, given: dict[str, Any]) -> Iterator[None]:
    """Have `at` called in a place of a call."""
    if place in ("hook", "quiet hook"):
        function = at if place == "quiet hook" else lambda *args: at()
        handle = decoder_layers(model)[-1].register_forward_pre_hook(function)
        try:
            yield
        finally:
            handle.remove()
        return
    if place == "processor":
        given["logits_processor"] = [_Processor(at)]
    elif place == "criterion":
        given["stopping_criteria"] = [_Criterion(at)]
    else:
        given["streamer"] = _Streamer(at)
    yield


# What is served


@dataclass(slots=True)
class _Lane:
    """What one thread keeps between its calls."""

    cache: ChunkReuseCache | None = None
    caches: dict[int, Any] = field(default_factory=dict)  # by the number of the step


class _Played:
    """A history in play: its store, its caches, and the folder of its tier."""

    def __init__(self, history: History, models: Family, dtype: torch.dtype) -> None:
        self._history, self._model, self._dtype = history, models.served, dtype
        self._same, self._steady = models.same, models.steady
        self._policy = ReusePolicy(**history.policy)
        live = KVQuantConfig(method="kivi", key_bits=8, value_bits=8, group_size=16, window=16, exact_layers=0)
        self._live = live if history.live_quant else None
        self._shared: ChunkReuseCache | None = None
        self._lanes = [_Lane() for _ in range(history.threads)]

    def __enter__(self) -> "_Played":
        self._folder = tempfile.TemporaryDirectory() if self._history.disk else None
        # Tiny models compute faster than anything is read, and what is measured differs each time.
        self._slow = patch.object(ComputePace, "seconds_per_token", lambda self, model: 1.0)
        self._slow.start()
        try:
            self._open()
        except ValueError as error:
            self.__exit__()
            raise Refused(str(error)) from error
        return self

    def __exit__(self, *_: Any) -> None:
        detach(self._model)
        self._slow.stop()
        if self._folder is not None:
            self._store.close()
            self._folder.cleanup()

    def read(self) -> None:
        """Read what users may watch, of all caches and of the store."""
        caches = [last_cache(self._model), self._shared]
        for lane in self._lanes:
            caches += [lane.cache, *list(lane.caches.values())]
        as_it_was = self._steady and not any(call.changed or call.user or call.raises for call in self._history.calls)
        with suppress(StoreClosedError):  # it is opened again
            for cache in caches:
                if isinstance(cache, ChunkReuseCache):
                    read_cache(cache)
            read_store(self._store, integrity=as_it_was)

    def run(self, steps: Sequence[Step]) -> None:
        """Play all calls, and look at what is stored."""
        threads = self._history.threads
        if threads == 1:
            failed = [self._lane(steps, 0)]
        else:
            failed = [None] * threads

            def lane(number: int) -> None:
                failed[number] = self._lane(steps, number)

            running = [threading.Thread(target=lane, args=(number,)) for number in range(threads)]
            for thread in running:
                thread.start()
            for thread in running:
                thread.join()
        for error in failed:
            if error is not None:
                raise error
        if self._history.reuse == "attach":
            detach(self._model)
        try:
            found = self._store.check_integrity()
        except Exception as error:
            raise Wrong(f"raised {type(error).__name__}", f"check_integrity(): {error}") from error
        if found.wrong and not self._history.live_quant and self._steady:
            raise Wrong("stored", f"{found.wrong} of {found.checked} chunks are wrong")

    def _lane(self, steps: Sequence[Step], number: int) -> Exception | None:
        lane = self._lanes[number]
        try:
            for at in range(number, len(steps), self._history.threads):
                self._step(lane, at, steps[at])
        except _Parted:
            return None
        except Exception as error:
            return error
        return None

    # One call

    def _step(self, lane: _Lane, number: int, step: Step) -> None:
        call, history = step.call, self._history
        for action in call.before:
            try:
                self._do(action, lane)
            except Wrong as wrong:
                raise Wrong(wrong.kind, f"{action} before call {number}: {wrong}") from wrong
            except Exception as error:
                raise Wrong(f"raised {type(error).__name__}", f"{action} before call {number}: {error}") from error
        given: dict[str, Any] = {}
        cache = lane.caches.get(step.of) if step.of is not None else self._cache(lane)
        inputs = step.inputs
        if cache is not None:
            if step.of is not None:
                inputs = {**inputs, "input_ids": inputs["input_ids"][:, step.held :]}
        try:
            given |= _arguments(call, history.family, self._dtype, self._store)
            if cache is not None:
                given[CACHE] = cache
                given.pop("cache_implementation", None)  # transformers takes one of the two
            with self._taking_part(call, lane, given):
                if call.copied is not None and step.of is not None and CACHE in given:
                    given[CACHE] = _copy(given[CACHE], call.copied)
                looped = call.loop and bool(inputs["attention_mask"].all())  # else it would have to pass positions
                looped = looped and history.reuse != REUSES[2]  # who calls a model by themselves, has a cache alone
                if looped and step.of is None and isinstance(cache, ChunkReuseCache):
                    cache.reset()  # else ids follow what it holds
                with model_as(self._model, call.changed), mode(call.within), user_code(self._model, call.user):
                    found = (_loop if looped else _generate)(self._model, inputs, call, given)
        except Planned:
            return
        except Wrong:
            raise
        except Exception as error:
            if isinstance(step.expected, Exception) or any(part in str(error) for part in DOCUMENTED):
                return
            if call.raises is not None and f"({Planned.__name__}: )" in str(error):  # raised while a draft was tried
                return
            if history.reuse == "one cache for all threads" and isinstance(error, KVBoostError):
                return
            raise Wrong(f"raised {type(error).__name__}", f"call {number}: {error}") from error
        if isinstance(step.expected, Exception):
            return
        lane.caches[number] = given[CACHE] if CACHE in given else cache_in(found)
        if not history.differs:
            # Plain generate() that goes on with a cache is off from one over the whole text by as much.
            unsteady = step.of is not None and not self._steady
            _compare(number, step, inputs, found, 10 * self._same if unsteady else self._same)

    @contextmanager
    def _taking_part(self, call: Call, lane: _Lane, given: dict[str, Any]) -> Iterator[None]:
        """With what raises, or calls `generate()`, in the middle of a call."""
        if call.raises is not None:
            with _with_place(call.raises[0], _At(call.raises[1], _raise), self._model, given):
                yield
        elif call.nested is not None:
            with _with_place(call.nested, _At(2, lambda: self._inner(given, call)), self._model, given):
                yield
        else:
            yield

    def _inner(self, outer: dict[str, Any], around: Call) -> None:
        """Ask something else in the middle of a call."""
        state = torch.get_rng_state()
        history, call = (
            self._history,
            Call(rows=(INNER,), within=around.within, changed=around.changed, user=around.user),
        )
        inputs, given = as_inputs(INNER.ids), _arguments(call, history.family, self._dtype, self._store)
        expected = _plain(history.family, history.attention, self._dtype, _key(inputs), _frozen(call))
        if history.reuse == "a new cache":
            given[CACHE] = self._make_cache()
        elif isinstance(outer.get(CACHE), ChunkReuseCache) and history.reuse != "attach":
            given[CACHE] = outer[CACHE]
        try:
            found = _generate(self._model, inputs, call, given)
        except KVBoostError:
            if CACHE in outer:  # it is in use, and says so
                return
            raise
        finally:
            torch.set_rng_state(state)
        if not history.differs:
            _compare(-1, Step(call, inputs, None, 0, expected), inputs, found, self._same)

    # Caches and the store

    def _open(self) -> None:
        history = self._history
        tiers = ["ram:64MB", f"disk:{self._folder.name}:64MB"] if self._folder is not None else []
        budget = None
        if history.max_chunks is not None and not tiers:
            budget = history.max_chunks * chunk_bytes(self._model, history.chunk_size, make_codec(None))
        self._store = ChunkStore(self._model, chunk_size=history.chunk_size, max_bytes=budget, tiers=tiers)
        if history.reuse == "attach":
            told: dict[str, Any] = {"live_quant": self._live, "max_cache_len": history.max_cache_len}
            attach(self._model, self._store, self._policy, **told)
        else:
            self._shared = self._make_cache()

    def _make_cache(self) -> ChunkReuseCache:
        told: dict[str, Any] = {"max_cache_len": self._history.max_cache_len, "live_quant": self._live}
        return ChunkReuseCache(self._model, self._store, self._policy, **told)

    def _cache(self, lane: _Lane) -> ChunkReuseCache | None:
        """The cache that a call is given."""
        reuse = self._history.reuse
        if reuse == "attach":
            return None
        if reuse == "one cache for all threads":
            return self._shared
        if reuse == "a new cache" or lane.cache is None:
            lane.cache = self._make_cache()
        return lane.cache

    def _do(self, action: str, lane: _Lane) -> None:
        """Do something to what a thread keeps, which must not change what is said later."""
        cache = lane.cache
        if action == "reopen":
            if self._folder is not None and self._history.threads == 1:
                self._store.close()
                self._open()
                lane.cache, lane.caches = None, {}
        elif action == "collect":
            self._store.check_integrity(0.5)
        elif cache is None:
            return
        elif action == "fork":
            lane.cache = cache.fork()
            lane.caches = {number: lane.cache if kept is cache else kept for number, kept in lane.caches.items()}
        elif action == "reset":
            cache.reset()
            lane.caches = {}
        elif action == "crop":
            try:
                cache.crop(-1)
            except (RuntimeError, ValueError):  # states, and windows that have let go of a token
                return
            lane.caches = {}
        elif action in EDITS:
            lane.caches = {}
            self._edit(cache, action)
        else:
            getattr(cache, action)()

    def _edit(self, cache: ChunkReuseCache, kind: str) -> None:
        """Edit what a cache holds, and go on from there: once it is repaired, it is as if it had been computed."""
        held = cache.get_seq_length()
        start, stop = held // 3, held // 3 + max(held // 8, 1)
        new = TEXTS[3][0, 200:209]
        edits: dict[str, dict[str, Any]] = {
            "drop": {"drop": [(start, stop)]},
            "replace": {"replace": [(start, stop, new)]},
            "insert": {"replace": [(start, start, new)]},
            "move on": {"move": [(start, stop, held - held // 8)]},
            "move back": {"move": [(held - held // 4, held - held // 8, start)]},
            "edit nothing": {},
        }
        try:
            ids = cache.edit(**edits[kind])
        except ValueError:  # what cannot be moved, or holds nothing
            return
        cache.repair()
        if (ledger := cache.parts.live.ledger) is None or ledger.blended is not None:
            return
        call, inputs = Call(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        expected = _plain(self._history.family, self._history.attention, self._dtype, _key(inputs), _frozen(call))
        found = _generate(self._model, inputs, call, {CACHE: cache, "do_sample": False})
        _compare(-1, Step(call, inputs, None, 0, expected), inputs, found, self._same)


def _compare(number: int, step: Step, inputs: dict[str, torch.Tensor], found: Any, same: float) -> None:
    """Tokens and logits of a call beside those of plain `generate()`."""
    if step.call.within == "autocast":
        return
    expected, at = step.expected, f"call {number}"
    right = expected["sequences"][:, step.inputs["input_ids"].shape[1] :]
    other = found["sequences"][:, inputs["input_ids"].shape[1] :]
    beams = step.call.options.get("num_beams", 1) > 1
    _compare_hidden(step, inputs, found, at, same)
    own_draft = step.call.options.get("draft") in OWN_DRAFTS
    logits = list(zip(expected["logits"] or (), found.get("logits") or (), strict=False))
    going = torch.ones(len(logits[0][0]) if logits else len(right), dtype=torch.bool)  # rows that have not parted
    parted = False
    for i, (ours, theirs) in enumerate((b, a) for a, b in logits):
        off = _apart(theirs, ours)
        if bool((off[going] > same).any()):
            raise Wrong("answer", f"{at}: token {i} is off by {float(off[going].max()):.2g} standard deviations")
        if beams:
            break
        if i < right.shape[1] and i < other.shape[1]:
            unlike = (right[:, i] != other[:, i]) & going
            if unlike.any():
                # Whoever passes new ids alone has penalties for these alone, with plain generate(), too.
                if not own_draft and step.call.options.get("do_sample") and not _penalized(step):
                    raise Wrong("answer", f"{at}: another token {i} was drawn, from equal logits")
                best = theirs[unlike].topk(2).values
                if bool(((best[:, 0] - best[:, 1]) > same * theirs[unlike].std(-1)).any()) and not _penalized(step):
                    raise Wrong("answer", f"{at}: {other.tolist()} instead of {right.tolist()}")
                going &= ~unlike
                parted = True
            if _trees(step.call):  # nothing is computed behind the end of a row
                going &= ~torch.isin(right[:, i], torch.tensor(step.call.options.get("eos_token_id", [])))
    if parted:
        raise _Parted
    if beams and right.shape == other.shape and not torch.equal(right, other):
        scores = [each.get("sequences_scores") for each in (expected, found)]
        if scores[0] is not None and bool(((scores[0] - scores[1]).abs() <= same).all()):
            raise _Parted
    if not torch.equal(right, other):
        raise Wrong("answer", f"{at}: {other.tolist()} instead of {right.tolist()}")


def _compare_hidden(step: Step, inputs: dict[str, torch.Tensor], found: Any, at: str, same: float) -> None:
    """Hidden states of all real tokens of a prompt, if the call has asked for them, and was given the whole prompt."""
    shown = [each.get("hidden_states") for each in (step.expected, found)]
    options, ids = step.call.options, inputs["input_ids"]
    if not all(shown) or ids.shape != step.inputs["input_ids"].shape or options.get("use_cache") is False:
        return
    if "prefill_chunk_size" in options:  # those of the last piece are returned, but with drafts
        return
    theirs, ours = (each[0] for each in shown)
    real = inputs["attention_mask"].bool()
    times = next(len(each) for each in theirs if each is not None) // len(real)
    real = real.repeat_interleave(times, dim=0)
    for number, (right, other) in enumerate(zip(theirs, ours, strict=True)):
        if (right is None) != (other is None) or (right is not None and right.shape != other.shape):
            raise Wrong("hidden states", f"{at}: of layer {number} there is another shape")
        if right is None or right.shape[1] != real.shape[1]:
            continue
        off = _apart(right[real].float(), other[real].float())
        if bool((off > 10 * same).any()):
            raise Wrong("hidden states", f"{at}: of layer {number} are off by {float(off.max()):.2g}")


def _trees(call: Call) -> bool:
    return str(call.options.get("draft")).endswith("trees")


def _penalized(step: Step) -> bool:
    return any("penalty" in name or "ngram" in name for name in step.call.options)


def _apart(expected: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """How far each row of logits is off, in standard deviations."""
    off = torch.where(expected == found, 0, (expected - found).abs()).nan_to_num(nan=float("inf")).amax(-1)
    both_nan = expected.isnan().any(-1) & found.isnan().any(-1)
    return torch.where(both_nan, 0, off / expected.std(-1).nan_to_num(1).clamp(min=1e-6))
