"""Keys for all that K/V depends on besides tokens: weights, code, hooks and settings."""
