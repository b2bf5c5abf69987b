"""Finds the generate() call that a forward belongs to, reads its local variables, and tells when it has ended.

transformers tells a cache nothing of the call that uses it. Three questions can be answered only from the caller's
local variables. Are the ids the whole prompt, or only those that follow the cache, which is also allowed? Does a
forward belong to the call that armed the cache, or did that call fail before its first forward? And which outputs of a
forward does the call use? All depend on the names of variables in `GenerationMixin` (the same in 5.17, 5.23 and 5.24);
where these are missing, ids count as a whole prompt, and all outputs as used.

A cache learns of a generate() call when that begins, and never that it has ended: the configuration that the call has
made for itself is gone then. Where somebody still refers to that, as the traceback of an exception does, the stacks of
all threads tell.
"""

import _thread
import gc
import inspect
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from itertools import islice, product
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType
from typing import Any, NamedTuple

import torch
from transformers import GenerationMixin, PreTrainedModel
from transformers import UnbatchedClassifierFreeGuidanceLogitsProcessor as _Guidance

from kvboost_hf import forks
from kvboost_hf.compat.forwards import CACHE, cache_in
from kvboost_hf.compat.models import input_device
from kvboost_hf.errors import StoreClosedError

_log = logging.getLogger("kvboost_hf")
MAX_DEPTH = 40  # frames to look at
_YIELDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_TRIES = 100  # to read the stack of a thread that goes on
_COMPILED = ("cuda",)  # where a compiled step is known to save time
SHARED_KV = "return_shared_kv_states"  # asks for K/V of some layers, which an assistant of Gemma 4 reads
_MOMENT_S = 0.05  # in which a finalizer ends
# Settings of the precision of float32 numbers. PyTorch's older setting of them all, `get_float32_matmul_precision`,
# raises once one of these was set, and says nothing of convolutions.
_OF_FLOAT32 = (("cuda", "matmul"), ("mkldnn", "matmul"), ("mkldnn", "conv"), ("cuda", "conv"))
_FULL = ("none", "ieee")
# Their values by the names of the older setting, which fingerprints of stored K/V have.
_NAMED: dict[tuple[str, ...], str] = {
    (*each, "tf32"): name
    for name, on_gpus, on_cpus in (
        ("highest", _FULL, _FULL),
        ("high", ("tf32",), ("tf32", *_FULL)),
        ("medium", ("tf32",), ("bf16",)),
    )
    for each in product(on_gpus, on_cpus, _FULL)
}
# Whether sums of half-precision products may be rounded on their way, and what PyTorch says where nobody has set it.
_OF_SUMS = {
    torch._C._get_cublas_allow_fp16_reduced_precision_reduction: (True, (True, True)),
    torch._C._get_cublas_allow_bf16_reduced_precision_reduction: (True, (True, True)),
    torch._C._get_cublas_allow_fp16_accumulation: (False,),
    torch._C._get_cpu_allow_fp16_reduced_precision_reduction: (False,),  # type: ignore[attr-defined]
}
# What generate() may call to decode, and the code that runs forwards then.
_LAST_LOGITS = (GenerationMixin._sample, GenerationMixin._beam_search)  # they read no others
_LOOPS = (*_LAST_LOGITS, GenerationMixin._assisted_decoding)
_HOLDING = tuple(f"{__name__.partition('.')[0]}.{part}." for part in ("cache", "assisted"))
_CODE = {loop.__code__ for loop in (*_LOOPS, GenerationMixin._prefill)}


def generate_frame(frame: FrameType | None) -> FrameType | None:
    """The frame of the innermost generate() call around `frame`, or None."""
    for _ in range(MAX_DEPTH):
        if frame is None:
            return None
        code = frame.f_code
        if code.co_name == "generate" and is_generate(frame):
            return frame
        frame = frame.f_back
    return None


def is_generate(frame: FrameType) -> bool:
    """Whether a frame is that of a generate() call."""
    return frame.f_code.co_name == "generate" and "generation_config" in frame.f_code.co_varnames


class GenerateCall:
    """A generate() call under way.

    Args:
        frame: A frame inside the call.
    """

    def __init__(self, frame: FrameType) -> None:
        found = generate_frame(frame)
        variables = found.f_locals if found is not None else {}
        self._config = _weakly(variables.get("generation_config"))
        self.model: Any = variables.get("self")
        self.num_ids: int | None = variables.get("input_ids_length")
        self.max_length: int | None = getattr(variables.get("generation_config"), "max_length", None)
        self.uses_cache = bool(getattr(variables.get("generation_config"), "use_cache", True))
        # Prompt lookup may propose more tokens than are left to generate.
        self.candidates: int = getattr(variables.get("generation_config"), "prompt_lookup_num_tokens", None) or 0
        self._ids = variables.get("input_ids")
        self.rows: int | None = self._ids.shape[0] if isinstance(self._ids, torch.Tensor) else None
        self.compile_config: Any = getattr(variables.get("generation_config"), "compile_config", None)
        self.disables_compile = bool(getattr(variables.get("generation_config"), "disable_compile", False))
        self.samples = _samples(variables)
        self.streamer: Any = variables.get("streamer")
        self.loop: Any = variables.get("custom_generate")  # runs forwards in place of a loop of transformers
        self._arguments = _arguments(variables)
        self._prepared: dict[str, Any] = variables.get("model_kwargs", {})
        self.mask: torch.Tensor | None = self._prepared.get("attention_mask")
        # A mask of ones is dropped, and its length kept.
        noted = getattr(variables.get("generation_config"), "_mask_length", None)
        self.mask_columns: int | None = self.mask.shape[1] if self.mask is not None else noted

    @property
    def config(self) -> Any:
        """The configuration that the call has made for itself; None where the call was not found, or has ended."""
        return self._config() if self._config is not None else None

    def start_over(self, model: PreTrainedModel) -> None:
        """Replace the positions that generate() prepared for a filled cache with those of a whole prompt."""
        if self._prepared and isinstance(self._ids, torch.Tensor):
            positions = positions_from_start(model, self._ids, self._arguments, self._prepared)
            if positions is not None:
                self._prepared["position_ids"] = positions

    def follows(self, held: int) -> bool:
        """Whether generate() takes the ids for those that follow `held` columns: its mask is of another length."""
        if self.num_ids is None or self.mask_columns is None or held == 0:
            return False
        if self._prepared.get("inputs_embeds") is not None:  # always of the whole prompt, beside ids or alone
            return False
        return self.mask_columns != self.num_ids

    def fits(self, held: int) -> bool:
        """Whether a mask over `held` columns and the ids that follow them has as many columns as these."""
        return self.num_ids is not None and self.mask_columns == held + self.num_ids

    def compiles(self, model: PreTrainedModel) -> bool:
        """Whether decoding of a model is compiled at all for the call, given its device."""
        if getattr(self.compile_config, "_compile_all_devices", False):
            return True
        started = [kind for kind in _COMPILED if kind != "cuda" or torch.cuda.is_initialized()]  # type: ignore[no-untyped-call]
        return bool(started) and input_device(model).type in started

    def is_at(self, frame: FrameType | None, ids: Any) -> bool:
        """Whether this call is the innermost one, of which `frame` is, or None; True where the call was not found.

        `ids` are those of the forward: a loop of `custom_generate` may return a generator that keeps nothing else of
        the call.
        """
        if self._config is None:
            return True
        config = self._config()
        if config is None:
            both_known = isinstance(ids, torch.Tensor) and isinstance(self._ids, torch.Tensor)
            return self.loop is not None and both_known and ids.is_set_to(self._ids)
        # A loop of `custom_generate` that yields goes on when generate() has returned.
        frames = _frames_from(sys._getframe(1)) if frame is None else [frame]
        return any(each.f_locals.get("generation_config") is config for each in frames)


def calling() -> GenerateCall:
    """The generate() call that the caller of this function is part of."""
    return GenerateCall(sys._getframe(1))


def running_config() -> Any:
    """The configuration that the generate() call under way has made for itself, or None."""
    found = generate_frame(sys._getframe(1))
    return found.f_locals.get("generation_config") if found is not None else None


class _Garbage:
    """Is collected by nobody while the stacks of other threads are read.

    Python 3.11 collects as it makes the object of a frame, or the dict of its variables. A finalizer lets other
    threads go on, also out of that very frame: what lies in its place by then is read, or the process dies.
    """

    def __init__(self) -> None:
        self._lock = forks.rlock(torn=self._collect)

    @contextmanager
    def stays(self) -> Iterator[None]:
        with self._lock:
            collects = gc.isenabled()
            gc.disable()
            try:
                yield
            finally:
                if collects:
                    gc.enable()

    def _collect(self) -> None:
        gc.enable()


_garbage = _Garbage()


@_garbage.stays()
def is_under_way(config: Any, thread: int) -> bool:
    """Whether the generate() call that has made `config` for itself runs in `thread`, or is a loop that yields.

    It looks at stacks and referrers: for rare cases only.
    """
    frames = _frames_of(thread)
    if any(is_generate(frame) and frame.f_locals.get("generation_config") is config for frame in frames):
        return True
    suspended = (GeneratorType, CoroutineType, AsyncGeneratorType)
    owners = gc.get_referrers(config)
    owners += [owner for each in owners if type(each) is dict for owner in gc.get_referrers(each)]
    return any(isinstance(owner, suspended) for owner in owners)


@_garbage.stays()
def is_in_stock_loop(config: Any, thread: int) -> bool:
    """Whether the generate() call that has made `config` is in a loop of transformers in `thread`, not in its own."""
    inside = False
    for frame in _frames_of(thread):
        if not is_generate(frame):
            inside |= frame.f_code in _CODE
        elif frame.f_locals.get("generation_config") is config:
            return inside
        else:
            inside = False
    return False


@_garbage.stays()
def is_in_forward(cache: Any, thread: int) -> bool:
    """Whether `thread` runs a forward with `cache`."""
    for frame in _frames_of(thread):
        if frame.f_code is torch.nn.Module._call_impl.__code__:
            if any(cache is value for value in frame.f_locals.get("kwargs", {}).values()):
                return True
        elif frame.f_code is type(cache).before_forward.__code__ and frame.f_locals.get("self") is cache:
            return True
    return False


@_garbage.stays()
def is_running(model: Any) -> bool:
    """Whether a thread runs the model, or a generate() call of it. It looks at all stacks: for rare cases only."""
    for thread in sys._current_frames():
        for frame in _frames_of(thread):
            if frame.f_code is torch.nn.Module._call_impl.__code__ or is_generate(frame):
                if frame.f_locals.get("self") is model:
                    return True
    return False


def _frames_of(thread: int) -> Iterable[FrameType]:
    """The frames of a thread, which may go on meanwhile: all that it is still in are among them.

    A generator that yields meanwhile does not tell any more who has called it: then they are looked up anew.
    """
    if thread == threading.get_ident():
        return _frames_from(sys._getframe(1))  # no list: it would hold the frame that holds it, and all K/V with that
    frames: list[FrameType] = []
    for _ in range(_TRIES):
        frames = list(_frames_from(sys._current_frames().get(thread)))
        if not frames or not frames[-1].f_code.co_flags & _YIELDS:
            break
    return frames


def _frames_from(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def encoded_from(encoded: Any) -> dict[str, Any] | None:
    """The arguments of the generate() call under way, if `encoded` are the features it has made of its images."""
    found = generate_frame(sys._getframe(1))
    if found is None:
        return None
    variables = found.f_locals
    if variables.get("model_kwargs", {}).get("mm_encoder_outputs") is not encoded:
        return None
    return _arguments(variables)


def in_generate() -> bool:
    """Whether some generate() call is under way."""
    return generate_frame(sys._getframe(1)) is not None


def in_prefill() -> bool:
    """Whether a generate() call is about to run its prompt."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(MAX_DEPTH):
        if frame is None or is_generate(frame):
            return False
        if frame.f_code.co_name == "_prefill":
            return True
        frame = frame.f_back
    return False


def outputs_read(ids: torch.Tensor, call: FrameType | None = None) -> frozenset[str] | None:
    """The `output_...` arguments of which transformers' generate() uses or returns what the forward over `ids` gives.

    None where somebody else may run that forward: a loop by hand, one of a model's own, or of `custom_generate`.

    Args:
        ids: The ids of the forward.
        call: The frame of the generate() call under way, or None to find it.
    """
    frame: FrameType | None = sys._getframe(1)
    call = generate_frame(frame) if call is None else call
    if call is None or call.f_locals.get("decoding_method") not in _LOOPS:
        return None
    while frame is not None and frame is not call and frame.f_code not in _CODE:
        frame = frame.f_back
    variables = frame.f_locals if frame is not None else {}
    config = variables.get("generation_config")
    if variables.get("model_inputs", {}).get("input_ids") is not ids or config is None:
        return None
    passes_on: Any = getattr(variables.get("self"), "_update_model_kwargs_for_generation", None)
    if getattr(passes_on, "__func__", None) is not GenerationMixin._update_model_kwargs_for_generation:
        return None  # the model's own may read anything
    piece = variables.get("input_chunk")
    if piece is not None and piece is not variables["input_chunks"][-1]:
        return frozenset()  # of a prompt in pieces, only the output of the last one is used
    drafting: Any = variables.get("candidate_generator")
    read = set(drafting.model_kwargs_overrides if getattr(drafting, "requires_model_outputs", False) else ())
    if SHARED_KV in read:  # an assistant that reads these reads the last token's hidden states, and no others
        read.remove("output_hidden_states")
    if config.return_dict_in_generate:
        read |= {name for name in ("output_hidden_states", "output_attentions") if getattr(config, name)}
    return frozenset(read)


def whole_of_piece(ids: Any) -> dict[str, Any] | None:
    """The ids and the mask of a prompt that generate() passes in pieces, if `ids` are the first of these, or None."""
    frame: FrameType | None = sys._getframe(1)
    call = generate_frame(frame)
    while frame is not None and frame is not call and frame.f_code is not GenerationMixin._prefill.__code__:
        frame = frame.f_back
    if call is None or frame is None or frame is call:
        return None
    found = frame.f_locals
    pieces = found.get("input_chunks")
    if pieces is None or found["input_chunk"] is not pieces[0] or found["model_inputs"].get("input_ids") is not ids:
        return None
    return {"input_ids": torch.cat(pieces, dim=-1), "attention_mask": found["attention_mask"]}


def cache_left_out(model: Any, ids: Any) -> Any:
    """The cache of the generate() call under way, if what prepares its forward over `ids` leaves it out, or None.

    Phi-3 and its kin do so, to have a whole text computed with the rotary frequencies of long ones.
    """
    frame: FrameType | None = sys._getframe(1)
    call = generate_frame(frame)
    while frame is not None and frame is not call and frame.f_code not in _CODE:
        frame = frame.f_back
    if call is None or frame is None or frame is call or frame.f_locals.get("self") is not model:
        return None
    given = frame.f_locals.get("model_inputs", {})
    return cache_in(frame.f_locals.get("model_kwargs", {})) if given.get("input_ids") is ids else None


def reads_last_logits(ids: torch.Tensor) -> bool:
    """Whether transformers' generate() reads nothing but the last logits of the forward over `ids`."""
    call = generate_frame(sys._getframe(1))
    decoding = call.f_locals.get("decoding_method") if call is not None else None
    return (decoding in _LAST_LOGITS and outputs_read(ids) is not None) or _guides(ids)


def _guides(ids: torch.Tensor) -> bool:
    """Whether the forward over `ids` is that of a negative prompt, by the processor of `guidance_scale`."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(MAX_DEPTH):
        if frame is None or is_generate(frame):
            return False
        if frame.f_code is _Guidance.get_unconditional_logits.__code__:
            is_stock = frame.f_back is not None and frame.f_back.f_code is _Guidance.__call__.__code__
            return is_stock and frame.f_locals.get("input_ids") is ids
        frame = frame.f_back
    return False


def may_draft() -> bool:
    """Whether the loop that runs forwards may check drafted tokens: somebody else's, or one of transformers."""
    call = generate_frame(sys._getframe(1))
    return call is None or call.f_locals.get("decoding_method") not in _LAST_LOGITS


def at_end(config: Any, act: Callable[[], object], *, streamer: Any = None) -> None:
    """Call `act` when a generate() call has ended: by its return, or before its streamer is told, whichever is first.

    As a rule, nobody refers to the call's configuration any more when it returns. `act` is not called where that shows
    in a collection of garbage in the middle of our work, nor at the end of the process, and it may be called twice:
    what uses the cache next has to do the same. What it raises is logged.

    Args:
        config: The configuration that the call has made for itself.
        act: A function that does not refer to the call's cache, which would live as long as the call.
        streamer: The streamer of the call, whose reader may begin the next one. One that takes no attributes stays as
            it is.
    """
    weakref.finalize(config, _has_returned, act).atexit = False
    if streamer is not None:
        weakref.finalize(config, _before_end(streamer, act)).atexit = False


def _has_returned(act: Callable[[], object]) -> None:
    try:
        _act(act, sys._getframe(1))
    except KeyboardInterrupt:  # a finalizer could only print it: it is raised a moment later
        threading.Timer(_MOMENT_S, _thread.interrupt_main).start()


def _before_end(streamer: Any, act: Callable[[], object]) -> Callable[[], None]:
    """Call `act` before a streamer is told that its call has ended; returns what undoes that."""
    own = getattr(streamer, "__dict__", {}).get("end")

    def end_after(*args: Any, **kwargs: Any) -> Any:
        undo()
        _act(act, sys._getframe(1))
        return end(*args, **kwargs)

    def undo() -> None:
        if vars(streamer).get("end") is end_after:
            del streamer.end
            if own is not None:
                streamer.end = own

    try:
        end, streamer.end = streamer.end, end_after
    except AttributeError:
        return lambda: None
    return undo


def _act(act: Callable[[], object], frame: FrameType | None) -> None:
    """Call `act`, unless a function of this package that may hold locks, or layers, is under way around `frame`."""
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith(_HOLDING):
            return
        frame = frame.f_back
    try:
        act()
    except StoreClosedError:  # then there is nothing to store it in
        pass
    except Exception:
        _log.exception("K/V of a prompt could not be stored. It is computed again when the prompt comes again.")


def _arguments(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of generate()."""
    arguments = dict(variables.get("kwargs", {}))
    if variables.get("inputs") is not None:
        arguments["input_ids"] = variables["inputs"]
    return arguments


def _samples(variables: Mapping[str, Any]) -> bool:
    """Whether transformers' own loop takes one token at a time from the logits, and returns nothing else of a step."""
    config = variables.get("generation_config")
    if config is None or variables.get("decoding_method") is not GenerationMixin._sample:
        return False
    if variables.get("model_kwargs", {}).get("inputs_embeds") is not None or getattr(config, "is_assistant", False):
        return False
    returned = config.return_dict_in_generate and (config.output_hidden_states or config.output_attentions)
    return not (returned or variables.get("generation_mode_kwargs", {}).get("synced_gpus"))


def _weakly(value: Any) -> "weakref.ref[Any] | None":
    return weakref.ref(value) if value is not None else None


def positions_from_start(
    model: PreTrainedModel, ids: torch.Tensor, arguments: dict[str, Any], prepared: dict[str, Any]
) -> torch.Tensor | None:
    """The positions that generate() prepares for a whole prompt on an empty cache.

    generate() prepares positions before the cache knows of the call, and a model that keeps shifts on itself takes the
    contents of the cache for the beginning of this prompt.

    Args:
        model: The model that generates.
        ids: The whole prompt, repeated for beams.
        arguments: What generate() was called with.
        prepared: The arguments it has prepared so far.

    Returns:
        The correct positions; None if those prepared are correct.
    """
    prepare = getattr(type(model), "_prepare_position_ids_for_generation", None)
    prepared_ids = prepared.get("position_ids")
    if (
        prepare in (None, GenerationMixin._prepare_position_ids_for_generation)
        or arguments.get("position_ids") is not None
        or prepared_ids is None
    ):
        return None
    given = arguments.get("input_ids")
    if not isinstance(given, torch.Tensor) or given.ndim != 2:
        return None
    repeats = ids.shape[0] // given.shape[0]
    mask = arguments.get("attention_mask")
    if mask is None:
        found = prepared.get("attention_mask")  # dropped where it is all ones
        mask = found[::repeats] if found is not None else torch.ones_like(given)
    # Not those prepared: images are arguments no longer once they are encoded, but positions depend on them.
    left_out = (CACHE, "past_key_values", "position_ids", "input_ids", "attention_mask")
    whole = {name: value for name, value in arguments.items() if name not in left_out}
    positions: torch.Tensor = prepare(model, given, {**whole, "attention_mask": mask})
    return positions.repeat_interleave(repeats, dim=positions.ndim - 2)


def running_streamer() -> Any:
    """The streamer of the generate() call under way, or None."""
    found = generate_frame(sys._getframe(1))
    return found.f_locals.get("streamer") if found is not None else None


def waits_for_peers() -> bool:
    """Whether the generate() call under way was told that GPUs decode in step."""
    found = generate_frame(sys._getframe(1))
    return found is not None and bool(found.f_locals.get("synced_gpus"))


class AssistedCall(NamedTuple):
    """An assisted decoding under way."""

    ids: torch.Tensor | None  # of the text so far, [1, tokens]
    processors: Any
    criteria: Any


def assisted_call() -> AssistedCall | None:
    """The assisted decoding under way, or None."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(MAX_DEPTH):
        if frame is None or is_generate(frame):
            return None
        if frame.f_code is GenerationMixin._assisted_decoding.__code__:
            processors, criteria = frame.f_locals.get("logits_processor"), frame.f_locals.get("stopping_criteria")
            return AssistedCall(frame.f_locals.get("input_ids"), processors or (), criteria or ())
        frame = frame.f_back
    return None


def give_back_tokenizer() -> None:
    """Let the generate() call that asks a loop of a user's own what it takes keep its tokenizer.

    transformers takes the tokenizer out of the arguments of generate() for its own loops, asks the user's loop for the
    names of further arguments, and drops what is not among them. Stop strings need it later.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(MAX_DEPTH):
        if frame is None:
            return
        if frame.f_code is GenerationMixin._extract_generation_mode_kwargs.__code__:
            taken, rest = frame.f_locals.get("generation_mode_kwargs"), frame.f_locals.get("kwargs")
            if taken and isinstance(rest, dict) and taken.get("tokenizer") is not None:
                rest.setdefault("tokenizer", taken["tokenizer"])
            return
        frame = frame.f_back


def autocast() -> Hashable:
    """The precision this thread computes with: of float32 numbers, of sums, and autocast by device type."""
    read = iter([read() for read in precision_readers()])
    of_float32, of_sums, rest = tuple(islice(read, len(_OF_FLOAT32))), list(islice(read, len(_OF_SUMS))), list(read)
    found: tuple[Hashable, ...] = (_NAMED.get(of_float32, of_float32),)
    for (reader, usual), allowed in zip(_OF_SUMS.items(), of_sums, strict=True):
        if allowed not in usual:
            found += ((reader.__name__, allowed),)
    for kind, is_enabled, dtype in zip(_device_kinds(), rest[::2], rest[1::2], strict=True):
        if is_enabled:
            found += ((kind, dtype),)
    return found


def under_autocast() -> bool:
    """Whether this thread computes under autocast, on any device."""
    return any(map(torch.is_autocast_enabled, _device_kinds()))


@cache
def precision_readers() -> tuple[Callable[[], Any], ...]:
    """What reads all that `autocast` tells, and the dtypes of an autocast that is not enabled: functions in C."""
    of_kind = (torch.is_autocast_enabled, torch.get_autocast_dtype)
    by_kind = [partial(read, kind) for kind in _device_kinds() for read in of_kind]
    return (*(partial(torch._C._get_fp32_precision_getter, *each) for each in _OF_FLOAT32), *_OF_SUMS, *by_kind)


@cache
def _device_kinds() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)
