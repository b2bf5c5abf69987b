"""`kvboost-hf check`: whether a model can reuse K/V."""

import argparse
import sys
import warnings

from kvboost_hf.cli.arguments import Commands
from kvboost_hf.cli.models import add_model, load_model
from kvboost_hf.compatibility import check_model_compatibility


def add(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("check", help="say whether a model can reuse K/V, and why not")
    add_model(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the report; returns 1 if exact reuse is not possible."""
    model, _, name = load_model(options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # all that they say is in the report
        found = check_model_compatibility(model, strict=False)
    sys.stdout.write(f"{name}: {found}\n")
    return 0 if found.exact else 1
