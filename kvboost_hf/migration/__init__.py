"""What each name, argument and flag of the kvboost package is here, or why there is none.

`python -m kvboost_hf.migration` prints it as a page.
"""

from collections.abc import Iterable

from kvboost_hf.migration.table import TABLE, Entry

__all__ = ["TABLE", "Entry", "missing", "refuse"]

_NAMES = {name: entry for entries in TABLE.values() for entry in entries for name in entry.names}
_REFUSED = {
    section: {name: entry for entry in entries if entry.refused for name in entry.names}
    for section, entries in TABLE.items()
}


def refuse(section: str, given: Iterable[str]) -> None:
    """Raise for arguments that only the kvboost package has.

    Args:
        section: Of the table: `"KVBoost"`, `"generate"` or `"server flags"`.
        given: Names of arguments, or flags.

    Raises:
        ValueError: for the first of them that the table refuses.

    Example:
        >>> refuse("generate", ["top_p"])
    """
    for name in given:
        if (entry := _REFUSED[section].get(name)) is not None:
            raise ValueError(f"`{name}` must be left out. {entry.text}")


def missing(name: str) -> str:
    """Why `kvboost_hf` has no such name.

    Example:
        >>> missing("broadcast_kv")
        'kvboost_hf has no `broadcast_kv`. Rows share stored chunks by themselves.'
    """
    entry = _NAMES.get(name)
    return f"kvboost_hf has no `{name}`. {entry.text}" if entry is not None else f"kvboost_hf has no `{name}`."
