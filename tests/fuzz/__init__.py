"""Random histories of `generate()` calls on caches and attached models, each beside plain `generate()`.

    python -m tests.fuzz --seconds 60 [--seed N]

`draw.py` draws a `History`, `play.py` runs it and compares, `shrink.py` makes one that fails as small as it can. A
history is printed as Python that runs it again.
"""
