"""Choosing tokens on a CUDA device: as generate() does, with one wait for all rows."""

import warnings
from typing import Any

import torch

from tests.conftest import VOCAB, make_model, random_ids
from tests.gpu.device import DEVICE, ON_GPU
from tests.internals.server import Sampler, SamplingOptions, choose_rows

OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": 3, "repetition_penalty": 1.2},
    {"logprobs": 3, "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {5: 2.0}},
]


def _samplers() -> list[Sampler]:
    return [Sampler(SamplingOptions(max_tokens=9, **options), [1, 2, 3]) for options in OPTIONS]


def test_one_wait_for_all_rows() -> None:
    samplers = _samplers()
    logits = torch.randn(len(samplers), VOCAB, device=DEVICE)
    choose_rows(samplers, logits)
    with warnings.catch_warnings(record=True) as waits:  # switching the mode on warns, too
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            choose_rows(samplers, logits)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len([wait for wait in waits if "called a synchronizing" in str(wait.message)]) == ON_GPU


def test_rows_together_are_rows_alone() -> None:
    steps = torch.randn(10, len(OPTIONS), VOCAB, device=DEVICE, dtype=torch.bfloat16) * 4
    together, alone = _samplers(), _samplers()
    for logits in steps:
        assert choose_rows(together, logits) == [s.choose(row) for s, row in zip(alone, logits, strict=True)]


@torch.inference_mode()
def test_seeded_draws_are_those_of_generate() -> None:
    model, ids = make_model("llama").to(DEVICE), random_ids(12).to(DEVICE)
    model.generation_config.eos_token_id = None
    torch.manual_seed(7)
    expected = model.generate(ids, max_new_tokens=8, do_sample=True, temperature=0.7, top_k=20)[0].tolist()
    sampler = Sampler(SamplingOptions(max_tokens=8, temperature=0.7, top_k=20, seed=7), [])
    row = ids[0].tolist()
    for _ in range(8):
        row.append(sampler.choose(model(torch.tensor([row], device=DEVICE)).logits[0, -1])[0])
    assert row == expected
