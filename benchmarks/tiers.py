"""The first prompt after a restart: its K/V from disk, or from a server, against host memory and against computing it.

    python benchmarks/tiers.py --out benchmarks/results [--device cuda] [--shape 8b] [--folder FOLDER]

One process stores prompts in every tier. For each tier and codec a new process makes the model anew, and in each round
opens a store and times the first long prompt through it, which ends in 32 tokens never seen, from the tier: from the
call of generate() to the token on the host, look-ups, reading and checking checksums included. Host memory is timed in
the same process, from the same store, once all is in it. A store reads no more than what it can read sooner than the
model computes it: how much that was is told, too.

Before the clock starts the process has made the model and the store (which reads something of it to see how fast it
is), has run one short unrelated prompt without any tier, for PyTorch's own start, and one through the store, for the
checksum of the weights and the probe of the model, both done once; what these take is given apart. "disk, cold" asks
the kernel to forget the files first (posix_fadvise); otherwise it may have them in its page cache, as after a restart
of a program on a machine that stays up.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from record import Record, add_options, add_shape
from reuse import Ids, measured_on, medians, provenance, rounded, ttft
from shapes import SHAPES, make_model
from targets import Result
from transformers import PreTrainedModel

from kvboost_hf import ChunkReuseCache, ChunkStore, check_model_compatibility

UNSEEN, BUDGET = 32, "24GB"
CODECS = ("int8", "turboquant")  # besides what is stored as it is


def address(tier: str, folder: Path, url: str) -> str:
    return f"disk:{folder}:{BUDGET}" if tier.startswith("disk") else url


def forget(folder: Path) -> None:
    """Have the kernel drop what it remembers of the files."""
    os.sync()
    for path in folder.rglob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def open_store(model: PreTrainedModel, options: argparse.Namespace) -> ChunkStore:
    """A store whose memory is empty."""
    place = address(options.tier, options.folder, options.url)
    return SHAPES[options.shape].new_store(model, tiers=[place], codec=options.codec)


def measure_here(options: argparse.Namespace) -> list[Result]:
    """What one new process finds: for each length of the prompt."""
    model, ending = make_model(options.device, options.shape), Ids(100)
    ttft(model, ending(UNSEEN))
    begin = time.perf_counter()
    check_model_compatibility(model)
    store = open_store(model, options)
    ttft(model, ending(UNSEEN), past_key_values=ChunkReuseCache(model, store))
    store.close()
    once = 1000 * (time.perf_counter() - begin)
    rows = []
    for tokens in SHAPES[options.shape].prompts:
        runs = [measure_round(model, tokens, ending(UNSEEN), options) for _ in range(options.rounds)]
        ratios = [run["tier"] / min(run["ram"], run["ram again"]) for run in runs]
        found = medians({name: [run[name] for run in runs] for name in runs[0]})
        spread = {"ratio": statistics.median(ratios), "ratio_max": max(ratios), "ratio_min": min(ratios)}
        rows.append({"tokens": tokens, "once": once, **found, **spread})
    return rows


def measure_round(
    model: PreTrainedModel, tokens: int, ending: list[int], options: argparse.Namespace
) -> dict[str, float]:
    """From a tier, and then twice from the memory of the same store."""
    store = open_store(model, options)
    shared, found = Ids(tokens)(tokens), {}
    if options.tier == "disk, cold":
        forget(options.folder)
    for name in ("tier", "ram", "ram again"):
        cache = ChunkReuseCache(model, store)
        found[name] = ttft(model, shared + ending, past_key_values=cache)
        came_from = cache.report.tier_tokens
        if name == "tier":
            found["read"] = came_from.get(expected_name(options.tier), 0)
        else:
            assert came_from["ram"] >= tokens // 128 * 128, cache.report
        store.flush()
    found["plain"] = ttft(model, shared + ending)
    found["blob_bytes"] = store.stats()["tiers"][expected_name(options.tier)]["bytes"]
    store.close()
    return found


def expected_name(tier: str) -> str:
    return "disk" if tier.startswith("disk") else "valkey"


def child(options: argparse.Namespace) -> list[Result]:
    """What a new process prints."""
    command = [sys.executable, __file__, "--child"]
    for name in ("device", "shape", "rounds", "url", "tier", "codec", "folder"):
        command += [f"--{name}", str(getattr(options, name))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"it ended with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
    found: list[Result] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(model: PreTrainedModel, tier: str, codec: str, options: argparse.Namespace, rows: list[Result]) -> None:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        chosen = argparse.Namespace(**vars(options) | {"tier": tier, "codec": codec, "folder": Path(folder)})
        with open_store(model, chosen) as store:
            for tokens in SHAPES[options.shape].prompts:
                store.warm(Ids(tokens)(tokens))
        for row in child(chosen):
            print(f"{tier}, {codec}: {rounded(row)}", flush=True)
            rows.append({"name": tier, "codec": codec, **row})


def markdown(result: Result) -> str:
    lines = [
        f"Tokens that were stored before the restart; {UNSEEN} never seen; {result['shape']}; "
        f"{measured_on(result['provenance'])}",
        "",
        "| tokens | tier | codec | MB in all | computed | from the tier | tokens of it | from host memory "
        "| tier / host memory (least to most) |",
        "| ---: | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in result["rows"]:
        ram = min(row["ram"], row["ram again"])
        lines.append(
            f"| {row['tokens']} | {row['name']} | {row['codec']} | {row['blob_bytes'] / 1e6:.0f} "
            f"| {row['plain']:.0f} ms | {row['tier']:.0f} ms ({row['plain'] / row['tier']:.1f}x) "
            f"| {row['read']:.0f} | {ram:.0f} ms ({row['plain'] / ram:.1f}x) "
            f"| {row['ratio']:.2f} ({row['ratio_min']:.2f} to {row['ratio_max']:.2f}) |"
        )
    if result["rows"]:
        once = statistics.median(row["once"] for row in result["rows"])
        lines += ["", f"The first prompt through a store in a new process takes {once:.0f} ms for things done once."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, rounds=7)
    add_shape(parser, "small")
    parser.add_argument("--folder", type=Path, help="of the disk tier (default: a temporary one)")
    parser.add_argument("--url", default="", help="of a Valkey or Redis server to be measured, too")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    for name in ("--tier", "--codec"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure_here(options)))
        return
    result: Result = {"provenance": provenance(sys.argv[1:], "tiers.py"), "shape": SHAPES[options.shape].describe()}
    rows: list[Result] = []
    result["rows"] = rows
    record = Record(f"tiers-{options.device}", options, result, markdown)
    model = make_model(options.device, options.shape)
    cases = [("disk", "raw"), ("disk, cold", "raw"), *(("disk", codec) for codec in CODECS)]
    for tier, codec in (*cases, *([("server on this machine", "raw")] if options.url else [])):
        record.measure(f"{tier}, {codec}", partial(measure, model, tier, codec, options, rows))
    record.show()


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
