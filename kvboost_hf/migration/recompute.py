"""`kvboost.cacheblend` and `kvboost.selective_recompute`: their settings, as a `ReusePolicy`."""

from dataclasses import dataclass
from typing import Any, NoReturn

from kvboost_hf.config import ReusePolicy
from kvboost_hf.fields import require_int

__all__ = ["CacheBlendRecompute", "SelectiveRecompute"]


@dataclass(frozen=True, slots=True)
class CacheBlendRecompute:
    """Repairs those moved tokens that differ most. `min_deviation` and `device` have no effect: the ratio decides."""

    recompute_ratio: float = 0.15
    min_deviation: float = 0.01
    device: str = "cpu"

    def __post_init__(self) -> None:
        _ = self.policy  # refuses what is no share

    @property
    def policy(self) -> ReusePolicy:
        """These settings for a `ChunkReuseCache` or a `KVBoost`."""
        return ReusePolicy(mode="blend", repair="cacheblend", recompute_ratio=self.recompute_ratio)

    def apply(self, assembled: Any, model: Any) -> NoReturn:
        """Raise TypeError: there are no assembled prompts here."""
        raise TypeError("A cache repairs chunks when generate() runs: ChunkReuseCache(model, policy=this.policy).")


@dataclass(frozen=True, slots=True)
class SelectiveRecompute:
    """Repairs `recompute_overlap` tokens behind each seam. The other settings have no effect."""

    recompute_overlap: int = 16
    skip_if_no_seams: bool = True
    device: str = "cpu"

    def __post_init__(self) -> None:
        require_int("recompute_overlap", self.recompute_overlap, least=0)

    @property
    def policy(self) -> ReusePolicy:
        """These settings for a `ChunkReuseCache` or a `KVBoost`."""
        return ReusePolicy(mode="blend", repair="selective", seam_tokens=self.recompute_overlap)

    apply = CacheBlendRecompute.apply
