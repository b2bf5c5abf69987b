"""`python -m tests.architectures --write`: run every architecture with and without reuse, and write the table."""

import argparse
import sys
import warnings

import transformers

from tests.architectures.models import TRIED, make_architecture
from tests.architectures.outcome import outcome_of
from tests.architectures.table import PAGE, ROWS, Row, row, write


def main() -> int:
    """Write the table; 1 if some architecture gives wrong answers or fails, which keeps it out of the table."""
    arguments = argparse.ArgumentParser(prog="python -m tests.architectures", description=__doc__)
    arguments.add_argument("--write", action="store_true", help=f"write {ROWS.name} and {PAGE.name}, else only look")
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    return run(arguments.parse_args().write)


def run(writing: bool) -> int:
    """Try every type; what fails is printed."""
    rows: dict[str, Row] = {}
    failed = 0
    for model_type in TRIED:
        model = make_architecture(model_type)
        try:
            rows[type(model).__name__] = row(model, outcome_of(model))
        except Exception as failure:  # anything that an architecture can come up with
            failed += 1
            print(f"{model_type}: {type(failure).__name__}: {failure}", file=sys.stderr)  # noqa: T201
    if writing:
        write(rows)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
