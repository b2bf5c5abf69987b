"""K/V and states of chunks as the store keeps them: encoded in blocks, on the host or on a device."""
