"""Models that are larger than the memory of their device: layers that come when their turn comes."""
