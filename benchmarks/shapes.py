"""Llamas with random weights, by the name of their shape, and the prompts that each is measured with.

`small` is large enough that computing dominates on a CPU, and far too small for a GPU; `8b` has the shape of
Llama 3.1 8B, and `tiny` is there to try a benchmark in seconds.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvboost_hf import ChunkStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is made, and measured.

    Args:
        sizes: The sizes of the configuration.
        dtype: The dtype of the weights.
        prompts: Their numbers of tokens.
        store_bytes: Budget of a store: all prompts have room in it.
    """

    sizes: dict[str, Any]
    dtype: torch.dtype
    prompts: tuple[int, ...]
    store_bytes: int = 4 * 2**30

    def describe(self, **sizes: Any) -> str:
        """In words, for a table, with sizes in place of its own."""
        layers, width = (self.sizes | sizes)["num_hidden_layers"], self.sizes["hidden_size"]
        return f"random Llama, {layers} layers of {width}, {str(self.dtype).removeprefix('torch.')}"

    def new_store(self, model: PreTrainedModel, **kwargs: Any) -> ChunkStore:
        """An empty store in host memory."""
        return ChunkStore(model, max_bytes=self.store_bytes, **kwargs)


def _sizes(vocabulary: int, layers: int, width: int, intermediate: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 16_384,
        "eos_token_id": None,
        "bos_token_id": 0,
        "pad_token_id": 0,
    }


_LONG = {
    "max_position_embeddings": 131_072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
}
SHAPES = {
    "tiny": Shape(sizes=_sizes(1024, 2, 128, 256, 4, 2), dtype=torch.float32, prompts=(384, 768)),
    "small": Shape(sizes=_sizes(1024, 8, 512, 1376, 8, 8), dtype=torch.float32, prompts=(2000,)),
    "8b": Shape(
        sizes=_sizes(128_256, 32, 4096, 14_336, 32, 8) | _LONG,
        dtype=torch.bfloat16,
        prompts=(8192, 32_768),
        store_bytes=16_000_000_000,
    ),
}


def make_model(device: str, shape: str = "small", **sizes: Any) -> PreTrainedModel:
    """A model in eval mode, drawn where it runs.

    Args:
        device: Where.
        shape: The shape of `SHAPES`.
        sizes: The sizes of the configuration, in place of those of the shape.
    """
    chosen = SHAPES[shape]
    with drawn(device, chosen.dtype):
        return LlamaForCausalLM(LlamaConfig(**chosen.sizes | sizes)).eval()


@contextmanager
def drawn(device: str, dtype: torch.dtype) -> Iterator[None]:
    """Models that are made within are drawn where they run, the same each time.

    Args:
        device: Where.
        dtype: The dtype of their weights.
    """
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)
