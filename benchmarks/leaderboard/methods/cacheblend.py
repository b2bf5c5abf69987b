"""CacheBlend: the tokens whose values differ most."""

from benchmarks.leaderboard.method import Method, shares

METHOD = Method(
    source="CacheBlend, Yao et al., 2024, https://arxiv.org/abs/2405.16444",
    about="Computes two layers whole, and then the tokens whose values there are farthest from the stored ones: "
    '`repair="cacheblend"`.',
    settings=shares("cacheblend"),
)
