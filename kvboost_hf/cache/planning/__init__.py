"""Decides without tensors where prompts are cut, which chunks match, which are evicted and which tokens recomputed."""
