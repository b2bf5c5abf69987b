"""Measures what codecs do to a model's K/V: `python -m benchmarks.turboquant [CODEC ...] --model NAME`."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.turboquant.validate import CODECS, validate_turboquant
from kvboost_hf.cli.arguments import ModelFlags
from kvboost_hf.cli.flags import JsonFlag
from kvboost_hf.cli.loading import load_model
from kvboost_hf.cli.measure import read_prompts
from kvboost_hf.fields import add_flags
from kvboost_hf.outputs import STANDARD_OUTPUT, write


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; returns 1 if a check failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.turboquant", description=__doc__)
    text = f"besides the paper's forms (default: {' '.join(CODECS)})"
    parser.add_argument("codecs", nargs="*", default=CODECS, metavar="CODEC", help=text)
    add_flags(parser, ModelFlags)
    text = "texts whose K/V is measured, one on each line or as a JSON list (default: made-up ones)"
    parser.add_argument("--prompts", type=Path, metavar="FILE", help=text)
    add_flags(parser, JsonFlag)
    options = parser.parse_args(arguments)
    model, tokenizer, name = load_model(options)
    prompts = read_prompts(options.prompts) if options.prompts is not None else None
    report = validate_turboquant(model, tokenizer, prompts=prompts, codecs=options.codecs)
    shown = sys.stderr if options.json == STANDARD_OUTPUT else sys.stdout
    print(f"{name}, {report.dtype}\n\n{report}", file=shown)
    if options.json is not None:
        write(options.json, json.dumps({"name": name, **report.as_dict()}, indent=2))
    return 0 if report else 1


if __name__ == "__main__":
    sys.exit(main())
