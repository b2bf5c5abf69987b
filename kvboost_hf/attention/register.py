"""`attn_implementation="kvboost_fa2"`: what transformers calls."""
