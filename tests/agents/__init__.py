"""Coding agents from npm, run against the server with a model whose answers are scripted. `make agents` runs them."""
