"""A setting in one place: a field of a dataclass has its default, its bounds and its flag, and its docstring the text.

Checks, flags, `--help` and the page of flags are made of these. Nothing here imports torch.
"""

import argparse
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

_KEY = "kvboost_hf"
_ENTRY = re.compile(r"(\w+): (.*)")
_UNSET = re.compile(r"[.;] None (?:for|is|takes) (.*)$")  # how a docstring says what None means


@dataclass(frozen=True, slots=True)
class _Setting:
    group: str | None
    flag: str | None
    metavar: str | None
    help: str | None
    least: float | None
    above: float | None
    most: float | None
    below: float | None


def setting(
    default: Any = MISSING,
    *,
    group: str | None = None,
    flag: str | None = None,
    metavar: str | None = None,
    help: str | None = None,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> Any:
    """A field of a dataclass of settings.

    Args:
        default: The default; none for a field that must be given.
        group: The title under which `--help` shows its flag; None for a field without a flag.
        flag: The name of the flag without dashes; None for that of the field.
        metavar: The name of the flag's value in `--help`.
        help: The text of the flag; None for that of the docstring.
        least: The value is this or more.
        above: The value is more than this.
        most: The value is this or less.
        below: The value is less than this.
    """
    return field(default=default, metadata={_KEY: _Setting(group, flag, metavar, help, least, above, most, below)})


def check_bounds(settings: Any) -> None:
    """Check all fields of settings that have bounds; None is within them.

    Raises:
        ValueError: for a value out of its bounds.
    """
    kind: type = type(settings)
    for each, bounds in _settings(kind):
        value = getattr(settings, each.name)
        if value is None or _within(value, bounds):
            continue
        unset = _described(kind)[each.name][1] if each.default is None else None
        remedy = f" Pass None for {unset}." if unset else ""
        raise ValueError(f"`{each.name}` must be {_told(bounds)}, got {value}.{remedy}")


def add_flags(parser: argparse._ActionsContainer, kind: type, group: str) -> None:
    """Add the flags of all fields of a dataclass that are in a group.

    Args:
        parser: Takes them.
        kind: The dataclass.
        group: The title of the group.
    """
    types = get_type_hints(kind)
    for each, found in _settings(kind):
        if found.group == group:
            name = found.flag or each.name.replace("_", "-")
            parser.add_argument(f"--{name}", dest=each.name, **_options(kind, each, found, types[each.name]))


def given(kind: type, options: argparse.Namespace) -> dict[str, Any]:
    """The values of all fields of a dataclass that have flags, by name.

    Args:
        kind: The dataclass.
        options: The parsed flags.
    """
    found = {each.name: getattr(options, each.name) for each, of in _settings(kind) if of.group is not None}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def shared(kind: type, settings: Any) -> dict[str, Any]:
    """The values of settings that another dataclass has by the same names.

    Args:
        kind: The other dataclass.
        settings: The settings.
    """
    own = {each.name for each in fields(settings)}
    return {each.name: getattr(settings, each.name) for each in fields(kind) if each.name in own}


def _settings(kind: type) -> Iterator[tuple[Field[Any], _Setting]]:
    return ((each, each.metadata[_KEY]) for each in fields(kind) if _KEY in each.metadata)


def _within(value: Any, bounds: _Setting) -> bool:
    return (
        (bounds.least is None or value >= bounds.least)
        and (bounds.above is None or value > bounds.above)
        and (bounds.most is None or value <= bounds.most)
        and (bounds.below is None or value < bounds.below)
    )


def _told(bounds: _Setting) -> str:
    if bounds.above is not None:
        return "positive" if bounds.most is None else f"more than {bounds.above} and at most {bounds.most}"
    if bounds.most is not None:
        return f"from {bounds.least} to {bounds.most}"
    return (
        f"from {bounds.least} to less than {bounds.below}" if bounds.below is not None else f"{bounds.least} or more"
    )


def _options(kind: type, each: Field[Any], found: _Setting, annotation: Any) -> dict[str, Any]:
    """What `add_argument` is passed."""
    text, unset = _described(kind)[each.name]
    text = found.help or text
    if annotation is bool:
        return {"action": "store_true", "help": text}
    if get_origin(annotation) is tuple:
        return {"action": "append", "default": [], "metavar": found.metavar, "help": f"{text}; repeatable"}
    if get_origin(annotation) in (Union, UnionType):
        (annotation,) = (one for one in get_args(annotation) if one is not type(None))
    default = None if each.default is MISSING else each.default
    if found.help is None:
        text += f" (default: {unset if default is None else '%(default)s'})"
    typed = {} if annotation is str else {"type": annotation}
    return {**typed, "default": default, "metavar": found.metavar, "help": text}


@cache
def _described(kind: type) -> Mapping[str, tuple[str, str | None]]:
    """By field, what the docstring says of it as a flag's text, and what None means."""
    found: dict[str, tuple[str, str | None]] = {}
    _, _, entries = inspect.cleandoc(kind.__doc__ or "").partition("Args:\n")
    for entry in re.split(r"\n {4}(?=\w)", f"\n{entries.partition(chr(10) * 2)[0]}"):
        if (match := _ENTRY.fullmatch(" ".join(entry.split()))) is None:
            continue
        text = match[2].rstrip(".")
        unset = _UNSET.search(text)
        text = (text[: unset.start()] if unset else text).replace("`", "").replace("%", "%%")
        found[match[1]] = text[:1].lower() + text[1:], unset[1] if unset else None
    return found
