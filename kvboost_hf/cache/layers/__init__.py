"""Layers that hold K/V or states in place of transformers' own."""
