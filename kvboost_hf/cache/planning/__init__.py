"""Decisions without tensors: where prompts are cut, what is a hit, what is evicted, what is computed again."""
