"""The commands `kvboost-hf` and `kvboost-server`: the subcommand NAME has its flags in `flags`, and `run_NAME`.

The file with `run_NAME` is imported when all arguments are right, so that help and errors of arguments need no torch.
"""

import argparse
import io
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from types import FrameType
from typing import NoReturn

from kvboost_hf import __version__
from kvboost_hf.errors import KVBoostError

__all__ = ["command_line", "main", "serve"]

_COMMANDS = {  # the file that runs each, and what it is for
    "demo": ("measure", "plain generate() beside generate() with a ChunkReuseCache"),
    "bench": ("measure", "measure ways of serving the same prompts, and others' ways beside them"),
    "doctor": ("doctor", "say what of this machine and a model works, and what to do"),
    "check": ("check", "say whether a model can reuse K/V, and why not"),
    "verify": ("measure", "measure what reuse does to the answers, on your own prompts"),
    "fits": ("check", "say what of a model stays on a device, and how fast the rest can come"),
    "warm": ("warm", "compute K/V of files ahead of the first request, and keep it"),
    "serve": ("serving", "answer requests as the APIs of OpenAI, Anthropic and Ollama do"),
    "inspect": ("inspect", "show what is stored: tokens, text, bytes, hits, tier"),
    "prune": ("inspect", "remove files of streamed layers that no process uses"),
}

_SIGPIPE = 128 + 13  # not all systems have this signal


class _Parser(argparse.ArgumentParser):
    """A parser whose errors do not stand behind a page of usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message.rstrip('.')}. All flags: {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `kvboost-hf`.

    Args:
        arguments: The arguments of the command; None takes those of the process.

    Returns:
        The exit status: 2 for what is refused, 130 after Ctrl-C, 141 if nobody reads the output any longer.
    """
    given = sys.argv[1:] if arguments is None else arguments
    _open_output()
    try:
        with _noted_interrupts() as interrupts:
            return _run_command(given, interrupts)
    except BrokenPipeError:  # whoever reads the output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _SIGPIPE
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # which a console of rich makes this of
            return _SIGPIPE
        raise
    except (KVBoostError, ValueError, OSError, ImportError) as error:  # of transformers, say: what to install
        sys.stderr.write(f"kvboost-hf: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("kvboost-hf: interrupted\n")
        return 128 + signal.SIGINT


def _run_command(given: Sequence[str], interrupts: list[int]) -> int:
    named = next((each for each in given if not each.startswith("-")), None)
    if named is not None and named not in _COMMANDS:
        close = get_close_matches(named, _COMMANDS, n=1)
        sys.stderr.write(f"kvboost-hf: there is no command {named!r}. ")
        sys.stderr.write(f"Did you mean {close[0]}?\n" if close else f"There are {', '.join(_COMMANDS)}.\n")
        return 2
    parser = command_line([] if named is None else [named])
    options, unknown = parser.parse_known_args(given)
    if unknown:
        from kvboost_hf.cli.arguments import refuse_unknown

        refuse_unknown(options.parser, unknown)
    if getattr(options, "config", None) is not None:
        from kvboost_hf.cli.config_file import apply_config

        apply_config(options, parser)
        options = parser.parse_args(given)
    options.given = given
    if hasattr(options, "device") and named != "doctor":  # which prints what it finds before torch is there
        from kvboost_hf.cli.loading import set_device

        set_device(options)
    if interrupts:
        raise KeyboardInterrupt  # which the import of torch has ignored
    status: int = options.run(options)
    sys.stdout.flush()
    return status


@contextmanager
def _noted_interrupts() -> Iterator[list[int]]:
    """Yields a list that notes each Ctrl-C, behind which other errors are `KeyboardInterrupt`, too.

    Imports make others of it: up to Python 3.11 a `RuntimeError` in the middle of a class, and whatever follows where
    code in C ignores it, as torch does when it imports NumPy.
    """
    found: list[int] = []
    own = threading.current_thread() is threading.main_thread()
    if not own or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield found
        return

    def note(number: int, frame: FrameType | None) -> None:
        found.append(number)
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield found
    except Exception as error:
        if found:
            raise KeyboardInterrupt from error
        raise
    finally:
        if signal.getsignal(signal.SIGINT) is note:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _open_output() -> None:
    """Drop what goes to a closed stream, and write characters that an encoding lacks as escapes."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def serve() -> int:
    """Run `kvboost-server`, which is `kvboost-hf serve`; returns the exit status."""
    return main(["serve", *sys.argv[1:]])


def command_line(with_flags: Iterable[str] = _COMMANDS) -> argparse.ArgumentParser:
    """The parser of all subcommands; `docs/flags.py` writes `docs/flags.md` from it.

    Args:
        with_flags: The subcommands that get their flags.
    """
    parser = _Parser(prog="kvboost-hf", description="K/V reuse for Hugging Face transformers.")
    parser.add_argument("--version", action="version", version=f"kvboost_hf {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (file, text) in _COMMANDS.items():
        one = commands.add_parser(name, help=text)
        if name in with_flags:
            import_module("kvboost_hf.cli.flags").add_command_flags(one, name)
            one.set_defaults(parser=one, run=partial(_run, file, name))
    return parser


def _run(file: str, name: str, options: argparse.Namespace) -> int:
    return int(getattr(import_module(f"kvboost_hf.cli.{file}"), f"run_{name}")(options))
