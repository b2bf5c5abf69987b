"""Processes that write to one folder and are killed at random instants: what is there afterwards, and is it right.

    python benchmarks/soak.py --out benchmarks/results [--rounds 1000]

Each round forks writers, kills them with SIGKILL one after the other, and opens the folder again. The folder must open
without an error and hold, unharmed, every blob that a writer was told is kept; the one that each was writing may be
lost. In every other round the budget is tight, so that older blobs are given up; the latest must be there. No file and
no row may be left over, and the budget must hold.

Then the same with whole stores: each process generates from prompts through a `ChunkStore` on the folder, and flushes
it now and then. Whatever a store finds afterwards must be the K/V that the model computes plainly, and give the plain
tokens; what was flushed must be found while there is room. And the same with a model with states (Qwen3-Next): the
states must be those that a forward leaves, too.
"""

import argparse
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from hashlib import blake2b, shake_128
from pathlib import Path
from typing import Any

import numpy as np
import torch
from record import write
from reuse import Result, measured_on, provenance
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3NextConfig, Qwen3NextForCausalLM

from kvboost_hf import ChunkReuseCache, ChunkStore, check_model_compatibility
from kvboost_hf.cache.kv.layer_kv import LayerKVReader
from kvboost_hf.cache.store.history import ComputePace
from kvboost_hf.cache.tiers.base import Entry, Kind
from kvboost_hf.cache.tiers.disk import DiskTier
from kvboost_hf.cache.tiers.record import Blob, dump

WRITERS = 2
MAX_LIFE_S = 0.05  # of a writer; opening the folder takes a few milliseconds of it
ROOMY, TIGHT = 2**26, 2**18
LATEST = 3  # blobs that a tight budget does not give up
BEGUN, KEPT = b"b", b"k"
MESSAGE = struct.Struct("<cqq")  # what happened, to which blob, and when in ns

CHUNK, WORDS, LENGTH = 16, 6, 3  # tokens in a chunk; a prompt has so many words, out of so many, of a chunk each
STORE_LIFE_S = 0.15  # of a process with a store
COMPARED = 2  # prompts in each round

Tell = Callable[[bytes, int], None]  # what happened, and to which blob
Work = Callable[[Path, int, int, Tell], None]  # folder, budget, number of the first blob


@dataclass
class Writer:
    """A process that was killed, and what it told."""

    begun: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    when: dict[tuple[bytes, int], int] = field(default_factory=dict)  # each was told, in ns
    failed: bool = False  # before it was killed


@dataclass
class Tally:
    rounds: int = 0
    kept: int = 0
    in_flight: int = 0  # when their writer was killed
    lost_in_flight: int = 0
    lost: int = 0  # with room for all
    lost_tight: int = 0  # of the latest, with a tight budget
    wrong: int = 0
    failures: int = 0  # to open the folder, or to write to it
    leftovers: int = 0
    over_budget: int = 0

    def is_clean(self) -> bool:
        return not (self.lost or self.lost_tight or self.wrong or self.failures or self.leftovers or self.over_budget)


@dataclass
class StoreTally:
    rounds: int = 0
    generated: int = 0  # prompts that a process began with
    flushed: int = 0  # prompts that a process was told are written
    compared: int = 0  # chunks
    checked: int = 0  # chunks and states, by computing them again
    wrong: int = 0  # chunks and states that are not what is computed plainly
    wrong_tokens: int = 0  # prompts with other tokens than plain ones
    lost: int = 0  # prompts that were flushed, and are not found whole
    failures: int = 0

    def is_clean(self) -> bool:
        return not (self.wrong or self.wrong_tokens or self.lost or self.failures)


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


def run_and_kill(
    work: Work, folder: Path, max_bytes: int, first: list[int], draw: random.Random, max_life_s: float = MAX_LIFE_S
) -> list[Writer]:
    """Fork one writer for each `first` blob, and kill them at random instants."""
    children = []
    for n in first:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                work(folder, max_bytes, n, partial(_tell, write))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(write)
        children.append((pid, read))
    writers = []
    for pid, read in children:
        time.sleep(draw.uniform(0, max_life_s))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        writer = Writer(failed=not os.WIFSIGNALED(status))
        with open(read, "rb") as pipe:
            told = pipe.read()
        for what, n, when in MESSAGE.iter_unpack(told):
            (writer.begun if what == BEGUN else writer.kept).append(n)
            writer.when[what, n] = when
        writers.append(writer)
    return writers


def _tell(pipe: int, what: bytes, n: int) -> None:
    os.write(pipe, MESSAGE.pack(what, n, time.monotonic_ns()))


def latest(writers: list[Writer]) -> set[int]:
    """Blobs that fewer than `LATEST` others can have come after, however their writers took turns."""
    when = {key: at for writer in writers for key, at in writer.when.items()}
    begun = {n: at for (what, n), at in when.items() if what == BEGUN}
    ends = sorted(when.get((KEPT, n), 2**63) for n in begun)  # what was being written may have come at any time
    return {n for n in begun if (KEPT, n) in when and len(ends) - bisect_right(ends, begun[n]) - 1 < LATEST}


def check(folder: Path, max_bytes: int, writers: list[Writer], tally: Tally, earlier: list[int]) -> list[int]:
    """Open the folder again and compare it with what was told; returns the numbers of the blobs that are there."""
    tight = max_bytes == TIGHT
    tier = DiskTier(folder, max_bytes)
    names = {path.stem: path.stat().st_size for path in (folder / "blobs").rglob("*") if path.is_file()}
    tally.over_budget += sum(names.values()) > max_bytes
    tally.leftovers += len(set(names) ^ {entry.key.hex() for entry in tier.entries()})
    in_flight = [n for writer in writers for n in writer.begun if n not in writer.kept]
    kept = [n for writer in writers for n in writer.kept]
    expected = latest(writers) if tight else {*earlier, *kept}
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
    missing = len(expected - set(there))
    tally.lost += 0 if tight else missing
    tally.lost_tight += missing if tight else 0
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


SMALL: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.2,
    "eos_token_id": None,
}


def dense() -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL)).eval()


def hybrid() -> PreTrainedModel:
    config = Qwen3NextConfig(
        **SMALL,
        layer_types=["linear_attention", "full_attention"],
        mlp_only_layers=[0, 1],
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    torch.manual_seed(0)
    return Qwen3NextForCausalLM(config).eval()


class Stores:
    """Prompts, a model, and what it says and computes without a store."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._words = torch.randint(2, 200, (WORDS, CHUNK))
        self._plain: dict[int, tuple[list[int], Any]] = {}
        self._seen: set[int] = set()
        check_model_compatibility(self.model)
        ComputePace.of(self.model).observe(64, 64.0)  # whatever is found is worth loading

    def prompt(self, n: int) -> torch.Tensor:
        """One of `WORDS ** LENGTH`, and a few tokens that fill no chunk."""
        words = [n // WORDS**at % WORDS for at in range(LENGTH)]
        return torch.cat([*(self._words[word] for word in words), self._words[words[0], :5]])[None]

    def open(self, folder: Path, max_bytes: int) -> ChunkStore:
        return ChunkStore(self.model, chunk_size=CHUNK, tiers=[f"disk:{folder}:{max_bytes}B"])

    def generate(self, n: int, cache: ChunkReuseCache | None = None) -> list[int]:
        ids = self.prompt(n)
        settings = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
        call: Any = self.model.generate
        found = call(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **settings)
        return found[0].tolist()

    def plain(self, n: int) -> tuple[list[int], Any]:
        """The tokens, and the layers with the K/V of the prompt."""
        if n not in self._plain:
            with torch.no_grad():
                self._plain[n] = self.generate(n), self.model(self.prompt(n), use_cache=True).past_key_values.layers
        return self._plain[n]

    def work(self, folder: Path, max_bytes: int, first: int, tell: Tell) -> None:
        """What a process does until it is killed."""
        store, draw, waiting = self.open(folder, max_bytes), random.Random(first), list[int]()
        cache = ChunkReuseCache(self.model, store)
        while True:
            n = draw.randrange(WORDS**LENGTH)
            tell(BEGUN, n)
            if self.generate(n, cache) != self.plain(n)[0]:
                raise RuntimeError(f"Prompt {n} has other tokens with a store.")
            waiting.append(n)
            if draw.random() < 0.3:
                store.flush()
                for n in waiting:
                    tell(KEPT, n)
                waiting.clear()
            if store.stats()["tiers"]["disk"]["errors"]:
                raise RuntimeError(f"A store failed: {store.stats()}")

    def check(
        self, folder: Path, max_bytes: int, writers: list[Writer], tally: StoreTally, draw: random.Random
    ) -> None:
        """Open a store on the folder again, and compare what it finds."""
        begun = sorted({n for writer in writers for n in writer.begun})
        kept = {n for writer in writers for n in writer.kept}
        self._seen |= set(begun)
        tally.rounds += 1
        tally.generated += sum(len(writer.begun) for writer in writers)
        tally.flushed += sum(len(writer.kept) for writer in writers)
        tally.failures += sum(writer.failed for writer in writers)
        store = self.open(folder, max_bytes)
        for n in draw.sample(begun, min(COMPARED, len(begun))):
            found = self.compare(store, n, tally)
            tally.lost += max_bytes == ROOMY and n in kept and found < LENGTH
        self.check_integrity(store, tally)
        tally.failures += int(store.stats()["tiers"]["disk"]["errors"])
        store.close()

    def check_all(self, folder: Path, tally: StoreTally) -> None:
        """Compare all that is left in the end."""
        store = self.open(folder, ROOMY)
        for n in sorted(self._seen):
            self.compare(store, n, tally)
        self.check_integrity(store, tally)
        store.close()

    def check_integrity(self, store: ChunkStore, tally: StoreTally) -> None:
        """Compute all that host memory holds again, and the states among it."""
        report = store.check_integrity()
        tally.checked += report.checked
        tally.wrong += report.wrong

    def compare(self, store: ChunkStore, n: int, tally: StoreTally) -> int:
        """Compare the chunks of a prompt, and its tokens; returns how many of its words are found."""
        tokens = self.prompt(n)[0].numpy()
        plain_tokens, layers = self.plain(n)
        root = store.root(b"")
        assert root is not None
        found = store.chain(root, tokens)
        for chunk, start, shared in found:
            reader = LayerKVReader(chunk.kv)
            for idx, layer in enumerate(layers):
                kept = reader.layer(idx)
                if kept is None:  # states, which `check_integrity` compares
                    continue
                for ours, plain in zip(kept, (layer.keys, layer.values), strict=True):
                    difference = (ours[:, :shared] - plain[0, :, start : start + shared]).abs().max()
                    tally.wrong += not difference <= 1e-4
            tally.compared += 1
        tally.wrong_tokens += self.generate(n, ChunkReuseCache(self.model, store)) != plain_tokens
        return len({start for _, start, shared in found if shared == CHUNK})


def soak_stores(model: PreTrainedModel, rounds: int, seed: int) -> StoreTally:
    draw, tally, stores = random.Random(seed), StoreTally(), Stores(model)
    for n in range(WORDS**LENGTH):
        stores.plain(n)  # once, and not in every child
    folder = Path(tempfile.mkdtemp())
    try:
        for number in range(rounds):
            max_bytes = TIGHT if number % 2 else ROOMY
            first = [number * WRITERS + i for i in range(WRITERS)]
            writers = run_and_kill(stores.work, folder, max_bytes, first, draw, STORE_LIFE_S)
            stores.check(folder, max_bytes, writers, tally, draw)
        stores.check_all(folder, tally)
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
        f"| kept, and lost, with room for all | {tally['lost']} |",
        f"| kept as one of the latest {LATEST}, and lost, with a tight budget | {tally['lost_tight']} |",
        f"| wrong contents | {tally['wrong']} |",
        f"| failures to open or to write | {tally['failures']} |",
        f"| leftovers after opening | {tally['leftovers']} |",
        f"| rounds over the budget | {tally['over_budget']} |",
        f"| seconds | {result['seconds']:.0f} |",
    ]
    for name, kind in (("stores", "a model with K/V alone"), ("stores_with_states", "a model with states, too")):
        stores = result[name]
        lines += [
            "",
            f"{WRITERS} processes with a `ChunkStore` each, on one folder, killed at random instants: {kind}",
            "",
            "| | |",
            "| --- | ---: |",
            f"| rounds of kills | {stores['rounds']} |",
            f"| prompts begun | {stores['generated']} |",
            f"| prompts flushed | {stores['flushed']} |",
            f"| chunks compared with plain K/V | {stores['compared']} |",
            f"| chunks and states computed again | {stores['checked']} |",
            f"| of these wrong | {stores['wrong']} |",
            f"| prompts with other tokens than plain ones | {stores['wrong_tokens']} |",
            f"| flushed, not given up, and lost | {stores['lost']} |",
            f"| failures to open, to read or to write | {stores['failures']} |",
            f"| seconds | {result['seconds_of_' + name]:.0f} |",
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
    clean = tally.is_clean()
    for name, make in (("stores", dense), ("stores_with_states", hybrid)):
        begin = time.perf_counter()
        stores = soak_stores(make(), options.rounds, options.seed)
        result[name], result["seconds_of_" + name] = asdict(stores), time.perf_counter() - begin
        clean &= stores.is_clean()
    write(options.out, "soak-cpu", result, markdown(result))
    print(markdown(result))
    sys.exit(0 if clean else 1)


if __name__ == "__main__":
    main()
