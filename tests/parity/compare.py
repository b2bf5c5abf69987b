"""Reuse against plain generate(): tokens, logits, and tokens that really went through the model."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from kvboost_hf import ChunkReuseCache
from tests.conftest import as_inputs


class Attended(TorchFunctionMode):
    """Counts the queries that reach attention, in all layers, wherever the weights are and whatever wraps them."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.queries += args[0].shape[0] * args[0].shape[2]
        return func(*args, **(kwargs or {}))


def same_as_plain(
    model: PreTrainedModel, cache: ChunkReuseCache, ids: torch.Tensor, *, caller: Any = None, atol: float = 2e-4
) -> int:
    """Assert that generate() with `cache` gives the tokens and logits of one without; returns the tokens reused.

    `caller` has the generate() that is called, for example a wrapper around `model`.
    """
    caller = model if caller is None else caller
    kwargs = {**as_inputs(ids), "max_new_tokens": 4, "output_logits": True, "return_dict_in_generate": True}
    plain = caller.generate(**kwargs)
    with Attended() as work:
        found = caller.generate(**kwargs, past_key_values=cache)
    assert torch.equal(found.sequences, plain.sequences)
    for ours, theirs in zip(found.logits, plain.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=atol)
    report = cache.report
    decoded = plain.sequences.shape[1] - ids.shape[1] - 1
    assert work.queries == (report.forwarded_tokens + decoded) * model.config.num_hidden_layers
    assert report.prompt_tokens == ids.numel() == report.reused_tokens + report.forwarded_tokens
    return report.reused_tokens
