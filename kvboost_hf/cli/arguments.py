"""Parts that commands share: arguments and their checks, and what to type next. Nothing here imports torch."""

import argparse
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, NoReturn

from kvboost_hf.errors import how_to_install
from kvboost_hf.fields import setting
from kvboost_hf.outputs import output_path

EMBEDDED = "embedded"  # the name of the model of the package, and of its tokenizer
# Commands, the flags to add, and what each is for.
_STEPS: dict[str, tuple[tuple[str, ...], str]] = {
    "demo": ((), "what reuse saves on real text"),
    "check": ((), "whether it can reuse K/V, and why not"),
    "bench": ((), "ways of reuse beside each other, in minutes"),
    "verify": (("--prompts", "FILE"), "what reuse does to answers on your prompts"),
    "serve": ((), "OpenAI's API, and a page, at http://127.0.0.1:8000"),
}


@contextmanager
def needs_extra(extra: str, command: str) -> Iterator[None]:
    """Turn an import that fails inside the context into a `ValueError` that names the extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ValueError(f"`kvboost-hf {command}` needs {error.name}: {how_to_install(extra)}") from error


def require_figures(path: Path | None) -> None:
    """Import what draws figures, if one is to be written: before anything is measured, not after it."""
    if path is not None:
        import matplotlib  # noqa: F401


def positive(text: str) -> int:
    """An integer above 0."""
    value = int(text) if text.isdecimal() else 0
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be a whole positive number, got {text}")
    return value


def named_model(text: str) -> str | None:
    """The name of a model; None for the embedded one."""
    return None if text == EMBEDDED else text


def figure(text: str) -> Path:
    """A file that can be written, of a format for figures."""
    if not text.endswith((".png", ".pdf", ".svg")):
        raise ValueError(f"{text!r} is no figure: name a file that ends in .png, .pdf or .svg")
    return output_path(text)


def read_text(path: Path) -> str:
    """The text of a file; `ValueError` if it cannot be read, is not UTF-8, or is empty."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"{path} must be a file that can be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be a text in UTF-8: {error}.") from error
    if not text:
        raise ValueError(f"{path} must hold a text, but it is empty.")
    return text


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


@dataclass
class ModelFlags:
    """Flags of commands that run a model.

    Args:
        model: A hub name, a folder, or 'embedded'; None is the embedded model.
        device: Where it runs; None is cuda where there is one, or cpu.
        dtype: One of auto, float32, bfloat16 or float16.
    """

    model: str | None = setting(None, parse=named_model)
    device: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting("auto", metavar="DTYPE")


def next_steps(options: argparse.Namespace, *steps: str | tuple[str, str]) -> str:
    """The last lines of a command: names of commands for the same model, or whole ones with their use."""
    pairs = [_named(step, options) if isinstance(step, str) else step for step in steps]
    return "".join(["\nNext:\n", *(f"  {command}   # {what}\n" for command, what in pairs)])


def typed(command: str, options: argparse.Namespace, *flags: object) -> str:
    """A command on the same model, as it is typed with some flags; `NAME` stands for the embedded model."""
    dtype = ("--dtype", options.dtype) if getattr(options, "dtype", "auto") != "auto" else ()
    return shlex.join(["kvboost-hf", command, "--model", options.model or "NAME", *dtype, *map(str, flags)])


def _named(command: str, options: argparse.Namespace) -> tuple[str, str]:
    flags, what = _STEPS[command]
    return typed(command, options, *flags), what
