"""The exception tree of kvboost_hf.

Exception
├── ValueError                     a bad argument: value, constraint and remedy in the message
└── KVBoostError                   a state that the library refuses to work in
    ├── CacheModelMismatchError    a cache met a model that it was not made for
    ├── InterruptedForwardError    a text was to be continued whose states an interrupted forward has spoilt
    ├── StreamingError             a model whose layers are streamed was used in a way that needs all its weights
    ├── StoreClosedError           a store was used after close()
    └── StoreFullError             warm() was given more text than the byte budget can pin
"""


class KVBoostError(RuntimeError):
    """Base of all errors about states; bad arguments raise plain `ValueError`."""


class CacheModelMismatchError(KVBoostError):
    """A `ChunkReuseCache` was passed to a model other than the one it was made for."""


class InterruptedForwardError(KVBoostError):
    """A `ChunkReuseCache` was to go on from states that an interrupted forward has spoilt."""


class StreamingError(KVBoostError):
    """A model whose layers are streamed was used in a way that needs all its weights in it."""


class StoreClosedError(KVBoostError):
    """A `ChunkStore` was used after `close()`."""


class StoreFullError(KVBoostError):
    """`ChunkStore.warm()` was given more text than the byte budget can hold pinned."""
