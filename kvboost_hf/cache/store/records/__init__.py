"""The chunks and states of one store, in host memory, on the device and in lower tiers."""
