"""The exception tree of kvboost_hf.

Exception
├── ValueError                     a bad argument: value, constraint and remedy in the message
└── KVBoostError                   an operation that is not possible in the present state
    ├── CacheInUseError            a cache was passed to two calls at once
    ├── CacheModelMismatchError    a cache was passed to a model that it was not made for
    ├── InterruptedForwardError    a cache cannot continue, since an interrupted forward has spoilt its states
    ├── NonFiniteLogitsError       score() was given NaN by the model
    ├── RankError                  another of the processes that compute a model together has failed, or is gone
    ├── StreamingError             an operation needs all weights of a model whose layers are streamed
    ├── StoreClosedError           a store was used after close()
    └── StoreFullError             warm() was given more text than the byte budget can pin
"""


class KVBoostError(RuntimeError):
    """Base of all errors about states; bad arguments raise plain `ValueError`."""


class CacheInUseError(KVBoostError):
    """A `ChunkReuseCache` was used, or changed, while another call or another thread was using it."""


class CacheModelMismatchError(KVBoostError):
    """A `ChunkReuseCache` was passed to a model other than the one it was made for."""


class InterruptedForwardError(KVBoostError):
    """A `ChunkReuseCache` cannot continue, since an interrupted forward has spoilt its states."""


class NonFiniteLogitsError(KVBoostError):
    """`score` and `score_ids` cannot go on, since the model's logits are NaN or infinite."""


class RankError(KVBoostError):
    """Another of the processes that compute a model together (`tp_plan`) has failed, or is gone."""


class StreamingError(KVBoostError):
    """An operation needs all weights of a model whose layers are streamed."""


class StoreClosedError(KVBoostError):
    """A `ChunkStore` was used after `close()`."""


class StoreFullError(KVBoostError):
    """`ChunkStore.warm()` was given more text than the byte budget can hold pinned."""


def how_to_install(extra: str) -> str:
    """The command that installs the packages of an extra. The package is not on PyPI yet."""
    return f"pip install '.[{extra}]' in a clone of kvboost_hf"
