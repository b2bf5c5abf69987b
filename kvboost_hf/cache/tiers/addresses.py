"""stub"""

from collections.abc import Sequence

from kvboost_hf.cache.tiers.base import Tier


def read_tiers(tiers: Sequence[str | Tier], max_bytes: int | None) -> tuple[int, int, list[Tier]]:
    """stub"""
    return max_bytes or 4 * 2**30, 0, list(tiers)  # type: ignore[arg-type]
