"""Assisted generation: drafts that know what they cost, and reuse K/V, too."""
