"""Reads the calls of a model: the forward hook, its arguments, positions, media, and the token ids in a cache."""
