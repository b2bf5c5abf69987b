"""The commands `kvboost-hf` and `kvboost-server`: one file for each subcommand, with `add` for its flags."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from kvboost_hf import __version__
from kvboost_hf.cli.arguments import refuse_unknown, require_device
from kvboost_hf.cli.doctor import add_check, add_doctor, add_fits
from kvboost_hf.cli.inspect import add_inspect, add_prune
from kvboost_hf.cli.measure import add_bench, add_demo, add_verify
from kvboost_hf.cli.server_settings import apply_config
from kvboost_hf.cli.serving import add_serve
from kvboost_hf.cli.warm import add_warm
from kvboost_hf.errors import KVBoostError

__all__ = ["command_line", "main", "serve"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `kvboost-hf`.

    Args:
        arguments: The arguments of the command; None takes those of the process.

    Returns:
        The exit status: 2 for what is refused, 130 after Ctrl-C, 141 if nobody reads the output any longer.
    """
    given = sys.argv[1:] if arguments is None else arguments
    parser = command_line()
    options, unknown = parser.parse_known_args(given)
    if unknown:
        refuse_unknown(options.parser, unknown)
    try:
        if getattr(options, "config", None) is not None:
            apply_config(options, parser)
            options = parser.parse_args(given)
        options.given = given
        if hasattr(options, "device"):
            require_device(options.device)
        status = int(options.run(options))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever reads the output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13  # SIGPIPE, which not all systems have
    except (KVBoostError, ValueError, OSError, ImportError) as error:  # of transformers, say: what to install
        sys.stderr.write(f"kvboost-hf: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("kvboost-hf: interrupted\n")
        return 128 + signal.SIGINT


def serve() -> int:
    """Run `kvboost-server`, which is `kvboost-hf serve`; returns the exit status."""
    return main(["serve", *sys.argv[1:]])


def command_line() -> argparse.ArgumentParser:
    """The parser of all subcommands; `docs/flags.py` writes `docs/flags.md` from it."""
    parser = argparse.ArgumentParser(prog="kvboost-hf", description="K/V reuse for Hugging Face transformers.")
    parser.add_argument("--version", action="version", version=f"kvboost_hf {__version__}")
    commands = parser.add_subparsers(required=True)
    for add in (
        add_demo, add_bench, add_doctor, add_check, add_verify, add_fits, add_warm, add_serve, add_inspect, add_prune,
    ):  # fmt: skip
        add(commands)
    for one in commands.choices.values():
        one.set_defaults(parser=one)
    return parser
