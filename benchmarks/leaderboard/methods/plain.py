"""Plain generate()."""

from benchmarks.leaderboard.method import Method

METHOD = Method(
    source="transformers",
    about="Computes every prompt whole, without a cache of earlier ones: what the others are compared with.",
    settings={"": None},
)
