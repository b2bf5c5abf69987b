"""Storage tiers below host memory: folders, servers and other file systems."""
