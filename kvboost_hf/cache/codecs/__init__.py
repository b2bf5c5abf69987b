"""How the K/V of a chunk is stored: as it is, or in fewer bits."""
