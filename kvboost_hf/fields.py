"""A setting in one place: a field of a dataclass has its default, its bounds and its flag, and its docstring the text.

Checks, flags, `--help` and the page of flags are made of these. Nothing here imports torch.
"""

import argparse
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

_KEY = "kvboost_hf"
_ENTRY = re.compile(r"(\w+): (.*)")
_UNSET = re.compile(r"[.;] None (?:for|is|takes) (.*)$")  # how a docstring says what None means
_KINDS: dict[Any, tuple[Any, str]] = {
    int: (int, "an int"),
    float: ((int, float), "a number"),
    bool: (bool, "True or False"),
}


@dataclass(frozen=True, slots=True)
class _Setting:
    groups: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    help: str | None = None
    parse: Callable[[str], Any] | None = None
    nargs: str | None = None
    choices: tuple[Any, ...] | None = None
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None


def setting(
    default: Any = MISSING,
    *,
    group: str | tuple[str, ...] = (),
    flag: str | tuple[str, ...] = (),
    metavar: str | None = None,
    help: str | None = None,
    parse: Callable[[str], Any] | None = None,
    nargs: str | None = None,
    choices: tuple[Any, ...] | None = None,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> Any:
    """A field of a dataclass of settings.

    Args:
        default: The default; none for a field that must be given.
        group: The title under which `--help` shows its flag, or several; none for a field that is a flag only where
            all fields of its dataclass are.
        flag: The name of the flag without dashes, or several; none for that of the field.
        metavar: The name of the flag's value in `--help`.
        help: The text of the flag; None for that of the docstring.
        parse: Makes the value of the flag's text, or raises ValueError; `bool` for a flag that is on or off, and None
            for what the type of the field says.
        nargs: How many values the flag takes, as argparse has it.
        choices: The values that the flag takes; None for those of the type of the field.
        least: The value is this or more.
        above: The value is more than this.
        most: The value is this or less.
        below: The value is less than this.
    """
    groups, flags = ((each,) if isinstance(each, str) else each for each in (group, flag))
    told = _Setting(groups, flags, metavar, help, parse, nargs, choices, least, above, most, below)
    return field(default=default, metadata={_KEY: told})


def same(kind: type, name: str, **flag: Any) -> Any:
    """A field with the default and the bounds of one of another dataclass, which alone spells them.

    Args:
        kind: The other dataclass.
        name: The name of its field.
        flag: What `setting` takes of the flag.
    """
    other = next(each for each in fields(kind) if each.name == name)
    told: _Setting = other.metadata.get(_KEY) or _Setting()
    bounds = {each: getattr(told, each) for each in ("least", "above", "most", "below")}
    return setting(other.default, **bounds, **flag)


def check_bounds(settings: Any) -> None:
    """Check the types, the choices and the bounds of all fields that `setting` made.

    Raises:
        ValueError: for a value of another type, one that is no choice, or one out of its bounds.
    """
    kind: type = type(settings)
    for each, bounds in _settings(kind):
        value, (annotation, optional) = getattr(settings, each.name), _annotation(each)
        if value is None and optional:
            continue
        if get_origin(annotation) is Literal and value not in get_args(annotation):
            raise ValueError(f"`{each.name}` must be one of {get_args(annotation)}, got {value!r}.")
        types, what = _KINDS.get(annotation, (object, ""))
        if not isinstance(value, types) or (isinstance(value, bool) and annotation in (int, float)):
            raise ValueError(f"`{each.name}` must be {what}, got {value!r}.")
        if _within(value, bounds):
            continue
        unset = _described(kind).get(each.name, ("", None))[1] if each.default is None else None
        remedy = f" Pass None for {unset}." if unset else ""
        raise ValueError(f"`{each.name}` must be {_told(bounds)}, got {value}.{remedy}")


def require_bool(name: str, value: object) -> None:
    """Refuse anything but True or False, as an argument that no dataclass has: a text would count as True.

    Raises:
        ValueError: for anything else.
    """
    if not isinstance(value, bool):
        raise ValueError(f"`{name}` must be True or False, got {value!r}.")


def require_int(name: str, value: object, *, least: int = 1) -> None:
    """Refuse anything but an int of `least` or more, as an argument that no dataclass has.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"`{name}` must be an int of {least} or more, got {value!r}.")


def add_flags(
    parser: argparse._ActionsContainer, kind: type, group: str | None = None, *, unset: bool = False
) -> dict[str, argparse.Action]:
    """Add flags for fields of a dataclass.

    Args:
        parser: Takes them.
        kind: The dataclass.
        group: The group whose fields are meant; None for all fields.
        unset: The default of all flags is None, so that it shows which were given.

    Returns:
        What the parser has for each field.
    """
    return {
        each.name: parser.add_argument(*(f"--{name}" for name in _flags(each, found)), **_options(kind, each, unset))
        for each, found in _settings(kind, group)
    }


def given(kind: type, options: argparse.Namespace, group: str | None = None) -> dict[str, Any]:
    """The values of the fields of a dataclass that have flags, by name.

    Args:
        kind: The dataclass.
        options: The parsed flags. Fields whose flags are not among them are left out.
        group: The group whose fields are meant; None for those of any group.
    """
    values = vars(options)
    found = {
        each.name: values[dest]
        for each, of in _settings(kind)
        if (group in of.groups if group is not None else of.groups)
        and (dest := _flags(each, of)[0].replace("-", "_")) in values
    }
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


def shared(kind: type, settings: Any) -> dict[str, Any]:
    """The values of settings that another dataclass has by the same names.

    Args:
        kind: The other dataclass.
        settings: The settings.
    """
    own = {each.name for each in fields(settings)}
    return {each.name: getattr(settings, each.name) for each in fields(kind) if each.name in own}


def _settings(kind: type, group: str | None = "") -> Iterator[tuple[Field[Any], _Setting]]:
    """The fields of a group, or those that `setting` made where it is empty; all fields where it is None."""
    for each in fields(kind):
        found = each.metadata.get(_KEY)
        if group is None:
            yield each, found or _Setting()
        elif found is not None and (not group or group in found.groups):
            yield each, found


def _flags(each: Field[Any], found: _Setting) -> tuple[str, ...]:
    return found.flags or (each.name.replace("_", "-"),)


def _annotation(each: Field[Any]) -> tuple[Any, bool]:
    """The type of a field without None, and whether None is allowed; several types count as none that is known."""
    if get_origin(each.type) not in (Union, UnionType):
        return each.type, False
    kinds = [one for one in get_args(each.type) if one is not type(None)]
    return kinds[0] if len(kinds) == 1 else None, type(None) in get_args(each.type)


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


def _options(kind: type, each: Field[Any], unset: bool) -> dict[str, Any]:
    """What `add_argument` is passed."""
    found: _Setting = each.metadata.get(_KEY) or _Setting()
    annotation, optional = _annotation(each)
    text, of_none = _described(kind).get(each.name, ("", None))
    several = get_origin(annotation) is tuple
    default = None if unset or each.default is MISSING else [] if each.default == () else each.default
    told: dict[str, Any] = {"default": default, "metavar": found.metavar, "help": found.help}
    if found.help is None:
        shown = of_none if each.default in (None, MISSING) else "yes" if each.default is True else each.default
        told["help"] = text + (f" (default: {shown})" if shown is not False and shown not in (None, (), "") else "")
        told["help"] = _on_the_command_line(kind, told["help"])
    parse = found.parse or (get_args(annotation)[0] if several else annotation)
    if parse is bool:
        del told["metavar"]
        return {**told, "action": argparse.BooleanOptionalAction if optional or default else "store_true"}
    if found.nargs is not None:
        told["nargs"] = found.nargs
    elif several:
        told |= {"action": "append", "help": f"{told['help']}; repeatable"}
    choices = found.choices or (get_args(parse) if get_origin(parse) is Literal else None)
    if choices is not None:
        told["choices"], parse = choices, found.parse or type(choices[-1])
    if parse is not str:
        told["type"] = parse if isinstance(parse, type) else _reading(parse)
    return told


def _on_the_command_line(kind: type, text: str) -> str:
    """A text of a docstring, with flags in place of the fields that have some."""
    flags = {each.name: _flags(each, of)[0] for each, of in _settings(kind) if of.groups}
    return re.sub(r"`([^`]*)`", lambda name: f"--{flags[name[1]]}" if name[1] in flags else name[1], text)


def _reading(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """A function that argparse calls for a text: its error is shown as it is."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read


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
        text = (text[: unset.start()] if unset else text).replace("%", "%%")
        found[match[1]] = text[:1].lower() + text[1:], unset[1] if unset else None
    return found
