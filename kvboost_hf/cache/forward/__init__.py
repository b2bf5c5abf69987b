"""One forward: whether it can reuse K/V, how K/V gets into the layers, and what is recorded afterwards."""
