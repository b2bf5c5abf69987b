"""Processes that write to one folder and are killed at random instants: what is there afterwards, and is it right.

    python benchmarks/soak.py --out benchmarks/results [--rounds 1000]

Each round forks writers, kills them with SIGKILL one after the other, and opens the folder again. The folder must open
without an error and hold, unharmed, every blob that a writer was told is kept; the one that each was writing may be
lost. In every other round the budget is tight, so that older blobs are given up; the latest must be there. No file and
no row may be left over, and the budget must hold.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from hashlib import blake2b, shake_128
from pathlib import Path

import numpy as np
import torch
from reuse import Result, measured_on, provenance

from kvboost_hf.cache.tiers.base import Entry, Kind
from kvboost_hf.cache.tiers.disk import DiskTier
from kvboost_hf.cache.tiers.record import Blob, dump

WRITERS = 2
MAX_LIFE_S = 0.05  # of a writer; opening the folder takes a few milliseconds of it
ROOMY, TIGHT = 2**26, 2**18
LATEST = 3  # blobs that a tight budget does not give up
BEGUN, KEPT = b"b", b"k"

Tell = Callable[[bytes, int], None]  # what happened, and to which blob
Work = Callable[[Path, int, int, Tell], None]  # folder, budget, number of the first blob


@dataclass
class Writer:
    """A process that was killed, and what it told."""

    begun: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    failed: bool = False  # before it was killed


@dataclass
class Tally:
    rounds: int = 0
    kept: int = 0
    in_flight: int = 0  # when their writer was killed
    lost_in_flight: int = 0
    lost: int = 0
    wrong: int = 0
    failures: int = 0  # to open the folder, or to write to it
    leftovers: int = 0
    over_budget: int = 0

    def is_clean(self) -> bool:
        return not (self.lost or self.wrong or self.failures or self.leftovers or self.over_budget)


def key_of(n: int) -> bytes:
    return blake2b(n.to_bytes(8, "little"), digest_size=20).digest()


def contents_of(key: bytes) -> bytes:
    """From 0 to 16 KiB that follow from the key."""
    return shake_128(key).digest(int.from_bytes(key[:2], "little") // 4)


def make_blob(n: int) -> tuple[Entry, list[bytes | memoryview]]:
    key = key_of(n)
    entry = Entry(key, Kind.CHUNK, b"model", b"root", b"parent", b"head", 0, np.arange(64), 0)
    contents = torch.from_numpy(np.frombuffer(contents_of(key), np.uint8).copy())
    return dump(entry, {"contents": contents[None]}, None)


def is_right(key: bytes, data: memoryview) -> bool:
    try:
        blob = Blob(data)
        blob.check_all()
    except ValueError:
        return False
    return blob.entry.key == key and blob.tensor("contents").numpy().tobytes() == contents_of(key)


def write_blobs(folder: Path, max_bytes: int, first: int, tell: Tell) -> None:
    """What a writer does until it is killed."""
    tier = DiskTier(folder, max_bytes)
    draw = random.Random(first)
    for n in range(first, first + 100_000):
        entry, blob = make_blob(n)
        tell(BEGUN, n)
        if tier.write(entry, blob):
            tell(KEPT, n)
        if draw.random() < 0.2:
            tier.read(key_of(draw.randint(first, n)))
            tier.touch([key_of(n)])
        if tier.stats()["errors"]:
            raise RuntimeError(f"A writer failed: {tier.stats()}")


def run_and_kill(work: Work, folder: Path, max_bytes: int, first: list[int], draw: random.Random) -> list[Writer]:
    """Fork one writer for each `first` blob, and kill them at random instants."""
    children = []
    for n in first:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                work(folder, max_bytes, n, lambda what, n: os.write(write, what + n.to_bytes(8, "little")) and None)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(write)
        children.append((pid, read))
    writers = []
    for pid, read in children:
        time.sleep(draw.uniform(0, MAX_LIFE_S))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        writer = Writer(failed=not os.WIFSIGNALED(status))
        with open(read, "rb") as pipe:
            told = pipe.read()
        for at in range(0, len(told), 9):
            n = int.from_bytes(told[at + 1 : at + 9], "little")
            (writer.begun if told[at : at + 1] == BEGUN else writer.kept).append(n)
        writers.append(writer)
    return writers


def check(folder: Path, max_bytes: int, writers: list[Writer], tally: Tally, earlier: list[int]) -> list[int]:
    """Open the folder again and compare it with what was told; returns the numbers of the blobs that are there."""
    tight = max_bytes == TIGHT
    tier = DiskTier(folder, max_bytes)
    names = {path.stem: path.stat().st_size for path in (folder / "blobs").rglob("*") if path.is_file()}
    tally.over_budget += sum(names.values()) > max_bytes
    tally.leftovers += len(set(names) ^ {entry.key.hex() for entry in tier.entries()})
    in_flight = [n for writer in writers for n in writer.begun if n not in writer.kept]
    kept = [n for writer in writers for n in writer.kept]
    expected = set(writers[-1].kept[-LATEST:] if tight else earlier + kept)  # the last writer outlived the others
    there = []
    for n in [*earlier, *kept, *in_flight]:
        data = tier.read(key_of(n))
        if data is not None:
            there.append(n)
            tally.wrong += not is_right(key_of(n), data)
    tally.rounds += 1
    tally.kept += len(kept)
    tally.in_flight += len(in_flight)
    tally.lost_in_flight += len(set(in_flight) - set(there))
    tally.lost += len(expected - set(there))
    tally.failures += int(tier.stats()["errors"]) + sum(writer.failed for writer in writers)
    tally.wrong += len(list(tier.entries())) != len(there)
    tier.close()
    return there


def soak(work: Work, rounds: int, seed: int) -> Tally:
    draw, tally = random.Random(seed), Tally()
    folder = Path(tempfile.mkdtemp())
    there: list[int] = []
    try:
        for number in range(rounds):
            max_bytes = TIGHT if number % 2 else ROOMY
            first = [(number * WRITERS + i) * 100_000 for i in range(WRITERS)]
            writers = run_and_kill(work, folder, max_bytes, first, draw)
            there = check(folder, max_bytes, writers, tally, there)
            assert all(len(writer.begun) <= len(writer.kept) + 1 for writer in writers), "One at a time."
    finally:
        shutil.rmtree(folder)
    return tally


def markdown(result: Result) -> str:
    tally = result["tally"]
    lines = [
        f"{WRITERS} writers on one folder, killed at random instants; {measured_on(result['provenance'])}",
        "",
        "| | |",
        "| --- | ---: |",
        f"| rounds of kills | {tally['rounds']} |",
        f"| blobs that writers were told are kept | {tally['kept']} |",
        f"| being written when their writer was killed | {tally['in_flight']} |",
        f"| of these lost | {tally['lost_in_flight']} |",
        f"| kept, and lost | {tally['lost']} |",
        f"| wrong contents | {tally['wrong']} |",
        f"| failures to open or to write | {tally['failures']} |",
        f"| leftovers after opening | {tally['leftovers']} |",
        f"| rounds over the budget | {tally['over_budget']} |",
        f"| seconds | {result['seconds']:.0f} |",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON and the table")
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # before forks
    begin = time.perf_counter()
    tally = soak(write_blobs, options.rounds, options.seed)
    result: Result = {
        "provenance": provenance(sys.argv[1:], "soak.py"),
        "tally": asdict(tally),
        "seconds": time.perf_counter() - begin,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "soak-cpu.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.out / "soak-cpu.md").write_text(markdown(result))
    print(markdown(result))
    sys.exit(0 if tally.is_clean() else 1)


if __name__ == "__main__":
    main()
