"""The OpenAI-compatible server: an asynchronous front, and one thread that runs the model."""
