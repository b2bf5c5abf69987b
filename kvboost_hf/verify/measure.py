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
class AnswerLogits:
    """The output of one generate() call.

    Args:
        ids: New tokens.
        logits: From which they were chosen, [new tokens, vocab], float32, on the CPU.
        times: Seconds from the call to each new token, on the host; empty where nobody has taken them.
    """

    ids: list[int]
    logits: torch.Tensor
    times: tuple[float, ...] = ()


class _Clock(BaseStreamer):
    """Takes the times at which generate() hands out what."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def answer(
    model: PreTrainedModel, ids: torch.Tensor, max_new_tokens: int, cache: ChunkReuseCache | None = None
) -> AnswerLogits:
    """Greedy generate() for one prompt, ids [1, n]."""
    ids = ids.to(input_device(model))
    generate: Any = model.generate
    clock, began = _Clock(), time.perf_counter()
    out = generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=1,
        max_new_tokens=max_new_tokens,
        output_logits=True,
        return_dict_in_generate=True,
        streamer=clock,
        **({cache_argument(model): cache} if cache is not None else {}),
    )
    logits = torch.stack([step[0].float().cpu() for step in out.logits])
    times = tuple(at - began for at in clock.times[1:])  # the prompt is handed out first
    return AnswerLogits(out.sequences[0, ids.shape[1] :].tolist(), logits, times)


def compare(
    prompt: int, full: AnswerLogits, found: AnswerLogits, report: ReuseReport, coded_tokens: int = 0
) -> PromptResult:
    """Measure an answer against the plain one, up to and including the first token that differs.

    Up to there the contexts are the same, so that every difference is the arm's.

    Args:
        prompt: Which one it is, counted from 0.
        full: The answer of plain generate().
        found: The answer of the arm.
        report: What the arm reused for it.
        coded_tokens: Tokens of the prompt that were read as codes.
    """
    shared = min(len(full.ids), len(found.ids))
    parted = next((at for at in range(shared) if full.ids[at] != found.ids[at]), None)
    steps = shared if parted is None else parted + 1
    theirs, ours = full.logits[:steps], found.logits[:steps]
    p, q = theirs.double().log_softmax(-1), ours.double().log_softmax(-1)
    kl = torch.where(p.exp() > 0, p.exp() * (p - q), 0).sum(-1)
    gap = None
    if parted is not None:
        best, second = theirs[parted].topk(2).values.tolist()
        gap = (best - second) / (float(theirs[parted].std()) or 1.0)
    return PromptResult(
        prompt=prompt,
        # Never below 0 but for rounding. NaN stays.
        kl=tuple(0.0 if value < 0 else value for value in kl.tolist()),
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
) -> tuple[AnswerLogits, ChunkReuseCache, int]:
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
