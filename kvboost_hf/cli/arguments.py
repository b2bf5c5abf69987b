"""Parses and checks arguments that several commands share, and names the extra of a package that is not installed."""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn, TypeAlias

from kvboost_hf.cache.tiers.addresses import parse_tier
from kvboost_hf.outputs import output_path

# Of `ArgumentParser.add_subparsers`, as argparse calls it.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


@contextmanager
def needs_extra(extra: str, command: str) -> Iterator[None]:
    """Turn an import that fails inside the context into an error that names the extra to install.

    Args:
        extra: Of this package, such as `"demo"`.
        command: Of `kvboost-hf`.

    Raises:
        ValueError: a package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ValueError(f"`kvboost-hf {command}` needs {error.name}: pip install 'kvboost_hf[{extra}]'") from error


def require_figures(path: Path | None) -> None:
    """Import what draws figures, if one is to be written: before anything is measured, not after it.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    if path is not None:
        import matplotlib  # noqa: F401


def positive(text: str) -> int:
    """An integer above 0."""
    value = int(text) if text.isdecimal() else 0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be a whole positive number, got {text}")
    return value


def output(text: str) -> Path:
    """A file that can be written, or '-' for standard output."""
    try:
        return output_path(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def figure(text: str) -> Path:
    """A file that can be written, of a format for figures."""
    if not text.endswith((".png", ".pdf", ".svg")):
        raise argparse.ArgumentTypeError(f"{text!r} is no figure: name a file that ends in .png, .pdf or .svg")
    return output(text)


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        ValueError: it cannot be read, is not UTF-8, or is empty.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} must be a file that can be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be a text in UTF-8: {error}.") from error
    if not text:
        raise ValueError(f"{path} must hold a text, but it is empty.")
    return text


def one_of(names: Iterable[str], text: str) -> str:
    """A help text that lists the choices."""
    return f"{text}, of {', '.join(names)}"


def add_json(parser: argparse.ArgumentParser, help: str = "write all figures ('-' for standard output)") -> None:
    """Add `--json FILE`."""
    parser.add_argument("--json", type=output, metavar="FILE", help=help)


def refuse_unknown(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> NoReturn:
    """End the process for arguments that a command does not take, with the flag that may be meant."""
    given, _, _ = unknown[0].partition("=")
    if given.startswith("-"):
        near = get_close_matches(given, parser._option_string_actions, n=1)
        meant = f"; did you mean {near[0]}?" if near else "."
        said = f"there is no flag {given}{meant}"
    elif "--model" in parser._option_string_actions:
        said = f"{given!r} must have a flag before it. A model is named so: {parser.prog} --model {given}."
    else:
        said = f"{given!r} must have a flag before it."
    parser.exit(2, f"{parser.prog}: {said} All flags: {parser.prog} --help\n")


def require_lasting(addresses: Sequence[str]) -> None:
    """Raise ValueError unless one of these tiers outlives the process."""
    if all(parse_tier(address).kind in ("ram", "device") for address in addresses):
        raise ValueError(f"`--tiers` must have one that outlives a process, got {list(addresses)}. Pass disk:FOLDER.")
