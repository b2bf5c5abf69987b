"""`python -m tests.fuzz`: random histories for some seconds. The status is 1 if one has failed."""

import argparse
import logging
import os
import random
import sys
import time

import torch
import transformers

from tests.fuzz.draw import draw_history
from tests.fuzz.history import History
from tests.fuzz.play import Refused, Wrong, confirmed, play
from tests.fuzz.shrink import shrunk

_MOST = 5  # failures that are shrunk and shown
_SHRINK_S = 20.0
_SCRIPT = """
from tests.fuzz.history import Call, History, Row
from tests.fuzz.play import play

play({history!r})
"""


def failure_of(history: History) -> Wrong | None:
    """What is wrong with a history, if anything."""
    try:
        play(history)
    except Wrong as wrong:
        return confirmed(history, wrong)
    except Refused:
        return None
    return None


def main() -> int:
    """Run, and say what was found."""
    options = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    options.add_argument("--seconds", type=float, default=60.0, help="how long (%(default)g)")
    options.add_argument("--seed", type=int, default=None, help="of the first history; without it, one by chance")
    options.add_argument("--most", type=int, default=_MOST, help="failures that end the run (%(default)d)")
    options.add_argument("--without", default="", help="histories whose Python has one of these, by commas, are left out")
    given = options.parse_args()
    without = [part for part in given.without.split(",") if part]
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(10**9)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("kvboost_hf").setLevel(logging.ERROR)
    print(f"tests.fuzz --seed {seed}", flush=True)
    begun, busy, histories, calls = time.monotonic(), 0.0, 0, 0
    found: dict[str, str] = {}
    while busy < given.seconds and len(found) < given.most:
        history = draw_history(seed + histories)
        if any(part in repr(history) for part in without):
            seed += 1
            continue
        start = time.monotonic()
        wrong = failure_of(history)
        busy += time.monotonic() - start
        histories, calls = histories + 1, calls + len(history.calls)
        if wrong is None:
            continue
        kind = wrong.kind

        def fails(each: History, kind: str = kind) -> bool:
            other = failure_of(each)
            return other is not None and other.kind == kind

        small = shrunk(history, fails, _SHRINK_S)
        least = failure_of(small) or wrong
        told = f"--seed {seed + histories - 1}, after {busy:.0f} s: {least}\n{_SCRIPT.format(history=small)}"
        print(told, flush=True)
        found[told] = kind
    took = time.monotonic() - begun
    print(
        f"{histories} histories, {calls} calls in {busy:.0f} s ({calls / max(busy, 1e-9):.1f} a second), "
        f"{took - busy:.0f} s for shrinking: {len(found) or 'nothing'} wrong",
        flush=True,
    )
    return 1 if found else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
