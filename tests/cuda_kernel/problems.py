"""What the CUDA kernel is asked: each kind of visibility, and sizes that do not fit tiles."""

from dataclasses import replace

import torch

from tests.attention import Problem

_HALF = Problem(dtype=torch.float16, head_dim=64)

PROBLEMS: dict[str, Problem] = {
    "suffix": _HALF,
    "square": replace(_HALF, queries=40),
    "tiles": replace(_HALF, queries=50, columns=97, batch=1),
    "groups": replace(_HALF, queries=9, heads=12, kv_heads=2),
    "no groups": replace(_HALF, heads=2, kv_heads=2),
    "not causal": replace(_HALF, causal=False),
    "window": replace(_HALF, queries=20, columns=130, batch=1, window=33),
    "window of one side": replace(_HALF, causal=False, window=9),
    "softcap": replace(_HALF, softcap=2.0),
    "padding": replace(_HALF, queries=40, padding=True),
    "sparse": replace(_HALF, columns=100, sparse=True),
    "sparse, window and padding": replace(_HALF, columns=100, sparse=True, window=20, padding=True),
    "tree": replace(_HALF, queries=12, tree=True),
    "tree of 64": replace(_HALF, queries=64, columns=70, batch=1, tree=True, padding=True),
    "tree and window": replace(_HALF, tree=True, window=16, sinks=True),
    "tree of 64 in a window": replace(_HALF, queries=64, columns=130, tree=True, sparse=True, window=50, softcap=3.0),
    "one node": replace(_HALF, queries=1, columns=33, tree=True, sinks=True),
    "mask": replace(_HALF, mask=True),
    "mask and softcap": replace(_HALF, mask=True, softcap=3.0, causal=False, padding=True),
    "sinks": replace(_HALF, sinks=True),
    "sinks of the unseeing": replace(_HALF, queries=40, padding=True, sinks=True),
    "one query": replace(_HALF, queries=1, columns=70),
    "splits": replace(_HALF, queries=1, columns=1100, batch=1, padding=True, sinks=True),
    "splits of a window": replace(_HALF, queries=3, columns=800, batch=1, window=300, softcap=5.0),
    "splits of a tree": replace(_HALF, queries=5, columns=600, batch=1, tree=True, mask=True),
    "tree of 64 in splits": replace(_HALF, queries=64, columns=600, batch=1, heads=2, kv_heads=1, tree=True),
    "one column": replace(_HALF, queries=1, columns=1),
    "head_dim 16": replace(_HALF, head_dim=16),
    "head_dim 96": replace(_HALF, head_dim=96, sinks=True),
    "head_dim 128": replace(_HALF, head_dim=128, window=30),
    "head_dim 256": replace(_HALF, head_dim=256, queries=18, padding=True),
}
