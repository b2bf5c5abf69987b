"""`ChunkStore`: chunks of K/V in host memory, on a device and in lower tiers."""
