"""The default: a repair before the first token, and all of the rest with the next ones."""

from benchmarks.leaderboard.method import Method
from kvboost_hf import ReusePolicy

METHOD = Method(
    source="ours",
    about='`ReusePolicy(mode="blend")`: as `auto`, and then all moved tokens are computed again, in order, with the '
    "three tokens that follow the first one.",
    settings={"the default": ReusePolicy(mode="blend"), "nothing at first": ReusePolicy(mode="blend", repair="none")},
)
