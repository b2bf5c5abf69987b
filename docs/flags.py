"""The page of all flags, from the parser: `python docs/flags.py > docs/flags.md`."""

import argparse
import re
import sys
from collections.abc import Container, Iterator

from kvboost_hf.cli import command_line

_OPENING = """# Every flag

<!-- Written by `python docs/flags.py > docs/flags.md`: change the parser. -->

**Who needs this:** you look a flag up. [The few that matter](server.md#the-flags-that-matter) are on the
server's page.

The command is `kvboost-hf`, with one of the words below behind it. `kvboost-server` is `kvboost-hf serve` by another
name. `kvboost-hf COMMAND --help` prints what is here. Where no model is named, the small one that comes with the
package runs.
"""
_NAME = re.compile(r"`(--(?!no-)[\w-]+)")
_CHOICES = re.compile(r", of [^()]*$")  # that the page of the command has
_FULL = "serve"  # other commands refer to its flags where they take them in the same words


def page() -> str:
    """All commands and their flags in Markdown."""
    found = (one for one in command_line()._actions if isinstance(one, argparse._SubParsersAction))
    commands = next(found)
    about = {one.dest: one.help or "" for one in commands._choices_actions}
    served = _all_rows(commands.choices[_FULL])
    lines = [_OPENING]
    for name, parser in commands.choices.items():
        lines += [f"## `{name}`", "", f"{_sentence(about[name])}", ""]
        positional, optional, *groups = parser._action_groups
        shared = set() if name == _FULL else served
        if own := [*_told([*_rows(positional), *_rows(optional)], shared)]:
            lines += [*own, ""]
        for group in groups:
            lines += [f"### {_sentence(group.title or '').rstrip('.')}", "", *_told([*_rows(group)], shared), ""]
    return "\n".join(lines)


def _told(rows: list[str], shared: Container[str]) -> Iterator[str]:
    """Rows, and one line for all those that another command has in full."""
    yield from (row for row in rows if row not in shared)
    if known := [_NAME.findall(row.partition(":")[0])[-1] for row in rows if row in shared]:
        yield f"- as for [`{_FULL}`](#{_FULL}): {', '.join(f'`{name}`' for name in known)}"


def _all_rows(parser: argparse.ArgumentParser) -> set[str]:
    return {row for group in parser._action_groups for row in _rows(group)}


def _rows(group: argparse._ArgumentGroup) -> Iterator[str]:
    for action in group._group_actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
            continue
        if action.help is None:
            raise ValueError(f"{action.option_strings or action.dest} must have a help text. Give it one.")
        text = _CHOICES.sub("", action.help % vars(action))  # as argparse does: what is said of defaults
        yield f"- {_flag(action)}: {text}"


def _flag(action: argparse.Action) -> str:
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        return ", ".join(f"`{flag}`" for flag in action.option_strings)
    choices = "|".join(map(str, action.choices or ()))
    value = action.metavar or choices or action.dest.upper().split("_")[-1]
    shown = {"+": f"{value} ...", "*": f"[{value} ...]"}.get(str(action.nargs), str(value))
    names = ", ".join([*(f"`{name}`" for name in action.option_strings[:-1]), ""])
    return names + f"`{' '.join([*action.option_strings[-1:], shown])}`"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


if __name__ == "__main__":
    sys.stdout.write(page())
