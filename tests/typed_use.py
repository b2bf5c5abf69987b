"""Code as users write it, which mypy checks as strictly as theirs may be; nothing runs it.

A comment that ignores an error is an error where there is none: so those calls are known to be refused.
"""

from typing import assert_type

import torch
from transformers import PreTrainedModel

from kvboost_hf import (
    ChunkReuseCache,
    ChunkStore,
    KVQuantConfig,
    ReusePolicy,
    ReuseReport,
    attach,
    last_cache,
    score_ids,
)


def reuse(model: PreTrainedModel) -> float:
    """Caches over a store, and what they report."""
    store = ChunkStore(model, tiers=["ram:4GB"], codec=KVQuantConfig(key_bits=4, value_bits=4))
    cache = ChunkReuseCache(model, store, ReusePolicy(mode="blend", recompute_ratio=0.2), salt="tenant")
    assert_type(cache.report, ReuseReport)
    assert_type(cache.report.bypass_reason, str | None)
    assert_type(cache.fork(), ChunkReuseCache)
    assert_type(store.max_bytes, int)
    return cache.report.reuse_ratio


def refused(model: PreTrainedModel) -> None:
    """Wrong arguments are seen before anything runs."""
    ReusePolicy(mode="shuffle")  # type: ignore[arg-type]
    ChunkReuseCache("a name")  # type: ignore[arg-type]
    ChunkStore(model, 64)  # type: ignore[call-arg]
    assert ChunkReuseCache(model).report.reuse  # type: ignore[attr-defined]


def attached(model: PreTrainedModel, ids: torch.Tensor) -> int:
    """A model is attached, and its last cache asked."""
    assert_type(attach(model), PreTrainedModel)
    cache = last_cache(model)
    scores = score_ids(model, [(ids, [1, 2])])
    return len(scores) + (cache.report.reused_tokens if cache is not None else 0)
