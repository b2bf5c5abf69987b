"""Random calls with a model's own heads: warm, they draft what they draft cold, and as much of it is accepted."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost_hf import (
    ChunkReuseCache,
    ChunkStore,
    ReusePolicy,
    attach,
    detach,
    last_cache,
    speculation_stats,
)
from tests.conftest import random_ids
from tests.fuzz.families import model_as
from tests.heads import KINDS, make_pair
from tests.internals.cache import ComputePace

CHUNK = 16
CALLS = 8
SEEDS = range(3)
POLICY = ReusePolicy(min_prefill_saving=0)
TEXTS = [random_ids(200, seed=70 + n) for n in range(2)]


@contextmanager
def changed(heads: Any, is_changed: bool) -> Iterator[None]:
    """With heads that draft something else."""
    tensors = [each for each in heads.parameters() if each.dim() > 1] if is_changed else []
    kept = [each.detach().clone() for each in tensors]
    with torch.no_grad():
        for each in tensors:
            each.add_(0.3 * each.flip(0))
    yield
    with torch.no_grad():
        for each, before in zip(tensors, kept, strict=True):
            each.copy_(before)


class Played:
    """Heads and a target in play.

    Args:
        seed: What is drawn follows from it.
        target: The model.
        heads: Those that draft for it.
        folder: Where a disk tier is, if there is one.
    """

    def __init__(self, seed: int, target: Any, heads: Any, folder: Path) -> None:
        self.draw, self.target, self.heads = random.Random(seed), target, heads
        self.folder = folder if self.draw.random() < 0.3 else None
        self.store = self.opened()
        self.cache = ChunkReuseCache(target, self.store, POLICY)
        self.lengths = [self.length() for _ in range(3)]
        self.warm = 0  # tokens that were not computed again

    def opened(self) -> ChunkStore:
        tiers = [f"disk:{self.folder}:100MB"] if self.folder is not None else []
        return ChunkStore(self.target, chunk_size=CHUNK, tiers=["ram:64MB", *tiers])

    def length(self) -> int:
        return CHUNK * self.draw.choice([2, 4, 6]) + self.draw.choice([-1, 0, 0, 1, 2, 7])

    def prompt(self, before: torch.Tensor | None) -> torch.Tensor:
        draw = self.draw
        if before is not None and draw.random() < 0.4:
            return torch.cat([before, TEXTS[1][:, : draw.choice([1, 2, CHUNK, 20])]], dim=1)
        head = draw.choice([*self.lengths, *self.lengths, 1, 2])
        other = TEXTS[1][:, 100 : 100 + draw.choice([0, 0, 1, 3, CHUNK])]
        return torch.cat([TEXTS[0][:, :head], other], dim=1)

    def disturb(self) -> None:
        """Do to the cache or its store what must change nothing."""
        event = self.draw.choice(["clear", "reopen", "fork", "crop", "reset", "evict", "store_all", *9 * ["nothing"]])
        if event == "clear":
            self.store.clear()
        elif event == "evict":
            self.store.max_bytes = max(int(self.store.stats()["bytes"]) // 2, 1)
            self.store.max_bytes = 64_000_000
        elif event == "reopen":
            self.store.close()
            self.store = self.opened()
            self.cache = ChunkReuseCache(self.target, self.store, POLICY)
        elif event == "fork":
            self.cache = self.cache.fork()
        elif event == "crop" and self.cache.get_seq_length() > 2:
            self.cache.crop(-2)
        elif event in ("reset", "store_all"):
            getattr(self.cache, event)()

    def answer(self, ids: torch.Tensor, new: int, given: dict[str, Any]) -> tuple[torch.Tensor, tuple[int, int, int]]:
        stats = speculation_stats(self.heads)
        before = stats.rounds, stats.drafted, stats.accepted
        found = self.target.generate(ids, do_sample=False, max_new_tokens=new, **given)
        after = stats.rounds, stats.drafted, stats.accepted
        return found, tuple(b - a for a, b in zip(before, after, strict=True))  # type: ignore[return-value]

    def call(self, before: torch.Tensor | None) -> torch.Tensor:
        draw = self.draw
        self.disturb()
        ids, new = self.prompt(before), draw.choice([1, 2, 6, 12])
        drafts: dict[str, Any] = {"assistant_model": self.heads}
        kind = draw.choice(["plain", "states", *5 * ["heads"]])
        given = drafts if kind == "heads" else {"output_hidden_states": -1} if kind == "states" else {}
        if draw.random() < 0.4:
            self.cache = ChunkReuseCache(self.target, self.store, POLICY)
        model_changed = ("in place", 1) if draw.random() < 0.15 else None
        with changed(self.heads, draw.random() < 0.15), model_as(self.target, model_changed):
            plain, _ = self.answer(ids, new, {})
            _, cold = self.answer(ids, new, given)
            if draw.random() < 0.3:
                attach(self.target, self.store, POLICY)
                found, warm = self.answer(ids, new, given)
                used = last_cache(self.target)
                detach(self.target)
            else:
                used = self.cache
                found, warm = self.answer(ids, new, {**given, "cache": used})
        self.warm += used.report.reused_tokens if used is not None else 0
        assert torch.equal(found, plain)
        assert warm == cold
        return plain


@pytest.mark.parametrize("kind", KINDS)
def test_random_calls_are_drafted_warm_as_cold(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Tiny models compute faster than anything is read.
    monkeypatch.setattr(ComputePace, "seconds_per_token", lambda self, model: 1.0)
    pair, warm = make_pair(kind, tmp_path / "heads"), 0
    for seed in SEEDS:
        played, before = Played(seed, *pair, tmp_path / f"tier{seed}"), None
        for _ in range(CALLS):
            before = played.call(before if before is None or before.shape[1] < 250 else None)
        warm += played.warm
    assert warm > 100
