"""Measures ways of serving the same prompts, those of other libraries beside them: `kvboost-hf bench`."""
