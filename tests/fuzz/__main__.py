"""`python -m tests.fuzz`: random histories for some seconds. The status is 1 if one has failed."""

import argparse
import logging
import random
import sys
import time
from dataclasses import replace
from itertools import count

import torch
import transformers

from tests.fuzz.draw import draw_history
from tests.fuzz.history import History
from tests.fuzz.play import Refused, Wrong, confirmed, play
from tests.fuzz.shrink import shrunk

_MOST = 5  # failures that end a run
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


def least(history: History, wrong: Wrong) -> tuple[History, Wrong]:
    """The smallest history that fails in this way, and how it fails."""

    def fails(each: History) -> bool:
        other = failure_of(each)
        return other is not None and other.kind == wrong.kind

    small = shrunk(history, fails, _SHRINK_S)
    return small, failure_of(small) or wrong


def fuzz(first: int, seconds: float, most: int, without: list[str], *, watched: bool = False) -> int:
    """Play the histories from a seed on; returns how many different ones have failed."""
    shown: set[str] = set()
    begun, shrinking, histories, calls = time.monotonic(), 0.0, 0, 0
    for seed in count(first):
        if time.monotonic() - begun - shrinking > seconds or len(shown) >= most:
            break
        history = replace(draw_history(seed), watched=watched)
        if any(part in repr(history) for part in without):
            continue
        histories, calls = histories + 1, calls + len(history.calls)
        wrong = failure_of(history)
        if wrong is None:
            continue
        start = time.monotonic()
        small, last = least(history, wrong)
        alike = repr(replace(small, family="llama", attention="eager"))
        if alike not in shown:
            shown.add(alike)
            _say(f"--seed {seed}, after {start - begun - shrinking:.0f} s: {last}\n{_SCRIPT.format(history=small)}")
        shrinking += time.monotonic() - start
    took = time.monotonic() - begun - shrinking
    pace = f"{histories} histories, {calls} calls in {took:.0f} s ({calls / took:.0f} a second)"
    _say(f"{pace}; {len(shown) or 'nothing'} wrong" + (f", shrunk in {shrinking:.0f} s" if shown else ""))
    return len(shown)


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


def main() -> int:
    """Run, and say what was found."""
    options = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    options.add_argument("--seconds", type=float, default=60.0, help="how long, without shrinking (%(default)g)")
    options.add_argument("--seed", type=int, default=None, help="of the first history; without it, one by chance")
    options.add_argument("--most", type=int, default=_MOST, help="failures that end the run (%(default)d)")
    options.add_argument("--without", default="", help="leave out histories whose Python has one of these, by commas")
    options.add_argument("--watched", action="store_true", help="beside a thread that reads what users may watch")
    given = options.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("kvboost_hf").setLevel(logging.ERROR)
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(10**9)
    _say(f"python -m tests.fuzz --seed {seed}")
    without = [part for part in given.without.split(",") if part]
    return 1 if fuzz(seed, given.seconds, given.most, without, watched=given.watched) else 0


if __name__ == "__main__":
    sys.exit(main())
