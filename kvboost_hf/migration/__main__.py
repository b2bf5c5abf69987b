"""The table as a page: `python -m kvboost_hf.migration --write docs/migrating-from-kvboost.md`."""

import argparse
import sys
from pathlib import Path

from kvboost_hf.migration.page import page


def main() -> None:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(prog="python -m kvboost_hf.migration", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="where to (default: standard output)")
    target: Path | None = parser.parse_args().write
    if target is None:
        sys.stdout.write(page())
    else:
        target.write_text(page(), encoding="utf-8")


main()
