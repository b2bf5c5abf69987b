"""Fingerprints of models: all that K/V depends on besides tokens, such as weights, code, hooks and settings."""
