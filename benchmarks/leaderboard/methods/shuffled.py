"""Moved K/V, exchanged among the tokens of a chunk."""

from benchmarks.leaderboard.changes import damaged
from benchmarks.leaderboard.method import Method, once

METHOD = Method(
    source="a control",
    about="As `none`, with stored K/V exchanged among the tokens of a chunk: must be worst by far.",
    settings={"": once("none")},
    change=damaged("shuffled"),
    control=5,
)
