"""kvboost_hf: plain `model.generate()` that does not compute again what it has computed before."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kvboost_hf.old_names import OldModules, old_name

if TYPE_CHECKING:
    from kvboost_hf.public import *  # noqa: F403
    from kvboost_hf.public import __all__ as __all__

__version__ = "0.3.0"

if OldModules not in sys.meta_path:
    sys.meta_path.append(OldModules)

if not TYPE_CHECKING:
    try:
        from wrapt import when_imported
    except ImportError:  # wrapt only keeps this import short
        import_module("kvboost_hf.attention")
    else:
        # `compat` imports transformers, and the attention needs all of `compat`.
        @when_imported("kvboost_hf.compat")
        @when_imported("transformers.modeling_utils")
        def _register_attention(imported: ModuleType) -> ModuleType:
            if imported.__name__ == "kvboost_hf.compat" or "kvboost_hf.compat" not in sys.modules:
                import_module("kvboost_hf.attention")
            return imported

    def __getattr__(name: str) -> Any:
        """A public name, all of which are loaded now; or why there is none."""
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"{__name__} has no `{name}`.", name=name)
        if (Path(__file__).parent / name).is_dir() or Path(__file__).with_name(f"{name}.py").is_file():
            return import_module(f"{__name__}.{name}")
        public = import_module("kvboost_hf.public")
        loaded = {each: getattr(public, each) for each in public.__all__} | {"__all__": public.__all__}
        globals().update(loaded)
        return loaded[name] if name in loaded else old_name(__name__, name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
