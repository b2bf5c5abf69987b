"""What a million chunks in one process take: memory of the index, planning, and a disk tier of as many files.

    python benchmarks/million.py --out benchmarks/results [--chunks 60000 250000 1000000] [--folder FOLDER]

Each case runs in a process of its own. Chunks have 128 tokens, in prompts of 2,048. All chunks of host memory share
one K/V, so that memory grows by the index: records, their tokens, and all that they are found by. Tokens are part of
the index here, though a store counts them in its budget. Planning is milliseconds of computing, the least of several
rounds, against a store of a hundred chunks. Files of the disk tier are what `dump` makes of such chunks; rows come
into its index by the functions that a tier uses, in one transaction.
"""

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import torch
from record import Record, add_options
from reuse import measured_on, provenance
from targets import Result

from kvboost_hf import ChunkStore
from kvboost_hf.cache.kv.layer_kv import Block, LayerKV
from kvboost_hf.cache.planning.chunks import HEAD_TOKENS, Tokens, prefix_key
from kvboost_hf.cache.planning.match import find_moved
from kvboost_hf.cache.planning.plan import Border, plan_row
from kvboost_hf.cache.tiers import disk_index
from kvboost_hf.cache.tiers.base import Entry, Kind
from kvboost_hf.cache.tiers.disk import DiskTier
from kvboost_hf.cache.tiers.disk_index import DiskIndex
from kvboost_hf.cache.tiers.record import dump

CHUNK, PROMPT, FEW, ROUNDS = 128, 2048, 100, 7
KV_BYTES = 64
ROOT = b"root".ljust(20, b".")
MODEL = b"model"
_models: list[object] = []


def words(number: int, n: int) -> Tokens:
    """The tokens of a prompt; those of another number share no chunk with it."""
    drawn = np.random.default_rng(number).integers(0, 30_000, n, dtype=np.int64)
    drawn[:4] = number >> 24, number >> 16 & 255, number >> 8 & 255, number & 255
    return drawn


def shared_kv() -> LayerKV:
    """K/V that all chunks have."""
    return LayerKV((Block.raw(torch.zeros(2, 1, 1, KV_BYTES // 8)),), (((0, 0), (0, 1)),))


def new_store(**options: object) -> ChunkStore:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, head_dim=8
    )
    if not _models:  # a store holds its model weakly
        _models.append(LlamaForCausalLM(config))
    return ChunkStore(_models[0], max_bytes=2**50, **options)  # type: ignore[arg-type]


def fill(store: ChunkStore, first: int, last: int) -> None:
    """Put prompts in, whose numbers are from `first` on."""
    root, kv = store.root(b""), shared_kv()
    assert root is not None
    for number in range(first, last):
        put(store, root, words(number, PROMPT), kv)


def put(store: ChunkStore, root: bytes, tokens: Tokens, kv: LayerKV) -> None:
    parent = root
    for at in range(0, len(tokens) - CHUNK + 1, CHUNK):
        part = tokens[at : at + CHUNK]
        store.put(root, parent, at, part, kv.nbytes, lambda: kv)
        parent = prefix_key(parent, part)


def least_ms(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    times = []
    for _ in range(rounds):
        begin = time.process_time()
        work()
        times.append(1000 * (time.process_time() - begin))
    return min(times)


def once_s(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def rss() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def plan_ms(store: ChunkStore, stored: int) -> dict[str, float]:
    """Milliseconds of planning: of prompts that are not stored, that are, and whose text is, elsewhere.

    Args:
        store: With `stored` prompts.
        stored: So many.
    """
    root, found = store.root(b""), {}
    assert root is not None
    for tokens in (2_048, 32_768):
        parts = [words(number % stored, PROMPT) for number in range(tokens // PROMPT)]
        hit = parts[0] if len(parts) == 1 else words(10**7, tokens)
        if len(parts) > 1:
            put(store, root, hit, shared_kv())
        cold = words(10**7 + 1, tokens)
        for name, prompt in (("cold", cold), ("hit", hit)):
            border = Border(0, root)
            found[f"{name} {tokens}"] = least_ms(
                lambda prompt=prompt, border=border: plan_row(
                    prompt, 0, border, len(prompt) - 1, store.chunker, store.view(root, prompt, border)
                )
            )
    return found


def moved_ms(store: ChunkStore, stored: int) -> dict[str, float]:
    root, found = store.root(b""), {}
    assert root is not None
    found["first blend, s"] = once_s(lambda: store.moved_index(root))
    for tokens in (2_048, 32_768):
        parts = [words(number % stored, PROMPT)[CHUNK : 9 * CHUNK] for number in range(tokens // PROMPT)]
        moved = np.concatenate([each for number, part in enumerate(parts) for each in (words(number, 1024)[5:], part)])
        index = store.moved_index(root)
        for name, prompt in (("moved, cold", words(10**7 + 2, tokens)), ("moved", moved)):
            found[f"{name} {tokens}"] = least_ms(
                lambda prompt=prompt, index=index: find_moved(prompt, 16, len(prompt), index)
            )
    return found


def measure_host(chunks: int, *, blend: bool, traced: bool) -> Result:
    """Chunks in host memory."""
    per = PROMPT // CHUNK
    store = new_store()
    root = store.root(b"")
    assert root is not None
    fill(store, 0, FEW // per + 1)
    if blend:
        store.moved_index(root)
    row: Result = {"few": plan_ms(store, FEW // per + 1) | (moved_ms(store, FEW // per + 1) if blend else {})}
    store.clear()
    if blend:
        store.moved_index(root)
    if traced:
        tracemalloc.start()
    before, begin = rss(), time.process_time()
    fill(store, 0, chunks // per)
    row["put, us"] = 1e6 * (time.process_time() - begin) / chunks
    count = store.stats()["chunks"]
    row["bytes"] = (rss() - before) / count
    if traced:
        snapshot = tracemalloc.take_snapshot()
        tracemalloc.stop()
        sizes: Counter[str] = Counter()
        for stat in snapshot.statistics("filename"):
            sizes["/".join(Path(stat.traceback[0].filename).parts[-2:])] += stat.size
        row["traced"] = {name: size / count for name, size in sizes.most_common(8)}
        row["traced bytes"] = sum(sizes.values()) / count
        return row
    row["many"] = plan_ms(store, chunks // per) | (moved_ms(store, chunks // per) if blend else {})
    begin = time.process_time()
    fill(store, 10**6, 10**6 + 200)
    row["put at the end, us"] = 1e6 * (time.process_time() - begin) / (200 * per)
    row["collect, ms"] = 1000 * once_s(gc.collect)
    row["stats, ms"] = 1000 * once_s(store.stats)
    row["check, s"] = once_s(store.check_consistency)
    store.max_bytes = store.stats()["bytes"]
    begin = time.process_time()
    fill(store, 2 * 10**6, 2 * 10**6 + 200)
    row["put and evict, us"] = 1e6 * (time.process_time() - begin) / (200 * per)
    row["clear, s"] = once_s(store.clear)
    return row


def blob_of(number: int, place: int, root: bytes, model: bytes) -> list[tuple[Entry, list[bytes | memoryview]]]:
    """Chunks of a prompt as blobs."""
    tokens, parent, found = words(number, place), root, []
    tensor = {"0.raw": torch.zeros(2, 1, CHUNK, 1, dtype=torch.bfloat16)}
    for at in range(0, place, CHUNK):
        part = tokens[at : at + CHUNK]
        key, head = prefix_key(parent, part), prefix_key(parent, part[:HEAD_TOKENS])
        entry = Entry(key, Kind.CHUNK, model, root, parent, head, at, part, 0)
        found.append(dump(entry, tensor, {"blocks": [], "places": []}))
        parent = key
    return found


def write_files(folder: Path, chunks: int, root: bytes, model: bytes) -> None:
    """Fill the folder of a disk tier as its writer would, but for one transaction for all."""
    tier = DiskTier(folder, 2**50)
    for entry, parts in blob_of(10**6, PROMPT, root, model):  # the real writer
        tier.write(entry, parts)
    tier.close()
    for byte in range(256):
        (folder / "blobs" / f"{byte:02x}").mkdir(0o700, exist_ok=True)
    index = DiskIndex(folder, lambda db: None, read_only=False, max_log_bytes=2**22)
    with index.transaction() as db:
        used = disk_index.now(db)
        for number in range(chunks * CHUNK // PROMPT):
            for entry, parts in blob_of(number, PROMPT, root, model):
                name = entry.key.hex()
                path = folder / "blobs" / name[:2] / f"{name}.safetensors"
                with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.writelines(parts)
                disk_index.add(db, entry, entry.nbytes, used)
    index.close()


def get(tier: DiskTier, key: bytes) -> bool:
    return key in tier.find([key]) and tier.read(key) is not None


def put_ms(tier: DiskTier, number: int) -> float:
    """Milliseconds of a chunk, of the chunks of a new prompt."""
    blobs = blob_of(number, PROMPT, ROOT, MODEL)
    return 1000 * once_s(lambda: [tier.write(*each) for each in blobs]) / len(blobs)


def measure_disk(folder: Path, chunks: int) -> Result:
    """A tier of so many files: opened with its index, and without it."""
    row: Result = {}
    for name in ("indexed", "opened again", "lost"):
        if name == "lost":
            for path in folder.glob("index.sqlite3*"):
                path.unlink()
        before = rss()
        begin = time.perf_counter()
        tier = DiskTier(folder, 2**50)
        row[f"{name}: open, s"] = time.perf_counter() - begin
        row[f"{name}: memory, MB"] = (rss() - before) / 1e6
        entry, _ = blob_of(7, CHUNK, ROOT, MODEL)[0]
        begin = time.perf_counter()
        row[f"{name}: found"] = get(tier, entry.key)
        row[f"{name}: first get, ms"] = 1000 * (time.perf_counter() - begin)
        row[f"{name}: get, ms"] = 1000 * once_s(partial(get, tier, entry.key))
        row[f"{name}: put, ms"] = put_ms(tier, 3 * 10**6 + len(row))
        row[f"{name}: second process, s"] = second(folder)
        if name == "lost":
            begin = time.perf_counter()
            while (count := int(tier.stats()["chunks"])) < chunks:
                time.sleep(0.5)
                assert time.perf_counter() - begin < 1200, count
            row["lost: whole after, s"] = time.perf_counter() - begin
        row[f"{name}: stats, ms"] = 1000 * once_s(tier.stats)
        if name == "opened again":
            tier.max_bytes = int(tier.stats()["bytes"])
            row["put and evict, ms"] = put_ms(tier, 4 * 10**6)
        begin = time.perf_counter()
        tier.close()
        row[f"{name}: close, s"] = time.perf_counter() - begin
    return row


def second(folder: Path) -> float:
    code = (
        "import sys, time; from kvboost_hf.cache.tiers.disk import DiskTier\n"
        "t = time.perf_counter(); tier = DiskTier(sys.argv[1], 2**50); tier.find([b'x' * 20])\n"
        "print(time.perf_counter() - t)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    return float(done.stdout)


def measure_below(folder: Path, chunks: int) -> Result:
    """Chunks that are known in the disk tier only, all in the index of mode "blend"."""
    row: Result = {}
    store = new_store(tiers=[f"disk:{folder}:1000000GB"])
    root = store.root(b"")
    assert root is not None
    name = store._records.lower.model_name
    store.close()
    if not (folder / "blobs").exists() or sum(1 for _ in os.scandir(folder / "blobs")) < 200:
        write_files(folder, chunks, root, name)
    store = new_store(tiers=[f"disk:{folder}:1000000GB"])
    root = store.root(b"")
    assert root is not None
    before = rss()
    row["first blend, s"] = once_s(lambda: store.moved_index(root))
    begin = time.perf_counter()
    while len(store.moved_index(root)) < chunks:
        time.sleep(0.5)
        assert time.perf_counter() - begin < 1200
    row["known after, s"] = time.perf_counter() - begin
    row["bytes"] = (rss() - before) / chunks
    row["many"] = moved_ms(store, chunks * CHUNK // PROMPT)
    store.close()
    return row


def child(what: str, *arguments: str) -> Result:
    done = subprocess.run([sys.executable, __file__, "--child", what, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"it ended with {done.returncode}: {done.stderr.strip().splitlines()[-3:]}")
    found: Result = json.loads(done.stdout.splitlines()[-1])
    return found


def run_child(what: str, *arguments: str) -> Result:
    torch.manual_seed(0)
    if what == "host":
        return measure_host(int(arguments[0]), blend=arguments[1] == "blend", traced=arguments[2] == "traced")
    folder = Path(arguments[0])
    if what == "write":
        return {"s": once_s(partial(write_files, folder, int(arguments[1]), ROOT, MODEL))}
    return (measure_disk if what == "disk" else measure_below)(folder, int(arguments[1]))


def measure(name: str, rows: dict[str, Result], *arguments: str) -> None:
    rows[name] = child(*arguments)
    print(f"{name}: {json.dumps(rows[name])}", flush=True)


def measure_files(name: str, rows: dict[str, Result], what: str, chunks: int, options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if what == "disk":
            child("write", folder, str(chunks))
        measure(name, rows, what, folder, str(chunks))
        shutil.rmtree(folder, ignore_errors=True)


def markdown(result: Result) -> str:
    lines = [
        f"Chunks of {CHUNK} tokens, in prompts of {PROMPT}; {measured_on(result['provenance'])}",
        "",
        "| | " + " | ".join(result["rows"]) + " |",
        "| --- |" + " ---: |" * len(result["rows"]),
    ]
    flat = {name: dict(_flat(row)) for name, row in result["rows"].items()}
    for what in dict.fromkeys(key for row in flat.values() for key in row):
        cells = [f"{row[what]:,.4g}" if what in row else "" for row in flat.values()]
        lines.append(f"| {what} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _flat(row: Result, lead: str = "") -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for key, value in row.items():
        found += _flat(value, f"{lead}{key}: ") if isinstance(value, dict) else [(f"{lead}{key}", value)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--chunks", type=int, nargs="+", default=[60_000, 250_000, 1_000_000])
    parser.add_argument("--only", nargs="+", default=["traced", "host", "blend", "disk", "below"])
    parser.add_argument("--folder", type=Path, help="of the disk tier (default: a temporary one)")
    parser.add_argument("--name", default="million", help="of the files that are written")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(run_child(*options.child)))
        return
    rows: dict[str, Result] = {}
    result: Result = {"provenance": provenance(sys.argv[1:], "million.py"), "rows": rows}
    record = Record(options.name, options, result, markdown)
    if "traced" in options.only:
        for mode in ("plain", "blend"):
            name = f"traced, {mode}"
            record.measure(name, partial(measure, name, rows, "host", str(20_000), mode, "traced"))
    for chunks in options.chunks:
        for mode in ("host", "blend"):
            if mode in options.only:
                name = f"{chunks}, {mode}"
                what = "blend" if mode == "blend" else "plain"
                record.measure(name, partial(measure, name, rows, "host", str(chunks), what, "timed"))
        for what in ("disk", "below"):
            if what in options.only:
                name = f"{chunks}, {what}"
                record.measure(name, partial(measure_files, name, rows, what, chunks, options))
    record.show()


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
