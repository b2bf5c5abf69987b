"""Answers a prompt, from K/V in fewer bits too, and compares the logits with those of plain generate()."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from kvboost_hf.cache.codecs import Codec, Planes, Role
from kvboost_hf.cache.layers.quantized import QuantizedLayer
from kvboost_hf.cache.planning.report import ReuseReport
from kvboost_hf.cache.reuse import ChunkReuseCache
from kvboost_hf.cache.store.chunk_store import ChunkStore
from kvboost_hf.compat import LayerRotation, cache_argument, difference, input_device
from kvboost_hf.config import KVQuantConfig, ReusePolicy
from kvboost_hf.verify.results import PromptResult

DecodePlanes = Callable[
    [Mapping[str, torch.Tensor], tuple[int, ...], torch.dtype, Role, LayerRotation | None], torch.Tensor
]  # as `Codec.decode`


@dataclass(frozen=True, slots=True)
class Call:
    """One generate() call, under a clock."""

    ids: list[int]  # new tokens
    times: tuple[float, ...]  # seconds from the call to each new token, on the host
    total_s: float  # seconds from the call to its return
    # The logits from which tokens were chosen, [new tokens, vocab], float32, on the CPU; None for a call that
    # did not keep them.
    kept: torch.Tensor | None = None

    @property
    def ttft_ms(self) -> float:
        """Milliseconds to the first token; to the return where there was none."""
        return 1000 * (self.times[0] if self.times else self.total_s)

    @property
    def total_ms(self) -> float:
        """Milliseconds to the return."""
        return 1000 * self.total_s

    @property
    def logits(self) -> torch.Tensor:
        """The logits, of a call that kept them."""
        assert self.kept is not None
        return self.kept


class _Clock(BaseStreamer):
    """Takes the times at which generate() hands out tokens; the prompt is handed out first."""

    def __init__(self, clock: Callable[[], float], on_first: Callable[[], None]) -> None:
        self.times: list[float] = []
        self._clock, self._on_first = clock, on_first

    def put(self, value: torch.Tensor) -> None:
        self.times.append(self._clock())
        if len(self.times) == 2:
            self._on_first()

    def end(self) -> None:
        pass


def timed_generate(
    model: PreTrainedModel,
    ids: Sequence[int],
    max_new_tokens: int,
    on_first: Callable[[], None] = lambda: None,
    *,
    keep_logits: bool = False,
    clock: Callable[[], float] = time.perf_counter,
    **kwargs: Any,
) -> Call:
    """Greedy generate() under a clock that starts at the call.

    Args:
        model: The model.
        ids: The prompt.
        max_new_tokens: Length of the answer.
        on_first: Called when the first token is there.
        keep_logits: Whether to return logits, too.
        clock: Tells seconds.
        kwargs: For generate().
    """
    prompt = torch.tensor([list(ids)], device=input_device(model))
    streamer = _Clock(clock, on_first)
    generate: Any = model.generate
    start = clock()
    out = generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        streamer=streamer,
        **({"output_logits": True, "return_dict_in_generate": True} if keep_logits else {}),
        **kwargs,
    )
    answer = (out.sequences if keep_logits else out)[0, len(ids) :].tolist()
    total_s = clock() - start
    logits = torch.stack([step[0].float().cpu() for step in out.logits]) if keep_logits else None
    return Call(answer, tuple(at - start for at in streamer.times[1:]), total_s, logits)


def answer(
    model: PreTrainedModel, ids: torch.Tensor, max_new_tokens: int, cache: ChunkReuseCache | None = None
) -> Call:
    """Greedy generate() for one prompt, ids [1, n]."""
    kwargs: dict[str, Any] = {cache_argument(model): cache} if cache is not None else {}
    return timed_generate(model, ids[0].tolist(), max_new_tokens, keep_logits=True, num_beams=1, **kwargs)


def report_of(cache: ChunkReuseCache | None, ids: Sequence[int]) -> ReuseReport:
    """The report on a prompt; that of plain generate() without a cache."""
    return ReuseReport(prompt_tokens=len(ids), forwarded_tokens=len(ids)) if cache is None else cache.report


def first_difference(ids: Sequence[int], others: Sequence[int]) -> int | None:
    """The index of the first token that two answers do not share; None if one of them begins with the other."""
    return next((at for at, (one, other) in enumerate(zip(ids, others, strict=False)) if one != other), None)


def divergences(theirs: torch.Tensor, ours: torch.Tensor) -> tuple[float, ...]:
    """KL divergence, in nats, of each step's distribution from the plain one; both are logits [steps, vocab]."""
    p, q = theirs.double().log_softmax(-1), ours.double().log_softmax(-1)
    kl = torch.where(p.exp() > 0, p.exp() * (p - q), 0).sum(-1)
    return tuple(0.0 if value < 0 else value for value in kl.tolist())  # below 0 by rounding only; NaN stays


def compare(prompt: int, full: Call, found: Call, report: ReuseReport, coded_tokens: int = 0) -> PromptResult:
    """Measure an answer against the plain one, up to and including the first token that differs.

    Up to there the contexts are the same, so that every difference is the arm's.

    Args:
        prompt: Which one it is, counted from 0.
        full: The answer of plain generate().
        found: The answer of the arm.
        report: What the arm reused for it.
        coded_tokens: Tokens of the prompt that were read as codes.
    """
    shared, parted = min(len(full.ids), len(found.ids)), first_difference(full.ids, found.ids)
    steps = shared if parted is None else parted + 1
    theirs, ours = full.logits[:steps], found.logits[:steps]
    gap = None
    if parted is not None:
        best, second = theirs[parted].topk(2).values.tolist()
        gap = (best - second) / (float(theirs[parted].std()) or 1.0)
    return PromptResult(
        prompt=prompt,
        kl=divergences(theirs, ours),
        agreeing_steps=int((theirs.argmax(-1) == ours.argmax(-1)).sum()),
        first_divergence=parted,
        divergence_gap=gap,
        max_difference=max(
            (difference(a, b) for a, b in zip(ours, theirs, strict=True)), key=lambda d: (d != d, d), default=0.0
        ),
        prompt_tokens=report.prompt_tokens,
        reused_tokens=report.reused_tokens,
        forwarded_tokens=report.forwarded_tokens,
        moved_tokens=report.moved_tokens,
        recomputed_tokens=report.recomputed_tokens,
        bypass_reason=report.bypass_reason,
        moved_reason=report.moved_reason,
        coded_tokens=coded_tokens,
        first_token=found.times[0] / full.times[0] if found.times else 1.0,
        answer=found.times[shared - 1] / full.times[shared - 1] if found.times else 1.0,
    )


def answer_from_codes(
    model: PreTrainedModel,
    store: ChunkStore,
    live_quant: KVQuantConfig | None,
    ids: torch.Tensor,
    max_new_tokens: int,
) -> tuple[Call, ChunkReuseCache, int]:
    """Store a prompt, ids [1, n], and answer it with a new cache that reads it from the store.

    Args:
        model: Answers.
        store: With the codec in question, as a `WatchedCodec`, or with K/V as it is.
        live_quant: How both caches hold K/V, or None.
        ids: The prompt.
        max_new_tokens: At most so many.

    Returns:
        The answer, the cache that it came from, and how many tokens of the prompt were read as codes: decoded from
        the store, or held by the layers; with both, the fewer.
    """
    before = ChunkReuseCache(model, store, live_quant=live_quant)
    answer(model, ids, 1, before)
    before.reset()  # the tail is stored, too
    decoded = _num_decoded(store)
    cache = ChunkReuseCache(model, store, ReusePolicy(min_prefill_saving=0), live_quant=live_quant)
    found = answer(model, ids, max_new_tokens, cache)
    read = []
    if isinstance(store.codec, WatchedCodec):
        report = cache.report
        read.append(report.reused_tokens - report.tier_tokens["live"] if _num_decoded(store) > decoded else 0)
    if live_quant is not None:
        held = (layer.num_coded for layer in cache.layers if isinstance(layer, QuantizedLayer))
        read.append(min(max(held, default=0), ids.shape[1]))
    return found, cache, min(read)


def _num_decoded(store: ChunkStore) -> int:
    return store.codec.num_decoded if isinstance(store.codec, WatchedCodec) else 0


class WatchedCodec(Codec):
    """A codec that encodes as another one does, and counts how often it decodes.

    Args:
        codec: The other one.
        name: The name of this codec; None for the name of the codec that is watched.
        decode: Decodes in place of the other one.
    """

    lossless = False

    def __init__(self, codec: Codec, name: str | None = None, decode: DecodePlanes | None = None) -> None:
        self._codec, self.name = codec, codec.name if name is None else name
        self.sink_tokens = codec.sink_tokens
        self._decode = codec.decode if decode is None else decode
        self.num_decoded = 0

    def encode(self, x: torch.Tensor, role: Role, rotations: Sequence[LayerRotation | None]) -> Planes:
        return self._codec.encode(x, role, rotations)

    def decode(
        self,
        planes: Mapping[str, torch.Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        role: Role,
        rotation: LayerRotation | None,
    ) -> torch.Tensor:
        self.num_decoded += 1
        return self._decode(planes, shape, dtype, role, rotation)

    def nbytes(self, shape: tuple[int, int, int, int], dtype: torch.dtype, role: Role) -> int:
        return self._codec.nbytes(shape, dtype, role)
