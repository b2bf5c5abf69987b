"""Repair of all moved tokens."""

from benchmarks.leaderboard.method import Method, once

METHOD = Method(
    source="ours",
    about="Finds moved K/V, and computes all of it again: shows that nothing else differs from plain.",
    settings={"": once("first_k", 1.0)},
)
