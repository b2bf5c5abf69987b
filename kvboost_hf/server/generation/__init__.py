"""How tokens are generated: K/V of batches, sampling, drafts, and text from tokens."""
