"""Answers a prompt, and compares the logits with those of plain generate()."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from kvboost_hf.cache.planning.report import ReuseReport
from kvboost_hf.cache.reuse import ChunkReuseCache
from kvboost_hf.compat import cache_argument, difference, input_device
from kvboost_hf.verify.results import PromptResult


@dataclass(frozen=True, slots=True)
class Answer:
    """The output of one generate() call.

    Args:
        ids: New tokens.
        logits: From which they were chosen, [new tokens, vocab], float32, on the CPU.
    """

    ids: list[int]
    logits: torch.Tensor


def answer(
    model: PreTrainedModel, ids: torch.Tensor, max_new_tokens: int, cache: ChunkReuseCache | None = None
) -> Answer:
    """Greedy generate() for one prompt, ids [1, n]."""
    ids = ids.to(input_device(model))
    generate: Any = model.generate
    out = generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=1,
        max_new_tokens=max_new_tokens,
        output_logits=True,
        return_dict_in_generate=True,
        **({cache_argument(model): cache} if cache is not None else {}),
    )
    logits = torch.stack([step[0].float().cpu() for step in out.logits])
    return Answer(out.sequences[0, ids.shape[1] :].tolist(), logits)


def compare(prompt: int, full: Answer, found: Answer, report: ReuseReport, coded_tokens: int = 0) -> PromptResult:
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
    )
