"""Exact reuse."""

from benchmarks.leaderboard.method import Method
from kvboost_hf import ReusePolicy

METHOD = Method(
    source="ours; as prefix caching of vLLM and SGLang",
    about="Reuses K/V up to the first token that differs from an earlier prompt.",
    settings={"": ReusePolicy()},
)
