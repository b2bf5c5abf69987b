"""Real text to make prompts of, which the package itself has, for `kvboost-hf demo`."""

from kvboost_hf.assets.texts import Count, prose, source

__all__ = ["Count", "prose", "source"]
