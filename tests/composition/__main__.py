"""`python -m tests.composition --write`: write the page of what goes with what."""

import argparse

from tests.composition.page import PAGE, page


def main() -> None:
    """Write the page, or print it."""
    arguments = argparse.ArgumentParser(prog="python -m tests.composition", description=__doc__)
    arguments.add_argument("--write", action="store_true", help=f"write {PAGE.name}, else only print it")
    if arguments.parse_args().write:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page())  # noqa: T201


if __name__ == "__main__":
    main()
