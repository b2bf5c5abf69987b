"""A repair before the first token, and some of the rest in the forward of each next one."""

from benchmarks.leaderboard.method import Method
from kvboost_hf import ReusePolicy

METHOD = Method(
    source="ours",
    about='`ReusePolicy(mode="blend")`, which takes as many tokens along as a decoding step has room for: on a CPU '
    "none. Or so many with each token, in order from the first moved one on.",
    settings={
        "the default": ReusePolicy(mode="blend"),
        **{f"{count} a token": ReusePolicy(mode="blend", progressive=count) for count in (16, 64)},
    },
)
