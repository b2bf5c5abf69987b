"""Backends, which copy the bytes of a layer into a slot, one for each type of device."""
