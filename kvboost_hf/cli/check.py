"""`kvboost-hf check`: reports whether a model can reuse K/V, and why not."""

import argparse
import sys
import warnings

from kvboost_hf.cli.arguments import Commands
from kvboost_hf.cli.models import add_model, load_shown
from kvboost_hf.cli.next_steps import next_steps
from kvboost_hf.compatibility import check_model_compatibility
from kvboost_hf.progress import Progress


def add(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("check", help="say whether a model can reuse K/V, and why not")
    add_model(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the report; returns 1 if exact reuse is not possible."""
    with Progress() as shown:
        model, _, name = load_shown(options, shown)
        shown.show(f"running {name} on a few tokens")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # all that they say is in the report
            found = check_model_compatibility(model, strict=False)
    sys.stdout.write(f"{name}: {found}\n")
    if not found.exact:
        again = ("kvboost-hf check --model NAME", "another model: this one runs without reuse")
        sys.stdout.write(next_steps(options, again))
        return 1
    sys.stdout.write(next_steps(options, "demo", "verify"))
    return 0
