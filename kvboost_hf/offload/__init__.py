"""Layer streaming: runs models that are larger than the memory of their device."""
