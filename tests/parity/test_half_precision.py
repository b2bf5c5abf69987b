"""What half precision can promise: reuse parts from plain generate() where stock prefill_chunk_size may, too."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, check_model_compatibility
from tests.conftest import as_inputs, make_model, random_ids

PROMPTS, TOKENS = 40, 5
# Logits of a prompt in two parts are no further from those in one than this, in standard deviations of the logits, and
# so tokens part only where the two best logits are no further apart than twice as much.
TOLERANCE = {torch.bfloat16: 0.05, torch.float16: 0.00625}


def compare(model: PreTrainedModel, ids: torch.Tensor, plain: Any, **kwargs: Any) -> tuple[float, bool]:
    """The largest difference in logits up to the first token that differs, and whether there is one."""
    found = model.generate(
        **as_inputs(ids), max_new_tokens=TOKENS, output_logits=True, return_dict_in_generate=True, **kwargs
    )
    off = 0.0
    for at, (ours, theirs) in enumerate(zip(found.logits, plain.logits, strict=False), start=ids.shape[1]):
        deviation = float(theirs.float().std())
        off = max(off, float((ours.float() - theirs.float()).abs().max()) / deviation)
        if found.sequences[0, at] != plain.sequences[0, at]:
            best, second = theirs[0].float().topk(2).values.tolist()
            assert (best - second) / deviation <= 2 * TOLERANCE[model.dtype]
            return off, True
    return off, False


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_parts_only_at_ties(dtype: torch.dtype) -> None:
    model = make_model("llama").to(dtype)
    check_model_compatibility(model)
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=32))
    parted, off, shared = [0, 0], [0.0, 0.0], random_ids(64, seed=99)
    for seed in range(PROMPTS):
        ids = torch.cat([shared, random_ids(20 + seed, seed=seed)], dim=1)
        if seed % 2:
            cut = 64  # the beginning was seen
        else:
            cut = ids.shape[1] - 1  # all of it was
            model.generate(**as_inputs(ids), past_key_values=cache, max_new_tokens=1)
        plain = model.generate(
            **as_inputs(ids), max_new_tokens=TOKENS, output_logits=True, return_dict_in_generate=True
        )
        for way, kwargs in enumerate(({"past_key_values": cache}, {"prefill_chunk_size": cut})):
            found, differs = compare(model, ids, plain, **kwargs)  # type: ignore[arg-type]
            off[way], parted[way] = max(off[way], found), parted[way] + differs
        assert cache.report.reused_tokens >= cut
    assert max(off) <= TOLERANCE[dtype], off
    assert parted[0] <= parted[1] + 1, parted
