"""Maps names, arguments and flags of the kvboost package to those of this one; docs/migration.py writes its page."""

import sys
from collections.abc import Iterable
from typing import Any

from kvboost_hf.migration.table import TABLE, Entry

__all__ = ["TABLE", "Entry", "OldModules", "missing", "old_name", "refuse"]

_NAMES = {name: entry for entries in TABLE.values() for entry in entries for name in entry.names}
_MODULES = {name: entry for entry in TABLE["modules"] if entry.ours for name in entry.names}
_REFUSED = {
    section: {name: entry for entry in entries if entry.refused for name in entry.names}
    for section, entries in TABLE.items()
}


def refuse(section: str, given: Iterable[str]) -> None:
    """Raise for arguments that only the kvboost package has.

    Args:
        section: A section of the table, such as `"KVBoost"`, `"generate"` or `"server flags"`.
        given: Names of arguments, or flags.

    Raises:
        ValueError: for the first of them that the table refuses.

    Example:
        >>> refuse("generate", ["top_p"])
    """
    for name in given:
        if (entry := _REFUSED[section].get(name)) is not None:
            raise ValueError(f"`{name}` must be left out. {entry.text}")


def old_name(module: str, name: str) -> Any:
    """Look up a name of the kvboost package that a module does not have; for the module's `__getattr__`.

    Args:
        module: That was asked.
        name: What for.

    Returns:
        A name of the kvboost package that this one has, too, but elsewhere.

    Raises:
        ImportError: for one that it does not have, a module included: Python shows the text of no other error where
            `from kvboost_hf import ...` fails.
        AttributeError: for a name that kvboost does not have.
    """
    if any(name in entry.names for entry in TABLE["names"]):
        package = sys.modules["kvboost_hf"]
        if name in package.__all__ and module != package.__name__:
            return getattr(package, name)
        raise ImportError(missing(name, module), name=module)
    OldModules.find_spec(f"{module}.{name}")
    raise AttributeError(missing(name, module), name=name)


class OldModules:
    """The last finder of `sys.meta_path`: raises an error with a remedy for modules of the kvboost package."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Raise ModuleNotFoundError for a module that only the kvboost package has."""
        package, _, module = name.partition(".")
        entry = _MODULES.get(f"kvboost.{module}")
        if package == "kvboost_hf" and entry is not None:
            raise ModuleNotFoundError(f"There is no module {name}. {entry.text}", name=name)


def missing(name: str, module: str = "kvboost_hf") -> str:
    """The message for a name that a module does not have.

    Example:
        >>> missing("broadcast_kv")
        'kvboost_hf has no `broadcast_kv`. Rows share stored chunks by themselves.'
    """
    entry = _NAMES.get(name)
    return f"{module} has no `{name}`. {entry.text}" if entry is not None else f"{module} has no `{name}`."
