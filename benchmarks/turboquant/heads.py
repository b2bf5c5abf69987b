"""Reads keys, values and queries of the layers of a model."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvboost_hf.cache.codecs import Codec, Role
from kvboost_hf.compat import LayerRotation, cache_argument, input_device, key_rotation

_NUM_QUERIES = 64  # of the last tokens
_CHUNK = 128  # tokens that a store encodes at once by default


@dataclass(frozen=True, slots=True, eq=False)
class LayerHeads:
    """One layer after a prompt.

    Args:
        keys: [kv_heads, tokens, head_dim], float32, as attention takes them.
        values: The same.
        queries: [kv_heads, queries, head_dim], of the last tokens: those of all heads that share keys, one after the
            other.
        positions: The row of `keys` that each query stands at, [queries].
        scale: The scale of the logits.
        rotation: How keys turn with their positions, or None.
    """

    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor
    positions: torch.Tensor
    scale: float
    rotation: LayerRotation | None

    def through(self, codec: Codec, role: Role) -> torch.Tensor:
        """Keys or values as a codec gives them back."""
        rotation = self.rotation if role == "keys" else None
        parts: list[torch.Tensor] = []
        for part in torch.split(self.keys if role == "keys" else self.values, _CHUNK, dim=1):
            planes = {name: plane[0] for name, plane in codec.encode(part[None], role, [rotation]).items()}
            heads, tokens, head_dim = part.shape
            parts.append(codec.decode(planes, (heads, tokens, head_dim), part.dtype, role, rotation))
        return torch.cat(parts, dim=1)


@torch.no_grad()
def read_heads(model: PreTrainedModel, ids: torch.Tensor) -> tuple[list[LayerHeads], bool]:
    """Run a prompt, ids [1, n].

    Returns:
        The layers that keep keys and values, and whether queries are the model's own. They are where it attends by
        PyTorch's `scaled_dot_product_attention`; else they are drawn at random, as long and as wide as the keys.

    Raises:
        ValueError: for a model none of whose layers keeps keys and values.
    """
    cache = DynamicCache(config=model.config)
    with _Queries() as seen:
        model(input_ids=ids.to(input_device(model)), use_cache=True, **{cache_argument(model): cache})
    rotations = key_rotation(model)
    kept = [
        (at, layer.keys[0].float(), layer.values[0].float())
        for at, layer in enumerate(cache.layers)
        if isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None
    ]
    if not kept:
        raise ValueError(f"`model` must keep keys and values, got {type(model).__name__}, none of whose layers does.")
    own = len(seen.queries) == len(kept)
    found: list[LayerHeads] = []
    for (at, keys, values), seen_here in zip(kept, seen.queries if own else [None] * len(kept), strict=True):
        query, scale = seen_here if seen_here is not None else (_drawn(keys), keys.shape[-1] ** -0.5)
        query = query[:, -min(_NUM_QUERIES, keys.shape[1]) :].float()  # a window keeps the last keys only
        positions = torch.arange(keys.shape[1] - query.shape[1], keys.shape[1], device=keys.device)
        sharing = len(query) // len(keys)
        rotation = rotations.layers[at] if not isinstance(rotations, str) else None
        queries = query.reshape(len(keys), -1, query.shape[-1])
        found.append(LayerHeads(keys, values, queries, positions.repeat(sharing), scale, rotation))
    return found, own


class _Queries(TorchFunctionMode):
    """Keeps the queries [heads, tokens, head_dim] of a forward, and the scale of their logits."""

    def __init__(self) -> None:
        super().__init__()
        self.queries: list[tuple[torch.Tensor, float]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            query = args[0] if args else kwargs["query"]
            self.queries.append((query[0], kwargs.get("scale") or query.shape[-1] ** -0.5))
        return func(*args, **kwargs)


def _drawn(keys: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(keys.shape, generator=generator).to(keys.device)
    return noise * keys.std(dim=1, keepdim=True) + keys.mean(dim=1, keepdim=True)
