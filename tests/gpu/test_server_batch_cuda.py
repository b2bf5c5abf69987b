"""Rows of the server's batch on a CUDA device: what they begin with stays where it is."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from tests.conftest import make_model, random_ids
from tests.gpu.device import DEVICE, ON_GPU, needs_gpu
from tests.internals.attention import kernel_calls
from tests.internals.server import BatchKV, choose_attention, sharing_reason


@needs_gpu("on a host it takes another one")
def test_a_server_on_a_gpu_keeps_the_attention_of_its_model() -> None:
    model = make_model().to(DEVICE)
    own = model.config._attn_implementation
    choose_attention(model)
    assert model.config._attn_implementation == own


@contextmanager
def rounding(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[None]:
    """A model in float64 rounds what its modules are given and return: what the dtype costs, whatever computes."""

    def rounded(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(rounded, x))
        return x.to(dtype).double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    leaves = [module for module in model.modules() if not list(module.children())]
    hooks = [leaf.register_forward_pre_hook(lambda _, given: rounded(given)) for leaf in leaves]
    hooks += [leaf.register_forward_hook(lambda _, given, found: rounded(found)) for leaf in leaves]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


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
        truth = torch.cat([exact(ids).logits[:, -1] for ids in texts])
        with rounding(exact, dtype):
            rounded = torch.cat([exact(ids).logits[:, -1] for ids in texts])
        off, usual = ((each.double() - truth).abs().max() for each in (found, rounded))
        # In float32 sums round, too: those of up to 96 products the root of that times as much as what they make.
        most = 4 * usual * (96**0.5 if dtype == torch.float32 else 1)
        assert off <= most, f"off by {off:.2e}, where roundings make {usual:.2e}"
        assert usual < truth.std() / 10, "another text might not be noticed"
    if ON_GPU:
        assert (kernel_calls() - before)["triton.attend_pieces"] == 5 * len(batch._layers)
