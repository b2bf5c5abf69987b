"""EPIC's LegoLink: the first tokens of each document."""

from benchmarks.leaderboard.method import Method, shares

METHOD = Method(
    source="EPIC, Hu et al., 2024, https://arxiv.org/abs/2410.15332",
    about='Computes the first tokens behind each seam again, as many behind each: `repair="first_k"`.',
    settings=shares("first_k"),
)
