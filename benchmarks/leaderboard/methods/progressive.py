"""A repair before the first token, and all of the rest before the next ones."""

from benchmarks.leaderboard.method import Method
from kvboost_hf import ReusePolicy

METHOD = Method(
    source="ours",
    about='`ReusePolicy(mode="blend", progressive=True)`: as `auto`, and then all from the first moved token on is '
    "computed again, in order: 2,048 tokens before the second token, or in thirds before the next three where the "
    "prompt is longer.",
    settings={
        "15% at first": ReusePolicy(mode="blend", progressive=True),
        "nothing at first": ReusePolicy(mode="blend", repair="none", progressive=True),
    },
)
