"""`kvboost.batch`: what prompts have in common, in whole chunks."""

from collections.abc import Sequence
from hashlib import sha256
from itertools import takewhile

import torch

from kvboost_hf.fields import require_int

__all__ = ["broadcast_kv", "find_common_chunk_prefix", "group_by_prefix"]


def find_common_chunk_prefix(all_token_ids: Sequence[Sequence[int]], chunk_size: int) -> int:
    """Tokens of the longest prefix of whole chunks that all prompts share."""
    require_int("chunk_size", chunk_size)
    shared = len(list(takewhile(lambda column: len(set(column)) == 1, zip(*all_token_ids, strict=False))))
    return shared // chunk_size * chunk_size


def broadcast_kv(
    kv: Sequence[tuple[torch.Tensor, torch.Tensor]], batch_size: int
) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """K/V [1, heads, tokens, head_dim] of each layer as [batch, heads, tokens, head_dim], without a copy."""
    require_int("batch_size", batch_size)
    return tuple((k.expand(batch_size, -1, -1, -1), v.expand(batch_size, -1, -1, -1)) for k, v in kv)


def group_by_prefix(
    prompts: Sequence[str], token_ids_list: Sequence[Sequence[int]], chunk_size: int, n_prefix_chunks: int = 3
) -> dict[str, list[int]]:
    """Indices of prompts whose first chunks, at most `n_prefix_chunks`, are the same, by a key for each group."""
    if len(prompts) != len(token_ids_list):
        raise ValueError(f"There are {len(prompts)} prompts, but the tokens of {len(token_ids_list)}.")
    require_int("chunk_size", chunk_size)
    require_int("n_prefix_chunks", n_prefix_chunks)
    groups: dict[str, list[int]] = {}
    for number, ids in enumerate(token_ids_list):
        whole = min(len(ids) // chunk_size, n_prefix_chunks) * chunk_size
        groups.setdefault(sha256(str(list(ids[:whole])).encode()).hexdigest(), []).append(number)
    return groups
