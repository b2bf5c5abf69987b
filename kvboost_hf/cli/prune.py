"""`kvboost-hf prune`: removes files of streamed layers that nobody uses."""

import argparse
import sys
from collections.abc import Sequence
from itertools import groupby

from kvboost_hf.cli.arguments import Commands
from kvboost_hf.offload.prune import LayerFile, former_files, prune_layers


def add(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser("prune", help="remove files of streamed layers that no process uses")
    parser.add_argument("folder", metavar="FOLDER", help="the `disk_folder` that layers are streamed from")
    parser.add_argument("--dry-run", action="store_true", help="only list what would be removed")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print what is in the folder, by model, and what was removed."""
    found = prune_layers(options.folder, dry_run=options.dry_run)
    by_model = sorted(found, key=_told)
    lines = [f"{state:<8} {model}: {_total(list(files))}" for (state, model), files in groupby(by_model, _told)]
    unused = [each for each in found if not each.in_use]
    lines.append(f"{'Would remove' if options.dry_run else 'Removed'} {_total(unused)} of {_total(found)}.")
    if former := former_files(options.folder):
        lines.append(
            f"{len(former)} files ({former[0].name} and the like) are of an earlier release, whose processes hold no "
            "locks. Delete them once none of them runs."
        )
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def _told(each: LayerFile) -> tuple[str, str]:
    return "in use" if each.in_use else "unused", ", ".join(each.models) or "a model that was in memory"


def _total(files: Sequence[LayerFile]) -> str:
    nbytes = sum(each.nbytes for each in files)
    size = f"{nbytes / 10**9:.1f} GB" if nbytes >= 10**9 else f"{nbytes / 10**6:.1f} MB"
    return f"{len(files)} file{'s' * (len(files) != 1)} ({size})"
