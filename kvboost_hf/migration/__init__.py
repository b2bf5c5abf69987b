"""Modules of the kvboost package, with its names and signatures, over the parts of this one.

`import kvboost_hf.kv_quantize` gives what `kvboost_hf.migration.kv_quantize` has, and so on: code that moves here
changes the name of the package. New code has no use for them.
"""
