"""Computes again, after the first token, what moved chunks have left: in order, until all K/V is exact.

    row     [ exact | again now | tainted … | the prompt's end | new tokens ]
                      ^ the first stale column

A column is exact if every column before it is. So each piece begins where the last one has ended, and what was chosen
by the repair is computed a second time. When no column is left, the row is stored under its history, as any other.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from kvboost_hf.cache.forward.moved import choose_columns
from kvboost_hf.cache.forward.moved_probe import needs_no_mask
from kvboost_hf.cache.forward.scatter import ScatterPass
from kvboost_hf.cache.layers.base import ReuseLayer
from kvboost_hf.cache.live.live_kv import LiveKV
from kvboost_hf.cache.planning.chunks import is_text
from kvboost_hf.compat import PrivateCache, input_device, run_model
from kvboost_hf.config import ReusePolicy

PIECE = 512  # columns at once where nobody waits
_TOKENS_FOR_A_SEAM = 1024  # documents of 800 tokens, and what stands between them
_AT_ONCE = 2048  # columns: with so many, the first token alone stands on repaired K/V, and all later ones on exact K/V
_TOKENS = 3  # with which all of a longer prompt is computed again: its mask has columns by columns


def may_repair(live: LiveKV, *, at_once: bool = False) -> bool:
    """Whether a cache holds tainted columns that can be computed again, and are to be: with later tokens, or now."""
    ledger = live.ledger
    return (
        ledger is not None
        and ledger.blended is not None
        and (at_once or ledger.progressive)
        and not ledger.unconfirmed
        and ledger.log.trusted
        and _holds_all(live.layers)
        and is_text(ledger.log.columns())  # images would have to be shown again
    )


def goes_on(policy: ReusePolicy, moved: int, seams: int) -> bool:
    """Whether what moved chunks have left is computed again with later tokens, where so many tokens have moved."""
    return policy.progressive if policy.progressive is not None else moved <= _TOKENS_FOR_A_SEAM * seams


def columns_per_token(live: LiveKV) -> int:
    """How many columns of each row to compute again with a new token: all, or a third of a long prompt."""
    assert live.ledger is not None
    return max(_AT_ONCE, math.ceil(live.ledger.log.length / _TOKENS))


@torch.no_grad()
def repair_more(live: LiveKV, model: PreTrainedModel, most: int) -> None:
    """Compute the next tainted columns again, at most `most` of each row.

    An interrupt leaves some layers with new K/V and others with old: the ledger still says that it is tainted.
    """
    ledger, layers = live.ledger, live.layers
    assert ledger is not None
    assert ledger.blended is not None
    ids = ledger.log.columns()
    wanted = ledger.blended.next_tainted(ids.shape[1], most)
    columns = choose_columns(list(wanted), list(np.ones_like(wanted)))
    cache = PrivateCache([layer.native for layer in layers])
    pads = ledger.log.pads.tolist()
    scatter = ScatterPass(model, cache, layers, columns, pads, unmasked=needs_no_mask(model))
    cache.take = scatter.update
    try:
        given = scatter.arguments(torch.from_numpy(ids).to(input_device(model)), 0)
        run_model(model, cache=cache, **given)
    finally:
        scatter.close()
        cache.take = None
    live.tally.repaired += int((columns >= ledger.log.pads[:, None]).sum())
    live.repaired(wanted)


def _holds_all(layers: Sequence[ReuseLayer]) -> bool:
    """Whether no layer has let go of columns, as windows do."""
    return not any(layer.first for layer in layers)
