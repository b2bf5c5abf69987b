"""Formats what to type after a command."""

import argparse
import shlex

# Commands, the flags to add, and what each is for.
_STEPS: dict[str, tuple[tuple[str, ...], str]] = {
    "demo": ((), "what reuse saves on real text"),
    "check": ((), "whether it can reuse K/V, and why not"),
    "bench": ((), "ways of reuse beside each other, in minutes"),
    "verify": (("--prompts", "FILE"), "what reuse does to answers on your prompts"),
    "serve": ((), "OpenAI's API, and a page, at http://127.0.0.1:8000"),
}


def next_steps(options: argparse.Namespace, *steps: str | tuple[str, str]) -> str:
    """The last lines of a command.

    Args:
        options: Of the command that has run.
        steps: What to type: names of commands, for the same model, or whole commands, each with what it is for.
    """
    pairs = [_named(step, options) if isinstance(step, str) else step for step in steps]
    return "".join(["\nNext:\n", *(f"  {command}   # {what}\n" for command, what in pairs)])


def typed(command: str, options: argparse.Namespace, *flags: object) -> str:
    """A command on the same model, as it is typed; `NAME` stands for the model where the embedded one has run.

    Args:
        command: Of `kvboost-hf`.
        options: Of the command that has run.
        flags: And their values, for this command.
    """
    dtype = ("--dtype", options.dtype) if getattr(options, "dtype", "auto") != "auto" else ()
    return shlex.join(["kvboost-hf", command, "--model", options.model or "NAME", *dtype, *map(str, flags)])


def _named(command: str, options: argparse.Namespace) -> tuple[str, str]:
    flags, what = _STEPS[command]
    return typed(command, options, *flags), what
