"""`--config`: takes the flags of a command from a TOML file."""

import argparse
import tomllib
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from kvboost_hf.cli.server_flags import REFUSED
from kvboost_hf.fields import setting
from kvboost_hf.old_names import refuse
from kvboost_hf.server.settings import require_closed

_CONFIG = "--config"
_KINDS: dict[Any, tuple[Any, str]] = {int: (int, "a whole number"), float: ((int, float), "a number")}
_TEXT = (str, int, float), "a text"  # of other flags; some take numbers, too, such as bits or bytes


@dataclass
class ConfigFlag:
    """The flag of a command whose flags a file may have; `apply_config` reads the file.

    Args:
        config: Take flags from this TOML file, by their names: `max-batch-size = 16`; those of the command line win.
    """

    config: Path | None = setting(None, metavar="FILE")


def apply_config(typed: argparse.Namespace, whole: argparse.ArgumentParser) -> None:
    """Make the values of the file of `--config` the defaults of its command; the command line is to be parsed again.

    Flags that only other commands with `--config` have are left out, so that all can read one file. `ValueError` for a
    file that cannot be read, has an unknown name or a wrong value, or has secrets and is open to other users.
    """
    path, parser = typed.config, typed.parser
    commands = next(action for action in whole._actions if isinstance(action, argparse._SubParsersAction)).choices
    own, known = _flags(parser), [_flags(each) for each in commands.values() if _CONFIG in each._option_string_actions]
    found: dict[str, Any] = {}
    for key, value in _read(path).items():
        name = key.replace("_", "-")
        action = own.get(name)
        if action is None:
            if any(name in flags for flags in known):
                continue
            nearest = get_close_matches(name, own, 1)
            hint = f"The nearest is `{nearest[0]}`." if nearest else "`--help` lists all."
            hint = f"Write flags without `[{key}]`." if isinstance(value, dict) else hint
            raise ValueError(f"{path}: `{key}` is no flag of this command. {hint}")
        if action.dest in found:
            raise ValueError(f"{path}: `{key}` is given twice, by two names of one flag. Leave out one of them.")
        try:
            found[action.dest] = _value(parser, action, value)
        except ValueError as error:
            raise ValueError(f"{path}: `{key}`: {error}") from error
        if _is_secret(action, value):
            require_closed(path, f"file {path}, which has `{key}`,")
    # A list on the command line replaces that of the file.
    typed_lists = {dest for dest, value in found.items() if isinstance(value, list) and getattr(typed, dest)}
    parser.set_defaults(**{dest: value for dest, value in found.items() if dest not in typed_lists})


def _flags(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """The flags of a parser by their long names, without those that say no to another one."""
    return {
        name.removeprefix("--"): action
        for name, action in parser._option_string_actions.items()
        if name.startswith("--") and not name.startswith("--no-") and action.dest not in ("help", "config")
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(
            f"`--config` must be a TOML file with a flag a line, such as `port = 9000`, got {path}: {error}."
        ) from error


def _value(parser: argparse.ArgumentParser, action: argparse.Action, value: object) -> Any:
    """The value of a flag, as the command line would give it, or `ValueError`."""
    if action.help == argparse.SUPPRESS:
        refuse(REFUSED, action.option_strings)
    if isinstance(action, argparse.BooleanOptionalAction | argparse._StoreTrueAction):
        if not isinstance(value, bool):
            raise ValueError(f"must be true or false, got {value!r}.")
        return value
    several = isinstance(action, argparse._AppendAction) or action.nargs == "+"
    values = value if several and isinstance(value, list) else [value]
    kinds, what = _KINDS.get(action.type, _TEXT)
    for each in values:
        if not isinstance(each, kinds) or isinstance(each, bool):
            raise ValueError(f"must be {what}{', or a list of them' if several else ''}, got {each!r}.")
    try:
        converted = [parser._get_value(action, str(each)) for each in values]
        for each in converted:
            parser._check_value(action, each)
    except argparse.ArgumentError as error:
        raise ValueError(f"{error.message}.") from error
    return converted if several else converted[0]


def _is_secret(action: argparse.Action, value: object) -> bool:
    """Whether a value has an API key, or the address of a tier a password."""
    return action.dest == "api_key" or (action.dest == "tiers" and "@" in str(value))
