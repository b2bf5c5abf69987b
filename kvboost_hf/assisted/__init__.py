"""Speculation: tokens proposed at little cost, and verified by the model in one forward."""
