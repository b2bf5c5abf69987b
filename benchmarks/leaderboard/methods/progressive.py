"""The default: a repair before the first token, and all of the rest with the next ones."""

from benchmarks.leaderboard.method import Method
from kvboost_hf import ReusePolicy

METHOD = Method(
    source="ours",
    about='`ReusePolicy(mode="blend")`: as `auto`, and then all from the first moved token on is computed again, in '
    "order: 2,048 tokens with the second token, or in thirds with the next three where the prompt is longer.",
    settings={"the default": ReusePolicy(mode="blend"), "nothing at first": ReusePolicy(mode="blend", repair="none")},
)
