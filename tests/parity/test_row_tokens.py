"""A report tells what was reused for each row of a batch."""

import pytest
import torch

from kvboost_hf import ChunkReuseCache, ChunkStore, ReusePolicy
from tests.conftest import as_inputs, counted, left_pad, make_model, random_ids

BASE, OTHER = random_ids(200, seed=1), random_ids(200, seed=2)
BLEND = ReusePolicy(mode="blend", repair="first_k", sink_tokens=0, min_prefill_saving=0)


def test_rows_that_have_different_prefixes_stored() -> None:
    model = make_model()
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=16), ReusePolicy(min_prefill_saving=0))
    for ids in (BASE[:, :96], OTHER[:, :32]):
        model.generate(**as_inputs(ids), past_key_values=cache, max_new_tokens=1)
    rows = [BASE[:, :120], OTHER[:, :120], random_ids(120, seed=3)]
    with counted(model) as work:
        model.generate(**left_pad(*rows), past_key_values=cache, max_new_tokens=1)
    report = cache.report
    assert report.row_tokens == (96, 32, 0)
    assert sum(report.row_tokens) == report.reused_tokens
    assert work.tokens >= report.forwarded_tokens == 360 - 128


def test_a_row_whose_prefix_begins_in_the_padding_of_another() -> None:
    model = make_model()
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=16), ReusePolicy(min_prefill_saving=0))
    model.generate(**as_inputs(BASE[:, :64]), past_key_values=cache, max_new_tokens=1)
    other = torch.cat([BASE[:, :64], OTHER[:, :6]], dim=1)
    model.generate(**left_pad(BASE[:, :180], other), past_key_values=cache, max_new_tokens=1)
    assert cache.report.row_tokens == (64, 64)
    assert cache.report.reused_tokens == 128


@pytest.mark.parametrize("policy", [ReusePolicy(), BLEND], ids=["exact", "blend"])
def test_rows_add_up(policy: ReusePolicy) -> None:
    model = make_model()
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=16), policy)
    prompts = [
        as_inputs(BASE[:, :150]),
        as_inputs(torch.cat([OTHER[:, :20], BASE[:, 32:150]], dim=1)),
        left_pad(torch.cat([OTHER[:, :30], BASE[:, 48:150]], dim=1), BASE[:, :160]),
        as_inputs(BASE[:, :170]),
    ]
    for inputs in prompts:
        model.generate(**inputs, past_key_values=cache, max_new_tokens=2)
        assert sum(cache.report.row_tokens) == cache.report.reused_tokens
        assert len(cache.report.row_tokens) == len(inputs["input_ids"])
        assert bool(cache.report.moved_tokens) <= (policy.mode == "blend")


def test_chunks_that_were_moved_count_for_their_row() -> None:
    model = make_model()
    cache = ChunkReuseCache(model, ChunkStore(model, chunk_size=16), BLEND)
    model.generate(**as_inputs(BASE[:, :160]), past_key_values=cache, max_new_tokens=1)
    moved = torch.cat([OTHER[:, :20], BASE[:, 32:160]], dim=1)
    cache.reset()
    model.generate(**left_pad(moved, BASE[:, :148]), past_key_values=cache, max_new_tokens=1)
    report = cache.report
    assert report.row_tokens == (report.moved_tokens - report.recomputed_tokens, report.exact_tokens)
    assert min(report.row_tokens) > 64
