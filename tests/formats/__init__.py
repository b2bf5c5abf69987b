"""Tiny checkpoints in 4 bits, each written by its own tool, with the logits that the tool computes (`write.py`)."""
