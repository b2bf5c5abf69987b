"""The default with smaller steps behind the first token."""

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.leaderboard.method import Method
from kvboost_hf import ChunkStore, ReusePolicy
from kvboost_hf.cache.forward import repair_later


@contextmanager
def thirds(_store: ChunkStore) -> Iterator[None]:
    """Within it, a third of a prompt is computed again with each token, and not all of it at once."""
    before, repair_later._AT_ONCE = repair_later._AT_ONCE, 128
    try:
        yield
    finally:
        repair_later._AT_ONCE = before


METHOD = Method(
    source="ours",
    about="As `progressive`, but a third of the prompt is computed again with each of the three tokens that follow "
    "the first one, however short the prompt is.",
    settings={
        "15%": ReusePolicy(mode="blend", progressive=True),
        "nothing at first": ReusePolicy(mode="blend", repair="none", progressive=True),
    },
    change=thirds,
)
