"""The default repair, which ends with the first token."""

from benchmarks.leaderboard.method import Method, once

METHOD = Method(
    source="ours",
    about="The default choice, `cacheblend` for up to 8 layers and `query` for more, 15% but at most 64 tokens for "
    "each seam, and nothing after the first token.",
    settings={"": once("auto")},
)
