"""Moved documents in a Qwen3-Next: K/V is turned to its new place, and states are joined. The package does neither.

Over a document, a layer of gated delta rule maps its state S to A S + B, where A and B depend on what the layer was
given there, and so on the other layers only.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
import transformers.models.qwen3_next.modeling_qwen3_next as qwen
from transformers import Cache, DynamicCache, PreTrainedModel

FIRST = (0, 4, 8, 16, 32)  # tokens of a document that are computed
Maps = list[tuple[torch.Tensor, torch.Tensor]]  # A and B of each layer of linear attention


@dataclass(frozen=True, slots=True)
class Seen:
    """A document without its first tokens, as it was computed somewhere."""

    kv: list[tuple[torch.Tensor, torch.Tensor]]  # of each layer of full attention, [1, heads, tokens, dim]
    at: int  # position of the first of these tokens
    maps: Maps
    convolutions: list[torch.Tensor]  # behind the document
    states: list[torch.Tensor]  # the same


@contextmanager
def _watched(calls: list[tuple[tuple[torch.Tensor, ...], dict[str, Any]]]) -> Iterator[None]:
    """Within it, the arguments of the chunked gated delta rule are noted."""
    rule = qwen.torch_chunk_gated_delta_rule

    def note(*args: torch.Tensor, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return rule(*args, **kwargs)

    with mock.patch.object(qwen, "torch_chunk_gated_delta_rule", note):
        yield


def _maps(calls: Sequence[tuple[tuple[torch.Tensor, ...], dict[str, Any]]]) -> Maps:
    """What each call does to a state: S becomes A S + B."""
    found: Maps = []
    for (query, key, value), kwargs in calls:
        heads, dim = value.shape[2], key.shape[-1]
        unit = torch.eye(dim).expand(1, heads, dim, dim).clone()
        nothing = value.new_zeros(*value.shape[:-1], dim)
        b = qwen.torch_chunk_gated_delta_rule(query, key, value, **{**kwargs, "initial_state": None})[1]
        a = qwen.torch_chunk_gated_delta_rule(query, key, nothing, **{**kwargs, "initial_state": unit})[1]
        found.append((a, b))
    return found


class Mover:
    """Puts documents that were computed elsewhere behind what a cache holds."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        kinds = model.config.layer_types
        self._linear = [idx for idx, kind in enumerate(kinds) if kind == "linear_attention"]
        self._full = [idx for idx, kind in enumerate(kinds) if kind != "linear_attention"]

    def run(self, ids: Sequence[int], cache: Cache) -> None:
        """Compute tokens behind what a cache holds."""
        self.model(input_ids=torch.tensor([list(ids)]), past_key_values=cache, use_cache=True, logits_to_keep=1)

    def see(self, ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Seen]:
        """What is kept of the documents of a prompt, by their number and how many first tokens are left out."""
        cuts = sorted({0, len(ids), *(cut for a, b in spans for cut in (b, *(a + k for k in FIRST if a + k < b)))})
        cache, after = DynamicCache(config=self.model.config), {}
        for start, stop in pairwise(cuts):
            calls: list[tuple[tuple[torch.Tensor, ...], dict[str, Any]]] = []
            with _watched(calls):
                self.run(ids[start:stop], cache)
            layers = [cache.layers[idx] for idx in self._linear]
            after[start] = (
                stop,
                _maps(calls),
                [layer.conv_states[0].clone() for layer in layers],
                [layer.recurrent_states[0].clone() for layer in layers],
            )
        found = {}
        for number, (start, end) in enumerate(spans):
            for first in FIRST:
                if start + first >= end:
                    continue
                at, maps, convolutions, states = after[start + first]
                while at < end:
                    at, later, convolutions, states = after[at]
                    maps = [(c @ a, c @ b + d) for (a, b), (c, d) in zip(maps, later, strict=True)]
                kv = [
                    tuple(t[:, :, start + first : end].clone() for t in (layer.keys, layer.values))
                    for layer in (cache.layers[idx] for idx in self._full)
                ]
                found[number, first] = Seen(kv, start + first, maps, convolutions, states)  # type: ignore[arg-type]
        return found

    def put(self, seen: Seen, at: int, cache: Cache, join: Callable[[torch.Tensor, int, Seen], torch.Tensor]) -> None:
        """Put a document into a cache of `at` columns, whose states become what `join` makes of them."""
        for (keys, values), idx in zip(seen.kv, self._full, strict=True):
            layer = cache.layers[idx]
            layer.keys = torch.cat([layer.keys, self._turned(keys, at - seen.at)], dim=2)
            layer.values = torch.cat([layer.values, values], dim=2)
        for number, idx in enumerate(self._linear):
            layer = cache.layers[idx]
            layer.recurrent_states[0] = join(layer.recurrent_states[0], number, seen).clone()
            layer.conv_states[0] = seen.convolutions[number].clone()

    def _turned(self, keys: torch.Tensor, shift: int) -> torch.Tensor:
        cos, sin = self.model.model.rotary_emb(keys, torch.tensor([[shift]]))
        turned, rest = keys.split([cos.shape[-1], keys.shape[-1] - cos.shape[-1]], dim=-1)
        return torch.cat([turned * cos + qwen.rotate_half(turned) * sin, rest], dim=-1)


JOINS: dict[str, Callable[[torch.Tensor, int, Seen], torch.Tensor]] = {
    "composed": lambda state, layer, seen: seen.maps[layer][0] @ state + seen.maps[layer][1],
    "as stored": lambda state, layer, seen: seen.states[layer],
    "left out": lambda state, layer, seen: state,
    "zeroed": lambda state, layer, seen: torch.zeros_like(state),
}
