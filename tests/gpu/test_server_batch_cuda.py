"""Rows of the server's batch on a CUDA device: what they begin with stays where it is."""

import copy

import pytest
import torch
from transformers import DynamicCache

from kvboost_hf.attention import kernel_calls
from kvboost_hf.server.generation.batch import BatchKV
from kvboost_hf.server.generation.sharing import choose_attention, sharing_reason
from tests.attention import assert_within_budget
from tests.conftest import make_model, random_ids
from tests.gpu.device import DEVICE, ON_GPU, needs_gpu


@needs_gpu("on a host it takes another one")
def test_a_server_on_a_gpu_keeps_the_attention_of_its_model() -> None:
    model = make_model().to(DEVICE)
    own = model.config._attn_implementation
    choose_attention(model)
    assert model.config._attn_implementation == own


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_in_pieces_are_rows_alone(dtype: torch.dtype) -> None:
    model = make_model().to(DEVICE, dtype)
    exact = copy.deepcopy(model).double()  # of the same weights
    exact.set_attn_implementation("eager")
    model.set_attn_implementation("kvboost_fa2")
    assert sharing_reason(model) is None
    batch, shared = BatchKV(model, in_place=True), random_ids(150, 1).to(DEVICE)
    texts = [torch.cat([shared, random_ids(9 + 70 * seed, seed + 2).to(DEVICE)], 1) for seed in range(3)]
    texts.append(random_ids(20, 9).to(DEVICE))  # without a piece
    for ids in texts:
        cache = DynamicCache(config=model.config)
        model(ids, past_key_values=cache, use_cache=True)
        batch.join([(layer.keys, layer.values) for layer in cache.layers], ids[0].tolist())
    before = kernel_calls()
    for step in range(5):
        found = batch.step([step + 1] * len(texts))
        texts = [torch.cat([ids, torch.tensor([[step + 1]], device=DEVICE)], 1) for ids in texts]
        expected, truth = (torch.cat([each(ids).logits[:, -1] for ids in texts]) for each in (model, exact))
        assert_within_budget(found, truth.double(), expected, dtype)
    if ON_GPU:
        assert (kernel_calls() - before)["triton.attend_pieces"] == 5 * len(batch._layers)
