"""Measures plain generate() beside generate() with a ChunkReuseCache: `kvboost-hf demo`."""
