"""Names of the argument for a cache: `cache` since transformers 5.24, and `past_key_values` or `cache_params` before.

`generate()` and forwards of a model with our hooks take `cache` with each release. Releases since 5.24 take the names
before it by themselves, with a `FutureWarning`.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation.utils import ALL_CACHE_NAMES

from kvboost_hf.compat.forwards import forward_arguments
from kvboost_hf.compat.memo import remember

# What generate() and the outputs of models call it with the installed release.
CACHE: str = ALL_CACHE_NAMES[0]
_NEWEST = "cache"
_OLDER = ("past_key_values", "cache_params")
_NAMES = tuple(dict.fromkeys((CACHE, *_OLDER)))


def cache_argument(model: PreTrainedModel) -> str:
    """The argument of forward that takes a cache; empty if there is none."""
    return remember(model, cache_argument, lambda: _cache_argument(model))


def _cache_argument(model: PreTrainedModel) -> str:
    named = inspect.signature(model.forward).parameters  # before what it may pass on to another forward
    return next((name for each in (named, forward_arguments(model)) for name in _NAMES if name in each), "")


def cache_in(kwargs: Mapping[str, Any]) -> Any:
    """The cache among the arguments of generate() or of a forward, or None."""
    return next((kwargs[name] for name in _NAMES if kwargs.get(name) is not None), None)


def with_cache_by(name: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of generate() or of a forward, with a cache by `name` that was passed by another name.

    Before transformers 5.24, generate_batch() passes pages as `cache`, which are no `Cache`: they stay where they are.
    """
    if not name or name in kwargs:
        return kwargs
    others = _OLDER if name == _NEWEST else (_NEWEST,) if isinstance(kwargs.get(_NEWEST), Cache) else ()
    given = next((each for each in others if each in kwargs), None)
    return {name if each == given else each: value for each, value in kwargs.items()} if given else kwargs


def take_newest_name(model: PreTrainedModel) -> None:
    """Let `generate()` of the model's class take `cache` with releases before transformers 5.24, too."""
    kind: Any = type(model)
    generate = getattr(kind, "generate", None)
    if CACHE != _NEWEST and generate is not None and not hasattr(generate, "leaves_kv_alone"):
        kind.generate = _with_newest_name(generate)


def _with_newest_name(generate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(generate)
    def renamed(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        return generate(self, *args, **with_cache_by(cache_argument(self), kwargs))

    renamed.leaves_kv_alone = True  # type: ignore[attr-defined]  # read by the fingerprint
    return renamed
