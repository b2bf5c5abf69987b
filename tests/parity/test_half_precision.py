"""What half precision can promise: reuse parts from plain generate() where stock prefill_chunk_size may, too."""

import pytest
import torch
from transformers import PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, check_model_compatibility
from tests.conftest import as_inputs, make_model, random_ids

PROMPTS, TOKENS = 40, 8
# Where two ways part, the two best logits of plain generate() are no further apart than this, in standard deviations
# of its logits: about three roundings of a number of that size through two layers.
TIES = {torch.bfloat16: 0.1, torch.float16: 0.0125}


def first_difference(found: torch.Tensor, plain: torch.Tensor) -> int | None:
    differ = (found != plain).nonzero()
    return int(differ[0]) if len(differ) else None


def gap(logits: torch.Tensor) -> float:
    best, second = logits.float().topk(2).values.tolist()
    return (best - second) / float(logits.float().std())


@pytest.mark.parametrize("dtype", TIES)
def test_parts_only_at_ties(dtype: torch.dtype) -> None:
    model: PreTrainedModel = make_model("llama").to(dtype)
    check_model_compatibility(model)
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=32))
    parted = {"reuse": 0, "prefill_chunk_size": 0}
    shared = random_ids(64, seed=99)
    for seed in range(PROMPTS):
        ids = torch.cat([shared, random_ids(20 + seed, seed=seed)], dim=1)
        plain = model.generate(
            **as_inputs(ids), max_new_tokens=TOKENS, output_logits=True, return_dict_in_generate=True
        )
        ways = {"reuse": {"past_key_values": cache}, "prefill_chunk_size": {"prefill_chunk_size": 64}}
        for way, kwargs in ways.items():
            found = model.generate(**as_inputs(ids), max_new_tokens=TOKENS, **kwargs)
            length = min(found.shape[1], plain.sequences.shape[1])
            at = first_difference(found[0, ids.shape[1] : length], plain.sequences[0, ids.shape[1] : length])
            if at is not None:
                parted[way] += 1
                assert gap(plain.logits[at][0]) < TIES[dtype], (way, seed)
        assert cache.report.reused_tokens >= (64 if seed else 0)
    assert parted["reuse"] <= parted["prefill_chunk_size"] + 2, parted
