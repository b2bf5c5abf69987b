"""A fixed number of tokens behind each seam."""

from benchmarks.leaderboard.method import Method, once

METHOD = Method(
    source="ours",
    about='Computes 16 tokens behind each seam again, however long the document is: `repair="selective"`.',
    settings={"16 tokens": once("selective")},
)
