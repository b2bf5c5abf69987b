"""Moved K/V as it is."""

from benchmarks.leaderboard.method import Method, once

METHOD = Method(
    source="Prompt Cache, Gim et al., 2023, https://arxiv.org/abs/2311.04934; here with keys rotated",
    about="Rotates the keys of moved K/V to their new positions, and computes none of it again.",
    settings={"": once("none")},
)
