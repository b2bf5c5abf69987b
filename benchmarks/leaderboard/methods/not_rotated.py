"""Moved K/V at the positions that it was stored for."""

from benchmarks.leaderboard.changes import keys_not_rotated
from benchmarks.leaderboard.method import Method, once

METHOD = Method(
    source="a control",
    about="As `none`, but keys keep the rotation of their old positions: what rotating them gains.",
    settings={"": once("none")},
    change=keys_not_rotated,
    control=0,
)
