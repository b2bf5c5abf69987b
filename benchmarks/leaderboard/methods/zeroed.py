"""Moved K/V, set to zero."""

from benchmarks.leaderboard.changes import damaged
from benchmarks.leaderboard.method import Method, once

METHOD = Method(
    source="a control",
    about="As `none`, with stored K/V set to zero: must be worst by far.",
    settings={"": once("none")},
    change=damaged("zeroed"),
    control=5,
)
