"""Attention of the question, and distance from the seam."""

from benchmarks.leaderboard.method import Method, shares

METHOD = Method(
    source="ours",
    about="Computes the tokens again that the question attends to, each counted the less the farther it is from its "
    'seam: `repair="query"`.',
    settings=shares(),
)
