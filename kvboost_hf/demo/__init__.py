"""The demonstration behind `kvboost-hf demo`: plain generate() beside generate() with a ChunkReuseCache."""
