"""Assisted generation: draft lengths that adapt to measured times, trees of drafts, and drafts from stored text."""
