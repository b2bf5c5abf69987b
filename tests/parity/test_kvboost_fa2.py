"""Models with `attn_implementation="kvboost_fa2"` say what they say with eager attention."""

import pytest
import torch
from transformers import (
    DynamicCache,
    PreTrainedModel,
)

from kvboost_hf.attention import kernel_calls
from tests.conftest import left_pad, make_model, random_ids

MODELS = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gpt_oss", "phi", "gpt2", "deepseek_v3", "bloom"]


def both(name: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The same model with eager attention, and with ours."""
    eager, ours = (make_model(name) for _ in range(2))
    eager.set_attn_implementation("eager")
    ours.set_attn_implementation("kvboost_fa2")
    return eager, ours


def calls_within(before: dict[str, int]) -> dict[str, int]:
    return dict(kernel_calls() - before)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_tokens(name: str, cache: str) -> None:
    eager, ours = both(name)
    inputs = (
        left_pad(random_ids(37, 1), random_ids(50, 2), random_ids(12, 3))
        if name != "gpt2"
        else {"input_ids": random_ids(50, 2)}
    )
    given = {"max_new_tokens": 12, "do_sample": False}
    if cache == "static":
        given["cache_implementation"] = "static"
    before = kernel_calls()
    found = ours.generate(**inputs, **given)
    calls = calls_within(before)
    assert torch.equal(found, eager.generate(**inputs, **given))
    if name != "bloom":  # computes attention itself
        assert sum(calls.values()) == 12 * ours.config.num_hidden_layers, calls


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("padded", [False, True])
def test_logits_of_a_suffix(name: str, padded: bool) -> None:
    eager, ours = both(name)
    inputs = left_pad(random_ids(80, 1), random_ids(61, 2)) if padded else {"input_ids": random_ids(80, 1)}
    mask = inputs.get("attention_mask")
    found = []
    for model in (eager, ours):
        cache, steps = DynamicCache(config=model.config), []
        for start, stop in ((0, 50), (50, 51), (51, 80)):
            given = {"attention_mask": mask[:, :stop]} if mask is not None else {}
            ids = inputs["input_ids"][:, start:stop]
            with torch.no_grad():
                steps.append(model(ids, past_key_values=cache, **given).logits)
        logits = torch.cat(steps, dim=1)
        found.append(logits[mask.bool()] if mask is not None else logits)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=2e-4)
